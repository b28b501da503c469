"""`omlxd cache export` and `import`: a model's blocks and records in one tar file, to keep or to carry.

They are hits where the same model is loaded with the same settings, versions and kind of processor: that is
what a namespace stands for. Each file's digest is checked on its way in (archive.py). A daemon that holds the
folder takes the files in itself. For one prompt the file may be mlx-lm's (prompt_cache.py).
"""

from __future__ import annotations

import argparse
import os
import sys
import tarfile
import time
from pathlib import Path
from typing import IO

from ....common.files import new_file, safetensors_header
from ....common.units import counted, disk_room, human
from ....config import Settings, ssd_cap
from ....errors import ConfigError, InvalidRequest, OmlxdError
from ....kv.files.namespace import FILE_NAME
from ....kv.files.paths import SUFFIX
from ...daemon.client import STREAM_S, DaemonError, find_daemon, pieces
from ...daemon.owner_api import CachedFiles, Imported
from .. import holder, inventory
from ..asked import named_request
from ..clear import named
from ..why_miss import ANSWER_S
from . import prompt_cache
from .archive import Room, take_archive


def export_files(args: argparse.Namespace, settings: Settings, root: Path) -> int:
    """Export files; exit status 1 if blocks of a session lack one. Evicted files are left out."""
    if sum(map(bool, (args.named, args.model, args.session))) != 1:
        raise ConfigError(
            "Say what to export: `omlxd cache export MODEL FILE`, or `omlxd cache export --session last "
            "FILE`."
        )
    args.model = args.model or args.named
    if args.format == "mlx-lm":
        return prompt_cache.export_file(args, settings)
    files = _of_session(args, settings, root) if args.session else _of_model(args, root)
    folders = dict.fromkeys(path.partition("/")[0] for path in files)
    nbytes = count = missing = 0
    with new_file(args.archive) as target, tarfile.open(fileobj=target, mode="w") as archive:
        for path in [f"{folder}/{FILE_NAME}" for folder in folders] + files:
            try:
                with open(root / path, "rb") as file:
                    member = archive.gettarinfo(arcname=path, fileobj=file)
                    archive.addfile(member, file)
            except FileNotFoundError:
                missing += not path.endswith(FILE_NAME)
                continue
            if not path.endswith(FILE_NAME):
                count, nbytes = count + 1, nbytes + member.size
    ranks = max((1 + len(its) for folder, its in _by_lead(root).items() if folder in folders), default=1)
    of_all = f", the shares of {ranks} ranks" if ranks > 1 else ""
    print(f"{args.archive}: {counted(count, 'file')}, {human(nbytes)}{of_all}")
    print("Its digests show damage, not who made it: import an archive only from somebody you trust.")
    if missing and args.session:
        more = f"in RAM alone: {counted(missing, 'more file')}"
        print(f"{more}; send the prompt once more, wait, and export again", file=sys.stderr)
    return 1 if missing and args.session else 0


def _of_model(args: argparse.Namespace, root: Path) -> list[str]:
    chosen = named(inventory.namespaces(root), args.model)
    if not chosen:
        raise ConfigError(
            f"Nothing of {args.model!r} is cached; `omlxd cache stats` lists the models that have something."
        )
    before = time.time() - args.newer_than if args.newer_than is not None else 0.0
    files = [file for file in inventory.walk(root, list(chosen)) if file.kind in ("block", "record")]
    # A prefix before what goes on from it.
    newer = [file.path for file in sorted(files, key=lambda file: -file.used) if file.used >= before]
    if not newer:
        raise ConfigError(f"--newer-than: nothing of {args.model!r} was used within it.")
    return newer


def _of_session(args: argparse.Namespace, settings: Settings, root: Path) -> list[str]:
    asked = named_request(args.session)
    found = find_daemon(args.url, settings).fetch("/omlxd/cache/files", CachedFiles, asked, ANSWER_S)
    if not found.files:
        raise ConfigError(f"--session: nothing of {args.session!r} is cached.")
    by_lead = _by_lead(root)
    parts = [path.partition("/") for path in found.files]
    # Records are rank 0's alone.
    shares = [
        f"{share}/{rest}"
        for folder, _, rest in parts
        for share in by_lead.get(folder, ())
        if rest.endswith(SUFFIX)
    ]
    return found.files + shares


def _by_lead(root: Path) -> dict[str, list[str]]:
    return inventory.by_lead(inventory.namespaces(root)) if root.is_dir() else {}


def import_files(args: argparse.Namespace, settings: Settings, root: Path) -> int:
    """Import files, but not bad ones, nor those without room: then the exit status is 1."""
    try:
        source = args.archive.open("rb")
    except FileNotFoundError:
        raise OmlxdError(f"{args.archive}: there is no such file") from None
    with source:
        header = safetensors_header(source, os.fstat(source.fileno()).st_size)
        source.seek(0)
        if header is not None and header.startswith(b"{"):
            return prompt_cache.import_file(args, settings, source, header)
        if args.prompt or args.model:
            raise ConfigError(
                f"{args.archive} is no prompt cache of mlx-lm: --prompt and --model are for one."
            )
        try:
            daemon = holder.find(root, settings, args.url) if root.is_dir() else None
            if daemon is not None:
                done = daemon.fetch("/omlxd/cache/import", Imported, pieces(source), STREAM_S)
            else:
                done = _import_here(source, settings, root)
        except (InvalidRequest, DaemonError) as error:
            raise OmlxdError(f"{args.archive}: {error.message}") from None
    print(*(f"bad: {each}" for each in done.bad), sep="\n", end="\n" if done.bad else "")
    print(f"{counted(done.taken, 'file')} imported, {done.there} were there, {len(done.bad)} bad")
    if done.full:
        most = daemon.cap if daemon else ssd_cap(settings, inventory.bytes_held(root))
        left_out = f"{counted(done.full, 'file')} left out"
        print(f"{left_out}: the SSD cache may take {human(most)}, as far as its disk has room")
    return 1 if done.bad or done.full else 0


def _import_here(source: IO[bytes], settings: Settings, root: Path) -> Imported:
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    with holder.exclusive(root):
        return take_archive(source, root, _Room(root, settings))


class _Room(Room):
    """Room in a folder that no daemon holds."""

    def __init__(self, root: Path, settings: Settings):
        held = inventory.bytes_held(root)
        self._left = min(ssd_cap(settings, held) - held, disk_room(root))

    def reserve(self, nbytes: int) -> bool:
        if nbytes > self._left:
            return False
        self._left -= nbytes
        return True

    def stored(self, path: str, nbytes: int) -> None:
        pass

    def released(self, nbytes: int) -> None:
        self._left += nbytes
