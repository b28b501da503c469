#!/usr/bin/env python3
"""Two models under mixed traffic while engines are killed, stopped and unloaded, and the disk fills up.

    python3 tools/soak.py --minutes 30

Every request must get a proper answer: 200, whole, or an error that says when to try again. At the
end it prints how memory, files, descriptors and processes grew, and exits with 1 if an answer was
improper, or if something grew more than `BOUNDS` allow. Random, but `--seed` gives the same order.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil

REPO = Path(__file__).resolve().parents[1]
MODELS = ("first", "second")
CLIENTS = 4
SAMPLE_S = 1.0
STALL_S = 4
ANSWER_S = 60.0
BOUNDS = {"front MB": 1.0, "front descriptors": 0.5, "processes": 0.2}
"""Growth a minute over the last two thirds of a run of 5 minutes or more."""
SHORT_BOUNDS = {"front MB": 100.0, "front descriptors": 200.0, "processes": 40.0}
"""The same for a shorter one, whose slope is mostly noise: two engines that start in its second half
are 10 processes a minute."""


@dataclass
class Report:
    """What came of it. `improper`: answers that were none, in words."""

    answers: Counter[str] = field(default_factory=Counter)
    events: Counter[str] = field(default_factory=Counter)
    improper: list[str] = field(default_factory=list)
    slopes: dict[str, float] = field(default_factory=dict)
    ends: dict[str, str] = field(default_factory=dict)

    def text(self, seconds: float) -> str:
        lines = [f"{seconds:.0f} s, {sum(self.answers.values())} requests"]
        lines += [f"  {count:6d}  {what}" for what, count in sorted(self.answers.items())]
        lines += ["what was done to it:"] + [f"  {n:6d}  {what}" for what, n in sorted(self.events.items())]
        lines += ["growth a minute:"] + [f"  {slope:+9.3f}  {what}" for what, slope in self.slopes.items()]
        lines += ["at the end:"] + [f"  {what}: {value}" for what, value in self.ends.items()]
        return "\n".join(lines + [f"IMPROPER: {problem}" for problem in self.improper[:20]])


class Daemon:
    """`omlxd serve` over two models in a folder of their own."""

    def __init__(self, home: Path, ttl: str):
        self.home = home
        self.cache = home / "cache"
        self._log = (home / "log.txt").open("a")
        environ = {name: value for name, value in os.environ.items() if not name.startswith("OMLXD_")}
        environ |= {"PYTHONPATH": str(REPO), "HOME": str(home), "HF_HUB_CACHE": str(home / "hub")}
        flags = ["--model-dir", str(home / "models"), "--base-path", str(home), "--port", "0"]
        flags += ["--paged-ssd-cache-dir", str(self.cache), "--paged-ssd-cache-max-size", "200MB"]
        flags += ["--hot-cache-max-size", "50MB", "--model-ttl", ttl, "--stall-timeout", f"{STALL_S}s"]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "omlxd", "serve", *flags],
            env=environ,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )
        assert self.process.stdout is not None
        found = re.search(r"listening on (http://\S+)", self.process.stdout.readline())
        if not found:
            raise RuntimeError(f"the daemon did not start: see {home / 'log.txt'}")
        self.url = found[1]
        self.front = psutil.Process(self.process.pid)

    def engines(self) -> list[psutil.Process]:
        found = []
        for child in self.front.children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if "omlxd.engine" in child.cmdline():
                    found.append(child)
        return found

    def post(self, path: str, content: object) -> httpx.Response:
        return httpx.post(self.url + path, json=content, timeout=ANSWER_S, trust_env=False)

    def stop(self) -> int:
        self.process.terminate()
        try:
            return self.process.wait(40)
        finally:
            self.process.kill()
            assert self.process.stdout is not None
            self.process.stdout.close()
            self._log.close()


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


# --------------------------------------------------------------------------- traffic


class Client(threading.Thread):
    """Asks, checks the answer, asks again; its conversation grows for a while, then begins anew."""

    def __init__(self, daemon: Daemon, seed: int, report: Report, stop: threading.Event):
        super().__init__(daemon=True)
        self._daemon_ = daemon
        self._random = random.Random(seed)
        self._report = report
        self._stopping = stop
        self._turns: list[dict[str, str]] = []

    def run(self) -> None:
        with httpx.Client(base_url=self._daemon_.url, timeout=ANSWER_S, trust_env=False) as http:
            while not self._stopping.is_set():
                path, content = self._request()
                try:
                    outcome = self._ask(http, path, content)
                except Exception as error:
                    if self._stopping.is_set():
                        return
                    outcome = f"no answer: {type(error).__name__}"
                    self._report.improper.append(f"{path} {type(error).__name__}: {error}")
                self._report.answers[outcome] += 1
                if outcome.startswith("retry"):
                    time.sleep(0.3)

    def _request(self) -> tuple[str, dict[str, object]]:
        chance = self._random
        if len(self._turns) > 12:
            self._turns = []
        words = " ".join(
            chance.choice(("kettle", "saucer", "spoon", "cup")) for _ in range(chance.randint(5, 300))
        )
        path = chance.choice(("/v1/messages", "/v1/chat/completions", "/v1/completions"))
        content: dict[str, object] = {
            "model": chance.choice((*MODELS, MODELS[0], "claude-sonnet-4-5")),
            "max_tokens": chance.choice((1, 8, 40)),
            "stream": chance.random() < 0.6,
            "temperature": 0,
        }
        if path == "/v1/completions":
            content["prompt"] = words
        else:
            self._turns.append({"role": "user", "content": words})
            content["messages"] = list(self._turns)
            self._turns.append({"role": "assistant", "content": "yes"})
        if chance.random() < 0.03:
            content["keep_alive"] = 0
        return path, content

    def _ask(self, http: httpx.Client, path: str, content: dict[str, object]) -> str:
        leaves = self._random.random() < 0.1
        with http.stream("POST", path, json=content) as answer:
            if answer.status_code != 200:
                answer.read()
                return self._refused(path, answer)
            if leaves:
                return "left in the middle"
            text = answer.read().decode()
        if not content["stream"]:
            json.loads(text)
            return "200"
        if '"error"' in text.rstrip().rsplit("\n\n", 1)[-1]:
            return "retry: error event"
        ended = "message_stop" in text if path == "/v1/messages" else text.rstrip().endswith("data: [DONE]")
        if not ended:
            self._report.improper.append(f"{path}: a stream without an end: …{text[-200:]!r}")
            return "improper"
        return "200 streamed"

    def _refused(self, path: str, answer: httpx.Response) -> str:
        error = answer.json().get("error", {})
        if answer.status_code in (503, 529) and "retry-after" in answer.headers and error.get("message"):
            return f"retry: {answer.status_code}"
        self._report.improper.append(f"{path}: {answer.status_code} {answer.text[:200]}")
        return f"improper: {answer.status_code}"


# --------------------------------------------------------------------------- trouble


class Trouble:
    """What is done to the daemon while it works. Each method is one kind of it."""

    def __init__(self, daemon: Daemon, chance: random.Random, report: Report):
        self._daemon = daemon
        self._chance = chance
        self._report = report
        self._full: Callable[[], None] | None = None

    def one(self) -> None:
        what = self._chance.choice((self.kill, self.kill, self.freeze, self.unload, self.load, self.reload))
        with contextlib.suppress(psutil.Error, httpx.HTTPError, IndexError):  # None runs now.
            what()
            self._report.events[what.__name__] += 1

    def kill(self) -> None:
        number = self._chance.choice((signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT, signal.SIGTERM))
        self._chance.choice(self._daemon.engines()).send_signal(number)

    def freeze(self) -> None:
        self._chance.choice(self._daemon.engines()).suspend()

    def unload(self) -> None:
        self._daemon.post("/omlxd/models/unload", {"model": self._chance.choice(MODELS)})

    def load(self) -> None:
        self._daemon.post("/omlxd/models/load", {"model": self._chance.choice(MODELS), "keep_alive": "5s"})

    def reload(self) -> None:
        self._daemon.process.send_signal(signal.SIGHUP)

    @contextlib.contextmanager
    def full_disk(self) -> Iterator[None]:
        """Nothing can be written to the cache: a small file system is filled, else folders become files."""
        self._report.events["full disk"] += 1
        if os.path.ismount(self._daemon.cache):
            ballast = self._daemon.cache / "ballast"
            with contextlib.suppress(OSError), ballast.open("wb", buffering=0) as file:
                while True:
                    file.write(bytes(1 << 16))
            try:
                yield
            finally:
                ballast.unlink(missing_ok=True)
            return
        blocked = [
            entry for entry in self._daemon.cache.iterdir() if re.fullmatch(r"[0-9a-f]{32}", entry.name)
        ]
        for folder in blocked:
            folder.rename(folder.with_name("aside-" + folder.name))
            folder.write_bytes(b"")
        try:
            yield
        finally:
            for folder in blocked:
                folder.unlink(missing_ok=True)
                folder.with_name("aside-" + folder.name).rename(folder)


def mount_small(folder: Path) -> bool:
    """A file system of 80 MB at `folder`, where this user may."""
    folder.mkdir(parents=True, exist_ok=True)
    command = ["mount", "-t", "tmpfs", "-o", "size=80m", "tmpfs", str(folder)]
    try:
        return subprocess.run(command, capture_output=True, timeout=10).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


# --------------------------------------------------------------------------- growth


class Sampler:
    """Figures of the daemon over time, and how they grew."""

    def __init__(self, daemon: Daemon):
        self._daemon = daemon
        self._rows: list[tuple[float, dict[str, float]]] = []

    def take(self) -> None:
        front = self._daemon.front
        with contextlib.suppress(psutil.Error):
            children = front.children(recursive=True)
            row = {
                "front MB": front.memory_info().rss / 1e6,
                "front descriptors": float(front.num_fds()),
                "processes": float(len(children)),
                "engines MB": sum(_rss(child) for child in children) / 1e6,
                "cache files": float(sum(len(files) for _, _, files in os.walk(self._daemon.cache))),
            }
            self._rows.append((time.monotonic(), row))

    def slopes(self) -> dict[str, float]:
        """Growth a minute of each figure, over the last two thirds; a least-squares line."""
        rows = self._rows[len(self._rows) // 3 :]
        if len(rows) < 3:
            return {}
        return {name: _slope([(at / 60, row[name]) for at, row in rows]) for name in rows[0][1]}

    def last(self) -> dict[str, str]:
        return {name: f"{value:.0f}" for name, value in self._rows[-1][1].items()} if self._rows else {}


def _rss(process: psutil.Process) -> int:
    with contextlib.suppress(psutil.Error):
        return process.memory_info().rss
    return 0


def _slope(points: list[tuple[float, float]]) -> float:
    mean_x = sum(x for x, _ in points) / len(points)
    mean_y = sum(y for _, y in points) / len(points)
    width = sum((x - mean_x) ** 2 for x, _ in points)
    return sum((x - mean_x) * (y - mean_y) for x, y in points) / width if width else 0.0


# --------------------------------------------------------------------------- the run


def soak(home: Path, seconds: float, seed: int = 0, every_s: float = 4.0) -> Report:
    """Run it in `home`, an empty folder; trouble comes every `every_s` seconds or so."""
    report, stop = Report(), threading.Event()
    build_models(home / "models")
    mounted = mount_small(home / "cache")
    report.events["cache on a small file system" if mounted else "cache on the common file system"] += 1
    daemon = Daemon(home, ttl="3s")
    try:
        _run(daemon, seconds, random.Random(seed), report, stop, every_s)
        family = daemon.front.children(recursive=True)
        report.ends["exit status"] = str(daemon.stop())
        left = [process.pid for process in family if process.is_running()]
        if left or report.ends["exit status"] != "0":
            report.improper.append(f"exit status {report.ends['exit status']}, processes left: {left}")
    finally:
        stop.set()
        daemon.process.kill()
        if mounted:
            subprocess.run(["umount", "-l", str(home / "cache")], check=False)
    bounds = BOUNDS if seconds >= 300 else SHORT_BOUNDS
    for name, bound in bounds.items():
        if report.slopes.get(name, 0.0) > bound:
            report.improper.append(f"{name} grew by {report.slopes[name]:.2f} a minute; the bound is {bound}")
    return report


def _run(
    daemon: Daemon,
    seconds: float,
    chance: random.Random,
    report: Report,
    stop: threading.Event,
    every_s: float,
) -> None:
    clients = [Client(daemon, chance.randrange(10**9), report, stop) for _ in range(CLIENTS)]
    sampler, trouble = Sampler(daemon), Trouble(daemon, chance, report)
    for client in clients:
        client.start()
    began = time.monotonic()
    next_trouble, disk = began + every_s, contextlib.ExitStack()
    while (now := time.monotonic()) - began < seconds:
        sampler.take()
        done = (now - began) / seconds
        if done > 0.4 and "full disk" not in report.events:
            disk.enter_context(trouble.full_disk())
        elif done > 0.6:
            disk.close()
        if now >= next_trouble:
            trouble.one()
            next_trouble = now + chance.uniform(0.3, 1.7) * every_s
        time.sleep(SAMPLE_S)
    disk.close()
    stop.set()
    for client in clients:
        client.join(ANSWER_S)
        if client.is_alive():
            report.improper.append("a client never got its answer")
    report.slopes, report.ends = sampler.slopes(), sampler.last()
    for model in MODELS:
        _serves_again(daemon, model, report)


def _serves_again(daemon: Daemon, model: str, report: Report) -> None:
    """After all that, each model answers; one engine may still be frozen or in its backoff."""
    deadline = time.monotonic() + ANSWER_S
    while time.monotonic() < deadline:
        answer = daemon.post("/v1/completions", {"model": model, "prompt": "kettle", "max_tokens": 2})
        if answer.status_code == 200:
            return
        time.sleep(0.5)
    report.improper.append(f"{model} does not serve at the end: {answer.text[:200]}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--home", type=Path, help="folder to run in, kept; default: a temporary one")
    args = parser.parse_args()
    home = args.home or Path(tempfile.mkdtemp(prefix="omlxd-soak-"))
    home.mkdir(parents=True, exist_ok=True)
    try:
        report = soak(home, args.minutes * 60, args.seed)
    finally:
        if args.home is None:
            shutil.rmtree(home, ignore_errors=True)
    print(report.text(args.minutes * 60))
    return 1 if report.improper else 0


if __name__ == "__main__":
    sys.exit(main())
