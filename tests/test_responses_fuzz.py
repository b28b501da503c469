"""No body of /v1/responses makes a 500."""

from __future__ import annotations

import asyncio
import copy
import json

import httpx
from app_client import client as plain
from fake_engine import EVERYTHING, FakeEngine, app_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from responses import (
    AGENTS,
    PATCH,
    PIXEL,
    READ,
    item,
    text,
)

junk = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**30), 10**30) | st.text(max_size=6) | st.floats(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
BODY = {
    "model": "tiny",
    "instructions": "i",
    "input": [
        item("user", text("u"), {"type": "input_image", "image_url": f"data:image/png;base64,{PIXEL}"}),
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "s"}], "encrypted_content": "x"},
        {"type": "function_call", "call_id": "c", "name": "read", "arguments": "{}", "namespace": "n"},
        {"type": "function_call_output", "call_id": "c", "output": [text("x")]},
        {"type": "shell_call", "call_id": "d", "action": {"commands": ["ls"]}},
        {"type": "tool_search_output", "call_id": "d", "tools": [READ]},
    ],
    "tools": [READ, AGENTS, PATCH, {"type": "web_search"}],
    "tool_choice": "auto",
    "reasoning": {"effort": "low"},
    "text": {"format": {"type": "text"}},
    "metadata": {"a": "b"},
    "stream": True,
    "include": ["reasoning.encrypted_content"],
    "max_output_tokens": 5,
}


def places(value):
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in list(items):
        yield value, key
        yield from places(inner)


async def status(content: bytes) -> httpx.Response:
    async with plain(app_of(FakeEngine(EVERYTHING))) as client:
        return await client.post("/v1/responses", content=content)


def test_the_whole_body_is_fine():
    answer = asyncio.run(status(json.dumps(BODY).encode()))
    assert answer.status_code == 200 and "response.completed" in answer.text


@settings(max_examples=250, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_no_body_makes_a_500(data):
    body = copy.deepcopy(BODY)
    for _ in range(data.draw(st.integers(1, 2))):
        container, key = data.draw(st.sampled_from(list(places(body))))
        if data.draw(st.booleans()):
            container[key] = data.draw(junk)
        else:
            del container[key]
        if not body:
            break
    answer = asyncio.run(status(json.dumps(body).encode()))
    assert answer.status_code in (200, 400, 404), answer.text
    assert answer.status_code == 200 or answer.json()["error"]["message"]
