"""Which namespaces belong to a model that is installed; the others are orphans, and their blocks go first.

A namespace's folder is described by the engine that writes it (namespace_file.py). It is

| an orphan, if                                                  | because                             |
|----------------------------------------------------------------|-------------------------------------|
| its description is missing or makes no sense                   | nobody can say whose it is          |
| the model's folder is gone                                     | the model was removed               |
| the model's folder has been loaded since as another namespace  | weights or settings changed         |

and never one while an engine that runs uses it. An orphan is not deleted for being one: a folder on a
disk that is not mounted comes back, and settings are changed back. It is only the first to make room.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from .namespace_file import read_namespace


class Installed:
    """`root`: the cache dir. Namespaces are folder names."""

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
        if info is None or not os.path.isdir(info.model_path):
            return True
        return self._loaded_as.get(info.model_path, namespace) != namespace
