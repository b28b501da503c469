"""/v1/responses: events into a stream or a response object, and what is kept of it."""

from __future__ import annotations

import random

import pytest
from fake_engine import EVERYTHING, HELLO, USAGE
from responses import (
    AGENTS,
    EVENTS,
    PATCH,
    READ,
    collected,
    item,
    messages,
    parsed,
    sent,
    streamed,
    text,
    user,
)

from omlxd.api.errors import message_of
from omlxd.api.responses.answer import OpenAIResponsesStream
from omlxd.chat import (
    Finished,
    Message,
    ReasoningDelta,
    TextDelta,
    TextPart,
    ToolCall,
)
from omlxd.errors import InvalidRequest, NotFound, Overloaded, PromptTooLong, Unavailable
from omlxd.front.http.stores.response_store import ResponseStore


def test_every_event_in_order_and_of_the_shape_that_the_sdk_defines():
    events = streamed(parsed(input="u", tools=[READ]), EVERYTHING)
    names = [name for name, _ in events]
    assert names == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.reasoning_text.delta",
        "response.reasoning_text.delta",
        "response.reasoning_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        *(
            [
                "response.output_item.added",
                "response.function_call_arguments.delta",
                "response.function_call_arguments.done",
                "response.output_item.done",
            ]
            * 2
        ),
        "response.completed",
    ]
    assert [event["sequence_number"] for _, event in events] == list(range(len(events)))
    assert all(event["type"] == name for name, event in events)
    for _, event in events:
        EVENTS.validate_python(event)  # Strict: a missing field is an error here.
    indices = [event["output_index"] for _, event in events if "output_index" in event]
    assert indices == sorted(indices) and set(indices) == {0, 1, 2, 3}


def test_the_limit_of_tokens_makes_an_incomplete_response():
    request = parsed(input="u", max_output_tokens=2)
    name, last = streamed(request, [TextDelta("Hel"), Finished("length", USAGE)])[-1]
    assert name == "response.incomplete"
    response = last["response"]
    assert response["status"] == "incomplete"
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}
    assert response["output"][0]["status"] == "incomplete" and response["max_output_tokens"] == 2


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (Overloaded("busy", retry_after=7), "rate_limit_exceeded"),
        (Unavailable("gone"), "server_error"),
        (PromptTooLong(9, 8), "context_length_exceeded"),
        (InvalidRequest("no"), "invalid_prompt"),
    ],
)
def test_an_error_in_mid_stream_ends_it_as_failed(error, code):
    stream = OpenAIResponsesStream("resp_1", parsed(input="u"), 1)
    data = stream.start() + stream.event(TextDelta("Hel")) + stream.error(error)
    events = list(sent(data))
    assert [name for name, _ in events][-2:] == ["response.output_item.done", "response.failed"]
    failed = events[-1][1]["response"]
    assert failed["status"] == "failed" and failed["error"]["code"] == code
    assert failed["error"]["message"].startswith(message_of(error, "openai"))
    assert ("try again in 7s" in failed["error"]["message"]) == (code == "rate_limit_exceeded")
    assert failed["output"][0]["content"][0]["text"] == "Hel"


def test_stream_and_whole_answer_are_equal_however_the_text_is_cut():
    rng = random.Random(1)
    request = parsed(input="u", tools=[READ, AGENTS, PATCH], include=["reasoning.encrypted_content"])
    for _ in range(200):
        events = []
        for _ in range(rng.randrange(5)):
            kind = rng.choice([TextDelta, ReasoningDelta, ToolCall])
            if kind is ToolCall:
                events.append(ToolCall(f"c{len(events)}", rng.choice(["read", "patch", "close"]), '{"a":1}'))
                continue
            whole = "".join(rng.choice("aé\n<") for _ in range(rng.randrange(1, 9)))
            while whole:
                cut = rng.randrange(1, len(whole) + 1)
                events.append(kind(whole[:cut]))
                whole = whole[cut:]
        events.append(Finished(rng.choice(["stop", "length"]), USAGE))
        whole = collected(request, events)
        stream = streamed(request, events)
        last = stream[-1][1]["response"]
        assert {**last, "completed_at": None} == {**whole, "completed_at": None}
        assert [event["item"] for name, event in stream if name.endswith("item.done")] == whole["output"]
        deltas = {}
        for name, event in stream:
            if name.endswith(".delta"):
                deltas.setdefault(event["output_index"], []).append(event["delta"])
        texts = [
            one.get("arguments") or one.get("input") or one["content"][0]["text"] for one in whole["output"]
        ]
        assert ["".join(deltas[index]) for index in sorted(deltas)] == texts


def test_what_comes_back_is_what_was_said():
    """An echoed answer is the very turn that the store keeps, thinking included."""
    kept = ResponseStore()
    request = parsed(input="u", tools=[READ], include=["reasoning.encrypted_content"])
    output = collected(request, EVERYTHING, kept.keep)["output"]
    # As Codex does: new ids, and the reasoning's text left out.
    items = [{**one, "id": "other"} for one in output]
    items[0].pop("content")
    assert messages(item("user", text("u")), *items, tools=[READ]) == kept.messages("resp_1")


def test_the_store_is_bounded_and_drops_the_least_recently_used():
    store = ResponseStore(max_responses=3, max_bytes=10_000)
    for name in "abc":
        store.keep(name, (user(name),))
    assert store.messages("a") == (user("a"),)
    store.keep("d", (user("d"),))
    assert store.messages("b") is None and len(store) == 3
    store.keep("big", (user("x" * 9_950),))
    assert store.messages("big") is not None and len(store) == 1
    store.keep("huge", (user("x" * 10_001),))
    assert store.messages("huge") is None and store.bytes <= 10_000
    store.keep("big", (user("y"),))
    assert store.bytes < 100


def test_an_answer_goes_on_from_the_one_before():
    store = ResponseStore()
    first = parsed(input="one", instructions="Be brief.")
    collected(first, HELLO, store.keep)
    second = parsed(history=store.messages, input="two", previous_response_id="resp_1", instructions="Speak.")
    assert second.generate.prompt.messages == (
        Message("system", (TextPart("Speak."),)),
        user("one"),
        Message("assistant", (TextPart("Hello there"),)),
        user("two"),
    )
    with pytest.raises(NotFound, match="resp_0"):
        parsed(history=store.messages, input="two", previous_response_id="resp_0")


def test_store_false_keeps_nothing():
    store = ResponseStore()
    collected(parsed(input="one", store=False), HELLO, store.keep)
    assert len(store) == 0
