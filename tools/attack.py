#!/usr/bin/env python3
"""A daemon of its own under attack from this machine: one kind after another, then a cache folder that hangs.

    python3 tools/attack.py --minutes 12

For each kind it prints /health at worst, MB of the front before, during and `--settle` seconds after it, and
bytes of the cache against the cap; at the end, seconds from SIGTERM to the end. Loopback only. Exits with 1
if the daemon died, did not end, or left its cap.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import sys
import tempfile
import time
from pathlib import Path

from soaking.attacks import Attacker, attacks
from soaking.own_daemon import Daemon, build_models

CAP_BYTES = 200_000_000
"""`--paged-ssd-cache-max-size` of soaking/own_daemon.py."""
ASK_S = 0.1
END_S = 30.0


class Watch:
    """Asks for /health again and again, and looks at the front's memory."""

    def __init__(self, attacker: Attacker, daemon: Daemon):
        self._attacker, self._daemon = attacker, daemon
        self.worst_s = self.peak_mb = 0.0

    def megabytes(self) -> float:
        return self._daemon.front.memory_info().rss / 1e6

    async def run(self) -> None:
        while True:
            self.worst_s = max(self.worst_s, await self._attacker.health_s())
            self.peak_mb = max(self.peak_mb, self.megabytes())
            await asyncio.sleep(ASK_S)


def bytes_below(folder: Path) -> int:
    return sum(path.lstat().st_blocks * 512 for path in folder.rglob("*"))


def hang_cache(folder: Path) -> int:
    """Replace each file by a FIFO: who opens it waits for ever."""
    files = [path for path in folder.rglob("*") if path.is_file()] + [folder / ".probe"]
    for path in files:
        path.unlink(missing_ok=True)
        os.mkfifo(path)
    return len(files)


async def attack_all(daemon: Daemon, attack_s: float, settle_s: float) -> bool:
    """Returns whether the cache stayed below its cap."""
    warm, kept = Attacker(daemon.url), True
    await warm.one_request()
    print(f"{'attack':24} {'/health':>8} {'MB':>5} {'peak':>5} {'after':>5} {'cache':>9}  answers")
    for name, _ in attacks(warm):
        attacker = Attacker(daemon.url)
        watch = Watch(Attacker(daemon.url), daemon)
        before, task = watch.megabytes(), asyncio.create_task(watch.run())
        await dict(attacks(attacker))[name](time.monotonic() + attack_s)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        await asyncio.sleep(settle_s)
        cached = bytes_below(daemon.cache)
        kept &= cached <= CAP_BYTES
        answers = ", ".join(f"{count} x {what}" for what, count in sorted(attacker.answers.items()))
        print(
            f"{name:24} {watch.worst_s:6.2f} s {before:5.0f} {watch.peak_mb:5.0f} {watch.megabytes():5.0f} "
            f"{cached / 1e6:6.1f} MB  {answers}{''.join('; ' + note for note in attacker.notes)}",
            flush=True,
        )
    return kept


async def hang(daemon: Daemon) -> None:
    """A request after the cache's files have begun to hang, in a new engine."""
    attacker = Attacker(daemon.url)
    await attacker.unload()
    hung, began = hang_cache(daemon.cache), time.monotonic()
    await attacker.one_request()
    print(
        f"hung cache: {hung} FIFOs; a request: {dict(attacker.answers)} in {time.monotonic() - began:.1f} s; "
        f"/health {await attacker.health_s():.2f} s"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--minutes", type=float, default=12.0, help="in all; less what settles is attacked")
    parser.add_argument("--settle", type=float, default=60.0, help="seconds before memory is looked at again")
    args = parser.parse_args()
    kinds = len(attacks(Attacker("http://127.0.0.1:1")))
    attack_s = max(1.0, args.minutes * 60 / kinds - args.settle)
    with tempfile.TemporaryDirectory(prefix="omlxd-attack-", ignore_cleanup_errors=True) as folder:
        home = Path(folder)
        build_models(home / "models")
        daemon = Daemon(home, "10m")
        try:
            kept = asyncio.run(attack_all(daemon, attack_s, args.settle))
            asyncio.run(hang(daemon))
            began = time.monotonic()
            daemon.process.terminate()
            status = daemon.process.wait(END_S)
            print(f"SIGTERM: {time.monotonic() - began:.1f} s, exit status {status}")
            print(f"the cache stayed {'below' if kept else 'NOT below'} its cap of {CAP_BYTES / 1e6:.0f} MB")
        finally:
            daemon.process.kill()
    return 0 if kept and status == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
