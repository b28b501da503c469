"""How much JSON a body holds, seen before any of it is built.

A megabyte of `[],[],…` becomes 30 MB of lists, and 32 of them kept this process from answering anybody
for half a minute. Real sessions of coding agents hold 3 objects or lists in a kilobyte.
"""

from __future__ import annotations

from contextvars import ContextVar

from ..errors import InvalidRequest

MOST_CONTAINERS = 200_000
"""Objects and lists. Twice what 32 MB of a coding agent's conversation hold."""
MOST_VALUES = 2_000_000
"""Commas, about as many as values: a prompt may be a list of a million token ids."""


_left: ContextVar[int] = ContextVar("_left", default=MOST_CONTAINERS)
"""Objects and lists that JSON texts within the body may still hold; ten values count as one."""


def check_shape(body: bytes) -> None:
    """Raises InvalidRequest for a body of too many objects, lists or values, be it JSON or not."""
    _left.set(MOST_CONTAINERS)
    if len(body) <= 2 * MOST_CONTAINERS or _fits(body):
        return
    # Signs within strings are text, which costs no more than its length.
    text = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    if text.count(b'"') > MOST_VALUES or not _fits(b"".join(text.split(b'"')[::2])):
        raise InvalidRequest(
            f"The request body holds more than {MOST_CONTAINERS:,} JSON objects and lists, or "
            f"{MOST_VALUES:,} values; send fewer."
        )


def check_nested(text: str, param: str) -> None:
    """As `check_shape`, for JSON text that is a value of the body: all such texts of one body together."""
    left = _left.get() - text.count("{") - text.count("[") - text.count(",") // 10
    if left < 0:
        raise InvalidRequest(f"{param}: too much JSON within the request's texts; send less", param=param)
    _left.set(left)


def _fits(text: bytes) -> bool:
    containers = text.count(b"{") + text.count(b"[")
    return containers <= MOST_CONTAINERS and text.count(b",") <= MOST_VALUES
