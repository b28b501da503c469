"""Stored files that name a block as their parent, by their headers.

A hash leads from a parent to its child only with the child's tokens. No index keeps the other way: an
owner who asks why a prompt missed needs it, seldom, and can wait for seconds.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable, Iterator, Set
from dataclasses import dataclass
from pathlib import Path

import msgspec

from ...common.files import safetensors_header
from ...kv.files.block_file import keys_of_text
from ...kv.files.fs import entries_of, subfolders
from ...kv.files.paths import file_kind, is_fan_dir
from ...kv.hashing import BlockHash, ExtraKey

_HEAD = 640
"""Bytes of a file that hold its kind, hash and parent, whatever its tokens are."""
_MOST_HEADER = 1 << 20


@dataclass(slots=True, frozen=True)
class Child:
    """A stored block: its name, token ids and extra keys, and when it was last used (seconds since 1970)."""

    block_hash: BlockHash
    tokens: list[int]
    used: float
    extra_keys: tuple[ExtraKey, ...] = ()


@dataclass(slots=True)
class Search:
    """`children`: by their parent. `looked`: files opened; `complete`: no time limit cut it short."""

    children: dict[BlockHash, list[Child]]
    looked: int = 0
    complete: bool = True


class _Claims(msgspec.Struct):
    hash: str
    parent: str
    tokens: str
    extra: str = ""


class _Header(msgspec.Struct):
    claims: _Claims = msgspec.field(name="__metadata__")


def children(namespace: Path, parents: Iterable[BlockHash], seconds: float) -> Search:
    """Token blocks in the folder `namespace` whose parent is one of `parents`, within about `seconds`.

    Nothing is verified: what they say is for people to read, never KV to use. Never raises OSError.
    """
    search = Search({})
    wanted = {parent.hex().encode() for parent in parents}
    deadline = time.monotonic() + seconds
    for path in block_files(namespace):
        if search.looked % 64 == 0 and time.monotonic() > deadline:
            search.complete = False
            break
        search.looked += 1
        try:
            read = read_claims(path, wanted)
        except (OSError, ValueError):
            continue
        if read is not None:
            parent, child = read
            search.children.setdefault(parent, []).append(child)
    return search


def block_files(namespace: Path) -> Iterator[str]:
    with contextlib.suppress(OSError):
        for fan in subfolders(namespace, is_fan_dir):
            with contextlib.suppress(OSError):
                yield from (entry.path for entry in entries_of(fan.path) if file_kind(entry.name) == "block")


def read_claims(path: str, wanted: Set[bytes] | None = None) -> tuple[BlockHash, Child] | None:
    """A token block and its parent, if `wanted` (None: any file's). Raises OSError; ValueError: nonsense."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    with open(fd, "rb", buffering=0) as file:
        head = file.read(_HEAD)
        parent = head.partition(b'"parent":"')[2][:64]
        if wanted is not None and (parent not in wanted or b'"kind":"tokens"' not in head):
            return None
        file.seek(0)
        facts = os.fstat(fd)
        header = safetensors_header(file, facts.st_size, _MOST_HEADER)
        if header is None:
            return None
        claims = msgspec.json.decode(header, type=_Header).claims
        tokens = [int(token) for token in claims.tokens.split(",")]
        child = Child(bytes.fromhex(claims.hash), tokens, facts.st_mtime, keys_of_text(claims.extra))
        return bytes.fromhex(claims.parent), child
