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
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import psutil
from soaking.growth import Sampler
from soaking.leaks import left_of, processes_of, temporary_files
from soaking.own_daemon import ANSWER_S, MODELS, Daemon, build_models, mount_small
from soaking.report import Report
from soaking.traffic import Client
from soaking.trouble import Trouble

CLIENTS = 4
SAMPLE_S = 1.0
START_S = 10.0
"""How long a process may live on after the daemon: one that is still importing its modules sees the end of
its engine only then."""
BOUNDS = {"front MB": 1.0, "front descriptors": 0.5, "front sockets": 0.5, "processes": 0.2}
"""Growth a minute over the last two thirds of a run of 5 minutes or more."""
SHORT_BOUNDS = {"front MB": 100.0, "front descriptors": 200.0, "front sockets": 200.0, "processes": 40.0}
"""The same for a shorter one, whose slope is mostly noise: two engines that start in its second half
are 10 processes a minute."""


def soak(
    home: Path, seconds: float, seed: int = 0, every_s: float = 4.0, answer_s: float = ANSWER_S
) -> Report:
    """Run it in `home`, an empty folder; trouble comes every `every_s` seconds or so."""
    report, stop = Report(), threading.Event()
    build_models(home / "models")
    mounted = mount_small(home / "cache")
    report.events["cache on a small file system" if mounted else "cache on the common file system"] += 1
    daemon = Daemon(home, "3s", answer_s)
    sampler = Sampler(daemon)
    try:
        _run(daemon, sampler, seconds, random.Random(seed), report, stop, every_s)
        report.ends["exit status"] = status = str(daemon.stop())
        report.ends["left of it"] = left = _left(home, sampler.shared_memory, whole=mounted)
        if status != "0" or left != "nothing":
            report.improper.append(f"exit status {status}; left of it: {left}")
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


def _left(home: Path, shared_memory: set[str], whole: bool) -> str:
    """What the daemon left, in words. `whole`: its folders were never set aside to make the disk fail."""
    deadline = time.monotonic() + START_S
    while processes_of(home) and time.monotonic() < deadline:
        time.sleep(0.1)
    left = [_described(process) for process in processes_of(home)]
    left += left_of(shared_memory)
    left += [str(path) for path in temporary_files(home / "cache") if whole]
    return ", ".join(left) or "nothing"


def _described(process: psutil.Process) -> str:
    """Which one, how old it is and who its parent is: enough to find out why it stayed."""
    try:
        age = time.time() - process.create_time()
        command = " ".join(process.cmdline())
        return f"process {process.pid} ({process.status()}, {age:.0f} s old, of {process.ppid()}: {command})"
    except psutil.Error:
        return f"process {process.pid}"


def _run(
    daemon: Daemon,
    sampler: Sampler,
    seconds: float,
    chance: random.Random,
    report: Report,
    stop: threading.Event,
    every_s: float,
) -> None:
    clients = [Client(daemon, chance.randrange(10**9), report, stop) for _ in range(CLIENTS)]
    trouble = Trouble(daemon, chance, report)
    for client in clients:
        client.start()
    began = time.monotonic()
    next_trouble, disk = began + every_s, contextlib.ExitStack()
    while (now := time.monotonic()) - began < seconds or "full disk" not in report.events:
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
        client.join(daemon.answer_s)
        if client.is_alive():
            report.improper.append("a client never got its answer")
    report.slopes, report.ends = sampler.slopes(), sampler.last()
    for model in MODELS:
        _serves_again(daemon, model, report)


def _serves_again(daemon: Daemon, model: str, report: Report) -> None:
    """After all that, each model answers; one engine may still be frozen or in its backoff."""
    deadline = time.monotonic() + daemon.answer_s
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
