"""transformers, imported without reading all of itself.

`import transformers` reads the 3,300 files of its `models` folder, and the first use of AutoTokenizer
reads them again, to learn which name lies in which module: the largest part of an engine's start. A
tokenizer needs few of those names. So the two modules that know them all (`transformers` and
`transformers.models`) know the AutoTokenizer's folder at first, and read the rest when somebody asks
for a name that is not there: by transformers' own code, with the same result.

Importing this module arranges for that; it must come before the first import of transformers. Where
that looks otherwise than expected, it is left as it is.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

IMPORT_UTILS = "transformers.utils.import_utils"
_FIRST = "auto"
"""The folder of AutoTokenizer and AutoConfig within `models`."""
_LEARNT = ("_modules", "_class_to_module", "_object_missing_backend", "_import_structure", "__all__")
"""Attributes that a `_LazyModule` makes of its structure."""
_REST = "_omlxd_rest"

_Structure = dict[frozenset[str], dict[str, set[str]]]
"""Backends → module → names in it."""


class _Part(_Structure):
    """The structure of one folder. `complete()`: that of all."""

    complete: Callable[[], _Structure]


class _Finder(importlib.abc.MetaPathFinder):
    """Finds transformers' own lazy modules once, and changes them when they have been executed."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != IMPORT_UTILS:
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        loader = spec.loader if spec is not None else None
        if isinstance(loader, importlib.machinery.SourceFileLoader):
            execute = loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                read_models_later(module)

            loader.exec_module = exec_module
        return spec


def read_models_later(import_utils: Any) -> None:
    """Change what `transformers.utils.import_utils` holds."""
    lazy = getattr(import_utils, "_LazyModule", None)
    define = getattr(import_utils, "define_import_structure", None)
    models = Path(import_utils.__file__).parents[1] / "models"
    if lazy is None or define is None or not (models / _FIRST).is_dir():
        return
    init, find = lazy.__init__, lazy.__getattr__

    def define_import_structure(module_path: Any, prefix: str | None = None) -> _Structure:
        if Path(module_path) not in (models, models / "__init__.py"):
            return define(module_path, prefix)
        part = _Part(define(models / _FIRST, _FIRST if prefix is None else f"{prefix}.{_FIRST}"))
        part.complete = lambda: define(module_path, prefix)
        return part

    def __init__(self: Any, name: str, module_file: str, structure: Any, *args: Any, **others: Any) -> None:
        init(self, name, module_file, structure, *args, **others)
        if isinstance(structure, _Part):
            setattr(self, _REST, lambda: lazy(name, module_file, _joined(structure)))
            del self.__all__  # Whoever asks gets it from `__getattr__`.

    def __getattr__(self: Any, name: str) -> Any:
        if _REST in vars(self) and (name == "__all__" or not (name.startswith("_") or _knows(self, name))):
            complete = vars(self)[_REST]()
            for attribute in _LEARNT:
                setattr(self, attribute, getattr(complete, attribute))
            vars(self).pop(_REST, None)  # Last: another thread may be here too.
            if name == "__all__":
                return complete.__all__
        return find(self, name)

    import_utils.define_import_structure = define_import_structure
    lazy.__init__, lazy.__getattr__ = __init__, __getattr__


def _joined(part: _Part) -> _Structure:
    """The structure, with the modules that transformers itself put into `part`."""
    complete = part.complete()
    for backends, modules in part.items():
        complete.setdefault(backends, {}).update(modules)
    return complete


def _knows(module: Any, name: str) -> bool:
    return (
        name in module._class_to_module
        or name in module._modules
        or name in module._objects
        or name in module._object_missing_backend
    )


if "transformers" not in sys.modules:
    sys.meta_path.insert(0, _Finder())
