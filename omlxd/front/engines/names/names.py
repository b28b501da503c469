"""Resolves a client's model name."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from ....config import closest
from ....errors import NotFound


def basename(model_id: str) -> str:
    """Return the last part of a hub id or a path."""
    return model_id.replace("\\", "/").rstrip("/").rpartition("/")[2]


PLACEHOLDERS = re.compile(
    "any|auto|current|custom|dummy|llm|model|omlxd|placeholder|string|test|unused"
    "|(default|local)([-_ ](llm|model))?"
)
"""Names that clients and their examples send where a server has one model."""


def resolve_name(
    name: str, model_ids: Sequence[str], default: str | None = None, aliases: Mapping[str, str] | None = None
) -> str:
    """Return the one of `model_ids` that `name` means.

    An exact id, else an alias, else a basename, else the same in another case or with Ollama's `:latest`.
    No name, a placeholder, and any name that begins with `claude-`, `gemini-` or `jev-` (Claude Code, Gemini
    CLI and their sub-agents ask for several, TypeSafe's SDKs for `jev-latest`) mean `default`. Raises
    NotFound, which lists what there is.
    """
    spellings = {basename(model_id): model_id for model_id in reversed(model_ids)} | dict(aliases or {})
    spellings |= {model_id: model_id for model_id in model_ids}
    if name in spellings:
        return spellings[name]
    plain = name.strip().lower().removesuffix(":latest")
    for spelling, model_id in spellings.items():
        if spelling.lower() == plain:
            return model_id
    if default is not None and (
        not plain or PLACEHOLDERS.fullmatch(plain) or plain.startswith(("claude-", "gemini-", "jev-"))
    ):
        return default
    there_are = ", ".join(model_ids) if model_ids else "none"
    near = closest(name[:200], [*spellings])
    raise NotFound(
        f"There is no model {name[:200]!r} here{near}; the models are: {there_are}.", param="model"
    )
