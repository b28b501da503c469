"""/v1/responses: tools, the names of their calls, and which of them may be called."""

from __future__ import annotations

import pytest
from fake_engine import HELLO, USAGE
from responses import (
    AGENTS,
    PATCH,
    READ,
    SCHEMA,
    collected,
    conversation,
    item,
    messages,
    parsed,
    text,
)

from omlxd.chat import (
    Finished,
    ToolCall,
    ToolCallPart,
)
from omlxd.errors import InvalidRequest


def test_tools_and_the_names_of_their_calls():
    request = parsed(
        input="u",
        tools=[READ, {"type": "web_search", "name": 5}, AGENTS, PATCH, {"type": "mcp", "tools": "x"}],
    )
    listed = request.generate.prompt.tools
    assert [tool.name for tool in listed] == ["read", "agents__close", "patch"]
    assert listed[0].parameters == SCHEMA and listed[0].description == "Reads."
    assert listed[2].parameters["required"] == ["input"] and "lark" in listed[2].description
    events = [
        ToolCall("1", "agents__close", '{"path":"a"}'),
        ToolCall("2", "close", "{}"),
        ToolCall("3", "patch", '{"input":"*** Begin"}'),
        ToolCall("4", "nobody", "{}"),
        Finished("tool_calls", USAGE),
    ]
    output = collected(request, events)["output"]
    told = [(one["type"], one["name"], one.get("namespace")) for one in output]
    assert told == [
        ("function_call", "close", "agents"),
        ("function_call", "close", "agents"),
        ("custom_tool_call", "patch", None),
        ("function_call", "nobody", None),
    ]
    assert output[2]["input"] == "*** Begin"
    # Echoed, a call has the name that the model gave it.
    again = messages(item("user", text("u")), {**output[0], "id": "fc_x"}, tools=[AGENTS])
    assert again[1].parts == (ToolCallPart("1", "agents__close", {"path": "a"}),)


def test_two_tools_never_share_a_name():
    tools = [{"type": "function", "name": "agents__close"}, AGENTS]
    names = [tool.name for tool in conversation(input="u", tools=tools).tools]
    assert names == ["agents__close", "agents__close_2"]
    assert conversation(input="u", tools=[*tools, *tools]).tools == conversation(input="u", tools=tools).tools
    told = parsed(input="u", tools=tools).names["agents__close_2"]
    assert (told.namespace, told.name) == ("agents", "close")


# --------------------------------------------------------------------------- which may be called

LATER = {**READ, "name": "later", "defer_loading": True}
TOOLS = [READ, AGENTS, PATCH, {"type": "web_search"}, LATER]


def chosen(choice, tools=TOOLS):
    prompt = conversation(input="u", tools=tools, tool_choice=choice)
    return prompt.tool_choice, prompt.allowed_tools


def allowed(*tools, mode="auto"):
    return {"type": "allowed_tools", "mode": mode, "tools": list(tools)}


@pytest.mark.parametrize(
    ("choice", "is_"),
    [
        ({"type": "function", "name": "read"}, ("named:read", ())),
        ({"type": "custom", "name": "patch"}, ("named:patch", ())),
        ({"type": "function", "name": "close", "namespace": "agents"}, ("named:agents__close", ())),
        (allowed({"type": "function", "name": "read"}), ("auto", ("read",))),
        (
            allowed(
                {"type": "custom", "name": "patch"}, {"type": "namespace", "name": "agents"}, mode="required"
            ),
            ("required", ("patch", "agents__close")),
        ),
        (allowed({"type": "web_search"}, {"type": "function", "name": "read"}), ("auto", ("read",))),
        (allowed({"type": "web_search"}), ("none", ())),
        (allowed({"type": "function", "name": "later"}), ("none", ())),
    ],
)
def test_the_choice_of_tools(choice, is_):
    assert chosen(choice) == is_
    told = collected(parsed(input="u", tools=TOOLS, tool_choice=choice), HELLO)
    assert told["tool_choice"] == choice


def test_all_tools_stay_in_the_prompt_whatever_is_allowed():
    """So that the tokens of the prompt are the same, and its prefix is found in the cache."""
    free = conversation(input="u", tools=TOOLS)
    some = conversation(input="u", tools=TOOLS, tool_choice=allowed({"type": "function", "name": "read"}))
    assert some.tools == free.tools and some.messages == free.messages


@pytest.mark.parametrize(
    ("choice", "says"),
    [
        (allowed(), "allowed_tools names no tool"),
        (allowed({"type": "function", "name": "nobody"}), "there is no tool 'nobody'"),
        (allowed({"type": "web_search"}, mode="required"), "none of the allowed tools can be called"),
        (
            allowed({"type": "function", "name": "read"}, mode="never"),
            "tool_choice: Invalid enum value 'never'",
        ),
        ({"type": "function", "name": "later"}, "'later' is not among the tools"),
        ({"type": "allowed_tools", "tools": 5}, "tool_choice: Expected"),
        ("sometimes", "'sometimes' is none of auto, none, required"),
        ({"type": "mcp", "server_label": "x"}, "'mcp' can't be enforced"),
    ],
)
def test_choices_that_are_refused(choice, says):
    with pytest.raises(InvalidRequest, match=says) as refused:
        chosen(choice)
    assert refused.value.param == "tool_choice"
