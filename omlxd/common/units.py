"""Sizes as people write them: `8GB`, `8GiB`, `512MB`, plain bytes, `20%` of something, `0`.

GB is 10^9 bytes and GiB is 2^30, as disks and RAM are sold and as macOS and `df -H` show them.

Lengths of time as people write them: `90s`, `5m`, `2h`, `1h30m`, plain seconds, negative for ever.
"""
# MERGED: docstrings of sizes.py, durations.py (join by hand)

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable
from pathlib import Path

import psutil

_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
MOST_CHARS = 64
"""A client may send any text, and looking for units takes the square of its length."""
_PART = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h|d)")
_WHOLE = re.compile(r"-?(?:\d+(?:\.\d+)?|(?:\d+(?:\.\d+)?(?:ms|s|m|h|d))+)")


def duration(value: str | float) -> float:
    """Seconds that `value` stands for; infinite for anything negative, as Ollama has it.

    Raises ValueError for what is no length of time.
    """
    text = str(value).strip().lower()
    if len(text) > MOST_CHARS or not _WHOLE.fullmatch(text):
        raise ValueError(text)
    if text.startswith("-"):
        return math.inf
    parts = _PART.findall(text)
    return sum(float(number) * _UNITS[unit] for number, unit in parts) if parts else float(text)


def spoken(seconds: float | None) -> str:
    """`seconds` as a person reads it: `45 s`, `5 min`, `2.5 h`; None and infinity: `for good`."""
    if seconds is None or math.isinf(seconds):
        return "for good"
    for unit, factor in (("d", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= factor:
            return f"{seconds / factor:.1f}".removesuffix(".0") + f" {unit}"
    return f"{seconds:.0f} s"


_SIZE_UNITS = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}
_SIZE = re.compile(r"(?P<number>\d+(?:\.\d+)?)\s*(?P<unit>[a-zA-Z]*|%)")
SMALLEST = 10**6
"""Bytes. Below this a cache holds not one block: it is a forgotten unit (`8` for `8GB`)."""


def parse_size(text: str, whole: Callable[[], int] | None = None, *, least: int = SMALLEST) -> int:
    """Bytes that `text` stands for: 0, or `least` and more. `whole` gives the bytes that `100%` is; None: no
    percentages.

    Raises ValueError (`no size: …`) for anything that makes no sense: no number, an unknown unit, more than
    100%, or a size too small to be meant.
    """
    found = _SIZE.fullmatch(text.strip())
    if not found:
        raise _refuse("write a size as 8GB, 512MB, 20% or 0")
    number, unit = float(found["number"]), found["unit"].lower()
    if unit == "%":
        if whole is None:
            raise _refuse("a percentage means nothing here; write a size as 8GB")
        if number > 100:
            raise _refuse("a percentage goes from 0% to 100%")
        return int(whole() * number / 100)
    if unit not in _SIZE_UNITS:
        raise _refuse(f"{found['unit']!r} is no unit; use MB, GB, TB, MiB, GiB, TiB or %")
    # Integers stay exact; a float would lose bytes beyond 2^53.
    nbytes = (
        int(found["number"]) * _SIZE_UNITS[unit]
        if "." not in found["number"]
        else int(number * _SIZE_UNITS[unit])
    )
    if 0 < nbytes < least:
        if unit:
            raise _refuse(f"that is too little; {human(least)} is the least")
        raise _refuse(f"that is {nbytes} bytes; write the unit, as in {found['number']}GB")
    if nbytes >= 2**63:
        raise _refuse("no machine has that much")
    return nbytes


def human(nbytes: int) -> str:
    """`nbytes` as a person reads it: `8 GB`, `1.5 GB`, `512 MB`."""
    for unit, factor in (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if nbytes >= factor:
            return f"{nbytes / factor:.1f}".removesuffix(".0") + f" {unit}"
    return f"{nbytes} bytes"


def total_ram() -> int:
    """Bytes of RAM that this process may count on: the machine's, or its control group's if less."""
    ram = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
    except OSError:
        return ram
    return min(ram, int(limit)) if limit.isdigit() else ram


def available_ram() -> int:
    """Bytes of RAM that could be taken now: the machine's, or its control group's if less."""
    available = psutil.virtual_memory().available
    try:
        group = Path("/sys/fs/cgroup")
        limit, used = (group / "memory.max").read_text().strip(), int((group / "memory.current").read_text())
        idle = re.search(r"^inactive_file (\d+)$", (group / "memory.stat").read_text(), re.M)
    except (OSError, ValueError):
        return available
    if not limit.isdigit():
        return available
    # What files hold there is given back on demand.
    return max(0, min(available, int(limit) - used + (int(idle[1]) if idle else 0)))


def disk_total(folder: Path) -> int:
    """Bytes of the disk on which `folder` is, or will be once it is made."""
    for place in (folder, *folder.parents):
        try:
            stat = os.statvfs(place)
        except OSError:
            continue
        return stat.f_frsize * stat.f_blocks
    raise ValueError(f"no part of a disk: none is found for {folder}")


def _refuse(why: str) -> ValueError:
    return ValueError(f"no size: {why}")
