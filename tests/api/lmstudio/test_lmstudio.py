"""LM Studio's `POST /api/v1/chat`: bodies in, items and events out, and turns that are kept."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest
from app_client import client
from fake_engine import EVERYTHING, HELLO, FakeEngine, app_of

from omlxd.api.lmstudio.answer import LMStudioStream
from omlxd.api.lmstudio.request import parse
from omlxd.chat import (
    Conversation,
    ImagePart,
    Message,
    Progress,
    TextDelta,
    TextPart,
    ThinkingPart,
)
from omlxd.errors import InvalidRequest, Unavailable

CHAT = "/api/v1/chat"
PNG = "data:image/png;base64," + base64.b64encode(b"\x89PNG").decode()


def parsed(input: Any = "hi", **fields: Any):
    return parse(json.dumps({"model": "tiny", "input": input, **fields}).encode())


def prompt(input: Any = "hi", **fields: Any) -> Conversation:
    made = parsed(input, **fields).generate.prompt
    assert isinstance(made, Conversation)
    return made


def events(text: str) -> list[tuple[str, dict[str, Any]]]:
    pieces = [piece.split("\n") for piece in text.strip().split("\n\n") if not piece.startswith(":")]
    told = [(name.removeprefix("event: "), json.loads(data.removeprefix("data: "))) for name, data in pieces]
    assert all(data["type"] == name for name, data in told)
    return told


def test_each_field():
    got = parsed(
        temperature=0.5, top_p=0.9, top_k=5.0, min_p=0.1, repeat_penalty=1.2, max_output_tokens=7.0,
        context_length=2000, stream=True, store=False, integrations=[],
    )  # fmt: skip
    sampling = got.generate.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.5, 0.9, 5)
    assert (sampling.min_p, sampling.repetition_penalty, sampling.max_tokens) == (0.1, 1.2, 7)
    assert got.generate.context_limit == 2000 and got.stream and not got.store
    nothing = parsed(**dict.fromkeys(["temperature", "system_prompt", "stream", "store", "reasoning"]))
    assert nothing == parsed() and nothing.store and not nothing.stream


@pytest.mark.parametrize(
    ("word", "thinking", "effort"),
    [("off", False, ""), ("on", True, ""), ("low", True, "low"), ("high", True, "high"), (None, None, "")],
)
def test_reasoning(word, thinking, effort):
    made = prompt(reasoning=word)
    assert (made.thinking, made.effort) == (thinking, effort)


def test_input_is_one_message_of_texts_and_images():
    assert prompt(system_prompt="Be brief").messages == (
        Message("system", (TextPart("Be brief"),)),
        Message("user", (TextPart("hi"),)),
    )
    [message] = prompt(
        [
            {"type": "message", "content": "What"},
            {"type": "text", "content": "is"},
            {"type": "input_text", "text": "this?"},
            {"type": "image", "data_url": PNG},
        ]
    ).messages
    assert message.parts[:3] == (TextPart("What"), TextPart("is"), TextPart("this?"))
    assert isinstance(message.parts[3], ImagePart) and message.parts[3].data == b"\x89PNG"


@pytest.mark.parametrize(
    ("param", "fields"),
    [
        ("input", {"input": ""}),
        ("input", {"input": []}),
        ("input.0.content", {"input": [{"type": "message"}]}),
        ("input.1.data_url", {"input": [{"text": "a"}, {"type": "image", "data_url": "http://a/b.png"}]}),
        ("input.0.type", {"input": [{"type": "video"}]}),
        ("integrations", {"integrations": ["mcp/playwright"]}),
        ("reasoning", {"reasoning": "max"}),
        ("max_output_tokens", {"max_output_tokens": 0}),
        ("temperature", {"temperature": -1}),
    ],
)
def test_what_is_refused(param, fields):
    with pytest.raises(InvalidRequest) as error:
        parsed(**{"input": "hi", **fields})
    assert error.value.param == param


async def test_a_stream_ends_with_the_whole_answer():
    script = (Progress(64, 128), Progress(128, 128), *EVERYTHING[:4], HELLO[-1])
    async with client(app_of(FakeEngine(script))) as http:
        whole = (await http.post(CHAT, json={"model": "tiny", "input": "hi"})).json()
        told = events((await http.post(CHAT, json={"model": "tiny", "input": "hi", "stream": True})).text)
    assert whole["output"] == [
        {"type": "reasoning", "content": "Let me think."},
        {"type": "message", "content": "I will look."},
    ]
    stats = whole["stats"]
    assert (stats["input_tokens"], stats["total_output_tokens"]) == (100, 7)
    assert (stats["reasoning_output_tokens"], stats["time_to_first_token_seconds"]) == (3, 0.25)
    assert whole.pop("response_id").startswith("resp_") and whole["model_instance_id"] == "tiny"
    names = [name for name, _ in told]
    assert names == [
        *("chat.start", "prompt_processing.start"),
        *["prompt_processing.progress"] * 2,
        "prompt_processing.end",
        *("reasoning.start", "reasoning.delta", "reasoning.delta", "reasoning.end"),
        *("message.start", "message.delta", "message.delta", "message.end"),
        "chat.end",
    ]
    assert [data["progress"] for _, data in told if "progress" in data] == [0.5, 1.0]
    result = told[-1][1]["result"]
    assert result.pop("response_id").startswith("resp_") and result == whole


def test_what_failed_is_told_with_what_was_said():
    stream = LMStudioStream("resp_1", parsed(), lambda *_: pytest.fail("it is not kept"))
    said = stream.start() + stream.event(TextDelta("He")) + stream.error(Unavailable("The engine ended."))
    *_, (_, failed), (_, ended), (_, last) = events(said.decode())
    assert failed["error"]["type"] == "internal_error" and "engine ended" in failed["error"]["message"]
    assert ended["type"] == "message.end" and last["result"]["output"][0]["content"] == "He"
    assert "response_id" not in last["result"]


async def test_a_chat_goes_on():
    engine = FakeEngine(EVERYTHING)
    async with client(app_of(engine)) as http:

        async def ask(**fields: Any) -> dict[str, Any]:
            return (await http.post(CHAT, json={"model": "tiny", **fields})).json()

        first = await ask(input="I like blue.", system_prompt="Be brief")
        streamed = await http.post(
            CHAT, json={"input": "Which?", "previous_response_id": first["response_id"], "stream": True}
        )
        second = events(streamed.text)[-1][1]["result"]
        other = {"input": "So?", "previous_response_id": second["response_id"], "system_prompt": "Be long"}
        last = await ask(**other, store=False)
        assert "response_id" not in last
        gone = await http.post(CHAT, json={"input": "a", "previous_response_id": "resp_x"})
        assert gone.status_code == 404 and gone.json()["error"]["param"] == "previous_response_id"
        # No response of OpenAI's API.
        assert (await http.get(f"/v1/responses/{first['response_id']}")).status_code == 404
    answer = Message("assistant", (ThinkingPart("Let me think."), TextPart("I will look.")))
    said = [Message("user", (TextPart(text),)) for text in ("I like blue.", "Which?", "So?")]
    brief, long = (Message("system", (TextPart(text),)) for text in ("Be brief", "Be long"))
    assert [each.prompt.messages for each in engine.requests] == [
        (brief, said[0]),
        (brief, said[0], answer, said[1]),
        (long, said[0], answer, said[1], answer, said[2]),
    ]
