"""A field that nobody reads is named, wherever it stands in a body; one that somebody reads never is."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from omlxd.api.anthropic.request import MessagesBody
from omlxd.api.fields.body import decode
from omlxd.api.fields.unknown_fields import MOST_BYTES, MOST_MEMBERS, MOST_NAMES, noting, unknown_fields
from omlxd.api.ollama.request import ChatBody as OllamaBody
from omlxd.api.openai.chat_request import ChatBody
from omlxd.api.openai.completions import CompletionsBody
from omlxd.api.openai.scores import ClassifyBody
from omlxd.api.responses.request import ResponsesBody

TEXT = [{"role": "user", "content": "hi"}]
SCHEMA = {"type": "object", "properties": {"anything": {"of": "mine"}}, "my_own": 1}
FUNCTION = {"name": "f", "parameters": SCHEMA}
BODIES: list[tuple[Any, dict[str, Any], tuple[tuple[Any, ...], ...]]] = [
    (
        ChatBody,
        {
            "messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}],
            "tools": [{"type": "function", "function": FUNCTION}],
            "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}},
            "stream_options": {"include_usage": True},
            "temperature": 0.5,
        },
        (
            (),
            ("messages", 0),
            ("messages", 0, "content", 0),
            ("tools", 0, "function"),
            ("response_format", "json_schema"),
            ("stream_options",),
        ),
    ),
    (
        MessagesBody,
        {
            "model": "m",
            "max_tokens": 9,
            "messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}],
            "tools": [{"name": "f", "input_schema": SCHEMA}],
        },
        ((), ("messages", 0), ("messages", 0, "content", 0)),
    ),
    (ResponsesBody, {"model": "m", "input": "hi", "temperature": 1}, ((),)),
    (CompletionsBody, {"prompt": "hi", "max_tokens": 3}, ((),)),
    (OllamaBody, {"model": "m", "messages": TEXT}, ((), ("messages", 0))),
]


@given(st.sampled_from(BODIES), st.data())
def test_a_field_is_named_where_it_stands_and_no_other(case, data):
    kind, body, places = case
    body = json.loads(json.dumps(body))
    place = data.draw(st.sampled_from(places))
    name = "zz_" + data.draw(st.text(st.characters(codec="utf-8", exclude_characters="."), max_size=8))
    inner: Any = body
    for step in place:
        inner = inner[step]
    inner[name] = data.draw(st.sampled_from([None, 1, "text", {"a": [1]}]))
    path = "".join("*." if isinstance(step, int) else f"{step}." for step in place)
    assert list(unknown_fields(kind, json.dumps(body).encode())) == [path + name]


@pytest.mark.parametrize(("kind", "body", "places"), BODIES)
def test_a_body_without_one_has_none(kind, body, places):
    assert not unknown_fields(kind, json.dumps(body).encode())


@given(
    st.binary(max_size=30)
    | st.sampled_from([b"[]", b"null", b'{"a":', b'{"messages": [[[1]]]}', b'{"a":"\\ud800"}'])
)
def test_whatever_the_bytes_are_it_raises_nothing(body):
    unknown_fields(ChatBody, body)


def test_what_one_of_several_readers_knows_is_known():
    body = json.dumps({"labels": ["a"], "messages": TEXT, "temperature": 1, "lables": 1}).encode()
    fields = noting()
    decode(msgspec.json.Decoder(ClassifyBody), body)
    decode(msgspec.json.Decoder(ChatBody), body)
    assert fields.names == ["lables"]
    # One that reads the outermost object alone hides nothing of what is inside.
    body = json.dumps({"labels": ["a"], "messages": [{**TEXT[0], "nam": 1}]}).encode()
    fields = noting()
    decode(msgspec.json.Decoder(ChatBody), body)
    decode(msgspec.json.Decoder(ClassifyBody), body)
    assert not fields.names  # `messages` is any JSON to the second: it may well read it.


def test_of_a_long_body_the_outermost_fields_are_told():
    long = {"messages": [{**TEXT[0], "nam": "x" * MOST_BYTES}], "temprature": 1}
    assert list(unknown_fields(ChatBody, json.dumps(long).encode())) == ["temprature"]


def test_very_many_fields_are_neither_told_nor_looked_at():
    many = json.dumps({f"field {number}": 1 for number in range(MOST_NAMES + 5)}).encode()
    assert len(unknown_fields(ChatBody, many)) == MOST_NAMES
    more = json.dumps(
        {"temprature": 1, "metadata": {f"{n:010}": 1 for n in range(MOST_MEMBERS + 1)}}
    ).encode()
    assert len(more) > MOST_BYTES and unknown_fields(ChatBody, more) == {}
