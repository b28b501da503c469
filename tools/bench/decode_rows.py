"""Decode steps of rows of equal and unequal contexts, beside mlx-lm's bare BatchGenerator, in process.

    python -m tools.bench.decode_rows [--shape cpu] [--contexts 500 16000 16000,17500,19000,20500 …]
        [--steps 12] [--rounds 3]

KV is random, so that no prompt is computed. Each side of each row has a process of its own, in turns, with
the same weights, KV and BLAS (OMLXD_CPU_BLAS=off: MLX's own). Ours is what the scheduler runs: batches that
`best_batch` chooses, without guesses. Prints the least milliseconds of a step in processor time and in wall
time, and ours over the other's: processor time says something beside other load too.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from omlxd.engine.process import blas

blas.put_first()  # As an engine does, before anything imports MLX.

import mlx.core as mx  # noqa: E402

from omlxd.engine import mlx_adapter  # noqa: E402
from omlxd.engine.mlx_adapter.attention import hooks as attention  # noqa: E402
from omlxd.engine.schedule.decode_batch import DecodeBatch, best_batch  # noqa: E402
from tools.bench.gpu_rig import Bench  # noqa: E402
from tools.bench.shapes import SHAPES  # noqa: E402

CONTEXTS = (
    "500",
    "16000",
    "16000,17500,19000,20500",
    ",".join(map(str, range(500, 1648, 37))),
    ",".join(["32000"] * 8),
)
"""Of the rows: one short, one long, four long of unequal length, 32 short, eight of 32,000."""

SIDES = "omlxd", "BatchGenerator"


def held(model: Any, length: int, seed: int) -> mlx_adapter.Cache:
    """A cache of one sequence with random KV of `length` tokens."""
    cache = mlx_adapter.new_cache(model, 1)
    mx.eval(model(mx.array([[1]]), cache=cache), mlx_adapter.state_arrays(cache))
    capacity = mlx_adapter.round_up(length + 64)
    for index, layer in enumerate(cache):
        for name in ("keys", "values"):
            array = getattr(layer, name)
            shape = 1, array.shape[1], capacity, array.shape[3]
            key = mx.random.key(1000 * seed + 2 * index + (name == "keys"))
            setattr(layer, name, mx.random.normal(shape, key=key).astype(array.dtype))
        layer.offset = length
        mx.eval(layer.keys, layer.values)
    return cache


def ours(bench: Bench, lengths: list[int]) -> Callable[[], object]:
    attention.install()
    mlx_adapter.use_own_rows(bench.model)
    batches: list[DecodeBatch] = []
    for seed, length in enumerate(lengths):
        sequence = bench._decoding(1)
        sequence.kv.cache, sequence.kv.length = held(bench.model, length, seed), length
        batch = best_batch(batches, sequence, bench.loaded)
        if batch is None:
            batches.append(batch := DecodeBatch(bench.model, compiled=bench.compiled))
        batch.add_row(sequence)
    return lambda: [batch.step() for batch in batches]


def theirs(bench: Bench, lengths: list[int]) -> Callable[[], object]:
    from mlx_lm.generate import BatchGenerator

    generator = BatchGenerator(bench.model, max_tokens=10_000)
    caches = [held(bench.model, length, seed) for seed, length in enumerate(lengths)]
    generator.insert([[1]] * len(lengths), caches=caches)
    while len(generator.next()[1]) < len(lengths):
        pass
    return generator.next


def measure(side: str, shape: str, lengths: list[int], steps: int) -> tuple[float, float]:
    """(processor, wall) milliseconds of the fastest step."""
    bench = Bench(shape, folder=None, tokens=0, blocks=[64])  # type: ignore[arg-type]
    step = (ours if side == SIDES[0] else theirs)(bench, lengths)
    for _ in range(3):
        step()
    taken: list[tuple[float, float]] = []
    for _ in range(steps):
        began = time.process_time(), time.perf_counter()
        step()
        taken.append((time.process_time() - began[0], time.perf_counter() - began[1]))
    processor, wall = (min(column) * 1e3 for column in zip(*taken, strict=True))
    return processor, wall


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--shape", default="cpu", choices=sorted(SHAPES))
    parser.add_argument("--contexts", nargs="+", default=list(CONTEXTS))
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        lengths = [int(length) for length in options.contexts[0].split(",")]
        print(json.dumps(measure(options.side, options.shape, lengths, options.steps)))
        return
    products = blas.name() or "products by MLX's own"
    print(f"{options.shape}, {products}; milliseconds of a step: omlxd, BatchGenerator\n")
    print("| rows | contexts | processor | ratio | wall | ratio |\n|" + "---|" * 6)
    for row in options.contexts:
        best = {side: (float("inf"), float("inf")) for side in SIDES}
        for _ in range(options.rounds):
            for side in SIDES:
                command = [sys.executable, "-m", "tools.bench.decode_rows", "--side", side, "--contexts", row]
                command += ["--shape", options.shape, "--steps", str(options.steps)]
                done = subprocess.run(command, capture_output=True, text=True, timeout=900)
                if done.returncode:
                    raise SystemExit(done.stderr[-2000:])
                got = json.loads(done.stdout.splitlines()[-1])
                best[side] = tuple(map(min, best[side], got))  # type: ignore[assignment]
        mine, other = (best[side] for side in SIDES)
        lengths = [int(length) for length in row.split(",")]
        cells = [f"{a:.1f}, {b:.1f} | {b / a:.2f}" for a, b in zip(mine, other, strict=True)]
        print(f"| {len(lengths)} | {min(lengths)} to {max(lengths)} |", " | ".join(cells), "|", flush=True)


if __name__ == "__main__":
    main()
