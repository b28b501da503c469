"""Checks the folders: their owner and readers, their room, and the speed of the disk."""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import shlex
import shutil
import stat
import sys
import tempfile
import time
from pathlib import Path

from ...common.units import disk_room, human, written_text
from ...config import Settings, has_ssd_cache, ssd_cap
from ...errors import ConfigError
from ...kv.ledger.write_budget import bytes_written
from ..cache import inventory
from ..daemon.client import DaemonError, daemon_of
from .finding import Finding, bad, ok, warn

TEST_BYTES = 256 * 10**6
TEST_S = 10.0
"""Seconds for writing, and again for reading."""
_CHUNK = 8 << 20
_SECONDS = 3.0
SPARE = 10**9
"""Bytes that a disk must have free for anything to be tried on it."""
NEARLY = 0.1
"""Part of the free room that a cache may use and be fine: its next write gives it back."""
WORTH = 0.05
"""Part of the missing room that emptying the cache must free to be advised."""
SLOW_WRITE, SLOW_READ = 100e6, 300e6
"""Bytes a second. Written is about 100 kB a token of an 8B model, so prefill at 1,000 tokens a second
writes 100 MB/s; reading below 300 MB/s restores such a prompt hardly faster than it is computed."""


def check_folder(check: str, folder: Path) -> Finding:
    """Check a folder that omlxd keeps: made with mode 0700, and ours."""
    place = _existing(folder)
    if place != folder:
        if not os.access(place, os.W_OK | os.X_OK):
            return bad(check, f"{folder} can't be made: {place} is not writable", _chown(place))
        return ok(check, f"{folder}, to be made at the first start")
    status = folder.stat()
    if not stat.S_ISDIR(status.st_mode):
        return bad(check, f"{folder} is no folder", "Move it away, or choose another folder.")
    if not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
        return bad(check, f"{folder} is not readable and writable", _chown(folder))
    if status.st_uid != os.getuid():
        return warn(check, f"{folder} belongs to user {status.st_uid}", _chown(folder))
    if stat.S_IMODE(status.st_mode) & 0o077:
        mode = stat.S_IMODE(status.st_mode)
        return warn(check, f"{folder} is open to other users (mode {mode:o})", f"Run `chmod 700 {folder}`.")
    return ok(check, f"{folder}, private")


def check_cache_folder(settings: Settings, kept: Settings) -> Finding:
    """Check `kept`, with the cache in use; a daemon that can't use the folder of `settings` has none."""
    if has_ssd_cache(kept):
        return check_folder("cache folder", kept.paged_ssd_cache_dir)
    if not has_ssd_cache(settings):
        return ok("cache folder", "none: the SSD cache is off")
    here = check_folder("cache folder", settings.paged_ssd_cache_dir)
    if here.verdict == "bad":
        return bad(here.check, f"the daemon has no SSD cache; here {here.text}", here.mend)
    return warn(
        "cache folder",
        f"the daemon has no SSD cache, and {settings.paged_ssd_cache_dir} could be used",
        "It was started without one (`--no-cache`), or could not use the folder then: restart it.",
    )


def _chown(folder: Path) -> str:
    return f"Make it yours: `sudo chown -R $(id -un) {folder}`, or choose another folder."


def _existing(folder: Path) -> Path:
    """Return `folder`, or the nearest existing one above."""
    return next((place for place in (folder, *folder.parents) if place.exists()), Path("/"))


def check_space(settings: Settings) -> Finding:
    """Compare free room with what the SSD cache may still take."""
    folder = settings.paged_ssd_cache_dir
    free = _free(folder)
    if not has_ssd_cache(settings):
        return ok("space", f"{human(free)} free; the SSD cache is off")
    used = 0
    with contextlib.suppress(OSError):
        used = inventory.bytes_held(folder)
    cap = ssd_cap(settings, used)
    facts = f"{human(free)} free; the SSD cache takes {human(used)} of at most {human(cap)}"
    room = disk_room(folder)
    left, lacks = free - room, -room
    if cap - used > room:
        facts += f", and leaves the disk's last {human(left)} to others: {human(max(0, used + room))} at most"
    # A cache that has grown up to there is as it should be; it gives way to others when it writes.
    if lacks <= left * NEARLY and used + room >= (1 if used else min(SPARE, cap)):
        return ok("space", facts)
    clear = f"omlxd cache clear --paged-ssd-cache-dir {shlex.quote(str(folder))}"
    mend = "Make room" + (f", or empty the cache: `{clear}`." if used > max(0, lacks) * WORTH else ".")
    return (bad if free < SPARE and used < lacks else warn)("space", facts, mend)


def check_written(settings: Settings) -> Finding:
    """Say what was written to the SSD cache: flash wears by writing. The daemon knows today's budget."""
    cold = None
    with contextlib.suppress(ConfigError, DaemonError):
        cold = daemon_of(settings).status(_SECONDS).cold
    if cold is None or Path(cold.dir) != settings.paged_ssd_cache_dir:
        text = written_text(*bytes_written(settings.paged_ssd_cache_dir))
        return ok("written", f"to the SSD cache: {text}")
    if cold.write_budget_used_up:
        mend = "Give --ssd-cache-daily-write-budget more, or leave it: new blocks stay in RAM."
        return warn("written", f"to the SSD cache: {cold.written}", mend)
    return ok("written", f"to the SSD cache: {cold.written}")


def _free(folder: Path) -> int:
    return shutil.disk_usage(_existing(folder)).free


def check_speed(settings: Settings, nbytes: int = TEST_BYTES, seconds: float = TEST_S) -> Finding:
    """Write and read one file on the cache's disk, outside of the cache's own account."""
    folder = _test_folder(settings)
    if _free(folder) < SPARE + nbytes:
        return ok("disk", f"not timed: {human(_free(folder))} free on {folder} is too little for that")
    try:
        with tempfile.TemporaryFile(dir=folder, prefix=".omlxd-doctor-") as file:
            wrote, written = _write(file.fileno(), nbytes, seconds)
            read = _read(file.fileno(), seconds)
    except OSError as error:
        return bad("disk", f"{folder} can't be written: {error.strerror or error}", _chown(folder))
    facts = f"writes {human(int(wrote))}/s, reads {human(int(read))}/s ({human(written)} on {folder})"
    if wrote < SLOW_WRITE or read < SLOW_READ:
        return warn("disk", facts, "Put the cache on a faster disk with --paged-ssd-cache-dir.")
    return ok("disk", facts)


def _test_folder(settings: Settings) -> Path:
    """Return a folder on the cache's disk, outside of the cache where that can be."""
    cache = settings.paged_ssd_cache_dir
    above = _existing(cache.parent)
    same_disk = _existing(cache).stat().st_dev == above.stat().st_dev
    return above if same_disk and os.access(above, os.W_OK) else _existing(cache)


def describe_rates(settings: Settings, nbytes: int = 32 * _CHUNK, seconds: float = 5.0) -> str:
    """Write and read one file past the page cache, and flush the drive's own cache; say how fast it was."""
    folder = _test_folder(settings)
    if _free(folder) < SPARE + nbytes:
        return f"not timed: {human(_free(folder))} free is too little for that"
    # It has no name: however this process ends, nothing is left of it.
    with tempfile.TemporaryFile(dir=folder, prefix=".omlxd-doctor-") as file:
        fd, how = file.fileno(), "F_NOCACHE and fsync"
        if sys.platform != "darwin":
            how = "O_DIRECT and fsync"
            try:
                fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_DIRECT)
            except OSError:
                how = "fsync, as this file system has no O_DIRECT"
        wrote, written = _write(fd, nbytes, seconds)
        os.write(fd, _pages(_CHUNK))
        began = time.perf_counter()
        if sys.platform == "darwin":
            fcntl.fcntl(fd, fcntl.F_FULLFSYNC)  # type: ignore[attr-defined]
            flush = "F_FULLFSYNC"
        else:
            os.fsync(fd)
            flush = "fsync"
        flushed = time.perf_counter() - began
        read = _read(fd, seconds)
    return (
        f"the SSD cache's: writes {human(int(wrote))}/s with {how}, reads {human(int(read))}/s "
        f"({human(written)}); "
        f"{flush} behind another {human(_CHUNK)} takes {flushed * 1e3:.1f} ms"
    )


def _pages(size: int) -> mmap.mmap:
    """Return whole pages of noise, as transfers past the page cache need them."""
    pages = mmap.mmap(-1, size)
    pages[:] = os.urandom(size)
    return pages


def _write(fd: int, nbytes: int, seconds: float) -> tuple[float, int]:
    """Write to the disk itself: (bytes a second, bytes). On macOS nothing stays in the page cache."""
    if sys.platform == "darwin":
        fcntl.fcntl(fd, fcntl.F_NOCACHE, 1)  # type: ignore[attr-defined]
    chunk = _pages(min(_CHUNK, nbytes))
    began, written = time.perf_counter(), 0
    while written < nbytes and time.perf_counter() - began < seconds:
        written += os.write(fd, chunk)
    os.fsync(fd)
    return written / (time.perf_counter() - began), written


def _read(fd: int, seconds: float) -> float:
    """Read what was written, past the page cache where the system lets us; returns bytes a second."""
    if sys.platform == "darwin":
        fcntl.fcntl(fd, fcntl.F_NOCACHE, 1)  # type: ignore[attr-defined]
    else:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.lseek(fd, 0, os.SEEK_SET)
    buffer, done = mmap.mmap(-1, _CHUNK), 0
    began = time.perf_counter()
    while time.perf_counter() - began < seconds and (got := os.readv(fd, [buffer])):
        done += got
    return done / max(1e-9, time.perf_counter() - began)
