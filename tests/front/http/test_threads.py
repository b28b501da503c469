"""Message threads: a conversation stays here, and the official SDK sends only what is new."""

import asyncio
import json
from typing import Any

import anthropic
import pytest
from app_client import client, message_of
from fake_engine import EVERYTHING, HELLO, FakeEngine, app_of, served
from sdk_clients import claude

from omlxd.api.anthropic.threads import ThreadRequest
from omlxd.chat import Conversation, GenerateRequest, Restarted, TextDelta
from omlxd.errors import ThreadError, Unavailable
from omlxd.front.http.stores.thread_store import MAX_THREAD_BYTES, ThreadStore

PATH = "/v1/messages"
TOOL: Any = {"name": "read", "description": "d", "input_schema": {"type": "object"}}
CREATE: Any = {"type": "create"}


def user(text: str) -> Any:
    return {"role": "user", "content": text}


def body(text: str, thread: Any = CREATE, **more: Any) -> dict[str, Any]:
    return {"model": "tiny", "max_tokens": 9, "messages": [user(text)], "thread": thread, **more}


def after(answer: Any) -> Any:
    return {"type": "continue", "previous_message_id": answer.json()["id"]}


def bare(request: GenerateRequest) -> Conversation:
    assert isinstance(request.prompt, Conversation)
    return request.prompt


@pytest.mark.parametrize("streamed", [False, True])
async def test_the_sdks_thread_sends_what_is_new_and_the_model_reads_all(streamed):
    engine = FakeEngine(EVERYTHING)
    results = [{"type": "tool_result", "tool_use_id": f"call_{n}", "content": "x"} for n in (1, 2)]
    async with claude(engine) as sdk:
        fixed: Any = {"model": "tiny", "max_tokens": 9, "system": "s", "tools": [TOOL]}
        thread = sdk.beta.messages.thread(**fixed)
        sent: list[Any] = []
        plain = sdk.beta.messages.create

        async def create(**asked: Any) -> Any:
            sent.append(asked)
            return await plain(**asked)

        sdk.beta.messages.create = create
        for turn in (user("one"), {"role": "user", "content": results}, user("three")):
            if streamed:
                async with thread.stream(turn) as stream:
                    await stream.get_final_message()
            else:
                await thread.send(turn)
        whole = list(thread.messages[:-1])
        await plain(messages=whole, **fixed)
    assert [asked["thread"]["type"] for asked in sent] == ["create", "continue", "continue"]
    assert [len(asked["messages"]) for asked in sent] == [1, 1, 1] and "system" not in sent[1]
    assert len(whole) == 5 and bare(engine.requests[2]) == bare(engine.requests[3])


async def test_the_sdk_sends_all_of_it_once_the_thread_has_gone():
    """A daemon that was started again, in the middle of a conversation."""
    old, new = FakeEngine(HELLO), FakeEngine(HELLO)
    async with (
        served(app_of(old)) as first,
        served(app_of(new)) as second,
        anthropic.AsyncAnthropic(base_url=first, api_key="k", max_retries=0) as sdk,
    ):
        thread = sdk.beta.messages.thread(model="tiny", max_tokens=9, system="s")
        await thread.send(user("one"))
        sdk.base_url = second
        await thread.send(user("two"))
        await thread.send(user("three"))
    assert [len(bare(request).messages) for request in new.requests] == [4, 6]
    assert thread.previous_message_id


async def test_an_answer_is_continued_once_and_by_its_owner_alone():
    engine = FakeEngine(HELLO)
    async with client(app_of(engine)) as http:
        first = await http.post(PATH, json=body("one"))
        stranger = await http.post(PATH, json=body("two", after(first)), headers={"x-api-key": "other"})
        second = await http.post(PATH, json=body("two", after(first)))
        again = await http.post(PATH, json=body("two", after(first)))
        unknown = await http.post(PATH, json=body("x", {"type": "continue", "previous_message_id": "msg_x"}))
        third = await http.post(PATH, json=body("three", after(second)))
    assert (first.status_code, second.status_code, third.status_code) == (200, 200, 200)
    assert [len(bare(request).messages) for request in engine.requests] == [1, 3, 5]
    for answer, status, code in (
        (stranger, 404, "thread_not_found"),
        (unknown, 404, "thread_not_found"),
        (again, 400, "thread_already_continued"),
    ):
        assert answer.status_code == status and answer.json()["error"]["details"] == {"error_code": code}
        assert 'thread {"type": "create"}' in message_of(PATH, answer)


@pytest.mark.parametrize("streamed", [False, True])
async def test_one_request_at_a_time_continues_an_answer(streamed: bool):
    engine = FakeEngine(HELLO)
    async with client(app_of(engine)) as http:
        first = await http.post(PATH, json=body("one"))
        engine.script = (0.2, *HELLO)
        again = [http.post(PATH, json=body("two", after(first), stream=streamed)) for _ in range(3)]
        answers = sorted(await asyncio.gather(*again), key=lambda answer: answer.status_code)
        assert [answer.status_code for answer in answers] == [200, 400, 400]
        for refused in answers[1:]:
            assert refused.json()["error"]["details"] == {"error_code": "thread_continue_in_flight"}
            assert "another request is continuing" in message_of(PATH, refused)
    assert len(engine.requests) == 2


async def test_an_answer_whose_continuation_failed_is_continued_again():
    engine = FakeEngine(HELLO)
    async with client(app_of(engine)) as http:
        first = await http.post(PATH, json=body("one"))
        engine.script = (Unavailable("gone"),)
        assert (await http.post(PATH, json=body("two", after(first)))).status_code == 503
        engine.script = HELLO
        assert (await http.post(PATH, json=body("two", after(first)))).status_code == 200


def test_a_request_that_was_read_before_another_ended_finds_the_answer_continued():
    store = ThreadStore()
    store.keep(request(previous="msg_1"), "msg_2", b"[]")
    with pytest.raises(ThreadError, match="continued already"), store.continuing(request(previous="msg_1")):
        pass


@pytest.mark.parametrize(
    ("thread", "words", "code"),
    [
        ({"type": "continue"}, "thread.previous_message_id: this field is required", None),
        ({"type": "continue", "previous_message_id": 5}, "thread.previous_message_id: Expected str", None),
        ("x", "thread: Expected object", None),
        ([], "thread: Expected object", None),
        (
            {"type": "create", "previous_message_id": "x"},
            "thread.previous_message_id: there is no such field",
            None,
        ),
        ({"type": "create", "more": 1}, "thread.more: there is no such field", None),
        ({"type": "bla"}, 'thread.type: it is "create" or "continue"', "thread_unsupported_request"),
        ({}, 'thread.type: it is "create" or "continue"', "thread_unsupported_request"),
    ],
)
async def test_a_malformed_thread_has_its_own_words_and_no_code_of_another_fault(thread, words, code):
    async with client(app_of(FakeEngine(HELLO))) as http:
        answer = await http.post(PATH, json=body("one", thread))
    assert answer.status_code == 400 and words in message_of(PATH, answer)
    assert (answer.json()["error"].get("details") or {}).get("error_code") == code


async def test_what_a_thread_began_with_stays():
    engine = FakeEngine(HELLO)
    async with client(app_of(engine)) as http:
        first = await http.post(PATH, json=body("one", system="s", tools=[TOOL]))
        other = await http.post(PATH, json=body("two", after(first), system="t"))
        same = await http.post(PATH, json=body("two", after(first), system="s"))
        counted = await http.post(PATH + "/count_tokens", json=body("three", after(same)))
    assert other.json()["error"]["details"] == {"error_code": "thread_fingerprint_mismatch"}
    assert "system" in message_of(PATH, other) and other.status_code == 400
    assert same.status_code == 200 and bare(engine.requests[1]).tools[0].name == "read"
    assert counted.json()["input_tokens"] > 0


async def test_an_answer_that_began_twice_is_kept_once():
    engine = FakeEngine([TextDelta("Lost"), Restarted(), *HELLO])
    async with client(app_of(engine)) as http:
        first = await http.post(PATH, json=body("one", stream=True))
        start = next(line for line in first.text.splitlines() if "message_start" in line and "data" in line)
        id = json.loads(start.removeprefix("data: "))["message"]["id"]
        await http.post(PATH, json=body("two", {"type": "continue", "previous_message_id": id}))
    told = bare(engine.requests[1]).messages[1]
    assert [part.text for part in told.parts if hasattr(part, "text")] == ["Hello there"]


def request(previous: str = "", size: int = 0) -> ThreadRequest:
    conversation = json.dumps({"messages": [user("x" * size)]}).encode()
    asked: Any = {"owner": "o", "conversation": conversation, "previous": previous}
    return ThreadRequest(model="m", stream=False, generate=GenerateRequest(prompt=None), **asked)  # type: ignore[arg-type]


def test_threads_are_bounded_in_count_and_bytes():
    store = ThreadStore(max_answers=4, max_bytes=2000)
    for number in range(9):
        store.keep(request(), f"msg_{number}", b"[]")
    kept = [number for number in range(9) if store.find_thread("o", f"msg_{number}")]
    assert kept == [5, 6, 7, 8]
    store.keep(request(size=1900), "msg_large", b"[]")
    assert store.find_thread("o", "msg_large") and store.find_thread("o", "msg_8") is None
    roomy = ThreadStore()
    roomy.keep(request(size=MAX_THREAD_BYTES), "msg_huge", b"[]")
    assert roomy.find_thread("o", "msg_huge") is None
