"""Whether a process may read the folders that omlxd uses, and those that macOS keeps from services (TCC)."""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

from ....config import Settings
from ...service.protected import PROTECTED, protected_place, used_paths
from .bounds import within

PLACE_S = 2.0
"""Seconds for one folder: macOS may ask its user, who may not see the question."""


def places(settings: Settings) -> dict[str, str]:
    """Return name → path. No name is one that somebody chose."""
    home = Path.home()
    result = {name: os.path.expanduser(path) for path, name in PROTECTED.items()}
    for what, path in used_paths(settings, settings.log_file):
        name = re.sub(r"^(the adapter|the draft model) of .*", r"\1", what)
        inside = protected_place(path, home)
        result[f"{name} (in {inside})" if inside else name] = str(path)
    return result


def describe(paths: Mapping[str, str]) -> str:
    """Say which can be read, and why others can't."""
    states: dict[str, list[str]] = defaultdict(list)
    for name, path in paths.items():
        states[_state(path)].append(name)
    return "; ".join(f"{state}: {', '.join(names)}" for state, names in states.items())


def _state(path: str) -> str:
    try:
        within(PLACE_S, lambda: _read(path))
    except FileNotFoundError:
        return "absent"
    except TimeoutError:
        return f"no answer within {PLACE_S:.0f} s"
    except OSError as error:
        return error.strerror or type(error).__name__
    return "readable"


def _read(path: str) -> None:
    if os.path.isdir(path):
        with os.scandir(path) as entries:
            next(entries, None)
    else:
        with open(path, "rb") as file:
            file.read(1)
