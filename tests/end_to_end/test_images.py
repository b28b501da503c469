"""Images sent to a daemon whose model sees: cached over turns and kills, named by why-miss, bounded."""

from __future__ import annotations

import base64
import importlib.util
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
from daemon import BLOCK, Daemon, own_usage, prose, wait_until
from media_files import pdf, png
from prometheus_client.parser import text_string_to_metric_families

from omlxd.cli.main import main

if not all(map(importlib.util.find_spec, ("mlx_vlm", "PIL", "pypdfium2"))):
    pytest.skip("mlx-vlm, pillow or pypdfium2 is not installed", allow_module_level=True)

from vision_families import build_vision_family


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_vision_family("qwen2_5_vl", tmp_path_factory.mktemp("models") / "seeing")


def source(data: bytes, media_type: str = "image/png") -> dict[str, str]:
    return {"type": "base64", "media_type": media_type, "data": base64.b64encode(data).decode()}


def data_url(data: bytes, media_type: str = "image/png") -> str:
    return f"data:{media_type};base64,{base64.b64encode(data).decode()}"


def image(data: bytes) -> dict[str, Any]:
    return {"type": "image", "source": source(data)}


def session(shot: bytes) -> list[dict[str, Any]]:
    """A user's PDF, and a picture that a tool gives back."""
    pages = {"type": "document", "source": source(pdf(["A kettle.", "A saucer."]), "application/pdf")}
    call = {"type": "tool_use", "id": "c1", "name": "Read", "input": {"file_path": "shot.png"}}
    result = {"type": "tool_result", "tool_use_id": "c1", "content": [image(shot)]}
    return [
        {"role": "user", "content": [{"type": "text", "text": prose(60)}, pages]},
        {"role": "assistant", "content": [call]},
        {"role": "user", "content": [result, {"type": "text", "text": prose(30, 1)}]},
    ]


def restored(answer: dict[str, Any]) -> int:
    usage = own_usage(answer)
    return usage["cached_hot"] + usage["cached_cold"]


def tokens(answer: dict[str, Any]) -> int:
    return restored(answer) + own_usage(answer)["computed"]


def test_a_session_with_images_goes_on_cached(model, tmp_path, capsys):
    turns = session(png(112, 84))
    with Daemon(tmp_path, model=model) as daemon:
        listed = daemon.http.get("/v1/models").json()["data"][0]["omlxd"]
        assert listed["input_modalities"] == ["text", "image"]
        first = daemon.messages(*turns)
        turns += [{"role": "assistant", "content": "Yes."}, {"role": "user", "content": "Go on."}]
        second = daemon.messages(*turns)
        assert restored(second) >= tokens(first) // BLOCK * BLOCK
        ask = {"model": daemon.model, "max_tokens": 8, "messages": session(png(112, 84, green=200))}
        other = daemon.post("/v1/messages", ask)
        assert tokens(other.json()) == tokens(first) and 0 < restored(other.json()) < restored(second)
        daemon.settled()
        assert main(["cache", "why-miss", other.headers["request-id"], "--url", daemon.url]) == 0
        place = "messages.2.content.0.tool_result.content.0.image.source"
        which = f"another image than image 3 of 3 ({place}) is stored there"
        assert which in capsys.readouterr().out
        daemon.settled()
        daemon.kill()
    with Daemon(tmp_path, model=model) as daemon:
        again = daemon.messages(*turns)
        assert restored(again) >= restored(second) and again["content"] == second["content"]


@pytest.mark.slow
def test_after_sigkill_no_picture_is_decoded_or_seen_again(model, tmp_path):
    """The first one ends in a block that is not full, and is not cached: its features are on disk."""
    ask = {"role": "user", "content": [{"type": "text", "text": prose(60)}, image(png(112, 84))]}
    pages = {"type": "document", "source": source(pdf(["A kettle."]), "application/pdf")}
    elsewhere = {"role": "user", "content": [pages, {"type": "text", "text": prose(9)}, image(png(112, 84))]}

    def figures(daemon: Daemon, *names: str) -> list[float]:
        names = names or ("image_towers", "images_remembered", "images_restored")
        samples = {
            sample.name: sample.value
            for family in text_string_to_metric_families(daemon.metrics())
            for sample in family.samples
        }
        return [samples[f"omlxd_{name}_total"] for name in names]

    with Daemon(tmp_path, model=model) as daemon:
        first = daemon.messages(ask)
        daemon.messages(elsewhere)
        assert figures(daemon) == [2, 0, 0]
        wait_until(lambda: figures(daemon, "images_written") == [2])
        daemon.settled()
        daemon.kill()
    with Daemon(tmp_path, model=model) as daemon:
        again = daemon.messages(ask)
        assert again["content"] == first["content"] and own_usage(again)["computed"] < BLOCK
        assert figures(daemon) == [0, 1, 1]
        daemon.messages({"role": "user", "content": [image(png(112, 84)), *elsewhere["content"]]})
        assert figures(daemon) == [0, 2, 2]


@pytest.mark.slow
def test_the_sdks_send_images_and_pdfs(model, tmp_path):
    shot, pages, ask = png(112, 84), pdf(["A kettle."]), "What is it?"
    shown = {"type": "image_url", "image_url": {"url": data_url(shot)}}
    file = {"filename": "k.pdf", "file_data": data_url(pages, "application/pdf")}
    paper = {"type": "document", "title": "k.pdf", "source": source(pages, "application/pdf")}
    with Daemon(tmp_path, model=model) as daemon:
        gpt = openai.OpenAI(base_url=f"{daemon.url}/v1", api_key="k", max_retries=0)
        claude = anthropic.Anthropic(base_url=daemon.url, api_key="k", max_retries=0)
        content = [shown, {"type": "file", "file": file}, {"type": "text", "text": ask}]
        one = gpt.chat.completions.create(
            model=daemon.model, messages=[{"role": "user", "content": content}], max_tokens=4, temperature=0
        )
        inputs = [
            {"type": "input_image", "image_url": data_url(shot), "detail": "auto"},
            {"type": "input_file", **file},
            {"type": "input_text", "text": ask},
        ]
        two = gpt.responses.create(
            model=daemon.model,
            input=[{"role": "user", "content": inputs}],
            max_output_tokens=4,
            temperature=0,
        )
        blocks = [image(shot), paper, {"type": "text", "text": ask}]
        three = claude.messages.create(
            model=daemon.model, messages=[{"role": "user", "content": blocks}], max_tokens=4
        )
        counted = claude.messages.count_tokens(
            model=daemon.model, messages=[{"role": "user", "content": blocks}]
        )
    total = one.usage.prompt_tokens
    assert total > 100 and two.usage.input_tokens == counted.input_tokens == total
    kept = (total - 1) // BLOCK * BLOCK
    assert two.usage.input_tokens_details.cached_tokens == three.usage.cache_read_input_tokens == kept


@pytest.mark.slow
def test_hostile_images_cost_their_own_request(model, tmp_path):
    shot = png(112, 84)
    with Daemon(tmp_path, model=model) as daemon:
        engine = daemon.engine_pid()
        for bad, why in (
            (png(60_000, 60_000, b""), "60000 x 60000 pixels, and 64,000,000 are the most"),
            (png(20_000, 1), "one side may be at most 200 times as long"),
            (shot[: len(shot) // 2], "can't be read, it may be damaged"),
            (b"BM" + bytes(60), "is no PNG, JPEG, WebP or GIF"),
        ):
            ask = {"model": daemon.model, "max_tokens": 4, "messages": session(bad)}
            answer = daemon.post("/v1/messages", ask)
            message = answer.json()["error"]["message"]
            assert answer.status_code == 400 and why in message
            assert message.startswith("messages.2.content.0.tool_result.content.0.image.source: the image ")
        many = {"role": "user", "content": [image(png(112, 84, green=shade)) for shade in range(101)] * 6}
        ask = {"model": daemon.model, "max_tokens": 4, "messages": [many]}
        assert "600 images" in daemon.post("/v1/messages", ask).json()["error"]["message"]
        del many["content"][101:]
        assert tokens(daemon.messages(many)) > 100
        assert tokens(daemon.messages(*session(png(1, 1)))) > 100
        assert daemon.engine_pid() == engine
