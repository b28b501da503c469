"""What of a daemon's SSD cache lies on the disk, and whether its account says the same."""

from __future__ import annotations

import contextlib
from pathlib import Path

from daemon import Daemon, wait_until

from omlxd.kv.files.paths import disk_bytes, file_kind


def shares_on_disk(*caches: Path) -> list[set[str]]:
    """Names of the files that each rank has, in no order of these."""
    shares: dict[Path, set[str]] = {}
    for cache in caches:
        for file in cache.rglob("*.safetensors"):
            shares.setdefault(file.parents[1], set()).add(file.name)
    return [*shares.values()]


def wait_for_shares(ranks: int, *caches: Path) -> None:
    """Return once all ranks have the same files. What rank 0 knows of another's writes is a second old."""

    def alike() -> bool:
        shares = shares_on_disk(*caches)
        return len(shares) == ranks and all(each == shares[0] for each in shares)

    wait_until(alike, why=lambda: f"{shares_on_disk(*caches)}")


def on_disk(cache: Path, *, temporary: bool = False) -> int:
    """Bytes of the files that the account counts, in whole pages; or of the unfinished ones alone."""
    total = 0
    for path in cache.rglob("*"):
        if (kind := file_kind(path.name)) and (kind == "temp") == temporary:
            with contextlib.suppress(FileNotFoundError):  # Evicted, or renamed, meanwhile.
                total += disk_bytes(path.stat().st_size)
    return total


def all_on_disk(cache: Path) -> int:
    """Bytes of the files, unfinished ones too, that two listings one after the other both have.

    One listing would count a file that is evicted and the one that took its space. A rename changes nothing.
    """
    first, second = _by_inode(cache), _by_inode(cache)
    return sum(min(nbytes, second[inode]) for inode, nbytes in first.items() if inode in second)


def _by_inode(cache: Path) -> dict[int, int]:
    listed: dict[int, int] = {}
    for path in cache.rglob("*"):
        if file_kind(path.name):
            with contextlib.suppress(FileNotFoundError):
                status = path.stat()
                listed[status.st_ino] = disk_bytes(status.st_size)
    return listed


def settled(daemon: Daemon) -> bool:
    """No grant is open, no temporary file is left, and the account is what lies there.

    Under a cap of less than `LEASE_SHARE` times `LEASE_BYTES`: else an engine holds the rest of its lease.
    """
    cache = daemon.cache
    cold = daemon.http.get("/omlxd/status").json()["cold"]
    return (
        not cold.get("reserved")
        and on_disk(cache, temporary=True) == 0
        and cold.get("bytes", 0) == on_disk(cache) > 0
    )


def unsettled(daemon: Daemon) -> str:
    """Why not, for a test that fails."""
    cache = daemon.cache
    counted = daemon.http.get("/omlxd/status").json()["cold"]
    return f"{counted}; on disk {on_disk(cache)}, unfinished {on_disk(cache, temporary=True)}"
