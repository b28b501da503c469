"""The official `openai` and `anthropic` clients against the app on real sockets."""

import anthropic
import openai
import pytest
from fake_engine import EVERYTHING, HELLO, USAGE, FakeEngine
from sdk_clients import claude, gpt

from omlxd.api.errors import message_of
from omlxd.chat import Conversation, Failed, Finished, TextDelta, TokenLogprob
from omlxd.errors import InvalidRequest, OmlxdError, Overloaded, PromptTooLong, Unavailable

PINGED_S = 0.6
"""A silence of many pings, of which a busy machine may leave out most."""
USER = [{"role": "user", "content": "hi"}]
SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}}}


# --------------------------------------------------------------------------- anthropic


def check_message(message):
    assert [block.type for block in message.content] == ["thinking", "text", "tool_use", "tool_use"]
    thinking, text, call, _ = message.content
    assert thinking.thinking == "Let me think." and thinking.signature
    assert text.text == "I will look."
    assert (call.id, call.name, call.input) == ("call_1", "read", {"path": "/tmp/a", "n": 1})
    assert message.stop_reason == "tool_use" and message.model == "claude-opus-5-5"
    usage = message.usage
    assert (usage.input_tokens, usage.cache_read_input_tokens, usage.output_tokens) == (36, 64, 7)
    assert usage.cache_creation_input_tokens == 0
    assert usage.output_tokens_details.thinking_tokens == 3


async def test_anthropic_messages_streaming_and_not():
    engine = FakeEngine([PINGED_S, *EVERYTHING])
    request = {
        "model": "claude-opus-5-5",
        "max_tokens": 100,
        "messages": USER,
        "system": "s",
        "tools": [{"name": "read", "description": "d", "input_schema": SCHEMA}],
        "thinking": {"type": "enabled", "budget_tokens": 1024},
    }
    async with claude(engine, ping_interval_s=0.02, header_grace_s=0.01) as client:
        whole = await client.messages.create(**request)
        check_message(whole)
        assert whole.usage.model_extra["omlxd"]["cached_cold"] == 16
        async with client.messages.stream(**request) as stream:
            kinds = [event.type async for event in stream]
            check_message(await stream.get_final_message())
        assert kinds[0] == "message_start" and kinds[-1] == "message_stop"
        raw = [event async for event in await client.messages.create(**request, stream=True)]
        assert raw[-2].usage.cache_read_input_tokens == 64
        assert raw[-2].usage.model_extra["omlxd"]["ttft_s"] == 0.25
    first, *others = engine.requests
    assert isinstance(first.prompt, Conversation)
    assert first.prompt.thinking is True and first.prompt.tools[0].parameters == SCHEMA
    assert others == [first, first]


async def test_anthropic_models_and_counting():
    async with claude(FakeEngine(tokens=77)) as client:
        (model,) = [model async for model in client.models.list(limit=1000)]
        assert model.id == "org/tiny" and model.created_at.year > 2000 and model.max_input_tokens == 4096
        assert (await client.models.retrieve("claude-x")).id == "org/tiny"
        counted = await client.messages.count_tokens(model="tiny", messages=USER)
        assert counted.input_tokens == 77


async def test_anthropic_stop_sequence():
    script = [TextDelta("a"), Finished("stop_sequence", USAGE, "END")]
    async with claude(FakeEngine(script)) as client:
        message = await client.messages.create(
            model="tiny", max_tokens=5, messages=USER, stop_sequences=["END"]
        )
        assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "END")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (InvalidRequest("no"), anthropic.BadRequestError),
        (PromptTooLong(9, 8), anthropic.BadRequestError),
        (Overloaded("busy"), anthropic.OverloadedError),
        (Unavailable("gone"), anthropic.ServiceUnavailableError),
        (OmlxdError("bug"), anthropic.InternalServerError),
    ],
)
async def test_anthropic_errors(error, kind, stream):
    async with claude(FakeEngine([error]), header_grace_s=60.0) as client:
        with pytest.raises(kind) as caught:
            await client.messages.create(model="tiny", max_tokens=5, messages=USER, stream=stream)
        assert caught.value.body["error"]["message"] == error.message


async def test_anthropic_other_errors():
    async with claude(FakeEngine(), api_key="other") as client:
        with pytest.raises(anthropic.AuthenticationError):
            await client.messages.create(model="tiny", max_tokens=5, messages=USER)
    async with claude(FakeEngine(), max_body_bytes=1000) as client:
        with pytest.raises(anthropic.NotFoundError, match="org/tiny"):
            await client.messages.create(model="gpt-4", max_tokens=5, messages=USER)
        with pytest.raises(anthropic.RequestTooLargeError):
            long = [{"role": "user", "content": "x" * 2000}]
            await client.messages.create(model="tiny", max_tokens=5, messages=long)


async def test_anthropic_error_in_mid_stream():
    engine = FakeEngine([TextDelta("a"), 0.05, Failed("overloaded", "busy")])
    async with claude(engine) as client:
        stream = await client.messages.create(model="tiny", max_tokens=5, messages=USER, stream=True)
        seen = []
        with pytest.raises(anthropic.APIStatusError, match="busy"):
            async for event in stream:
                seen.append(event.type)
        assert seen[-1] == "content_block_delta"


# --------------------------------------------------------------------------- openai


def check_usage(usage):
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (100, 7, 107)
    assert usage.prompt_tokens_details.cached_tokens == 64
    assert usage.completion_tokens_details.reasoning_tokens == 3
    assert usage.model_extra["omlxd"]["computed"] == 36


def check_completion(completion):
    (choice,) = completion.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "I will look."
    assert [call.function.name for call in choice.message.tool_calls] == ["read", "read"]
    assert choice.message.tool_calls[0].function.arguments == '{"path":"/tmp/a","n":1}'
    check_usage(completion.usage)


async def test_openai_chat_streaming_and_not():
    engine = FakeEngine([PINGED_S, *EVERYTHING])
    request = {
        "model": "tiny",
        "messages": USER,
        "tools": [{"type": "function", "function": {"name": "read", "parameters": SCHEMA}}],
    }
    usage = {"stream_options": {"include_usage": True}}
    async with gpt(engine, ping_interval_s=0.02, header_grace_s=0.01) as client:
        whole = await client.chat.completions.create(**request)
        check_completion(whole)
        assert whole.choices[0].message.model_extra["reasoning_content"] == "Let me think."
        async with client.chat.completions.stream(**request, **usage) as stream:
            async for _ in stream:
                pass
            check_completion(await stream.get_final_completion())
        chunks = [
            chunk async for chunk in await client.chat.completions.create(**request, **usage, stream=True)
        ]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert sum(chunk.choices == [] for chunk in chunks) == 1
    check_usage(chunks[-1].usage)
    assert len({chunk.id for chunk in chunks}) == 1
    assert len(chunks) > len(EVERYTHING) + 2, "there are pings among them"


async def test_openai_logprobs():
    token = TokenLogprob("Hi", -0.5, (("Hi", -0.5), ("Ho", -1.5)))
    async with gpt(FakeEngine([TextDelta("Hi", (token,)), HELLO[-1]])) as client:
        request = {"model": "tiny", "messages": USER, "logprobs": True, "top_logprobs": 2}
        whole = await client.chat.completions.create(**request)
        assert whole.choices[0].logprobs.content[0].top_logprobs[1].logprob == -1.5
        legacy = await client.completions.create(model="tiny", prompt="x", logprobs=2)
        assert legacy.choices[0].logprobs.top_logprobs == [{"Hi": -0.5, "Ho": -1.5}]


@pytest.mark.slow
async def test_openai_completions_streaming_and_not():
    async with gpt(FakeEngine([PINGED_S, *HELLO]), ping_interval_s=0.02, header_grace_s=0.01) as client:
        whole = await client.completions.create(model="tiny", prompt="Once")
        assert whole.choices[0].text == "Hello there" and whole.choices[0].finish_reason == "stop"
        check_usage(whole.usage)
        stream = await client.completions.create(model="tiny", prompt=[1, 2], stream=True)
        chunks = [chunk async for chunk in stream]
        assert "".join(chunk.choices[0].text for chunk in chunks) == "Hello there"
        assert chunks[-1].choices[0].finish_reason == "stop"


async def test_openai_models():
    async with gpt(FakeEngine()) as client:
        (model,) = [model async for model in client.models.list()]
        assert (model.id, model.object, model.owned_by) == ("org/tiny", "model", "omlxd")
        assert model.model_extra["omlxd"]["context_length"] == 4096
        assert (await client.models.retrieve("org/tiny")).id == "org/tiny"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("error", "kind", "code"),
    [
        (InvalidRequest("no"), openai.BadRequestError, None),
        (PromptTooLong(9, 8), openai.BadRequestError, "context_length_exceeded"),
        (Overloaded("busy"), openai.InternalServerError, "overloaded"),
        (Unavailable("gone"), openai.InternalServerError, "unavailable"),
        (OmlxdError("bug"), openai.InternalServerError, "internal_error"),
    ],
)
async def test_openai_errors(error, kind, code, stream):
    async with gpt(FakeEngine([error]), header_grace_s=60.0) as client:
        with pytest.raises(kind) as caught:
            await client.chat.completions.create(model="tiny", messages=USER, stream=stream)
        assert caught.value.code == code and message_of(error, "openai") in str(caught.value)


async def test_openai_other_errors():
    async with gpt(FakeEngine(), api_key="other") as client:
        with pytest.raises(openai.AuthenticationError):
            await client.models.list()
    async with gpt(FakeEngine()) as client:
        with pytest.raises(openai.NotFoundError, match="org/tiny") as caught:
            await client.chat.completions.create(model="gpt-4", messages=USER)
        assert caught.value.code == "model_not_found" and caught.value.param == "model"
        with pytest.raises(openai.BadRequestError) as refused:
            await client.chat.completions.create(model="tiny", messages=USER, n=9)
        assert refused.value.param == "n"


async def test_openai_error_in_mid_stream():
    engine = FakeEngine([TextDelta("a"), 0.05, Failed("unavailable", "the engine died")])
    async with gpt(engine) as client:
        stream = await client.chat.completions.create(model="tiny", messages=USER, stream=True)
        with pytest.raises(openai.APIError, match="the engine died"):
            async for _ in stream:
                pass


async def test_closing_a_stream_early_frees_the_request():
    for make in (claude, gpt):
        engine = FakeEngine([TextDelta("x"), 300.0, *HELLO])
        async with make(engine) as client:
            create = client.messages.create if make is claude else client.chat.completions.create
            stream = await create(model="tiny", max_tokens=5, messages=USER, stream=True)
            async for _ in stream:
                break
            await stream.close()
            await engine.closed.wait()
