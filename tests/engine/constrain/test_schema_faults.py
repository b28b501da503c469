"""A schema's fault is told with its place, before anything is computed; what leads to itself is anything."""

# ruff: noqa: F811 -- `tokenizer` is a fixture of parsing.py

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from host import chat
from parsing import tokenizer  # noqa: F401 -- a fixture

from omlxd.chat import AnswerFormat, Tool
from omlxd.engine.constrain.schema.faults import without_circles
from omlxd.errors import InvalidRequest
from tests.engine.constrain.test_forced_calls import compiler_of, spelled
from tests.engine.constrain.test_odd_schemas import broken

INT = {"type": "integer"}
CIRCLES: list[tuple[dict[str, Any], str]] = [
    ({"$ref": "#"}, ""),
    ({"$ref": ""}, ""),
    ({"$id": "http://x/y", "$ref": "http://x/y#"}, ""),
    ({"$ref": "#", "type": "object"}, ""),
    ({"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}, "/$defs/a"),
    ({"$defs": {"a": {"$anchor": "q", "$ref": "#q"}}, "$ref": "#q"}, "/$defs/a"),
    ({"type": "object", "properties": {"a": {"$ref": "#/properties/a"}}}, "/properties/a"),
    ({"type": "object", "properties": {"a b": {"$ref": "#/properties/a%20b"}}}, "/properties/a b"),
    ({"type": "array", "items": {"$ref": "#/items"}}, "/items"),
    ({"allOf": [{"$ref": "#"}]}, "/allOf/0"),
    ({"allOf": [{"type": "object"}, {"$ref": "#"}]}, "/allOf/1"),
    ({"oneOf": [{"$ref": "#"}]}, "/oneOf/0"),
    ({"anyOf": [{"$ref": "#"}, {"allOf": [{"$ref": "#/anyOf/0"}]}]}, "/anyOf/0"),
    ({"anyOf": [{"$ref": "#/anyOf/0"}, {"$ref": "#/anyOf/1"}]}, "/anyOf/0"),
]
SOUND: list[dict[str, Any]] = [
    {"anyOf": [{"$ref": "#"}, INT]},
    {"type": "array", "items": {"$ref": "#"}},
    {"type": "object", "properties": {"next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}},
    {"$defs": {"a": {"$ref": "#/$defs/a"}}, **INT},  # Nothing asks for it.
    {"$defs": {"a": {"allOf": [{"$ref": "#"}]}}, "anyOf": [{"$ref": "#/$defs/a"}, INT]},
    {"$defs": {"a": INT}, "properties": {"x": {"$ref": "#/$defs/a"}, "y": {"$ref": "#/$defs/a"}}},
]


def strict(schema: dict[str, Any]) -> Any:
    return chat(format=AnswerFormat("json", schema=schema, strict=True))


@pytest.mark.parametrize(("schema", "pointer"), CIRCLES)
def test_a_ref_that_leads_only_to_itself_is_refused_if_strict_else_anything(tokenizer, schema, pointer):
    compiler = compiler_of(spelled(tokenizer, "json_tools"))
    with pytest.raises(InvalidRequest) as refused:
        compiler.compile(strict(schema), thinking=False)
    where = f"at {pointer}" if pointer else "at the top"
    assert refused.value.message == f"response_format: `$ref` {where} leads only to itself"
    assert refused.value.param == "response_format"
    with pytest.raises(InvalidRequest, match=r"'Go'.*(leads only to itself|its type)") as refused:
        tool = Tool("Go", "", schema, strict=True)
        compiler.compile(chat(tools=(tool,), tool_choice="required"), thinking=False)
    loose = compiler.compile(chat(format=AnswerFormat("json", schema=schema)), thinking=False)
    assert loose and f"response_format: {pointer}/$ref" in loose.left_out
    for name in ("json_tools", "qwen3_coder"):
        call = chat(tools=(Tool("Go", "", schema),), tool_choice="required")
        constraint = compiler_of(spelled(tokenizer, name)).compile(call, thinking=False)
        assert constraint and constraint.left_out


@pytest.mark.parametrize("schema", SOUND)
def test_a_ref_that_leads_elsewhere_too_is_held_to(tokenizer, schema):
    assert without_circles(schema) == (schema, [])
    constraint = compiler_of(spelled(tokenizer, "json_tools")).compile(strict(schema), thinking=False)
    assert constraint and not constraint.left_out


UNSATISFIABLE: dict[str, Any] = {**INT, "minimum": 5, "maximum": 3}


def within(schema: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {"good": INT, "x": schema},
        "required": ["x"],
        "additionalProperties": False,
    }


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        (
            {"type": "objct"},
            "`type` 'objct' {} is none of string, integer, number, boolean, array, object, null",
        ),
        ({"type": ["string", "foo"]}, "`type` 'foo' {} is none of "),
        ({"$ref": "#/$defs/nope"}, "`$ref` '#/$defs/nope' {} points to nothing"),
        ({"$ref": "#nope"}, "`$ref` '#nope' {} points to nothing"),
        ({"$ref": "http://a/b"}, "`$ref` 'http://a/b' {} points outside the schema"),
        ({"type": "string", "pattern": "(a"}, "`pattern` '(a' {} can't be read: unclosed group"),
        ({"type": "string", "pattern": "(?=a)b"}, "`pattern` '(?=a)b' {} can't be read: look-around"),
        (UNSATISFIABLE, "no value fits the schema {}: minimum (5) is greater than maximum (3)"),
        ({"enum": []}, "no value fits the schema {}: `enum` is empty"),
        ({"type": "string", "format": "phone"}, "`format` 'phone' {} can't be enforced"),
        ({"type": "array", "items": INT, "contains": INT}, "`contains` {} can't be enforced"),
        ({**INT, "multipleOf": 0}, "`multipleOf` {}: "),
    ],
)
def test_a_strict_schema_is_refused_by_its_place(tokenizer, schema, words):
    compiler = compiler_of(spelled(tokenizer, "json_tools"))
    shared = {"$defs": {"d": schema}, "type": "object", "properties": {"x": {"$ref": "#/$defs/d"}}}
    for whole, where in (
        (schema, "at the top"),
        (within(schema), "at /properties/x"),
        (within({"type": "array", "items": schema, "minItems": 1}), "at /properties/x/items"),
        (within({"anyOf": [schema]}), "at /properties/x/anyOf/0"),
        ({**shared, "required": ["x"], "additionalProperties": False}, "at /$defs/d"),
    ):
        with pytest.raises(InvalidRequest) as refused:
            compiler.compile(strict(whole), thinking=False)
        assert refused.value.message.startswith("response_format: " + words.format(where)), refused.value
        assert "\n" not in refused.value.message


def test_a_required_property_that_is_false_is_named(tokenizer):
    compiler = compiler_of(spelled(tokenizer, "json_tools"))
    with pytest.raises(InvalidRequest, match=r"no value fits .* the required property 'x' can have no value"):
        compiler.compile(strict(within(False)), thinking=False)


def test_no_token_comes_without_the_mask_of_its_grammar(tokenizer):
    """Whatever the schema: it is refused, or has a mask from the first token to the last."""
    compiler = compiler_of(spelled(tokenizer, "json_tools"))
    rng = random.Random(3)
    schemas = [schema for schema, _ in CIRCLES] + SOUND + [broken(rng) for _ in range(10)]
    walked = 0
    for index, schema in enumerate(schemas):
        format = AnswerFormat("json", schema=schema, strict=bool(index % 2))
        try:
            constraint = compiler.compile(chat(format=format), thinking=False)
        except InvalidRequest:
            continue
        assert constraint is not None
        ended = False
        for _ in range(6):
            assert ended or (constraint.mask is not None and constraint.mask.any())
            if ended or constraint.mask is None:
                break
            token = int(rng.choice(np.flatnonzero(constraint.mask).tolist()))
            ended = token in compiler._parts("format")[1].ends
            constraint.advance(token)
            assert constraint.error is None
        walked += 1
    assert walked > len(schemas) // 2
