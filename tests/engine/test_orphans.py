"""No engine outlives its front: the end of the socket alone ends it, whatever it is doing.

Linux would also end it by a signal when its parent dies; in the first tests the parent lives on and only
closes the socket, which is all that other systems offer. In the last ones a daemon is killed.
"""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from cold_files import all_on_disk, settled, unsettled
from daemon import BLOCK, READY_S, REPO, Daemon, alive, demo_model, own_usage, prose, restored, wait_until
from dying import BASE, CAP, MOMENTS, Asking, Dying
from fast_or_slow import rest_slow

from omlxd import wire
from omlxd.chat import GenerateRequest, Progress, RawPrompt, Sampling, TextDelta
from omlxd.engine.server import service

GONE_S = service.ORPHAN_FLUSH_S + 60.0
"""An orphan that does not notice would be there for good."""


class Engine:
    """An engine process, and the front's end of its socket."""

    def __init__(self, cold: Path, *program: str):
        self.socket, theirs = socket.socketpair()
        self.cold = cold
        (cold / ".lock").touch()  # The front's: without it the folder is away.
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, *(program or ("-m", "omlxd.engine")), "--fd", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                cwd=REPO,
                stderr=subprocess.DEVNULL,
            )
        self.socket.settimeout(120)
        self._decoder = wire.FrameDecoder(wire.ToFront)

    def send(self, message: object) -> None:
        self.socket.sendall(wire.encode(message))

    def load(self) -> None:
        cache = wire.CacheSettings(cold_dir=str(self.cold))
        self.send(wire.Load(model_path=str(demo_model()), model_id="demo", cache=cache))

    def generate(self, id: int, words: int, max_tokens: int) -> None:
        sampling = Sampling(temperature=0.0, max_tokens=max_tokens)
        prompt = RawPrompt(text=prose(words, seed=id))
        self.send(wire.Generate(id=id, request=GenerateRequest(prompt=prompt, sampling=sampling)))

    def until(self, found: Callable[[object], bool]) -> None:
        """Read frames until one is `found`; space for blocks is granted meanwhile."""
        while data := self.socket.recv(1 << 18):
            for message in self._decoder.feed(data):
                if isinstance(message, wire.Reserve):
                    self.send(wire.Grant(ticket=message.ticket, nbytes=message.nbytes))
                if found(message):
                    return
        raise AssertionError("the engine ended first")

    def hang_up(self) -> None:
        """Close the socket, and wait until the process is gone."""
        self.socket.close()
        self.process.wait(GONE_S)


BROKEN = """
import threading
from concurrent.futures import ThreadPoolExecutor
from omlxd.engine import __main__
from omlxd.engine.server import service

def run(self):
    ThreadPoolExecutor(1).submit(threading.Event().wait)  # As a read of a disk that hangs.
    raise ValueError

service.EngineService.run = run
__main__.main()
"""


def test_an_engine_whose_main_thread_fails_is_gone_whatever_its_other_threads_do():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        fd = theirs.fileno()
        ended = subprocess.run(
            [sys.executable, "-c", BROKEN, "--fd", str(fd)],
            pass_fds=[fd],
            cwd=REPO,
            stderr=subprocess.PIPE,
            timeout=GONE_S,
        )
    assert ended.returncode == 6 and b"this engine ends" in ended.stderr


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    made = Engine(tmp_path)
    yield made
    with contextlib.suppress(OSError):
        made.socket.close()
    if made.process.poll() is None:
        made.process.kill()
        made.process.wait()


def event(kind: type) -> Callable[[object], bool]:
    return lambda message: (
        isinstance(message, wire.Events) and any(isinstance(e, kind) for _, e in message.events)
    )


@pytest.mark.slow
def test_while_it_imports(engine: Engine):
    engine.hang_up()


def test_while_it_loads(engine: Engine):
    engine.load()
    engine.until(lambda message: isinstance(message, wire.LoadProgress))
    engine.hang_up()


def test_while_it_prefills(engine: Engine):
    engine.load()
    engine.until(lambda message: isinstance(message, wire.Loaded))
    for id in range(1, 7):
        engine.generate(id, BLOCK * 20, 1)
    engine.until(event(Progress))
    engine.hang_up()


@pytest.mark.slow
def test_while_it_decodes_and_writes(engine: Engine):
    engine.load()
    engine.until(lambda message: isinstance(message, wire.Loaded))
    for id in range(1, 5):
        engine.generate(id, BLOCK, 2000)
    engine.until(event(TextDelta))
    engine.until(lambda message: isinstance(message, wire.Stored))
    engine.hang_up()
    # What was computed is flushed for a moment.
    assert list(engine.cold.rglob("*.safetensors"))


JUDGES = """
import time
from pathlib import Path
from omlxd.engine import __main__
from omlxd.engine.mlx_adapter.attention import backend
from omlxd.engine.mlx_adapter.metal import rule
from omlxd.engine.mlx_adapter.metal.backend import MetalBackend
from omlxd.engine.server import host

def load_model(load, *group):
    backend._current.use_kernel_folder(Path(load.cache.cold_dir) / "kernels")
    rule.judged(rule.Case("a kernel", "", lambda: time.sleep(1000), lambda: (), 1.0))

backend._current, host.load_model = MetalBackend(), load_model
__main__.main()
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["hangs up", "SIGTERM", "SIGKILL"])
def test_a_stop_is_no_fault_of_the_kernel_that_is_judged(how: str, tmp_path: Path):
    """Its note goes, unless nobody could take it back."""
    engine = Engine(tmp_path, "-c", JUDGES)
    try:
        engine.load()
        wait_until(lambda: [*tmp_path.glob("kernels/judging-*")])
        if how == "hangs up":
            engine.hang_up()
        else:
            engine.process.send_signal(signal.Signals[how])
            engine.process.wait(GONE_S)
        assert len([*tmp_path.glob("kernels/judging-*")]) == (how == "SIGKILL")
    finally:
        engine.process.kill()
        engine.process.wait()
        engine.socket.close()


@pytest.mark.slow
def test_while_nobody_reads_what_it_sends(engine: Engine):
    """Its sends block; the end of the socket ends them."""
    engine.load()
    engine.until(lambda message: isinstance(message, wire.Loaded))
    for id in range(1, 9):
        engine.generate(id, 4, 2000)
    time.sleep(1.0)
    engine.hang_up()


# --------------------------------------------------------------------------- SIGKILL for the daemon


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux ends children with their parent")
def test_a_stopped_engine_goes_with_its_daemon(tmp_path: Path):
    with Daemon(tmp_path) as daemon:
        engine = psutil.Process(daemon.engine_pid())
        engine.suspend()
        try:
            wait_until(lambda: engine.status() == psutil.STATUS_STOPPED)
            daemon.kill()  # Fails if its engine outlives it.
        finally:
            with contextlib.suppress(psutil.NoSuchProcess):
                engine.kill()


@pytest.mark.parametrize(
    ("moment", "deaf"),
    rest_slow(
        [*((moment, True) for moment in MOMENTS), ("prefill", False), ("writing", False)], ("prefill", False)
    ),
)
def test_the_daemon_is_killed_while_its_engine_works(tmp_path: Path, moment: str, deaf: bool):
    """The engine's own thread stands still meanwhile, as in a kernel that hangs; `deaf`: no signal comes."""
    dying = Dying(tmp_path, deaf=deaf)
    with dying.daemon as daemon:
        dying.stop_at(moment)
        Asking(daemon, BASE if moment in ("decode", "restoring") else prose(400, seed=5), stream=True)
        wait_until(dying.stands, READY_S, daemon.logged)
        engine = psutil.Process(dying.engine())
        assert alive(engine) and engine.pid in [child.pid for child in daemon.front().children()]
        daemon.kill()  # Fails if its engine outlives it.
        assert not alive(engine)
    (dying.folder / "there").unlink()
    with Daemon(tmp_path, "--paged-ssd-cache-max-size", str(CAP)) as daemon:
        again = daemon.messages(BASE, max_tokens=20)
        assert restored(own_usage(again)) > 0 and again["content"] == dying.base["content"]
        wait_until(lambda: settled(daemon), why=lambda: unsettled(daemon))
        assert all_on_disk(dying.cache) <= CAP and daemon.stop() == 0
