"""A real `omlxd serve` over a real model, for tests that speak HTTP: start, ask, kill, start again.

The tiny stub engine of test_serve.py tests the daemon's life; here every prompt is computed.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import httpx
import pretend_metal
import psutil

from omlxd.common.stacks import SIGNAL
from omlxd.models.demo import build_demo

REPO = Path(__file__).resolve().parents[2]
BLOCK = 64
"""Tokens in a cache block, the daemon's default."""
NO_END = {"4089": -100, "4091": -100}
"""A bias against the tokens that end the demo's turn."""
READY_S = 120.0
PATIENCE_S = 60.0
"""Seconds that a test waits for what another process or thread does: no measure of speed."""


@functools.cache
def demo_model() -> Path:
    """The demo model, built once a test session."""
    return build_demo(session_folder() / "omlxd-demo")


def demo_model_with(template: str, folder: Path) -> Path:
    """A copy of the demo model at `folder`, with another chat template."""
    shutil.copytree(demo_model(), folder)
    config = folder / "tokenizer_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"chat_template": template}))
    (folder / "omlxd_demo.json").unlink()  # Or it would be built anew.
    return folder


@functools.cache
def family_model(name: str) -> Path:
    """A tiny model of tests/support/families.py, built once a test session."""
    from families import build_family

    return build_family(name, session_folder() / name)


@functools.cache
def session_folder() -> Path:
    """A folder that goes away with the test session."""
    folder = Path(tempfile.mkdtemp(prefix="omlxd-tests-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def prose(words: int, seed: int = 0) -> str:
    """Text of `words` words, another for each seed from its first word on: about 4 tokens a word."""
    return " ".join(f"{chr(97 + (seed + i) % 26)}ine {(seed * 7919 + i * 31) % 997}" for i in range(words))


class Daemon:
    """A running daemon with a home of its own; a context manager that leaves no process behind.

    home     base path; a second daemon on the same one finds the first one's cache
    model    model folder; None: the demo model
    env      further variables
    wrapper  a program and arguments to run it under
    transport  how its clients reach it; None: over this host's loopback
    wait     return only once the model is loaded
    """

    def __init__(
        self,
        home: Path,
        *flags: str,
        model: Path | None = None,
        env: Mapping[str, str] | None = None,
        wrapper: tuple[str, ...] = (),
        wait: bool = True,
        transport: httpx.BaseTransport | None = None,
    ):
        self.home = home
        home.mkdir(parents=True, exist_ok=True)
        self.model_folder = model or demo_model()
        self._log_path = home / f"log-{time.monotonic_ns()}.txt"
        self._log = self._log_path.open("w")
        environ = {name: value for name, value in os.environ.items() if not name.startswith("OMLXD_")}
        environ |= {"PYTHONPATH": pretend_metal.code_path(), "HOME": str(home), "OMLXD_SEED": "0"}
        # Another BLAS rounds otherwise on each processor: texts of random weights would differ.
        environ |= {"OMLXD_CPU_BLAS": "off", "OMLXD_KEEP_AWAKE": "off", **(env or {})}
        serve = ["-m", "omlxd", "serve", "--port", "0", "--base-path", str(home / "omlxd")]
        self.process = subprocess.Popen(
            [*wrapper, sys.executable, *serve, "--model", str(self.model_folder), *flags],
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )
        assert self.process.stdout is not None
        found = re.search(r"listening on (http://\S+) \(model (.*)\)", self.process.stdout.readline())
        if not found:
            self.close()
            raise RuntimeError(f"the daemon did not start: {self.logged()}")
        self.url, self.model = found[1], found[2]
        self.http = _Client(self, base_url=self.url, timeout=300, trust_env=False, transport=transport)
        if wait:
            self.wait_ready()

    @property
    def cache(self) -> Path:
        """The cache dir, unless a flag names another one."""
        return self.home / "omlxd" / "cache"

    def __enter__(self) -> Daemon:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ----------------------------------------------------------------- asking

    def messages(self, *turns: Any, max_tokens: int = 8, **more: Any) -> dict[str, Any]:
        """The answer of /v1/messages, greedy. A turn is a text (of the user) or a whole message."""
        return self._ask("/v1/messages", turns, max_tokens, more)

    def chat(self, *turns: Any, max_tokens: int = 8, **more: Any) -> dict[str, Any]:
        """The answer of /v1/chat/completions, greedy."""
        return self._ask("/v1/chat/completions", turns, max_tokens, more)

    def _ask(self, path: str, turns: tuple[Any, ...], max_tokens: int, more: dict[str, Any]) -> Any:
        answer = self.post(path, body(self.model, *turns, max_tokens=max_tokens, **more))
        assert answer.status_code == 200, answer.text
        return answer.json()

    def post(self, path: str, content: Any, **options: Any) -> httpx.Response:
        """POST bytes as they are, or anything else as JSON."""
        if isinstance(content, bytes):
            return self.http.post(path, content=content, **options)
        return self.http.post(path, json=content, **options)

    def stream(self, path: str, content: dict[str, Any]):
        """A streamed answer, as httpx streams it: a context manager."""
        return self.http.stream("POST", path, json={**content, "stream": True})

    def figure(self, name: str) -> float:
        """One of the engine's own figures, as it is at this moment."""
        return self.figures()[name]

    def figures(self) -> dict[str, float]:
        """All of them, said by the engine after this was called: it may be slow to answer."""
        found: dict[str, float] = {}

        def fresh() -> bool:
            model = self.http.get("/omlxd/status").json()["models"][0]
            found.clear()
            found.update(model["values"])
            return model["state"] == "ready" and not model.get("values_age_s")

        wait_until(fresh, why=self.logged)
        return found

    def metrics(self) -> str:
        """The page of /metrics, with what the engine says of itself at this moment."""
        pages: list[str] = []
        stale = re.compile(r"^omlxd_engine_figures_age_seconds\S* (?!0\.0$)", re.M)

        def fresh() -> bool:
            answer = self.http.get("/metrics")
            assert answer.status_code == 200, answer.text
            pages.append(answer.text)
            return not stale.search(answer.text)

        wait_until(fresh, why=self.logged)
        return pages[-1]

    def settled(self) -> None:
        """Return once nothing runs in the engine, and no block is on its way to disk."""
        names = (
            "num_requests_running",
            "num_requests_waiting",
            "kv_unwritten_blocks",
            "kv_store_queue_bytes",
        )
        # Twice: what is between two of these places at one look is in one of them at the next.
        for _ in range(2):
            wait_until(lambda: not any(map(self.figures().__getitem__, names)), why=self.logged)

    def state(self) -> str:
        return self.http.get("/health").json()["models"][0]["state"]

    def wait_ready(self) -> None:
        wait_until(lambda: self.state() == "ready", READY_S, self.show_stacks)

    def logged(self) -> str:
        return self._log_path.read_text()

    def show_stacks(self) -> str:
        """Its log, with where its processes stand now at the end."""
        for pid in [self.process.pid, *self.engines()]:
            os.kill(pid, SIGNAL)
        time.sleep(2.0)
        return self.logged()

    # ----------------------------------------------------------------- its processes

    def engine_pid(self) -> int:
        (pid,) = self.engines()
        return pid

    def engines(self) -> list[int]:
        """Process ids of engines; of none while a model is looked for, or after one died."""
        found = []
        for child in self.front().children():
            with contextlib.suppress(psutil.NoSuchProcess):
                if "omlxd.engine" in child.cmdline():
                    found.append(child.pid)
        return found

    def kill_engine(self) -> None:
        """SIGKILL to the one engine. Returns once the daemon knows; it may be up again by then."""
        before = self._engine_ends()
        os.kill(self.engine_pid(), signal.SIGKILL)
        wait_until(lambda: self._engine_ends() > before, why=self.logged)

    def _engine_ends(self) -> float:
        page = self.http.get("/metrics").text
        return sum(map(float, re.findall(r"^omlxd_engine_restarts_total\S* (\S+)$", page, re.M)))

    def front(self) -> psutil.Process:
        return psutil.Process(self.process.pid)

    def kill(self) -> None:
        """SIGKILL the front alone, as a crash would; fails if its engine outlives it."""
        family = self._family()
        self.process.kill()
        self.process.wait()
        wait_until(
            lambda: not any(map(alive, family)), PATIENCE_S, lambda: f"alive: {[*filter(alive, family)]}"
        )

    def _family(self) -> list[psutil.Process]:
        return self.front().children(recursive=True)

    def stop(self, timeout: float = PATIENCE_S) -> int:
        """SIGTERM; the exit status."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout)

    def close(self) -> None:
        """End whatever still runs."""
        if self.process.poll() is None:
            family = self._family()
            self.process.kill()
            self.process.wait()
            deadline = time.monotonic() + 10.0
            while any(map(alive, family)) and time.monotonic() < deadline:
                time.sleep(0.02)
            for process in filter(alive, family):
                process.kill()
        assert self.process.stdout is not None
        self.process.stdout.close()
        self._log.close()
        if hasattr(self, "http"):
            self.http.close()


class _Client(httpx.Client):
    """Says where the daemon stands when an answer does not come."""

    def __init__(self, daemon: Daemon, **options: Any):
        super().__init__(**options)
        self._daemon = daemon

    def send(self, request: httpx.Request, **options: Any) -> httpx.Response:
        try:
            return super().send(request, **options)
        except httpx.ReadTimeout as error:
            error.add_note(self._daemon.show_stacks())
            raise


def alive(process: psutil.Process) -> bool:
    """Whether it runs; one that ended and that nobody has waited for does not."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def body(model: str, *turns: Any, max_tokens: int = 8, **more: Any) -> dict[str, Any]:
    """A greedy request that both chat protocols take."""
    messages = [{"role": "user", "content": turn} if isinstance(turn, str) else turn for turn in turns]
    return {"model": model, "messages": messages, "max_tokens": max_tokens, "temperature": 0, **more}


def own_usage(answer: dict[str, Any]) -> dict[str, Any]:
    """The part of an answer's usage that every protocol carries alike."""
    return answer["usage"]["omlxd"]


def restored(usage: dict[str, Any]) -> int:
    """Of an engine's first request: the prompt tokens that came from SSD.

    They count as hot if it comes late: an idle engine reads what was used last into RAM (newest.py).
    """
    return usage["cached_hot"] + usage["cached_cold"]


def free_port(family: int = socket.AF_INET) -> int:
    """A port of loopback that is free, and that no other program is given unless it asks for it."""
    host = "::1" if family == socket.AF_INET6 else "127.0.0.1"
    for port in random.SystemRandom().sample(range(20_000, 30_000), 100):
        with contextlib.suppress(OSError), socket.create_server((host, port), family=family):
            return port
    raise OSError("no port of 100 is free")


def wait_until(
    true: Callable[[], bool], seconds: float = PATIENCE_S, why: Callable[[], str] = lambda: "not in time"
) -> None:
    """Return as soon as it is `true`; never less than PATIENCE_S, since a machine may be busy."""
    seconds = max(seconds, PATIENCE_S)
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, why()
        time.sleep(0.02)
