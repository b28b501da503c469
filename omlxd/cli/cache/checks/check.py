"""`omlxd cache check`: verifies files, lists the bad ones, removes them only if asked to.

It is safe beside a running daemon. A file that is evicted meanwhile is neither good nor bad. A bad file that
is removed is a miss to the daemon, whose account counts its bytes until it hears of it.
"""

from __future__ import annotations

import os
import random
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from ....common.units import counted, human
from ....kv.files.paths import is_stored_path
from .. import inventory
from ..inventory import CacheFile
from .verify import Verifier

_TTY_S, _PLAIN_S = 0.1, 10.0
"""Seconds between two progress lines."""


@dataclass(slots=True)
class Bad:
    path: str
    reason: str
    removed: bool = False


@dataclass(slots=True)
class Outcome:
    """The result of a check. `gone`: files evicted or replaced meanwhile. `bytes`: read."""

    checked: int = 0
    bytes: int = 0
    gone: int = 0
    temporary: int = 0
    strangers: int = 0
    bad: list[Bad] = field(default_factory=list)

    def removed_paths(self) -> list[str]:
        """Return the removed files that a daemon counts."""
        return [bad.path for bad in self.bad if bad.removed and is_stored_path(bad.path)]


def check(root: Path, *, sample: tuple[int, int] = (1, 1), delete_bad: bool = False) -> Outcome:
    """Verify `sample[0]` of every `sample[1]` files, and all misplaced entries; print each bad one.

    Raises FileNotFoundError without a cache dir.
    """
    outcome, chosen = Outcome(), list[CacheFile]()
    for file in inventory.walk(root, list(inventory.namespaces(root))):
        if file.kind in ("block", "record"):
            chosen.append(file)
        elif file.kind == "misplaced":
            outcome.bad.append(_misplaced(root, file, delete_bad))
            print(_line(outcome.bad[-1]))
        elif file.kind == "temporary":
            outcome.temporary += 1
        else:
            outcome.strangers += 1
    some, of = sample
    if some < of:
        chosen = random.sample(chosen, -(-len(chosen) * some // of))
    _verify(root, chosen, outcome, delete_bad)
    return outcome


def _verify(root: Path, chosen: list[CacheFile], outcome: Outcome, delete_bad: bool) -> None:
    verifier, progress = Verifier(), _Progress(len(chosen), sum(file.size for file in chosen))
    alike: dict[tuple[str, str], dict[int, list[tuple[CacheFile, os.stat_result]]]] = {}

    def condemn(file: CacheFile, reason: str, seen: os.stat_result | None) -> None:
        bad = Bad(file.path, reason)
        if delete_bad and seen is not None:
            bad.removed = _remove_same(f"{root}/{file.path}", seen)
        outcome.bad.append(bad)
        progress.clear()
        print(_line(bad))

    for file in chosen:
        path = f"{root}/{file.path}"
        try:
            seen = os.lstat(path)
            is_record = file.kind == "record"
            verdict = verifier.verify(path, file.namespace, file.name, is_record=is_record)
        except FileNotFoundError:
            outcome.gone += 1
            continue
        except OSError as error:
            # It may be good, and the disk or a permission at fault: never removed.
            condemn(file, f"can't be read: {error.strerror or error}", None)
            continue
        outcome.checked += 1
        outcome.bytes += file.size
        if verdict.fault:
            condemn(file, verdict.fault, seen)
        else:
            siblings = alike.setdefault((file.namespace, verdict.kind), {})
            siblings.setdefault(verdict.tensors, []).append((file, seen))
        progress.show(outcome)
    for siblings in alike.values():
        most = max(map(len, siblings.values()))
        for some in siblings.values():
            if len(some) < most:
                for file, seen in some:
                    condemn(file, "its tensors are not those of its namespace", seen)
    progress.clear()


def _remove_same(path: str, seen: os.stat_result) -> bool:
    """Unlink `path` if it still is the checked file; a daemon may have put a good one there."""
    try:
        if not os.path.samestat(os.lstat(path), seen):
            return False
        os.unlink(path)
    except OSError:
        return False
    return True


def _misplaced(root: Path, file: CacheFile, delete_bad: bool) -> Bad:
    """List misplaced entries; a folder goes only if it is empty."""
    path = root / file.path
    is_folder = file.is_folder
    reason = "a folder, not a file" if is_folder else "not where or what a block's file is"
    bad = Bad(file.path, "a link, not a file" if path.is_symlink() else reason)
    if delete_bad:
        try:
            path.rmdir() if is_folder else path.unlink()
            bad.removed = True
        except OSError as error:
            bad.reason += f"; can't be removed: {error.strerror}"
    return bad


def _line(bad: Bad) -> str:
    return f"bad: {bad.path}: {bad.reason}{'; removed' if bad.removed else ''}"


def summary(outcome: Outcome) -> str:
    """Sum up an outcome in one or two sentences."""
    removed = sum(bad.removed for bad in outcome.bad)
    text = f"checked {counted(outcome.checked, 'file')}, {human(outcome.bytes)}: "
    text += f"{len(outcome.bad)} bad, {removed} removed" if outcome.bad else "all good"
    extra: Iterable[tuple[int, str]] = (
        (outcome.gone, "vanished meanwhile"),
        (outcome.temporary, "temporary"),
        (outcome.strangers, "not omlxd's, left alone"),
    )
    extras = ", ".join(f"{count} {what}" for count, what in extra if count)
    return text + (f" ({extras})" if extras else "")


class _Progress:
    """A line that rewrites itself on a terminal; one every ten seconds elsewhere. On stderr."""

    def __init__(self, files: int, nbytes: int):
        self._files, self._bytes = files, nbytes
        self._tty = sys.stderr.isatty()
        self._every = _TTY_S if self._tty else _PLAIN_S
        self._next = time.monotonic() + self._every
        self._shown = False

    def show(self, outcome: Outcome) -> None:
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + self._every
        line = (
            f"checked {outcome.checked} of {self._files} files, "
            f"{human(outcome.bytes)} of {human(self._bytes)}, {len(outcome.bad)} bad"
        )
        print(f"\r\x1b[K{line}" if self._tty else line, end="" if self._tty else "\n", file=sys.stderr)
        sys.stderr.flush()
        self._shown = self._tty

    def clear(self) -> None:
        """Clear the line before other output."""
        if self._shown:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
            self._shown = False
