"""The Messages API on the wire, whatever is asked and whatever the model does: order of a stream, the same
content in both forms, the prompt that is counted, errors in its shape."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest
from app_client import client, message_of
from fake_engine import USAGE, FakeEngine, app_of
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from request_bodies import VALID, ruined

from omlxd.chat import (
    Failed,
    Finished,
    Progress,
    ReasoningDelta,
    TextDelta,
    ToolCall,
    ToolCallCut,
    ToolCallDelta,
)
from omlxd.errors import Overloaded

MESSAGES, COUNT = "/v1/messages", "/v1/messages/count_tokens"
fuzz = settings(
    max_examples=80, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
)

# --------------------------------------------------------------------------- what a model may do

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=6)


@st.composite
def calls(draw) -> list[Any]:
    """One call: in pieces or whole, and perhaps cut off."""
    id, name = draw(st.uuids()).hex, draw(st.sampled_from(["read", "write"]))
    whole = json.dumps(draw(st.dictionaries(texts, st.integers() | texts, max_size=3)))
    sent = whole[: draw(st.integers(0, len(whole)))]
    cuts = sorted(draw(st.lists(st.integers(0, len(sent)), max_size=3)))
    pieces = [sent[a:b] for a, b in zip([0, *cuts], [*cuts, len(sent)], strict=True)] if sent else []
    steps: list[Any] = [ToolCallDelta(id, name, piece) for piece in pieces]
    if pieces and draw(st.integers(0, 3)) == 0:
        return [*steps, ToolCallCut(id, name, sent, "{}")]
    return [*steps, ToolCall(id, name, whole)]


steps = st.lists(
    st.one_of(
        st.builds(TextDelta, texts).map(lambda step: [step]),
        st.builds(ReasoningDelta, texts).map(lambda step: [step]),
        st.builds(Progress, st.integers(0, 5), st.integers(0, 5)).map(lambda step: [step]),
        st.just([0.0]),
        calls(),
    ),
    max_size=8,
).map(lambda lists: [step for each in lists for step in each])
ends = st.sampled_from(["stop", "stop_sequence", "length", "tool_calls"]).map(
    lambda reason: Finished(reason, USAGE, "END" if reason == "stop_sequence" else None)
)
failures = st.sampled_from(
    [
        Failed("overloaded", "busy", 3),
        Failed("internal", "a bug"),
        Overloaded("full"),
        RuntimeError("a bug"),
        None,
    ]
)
"""None: the engine ends without an end."""


async def both(body: dict[str, Any], script: list[Any]) -> tuple[httpx.Response, httpx.Response, FakeEngine]:
    """(streamed, whole, the engine)."""
    engine = FakeEngine(script)
    async with client(app_of(engine, header_grace_s=0.01)) as http:
        streamed = await http.post(MESSAGES, json={**body, "stream": True})
        whole = await http.post(MESSAGES, json={**body, "stream": False})
        await http.post(COUNT, json=body)
    return streamed, whole, engine


# --------------------------------------------------------------------------- how a client reads it

DELTAS = {
    "text": {"text_delta": "text"},
    "thinking": {"thinking_delta": "thinking", "signature_delta": "signature"},
    "tool_use": {"input_json_delta": "partial_json"},
}


class Reader:
    """A stream, read event by event; an event out of its order is an AssertionError.

    whole  it must end well; else it must not
    """

    def __init__(self, text: str, whole: bool = True):
        self.blocks: list[dict[str, Any]] = []
        self.arguments: dict[str, str] = {}
        self.usage: Any = None
        self.stop: tuple[Any, Any] | None = None
        self.done = False
        self._open = self._signed = False
        assert text.endswith("\n\n")
        for at, event in enumerate(text[:-2].split("\n\n")):
            first, second = event.split("\n")
            data = json.loads(second.removeprefix("data: "))
            assert first == f"event: {data['type']}"
            assert (at == 0) is (data["type"] == "message_start")
            assert not self.done, "nothing comes after the end"
            getattr(self, data["type"])(data)
        assert self.done is whole

    def message_start(self, data: dict[str, Any]) -> None:
        message = data["message"]
        assert message["type"] == "message" and message["role"] == "assistant" and message["content"] == []
        assert message["stop_reason"] is None and message["id"].startswith("msg_")
        self.model = message["model"]

    def ping(self, data: dict[str, Any]) -> None:
        assert data == {"type": "ping"}

    def content_block_start(self, data: dict[str, Any]) -> None:
        assert not self._open and self.stop is None and data["index"] == len(self.blocks)
        self.blocks.append(data["content_block"])
        self._open, self._signed = True, False

    def content_block_delta(self, data: dict[str, Any]) -> None:
        assert self._open and data["index"] == len(self.blocks) - 1
        block, delta = self.blocks[-1], data["delta"]
        field = DELTAS[block["type"]][delta["type"]]
        assert not self._signed, "the signature is the last of a thought"
        self._signed = field == "signature"
        if field == "partial_json":
            self.arguments[block["id"]] = self.arguments.get(block["id"], "") + delta[field]
        else:
            assert delta[field], "no delta says nothing"
            block[field] += delta[field]

    def content_block_stop(self, data: dict[str, Any]) -> None:
        assert self._open and data["index"] == len(self.blocks) - 1
        assert self._signed is (self.blocks[-1]["type"] == "thinking")
        self._open = False

    def message_delta(self, data: dict[str, Any]) -> None:
        assert not self._open and self.stop is None
        self.stop, self.usage = (data["delta"]["stop_reason"], data["delta"]["stop_sequence"]), data["usage"]

    def message_stop(self, data: dict[str, Any]) -> None:
        assert self.stop is not None
        self.done = True


def check_error(answer: httpx.Response) -> None:
    assert answer.status_code in (500, 503, 529), answer.text
    assert message_of(MESSAGES, answer)
    assert set(answer.json()) == {"type", "error", "request_id"}


@fuzz
@given(body=VALID[MESSAGES], script=steps, end=ends)
@example(
    body={"model": "tiny", "messages": [{"role": "user", "content": "hi"}]},
    script=[],
    end=Finished("stop", USAGE),
)
def test_a_stream_is_in_order_and_says_what_the_whole_answer_says(body, script, end):
    streamed, whole, engine = asyncio.run(both(body, [*script, end]))
    assert streamed.status_code == whole.status_code == 200
    read, message = Reader(streamed.text), whole.json()
    cut = {step.id: step for step in script if isinstance(step, ToolCallCut)}
    for block in read.blocks:
        if block["type"] == "tool_use":
            told = read.arguments.get(block["id"], "")
            if block["id"] in cut:
                assert told == cut[block["id"]].arguments
                block["input"] = json.loads(cut[block["id"]].valid_arguments)
            else:
                block["input"] = json.loads(told)
    assert json.dumps(read.blocks) == json.dumps(message["content"])
    assert read.stop == (message["stop_reason"], message["stop_sequence"])
    assert read.usage == message["usage"] and read.model == message["model"] == body["model"]
    one, two = engine.requests
    assert one == two and engine.counted == [one.prompt]


@pytest.mark.slow
@fuzz
@given(body=VALID[MESSAGES], script=steps, failure=failures)
def test_a_failure_is_an_error_in_its_shape_or_the_last_event(body, script, failure):
    ended = [] if failure is None else [failure]
    streamed, whole, _ = asyncio.run(both(body, [*script, *ended]))
    check_error(whole)
    if streamed.status_code != 200:
        check_error(streamed)
        return
    before, _, last = streamed.text.rpartition("event: error\n")
    told = json.loads(last.removeprefix("data: "))
    assert told["type"] == "error" and told["error"]["message"]
    assert told["request_id"] == streamed.headers["request-id"]
    assert Reader(before, whole=False).stop is None


@fuzz
@given(data=st.data())
def test_a_body_that_lost_its_sense_is_counted_if_and_only_if_it_is_served(data):
    body = ruined(data, data.draw(VALID[MESSAGES]))

    async def ask() -> list[httpx.Response]:
        async with client(app_of(FakeEngine())) as http:
            content = json.dumps(body).encode()
            return [await http.post(path, content=content) for path in (MESSAGES, COUNT)]

    served, counted = asyncio.run(ask())
    if body.get("messages") and "can't be continued" in served.text:
        assert counted.status_code == 200
        return
    assert served.status_code == counted.status_code and served.status_code in (200, 400, 404)
    if served.status_code != 200:
        assert message_of(MESSAGES, served) == message_of(MESSAGES, counted)
        kinds = {400: "invalid_request_error", 404: "not_found_error"}
        assert served.json()["error"]["type"] == kinds[served.status_code]


# --------------------------------------------------------------------------- begun answers


@pytest.mark.parametrize("begun", ["The best answer is (", [{"type": "text", "text": "{"}]])
async def test_a_begun_answer_is_continued(begun):
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
    async with client(app_of(engine := FakeEngine())) as http:
        with_begun = {**body, "messages": [*body["messages"], {"role": "assistant", "content": begun}]}
        assert (await http.post(MESSAGES, json=with_begun)).status_code == 200
        assert (await http.post(COUNT, json=with_begun)).status_code == 200
        (asked,) = engine.requests
        assert asked.prompt.continue_final and asked.prompt.messages[-1].role == "assistant"
        use = {"type": "tool_use", "id": "t", "name": "f", "input": {}}
        called = {**body, "messages": [*body["messages"], {"role": "assistant", "content": [use]}]}
        answer = await http.post(MESSAGES, json=called)
        assert answer.status_code == 400 and "end with a user's message" in message_of(MESSAGES, answer)
        assert (await http.post(COUNT, json=called)).status_code == 200
        schema = {"type": "json_schema", "schema": {"type": "object"}}
        held = {**with_begun, "output_config": {"format": schema}}
        answer = await http.post(MESSAGES, json=held)
        assert answer.status_code == 400 and "output_config.format" in message_of(MESSAGES, answer)
        for empty in ("", [], [{"type": "text", "text": ""}]):
            nothing = {**body, "messages": [*body["messages"], {"role": "assistant", "content": empty}]}
            for asked in (body, nothing):
                assert (await http.post(MESSAGES, json=asked)).status_code == 200
            one, two = engine.requests[-2:]
            assert one == two


# --------------------------------------------------------------------------- paths that are not served

VERSION = {"anthropic-version": "2023-06-01"}


@pytest.mark.parametrize(
    ("method", "path", "words"),
    [
        ("POST", "/v1/messages/batches", "Anthropic's (/v1/messages)"),
        ("GET", "/v1/messages/batches/msgbatch_1/results", "Anthropic's (/v1/messages)"),
        ("POST", "/v1/complete", "Anthropic's (/v1/messages)"),
        ("POST", "/v1/files", "no files are kept here"),
        ("GET", "/v1/files/file_1/content?beta=true", "no files are kept here"),
        ("GET", "/v1/skills?beta=true", "Anthropic's (/v1/messages)"),
        ("GET", "/v1/organizations/me", "there is no such path"),
        ("GET", "/v1/models/none", "'none'"),
    ],
)
async def test_what_is_not_served_is_a_404_in_the_shape_that_its_client_reads(method, path, words):
    async with client(app_of(FakeEngine())) as http:
        answer = await http.request(method, path, headers=VERSION, content=b"{}")
        assert answer.status_code == 404 and words in message_of(MESSAGES, answer)
        assert answer.json()["error"]["type"] == "not_found_error" and "x-request-id" not in answer.headers
        if not path.startswith(("/v1/messages", "/v1/complete")):
            # OpenAI's clients, which have some of these paths too, send no such header.
            assert words in message_of("", await http.request(method, path, content=b"{}"))


async def test_the_header_changes_nothing_for_openais_own_paths():
    async with client(app_of(FakeEngine())) as http:
        answer = await http.post("/v1/chat/completions", headers=VERSION, content=b"{}")
        assert answer.status_code == 400 and message_of("/v1/chat/completions", answer)


async def test_answers_carry_the_id_under_which_its_client_looks():
    async with client(app_of(FakeEngine())) as http:
        for path in ("/v1/models", "/v1/models/org/tiny"):
            assert (await http.get(path, headers=VERSION)).headers["request-id"].startswith("req_")
            assert (await http.get(path)).headers["x-request-id"].startswith("req_")
        wrong = await http.get(MESSAGES, headers=VERSION)
        assert wrong.status_code == 405 and "takes POST" in message_of(MESSAGES, wrong)
    async with client(app_of(FakeEngine(), api_key="k")) as http:
        refused = await http.get("/v1/models", headers=VERSION)
        assert refused.status_code == 401 and refused.json()["error"]["type"] == "authentication_error"
        assert refused.headers["request-id"] == refused.json()["request_id"]
