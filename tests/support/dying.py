"""A daemon whose engine stands still at an exact moment (dying_engine.py), and requests that wait for it."""

from __future__ import annotations

import json
import shlex
import sys
import threading
import time
from pathlib import Path
from typing import Any

import httpx
from cold_files import settled, unsettled
from daemon import Daemon, body, prose, wait_until

CAP = 4_000_000
MOMENTS = ("loading", "prefill", "decode", "writing", "restoring")
BASE = prose(100)
"""What was asked before, and has to be warm afterwards."""


class Dying:
    """A daemon whose engine can be stopped at a moment; `base`: its answer to BASE, given before."""

    def __init__(self, home: Path, *flags: str, deaf: bool = False, model: Path | None = None):
        self.folder = home / "moments"
        self.folder.mkdir(parents=True)
        if deaf:
            (self.folder / "deaf").touch()
        program = [sys.executable, str(Path(__file__).with_name("dying_engine.py")), str(self.folder)]
        self.daemon = Daemon(
            home,
            *("--paged-ssd-cache-max-size", str(CAP), *flags),
            model=model,
            env={"OMLXD_ENGINE_COMMAND": shlex.join([*program, "omlxd.engine"])},
        )
        self.home, self.cache = home, self.daemon.cache
        try:
            self.base = self.daemon.messages(BASE, max_tokens=20)
            self.daemon.settled()
            wait_until(lambda: settled(self.daemon), why=lambda: unsettled(self.daemon))
        except BaseException:
            self.daemon.close()
            raise

    def stop_at(self, moment: str) -> None:
        """The engine, or its rank N at MOMENT@N, will stand still when it is there; a load is begun anew."""
        if moment.startswith(("loading", "restoring")):
            unloaded = self.daemon.post("/omlxd/models/unload", {"model": self.daemon.model})
            assert unloaded.status_code == 200
        for told in (*self.folder.glob("asked-*"), *self.folder.glob("cancelled-*")):
            told.unlink()
        (self.folder / "moment").write_text(moment)

    def stands(self) -> bool:
        return (self.folder / "there").exists()

    def engine(self) -> int:
        """Process id of the one that stands."""
        return int((self.folder / "there").read_text())

    def die_by(self, signal: str) -> float:
        """Let it die, or its GPU fail (`FAULT`); when it did, on the monotonic clock."""
        (self.folder / "there").unlink()
        (self.folder / ".go").write_text(signal)
        (self.folder / ".go").rename(self.folder / "go")
        wait_until(lambda: (self.folder / "died").exists(), 30)
        died = float((self.folder / "died").read_text())
        (self.folder / "died").unlink()
        return died

    def go_on(self) -> None:
        """Let it live: it does what it was about to do."""
        (self.folder / "there").unlink()
        (self.folder / ".go").write_text("SIGCONT")
        (self.folder / ".go").rename(self.folder / "go")
        wait_until(lambda: not (self.folder / "go").exists())

    def asked(self) -> int:
        """Requests that the engine has been sent since `stop_at`."""
        return len(list(self.folder.glob("asked-*")))

    def cancelled(self) -> int:
        """Those of them that it was told to leave."""
        return len(list(self.folder.glob("cancelled-*")))

    def status(self) -> dict[str, Any]:
        return self.daemon.http.get("/omlxd/status").json()

    def in_flight(self) -> int:
        """Requests that the engine has been sent since `stop_at`, or that wait until it is loaded."""
        (model,) = self.status()["models"]
        return self.asked() + model.get("waiting", 0)


class Asking(threading.Thread):
    """A request. `error`: what it was told, "" if it was answered; `ended`: when (monotonic). `heard`: a part
    of its answer has come."""

    def __init__(self, daemon: Daemon, prompt: str, *, stream: bool, max_tokens: int = 300):
        super().__init__(daemon=True)
        self._daemon_ = daemon
        self._content = body(daemon.model, prompt, max_tokens=max_tokens)
        self._stream = stream
        self.error, self.ended, self.heard = "", 0.0, False
        self.start()

    def run(self) -> None:
        try:
            self._ask()
        except httpx.HTTPError as error:  # The daemon itself was killed.
            self.error = f"lost: {error}"

    def _ask(self) -> None:
        if self._stream:
            with self._daemon_.stream("/v1/messages", self._content) as answer:
                if answer.status_code == 200:
                    events = list[str]()
                    for line in answer.iter_lines():
                        if line.startswith("data: "):
                            events.append(line[6:])
                            self.heard = self.heard or "content_block_delta" in line
                    self.ended = time.monotonic()
                    last = json.loads(events[-1])
                    if last["type"] == "error":
                        assert not any("message_stop" in event for event in events)
                        assert last["error"]["type"] == "overloaded_error"  # Which clients try again.
                        self.error = last["error"]["message"]
                    return
                answer.read()
        else:
            answer = self._daemon_.post("/v1/messages", self._content)
        self.ended = time.monotonic()
        if answer.status_code != 200:
            assert answer.status_code == 503 and 1 <= int(answer.headers["retry-after"]) <= 60
            assert answer.json()["error"]["type"] == "overloaded_error"
            self.error = answer.json()["error"]["message"]
