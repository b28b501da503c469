"""Bytes that a decode step reads, by arithmetic, and what they take on three Macs: no measurement.

    python -m tools.bench.step_bytes [--length 16000] [--own 500] [--bits 4]

Rows are agents that share a prefix of `--length` tokens and have `--own` of their own. A step reads the
weights once (`--bits`, and half a bit for scales and biases of groups of 64; of experts those that some row
chose), and KV in 16 bits: that of each row ("apart"), or the prefix once ("shared"). Recurrent state is read
and written for each row, in 32 bits.

A limit is these bytes by the memory's bandwidth, as Apple gives it. Nobody reaches it: 80 to 85 % is good.
Launches take 2 to 5 µs each where the GPU waits for them, as others measured; how many a step has,
launches.py counts.

The last table is of two M4 Max that share a model by `--join`: each reads half of a layer, and all of the
head. A layer has two sums, a step one more; a sum takes 27 to 31 µs by RDMA over Thunderbolt 5, as oMLX's
authors measured. 80B-A3B's kind is not in it: mlx-lm divides its layers, not its heads.
"""

from __future__ import annotations

import argparse
from typing import NamedTuple

MACS = {"M2 Pro": 200e9, "M4 Max": 546e9, "M5 Max": 614e9}
"""Bytes a second, as Apple specifies them; M5 Max: with 40 GPU cores, announced in March 2026."""
ROWS = (1, 4, 8)
LAUNCH_S = 2e-6, 5e-6
SUM_S = 27e-6, 31e-6


class Model(NamedTuple):
    """Numbers of one model, as its config has them.

    layers      with attention, and with recurrent state
    dense       weights a layer that each token reads, and of the head, in numbers
    experts     (numbers of one, how many there are, how many a token has) a layer; zeros: none
    kv          numbers of KV a token and layer with attention
    state       numbers of state a row and layer without
    launches    a layer, as launches.py counts them
    """

    name: str
    layers: tuple[int, int]
    dense: float
    head: float
    experts: tuple[float, int, int]
    kv: int
    state: int
    launches: int


MODELS = (
    # Llama 3.1 8B: 32 layers, 4,096 wide, 32 heads on 8 of 128, 14,336, vocabulary 128,256.
    Model("8B dense", (32, 0), 4096 * (6144 + 4096 + 3 * 14336), 4096 * 128256, (0, 0, 0), 2048, 0, 18),
    # Qwen3 30B-A3B: 48 layers, 2,048 wide, 32 heads on 4 of 128, 128 experts of 768, 8 a token.
    Model(
        "30B-A3B experts",
        (48, 0),
        2048 * (5120 + 4096 + 128),
        2048 * 151936,
        (3 * 2048 * 768, 128, 8),
        1024,
        0,
        29,
    ),
    # Qwen3-Next 80B-A3B: 12 layers with attention (16 heads on 2 of 256), 36 of gated delta nets (16 and 32
    # heads of 128), 512 experts of 512, 10 a token and one for all.
    Model(
        "80B-A3B hybrid",
        (12, 36),
        2048 * 12288 + 3 * 2048 * 512 + 2048 * 4096,
        2048 * 151936,
        (3 * 2048 * 512, 512, 10),
        1024,
        32 * 128 * 128,
        30,
    ),
)


def step_bytes(model: Model, rows: int, length: int, own: int, shared: bool, bits: int) -> float:
    """Return the bytes that a step of so many rows reads and writes."""
    layers = sum(model.layers)
    each, count, chosen = model.experts
    experts = each * count * (1 - (1 - chosen / count) ** rows) if count else 0.0
    weights = (layers * (model.dense + experts) + model.head) * (bits + 0.5) / 8
    tokens = length + rows * own if shared else rows * (length + own)
    kv = model.layers[0] * model.kv * 2.0 * tokens
    state = model.layers[1] * model.state * 4.0 * 2 * rows
    return weights + kv + state


def table(length: int, own: int, bits: int) -> list[str]:
    """Return the lines of a table: limits in milliseconds, and tokens a second of all rows."""
    macs = " | ".join(f"{name}, ms (tok/s)" for name in MACS)
    lines = [f"| model | rows | KV | GB a step | {macs} | launches, ms |", "|---" * (5 + len(MACS)) + "|"]
    for model in MODELS:
        for rows in ROWS:
            for shared in (False, True) if rows > 1 else (False,):
                read = step_bytes(model, rows, length, own, shared, bits)
                times = (read / speed for speed in MACS.values())
                limits = " | ".join(f"{1e3 * s:.1f} ({rows / s:,.0f})" for s in times)
                count = sum(model.layers) * model.launches
                launches = " to ".join(f"{1e3 * count * each:.1f}" for each in LAUNCH_S)
                kv = "shared" if shared else "apart"
                lines.append(f"| {model.name} | {rows} | {kv} | {read / 1e9:.1f} | {limits} | {launches} |")
    return lines


def of_two(length: int, own: int, bits: int) -> list[str]:
    """Return the lines of a table: an M4 Max alone, and two that share the model."""
    speed, gb = MACS["M4 Max"], 1e9
    lines = ["| model | rows | GB a step, each of two | one, ms (tok/s) | two, ms | of it sums, ms | tok/s |"]
    lines.append("|---" * 7 + "|")
    for model in (model for model in MODELS if not model.state):
        for rows in ROWS:
            read = step_bytes(model, rows, length, own, False, bits)
            head = model.head * (bits + 0.5) / 8
            half, sums = (read + head) / 2, [(2 * model.layers[0] + 1) * each for each in SUM_S]
            both = [half / speed + each for each in sums]
            cells = f"{half / gb:.1f}", f"{1e3 * read / speed:.1f} ({rows * speed / read:,.0f})"
            spans = (" to ".join(f"{1e3 * each:.1f}" for each in times) for times in (both, sums))
            rates = " to ".join(f"{rows / each:,.0f}" for each in reversed(both))
            lines.append(f"| {model.name} | {rows} | {' | '.join((*cells, *spans, rates))} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--length", type=int, default=16_000)
    parser.add_argument("--own", type=int, default=500)
    parser.add_argument("--bits", type=int, default=4, help="of weights")
    args = parser.parse_args()
    print(f"An estimate: rows share {args.length:,} tokens and have {args.own:,} of their own.\n")
    print("\n".join(table(args.length, args.own, args.bits)))
    print("\nTwo M4 Max, an estimate:\n")
    print("\n".join(of_two(args.length, args.own, args.bits)))


if __name__ == "__main__":
    main()
