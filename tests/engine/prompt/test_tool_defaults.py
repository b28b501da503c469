"""Arguments that equal the `default` of a tool's schema make no other call."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from talk import CALL, QWEN3, Session, folder, pipeline, user  # noqa: F401

from omlxd.api.anthropic import request as anthropic
from omlxd.chat import Conversation, Message, Tool, ToolCallPart
from omlxd.engine.prompt.canonical import chain_of
from omlxd.engine.prompt.tool_defaults import ToolDefaults, canonical_json

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "path": {"type": "string"},
        "all": {"type": "boolean", "default": False},
        "lines": {"type": "integer", "default": 2},
        "note": {"anyOf": [{"type": "string"}, {"type": "null"}], "default": None},
        "tags": {"type": "array", "items": {"type": "string"}, "default": []},
        "how": {"$ref": "#/$defs/How", "default": {}},
        "edits": {"type": "array", "items": {"$ref": "#/$defs/Edit"}},
        "maybe": {"anyOf": [{"$ref": "#/$defs/How"}, {"type": "null"}]},
        "either": {"oneOf": [{"$ref": "#/$defs/How"}, {"$ref": "#/$defs/Edit"}]},
        "shared": {"allOf": [{"$ref": "#/$defs/Five"}]},
    },
    "$defs": {
        "How": {"type": "object", "properties": {"deep": {"type": "boolean", "default": True}}},
        "Edit": {"type": "object", "properties": {"old": {}, "all": {"default": False}, "deep": {}}},
        "Five": {"default": 5},
        "Loop": {"$ref": "#/$defs/Loop"},
    },
}
BARE = {"path": "a", "edits": [{"old": "x"}], "maybe": {}, "either": {"deep": True}}


def without(arguments: Any, schema: dict[str, Any] = SCHEMA) -> Any:
    return ToolDefaults([Tool("T", "", schema)]).without("T", arguments)


@pytest.mark.parametrize(
    "more",
    [
        {"all": False},
        {"lines": 2},
        {"lines": 2.0},
        {"note": None},
        {"tags": []},
        {"how": {}},
        {"how": {"deep": True}},
        {"edits": [{"old": "x", "all": False}]},
        {"maybe": {"deep": True}},
        {"shared": 5},
    ],
)
def test_what_equals_its_default_is_left_out(more):
    assert without({**BARE, **more}) == without(BARE) == BARE


@pytest.mark.parametrize(
    "more",
    [
        {"all": True},
        {"all": 0},
        {"lines": 3},
        {"note": ""},
        {"tags": ["a"]},
        {"how": {"deep": False}},
        {"edits": [{"old": "x", "all": True}]},
        {"either": {}},
        {"unknown": None},
        {"path": ""},
    ],
)
def test_what_does_not_stays(more):
    assert without({**BARE, **more}) != without(BARE)


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#/$defs/Loop", "$defs": {"Loop": {"$ref": "#/$defs/Loop"}}},
        {"properties": {"a": True}},
        {"properties": [1], "items": 3, "allOf": {}, "anyOf": None},
        {"properties": {"a": {"$ref": "http://elsewhere"}}},
        {"properties": {"a": {"$ref": "#/$defs/none"}}},
    ],
)
def test_a_schema_that_is_none_leaves_arguments_as_they_are(schema):
    assert without({"a": 1}, schema) == {"a": 1}


_values = st.recursive(
    st.none() | st.booleans() | st.integers(0, 3) | st.text("ab", max_size=2),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from("abc"), inner, max_size=2),
    max_leaves=5,
)


@given(st.dictionaries(st.sampled_from("abc"), _values), st.dictionaries(st.sampled_from("abc"), _values))
def test_filling_defaults_in_makes_no_other_call(arguments, defaults):
    schema = {"properties": {name: {"default": value} for name, value in defaults.items()}}
    filled = {**defaults, **arguments}
    assert canonical_json(without(filled, schema)) == canonical_json(without(arguments, schema))


def test_an_echo_with_defaults_filled_in_is_healed(folder):  # noqa: F811
    tools = (Tool("Read", "", {"properties": {"path": {}, "lines": {}, "all": {"default": False}}}),)
    session = Session(pipeline(folder, QWEN3))
    session.tools = tools
    for turn in range(2):
        session.ask(user(f"Read, {turn}"))
        answer = session.generate(CALL)
        name, arguments = answer.calls[0]
        filled = {**json.loads(arguments), "all": False}
        session.ask(Message("assistant", (ToolCallPart("c", name, filled),)), user("And?"))
        assert session.kept() and not session.rendered.refused
        session.generate("Well.")
        session.ask(Message("assistant", (ToolCallPart("c", name, {**filled, "all": True}),)))
        assert not session.kept()
        session.messages = session.messages[:-1]


def test_a_tool_that_comes_up_later_has_defaults_too():
    edit = {"name": "Edit", "input_schema": {"type": "object", "properties": {"all": {"default": False}}}}

    def talk(arguments: dict) -> Conversation:
        use = {"type": "tool_use", "id": "1", "name": "Edit", "input": arguments}
        found = {"type": "tool_reference", "tool_name": "Edit"}
        search = {"type": "tool_use", "id": "0", "name": "ToolSearch", "input": {}}
        messages = [
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": [search]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "0", "content": [found]}]},
            {"role": "assistant", "content": [use]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": "ok"}]},
        ]
        tools = [{"name": "ToolSearch", "input_schema": {"type": "object"}}, {**edit, "defer_loading": True}]
        body = {"model": "m", "max_tokens": 5, "messages": messages, "tools": tools}
        prompt = anthropic.parse(json.dumps(body).encode()).generate.prompt
        assert isinstance(prompt, Conversation) and [tool.name for tool in prompt.tools] == ["ToolSearch"]
        return prompt

    assert chain_of(talk({})) == chain_of(talk({"all": False})) != chain_of(talk({"all": True}))
