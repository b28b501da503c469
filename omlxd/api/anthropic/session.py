"""Which conversation a Messages request belongs to: what Claude Code says in headers and `metadata`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from ..body import session_header

MAX_USER_ID = 4096
"""Characters of `metadata.user_id` that are looked into; Claude Code's has 200."""


class Metadata(msgspec.Struct):
    user_id: str | None = None


def session_of(headers: Mapping[str, str], metadata: Metadata | None) -> str:
    """Its name, at most 200 letters; "" if it has none."""
    named = session_header(headers, "x-claude-code-session-id", "x-claude-code-agent-id")
    if named or metadata is None or not metadata.user_id:
        return named
    if len(metadata.user_id) > MAX_USER_ID:
        return metadata.user_id[:200]
    try:
        user = msgspec.json.decode(metadata.user_id, type=dict[str, Any])
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        user = {}
    session = user.get("session_id")
    return (session if isinstance(session, str) and session else metadata.user_id)[:200]


def parent_agent(headers: Mapping[str, str]) -> str:
    """The agent whose sub-agent asks; "" if none does."""
    return session_header(headers, "x-claude-code-parent-agent-id")
