"""`<namespace>/namespace.json`: what a folder of the cache dir holds, for tools that run without a model.

Nothing in serving reads it; a folder without one is as good as any.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from .hashing import BlockHash
from .paths import namespace_dir

FILE_NAME = "namespace.json"


class NamespaceInfo(msgspec.Struct, frozen=True, kw_only=True):
    """model_path: the folder it was loaded from. created: seconds since 1970, of the first load.

    block_size    tokens a block
    block_bytes   bytes on disk of one token block
    facts_digest  the whole namespace, 64 hex digits; the folder's name is its first half
    facts         what it is the digest of; {} in a description that an older version wrote
    """

    model_id: str
    model_path: str
    model_type: str
    block_size: int
    block_bytes: int
    created: float
    facts_digest: str
    facts: dict[str, Any] = {}


def describe_namespace(
    root: Path,
    namespace: BlockHash,
    *,
    model_id: str,
    model_path: str,
    model_type: str,
    block_size: int,
    block_bytes: int,
    facts: Mapping[str, Any] | None = None,
) -> None:
    """Write the description of a namespace under cache dir `root`, whole or not at all. Never raises OSError.

    The time of the first description stays; one that would say the same is not written again.
    """
    old = read_namespace(root, namespace_dir(namespace))
    new = NamespaceInfo(
        model_id=model_id,
        model_path=model_path,
        model_type=model_type,
        block_size=block_size,
        block_bytes=block_bytes,
        created=old.created if old else time.time(),
        facts_digest=namespace.hex(),
        # As it will be read again: JSON has no tuples.
        facts=msgspec.json.decode(msgspec.json.encode(dict(facts or {}))),
    )
    if new == old:
        return
    folder = root / namespace_dir(namespace)
    temp = folder / f"{FILE_NAME}.{os.getpid()}.tmp"
    try:
        folder.mkdir(exist_ok=True, mode=0o700)
        temp.write_bytes(msgspec.json.format(msgspec.json.encode(new)))
        temp.replace(folder / FILE_NAME)
    except OSError:
        with contextlib.suppress(OSError):
            temp.unlink()


def read_namespace(root: Path, folder: str) -> NamespaceInfo | None:
    """The description in `root/folder`; None if there is none that makes sense."""
    try:
        return msgspec.json.decode((root / folder / FILE_NAME).read_bytes(), type=NamespaceInfo)
    except (OSError, msgspec.MsgspecError, ValueError, RecursionError):
        return None
