"""Sizes and durations as people write them, and the RAM and disk that this machine has.

Sizes: `8GB`, `8GiB`, `512MB`, plain bytes, `20%` of something, `0`. GB is 10^9 bytes and GiB is 2^30, as
macOS and `df -H` show them. Durations: `90s`, `5m`, `2h`, `1h30m`, plain seconds, negative for ever.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path

import psutil

from . import darwin

LEFT_FREE = 5 * 10**9
"""Bytes that the SSD cache leaves free on its disk; a twentieth of one below 100 GB."""

MOST_CACHE, LEAST_CACHE = 100 * 10**9, 10**9
"""Bytes that the SSD cache may take at most where nobody set a size, and that it may take on any disk."""
LEFT_TO_OTHERS = 20 * 10**9
"""Bytes of a disk's room that such a cache leaves, beside `LEFT_FREE`; a half of less than 40 GB."""

PREFILL_CHUNK = 2048
"""Tokens of a prompt that a pass computes at most: mlx-lm's own prefill step."""

DRAFT_CONTEXT = 4096
"""Tokens of a prompt that a draft model reads, the newest."""

CPU_PREFILL_CHUNK = 64
"""Tokens of a prompt that a pass computes at most on a CPU, or one longer block; more gain nothing. Seconds
for 1,024 tokens of SmolLM2's shape with 6 layers, OpenBLAS, one thread, by pass: 32 1.37, 64 1.15, 128 1.13,
256 1.12, 512 1.16, 1,024 1.48.
"""

SLOTS, CPU_SLOTS = 32, 8
"""Requests that decode at once on a GPU, where memory admits them, and on a CPU.

An H100 decodes 32 short streams of an 8B shape in 12 to 17 ms a step and one in 7; a CPU's step grows with
its rows."""

_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
MOST_CHARS = 64
"""Characters of a size or duration: looking for units takes the square of its length."""
_PART = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h|d)")
_DURATION = re.compile(r"-?(?:\d+(?:\.\d+)?|(?:\d+(?:\.\d+)?(?:ms|s|m|h|d))+)")


def duration(value: str | float) -> float:
    """Return the seconds in `value`, infinity for anything negative, as Ollama does. Raises ValueError."""
    text = str(value).strip().lower()
    if len(text) > MOST_CHARS or not _DURATION.fullmatch(text):
        raise ValueError(text)
    if text.startswith("-"):
        return math.inf
    parts = _PART.findall(text)
    return sum(float(number) * _UNITS[unit] for number, unit in parts) if parts else float(text)


def spoken(seconds: float | None) -> str:
    """Format `seconds`: `45 s`, `5 min`, `2.5 h`; `for good` for None and infinity."""
    if seconds is None or math.isinf(seconds):
        return "for good"
    for unit, factor in (("d", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= factor:
            return f"{seconds / factor:.1f}".removesuffix(".0") + f" {unit}"
    return f"{seconds:.2g} s" if 0 < seconds < 1 else f"{seconds:.0f} s"


_SIZE_UNITS = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgt", 1):
    _SIZE_UNITS |= {f"{_letter}b": 1000**_power, f"{_letter}ib": 1024**_power}
_SIZE = re.compile(r"(?P<number>\d+(?:\.\d+)?)\s*(?P<unit>[a-zA-Z]*|%)")
SMALLEST = 10**6
"""Bytes. Below this a cache holds not one block: it is a forgotten unit (`8` for `8GB`)."""


def parse_size(text: str, total: Callable[[], int] | None = None, *, least: int = SMALLEST) -> int:
    """Return the bytes in `text`: 0, or at least `least`. `total()`: the bytes of `100%`.

    Raises ValueError (`no size: …`) for no number, an unknown unit, more than 100%, or less than `least`.
    """
    match = _SIZE.fullmatch(text.strip())
    if not match:
        raise _refuse("write a size as 8GB, 512MB, 20% or 0")
    number, unit = float(match["number"]), match["unit"].lower()
    if unit == "%":
        if total is None:
            raise _refuse("a percentage means nothing here; write a size as 8GB")
        if number > 100:
            raise _refuse("a percentage goes from 0% to 100%")
        return int(total() * number / 100)
    if number >= 2**63:
        raise _refuse("no machine has that much")
    if unit not in _SIZE_UNITS:
        raise _refuse(f"{match['unit']!r} is not a unit; use MB, GB, TB, MiB, GiB, TiB or %")
    # Integers stay exact; a float would lose bytes beyond 2^53.
    nbytes = (
        int(match["number"]) * _SIZE_UNITS[unit]
        if "." not in match["number"]
        else int(number * _SIZE_UNITS[unit])
    )
    if number and nbytes < least:
        if unit:
            raise _refuse(f"that is too little; {human(least)} is the least")
        share = f"{number * 100:g}%, or " if number < 1 and total else ""
        raise _refuse(f"that is {match['number']} bytes; write {share}the unit, as in {match['number']}GB")
    if nbytes >= 2**63:
        raise _refuse("no machine has that much")
    return nbytes


def human(nbytes: int) -> str:
    """Format `nbytes`: `8 GB`, `1.5 GB`, `512 MB`."""
    for unit, factor in (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if nbytes >= factor:
            return f"{nbytes / factor:.1f}".removesuffix(".0") + f" {unit}"
    return f"{nbytes} bytes"


def most_text(capacity: int, limit: int) -> str:
    """Format the bytes that the SSD cache may come to, and why they are fewer than its limit."""
    if capacity >= limit:
        return human(capacity)
    return f"{human(capacity)} (what its disk has room for; the limit is {human(limit)})"


def default_cap(room: int, held: int) -> int:
    """Return the SSD cache's limit where nobody set one: it leaves others `LEFT_TO_OTHERS`, or half.

    What the cache holds counts as room, so that its growth changes nothing.

    room  bytes that its disk has for it (`disk_room`); held: bytes that it has
    """
    most = room + held
    return max(LEAST_CACHE, min(MOST_CACHE, max(most // 2, most - LEFT_TO_OTHERS)))


def written_text(today: int, ever: int, budget: int = 0, used_up: bool = False) -> str:
    """Format the bytes written to the SSD cache, which wear its disk. `budget`: of a day; 0: no limit."""
    most = f", of {human(budget)} a day{' (writing stops until midnight)' * used_up}" if budget else ""
    return f"{human(today)} today{most}, {human(ever)} in all"


def counted(number: int, noun: str) -> str:
    """Format a count: `1 request`, `2,000 requests`."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def total_ram() -> int:
    """Return the bytes of RAM of the machine, or of this process's control group if less."""
    ram = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
    except OSError:
        return ram
    return min(ram, int(limit)) if limit.isdigit() else ram


def available_ram(pageable: int = 0) -> int:
    """Return the bytes of RAM that are free, in the machine or in this process's control group.

    On macOS those of psutil, which are free or inactive, or more: what is neither wired nor compressed, as
    `memory_pressure` says, for files are dropped and other programs' pages compressed on demand. Under
    pressure they no longer are, and psutil's count alone.

    pageable  bytes of this process that are not wired: they are among those, and not free for it
    """
    available = psutil.virtual_memory().available
    if (percent := darwin.sysctl_int("kern.memorystatus_level")) is not None:
        if memory_pressure() > NORMAL:
            return available
        return max(available, total_ram() * percent // 100 - pageable)
    try:
        group = Path("/sys/fs/cgroup")
        limit, used = (group / "memory.max").read_text().strip(), int((group / "memory.current").read_text())
        idle = re.search(r"^inactive_file (\d+)$", (group / "memory.stat").read_text(), re.M)
    except (OSError, ValueError):
        return available
    if not limit.isdigit():
        return available
    # The page cache is given back on demand.
    return max(0, min(available, int(limit) - used + (int(idle[1]) if idle else 0)))


NORMAL, CRITICAL = 1, 4
"""Levels of macOS's memory pressure; 2 is a warning."""


def memory_pressure() -> int:
    """Return macOS's level of memory pressure; elsewhere `NORMAL`."""
    return darwin.sysctl_int("kern.memorystatus_vm_pressure_level") or NORMAL


def process_memory(process: psutil.Process) -> int:
    """Return the bytes of RAM that `process` takes. Raises psutil.Error."""
    return darwin.phys_footprint(process.pid) or process.memory_info().rss


def disk_total(folder: Path) -> int:
    """Return the size in bytes of the disk that holds `folder`, which may not exist yet."""
    stat = _disk(folder)
    return stat.f_frsize * stat.f_blocks


def disk_room(folder: Path) -> int:
    """Return the bytes that the disk of `folder` takes until `LEFT_FREE` are left; below 0: it has less.

    A file system that does not tell its size (some of FUSE's) has room without end.
    """
    stat = _disk(folder)
    if not stat.f_blocks:
        return sys.maxsize
    return stat.f_frsize * stat.f_bavail - min(LEFT_FREE, stat.f_frsize * stat.f_blocks // 20)


def disk_free(folder: Path) -> int:
    """Return the bytes that are free for this user on the disk of `folder`."""
    stat = _disk(folder)
    return stat.f_frsize * stat.f_bavail


def _disk(folder: Path) -> os.statvfs_result:
    for place in (folder, *folder.parents):
        with contextlib.suppress(OSError):
            return os.statvfs(place)
    raise ValueError(f"there is no disk for {folder}")


def _refuse(why: str) -> ValueError:
    return ValueError(f"no size: {why}")
