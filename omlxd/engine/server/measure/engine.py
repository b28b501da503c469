"""An engine in this process, with both tiers: what a daemon's engine does, without its front."""

from __future__ import annotations

import logging
import queue
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, NamedTuple

from .... import wire
from ....chat import Event, Failed, Finished, GenerateRequest, RawPrompt
from ....kv.ledger.lease import LedgerLease
from ....kv.ledger.ledger import Ledger
from ....models.demo import build_random
from ... import mlx_adapter
from ...output.sink import OutputThread
from ...process import blas
from ..host import EngineHost

CAP = 10**9
WAIT_S = 60.0
SIZES = {
    "hidden_size": 1024,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "intermediate_size": 2816,
}
"""94 million weights."""
CPU_SIZES = SIZES | {
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 768,
}
"""4 million weights."""
SLOW_GFLOPS = 20.0
"""A CPU with less measures the demo model, of half a million weights in its layers and head."""
_UNWRITTEN = ("kv_unwritten_blocks", "kv_store_queue_bytes")


class Job(NamedTuple):
    """As wire.MeasureJob."""

    model: Path
    folder: Path
    metal_kernels: str


class Engine:
    """A host on a thread of its own. `notes`: what its load said of attention. `load_s`: seconds of it."""

    def __init__(self, job: Job):
        """Load the model of `job`, made if it is not there. Raises what a load raises."""
        self.notes: list[str] = []
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        cpu = mlx_adapter.backend() == "cpu"
        if not (job.model / "config.json").exists():
            sizes = (CPU_SIZES if blas.gflops() >= SLOW_GFLOPS else {}) if cpu else SIZES
            build_random(job.model, "float32" if cpu else "float16", **sizes)
        job.folder.mkdir(exist_ok=True)
        folder = Path(mkdtemp(dir=job.folder))  # Whoever failed before keeps its own.
        ledger = Ledger(folder, CAP)
        ledger.open()
        load = wire.Load(
            model_path=str(job.model),
            model_id="report",
            cache=wire.CacheSettings(cold_dir=str(folder), cold_cache_bytes=CAP),
            budget=wire.Budget(float32=cpu),
            seed=0,
            speculate=False,
            metal_kernels=job.metal_kernels,
        )
        built: Future[EngineHost] = Future()
        began = time.perf_counter()
        threading.Thread(target=self._run, args=(load, LedgerLease(ledger), built), daemon=True).start()
        self._host = built.result()
        self.load_s = time.perf_counter() - began

    def _run(self, load: wire.Load, lease: LedgerLease, built: Future[EngineHost]) -> None:
        log, notes = logging.getLogger(mlx_adapter.__name__), _Notes(self.notes)
        log.addHandler(notes)
        log.setLevel(logging.INFO)
        log.getChild("metal.rule").setLevel(logging.DEBUG)
        try:
            host = EngineHost(load, OutputThread(self._take), lease)
        except Exception as error:
            built.set_exception(error)
            return
        built.set_result(host)
        host.scheduler.run()

    def _take(self, events: tuple[tuple[int, Event], ...]) -> None:
        for _, event in events:
            self._events.put(event)

    @property
    def loaded(self) -> mlx_adapter.LoadedModel:
        return self._host.loaded

    def call(self, work: Callable[[], Any]) -> Any:
        """Return the result of `work` on the engine thread. Raises what it raises."""
        done: Future[Any] = Future()

        def run() -> None:
            try:
                done.set_result(work())
            except Exception as error:
                done.set_exception(error)

        self._host.scheduler.post(run)
        return done.result()

    def ask(self, request: GenerateRequest) -> list[Event]:
        """Return the events of an answer, `Finished` last. Raises RuntimeError."""
        self._host.start(1, request, lambda: None)
        events: list[Event] = []
        while not events or not isinstance(events[-1], Finished | Failed):
            events.append(self._events.get(timeout=WAIT_S))
        if isinstance(last := events[-1], Failed):
            raise RuntimeError(last.message)
        return events

    def leave_ram(self) -> None:
        """Wait until all blocks are on SSD, and drop those in RAM. Raises RuntimeError."""
        until = time.monotonic() + WAIT_S
        while any(map(self._host.engine_stats().get, _UNWRITTEN)):
            if time.monotonic() > until:
                raise RuntimeError("blocks were not written in time")
            time.sleep(0.02)
        self._host.tidy_memory(trim=True, reset_peak=False)


class _Notes(logging.Handler):
    """Notes lines; what is judged goes to standard error, whose last line tells with what a process ended."""

    def __init__(self, notes: list[str]):
        super().__init__()
        self._notes = notes

    def emit(self, record: logging.LogRecord) -> None:
        if (text := record.getMessage()).startswith("judging"):
            print(text, file=sys.stderr, flush=True)
        else:
            self._notes.append(text)


def numbers(count: int, vocab: int) -> tuple[int, ...]:
    """Return tokens that repeat nothing, the same on every machine."""
    return tuple(7919 * at * at % min(vocab, 4001) for at in range(1, count + 1))


def prompt(engine: Engine, tokens: int) -> RawPrompt:
    return RawPrompt(tokens=numbers(tokens, engine.loaded.vocab_size))
