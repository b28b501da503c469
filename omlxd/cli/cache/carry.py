"""`omlxd cache export` and `import`: a model's blocks and records in one tar file, to keep or to carry.

They are hits where the same model is loaded with the same settings, versions and kind of processor: that is
what a namespace stands for. Each file's digest is checked on its way in.
"""

from __future__ import annotations

import argparse
import os
import sys
import tarfile
import time
from pathlib import Path

import msgspec

from ...common.units import human
from ...config import Settings
from ...errors import ConfigError, OmlxdError
from ...kv.files.fs import FileSystem, put_in_place, write_all
from ...kv.files.namespace import FILE_NAME, read_namespace
from ...kv.files.paths import RECORD_SUFFIX, disk_bytes, is_namespace_dir, is_stored_path
from ..daemon_client import address, fetch
from ..owner_api import CachedFiles
from . import inventory
from .clear import named
from .holder import exclusive
from .pin import named_request
from .verify import Verifier
from .why_miss import ANSWER_S

MOST_BYTES = 1 << 30
"""Of one file in an archive; blocks have some megabytes."""


def export_files(args: argparse.Namespace, settings: Settings, root: Path) -> int:
    """A daemon may run; a file that it evicts meanwhile is left out. Raises OmlxdError, OSError.

    Exit status 1 if blocks of a session have no file.
    """
    files = _of_session(args, settings) if args.session else _of_model(args, root)
    folders = dict.fromkeys(path.partition("/")[0] for path in files)
    nbytes = count = missing = 0
    fd = os.open(args.archive, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "wb") as target, tarfile.open(fileobj=target, mode="w") as archive:
        for path in [f"{folder}/{FILE_NAME}" for folder in folders] + files:
            try:
                archive.add(root / path, path, recursive=False)
            except FileNotFoundError:
                missing += not path.endswith(FILE_NAME)
                continue
            count, nbytes = count + 1, nbytes + (root / path).stat().st_size
    print(f"{args.archive}: {count} files, {human(nbytes)}")
    if missing and args.session:
        print(f"{missing} more are in RAM alone: send it once more, wait, and export again", file=sys.stderr)
    return 1 if missing and args.session else 0


def _of_model(args: argparse.Namespace, root: Path) -> list[str]:
    chosen = named(inventory.namespaces(root), args.model)
    if not chosen:
        raise ConfigError(f"--model: nothing of {args.model!r} is cached.", param="--model")
    before = time.time() - args.newer_than if args.newer_than is not None else 0.0
    files = [file for file in inventory.walk(root, list(chosen)) if file.kind in ("block", "record")]
    # A prefix before what goes on from it.
    newer = [file.path for file in sorted(files, key=lambda file: -file.used) if file.used >= before]
    if not newer:
        raise ConfigError(
            f"--newer-than: nothing of {args.model!r} was used within it.", param="--newer-than"
        )
    return newer


def _of_session(args: argparse.Namespace, settings: Settings) -> list[str]:
    asked = msgspec.json.encode(named_request(args.session))
    found = fetch(*address(args.url, settings), "/omlxd/cache/files", CachedFiles, asked, ANSWER_S)
    if not found.files:
        raise ConfigError(f"--session: nothing of {args.session!r} is cached.", param="--session")
    return found.files


def import_files(args: argparse.Namespace, settings: Settings, root: Path) -> int:
    """Exit status 1 if a file of the archive is bad or finds no room; the others are taken.

    Raises OmlxdError, OSError.
    """
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    taken = there = bad = full = 0
    with exclusive(root), _opened(args.archive) as archive:
        folders = list(inventory.namespaces(root))
        room = settings.cold_cache_bytes - sum(each.disk for each in inventory.walk(root, folders))
        while (member := _next(archive)) is not None:
            try:
                if room < disk_bytes(member.size) and not (root / member.name).exists():
                    full += 1
                elif _take(archive, member, root):
                    taken += 1
                    room -= disk_bytes(member.size)
                else:
                    there += 1
            except _Bad as error:
                bad += 1
                print(f"bad: {member.name[:200]!r}: {error}")
    print(f"{taken} files imported, {there} were there, {bad} bad")
    if full:
        print(f"{full} files left out: the SSD cache may take {human(settings.cold_cache_bytes)}")
    return 1 if bad or full else 0


class _Bad(Exception):
    """What is wrong with a file of an archive."""


def _opened(path: Path) -> tarfile.TarFile:
    try:
        return tarfile.open(path, "r:")
    except tarfile.TarError as error:
        raise OmlxdError(f"{path} is no export: {error}") from error


def _next(archive: tarfile.TarFile) -> tarfile.TarInfo | None:
    try:
        return archive.next()
    except (tarfile.TarError, OSError, EOFError) as error:
        raise OmlxdError(f"{archive.name} is cut off or damaged from here on: {error}") from error


def _take(archive: tarfile.TarFile, member: tarfile.TarInfo, root: Path) -> bool:
    """Put one file in place, with its time of last use; False: there is one already. Raises _Bad."""
    folder, _, name = member.name.rpartition("/")
    is_description = name == FILE_NAME and is_namespace_dir(folder)
    if not member.isfile() or not (is_description or is_stored_path(member.name)):
        raise _Bad("no block, record or description")
    if member.size > MOST_BYTES:
        raise _Bad("it is larger than 1 GiB")
    target = root / member.name
    if target.exists():
        return False
    try:
        source = archive.extractfile(member)
        data = source.read() if source is not None else b""
    except (tarfile.TarError, OSError) as error:
        raise _Bad(str(error)) from None
    target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    fs = FileSystem()
    put_in_place(fs, str(target), lambda fd: write_all(fs, fd, [memoryview(data)]))
    if fault := _fault(target, is_description):
        target.unlink()
        raise _Bad(fault)
    used = min(float(member.mtime), time.time())
    os.utime(target, (used, used))
    return True


def _fault(file: Path, is_description: bool) -> str:
    """What a check of the file finds; "": nothing."""
    namespace, digest = file.parent.parent.name, file.name[:64]
    if is_description:
        return "" if read_namespace(file.parent.parent, file.parent.name) else "it is no description"
    if file.name.endswith(RECORD_SUFFIX):
        return Verifier().verify_record(str(file), digest).fault
    return Verifier().verify(str(file), namespace, digest).fault
