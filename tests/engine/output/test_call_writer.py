"""Arguments go out while the model writes them, and what breaks off says so."""

# ruff: noqa: F811 -- `tokenizer` is a fixture of parsing.py

from __future__ import annotations

import json
import re
import time
from dataclasses import replace
from typing import Any, cast

import pytest
from fake_engine import USAGE
from growth import assert_linear
from parsing import READ, call, parse, tokenizer  # noqa: F401 -- a fixture

from omlxd.api.anthropic.answer import AnthropicStream
from omlxd.api.openai.chat_answer import OpenAIChatStream
from omlxd.chat import Finished, TextDelta, ToolCall, ToolCallCut, ToolCallDelta
from omlxd.engine.output.calls.reader import ToolCallReader
from omlxd.engine.output.calls.writers import TagWriter, writer_for
from omlxd.engine.output.parser import OutputParser


def pieces(tokenizer, text: str) -> list[str]:
    """The text of each ToolCallDelta, fed letter by letter."""
    parser = OutputParser(tokenizer, tools=(READ,))
    events = [event for letter in text for event in parser.add_text(letter)]
    return [event.text for event in events if isinstance(event, ToolCallDelta)]


def test_a_string_goes_out_letter_by_letter(tokenizer):
    text = f"<tool_call>\n{call(path='abc', limit='12', ratio=1.5)}\n</tool_call>"
    told = ['{"path": "', "a", "b", "c", '"', ', "limit": 12', ', "ratio": 1.5}']
    assert pieces(tokenizer, text) == told


def test_escapes_go_out_whole(tokenizer):
    text = '<tool_call>{"name": "Read", "arguments": {"path": "\\n\\u00e9\\ud83d\\ude42\\\\"}}</tool_call>'
    assert pieces(tokenizer, text) == ['{"path": "', "\\n", "é", "🙂", "\\\\", '"', "}"]


@pytest.mark.parametrize("written", [r"\d+\.py", r"a\'b", r"\u12", r"\U", r"C:\Work\\x", r"\\d\n\xe9"])
def test_a_backslash_that_begins_no_escape_stands_for_itself(tokenizer, written):
    path = written.replace(r"\\", "\0").replace(r"\n", "\n").replace("\0", "\\")
    arguments = json.dumps({"path": path, "tags": [path]})
    told = f'{{"path": "{written}", "tags": ["{written}"]}}'
    text = f'<tool_call>{{"name": "Read", "arguments": {told}}}</tool_call>'
    assert "".join(pieces(tokenizer, text)) == arguments
    for chunks in (text, [text]):
        assert parse(tokenizer, *chunks) == [("call", "Read", arguments)]
    listed = f"<tool_call>[{text[11:-12]}]</tool_call>"
    assert parse(tokenizer, listed) == [("call", "Read", arguments)]


def test_parameters_go_out_one_by_one(tokenizer):
    limit = "<parameter=limit>\n7\n</parameter>"
    body = f"<function=Read>\n<parameter=path>\na\nb\n</parameter>\n{limit}\n</function>"
    text = f"<tool_call>\n{body}\n</tool_call>"
    assert pieces(tokenizer, text) == ['{"path": "a\\nb"', ', "limit": 7']
    assert parse(tokenizer, *text) == [("call", "Read", '{"path": "a\\nb", "limit": 7}')]
    deep = "<arg_key>deep</arg_key><arg_value>true</arg_value>"
    pairs = f"Read<arg_key>path</arg_key><arg_value>a</arg_value>{deep}"
    text = f"<tool_call>{pairs}</tool_call>"
    assert pieces(tokenizer, text) == ['{"path": "a"', ', "deep": true']
    assert parse(tokenizer, *text) == [("call", "Read", '{"path": "a", "deep": true}')]


@pytest.mark.parametrize(
    ("begun", "looped"),
    [
        ('{"name": "Read", "arguments": {', " " * 16),
        ('{"name": "Read", "arguments": {"path": "a"', " " * 16),
        ('{"name": "Read", "arguments": {"path": "', "</tool_call>"),
        ('{"name": "Read", "arguments": {"', "k" * 8),
        ("<function=Read>\n<parameter=path>\n", "</parameter>"),
        ("<function=", "R" * 8),
    ],
)
def test_a_model_that_repeats_itself_in_a_call_costs_as_much_for_each_token(tokenizer, begun, looped):
    def seconds(count: int) -> float:
        parser = OutputParser(tokenizer, tools=(READ,))
        parser.add_text(f"<tool_call>{begun}")
        start = time.thread_time()
        for _ in range(count):
            parser.add_text(looped)
        return time.thread_time() - start

    assert_linear(seconds, 800)


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>{"name": "Read", "arguments": "{}"}</tool_call>',
        '<tool_call>{"arguments": {"path": "a"}, "name": "Read"}</tool_call>',
        '<tool_call>[{"name": "Read", "arguments": {"path": "a"}}]</tool_call>',
        "<tool_call>Read</tool_call>",
    ],
)
def test_other_spellings_come_whole(tokenizer, text):
    assert not pieces(tokenizer, text)
    assert parse(tokenizer, *text)[0][:2] == ("call", "Read")


@pytest.mark.parametrize(
    ("text", "reason", "events"),
    [
        (
            '{"path": "a", "limit": 1',
            "length",
            [("cut", "Read", '{"path": "a", "limit": 1', '{"path": "a"}')],
        ),
        ('{"path": "a", "li', "length", [("cut", "Read", '{"path": "a", "li', '{"path": "a"}')]),
        ('{"path": "a\\', "length", [("cut", "Read", '{"path": "a', "{}")]),
        ('{"path": "a"}', "length", [("cut", "Read", '{"path": "a"}', '{"path": "a"}')]),
        ('{"path": "a"}', "stop", [("cut", "Read", '{"path": "a"}', '{"path": "a"}')]),
        (
            '{"path": "a", "limit": 1 2}}</tool_call> b',
            "stop",
            [("cut", "Read", '{"path": "a"', '{"path": "a"}'), ("text", "1 2}}\nb")],
        ),
    ],
)
def test_what_breaks_off(tokenizer, text, reason, events):
    text = '<tool_call>{"name": "Read", "arguments": ' + text
    assert parse(tokenizer, text, reason=reason) == events
    assert parse(tokenizer, *text, reason=reason) == events


SCRIPT = [
    TextDelta("I "),
    ToolCallDelta("c1", "Read", '{"path": "'),
    ToolCallDelta("c1", "Read", "a"),
    ToolCall("c1", "Read", '{"path": "a"}'),
    ToolCallDelta("c2", "Read", '{"path'),
    ToolCallCut("c2", "Read", '{"path": "b', "{}"),
    Finished("length", USAGE),
]


def datas(raw: bytes) -> list[dict]:
    lines = [line[6:] for line in raw.decode().split("\n") if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def test_anthropic_tells_it_as_it_comes():
    encoder = AnthropicStream("i", "m", "r")
    told = [datas(encoder.event(event)) for event in SCRIPT]
    assert [[data["type"] for data in some] for some in told[1:6]] == [
        ["content_block_stop", "content_block_start", "content_block_delta"],
        ["content_block_delta"],
        ["content_block_delta", "content_block_stop"],
        ["content_block_start", "content_block_delta"],
        ["content_block_delta", "content_block_stop"],
    ]
    assert told[3][0]["delta"]["partial_json"] == '"}' and told[6][0]["delta"]["stop_reason"] == "max_tokens"


def test_chat_tells_it_as_it_comes():
    encoder = OpenAIChatStream("i", "m", 5, "r")
    told = [datas(encoder.event(event))[0]["choices"][0]["delta"] for event in SCRIPT[1:6]]
    first = {
        "id": "c1",
        "function": {"name": "Read", "arguments": '{"path": "'},
        "type": "function",
        "index": 0,
    }
    assert told[0]["tool_calls"] == [first]
    assert told[1]["tool_calls"] == [{"index": 0, "function": {"arguments": "a"}}]
    assert told[2]["tool_calls"] == [{"index": 0, "function": {"arguments": '"}'}}]
    assert told[3]["tool_calls"][0]["index"] == 1
    assert told[4]["tool_calls"] == [{"index": 1, "function": {"arguments": '": "b'}}]


def test_a_tag_within_a_value_is_not_looked_at_with_every_token():
    writer = writer_for("<function=Read>\n", ToolCallReader((READ,)).parameters)
    looked = 0

    class Counted:
        def match(self, text: str) -> re.Match[str] | None:
            nonlocal looked
            looked += 1
            return parameter.match(text)

    assert isinstance(writer, TagWriter)
    parameter = writer._tags.parameter
    writer._tags = replace(writer._tags, parameter=cast(Any, Counted()))
    value = f"see </parameter> here{' word' * 1000}"
    text = f"<function=Read>\n<parameter=path>\n{value}\n</parameter>\n</function>"
    for letter in text:
        writer.feed(letter)
    assert writer.close() and json.loads(writer.arguments) == {"path": value}
    assert looked < 20
