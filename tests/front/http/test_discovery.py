"""What clients learn of models, in each dialect that they speak."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
from app_client import client
from fake_engine import FakeEngine, app_of
from msgspec.structs import replace

from omlxd.front.engines.model import Card
from omlxd.front.http.listing import model_list as cards
from omlxd.front.http.listing.codex_catalog import codex_catalog

CARD = Card(
    id="org/Some-4bit",
    state="ready",
    context_length=4096,
    images=True,
    tools=True,
    thinking=True,
    family="qwen3",
    bits=4,
    nbytes=1234,
    changed=1.7e9,
    template="{{ enable_thinking }}",
)
AWAY = replace(CARD, state="unloaded", images=False)


async def test_the_list_of_llama_cpp_has_states_contexts_and_inputs():
    loaded, away = FakeEngine(), FakeEngine(model_id="org/second")
    away.info, away.state = None, "failed"
    async with client(app_of(loaded, away)) as http:
        for path in ("/models?reload=1", "/v1/models"):
            first, second = (await http.get(path)).json()["data"]
            assert first["status"] == {"value": "loaded"} and first["meta"]["n_ctx"] == 4096
            assert first["architecture"] == {
                "input_modalities": ["text", "image"],
                "output_modalities": ["text"],
            }
            assert second["status"] == {"value": "unloaded", "failed": True} and second["meta"] is None


CODEX_NEEDS = (
    *("slug", "display_name", "supported_reasoning_levels", "shell_type", "visibility", "supported_in_api"),
    *("priority", "base_instructions", "support_verbosity", "truncation_policy"),
    "experimental_supported_tools",
)
"""Fields without which Codex 0.171 takes no entry of its catalog."""


@pytest.mark.parametrize(("thinks", "sees"), [(True, True), (False, False)])
def test_codex_finds_each_model_that_chats(thinks: bool, sees: bool):
    card = replace(CARD, thinking=thinks, images=sees)
    others = [replace(CARD, kind=kind) for kind in ("embedding", "rerank")]
    catalog = msgspec.to_builtins(codex_catalog([*others, card, replace(AWAY, context_length=None)]))
    first, second = catalog["models"]
    assert all(first[name] is not None for name in CODEX_NEEDS)
    assert first["slug"] == "org/Some-4bit" and first["context_window"] == 4096
    assert first["input_modalities"] == ["text", "image"][: 1 + sees]
    levels = [level["effort"] for level in first["supported_reasoning_levels"]]
    assert levels == ["low", "medium", "high"] * thinks
    assert first["default_reasoning_level"] == ("medium" if thinks else None)
    assert first["apply_patch_tool_type"] == "freeform" and "apply_patch" in first["base_instructions"]
    assert second["context_window"] is None and first["priority"] < second["priority"]


async def test_the_catalog_of_codex_is_served():
    async with client(app_of(FakeEngine())) as http:
        answer = (await http.get("/v1/codex/models?client_version=0.171.0")).json()
        assert [model["slug"] for model in answer["models"]] == ["org/tiny"]


@pytest.mark.parametrize("state", ["loading", "restarting", "unloading", "unloaded"])
def test_states_of_a_router(state: str):
    values = {"loading": "loading", "restarting": "loading", "unloading": "loaded", "unloaded": "unloaded"}
    assert cards.model_entry(replace(CARD, state=state)).status.value == values[state]


async def test_props_are_of_the_default_model_or_of_the_one_that_is_named():
    engine, second = FakeEngine(), FakeEngine(model_id="org/second")
    async with client(app_of(engine, second)) as http:
        answer = (await http.get("/props")).json()
        assert (
            answer["default_generation_settings"] == {"n_ctx": 4096} and answer["model_alias"] == "org/tiny"
        )
        assert answer["modalities"] == {"vision": True, "audio": False}
        assert answer["chat_template_caps"] == {"supports_tools": True, "supports_tool_calls": True}
        assert "enable_thinking" in answer["chat_template"] and answer["models_autoload"] is True
        second.is_refused = True
        answer = (await http.get("/props", params={"model": "org/second", "autoload": "false"})).json()
        assert answer["model_alias"] == "org/second" and answer["models_autoload"] is False
        assert (await http.get("/props?model=none")).status_code == 404


async def test_lm_studios_clients_load_and_unload():
    engine = FakeEngine()
    load, unload = "/api/v1/models/load", "/api/v1/models/unload"
    async with client(app_of(engine)) as http:
        (instance,) = (await http.get("/api/v1/models")).json()["models"][0]["loaded_instances"]
        gone = await http.post(unload, json={"instance_id": instance["id"]})
        assert gone.json() == {"instance_id": "org/tiny"} and engine.state == "unloaded"
        loaded = (await http.post(load, json={"model": "org/tiny", "flash_attention": True})).json()
        assert loaded.pop("load_time_seconds") >= 0 and engine.state == "ready"
        assert loaded == {"type": "llm", "instance_id": "org/tiny", "status": "loaded"}
        for path, body, status, words in (
            (load, {"model": "none"}, 404, "none"),
            (unload, {"instance_id": "none"}, 404, "none"),
            (load, {}, 400, "model: this field is required"),
            (unload, {"model": "org/tiny"}, 400, "instance_id: this field is required"),
            (load, {"model": "org/tiny", "context_length": 4097}, 400, "has 4096 tokens"),
        ):
            answer = await http.post(path, json=body)
            assert answer.status_code == status and words in answer.json()["error"]["message"]
        assert (await http.post(load, json={"model": "tiny", "context_length": 4096})).status_code == 200


async def test_a_router_loads_and_unloads():
    engine = FakeEngine()
    async with client(app_of(engine)) as http:
        assert (await http.post("/models/unload", json={"model": "tiny"})).json() == {"success": True}
        assert engine.state == "unloaded"
        assert (await http.post("/models/load", json={"model": "tiny"})).json() == {"success": True}
        async with asyncio.timeout(30):
            while engine.state != "ready":
                await asyncio.sleep(0)
        for path in ("/models/load", "/models/unload"):
            assert (await http.post(path, json={"model": "none"})).status_code == 404
            assert (await http.post(path, json={})).status_code == 400


def test_lm_studio_is_shown_kind_context_and_what_is_loaded():
    loaded, away = cards.lmstudio_models([CARD, AWAY]).models
    assert (loaded.type, loaded.key, loaded.publisher) == ("llm", "org/Some-4bit", "org")
    assert loaded.loaded_instances[0].config.context_length == loaded.max_context_length == 4096
    assert loaded.capabilities == cards.LMStudioCapabilities(vision=True, trained_for_tool_use=True)
    assert loaded.quantization == cards.LMStudioQuantization("4bit", 4) and not away.loaded_instances
    first, second = cards.lmstudio_v0_models([CARD, AWAY]).data
    assert (first.type, first.state, first.loaded_context_length) == ("vlm", "loaded", 4096)
    assert (second.type, second.state) == ("llm", "not-loaded")
    ranks = replace(CARD, kind="rerank")
    assert not cards.lmstudio_models([ranks]).models and not cards.lmstudio_v0_models([ranks]).data


async def test_lm_studio_s_lists_are_served():
    async with client(app_of(FakeEngine())) as http:
        assert (await http.get("/api/v1/models")).json()["models"][0]["key"] == "org/tiny"
        assert (await http.get("/api/v0/models")).json()["data"][0]["id"] == "org/tiny"
