"""Turns a conversation into the messages that a chat template takes. No template and no tokenizer here.

What a template can't take is written in a way that it can, in place, so that nothing of the
conversation is hidden from the model and a longer conversation still begins like a shorter one:

- a system message in the middle becomes a user message `<system-reminder>\\n…\\n</system-reminder>`;
- messages of one role in a row are joined with an empty line;
- calls and results become `<tool_call>` and `<tool_response>` text, tools a paragraph of the system
  message.

Texts of one message are joined with a newline, as vLLM does. A call's arguments keep the order of keys in
which the client gave them: a model writes them in an order of its own that an echo must not change.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from itertools import groupby
from typing import Any

from .... import chat
from ....errors import bad_field
from .traits import IMAGE, TemplateTraits, as_parts

TemplateMessage = dict[str, Any]
"""A message as Hugging Face's chat templates define it."""

TOOLS_TEXT = """\
# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{tools}
</tools>

For each function call, return a json object with function name and arguments within \
<tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""


def template_messages(
    conversation: chat.Conversation, traits: TemplateTraits, *, hoist: bool = False
) -> tuple[list[TemplateMessage], list[TemplateMessage] | None]:
    """Return messages and tools for a template with `traits`. Raises InvalidRequest.

    hoist  put system messages that stand before the first assistant's turn at the head. Later ones
           never: each would change the head of a prompt that is cached
    """
    if not conversation.messages:
        raise bad_field("messages", "at least one message is required")
    names: dict[str, str] = {}
    messages: list[TemplateMessage] = []
    for message in conversation.messages:
        names |= _call_names(message)  # Some clients use an id again.
        messages += _messages_of(message, names, traits)
    if hoist:
        messages = _hoisted(messages)
    tools = openai_tools(conversation.tools)
    if tools and not traits.tools:
        listed = "\n".join(compact_json(tool) for tool in tools)
        messages.insert(0, {"role": "system", "content": TOOLS_TEXT.format(tools=listed)})
    messages = _place_systems(messages, traits)
    messages = _joined(messages, traits)
    if conversation.continue_final and (
        messages[-1].get("tool_calls") or _call_names(conversation.messages[-1])
    ):
        raise bad_field(
            "messages", "an answer begun behind a call can't be continued; give the call's result"
        )
    if traits.content_parts:
        messages = [as_parts(message) for message in messages]
    return messages, tools if tools and traits.tools else None


def openai_tools(tools: Sequence[chat.Tool]) -> list[TemplateMessage]:
    """Return tools in OpenAI's form, which templates and mlx-lm's tool parsers take."""
    return [
        {
            "type": "function",
            "function": {
                "name": tool.name,
                "description": tool.description,
                # A schema without `properties` breaks templates that loop over them.
                "parameters": tool.parameters or {"type": "object", "properties": {}},
            },
        }
        for tool in tools
    ]


def compact_json(value: Any) -> str:
    """Format JSON as templates do: one line, keys in order, no escapes for letters."""
    return json.dumps(value, ensure_ascii=False)


def plain_text(messages: list[TemplateMessage]) -> str:
    """Render for a model without a chat template: roles by name, ending where it should go on."""
    names = {"system": "System", "user": "User", "assistant": "Assistant"}
    turns = [f"{names[message['role']]}: {message['content']}" for message in messages]
    return "\n\n".join([*turns, "Assistant:"])


# --------------------------------------------------------------------------- one message


def _call_names(message: chat.Message) -> dict[str, str]:
    """Map call id → tool's name: a result has only the id, and some templates need the name."""
    return {part.id: part.name for part in message.parts if isinstance(part, chat.ToolCallPart)}


def _messages_of(
    message: chat.Message, names: dict[str, str], traits: TemplateTraits
) -> list[TemplateMessage]:
    _refuse_images(message, traits)
    if message.role == "tool":
        results = [part for part in message.parts if isinstance(part, chat.ToolResultPart)]
        messages = [_result(part, names, traits) for part in results]
        images = [IMAGE for part in results for _ in part.images]
        if images and traits.tool_role and not traits.tool_images:
            messages.append({"role": "user", "content": images})
        return messages
    if message.role == "assistant":
        text = "\n".join(part.text for part in message.parts if isinstance(part, chat.TextPart))
        return [_assistant(message, text, traits)]
    return [{"role": message.role, "content": _content(message.parts)}]


def _content(parts: Sequence[chat.Part]) -> str | list[TemplateMessage]:
    """Return texts, joined with a newline where they follow each other, and images in their places."""
    content: list[TemplateMessage] = []
    shown = (part for part in parts if isinstance(part, chat.ImagePart | chat.TextPart))
    for kind, group in groupby(shown, type):
        if kind is chat.ImagePart:
            content += (IMAGE for _ in group)
        else:
            texts = (part.text for part in group if isinstance(part, chat.TextPart))
            content.append({"type": "text", "text": "\n".join(texts)})
    if IMAGE in content:
        return content
    return content[0]["text"] if content else ""


def _refuse_images(message: chat.Message, traits: TemplateTraits) -> None:
    for part in chat.media_of([message]):
        if not traits.image:
            raise bad_field(part.param or "messages", "this model takes no images")
        if message.role not in ("user", "tool"):
            raise bad_field(part.param or "messages", f"an image in a message of the {message.role}")


def _assistant(message: chat.Message, text: str, traits: TemplateTraits) -> TemplateMessage:
    converted: TemplateMessage = {"role": "assistant", "content": text}
    thinking = "\n".join(part.text for part in message.parts if isinstance(part, chat.ThinkingPart))
    calls = [part for part in message.parts if isinstance(part, chat.ToolCallPart)]
    if thinking and traits.reasoning_key:
        if calls and text and not traits.thinking_and_text:
            converted["content"], thinking = "", f"{thinking}\n\n{text}"
        converted[traits.reasoning_key] = thinking
    if calls and traits.tool_calls:
        converted["tool_calls"] = [_call(part, traits) for part in calls]
    elif calls:
        written = [
            f"<tool_call>\n{compact_json({'name': part.name, 'arguments': part.arguments})}\n</tool_call>"
            for part in calls
        ]
        converted["content"] = "\n".join([text, *written] if text else written)
    return converted


def _call(part: chat.ToolCallPart, traits: TemplateTraits) -> TemplateMessage:
    arguments = compact_json(part.arguments) if traits.arguments_text else part.arguments
    id = _call_id(part.id, traits)
    return {"id": id, "type": "function", "function": {"name": part.name, "arguments": arguments}}


def _call_id(id: str, traits: TemplateTraits) -> str:
    """Return `id`, or nine hexadecimal digits in its place."""
    return id if traits.any_call_id else hashlib.blake2b(id.encode(), digest_size=8).hexdigest()[:9]


def _result(part: chat.ToolResultPart, names: dict[str, str], traits: TemplateTraits) -> TemplateMessage:
    text = part.text
    if part.is_error and "error" not in text[:200].lower():
        text = f"Error: {text}"
    if not traits.tool_role:
        return {"role": "user", "content": _with_images(f"<tool_response>\n{text}\n</tool_response>", part)}
    name = names.get(part.call_id, "")
    content = _with_images(text, part) if traits.tool_images else text
    return {"role": "tool", "tool_call_id": _call_id(part.call_id, traits), "name": name, "content": content}


def _with_images(text: str, result: chat.ToolResultPart) -> str | list[TemplateMessage]:
    if not result.images:
        return text
    return [*([{"type": "text", "text": text}] if text else []), *(IMAGE for _ in result.images)]


# --------------------------------------------------------------------------- their order


def _hoisted(messages: list[TemplateMessage]) -> list[TemplateMessage]:
    end = next((i for i, message in enumerate(messages) if message["role"] == "assistant"), len(messages))
    # `sorted` is stable.
    return [*sorted(messages[:end], key=lambda message: message["role"] != "system"), *messages[end:]]


def _place_systems(messages: list[TemplateMessage], traits: TemplateTraits) -> list[TemplateMessage]:
    """Put system messages where the template takes them, else as user messages in place."""
    head = next((i for i, message in enumerate(messages) if message["role"] != "system"), len(messages))
    first, messages = messages[:head], messages[head:]
    if len(first) > 1 and not traits.system_repeats:
        first = [{"role": "system", "content": "\n\n".join(message["content"] for message in first)}]
    if not traits.system_first:
        first = [{**message, "role": "user"} for message in first]
    if not traits.system_anywhere:
        messages = [_reminder(message) if message["role"] == "system" else message for message in messages]
    return first + messages


def _reminder(message: TemplateMessage) -> TemplateMessage:
    text = message["content"]
    if not text.startswith("<system-reminder>"):
        text = f"<system-reminder>\n{text}\n</system-reminder>"
    return {"role": "user", "content": text}


def _joined(messages: list[TemplateMessage], traits: TemplateTraits) -> list[TemplateMessage]:
    """Join neighbours in `messages` where the template wants roles to alternate."""
    runs: list[list[TemplateMessage]] = []
    for message in messages:
        role, before = message["role"], runs[-1][0]["role"] if runs else ""
        same = before == role and role in ("user", "assistant") and not traits.repeats
        after_tool = before == "tool" and role == "user" and not traits.user_after_tool
        if same or after_tool:
            runs[-1].append(message)
        else:
            runs.append([message])
    return [_merged(run, traits) if len(run) > 1 else run[0] for run in runs]


def _merged(run: list[TemplateMessage], traits: TemplateTraits) -> TemplateMessage:
    merged = {**run[0], "content": _joined_contents([m["content"] for m in run if m["content"]])}
    if calls := [call for message in run for call in message.get("tool_calls", [])]:
        merged["tool_calls"] = calls
    if thoughts := [m[traits.reasoning_key] for m in run if traits.reasoning_key in m]:
        merged[traits.reasoning_key] = "\n\n".join(thoughts)
    return merged


def _joined_contents(contents: list[Any]) -> Any:
    """Join contents of neighbours; an empty line stands between two texts."""
    if all(isinstance(content, str) for content in contents):
        return "\n\n".join(contents)
    joined: list[TemplateMessage] = []
    for content in contents:
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
        if joined and joined[-1] != IMAGE and parts[0] != IMAGE:
            joined[-1] = {**joined[-1], "text": joined[-1]["text"] + "\n\n"}
        joined += parts
    return joined
