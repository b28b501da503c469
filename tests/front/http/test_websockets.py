"""A WebSocket is refused with words: LM Studio's SDK raises them, others read them in the answer's body."""

from __future__ import annotations

import json

import pytest
from app_client import client
from fake_engine import FakeEngine, app_of

from omlxd.front.http.sending.websockets import LM_STUDIO, NOT_FOR_SDK


async def told(path: str, *received: str, agent: bytes = b"") -> list[dict]:
    """What the app sends to a client that connects, and then sends what is `received`."""
    waiting = [{"type": "websocket.connect"}, *({"type": kind} for kind in received)]
    sent: list[dict] = []

    async def receive():
        return waiting.pop(0)

    async def send(message):
        sent.append(message)

    scope = {"type": "websocket", "path": path, "headers": [(b"user-agent", agent)], "query_string": b""}
    await app_of(FakeEngine())(scope, receive, send)
    return sent


@pytest.mark.parametrize("path", sorted(LM_STUDIO))
async def test_lm_studios_sdk_raises_what_it_is_told(path):
    accepted, answer, closed = await told(path, "websocket.receive")
    assert accepted["type"] == "websocket.accept"
    assert json.loads(answer["text"]) == {"success": False, "error": NOT_FOR_SDK}
    assert closed["code"] == 1008 and "/api/v1/chat" in closed["reason"]
    assert len(await told(path, "websocket.disconnect")) == 1


async def test_the_sdk_for_python_reads_an_object():
    _, answer, _ = await told("/llm", "websocket.receive", agent=b"python-httpx/0.28.1")
    assert json.loads(answer["text"])["error"] == {"title": NOT_FOR_SDK}


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/realtime", "/", "/x\n" + "y" * 5000])
async def test_another_client_reads_why(path):
    start, body = await told(path)
    assert start["status"] == 426 and dict(start["headers"])[b"connection"] == b"close"
    error = json.loads(body["body"])["error"]
    assert "Ask over HTTP" in error["message"] and len(error["message"]) < 500


async def test_lm_studios_sdk_finds_the_server():
    async with client(app_of(FakeEngine())) as http:
        assert (await http.get("/lmstudio-greeting")).json() == {"lmstudio": True}
