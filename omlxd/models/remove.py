"""Deletes a model's files: those that omlxd or the hub made, and no folder of the owner's own."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Protocol

from ..errors import ConfigError, ModelError


class Installed(Protocol):
    """An installed model: `source` as in models/catalog.py, and `adapter`, a folder or ""."""

    id: str
    source: str
    folder: str | None
    adapter: str


def removable(model: Installed, base_path: Path) -> Path:
    """Return the folder to delete for `model`. Raises ConfigError for one that is the owner's own."""
    place = Path(model.adapter if ":" in model.id and model.adapter else model.folder or "")
    ours = (base_path / "models", base_path / "adapters")
    if any(place.is_relative_to(root) and place != root for root in ours):
        return place
    for folder in place.parents:
        # The hub's: models--ORG--NAME/snapshots/REVISION, whose files are links into blobs.
        if folder.name.startswith("models--") and place.parent == folder / "snapshots":
            return folder
    where = f"lies in {place}, a folder of your own" if model.folder else "has no files here"
    raise ConfigError(f"{model.id} {where}; delete it there.")


def remove_folder(folder: Path) -> None:
    """Delete a folder, renamed first, so that no half of a model is ever seen. Raises ModelError."""
    doomed = folder.with_name(f".{folder.name}.removed")
    try:
        shutil.rmtree(doomed, ignore_errors=True)
        folder.rename(doomed)
        shutil.rmtree(doomed)
    except OSError as error:
        raise ModelError(f"{folder} can't be deleted: {error.strerror or error}.") from error
