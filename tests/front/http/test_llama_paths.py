"""llama.cpp's paths without a prefix, and its `/completion` with a body of its own."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from app_client import body, client
from fake_engine import HELLO, USAGE, FakeEngine, app_of

from omlxd.api.openai.llama_completion import parse
from omlxd.chat import Finished, Limited, RawPrompt, TextDelta
from omlxd.errors import InvalidRequest


@pytest.mark.parametrize("path", ["/chat/completions", "/completions"])
async def test_a_path_without_v1_is_the_same(path):
    async with client(app_of(FakeEngine())) as http:
        one, two = [(await http.post(at, json=body(at))).json() for at in (path, f"/v1{path}")]
        assert one["choices"] == two["choices"] and one["object"] == two["object"]
        wrong = await http.post(path, json=body(path, temperature=9))
        assert wrong.status_code == 400 and wrong.json()["error"]["param"] == "temperature"


def sampling(**fields: Any):
    return parse(json.dumps({"prompt": "Once", **fields}).encode()).generate


def test_llama_cpps_names():
    got = sampling(
        n_predict=5.0, repeat_penalty=1.2, repeat_last_n=64, seed=-1, top_k=0, cache_prompt=True, id_slot=2
    ).sampling
    assert (got.max_tokens, got.repetition_penalty, got.repetition_context_size) == (5, 1.2, 64)
    assert got.seed is None and sampling(seed=7).sampling.seed == 7
    for fields in ({}, {"n_predict": -1}, {"n_predict": None}):
        assert sampling(**fields).sampling.max_tokens is None
    assert sampling(n_predict=0).sampling.max_tokens == 0
    assert sampling(repeat_penalty=1.2, repeat_last_n=0).sampling.repetition_penalty is None
    assert sampling(repeat_penalty=1.2, repeat_last_n=-1).sampling.repetition_context_size == 0
    assert sampling(prompt=[1, 2]).prompt == RawPrompt(tokens=(1, 2))
    assert sampling(json_schema={"type": "object"}).format is not None


@pytest.mark.parametrize(
    ("param", "fields"),
    [
        ("n_probs", {"n_probs": 3}),
        ("grammar", {"grammar": "root ::= a"}),
        ("prompt", {"prompt": ["a", "b"]}),
        ("mirostat", {"mirostat": 2}),
    ],
)
def test_what_is_refused(param, fields):
    with pytest.raises(InvalidRequest) as error:
        sampling(**fields)
    assert error.value.param == param


@pytest.mark.parametrize(
    ("finished", "kind", "word"),
    [
        (Finished("stop", USAGE), "eos", ""),
        (Finished("length", USAGE), "limit", ""),
        (Finished("stop_sequence", USAGE, "x"), "word", "x"),
    ],
)
async def test_an_answer_and_its_stream(finished, kind, word):
    script = (TextDelta("Hello"), TextDelta(" there"), finished)
    async with client(app_of(FakeEngine(script))) as http:
        whole = (await http.post("/completion", json={"prompt": "Once", "n_predict": 9})).json()
        streamed = await http.post("/completion", json={"prompt": "Once", "stream": True})
    assert whole["content"] == "Hello there" and whole["stop"] is True
    assert (whole["stop_type"], whole["stopping_word"]) == (kind, word)
    assert (whole["tokens_evaluated"], whole["tokens_predicted"], whole["tokens_cached"]) == (100, 7, 64)
    chunks = [json.loads(line[6:]) for line in streamed.text.strip().split("\n\n")]
    assert "".join(chunk["content"] for chunk in chunks) == "Hello there"
    assert [chunk["stop"] for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert chunks[-1]["stop_type"] == kind


async def test_models_without_v1():
    async with client(app_of(FakeEngine(HELLO))) as http:
        listed, named = await http.get("/models"), await http.get("/models/org/tiny")
        assert listed.json() == (await http.get("/v1/models")).json()
        assert named.json() == (await http.get("/v1/models/org/tiny")).json()


async def test_what_of_a_schema_is_not_enforced_is_told():
    usage = msgspec.structs.replace(USAGE, limited=Limited(("json_schema: /type",)))
    async with client(app_of(FakeEngine((TextDelta("1"), Finished("stop", usage))))) as http:
        whole = (await http.post("/completion", json={"prompt": "Once"})).json()
        streamed = await http.post("/completion", json={"prompt": "Once", "stream": True})
    last = json.loads(streamed.text.strip().rpartition("data: ")[2])
    for answer in (whole, last):
        assert answer["omlxd"]["not_enforced"] == ["json_schema: /type"]


CUT = {
    "/v1/chat/completions": '"finish_reason":"length"',
    "/v1/completions": '"finish_reason":"length"',
    "/v1/messages": '"stop_reason":"max_tokens"',
    "/v1/responses": '"reason":"max_output_tokens"',
    "/api/chat": '"done_reason":"length"',
    "/api/generate": '"done_reason":"length"',
    "/v1beta/models/tiny:generateContent": '"finishReason":"MAX_TOKENS"',
    "/completion": '"stop_type":"limit"',
}


@pytest.mark.parametrize("path", CUT)
async def test_a_loop_that_was_ended_is_told_at_every_door(path: str):
    limited = Limited((), "repetition", "repetition", 7)
    usage = msgspec.structs.replace(USAGE, limited=limited)
    async with client(app_of(FakeEngine((TextDelta("on and on"), Finished("length", usage))))) as http:
        for stream in (False, True):
            more = (
                {"stream": stream, "stream_options": {"include_usage": True}}
                if "v1/" in path
                else {"stream": stream}
            )
            at = path.replace(":g", ":streamG") if stream else path
            text = (await http.post(at, json=body(path, **({} if ":" in path else more)))).text.replace(
                ": ", ":"
            )
            assert CUT[path] in text, text
            assert '"answer_ended":"repetition"' in text and '"repeated_tokens":7' in text, text
