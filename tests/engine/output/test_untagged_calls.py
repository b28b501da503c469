"""Calls that models write without their format's tags: what is one, what is text, and how long it waits."""

# ruff: noqa: F811 -- `tokenizer` is a fixture of parsing.py

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from parsing import merged, parse, tokenizer  # noqa: F401 -- a fixture

from omlxd.chat import Event, Tool
from omlxd.engine.output.calls.untagged import MOST_HELD
from omlxd.engine.output.parser import OutputParser

WEATHER = Tool(
    "get_weather",
    "Tells the weather.",
    {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer", "minimum": 1},
            "unit": {"enum": ["C", "F"]},
        },
        "required": ["city"],
        "additionalProperties": False,
    },
)
WRITE = Tool(
    "write_file",
    "Writes.",
    {"type": "object", "properties": {"path": {"type": "string"}, "text": {"type": "string"}}},
)
TIME = Tool("get_weather_time", "Tells when.", {})
TOOLS = (WEATHER, WRITE, TIME)

OSLO = ("call", "get_weather", '{"city": "Oslo"}')
BERGEN = ("call", "get_weather", '{"city": "Bergen"}')
CALL = '{"name": "get_weather", "arguments": {"city": "Oslo"}}'
OTHER = '{"name": "get_weather", "arguments": {"city": "Bergen"}}'
META = '{"name": "get_weather", "parameters": {"city": "Oslo"}}'
SURE = "Sure! I'll look up the weather in Oslo."
PIECE = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n{}\n```<｜tool▁call▁end｜>"

ANSWERS: dict[str, tuple[str, list[tuple[str, ...]]]] = {
    "qwen2.5-coder": (f"```json\n{CALL}\n```", [OSLO]),
    "qwen2.5-coder, one line": (f"```json {CALL} ```", [OSLO]),
    "qwen2.5-coder, tools": (f"<tools>\n{CALL}\n</tools>", [OSLO]),
    "qwen2.5-coder, two in one fence": (f"```json\n{CALL}\n{OTHER}\n```", [OSLO, BERGEN]),
    "qwen2.5-coder, two fences": (f"```json\n{CALL}\n```\n\n```json\n{OTHER}\n```\n", [OSLO, BERGEN]),
    "qwen2.5-coder, a sentence": (f"{SURE}\n\n```json\n{CALL}\n```", [("text", SURE), OSLO]),
    "qwen2.5-coder, half of its tags": (f"{CALL}\n</tool_call>", [OSLO]),
    "qwen3-coder, no frame": (
        "<function=get_weather>\n<parameter=city>\nOslo\n</parameter>\n</function>\n</tool_call>",
        [OSLO],
    ),
    "llama-3.1": (META, [OSLO]),
    "llama-3.1, a type": (
        '{"type": "function", "name": "get_weather", "parameters": {"city": "Oslo"}}',
        [OSLO],
    ),
    "llama-3.1, two": (f"{META}; {META.replace('Oslo', 'Bergen')}", [OSLO, BERGEN]),
    "llama-3.1, python tag": (f"<|python_tag|>{META}", [OSLO]),
    "llama-3.1, function": ('<function=get_weather>{"city": "Oslo"}</function>', [OSLO]),
    "llama-3.2": ("[get_weather(city='Oslo')]", [OSLO]),
    "llama-3.2, two": ('[get_weather(city="Oslo"), get_weather(city="Bergen")]', [OSLO, BERGEN]),
    "llama-3.2, digits": (
        '{"name": "get_weather", "parameters": {"city": "Oslo", "days": "3"}}',
        [("call", "get_weather", '{"city": "Oslo", "days": 3}')],
    ),
    "mistral, no token": (f"[{CALL}, {OTHER}]", [OSLO, BERGEN]),
    "mistral, in text": (f"[TOOL_CALLS] [{CALL}]", [OSLO]),
    "mistral, with an id": (CALL[:-1] + ', "id": "VvvODy9mT"}', [OSLO]),
    "gemma-3": ('```tool_code\nget_weather(city="Oslo")\n```', [OSLO]),
    "gemma-3, a list": ('```tool_code\n[get_weather("Oslo")]\n```', [OSLO]),
    "gemma-3, json": (
        f"Okay, I can do that.\n```tool_call\n{CALL}\n```",
        [("text", "Okay, I can do that."), OSLO],
    ),
    "phi-4-mini": (f"<|tool_call|>[{CALL}]<|/tool_call|>", [OSLO]),
    "phi-4-mini, functools": (f"functools[{CALL}]", [OSLO]),
    "deepseek-r1": (
        "<｜tool▁calls▁begin｜>" + PIECE.format('{"city": "Oslo"}') + "<｜tool▁calls▁end｜>",
        [OSLO],
    ),
    "deepseek-v3.1": (
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{"city": "Oslo"}'
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        [OSLO],
    ),
    "smollm2": (f"<tool_call>[{CALL}]</tool_call>", [OSLO]),
    "smollm2, bare": (f"[{CALL}]", [OSLO]),
    "hermes, no tags": (f"\n{CALL}\n", [OSLO]),
    "hermes, arguments first": ('{"arguments": {"city": "Oslo"}, "name": "get_weather"}', [OSLO]),
    "hermes, tags and none": (f"<tool_call>\n{CALL}\n</tool_call>\n{OTHER}", [OSLO, BERGEN]),
    "granite-3": (f"<|tool_call|>[{CALL}]", [OSLO]),
    "openai's own": (
        '{"type": "function", "function": {"name": "get_weather", "arguments": "{\\"city\\": \\"Oslo\\"}"}}',
        [OSLO],
    ),
    "behind a thought": (f"<think>\nThe weather.\n</think>\n\n{CALL}", [("reasoning", "The weather."), OSLO]),
    "no arguments": (
        '{"name": "get_weather_time", "arguments": {}}',
        [("call", "get_weather_time", "{}")],
    ),
    "tags in a string": (
        '{"name": "write_file", "arguments": {"path": "a", "text": "```json\\n[1]</tools>"}}',
        [("call", "write_file", '{"path": "a", "text": "```json\\n[1]</tools>"}')],
    ),
}
"""What models of each family write, and what it is."""

TEXTS = {
    "another tool": '{"name": "get_news", "arguments": {"city": "Oslo"}}',
    "a longer name": '{"name": "get_weathers", "arguments": {"city": "Oslo"}}',
    "a missing argument": '{"name": "get_weather", "arguments": {}}',
    "another argument": '{"name": "get_weather", "arguments": {"city": "Oslo", "zip": 1}}',
    "no value of it": '{"name": "get_weather", "arguments": {"city": "Oslo", "unit": "K"}}',
    "out of bounds": '[get_weather(city="Oslo", days=0)]',
    "no arguments": '{"name": "get_weather"}',
    "one bad call of two": f"[{CALL}, {CALL.replace('city', 'town')}]",
    "text behind it": f"```json\n{CALL}\n```\nThis asks for the weather.",
    "two sentences before it": f"You can call this tool. Write this into your file:\n{CALL}",
    "a call within prose": f"An example is `{CALL}` which asks for it.",
    "data": '{"city": "Oslo", "degrees": [1, 2.5], "windy": false}',
    "a list": "[1, 2, 3]",
    "a person": '```json\n{"name": "Alice", "arguments": "none"}\n```',
    "code": '```python\nprint(get_weather("Oslo"))\n```',
    "a python call": 'get_weather(city="Oslo")',
    "a link": "[get_weather](https://example.org)",
    "cut off": CALL[:-1],
    "half a fence": f"```json\n{CALL}\n``",
    "no JSON": '{"name": "get_weather", "arguments": {city: "Oslo"}}',
    "deep": '{"name": "get_weather_time", "arguments": ' + '{"a": ' * 5000,
    "an empty tag": "<tools></tools>",
    "long": '{"name": "write_file", "arguments": {"text": "' + "x" * MOST_HELD + '"}}',
    "arguments in no object": '{"name": "get_weather_time", "arguments": [1]}',
    "nothing but its beginning": "```json\n",
}
"""What is an answer, byte for byte."""


def pieces(text: str, size: int) -> list[str]:
    return [text[at : at + size] for at in range(0, len(text), size)]


@pytest.mark.parametrize("name", ANSWERS)
def test_what_models_write_is_a_call(tokenizer, name):
    text, wanted = ANSWERS[name]
    for size in (1, 3, len(text)):
        assert parse(tokenizer, *pieces(text, size), tools=TOOLS) == wanted
    (first, *_) = parse(tokenizer, text, tools=TOOLS, one_call=True)
    assert first == wanted[0]


@pytest.mark.parametrize("name", TEXTS)
def test_what_is_no_call_is_text(tokenizer, name):
    text = TEXTS[name]
    for size in (1, 3, len(text)) if len(text) < 1000 else (1000, len(text)):
        assert parse(tokenizer, *pieces(text, size), tools=TOOLS) == [("text", text)]


@pytest.mark.parametrize(
    ("behind", "stop"), [("\n", "\n"), ("\n\nUser: And", "\n\nUser:"), (" \nOutput: 3", "Output")]
)
def test_a_stop_string_behind_a_call_ends_it(tokenizer, behind, stop):
    """Real Gemma 3, of base weights, goes on with the user's next question."""
    for size in (1, 3, 200):
        parser = OutputParser(tokenizer, tools=TOOLS, stop=(stop,))
        events = [event for piece in pieces(CALL + behind, size) for event in parser.add_text(piece)]
        assert parser.ended and parser.stopped == stop
        assert merged(events + parser.finish("stop")) == [OSLO]
    assert parse(tokenizer, f"{CALL} Then\n", tools=TOOLS, stop=("\n",)) == [("text", f"{CALL} Then")]


@pytest.mark.parametrize("how", [{"tools": ()}, {"held": True}, {"tools": TOOLS, "allowed": ("write_file",)}])
def test_where_no_call_may_be_json_is_text(tokenizer, how):
    assert parse(tokenizer, CALL, **{"tools": TOOLS, **how}) == [("text", CALL)]


def shown(tokenizer, text: str) -> int:
    """Letters that were sent before the text's end."""
    parser = OutputParser(tokenizer, tools=TOOLS)
    events: list[Event] = [event for letter in text for event in parser.add_text(letter)]
    return sum(len(event[1]) for event in merged(events))


@pytest.mark.parametrize(
    ("text", "waits"),
    [
        ('{"city": "Oslo"', 0),
        ('[{"city": 1', 0),
        ('{"name": "Alice"', 0),
        ("```python\nimport os", 0),
        ("Use `ls` or [1", 0),
        (f"{SURE} {CALL} Then", 0),
        (CALL, len(CALL)),
    ],
)
def test_text_waits_no_longer_than_it_may_be_a_call(tokenizer, text, waits):
    assert len(text) - shown(tokenizer, text) == waits


PIECES = st.sampled_from(
    [
        *(
            "```json\n",
            "```",
            "```tool_code\n",
            "<tools>",
            "</tools>",
            "<tool_call>",
            "</tool_call>",
            "\n",
            " ",
        ),
        *(CALL, OTHER, META, CALL[:20], CALL[20:], "[", "]", "{", "}", ",", '"', "get_weather(", "city='O')"),
        *(
            "[get_weather(city='O')]",
            "<function=get_weather>",
            '{"city": "Oslo"}',
            "</function>",
            "Sure! ",
            "word",
        ),
        *(
            "One of us says so. ",
            "<think>",
            "</think>",
            "END",
            "functools",
            "<｜tool▁call▁begin｜>",
            "</parameter>",
        ),
        "<parameter=city>",
    ]
)


@settings(max_examples=400, deadline=None)
@given(
    st.lists(PIECES, max_size=12).map("".join),
    st.sets(st.integers(0, 300), max_size=12),
    st.sampled_from(["stop", "length"]),
    st.sampled_from([(), ("END",), ("```",), ("\n",), ("\n", "wo"), (" word", "\nEND")]),
    st.booleans(),
)
def test_chunks_never_matter_and_no_word_is_lost(tokenizer, text, cuts, reason, stop, one_call):
    how = {"reason": reason, "stop": stop, "tools": TOOLS, "one_call": one_call}
    at = [0, *sorted(cut for cut in cuts if cut < len(text)), len(text)]
    events = parse(tokenizer, *[text[a:b] for a, b in itertools.pairwise(at)], **how)
    assert events == parse(tokenizer, text, **how)
    if stop or one_call:
        return
    plain = parse(tokenizer, text, tools=TOOLS, allowed=("no tool",), reason=reason)
    written, place = "".join(event[1] for event in plain if event[0] == "text"), 0
    for event in events:
        if event[0] == "text":
            place = written.index(event[1], place) + len(event[1])
    if not any(event[0] == "call" for event in events):
        assert events == plain


@settings(max_examples=100, deadline=None)
@given(
    st.dictionaries(
        st.text(max_size=8),
        st.recursive(
            st.none()
            | st.booleans()
            | st.integers()
            | st.floats(allow_nan=False, allow_infinity=False)
            | st.text(),
            lambda inner: (
                st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
            ),
            max_leaves=8,
        ),
    ),
    st.integers(1, 9),
)
def test_any_arguments_come_whole(tokenizer, arguments, size):
    text = json.dumps({"name": "get_weather_time", "arguments": arguments}, ensure_ascii=False)
    ((kind, name, written),) = parse(tokenizer, *pieces(text, size), tools=TOOLS)
    assert (kind, name) == ("call", "get_weather_time") and json.loads(written) == arguments
