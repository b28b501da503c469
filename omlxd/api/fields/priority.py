"""Reads who goes first: a body's `priority`, else the header's word; never less than the key's number."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

import msgspec

from ...chat import PRIORITIES, PriorityWord
from ...errors import bad_field
from .body import decode
from .types import MAX_INT64

PRIORITY_HEADER = "x-omlxd-priority"


class PriorityBody(msgspec.Struct):
    """A field of each body that waits in line."""

    priority: Annotated[int, msgspec.Meta(ge=-(2**63), le=MAX_INT64)] | None = None


_decoder = msgspec.json.Decoder(PriorityBody)


def priority_of(body: bytes, headers: Mapping[str, str], floor: PriorityWord | None) -> int:
    """Return the number of a request whose `body` has been read. Raises InvalidRequest.

    floor  what the key says; None: there is none
    """
    word = headers.get(PRIORITY_HEADER, floor or "interactive").strip().lower()
    if word not in PRIORITIES:
        raise bad_field(PRIORITY_HEADER, f"write {' or '.join(PRIORITIES)}")
    said = decode(_decoder, body).priority if b'"priority"' in body else None
    priority = PRIORITIES[word] if said is None else said
    return priority if floor is None else max(priority, PRIORITIES[floor])
