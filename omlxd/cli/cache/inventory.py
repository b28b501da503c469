"""Lists a cache dir by name, size and time. Opens no file, and enters no folder but namespaces (32 hex
digits).
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ...kv.files.fs import entries_of
from ...kv.files.namespace import FILE_NAME, NamespaceInfo, read_namespace
from ...kv.files.paths import (
    NAMESPACE_HEX,
    RECORD_SUFFIX,
    SUFFIX,
    TEMP_SUFFIX,
    disk_bytes,
    file_kind,
    is_fan_dir,
    is_namespace_dir,
)

Kind = Literal["block", "record", "temporary", "misplaced", "stranger"]
"""block, record  a file whose place and name are those of a block or record
temporary      left by a crash, or being written by a daemon
misplaced      of such a suffix, but no file that a store would look for: elsewhere, a link, a folder
stranger       anything else; never removed
"""


@dataclass(slots=True, frozen=True)
class CacheFile:
    """`path` is relative to the cache dir. `size`: bytes in it; `used`: seconds since 1970."""

    kind: Kind
    path: str
    size: int
    used: float
    is_folder: bool = False

    @property
    def namespace(self) -> str:
        return self.path[:NAMESPACE_HEX]

    @property
    def name(self) -> str:
        """The hash, in hex, of a block or a record."""
        return self.path.rpartition("/")[2][:64]

    @property
    def disk(self) -> int:
        """Bytes on disk, as the ledger counts them."""
        return disk_bytes(self.size)


def namespaces(root: Path) -> dict[str, NamespaceInfo | None]:
    """Map folder → description, if any. Raises FileNotFoundError, OSError."""
    with os.scandir(root) as entries:
        folders = [e.name for e in entries if is_namespace_dir(e.name) and e.is_dir(follow_symlinks=False)]
    return {folder: read_namespace(root, folder) for folder in sorted(folders)}


def by_lead(infos: Mapping[str, NamespaceInfo | None]) -> dict[str, list[str]]:
    """Map each folder but those of other ranks → the folders of these, if any, with their shares of it."""
    leads = {name: info.lead for name, info in infos.items() if info and info.lead != name}
    shares = {name: lead for name, lead in leads.items() if lead in infos}
    return {name: [s for s, lead in shares.items() if lead == name] for name in infos if name not in shares}


def walk(root: Path, folders: list[str]) -> Iterator[CacheFile]:
    """Yield everything in the namespaces `folders`, but for their descriptions. What vanishes is left out."""
    for folder in folders:
        for entry in entries_of(f"{root}/{folder}"):
            if entry.name == FILE_NAME:
                continue
            if is_fan_dir(entry.name) and entry.is_dir(follow_symlinks=False):
                for inner in entries_of(entry.path):
                    yield from _files(inner, f"{folder}/{entry.name}/{inner.name}", entry.name)
            else:
                yield from _files(entry, f"{folder}/{entry.name}", "")


def bytes_held(root: Path) -> int:
    """Return the bytes on disk of everything in the namespaces. Raises OSError."""
    return sum(file.disk for file in walk(root, list(namespaces(root))))


def _files(entry: os.DirEntry[str], path: str, fan: str) -> Iterator[CacheFile]:
    try:
        status = entry.stat(follow_symlinks=False)
    except FileNotFoundError:
        return
    is_file, name = stat.S_ISREG(status.st_mode), entry.name
    kind: Kind = "stranger"
    if name.endswith(TEMP_SUFFIX) and is_file:
        kind = "temporary"
    elif name.endswith((SUFFIX, RECORD_SUFFIX)):
        kind = "misplaced"
        if is_file and name[:2] == fan and (named := file_kind(name)) in ("block", "record"):
            kind = "block" if named == "block" else "record"
    yield CacheFile(kind, path, status.st_size, status.st_mtime, stat.S_ISDIR(status.st_mode))
