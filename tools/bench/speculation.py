"""Decoding with guesses against decoding without, by the kind of work, through HTTP.

    python -m tools.bench.speculation --model FOLDER [--streams 1,4,16] [--output 96] [--rounds 3]
                                      [--work edit,log,call,prose] [--warm-up 2]

Two daemons serve one chat model, one with `--speculation off`, and answer greedily in turn. Each time of the
one with guesses is compared with the mean of the other's time before and its time behind. Kinds of work:

- edit    return a file with one name changed; the answer's first lines are there, or a small model won't, and
          it ends with the file
- log     repeat a log
- call    answer with a tool call in JSON
- prose   tell a story
- mixed   one of these a stream, in this order, again and again

Each prompt is sent by itself first, then answers of `--warm-up` tokens come, so that all but the ends of the
prompts is cached. In each round answers of one token are timed, too, and taken off: what is left is decoding,
from the first token of the last stream that begins to the last one of the last that ends. A row has tokens a
second of both and their ratio; `best`, that of the shortest times of all rounds, since a machine that others
use is noisy; `of each`, the ratio of each stream's own tokens a second, summed; `alone`, that of a speed
without guesses and the one before it, which the machine alone makes; and that of tokens a processor second of
the daemons. All but `best` are medians or quartiles of the rounds. Then come how many guesses held, in all
and of a row in a pass, and whether all answers are the same. The aim: at least 1.5 on edits, and never under
0.98.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import operator
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from pathlib import Path
from statistics import mean, median
from typing import Any

import httpx
import psutil

from tools.bench.serve import Server, free_port

FILE = """class Account:
    def __init__(self, owner, balance=0):
        self.owner = owner
        self.balance = balance
        self.history = []

    def deposit(self, amount):
        if amount <= 0:
            raise ValueError("amount must be positive")
        self.balance += amount
        self.history.append(("deposit", amount))
        return self.balance

    def withdraw(self, amount):
        if amount > self.balance:
            raise ValueError("insufficient funds")
        self.balance -= amount
        self.history.append(("withdraw", amount))
        return self.balance
"""
LOG = "\n".join(
    f"2026-11-22 09:{minute:02}:17 INFO worker-{minute % 3} finished job {4100 + minute} in {minute * 7} ms"
    for minute in range(12)
)
CALL = '{"name": "read_file", "arguments": {"path": "src/account.py", "offset": 0, "limit": 200}}'

BEGUN = {"edit": "class Wallet:\n    def __init__(self, owner, balance=0):\n        self.owner = owner"}
"""Beginnings of answers; one that ends in a new line would cut a token in two."""

STOPS = {"edit": ["```", "\n# "]}
"""What ends an answer: behind a file a small model explains it."""

Body = dict[str, Any]

WORK = {
    "edit": f"{FILE}\nReturn this file, but with the class named Wallet.",
    "log": f"Repeat this log line by line, with no other word:\n\n{LOG}",
    "call": f"Tools are called as JSON, such as {CALL}\nCall read_file for src/wallet.py, lines 0 to 200.",
    "prose": "Tell a short story about a fisherman who finds a letter in a bottle.",
}


@dataclass
class Cost:
    """Of some answers: seconds until each ended, its tokens, and seconds of processors in all."""

    seconds: list[float]
    tokens: list[int]
    processor: float

    def rates(self, first: Cost) -> tuple[float, float, float]:
        """Tokens a second behind those of `first`, which has answers of one token: on the clock, each
        answer's own, summed, and of processors, which psutil counts in hundredths."""
        tokens = list(map(operator.sub, self.tokens, first.tokens))
        seconds = map(operator.sub, self.seconds, first.seconds)
        return (
            sum(tokens) / (max(self.seconds) - max(first.seconds)),
            sum(map(operator.truediv, tokens, seconds)),
            sum(tokens) / max(self.processor - first.processor, 0.01),
        )


class ChatServer(Server):
    """Answers a chat greedily. `rates`, `times`, `texts`: of each round; `times` are seconds until the last
    answer of one token has ended, and the last whole one."""

    def begin(self) -> None:
        """Forget what was measured."""
        self.rates, self.texts = list[tuple[float, float, float]](), list[list[str]]()
        self.times = list[tuple[float, float]]()

    def guesses(self) -> list[int]:
        """So far: how often a row had guesses in a pass, how many there were, how many held."""
        metrics = httpx.get(f"{self.url}/metrics").text
        lines = [line.split() for line in metrics.splitlines() if not line.startswith("#")]
        return [
            sum(int(float(value)) for key, value in lines if f"spec_decode_num_{name}_total" in key)
            for name in ("drafts", "draft_tokens", "accepted_tokens")
        ]

    def processor_seconds(self) -> float:
        """Of the daemon and its engines, so far."""
        daemon = psutil.Process(self.process.pid)
        times = [each.cpu_times() for each in (daemon, *daemon.children(recursive=True))]
        return sum(each.user + each.system for each in times)

    def measure(self, bodies: list[Body], most: int) -> None:
        """A round: answers of `most` tokens, and of one."""
        first, _ = self.chat(bodies, 1)
        whole, texts = self.chat(bodies, most)
        self.rates.append(whole.rates(first))
        self.times.append((max(first.seconds), max(whole.seconds)))
        self.texts.append(texts)

    def best(self) -> float:
        """Seconds from the first token to the last, in the shortest of all rounds."""
        first, whole = (min(each) for each in zip(*self.times, strict=True))
        return whole - first

    def chat(self, bodies: list[Body], most: int) -> tuple[Cost, list[str]]:
        """What all answers at once cost, and what they are."""
        before, began = self.processor_seconds(), time.perf_counter()
        texts, tokens, ends = zip(*asyncio.run(self._answers(bodies, most)), strict=True)
        processor = self.processor_seconds() - before
        return Cost([end - began for end in ends], list(tokens), processor), list(texts)

    async def _answers(self, bodies: list[Body], most: int) -> list[tuple[str, int, float]]:
        async with httpx.AsyncClient(timeout=900) as client:
            return list(await asyncio.gather(*(self._answer(client, body, most) for body in bodies)))

    async def _answer(self, client: httpx.AsyncClient, body: Body, most: int) -> tuple[str, int, float]:
        """Its text, its tokens, and when it ended."""
        body = body | {"max_tokens": most}
        text, tokens = "", 0
        async with client.stream("POST", f"{self.url}/v1/chat/completions", json=body) as response:
            response.raise_for_status()
            async for line in response.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                event = json.loads(line[6:])
                for choice in event.get("choices", ()):
                    text += choice["delta"].get("content") or ""
                if usage := event.get("usage"):
                    tokens = usage["completion_tokens"]
        return text, tokens, time.perf_counter()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--streams", default="1,4,16")
    parser.add_argument("--output", type=int, default=96, help="tokens of an answer at most")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--work", default=",".join(WORK))
    parser.add_argument("--warm-up", type=int, default=2, help="tokens; on a GPU as many as --output")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as home:

        def daemon(name: str) -> ChatServer:
            port = free_port()
            command = [sys.executable, "-m", "omlxd", "serve", "--model", str(options.model)]
            command += ["--port", str(port), "--speculation", name, "--base-path", f"{home}/{name}"]
            command += ["--max-concurrent-requests", str(max(8, *map(int, options.streams.split(","))))]
            return ChatServer(name, command, port, options.model.name)

        servers = [daemon("off"), daemon("auto")]
        try:
            names = (
                "off, tok/s",
                "auto, tok/s",
                "ratio",
                "quartiles",
                "best",
                "of each",
                "quartiles",
                "alone",
                "processor",
                "guesses held",
                "in a pass",
                "same",
            )
            print(f"| work | streams | {' | '.join(names)} |")
            print("| --- " * (2 + len(names)) + "|")
            for streams in map(int, options.streams.split(",")):
                for work in options.work.split(","):
                    row(servers, work, streams, options)
        finally:
            for server in servers:
                server.stop()
    return 0


def request(work: str, number: int) -> Body:
    """Of a kind of work, the body of a request like no other."""
    if work == "mixed":
        work = list(WORK)[number % len(WORK)]
    begun = BEGUN.get(work, "")
    messages = [{"role": "user", "content": f"{WORK[work]} This is task {number}."}]
    return {
        "messages": [*messages, {"role": "assistant", "content": begun}] if begun else messages,
        "continue_final_message": bool(begun),
        "add_generation_prompt": not begun,
        "stop": STOPS.get(work, []),
        "temperature": 0,
        "repetition_penalty": 1.0,  # A small model's own keeps it from returning a file.
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def row(servers: list[ChatServer], work: str, streams: int, options: argparse.Namespace) -> None:
    bodies = [request(work, number) for number in range(streams)]
    for server in servers:
        # One by one: which comes first decides how the others are cut into passes.
        for body in bodies:
            server.chat([body], 1)
        server.chat(bodies, options.warm_up)
        server.begin()
    off, auto = servers
    before = auto.guesses()
    off.measure(bodies, options.output)
    for _ in range(options.rounds):
        auto.measure(bodies, options.output)
        off.measure(bodies, options.output)
    drafts, drafted, accepted = (now - then for now, then in zip(auto.guesses(), before, strict=True))
    around = [list(map(mean, zip(*pair, strict=True))) for pair in pairwise(off.rates)]
    ratios = [
        list(map(operator.truediv, fast, plain)) for fast, plain in zip(auto.rates, around, strict=True)
    ]
    (low, ratio, high), (own_low, own, own_high), (_, cheaper, _) = (
        quartiles(each) for each in zip(*ratios, strict=True)
    )
    least, _, most = quartiles([b[0] / a[0] for a, b in pairwise(off.rates)])
    print(
        f"| {work} | {streams} | {median(rate for rate, _, _ in off.rates):.1f} |"
        f" {median(rate for rate, _, _ in auto.rates):.1f} |"
        f" {ratio:.2f} | {low:.2f} to {high:.2f} | {off.best() / auto.best():.2f} |"
        f" {own:.2f} | {own_low:.2f} to {own_high:.2f} |"
        f" {least:.2f} to {most:.2f} | {cheaper:.2f} |"
        f" {accepted} of {drafted} | {accepted / max(drafts, 1):.1f} |"
        f" {alike(off.texts, [auto.texts[0], *auto.texts])} |",
        flush=True,
    )


def quartiles(values: Sequence[float]) -> list[float]:
    """The lower one, the median and the upper one."""
    return [sorted(values)[len(values) * part // 4] for part in (1, 2, 3)]


def alike(off: list[list[str]], auto: list[list[str]]) -> str:
    """Whether all rounds' answers are the same; else where the first two part, and who repeats its own."""
    if off == auto:
        return "yes"
    pairs = zip(chain(*off), chain(*auto), strict=True)
    at = [
        next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), 0) for a, b in pairs if a != b
    ]
    own = [name for name, texts in (("off", off), ("auto", auto)) if texts == texts[:1] * len(texts)]
    return f"no: {len(at)}, from character {min(at)} on; every round the same: {', '.join(own) or 'none'}"


if __name__ == "__main__":
    sys.exit(main())
