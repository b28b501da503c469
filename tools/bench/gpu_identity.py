"""How near hits come to runs without reuse on this machine's backend, for every family of the tests' matrix.

    python -m tools.bench.gpu_identity [--rows qwen3-fp32,gemma3_text-bf16,...] [--dtype bf16] [--kv-bits 8]

The scenarios are tests/engine/test_family_matrix.py's, whose rows these are (`--rows` takes any part of a
row's name; `--dtype` and `--kv-bits` make further rows of the families that have them). A row's line gives

    requests   checked, each hot and from the cold tier
    tokens     of them, how many gave the cold run's greedy tokens, all of them
    first      largest difference of a logit of the first token's, over all requests
    all        the same over every token, up to the first that differs
    lead       by how much the cold run's token led its next best where a hit gave another: a lead
               smaller than `all` is within what the backend's rounding does to logits; - if none differed

and `first` and `all` of the requests that hit KV of prompts alone, which the same passes computed: on a
CPU 0 there. On CUDA, cuDNN's attention for one token sums in another order from run to run, in bfloat16
and above 256 tokens: two cold runs differ too. `MLX_CUDA_USE_CUDNN_SDPA=0` in the environment has MLX's own
kernel do it, always alike; omlxd/engine/process/prepare.py says what that costs.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import mlx.core as mx
import numpy as np

from omlxd.engine.mlx_adapter import versions
from omlxd.engine.process.prepare import set_backend_defaults

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "support"))

from cold_run import Reference, outputs
from families import FP32_ONLY
from rig import Rig

from tests.engine.test_family_matrix import GRID, ROWS, SCENARIOS, Ask, Row, matrix_rig, serve


@dataclass(slots=True)
class Nearness:
    """Over several requests; differences are absolute, in logits."""

    requests: int = 0
    same_tokens: int = 0
    first: float = 0.0
    all: float = 0.0
    lead: float = -1.0

    def add(self, got: list[int], rows: Sequence[np.ndarray], want: list[int], others: Sequence[np.ndarray]):
        far = [float(np.abs(a - b).max()) for a, b in zip(rows, others, strict=True)]
        same = next((i for i, (a, b) in enumerate(zip(got, want, strict=True)) if a != b), len(got))
        self.requests += 1
        if same == len(got):
            self.same_tokens += 1
        else:
            second, best = np.sort(others[same].ravel())[-2:]
            self.lead = max(self.lead, float(best - second))
        self.first = max(self.first, far[0])
        self.all = max(self.all, *far[: same + 1])

    def __str__(self) -> str:
        lead = f"{self.lead:8.2g}" if self.lead >= 0 else f"{'-':>8}"
        return f"{self.same_tokens:3}/{self.requests:<3} {self.first:8.2g} {self.all:8.2g} {lead}"


@dataclass(slots=True)
class Result:
    """`prompts`: requests that hit KV of prompts; `answers`: of answers too."""

    hot: Nearness = field(default_factory=Nearness)
    cold: Nearness = field(default_factory=Nearness)
    prompts: Nearness = field(default_factory=Nearness)
    answers: Nearness = field(default_factory=Nearness)


def measure(row: Row, folder: Path) -> Result:
    model = row.build(folder / "model")
    result = Result()
    with Reference(model, **row.options) as uncached:
        uncached.rig.use_grid(GRID)
        parts = [scenario(lambda tokens, n: uncached.once(tokens, n)[0]) for scenario in SCENARIOS]
        with matrix_rig(model, folder / "cold", **row.options) as rig:
            for before, _ in parts:
                serve(rig, before)
        with matrix_rig(model, folder / "cold", **row.options) as rig:
            for _, after in parts:
                _ask(rig, after, uncached, result, result.cold)
        with matrix_rig(model, **row.options) as rig:
            for before, after in parts:
                serve(rig, before)
                _ask(rig, after, uncached, result, result.hot)
    return result


def _ask(rig: Rig, asks: list[Ask], uncached: Reference, result: Result, tier: Nearness) -> None:
    for ask in asks:
        rig.recorder.logits.clear()
        got = rig.run(ask.tokens, ask.n).got
        rows = outputs(rig, ask.n)
        want, others = uncached.once(ask.tokens, ask.n)
        for nearness in (tier, result.answers if ask.answered else result.prompts):
            nearness.add(got, rows, want, others)


def chosen(arguments: argparse.Namespace) -> list[Row]:
    rows = list(ROWS)
    if arguments.dtype or arguments.kv_bits:
        wanted = Row("", arguments.dtype or "fp32", arguments.kv_bits)
        known = {(row.family, row.dtype, row.kv_bits) for row in rows if row.kv_bits}
        rows = [
            Row(family, wanted.dtype, wanted.kv_bits)
            for family in dict.fromkeys(row.family for row in rows)
            if (wanted.dtype == "fp32" or family not in FP32_ONLY)
            and (not wanted.kv_bits or any(family == name for name, _, _ in known))
        ]
    parts = arguments.rows.split(",")
    return [row for row in rows if any(part in str(row) for part in parts)]


def main() -> None:
    set_backend_defaults()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rows", default="", help="parts of rows' names, with commas between")
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default=None)
    parser.add_argument("--kv-bits", type=int, choices=(0, 4, 8), default=0)
    arguments = parser.parse_args()
    print(f"{mx.default_device()}, {versions()}")
    columns = ("hot", "cold tier", "KV of prompts", "KV of answers too")
    print(f"{'':24}" + "".join(f" | {name:34}" for name in columns))
    print(f"{'':24}" + f" | {'tokens':7} {'first':>8} {'all':>8} {'lead':>8}" * len(columns), flush=True)
    for row in chosen(arguments):
        with tempfile.TemporaryDirectory() as folder:
            try:
                r = measure(row, Path(folder))
            except Exception as error:
                print(f"{row!s:24} | failed: {type(error).__name__}: {error}", flush=True)
                continue
        print(f"{row!s:24} | {r.hot} | {r.cold} | {r.prompts} | {r.answers}", flush=True)


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # As an engine ends: Python's own end may stop a thread that is inside MLX, and abort.
