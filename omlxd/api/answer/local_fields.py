"""Reads from clients' fields which conversation this is.

The first that says anything counts: the body's own fields, then those under `metadata`, then `extra_body`:
`session_id`, `conversation_id`, `thread_id`, `chat_id`, `conversation`, `session`. Other values are ignored:
these fields are nobody's standard.
"""

from __future__ import annotations

from typing import Any

from .answer_format import GuidedFields
from .thinking import as_word, field_of

_SESSION = ("session_id", "conversation_id", "thread_id", "chat_id", "conversation", "session")
_NESTED = ("metadata", "extra_body")


class DialectFields(GuidedFields, kw_only=True):
    """Fields of any type; useless values are passed over."""

    session_id: Any = None
    conversation_id: Any = None
    thread_id: Any = None
    chat_id: Any = None
    conversation: Any = None
    session: Any = None


def session_of(body: Any) -> str:
    """Return the conversation's name, "" for none."""
    for place in (body, *(field_of(body, name) for name in _NESTED)):
        for name in _SESSION:
            value = field_of(place, name)
            value = value.get("id") if isinstance(value, dict) else value
            if word := as_word(value):
                return word[:200]
    return ""
