"""Folders that macOS keeps from services, and which files of a service lie there.

A terminal has its user's consent for them, and so has what it starts. An agent of launchd has not: it gets
`Operation not permitted`, or a question that nobody sees. macOS calls this TCC.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from pathlib import Path

import omlxd

from ...config import Settings, has_ssd_cache
from ...errors import ConfigError
from ...models.catalog import hub_cache_dir
from ...models.resolve import is_local, local_path

PROTECTED = {
    "~/Documents": "Documents",
    "~/Desktop": "Desktop",
    "~/Downloads": "Downloads",
    "~/Library/Mobile Documents": "iCloud Drive",
    "~/Library/CloudStorage": "a cloud's folder",
    "/Volumes": "/Volumes",
}
"""Folder → its name for people."""

CODE = ("omlxd", "its virtual environment", "its Python")
REMEDIES = {
    True: "Move omlxd elsewhere in your home, as to ~/omlxd. There, run `python3 tools/bootstrap.py serve "
    "--help`, which makes .venv anew, and install again.",
    False: "Copy the files elsewhere in your home, as to ~/models, and install again with that path "
    "(the Hugging Face cache: with HF_HOME set to it).",
}
"""What to do, for the code and for all else."""

Paths = Iterable[tuple[str, Path]]


def used_paths(settings: Settings, log_file: Path | None) -> Paths:
    """Yield (what it is, path) of all that a daemon with `settings` runs, reads and writes."""
    yield CODE[0], Path(omlxd.__file__).parents[1]
    if sys.prefix != sys.base_prefix:
        yield CODE[1], Path(sys.prefix)
    yield CODE[2], Path(sys.executable)
    if settings.model and is_local(settings.model):
        yield "the model", local_path(settings.model)
    if settings.model_dir is not None:
        yield "the folder of models", settings.model_dir
    specs = [settings.model, *(own.draft_model or "" for own in settings.models.values())]
    if not settings.no_hf_cache or any(spec and not is_local(spec) for spec in specs):  # Also to download to.
        yield "the Hugging Face cache", hub_cache_dir()
    for name, own in settings.models.items():
        if own.adapter is not None:
            yield f"the adapter of {name}", own.adapter
        if own.draft_model and is_local(own.draft_model):
            yield f"the draft model of {name}", local_path(own.draft_model)
    yield "the base folder", settings.base_path
    if has_ssd_cache(settings):
        yield "the SSD cache", settings.paged_ssd_cache_dir
    if settings.config is not None:
        yield "the settings file", settings.config
    if log_file is not None:
        yield "the log", log_file


def protected_place(path: Path, home: Path) -> str | None:
    """Return the name of the protected folder that `path` is in, by what links mean; None: it is in none."""
    real = _parts(path)
    for folder, name in PROTECTED.items():
        place = _parts(home / folder[2:] if folder.startswith("~/") else Path(folder))
        if real[: len(place)] == place:
            return name
    return None


def _parts(path: Path) -> tuple[str, ...]:
    """Return the folders of a path. The disk of a Mac takes `documents` for `Documents`."""
    return Path(os.path.realpath(path).casefold()).parts


def check_unprotected(paths: Paths, home: Path) -> None:
    """Raise ConfigError, with a line for each, if some of `paths` are where a service can't read."""
    lines: list[str] = []
    is_code: set[bool] = set()
    seen: list[tuple[str, ...]] = []
    for what, path in paths:
        place, parts = protected_place(path, home), _parts(path)
        if place and not any(parts[: len(outer)] == outer for outer in seen):
            seen.append(parts)
            lines.append(f"{path} ({what}) is in {place}")
            is_code.add(what in CODE)
    if lines:
        lines.append("macOS lets no service read there without a consent (TCC) that a service can't ask for.")
        lines += [REMEDIES[kind] for kind in sorted(is_code, reverse=True)]
        raise ConfigError("\n".join(lines))
