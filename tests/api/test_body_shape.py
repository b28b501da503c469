"""Bodies that would become far more memory than they are bytes are refused before they are built."""

import contextlib
import json
import tracemalloc

import pytest
from app_client import DOORS, client, message_of
from app_client import body as body_of
from fake_engine import FakeEngine, app_of

from omlxd.api.anthropic import request
from omlxd.api.fields.body import MOST_CONTAINERS, check_shape
from omlxd.api.openai import chat_request
from omlxd.chat import Conversation
from omlxd.errors import InvalidRequest

MB = 10**6
UNITS = {"lists": b"[],", "objects": b"{},", "numbers": b"0,", "texts": b'"",', "members": b'"":0,'}


def filled(unit: bytes, size: int) -> bytes:
    inner = (unit * (size // len(unit)))[:-1]
    opens, closes = (b"{", b"}") if b":" in unit else (b"[", b"]")
    return b'{"metadata":' + opens + inner + closes + b"}"


@pytest.mark.parametrize("unit", UNITS.values(), ids=UNITS)
def test_too_many_of_anything_are_refused(unit: bytes):
    with pytest.raises(InvalidRequest, match="holds more than 200,000 JSON objects and lists"):
        check_shape(filled(unit, 12 * MB))


def test_names_are_dearer_than_values():
    for size, fits in ((MB, True), (2 * MB, False)):
        with contextlib.nullcontext() if fits else pytest.raises(InvalidRequest, match="300,000 fields"):
            check_shape(filled(UNITS["members"], size))
    code = "a: b; " * (MB // 2)  # A colon in a text is none.
    check_shape(json.dumps({"messages": [{"role": "user", "content": code}] * 3}).encode())


@pytest.mark.parametrize("text", ["[{,}]" * 10**6, '"[{,\\"}]' * 10**6, "\\" * 10**6 + "[" * 10**6])
def test_signs_within_texts_are_text(text: str):
    check_shape(json.dumps({"messages": [{"role": "user", "content": text}] * 3}).encode())


def test_a_long_prompt_of_token_ids_and_a_long_session_pass():
    check_shape(json.dumps({"prompt": list(range(10**6))}).encode())
    turn = {"role": "user", "content": [{"type": "text", "text": "x" * 500}]}
    check_shape(json.dumps({"messages": [turn] * (MOST_CONTAINERS // 4)}).encode())


def test_json_within_texts_is_bounded_for_all_of_them_together():
    text = json.dumps([[]] * 60_000)
    call = {"type": "function", "function": {"name": "a", "arguments": text}}
    few = {"messages": [{"role": "assistant", "tool_calls": [call] * 2}]}
    prompt = chat_request.parse(json.dumps(few).encode()).generate.prompt
    assert isinstance(prompt, Conversation) and len(prompt.messages[0].parts) == 2
    many = {"messages": [{"role": "assistant", "tool_calls": [call] * 50}], "guided_json": text}
    with pytest.raises(InvalidRequest, match="guided_json: too much JSON within"):
        chat_request.parse(json.dumps(many).encode())
    user = json.dumps({"session_id": "s", "more": [[]] * 10**6})
    told = {"messages": [{"role": "user", "content": "x"}], "metadata": {"user_id": user}}
    assert request.parse(json.dumps(told).encode()).generate.session == user[:200]


@pytest.mark.parametrize("path", [*DOORS, "/omlxd/why-miss", "/omlxd/cache/forget"])
async def test_no_path_builds_them(path: str):
    async with client(app_of(FakeEngine())) as http:
        raw = json.dumps(body_of(path)).encode()[:-1] + b"," + filled(b"[],", 8 * MB)[1:]
        tracemalloc.start()
        try:
            answer = await http.post(path, content=raw)
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert answer.status_code == 400 and "holds more than" in message_of(path, answer)
        assert peak < 60 * MB  # The body, and copies of it.
