#!/usr/bin/env python3
"""A daemon of its own under attack from this machine: one kind after another, then a cache folder that hangs.

    python3 tools/attack.py --minutes 12

For each kind it prints /health at worst, MB of the front before, during and `--settle` seconds after it, and
bytes of the cache against the cap; of the slowest /health also, on Linux, how long the front's event loop ran
and waited for a processor in it. At the end, seconds from SIGTERM to the end. Loopback only. Exits with 1
if the daemon died, did not end, left its cap, or kept a file of an attacker.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from daemon_process import REPO
from soaking.attacks import Attacker, attacks
from soaking.own_daemon import MODELS, Daemon, build_models
from soaking.prober import Prober

CAP_BYTES = 200_000_000
"""`--paged-ssd-cache-max-size` of soaking/own_daemon.py."""
END_S, STALL_S = 30.0, 120
HANGING_DISK = Path(__file__).parent / "soaking" / "hanging_disk"


@dataclass(frozen=True)
class Run:
    daemon: Daemon
    prober: Prober

    def megabytes(self) -> float:
        return self.daemon.front.memory_info().rss / 1e6


def strange_files(home: Path) -> set[str]:
    """What an attacker may have put here, or above: all but logs."""
    evil = {str(path) for path in (home.parent / "evil", home / "evil", Path("/etc/evil")) if path.exists()}
    return evil | {str(path) for path in home.rglob("*") if path.suffix not in (".txt", ".log")}


def bytes_below(folder: Path) -> int:
    return sum(path.lstat().st_blocks * 512 for path in folder.rglob("*"))


async def attack_all(run: Run, names: list[str], attack_s: float, settle_s: float) -> bool:
    """Returns whether the cache stayed below its cap, and nothing of an attacker's was kept."""
    daemon, kept = run.daemon, True
    await Attacker(daemon.url).one_request()
    print(f"{'attack':24} {'/health':>8} {'MB':>5} {'peak':>5} {'after':>5} {'cache':>9}  answers")
    for name in names:
        attacker = Attacker(daemon.url)
        began, before, files = time.monotonic(), run.megabytes(), strange_files(daemon.home)
        try:
            await dict(attacks(attacker))[name](time.monotonic() + attack_s)
        except OSError as error:
            attacker.notes.append(f"the attack ended: {error}")
        await asyncio.sleep(settle_s)
        probes = run.prober.since(began)
        cached = bytes_below(daemon.cache)
        forged = sorted(strange_files(daemon.home) - files) if name == "hostile archives" else []
        kept &= cached <= CAP_BYTES and not forged
        worst = max(probes, key=lambda probe: probe.took_s)
        answers = ", ".join(f"{count} x {what}" for what, count in sorted(attacker.answers.items()))
        notes = [f"the front ran {worst.ran_s:.2f} s and waited {worst.waited_s:.2f} s for a processor in it"]
        notes += attacker.notes + [f"kept: {', '.join(forged)}"] * bool(forged)
        print(
            f"{name:24} {worst.took_s:6.2f} s {before:5.0f} {max(probe.rss for probe in probes) / 1e6:5.0f} "
            f"{run.megabytes():5.0f} {cached / 1e6:6.1f} MB  {'; '.join([answers, *notes])}",
            flush=True,
        )
    return kept


async def hang(run: Run, flag: Path) -> None:
    """Requests, hits and misses, after the cache's folder has stopped answering."""
    attacker = Attacker(run.daemon.url)
    await attacker.one_request(MODELS[1])
    await attacker.unload()
    flag.touch()
    began, waits = time.monotonic(), list[float]()
    for _ in range(2):
        for model in MODELS:
            for text in ("kettle ", "pot "):
                asked = time.monotonic()
                await attacker.one_request(model, text)
                waits.append(time.monotonic() - asked)
    worst = max(probe.took_s for probe in run.prober.since(began))
    said = ", ".join(f"{each:.1f}" for each in waits)
    print(f"a folder that hangs: {dict(attacker.answers)} after {said} s; /health {worst:.2f} s at worst")


def main() -> int:
    names = [name for name, _ in attacks(Attacker("http://127.0.0.1:1"))]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--minutes", type=float, default=12.0, help="in all; less what settles is attacked")
    parser.add_argument("--settle", type=float, default=60.0, help="seconds before memory is looked at again")
    parser.add_argument("--nice", type=int, default=0, help="of the attackers; the daemon keeps its own")
    parser.add_argument("--only", nargs="+", choices=names, default=names, help="these attacks alone")
    args = parser.parse_args()
    attack_s = max(1.0, args.minutes * 60 / len(args.only) - args.settle)
    with tempfile.TemporaryDirectory(prefix="omlxd-attack-", ignore_cleanup_errors=True) as folder:
        home = Path(folder)
        build_models(home / "models")
        flag = home / "hangs"
        variables = {"HANGING_FOLDER": str(home / "cache"), "HANGS_WHILE": str(flag)}
        variables["PYTHONPATH"] = f"{HANGING_DISK}{os.pathsep}{REPO}"
        daemon = Daemon(home, "10m", stall_s=STALL_S, **variables)
        place = urlsplit(daemon.url)
        prober = Prober(place.hostname or "", place.port or 0, daemon.process.pid, home / "health.txt")
        os.nice(args.nice)
        try:
            run = Run(daemon, prober)
            kept = asyncio.run(attack_all(run, args.only, attack_s, args.settle))
            asyncio.run(hang(run, flag))
            began = time.monotonic()
            daemon.process.terminate()
            status = daemon.process.wait(END_S)
            print(f"SIGTERM, while it hangs: {time.monotonic() - began:.1f} s, exit status {status}")
            print(f"the cache stayed {'below' if kept else 'NOT below'} its cap of {CAP_BYTES / 1e6:.0f} MB")
        finally:
            daemon.process.kill()
            prober.close()
    return 0 if kept and status == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
