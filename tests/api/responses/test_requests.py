"""/v1/responses: bodies into requests."""

from __future__ import annotations

import pytest
from fake_engine import HELLO
from responses import (
    PIXEL,
    READ,
    SCHEMA,
    collected,
    conversation,
    item,
    messages,
    parsed,
    text,
    user,
)

from omlxd.api.responses.items import sealed
from omlxd.chat import (
    ImagePart,
    Message,
    TextPart,
    ThinkingPart,
    ToolCallPart,
    ToolResultPart,
)
from omlxd.errors import InvalidRequest


def test_a_text_and_instructions():
    assert messages_of_text("hi") == (user("hi"),)
    system = Message("system", (TextPart("Be brief."),))
    assert conversation(input="hi", instructions="Be brief.").messages == (system, user("hi"))


def messages_of_text(value):
    return conversation(input=value).messages


def test_messages_of_every_role():
    assert messages(
        item("developer", text("d")),
        item("system", text("s")),
        {"role": "user", "content": "u"},
        item("assistant", text("a", "output_text"), {"type": "refusal", "refusal": "no"}),
        item("user", text("v"), {"type": "input_image", "image_url": f"data:image/png;base64,{PIXEL}"}),
    ) == (
        Message("system", (TextPart("d"),)),
        Message("system", (TextPart("s"),)),
        user("u"),
        Message("assistant", (TextPart("a"), TextPart("no"))),
        Message("user", (TextPart("v"), ImagePart(b"png", "image/png", "input.4.content.1.image_url"))),
    )


def test_a_turn_with_reasoning_calls_and_results_is_one_message_each():
    call = {"type": "function_call", "call_id": "c1", "name": "read", "arguments": '{"path": "a"}'}
    output = {"type": "function_call_output", "call_id": "c1", "output": "text"}
    image = {"type": "input_image", "image_url": f"data:image/png;base64,{PIXEL}"}
    assert messages(
        item("user", text("u")),
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        item("assistant", text("a", "output_text")),
        call,
        {**call, "call_id": "c2"},
        output,
        {**output, "call_id": "c2", "output": [text("t"), image]},
        item("user", text("next")),
    ) == (
        user("u"),
        Message(
            "assistant",
            (
                ThinkingPart("hm"),
                TextPart("a"),
                ToolCallPart("c1", "read", {"path": "a"}),
                ToolCallPart("c2", "read", {"path": "a"}),
            ),
        ),
        Message(
            "tool",
            (
                ToolResultPart("c1", "text"),
                ToolResultPart(
                    "c2", "t", images=(ImagePart(b"png", "image/png", "input.6.output.1.image_url"),)
                ),
            ),
        ),
        user("next"),
    )


def test_reasoning_comes_from_its_text_else_ours_else_its_summary():
    summary = [{"type": "summary_text", "text": "short"}]

    def thought(**more):
        found = messages(item("user", text("u")), {"type": "reasoning", "summary": summary, **more})
        return [part.text for message in found[1:] for part in message.parts]

    assert thought() == ["short"]
    assert thought(encrypted_content=sealed("whole")) == ["whole"]
    assert thought(encrypted_content="gAAAA") == ["short"]
    assert thought(encrypted_content=sealed("whole")[:-1]) == ["short"]
    assert thought(content=[{"type": "reasoning_text", "text": "text"}]) == ["text"]
    assert thought(summary=[], encrypted_content="gAAAA") == []


def test_items_of_other_kinds_become_calls_or_nothing():
    found = messages(
        item("user", text("u")),
        {"type": "custom_tool_call", "call_id": "c", "name": "patch", "input": "*** Begin"},
        {"type": "custom_tool_call_output", "call_id": "c", "output": "done"},
        {"type": "local_shell_call", "id": "x", "call_id": "d", "action": {"command": ["ls"]}},
        {"type": "local_shell_call_output", "call_id": "d", "output": {"files": 1}},
        {"type": "function_call", "call_id": "e", "name": "read", "arguments": "{broken"},
        {"type": "web_search_call", "id": "ws_1", "status": "completed"},
        {"type": "compaction", "encrypted_content": "gAAA"},
        {"type": "of_the_future", "payload": 1},
    )
    assert found[1:] == (
        Message("assistant", (ToolCallPart("c", "patch", {"input": "*** Begin"}),)),
        Message("tool", (ToolResultPart("c", "done"),)),
        Message("assistant", (ToolCallPart("d", "local_shell", {"command": ["ls"]}),)),
        Message("tool", (ToolResultPart("d", '{"files":1}'),)),
        Message("assistant", (ToolCallPart("e", "read", {"input": "{broken"}),)),
    )


def test_ids_and_unknown_fields_never_reach_the_prompt():
    def items(stamp):
        return [
            {**item("user", text("u")), "id": f"msg_{stamp}", "status": "completed"},
            {"type": "reasoning", "id": f"rs_{stamp}", "summary": [{"type": "summary_text", "text": "s"}]},
            {"type": "function_call", "id": f"fc_{stamp}", "call_id": "c", "name": "read", "arguments": "{}"},
            {"type": "function_call_output", "id": f"o_{stamp}", "call_id": "c", "output": "x"},
        ]

    more = {"client_metadata": {"turn_id": "1"}, "service_tier": "auto", "stream_options": {}}
    one = parsed(input=items("a"), tools=[READ], **more).generate
    assert one == parsed(input=items("b"), tools=[READ]).generate


def test_sampling_thinking_and_session():
    request = parsed(
        input="u", max_output_tokens=9, temperature=0.5, top_p=0.9, reasoning={"effort": "high"}, stream=True
    )
    sampling = request.generate.sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p, request.stream) == (9, 0.5, 0.9, True)
    assert request.generate.prompt.thinking is True
    assert (request.generate.prompt.effort, request.generate.prompt.template_args) == ("high", {})
    args = conversation(input="u", chat_template_kwargs={"enable_thinking": False, "style": "x"})
    assert (args.thinking, args.template_args) == (False, {"style": "x"})
    assert conversation(input="u", think=False).thinking is False
    assert conversation(input="u", reasoning={"effort": "none"}).thinking is False
    assert conversation(input="u", reasoning={"summary": "auto"}).thinking is None
    assert conversation(input="u", tools=[READ], tool_choice="none").tool_choice == "none"
    assert parsed(input="u", prompt_cache_key="k").generate.session == "k"
    thread = {"session-id": "s", "thread-id": "s"}
    assert parsed(thread, input="u", prompt_cache_key="k").generate.session == "s"
    assert parsed({**thread, "thread-id": "t"}, input="u").generate.session == "s/t"


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({}, "input"),
        ({"input": []}, "input"),
        ({"input": 5}, "input"),
        ({"input": "u", "tool_choice": "required"}, "tool_choice: there are no tools"),
        (
            {"input": "u", "tool_choice": {"type": "function", "name": "read"}},
            "tool_choice: there is no tool",
        ),
        (
            {"input": "u", "tool_choice": {"type": "web_search"}},
            "tool_choice: 'web_search' can't be enforced",
        ),
        ({"input": "u", "tool_choice": ["required"]}, "tool_choice: this can't be enforced"),
        ({"input": "u", "text": {"format": {"type": "json_schema"}}}, r"text\.format\.schema: this field"),
        ({"input": "u", "text": {"format": {"type": "yaml"}}}, r"text\.format\.type: 'yaml'"),
        ({"input": "u", "background": True}, "background"),
        ({"input": "u", "conversation": "conv_1"}, "conversation"),
        ({"input": "u", "top_logprobs": 21}, "top_logprobs"),
        ({"input": "u", "tools": [{"type": "function"}]}, r"tools\.0\.name"),
        ({"input": "u", "tools": [{"type": "function", "name": "x" * 257}]}, r"tools\.0\.name: longer"),
        ({"input": "u", "tools": ["x"]}, r"tools\.0"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, r"input\.0\.id: there is no item 'msg_1'"),
        ({"input": [{"type": "function_call", "name": "read"}]}, r"input\.0\.call_id"),
        ({"input": [{"role": "robot", "content": "x"}]}, r"input\.0\.role"),
        ({"input": [item("user", {"type": "input_file", "file_id": "f"})]}, r"content\.0\.file_id"),
        ({"input": [item("user", {"type": "input_audio"})]}, "'input_audio' is not supported"),
        ({"input": [item("user", {"type": "input_image", "image_url": "https://x/y"})]}, "not fetched"),
        ({"input": [item("system", {"type": "input_image", "image_url": "data:,x"})]}, "image"),
    ],
)
def test_refusals_name_the_field(body, says):
    with pytest.raises(InvalidRequest, match=says):
        parsed(**body)


def test_fields_that_are_taken_and_told_again():
    """The SDK and Codex send them; what they ask for is so here, or is no business of a local server."""
    format = {"type": "json_schema", "name": "s", "schema": SCHEMA, "strict": True}
    given = {
        "max_tool_calls": 3,
        "metadata": {"a": "b"},
        "safety_identifier": "me",
        "prompt_cache_key": "k",
        "prompt_cache_retention": "24h",
        "text": {"format": format, "verbosity": "low"},
    }
    more = {"truncation": "auto", "service_tier": "flex", "include": ["web_search_call.results"]}
    request = parsed(input="u", **given, **more)
    told = collected(request, HELLO)
    assert {name: told[name] for name in given} == given
    # What this server does, not what was asked for: nothing is cut off, and there is one tier.
    assert (told["truncation"], told["service_tier"]) == ("disabled", "default")
    assert request.generate.prompt.template_args == {"verbosity": "low"}
    assert request.generate.format.schema == SCHEMA
    assert collected(parsed(input="u"), HELLO)["text"] == {"format": {"type": "text"}}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"text": {"verbosity": "loud"}}, "text.verbosity"),
        ({"truncation": "middle"}, "truncation"),
        ({"max_tool_calls": 0}, "max_tool_calls"),
        ({"metadata": 5}, "metadata"),
    ],
)
def test_words_that_mean_nothing_are_refused(body, param):
    with pytest.raises(InvalidRequest) as refused:
        parsed(input="u", **body)
    assert refused.value.param == param


def test_messages_in_place_of_input_are_told_their_path():
    with pytest.raises(InvalidRequest, match="`messages` belongs to /v1/chat/completions") as refused:
        parsed(messages=[{"role": "user", "content": "hi"}])
    assert refused.value.param == "input"
