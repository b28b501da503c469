"""/v1/responses: bodies into requests, events into answers, and the official client on real sockets."""

import asyncio
import base64
import contextlib
import copy
import json
import random

import httpx
import openai
import pytest
from app_client import client as plain
from daemon import BLOCK, Daemon, prose
from fake_engine import EVERYTHING, HELLO, USAGE, FakeEngine, app_of, served
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from openai.types.responses import (
    ResponseFunctionToolCall,
    ResponseOutputMessage,
    ResponseReasoningItem,
    ResponseStreamEvent,
)
from pydantic import TypeAdapter

from omlxd.api.openai_responses import parse
from omlxd.api.openai_responses_items import sealed
from omlxd.api.openai_responses_stream import OpenAIResponsesCollector, OpenAIResponsesStream
from omlxd.chat import (
    Conversation,
    Failed,
    Finished,
    ImagePart,
    Message,
    ReasoningDelta,
    TextDelta,
    TextPart,
    ThinkingPart,
    ToolCall,
    ToolCallPart,
    ToolResultPart,
)
from omlxd.errors import InvalidRequest, NotFound, OmlxdError, Overloaded, PromptTooLong, Unavailable
from omlxd.front.response_store import ResponseStore

SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}}}
READ = {"type": "function", "name": "read", "description": "Reads.", "parameters": SCHEMA, "strict": False}
AGENTS = {
    "type": "namespace",
    "name": "agents",
    "description": "d",
    "tools": [{"type": "function", "name": "close", "parameters": SCHEMA}],
}
PATCH = {
    "type": "custom",
    "name": "patch",
    "format": {"type": "grammar", "syntax": "lark", "definition": "x"},
}
EVENTS = TypeAdapter(ResponseStreamEvent)
PIXEL = base64.b64encode(b"png").decode()


def parsed(headers=None, history=lambda _: None, **body):
    return parse(json.dumps({"model": "tiny", **body}).encode(), headers, history)


def conversation(**body) -> Conversation:
    prompt = parsed(**body).generate.prompt
    assert isinstance(prompt, Conversation)
    return prompt


def messages(*items, **more):
    return conversation(input=list(items), **more).messages


def user(text):
    return Message("user", (TextPart(text),))


def item(role, *content):
    return {"type": "message", "role": role, "content": list(content)}


def text(value, kind="input_text"):
    return {"type": kind, "text": value}


# --------------------------------------------------------------------------- requests


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
        Message("user", (TextPart("v"), ImagePart(b"png", "image/png"))),
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
                ToolResultPart("c2", "t", images=(ImagePart(b"png", "image/png"),)),
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


def test_sampling_thinking_and_session():
    request = parsed(
        input="u", max_output_tokens=9, temperature=0.5, top_p=0.9, reasoning={"effort": "high"}, stream=True
    )
    sampling = request.generate.sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p, request.stream) == (9, 0.5, 0.9, True)
    assert request.generate.prompt.thinking is True
    assert request.generate.prompt.template_args == {"reasoning_effort": "high"}
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
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, r"input\.0"),
        ({"input": [{"type": "function_call", "name": "read"}]}, r"input\.0\.call_id"),
        ({"input": [{"role": "robot", "content": "x"}]}, r"input\.0\.role"),
        ({"input": [item("user", {"type": "input_file", "file_id": "f"})]}, "'input_file' is not supported"),
        ({"input": [item("user", {"type": "input_image", "image_url": "https://x/y"})]}, "not fetched"),
        ({"input": [item("system", {"type": "input_image", "image_url": "data:,x"})]}, "image"),
    ],
)
def test_refusals_name_the_field(body, says):
    with pytest.raises(InvalidRequest, match=says):
        parsed(**body)


# --------------------------------------------------------------------------- answers


def collected(request, events, keep=lambda *kept: None):
    collector = OpenAIResponsesCollector("resp_1", request, 1, keep)
    for event in events:
        collector.event(event)
    return json.loads(collector.response())


def sent(data: bytes):
    """The events of a stream, as (event name, JSON)."""
    for block in data.decode().split("\n\n")[:-1]:
        name, _, payload = block.partition("\ndata: ")
        yield name.removeprefix("event: "), json.loads(payload)


def streamed(request, events):
    stream = OpenAIResponsesStream("resp_1", request, 1)
    data = stream.start() + b"".join(map(stream.event, events))
    return list(sent(data))


def test_every_event_in_order_and_of_the_shape_that_the_sdk_defines():
    events = streamed(parsed(input="u", tools=[READ]), EVERYTHING)
    names = [name for name, _ in events]
    assert names == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.reasoning_text.delta",
        "response.reasoning_text.delta",
        "response.reasoning_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        *(
            [
                "response.output_item.added",
                "response.function_call_arguments.delta",
                "response.function_call_arguments.done",
                "response.output_item.done",
            ]
            * 2
        ),
        "response.completed",
    ]
    assert [event["sequence_number"] for _, event in events] == list(range(len(events)))
    assert all(event["type"] == name for name, event in events)
    for _, event in events:
        EVENTS.validate_python(event)  # Strict: a missing field is an error here.
    indices = [event["output_index"] for _, event in events if "output_index" in event]
    assert indices == sorted(indices) and set(indices) == {0, 1, 2, 3}


def test_the_limit_of_tokens_makes_an_incomplete_response():
    request = parsed(input="u", max_output_tokens=2)
    name, last = streamed(request, [TextDelta("Hel"), Finished("length", USAGE)])[-1]
    assert name == "response.incomplete"
    response = last["response"]
    assert response["status"] == "incomplete"
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}
    assert response["output"][0]["status"] == "incomplete" and response["max_output_tokens"] == 2


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (Overloaded("busy", retry_after=7), "rate_limit_exceeded"),
        (Unavailable("gone"), "server_error"),
        (PromptTooLong(9, 8), "context_length_exceeded"),
        (InvalidRequest("no"), "invalid_prompt"),
    ],
)
def test_an_error_in_mid_stream_ends_it_as_failed(error, code):
    stream = OpenAIResponsesStream("resp_1", parsed(input="u"), 1)
    data = stream.start() + stream.event(TextDelta("Hel")) + stream.error(error)
    events = list(sent(data))
    assert [name for name, _ in events][-2:] == ["response.output_item.done", "response.failed"]
    failed = events[-1][1]["response"]
    assert failed["status"] == "failed" and failed["error"]["code"] == code
    assert failed["error"]["message"].startswith(error.message)
    assert ("try again in 7s" in failed["error"]["message"]) == (code == "rate_limit_exceeded")
    assert failed["output"][0]["content"][0]["text"] == "Hel"


def test_stream_and_whole_answer_are_equal_however_the_text_is_cut():
    rng = random.Random(1)
    request = parsed(input="u", tools=[READ, AGENTS, PATCH], include=["reasoning.encrypted_content"])
    for _ in range(200):
        events = []
        for _ in range(rng.randrange(5)):
            kind = rng.choice([TextDelta, ReasoningDelta, ToolCall])
            if kind is ToolCall:
                events.append(ToolCall(f"c{len(events)}", rng.choice(["read", "patch", "close"]), '{"a":1}'))
                continue
            whole = "".join(rng.choice("aé\n<") for _ in range(rng.randrange(1, 9)))
            while whole:
                cut = rng.randrange(1, len(whole) + 1)
                events.append(kind(whole[:cut]))
                whole = whole[cut:]
        events.append(Finished(rng.choice(["stop", "length"]), USAGE))
        whole = collected(request, events)
        stream = streamed(request, events)
        last = stream[-1][1]["response"]
        assert {**last, "completed_at": None} == {**whole, "completed_at": None}
        assert [event["item"] for name, event in stream if name.endswith("item.done")] == whole["output"]
        deltas = {}
        for name, event in stream:
            if name.endswith(".delta"):
                deltas.setdefault(event["output_index"], []).append(event["delta"])
        texts = [
            one.get("arguments") or one.get("input") or one["content"][0]["text"] for one in whole["output"]
        ]
        assert ["".join(deltas[index]) for index in sorted(deltas)] == texts


def test_what_comes_back_is_what_was_said():
    """An echoed answer is the very turn that the store keeps, thinking included."""
    kept = ResponseStore()
    request = parsed(input="u", tools=[READ], include=["reasoning.encrypted_content"])
    output = collected(request, EVERYTHING, kept.keep)["output"]
    # As Codex does: new ids, and the reasoning's text left out.
    items = [{**one, "id": "other"} for one in output]
    items[0].pop("content")
    assert messages(item("user", text("u")), *items, tools=[READ]) == kept.messages("resp_1")


# --------------------------------------------------------------------------- the store


def test_the_store_is_bounded_and_drops_the_least_recently_used():
    store = ResponseStore(max_responses=3, max_bytes=10_000)
    for name in "abc":
        store.keep(name, (user(name),))
    assert store.messages("a") == (user("a"),)
    store.keep("d", (user("d"),))
    assert store.messages("b") is None and len(store) == 3
    store.keep("big", (user("x" * 9_950),))
    assert store.messages("big") is not None and len(store) == 1
    store.keep("huge", (user("x" * 10_001),))
    assert store.messages("huge") is None and store.bytes <= 10_000
    store.keep("big", (user("y"),))
    assert store.bytes < 100


def test_an_answer_goes_on_from_the_one_before():
    store = ResponseStore()
    first = parsed(input="one", instructions="Be brief.")
    collected(first, HELLO, store.keep)
    second = parsed(history=store.messages, input="two", previous_response_id="resp_1", instructions="Speak.")
    assert second.generate.prompt.messages == (
        Message("system", (TextPart("Speak."),)),
        user("one"),
        Message("assistant", (TextPart("Hello there"),)),
        user("two"),
    )
    with pytest.raises(NotFound, match="resp_0"):
        parsed(history=store.messages, input="two", previous_response_id="resp_0")


def test_store_false_keeps_nothing():
    store = ResponseStore()
    collected(parsed(input="one", store=False), HELLO, store.keep)
    assert len(store) == 0


# --------------------------------------------------------------------------- the official client


@contextlib.asynccontextmanager
async def gpt(engine, **settings):
    async with (
        served(app_of(engine, **settings)) as url,
        openai.AsyncOpenAI(base_url=url + "/v1", api_key="k", max_retries=0) as client,
    ):
        yield client


def check_response(response):
    thinking, message, call, second = response.output
    assert isinstance(thinking, ResponseReasoningItem) and thinking.content[0].text == "Let me think."
    assert isinstance(message, ResponseOutputMessage) and response.output_text == "I will look."
    assert isinstance(call, ResponseFunctionToolCall) and isinstance(second, ResponseFunctionToolCall)
    assert (call.call_id, call.name, call.arguments) == ("call_1", "read", '{"path":"/tmp/a","n":1}')
    assert response.status == "completed" and response.error is None
    usage = response.usage
    assert (usage.input_tokens, usage.output_tokens, usage.total_tokens) == (100, 7, 107)
    assert usage.input_tokens_details.cached_tokens == 64
    assert usage.output_tokens_details.reasoning_tokens == 3
    assert usage.model_extra["omlxd"]["computed"] == 36


async def test_the_sdk_streaming_and_not():
    engine = FakeEngine([0.2, *EVERYTHING])
    request = {"model": "tiny", "input": "u", "tools": [READ], "instructions": "Be brief."}
    async with gpt(engine, ping_interval_s=0.05, header_grace_s=0.01) as client:
        check_response(await client.responses.create(**request))
        events = [event async for event in await client.responses.create(**request, stream=True)]
        check_response(events[-1].response)
        async with client.responses.stream(**request) as stream:
            async for _ in stream:
                pass
            check_response(await stream.get_final_response())
    assert [event.sequence_number for event in events] == list(range(len(events)))
    pings = [event for event in events if event.type == "response.in_progress"]
    assert len(pings) > 1, "a silence is filled with typed events"
    assert engine.requests[1:] == engine.requests[:1] * 2


async def test_the_sdk_goes_on_with_previous_response_id():
    engine = FakeEngine()
    async with gpt(engine) as client:
        first = await client.responses.create(model="tiny", input="one")
        stream = await client.responses.create(
            model="tiny", input="two", previous_response_id=first.id, stream=True
        )
        second = [event async for event in stream][-1].response
        await client.responses.create(model="tiny", input="three", previous_response_id=second.id)
        said = [(message.role, message.parts[0].text) for message in engine.requests[-1].prompt.messages]
        assert said == [
            ("user", "one"),
            ("assistant", "Hello there"),
            ("user", "two"),
            ("assistant", "Hello there"),
            ("user", "three"),
        ]
        with pytest.raises(openai.NotFoundError) as caught:
            await client.responses.create(model="tiny", input="x", previous_response_id="resp_0")
        assert caught.value.code == "previous_response_not_found"
        assert caught.value.param == "previous_response_id"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (InvalidRequest("no"), openai.BadRequestError),
        (PromptTooLong(9, 8), openai.BadRequestError),
        (Overloaded("busy"), openai.InternalServerError),
        (OmlxdError("bug"), openai.InternalServerError),
    ],
)
async def test_the_sdk_sees_errors_as_such(error, kind, stream):
    async with gpt(FakeEngine([error]), header_grace_s=1.0) as client:
        with pytest.raises(kind, match=error.message):
            await client.responses.create(model="tiny", input="u", stream=stream)


async def test_the_sdk_sees_an_error_in_mid_stream():
    engine = FakeEngine([TextDelta("a"), 0.05, Failed("unavailable", "the engine died")])
    async with gpt(engine) as client:
        stream = await client.responses.create(model="tiny", input="u", stream=True)
        events = [event async for event in stream]
    assert events[-1].type == "response.failed"
    assert events[-1].response.error.message == "the engine died"


async def test_a_client_that_goes_away_frees_the_request():
    engine = FakeEngine([TextDelta("x"), 30.0, *HELLO])
    async with gpt(engine) as client:
        stream = await client.responses.create(model="tiny", input="u", stream=True)
        async for event in stream:
            if event.type == "response.output_text.delta":
                break
        await stream.close()
        await engine.closed.wait()


# --------------------------------------------------------------------------- a real daemon


def test_a_real_model_finds_the_conversation_in_its_cache(tmp_path):
    with Daemon(tmp_path) as daemon:
        body = {"model": daemon.model, "max_output_tokens": 8, "temperature": 0, "tools": [READ, AGENTS]}

        def ask(**more):
            answer = daemon.post("/v1/responses", {**body, **more})
            assert answer.status_code == 200, answer.text
            return answer.json()

        first = ask(input=prose(60))
        before = first["usage"]["input_tokens"]
        again = ask(input=prose(60))
        assert again["usage"]["input_tokens_details"]["cached_tokens"] >= before - BLOCK
        assert [one.get("content") for one in again["output"]] == [
            one.get("content") for one in first["output"]
        ]
        after = ask(input="And?", previous_response_id=first["id"])["usage"]
        assert after["input_tokens"] > before
        assert after["input_tokens_details"]["cached_tokens"] >= before - BLOCK


# --------------------------------------------------------------------------- no body makes a 500

junk = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**30), 10**30) | st.text(max_size=6) | st.floats(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
BODY = {
    "model": "tiny",
    "instructions": "i",
    "input": [
        item("user", text("u"), {"type": "input_image", "image_url": f"data:image/png;base64,{PIXEL}"}),
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "s"}], "encrypted_content": "x"},
        {"type": "function_call", "call_id": "c", "name": "read", "arguments": "{}", "namespace": "n"},
        {"type": "function_call_output", "call_id": "c", "output": [text("x")]},
        {"type": "shell_call", "call_id": "d", "action": {"commands": ["ls"]}},
        {"type": "tool_search_output", "call_id": "d", "tools": [READ]},
    ],
    "tools": [READ, AGENTS, PATCH, {"type": "web_search"}],
    "tool_choice": "auto",
    "reasoning": {"effort": "low"},
    "text": {"format": {"type": "text"}},
    "metadata": {"a": "b"},
    "stream": True,
    "include": ["reasoning.encrypted_content"],
    "max_output_tokens": 5,
}


def places(value):
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in list(items):
        yield value, key
        yield from places(inner)


async def status(content: bytes) -> httpx.Response:
    async with plain(app_of(FakeEngine(EVERYTHING))) as client:
        return await client.post("/v1/responses", content=content)


def test_the_whole_body_is_fine():
    answer = asyncio.run(status(json.dumps(BODY).encode()))
    assert answer.status_code == 200 and "response.completed" in answer.text


@settings(max_examples=250, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_no_body_makes_a_500(data):
    body = copy.deepcopy(BODY)
    for _ in range(data.draw(st.integers(1, 2))):
        container, key = data.draw(st.sampled_from(list(places(body))))
        if data.draw(st.booleans()):
            container[key] = data.draw(junk)
        else:
            del container[key]
        if not body:
            break
    answer = asyncio.run(status(json.dumps(body).encode()))
    assert answer.status_code in (200, 400, 404), answer.text
    assert answer.status_code == 200 or answer.json()["error"]["message"]
