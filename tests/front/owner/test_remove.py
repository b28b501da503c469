"""`POST /omlxd/models/remove`: whose files go, who may say so, and that nobody loads them meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from app_client import client
from engine_processes import alive, until

from omlxd.chat import GenerateRequest, RawPrompt
from omlxd.errors import NotFound
from omlxd.front.app import create_app
from omlxd.front.engines import pool as pool_module
from omlxd.front.engines.pool import EnginePool
from omlxd.front.http.settings import HttpSettings
from omlxd.front.owner.models import admin_routes
from tests.front.engines.test_pool import ask, make_adapter, pool, states, surroundings
from tests.models.test_resolve import make

__all__ = ["surroundings"]
REMOVE = "/omlxd/models/remove"


@contextlib.asynccontextmanager
async def owner(made: EnginePool, api_key: str = "", **headers: str) -> AsyncIterator[httpx.AsyncClient]:
    app = create_app(made, HttpSettings(api_key=api_key), admin_routes(made))
    async with client(app) as http:
        http.headers.update(headers)
        yield http


async def remove(http: httpx.AsyncClient, model: str) -> tuple[int, dict[str, Any]]:
    answer = await http.post(REMOVE, json={"model": model})
    return answer.status_code, answer.json()


async def test_a_loaded_model_is_unloaded_and_its_folder_deleted(tmp_path: Path):
    async with pool(tmp_path, "org/a", "org/b") as made, owner(made) as http:
        loaded = (await http.post("/omlxd/models/load", json={"model": "a"})).json()
        status, said = await remove(http, "a")
        assert (status, said["id"], said["folder"]) == (200, "org/a", str(tmp_path / "models" / "org" / "a"))
        assert said["bytes"] == loaded["disk_bytes"] > 0 and not alive(loaded["pid"])
        assert [each.name for each in (tmp_path / "models" / "org").iterdir()] == ["b"]
        assert states(made) == {"org/b": "unloaded"}
        assert (await remove(http, "org/a"))[0] == 404


@pytest.mark.parametrize(
    ("key", "model", "status", "words"),
    [
        ("", "a", 401, "key"),
        ("wrong", "a", 401, "key"),
        ("s3cret", "nonsense", 404, "nonsense"),
        ("s3cret", "../models/a", 404, "../models/a"),
        ("s3cret", "own", 400, "a folder of your own; delete it there"),
    ],
)
async def test_what_may_not_go_stays(tmp_path: Path, key: str, model: str, status: int, words: str):
    own = make(tmp_path / "elsewhere" / "own")
    flags = {"model": str(own)}
    headers = {"authorization": f"Bearer {key}"} if key else {}
    async with pool(tmp_path, "a", **flags) as made, owner(made, "s3cret", **headers) as http:
        got, said = await remove(http, model)
        assert got == status and words in said["error"]["message"], said
        assert (own / "config.json").exists() and (tmp_path / "models" / "a" / "config.json").exists()
        assert set(states(made)) == {"own", "a"}


async def test_a_model_that_answers_stays(tmp_path: Path):
    async with pool(tmp_path, "a") as made, owner(made) as http:
        answer = asyncio.create_task(ask(made, "a", "gate hello"))
        await until(lambda: made.resolve("a").in_flight == 1 and states(made)["a"] == "ready")
        status, said = await remove(http, "a")
        assert status == 400 and "answers a request" in said["error"]["message"]
        (tmp_path / "gate").touch()
        await answer
        assert (tmp_path / "models" / "a").exists()
        assert (await remove(http, "a"))[0] == 200 and not (tmp_path / "models" / "a").exists()


async def test_nobody_loads_it_again_between_its_unload_and_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    deletes, goes_on, real = threading.Event(), threading.Event(), pool_module.remove_folder

    def slowly(folder: Path) -> None:
        deletes.set()
        assert goes_on.wait(60)
        real(folder)

    monkeypatch.setattr(pool_module, "remove_folder", slowly)
    make_adapter(tmp_path / "adapters" / "a" / "mine")
    async with pool(tmp_path, "a") as made, owner(made) as http:
        await made.load("a")
        engine = made.resolve("a")
        adapter = next((each for each in made.models() if each.installed.base), None)
        assert adapter is not None
        removal = asyncio.create_task(remove(http, "a"))
        await asyncio.to_thread(deletes.wait, 60)
        try:
            assert engine.state == "unloaded"
            with pytest.raises(NotFound, match="a is being deleted"):
                engine.generate(GenerateRequest(prompt=RawPrompt(text="hello")))
            with pytest.raises(NotFound, match="being deleted"):
                await engine.count_tokens(RawPrompt(text="hello"))
            load = await http.post("/omlxd/models/load", json={"model": "a"})
            assert load.status_code == 404 and "being deleted" in load.text
            assert (await remove(http, "a"))[0] == 404
            assert "being deleted" in str(await ask(made, adapter.model_id)), "its base goes"
            assert engine.state == "unloaded" and engine.starts == 1
        finally:
            goes_on.set()
        assert (await removal)[0] == 200 and not (tmp_path / "models" / "a").exists()
        assert "a" not in states(made)
