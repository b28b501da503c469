"""Schemas as pydantic, zod, Claude Code and MCP servers make them: keyword by keyword, not all or nothing."""

# ruff: noqa: F811 -- `tokenizer` is a fixture of parsing.py

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
from grammar_walk import Walker, calls_in
from host import chat
from parsing import tokenizer  # noqa: F401 -- a fixture

from omlxd.chat import AnswerFormat, Tool
from omlxd.errors import InvalidRequest
from tests.engine.constrain.test_forced_calls import allows, compiled, compiler_of, spelled

SCHEMAS: dict[str, dict[str, Any]] = json.loads(
    (Path(__file__).parents[2] / "data" / "schemas.json").read_text()
)
LEFT_OUT = {
    "pydantic_set": ["/properties/names/uniqueItems", "/properties/one/uniqueItems"],
    "pydantic_path": ["/properties/path/format", "/properties/file/format"],
    "pydantic_union": ["/$defs/Dog/properties/tags/uniqueItems"],
    "pydantic_misc": [f"/properties/{name}/format" for name in ("net", "pw", "b", "b64")],
    "zod4_strings": ["/properties/p/pattern", *(f"/properties/{name}/format" for name in ("c", "b", "ip"))],
    "zod4_floats": [f"/properties/{name}/{word}" for name in "fd" for word in ("minimum", "maximum")],
    "zod3_set": ["/properties/s/uniqueItems"],
    "zod3_strings": ["/properties/p/pattern"],
    "mcp_github": [
        *("/properties/labels/uniqueItems", "/properties/since/format", "/properties/filter/not"),
        *("/properties/mode/type", "/additionalProperties"),
    ],
    "mcp_query": [
        *("/properties/where/oneOf/1/properties/all/contains", "/properties/where/oneOf", "/if", "/then")
    ],
}
"""Of the schemas of which something is left out; of the others nothing is."""
FORMATS = ("json_tools", "qwen3_coder", "pythonic", "gemma4", "kimi_k3", "minicpm5")


def without(schema: dict[str, Any], pointers: list[str]) -> dict[str, Any]:
    schema = copy.deepcopy(schema)
    for pointer in pointers:
        *steps, word = pointer.split("/")[1:]
        node: Any = schema
        for step in steps:
            node = node[int(step) if isinstance(node, list) else step]
        value = node.pop(word)
        if word == "oneOf":
            node["anyOf"] = value
    return schema


@pytest.mark.parametrize("name", SCHEMAS)
def test_what_is_left_out_is_told_and_refused_where_strict(tokenizer, name):
    compiler = compiler_of(spelled(tokenizer, "json_tools"))
    schema, left_out = SCHEMAS[name], LEFT_OUT.get(name, [])
    answer = compiler.compile(chat(format=AnswerFormat("json", schema=schema)), thinking=False)
    assert answer is not None
    assert answer.left_out == tuple(f"response_format: {pointer}" for pointer in left_out)
    call = compiled(compiler, tools=(Tool("Go", "", schema),), tool_choice="required")
    assert call.left_out == tuple(f"tools.Go: {pointer}" for pointer in left_out)
    for request in (
        chat(format=AnswerFormat("json", schema=schema, strict=True)),
        chat(tools=(Tool("Go", "", schema, strict=True),), tool_choice="required"),
    ):
        if left_out:
            with pytest.raises(InvalidRequest):
                compiler.compile(request, thinking=False)
        else:
            assert compiler.compile(request, thinking=False)


@pytest.mark.slow
@pytest.mark.parametrize("name", SCHEMAS)
@pytest.mark.parametrize("format", FORMATS)
def test_the_rest_of_the_schema_holds(tokenizer, format, name):
    model = spelled(tokenizer, format)
    tool = Tool("Go", "", SCHEMAS[name])
    constraint = compiled(compiler_of(model), tools=(tool,), tool_choice="named:Go")
    if len(constraint.left_out) > len(LEFT_OUT.get(name, ())):
        return  # Text without quotes has no formats: it is told, and noise shows it.
    tokens = Walker(model).walk(constraint, 1, free=200)
    loose = Tool("Go", "", without(SCHEMAS[name], LEFT_OUT.get(name, [])))
    if tokens is not None:
        calls_in(model, tokens, (loose,))


@pytest.mark.parametrize(
    ("schema", "yes", "no"),
    [
        ({"uniqueItems": True, "type": "array", "items": {"type": "integer"}}, [1, 1], ["a"]),
        ({"type": "string", "format": "path", "maxLength": 3}, "a/b", "abcd"),
        ({"type": "string", "pattern": "(?=a)a", "minLength": 2}, "xy", "x"),
        ({"not": {"const": 1}, "type": "integer"}, 1, "a"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, 1.5, "a"),
        ({"contains": {"const": 1}, "type": "array", "items": {"type": "integer"}}, [2], ["a"]),
        (
            {"type": "object", "properties": {"b": {"type": "null"}}, "additionalProperties": None},
            {},
            {"c": 1},
        ),
        ({"type": ["any", "string"]}, "a", 1),
        ({"enum": [1, 2], "if": {}, "then": {}}, 2, 3),
        ({"propertyNames": {"enum": ["b"]}, "additionalProperties": {"type": "integer"}}, {"b": 1}, {"c": 1}),
        ({"type": "array", "items": {"type": "string", "format": "path", "enum": ["a"]}}, ["a"], ["b"]),
    ],
)
def test_one_odd_property_frees_no_other(tokenizer, schema, yes, no):
    """Nor itself of its other keywords."""
    model = spelled(tokenizer, "json_tools")
    root = {"type": "object", "properties": {"x": schema, "y": {"enum": [1]}}, "required": ["x", "y"]}
    tools = (Tool("Go", "", root),)

    def may(arguments: dict[str, Any]) -> bool:
        constraint = compiled(compiler_of(model), tools=tools, tool_choice="named:Go")
        call = json.dumps({"name": "Go", "arguments": arguments})
        return allows(model, constraint, f"<tool_call>\n{call}\n</tool_call>")

    assert may({"x": yes, "y": 1})
    assert not may({"x": no, "y": 1})
    assert not may({"x": yes, "y": 2})
    assert not may({"x": yes, "y": 1, "invented": 1})


DIGITS = [str(digit) for digit in range(10)]


@pytest.mark.parametrize("lead", [[], ["0.1"], ["-1"], ["1e"]])
@pytest.mark.parametrize(
    "schema",
    [
        {"type": "integer"},
        {"type": "number"},
        {"type": "integer", "format": "int32"},
        {"type": "integer", "format": "int64"},
        {"type": "integer", "format": "uint8"},
        {"type": "integer", "minimum": 3},
        {"type": "number", "minimum": 0, "maximum": 1},
        {"type": "integer", "minimum": 0, "exclusiveMinimum": True, "maximum": 12},
        {"type": "string", "format": "date-time"},
        {},
    ],
)
def test_who_writes_digits_as_long_as_it_may_comes_to_an_end(tokenizer, schema, lead):
    root = {"type": "object", "properties": {"x": schema}, "required": ["x"]}
    model = spelled(tokenizer, "json_tools")
    constraint = compiler_of(model).compile(chat(format=AnswerFormat("json", schema=root)), thinking=False)
    assert constraint is not None
    ids = model.encode('{"x":', add_special_tokens=False)
    wants = [model.encode(text, add_special_tokens=False)[0] for text in (*DIGITS[::-1], "2", "0", "1")]
    ends = model.eos_token_ids
    for text in lead:
        ids += model.encode(text, add_special_tokens=False)
    tokens: list[int] = []
    while len(tokens) < 150:
        mask = constraint.mask
        assert mask is not None
        if any(mask[end] for end in ends):
            break
        ask = ids[:1] if ids and mask[ids[0]] else [each for each in wants if mask[each]]
        del ids[:1]
        tokens.append(token := ask[0] if ask else int(mask.nonzero()[0][0]))
        constraint.advance(token)
    text = model.decode(tokens)
    value = json.loads(text)
    assert len(text) < 120, text
    least, most = {"int32": (-(2**31), 2**31 - 1), "int64": (-(2**63), 2**63 - 1), "uint8": (0, 255)}.get(
        schema.get("format", ""), (float("-inf"), float("inf"))
    )
    assert not isinstance(value["x"], int | float) or least <= value["x"] <= most
    jsonschema_rs.Draft202012Validator(
        {**root, "properties": {"x": {key: each for key, each in schema.items() if each is not True}}}
    ).validate(value)
