"""/v1/responses with the official client, and a real daemon, on real sockets."""

from __future__ import annotations

import re

import openai
import pytest
from daemon import BLOCK, Daemon, prose
from fake_engine import EVERYTHING, HELLO, FakeEngine
from openai.types.responses import (
    ResponseFunctionToolCall,
    ResponseOutputMessage,
    ResponseReasoningItem,
)
from responses import (
    AGENTS,
    READ,
)
from sdk_clients import gpt

from omlxd.api.errors import message_of
from omlxd.chat import (
    Failed,
    TextDelta,
)
from omlxd.errors import InvalidRequest, OmlxdError, Overloaded, PromptTooLong


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


@pytest.mark.slow
async def test_the_sdk_streaming_and_not():
    engine = FakeEngine([0.6, *EVERYTHING])
    request = {"model": "tiny", "input": "u", "tools": [READ], "instructions": "Be brief."}
    async with gpt(engine, ping_interval_s=0.02, header_grace_s=0.01) as client:
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
    async with gpt(FakeEngine([error]), header_grace_s=60.0) as client:
        with pytest.raises(kind, match=re.escape(message_of(error, "openai"))):
            await client.responses.create(model="tiny", input="u", stream=stream)


async def test_the_sdk_sees_an_error_in_mid_stream():
    engine = FakeEngine([TextDelta("a"), 0.05, Failed("unavailable", "the engine died")])
    async with gpt(engine) as client:
        stream = await client.responses.create(model="tiny", input="u", stream=True)
        events = [event async for event in stream]
    assert events[-1].type == "response.failed"
    assert events[-1].response.error.message == "the engine died"


async def test_a_client_that_goes_away_frees_the_request():
    engine = FakeEngine([TextDelta("x"), 300.0, *HELLO])
    async with gpt(engine) as client:
        stream = await client.responses.create(model="tiny", input="u", stream=True)
        async for event in stream:
            if event.type == "response.output_text.delta":
                break
        await stream.close()
        await engine.closed.wait()


# --------------------------------------------------------------------------- a real daemon


@pytest.mark.slow
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
