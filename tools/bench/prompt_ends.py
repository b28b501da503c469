"""Ends of several prompts behind one cached prefix, ready at once: in one pass, and one after another.

    python -m tools.bench.prompt_ends MODEL [--prefix 2560] [--ends 4x8,4x16] [--answer 16] [--rounds 2]

Seconds of processor time, which other programs' load changes less than time by the clock: until each prompt's
first token, until all answers have ended, and the longest gap of a request that decodes beside them.
"""

from __future__ import annotations

import argparse
import itertools
import queue
import random
import statistics
import threading
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Any

from omlxd.engine.process import blas

blas.put_first()  # As an engine does, before anything imports MLX.

from omlxd import wire  # noqa: E402
from omlxd.chat import Failed, Finished, GenerateRequest, RawPrompt, Sampling  # noqa: E402
from omlxd.engine.output.sink import OutputThread  # noqa: E402
from omlxd.engine.sequence.sequence import Drawn, Sequence  # noqa: E402
from omlxd.engine.server.host import EngineHost  # noqa: E402
from tools.bench.gpu_rig import row  # noqa: E402

BEFORE = 25
"""Tokens that a request decodes before others come."""


class Bench:
    """A host, which the main thread runs. `times`: (sequence, processor seconds) of each token."""

    def __init__(self, model: str, prefix: int):
        self._ids, self._ended = itertools.count(1), queue.SimpleQueue[Any]()
        self.times: list[tuple[Any, float]] = []
        self.then: Callable[[], None] | None = None
        self.prefix = self.tokens(prefix)
        load = wire.Load(
            model_path=model,
            model_id="m",
            cache=wire.CacheSettings(),
            max_concurrent=16,
            speculate=False,
            budget=wire.Budget(float32=True),
        )

        self.host = EngineHost(load, OutputThread(self._take), None)  # type: ignore[arg-type]
        self._note_tokens()

    def _take(self, events: tuple[tuple[int, Any], ...]) -> None:
        for _, event in events:
            if isinstance(event, Finished | Failed):
                self._ended.put(event)

    def _note_tokens(self) -> None:
        accept = self.host.scheduler.accept

        def noting(sequence: Sequence, drawn: Seq[Drawn]) -> bool:
            for _ in drawn:
                self.times.append((sequence, time.process_time()))
                if len(self.times) == BEFORE and (then := self.then):
                    then()
            return accept(sequence, drawn)

        self.host.scheduler.accept = noting

    def tokens(self, count: int) -> list[int]:
        return [random.randrange(100, 1000) for _ in range(count)]

    def ask(self, count: int, end: int, answer: int) -> float:
        """Start them in one turn; when, in processor seconds."""
        gate = threading.Event()

        def hold() -> None:
            gate.wait()

        self.host.scheduler.post(hold)
        for _ in range(count):
            prompt = RawPrompt(tokens=(*self.prefix, *self.tokens(end)))
            sampling = Sampling(max_tokens=answer, temperature=0)
            self.host.start(next(self._ids), GenerateRequest(prompt=prompt, sampling=sampling), lambda: None)
        began = time.process_time()
        gate.set()
        return began

    def wait(self, count: int) -> None:
        for _ in range(count):
            assert isinstance(event := self._ended.get(), Finished), event

    def firsts(self, began: float) -> list[float]:
        """Seconds from then to the first token of each sequence that had none."""
        seen = {sequence: at for sequence, at in reversed(self.times)}
        return sorted(at - began for at in seen.values() if at >= began)

    def alone(self, count: int, end: int, answer: int) -> list[float]:
        """First tokens, then the end of all."""
        self.times.clear()
        began = self.ask(count, end, answer)
        self.wait(count)
        return [*self.firsts(began), time.process_time() - began]

    def beside(self, count: int, end: int) -> list[float]:
        """The decoder's usual gap, and its longest until the others have begun."""
        self.times.clear()
        asked: list[float] = []
        self.then = lambda: asked.append(self.ask(count, end, 2))
        self.ask(1, 9, 80)
        self.wait(count + 1)
        self.then = None
        decoder, began = self.times[0][0], asked[0]
        last = began + self.firsts(began)[-1]
        mine = [at for sequence, at in self.times if sequence is decoder]
        gaps = list(itertools.pairwise(mine))
        usual = statistics.median(b - a for a, b in gaps[2:] if b < began)
        return [usual, max(b - a for a, b in gaps if began <= b and a <= last)]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("model", help="a folder")
    parser.add_argument("--prefix", type=int, default=2560, help="tokens")
    parser.add_argument("--ends", default="4x8,4x16,3x8,2x16", help="prompts x tokens of each")
    parser.add_argument("--answer", type=int, default=16, help="tokens")
    parser.add_argument("--rounds", type=int, default=2)
    options = parser.parse_args()
    bench = Bench(options.model, options.prefix)

    def run() -> None:
        try:
            measure(bench, options)
        finally:
            bench.host.scheduler.stop()

    threading.Thread(target=run).start()
    bench.host.scheduler.run()
    bench.host.close(5)


def measure(bench: Bench, options: argparse.Namespace) -> None:
    bench.alone(1, 2, 1)
    row("ends", "passes", "first tokens", "all have ended", "a decoder's gap", "longest beside")
    row(*["---"] * 6)
    for count, end in (map(int, ends.split("x")) for ends in options.ends.split(",")):
        rounds: dict[bool, list[list[float]]] = {False: [], True: []}
        for _, merges in itertools.product(range(options.rounds), rounds):
            bench.host.scheduler.passes._merges = merges
            rounds[merges].append([*bench.alone(count, end, options.answer), *bench.beside(count, end)])
        for merges, found in rounds.items():
            *firsts, ended, gap, longest = map(statistics.median, zip(*found, strict=True))
            shown = " ".join(f"{first:.2f}" for first in firsts)
            row(f"{count} x {end}", "one" if merges else "each its own", shown, ended, gap, longest)


if __name__ == "__main__":
    main()
