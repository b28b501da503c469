"""A real daemon over the demo model: the official clients, many requests at once, clients that go away."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import socket
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import anthropic
import openai
import psutil
import pytest
from daemon import BLOCK, Daemon, body, family_model, own_usage, prose, wait_until
from dying import Dying

USER: Any = [{"role": "user", "content": "Tell me of kettles and saucers."}]


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with Daemon(tmp_path_factory.mktemp("serving")) as daemon:
        yield daemon


@pytest.fixture(scope="module")
def one_slot(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """One request at a time, of a model that never ends its turn by itself."""
    home = tmp_path_factory.mktemp("one")
    with Daemon(home, "--max-concurrent-requests", "1", model=family_model("qwen3")) as daemon:
        yield daemon


@pytest.fixture
def gpt(serving: Daemon) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=serving.url + "/v1", api_key="k", max_retries=0, timeout=300) as client:
        yield client


@pytest.fixture
def claude(serving: Daemon) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=serving.url, api_key="k", max_retries=0, timeout=300) as client:
        yield client


# --------------------------------------------------------------------------- the official clients


def test_anthropic_streamed_and_not(claude: anthropic.Anthropic):
    request: Any = {"model": "claude-opus-5-5", "max_tokens": 400, "messages": USER}
    request["extra_body"] = {"temperature": 0}
    whole = claude.messages.create(**request)
    with claude.messages.stream(**request) as stream:
        start = next(event for event in stream if event.type == "message_start").message.usage
        kinds = [event.type for event in stream]
        streamed = stream.get_final_message()
    assert start.input_tokens == streamed.usage.input_tokens > 0
    assert start.cache_read_input_tokens == streamed.usage.cache_read_input_tokens
    assert [block.model_dump() for block in streamed.content] == [b.model_dump() for b in whole.content]
    assert [block.type for block in whole.content] == ["thinking", "text"]
    assert streamed.stop_reason == whole.stop_reason == "end_turn"
    assert streamed.usage.output_tokens == whole.usage.output_tokens > 40
    assert kinds[-1] == "message_stop"
    counted = claude.messages.count_tokens(model="claude-opus-5-5", messages=USER)
    assert counted.input_tokens == whole.usage.input_tokens + (whole.usage.cache_read_input_tokens or 0)


def test_a_prompt_is_computed_before_it_is_asked(claude: anthropic.Anthropic):
    """As the SDK says of `max_tokens`: with 0 the cache is filled, and nothing is said."""
    said: Any = [{"role": "user", "content": prose(80, 300)}]
    request: Any = {"model": "claude-opus-5-5", "messages": said}
    warm = claude.messages.create(max_tokens=0, **request)
    assert (warm.content, warm.stop_reason, warm.usage.output_tokens) == ([], "max_tokens", 0)
    assert warm.usage.input_tokens > 2 * BLOCK and not warm.usage.cache_read_input_tokens
    answer = claude.messages.create(max_tokens=1, **request)
    assert answer.usage.input_tokens <= BLOCK < (answer.usage.cache_read_input_tokens or 0)
    with claude.messages.stream(max_tokens=0, **request) as stream:
        assert "content_block_start" not in [event.type for event in stream]
        assert stream.get_final_message().usage.output_tokens == 0


def test_the_tool_runner_keeps_its_conversation_in_a_thread(claude: anthropic.Anthropic):
    """It asks for a thread by itself."""

    @anthropic.beta_tool
    def look(path: str) -> str:
        """Look at a file.

        Args:
            path: where it lies
        """
        return f"nothing at {path}"

    runner = claude.beta.messages.tool_runner(
        model="claude-opus-5-5", max_tokens=400, messages=USER, tools=[look], max_iterations=1
    )
    assert runner.until_done().stop_reason in ("end_turn", "tool_use")


def test_a_thread_computes_nothing_twice(claude: anthropic.Anthropic):
    thread = claude.beta.messages.thread(model="claude-opus-5-5", max_tokens=60, system=prose(81, 300))
    thread.send(*USER)
    first = thread.previous_message_id
    answer = thread.send({"role": "user", "content": "And of spoons?"})
    assert thread.previous_message_id == answer.id != first
    assert answer.usage.input_tokens <= BLOCK + 40 < (answer.usage.cache_read_input_tokens or 0)


def test_openai_chat_streamed_and_not(gpt: openai.OpenAI):
    request: Any = {"model": "omlxd-demo", "max_tokens": 400, "messages": USER, "temperature": 0}
    whole = gpt.chat.completions.create(**request)
    chunks = list(gpt.chat.completions.create(**request, stream=True, stream_options={"include_usage": True}))
    deltas: Any = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    message: Any = whole.choices[0].message
    assert "".join(delta.content or "" for delta in deltas) == message.content
    reasoning = "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas)
    assert reasoning == message.reasoning_content and reasoning
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == whole.choices[0].finish_reason
    assert chunks[-1].usage and whole.usage
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_openai_completions_streamed_and_not(gpt: openai.OpenAI):
    request: Any = {"model": "omlxd-demo", "max_tokens": 60, "prompt": "Once upon", "temperature": 0}
    whole = gpt.completions.create(**request).choices[0]
    pieces: Any = list(gpt.completions.create(**request, stream=True))
    assert "".join(piece.choices[0].text for piece in pieces if piece.choices) == whole.text != ""


def test_names(claude: anthropic.Anthropic, gpt: openai.OpenAI):
    assert "omlxd-demo" in [model.id for model in gpt.models.list()]
    assert "omlxd-demo" in [model.id for model in claude.models.list()]
    request: Any = {"max_tokens": 2, "messages": USER}
    assert claude.messages.create(model="claude-haiku-5-5", **request).model == "claude-haiku-5-5"
    with pytest.raises(anthropic.NotFoundError, match="omlxd-demo"):
        claude.messages.create(model="gpt-4", **request)
    with pytest.raises(openai.NotFoundError, match="omlxd-demo"):
        gpt.chat.completions.create(model="llama", **request)


def test_26_counts_at_once(serving: Daemon):
    """As Claude Code sends them, one a tool."""
    request = body(serving.model, prose(300))

    def count(_: int) -> int:
        return serving.post("/v1/messages/count_tokens", request).json()["input_tokens"]

    with ThreadPoolExecutor(26) as pool:
        began = time.monotonic()
        counted = list(pool.map(count, range(26)))
        print(f"26 counts in {time.monotonic() - began:.3f} s")
    assert len(set(counted)) == 1 and counted[0] > 50


def test_what_is_counted_of_documents_and_tools_is_what_is_computed(serving: Daemon):
    """To the token; and where `cache_control` stands is no part of it."""
    paper = {"type": "document", "title": "Kettles", "context": "1931"}
    paper["source"] = {"type": "text", "media_type": "text/plain", "data": prose(150)}
    found = {"type": "search_result", "source": "https://a.example", "title": "Saucers"}
    found["content"] = [{"type": "text", "text": prose(60, seed=1)}]
    result = {"type": "tool_result", "tool_use_id": "t", "content": [paper, found]}
    turns = [
        {"role": "user", "content": [paper, found, {"type": "text", "text": "Which?"}]},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "bash", "input": {}}]},
        {"role": "user", "content": [result]},
    ]
    marked = json.loads(json.dumps(turns))
    for block in (*marked[0]["content"], *marked[2]["content"], *marked[2]["content"][0]["content"]):
        block["cache_control"] = {"type": "ephemeral"}
    tools = [{"type": "bash_20250124", "name": "bash"}]
    for at, messages in enumerate((turns, marked)):
        asked = {"model": serving.model, "max_tokens": 4, "messages": messages, "tools": tools}
        counted = serving.post("/v1/messages/count_tokens", asked).json()["input_tokens"]
        answer = serving.post("/v1/messages", asked)
        assert answer.status_code == 200, answer.text
        usage = answer.json()["usage"]
        assert counted == usage["input_tokens"] + usage["cache_read_input_tokens"] > 300
        if at:
            assert usage["input_tokens"] <= BLOCK


# --------------------------------------------------------------------------- sampling


def test_seeds(serving: Daemon):
    def ask(seed: int) -> str:
        request = body(serving.model, *USER, max_tokens=60, seed=seed) | {"temperature": 1.0}
        answer = serving.post("/v1/chat/completions", request).json()
        message = answer["choices"][0]["message"]
        return f"{message.get('reasoning_content')} / {message['content']}"

    alone = [ask(7), ask(7), ask(8)]
    with ThreadPoolExecutor(6) as pool:
        together = list(pool.map(ask, [7, 9, 8, 10, 7, 11]))
    assert alone[0] == alone[1] == together[0] == together[4]
    assert alone[2] == together[2] and len({alone[0], *together}) == 5


def test_choices_are_as_each_would_be_alone(serving: Daemon):
    def ask(**more: Any) -> Any:
        request = body(serving.model, "Tell me of " + prose(300), max_tokens=30, **more)
        return serving.post("/v1/chat/completions", request | {"temperature": 1.0}).json()

    alone = [ask(seed=seed)["choices"][0]["message"] for seed in (7, 8, 9)]
    answer = ask(seed=7, n=3)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert [choice["message"] for choice in answer["choices"]] == alone
    assert answer["usage"]["completion_tokens"] == 90


def test_an_answer_held_to_a_schema(gpt: openai.OpenAI, claude: anthropic.Anthropic):
    schema: Any = {
        "type": "object",
        "properties": {"colour": {"enum": ["red", "blue"]}, "many": {"type": "boolean"}},
        "required": ["colour", "many"],
        "additionalProperties": False,
    }
    named: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    thoughtless: Any = {"enable_thinking": False}
    told = gpt.chat.completions.create(
        model="claude-x",
        messages=USER,
        response_format=named,
        extra_body=thoughtless,
        max_tokens=200,
        temperature=0,
    )
    assert set(json.loads(told.choices[0].message.content or "")) == {"colour", "many"}
    message = claude.messages.create(
        model="claude-x",
        max_tokens=200,
        messages=USER,
        thinking={"type": "disabled"},
        extra_body={"temperature": 0},
        output_config={"format": {"type": "json_schema", "schema": schema}},
    )
    (text,) = message.content
    assert text.type == "text" and json.loads(text.text)["colour"] in ("red", "blue")
    tool: Any = {"name": "paint", "input_schema": schema}
    message = claude.messages.create(
        model="claude-x",
        max_tokens=300,
        messages=USER,
        thinking={"type": "disabled"},
        extra_body={"temperature": 0},
        tools=[tool],
        tool_choice={"type": "tool", "name": "paint", "disable_parallel_tool_use": True},
    )
    (call,) = message.content
    assert call.type == "tool_use" and set(call.input) == {"colour", "many"}
    with pytest.raises(openai.BadRequestError, match="uniqueItems"):
        odd: Any = {
            "type": "json_schema",
            "json_schema": {"name": "x", "schema": {"uniqueItems": True}, "strict": True},
        }
        gpt.chat.completions.create(model="claude-x", messages=USER, response_format=odd)


def test_max_tokens(serving: Daemon):
    answer = serving.chat(*USER, max_tokens=11)
    assert answer["usage"]["completion_tokens"] == 11
    assert answer["choices"][0]["finish_reason"] == "length"
    answer = serving.messages(*USER, max_tokens=11)
    assert answer["usage"]["output_tokens"] == 11 and answer["stop_reason"] == "max_tokens"


def test_stop_strings(serving: Daemon):
    text = serving.chat(*USER, max_tokens=400)["choices"][0]["message"]["content"]
    # From the middle of a word to the middle of another: no token begins or ends with it.
    stop = next(text[i : i + 7] for i in range(60, 200) if text.count(text[i : i + 7]) == 1)
    before = text[: text.index(stop)]
    answer = serving.chat(*USER, max_tokens=400, stop=["never to be seen", stop])
    assert answer["choices"][0]["message"]["content"] == before
    assert answer["choices"][0]["finish_reason"] == "stop"
    answer = serving.messages(*USER, max_tokens=400, stop_sequences=[stop])
    assert answer["content"][-1]["text"] == before
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", stop)


def test_thinking_is_switched_off(serving: Daemon):
    answer = serving.messages(*USER, max_tokens=20, thinking={"type": "disabled"})
    assert [part["type"] for part in answer["content"]] == ["text"]


def test_a_budget_of_thinking_at_every_door(serving: Daemon):
    """Streamed and not: the model is cut at three tokens, and answers."""
    talk, own = {"messages": USER}, {"model": "default", "max_tokens": 40}
    think = {"thinking": {"type": "enabled", "budget_tokens": 3}}
    contents = [{"parts": [{"text": USER[0]["content"]}]}]
    config = {"maxOutputTokens": 40, "thinkingConfig": {"thinkingBudget": 3, "includeThoughts": True}}
    told, ollama = {"include_usage": True}, ("/api/chat", "/api/generate")
    doors: list[tuple[str, dict[str, Any], str]] = [
        (
            "/v1/chat/completions",
            talk | own | {"thinking_budget": 3, "stream_options": told},
            "reasoning_tokens",
        ),
        ("/v1/messages", talk | own | think, "thinking_tokens"),
        (
            "/v1/responses",
            {"input": "x", "max_output_tokens": 40, "reasoning": {"max_tokens": 3}},
            "reasoning_tokens",
        ),
        (
            "/api/v1/chat",
            {"input": "x", "max_output_tokens": 40, "max_reasoning_tokens": 3},
            "reasoning_output_tokens",
        ),
        ("/api/chat", talk | {"model": "default", "think": True, "thinking_budget": 3}, ""),
        ("/api/generate", {"model": "default", "prompt": "x", "thinking_token_budget": 3}, ""),
        (
            "/v1beta/models/gemini-x:generateContent",
            {"contents": contents, "generationConfig": config},
            "thoughtsTokenCount",
        ),
    ]
    for path, content, counted in doors:
        for stream in (False, True):
            asked = content | ({} if ":" in path else {"stream": stream})
            at = path.replace(":g", ":streamG") + "?alt=sse" if stream and ":" in path else path
            text = serving.post(at, asked | ({"options": {"num_predict": 40}} if path in ollama else {})).text
            assert '"reasoning_ended":"budget"' in text, (at, text)
            assert not counted or f'"{counted}":3' in text, (at, text)
    answer = serving.chat(*USER, max_tokens=40, thinking_budget=3)["choices"][0]["message"]
    assert answer["content"] and answer["reasoning_content"]
    hidden = serving.chat(*USER, max_tokens=40, thinking_budget=3, include_reasoning=False)
    assert "reasoning_content" not in hidden["choices"][0]["message"]
    assert hidden["choices"][0]["message"]["content"] == answer["content"]


# --------------------------------------------------------------------------- many at once


@pytest.fixture(scope="module")
def standing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Dying]:
    """A daemon whose engine can be made to stand still in the middle of a prompt, and to go on."""
    made = Dying(tmp_path_factory.mktemp("standing") / "home")
    with made.daemon:
        yield made


@pytest.mark.slow
def test_others_decode_while_a_long_prompt_prefills(standing: Dying):
    """However long: where clients come late on a busy machine, a longer one is still at it."""
    for words in (2400, 4000, 6000):
        events = company(standing, prose(words, seed=words))
        for n in range(7):
            assert events.count(f"short {n}") > 4
        if "long" not in events[: -events.count("long")]:
            return
    raise AssertionError(f"a short answer came after the long prompt's first token: {events}")


def company(standing: Dying, long: str) -> list[str]:
    """Whose text came when, of a long prompt and of seven short ones that come while it is computed."""
    events: list[str] = []
    daemon = standing.daemon

    def ask(name: str, prompt: str, max_tokens: int) -> None:
        request = body(daemon.model, prompt, max_tokens=max_tokens)
        with daemon.stream("/v1/messages", request) as answer:
            for line in answer.iter_lines():
                if line.startswith("event: content_block_delta"):
                    events.append(name)

    with ThreadPoolExecutor(8) as pool:
        standing.stop_at("prefill")
        first = pool.submit(ask, "long", long, 4)
        wait_until(standing.stands)
        others = [pool.submit(ask, f"short {n}", f"{n} short ones", 12) for n in range(7)]
        wait_until(lambda: standing.asked() == 8)
        standing.go_on()
        for asked in [first, *others]:
            asked.result()
    return events


def test_answers_do_not_depend_on_company(serving: Daemon):
    prompts = [f"{n} is a number. " * (3 * n + 1) for n in range(8)]
    alone = [serving.messages(prompt, max_tokens=30)["content"] for prompt in prompts]
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(lambda p: serving.messages(p, max_tokens=30)["content"], prompts))
    assert together == alone


# --------------------------------------------------------------------------- waiting


def test_the_first_event_waits_for_no_engine(serving: Daemon):
    """It comes though the engine does nothing at all."""
    engine = serving.engine_pid()
    os.kill(engine, signal.SIGSTOP)
    try:
        with serving.stream("/v1/messages", body(serving.model, prose(30, seed=50))) as answer:
            lines = answer.iter_lines()
            assert next(lines) == "event: ping"
            os.kill(engine, signal.SIGCONT)
            assert [line for line in lines if line.startswith("event: ")][-1] == "event: message_stop"
    finally:
        os.kill(engine, signal.SIGCONT)


@pytest.mark.slow
def test_requests_wait_with_pings_while_the_engine_loads(tmp_path: Path):
    # As slow a load as can be: it stops itself before it begins.
    stopped = shlex.join(["sh", "-c", 'kill -STOP $$; exec "$@"', "sh", sys.executable, "-m", "omlxd.engine"])
    with Daemon(tmp_path, wait=False, env={"OMLXD_ENGINE_COMMAND": stopped}) as daemon:

        def stands() -> bool:
            return [psutil.Process(pid).status() for pid in daemon.engines()] == [psutil.STATUS_STOPPED]

        wait_until(stands)
        (engine,) = daemon.engines()
        began = time.monotonic()
        with daemon.stream("/v1/messages", body(daemon.model, "hello")) as answer:
            assert daemon.state() == "loading"
            lines = answer.iter_lines()
            assert next(lines) == "event: ping"
            while not next(lines).startswith("event: ping"):
                pass
            assert time.monotonic() - began > 5
            os.kill(engine, signal.SIGCONT)
            kinds = [line for line in lines if line.startswith("event: ")]
        assert "event: content_block_delta" in kinds and kinds[-1] == "event: message_stop"


# --------------------------------------------------------------------------- clients that go away


@pytest.mark.slow
def test_disconnect_in_mid_prefill_frees_the_slot_and_keeps_what_was_computed(tmp_path: Path):
    one_slot = Dying(tmp_path / "home", "--max-concurrent-requests", "1")
    with one_slot.daemon as daemon:
        prompt = prose(900, seed=900)
        one_slot.stop_at("prefill")
        with daemon.stream("/v1/messages", body(daemon.model, prompt)) as answer:
            next(answer.iter_lines())
            wait_until(one_slot.stands)  # A part of it is computed.
        wait_until(lambda: one_slot.cancelled() == 1)
        one_slot.go_on()
        daemon.messages("hello", max_tokens=1)
        usage = own_usage(daemon.messages(prompt, max_tokens=1))
        assert usage["cached_hot"] + usage["cached_cold"] >= BLOCK
        assert usage["computed"] > 500, "it was computed to its end: nothing was interrupted"


@pytest.mark.parametrize("streaming", [True, False])
def test_disconnect_in_mid_answer_frees_the_slot_and_keeps_what_was_computed(
    one_slot: Daemon, streaming: bool
):
    prompt = prose(80, seed=60 + streaming)
    request = body(one_slot.model, prompt, max_tokens=20_000)
    before = one_slot.figure("generation_tokens_total")
    if streaming:
        with one_slot.stream("/v1/messages", request) as answer:
            lines = answer.iter_lines()
            for _ in range(200):
                next(lines)
    else:
        with raw_post(one_slot, "/v1/messages", request):
            wait_until(lambda: one_slot.figure("generation_tokens_total") > before + 10)
    one_slot.messages("hello", max_tokens=1)
    assert one_slot.figure("generation_tokens_total") < before + 20_000, "it was generated to its end"
    assert own_usage(one_slot.messages(prompt, max_tokens=1))["computed"] <= BLOCK


@contextlib.contextmanager
def raw_post(daemon: Daemon, path: str, content: dict[str, Any]) -> Iterator[None]:
    """A request whose client hangs up at the end, without having read anything."""
    sent = json.dumps(content).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with socket.create_connection(("127.0.0.1", int(daemon.url.rpartition(":")[2]))) as client:
        client.sendall(f"{head}Content-Length: {len(sent)}\r\n\r\n".encode() + sent)
        yield


def test_requests_queue_for_the_only_slot(one_slot: Daemon):
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda n: one_slot.messages(f"number {n}", max_tokens=20), range(4)))
    assert [answer["usage"]["output_tokens"] for answer in answers] == [20] * 4
