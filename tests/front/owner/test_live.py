"""`GET /omlxd/events`: what it tells, who may watch, and when it ends."""

import asyncio
import contextlib
import json
from typing import Any

import httpx
from app_client import body
from fake_engine import FakeEngine, app_of, served

from omlxd.front.owner import live


async def looks(stream: httpx.Response):
    async for line in stream.aiter_lines():
        if line.startswith("data: "):
            yield json.loads(line[6:])


@contextlib.asynccontextmanager
async def watched(http: httpx.AsyncClient, headers: dict[str, str] | None = None):
    async with http.stream("GET", "/omlxd/events", headers=headers) as answer:
        assert answer.status_code == 200 and answer.headers["content-type"] == "text/event-stream"
        yield looks(answer)


async def test_it_tells_the_hour_once_and_then_what_changed(monkeypatch: Any):
    monkeypatch.setattr(live, "PERIOD_S", 0.05)
    async with served(app_of(FakeEngine())) as url, httpx.AsyncClient(base_url=url) as http:
        chat = "/v1/chat/completions"
        assert (await http.post(chat, json=body(chat))).status_code == 200
        async with watched(http) as told:
            first = await anext(told)
            assert [model["id"] for model in first["status"]["models"]] == ["org/tiny"]
            assert first["memory_total"] >= first["memory_available"] > 0
            (slot,) = first["slots"]
            assert (slot["requests"], slot["prompt"], slot["cached_hot"], slot["cached_cold"]) == (
                1,
                100,
                48,
                16,
            )
            assert slot["first"] == 1 and slot["ttft_sum"] > 0
            await http.post(chat, json=body(chat))
            async for look in told:
                assert len(look["slots"]) <= 2
                if look["slots"][-1]["requests"] == 2 or look["slots"][-1]["at"] > slot["at"]:
                    break


async def test_one_too_many_is_told_to_wait_and_one_who_leaves_makes_room(monkeypatch: Any):
    monkeypatch.setattr(live, "PERIOD_S", 0.05)
    monkeypatch.setattr(live, "MOST_VIEWERS", 1)
    async with served(app_of(FakeEngine())) as url, httpx.AsyncClient(base_url=url) as http:
        async with watched(http) as told:
            await anext(told)
            refused = await http.get("/omlxd/events")
            assert refused.status_code == 503 and "viewers" in refused.text
        async with asyncio.timeout(60):
            while True:
                with contextlib.suppress(AssertionError):
                    async with watched(http) as told:
                        assert await anext(told)
                        break
                await asyncio.sleep(0.05)
        head = await http.head("/omlxd/events")
        assert head.status_code == 200 and not head.content


async def test_it_ends_when_the_daemon_stops():
    stopping = asyncio.Event()
    async with (
        served(app_of(FakeEngine(), stopping=stopping)) as url,
        httpx.AsyncClient(base_url=url) as http,
        watched(http) as told,
    ):
        await anext(told)
        stopping.set()
        assert [look async for look in told] == []


async def test_whoever_may_not_look_sees_nothing():
    async with served(app_of(FakeEngine(), api_key="k")) as url, httpx.AsyncClient(base_url=url) as http:
        assert (await http.get("/omlxd/events")).status_code == 401
        with_key = {"authorization": "Bearer k"}
        for headers in ({"host": "evil.example"}, {"sec-fetch-site": "cross-site"}):
            assert (await http.get("/omlxd/events", headers=with_key | headers)).status_code == 400
        async with watched(http, with_key | {"sec-fetch-site": "same-origin"}) as told:
            assert (await anext(told))["status"]["version"]
