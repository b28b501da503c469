"""200 outputs, cut at random: what a stream adds up to is the body of the non-streaming answer.

Each output goes through the parser once whole and once in random chunks; the first is collected into
a body, the second encoded as a stream that is read as a client reads it.
"""

# ruff: noqa: F811 -- `tokenizer` is a fixture of parsing.py

from __future__ import annotations

import itertools
import json
import random

import jiter
import pytest
from fake_engine import USAGE
from parsing import READ, call, tokenizer  # noqa: F401 -- a fixture

from omlxd.api.anthropic.answer import AnthropicCollector, AnthropicStream
from omlxd.api.anthropic.tools import shown_id
from omlxd.api.openai.chat_answer import OpenAIChatCollector, OpenAIChatStream
from omlxd.api.openai.completions import OpenAICompletionCollector, OpenAICompletionStream
from omlxd.api.responses import request as openai_responses
from omlxd.api.responses.answer import OpenAIResponsesCollector, OpenAIResponsesStream
from omlxd.chat import Event, Finished, ToolCall, ToolCallCut, ToolCallDelta
from omlxd.engine.output import parser as output
from omlxd.engine.output.parser import OutputParser

COUNT = 200
XML = (
    "<function=Read>\n<parameter=path>\na < b\n</parameter>\n<parameter=limit>\n7\n</parameter>\n</function>"
)
GLM = (
    "Read\n<arg_key>path</arg_key>\n<arg_value>é</arg_value>\n"
    "<arg_key>deep</arg_key><arg_value>true</arg_value>"
)
LONG = call(path='a "quoted" \\ path\n🙂 </tool_call> é', limit="5", items=[1, {"a": "]"}], any=None)
ESCAPED = '{"name": "Read", "arguments": {"path": "\\u00e9 \\ud83d\\ude42 \\ud83d", "ratio": 1.50}, "x": 1}'
PIECES = [
    *(
        "Hello",
        " world.",
        "\n\n",
        "  ",
        "🙂é",
        "a < b",
        "<think>\nWhy?\n</think>\n\n",
        "</think>",
        "<think>hm",
    ),
    *(f"<tool_call>\n{body}\n</tool_call>" for body in (call(path="x", limit=3), LONG, ESCAPED, XML, GLM)),
    *(
        f"<tool_call>{body}</tool_call>"
        for body in ('{"name": "Stop", "arguments": {}}', "no call", call(), "Read")
    ),
    '<tool_call>{"name": "Read", "arguments": {"path": "a", "limit": oops}}</tool_call>',
    '<tool_call>{"name": "Read", "arguments": {"path": "never closed</tool_call>',
    XML,
    "<tool_call>\n" + LONG[:60],
    "<tool_call>\n" + XML[:70],
]


def cases():
    for seed in range(COUNT):
        rng = random.Random(seed)
        text = "".join(rng.choices(PIECES, k=rng.randint(1, 6)))
        cuts = sorted(rng.choices(range(len(text) + 1), k=rng.randint(0, len(text))))
        chunks = [text[a:b] for a, b in itertools.pairwise([0, *cuts, len(text)])]
        yield text, chunks, rng.random() < 0.3, rng.choice(["stop", "length"]), rng.choice([(), ("rld", "7")])


def events_of(tokenizer, chunks, thinking, reason, stop) -> list[Event]:
    counter = itertools.count()
    output.secrets.token_hex, kept = (lambda size: f"{next(counter):024}"), output.secrets.token_hex
    try:
        parser = OutputParser(tokenizer, tools=(READ,), starts_in_thinking=thinking, stop=stop)
        events = [event for chunk in chunks for event in parser.add_text(chunk)] + parser.finish(reason)
    finally:
        output.secrets.token_hex = kept
    return [*events, Finished(reason, USAGE, parser.stopped)]


@pytest.fixture(scope="module")
def outputs(tokenizer):
    made = [
        (events_of(tokenizer, [text], *how), events_of(tokenizer, chunks, *how))
        for text, chunks, *how in cases()
    ]
    kinds = {type(event) for whole, _ in made for event in whole}
    assert {ToolCall, ToolCallCut, ToolCallDelta} <= kinds
    return made


def datas(encoder, events) -> list[dict]:
    raw = encoder.start() + b"".join(encoder.event(event) for event in events)
    lines = [line[6:] for line in raw.decode().split("\n") if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def body(collector, events) -> bytes:
    for event in events:
        collector.event(event)
    return collector.response()


def test_the_events_are_the_same(outputs):
    for whole, chunked in outputs:
        assert [e for e in whole if isinstance(e, ToolCall | ToolCallCut)] == [
            e for e in chunked if isinstance(e, ToolCall | ToolCallCut)
        ]


def test_anthropic(outputs):
    for whole, chunked in outputs:
        wanted = json.loads(body(AnthropicCollector("i", "m"), whole))
        assert body(AnthropicCollector("i", "m"), chunked) == body(AnthropicCollector("i", "m"), whole)
        blocks: list[dict] = []
        for data in datas(AnthropicStream("i", "m", "r"), chunked):
            if data["type"] == "content_block_start":
                assert data["index"] == len(blocks)
                blocks.append({**data["content_block"], "json": ""})
            elif data["type"] == "content_block_delta":
                for key, value in data["delta"].items():
                    if key != "type":
                        blocks[-1]["json" if key == "partial_json" else key] += value
        cut = [event for event in whole if isinstance(event, ToolCallCut)]
        for block in blocks:
            text = block.pop("json")
            if block["type"] == "tool_use":
                block["input"] = jiter.from_json(text.encode(), partial_mode=True)  # as the SDK does
                if broken := next((event for event in cut if shown_id(event.id) == block["id"]), None):
                    assert broken.arguments == text
                    block["input"] = json.loads(broken.valid_arguments)
                else:
                    assert json.loads(text) == block["input"]
        assert blocks == wanted["content"]


def test_chat(outputs):
    for whole, chunked in outputs:
        raw = body(OpenAIChatCollector("i", "m", 5), whole)
        assert body(OpenAIChatCollector("i", "m", 5), chunked) == raw
        message = json.loads(raw)["choices"][0]["message"]
        text = reasoning = ""
        calls: list[dict] = []
        for chunk in datas(OpenAIChatStream("i", "m", 5, "r"), chunked):
            delta = chunk["choices"][0]["delta"]
            text += delta.get("content") or ""
            reasoning += delta.get("reasoning_content") or ""
            for piece in delta.get("tool_calls", ()):
                if piece.pop("index") == len(calls):
                    calls.append(piece)
                else:
                    calls[-1]["function"]["arguments"] += piece["function"]["arguments"]
        assert (text, reasoning) == (message["content"] or "", message.get("reasoning_content", ""))
        assert calls == message.get("tool_calls", [])


def test_completions(outputs):
    for whole, chunked in outputs:
        raw = body(OpenAICompletionCollector("i", "m", 5), whole)
        assert body(OpenAICompletionCollector("i", "m", 5), chunked) == raw
        chunks = datas(OpenAICompletionStream("i", "m", 5, "r"), chunked)
        assert "".join(c["choices"][0]["text"] for c in chunks) == json.loads(raw)["choices"][0]["text"]


def test_responses(outputs, monkeypatch):
    monkeypatch.setattr("time.time", lambda: 5.0)
    tool = {"type": "function", "name": "Read", "parameters": READ.parameters}
    request = openai_responses.parse(json.dumps({"input": "u", "tools": [tool]}).encode())
    for whole, chunked in outputs:
        raw = body(OpenAIResponsesCollector("resp_1", request, 5), whole)
        assert body(OpenAIResponsesCollector("resp_1", request, 5), chunked) == raw
        told = datas(OpenAIResponsesStream("resp_1", request, 5), chunked)
        assert told[-1]["response"] == json.loads(raw)
        assert [data["sequence_number"] for data in told] == list(range(len(told)))
        pieces: dict[str, str] = {}
        for data in told:
            if data["type"].endswith(".delta"):
                pieces[data["item_id"]] = pieces.get(data["item_id"], "") + data["delta"]
        for item in json.loads(raw)["output"]:
            full = item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"]
            assert pieces[item["id"]] == full
