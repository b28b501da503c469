"""Probes the features of a model's chat template by rendering small conversations at load time.

Some templates raise on a system message in the middle, some drop a role. A template takes a feature if it
renders the probe without an error and with all of its words, in order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

from ....common.child_process import ChildLost

Apply = Callable[..., str]
"""Renders (messages, tools) to text; raises whatever the template raises."""


@dataclass(slots=True, frozen=True)
class TemplateTraits:
    """Features of a template; for missing ones engine/prompt/template/messages.py has other spellings.

    content_parts     content must be a list of parts, not a string
    system_first      a system message at the start
    system_repeats    two of them at the start
    system_anywhere   a system message after a user turn, rendered in place
    repeats           two user messages in a row
    tools             the list of tools
    tool_calls        an assistant's calls
    arguments_text    a call's arguments must be JSON text, not an object
    tool_role         messages of role `tool`
    user_after_tool   a user message right after a tool's result
    any_call_id       call ids of any form; else nine letters and digits, as Mistral's templates want
    reasoning_key     the field of an assistant message that holds its thinking; "": none
    thinking_and_text a message with a call may have both
    image             what it writes for an image of a user; "": it shows none, or the model takes none
    tool_images       it shows images of a tool's result
    """

    content_parts: bool = False
    system_first: bool = True
    system_repeats: bool = True
    system_anywhere: bool = True
    repeats: bool = True
    tools: bool = True
    tool_calls: bool = True
    arguments_text: bool = False
    tool_role: bool = True
    user_after_tool: bool = True
    any_call_id: bool = True
    reasoning_key: str = "reasoning_content"
    thinking_and_text: bool = True
    image: str = ""
    tool_images: bool = False

    def missing(self) -> list[str]:
        """Return the names of missing features, for the load log."""
        lacks = [f.name for f in fields(self) if getattr(self, f.name) in (False, "")]
        return [name for name in lacks if name not in _NO_LACK]


_NO_LACK = ("content_parts", "arguments_text", "image", "tool_images")

IMAGE = {"type": "image"}
"""An image as a part of a message's content."""

PLAIN = TemplateTraits(tools=False, tool_calls=False, tool_role=False, reasoning_key="")
"""Traits of the plain rendering without a template (messages.plain_text)."""

_TOOL = {
    "type": "function",
    "function": {
        "name": "kestrel",
        "description": "Finds birds.",
        "parameters": {"type": "object", "properties": {"wing": {"type": "string"}}},
    },
}


def probe(apply: Apply, images: bool = False) -> TemplateTraits:
    """Probe the traits of a template. `apply` renders with a generation prompt. Raises ChildLost alone.

    images  the model takes images
    """
    parts = not _shows(apply, [_user("falcon")], "falcon") and _shows(
        apply, [_user([{"type": "text", "text": "falcon"}])], "falcon"
    )

    def shows(messages: list[dict[str, Any]], *words: str, tools: bool = False) -> bool:
        if parts:
            messages = [as_parts(message) for message in messages]
        return _shows(apply, messages, *words, tools=tools)

    system, user, reply = _system("osprey"), _user("falcon"), {"role": "assistant", "content": "merlin"}
    system_first = shows([system, user], "osprey", "falcon")
    arguments_text = not shows([user, _call({"wing": "plover"}), _result()], "kestrel", "plover")
    call = _call('{"wing": "plover"}' if arguments_text else {"wing": "plover"})
    tool_calls = shows([user, call, _result()], "kestrel", "plover") or shows(
        [user, call, _user("heron")], "kestrel", "plover"
    )
    tool_role = tool_calls and shows([user, call, _result()], "falcon", "plover", "siskin")
    named = [user, _with_id(call, "call_0123456789abcdef"), _result("call_0123456789abcdef")]
    reasoning_key = _reasoning_key(shows, call)
    both = {**call, "content": "merlin", reasoning_key: "petrel"}
    image = _image(apply) if images else ""
    seen = {**_result(), "content": [{"type": "text", "text": "siskin"}, IMAGE]}
    return TemplateTraits(
        content_parts=parts,
        system_first=system_first,
        system_repeats=shows([system, _system("linnet"), user], "osprey", "linnet", "falcon"),
        system_anywhere=shows(
            [user, system, reply, _user("heron"), _system("linnet")],
            *("falcon", "osprey", "merlin", "heron", "linnet"),
        ),
        repeats=shows([user, _user("heron"), reply, user], "falcon", "heron", "merlin"),
        tools=shows([user], "kestrel", tools=True),
        tool_calls=tool_calls,
        arguments_text=arguments_text and tool_calls,
        tool_role=tool_role,
        user_after_tool=not tool_role
        or shows([user, call, _result(), _user("heron")], "plover", "siskin", "heron"),
        any_call_id=not tool_role or shows(named, "plover", "siskin"),
        reasoning_key=reasoning_key,
        # Where thinking is left out beside text, that is the template's own choice.
        thinking_and_text=not reasoning_key or shows([_user("falcon"), both, _result()], "merlin"),
        image=image,
        tool_images=bool(image) and tool_role and shows([user, call, seen], "siskin", image),
    )


def _image(apply: Apply) -> str:
    """Return the template's text for an image between two texts of a user."""
    texts = [{"type": "text", "text": word} for word in ("falcon", "heron")]
    try:
        text = apply([_user([texts[0], IMAGE, texts[1]])], None)
    except ChildLost:
        raise
    except Exception:  # a template raises what it likes
        return ""
    between = text.partition("falcon")[2].partition("heron")
    return between[0].strip() if between[1] else ""


def _reasoning_key(shows: Callable[..., bool], call: dict[str, Any]) -> str:
    for key in ("reasoning_content", "reasoning", "thinking"):
        called = {**call, key: "petrel"}
        said = {"role": "assistant", "content": "merlin", key: "petrel"}
        if shows([_user("falcon"), called, _result()], "petrel") or shows(
            [_user("falcon"), said, _user("heron")], "petrel"
        ):
            return key
    return ""


def as_parts(message: dict[str, Any]) -> dict[str, Any]:
    """Return `message` with its content as a list of parts."""
    content = message.get("content")
    return (
        {**message, "content": [{"type": "text", "text": content}]} if isinstance(content, str) else message
    )


def _shows(apply: Apply, messages: list[dict[str, Any]], *words: str, tools: bool = False) -> bool:
    try:
        text = apply(messages, [_TOOL] if tools else None)
    except ChildLost:
        raise
    except Exception:  # a template raises what it likes
        return False
    at = 0
    for word in words:
        at = text.find(word, at)
        if at < 0:
            return False
    return True


def _user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def _system(text: str) -> dict[str, Any]:
    return {"role": "system", "content": text}


def _call(arguments: Any) -> dict[str, Any]:
    function = {"name": "kestrel", "arguments": arguments}
    # Nine letters and digits: some templates insist on that.
    calls = [{"id": "abcdef123", "type": "function", "function": function}]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def _with_id(message: dict[str, Any], id: str) -> dict[str, Any]:
    return {**message, "tool_calls": [{**call, "id": id} for call in message["tool_calls"]]}


def _result(id: str = "abcdef123") -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": id, "name": "kestrel", "content": "siskin"}
