"""Forced and strict calls in every format: what noise writes, the parser reads, as the schema says."""

# ruff: noqa: F811 -- `tokenizer` is a fixture of parsing.py

from __future__ import annotations

import copy
import functools
import importlib
import json
from typing import Any

import pytest
from fast_or_slow import rest_slow
from grammar_walk import Walker, calls_in
from host import chat
from mlx_lm.tokenizer_utils import TokenizerWrapper
from parsing import tokenizer  # noqa: F401 -- a fixture

from omlxd.chat import TextDelta, Tool, ToolCall
from omlxd.engine.constrain.call_formats import CALL_FORMATS
from omlxd.engine.constrain.constraint import Constraint, ConstraintCompiler
from omlxd.engine.output.parser import OutputParser
from omlxd.errors import InvalidRequest
from omlxd.models import demo


def closed(properties: dict[str, Any], *optional: str, **more: Any) -> dict[str, Any]:
    required = [name for name in properties if name not in optional]
    return {
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": False,
        **more,
    }


POINT = closed({"x": {"type": "integer"}, "label": {"type": "string"}}, "label")
SCHEMAS: dict[str, dict[str, Any]] = {
    "none": closed({}),
    "text": closed({"text": {"type": "string"}}),
    "texts": closed({"a": {"type": "string"}, "b": {"type": ["string", "null"]}}, "a"),
    "scalars": closed(
        {
            "whole": {"type": "integer", "minimum": -3, "maximum": 12},
            "any_whole": {"type": "integer"},
            "number": {"type": "number"},
            "flag": {"type": "boolean"},
            "nothing": {"type": "null"},
        }
    ),
    "choices": closed(
        {
            "mode": {"enum": ["r", "w+", 'say "<hi>" & go\n', ""]},
            "level": {"enum": [1, 2.5, None, True]},
            "kind": {"const": "file"},
            "maybe": {"anyOf": [{"type": "string", "enum": ["red", "blue"]}, {"type": "null"}]},
        }
    ),
    "arrays": closed(
        {
            "names": {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": 3},
            "grid": {
                "type": "array",
                "items": {"type": "array", "items": {"type": "integer"}, "maxItems": 2},
            },
            "pair": {
                "type": "array",
                "prefixItems": [{"type": "string"}, {"type": "boolean"}],
                "minItems": 2,
                "maxItems": 2,
            },
        },
        "grid",
    ),
    "nested": closed(
        {
            "at": {"$ref": "#/$defs/point"},
            "deep": closed({"list": {"type": "array", "items": {"$ref": "#/$defs/point"}, "maxItems": 2}}),
            "or": {"anyOf": [{"$ref": "#/$defs/point"}, {"type": "null"}]},
            "map": {"type": "object", "additionalProperties": {"type": "string"}},
        },
        "map",
        **{"$defs": {"point": POINT}},
    ),
    "short": closed({"code": {"type": "string", "minLength": 2, "maxLength": 5}}),
    "loose": {"type": "object", "properties": {"free": {}, "obj": {"type": "object"}}, "required": ["free"]},
}
TOOLS = tuple(Tool(name, "", schema) for name, schema in SCHEMAS.items())
TAGS = {
    "pythonic": ("<|tool_call_start|>", "<|tool_call_end|>"),
    "gemma4": ("<|tool_call>", "<tool_call|>", '<|"|>'),
    "function_gemma": ("<start_function_call>", "<end_function_call>", "<escape>"),
    "kimi_k3": ("<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"),
    "kimi_k2": ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    "minimax_m2": ("<minimax:tool_call>", "</minimax:tool_call>"),
    "mistral": ("[TOOL_CALLS]",),
}
"""Those that are tokens of their own in the models that write them; also tried as plain text."""
FORMATS = sorted(name for name in CALL_FORMATS if name.isidentifier())
"""All rows but ours, and one that mlx-lm's parser of another name reads."""


@functools.cache
def spelled(tokenizer, name: str, special: bool = False) -> TokenizerWrapper:
    parsers = importlib.import_module(f"mlx_lm.tool_parsers.{name}")
    inner = tokenizer._tokenizer
    if special:
        inner = copy.deepcopy(inner)
        inner.add_special_tokens({"additional_special_tokens": list(TAGS[name])})
    return TokenizerWrapper(
        inner,
        eos_token_ids=tokenizer.eos_token_ids,
        tool_parser=parsers.parse_tool_call,
        tool_call_start=parsers.tool_call_start,
        tool_call_end=parsers.tool_call_end,
    )


def compiled(compiler: ConstraintCompiler, **more: Any) -> Constraint:
    constraint = compiler.compile(chat(**more), thinking=False)
    assert constraint is not None
    return constraint


@functools.cache
def compiler_of(model: TokenizerWrapper) -> ConstraintCompiler:
    return ConstraintCompiler(model, demo.VOCAB + 16)


CASES = [(name, False) for name in FORMATS] + [(name, True) for name in sorted(TAGS)]
SOME = (("json_tools", False), ("qwen3_coder", False), ("gemma4", True), ("kimi_k3", True), ("mistral", True))
"""JSON, tags with and without tokens of their own, and the oddest two."""


def check_named(tokenizer, name: str, special: bool, seeds: range) -> None:
    model = spelled(tokenizer, name, special)
    compiler, walker = compiler_of(model), Walker(model)
    for tool in TOOLS:
        how: Any = {"tools": TOOLS, "tool_choice": f"named:{tool.name}"}
        walks = [walker.walk(compiled(compiler, **how), seed) for seed in seeds]
        for tokens in filter(None, walks):
            (call,) = calls_in(model, tokens, TOOLS)
            assert call.name == tool.name
        assert any(walks), tool.name


@pytest.mark.parametrize(("name", "special"), rest_slow(CASES, *SOME))
def test_what_is_forced_is_read_back_as_the_schema_says(tokenizer, name, special):
    check_named(tokenizer, name, special, range(2))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "special"), CASES)
def test_what_is_forced_is_read_back_whatever_the_seed(tokenizer, name, special):
    check_named(tokenizer, name, special, range(100, 102))


@pytest.mark.parametrize(("name", "special"), rest_slow(CASES, *SOME))
def test_one_call_and_several(tokenizer, name, special):
    model = spelled(tokenizer, name, special)
    compiler, walker = compiler_of(model), Walker(model)
    tools = tuple(tool for tool in TOOLS if tool.name in ("none", "choices"))
    counts = []
    for seed in range(6):
        many = compiled(compiler, tools=tools, tool_choice="required")
        if (tokens := walker.walk(many, seed, free=400)) is not None:
            counts.append(len(calls_in(model, tokens, tools)))
        one = compiled(compiler, tools=tools, tool_choice="required", parallel_calls=False)
        if (tokens := walker.walk(one, seed, free=400)) is not None:
            assert len(calls_in(model, tokens, tools)) == 1
        named = compiled(compiler, tools=tools, tool_choice="named:choices")
        if (tokens := walker.walk(named, seed, free=400)) is not None:
            assert len(calls_in(model, tokens, tools)) == 1
    assert max(counts) > 1


@pytest.mark.parametrize(("name", "special"), rest_slow(CASES, *SOME))
def test_an_answer_that_ends_with_one_call_tells_of_others_in_its_tokens(tokenizer, name, special):
    """Some formats have several calls between one pair of tags."""
    model = spelled(tokenizer, name, special)
    compiler, walker = compiler_of(model), Walker(model)
    tools = tuple(tool for tool in TOOLS if tool.name in ("none", "choices"))
    for seed in range(6):
        tokens = walker.walk(compiled(compiler, tools=tools, tool_choice="required"), seed, free=400)
        parser, taken = OutputParser(model, tools=tools, one_call=True), list[int]()
        for token in tokens or ():
            taken.append(token)
            events = parser.add_token(token)
            if parser.ended:
                assert sum(isinstance(event, ToolCall) for event in events) == 1
                assert parser.dropped == (len(calls_in(model, taken, tools)) > 1)
                break


@pytest.mark.parametrize(("name", "special"), rest_slow(CASES, *SOME))
def test_no_marker_of_a_call_that_is_cut_off_is_text(tokenizer, name, special):
    model = spelled(tokenizer, name, special)
    forced: dict[str, Any] = {"tools": TOOLS, "tool_choice": "named:texts"}
    tokens = Walker(model).walk(compiled(compiler_of(model), **forced), 1)
    assert tokens is not None
    for end in range(len(tokens)):
        parser = OutputParser(model, tools=TOOLS, must_call=True)
        events = [event for token in tokens[:end] for event in parser.add_token(token)]
        events += parser.finish("length")
        assert not any(isinstance(event, TextDelta) for event in events), model.decode(tokens[:end])
        free = OutputParser(model, tools=TOOLS)
        events = [event for token in tokens[:end] for event in free.add_token(token)] + free.finish("length")
        text = "".join(event.text for event in events if isinstance(event, TextDelta))
        assert model.tool_call_start not in text, model.decode(tokens[:end])


def allows(model: TokenizerWrapper, constraint: Constraint, text: str) -> bool:
    """Whether the whole of `text` may be written, in the tokenizer's own tokens, and the turn then end."""
    for token in model.encode(text, add_special_tokens=False):
        if constraint.mask is None or not constraint.mask[token]:
            return False
        constraint.advance(token)
    return constraint.mask is not None and any(constraint.mask[end] for end in model.eos_token_ids)


GO = {
    "pythonic": "<|tool_call_start|>[Go(n={n})]<|tool_call_end|>",
    "gemma4": "<|tool_call>call:Go{{n:{n}}}<tool_call|>",
    "function_gemma": "<start_function_call>call:Go{{n:{n}}}<end_function_call>",
    "kimi_k3": '<|open|>tools<|sep|><|open|>call tool="Go" index="1"<|sep|><|open|>argument key="n" '
    'type="number"<|sep|>{n}<|close|>argument<|sep|><|close|>call<|sep|><|close|>tools<|sep|>',
    "minicpm5": '<function name="Go"><param name="n">{n}</param></function>',
    "muse_spark": '<atem:function_calls>\n<atem:invoke name="Go">\n<atem:parameter name="n">{n}'
    "</atem:parameter>\n</atem:invoke>\n</atem:function_calls>",
    "json_tools": '<tool_call>\n{{"name": "Go", "arguments": {{"n": {n}}}}}\n</tool_call>',
    "qwen3_coder": "<tool_call>\n<function=Go>\n<parameter=n>\n{n}\n</parameter>\n</function>\n</tool_call>",
    "minimax_m2": '<minimax:tool_call>\n<invoke name="Go">\n<parameter name="n">{n}</parameter>\n</invoke>\n'
    "</minimax:tool_call>",
    "glm47": "<tool_call>Go<arg_key>n</arg_key><arg_value>{n}</arg_value></tool_call>",
}
"""A call as each format's template writes it."""
SMALL = closed({"n": {"type": "integer", "maximum": 9, "minimum": 0}})
STOP = Tool("Stop", "", closed({}))
IN_TEXT = [case for case in CASES if case[0] in GO]


@pytest.mark.parametrize(("name", "special"), IN_TEXT)
def test_strict_calls_in_free_text(tokenizer, name, special):
    model = spelled(tokenizer, name, special)
    compiler = compiler_of(model)
    strict = (Tool("Go", "", SMALL, strict=True), STOP)

    def may(text: str) -> bool:
        return allows(model, compiled(compiler, tools=strict), text)

    assert may("Nothing to call [here], {you} see: a < b.")
    assert may(f"I go.\n{GO[name].format(n=7)}")
    assert not may(f"I go.\n{GO[name].format(n=77)}")
    assert not may(f"I go.\n{GO[name].format(n=7).replace('Go', 'Run')}")


@pytest.mark.parametrize(("name", "special"), IN_TEXT)
def test_of_the_tools_some_are_allowed(tokenizer, name, special):
    model = spelled(tokenizer, name, special)
    compiler = compiler_of(model)
    tools = (Tool("Go", "", SMALL), STOP)
    call = GO[name].format(n=7)

    def may(text: str, *allowed: str, choice: str = "auto") -> bool:
        constraint = compiled(compiler, tools=tools, allowed_tools=allowed, tool_choice=choice)
        return allows(model, constraint, text)

    assert may("I rest.", "Stop") and may(call, "Go") and not may(f"I go.\n{call}", "Stop")
    assert may(call, "Go", choice="required") and not may(call, "Stop", choice="required")
    assert not may("No.", "Go", choice="required")
    assert compiler.compile(chat(tools=tools, allowed_tools=("Stop", "Go")), thinking=False) is None


@pytest.mark.parametrize(
    ("name", "schema", "says"),
    [
        ("pythonic", closed({"a": {"type": "array", "uniqueItems": True}}), "uniqueItems"),
        ("gemma4", closed({"a": {"type": "string", "format": "date"}}), "format 'date'"),
        ("gemma4", closed({"a": {"enum": ['<|"|>']}}), "can't hold"),
        ("function_gemma", closed({"a": {"not": {"type": "null"}}}), "not"),
        ("minicpm5", closed({'a"b': {"type": "null"}}), "whose name the format can't hold"),
        ("muse_spark", closed({"a": {"oneOf": [{"type": "integer"}, {"type": "number"}]}}), "oneOf"),
        ("kimi_k3", closed({"a": {"$ref": "#/$defs/none"}}), "at /properties/a points to nothing"),
        ("glm47", closed({"a": {"type": "object", "patternProperties": {"a": {}}}}), "patternProperties"),
        ("glm47", {"type": "objct"}, "'objct', and arguments are an object"),
        ("json_tools", {"type": "objct"}, "'objct', and arguments are an object"),
    ],
)
def test_a_strict_schema_that_cant_be_enforced_is_refused_by_name(tokenizer, name, schema, says):
    compiler = compiler_of(spelled(tokenizer, name))
    with pytest.raises(InvalidRequest, match=f"strict schema of 'Odd' can't be enforced: .*{says}"):
        compiler.compile(chat(tools=(Tool("Odd", "", schema, strict=True),)), thinking=False)


@pytest.mark.parametrize("name", ["pythonic", "gemma4", "function_gemma", "muse_spark", "kimi_k3", "glm47"])
def test_a_loose_schema_that_cant_be_enforced_still_gives_a_call(tokenizer, name):
    model = spelled(tokenizer, name)
    schema = closed({"date": {"type": "string", "format": "phone"}, "n": {"type": "integer", "not": {}}})
    tool = Tool("Odd", "", schema)
    constraint = compiled(compiler_of(model), tools=(tool,), tool_choice="required", parallel_calls=False)
    tokens = Walker(model).walk(constraint, 1)
    assert tokens is not None
    plain = Tool("Odd", "", closed({"date": {"type": "string"}, "n": {"type": "integer"}}))
    (call,) = calls_in(model, tokens, (plain,))
    assert json.loads(call.arguments).keys() == {"date", "n"}


def test_a_name_that_the_format_cant_hold(tokenizer):
    compiler = compiler_of(spelled(tokenizer, "pythonic"))
    odd, fine = Tool("a b", "", closed({})), Tool("ab", "", closed({}))
    with pytest.raises(InvalidRequest, match="can't hold the name 'a b'"):
        compiler.compile(chat(tools=(odd,), tool_choice="required"), thinking=False)
    assert compiled(compiler, tools=(odd, fine), tool_choice="required")


def test_thinking_that_begins_like_a_call(tokenizer):
    """Kimi K3's `<|open|>think` and `<|open|>tools` begin with the same token."""
    model = spelled.__wrapped__(tokenizer, "kimi_k3", special=True)
    starts, ends = "<|open|>think<|sep|>", "<|close|>think<|sep|>"
    model._think_start_tokens = tuple(model.encode(starts, add_special_tokens=False))
    model._think_end_tokens = tuple(model.encode(ends, add_special_tokens=False))
    compiler = compiler_of(model)
    call = GO["kimi_k3"].format(n=7)

    def may(text: str) -> bool:
        how: Any = {"tools": (Tool("Go", "", SMALL),), "tool_choice": "required", "thinking": None}
        return allows(model, compiled(compiler, **how), text)

    assert may(call) and may(f"{starts}Well, <a> b.{ends}{call}")
    assert not may(f"{starts}Well.{ends}No.") and not may(f"{starts}Well.")
