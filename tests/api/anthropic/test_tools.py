"""Tools of Anthropic's API that come, go, or are the client's own; summaries in place of a conversation."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from omlxd.api.anthropic import request
from omlxd.api.anthropic.answer import AnthropicStream
from omlxd.chat import Conversation, Message, TextPart, ToolCall, ToolCallPart, ToolResultPart
from omlxd.errors import InvalidRequest

SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}}
F, G = ({"name": name, "description": name.upper(), "input_schema": SCHEMA} for name in "fg")
USER = {"role": "user", "content": "hi"}


def prompt(*messages: dict[str, Any], **more: Any) -> Conversation:
    body = {"messages": list(messages) or [USER], **more}
    got = request.parse(json.dumps(body).encode()).generate.prompt
    assert isinstance(got, Conversation)
    return got


def names(conversation: Conversation) -> list[str]:
    return [tool.name for tool in conversation.tools]


def change(kind: str, tool: Any) -> dict[str, Any]:
    tool = {"type": "tool_reference", "name": tool} if isinstance(tool, str) else tool
    return {"role": "system", "content": [{"type": f"tool_{kind}", "tool": tool}]}


def said(message: Message) -> str:
    (part,) = message.parts
    assert isinstance(part, TextPart)
    return part.text


# --------------------------------------------------------------------------- the client's own

COMMANDS = {
    "bash_20250124": None,
    "text_editor_20241022": {"view", "create", "str_replace", "insert", "undo_edit"},
    "text_editor_20250124": {"view", "create", "str_replace", "insert", "undo_edit"},
    "text_editor_20250429": {"view", "create", "str_replace", "insert"},
    "text_editor_20250728": {"view", "create", "str_replace", "insert"},
    "memory_20250818": {"view", "create", "str_replace", "insert", "delete", "rename"},
}


@pytest.mark.parametrize("kind", COMMANDS)
def test_a_tool_that_the_client_runs_is_told_with_its_arguments(kind):
    (tool,) = prompt(tools=[{"type": kind, "name": "n", "max_characters": 9}]).tools
    properties = tool.parameters["properties"]
    assert tool.name == "n" and tool.description
    if COMMANDS[kind] is None:
        assert properties.keys() == {"command", "restart"}
        return
    assert set(properties["command"]["enum"]) == COMMANDS[kind] and "command" in tool.parameters["required"]
    late = "undo_edit" not in COMMANDS[kind]
    assert {"path", "file_text", "old_str", "new_str", "insert_line", "view_range"} <= properties.keys()
    assert ("insert_text" in properties) is late


def test_the_memory_tools_arguments_are_those_that_the_sdk_reads():
    from anthropic.types import beta

    (tool,) = prompt(tools=[{"type": "memory_20250818", "name": "memory"}]).tools
    kinds = [getattr(beta, name) for name in dir(beta) if name.startswith("BetaMemoryTool20250818")]
    commands = [kind for kind in kinds if "command" in getattr(kind, "model_fields", {})]
    assert len(commands) == 6
    assert set().union(*(kind.model_fields for kind in commands)) == tool.parameters["properties"].keys()


def test_a_call_of_it_can_be_forced_and_it_can_be_deferred():
    bash = {"type": "bash_20250124", "name": "bash"}
    assert prompt(tools=[bash], tool_choice={"type": "tool", "name": "bash"}).tool_choice == "named:bash"
    assert prompt(tools=[bash], tool_choice={"type": "any"}).tool_choice == "required"
    assert names(prompt(tools=[F, {**bash, "defer_loading": True}])) == ["f"]


def test_examples_of_a_tools_input_are_told():
    examples = {"input_examples": [{"b": 1, "a": "é"}, {"a": "y"}]}
    (tool,) = prompt(tools=[F | examples]).tools
    assert tool.description == 'F\n\nExamples of its input:\n{"b":1,"a":"é"}\n{"a":"y"}'
    (bare,) = prompt(tools=[{"name": "f", "input_schema": SCHEMA, **examples}]).tools
    assert bare.description.startswith("Examples of its input:\n")
    (bash,) = prompt(tools=[{"type": "bash_20250124", "name": "bash", **examples}]).tools
    assert bash.description.endswith('{"a":"y"}') and bash.description.startswith("Run a command")


# --------------------------------------------------------------------------- tools that come and go


def test_a_tool_that_comes_later_is_told_where_it_comes_and_the_head_stays():
    before = prompt(USER, tools=[F])
    after = prompt(USER, change("addition", "g"), tools=[F, G])
    assert after.tools == before.tools and after.messages[:1] == before.messages
    told = said(after.messages[1])
    assert told.startswith("From here on this tool can be called:\n") and json.loads(told.split("\n")[1]) == {
        "type": "function",
        "function": {"name": "g", "description": "G", "parameters": SCHEMA},
    }


def test_a_tool_defined_in_its_place_is_the_same_as_one_referred_to():
    defined = change("addition", {"type": "tool_definition", "definition": {**G, "cache_control": {}}})
    assert prompt(USER, defined, tools=[F]) == prompt(USER, change("addition", "g"), tools=[F, G])
    bash = {"type": "bash_20250124", "name": "bash"}
    (_, message) = prompt(USER, change("addition", {"type": "tool_definition", "definition": bash})).messages
    assert '"name":"bash"' in said(message)


def test_a_tool_that_goes_stays_in_the_head_and_is_told_to_be_gone():
    gone = prompt(USER, change("removal", "f"), tools=[F, G])
    assert names(gone) == ["f", "g"]
    assert said(gone.messages[1]) == "The tool f can't be called any more."
    choices = {"type": "any"}, {"type": "tool", "name": "g"}
    required, named = (
        prompt(USER, change("removal", "f"), tools=[F, G], tool_choice=choice) for choice in choices
    )
    assert (required.tool_choice, required.allowed_tools) == ("required", ("g",))
    assert (named.tool_choice, named.allowed_tools) == ("named:g", ())
    with pytest.raises(InvalidRequest, match="there is no tool 'f'"):
        prompt(USER, change("removal", "f"), tools=[F, G], tool_choice={"type": "tool", "name": "f"})


def test_a_tool_that_goes_and_comes_again_was_there_at_first():
    back = [USER, change("removal", "f"), USER, change("addition", "f"), USER]
    again = prompt(*back, tools=[F, G], tool_choice={"type": "tool", "name": "f"})
    assert names(again) == ["f", "g"] and again.tool_choice == "named:f"


@pytest.mark.parametrize("kind", ["addition", "removal"])
def test_tools_of_mcp_servers_and_unknown_ones_come_and_go_without_a_word(kind):
    for tool in (
        {"type": "mcp_tool_reference", "server_name": "s", "name": "f"},
        {"type": "mcp_toolset_reference", "server_name": "s"},
    ):
        got = prompt(USER, change(kind, tool), USER, tools=[F])
        assert (
            names(got) == ["f"] and [part for m in got.messages for part in m.parts] == [TextPart("hi")] * 2
        )
    assert prompt(USER, change(kind, "unknown"), tools=[F]).tools == prompt(USER, tools=[F]).tools


def test_a_definition_that_is_not_whole_is_named():
    with pytest.raises(InvalidRequest, match="input_schema: this field is required"):
        prompt(USER, change("addition", {"type": "tool_definition", "definition": {"name": "x"}}))


def test_short_references_to_a_long_tool_have_a_bound():
    long = {"name": "f", "input_schema": {"a": "x" * 100_000}, "defer_loading": True}
    reference = {"type": "tool_reference", "tool_name": "f"}

    def asked(times: int) -> Conversation:
        result = {"type": "tool_result", "tool_use_id": "t", "content": [reference] * times}
        return prompt({"role": "user", "content": [result]}, tools=[long])

    assert asked(80).messages
    with pytest.raises(InvalidRequest, match="refer to each once"):
        asked(90)


# --------------------------------------------------------------------------- what is shown no more

CALL = {"type": "tool_use", "id": "t", "name": "f", "input": {}}
SUMMARY = {"type": "compaction", "content": "They greeted.", "encrypted_content": "x", "signature": "y"}
TOLD = "This is a summary of the conversation so far:\n<summary>\nThey greeted.\n</summary>"


def test_a_summary_stands_for_all_that_was_before_it():
    compacted = {"role": "assistant", "content": [{"type": "text", "text": "Bye"}, SUMMARY, CALL]}
    got = prompt(USER, {"role": "assistant", "content": "Hello"}, compacted, USER, system="s")
    assert got.messages == (
        Message("system", (TextPart("s"),)),
        Message("user", (TextPart(TOLD),)),
        Message("assistant", (ToolCallPart("t", "f", {}),)),
        Message("user", (TextPart("hi"),)),
    )
    for role in ("user", "assistant"):
        assert prompt({"role": role, "content": [SUMMARY]}, USER) == prompt(
            USER, {"role": role, "content": [SUMMARY]}, USER
        )


def test_the_last_summary_counts_and_an_empty_one_does_not():
    older = {"role": "assistant", "content": [{**SUMMARY, "content": "Older."}]}
    newer = {"role": "assistant", "content": [SUMMARY]}
    assert prompt(older, USER, newer, USER) == prompt(newer, USER)
    for nothing in (
        {"type": "compaction"},
        {"type": "compaction", "content": None, "encrypted_content": "x"},
    ):
        failed = {"role": "assistant", "content": [nothing, {"type": "text", "text": "Yes"}]}
        assert prompt(USER, failed, USER) == prompt(USER, {"role": "assistant", "content": "Yes"}, USER)


def test_tools_that_came_within_what_was_summed_up_are_told_again():
    came = {"type": "tool_addition", "tool": {"type": "tool_definition", "definition": G}}
    got = prompt({"role": "assistant", "content": [{**SUMMARY, "tool_changes": [came]}]}, USER, tools=[F])
    assert said(got.messages[0]).startswith(TOLD + "\nFrom here on this tool can be called:\n")
    assert names(got) == ["f"]


def test_places_in_errors_count_what_is_not_shown():
    bad = {
        "role": "assistant",
        "content": [{"type": "text", "text": "x"}, SUMMARY, {"type": "image", **IMAGE}],
    }
    with pytest.raises(InvalidRequest) as caught:
        prompt(USER, bad)
    assert caught.value.param == "messages.1.content.2"


IMAGE = {"source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}


def test_a_system_message_for_one_turn_is_shown_for_that_turn():
    note = {"role": "system", "content": "Hurry.", "clear_at": "next_user_message"}
    assert [m.role for m in prompt(USER, note).messages] == ["user", "system"]
    answered = [USER, note, {"role": "assistant", "content": "Yes"}]
    assert [m.role for m in prompt(*answered).messages] == ["user", "system", "assistant"]
    assert [m.role for m in prompt(*answered, USER).messages] == ["user", "assistant", "user"]
    for stays in ({**note, "clear_at": "never"}, {**note, "clear_at": None}):
        assert [m.role for m in prompt(USER, stays, USER).messages] == ["user", "system", "user"]


def test_a_system_message_may_have_nothing_to_say():
    assert prompt(USER, {"role": "system", "output_config": {"effort": "low"}}) == prompt(USER)
    for role in ("user", "assistant"):
        with pytest.raises(InvalidRequest, match=r"messages\.0\.content: this field is required"):
            prompt({"role": role})


def test_ids_of_calls_are_anthropics_for_the_client_and_the_engines_in_the_prompt():
    made, foreign = f"call_{'0a' * 12}", "toolu_01A09q90qw90lq917835lq9a"
    stream = AnthropicStream("msg_1", "m", "req_1")
    stream.event(ToolCall(made, "read", "{}"))
    [block] = msgspec.json.decode(msgspec.json.encode(stream.message.content))
    assert block["id"] == f"toolu_{'0a' * 12}"
    for sent, held in ((block["id"], made), (made, made), (foreign, foreign), ("call_1", "call_1")):
        use = {"type": "tool_use", "id": sent, "name": "read", "input": {}}
        result = {"type": "tool_result", "tool_use_id": sent, "content": "x"}
        turns = prompt(USER, {"role": "assistant", "content": [use]}, {"role": "user", "content": [result]})
        parts = [part for message in turns.messages for part in message.parts]
        assert [part.id for part in parts if isinstance(part, ToolCallPart)] == [held]
        assert [part.call_id for part in parts if isinstance(part, ToolResultPart)] == [held]
