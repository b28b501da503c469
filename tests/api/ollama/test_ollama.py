"""Ollama's API over a scripted engine: bodies in, lines out, and what is refused."""

from __future__ import annotations

import base64
import json
from typing import Any

import msgspec
import pytest
from app_client import client
from fake_engine import EVERYTHING, HELLO, INFO, USAGE, FakeEngine, app_of
from msgspec.structs import replace

from omlxd.api.ollama.request import parse_chat, parse_generate
from omlxd.chat import (
    Conversation,
    Failed,
    Finished,
    ImagePart,
    RawPrompt,
    TextDelta,
    TextPart,
    ThinkingPart,
    TokenLogprob,
    ToolCall,
    ToolCallCut,
    ToolCallPart,
    ToolResultPart,
    Usage,
)
from omlxd.errors import InvalidRequest

PNG = base64.b64encode(b"\x89PNG").decode()
USER = {"role": "user", "content": "hi"}


def parsed(**fields: Any):
    return parse_chat(json.dumps({"model": "tiny", "messages": [USER], **fields}).encode())


def generated(**fields: Any):
    return parse_generate(json.dumps({"model": "tiny", "prompt": "hi", **fields}).encode())


def conversation(request: Any) -> Conversation:
    assert isinstance(request.generate.prompt, Conversation)
    return request.generate.prompt


# --------------------------------------------------------------------------- bodies


def test_messages_hold_texts_thoughts_images_and_calls_with_their_results():
    call = {"function": {"name": "look", "arguments": {"at": 1}}}
    other = {"function": {"name": "read", "arguments": {}}}
    turns = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "see", "images": [PNG]},
        {"role": "assistant", "content": "", "thinking": "hm", "tool_calls": [call, other, call]},
        {"role": "tool", "tool_name": "read", "content": "r"},
        {"role": "tool", "tool_name": "look", "content": "1"},
        {"role": "tool", "content": "2"},
        {"role": "assistant", "tool_calls": [{"id": "own", **call}]},
        {"role": "tool", "tool_call_id": "own", "content": "3"},
    ]
    system, user, calls, *results, own, last = conversation(parsed(messages=turns)).messages
    assert system.parts == (TextPart("s"),)
    assert user.parts == (ImagePart(b"\x89PNG", "image/*", "messages.1.images.0"), TextPart("see"))
    thought, first, second, third = calls.parts
    assert thought == ThinkingPart("hm") and isinstance(first, ToolCallPart) and first.arguments == {"at": 1}
    assert isinstance(second, ToolCallPart) and isinstance(third, ToolCallPart)
    expected = [(second.id, "r"), (first.id, "1"), (third.id, "2")]
    assert [message.parts for message in results] == [(ToolResultPart(id, text),) for id, text in expected]
    assert own.parts == (ToolCallPart("own", "look", {"at": 1}),)
    assert last.parts == (ToolResultPart("own", "3"),)


def test_options_are_sampling():
    options = {
        **{"temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "repeat_penalty": 1.1, "seed": 3},
        **{"presence_penalty": 0.2, "frequency_penalty": 0.3, "num_predict": 9, "stop": ["a", "b"]},
        **{"num_ctx": 4096, "num_gpu": 1, "mirostat": 0, "typical_p": 1.0, "num_keep": 4},
    }
    sampling = parsed(options=options, logprobs=True, top_logprobs=2).generate.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.5, 0.9, 7, 0.1)
    assert (sampling.repetition_penalty, sampling.seed, sampling.max_tokens) == (1.1, 3, 9)
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (0.2, 0.3)
    assert sampling.stop == ("a", "b") and sampling.logprobs == 2
    for limit in (-2, -1, 0):
        assert parsed(options={"num_predict": limit}).generate.sampling.max_tokens is None


def test_format_tools_and_think():
    assert parsed(format="").generate.format is None
    json_format = parsed(format="json").generate.format
    assert json_format is not None and json_format.schema == {"type": "object"}
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    assert parsed(format=schema).generate.format == json_format.__class__(
        "json", schema=schema, param="format"
    )
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
    assert conversation(parsed(tools=[tool])).tools[0].name == "look"
    thinks = [conversation(parsed(think=think)) for think in (True, False, "high", None)]
    assert [prompt.thinking for prompt in thinks] == [True, False, True, None]
    assert thinks[2].effort == "high"


def test_generate_makes_a_conversation_or_a_raw_prompt():
    system, user = conversation(generated(system="s", images=[PNG])).messages
    assert system.role == "system" and user.role == "user"
    assert [type(part) for part in user.parts] == [ImagePart, TextPart]
    assert generated(raw=True).generate.prompt == RawPrompt("hi")
    assert generated().stream and not generated(stream=False).stream


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"options": {"mirostat": 1}}, "options.mirostat"),
        ({"options": {"typical_p": 0.5}}, "options.typical_p"),
        ({"options": {"temperature": "hot"}}, "options.temperature"),
        ({"format": "xml"}, "format"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": "system", "content": "x", "images": [PNG]}]}, "messages.0.images"),
        ({"messages": [{**USER, "images": ["%"]}]}, "messages.0.images.0"),
    ],
)
def test_what_a_chat_refuses(fields: dict[str, Any], param: str):
    with pytest.raises(InvalidRequest) as refused:
        parsed(**fields)
    assert refused.value.param == param


@pytest.mark.parametrize("field", [{"suffix": "x"}, {"template": "{{ .Prompt }}"}, {"context": [1]}])
def test_what_a_generate_refuses(field: dict[str, Any]):
    with pytest.raises(InvalidRequest) as refused:
        generated(**field)
    assert refused.value.param == next(iter(field))
    with pytest.raises(InvalidRequest):
        generated(raw=True, images=[PNG])


# --------------------------------------------------------------------------- answers


async def ask(path: str, script: Any, **fields: Any) -> list[dict[str, Any]]:
    """The lines of an answer."""
    async with client(app_of(FakeEngine(script))) as http:
        prompt = {"prompt": "hi"} if path == "/api/generate" else {"messages": [USER]}
        answer = await http.post(path, json={"model": "tiny", **prompt, **fields})
    assert answer.status_code == 200, answer.text
    kind = "application/json" if fields.get("stream") is False else "application/x-ndjson"
    assert answer.headers["content-type"] == kind
    return [json.loads(line) for line in answer.text.splitlines()]


async def test_a_chat_is_a_line_a_piece_and_collected_the_same():
    *lines, last = await ask("/api/chat", EVERYTHING)
    (whole,) = await ask("/api/chat", EVERYTHING, stream=False)
    assert not any(line["done"] for line in lines) and last["done"] and whole["done"]
    pieces = [line["message"] for line in lines]
    for field in ("content", "thinking"):
        assert "".join(piece.get(field, "") for piece in pieces) == whole["message"][field]
    calls = [call for piece in pieces for call in piece.get("tool_calls", [])]
    assert calls == whole["message"]["tool_calls"]
    assert calls[0]["function"] == {"name": "read", "arguments": {"path": "/tmp/a", "n": 1}}
    for end in (last, whole):
        assert end["model"] == "tiny" and end["done_reason"] == "stop" and end["created_at"].endswith("Z")
        assert (end["prompt_eval_count"], end["eval_count"]) == (USAGE.prompt_tokens, USAGE.completion_tokens)
        assert (
            end["prompt_eval_duration"] == pytest.approx((USAGE.ttft_s - USAGE.queue_s) * 1e9)
            and end["eval_duration"] >= 0
        )
        assert end["total_duration"] == end["prompt_eval_duration"] + end["eval_duration"]


@pytest.mark.parametrize("state", ["unloaded", "loading", "ready"])
@pytest.mark.parametrize("fields", [{"stream": True}, {"stream": False}, {"stream": False, "messages": []}])
async def test_the_seconds_that_a_load_took_are_the_loads(state: str, fields: dict[str, Any]):
    usage = Usage(prompt_tokens=5, queue_s=0.2, ttft_s=0.25, decode_s=0.05)
    engine = FakeEngine((Finished("stop", usage),))
    engine.state = state
    async with client(app_of(engine)) as http:
        answer = await http.post("/api/chat", json={"model": "tiny", "messages": [USER], **fields})
    end = json.loads(answer.text.splitlines()[-1])
    assert end["load_duration"] == (0 if state == "ready" else 0.2e9)
    assert end.get("prompt_eval_duration", 0.05e9) == pytest.approx(0.05e9)
    assert end["total_duration"] == 0.25e9  # No token followed the first.


@pytest.mark.parametrize("stream", [True, False])
async def test_a_call_alone_takes_the_engines_time_too(stream: bool):
    usage = Usage(prompt_tokens=5, completion_tokens=9, ttft_s=0.25, decode_s=0.5)
    *_, end = await ask(
        "/api/chat", (ToolCall("c", "read", "{}"), Finished("tool_calls", usage)), stream=stream
    )
    assert (end["prompt_eval_duration"], end["eval_duration"]) == (0.25e9, 0.5e9)


async def test_generate_answers_with_a_response():
    *lines, last = await ask("/api/generate", HELLO)
    assert "".join(line["response"] for line in lines) == "Hello there" and last["response"] == ""
    (whole,) = await ask("/api/generate", EVERYTHING, stream=False)
    assert (whole["response"], whole["thinking"]) == ("I will look.", "Let me think.")


async def test_logprobs_limits_and_calls_that_are_cut():
    token = TokenLogprob("a", -0.5, (("a", -0.5), ("b", -1.5)))
    script = [
        TextDelta("a", (token,)),
        ToolCallCut("c", "f", '{"x":1,"y', '{"x":1}'),
        Finished("length", USAGE),
    ]
    (whole,) = await ask("/api/chat", script, stream=False, logprobs=True)
    assert whole["done_reason"] == "length"
    assert whole["logprobs"][0]["logprob"] == -0.5 and whole["logprobs"][0]["top_logprobs"][1]["token"] == "b"
    assert whole["message"]["tool_calls"][0]["function"]["arguments"] == {"x": 1}


@pytest.mark.slow
async def test_an_error_is_a_status_before_the_answer_and_a_line_in_it():
    lines = await ask("/api/chat", [TextDelta("a"), 1.2, Failed("unavailable", "gone")])
    assert lines[0]["message"]["content"] == "a" and lines[-1] == {"error": "gone"}
    async with client(app_of(FakeEngine())) as http:
        answer = await http.post("/api/chat", json={"model": "none", "messages": [USER]})
        assert answer.status_code == 404 and "org/tiny" in answer.json()["error"]
        answer = await http.post("/api/nothing", json={})
        assert answer.status_code == 404 and "Ollama" in answer.json()["error"]


async def test_silence_is_an_empty_line():
    script = [0.3, *HELLO]
    async with client(app_of(FakeEngine(script), header_grace_s=0.01, ping_interval_s=0.05)) as http:
        answer = await http.post("/api/chat", json={"model": "tiny", "messages": [USER]})
    first = json.loads(answer.text.splitlines()[0])
    assert first["message"] == {"content": "", "role": "assistant"} and not first["done"]


@pytest.mark.parametrize("path", ["/api/chat", "/api/generate"])
async def test_a_body_without_a_prompt_loads_or_unloads(path: str):
    engine = FakeEngine([Finished("length", USAGE)])
    async with client(app_of(engine)) as http:
        asked = {"model": "tiny", "stream": False}
        answer = (await http.post(path, json=asked | {"keep_alive": "5m"})).json()
        assert answer["done"] and answer["done_reason"] == "load" and engine.keep_alive == 300
        assert engine.requests[0].sampling.max_tokens == 0 and "eval_count" not in answer
        answer = (await http.post(path, json=asked | {"keep_alive": 0})).json()
        assert answer["done_reason"] == "unload" and engine.state == "unloaded" and len(engine.requests) == 1


# --------------------------------------------------------------------------- models


async def test_the_lists_and_what_is_shown():
    loaded, away = FakeEngine(), FakeEngine(model_id="org/second")
    away.state = "unloaded"
    async with client(app_of(loaded, away)) as http:
        first, second = (await http.get("/api/tags")).json()["models"]
        assert first["name"] == first["model"] == "org/tiny:latest" and len(first["digest"]) == 64
        assert first["digest"] != second["digest"] and first["details"]["family"] == "qwen3"
        (running,) = (await http.get("/api/ps")).json()["models"]
        assert running["name"] == "org/tiny:latest" and running["context_length"] == 4096
        assert running["expires_at"] > "2100"
        for asked in ({"model": "org/tiny:latest"}, {"name": "tiny"}):
            shown = (await http.post("/api/show", json=asked)).json()
            assert shown["capabilities"] == ["completion", "tools", "vision", "thinking"]
            arch = shown["model_info"]["general.architecture"]
            assert shown["model_info"][f"{arch}.context_length"] == 4096
        assert (await http.post("/api/show", json={"model": "none"})).status_code == 404
        assert (await http.post("/api/show", json={})).status_code == 400
        version = (await http.get("/api/version")).json()["version"]
        assert [int(part) for part in version.split(".")] > [0, 6, 4]


@pytest.mark.parametrize(
    ("backend", "says", "size"),
    [("cpu", 5000, 5000), ("metal", 5000, 5000), ("cuda", 900, 1000), ("cuda", None, 1000)],
)
async def test_what_runs_shows_the_memory_that_it_takes_and_how_much_is_a_gpus(
    backend: str, says: int | None, size: int
):
    engine = FakeEngine()
    engine.info = replace(INFO, weight_bytes=1000, backend=backend)
    engine.values = None if says is None else {"mlx_active_bytes": says}
    async with client(app_of(engine)) as http:
        (running,) = (await http.get("/api/ps")).json()["models"]
        (listed,) = (await http.get("/api/tags")).json()["models"]
    assert running["size"] == size and running["size_vram"] == (0 if backend == "cpu" else size)
    assert running["digest"] == listed["digest"] and listed["size"] == 1000


async def test_nothing_is_deleted_and_what_is_here_needs_no_download():
    async with client(app_of(FakeEngine())) as http:
        assert (await http.post("/api/pull", json={"model": "tiny"})).text == '{"status":"success"}\n'
        missing = await http.post("/api/pull", json={"model": "absent", "stream": False})
        assert missing.status_code == 400 and "write ORG/NAME" in missing.json()["error"]
        gone = await http.request("DELETE", "/api/delete", json={"model": "tiny"})
        assert gone.status_code == 400 and "remove its folder" in gone.json()["error"]
        for path in ("/api/copy", "/api/push", "/api/create"):
            answer = await http.post(path, json={"model": "tiny"})
            assert answer.status_code == 400 and "omlxd models pull" in answer.json()["error"]


async def test_one_token_has_no_time_of_its_own():
    usage = msgspec.structs.replace(USAGE, completion_tokens=1)
    *_, last = await ask("/api/chat", [TextDelta("a"), Finished("length", usage)])
    assert last["eval_count"] == 1 and last["eval_duration"] == 0
