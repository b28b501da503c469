"""What the tests of the output parser share: a tokenizer, a tool, and events that can be compared."""

from __future__ import annotations

import json

import pytest
from mlx_lm.tokenizer_utils import load as load_tokenizer

from omlxd.chat import Event, ReasoningDelta, TextDelta, Tool, ToolCall, ToolCallCut, ToolCallDelta
from omlxd.engine.output.parser import OutputParser, prepare
from omlxd.models import demo

SCHEMA = {
    "type": "object",
    "properties": {
        "path": {"type": "string"},
        "limit": {"type": "integer"},
        "ratio": {"type": "number"},
        "deep": {"type": "boolean"},
        "items": {"type": "array"},
        "maybe": {"type": ["string", "null"]},
        "either": {"anyOf": [{"type": "integer"}, {"type": "string"}]},
        "count": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
        "any": {},
    },
}
READ = Tool("Read", "Reads.", SCHEMA)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    demo.write_tokenizer(folder, demo.VOCAB)
    demo.write_json(folder / "config.json", {"model_type": "qwen3"})
    tokenizer = load_tokenizer(folder)
    prepare(tokenizer)
    return tokenizer


def merged(events: list[Event]) -> list[tuple[str, ...]]:
    """Events with neighbours of a kind joined and call ids left out.

    The pieces of a call must be the beginning of the call that follows them.
    """
    out: list[tuple[str, ...]] = []
    pieces: list[ToolCallDelta] = []
    for event in events:
        if isinstance(event, ToolCallDelta):
            assert event.text
            pieces.append(event)
            continue
        if isinstance(event, ToolCall | ToolCallCut):
            assert event.arguments.startswith("".join(piece.text for piece in pieces))
            assert {(piece.id, piece.name) for piece in pieces} <= {(event.id, event.name)}
            pieces = []
        assert not pieces
        if isinstance(event, ToolCall):
            assert isinstance(json.loads(event.arguments), dict)
            out.append(("call", event.name, event.arguments))
            continue
        if isinstance(event, ToolCallCut):
            assert isinstance(json.loads(event.valid_arguments), dict)
            out.append(("cut", event.name, event.arguments, event.valid_arguments))
            continue
        assert isinstance(event, TextDelta | ReasoningDelta) and event.text
        kind = "text" if isinstance(event, TextDelta) else "reasoning"
        if out and out[-1][0] == kind:
            out[-1] = (kind, out[-1][1] + event.text)
        else:
            out.append((kind, event.text))
    return out


def parse(tokenizer, *chunks: str, reason="stop", tools=(READ,), **how) -> list[tuple[str, ...]]:
    parser = OutputParser(tokenizer, tools=tools, **how)
    events = [event for chunk in chunks for event in parser.add_text(chunk)]
    return merged(events + parser.finish(reason))


def call(**arguments) -> str:
    return json.dumps({"name": "Read", "arguments": arguments})
