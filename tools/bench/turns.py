"""Several agents' next turns, which come at the same moment, through HTTP, beside other servers.

    python -m tools.bench.turns --model FOLDER [--agents 4] [--words 300] [--more 12] [--output 32]
        [--rounds 5] [--server NAME COMMAND]…

Each agent's talk of so many words has been computed; its next turn is a few words longer and is answered with
`--output` tokens. Servers as in streams.py. Wall: seconds until all have their answers, median of the rounds.
TTFT and gaps between pieces of text: of all rounds together.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

from tools.bench.streams import OURS, server_of

WORDS = ("red", "green", "blue", "one", "two", "north", "river", "stone", "bird", "tree", "house", "road")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--agents", type=int, default=4)
    parser.add_argument("--words", type=int, default=300)
    parser.add_argument("--more", type=int, default=12)
    parser.add_argument("--output", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--server", nargs=2, action="append", metavar=("NAME", "COMMAND"))
    options = parser.parse_args()
    print("| server | wall s | TTFT p50 s | TTFT p90 s | gap p99 s |\n|" + "---|" * 5)
    for name, command in options.server or [("omlxd", OURS)]:
        with tempfile.TemporaryDirectory(prefix="turns-") as home:
            server = server_of(name, command, options.model, home)
            try:
                cells = measure(server, options)
            finally:
                server.stop()
        print("|", " | ".join([name, *(f"{cell:.3f}" for cell in cells)]), "|", flush=True)
    return 0


def measure(server: Any, options: argparse.Namespace) -> tuple[float, float, float, float]:
    """(median wall, TTFT p50, TTFT p90, gap p99), in seconds."""
    rng = random.Random(1)
    walls: list[float] = []
    firsts: list[float] = []
    gaps: list[float] = []
    for _ in range(options.rounds):
        talks = [" ".join(rng.choices(WORDS, k=options.words)) for _ in range(options.agents)]
        for talk in talks:
            asyncio.run(server.ask([_user(talk)], 1))
        turns = [_user(f"{talk} {' '.join(rng.choices(WORDS, k=options.more))}") for talk in talks]
        began = time.perf_counter()
        streams = asyncio.run(server.ask(turns, options.output))
        walls.append(time.perf_counter() - began)
        firsts += [stream.ttft for stream in streams]
        gaps += [b - a for stream in streams for a, b in pairwise(stream.times)]
    return statistics.median(walls), statistics.median(firsts), _part(firsts, 9, 10), _part(gaps, 99, 100)


def _user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def _part(values: list[float], at: int, parts: int) -> float:
    return statistics.quantiles(values, n=parts)[at - 1] if len(values) > 1 else max(values, default=0.0)


if __name__ == "__main__":
    sys.exit(main())
