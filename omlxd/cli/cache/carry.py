"""`omlxd cache export` and `import`: a model's blocks and records in one tar file, to keep or to carry.

They are hits where the same model is loaded with the same settings, versions and kind of processor: that is
what a namespace stands for. Each file's digest is checked on its way in.
"""

from __future__ import annotations

import argparse
import os
import tarfile
import time
from pathlib import Path

from ...common.units import human
from ...config import Settings
from ...errors import ConfigError, OmlxdError
from ...kv.files.fs import FileSystem, put_in_place, write_all
from ...kv.files.namespace import FILE_NAME, read_namespace
from ...kv.files.paths import RECORD_SUFFIX, is_namespace_dir, is_stored_path
from . import inventory
from .clear import named
from .holder import exclusive
from .verify import Verifier

MOST_BYTES = 1 << 30
"""Of one file in an archive; blocks have some megabytes."""


def export_files(args: argparse.Namespace, settings: Settings, root: Path) -> int:
    """A daemon may run; a file that it evicts meanwhile is left out. Raises OmlxdError, OSError."""
    chosen = named(inventory.namespaces(root), args.model)
    if not chosen:
        raise ConfigError(f"--model: nothing of {args.model!r} is cached.", param="--model")
    before = time.time() - args.newer_than if args.newer_than else 0.0
    files = [file for file in inventory.walk(root, list(chosen)) if file.kind in ("block", "record")]
    # A prefix before what goes on from it.
    files = sorted((file for file in files if file.used >= before), key=lambda file: -file.used)
    nbytes = count = 0
    with tarfile.open(args.archive, "x") as archive:
        for path in [f"{folder}/{FILE_NAME}" for folder in chosen] + [file.path for file in files]:
            try:
                archive.add(root / path, path, recursive=False)
            except FileNotFoundError:
                continue
            count, nbytes = count + 1, nbytes + (root / path).stat().st_size
    print(f"{args.archive}: {count} files, {human(nbytes)}")
    return 0


def import_files(args: argparse.Namespace, settings: Settings, root: Path) -> int:
    """Exit status 1 if a file of the archive is bad; the others are taken. Raises OmlxdError, OSError."""
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    taken = there = bad = 0
    with exclusive(root), _opened(args.archive) as archive:
        while (member := _next(archive)) is not None:
            try:
                if _take(archive, member, root):
                    taken += 1
                else:
                    there += 1
            except _Bad as error:
                bad += 1
                print(f"bad: {member.name[:200]!r}: {error}")
    print(f"{taken} files imported, {there} were there, {bad} bad")
    return 1 if bad else 0


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
