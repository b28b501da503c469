"""`<namespace>/namespace.json` says whose a folder of the cache dir is. Its engine writes it.

Tools read it without a model, and the ledger: blocks of orphans go first. A namespace is

| an orphan, if                                                  | because                             |
|----------------------------------------------------------------|-------------------------------------|
| its description is missing or makes no sense                   | nobody can say whose it is          |
| its folder is gone, that of its adapter if it has one          | the model was removed               |
| that folder has been loaded since as another namespace         | weights or settings changed         |

and never one while an engine that runs uses it. An orphan is not deleted for being one: a folder on a
disk that is not mounted comes back, and settings are changed back. It is only the first to make room.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from ...common.files import read_small
from .fs import FileSystem, put_in_place, write_all
from .paths import NAMESPACE_HEX

FILE_NAME = "namespace.json"


class NamespaceInfo(msgspec.Struct, frozen=True, kw_only=True):
    """model_path, adapter: folders it was loaded from. created: seconds since 1970, of the first load.

    block_size    tokens a block
    block_bytes   bytes on disk of one token block
    facts_digest  the namespace's digest, 64 hex digits; the folder's name is its first half
    facts         what it is the digest of; {} in a description that an older version wrote
    """

    model_id: str
    model_path: str
    model_type: str
    block_size: int
    block_bytes: int
    facts_digest: str
    facts: dict[str, Any] = {}
    created: float = 0.0
    adapter: str = ""


def describe_namespace(root: Path, info: NamespaceInfo, fs: FileSystem) -> None:
    """Write the description of a namespace under cache dir `root`, all of it or nothing. Raises no OSError.

    The time of the first description stays; one that would say the same is not written again.
    """
    folder = root / info.facts_digest[:NAMESPACE_HEX]
    old = read_namespace(root, folder.name)
    data = msgspec.json.encode(replace(info, created=old.created if old else time.time()))
    if old is None or data != msgspec.json.encode(old):
        text = memoryview(msgspec.json.format(data))
        with contextlib.suppress(OSError):
            put_in_place(fs, str(folder / FILE_NAME), lambda fd: write_all(fs, fd, [text]))


def read_namespace(root: Path, folder: str) -> NamespaceInfo | None:
    """The description in `root/folder`; None if there is none that makes sense."""
    try:
        return msgspec.json.decode(read_small(root / folder / FILE_NAME), type=NamespaceInfo)
    except (OSError, msgspec.MsgspecError, ValueError, RecursionError):
        return None


class Installed:
    """Which namespaces belong to installed models. `root`: the cache dir; namespaces are folder names."""

    def __init__(self, root: Path):
        self._root = root
        self._in_use: Counter[str] = Counter()
        self._loaded_as: dict[str, str] = {}  # model folder → namespace of its last load

    def loaded(self, namespace: str, model_path: str) -> None:
        """An engine runs the model of `model_path` under `namespace`."""
        self._in_use[namespace] += 1
        self._loaded_as[model_path] = namespace

    def left(self, namespace: str) -> None:
        """That engine is gone."""
        self._in_use[namespace] -= 1

    def orphans(self, namespaces: Iterable[str]) -> set[str]:
        """Those of `namespaces` that no installed model has. Reads a small file of each."""
        return {namespace for namespace in namespaces if self._is_orphan(namespace)}

    def _is_orphan(self, namespace: str) -> bool:
        if self._in_use[namespace] > 0:
            return False
        info = read_namespace(self._root, namespace)
        if info is None or not os.path.isdir(info.adapter or info.model_path):
            return True
        return self._loaded_as.get(info.adapter or info.model_path, namespace) != namespace
