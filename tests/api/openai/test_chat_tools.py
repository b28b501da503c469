"""Chat completions: custom tools, and the obsolete `functions`."""

from __future__ import annotations

import json

import openai
import pytest
from fake_engine import HELLO, USAGE, FakeEngine
from responses import conversation as of_responses
from sdk_clients import gpt

from omlxd.api.openai import chat_request
from omlxd.chat import (
    Conversation,
    Finished,
    Message,
    TextPart,
    ToolCall,
    ToolCallCut,
    ToolCallDelta,
    ToolCallPart,
    ToolResultPart,
)
from omlxd.errors import InvalidRequest

SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}}}
READ = {"name": "read", "description": "Reads.", "parameters": SCHEMA}
TOOL = {"type": "function", "function": READ}
GRAMMAR = {"syntax": "lark", "definition": 'start: "a"+'}
PATCH = {"name": "patch", "description": "Patches.", "format": {"type": "grammar", "grammar": GRAMMAR}}
CUSTOM = {"type": "custom", "custom": PATCH}
USER = [{"role": "user", "content": "u"}]


def conversation(**body) -> Conversation:
    body = {"messages": USER, **body}
    prompt = chat_request.parse(json.dumps(body).encode()).generate.prompt
    assert isinstance(prompt, Conversation)
    return prompt


# --------------------------------------------------------------------------- custom tools


def test_a_custom_tool_is_that_of_responses():
    flat = {"type": "custom", **PATCH, "format": {"type": "grammar", **GRAMMAR}}
    (tool,) = conversation(tools=[CUSTOM]).tools
    assert (tool,) == of_responses(input="u", tools=[flat]).tools
    assert tool.input_grammar == GRAMMAR["definition"] and tool.parameters["required"] == ["input"]
    pattern = {"type": "grammar", "grammar": {"syntax": "regex", "definition": "[0-9]+"}}
    (held,) = conversation(tools=[{"type": "custom", "custom": {**PATCH, "format": pattern}}]).tools
    assert held.strict and held.parameters["properties"]["input"]["pattern"] == "^(?:[0-9]+)$"
    (free,) = conversation(tools=[{"type": "custom", "custom": {"name": "note"}}]).tools
    assert not free.strict and not free.input_grammar


@pytest.mark.parametrize(
    ("choice", "is_"),
    [
        ({"type": "custom", "custom": {"name": "patch"}}, ("named:patch", ())),
        (
            {
                "type": "allowed_tools",
                "allowed_tools": {
                    "mode": "required",
                    "tools": [{"type": "custom", "custom": {"name": "patch"}}],
                },
            },
            ("required", ("patch",)),
        ),
    ],
)
def test_a_custom_tool_can_be_chosen(choice, is_):
    chosen = conversation(tools=[TOOL, CUSTOM], tool_choice=choice)
    assert (chosen.tool_choice, chosen.allowed_tools) == is_


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"tools": [{"type": "custom"}]}, "tools.0.custom"),
        ({"tools": [{"type": "custom", "custom": {"name": ""}}]}, "tools.0.custom.name"),
        (
            {"tools": [TOOL, {"type": "custom", "custom": {"name": "x", "format": {"type": "grammar"}}}]},
            "tools.1.custom.format",
        ),
        (
            {"tools": [{"type": "custom", "custom": {"name": "x", "format": {"type": "xml"}}}]},
            "tools.0.custom.format",
        ),
        (
            {"tools": [TOOL, {"type": "custom", "custom": {"name": "read"}}]},
            "tools.0.function.name",
        ),
        (
            {"tools": [CUSTOM], "tool_choice": {"type": "custom", "custom": {"name": "other"}}},
            "tool_choice",
        ),
        ({"functions": [READ], "tools": [TOOL]}, "functions"),
        ({"functions": [{"name": ""}]}, "functions.0.name"),
        ({"functions": [{"name": "f", "parameters": 5}]}, "functions.0.parameters"),
        ({"functions": [READ], "function_call": "always"}, "function_call"),
        ({"functions": [READ], "function_call": {"name": "write"}}, "function_call"),
        ({"functions": [READ], "function_call": {"name": ["read"]}}, "function_call"),
        ({"messages": [{"role": "function", "name": "f", "content": "x"}]}, "messages.0.role"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"id": "c", "type": "custom"}]}]},
            "messages.0.tool_calls.0.custom",
        ),
    ],
)
def test_what_is_wrong_is_named(body, param):
    with pytest.raises(InvalidRequest) as refused:
        conversation(**body)
    assert refused.value.param == param and param in refused.value.message


def test_a_custom_call_is_echoed():
    call = {"id": "c1", "type": "custom", "custom": {"name": "patch", "input": "aa"}}
    messages = [
        *USER,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "done"},
    ]
    assert conversation(messages=messages, tools=[CUSTOM]).messages[1:] == (
        Message("assistant", (ToolCallPart("c1", "patch", {"input": "aa"}),)),
        Message("tool", (ToolResultPart("c1", "done"),)),
    )


CALLS = (
    ToolCallDelta("c1", "read", '{"path"'),
    ToolCall("c1", "read", '{"path":"a"}'),
    ToolCallDelta("c2", "patch", '{"input": "a'),
    ToolCall("c2", "patch", '{"input": "aaa"}'),
    Finished("tool_calls", USAGE),
)


async def test_the_sdk_gets_custom_calls():
    async with gpt(FakeEngine(CALLS)) as client:
        answer = await client.chat.completions.create(model="tiny", messages=USER, tools=[TOOL, CUSTOM])
        (choice,) = answer.choices
        first, second = choice.message.tool_calls
        assert choice.finish_reason == "tool_calls" and choice.message.content is None
        assert first.type == "function" and first.function.arguments == '{"path":"a"}'
        assert second.type == "custom" and (second.id, second.custom.name) == ("c2", "patch")
        assert second.custom.input == "aaa"
        stream = await client.chat.completions.create(
            model="tiny", messages=USER, tools=[TOOL, CUSTOM], stream=True
        )
        sent = [
            call.to_dict()
            async for chunk in stream
            for choice in chunk.choices
            for call in choice.delta.tool_calls or []
        ]
    assert sent == [
        {"id": "c1", "function": {"name": "read", "arguments": '{"path"'}, "type": "function", "index": 0},
        {"function": {"arguments": ':"a"}'}, "index": 0},
        {"id": "c2", "custom": {"name": "patch", "input": "aaa"}, "type": "custom", "index": 1},
    ]


async def test_a_custom_call_that_is_cut_off():
    cut = [
        ToolCallDelta("c", "patch", '{"input": "a'),
        ToolCallCut("c", "patch", '{"input": "aa', '{"input":"aa"}'),
        Finished("length", USAGE),
    ]
    async with gpt(FakeEngine(cut)) as client:
        answer = await client.chat.completions.create(model="tiny", messages=USER, tools=[CUSTOM])
    (call,) = answer.choices[0].message.tool_calls
    assert (call.custom.input, answer.choices[0].finish_reason) == ("aa", "length")


# --------------------------------------------------------------------------- functions


def test_functions_are_tools():
    asked = conversation(functions=[READ])
    assert asked.tools == conversation(tools=[TOOL]).tools
    assert asked.tool_choice == "auto" and not asked.parallel_calls
    assert conversation(functions=[READ], function_call="none").tool_choice == "none"
    assert conversation(functions=[READ], function_call={"name": "read"}).tool_choice == "named:read"


def test_function_calls_and_their_results_come_in_turns():
    messages = [
        *USER,
        {
            "role": "assistant",
            "content": "Look.",
            "function_call": {"name": "read", "arguments": '{"path":"a"}'},
        },
        {"role": "function", "name": "read", "content": "A"},
        {"role": "assistant", "content": None, "function_call": {"name": "read", "arguments": "{}"}},
        {"role": "function", "name": "read", "content": "B"},
    ]
    assert conversation(messages=messages, functions=[READ]).messages[1:] == (
        Message("assistant", (TextPart("Look."), ToolCallPart("function_1", "read", {"path": "a"}))),
        Message("tool", (ToolResultPart("function_1", "A"),)),
        Message("assistant", (ToolCallPart("function_3", "read", {}),)),
        Message("tool", (ToolResultPart("function_3", "B"),)),
    )


async def test_the_sdk_gets_a_function_call():
    script = [*CALLS[:2], CALLS[-1]]
    async with gpt(FakeEngine(script)) as client:
        answer = await client.chat.completions.create(model="tiny", messages=USER, functions=[READ])
        (choice,) = answer.choices
        assert choice.finish_reason == "function_call" and choice.message.tool_calls is None
        called = choice.message.function_call
        assert (called.name, called.arguments) == ("read", '{"path":"a"}')
        stream = await client.chat.completions.create(
            model="tiny", messages=USER, functions=[READ], stream=True
        )
        chunks = [choice async for chunk in stream for choice in chunk.choices]
    told = [chunk.delta.function_call for chunk in chunks if chunk.delta.function_call]
    assert [one.name for one in told] == ["read", None]
    assert "".join(one.arguments for one in told) == '{"path":"a"}'
    assert chunks[-1].finish_reason == "function_call"
    assert not any(chunk.delta.tool_calls for chunk in chunks)


async def test_text_stays_text_with_functions():
    async with gpt(FakeEngine(HELLO)) as client:
        answer = await client.chat.completions.create(model="tiny", messages=USER, functions=[READ])
        assert answer.choices[0].message.content == "Hello there"
        assert answer.choices[0].finish_reason == "stop" and answer.choices[0].message.function_call is None
        with pytest.raises(openai.BadRequestError, match="send them among the tools"):
            await client.chat.completions.create(model="tiny", messages=USER, functions=[READ], tools=[TOOL])
