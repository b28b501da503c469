"""A model that reads no images: the error names it, and one that does if there is one."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anthropic
import openai
import pytest
from app_client import client
from fake_engine import INFO, FakeEngine, FakeEngines
from msgspec.structs import replace
from sdk_clients import claude, gpt

from omlxd.chat import Conversation, ImagePart, Message, RawPrompt, TextPart, ToolResultPart
from omlxd.errors import InvalidRequest
from omlxd.front.app import check_images, create_app
from omlxd.front.engines.model import ModelEngine
from omlxd.front.http.listing.model_list import model_entry
from omlxd.models.catalog import InstalledModel
from omlxd.models.footprint import INSTALL_VISION

IMAGE = ImagePart(b"png", "image/png", "messages.0.content.0")


def engine(model_id: str, images: bool | None, blind: str = "") -> FakeEngine:
    made = FakeEngine(model_id=model_id)
    made.info = None if images is None else replace(INFO, model_id=model_id, images=images, blind=blind)
    return made


def asked(*parts) -> Conversation:
    return Conversation((Message("user", parts),))


def refusal(of: FakeEngine, *others: FakeEngine, prompt=None) -> str:
    with pytest.raises(InvalidRequest) as caught:
        check_images(of, [of, *others], prompt or asked(IMAGE))
    assert caught.value.param == IMAGE.param
    return caught.value.message


def test_the_error_names_the_model_and_one_that_sees():
    text, other, seeing = engine("org/text", False), engine("org/other", None), engine("org/vl", True)
    at = "messages.0.content.0: "
    assert refusal(text, other) == at + "org/text reads no images, and no installed model does"
    assert (
        refusal(text, other, seeing) == at + "org/text reads no images, and org/vl does: ask for that model"
    )
    result = Conversation((Message("tool", (ToolResultPart("c", "see", images=(IMAGE,)),)),))
    assert "org/vl" in refusal(text, seeing, prompt=result)
    blind = engine("org/half", False, "mlx-vlm is not installed")
    assert "org/half reads no images (mlx-vlm is not installed)" in refusal(blind)


def test_what_can_be_read_is_let_through():
    text, unknown, seeing = engine("org/text", False), engine("org/other", None), engine("org/vl", True)
    for model, prompt in (
        (seeing, asked(IMAGE)),
        (unknown, asked(IMAGE)),  # Its engine knows.
        (text, asked(TextPart("hi"))),
        (text, RawPrompt("hi")),
    ):
        check_images(model, [model], prompt)


def test_what_to_install_is_said_before_the_model_was_ever_loaded(tmp_path: Path, monkeypatch):
    monkeypatch.setattr("omlxd.models.footprint.find_spec", lambda name: None)
    for name, text in (
        ("config.json", {"model_type": "qwen2_vl", "vision_config": {}}),
        ("model.safetensors.index.json", {"weight_map": {"visual.merger.bias": "model.safetensors"}}),
        ("preprocessor_config.json", {}),
    ):
        (tmp_path / name).write_text(json.dumps(text))
    supervisor = SimpleNamespace(model_id="vl", info=None)
    process: Any = SimpleNamespace(supervisor=supervisor, state="unloaded")
    model = ModelEngine(InstalledModel("vl", "vl", "model-dir", tmp_path), process, may_load=lambda: True)
    model.measure()
    why = f"mlx-vlm is not installed: {INSTALL_VISION}"
    with pytest.raises(
        InvalidRequest, match=re.escape(f"vl reads no images ({why}), and no installed model")
    ):
        check_images(model, [model], asked(IMAGE))
    entry = model_entry(model.card).omlxd
    assert (entry.input_modalities, entry.note) == (["text"], f"no images: {why}")
    (tmp_path / "config.json").write_text('{"model_type": "qwen2"}')
    model.measure()
    assert model_entry(model.card).omlxd.note == ""
    process.state, supervisor.trouble = "failed", "config.json names no model."
    assert model_entry(model.card).omlxd.note == "config.json names no model."


async def test_the_folders_of_a_model_that_was_never_loaded_are_looked_at():
    unknown, looks = engine("org/vl", None), []
    engines: Any = FakeEngines(unknown)

    async def look() -> None:
        looks.append(unknown)
        unknown.info = replace(INFO, model_id="org/vl", images=False, blind="mlx-vlm is not installed")

    engines.look_for_models = look
    url = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    async with client(create_app(engines)) as http:
        for content, refused in (("hi", False), ([url], True)):
            body = {"model": "vl", "messages": [{"role": "user", "content": content}]}
            answer = await http.post("/v1/chat/completions", json=body)
            assert ("mlx-vlm is not installed" in answer.text) == refused == bool(looks)


async def test_clients_get_it_before_the_model_is_asked():
    text = engine("org/text", False)
    source = {"type": "base64", "media_type": "image/png", "data": "AAAA"}
    messages = [{"role": "user", "content": [{"type": "image", "source": source}]}]
    async with claude(text) as client:
        with pytest.raises(anthropic.BadRequestError, match="org/text reads no images"):
            await client.messages.create(model="text", messages=messages, max_tokens=3)
        with pytest.raises(anthropic.BadRequestError, match="org/text reads no images"):
            await client.messages.count_tokens(model="text", messages=messages)
    url = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    async with gpt(text) as client:
        with pytest.raises(openai.BadRequestError, match="org/text reads no images") as caught:
            await client.chat.completions.create(model="text", messages=[{"role": "user", "content": [url]}])
    assert caught.value.param == "messages.0.content.0.image_url"
    assert not text.requests and not text.counted
