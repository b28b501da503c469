"""Several answers to one request: `n` of chat and completions."""

import asyncio
import json
import time

import pytest
from app_client import body, client, message_of
from fake_engine import USAGE, FakeEngine, app_of, served
from msgspec.structs import replace
from sdk_clients import gpt

from omlxd.chat import Failed, Finished, Progress, RawPrompt, TextDelta, ToolCall, Usage
from omlxd.errors import Overloaded, PromptTooLong
from omlxd.front.http.choices import AT_ONCE

PATHS = ["/v1/chat/completions", "/v1/completions"]


class Choosing(FakeEngine):
    """Request i says i words, with a pause before each; `scripts` replaces that."""

    def __init__(self, *scripts, pause: float = 0.01):
        super().__init__()
        self.scripts = scripts
        self.pause = pause
        self.open = 0
        self.log: list[tuple[str, int]] = []

    async def generate(self, request):
        index = len(self.requests)
        self.requests.append(request)
        self.log.append(("asked", index))
        usage = Usage(
            prompt_tokens=100,
            cached_hot=96 if index else 0,
            completion_tokens=index + 1,
            drafted=4 + index,
            accepted=index,
            model_drafted=2,
            model_accepted=1,
        )
        words = [TextDelta(f"{index}.{word} ") for word in range(index + 1)]
        script = self.scripts[index] if self.scripts else [Progress(0, 100), *words, Finished("stop", usage)]
        self.open += 1
        try:
            for step in script:
                if isinstance(step, Exception):
                    raise step
                await asyncio.sleep(step if isinstance(step, int | float) else self.pause)
                if not isinstance(step, int | float):
                    self.log.append(("said", index))
                    yield step
        finally:
            self.open -= 1


def datas(text: str) -> list:
    lines = [line[6:] for line in text.split("\n") if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def text_of(choice: dict) -> str:
    return (
        choice.get("text")
        or choice.get("message", {}).get("content")
        or choice.get("delta", {}).get("content", "")
    )


def guesses(usage: dict) -> list[int]:
    return [usage["omlxd"][n] for n in ("drafted", "accepted", "model_drafted", "model_accepted")]


WHOLE = {0: "0.0 ", 1: "1.0 1.1 ", 2: "2.0 2.1 2.2 "}


@pytest.mark.parametrize("path", PATHS)
async def test_whole(path):
    engine = Choosing()
    async with client(app_of(engine)) as http:
        answer = (await http.post(path, json=body(path, n=3, seed=7))).json()
    assert {choice["index"]: text_of(choice) for choice in answer["choices"]} == WHOLE
    assert answer["usage"]["prompt_tokens"] == 100 and answer["usage"]["completion_tokens"] == 6
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert guesses(answer["usage"]) == [15, 3, 6, 3]
    assert [request.sampling.seed for request in engine.requests] == [7, 8, 9]
    assert [request.again for request in engine.requests] == [False, True, True]
    assert all(request.prompt == engine.requests[0].prompt for request in engine.requests)


@pytest.mark.parametrize("path", PATHS)
async def test_streamed(path):
    engine = Choosing()
    async with client(app_of(engine)) as http:
        given = body(path, n=3, stream=True, stream_options={"include_usage": True})
        chunks = datas((await http.post(path, json=given)).text)
    texts = dict.fromkeys(range(3), "")
    order = []
    for chunk in chunks[:-1]:
        (choice,) = chunk["choices"]
        texts[choice["index"]] += text_of(choice)
        order.append((choice["index"], choice["finish_reason"]))
    assert texts == WHOLE
    assert sorted(index for index, reason in order if reason == "stop") == [0, 1, 2]
    assert chunks[-1]["choices"] == [] and chunks[-1]["usage"]["completion_tokens"] == 6
    assert guesses(chunks[-1]["usage"]) == [15, 3, 6, 3]
    assert engine.log[:2] == [("asked", 0), ("said", 0)]
    first_word = [entry for entry in engine.log if entry == ("said", 0)][1:2]
    assert engine.log.index(("asked", 1)) > engine.log.index(first_word[0])


async def test_choices_decode_at_the_same_time():
    """Each has its own clock from the request's arrival: tokens of all, in the seconds of all."""
    one = Usage(prompt_tokens=9, completion_tokens=6, queue_s=0.5, prefill_s=0.5, ttft_s=1.0, decode_s=2.0)
    other = replace(one, queue_s=1.9, prefill_s=0.1, ttft_s=2.0, decode_s=4.0, peak_bytes=7)
    began = time.monotonic()
    engine = Choosing([TextDelta("a"), Finished("stop", one)], [TextDelta("b"), Finished("stop", other)])
    async with client(app_of(engine)) as http:
        answer = (await http.post(PATHS[0], json=body(PATHS[0], n=2))).json()
    asked = {request.asked for request in engine.requests}
    assert len(asked) == 1 and began <= asked.pop() <= time.monotonic()
    omlxd, timings = answer["usage"]["omlxd"], answer["timings"]
    assert (omlxd["ttft_s"], omlxd["queue_s"], omlxd["prefill_s"]) == (1.0, 0.5, 0.5)
    assert (omlxd["decode_s"], omlxd["tokens_per_s"], omlxd["peak_bytes"]) == (5.0, 2.2, 7)
    assert (timings["predicted_n"], timings["predicted_per_second"]) == (12, 2.2)


@pytest.mark.parametrize("drafted", [4, 0])
async def test_guesses_are_told_although_none_held_or_none_was_made(drafted: int):
    usage = Usage(prompt_tokens=9, completion_tokens=6, drafted=drafted)
    async with client(app_of(FakeEngine((TextDelta("a"), Finished("stop", usage))))) as http:
        omlxd = (await http.post(PATHS[0], json=body(PATHS[0]))).json()["usage"]["omlxd"]
    assert (omlxd["drafted"], omlxd["accepted"]) == (drafted, 0)
    assert not omlxd.keys() & {"model_drafted", "model_accepted"}


async def test_calls_of_each_choice_are_numbered_by_themselves():
    scripts = [
        [ToolCall(f"c{n}", "f", "{}"), ToolCall(f"d{n}", "f", "{}"), Finished("tool_calls", USAGE)]
        for n in (0, 1)
    ]
    async with client(app_of(Choosing(*scripts))) as http:
        chunks = datas((await http.post(PATHS[0], json=body(PATHS[0], n=2, stream=True))).text)
    calls = [
        (choice["index"], call["index"], call["id"])
        for chunk in chunks
        for choice in chunk["choices"]
        for call in choice["delta"].get("tool_calls", [])
    ]
    assert sorted(calls) == [(0, 0, "c0"), (0, 1, "d0"), (1, 0, "c1"), (1, 1, "d1")]


@pytest.mark.parametrize("broken", [Overloaded("full", retry_after=3), Failed("overloaded", "full", 3)])
async def test_one_that_fails_fails_them_all(broken):
    engine = Choosing([TextDelta("a"), 300.0, Finished("stop", USAGE)], [broken])
    async with client(app_of(engine)) as http:
        answer = await http.post(PATHS[0], json=body(PATHS[0], n=2))
        assert answer.status_code == 503 and answer.headers["retry-after"] == "3"
        assert message_of(PATHS[0], answer) == "full"
    assert engine.open == 0


async def test_a_client_that_goes_away_cancels_them_all():
    import httpx

    slow = [TextDelta("a"), 300.0, Finished("stop", USAGE)]
    engine = Choosing(slow, slow, slow)
    async with served(app_of(engine)) as url, httpx.AsyncClient() as http:
        given = body(PATHS[0], n=3, stream=True)
        async with http.stream("POST", url + PATHS[0], json=given) as answer:
            async for line in answer.aiter_lines():
                if engine.open == 3 and '"content":"a"' in line:
                    break
        async with asyncio.timeout(60):
            while engine.open:
                await asyncio.sleep(0.02)


# --------------------------------------------------------------------------- several prompts


class Echoing(FakeEngine):
    """Says its prompt and its seed. `prompts` are told of each other by their usage."""

    def __init__(self):
        super().__init__()
        self.running = self.most = 0

    async def generate(self, request):
        self.requests.append(request)
        self.running += 1
        self.most = max(self.most, self.running)
        prompt = request.prompt
        said = prompt.text or ",".join(map(str, prompt.tokens))
        try:
            await asyncio.sleep(0.01)
            yield TextDelta(f"{said}/{request.sampling.seed}")
            usage = Usage(prompt_tokens=10 * len(said), cached_hot=1, completion_tokens=1, reasoning_tokens=1)
            yield Finished("length" if said == "b" else "stop", usage)
        finally:
            self.running -= 1


async def test_each_prompt_has_its_answers():
    async with gpt(Echoing()) as client:
        answer = await client.completions.create(
            model="tiny", prompt=["a", "b", "long"], n=2, seed=7, max_tokens=5
        )
    assert [(one.index, one.text, one.finish_reason) for one in answer.choices] == [
        (0, "a/7", "stop"),
        (1, "a/8", "stop"),
        (2, "b/7", "length"),
        (3, "b/8", "length"),
        (4, "long/7", "stop"),
        (5, "long/8", "stop"),
    ]
    # A prompt counts once, each answer by itself.
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (10 + 10 + 40, 6)
    assert answer.usage.prompt_tokens_details.cached_tokens == 3
    assert answer.usage.total_tokens == 66


async def test_prompts_of_token_ids_streamed():
    engine = Echoing()
    async with gpt(engine) as client:
        stream = await client.completions.create(
            model="tiny",
            prompt=[[1, 2], [3]],
            echo=True,
            stream=True,
            stream_options={"include_usage": True},
        )
        texts, reasons, usages = {}, {}, []
        async for chunk in stream:
            for choice in chunk.choices:
                texts[choice.index] = texts.get(choice.index, "") + choice.text
                if choice.finish_reason:
                    reasons[choice.index] = choice.finish_reason
            if chunk.usage:
                usages.append(chunk.usage)
    assert texts == {0: "1,2/None", 1: "3/None"} and reasons == {0: "stop", 1: "stop"}
    assert [usage.completion_tokens for usage in usages] == [2]
    asked = sorted((request.prompt for request in engine.requests), key=lambda prompt: prompt.tokens)
    assert asked == [RawPrompt(tokens=(1, 2), echo=True), RawPrompt(tokens=(3,), echo=True)]


async def test_a_long_list_of_prompts_leaves_room_for_others():
    engine = Echoing()
    async with client(app_of(engine)) as http:
        prompts = [f"p{number}" for number in range(64)]
        given = {"model": "tiny", "prompt": prompts, "n": 2}
        answer = (await http.post("/v1/completions", json=given)).json()
        assert [choice["text"] for choice in answer["choices"]] == [
            f"{prompt}/None" for prompt in prompts for _ in range(2)
        ]
        assert engine.most == AT_ONCE
        refused = await http.post("/v1/completions", json={**given, "n": 3})
    assert refused.status_code == 400
    assert "64 prompts with 3 answers each are more than 128" in message_of("/v1/completions", refused)


async def test_a_prompt_that_fails_fails_the_request():
    engine = Choosing([TextDelta("a"), Finished("stop", USAGE)], [Overloaded("full")])
    async with client(app_of(engine)) as http:
        answer = await http.post("/v1/completions", json=body("/v1/completions") | {"prompt": ["a", "b"]})
    assert answer.status_code == 503 and engine.open == 0


# --------------------------------------------------------------------------- one bad prompt of several


@pytest.mark.parametrize("raised", [False, True])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 2])
async def test_a_bad_prompt_of_several_is_an_error_of_its_own(stream, raised, n):
    error = PromptTooLong(9000, 8192)

    class Picky(Choosing):
        async def generate(self, request):
            if request.prompt.text.startswith("bad"):
                if raised:
                    raise error
                yield error.as_event()
                return
            async for event in super().generate(request):
                yield event

    async def ask(*prompts):
        async with client(app_of(Picky(), header_grace_s=60.0)) as http:
            given = body(PATHS[1], prompt=list(prompts), n=n, stream=stream)
            return await http.post(PATHS[1], json=given)

    answer = await ask("one", "bad", "two")
    assert answer.status_code == 200
    chunks = datas(answer.text) if stream else [answer.json()]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    reasons = {choice["index"]: choice["finish_reason"] for choice in choices if choice["finish_reason"]}
    bad = range(n, 2 * n)
    assert reasons == {index: "error" if index in bad else "stop" for index in range(3 * n)}
    errors = {choice["index"]: choice["error"] for choice in choices if "error" in choice}
    assert set(errors) == set(bad) and errors[n]["code"] == "context_length_exceeded"
    for prompts in (["bad"], ["bad", "bad too"]):
        answer = await ask(*prompts)
        assert answer.status_code == 400 and answer.json()["error"]["code"] == "context_length_exceeded"
