"""Installed models as the folders tell, with no daemon."""

from __future__ import annotations

from pathlib import Path

from ..config import Settings
from ..errors import ModelError
from ..models.catalog import Catalog, default_model
from ..models.footprint import footprint
from ..models.messages import InstalledStatus
from ..models.resolve import check_folder


def why_broken(model: InstalledStatus) -> str:
    """Why its folder can't be loaded, as far as its files tell; "" if they tell nothing."""
    if model.folder is None:
        return ""
    try:
        check_folder(Path(model.folder))
    except ModelError as error:
        return error.message.removeprefix("--model: ")
    return ""


def installed(settings: Settings) -> list[InstalledStatus]:
    """Every model that a daemon of these settings would offer."""
    default = default_model(settings)
    found = []
    for model in Catalog(settings).models().values():
        own = settings.models.get(model.id)
        prints = footprint(model.folder) if model.folder is not None else None
        found.append(
            InstalledStatus(
                id=model.id,
                state="installed",
                source=model.source,
                default=default is not None and model.id == default.id,
                folder=str(model.folder) if model.folder else None,
                aliases=list(own.aliases) if own else [],
                pinned=bool(own and own.pin),
                disk_bytes=prints.weights if prints else None,
                load_bytes=prints.loading() if prints else None,
                context_length=prints.context_length if prints else None,
                kv_bytes_per_token=prints.kv_per_token if prints else None,
            )
        )
    return found
