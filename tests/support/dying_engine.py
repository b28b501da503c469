"""A real engine that stops at one exact moment of its work, and dies there by the signal that it is told.

    python tests/support/dying_engine.py FOLDER omlxd.engine --fd N

It is `python -m omlxd.engine`, but that it looks for `FOLDER/moment`, which names one of `MOMENTS`. The
next time that it is there, it removes that file, writes `FOLDER/there` (its process id) and stands still.
Once `FOLDER/go` names a signal, it writes `FOLDER/died` (when, on the monotonic clock) and kills itself;
if it names SIGCONT, it goes on as if nothing had been, and if `FAULT`, its GPU has failed.
Every request that arrives is a file `FOLDER/asked-N`, every one that is cancelled `FOLDER/cancelled-N`.
Ranks that follow it do so too, at `MOMENT@RANK`. Ranks have one more: "matching", before what they have of a
prefix is restored; rank 0 has asked the others by then.
With `FOLDER/deaf` no signal comes when the front dies, as on systems that send none; it ignores SIGTERM, too.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import runpy
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from omlxd import wire
from omlxd.engine import mlx_adapter
from omlxd.engine.kvio.open_store import ModelStore
from omlxd.engine.kvio.reads.restore import Restore
from omlxd.engine.kvio.split_bridge import SplitBridge
from omlxd.engine.schedule import forward as prompt_passes
from omlxd.engine.schedule.decode_batch import DecodeBatch
from omlxd.engine.server.ranks import lead as ranks
from omlxd.engine.server.ranks.follower import Follower
from omlxd.engine.server.service import EngineService
from omlxd.kv.files.fs import FileSystem
from omlxd.wire import plan

MOMENTS = ("loading", "prefill", "decode", "writing", "restoring")
"""The weights are there and nobody knows yet; a prompt's first chunk is done, others are not; some tokens
are out; a part of a block file is written, under its temporary name; a prefix has been read from files."""
TOKENS = 3
FAULT = "[METAL] Command buffer execution failed: Impacting Interactivity (00000001:kIOGPUCommandBuffer…)"

FOLDER = Path(sys.argv[1])
_standing = threading.Event()
_rank = ""


def here(moment: str) -> None:
    """Stand still if this is the moment; whoever computes stands still as well once somebody does."""
    while _standing.is_set():
        time.sleep(0.01)
    if not _claim(moment):
        return
    _standing.set()
    _write("there", str(os.getpid()))
    while not (FOLDER / "go").exists():
        time.sleep(0.005)
    if (name := (FOLDER / "go").read_text()) == "FAULT":
        _standing.clear()
        (FOLDER / "go").unlink()
        _write("died", str(time.monotonic()))
        raise RuntimeError(FAULT)
    number = signal.Signals[name]
    if number == signal.SIGCONT:
        _standing.clear()
        (FOLDER / "go").unlink()
        return
    (FOLDER / "go").unlink()
    _write("died", str(time.monotonic()))
    os.kill(os.getpid(), number)
    time.sleep(60)  # The signal may take another thread first.


def _claim(moment: str) -> bool:
    with contextlib.suppress(OSError):
        if (FOLDER / "moment").read_text() == moment + _rank:
            (FOLDER / "moment").unlink()
            return True
    return False


def _write(name: str, text: str) -> None:
    """Whole, or not there: somebody waits for it."""
    (FOLDER / f".{name}").write_text(text)
    (FOLDER / f".{name}").rename(FOLDER / name)


def _after(original: Callable[..., Any], moment: str) -> Callable[..., Any]:
    def wrapped(*args: Any, **named: Any) -> Any:
        result = original(*args, **named)
        here(moment)
        return result

    return wrapped


def _before(original: Callable[..., Any], moment: str) -> Callable[..., Any]:
    def wrapped(*args: Any, **named: Any) -> Any:
        here(moment)
        return original(*args, **named)

    return wrapped


def _deaf(self: EngineService) -> None:
    if sys.platform.startswith("linux"):
        pr_set_pdeathsig = 1
        assert ctypes.CDLL(None).prctl(pr_set_pdeathsig, 0) == 0
    _run(self)


_step, _writev, _handle, _run, _followed = (
    DecodeBatch.step,
    FileSystem.writev,
    EngineService._handle,
    EngineService.run,
    Follower._handle,
)
_steps = 0


def _noted(self: EngineService, message: Any) -> None:
    if isinstance(message, wire.Generate):
        (FOLDER / f"asked-{message.id}").touch()
    _handle(self, message)
    if isinstance(message, wire.Cancel):
        (FOLDER / f"cancelled-{message.id}").touch()


def _follow(self: Follower, message: Any) -> None:
    global _rank, _steps
    if isinstance(message, plan.Follow):
        _rank = f"@{message.rank}"
    _followed(self, message)
    if isinstance(message, plan.Pass):
        decodes = len(message.tokens) == 1
        _steps = _steps + decodes if (FOLDER / "moment").exists() else 0
        if not decodes or _steps > TOKENS:
            here("decode" if decodes else "prefill")


def _counted_step(batch: DecodeBatch) -> Any:
    global _steps
    _steps = _steps + 1 if (FOLDER / "moment").exists() else 0
    if _steps > TOKENS or _standing.is_set():
        here("decode")
    return _step(batch)


def _half_written(self: FileSystem, fd: int, buffers: Any) -> int:
    written = _writev(self, fd, buffers[:1])  # As a kernel may; the rest is written by the next call.
    here("writing")
    return written


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if (FOLDER / "deaf").exists():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        EngineService.run = _deaf
    mlx_adapter.load = _after(mlx_adapter.load, "loading")
    prompt_passes.compute_chunk = _after(prompt_passes.compute_chunk, "prefill")
    Restore._accept = _before(Restore._accept, "restoring")
    EngineService._handle = _noted
    DecodeBatch.step = _counted_step
    FileSystem.writev = _half_written
    SplitBridge.restore = _before(SplitBridge.restore, "matching")
    Follower._handle = _follow
    if "--follow" in sys.argv:  # Rank 0 takes its time, and nothing would be left to restore.
        ModelStore.read_newest = lambda self, post: None
    ranks._COMMAND = (sys.executable, __file__, str(FOLDER), "omlxd.engine", "--follow")
    sys.argv = sys.argv[2:]
    runpy.run_module("omlxd.engine", run_name="__main__")
