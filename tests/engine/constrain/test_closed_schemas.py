"""Schemas as pydantic makes them: an object has the properties that its schema names, and no others."""

# ruff: noqa: F811 -- `tokenizer` is a fixture of parsing.py

from __future__ import annotations

import json
from typing import Any, Literal, Optional

import pytest
from grammar_walk import Walker
from host import chat
from parsing import tokenizer  # noqa: F401 -- a fixture
from pydantic import BaseModel, ConfigDict, Field

from omlxd.chat import AnswerFormat, Tool
from tests.engine.constrain.test_forced_calls import allows, compiler_of, spelled


class Point(BaseModel):
    x: int
    next: Optional[Point] = None  # noqa: UP045 -- as older code has it


class Cat(BaseModel):
    kind: Literal["cat"]
    lives: int = Field(ge=1, le=9)


class Box(BaseModel):
    model_config = ConfigDict(extra="allow")
    kind: Literal["box"]


class Empty(BaseModel):
    pass


class Scene(BaseModel):
    at: Point
    things: list[Cat | Box] = Field(max_length=2)
    pair: tuple[int, Point] = Field(description="a pair")
    counts: dict[str, int]
    empty: Empty


class OneThing(BaseModel):
    thing: Cat | Box = Field(discriminator="kind")


SCENE: dict[str, Any] = {
    "at": {"x": 1, "next": {"x": 2, "next": None}},
    "things": [{"kind": "cat", "lives": 9}, {"kind": "box", "size": 3}],
    "pair": [1, {"x": 3}],
    "counts": {"cats": 4},
    "empty": {},
}
ODD = {
    "at": {**SCENE["at"], "z": 1},
    "things": [{"kind": "cat", "lives": 9, "name": "Tom"}],
    "pair": [1, {"x": 3, "y": 4}],
    "empty": {"a": 1},
}


def may_answer(model, schema: dict[str, Any], value: Any) -> bool:
    format = AnswerFormat("json", schema=schema)
    constraint = compiler_of(model).compile(chat(format=format), thinking=False)
    return allows(model, constraint, value if isinstance(value, str) else json.dumps(value))


def may_call(model, schema: dict[str, Any], arguments: Any) -> bool:
    tools = (Tool("Go", "", schema),)
    constraint = compiler_of(model).compile(chat(tools=tools, tool_choice="named:Go"), thinking=False)
    call = json.dumps({"name": "Go", "arguments": arguments})
    return allows(model, constraint, f"<tool_call>\n{call}\n</tool_call>")


@pytest.mark.parametrize("may", [may_answer, may_call])
def test_a_pydantic_model_is_closed_where_it_does_not_allow_more(tokenizer, may):
    model = spelled(tokenizer, "json_tools")
    schema = Scene.model_json_schema()
    assert may(model, schema, SCENE)
    assert not may(model, schema, {**SCENE, "mood": "calm"})
    for key, odd in ODD.items():
        assert not may(model, schema, {**SCENE, key: odd}), key
    one = OneThing.model_json_schema()
    assert may(model, one, {"thing": {"kind": "box", "size": 3}})
    assert not may(model, one, {"thing": {"kind": "cat", "lives": 3, "size": 3}})


A = {"type": "object", "properties": {"a": {"type": "integer"}}}
B = {"type": "object", "properties": {"b": {"type": "integer"}}, "required": ["b"]}


@pytest.mark.parametrize(
    ("schema", "yes", "no"),
    [
        ({"allOf": [A, B]}, {"a": 1, "b": 2}, {"b": 2, "c": 3}),
        ({"allOf": [{"$ref": "#/$defs/a"}], "$defs": {"a": A}}, {"a": 1}, {"a": 1, "c": 3}),
        ({**A, "allOf": [{"$ref": "#/$defs/b"}], "$defs": {"b": B}}, {"a": 1, "b": 2}, {"b": 2, "c": 3}),
        ({**A, "anyOf": [B, {"required": ["d"]}]}, {"a": 1, "b": 2}, {"b": 2, "c": 3}),
        ({**A, "anyOf": [B, {"required": ["d"]}]}, {"d": "x"}, {"d": 2, "c": 3}),
        ({"anyOf": [A, B]}, {"b": 1}, {"a": 1, "b": 1, "c": 1}),
        ({**A, "required": ["z"]}, {"a": 1, "z": [1]}, {"z": 1, "c": 1}),
        ({**A, "patternProperties": {"^x": {"type": "integer"}}}, {"a": 1, "xy": 1}, {"a": 1, "y": 1}),
        ({**A, "unevaluatedProperties": False}, {"a": 1}, {"a": 1, "c": 1}),
        ({**A, "additionalProperties": {"type": "null"}}, {"a": 1, "c": None}, {"a": 1, "c": 1}),
        ({**A, "additionalProperties": True}, {"a": 1, "c": 1}, '{"a": "x"}'),
        ({**A, "additionalProperties": True}, {"a": 1, "c": 1}, '{"\\u0061": "x"}'),
        ({"allOf": [A, {**B, "additionalProperties": True}]}, {"a": 1, "b": 2, "c": 3}, {"a": 1}),
        ({"type": "object"}, {"c": 1}, [1]),
        ({"type": "array", "items": {"type": ["object", "null"], **A}}, [{"a": 1}], [{"c": 1}]),
        ({**A, "properties": {"a": {"$ref": "#"}}}, {"a": {"a": {}}}, {"a": {"a": {}, "c": 1}}),
    ],
)
def test_every_keyword_that_names_properties_closes_an_object(tokenizer, schema, yes, no):
    model = spelled(tokenizer, "json_tools")
    assert may_answer(model, schema, yes)
    assert not may_answer(model, schema, no)


def test_a_tool_without_parameters_takes_none(tokenizer):
    model = spelled(tokenizer, "json_tools")
    for schema in ({}, {"type": "object"}, {"type": "object", "properties": {}}):
        assert may_call(model, schema, {}) and not may_call(model, schema, {"a": 1})
    opened = {"type": "object", "additionalProperties": True}
    assert may_call(model, opened, {"a": 1})


def test_noise_writes_what_the_pydantic_model_takes(tokenizer):
    model = spelled(tokenizer, "json_tools")
    format = AnswerFormat("json", schema=Scene.model_json_schema())
    walks = [
        Walker(model).walk(compiler_of(model).compile(chat(format=format), thinking=False), seed)
        for seed in range(4)
    ]
    texts = [
        model.decode(tokens[:-1] if tokens[-1] in model.eos_token_ids else tokens)
        for tokens in walks
        if tokens
    ]
    assert texts
    for text in texts:
        assert json.loads(text).keys() == Scene.model_validate_json(text).model_fields_set
