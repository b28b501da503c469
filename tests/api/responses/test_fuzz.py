"""No body of /v1/responses makes a 500."""

from __future__ import annotations

import asyncio
import json

import httpx
from app_client import client as plain
from fake_engine import EVERYTHING, FakeEngine, app_of
from fast_or_slow import counts
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from request_bodies import ruined
from responses import (
    AGENTS,
    PATCH,
    PIXEL,
    READ,
    item,
    text,
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


async def status(content: bytes) -> httpx.Response:
    async with plain(app_of(FakeEngine(EVERYTHING))) as client:
        return await client.post("/v1/responses", content=content)


def test_the_whole_body_is_fine():
    answer = asyncio.run(status(json.dumps(BODY).encode()))
    assert answer.status_code == 200 and "response.completed" in answer.text


@counts(30, 250)
def test_no_body_makes_a_500(count):
    @settings(max_examples=count, deadline=None, suppress_health_check=list(HealthCheck))
    @given(data=st.data())
    def check(data):
        answer = asyncio.run(status(json.dumps(ruined(data, BODY)).encode()))
        assert answer.status_code in (200, 400, 404), answer.text
        assert answer.status_code == 200 or answer.json()["error"]["message"]

    check()
