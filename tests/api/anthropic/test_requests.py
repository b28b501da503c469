"""Anthropic bodies into requests; recorded Claude Code traffic."""

import base64
import itertools
import json
import os
import time
from pathlib import Path

import pytest

from omlxd.api.anthropic import request
from omlxd.chat import (
    Conversation,
    ImagePart,
    Message,
    TextPart,
    ThinkingPart,
    Tool,
    ToolCallPart,
    ToolResultPart,
)
from omlxd.errors import InvalidRequest

PNG = base64.b64encode(b"\x89PNG not really").decode()
TRACES = Path(os.environ.get("OMLXD_TRACES") or Path(__file__).parents[4] / "shared" / "traces")


def parse(headers=None, **body):
    body.setdefault("messages", [{"role": "user", "content": "hi"}])
    return request.parse(json.dumps(body).encode(), headers or {})


def conversation(**body) -> Conversation:
    prompt = parse(**body).generate.prompt
    assert isinstance(prompt, Conversation)
    return prompt


def messages(*given, **body):
    return conversation(messages=list(given), **body).messages


def refused(**body) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        parse(**body)
    return caught.value


def user(*blocks):
    return {"role": "user", "content": list(blocks)}


def text(value, **more):
    return {"type": "text", "text": value, **more}


def test_a_small_request():
    parsed = parse(
        model="m",
        stream=True,
        max_tokens=5,
        temperature=0.5,
        top_p=0.9,
        top_k=3,
        stop_sequences=["a", "b"],
        unknown={"x": 1},
    )
    assert (parsed.model, parsed.stream) == ("m", True)
    sampling = parsed.generate.sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p, sampling.top_k) == (5, 0.5, 0.9, 3)
    assert sampling.stop == ("a", "b")
    assert parsed.generate.prompt == Conversation((Message("user", (TextPart("hi"),)),))


def test_absent_sampling_fields_are_none():
    sampling = parse().generate.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.max_tokens) == (None,) * 4
    assert parse().model == ""


def test_top_p_zero_is_greedy():
    sampling = parse(top_p=0).generate.sampling
    assert (sampling.top_p, sampling.top_k) == (None, 1)


def test_string_and_list_content_are_equal():
    assert messages({"role": "user", "content": "hi"}) == messages(user(text("hi", cache_control={"a": 1})))
    as_string = {"type": "tool_result", "tool_use_id": "t", "content": "out"}
    assert messages(user(as_string)) == messages(user({**as_string, "content": [text("out")]}))


@pytest.mark.parametrize(
    "system",
    [
        "x-anthropic-billing-header: cc_version=1.2.abc;\nBe good",
        "x-anthropic-billing-header: other suffix\n\nBe good",
        [text("x-anthropic-billing-header: cc_version=2; x=1;"), text("Be good", cache_control={})],
        [text("x-anthropic-billing-header:"), text("x-anthropic-billing-header: b\nBe good")],
        "Be good",
    ],
)
def test_billing_header_is_dropped(system):
    assert conversation(system=system).messages[0] == Message("system", (TextPart("Be good"),))


def test_many_billing_headers_take_no_longer_than_their_text():
    began = time.thread_time()
    (system, _) = conversation(system="x-anthropic-billing-header: a\n" * 300_000 + "Be good").messages
    assert system.parts == (TextPart("Be good"),)
    # Each was once cut off what was left: minutes of a front that hangs.
    assert time.thread_time() - began < 10


def test_a_system_of_nothing_but_billing_is_no_message():
    only = conversation(system=[text("x-anthropic-billing-header: a")])
    assert [message.role for message in only.messages] == ["user"]


def test_system_inside_messages_stays_in_place():
    got = messages(user(text("a")), {"role": "system", "content": "s"}, user(text("b")), user(text("c")))
    assert [message.role for message in got] == ["user", "system", "user", "user"]


def test_tool_results_before_text_become_two_messages():
    got = messages(
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "sig"},
                {"type": "redacted_thinking", "data": "x"},
                text("ok"),
                {"type": "tool_use", "id": "t1", "name": "f", "input": {"b": 1, "a": 2}},
            ],
        },
        user(
            {"type": "tool_result", "tool_use_id": "t1", "content": [text("one"), text("two")]},
            {"type": "tool_result", "tool_use_id": "t2", "is_error": True},
            text("and now"),
        ),
    )
    assert got == (
        Message(
            "assistant",
            (ThinkingPart("hm", "sig"), TextPart("ok"), ToolCallPart("t1", "f", {"b": 1, "a": 2})),
        ),
        Message("tool", (ToolResultPart("t1", "one\ntwo"), ToolResultPart("t2", "", is_error=True))),
        Message("user", (TextPart("and now"),)),
    )


def test_images():
    block = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PNG}}

    def part(param: str) -> ImagePart:
        return ImagePart(base64.b64decode(PNG), "image/png", param)

    result = {"type": "tool_result", "tool_use_id": "t", "content": [text("see"), block]}
    got = messages(user(block), user(result))
    assert got[0].parts == (part("messages.0.content.0.image.source"),)
    image = part("messages.1.content.0.tool_result.content.1.image.source")
    assert got[1].parts == (ToolResultPart("t", "see", images=(image,)),)
    url = {"type": "image", "source": {"type": "url", "url": "http://127.0.0.1/x"}}
    error = refused(messages=[user(url)])
    assert error.param == "messages.0.content.0.image.source" and "not fetched" in error.message
    bad = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "%%"}}
    assert "base64" in refused(messages=[user(bad)]).message


def test_unknown_blocks_are_named():
    error = refused(messages=[user(text("a"), {"type": "of_the_future", "source": {}})])
    assert error.param == "messages.0.content.1.type"
    assert "'of_the_future'" in error.message


def test_blocks_in_the_wrong_role_are_named():
    error = refused(messages=[user({"type": "tool_use", "id": "a", "name": "b", "input": {}})])
    assert "tool_use" in error.message and error.param == "messages.0.content.0"


SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}}


def test_tools():
    got = conversation(
        tools=[
            {"name": "f", "description": "d", "input_schema": SCHEMA, "cache_control": {}},
            {"type": "web_search_20250305", "name": "web_search"},
            {"type": "mcp_toolset"},
            {"type": "custom", "name": "later", "input_schema": SCHEMA, "defer_loading": True},
        ]
    )
    assert got.tools == (Tool("f", "d", SCHEMA),)


def test_a_deferred_tool_is_told_where_it_is_referred_to():
    reference = {"type": "tool_reference", "tool_name": "later"}
    result = {"type": "tool_result", "tool_use_id": "t", "content": [reference]}

    def told(schema):
        later = {"name": "later", "description": "d", "input_schema": schema, "defer_loading": True}
        (message,) = messages(user(result), tools=[later])
        return message.parts[0].text

    first = told({"type": "object", "properties": {}})
    assert first == told({"properties": {}, "type": "object"})
    assert json.loads(first) == {
        "type": "function",
        "function": {
            "name": "later",
            "description": "d",
            "parameters": {"type": "object", "properties": {}},
        },
    }


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        (None, "auto"),
        ({"type": "auto"}, "auto"),
        ({"type": "any"}, "required"),
        ({"type": "none"}, "none"),
        ({"type": "tool", "name": "f"}, "named:f"),
        ({"type": "tool", "name": "web_search"}, "auto"),
    ],
)
def test_tool_choice(choice, expected):
    tools = [{"name": "f", "input_schema": SCHEMA}, {"type": "web_search_20250305", "name": "web_search"}]
    assert conversation(tools=tools, tool_choice=choice).tool_choice == expected
    assert refused(tools=tools, tool_choice={"type": "tool", "name": "g"}).param == "tool_choice.name"
    for forced in ({"type": "any"}, {"type": "tool", "name": "f"}):
        assert "no tools to choose from" in refused(tool_choice=forced).message
    later = [*tools, {"name": "later", "input_schema": SCHEMA, "defer_loading": True}]
    error = refused(tools=later, tool_choice={"type": "tool", "name": "later"})
    assert error.param == "tool_choice.name" and "deferred" in error.message


@pytest.mark.parametrize("choice", [{"type": "auto"}, {"type": "any"}, {"type": "tool", "name": "f"}])
def test_one_call_at_most_if_calls_may_not_be_parallel(choice):
    tools = [{"name": "f", "input_schema": SCHEMA}]
    assert conversation(tools=tools, tool_choice=choice).parallel_calls
    one = conversation(tools=tools, tool_choice={**choice, "disable_parallel_tool_use": True})
    assert not one.parallel_calls and one.tools == conversation(tools=tools).tools


@pytest.mark.parametrize(
    ("thinking", "expected"),
    [
        (None, None),
        ({"type": "enabled", "budget_tokens": 1000}, True),
        ({"type": "adaptive"}, True),
        ({"type": "disabled"}, False),
    ],
)
def test_thinking(thinking, expected):
    assert conversation(thinking=thinking).thinking is expected


def test_session():
    user_id = json.dumps({"device_id": "d", "session_id": "s1"})
    assert parse(metadata={"user_id": user_id}).generate.session == "s1"
    assert parse(metadata={"user_id": "plain"}).generate.session == "plain"
    headers = {"x-claude-code-session-id": "s2", "x-claude-code-agent-id": "a"}
    assert parse(headers, metadata={"user_id": user_id}).generate.session == "s2/a"


def nested(levels):
    value = {}
    for _ in range(levels):
        value = {"a": value}
    return value


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": "user"}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": [{"text": "x"}]}]}, "messages.0.content.0.type"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 10**30}, "max_tokens"),
        ({"max_tokens": "many"}, "max_tokens"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": 99}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"top_p": 1.5}, "top_p"),
        ({"stop_sequences": ["x"] * 10_000}, "stop_sequences"),
        ({"stop_sequences": ["x" * 1001]}, "stop_sequences"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"tools": [{"name": "f"}]}, "tools.0.input_schema"),
        ({"tools": [{"input_schema": {}}]}, "tools.0.name"),
        ({"tools": [{"name": "f", "input_schema": nested(100)}]}, "tools.0.input_schema"),
        ({"stream": "yes"}, "stream"),
        ({"model": 3}, "model"),
    ],
)
def test_bad_fields_are_named(body, param):
    error = refused(**body)
    assert error.param == param
    assert param in error.message


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"   ",
        b"{",
        b"[]",
        b"null",
        b'"x"',
        b"\xff\xfe",
        b"[" * 200_000,
        b'{"messages":' + b"[" * 200_000,
        b'{"messages":[],"x":' + b'{"a":' * 200_000,
        b'{"messages":[{"role":"user","content":"\\ud800"}]}',
        b'{"messages":[{"role":"user","content":"x"}],"temperature":NaN}',
        b'{"messages":[{"role":"user","content":"x"}],"temperature":1e999}',
        b'{"messages":[{"role":"user","content":"x"}],"max_tokens":' + b"9" * 10_000 + b"}",
    ],
)
def test_bodies_that_are_no_request(body):
    with pytest.raises(InvalidRequest):
        request.parse(body)


def test_numbers_past_64_bits_in_arguments_are_kept_as_floats():
    block = {"type": "tool_use", "id": "t", "name": "f", "input": {"a": [10**25, 2**64 - 1]}}
    (message,) = messages({"role": "assistant", "content": [block]})
    assert message.parts[0].arguments == {"a": [1e25, 2**64 - 1]}


# --------------------------------------------------------------------------- recorded traffic


def trace(name):
    path = TRACES / name
    if not path.is_file():
        pytest.skip(f"no trace {path}")
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize(
    "name",
    ["claude_code_session.jsonl", "claude_code_other_sessions.jsonl", "claude_code_subagents.jsonl"],
)
def test_every_recorded_body_parses(name):
    for turn in trace(name):
        parsed = request.parse(json.dumps(turn["body"]).encode(), turn["headers"])
        assert parsed.stream and parsed.model == "omlx-local"
        assert parsed.generate.session.startswith("00000000-")
        assert "x-anthropic-billing-header" not in str(parsed.generate.prompt)


def test_each_recorded_turn_extends_the_one_before():
    turns = [
        request.parse(json.dumps(turn["body"]).encode()).generate.prompt
        for turn in trace("claude_code_session.jsonl")
    ]
    assert len(turns) == 10
    for before, after in itertools.pairwise(turns):
        assert isinstance(before, Conversation) and isinstance(after, Conversation)
        assert len(after.messages) > len(before.messages)
        assert after.messages[: len(before.messages)] == before.messages
        assert after.tools == before.tools
