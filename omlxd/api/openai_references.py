"""`item_reference` in the input of /v1/responses: an item of an earlier response's output, named by its id.

Vercel's AI SDK sends earlier turns so, unless it is told not to store them.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from ..errors import InvalidRequest
from .openai_responses_items import Item

KnownItem = Callable[[str], "bytes | None"]
"""Item id → the item as JSON; None: not known (any more)."""
MAX_BYTES = 32 * 1024 * 1024
"""Of all items that one request refers to: as much as a body may hold."""

_decoder = msgspec.json.Decoder(Item)


def resolved(items: list[Item], known: KnownItem) -> list[Item]:
    """`items` with each reference replaced by what it stands for. Raises InvalidRequest."""
    out: list[Item] = []
    left = MAX_BYTES
    for index, item in enumerate(items):
        if not _refers(item):
            out.append(item)
            continue
        param = f"input.{index}.id"
        if not isinstance(item.id, str):
            raise InvalidRequest(f"{param}: this field is required", param=param)
        if (meant := known(item.id)) is None:
            raise InvalidRequest(
                f"{param}: there is no item {item.id[:100]!r} here (any more); send the item itself",
                param=param,
            )
        left -= len(meant)
        if left < 0:
            raise InvalidRequest(f"{param}: the items referred to are too large together", param=param)
        out.append(_decoder.decode(meant))
    return out


def _refers(item: Item) -> bool:
    """The type may be left out, and then there is nothing but the id."""
    return item.type == "item_reference" or (item.type is None and item.role is None and item.id is not None)
