"""Seconds to the first token of several agents' next turns, which come at the same moment, through HTTP.

    python -m tools.bench.turns --model FOLDER [--agents 4] [--words 300] [--more 12] [--rounds 5]

Each agent's talk of so many words has been computed; its next turn is a few words longer.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import sys
import tempfile
from pathlib import Path

from tools.bench.serve import free_port
from tools.bench.speculation import ChatServer

WORDS = ("red", "green", "blue", "one", "two", "north", "river", "stone", "bird", "tree", "house", "road")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--agents", type=int, default=4)
    parser.add_argument("--words", type=int, default=300)
    parser.add_argument("--more", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    rng = random.Random(1)
    with tempfile.TemporaryDirectory() as home:
        port = free_port()
        command = [sys.executable, "-m", "omlxd", "serve", "--model", str(options.model)]
        command += ["--port", str(port), "--base-path", home]
        server = ChatServer("omlxd", command, port, options.model.name)
        try:
            times: list[float] = []
            for _ in range(options.rounds):
                talks = [" ".join(rng.choices(WORDS, k=options.words)) for _ in range(options.agents)]
                asyncio.run(server.chat(talks, "", 1))
                turns = [f"{talk} {' '.join(rng.choices(WORDS, k=options.more))}" for talk in talks]
                streams = asyncio.run(server.chat(turns, "", 2))
                times += [stream.ttft for stream in streams]
        finally:
            server.stop()
    tenths = statistics.quantiles(times, n=10)
    print(f"{options.agents} turns at once, {options.more} words more: first token after", end=" ")
    print(
        f"p50 {statistics.median(times):.2f} s, p90 {tenths[-1]:.2f} s, mean {statistics.mean(times):.2f} s"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
