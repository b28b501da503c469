"""EnginePool over stub engines: several models, loading on demand, who goes and when, names."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import mlx.core as mx
import pytest
from engine_processes import alive, until, words

from omlxd.chat import Conversation, Event, Failed, Finished, GenerateRequest, RawPrompt, Sampling
from omlxd.config import load_settings
from omlxd.errors import AdapterError, InvalidRequest, ModelError, NotFound, OmlxdError
from omlxd.front.app import create_app
from omlxd.front.engines import adapters, client
from omlxd.front.engines import pool as pool_module
from omlxd.front.engines.model import with_settings
from omlxd.front.engines.pool import EnginePool
from omlxd.front.owner.engine_metrics import MetricsOf
from omlxd.front.owner.models import admin_routes
from omlxd.front.owner.status import Admin
from omlxd.models import resolve
from omlxd.models.adapters import adapter_state
from omlxd.models.catalog import LOOK_HOLDS_S
from omlxd.models.footprint import footprint
from omlxd.models.resolve import DEFAULT_ID, DEMO_ID
from tests.models.test_resolve import make

STUB = Path(__file__).parents[2] / "support" / "stub_engine.py"
REPO = str(Path(__file__).resolve().parents[3])
HANGS_S = 300
"""How long a disk that hangs does so, if the test does not end it."""


@pytest.fixture(autouse=True)
def surroundings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("PYTHONPATH", REPO)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "no-hub"))
    # A stub on a busy machine may be slow to say what it holds, and what it says is what is tested.
    monkeypatch.setattr(client, "STATS_TIMEOUT_S", 60.0)


def settings(home: Path, text: str = "", **flags: str):
    home.mkdir(exist_ok=True)
    (home / "omlxd.toml").write_text(text)
    return load_settings({"base_path": str(home), "model_dir": str(home / "models"), **flags}, {})


@contextlib.asynccontextmanager
async def pool(
    home: Path, *names: str, text: str = "", stub: str = "", **flags: str
) -> AsyncIterator[EnginePool]:
    for name in names:
        if not (home / "models" / name).exists():
            make(home / "models" / name)
    command = [sys.executable, str(STUB), "--notes", str(home), *stub.split()]
    made = EnginePool(settings(home, text, **flags), command, room_wait_s=0.5)
    made.start()
    try:
        yield made
    finally:
        await asyncio.wait_for(made.close(0.1, 1.0), 60)


async def ask(made: EnginePool, model: str, text: str = "hello") -> list[Event]:
    request = GenerateRequest(prompt=RawPrompt(text=text))
    return [event async for event in made.resolve(model).generate(request)]


def states(made: EnginePool) -> dict[str, str]:
    return {engine.model_id: engine.state for engine in made.models()}


def make_adapter(folder: Path) -> Path:
    """Whole, of a matrix that means nothing."""
    folder.mkdir(parents=True)
    mx.save_safetensors(str(folder / "adapters.safetensors"), {"layers.0.q.lora_a": mx.zeros(1)})
    config = {"num_layers": 1, "lora_parameters": {"rank": 1, "scale": 1.0, "dropout": 0.0}}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def notes(home: Path) -> str:
    path = home / "notes.txt"
    return path.read_text() if path.exists() else ""


async def test_models_of_a_folder_are_loaded_when_they_are_asked_for(tmp_path: Path):
    async with pool(tmp_path, "small", "org/big", "org/other") as made:
        assert states(made) == dict.fromkeys(["org/big", "org/other", "small"], "unloaded")
        (tmp_path / "models" / "no-model").mkdir()
        answers = await asyncio.gather(ask(made, "small"), ask(made, "org/big"), ask(made, "big"))
        assert all(isinstance(events[-1], Finished) for events in answers)
        assert states(made) == {"org/big": "ready", "org/other": "unloaded", "small": "ready"}
        with pytest.raises(NotFound, match="org/other"):
            await made.find_engine("no-model")
        make(tmp_path / "models" / "new")  # No restart is needed to find it.
        await made.find_engine("new")
        assert words(await ask(made, "new")) == ["hello"]
        with pytest.raises(NotFound):
            made.resolve("../models/small")


async def test_the_model_of_the_flag_is_loaded_at_start_and_is_the_default(tmp_path: Path):
    async with pool(tmp_path, "a", "org/b", model="org/b") as made:
        await until(lambda: states(made)["org/b"] == "ready")
        assert [engine.model_id for engine in made.models()] == ["org/b", "a"]
        await ask(made, "a")
        assert made.resolve("claude-haiku-4-5-20251001").model_id == "org/b"


async def test_a_draft_model_is_found_by_its_name_and_counts_as_the_models_memory(tmp_path: Path):
    text = '[models.big]\ndraft-model = "small"\n[models.other]\ndraft-model = "./nowhere"\n'
    async with pool(tmp_path, "big", "org/small", "other", text=text) as made:
        big = made.resolve("big")
        await asyncio.to_thread(big.measure)
        alone = big.footprint
        load = await made._prepare(big)
        small = tmp_path / "models" / "org" / "small"
        assert load.draft_path == str(small)
        assert alone is not None and big.footprint is not None
        assert big.footprint.weights == alone.weights + footprint(small).weights
        assert big.disk_bytes == alone.weights
        with pytest.raises(ModelError, match=r"draft-model of other: .*nowhere"):
            await made._prepare(made.resolve("other"))


async def test_settings_read_again_warn_of_a_draft_model_that_is_not_there(tmp_path: Path, caplog):
    caplog.set_level("INFO", "omlxd")
    text = '[models."org/a"]\nspeculation = "auto"\ndraft-model = "{}"\n'
    async with pool(tmp_path, "org/a", "small") as made:
        await ask(made, "a")
        for draft, warned in (("./nowhere", True), ("small", False), ("org/on-a-hub", False)):
            caplog.clear()
            await made.apply_settings(settings(tmp_path, text.format(draft)))
            assert "org/a takes up speculation, draft-model when it is loaded again" in caplog.text
            warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
            assert len(warnings) == warned
        await made.apply_settings(settings(tmp_path, text.format("./nowhere")))
        assert f"draft-model of org/a: there is no folder {Path('nowhere').absolute()}; give" in caplog.text
        await made.apply_settings(settings(tmp_path, '[models."org/a"]\nadapter = "/nowhere"\n'))
        said = "adapter of org/a: the adapter can't be used: /nowhere/adapter_config.json can't be read"
        assert said in caplog.text
        with pytest.raises(AdapterError, match=said) as caught:
            await made._spawn(made.resolve("a"))
        assert caught.value.code == "model_unusable"


async def test_an_adapter_of_the_settings_that_fits_no_layer_is_no_fault_of_the_request(tmp_path: Path):
    own = make_adapter(make(tmp_path / "models" / "a") / "own")
    text = f'[models.a]\nadapter = "{own}"\n'
    async with pool(tmp_path, "a", text=text, stub="--load-fails misfit") as made:
        for name, code in (("a", "model_unusable"), ("a:own", "invalid_request")):
            [failed] = await ask(made, name)
            assert isinstance(failed, Failed) and (failed.code, "misfit" in failed.message) == (code, True)
            assert ("adapter of a: " in failed.message) == (name == "a")


async def test_a_mended_setting_or_the_owner_ends_the_hold_of_a_model_that_failed(tmp_path: Path):
    text = '[models.big]\ndraft-model = "./nowhere"\n'
    async with pool(tmp_path, "big", "small", text=text) as made:
        assert isinstance((await ask(made, "big"))[-1], Failed)
        with pytest.raises(ModelError, match=r"its files or settings change, `omlxd models load big` a"):
            await ask(made, "big")
        made.apply_settings(settings(tmp_path, text.replace("./nowhere", "./elsewhere")))
        assert "elsewhere" in str((await ask(made, "big"))[-1])
        (tmp_path / "models" / "big" / "config.json").rename(tmp_path / "kept.json")
        with pytest.raises(OmlxdError, match=r"config\.json"):
            await made.load("big")
        (tmp_path / "kept.json").rename(tmp_path / "models" / "big" / "config.json")
        made.apply_settings(settings(tmp_path))
        await made.load("big")
        assert states(made)["big"] == "ready"


async def test_changed_files_end_the_hold_of_a_model_that_failed_for_good(tmp_path: Path):
    """Its own files, or those of its draft model."""
    text = '[models.a]\ndraft-model = "small"\n'
    async with pool(tmp_path, "a", "small", text=text, stub="--load-fails lasting:unknown") as made:
        for starts, changed in enumerate(("", "a/config.json", "small/config.json"), 1):
            if changed:
                os.utime(tmp_path / "models" / changed, (1, 1))
            await made.find_engine("a")
            assert isinstance((await ask(made, "a"))[-1], Failed)
            for _ in range(3):
                with pytest.raises(ModelError, match="unknown"):
                    (await made.find_engine("a")).generate(GenerateRequest(prompt=RawPrompt(text="x")))
            assert made.resolve("a").starts == starts


async def test_a_hub_that_is_away_is_no_fault_of_the_model(tmp_path: Path, monkeypatch):
    async def away(repo: str, **kwargs: Any) -> Path:
        why = f"{repo} can't be downloaded: the hub can't be reached."
        raise ModelError(why, code="unavailable", retry_after=60)

    monkeypatch.setattr(resolve, "fetch_from_hub", away)
    text = '[models.a]\ndraft-model = "org/draft"\n'
    async with pool(tmp_path, "a", text=text, model="org/x") as made:
        for name, of in (("a", "draft-model of a: org/draft"), ("org/x", "org/x")):
            [failed] = await ask(made, name)
            assert isinstance(failed, Failed)
            assert (failed.code, failed.retry_after) == ("unavailable", 60)
            assert failed.message == f"{of} can't be downloaded: the hub can't be reached."


async def test_a_fresh_look_is_not_one_that_had_begun_before(tmp_path: Path):
    async with pool(tmp_path, "a") as made:
        look, looked, goes_on = made.catalog.look, threading.Event(), threading.Event()

        def slow_look() -> None:
            look()
            looked.set()
            goes_on.wait(20)

        made.catalog.look = slow_look  # type: ignore[method-assign]
        first = asyncio.create_task(made.look_for_models(afresh=True))
        await asyncio.to_thread(looked.wait, 20)
        made.catalog.look = look  # type: ignore[method-assign]
        shutil.copytree(tmp_path / "models" / "a", tmp_path / "models" / "b")
        found = asyncio.create_task(made.find_engine("b"))
        await asyncio.sleep(0.05)
        goes_on.set()
        assert (await found).model_id == "b"
        await first


async def test_without_a_default_claude_means_the_model_used_last(tmp_path: Path):
    async with pool(tmp_path, "a", "b") as made:
        assert made.resolve("claude-x").model_id == "a"
        await ask(made, "a")
        await ask(made, "b")
        assert made.resolve("claude-x").model_id == "b"


async def test_the_least_recently_used_one_goes_when_there_are_too_many(tmp_path: Path):
    async with pool(tmp_path, "a", "b", "c", max_loaded_models="2") as made:
        await ask(made, "a")
        await ask(made, "b")
        pid = made.resolve("b").pid
        assert pid
        await ask(made, "a", "again")
        assert words(await ask(made, "c")) == ["hello"]
        assert states(made) == {"a": "ready", "b": "unloaded", "c": "ready"}
        assert not alive(pid) and "quit" in notes(tmp_path)
        made.pin("a", True)
        await ask(made, "c")
        await ask(made, "b")
        assert states(made) == {"a": "ready", "b": "ready", "c": "unloaded"}


async def test_a_model_in_use_never_goes_and_the_newcomer_waits_or_is_told(tmp_path: Path):
    async with pool(tmp_path, "a", "b", max_loaded_models="1") as made:
        busy = made.resolve("a").generate(GenerateRequest(prompt=RawPrompt(text="one gate two")))
        await anext(busy)
        refused = (await ask(made, "b"))[-1]
        assert isinstance(refused, Failed) and refused.code == "unavailable"
        assert "1 of 1 models are loaded" in refused.message and refused.retry_after
        assert states(made) == {"a": "ready", "b": "unloaded"}
        made._room_wait_s = 60.0
        asking = asyncio.create_task(ask(made, "b"))
        await asyncio.sleep(0)  # It has begun, and waits.
        (tmp_path / "gate").touch()
        events, rest = await asyncio.gather(asking, collect(busy))
        assert isinstance(events[-1], Finished) and isinstance(rest[-1], Finished)
        assert states(made) == {"a": "unloaded", "b": "ready"}


async def collect(stream) -> list[Event]:
    return [event async for event in stream]


@pytest.mark.slow
async def test_idle_models_go_after_their_time_and_come_back(tmp_path: Path):
    text = '[models.b]\nttl = "0"\n[models.c]\npin = true\n'
    async with pool(tmp_path, "a", "b", "c", text=text, model_ttl="1h") as made:
        for name in ("c", "b", "a"):
            await ask(made, name)
        status = {engine.model_id: engine.expires_in_s for engine in made.models()}
        assert status["a"] is not None and status["a"] <= 3600 and status["b"] is status["c"] is None
        made.apply_settings(settings(tmp_path, text, model_ttl="0.3s"))
        await until(lambda: states(made) == {"a": "unloaded", "b": "ready", "c": "ready"})
        slow = asyncio.create_task(ask(made, "a", "one sleep:0.6 two"))
        assert isinstance((await slow)[-1], Finished)  # Longer than its time to live.
        assert made.resolve("a").process.supervisor.loads == 2


async def test_keep_alive_is_ollamas(tmp_path: Path):
    async with pool(tmp_path, "a", model_ttl="0.3s") as made:
        engine = made.resolve("a")
        made.keep_alive(engine, math.inf)
        await ask(made, "a")
        await asyncio.sleep(0.5)
        assert engine.state == "ready"
        made.keep_alive(engine, 0.0)
        events = await ask(made, "a", "one sleep:0.2 two")
        assert isinstance(events[-1], Finished)
        await until(lambda: engine.state == "unloaded")
        await ask(made, "a")
        assert engine.idle_s == 0.3  # The wish went with the model.


async def test_what_the_owner_loads_stays(tmp_path: Path):
    async with pool(tmp_path, "a", model_ttl="0.2s") as made:
        engine = await made.load("a")
        await asyncio.sleep(0.4)
        assert engine.state == "ready" and engine.expires_in_s is None
        assert await made.unload("a") and engine.state == "unloaded"
        assert await made.unload("a")


async def test_a_request_never_shortens_what_the_owner_said(tmp_path: Path):
    async with pool(tmp_path, "a", "b", text='[models.b]\nttl = "10m"', model_ttl="20m") as made:
        a, b = made.resolve("a"), made.resolve("b")
        await made.load("a")
        made.keep_alive(a, 300.0)
        assert a.idle_s == math.inf and b.idle_s == 600
        made.keep_alive(b, 300.0)
        assert b.idle_s == 600
        await made.load("a", 900.0)
        made.keep_alive(a, 300.0)
        assert a.idle_s == 900
        made.keep_alive(a, 1000.0)
        assert a.idle_s == 1000
        await made.unload("a")
        made.keep_alive(a, 300.0)
        assert a.idle_s == 300, "nobody but this request said anything"


@pytest.mark.parametrize("why", ["keep_alive", "room"])
async def test_what_the_owner_loaded_is_the_owners_again_after_it_was_away(tmp_path: Path, why: str):
    async with pool(tmp_path, "a", "b", max_loaded_models="1", model="a") as made:
        a = made.resolve("a")
        await ask(made, "a")
        assert a.idle_s == math.inf
        if why == "room":
            await ask(made, "b")
        else:
            made.keep_alive(a, 0.0)
            await ask(made, "a")
        await until(lambda: a.state == "unloaded")
        await ask(made, "a")
        assert a.idle_s == math.inf
        await made.unload("a")
        await ask(made, "a")
        assert a.idle_s == 3600


async def test_loading_a_loaded_model_begins_its_time_anew(tmp_path: Path):
    async with pool(tmp_path, "a") as made:
        engine = await made.load("a")
        engine.process.used_at -= 7200  # Idle for two hours.
        await made.load("a", 3600)
        assert engine.state == "ready" and engine.expires_in_s and engine.expires_in_s > 1800
        # Whoever lets idle models go sleeps until its old time is over, unless it is told.
        await made.load("a", 0.1)
        await until(lambda: engine.state == "unloaded")
        assert engine.process.supervisor.loads == 1


@pytest.mark.parametrize("pinned", [False, True])
async def test_unloading_a_busy_model_waits_for_its_requests(tmp_path: Path, pinned: bool, caplog):
    caplog.set_level("INFO", "omlxd")
    async with pool(tmp_path, "a") as made:
        made.pin("a", pinned)
        asking = asyncio.create_task(ask(made, "a", "one gate two"))
        await until(lambda: made.resolve("a").state == "ready")
        assert not await made.unload("a")
        (tmp_path / "gate").touch()
        assert words(await asking) == ["one", "two"]
        await until(lambda: made.resolve("a").state == "unloaded")
        assert "a goes: it was to be unloaded once its requests had ended" in caplog.text
        assert made.resolve("a").is_pinned == pinned
        if pinned:
            assert words(await ask(made, "a")) == ["hello"]
            assert made.resolve("a").expires_in_s is None  # It went once; from now on it stays again.


async def test_who_waits_for_a_load_is_answered_before_the_model_goes(tmp_path: Path):
    async with pool(tmp_path, "a", stub="--load-gate may-load") as made:
        engine = made.resolve("a")
        asking = asyncio.create_task(ask(made, "a", "one two"))
        await until(lambda: engine.pid is not None)
        assert not await made.unload("a")
        (tmp_path / "may-load").touch()
        assert words(await asking) == ["one", "two"]
        await until(lambda: engine.state == "unloaded")


async def test_a_load_that_hangs_ends_once_nobody_waits_for_it(tmp_path: Path):
    async with pool(tmp_path, "a", stub="--load-gate never") as made:
        engine = made.resolve("a")
        stream = engine.generate(GenerateRequest(prompt=RawPrompt(text="hello")))
        await until(lambda: engine.pid is not None)
        assert not await made.unload("a")
        engine.process.cancel_request(stream.id)
        await until(lambda: engine.state == "unloaded")
        loading = asyncio.create_task(made.load("a"))
        await until(lambda: engine.pid is not None)
        assert await made.unload("a")
        with pytest.raises(OmlxdError, match="unloaded before it was loaded"):
            await loading


async def test_an_engine_stays_for_an_adapter_that_somebody_waits_for(tmp_path: Path, caplog):
    caplog.set_level("INFO", "omlxd")
    make_adapter(make(tmp_path / "models" / "a") / "style")
    async with pool(tmp_path, "a") as made:
        await ask(made, "a")
        host, guest = made.resolve("a"), made.resolve("a:style")
        loading = asyncio.create_task(made.load("a:style"))  # The stub never says that it is loaded.
        await until(lambda: guest.shares == "a" and guest.process.supervisor.link is not None)
        assert not await made.unload("a")
        made.keep_alive(host, 60.0)  # Which wakes the keeper.
        await asyncio.sleep(0.1)
        assert host.state == "ready" and "a goes" not in caplog.text
        loading.cancel()
        await until(lambda: host.state == guest.state == "unloaded")
        assert caplog.text.count("a goes") == 1


async def test_requests_that_come_while_it_unloads_wait_and_reload(tmp_path: Path):
    async with pool(tmp_path, "a", stub="--quit-gate may-quit") as made:
        await ask(made, "a")
        engine = made.resolve("a")
        first = engine.pid
        going = asyncio.create_task(made.unload("a"))
        await until(lambda: engine.state == "unloading")
        asked = [asyncio.create_task(ask(made, "a", text)) for text in ("x", "y")]
        await asyncio.sleep(0)  # They have begun, and wait.
        (tmp_path / "may-quit").touch()
        answers = await asyncio.gather(*asked)
        assert [words(events) for events in answers] == [["x"], ["y"]]
        assert await going and first and not alive(first) and engine.process.supervisor.loads == 2


@pytest.mark.slow
async def test_an_engine_that_dies_while_it_unloads_is_unloaded(tmp_path: Path):
    async with pool(tmp_path, "a", stub="--quit-s 300") as made:
        await ask(made, "a")
        engine = made.resolve("a")
        going = asyncio.create_task(made.unload("a"))
        await until(lambda: engine.state == "unloading")
        os.kill(engine.pid, signal.SIGKILL)
        assert await asyncio.wait_for(going, 60) and engine.state == "unloaded"
        assert words(await ask(made, "a")) == ["hello"]


async def test_unloaded_is_a_model_whose_process_is_gone(tmp_path: Path):
    async with pool(tmp_path, "a", stub="--linger") as made:
        await ask(made, "a")
        pid = made.resolve("a").pid
        assert await made.unload("a")
        assert pid and not alive(pid)


async def test_loading_on_demand_can_be_turned_off(tmp_path: Path):
    async with pool(tmp_path, "a", no_jit_load="true") as made:
        assert made.resolve("a").is_refused
        with pytest.raises(NotFound, match="omlxd models load a"):
            await ask(made, "a")
        await made.load("a")
        assert not made.resolve("a").is_refused
        assert words(await ask(made, "a")) == ["hello"]


async def test_settings_of_a_model_hold_from_the_next_request_on(tmp_path: Path, caplog):
    caplog.set_level("INFO", "omlxd")
    text = '[models."org/a"]\ntemperature = 0.5\ntemplate-args = { x = 1 }\nthinking = false\n'
    async with pool(tmp_path, "org/a", text=text) as made:
        engine = made.resolve("a")
        request = GenerateRequest(prompt=Conversation(messages=(), template_args={"y": 2}))
        sent = with_settings(request, engine.settings)
        assert sent.sampling.temperature == 0.5 and isinstance(sent.prompt, Conversation)
        assert sent.prompt.template_args == {"x": 1, "y": 2} and sent.prompt.thinking is False
        own = GenerateRequest(prompt=request.prompt, sampling=Sampling(temperature=0.0))
        assert with_settings(own, engine.settings).sampling.temperature == 0.0
        await ask(made, "a")
        text = "[models.a]\ntemperature = 0.7\nblock-size = 32\ncontext-limit = 500\nmax-tokens = 9\n"
        made.apply_settings(settings(tmp_path, text))
        sent = with_settings(request, engine.settings)
        assert (sent.sampling.temperature, sent.sampling.max_tokens, sent.context_limit) == (0.7, 9, 500)
        assert engine.context_length == 500 and engine.state == "ready"
        assert (await Admin(made, MetricsOf(made)).daemon_status()).models[0].context_length == 500
        assert "org/a takes up block-size when it is loaded again" in caplog.text
        await made.unload("a")
        await ask(made, "a")
        assert engine.info is not None and engine.info.block_size == 32


async def test_a_context_limit_past_the_models_own_is_told_when_it_is_loaded(tmp_path: Path, caplog):
    folder = make(tmp_path / "models" / "a")
    (folder / "config.json").write_text('{"model_type": "qwen3", "max_position_embeddings": 8192}')
    async with pool(tmp_path, text="[models.a]\ncontext-limit = 999999\n") as made:
        await ask(made, "a")
    assert "a: context-limit is 999,999 tokens, but the model's own 8,192 count" in caplog.text


async def test_engines_hear_of_the_logs_new_level_loaded_or_loading(tmp_path: Path):
    async with pool(tmp_path, "a", stub="--load-gate may-load") as made:
        asked = asyncio.create_task(ask(made, "a"))
        await until(lambda: "first live" in notes(tmp_path))  # The Load is there, with the old level.
        made.apply_settings(settings(tmp_path, log_level="error"))
        (tmp_path / "may-load").touch()
        await asked
        await until(lambda: "level error" in notes(tmp_path))
        made.apply_settings(settings(tmp_path, log_level="info"))
        await until(lambda: "level info" in notes(tmp_path))


async def test_aliases_of_the_file_and_of_the_owner(tmp_path: Path):
    text = '[models."org/a"]\naliases = ["fast", "claude-haiku-4-5"]\n'
    async with pool(tmp_path, "org/a", "b", text=text, model="b") as made:
        assert made.resolve("claude-haiku-4-5").model_id == made.resolve("fast").model_id == "org/a"
        assert made.resolve("claude-opus-5").model_id == "b"
        made.alias("mine", "a")
        for wrong in ("b", "fast", " ", "x" * 201):
            with pytest.raises(InvalidRequest):
                made.alias(wrong, "org/a")
        made.pin("a", True)
    async with pool(tmp_path, "org/a", "b", text=text) as again:
        assert again.resolve("mine").model_id == "org/a" and again.resolve("a").is_pinned
        again.alias("mine", None)
        with pytest.raises(NotFound):
            again.resolve("mine")


async def test_a_model_that_is_not_whole_names_no_flag_that_nobody_gave(tmp_path: Path):
    make(tmp_path / "models" / "half")
    (tmp_path / "models" / "half" / "model.safetensors").write_bytes(b"x" * 100)
    (tmp_path / "models" / "half" / "model.safetensors.index.json").unlink(missing_ok=True)
    async with pool(tmp_path) as made:
        failed = (await ask(made, "half"))[-1]
        assert isinstance(failed, Failed) and "Copy or download it again." in failed.message
        assert "--model" not in failed.message


async def test_a_model_whose_folder_is_gone_leaves_no_task(tmp_path: Path):
    async with pool(tmp_path, "a", "b", "c") as made:
        (tmp_path / "models" / "b" / "config.json").write_text("{")
        await ask(made, "a")
        await made.unload("a")
        assert isinstance((await ask(made, "b"))[-1], Failed)
        await ask(made, "c")
        for name in ("a", "b", "c"):
            shutil.rmtree(tmp_path / "models" / name)
        await made.look_for_models(afresh=True)

        def supervised() -> list[str]:
            return [t.get_name() for t in asyncio.all_tasks() if t.get_name().startswith("engine ")]

        await until(lambda: supervised() == ["engine c"])
        assert states(made) == {"c": "ready"}


async def test_a_default_that_another_model_follows(tmp_path: Path):
    """The model that is served where none was named is gone, or another is fetched while it runs."""
    (tmp_path / "models").mkdir()
    async with pool(tmp_path, DEFAULT_ID, model_dir="") as made:
        await until(lambda: states(made) == {DEFAULT_ID: "ready"})
        shutil.rmtree(tmp_path / "models" / DEFAULT_ID)
        await made.unload(DEFAULT_ID)
        await made.look_for_models(afresh=True)
        assert states(made) == {DEMO_ID: "unloaded"}
        assert made.resolve("claude-x").model_id == DEMO_ID
        make(tmp_path / "models" / DEFAULT_ID)
        await made.look_for_models(afresh=True)
        assert made.resolve("claude-x").model_id == DEFAULT_ID
        assert made.default() is made.resolve(DEFAULT_ID)


async def test_the_demo_model_that_a_daemon_began_with_stays_known_until_it_ends(tmp_path: Path):
    """The start line says to fetch a real one, which is the default of the next start."""
    (tmp_path / "models").mkdir()
    made = EnginePool(settings(tmp_path, model_dir=""), ["true"])
    make(tmp_path / "models" / DEFAULT_ID)
    await made.look_for_models(afresh=True)
    assert states(made) == {DEFAULT_ID: "unloaded", DEMO_ID: "unloaded"}
    for name in (DEMO_ID, "claude-x", ""):
        assert (await made.find_engine(name)).model_id == DEMO_ID
    assert EnginePool(settings(tmp_path, model_dir=""), ["true"]).resolve("").model_id == DEFAULT_ID


async def test_what_is_remembered_of_models_is_its_owners_alone(tmp_path: Path):
    async with pool(tmp_path, "a") as made:
        made.alias("b", "a")
    assert (tmp_path / "models.json").stat().st_mode & 0o777 == 0o600


async def test_the_folders_are_looked_at_again_only_for_a_name_that_nobody_knows(tmp_path: Path, monkeypatch):
    async with pool(tmp_path, "org/a") as made:
        looks: list[None] = []
        monkeypatch.setattr(made.catalog, "look", lambda look=made.catalog.look: looks.append(None) or look())
        for name in ("org/a", "a", "claude-opus-5-5"):
            assert (await made.find_engine(name)).model_id == "org/a"
        await asyncio.sleep(0.1)
        assert len(looks) <= 1, "what is known is not waited for"
        with pytest.raises(NotFound):
            await made.find_engine("b")
        assert looks
        make(tmp_path / "models" / "org" / "b")
        assert (await made.find_engine("b")).model_id == "org/b"


async def test_a_disk_that_hangs_keeps_nobody_waiting(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(pool_module, "LOOK_S", 0.05)
    async with pool(tmp_path, "a") as made:
        hangs, late = threading.Event(), list[str]()
        monkeypatch.setattr(made.catalog, "look", lambda: hangs.wait(HANGS_S) or late.append("look"))
        try:
            assert words(await ask(made, "a")) == ["hello"]
            with pytest.raises(NotFound):
                await made.find_engine("b")
            await asyncio.gather(*(made.look_for_models(afresh=True) for _ in range(20)))
            assert [engine.model_id for engine in made.models()] == ["a"]
            assert late == [], "somebody waited for the disk"
        finally:
            hangs.set()


async def test_an_adapters_disk_that_hangs_holds_one_thread(tmp_path: Path, monkeypatch):
    folder = make_adapter(tmp_path / "style")
    async with pool(tmp_path, "a", text=f'[models.a]\nadapter = "{folder}"\n') as made:
        await ask(made, "a")
        hangs, looks = threading.Event(), list[Path]()

        def look(folder: Path) -> tuple[int, ...]:
            looks.append(folder)
            hangs.wait(HANGS_S)
            return adapter_state(folder)

        monkeypatch.setattr(adapters, "LOOK_S", 0.05)
        monkeypatch.setattr(adapters, "adapter_state", look)
        try:
            for _ in range(3):
                await asyncio.gather(*(made.find_engine("a") for _ in range(5)))
            assert looks == [folder]
        finally:
            hangs.set()
        os.utime(folder / "adapters.safetensors", (1, 1))
        monkeypatch.setattr(adapters, "LOOK_S", 60.0)
        engine = await made.find_engine("a")
        assert engine.state != "ready" and len(looks) == 2, "the look that hung was of other files"


async def test_new_settings_and_what_the_owner_says_wait_for_no_disk(tmp_path: Path, monkeypatch, caplog):
    make(tmp_path / "other" / "new")
    async with pool(tmp_path, "a") as made:
        hangs, late = threading.Event(), list[str]()

        def hang() -> bool:
            return hangs.wait(HANGS_S) or bool(late.append("disk"))

        monkeypatch.setattr(made.catalog, "look", lambda look=made.catalog.look: hang() and look())
        monkeypatch.setattr(made.book, "_replace", lambda text, put=made.book._replace: hang() and put(text))
        made.pin("a", True)
        text = "[models.new]\ntemperature = 0.5\n[models.nobody]\ntemperature = 0.5\n"
        made.apply_settings(settings(tmp_path, text, model_dir=str(tmp_path / "other")))
        assert late == [], "somebody waited for the disk"
        hangs.set()
        await until(lambda: "new" in states(made))
        assert made.resolve("new").settings.temperature == 0.5
        await until(lambda: "settings of 'nobody' are for a model that is not here" in caplog.text)
        assert "'new'" not in caplog.text
    assert "a" in (tmp_path / "models.json").read_text()


async def test_over_http(tmp_path: Path):
    async with pool(tmp_path, "a", "org/b", model="a") as made:
        app = create_app(made, more_routes=admin_routes(made))
        transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8000") as http:

            async def post(path: str, **content: object) -> httpx.Response:
                return await http.post(path, json=content)

            listed = (await http.get("/v1/models")).json()["data"]
            assert [entry["id"] for entry in listed] == ["a", "org/b"]
            assert listed[1]["omlxd"]["state"] == "unloaded"
            loaded = await post("/omlxd/models/load", model="b")
            assert loaded.status_code == 200 and loaded.json()["state"] == "ready" and loaded.json()["pid"]
            for path, more in (
                ("/v1/completions", {"prompt": "x"}),
                ("/v1/completions", {"prompt": "x", "keep_alive": "10m"}),
                ("/v1/completions", {"prompt": "x", "keep_alive": -1}),
            ):
                assert (await post(path, model="org/b", **more)).status_code == 200
            wrong = await post("/v1/completions", model="org/b", prompt="x", keep_alive="soon")
            assert wrong.status_code == 400 and "keep_alive" in wrong.json()["error"]["message"]
            pinned = await post("/omlxd/models/pin", model="org/b")
            assert pinned.json()["pinned"] and pinned.json()["expires_in_s"] is None
            await post("/omlxd/models/pin", model="org/b", pinned=False)
            await post("/omlxd/models/alias", alias="bee", model="org/b")
            shown = (await http.get("/omlxd/models/org/b")).json()
            assert shown["aliases"] == ["bee"] and shown["disk_bytes"] > 0 and not shown["pinned"]
            assert (await post("/omlxd/models/unload", model="bee")).json()["gone"]
            make(tmp_path / "models" / "new")
            made.catalog._looked_at -= LOOK_HOLDS_S
            async with asyncio.timeout(60):
                while "new" not in (await http.get("/health")).text:
                    await asyncio.sleep(0.02)
            shutil.rmtree(tmp_path / "models" / "new")
            every = (await http.get("/omlxd/models")).json()["models"]
            assert [(entry["id"], entry["default"]) for entry in every] == [("a", True), ("org/b", False)]
            assert (await post("/omlxd/models/load", model="nobody")).status_code == 404
            assert (await post("/omlxd/models/load")).status_code == 400


@pytest.mark.skipif(sys.platform != "linux", reason="reads the policy of another process")
async def test_what_loads_beside_others_stands_back_until_it_is_loaded(tmp_path: Path):
    def place(pid: int) -> tuple[int, int]:
        return os.getpriority(os.PRIO_PROCESS, pid), os.sched_getscheduler(pid)

    own = place(os.getpid())
    if own[0] == 19 or own[1] != os.SCHED_OTHER:
        pytest.skip("these tests stand back themselves")
    async with pool(tmp_path, "a", "b", stub="--load-gate may-load") as made:
        (tmp_path / "may-load").touch()
        busy = made.resolve("a").generate(GenerateRequest(prompt=RawPrompt(text="one gate two")))
        await anext(busy)
        (tmp_path / "may-load").unlink()
        asking = asyncio.create_task(ask(made, "b"))
        await until(lambda: made.resolve("b").pid)
        pid = made.resolve("b").pid
        assert pid and place(pid) != own
        (tmp_path / "may-load").touch()
        await asking
        assert place(pid) == own
        await busy.aclose()


async def test_who_waits_for_a_change_keeps_nobody_else_from_running(tmp_path: Path):
    """Whatever happened before it waits, and whether or not anybody has taken note of it."""
    async with pool(tmp_path, "a") as made:
        for keeper in made._keepers:
            keeper.cancel()
        deadline = time.monotonic() + 0.5

        async def waits() -> int:
            looks = 0
            while await made.change_before(deadline):
                looks += 1
            return looks

        made._note_change()
        others = 0
        waiting = asyncio.create_task(waits())
        while not waiting.done():
            await asyncio.sleep(0)
            others += 1
        assert waiting.result() < others


async def test_many_at_once_over_few_places(tmp_path: Path):
    names = ["a", "b", "c"]
    async with pool(tmp_path, *names, max_loaded_models="2", model_ttl="0.05s") as made:
        made._room_wait_s = 120.0
        answers = await asyncio.gather(*(ask(made, names[n % 3], f"w{n}") for n in range(30)))
        assert [words(events) for events in answers] == [[f"w{n}"] for n in range(30)]
        assert sum(engine.admitted for engine in made.models()) <= 2
