"""Takes an exported archive in: each file is verified under another name, and put in place whole.

`omlxd cache import` does so in a folder that no daemon holds, a daemon in its own (front/owner/carry.py).
Whoever is killed in the middle leaves a temporary file, which the next daemon removes.
"""

from __future__ import annotations

import os
import tarfile
import time
from pathlib import Path
from typing import IO, Any, Protocol

import msgspec

from ...common.files import read_small
from ...common.units import counted
from ...errors import InvalidRequest
from ...kv.files.fs import FileSystem, TempLeft, put_in_place, write_all
from ...kv.files.namespace import FILE_NAME, NamespaceInfo
from ...kv.files.paths import (
    LOCK_NAME,
    RECORD_SUFFIX,
    TEMP_SUFFIX,
    disk_bytes,
    is_namespace_dir,
    is_stored_path,
)
from ..owner_api import Imported
from .verify import Verifier

MOST_BYTES = 1 << 30
"""Of one file in an archive; blocks have some megabytes."""
_MOST_NAME = 1 << 20
"""Bytes of a member's long name or other extra header."""
_PIECE = 1 << 20


class Room(Protocol):
    """The account of the folder's bytes."""

    def reserve(self, nbytes: int) -> bool:
        """Whether there is room for `nbytes` more, which are then kept for the caller."""
        ...

    def stored(self, path: str, nbytes: int) -> None:
        """They are the file `path`, relative to the folder, now."""
        ...

    def released(self, nbytes: int) -> None:
        """They are not needed."""
        ...


class _Bad(Exception):
    """What is wrong with a file of an archive."""


class _Header(tarfile.TarInfo):
    """tarfile takes a header that makes no sense, and a file that ends early, for the end of an archive."""

    @classmethod
    def frombuf(cls, buf: Any, encoding: str, errors: str) -> Any:
        member = super().frombuf(buf, encoding, errors)
        if member.type not in (*tarfile.REGULAR_TYPES, tarfile.DIRTYPE) and member.size > _MOST_NAME:
            raise tarfile.ReadError("a header is too large")
        return member

    @classmethod
    def fromtarfile(cls, archive: tarfile.TarFile) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        try:
            return super().fromtarfile(archive)
        except tarfile.HeaderError as error:
            if type(error).__name__ == "EOFHeaderError":  # It has no public name.
                raise
            raise tarfile.ReadError(str(error)) from None


def take_archive(source: IO[bytes], root: Path, room: Room) -> Imported:
    """Put the files of the archive that `source` reads into the cache dir `root`.

    What is bad or finds no room is left out. Raises InvalidRequest for what is no archive, or is damaged.
    """
    result, is_export = Imported(), False
    fs, verifier = FileSystem(str(root / LOCK_NAME)), Verifier()
    try:
        with tarfile.open(fileobj=source, mode="r|", tarinfo=_Header) as archive:
            for member in archive:
                try:
                    _take(archive, member, root, room, result, fs, verifier)
                except _Bad as error:
                    result.bad.append(f"{member.name[:200]!r}: {error}")
                is_export = True
    except (tarfile.TarError, EOFError, ValueError, RecursionError) as error:
        if not is_export:
            raise InvalidRequest(f"It is no export of omlxd: {error}.") from None
        raise InvalidRequest(
            f"It is cut off or damaged from here on: {error}. "
            f"Imported before that: {counted(result.taken, 'file')}."
        ) from None
    return result


def _take(
    archive: tarfile.TarFile,
    member: tarfile.TarInfo,
    root: Path,
    room: Room,
    result: Imported,
    fs: FileSystem,
    verifier: Verifier,
) -> None:
    """Put one file in place, with its time of last use. Raises _Bad, or what tarfile does."""
    folder, _, name = member.name.rpartition("/")
    is_description = name == FILE_NAME and is_namespace_dir(folder)
    if member.type not in (tarfile.REGTYPE, tarfile.AREGTYPE) or not (
        is_description or is_stored_path(member.name)
    ):
        raise _Bad("no block, record or description")
    if member.size > (_MOST_NAME if is_description else MOST_BYTES):
        raise _Bad("it is too large")
    target = root / member.name
    if target.exists():
        result.there += not is_description
        return
    nbytes = 0 if is_description else disk_bytes(member.size)
    if nbytes and not room.reserve(nbytes):
        result.full += 1
        return
    # A name that the walk of a daemon's start knows and removes.
    temp = f"{target}.{os.getpid()}-{time.time_ns()}{TEMP_SUFFIX}"

    def write(fd: int) -> None:
        source = archive.extractfile(member)
        assert source is not None
        while piece := source.read(_PIECE):
            write_all(fs, fd, [memoryview(piece)])
        if fault := _fault(temp, member.name, verifier):
            raise _Bad(fault)
        # Of a time that is no number, 0 is left.
        used = max(0.0, min(float(member.mtime), time.time()))
        os.utime(temp, (used, used))

    try:
        put_in_place(fs, str(target), write, temp)
    except TempLeft as error:
        # The temporary file takes what was granted.
        if isinstance(error.__cause__, _Bad):
            raise _Bad(error.strerror) from None
        raise
    except BaseException:
        room.released(nbytes)
        raise
    room.stored(member.name, nbytes)
    result.taken += not is_description


def _fault(temp: str, path: str, verifier: Verifier) -> str:
    """What a check of the file finds; "": nothing. `path`: where it is to lie."""
    namespace, name = path.split("/")[0], path.rpartition("/")[2]
    if name == FILE_NAME:
        try:
            info = msgspec.json.decode(read_small(Path(temp)), type=NamespaceInfo)
        except (msgspec.MsgspecError, ValueError, RecursionError):
            return "it is no description"
        return "" if info.facts_digest.startswith(namespace) else "it describes another namespace"
    return verifier.verify(temp, namespace, name[:64], is_record=name.endswith(RECORD_SUFFIX)).fault
