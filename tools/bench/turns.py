"""Several agents' next turns, which come at the same moment, through HTTP, beside other servers.

    python -m tools.bench.turns --model FOLDER [--agents 4] [--words 300] [--more 12] [--output 32]
        [--rounds 5] [--grow 8000+600+600 …]… [--trace FILE.jsonl]… [--each] [--bound SECONDS]
        [--server NAME COMMAND]…

Each agent's talk of so many words has been computed; its next turn is a few words longer and is answered with
`--output` tokens. With `--grow`, a value an agent, nothing has been computed: each agent begins with so many
tokens, and each of its turns adds so many to its prompt, once the turn before is answered; the agents run at
the same time. With `--trace`, a run behind those, recorded requests are sent as they are, but for the model's
name, the limit of tokens, and temperature 0: trace_order.py says which of them at the same time. Both omlxd
and vllm-mlx 0.6 take bodies of /v1/messages with tools, marks of cached prefixes and system messages amid the
conversation; each lays them out its own way, so that prompts differ by a few tokens in a thousand. No server
takes a request to go on behind an end of text: a stream that ended early is told. Servers as in streams.py.

answered  turns, of all; fewer where the bound cut the server, whose other figures are then of those
wall      seconds until all agents have their answers; without --grow the median of the rounds
later     TTFT p50 of turns behind an agent's first alone
prompt    tokens of all prompts answered, cached ones too, as the server counts them; -: it tells none

TTFT and gaps between pieces of text are of all rounds together. With `--each`, stderr has a line a turn.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from tools.bench.rates import Stream
from tools.bench.streams import OURS, server_of, text
from tools.bench.trace_order import Place, order
from tools.replay import read_trace

WORDS = ("red", "green", "blue", "one", "two", "north", "river", "stone", "bird", "tree", "house", "road")

Turn = tuple[Any, Place]
"""What to ask for, and when."""


@dataclass
class Answers:
    """What has come so far. `later`: of it, turns that are not an agent's first."""

    streams: list[Stream] = field(default_factory=list)
    later: list[Stream] = field(default_factory=list)
    walls: list[float] = field(default_factory=list)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--agents", type=int, default=4)
    parser.add_argument("--words", type=int, default=300)
    parser.add_argument("--more", type=int, default=12)
    parser.add_argument("--output", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--grow", nargs="+", action="append", default=[])
    parser.add_argument("--trace", type=Path, action="append", default=[])
    parser.add_argument("--each", action="store_true")
    parser.add_argument("--bound", type=float, default=3600.0)
    parser.add_argument("--server", nargs=2, action="append", metavar=("NAME", "COMMAND"))
    options = parser.parse_args()
    names = (
        "run",
        "answered",
        "wall s",
        "TTFT p50 s",
        "TTFT p90 s",
        "later s",
        "gap p99 s",
        "largest gap s",
        "prompt",
    )
    runs = [grown(options.model, number, agents) for number, agents in enumerate(options.grow)]
    runs += [recorded(path) for path in options.trace]
    print(f"| server | {' | '.join(names)} |\n|" + "---|" * (1 + len(names)))
    for name, command in options.server or [("omlxd", OURS)]:
        with tempfile.TemporaryDirectory(prefix="turns-", ignore_cleanup_errors=True) as home:
            server = server_of(name, command, options.model, home)
            cut = False
            try:
                for number, turns in enumerate(runs or [[]]):
                    answers = Answers()
                    cut = asyncio.run(within(server, options, answers, turns, number))
                    told = cells(answers, options, turns, cut)
                    print("|", " | ".join([name, str(number + 1), *told]), "|", flush=True)
                    if cut:
                        break
            finally:
                server.kill() if cut else server.stop()
    return 0


async def within(
    server: Any, options: argparse.Namespace, answers: Answers, turns: list[Turn], number: int
) -> bool:
    """Whether the bound cut the run."""
    try:
        async with asyncio.timeout(options.bound):
            if turns:
                await follow(server, options, answers, turns, number)
            else:
                await rounds(server, options, answers)
    except TimeoutError:
        return True
    return False


async def rounds(server: Any, options: argparse.Namespace, answers: Answers) -> None:
    rng = random.Random(1)
    for _ in range(options.rounds):
        talks = [" ".join(rng.choices(WORDS, k=options.words)) for _ in range(options.agents)]
        for talk in talks:
            await server.ask([_user(talk)], 1)
        turns = [_user(f"{talk} {' '.join(rng.choices(WORDS, k=options.more))}") for talk in talks]
        began = time.perf_counter()
        streams = await server.ask(turns, options.output)
        answers.walls.append(time.perf_counter() - began)
        answers.streams += streams
        answers.later += streams


def grown(model: Path, run: int, agents: list[str]) -> list[Turn]:
    turns: list[Turn] = []
    for number, agent in enumerate(agents):
        prompt = ""
        for turn, tokens in enumerate(agent.split("+")):
            prompt += text(model, int(tokens), 10000 * run + 100 * number + turn)
            turns.append((prompt, Place(number, turn, {len(turns) - 1} if turn else set())))
    return turns


def recorded(path: Path) -> list[Turn]:
    requests = read_trace(path)
    return list(zip(requests, order(requests), strict=True))


async def follow(
    server: Any, options: argparse.Namespace, answers: Answers, turns: list[Turn], run: int
) -> None:
    """Ask each as soon as those that it waits for are answered."""
    answered = [asyncio.Event() for _ in turns]

    async def one(at: int, prompt: Any, place: Place) -> None:
        for earlier in place.waits:
            await answered[earlier].wait()
        stream = (await server.ask([prompt], options.output))[0]
        answered[at].set()
        answers.streams.append(stream)
        if place.turn:
            answers.later.append(stream)
        if options.each:
            asked, done = stream.start - began, stream.times[-1] - began
            told = f"asked at {asked:.2f} s, first token after {stream.ttft:.2f} s, done at {done:.2f} s"
            name = f"run {run + 1}, agent {place.agent}, turn {place.turn}"
            print(f"{name}: {told}", file=sys.stderr, flush=True)

    began = time.perf_counter()
    await asyncio.gather(*(one(at, *turn) for at, turn in enumerate(turns)))
    answers.walls.append(time.perf_counter() - began)


def cells(answers: Answers, options: argparse.Namespace, turns: list[Turn], cut: bool) -> list[str]:
    firsts = [stream.ttft for stream in answers.streams if stream.times]
    gaps = [b - a for stream in answers.streams for a, b in pairwise(stream.times)]
    return [
        f"{len(firsts)} of {len(turns) or options.rounds * options.agents}",
        f"over {options.bound:.0f}" if cut else f"{statistics.median(answers.walls):.3f}",
        *(f"{_part(firsts, part, 10):.3f}" for part in (5, 9)),
        f"{_part([stream.ttft for stream in answers.later if stream.times], 1, 2):.3f}",
        f"{_part(gaps, 99, 100):.3f}",
        f"{max(gaps, default=0.0):.3f}",
        str(sum(stream.prompt for stream in answers.streams) or "-"),
    ]


def _user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def _part(values: list[float], at: int, parts: int) -> float:
    return statistics.quantiles(values, n=parts)[at - 1] if len(values) > 1 else max(values, default=0.0)


if __name__ == "__main__":
    sys.exit(main())
