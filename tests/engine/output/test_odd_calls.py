"""Calls as models write them beside their format: several in one block, raw newlines, tags within values."""

# ruff: noqa: F811 -- `tokenizer` is a fixture of parsing.py

from __future__ import annotations

import pytest
from parsing import READ, merged, tokenizer  # noqa: F401 -- a fixture

from omlxd.chat import Tool
from omlxd.engine.output.calls.reader import ToolCallReader
from omlxd.engine.output.parser import OutputParser
from tests.engine.constrain.test_forced_calls import spelled

STOP = Tool("Stop", "", {"type": "object", "properties": {}})
READ_X, STOPPED = ("call", "Read", '{"path": "x"}'), ("call", "Stop", "{}")
JSON_READ = '{"name": "Read", "arguments": {"path": "x"}}'
CODER_READ = "<function=Read>\n<parameter=path>\nx\n</parameter>\n</function>"


@pytest.mark.parametrize(
    ("name", "text", "wanted"),
    [
        (
            "json_tools",
            f'<tool_call>\n{JSON_READ}\n{{"name": "Stop", "arguments": {{}}}}\n</tool_call> bye',
            [READ_X, STOPPED, ("text", "bye")],
        ),
        ("json_tools", f"<tool_call>{JSON_READ},{JSON_READ}</tool_call>", [READ_X, READ_X]),
        (
            "qwen3_coder",
            f"<tool_call>\n{CODER_READ}\n<function=Stop>\n</function>\n</tool_call>",
            [READ_X, STOPPED],
        ),
        (
            "minimax_m2",
            '<minimax:tool_call>\n<invoke name="Read">\n<parameter name="items">["</parameter>", 1]'
            "</parameter>\n</invoke>\n</minimax:tool_call>",
            [("call", "Read", '{"items": ["</parameter>", 1]}')],
        ),
        (
            "pythonic",
            '<|tool_call_start|>[Read(path="a\nb")]<|tool_call_end|>',
            [("call", "Read", '{"path": "a\\nb"}')],
        ),
        (
            "pythonic",
            '<|tool_call_start|>[Read(path="<arg_key>")]<|tool_call_end|>',
            [("call", "Read", '{"path": "<arg_key>"}')],
        ),
        (
            "minimax_m2",
            '<minimax:tool_call>\n<invoke name="Read">\n<parameter name="path"><arg_key></parameter>\n'
            "</invoke>\n</minimax:tool_call>",
            [("call", "Read", '{"path": "<arg_key>"}')],
        ),
        (
            "gemma4",
            '<|tool_call>call:Read{path:<|"|><longcat_arg_key><|"|>}<tool_call|>',
            [("call", "Read", '{"path": "<longcat_arg_key>"}')],
        ),
        ("pythonic", '<|tool_call_start|>[Read("x"), Stop()]<|tool_call_end|>', [READ_X, STOPPED]),
        (
            "pythonic",
            '<|tool_call_start|>[Stop("x")]<|tool_call_end|>',
            [("text", '<|tool_call_start|>[Stop("x")]<|tool_call_end|>')],
        ),
        ("gemma4", '<|tool_call>call:Read{"path":<|"|>x<|"|>}<tool_call|>', [READ_X]),
        ("gemma4", '<|tool_call>call:Read{path: "x"}<tool_call|>', [READ_X]),
        (
            "gemma4",
            '<|tool_call>call:Read{items:[{"a": "}\\u00e9"}]}<tool_call|>',
            [("call", "Read", '{"items": [{"a": "}é"}]}')],
        ),
    ],
)
def test_what_is_meant_is_called(tokenizer, name, text, wanted):
    for pieces in ([text], list(text)):
        parser = OutputParser(spelled(tokenizer, name), tools=(READ, STOP))
        events = [event for piece in pieces for event in parser.add_text(piece)] + parser.finish("stop")
        assert merged(events) == wanted


@pytest.mark.parametrize(
    ("arguments", "valid"),
    [
        ('{"path": "x', "{}"),
        ('{"path": "x"}', '{"path": "x"}'),
        ("", "{}"),
        ('{"path": "a\nb\\d"}', '{"path": "a\\nb\\\\d"}'),
        ('{"ratio": NaN}', "{}"),
    ],
)
def test_a_json_call_that_is_cut_off_keeps_its_arguments(tokenizer, arguments, valid):
    begun = f"<|tool_call_begin|>functions.Read:3<|tool_call_argument_begin|>{arguments}"
    parser = OutputParser(spelled(tokenizer, "kimi_k2"), tools=(READ, STOP))
    events = parser.add_text(f"Hm. <|tool_calls_section_begin|>{begun}") + parser.finish("length")
    assert merged(events) == [("text", "Hm."), ("cut", "Read", arguments, valid)]


@pytest.mark.parametrize("text", ["call:" * 60_000, "call:R{" + "a" * 300_000, "[R(" + "a.b" * 100_000])
def test_a_model_that_repeats_itself_holds_nobody_up(text):
    assert ToolCallReader((READ,)).read(text) is None


@pytest.mark.parametrize(
    "value", ["NaN", "-Infinity", "{'a': {1, 2}}", "{(1, 2): 3}", "[b'x']", "{'a': 1e999}"]
)
def test_a_literal_that_is_none_of_json_is_text(tokenizer, value):
    tool = Tool("Read", "", {"type": "object", "properties": {"x": {"type": ["object", "array", "number"]}}})
    body = f"<function=Read>\n<parameter=x>\n{value}\n</parameter>\n</function>"
    quoted = f'{{"name": "Read", "arguments": {{"x": "{value}"}}}}'
    for text in (body, quoted):
        parser = OutputParser(tokenizer, tools=(tool,))
        events = [*parser.add_text(f"<tool_call>\n{text}\n</tool_call>"), *parser.finish("stop")]
        assert merged(events) == [("call", "Read", f'{{"x": "{value}"}}')]
