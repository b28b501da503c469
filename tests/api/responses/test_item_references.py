"""`item_reference`: an item of an earlier response, by its id."""

from __future__ import annotations

import json

import openai
import pytest
from app_client import client, message_of
from fake_engine import EVERYTHING, FakeEngine, app_of
from sdk_clients import gpt

from omlxd.api.responses import request
from omlxd.api.responses.items import item_id, new_response_id, response_of
from omlxd.api.responses.request import parse
from omlxd.chat import Message, TextPart, ThinkingPart, ToolCallPart, ToolResultPart
from omlxd.errors import InvalidRequest

PATH = "/v1/responses"
RESULTS = [
    {"type": "function_call_output", "call_id": "call_1", "output": "one"},
    {"type": "function_call_output", "call_id": "call_2", "output": "two"},
]


def refer(item) -> dict:
    return {"type": "item_reference", "id": item if isinstance(item, str) else item.id}


async def test_the_sdk_refers_to_what_was_answered():
    engine = FakeEngine(EVERYTHING)
    async with gpt(engine) as sdk:
        first = await sdk.responses.create(model="tiny", input="go")
        given = [{"role": "user", "content": "go"}, *map(refer, first.output), *RESULTS]
        second = await sdk.responses.create(model="tiny", input=given)
        assert engine.requests[-1].prompt.messages == (
            Message("user", (TextPart("go"),)),
            Message(
                "assistant",
                (
                    ThinkingPart("Let me think."),
                    TextPart("I will look."),
                    ToolCallPart("call_1", "read", {"path": "/tmp/a", "n": 1}),
                    ToolCallPart("call_2", "read", {}),
                ),
            ),
            Message("tool", (ToolResultPart("call_1", "one"), ToolResultPart("call_2", "two"))),
        )
        # Kept is what was meant: the first response may go.
        await sdk.responses.delete(first.id)
        follow = await sdk.responses.create(
            model="tiny", input=[{"role": "user", "content": "and?"}], previous_response_id=second.id
        )
        assert follow.status == "completed"
        with pytest.raises(openai.BadRequestError, match="there is no item") as gone:
            await sdk.responses.create(model="tiny", input=given)
        assert gone.value.param == "input.1.id"


async def test_an_id_alone_is_a_reference():
    engine = FakeEngine()
    async with client(app_of(engine)) as http:
        told = (await http.post(PATH, json={"model": "tiny", "input": "hi"})).json()
        given = [{"id": told["output"][0]["id"]}, {"role": "user", "content": "go on"}]
        assert (await http.post(PATH, json={"model": "tiny", "input": given})).status_code == 200
        said = [message.role for message in engine.requests[-1].prompt.messages]
        assert said == ["assistant", "user"]


@pytest.mark.parametrize("id", ["msg_1", "", "rs_" + "0" * 26, "file_" + "g" * 26])
async def test_unknown_items_are_told(id):
    async with client(app_of(FakeEngine())) as http:
        answer = await http.post(PATH, json={"model": "tiny", "input": [refer(id)]})
        assert answer.status_code == 400
        assert message_of(PATH, answer) == (
            f"input.0.id: there is no item {id!r} here (any more); send the item itself"
        )


async def test_what_is_not_stored_can_not_be_referred_to():
    async with client(app_of(FakeEngine())) as http:
        told = (await http.post(PATH, json={"model": "tiny", "input": "hi", "store": False})).json()
        given = {"model": "tiny", "input": [refer(told["output"][0]["id"])]}
        assert (await http.post(PATH, json=given)).status_code == 400


def asked(*items, known=lambda id: None):
    body = {"model": "tiny", "input": list(items)}
    return parse(json.dumps(body).encode(), item_of=known)


def test_references_are_bounded(monkeypatch):
    large = json.dumps({"type": "message", "role": "user", "content": "x" * 400}).encode()
    monkeypatch.setattr(request, "MAX_BYTES", 1000)
    assert len(asked(*[refer("a")] * 2, known=lambda id: large).messages) == 2
    with pytest.raises(InvalidRequest, match="too large together") as refused:
        asked(*[refer("a")] * 3, known=lambda id: large)
    assert refused.value.param == "input.2.id"
    for id in (None, 5, ["a"]):
        with pytest.raises(InvalidRequest, match=r"input\.0\.id: this field is required"):
            asked({"type": "item_reference", "id": id})


def test_an_item_tells_its_response():
    response = new_response_id()
    assert response_of(item_id("msg", response, 3)) == response_of(item_id("fc", response, 300)) == response
    for other in ("", "resp_", response, "msg_1", f"msg_{'A' * 26}", f"{item_id('msg', response, 1)} "):
        assert response_of(other) is None
