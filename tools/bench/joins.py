"""What it costs a batch that a row joins or leaves: rows with arrays of their own, beside one array of all.

    python -m tools.bench.joins --model FOLDER [--kv-bits 8] [--rows 16] [--context 4000] [--turns 6]
        [--rounds 2]

A row joins the batch, six steps follow, its oldest row leaves, six more follow; all of that `--turns` times.
Each way has processes of its own, in turns. Prints medians in milliseconds: until the first step behind a
join or a leave is computed, and of a step; and the most memory beside what is held before a join.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

from omlxd.engine.process import blas

blas.put_first()  # As an engine does, before anything imports MLX.

import mlx.core as mx  # noqa: E402

from omlxd.engine import mlx_adapter  # noqa: E402
from omlxd.engine.mlx_adapter import Quantisation  # noqa: E402
from omlxd.engine.mlx_adapter.model import checks  # noqa: E402

WAYS = "own arrays", "one array"
BETWEEN = 6


class Batch:
    """Rows of unequal length that decode."""

    def __init__(self, loaded: mlx_adapter.LoadedModel, rows: int, context: int):
        self.loaded, self.context, self.step = (
            loaded,
            context,
            mlx_adapter.attention_backend().decode_step(loaded.model),
        )
        self.cache = mlx_adapter.merge([self.row(0)])
        self.rows, self.steps = 1, 0
        for seed in range(1, rows):
            self.join(self.row(seed))

    def row(self, seed: int) -> mlx_adapter.Cache:
        length = self.context + 31 * (seed % 16)
        cache = mlx_adapter.new_cache(self.loaded.model, length + 512)
        tokens = mx.random.randint(5, 200, (1, length), key=mx.random.key(seed))
        for start in range(0, length, 2048):
            self.loaded.model(tokens[:, start : start + 2048], cache=cache)
            mx.eval(mlx_adapter.state_arrays(cache))
        return cache

    def join(self, cache: mlx_adapter.Cache) -> None:
        mlx_adapter.extend(self.cache, cache)
        self.rows, self.steps = self.rows + 1, 0
        self.decode()

    def leave(self) -> None:
        left = mlx_adapter.keep_rows(self.cache, range(1, self.rows))
        self.rows, self.steps = self.rows - 1, 0
        self.decode()
        mlx_adapter.let_go(left)

    def decode(self) -> None:
        tokens = mx.full((self.rows, 1), 7)
        logits = self.step(tokens, self.cache, self.steps)
        logits = self.loaded.model(tokens, cache=self.cache) if logits is None else logits
        mx.eval(logits)  # As the engine does; what is kept is written on the way.
        self.steps += 1


def measure(options: argparse.Namespace) -> dict[str, float]:
    if options.way == WAYS[1]:
        checks.use_own_rows = lambda model: False
    kv = Quantisation(options.kv_bits) if options.kv_bits else None
    loaded = mlx_adapter.load(Path(options.model), kv=kv)
    if options.way == WAYS[0] and not (
        mlx_adapter.has_own_rows(loaded.model) or mlx_adapter.use_own_rows(loaded.model)
    ):
        raise SystemExit("rows of this model can't keep arrays of their own")
    batch = Batch(loaded, options.rows, options.context)
    joining = [batch.row(100 + turn) for turn in range(options.turns)]
    taken: dict[str, list[float]] = {"join": [], "leave": [], "step": []}
    peaks: list[float] = []

    def timed(name: str, *given: mlx_adapter.Cache) -> None:
        began = time.perf_counter()
        {"join": batch.join, "leave": batch.leave, "step": batch.decode}[name](*given)
        taken[name].append((time.perf_counter() - began) * 1e3)

    for _ in range(2 * BETWEEN):
        batch.decode()
    for cache in joining:
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        timed("join", cache)
        peaks.append((mx.get_peak_memory() - before) / 1e6)
        for _ in range(BETWEEN):
            timed("step")
        timed("leave")
        for _ in range(BETWEEN):
            timed("step")
    return {name: statistics.median(own) for name, own in taken.items()} | {"peak": max(peaks)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--kv-bits", type=int, choices=(8, 4))
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--context", type=int, default=4000)
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.way:
        print(json.dumps(measure(options)))
        return
    found: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    for _ in range(options.rounds):
        for way in WAYS:
            command = [sys.executable, "-m", "tools.bench.joins", *sys.argv[1:], "--way", way]
            done = subprocess.run(command, capture_output=True, text=True, timeout=900)
            if done.returncode:
                raise SystemExit(done.stderr[-2000:])
            found[way].append(json.loads(done.stdout.splitlines()[-1]))
    print(f"{options.rows} rows from {options.context} tokens on, {mlx_adapter.backend()}; milliseconds\n")
    print("| way | join + step | leave + step | step | MB at a join's peak |\n|" + "---|" * 5)
    middle = {
        way: [statistics.median(run[name] for run in runs) for name in ("join", "leave", "step", "peak")]
        for way, runs in found.items()
    }
    for way, figures in middle.items():
        print(f"| {way} | " + " | ".join(f"{figure:.1f}" for figure in figures) + " |")
    ratios = [own / one for own, one in zip(*middle.values(), strict=True)]
    print("| ratio | " + " | ".join(f"{ratio:.2f}" for ratio in ratios) + " |")


if __name__ == "__main__":
    main()
