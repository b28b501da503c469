"""A daemon of this checkout, that can be killed and started again."""

from __future__ import annotations

import json
import shlex
import sys
import time
import urllib.request
from pathlib import Path

from daemon_process import end_daemon, start_daemon

ENGINE = Path(__file__).with_name("scripted_engine.py")
START_S = 120.0


class OwnDaemon:
    """A context manager; `home` is the base path, its log is `home`/daemon.log.

    model   folder of a model whose logits a script overrides; None: the demo model, left alone
    played  the scripted engine's log
    """

    def __init__(self, home: Path, model: Path | None, *flags: str, port: int = 0):
        home.mkdir(parents=True, exist_ok=True)
        self._home = home
        self._scripted = model is not None
        self._arguments = [*(["--model", str(model)] if model else []), *flags]
        self._port = port
        self.played = home / "played.jsonl"
        self.url = ""

    def __enter__(self) -> OwnDaemon:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait()
        end_daemon(self._process)

    def start(self) -> None:
        """Start it and wait for the model. Raises RuntimeError, leaving no process behind."""
        log, scripts = self._home / "daemon.log", {}
        if self._scripted:
            scripts["OMLXD_ENGINE_COMMAND"] = shlex.join([sys.executable, str(ENGINE)])
            scripts["OMLXD_SCRIPT_LOG"] = str(self.played)
        flags = ["--base-path", str(self._home), *self._arguments, "--port", str(self._port)]
        self._process, self.url = start_daemon(log, *flags, **scripts)
        self._port = int(self.url.rpartition(":")[2])
        try:
            deadline = time.monotonic() + START_S
            while states(self.url) != ["ready"]:
                if time.monotonic() > deadline or self._process.poll() is not None:
                    raise RuntimeError(f"the model was not loaded: see {log}")
                time.sleep(0.1)
        except BaseException:
            end_daemon(self._process)
            raise

    def kill_and_restart(self) -> None:
        """SIGKILL, then a new daemon on the same port and the same cache."""
        end_daemon(self._process)
        self.start()


def states(url: str) -> list[str]:
    """The state of each model. Raises OSError."""
    return [model["state"] for model in _get(url + "/health")["models"]]


def first_model(url: str) -> str:
    """The name of the first model that a daemon serves. Raises OSError."""
    return _get(url + "/v1/models")["data"][0]["id"]


def _get(url: str):
    # No proxy of the environment's may stand before the loopback.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(url, timeout=10) as answer:
        return json.load(answer)
