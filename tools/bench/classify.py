"""Prompts a second through /v1/classify: many in one request, each in its own, and the bare forward passes.

    python -m tools.bench.classify MODEL [--prompts 32] [--prefix 600] [--labels " yes, no"] [--rounds 3]
                                   [--before CHECKOUT]

MODEL is a folder. Prompts share a prefix of about `--prefix` tokens, which is cached before, and end in some
20 tokens of their own. `bare` is mlx-lm in this process, with the same BLAS: the ends of `--at-once` prompts
in one pass over copies of the prefix's KV, and no label of more than one token. --before: another checkout of
omlxd, in turns with this one. Medians at the end, and the largest difference between probabilities of one
request and of many.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
import time
from itertools import takewhile
from pathlib import Path
from typing import Any

import httpx

from omlxd.engine.process import blas

blas.put_first()  # As an engine does, before anything imports MLX.

import mlx.core as mx  # noqa: E402

from omlxd.engine import mlx_adapter  # noqa: E402
from tools.bench.serve import OURS, Server, free_port  # noqa: E402

WORDS = ("kettle", "saucer", "spoon", "cup", "table", "lamp", "river", "stone", "window", "garden", "paper")


def texts_of(options: argparse.Namespace, round: int) -> list[str]:
    """Other ends each round, so that no answer is cached."""
    draw = random.Random(5)
    prefix = " ".join(draw.choice(WORDS) for _ in range(options.prefix))
    draw = random.Random(100 + round)
    ends = (" ".join(draw.choice(WORDS) for _ in range(16)) for _ in range(options.prompts))
    return [f"{prefix}. Is it in the kitchen: {end}?" for end in ends]


def classify(server: Server, texts: list[str], labels: list[str], batch: int) -> tuple[float, list[Any]]:
    """(texts a second, their rows)."""
    rows: list[Any] = []
    began = time.perf_counter()
    with httpx.Client(timeout=900) as client:
        for at in range(0, len(texts), batch):
            body = {"input": texts[at : at + batch], "labels": labels}
            answer = client.post(f"{server.url}/v1/classify", json=body)
            answer.raise_for_status()
            rows += answer.json()["data"]
    return len(texts) / (time.perf_counter() - began), rows


def bare(options: argparse.Namespace, round: int) -> float:
    """Texts a second of forward passes alone."""
    loaded = mlx_adapter.load(options.model, None, mlx_adapter.backend() == "cpu")
    model, prompts = loaded.model, [loaded.tokenizer.encode(text) for text in texts_of(options, round)]
    pairs = zip(min(prompts), max(prompts), strict=False)
    shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs)) // 64 * 64
    cache = mlx_adapter.new_cache(model, shared)
    mx.eval(model(mx.array([prompts[0][:shared]]), cache=cache))
    began = time.perf_counter()
    for at in range(0, len(prompts), options.at_once):
        ends = [prompt[shared:] for prompt in prompts[at : at + options.at_once]]
        width = max(map(len, ends))
        rows = mlx_adapter.merge([cache] * len(ends))
        mx.eval(model(mx.array([[*end, *[0] * (width - len(end))] for end in ends]), cache=rows))
    return len(prompts) / (time.perf_counter() - began)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--prefix", type=int, default=600)
    parser.add_argument("--labels", default=" yes, no")
    parser.add_argument("--at-once", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--before", type=Path)
    options = parser.parse_args()
    labels = options.labels.split(",")
    checkouts = {OURS: None, **({"before": options.before} if options.before else {})}
    rates: dict[str, list[float]] = {}
    worst = 0.0
    with tempfile.TemporaryDirectory() as home:
        for index in range(options.rounds):
            for name, checkout in checkouts.items():
                port = free_port()
                command = [sys.executable, "-m", "omlxd", "serve", "--model", str(options.model)]
                command += ["--port", str(port), "--base-path", f"{home}/{name}-{index}"]
                command += ["--log-level", "warning"]
                env = {"OMLXD_CPU_BLAS": "auto"}
                server = Server(name, command, port, options.model.name, checkout=checkout, env=env)
                try:
                    classify(server, texts_of(options, -1)[:2], labels, 1)
                    one, many = texts_of(options, 2 * index), texts_of(options, 2 * index + 1)
                    for row, texts, batch in (
                        (f"{name}: each in its own request", one, 1),
                        (f"{name}: {options.prompts} in one request", many, 128),
                    ):
                        rate, rows = classify(server, texts, labels, batch)
                        rates.setdefault(row, []).append(rate)
                        print(f"{row}: {rate:.1f} prompts/s", flush=True)
                    alone = classify(server, many[:8], labels, 1)[1]
                    for got, want in zip(rows, alone, strict=False):
                        worst = max(
                            worst, *(abs(a - b) for a, b in zip(got["probs"], want["probs"], strict=True))
                        )
                finally:
                    server.stop()
            rates.setdefault("bare", []).append(bare(options, index))
            print(f"bare: {rates['bare'][-1]:.1f} prompts/s", flush=True)
    print()
    for row, values in rates.items():
        print(f"{row:40} {statistics.median(values):8.1f} prompts/s (median of {len(values)})")
    print(f"largest difference of a probability, in many and alone: {worst:.2g}")


if __name__ == "__main__":
    main()
