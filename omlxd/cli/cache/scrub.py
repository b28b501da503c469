"""`omlxd cache scrub`: a check, and removal of what crashes and removed models leave.

The check may take long and needs no lock; temporary files and empty folders are removed under it.
"""

from __future__ import annotations

from pathlib import Path

from ...common.units import human
from ...kv.files.namespace import NamespaceInfo
from . import inventory
from .check import check, summary
from .clear import plan, prune, remove, title
from .holder import DaemonRuns, Holder, exclusive


def scrub(root: Path, *, orphans: bool, daemon: Holder | None = None) -> bool:
    """Check and remove; `orphans`: also the KV of models whose folder is gone. True: nothing was bad.

    daemon  the one that holds the folder: it hears what is gone, and removes orphans itself
    Raises FileNotFoundError without a cache dir, OSError where a folder can't be read.
    """
    outcome = check(root, delete_bad=True)
    print(summary(outcome))
    good = not outcome.bad
    if daemon is not None:
        daemon.forget(outcome.removed_paths(), remove=False)
    try:
        with exclusive(root):
            print(_sweep(root))
    except DaemonRuns as error:
        print(f"leftovers stay: {error}")
    except OSError as error:
        print(f"leftovers stay: {error}")
        good = False
    return _orphans(root, orphans, daemon) and good


def _sweep(root: Path) -> str:
    """Remove temporary files and folders that hold nothing; tells what went."""
    files = nbytes = 0
    folders = list(inventory.namespaces(root))
    temporary = [file for file in inventory.walk(root, folders) if file.kind == "temporary"]
    for file in temporary:
        (root / file.path).unlink(missing_ok=True)
        files, nbytes = files + 1, nbytes + file.disk
    for path in [*root.glob("fingerprints.json.*.tmp"), root / ".probe"]:
        if path.is_file() and not path.is_symlink():
            files, nbytes = files + 1, nbytes + path.stat().st_size
            path.unlink()
    empty = sum(prune(root, folder) for folder in folders)
    return f"removed {files} leftovers, {human(nbytes)}, and {empty} empty folders"


def _orphans(root: Path, wanted: bool, daemon: Holder | None) -> bool:
    result = {f: i for f, i in inventory.namespaces(root).items() if i is not None and _is_gone(i)}
    if not result:
        return True
    planned = plan(root, result, None, daemon)
    for folder, info in result.items():
        own = sum(file.disk for file in planned.files if file.namespace == folder)
        print(f"orphan: {title(folder, info)}: {human(own)}; {info.model_path} is no longer there")
    if not wanted:
        print("orphans stay; remove them with --orphans")
        return True
    try:
        files, nbytes, troubles = remove(root, planned, daemon)
    except DaemonRuns as error:
        print(f"orphans stay: {error}")
        return True
    for trouble in troubles:
        print(f"can't remove {trouble}")
    print(f"removed {files} files of orphans, {human(nbytes)}")
    return not troubles


def _is_gone(info: NamespaceInfo) -> bool:
    return bool(info.model_path) and not Path(info.model_path).exists()
