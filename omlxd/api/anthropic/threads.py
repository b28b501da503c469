"""Message threads: a conversation is kept here, and a request that continues it carries only what is new.

`thread: {"type": "create"}` keeps the conversation under the id of its answer; `{"type": "continue",
"previous_message_id": …}` has it stand before the request's messages. Its JSON is kept, so that a continued
request is read as if all of it had been sent.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from ...errors import InvalidRequest, OmlxdError, ThreadError
from ..fields.body import ParsedRequest

FIXED = ("system", "tools")
"""Fields that a thread's first request fixes."""
PREVIOUS = "thread.previous_message_id"

HeldThread = Callable[[str, str], "bytes | None"]
"""Looks up (owner, answer's id) → its conversation as JSON; b"": continued already; None: unknown."""


REPLAY = 'send the whole conversation with thread {"type": "create"}'


class Create(msgspec.Struct, tag_field="type", tag="create", forbid_unknown_fields=True):
    pass


class Continue(msgspec.Struct, tag_field="type", tag="continue", forbid_unknown_fields=True):
    previous_message_id: str


class ThreadRequest(ParsedRequest, frozen=True, kw_only=True):
    """A parsed body whose conversation is to be kept.

    owner         who alone may continue it
    conversation  JSON of `system`, `tools` and `messages`, without the answer
    previous      the answer that it continues; "": none
    """

    owner: str
    conversation: bytes
    previous: str = ""


class _Held(msgspec.Struct):
    messages: list[msgspec.Raw]


_NULL = msgspec.Raw(b"null")
_value = msgspec.json.Decoder(Any).decode
_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])
_held = msgspec.json.Decoder(_Held)


def owner_of(headers: Mapping[str, str]) -> str:
    """Return a name for the holder of a request's keys."""
    keys = "\0".join(headers.get(name, "") for name in ("authorization", "x-api-key"))
    return hashlib.blake2b(keys.encode(), digest_size=16).hexdigest()


def conversation_of(body: bytes, thread: Create | Continue, owner: str, held: HeldThread) -> dict[str, Any]:
    """Return `system`, `tools` and `messages` of the conversation, each as JSON.

    Raises ThreadError where `thread` continues what is not kept, or can't be continued.
    """
    given = _fields.decode(body)
    if isinstance(thread, Create):
        return {name: given[name] for name in (*FIXED, "messages") if name in given}
    before = held(owner, thread.previous_message_id)
    if before is None:
        raise ThreadError(PREVIOUS, f"nothing is kept under this id (any more); {REPLAY}", "thread_not_found")
    if not before:
        raise already_continued()
    kept = _fields.decode(before)
    for name in FIXED:
        if name in given and _value(given[name]) != _value(kept.get(name, _NULL)):
            why = f"{name} differs from what the thread began with; leave it out, or {REPLAY}"
            raise ThreadError("thread", why, "thread_fingerprint_mismatch")
    messages = [*_held.decode(before).messages, *_held.decode(body).messages]
    return {**kept, "messages": messages}


def already_continued() -> ThreadError:
    return ThreadError(
        PREVIOUS, f"this answer has been continued already; {REPLAY}", "thread_already_continued"
    )


def in_threads_words(error: InvalidRequest) -> OmlxdError:
    """Return a thread's error in Anthropic's words for a body's unknown `thread.type`."""
    if error.param != "thread.type":
        return error
    return ThreadError("thread.type", 'it is "create" or "continue"', "thread_unsupported_request")


def with_conversation(body: bytes, conversation: Mapping[str, Any]) -> bytes:
    """Return `body` as it would be without a thread."""
    fields = {name: value for name, value in _fields.decode(body).items() if name != "thread"}
    return msgspec.json.encode({**fields, **conversation})


def with_answer(conversation: bytes, content: bytes) -> bytes:
    """Add an answer's blocks to the end of `conversation`, all as JSON."""
    fields: dict[str, Any] = {**_fields.decode(conversation)}
    answer = {"role": "assistant", "content": msgspec.Raw(content)}
    fields["messages"] = [*_held.decode(conversation).messages, answer]
    return msgspec.json.encode(fields)
