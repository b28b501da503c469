"""`<namespace>/namespace.json` names the models of a folder of the cache dir. Its engine writes it.

Tools read it without a model, and the ledger: blocks of orphans go first. A namespace is

| an orphan, if                                                  | because                             |
|----------------------------------------------------------------|-------------------------------------|
| its description is missing or makes no sense                   | nobody can say whose it is          |
| its folder is gone, that of its adapter if it has one          | the model was removed               |
| that folder has been loaded since as another namespace         | weights or settings changed         |

and never one while an engine that runs uses it. Copies of a model, with equal files, share a namespace, and
it is an orphan only if it would be one of each copy. A folder that was renamed is not gone; one that was
moved elsewhere is, until it is loaded there. An orphan is not deleted for being one: a folder on a disk that
is not mounted comes back, and settings are changed back. It is only the first to make room.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

import msgspec
from msgspec.structs import force_setattr, replace

from ...common.files import read_small
from .fs import FileSystem, put_in_place, write_all
from .paths import NAMESPACE_HEX

FILE_NAME = "namespace.json"
MOST_COPIES = 16
"""Models that a description remembers; nobody keeps more copies of one."""


class Copy(msgspec.Struct, frozen=True):
    """A model that used a namespace. `config`: identity of its config, wherever that is; "": not known."""

    model_id: str
    model_path: str
    adapter: str
    config: str = ""

    @property
    def folder(self) -> str:
        return self.adapter or self.model_path

    def is_here(self) -> bool:
        """Return whether the model's folder exists, perhaps under another name beside its old place."""
        beside, is_here = os.path.dirname(self.folder), os.path.isdir(self.folder)
        if self.config and not is_here:
            with contextlib.suppress(OSError):
                is_here = any(
                    self.config_in(f"{beside}/{name}") == self.config for name in os.listdir(beside)
                )
        return is_here

    def config_in(self, folder: str) -> str:
        try:
            status = os.lstat(f"{folder}/{'adapter_' if self.adapter else ''}config.json")
        except OSError:
            return ""
        return f"{status.st_ino}:{status.st_size}:{status.st_mtime_ns}:{status.st_ctime_ns}"


class NamespaceInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A namespace's description. model_path, adapter: folders it was loaded from. created: seconds since
    1970, of the first load.

    block_size    tokens a block
    block_bytes   bytes on disk of one token block
    facts_digest  the namespace's digest, 64 hex digits; the folder's name is its first half
    facts         what it is the digest of; {} in a description that an older version wrote
    copies        models that used it, the last one first
    lead          of a rank's share: the folder of rank 0's namespace; if that is an orphan, this is one
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
    copies: tuple[Copy, ...] = ()
    lead: str = ""

    def __post_init__(self) -> None:
        if not self.copies:
            force_setattr(self, "copies", (Copy(self.model_id, self.model_path, self.adapter),))

    @property
    def names(self) -> list[str]:
        """Ids of the models that have it: those whose folder is in its place, or all that ever had it."""
        here = [copy.model_id for copy in self.copies if os.path.isdir(copy.folder)]
        return list(dict.fromkeys(here or [copy.model_id for copy in self.copies]))

    def is_called(self, name: str) -> bool:
        """Return whether `name` is the id or the folder of a model that used the namespace."""
        return any(name in (copy.model_id, copy.model_path) for copy in self.copies)

    def has_short_name(self, name: str) -> bool:
        """Return whether `name` is the last part of the id of a model that used the namespace."""
        return any(copy.model_id.rpartition("/")[2] == name for copy in self.copies)


def describe_namespace(root: Path, info: NamespaceInfo, fs: FileSystem) -> None:
    """Write the description of a namespace under cache dir `root`, all of it or nothing. Raises no OSError.

    The time of the first description and its copies stay; one that would say the same is not written again.
    """
    folder = root / info.facts_digest[:NAMESPACE_HEX]
    old = read_namespace(root, folder.name)
    own = replace(info.copies[0], config=info.copies[0].config_in(info.copies[0].folder))
    others = [
        copy
        for copy in (old.copies if old else ())
        if (copy.model_id, copy.folder) != (own.model_id, own.folder)
        and (copy.config != own.config or os.path.isdir(copy.folder))  # Or it has been renamed.
    ]
    copies = (own, *others)[:MOST_COPIES]
    data = msgspec.json.encode(replace(info, created=old.created if old else time.time(), copies=copies))
    if old is None or data != msgspec.json.encode(old):
        text = memoryview(msgspec.json.format(data))
        with contextlib.suppress(OSError):
            put_in_place(fs, str(folder / FILE_NAME), lambda fd: write_all(fs, fd, [text]))


def read_namespace(root: Path, folder: str) -> NamespaceInfo | None:
    """Read the description in `root/folder`, by the last model whose folder is in its place, if any.

    None: there is none that makes sense.
    """
    try:
        info = msgspec.json.decode(read_small(root / folder / FILE_NAME), type=NamespaceInfo)
    except (OSError, msgspec.MsgspecError, ValueError, RecursionError):
        return None
    last = next((copy for copy in info.copies if os.path.isdir(copy.folder)), info.copies[0])
    return replace(info, model_id=last.model_id, model_path=last.model_path, adapter=last.adapter)


def differences(own: dict[str, Any], other: dict[str, Any]) -> dict[str, str]:
    """The facts that differ, by name, in words; of weights, the files."""
    if not own or not other:
        return {}
    names: dict[str, str] = {}
    for name in sorted(own.keys() | other.keys()):
        here, there = own.get(name), other.get(name)
        if here == there:
            continue
        if isinstance(here, dict) and isinstance(there, dict):
            ours, theirs = cast(dict[str, Any], here), cast(dict[str, Any], there)
            parts = sorted(key for key in ours.keys() | theirs.keys() if ours.get(key) != theirs.get(key))
            names[name] = f"{name} ({', '.join(parts)})"
        elif isinstance(here, (int, str)) and isinstance(there, (int, str)):
            names[name] = f"{name} ({there}, now {here})"
        else:
            names[name] = name
    return names


class Installed:
    """Namespaces of installed models. `root`: the cache dir; namespaces are folder names."""

    def __init__(self, root: Path):
        self._root = root
        self._in_use: Counter[str] = Counter()
        self._loaded_as: dict[str, str] = {}  # model folder → namespace of its last load
        self._leads: dict[str, str] = {}  # of a rank's share → of rank 0

    def loaded(self, namespace: str, model_path: str, shares: Iterable[str] = ()) -> None:
        """Note that an engine runs the model of `model_path` under `namespace`, its other ranks under
        `shares`."""
        self._in_use[namespace] += 1
        self._loaded_as[model_path] = namespace
        self._leads |= dict.fromkeys(shares, namespace)

    def of_other_ranks(self, namespace: str) -> list[str]:
        """Return the namespaces in which other ranks keep their shares of its blocks, as far as known."""
        lead = self._leads.get(namespace, namespace)
        if lead not in self._leads.values():
            return []
        of_all = [lead, *(share for share, its in self._leads.items() if its == lead)]
        return [name for name in of_all if name != namespace]

    def left(self, namespace: str) -> None:
        """Note that an engine of `namespace` is gone."""
        self._in_use[namespace] -= 1

    def orphans(self, namespaces: Iterable[str]) -> set[str]:
        """Return the `namespaces` that no installed model has. Reads a small file of each."""
        return {namespace for namespace in namespaces if self._is_orphan(namespace)}

    def _is_orphan(self, namespace: str) -> bool:
        info = read_namespace(self._root, namespace)
        if info is not None and info.lead and info.lead != namespace:
            self._leads[namespace] = info.lead
            namespace = info.lead
            info = read_namespace(self._root, namespace)
        if self._in_use[namespace] > 0:
            return False
        return info is None or not any(
            self._loaded_as.get(copy.folder, namespace) == namespace and copy.is_here()
            for copy in info.copies
        )
