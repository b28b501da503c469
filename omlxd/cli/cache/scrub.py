"""`omlxd cache scrub`: a check, and removal of what crashes and removed models leave.

The check may take long and needs no lock; temporary files and empty folders are removed under it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ...common.units import human
from ...kv.files.namespace import NamespaceInfo
from ...kv.files.paths import is_stored_path
from . import inventory
from .check import check, summary
from .clear import plan, prune, remove, title
from .holder import DaemonRuns, Holder, exclusive


@dataclass(slots=True)
class Leftovers:
    """Removed: temporary files, their bytes on disk, and folders that held nothing."""

    files: int = 0
    bytes: int = 0
    folders: int = 0


def scrub(
    root: Path, *, orphans: bool, daemon: Holder | None = None, say: Callable[[str], None] = print
) -> bool:
    """Check and remove; `orphans`: also the KV of models whose folder is gone. True: nothing was bad.

    daemon  the one that holds the folder: it hears what is gone, and removes orphans itself
    Raises FileNotFoundError without a cache dir, OSError where a folder can't be read.
    """
    outcome = check(root, delete_bad=True, say=say)
    say(summary(outcome))
    good = not outcome.bad
    if daemon is not None:
        gone = [bad.path for bad in outcome.bad if bad.removed and is_stored_path(bad.path)]
        daemon.forget(gone, remove=False)
    try:
        with exclusive(root):
            left = _sweep(root)
        say(f"removed {left.files} leftovers, {human(left.bytes)}, and {left.folders} empty folders")
    except DaemonRuns as error:
        say(f"leftovers stay: {error}")
    except OSError as error:
        say(f"leftovers stay: {error}")
        good = False
    return _orphans(root, orphans, daemon, say) and good


def _sweep(root: Path) -> Leftovers:
    left = Leftovers()
    folders = list(inventory.namespaces(root))
    temporary = [file for file in inventory.walk(root, folders) if file.kind == "temporary"]
    for file in temporary:
        (root / file.path).unlink(missing_ok=True)
        left.files += 1
        left.bytes += file.disk
    for path in [*root.glob("fingerprints.json.*.tmp"), root / ".probe"]:
        if path.is_file() and not path.is_symlink():
            left.files += 1
            left.bytes += path.stat().st_size
            path.unlink()
    left.folders = sum(prune(root, folder) for folder in folders)
    return left


def _orphans(root: Path, wanted: bool, daemon: Holder | None, say: Callable[[str], None]) -> bool:
    result = {f: i for f, i in inventory.namespaces(root).items() if i is not None and _is_gone(i)}
    if not result:
        return True
    planned = plan(root, result, None)
    for folder, info in result.items():
        own = sum(file.disk for file in planned.files if file.namespace == folder)
        assert info is not None
        say(f"orphan: {title(folder, info)}: {human(own)}; {info.model_path} is no longer there")
    if not wanted:
        say("orphans stay; remove them with --orphans")
        return True
    try:
        if daemon is None:
            files, nbytes, troubles = remove(root, planned)
        else:
            blocks = [file.path for file in planned.files if file.kind != "temporary"]
            files, nbytes, troubles = daemon.forget(blocks, remove=True)
    except DaemonRuns as error:
        say(f"orphans stay: {error}")
        return True
    for trouble in troubles:
        say(f"can't remove {trouble}")
    say(f"removed {files} files of orphans, {human(nbytes)}")
    return not troubles


def _is_gone(info: NamespaceInfo) -> bool:
    return bool(info.model_path) and not Path(info.model_path).exists()
