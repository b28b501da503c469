"""A vision model through the whole daemon: images by HTTP, hit in RAM, hit from SSD after SIGKILL."""

from __future__ import annotations

import base64
import importlib.util
import io
from pathlib import Path
from typing import Any

import pytest

if not all(map(importlib.util.find_spec, ("mlx_vlm", "PIL"))):
    pytest.skip("mlx-vlm is not installed", allow_module_level=True)

from daemon import BLOCK, Daemon, own_usage, prose, wait_until
from PIL import Image as Pillow
from vision_families import VISION_FAMILIES, build_vision_family, picture

from omlxd.cli.cache.checks.verify import Verifier


def block(seed: int, width: int = 112) -> dict[str, Any]:
    out = io.BytesIO()
    Pillow.fromarray(picture(seed, width)).save(out, "PNG")
    source = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(out.getvalue()).decode()}
    return {"type": "image", "source": source}


def ask(*images: dict[str, Any]) -> dict[str, Any]:
    text = {"type": "text", "text": prose(60)}
    return {"role": "user", "content": [text, *images, text]}


def block_files(home: Path) -> list[Path]:
    return list((home / "omlxd").rglob("*.safetensors"))


def cached(answer: dict[str, Any]) -> tuple[int, int]:
    own = own_usage(answer)
    return own["cached_hot"], own["cached_cold"]


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen2_5_vl", "gemma4", "qwen3_5"])
def test_images_are_hit_in_ram_and_after_sigkill(tmp_path: Path, family: str):
    model = build_vision_family(family, tmp_path / "model")
    home = tmp_path / "home"
    with Daemon(home, model=model) as daemon:
        [listed] = daemon.http.get("/v1/models").json()["data"]
        assert listed["omlxd"]["input_modalities"] == ["text", "image"]
        first = daemon.messages(ask(block(1)))
        again = daemon.messages(ask(block(1)))
        assert again["content"] == first["content"] and cached(again)[0] >= 3 * BLOCK
        turn = {"role": "assistant", "content": first["content"]}
        second = daemon.messages(ask(block(1)), turn, ask(block(2, 168)))
        blocks = own_usage(second)["computed"] // BLOCK
        wait_until(lambda: len(block_files(home)) > blocks)
        daemon.kill()
    with Daemon(home, model=model) as daemon:
        after = daemon.messages(ask(block(1)), turn, ask(block(2, 168)))
        assert after["content"] == second["content"]
        assert cached(after)[1] >= cached(again)[0]
        other = daemon.messages(ask(block(3)), turn, ask(block(2, 168)))
        # Models with state at a position go on from a checkpoint, and none stands so early.
        assert VISION_FAMILIES[family].per_token <= sum(cached(other)) < cached(again)[0]
        why = daemon.post("/omlxd/why-miss", {"request_id": "last"}).json()["explanation"]
        assert why["cause"] in ("other_image", "no_checkpoint")
    for file in block_files(home):
        namespace = file.parent.parent.name
        assert Verifier().verify(str(file), namespace, file.stem).fault == "", file


@pytest.mark.slow
def test_the_owner_says_how_many_images_a_request_may_hold(tmp_path: Path):
    model = build_vision_family("qwen2_5_vl", tmp_path / "org" / "vl")
    (tmp_path / "omlxd.toml").write_text("[models.vl]\nmax-images = 3\n")
    for flags, most in ((("--max-images", "2"), 2), (("--config", str(tmp_path / "omlxd.toml")), 3)):
        with Daemon(tmp_path / "home", *flags, model=model) as daemon:
            assert daemon.messages(ask(*[block(1)] * most))["content"]
            turn = ask(*[block(1)] * (most + 1))
            refused = daemon.post("/v1/messages", {"model": "vl", "max_tokens": 4, "messages": [turn]})
            message = refused.json()["error"]["message"]
            assert refused.status_code == 400 and f"a request may hold {most} images" in message
            assert message.startswith(f"messages.0.content.{most + 1}.image.source: ")
