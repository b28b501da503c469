"""What the tests of /v1/responses share: bodies, requests made of them, answers as JSON."""

from __future__ import annotations

import base64
import json

from openai.types.responses import (
    ResponseStreamEvent,
)
from pydantic import TypeAdapter

from omlxd.api.responses.answer import OpenAIResponsesCollector, OpenAIResponsesStream
from omlxd.api.responses.request import parse
from omlxd.chat import (
    Conversation,
    Message,
    TextPart,
)

SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}}}
READ = {"type": "function", "name": "read", "description": "Reads.", "parameters": SCHEMA, "strict": False}
AGENTS = {
    "type": "namespace",
    "name": "agents",
    "description": "d",
    "tools": [{"type": "function", "name": "close", "parameters": SCHEMA}],
}
PATCH = {
    "type": "custom",
    "name": "patch",
    "format": {"type": "grammar", "syntax": "lark", "definition": "x"},
}
EVENTS = TypeAdapter(ResponseStreamEvent)
PIXEL = base64.b64encode(b"png").decode()


def parsed(headers=None, history=lambda _: None, **body):
    return parse(json.dumps({"model": "tiny", **body}).encode(), headers, history)


def conversation(**body) -> Conversation:
    prompt = parsed(**body).generate.prompt
    assert isinstance(prompt, Conversation)
    return prompt


def messages(*items, **more):
    return conversation(input=list(items), **more).messages


def user(text):
    return Message("user", (TextPart(text),))


def item(role, *content):
    return {"type": "message", "role": role, "content": list(content)}


def text(value, kind="input_text"):
    return {"type": kind, "text": value}


def collected(request, events, keep=lambda *kept: None):
    collector = OpenAIResponsesCollector("resp_1", request, 1, keep)
    for event in events:
        collector.event(event)
    return json.loads(collector.response())


def sent(data: bytes):
    """The events of a stream, as (event name, JSON)."""
    for block in data.decode().split("\n\n")[:-1]:
        name, _, payload = block.partition("\ndata: ")
        yield name.removeprefix("event: "), json.loads(payload)


def streamed(request, events):
    stream = OpenAIResponsesStream("resp_1", request, 1)
    data = stream.start() + b"".join(map(stream.event, events))
    return list(sent(data))
