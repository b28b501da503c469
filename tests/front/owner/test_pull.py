"""`POST /omlxd/models/pull` and `/api/pull`: how far it is, its end, and that it ends with whoever asked."""

import asyncio
import json
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from fake_engine import FakeEngine, FakeEngines, ollama_pull, served
from starlette.routing import Route

from omlxd.errors import ModelError, Overloaded
from omlxd.front.app import create_app
from omlxd.front.http.settings import HttpSettings
from omlxd.front.owner import pull

PULL = "/omlxd/models/pull"


class Hub:
    """Stands in for the download: it ends when `end` is set, with `error` if there is one."""

    def __init__(self) -> None:
        self.end, self.ended = asyncio.Event(), asyncio.Event()
        self.error = ""
        self.begun = 0

    async def fetch(self, model: str, note: Callable[[int, int], None]) -> Path:
        self.begun += 1
        try:
            note(10, 100)
            note(0, 100)  # Another bar, which does not move.
            await self.end.wait()
            if self.error:
                raise ModelError(self.error, code="unavailable")
            return Path("/models") / model
        finally:
            self.ended.set()


@pytest.fixture
async def hub(monkeypatch: pytest.MonkeyPatch) -> Hub:
    made = Hub()
    monkeypatch.setattr(pull, "fetch_from_hub", made.fetch)
    monkeypatch.setattr(pull, "TELL_S", 0.05)
    return made


def app(**settings: Any):
    looks: list[bool] = []

    async def look_for_models(afresh: bool) -> None:
        looks.append(afresh)

    engines = FakeEngines(FakeEngine())
    pool: Any = SimpleNamespace(look_for_models=look_for_models, find_engine=engines.find_engine)
    route = Route(PULL, pull.Pulling(pool).pull, methods=["POST"])
    return create_app(engines, HttpSettings(**settings), [route, ollama_pull(pool)]), looks


async def told(answer: httpx.Response):
    assert answer.status_code == 200 and answer.headers["content-type"] == "text/event-stream"
    async for line in answer.aiter_lines():
        if line.startswith("data: "):
            yield json.loads(line[6:])


async def test_it_says_how_far_it_is_and_where_the_model_lies(hub: Hub):
    made, looks = app()
    async with (
        served(made) as url,
        httpx.AsyncClient(base_url=url) as http,
        http.stream("POST", PULL, json={"model": "org/tiny"}) as answer,
    ):
        events = told(answer)
        assert await anext(events) == {"done": 10, "total": 100}
        again = await http.post(PULL, json={"model": "org/tiny"})
        assert again.status_code == 503 and hub.begun == 1
        hub.end.set()
        rest = [event async for event in events]
        assert rest[-1] == {"id": "org/tiny", "folder": "/models/org/tiny"} and looks == [True]


async def test_what_fails_is_told_and_can_be_tried_again(hub: Hub):
    hub.error = "the hub can't be reached"
    hub.end.set()
    async with served(app()[0]) as url, httpx.AsyncClient(base_url=url) as http:
        for _ in range(2):
            async with http.stream("POST", PULL, json={"model": "org/tiny"}) as answer:
                assert [event async for event in told(answer)][-1] == {"error": {"message": hub.error}}


async def test_of_those_that_ask_at_the_same_time_one_downloads(hub: Hub):
    hub.end.set()
    pool: Any = SimpleNamespace(look_for_models=lambda afresh: asyncio.sleep(0))
    pulling = pull.Pulling(pool)
    asked = [pulling._begin(model) for model in ("org/tiny", "org/tiny", "org/other", "org/third")]

    async def last(events: AsyncGenerator[pull.Event, None]) -> pull.Event:
        return [event async for event in events][-1]

    told = await asyncio.gather(*map(last, asked), return_exceptions=True)
    assert hub.begun == 2 and [type(each) for each in told] == [dict, Overloaded, dict, Overloaded]


async def test_whoever_goes_away_ends_it(hub: Hub):
    async with served(app()[0]) as url, httpx.AsyncClient(base_url=url) as http:
        async with http.stream("POST", PULL, json={"model": "org/tiny"}) as answer:
            await anext(told(answer))
        async with asyncio.timeout(60):
            await hub.ended.wait()


async def test_who_may_not_and_what_is_no_hub_id(hub: Hub):
    async with served(app(api_key="k")[0]) as url, httpx.AsyncClient(base_url=url) as http:
        assert (await http.post(PULL, json={"model": "org/tiny"})).status_code == 401
    async with served(app(max_body_bytes=100)[0]) as url, httpx.AsyncClient(base_url=url) as http:
        site = {"origin": "http://localhost:3000", "sec-fetch-site": "same-site"}
        assert (await http.post(PULL, json={"model": "org/tiny"}, headers=site)).status_code == 400
        plain = {"origin": url, "content-type": "text/plain"}
        assert (await http.post(PULL, content='{"model": "org/tiny"}', headers=plain)).status_code == 400
        assert (await http.post(PULL, json={"model": "x" * 100})).status_code == 413
        for model in ("", "tiny", "../x", "/etc", "org/tiny/x", "~nobody-here/x"):
            assert (await http.post(PULL, json={"model": model})).status_code == 400
    async with served(app()[0]) as url, httpx.AsyncClient(base_url=url) as http:
        assert (await http.post(PULL, json={"model": "x" * 300})).status_code == 400
    assert hub.begun == 0


async def lines(answer: httpx.Response) -> list[Any]:
    assert answer.headers["content-type"] == "application/x-ndjson"
    return [json.loads(line) async for line in answer.aiter_lines()]


@pytest.mark.parametrize("name", ["org/new", "hf.co/org/new", "https://huggingface.co/org/new:latest"])
async def test_ollamas_clients_see_a_bar(hub: Hub, name: str):
    hub.end.set()
    made, looks = app()
    async with served(made) as url, httpx.AsyncClient(base_url=url) as http:
        async with http.stream("POST", "/api/pull", json={"model": name}) as answer:
            told = await lines(answer)
        whole = await http.post("/api/pull", json={"name": name, "stream": False})
    assert told[-1] == whole.json() == {"status": "success"} and looks == [True, True]


async def test_ollamas_clients_see_how_far_it_is_and_what_fails(hub: Hub):
    hub.error = "the hub can't be reached"
    async with served(app()[0]) as url, httpx.AsyncClient(base_url=url) as http:
        async with http.stream("POST", "/api/pull", json={"model": "org/new"}) as answer:
            asyncio.get_running_loop().call_later(0.2, hub.end.set)
            first, *_, last = await lines(answer)
        whole = await http.post("/api/pull", json={"model": "org/new", "stream": False})
    bar = {"digest": "models:org/new", "total": 100, "completed": 10}
    assert first == {"status": "pulling org/new", **bar} and last == {"error": hub.error}
    assert whole.status_code == 503 and whole.json() == {"error": hub.error}


async def test_a_page_of_another_site_downloads_nothing(hub: Hub):
    async with served(app()[0]) as url, httpx.AsyncClient(base_url=url) as http:
        site = {"origin": "http://localhost:3000", "sec-fetch-site": "same-site"}
        refused = await http.post("/api/pull", json={"model": "org/new"}, headers=site)
    assert refused.status_code == 400 and hub.begun == 0
