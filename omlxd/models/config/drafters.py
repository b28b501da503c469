"""Tells a folder's drafter, a model that reads its target's hidden states, from a model of its own.

mlx-vlm has their classes; this reads their config.json alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

DrafterKind = Literal["eagle3", "dflash", "mtp", "refused"]

_REFUSED = {
    "gemma4_assistant": "it reads its target's KV, not hidden states",
    "gemma4_unified_assistant": "it reads its target's KV, not hidden states",
    "inkling_mtp": "each of its tokens comes from a layer of its own, with a state that can't be trimmed",
}
"""Drafters of mlx-vlm that don't guess here, and why."""
_OLDER = "EAGLE guesses here from version 3 on"


def drafter_kind(config: Mapping[str, Any]) -> tuple[DrafterKind, str] | None:
    """Return (kind, why it is refused) of a folder's drafter; None: the folder holds another model."""
    model_type = str(config.get("model_type") or config.get("speculators_model_type") or "").lower()
    architectures = str(config.get("architectures")).lower()
    if why := _REFUSED.get(model_type):
        return "refused", why
    if "eagle3" in (model_type, config.get("speculators_model_type")) or "eagle3" in architectures:
        return "eagle3", ""
    if "eagle" in architectures or model_type.startswith("eagle"):
        return "refused", _OLDER
    if model_type.endswith("_mtp"):
        return "mtp", ""
    marks = ("dflash", "dspark")
    if config.get("dflash_config") is not None or any(m in f"{model_type} {architectures}" for m in marks):
        return "dflash", ""
    return ("dflash", "") if model_type == "muse_glimmer_assistant" else None
