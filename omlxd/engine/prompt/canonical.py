"""The canonical form of a conversation: equal for two that differ only by transport.

It tells which conversation a request goes on with, never what the model reads (the original does) nor
whose KV it gets (the model's tokens do). Left out or made equal, after the seeds of this project:

| what                                                      | in the canonical form         |
|-----------------------------------------------------------|-------------------------------|
| space around a text, how a message is cut into parts      | gone                          |
| CRLF, in texts                                            | LF                            |
| `"message_id": …` of any type, `Stats: runtime …`, `Current time is …` | one constant each |
| a line `cch=…;`, which is nothing else                    | gone                          |
| a `<system-reminder>` block                               | one constant                  |
| OpenClaw's inbound-context block                          | gone: it is not always there  |
| an assistant's thinking, call ids, signatures             | gone                          |
| a call's arguments: order of keys, spaces, 1.0 for 1      | one spelling                  |
| arguments that equal the `default` of the tool's schema   | gone                          |

Nothing here uses a pattern that can run past the text it is in: blocks are found by their two ends.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from typing import Any

from ... import chat
from .tool_defaults import ToolDefaults, canonical_json

Digest = bytes
"""Digest of 16 bytes."""

_LINES = (
    (re.compile(r"(Stats: runtime\s+)[^\n•]+", re.IGNORECASE), r"\1="),
    (re.compile(r"Current time is[^\n]+"), "Current time is ="),
    (re.compile(r"^[ \t]*cch=[^\s;]*;[ \t]*(?:\n|\Z)", re.MULTILINE), ""),
)
_MESSAGE_ID = re.compile(r'"message_id"\s*:\s*')
_json = json.JSONDecoder(strict=False)
_REMINDER = ("<system-reminder>", "</system-reminder>")
_INBOUND = ("## Inbound Context (trusted metadata)\n", "\n```\n")
_WORDS = ("tats: runtime", "Current time is", "TATS: RUNTIME", "cch=")
"""Words of texts that a pattern of `_LINES` changes, of which each has one; looking for words is cheap."""


def canonical_text(text: str) -> str:
    """Return `text` with transport's changes made equal."""
    text = _with_lf(text)
    if _REMINDER[0] in text:
        text = _without_blocks(text, *_REMINDER, "".join(_REMINDER))
    if _INBOUND[0] in text:
        text = _without_blocks(f"{text}\n", *_INBOUND, "")
    if '"message_id"' in text:
        text = _without_message_ids(text)
    if any(word in text for word in _WORDS):
        for pattern, constant in _LINES:
            text = pattern.sub(constant, text)
    return text.strip()


def _with_lf(text: str) -> str:
    return text.replace("\r\n", "\n")


def _without_message_ids(text: str) -> str:
    """Put one constant for the JSON value of each `"message_id"` in `text`; other text stays."""
    out: list[str] = []
    at = 0
    for found in _MESSAGE_ID.finditer(text):
        if found.start() < at:  # Within the value of another.
            continue
        try:
            _, end = _json.raw_decode(text, found.end())
        except (ValueError, RecursionError):
            continue
        out += (text[at : found.start()], '"message_id": =')
        at = end
    return "".join([*out, text[at:]])


def _without_blocks(text: str, start: str, end: str, constant: str) -> str:
    """Put `constant` for each `start … end` in `text`; a block that never ends stays.

    With no constant, the empty lines behind the block go too.
    """
    out: list[str] = []
    at = 0
    while (begin := text.find(start, at)) >= 0:
        stop = text.find(end, begin + len(start))
        if stop < 0:
            break
        out += (text[at:begin], constant)
        at = stop + len(end)
        while not constant and text.startswith("\n", at):
            at += 1
    return "".join([*out, text[at:]])


def digest_of(*texts: str | bytes, size: int = 16) -> Digest:
    """Return the digest of texts in order, `size` bytes; where one ends is part of it."""
    state = hashlib.blake2b(digest_size=size)
    for text in texts:
        data = text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass")
        state.update(len(data).to_bytes(8, "little"))
        state.update(data)
    return state.digest()


_NO_DEFAULTS = ToolDefaults()


def answer_digest(
    texts: Iterable[str], calls: Iterable[tuple[str, Any]], defaults: ToolDefaults = _NO_DEFAULTS
) -> Digest:
    """Return the digest of an assistant's turn: its texts joined, space at their ends gone, and its calls."""
    text = "".join(_with_lf(text).strip() for text in texts)
    said = (f"{name}\n{canonical_json(defaults.without(name, arguments))}" for name, arguments in calls)
    return digest_of(text, *said)


def thought_digest(texts: Iterable[str]) -> Digest | None:
    """Digest an assistant's thinking; None without any."""
    text = "".join(_with_lf(text).strip() for text in texts)
    return digest_of(text) if text else None


def answer_of(message: chat.Message, defaults: ToolDefaults = _NO_DEFAULTS) -> tuple[Digest, Digest | None]:
    """Return (answer, thought) of an assistant's message as a client sent it."""
    parts = message.parts
    return (
        answer_digest(
            (part.text for part in parts if isinstance(part, chat.TextPart)),
            ((part.name, part.arguments) for part in parts if isinstance(part, chat.ToolCallPart)),
            defaults,
        ),
        thought_digest(part.text for part in parts if isinstance(part, chat.ThinkingPart)),
    )


def message_digest(message: chat.Message, defaults: ToolDefaults = _NO_DEFAULTS) -> Digest:
    if message.role == "assistant":
        return answer_of(message, defaults)[0]
    texts = [canonical_text(part.text) for part in message.parts if isinstance(part, chat.TextPart)]
    others: list[str | bytes] = []
    for part in message.parts:
        if isinstance(part, chat.ImagePart | chat.DocumentPart):
            others.append(part.data)
        elif isinstance(part, chat.ToolResultPart):
            others += (canonical_text(part.text), str(part.is_error))
            others += (media.data for media in (*part.images, *part.documents))
    return digest_of(message.role, "\n".join(filter(None, texts)), *others)


def chain_of(conversation: chat.Conversation) -> list[Digest]:
    """Return digests of every beginning of the conversation: [n] is of its tools and its first n messages."""
    tools = (
        f"{tool.name}\n{_with_lf(tool.description)}\n{canonical_json(tool.parameters)}"
        for tool in conversation.tools
    )
    chain, defaults = [digest_of(*tools)], ToolDefaults((*conversation.tools, *conversation.later_tools))
    for message in conversation.messages:
        chain.append(digest_of(chain[-1], message.role, message_digest(message, defaults)))
    return chain


def opening(messages: Sequence[chat.Message]) -> int:
    """Return the messages up to the first user's, which identify conversations without a name."""
    for index, message in enumerate(messages):
        if message.role == "user":
            return index + 1
    return len(messages)
