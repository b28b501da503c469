"""`omlxd serve` over two models in a folder of its own, which may be a small file system."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from pathlib import Path

import httpx
import psutil
from daemon_process import REPO, end_daemon, start_daemon

MODELS = ("first", "second")
STALL_S = 4
ANSWER_S = 60.0


class Daemon:
    """`answer_s`: how long anybody waits for an answer. `variables`: of its environment."""

    def __init__(
        self, home: Path, ttl: str, answer_s: float = ANSWER_S, stall_s: int = STALL_S, **variables: str
    ):
        self.home = home
        self.answer_s = answer_s
        self.cache = home / "cache"
        flags = ["--model-dir", str(home / "models"), "--base-path", str(home), "--port", "0"]
        flags += ["--paged-ssd-cache-dir", str(self.cache), "--paged-ssd-cache-max-size", "200MB"]
        flags += ["--hot-cache-max-size", "50MB", "--model-ttl", ttl, "--stall-timeout", f"{stall_s}s"]
        own = {"HOME": str(home), "HF_HUB_CACHE": str(home / "hub")} | variables
        self.process, self.url = start_daemon(home / "log.txt", *flags, **own)
        self.front = psutil.Process(self.process.pid)

    def engines(self) -> list[psutil.Process]:
        found = []
        for child in self.front.children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if "omlxd.engine" in child.cmdline():
                    found.append(child)
        return found

    def post(self, path: str, content: object) -> httpx.Response:
        return httpx.post(self.url + path, json=content, timeout=self.answer_s, trust_env=False)

    def stop(self) -> int:
        self.process.terminate()
        try:
            return self.process.wait(120)
        finally:
            end_daemon(self.process)


def build_models(folder: Path) -> None:
    """The demo model twice; another context makes the second one another namespace."""
    for name, context in zip(MODELS, (32768, 16384), strict=True):
        target = folder / name
        if target.exists():
            continue
        command = [sys.executable, "-m", "omlxd.models.demo", str(target)]
        subprocess.run(command, check=True, cwd=REPO, stdout=subprocess.DEVNULL)
        config = json.loads((target / "config.json").read_text())
        config["max_position_embeddings"] = context
        (target / "config.json").write_text(json.dumps(config))


def mount_small(folder: Path) -> bool:
    """A file system of 80 MB at `folder`, where this user may."""
    folder.mkdir(parents=True, exist_ok=True)
    command = ["mount", "-t", "tmpfs", "-o", "size=80m", "tmpfs", str(folder)]
    try:
        return subprocess.run(command, capture_output=True, timeout=10).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False
