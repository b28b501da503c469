"""Takes an exported archive in: each file is verified under another name, and put in place whole.

`omlxd cache import` does so in a folder that no daemon holds, a daemon in its own
(front/owner/cache/carry.py). Whoever is killed in the middle leaves a temporary file, which the
next daemon removes.

An archive comes from anywhere. So each size is bounded before a byte of it is read, each byte is reserved
before it is written, and a namespace gets its description, of one page, behind the first of its files. The
digests show damage. They do not show who made an archive: its maker can give any KV to any tokens.
"""

from __future__ import annotations

import os
import tarfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, Protocol

import msgspec
from msgspec.structs import replace

from ....common.units import counted
from ....errors import InvalidRequest
from ....kv.files.fs import FileSystem, TempLeft, put_in_place, write_all
from ....kv.files.namespace import FILE_NAME, NamespaceInfo
from ....kv.files.paths import (
    LOCK_NAME,
    PAGE,
    RECORD_SUFFIX,
    TEMP_SUFFIX,
    disk_bytes,
    is_namespace_dir,
    is_stored_path,
)
from ...daemon.owner_api import Imported
from ..checks.verify import Verifier

MOST_BYTES = 1 << 30
"""Bytes of one file in an archive at most; blocks have some megabytes."""
_MOST_HEADER = 1 << 16
"""Bytes of a member's long name or other extra header; some 300 may nest."""
_MOST_DESCRIPTION = 1 << 16
MOST_NAMESPACES = 256
"""Namespaces whose descriptions wait for a first file. An export has those of one model."""
MOST_BAD = 1000
"""Bad files after which an archive is read no further."""
_PIECE = 1 << 20
_HEADERS = (
    *(tarfile.REGTYPE, tarfile.AREGTYPE, tarfile.DIRTYPE, tarfile.LNKTYPE, tarfile.SYMTYPE),
    *(tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.FIFOTYPE, tarfile.XHDTYPE, tarfile.GNUTYPE_LONGNAME),
)
"""Kinds of headers that `tar` makes of our files. Sparse files and global headers hold sizes of their own."""


class Room(Protocol):
    """The account of the folder's bytes."""

    def reserve(self, nbytes: int) -> bool:
        """Reserve `nbytes` for the caller; returns whether there is room."""
        ...

    def stored(self, path: str, nbytes: int) -> None:
        """Count reserved bytes as the file `path`, relative to the folder."""
        ...

    def released(self, nbytes: int) -> None:
        """Release reserved bytes."""
        ...


class _Bad(Exception):
    """A fault of a file in an archive."""


class _Header(tarfile.TarInfo):
    """A header whose sizes are bounded, however it says them.

    tarfile takes a header that makes no sense, and a file that ends early, for the end of an archive. It
    believes any size, and reads to its end, even if the archive is over.
    """

    @classmethod
    def frombuf(cls, buf: Any, encoding: str, errors: str) -> Any:
        member = super().frombuf(buf, encoding, errors)
        if member.type not in _HEADERS:
            raise tarfile.ReadError("it has a header that no export has")
        is_extra = member.type in (tarfile.XHDTYPE, tarfile.GNUTYPE_LONGNAME)
        _check_size(member.size, _MOST_HEADER if is_extra else MOST_BYTES)
        return member

    @classmethod
    def fromtarfile(cls, archive: tarfile.TarFile) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        try:
            return super().fromtarfile(archive)
        except tarfile.HeaderError as error:
            if type(error).__name__ == "EOFHeaderError":  # It has no public name.
                raise
            raise tarfile.ReadError(str(error)) from None

    def _apply_pax_info(self, pax_headers: dict[str, str], encoding: str, errors: str) -> None:
        """Replace fields of the header by those of a PAX header; tarfile calls it."""
        super()._apply_pax_info(pax_headers, encoding, errors)  # type: ignore[misc]
        _check_size(self.size, MOST_BYTES)

    def _no_sparse(self, *_: Any) -> None:
        """Refuse a sparse file; tarfile calls it before it reads the file's map. Raises tarfile.ReadError."""
        raise tarfile.ReadError("it has a sparse file, which no export has")

    _proc_gnusparse_00 = _proc_gnusparse_01 = _proc_gnusparse_10 = _no_sparse


def _check_size(size: int, most: int) -> None:
    """Check a size. Raises tarfile.ReadError. tarfile goes back in the archive where a size is below 0."""
    if not 0 <= size <= most:
        raise tarfile.ReadError("a header is too large" if most == _MOST_HEADER else "a file is too large")


def take_archive(source: IO[bytes], root: Path, room: Room) -> Imported:
    """Put the files of the archive that `source` reads into the cache dir `root`.

    What is bad or finds no room is left out. Raises InvalidRequest for what is no archive, or is damaged.
    """
    importing = _Importing(root, room)
    try:
        with tarfile.open(fileobj=source, mode="r|", tarinfo=_Header) as archive:
            while (member := archive.next()) is not None:
                importing.take(archive, member)
                archive.members.clear()  # type: ignore[attr-defined]  # It would keep each.
    except (tarfile.TarError, EOFError, ValueError, RecursionError) as error:
        if not importing.is_export:
            raise InvalidRequest(f"It is no export of omlxd: {error}.") from None
        raise InvalidRequest(
            f"It is cut off or damaged from here on: {error}. "
            f"Imported before that: {counted(importing.result.taken, 'file')}."
        ) from None
    return importing.result


class _Importing:
    """An import of one archive into the cache dir `root`."""

    def __init__(self, root: Path, room: Room):
        self.result = Imported()
        self.is_export = False
        self._root, self._room = root, room
        self._fs, self._verifier = FileSystem(str(root / LOCK_NAME)), Verifier()
        self._descriptions: dict[str, bytes] = {}
        """Namespace → description, b"" once it is in place."""

    def take(self, archive: tarfile.TarFile, member: tarfile.TarInfo) -> None:
        """Put one file in place, with its time of last use. Raises what tarfile does, OSError."""
        try:
            self._take(archive, member)
        except _Bad as error:
            self.result.bad.append(f"{member.name[:200]!r}: {error}")
            if len(self.result.bad) == MOST_BAD:
                raise tarfile.ReadError(f"{MOST_BAD} of its files are bad") from None
        self.is_export = True

    def _take(self, archive: tarfile.TarFile, member: tarfile.TarInfo) -> None:
        folder, _, name = member.name.rpartition("/")
        is_description = name == FILE_NAME and is_namespace_dir(folder)
        if member.type not in (tarfile.REGTYPE, tarfile.AREGTYPE) or not (
            is_description or is_stored_path(member.name)
        ):
            raise _Bad("no block, record or description")
        source = archive.extractfile(member)
        assert source is not None
        if is_description:
            self._keep_description(folder, source, member.size)
        elif (self._root / member.name).exists():
            self.result.there += 1
            self._describe(folder.split("/")[0])
        else:
            self._put(source, member)

    def _keep_description(self, namespace: str, source: IO[bytes], size: int) -> None:
        if size > _MOST_DESCRIPTION:
            raise _Bad("it is too large")
        if namespace not in self._descriptions and len(self._descriptions) == MOST_NAMESPACES:
            raise _Bad(f"the archive has more than {MOST_NAMESPACES} namespaces")
        self._descriptions[namespace] = _description(source.read(), namespace)

    def _put(self, source: IO[bytes], member: tarfile.TarInfo) -> None:
        def write(fd: int) -> None:
            while piece := source.read(_PIECE):
                write_all(self._fs, fd, [memoryview(piece)])
            namespace, name = member.name.split("/")[0], member.name.rpartition("/")[2]
            verdict = self._verifier.verify(
                temp, namespace, name[:64], is_record=name.endswith(RECORD_SUFFIX)
            )
            if verdict.fault:
                raise _Bad(verdict.fault)
            # Of a time that is no number, 0 is left.
            used = max(0.0, min(float(member.mtime), time.time()))
            os.utime(temp, (used, used))

        # A name that the walk of a daemon's start knows and removes.
        target = f"{self._root / member.name}"
        temp = f"{target}.{os.getpid()}-{time.time_ns()}{TEMP_SUFFIX}"
        nbytes = disk_bytes(member.size)
        if not self._write(target, write, temp, nbytes):
            self.result.full += 1
            return
        self._room.stored(member.name, nbytes)
        self.result.taken += 1
        self._describe(member.name.split("/")[0])

    def _describe(self, namespace: str) -> None:
        """Write the namespace's description, if one came and none is there. The account leaves it out."""
        text = self._descriptions.pop(namespace, b"")
        target = self._root / namespace / FILE_NAME
        if not text or target.exists():
            return
        temp = f"{target}.{os.getpid()}-{time.time_ns()}{TEMP_SUFFIX}"
        nbytes = disk_bytes(len(text))
        if self._write(str(target), lambda fd: write_all(self._fs, fd, [memoryview(text)]), temp, nbytes):
            self._room.released(nbytes)

    def _write(self, target: str, write: Callable[[int], object], temp: str, nbytes: int) -> bool:
        """Reserve `nbytes` and write the file; False: there is no room. Raises _Bad, OSError."""
        if nbytes and not self._room.reserve(nbytes):
            return False
        try:
            put_in_place(self._fs, target, write, temp)
        except TempLeft as error:
            # The temporary file takes what was granted.
            if isinstance(error.__cause__, _Bad):
                raise _Bad(error.strerror) from None
            raise
        except BaseException:
            self._room.released(nbytes)
            raise
        return True


def _description(text: bytes, namespace: str) -> bytes:
    """Return a namespace's description in at most a page, with as many of its copies. Raises _Bad."""
    try:
        info = msgspec.json.decode(text, type=NamespaceInfo)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        raise _Bad("it is no description") from None
    if not info.facts_digest.startswith(namespace):
        raise _Bad("it describes another namespace")
    for copies in range(len(info.copies), 0, -1):
        made = msgspec.json.format(msgspec.json.encode(replace(info, copies=info.copies[:copies])))
        if len(made) <= PAGE:
            return made
    raise _Bad("it is too large")
