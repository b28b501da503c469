"""The HTTP app over a scripted engine: routes, streams, disconnects, guards, errors."""

import asyncio
import json
import logging
import threading

import httpx
import pytest
from app_client import PATHS, body, client, message_of
from fake_engine import EVERYTHING, HELLO, USAGE, FakeEngine, FakeEngines, app_of, served

from omlxd.api.fields.body import mended
from omlxd.chat import Failed, Finished, Progress, RawPrompt, TextDelta
from omlxd.errors import NotFound, OmlxdError, Overloaded, PromptTooLong, Unavailable
from omlxd.front import app
from omlxd.front.app import create_app
from omlxd.front.engines.names.names import resolve_name

# --------------------------------------------------------------------------- names


def test_resolve_name():
    known = ["org/tiny", "/models/other", "claude-here"]
    assert resolve_name("org/tiny", known) == "org/tiny"
    assert resolve_name("tiny", known) == "org/tiny"
    assert resolve_name("other", known) == "/models/other"
    assert resolve_name("claude-here", known, "org/tiny") == "claude-here"
    assert resolve_name("claude-opus-5-5", known, "org/tiny") == "org/tiny"
    assert resolve_name("jev-latest", known, "org/tiny") == "org/tiny"
    for name in ("", "  ", "default", "Dummy", "local", "local-model", "default:latest"):
        assert resolve_name(name, known, "org/tiny") == "org/tiny"
        with pytest.raises(NotFound):
            resolve_name(name, [], None)
    for name in ("OTHER", "other:latest", "/Models/Other:latest"):
        assert resolve_name(name, known, "org/tiny") == "/models/other"
    assert resolve_name("Fast:latest", known, None, {"fast": "org/tiny"}) == "org/tiny"
    assert resolve_name("local", known, "org/tiny", {"local": "/models/other"}) == "/models/other"
    for name in ("gpt-4", "gpt-4:latest", "other:8b", "ny", "claude"):
        with pytest.raises(NotFound, match="org/tiny, /models/other, claude-here"):
            resolve_name(name, known, "org/tiny")
    with pytest.raises(NotFound):
        resolve_name("claude-x", [], None)


# --------------------------------------------------------------------------- plain routes


async def test_models_and_health_and_root():
    ready, loading = FakeEngine(), FakeEngine(model_id="/models/second")
    loading.info, loading.state = None, "loading"
    async with client(app_of(ready, loading)) as http:
        listed = (await http.get("/v1/models?limit=1000")).json()
        assert listed["object"] == "list" and listed["has_more"] is False
        first, second = listed["data"]
        assert first["id"] == listed["first_id"] == "org/tiny"
        assert first["object"] == first["type"] == "model" and first["display_name"] == "tiny"
        assert first["omlxd"] == {
            "state": "ready",
            "context_length": 4096,
            "kv_reuse": "",
            "block_size": 64,
            "note": "a test",
            "input_modalities": ["text", "image"],
            "kind": "chat",
        }
        assert second["omlxd"]["state"] == "loading" and second["omlxd"]["context_length"] is None
        assert (await http.get("/v1/models/org/tiny")).json() == first
        assert (await http.get("/v1/models/claude-opus-5-5")).json() == first
        missing = await http.get("/v1/models/gpt-4")
        assert missing.status_code == 404 and "org/tiny" in message_of("/v1/models", missing)
        health = (await http.get("/health")).json()
        assert health["status"] == "ok"
        assert health["models"][1] == {"id": "/models/second", "state": "loading"}
        assert (await http.get("/")).text.startswith("omlxd ")
        assert (await http.head("/")).status_code == 200


async def test_a_large_body_is_parsed_beside_the_event_loop(monkeypatch):
    threads = []

    def seen(data):
        threads.append(threading.current_thread())
        return mended(data)

    monkeypatch.setattr(app, "mended", seen)
    async with client(app_of(FakeEngine(HELLO))) as http:
        for text in ("hi", "hi " * app.LARGE_BODY):
            for path in PATHS:
                more = {"prompt": text} if "completions" in path and "chat" not in path else {}
                more = more or {"messages": [{"role": "user", "content": text}]}
                assert (await http.post(path, json=body(path) | more)).status_code == 200
    main = threading.main_thread()
    assert [thread is main for thread in threads] == [True] * len(PATHS) + [False] * len(PATHS)


async def test_count_tokens():
    engine = FakeEngine(tokens=123)
    async with client(app_of(engine)) as http:
        given = body("/v1/messages", system="s")
        answer = await http.post("/v1/messages/count_tokens?beta=true", json=given)
        assert answer.json() == {"input_tokens": 123}
        await http.post("/v1/messages", json=given)
    assert engine.counted == [engine.requests[0].prompt]


CUT = [
    ("a\\ud83d", "a\ufffd"),
    ("\\ude00b", "\ufffdb"),
    ("\\uD83D\\uDE00", "\U0001f600"),
    ("\\ud83d\\ud83d\\ude00\\ude00", "\ufffd\U0001f600\ufffd"),
    ("\\\\ud83d", "\\ud83d"),
    ("\\\\\\ud83d", "\\\ufffd"),
]


@pytest.mark.parametrize("path", [*PATHS, "/v1/responses"])
@pytest.mark.parametrize(("cut", "text"), CUT)
async def test_half_a_surrogate_pair_and_a_byte_order_mark_end_no_session(path, cut, text):
    given = {"model": "tiny", "input": "hi"} if path == "/v1/responses" else body(path)
    said = json.dumps(given).replace('"hi"', '"HERE"')
    async with client(app_of(engine := FakeEngine())) as http:
        content = b"\xef\xbb\xbf" + said.replace("HERE", cut).encode()
        answer = await http.post(path, content=content, headers={"content-type": "application/json"})
        assert answer.status_code == 200, answer.text
    prompt = engine.requests[0].prompt
    assert text == (prompt.text if isinstance(prompt, RawPrompt) else prompt.messages[-1].parts[0].text)


@pytest.mark.parametrize("path", ["/v1/messages/nothing", "/v1/nothing", "/nothing"])
async def test_no_such_path(path):
    async with client(app_of(FakeEngine())) as http:
        answer = await http.get(path)
        assert answer.status_code == 404
        assert message_of(path, answer).startswith(f"GET {path}: there is no such path; this server speaks")
        assert answer.json()["error"].get("code") is None  # "model_not_found" would mislead.


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("/v1/chat/completions/", "but /v1/chat/completions;"),
        ("//v1/chat/completions", "but /v1/chat/completions;"),
        ("/v1/v1/messages", "but /v1/messages; the base URL of an OpenAI client ends in /v1"),
        ("/openai/v1/chat/completions", "but /v1/chat/completions;"),
        ("/v1/responses/resp_1/cancel", "Anthropic's (/v1/messages), Ollama's (/api/chat), Gemini's"),
        ("/slots", "LM Studio's (/api/v1/chat), and of llama.cpp (/models, /props) what lists"),
        ("/api/v0/models/tiny", "GET /openapi.json describes every path"),
        ("/v1/audio/transcriptions", "audio is neither transcribed, translated nor spoken here"),
        ("/v1/audio/speech", "no model of sound is served"),
        ("/v1/images/generations", "no images are made here"),
        ("/v1beta/files", "this server speaks OpenAI's API"),
        ("/openai/deployments/x/chat/completions", "this server speaks OpenAI's API"),
        ("/chat", "GET /v1/models lists its models"),
    ],
)
async def test_a_path_that_nearly_is_one_or_is_elsewhere(path, words):
    async with client(app_of(FakeEngine())) as http:
        answer = await http.post(http.base_url.copy_with(raw_path=path.encode()), json={})
        assert answer.status_code == 404
        assert words in answer.json()["error"]["message"]


async def test_a_responses_prompt_is_counted_as_it_would_be_served():
    engine = FakeEngine(tokens=321)
    async with client(app_of(engine)) as http:
        given = {"model": "tiny", "input": "hi", "instructions": "s"}
        answer = await http.post("/v1/responses/input_tokens", json=given)
        assert answer.json() == {"object": "response.input_tokens", "input_tokens": 321}
        await http.post("/v1/responses", json=given)
    assert engine.counted == [engine.requests[0].prompt]


async def test_the_list_of_models_with_a_slash():
    async with client(app_of(FakeEngine())) as http:
        assert (await http.get("/v1/models/")).json() == (await http.get("/v1/models")).json()


async def test_a_packed_body_is_told_to_be_unpacked():
    async with client(app_of(FakeEngine())) as http:
        packed = {"content-encoding": "gzip"}
        answer = await http.post("/v1/messages", content=b"\x1f\x8b", headers=packed)
        assert answer.status_code == 415
        assert "send the body as it is" in message_of("/v1/messages", answer)
        plain = {"content-encoding": "identity"}
        assert (await http.post("/v1/messages", json=body("/v1/messages"), headers=plain)).status_code == 200


async def test_a_method_of_any_length_is_told_and_logged_short(caplog):
    caplog.set_level("INFO", "omlxd.access")
    async with client(app_of(FakeEngine())) as http:
        answer = await http.request("X" * 5000, "/v1/models")
        assert answer.status_code == 405 and len(answer.text) < 300
    assert "X" * 20 in caplog.text and "X" * 21 not in caplog.text


@pytest.mark.parametrize("path", [*PATHS, "/v1/messages/count_tokens"])
async def test_wrong_method(path):
    async with client(app_of(FakeEngine())) as http:
        answer = await http.get(path)
        assert answer.status_code == 405 and answer.headers["allow"] == "POST"
        assert "POST" in message_of(path, answer)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("stream", [False, True])
async def test_bad_requests(path, stream):
    async with client(app_of(FakeEngine())) as http:
        for status, given in [
            (400, body(path, temperature=-1, stream=stream)),
            (404, body(path, model="gpt-4", stream=stream)),
        ]:
            answer = await http.post(path, json=given)
            assert answer.status_code == status
            assert message_of(path, answer)
        answer = await http.post(path, content=b"{oops")
        assert answer.status_code == 400 and "JSON" in message_of(path, answer)


@pytest.mark.parametrize("path", [*PATHS, "/v1/responses"])
async def test_a_request_without_a_model_goes_to_the_default_one_and_the_answer_names_it(path, caplog):
    caplog.set_level("INFO", "omlxd.access")
    given = {"input": "hi"} if path == "/v1/responses" else body(path)
    given.pop("model", None)
    async with client(app_of(FakeEngine(), FakeEngine(model_id="org/other"))) as http:
        answer = await http.post(path, json=given)
        assert answer.status_code == 200 and answer.json()["model"] == "org/tiny"
        assert (await http.post(path, json={**given, "model": None})).json()["model"] == "org/tiny"
        assert (await http.post(path, json={**given, "model": "local"})).json()["model"] == "local"
    assert "model=org/tiny status=200" in caplog.text


# --------------------------------------------------------------------------- generating


@pytest.mark.parametrize("path", PATHS)
async def test_whole_answers_carry_usage(path):
    async with client(app_of(FakeEngine(EVERYTHING))) as http:
        answer = await http.post(path, json=body(path))
    usage = answer.json()["usage"]
    if path == "/v1/messages":
        total = sum(usage[k + "input_tokens"] for k in ("", "cache_read_", "cache_creation_"))
        assert total == USAGE.prompt_tokens and usage["cache_read_input_tokens"] == 64
    else:
        assert usage["prompt_tokens"] == 100 and usage["prompt_tokens_details"] == {"cached_tokens": 64}
    expected = {"cached_hot": 48, "cached_cold": 16, "computed": 36, "ttft_s": 0.25}
    assert expected.items() <= usage["omlxd"].items()


async def next_event(lines) -> str:
    """The next event of a stream of lines: its `event:` name, or its data."""
    name = None
    async for line in lines:
        if line.startswith("event: "):
            name = line[7:]
        elif line.startswith("data: "):
            return name or line[6:]
    return ""


@pytest.mark.parametrize("path", PATHS)
async def test_a_stream_starts_before_the_engine_speaks_and_pings(path):
    engine = FakeEngine([300.0, *HELLO])
    async with (
        served(app_of(engine, ping_interval_s=0.05)) as url,
        httpx.AsyncClient(base_url=url) as http,
    ):
        clock = asyncio.get_running_loop().time
        start = clock()
        async with http.stream("POST", path, json=body(path, stream=True)) as answer:
            assert answer.status_code == 200
            assert answer.headers["content-type"].startswith("text/event-stream")
            lines = answer.aiter_lines()
            first = await next_event(lines)
            assert first == "ping" if path == "/v1/messages" else json.loads(first)["choices"]
            for _ in range(3):
                ping = await next_event(lines)
                assert ping == "ping" if path == "/v1/messages" else json.loads(ping)["choices"][0]
            assert clock() - start < 200.0, "what came waited for the engine"
        await asyncio.wait_for(engine.closed.wait(), 60)


@pytest.mark.slow
async def test_a_messages_stream_is_pinged_before_it_starts_and_starts_with_the_prompts_tokens():
    engine = FakeEngine([2.0, Progress(64, 100), *HELLO])
    async with client(app_of(engine)) as http:
        text = (await http.post("/v1/messages", json=body("/v1/messages", stream=True))).text
    before, after = text.split("event: message_start\n")
    assert before.startswith("event: ping"), "silent for longer than a second"
    usage = json.loads(after.split("\n")[0].removeprefix("data: "))["message"]["usage"]
    assert (usage["input_tokens"], usage["cache_read_input_tokens"]) == (36, 64)


@pytest.mark.slow
async def test_progress_does_not_put_pings_off_and_silence_mid_stream_is_pinged():
    script = [*[step for n in range(80) for step in (Progress(n, 80), 0.01)], TextDelta("a"), 1.0, *HELLO]
    async with client(app_of(FakeEngine(script), ping_interval_s=0.04, header_grace_s=0.001)) as http:
        text = (await http.post("/v1/messages", json=body("/v1/messages", stream=True))).text
    before, after = text.split('"text_delta","text":"a"')
    assert before.count("event: ping") >= 3
    assert after.count("event: ping") >= 2
    assert text.endswith('event: message_stop\ndata: {"type":"message_stop"}\n\n')


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_disconnect_closes_the_request_at_once(path, stream):
    engine = FakeEngine([TextDelta("x"), 300.0, *HELLO])
    async with served(app_of(engine)) as url, httpx.AsyncClient(base_url=url) as http:
        given = body(path, stream=stream)
        if stream:
            async with http.stream("POST", path, json=given) as answer:
                await next_event(answer.aiter_lines())
        else:
            asking = asyncio.create_task(http.post(path, json=given))
            while not engine.requests:
                await asyncio.sleep(0.01)
            asking.cancel()
        await asyncio.wait_for(engine.closed.wait(), 60)
    assert engine.finished == 0


async def test_a_client_gone_before_the_first_event_still_closes_the_request():
    """`http.disconnect` waits in the queue already when the answer begins."""
    engine = FakeEngine([300.0])
    closed = asyncio.Event()

    class Stream:
        def __aiter__(self):
            return self

        async def __anext__(self):
            await asyncio.sleep(300)

        async def aclose(self):
            closed.set()

    engine.generate = lambda request: Stream()  # type: ignore[method-assign,assignment,return-value]
    raw = json.dumps(body("/v1/messages", stream=True)).encode()
    queue = [{"type": "http.request", "body": raw}, {"type": "http.disconnect"}]
    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/messages",
        "query_string": b"",
        "headers": [(b"host", b"localhost")],
    }

    async def receive():
        return queue.pop(0)

    async def send(message):
        pass

    await asyncio.wait_for(app_of(engine)(scope, receive, send), 60)
    assert closed.is_set()


FAILURES = [
    (PromptTooLong(5000, 4096), 400, "5000 tokens"),
    (Overloaded("busy", retry_after=5), 503, "busy"),
    (Unavailable("gone", retry_after=2), 503, "gone"),
    (RuntimeError("secret inside"), 500, None),
]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("error", "status", "text"), FAILURES)
@pytest.mark.parametrize("as_event", [False, True])
async def test_failures_before_the_first_event(path, stream, error, status, text, as_event):
    if as_event and isinstance(error, OmlxdError):
        script = [Progress(0, 9), error.as_event()]
    else:
        script = [0.01, error]
    async with client(app_of(FakeEngine(script), header_grace_s=60.0)) as http:
        answer = await http.post(path, json=body(path, stream=stream))
    if path == "/v1/messages" and isinstance(error, Overloaded):
        status = 529
    assert answer.status_code == status
    message = message_of(path, answer)
    assert text in message if text else "secret" not in message
    if isinstance(error, PromptTooLong):
        # What Claude Code parses; what LiteLLM and LangChain look for.
        expected = "prompt is too long: 5000 tokens > 4096 maximum"
        if path != "/v1/messages":
            expected = "This model's maximum context length is 4097 tokens. However, your "
        assert message.startswith(expected)
        assert ("messages resulted in 5000 tokens" in message) == (path == "/v1/chat/completions")
        assert message.count("too long") == 1
        assert "prompt is too long" in message
        assert ("exceeds the context window" in message) == (path != "/v1/messages")
    if status in (503, 529):
        assert answer.headers["retry-after"] == str(error.retry_after)


@pytest.mark.parametrize("path", PATHS)
async def test_failures_after_the_first_event(path):
    script = [TextDelta("some"), 0.05, Failed("unavailable", "the engine died", 2)]
    async with client(app_of(FakeEngine(script))) as http:
        answer = await http.post(path, json=body(path, stream=True))
    assert answer.status_code == 200
    last = answer.text.rstrip("\n").split("\n\n")[-1]
    assert "the engine died" in last and "[DONE]" not in answer.text
    assert last.startswith("event: error\n" if path == "/v1/messages" else 'data: {"error"')


async def test_an_engine_that_stops_without_an_end():
    async with client(app_of(FakeEngine([TextDelta("x")]))) as http:
        answer = await http.post("/v1/messages", json=body("/v1/messages"))
        assert answer.status_code == 503
        streamed = await http.post("/v1/messages", json=body("/v1/messages", stream=True))
        assert streamed.status_code == 503


async def test_a_bug_is_a_500_with_no_traceback(caplog):
    class Broken(FakeEngines):
        async def find_engine(self, model_name):
            raise ZeroDivisionError("inner secret")

    async with client(create_app(Broken())) as http:
        answer = await http.post("/v1/messages", json=body("/v1/messages"))
    assert answer.status_code == 500
    message = message_of("/v1/messages", answer)
    assert answer.headers["request-id"] in message and "secret" not in message
    assert "inner secret" in caplog.text and answer.headers["request-id"] in caplog.text


# --------------------------------------------------------------------------- the rest


@pytest.mark.parametrize("stream", [True, False])
async def test_access_log_counts_the_pieces_of_an_answer_that_broke_off(stream: bool, caplog):
    caplog.set_level(logging.INFO, "omlxd.access")
    died = Failed("unavailable", "The engine died.")
    script = (Progress(64, 100), 0.1, TextDelta("a"), TextDelta("b"), 0.3, TextDelta("c"), died)
    async with client(app_of(FakeEngine(script))) as http:
        await http.post(PATHS[0], json=body(PATHS[0], stream=stream))
    line = caplog.records[-1].fields
    assert (line.outcome, line.prompt_tokens, line.cached_tokens) == ("unavailable", 100, 64)
    assert line.completion_tokens == 3
    assert 0.09 < line.ttft_s < line.duration_s - 0.25 and line.decode_s > 0.25
    assert line.tokens_per_s == pytest.approx(2 / line.decode_s, rel=0.1)


async def test_access_log_tells_counts_and_no_text(caplog):
    caplog.set_level(logging.INFO, "omlxd.access")
    secret = "the prompt itself"
    async with client(app_of(FakeEngine())) as http:
        given = body("/v1/messages", messages=[{"role": "user", "content": secret}], stream=True)
        answer = await http.post("/v1/messages", json=given)
        await http.post("/v1/messages", json=body("/v1/messages", model="a\nb"))
        await http.get("/health")
    first, second = [record.getMessage() for record in caplog.records if record.name == "omlxd.access"]
    assert answer.headers["request-id"] in first
    for part in (
        "/v1/messages",
        "model=tiny",
        "status=200",
        "outcome=ok",
        "prompt=100",
        "cached=64",
        "completion=7",
        "guesses=0/0",
    ):
        assert part in first
    assert secret not in first and "ttft=0.250s" in first
    assert "model=a\\nb" in second and "status=404" in second and "outcome=not_found" in second


@pytest.mark.parametrize("path", PATHS)
async def test_access_log_tells_fields_that_nobody_reads(path, caplog):
    caplog.set_level(logging.INFO, "omlxd.access")
    async with client(app_of(FakeEngine())) as http:
        await http.post(path, json=body(path))
        await http.post(path, json=body(path, temprature=0.5, **{"a\nb": 1}))
    plain, mistyped = [record for record in caplog.records if record.name == "omlxd.access"]
    assert plain.fields.ignored == [] and "ignored" not in plain.getMessage()
    assert mistyped.fields.ignored == ["temprature", "a\\nb"]
    assert " ignored=temprature,a\\nb" in mistyped.getMessage()


async def test_what_its_log_says_of_a_request_can_be_looked_up_in_the_engines(caplog):
    caplog.set_level(logging.INFO, "omlxd.access")
    engine = FakeEngine()
    async with client(app_of(engine)) as http:
        for path in PATHS:
            await http.post(path, json=body(path))
        await http.post("/v1/chat/completions", json=body("/v1/chat/completions", n=2))
    names = [record.getMessage().split()[0] for record in caplog.records]
    assert engine.names == [*names, names[-1]] and len({*names}) == 4


async def test_the_access_log_counts_no_prompt_that_nobody_counted(caplog):
    caplog.set_level(logging.INFO, "omlxd.access")
    script = ([300.0], [Progress(64, 100), TextDelta("x"), 300.0])
    for engine in map(FakeEngine, script):
        async with served(app_of(engine)) as url, httpx.AsyncClient(base_url=url) as http:
            asking = asyncio.create_task(http.post("/v1/messages", json=body("/v1/messages")))
            while not engine.requests:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.1)
            asking.cancel()
            await asyncio.wait_for(engine.closed.wait(), 60)
    lines = [
        record.getMessage() for record in caplog.records if "outcome=disconnected" in record.getMessage()
    ]
    assert [line.split(" completion=")[0].split(" prompt=")[1] for line in lines] == [
        "- cached=- computed=0",
        "100 cached=64 computed=36",
    ]
    assert all(" guesses=- " in line and " peak=- " in line for line in lines)


@pytest.mark.parametrize("sends", [0, 1, 2, 3])
async def test_the_access_log_tells_what_was_spent_on_a_request_whose_client_left(sends: int, caplog):
    caplog.set_level(logging.INFO, "omlxd.access")
    steps = (0.05, Progress(64, 1000)), (0.1, Progress(448, 1000, 0.01, 0.1)), (0.05, TextDelta("x"))
    script = [step for pair in steps[:sends] for step in pair]
    engine = FakeEngine([*script, 300.0])
    async with served(app_of(engine)) as url, httpx.AsyncClient(base_url=url) as http:
        asking = asyncio.create_task(http.post(PATHS[0], json=body(PATHS[0])))
        while not engine.requests:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.8)
        asking.cancel()
        await asyncio.wait_for(engine.closed.wait(), 60)
    (line,) = (vars(record)["fields"] for record in caplog.records)
    assert line.outcome == "disconnected" and line.computed_tokens == (0, 0, 384, 936)[sends]
    spent_s = line.queue_s + line.restore_s + line.prefill_s + line.decode_s
    assert spent_s == pytest.approx(line.duration_s, abs=0.05) and spent_s >= 0.8
    assert line.queue_s >= 0.03 and (line.prefill_s >= 0.1) == (sends > 0)
    assert (line.decode_s > 0) == (line.ttft_s > 0) == (sends == 3)
    assert line.restore_s == (0.01 if sends > 1 else 0)


async def test_many_requests_at_once():
    engine = FakeEngine([0.02, *EVERYTHING])
    async with served(app_of(engine)) as url, httpx.AsyncClient(base_url=url) as http:
        answers = await asyncio.gather(
            *(http.post(path, json=body(path, stream=i % 2 == 0)) for path in PATHS for i in range(10))
        )
    assert {answer.status_code for answer in answers} == {200}
    assert engine.finished == len(answers) == 30


async def test_finished_is_enough():
    async with client(app_of(FakeEngine([Finished("stop", USAGE)]))) as http:
        for path in PATHS:
            for stream in (True, False):
                assert (await http.post(path, json=body(path, stream=stream))).status_code == 200
