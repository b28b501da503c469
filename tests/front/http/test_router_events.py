"""`GET /models/sse`: a model's status as it changes, in the form that pi and Zed read."""

import asyncio
import json
from collections.abc import AsyncIterator

import httpx
import pytest
from app_client import client
from fake_engine import FakeEngine, app_of, served

from omlxd.front.http.listing import router_events

PATH = "/models/sse"


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router_events, "LOOK_S", 0.01)


async def begun(answer: httpx.Response) -> AsyncIterator[str]:
    """Its lines, after the first: then changes are looked for."""
    assert answer.status_code == 200 and answer.headers["content-type"] == "text/event-stream"
    lines = answer.aiter_lines()
    assert await anext(lines) == ": statuses"
    return lines


async def next_event(lines: AsyncIterator[str]) -> dict[str, object]:
    async with asyncio.timeout(60):
        async for line in lines:
            if line.startswith("data: "):
                return json.loads(line[6:])
    raise AssertionError("the stream ended")


def changed(status: str) -> dict[str, object]:
    return {"model": "org/tiny", "event": "status_change", "data": {"status": status}}


async def test_changes_are_told_and_what_was_so_before_is_not():
    engine = FakeEngine()
    engine.state = "unloaded"
    async with (
        served(app_of(engine)) as url,
        httpx.AsyncClient(base_url=url) as http,
        http.stream("GET", PATH) as answer,
    ):
        lines = await begun(answer)
        for state, status in (("loading", "loading"), ("ready", "loaded"), ("failed", "unloaded")):
            engine.state = state
            assert await next_event(lines) == changed(status)


async def test_a_stream_ends_with_the_daemon_and_its_place_is_free_again(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(router_events, "MOST_LISTENERS", 1)
    stopping = asyncio.Event()
    async with (
        served(app_of(FakeEngine(), stopping=stopping)) as url,
        httpx.AsyncClient(base_url=url) as http,
    ):
        for _ in range(2):
            async with http.stream("GET", PATH) as answer:
                await begun(answer)
                assert (await http.get(PATH)).status_code == 503
            async with asyncio.timeout(60):
                while await full(http):
                    await asyncio.sleep(0.01)
        async with http.stream("GET", PATH) as answer:
            lines = await begun(answer)
            stopping.set()
            async with asyncio.timeout(60):
                assert [line async for line in lines if line] == []


async def full(http: httpx.AsyncClient) -> bool:
    async with http.stream("GET", PATH) as answer:
        return answer.status_code == 503


async def test_a_key_is_asked_for():
    async with client(app_of(FakeEngine(), api_key="k")) as http:
        assert (await http.get(PATH)).status_code == 401
