"""What a long cold prompt costs those who decode beside it, and a short turn that comes meanwhile.

    python -m tools.bench.prefill_gap [--shape cpu] [--prompt 2048] [--context 64] [--seconds 300]

A stream decodes alone, then beside the prefill; in the middle of that a turn of 100 tokens asks for 15.
It gives up after `--seconds`, at the end of the step under way, and says how far it came.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from omlxd.engine.process import blas

blas.put_first()  # As an engine does, before anything imports MLX.

from omlxd.engine.schedule.scheduler import Scheduler  # noqa: E402
from omlxd.engine.sequence.sequence import Sequence  # noqa: E402
from tools.bench.gpu_rig import Bench, Collector, row  # noqa: E402

ALONE = 16
"""Tokens that the stream decodes alone, and that are measured."""


class Clock(Collector):
    """When tokens came."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def take(self, drawn: Any, count: Any) -> None:
        self.times += [time.perf_counter()] * len(drawn)

    def failed(self, sequence: Sequence, error: Exception) -> None: ...  # The stream, at the end.


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--shape", default="cpu")
    parser.add_argument("--prompt", type=int, default=2048, help="tokens of the cold prompt")
    parser.add_argument("--context", type=int, default=64, help="tokens of the stream's prompt")
    parser.add_argument("--seconds", type=float, default=300.0, help="give up after so long")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(options.shape, Path(folder), options.prompt, [64])
        scheduler = Scheduler(bench.loaded, None, slots=4, block_size=64)
        return run(bench, scheduler, options.prompt, options.context, options.seconds)


def run(bench: Bench, scheduler: Scheduler, long: int, context: int, seconds: float) -> int:
    deadline = time.monotonic() + seconds

    def wait(there: Any) -> None:
        while not there():
            if time.monotonic() > deadline:
                raise TimeoutError
            time.sleep(0.001)

    def submit(length: int, new: int, seed: int) -> tuple[Sequence, Clock]:
        sink = Clock()
        sequence = bench._sequence(bench.prompt(length, seed), 64, new, sink)
        scheduler.submit(sequence)
        return sequence, sink

    def ask() -> None:
        with contextlib.suppress(TimeoutError):
            measure()
        scheduler.stop()

    def measure() -> None:
        wait(lambda: len(stream.times) > ALONE)
        marks.append(time.perf_counter())
        cold, first = submit(long, 1, 1)
        wait(lambda: cold.kv.length >= long // 4)
        marks.append(time.perf_counter())
        short = submit(100, 15, 2)[1]
        wait(lambda: short.ended)
        marks.append(time.perf_counter())
        wait(lambda: first.ended)
        marks.append(time.perf_counter())

    marks: list[float] = []
    _, stream = submit(context, 100_000, 0)
    threading.Thread(target=ask, daemon=True).start()
    scheduler.run()
    if len(marks) < 4:
        print(f"gave up after {seconds:.0f} s in step {len(marks) + 1} of 4, {len(stream.times)} tokens came")
        return 1
    began, turn, turn_end, end = marks
    gaps = [(b, b - a) for a, b in zip(stream.times, stream.times[1:], strict=False)]
    row("gap between tokens", "median ms", "longest ms")
    row("---", "---", "---")
    for name, part in (
        ("alone", [gap for at, gap in gaps[2:] if at < began]),
        ("beside the prefill", [gap for at, gap in gaps if began <= at < end]),
    ):
        row(name, statistics.median(part) * 1000, max(part) * 1000)
    print(f"BLAS: {blas.name() or 'of the wheel'}")
    print(f"cold prompt {end - began:.2f} s; 15 tokens of a turn beside it {turn_end - turn:.2f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
