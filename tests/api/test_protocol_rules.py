"""Sentences of the protocols that hold for a whole request: overload, pings, tools of the server's side,
deferred tools, unknown fields, many counts at once."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import pytest
from app_client import PATHS, body, client
from fake_engine import EVERYTHING, HELLO, FakeEngine, app_of

from omlxd.chat import Conversation, Progress, TextPart, ToolCallPart, ToolResultPart
from omlxd.errors import Overloaded

SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}}}
ALL = [*PATHS, "/v1/responses"]


def given(path: str, **more: Any) -> dict[str, Any]:
    if path == "/v1/responses":
        return {"model": "tiny", "input": "hi", **more}
    return body(path, **more)


def prompt(engine: FakeEngine) -> Conversation:
    asked = engine.requests[-1].prompt
    assert isinstance(asked, Conversation)
    return asked


# --------------------------------------------------------------------------- overload


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("wait", [7, 600, None])
@pytest.mark.parametrize("path", ALL)
async def test_overload_in_each_protocols_words(path, wait, stream):
    engine = FakeEngine([Overloaded("busy", retry_after=wait)])
    async with client(app_of(engine, header_grace_s=60.0)) as http:
        answer = await http.post(path, json=given(path, stream=stream))
    # Clients give up at once on a longer wait.
    assert 1 <= int(answer.headers["retry-after"]) <= 60
    if wait == 7:
        assert answer.headers["retry-after"] == "7"
    told = answer.json()
    if path == "/v1/messages":
        assert answer.status_code == 529
        assert told["type"] == "error"
        assert told["error"] == {"type": "overloaded_error", "message": "busy"}
    else:
        assert answer.status_code == 503
        assert told["error"]["code"] == "overloaded" and told["error"]["type"] == "server_error"


# --------------------------------------------------------------------------- pings


@pytest.mark.slow
async def test_a_long_prefill_is_filled_with_pings():
    """Progress goes on all the time, and the client hears at least once an interval."""
    prefill = [step for at in range(60) for step in (0.02, Progress(at, 60))]
    async with client(
        app_of(FakeEngine([*prefill, *HELLO]), ping_interval_s=0.05, header_grace_s=0.01)
    ) as http:
        answer = await http.post("/v1/messages", json=body("/v1/messages", stream=True))
    kinds = [line.removeprefix("event: ") for line in answer.text.split("\n") if line.startswith("event: ")]
    before = kinds[: kinds.index("content_block_start")]
    assert before.count("message_start") == 1 and before.count("ping") >= 3
    assert set(before) == {"message_start", "ping"} and kinds[-1] == "message_stop"


# --------------------------------------------------------------------------- tools of the server's side

SERVER_TOOLS: list[dict[str, Any]] = [
    {"type": "web_search_20250305", "name": "web_search", "max_uses": 5, "allowed_domains": ["a.example"]},
    {"type": "web_fetch_20250910", "name": "web_fetch", "citations": {"enabled": True}},
    {"type": "code_execution_20250825", "name": "code_execution"},
    {"type": "tool_search_tool_regex_20251119", "name": "tool_search_tool_regex"},
    {"type": "computer_20250124", "name": "computer", "display_width_px": 1, "display_height_px": 1},
    {"type": "mcp_toolset", "mcp_server_name": "x"},
    {"type": "of_the_future_20301231", "name": "later", "whatever": [1]},
]


@pytest.mark.parametrize("tool", SERVER_TOOLS, ids=lambda tool: tool["type"])
async def test_a_server_side_tool_is_no_error(tool):
    engine = FakeEngine()
    own = {"name": "f", "input_schema": SCHEMA}
    async with client(app_of(engine)) as http:
        for choice in ({}, {"tool_choice": {"type": "auto"}}, {"tool_choice": {"type": "any"}}):
            for tools in ([tool], [own, tool]):
                asked = body("/v1/messages", tools=tools, **choice)
                assert (await http.post("/v1/messages", json=asked)).status_code == 200
                assert [listed.name for listed in prompt(engine).tools] == ["f"] * (len(tools) - 1)
                counted = await http.post("/v1/messages/count_tokens", json=asked)
                assert counted.status_code == 200


async def test_their_blocks_in_a_session_from_elsewhere_are_no_error():
    engine = FakeEngine()
    blocks = [
        {"type": "text", "text": "I search."},
        {"type": "server_tool_use", "id": "srvtoolu_1", "name": "web_search", "input": {"query": "x"}},
        {
            "type": "web_search_tool_result",
            "tool_use_id": "srvtoolu_1",
            "content": [{"type": "web_search_result"}],
        },
        {"type": "mcp_tool_use", "id": "m", "name": "n", "server_name": "s", "input": {}},
        {"type": "mcp_tool_result", "tool_use_id": "m", "is_error": False, "content": []},
        {"type": "text", "text": "Found.", "citations": [{"type": "web_search_result_location"}]},
    ]
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": blocks},
        {"role": "user", "content": "more"},
    ]
    async with client(app_of(engine)) as http:
        answer = await http.post("/v1/messages", json=body("/v1/messages") | {"messages": messages})
    assert answer.status_code == 200
    assert prompt(engine).messages[1].parts == (TextPart("I search."), TextPart("Found."))


@pytest.mark.parametrize(
    "kind", ["web_search", "web_search_preview", "image_generation", "code_interpreter", "mcp"]
)
async def test_a_server_side_tool_is_no_error_in_responses(kind):
    engine = FakeEngine()
    async with client(app_of(engine)) as http:
        answer = await http.post("/v1/responses", json=given("/v1/responses", tools=[{"type": kind}]))
    assert answer.status_code == 200 and prompt(engine).tools == ()


# --------------------------------------------------------------------------- deferred tools


async def test_deferred_tools_are_rendered_at_their_reference():
    """The head of the prompt stays as it was before the search, and the reference tells the schema."""
    engine = FakeEngine()
    search = {"name": "ToolSearch", "input_schema": SCHEMA}
    later = {"name": "mcp__x__later", "description": "Later.", "input_schema": SCHEMA, "defer_loading": True}
    first = [{"role": "user", "content": "hi"}]
    reference = {"type": "tool_reference", "tool_name": "mcp__x__later"}
    after = [
        *first,
        {
            "role": "assistant",
            "content": [{"type": "tool_use", "id": "t", "name": "ToolSearch", "input": {}}],
        },
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": [reference]}]},
    ]
    async with client(app_of(engine)) as http:
        for messages, tools in ((first, [search]), (first, [search, later]), (after, [later, search])):
            asked = body("/v1/messages", tools=tools) | {"messages": messages}
            assert (await http.post("/v1/messages", json=asked)).status_code == 200
    one, two, three = (request.prompt for request in engine.requests)
    assert isinstance(one, Conversation) and isinstance(three, Conversation)
    assert one == two and three.tools == one.tools and [tool.name for tool in one.tools] == ["ToolSearch"]
    (result,) = three.messages[-1].parts
    assert isinstance(result, ToolResultPart)
    assert json.loads(result.text)["function"] == {
        "name": "mcp__x__later",
        "description": "Later.",
        "parameters": SCHEMA,
    }


async def test_deferred_tools_in_responses():
    engine = FakeEngine()
    search = {"type": "function", "name": "search", "parameters": SCHEMA}
    later = {"type": "function", "name": "later", "parameters": SCHEMA, "defer_loading": True}
    items: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]
    found: list[dict[str, Any]] = [
        {"type": "tool_search_call", "call_id": "c", "arguments": {"query": "x"}},
        {"type": "tool_search_output", "call_id": "c", "tools": [later]},
        {"type": "function_call", "call_id": "d", "name": "later", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "d", "output": "done"},
    ]
    async with client(app_of(engine)) as http:
        for given_items, tools in (
            (items, [search, later]),
            (items + found, [search, later]),
            (items + found, [search]),
        ):
            asked = {"model": "tiny", "input": given_items, "tools": tools}
            assert (await http.post("/v1/responses", json=asked)).status_code == 200
    one, two, three = (request.prompt for request in engine.requests)
    assert isinstance(one, Conversation) and isinstance(two, Conversation)
    assert [tool.name for tool in one.tools] == ["search"] and two.tools == one.tools and three == two
    parts = [part for message in two.messages for part in message.parts]
    results = [part.text for part in parts if isinstance(part, ToolResultPart)]
    assert '"name":"later"' in results[0].replace(" ", "") and results[1] == "done"
    assert [part.name for part in parts if isinstance(part, ToolCallPart)] == ["tool_search", "later"]


# --------------------------------------------------------------------------- unknown fields

UNKNOWN: dict[str, Any] = {
    "of_the_future": {"a": [1, None]},
    "betas": ["x"],
    "context_management": {"edits": []},
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ALL)
async def test_unknown_fields_change_nothing(path, stream):
    engine = FakeEngine(EVERYTHING)
    known = given(path, stream=stream)
    more = json.loads(json.dumps(known)) | UNKNOWN
    for message in more.get("messages", ()):
        message |= {"of_the_future": 1}
    async with client(app_of(engine)) as http:
        for asked in (known, more):
            assert (await http.post(path, json=asked)).status_code == 200
    one, two = engine.requests
    assert one.prompt == two.prompt and one.sampling == two.sampling


async def test_unknown_fields_of_tools_and_blocks_change_nothing():
    engine = FakeEngine()
    block = {"type": "text", "text": "hi"}
    tool = {"name": "f", "input_schema": SCHEMA}
    more = {"of_the_future": 1, "cache_control": {"type": "ephemeral", "ttl": "1h", "scope": "global"}}
    async with client(app_of(engine)) as http:
        for extra in ({}, more):
            asked = body("/v1/messages", tools=[tool | extra], system=[block | extra])
            asked["messages"] = [{"role": "user", "content": [block | extra]}]
            assert (await http.post("/v1/messages", json=asked)).status_code == 200
    assert engine.requests[0].prompt == engine.requests[1].prompt


# --------------------------------------------------------------------------- counting


async def test_26_counts_at_once_are_all_answered():
    engine = FakeEngine(tokens=123)
    asked = body("/v1/messages", system="s", tools=[{"name": "f", "input_schema": SCHEMA}])
    async with client(app_of(engine)) as http:
        began = time.monotonic()
        answers = await asyncio.gather(
            *(http.post("/v1/messages/count_tokens?beta=true", json=asked) for _ in range(26))
        )
        print(f"26 counts in {time.monotonic() - began:.3f} s")
    assert [answer.json() for answer in answers] == [{"input_tokens": 123}] * 26
