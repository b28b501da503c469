"""`omlxd cache clear` and `scrub`: remove KV, and what crashes and removed models leave.

The daemon that holds the folder removes blocks and records itself. The check of a scrub may take long and
needs no lock; temporary files and empty folders are removed under it.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import psutil

from ...common.units import counted, human
from ...kv.files.namespace import FILE_NAME, NamespaceInfo
from ...kv.files.paths import JUDGING, disk_bytes, temp_owner
from . import inventory
from .checks.check import check, summary
from .holder import DaemonRuns, Holder, exclusive
from .inventory import CacheFile


@dataclass(slots=True)
class Plan:
    """Files to remove. `pinned`: files that stay, and by which pins."""

    folders: Mapping[str, NamespaceInfo | None]
    files: list[CacheFile]
    pinned: int = 0
    pins: Sequence[str] = ()

    @property
    def bytes(self) -> int:
        return sum(file.disk for file in self.files)

    def as_text(self) -> list[str]:
        """Format a line for each model that loses a file."""
        lines: list[str] = []
        for folder, info in self.folders.items():
            own = [file for file in self.files if file.namespace == folder]
            if own:
                size = human(sum(file.disk for file in own))
                shared = "; models with equal files share it" if info and len(info.names) > 1 else ""
                lines.append(f"{title(folder, info)}: {counted(len(own), 'file')}, {size}{shared}")
        if self.pinned:
            own = f"{counted(self.pinned, 'pinned file')} ({', '.join(self.pins)})"
            lines.append(f"left alone: {own}; --pinned removes pinned files too")
        if notes := sum(file.namespace not in self.folders for file in self.files):
            lines.append(
                f"{counted(notes, 'Metal kernel')} that an engine ended with: judged again at a load"
            )
        return lines


def title(folder: str, info: NamespaceInfo | None) -> str:
    return f"{', '.join(info.names) if info else '(unknown model)'} [{folder[:8]}]"


def named(folders: Mapping[str, NamespaceInfo | None], name: str) -> Mapping[str, NamespaceInfo | None]:
    """Return the namespaces that `name` means: a model's id, its end, or 6 digits or more of a namespace.

    With one go the shares that other ranks have of its blocks.
    """
    infos = {folder: info for folder, info in folders.items() if info is not None}
    exact = {folder: info for folder, info in infos.items() if info.is_called(name)}
    last = {folder: info for folder, info in infos.items() if info.has_short_name(name)}
    prefix = {f: i for f, i in folders.items() if len(name) >= 6 and f.startswith(name.lower())}
    chosen = exact or last or prefix
    shares = {
        share for folder, its in inventory.by_lead(folders).items() if folder in chosen for share in its
    }
    return {folder: info for folder, info in folders.items() if folder in shares or folder in chosen}


def plan(
    root: Path,
    folders: Mapping[str, NamespaceInfo | None],
    older_than_s: float | None,
    daemon: Holder | None = None,
    pins: Mapping[str, Sequence[str]] = MappingProxyType({}),
) -> Plan:
    """Plan to remove everything of omlxd's in `folders`, or blocks and records unused for `older_than_s`
    seconds.

    daemon  the one that holds the folder: temporary files are its own, and stay
    pins    names by which files are pinned that stay
    """
    kinds = ["block", "record", *(["temporary"] if older_than_s is None and daemon is None else [])]
    before = math.inf if older_than_s is None else time.time() - older_than_s
    files = [
        file for file in inventory.walk(root, list(folders)) if file.kind in kinds and file.used < before
    ]
    # A prefix is used by whoever goes on from it, so what is older lies after what is newer in a chain.
    found = sorted(files, key=lambda file: file.used)
    free = [file for file in found if file.path not in pins]
    names = sorted({ascii(name)[1:-1] for file in found for name in pins.get(file.path, ())})
    return Plan(folders, free, len(found) - len(free), names)


def notes_of(root: Path) -> list[CacheFile]:
    """List the notes of kernels that were judged as their process ended."""
    found = [(path, path.stat()) for path in root.glob(JUDGING) if path.is_file() and not path.is_symlink()]
    return [CacheFile("temporary", f"{at.relative_to(root)}", its.st_size, its.st_mtime) for at, its in found]


def remove(root: Path, planned: Plan, daemon: Holder | None = None) -> tuple[int, int, list[str]]:
    """Remove a plan's files: (files gone, bytes on disk gone, why some stay). `daemon`: has it remove them.

    Raises DaemonError; DaemonRuns and OSError without one.
    """
    if daemon is not None:
        return daemon.forget([file.path for file in planned.files], remove=True)
    gone = nbytes = 0
    troubles: list[str] = []
    with exclusive(root):
        for file in planned.files:
            try:
                (root / file.path).unlink(missing_ok=True)
            except OSError as error:
                troubles.append(f"{file.path}: {error.strerror}")
                continue
            gone += 1
            nbytes += file.disk
        for folder in planned.folders:
            prune(root, folder)
    return gone, nbytes, troubles


def prune(root: Path, folder: str) -> int:
    """Remove a namespace's empty folders, and its own once it is empty, under the lock; returns how many."""
    removed = 0
    own = root / folder
    with contextlib.suppress(OSError):
        for inner in [*own.iterdir()]:
            if inner.is_dir() and not inner.is_symlink():
                with contextlib.suppress(OSError):
                    inner.rmdir()
                    removed += 1
        if [entry.name for entry in own.iterdir()] in ([], [FILE_NAME]):
            (own / FILE_NAME).unlink(missing_ok=True)
            own.rmdir()
            removed += 1
    return removed


# --------------------------------------------------------------------------- scrub


def scrub(root: Path, *, orphans: bool, daemon: Holder | None = None) -> bool:
    """Check and remove; `orphans`: also the KV of models that are gone. True: nothing bad, nor any leftover,
    is there now.

    daemon  the one that holds the folder: it hears what is gone, and removes orphans itself
    Raises FileNotFoundError without a cache dir, OSError where a folder can't be read.
    """
    outcome = check(root, delete_bad=True)
    print(summary(outcome))
    good = all(bad.removed for bad in outcome.bad)
    if daemon is not None:
        daemon.forget(outcome.removed_paths(), remove=False)
    try:
        with exclusive(root):
            print(_sweep(root))
    except DaemonRuns as error:
        if not all(map(_is_being_written, _leftovers(root))):
            print(f"leftovers stay: {error}")
            good = False
    except OSError as error:
        print(f"leftovers stay: {error}")
        good = False
    return _orphans(root, orphans, daemon) and good


def _sweep(root: Path) -> str:
    """Remove temporary files and empty folders; reports what went."""
    files = nbytes = 0
    for path in _leftovers(root):
        files, nbytes = files + 1, nbytes + disk_bytes(path.stat().st_size)
        path.unlink()
    empty = sum(prune(root, folder) for folder in inventory.namespaces(root))
    return f"removed {counted(files, 'leftover')}, {human(nbytes)}, and {counted(empty, 'empty folder')}"


def _leftovers(root: Path) -> list[Path]:
    """List temporary files; beside a daemon some of them are being written."""
    found = inventory.walk(root, list(inventory.namespaces(root)))
    temporary = [root / file.path for file in found if file.kind == "temporary"]
    loose = [*root.glob("*.json.*.tmp"), root / ".probe", *root.glob(JUDGING)]
    return [path for path in temporary + loose if path.is_file() and not path.is_symlink()]


def _is_being_written(path: Path) -> bool:
    owner = temp_owner(path.name)
    return owner is not None and psutil.pid_exists(owner)


def _orphans(root: Path, wanted: bool, daemon: Holder | None) -> bool:
    result = {f: i for f, i in inventory.namespaces(root).items() if i is not None and _is_gone(i)}
    if not result:
        return True
    planned = plan(root, result, None, daemon)
    for folder, info in result.items():
        own = sum(file.disk for file in planned.files if file.namespace == folder)
        paths = ", ".join(dict.fromkeys(copy.folder for copy in info.copies))
        print(f"orphan: {title(folder, info)}: {human(own)}; no longer there: {paths}")
    if not wanted:
        print("orphans stay; remove them with --orphans (a model that was moved is none once it is loaded)")
        return True
    try:
        files, nbytes, troubles = remove(root, planned, daemon)
    except DaemonRuns as error:
        print(f"orphans stay: {error}")
        return False
    for trouble in troubles:
        print(f"can't remove {trouble}")
    print(f"removed {counted(files, 'file')} of orphans, {human(nbytes)}")
    return not troubles


def _is_gone(info: NamespaceInfo) -> bool:
    return bool(info.model_path) and not any(copy.is_here() for copy in info.copies)
