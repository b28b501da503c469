"""The fields of the SDK's requests: each is honoured, of no account to a local server, or refused by name."""

from __future__ import annotations

import openai
import pytest
from app_client import client as plain
from fake_engine import FakeEngine, app_of
from sdk_clients import gpt

USER = [{"role": "user", "content": "hi"}]
CACHE = {
    "prompt_cache_key": "k",
    "prompt_cache_options": {"mode": "implicit", "ttl": "30m"},
    "prompt_cache_retention": "24h",
    "safety_identifier": "me",
    "service_tier": "flex",
    "user": "u",
}

HARMLESS_IN_CHAT = {
    **CACHE,
    "audio": {"voice": "alloy", "format": "wav"},
    "metadata": {"a": "b"},
    "modalities": ["text"],
    "prediction": {"type": "content", "content": "hello"},
    "store": True,
    "stream_options": {"include_obfuscation": False},
}
"""Of no account: they ask for speed, for storing elsewhere, or for what is so anyway."""

REFUSED_IN_CHAT = {
    "modalities": ["text", "audio"],
    "moderation": {"model": "omni-moderation-latest"},
    "web_search_options": {},
}

HARMLESS_IN_RESPONSES = {
    **CACHE,
    "image": {"context_compression": "auto"},
    "include": ["file_search_call.results", "web_search_call.action.sources"],
    "max_tool_calls": 1,
    "background": False,
    "context_management": [{"type": "compaction", "compact_threshold": 1000}],
    "stream_options": {"include_obfuscation": False},
    "truncation": "auto",
}

REFUSED_IN_RESPONSES = {
    "background": True,
    "conversation": {"id": "conv_1"},
    "moderation": {"model": "omni-moderation-latest"},
    "prompt": {"id": "pmpt_1"},
}


@pytest.mark.parametrize("field", HARMLESS_IN_CHAT)
async def test_harmless_in_chat(field):
    engine = FakeEngine()
    async with gpt(engine) as client:
        await client.chat.completions.create(model="tiny", messages=USER)
        await client.chat.completions.create(model="tiny", messages=USER, **{field: HARMLESS_IN_CHAT[field]})
    plain, given = engine.requests
    assert (given.prompt, given.sampling, given.format) == (plain.prompt, plain.sampling, plain.format)


@pytest.mark.parametrize("field", HARMLESS_IN_RESPONSES)
async def test_harmless_in_responses(field):
    engine = FakeEngine()
    async with gpt(engine) as client:
        await client.responses.create(model="tiny", input="hi")
        await client.responses.create(model="tiny", input="hi", **{field: HARMLESS_IN_RESPONSES[field]})
    plain, given = engine.requests
    assert (given.prompt, given.sampling, given.format) == (plain.prompt, plain.sampling, plain.format)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("field", REFUSED_IN_CHAT)
async def test_refused_in_chat(field, stream):
    async with gpt(FakeEngine()) as client:
        with pytest.raises(openai.BadRequestError) as refused:
            await client.chat.completions.create(
                model="tiny", messages=USER, stream=stream, **{field: REFUSED_IN_CHAT[field]}
            )
    assert refused.value.param == field and refused.value.body["message"].startswith(f"{field}: ")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("field", REFUSED_IN_RESPONSES)
async def test_refused_in_responses(field, stream):
    async with gpt(FakeEngine()) as client:
        with pytest.raises(openai.BadRequestError) as refused:
            await client.responses.create(
                model="tiny", input="hi", stream=stream, **{field: REFUSED_IN_RESPONSES[field]}
            )
    assert refused.value.param == field and refused.value.body["message"].startswith(f"{field}: ")


async def test_a_response_is_one_answer():
    async with gpt(FakeEngine()) as client:
        await client.responses.create(model="tiny", input="hi", extra_body={"n": 1})
        with pytest.raises(openai.BadRequestError) as refused:
            await client.responses.create(model="tiny", input="hi", extra_body={"n": 2})
    assert refused.value.param == "n"


PATHS = ["/v1/chat/completions", "/v1/completions", "/v1/responses"]
PROMPTS = {PATHS[0]: {"messages": USER}, PATHS[1]: {"prompt": "hi"}, PATHS[2]: {"input": "hi"}}


@pytest.mark.parametrize("path", PATHS)
async def test_fields_of_llama_cpp_that_bind_the_answer(path):
    engine = FakeEngine()
    schema = {"type": "object"}
    asked = {"model": "tiny", **PROMPTS[path]}
    async with plain(app_of(engine)) as http:
        for fields, param in (
            ({"grammar": 'root ::= "a"'}, "grammar"),
            ({"json_schema": schema, "guided_regex": "a"}, "guided_regex"),
            ({"json_schema": "x"}, "json_schema"),
        ):
            answer = await http.post(path, json={**asked, **fields})
            assert answer.status_code == 400 and answer.json()["error"]["param"] == param
        for fields in ({"json_schema": schema}, {"grammar": ""}, {"grammar": None, "json_schema": None}):
            assert (await http.post(path, json={**asked, **fields})).status_code == 200
    first, *others = engine.requests
    assert first.format.schema == schema and first.format.param == "json_schema"
    assert [other.format for other in others] == [None, None]
