"""Ids of /v1/responses: an item's tells which response it belongs to."""

from __future__ import annotations

import os
import re

_ITEM = re.compile(r"[a-z]+_([0-9a-f]{24})[0-9a-f]{2,}")


def new_response_id() -> str:
    return "resp_" + os.urandom(12).hex()


def item_id(prefix: str, response_id: str, index: int) -> str:
    """Of the item at `index`; the prefix keeps those of the input and of the output apart."""
    return f"{prefix}_{response_id.removeprefix('resp_')}{index:02x}"


def response_of(item_id: str) -> str | None:
    """The response whose item this is; None: no item of ours has such an id."""
    match = _ITEM.fullmatch(item_id)
    return f"resp_{match[1]}" if match else None
