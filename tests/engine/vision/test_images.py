"""Images of a request, from encoded bytes to tokens, keys and answers; each trap of mlx-vlm's models."""

from __future__ import annotations

import dataclasses
import importlib.util
import io
import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

if not all(map(importlib.util.find_spec, ("mlx_vlm", "PIL"))):
    pytest.skip("mlx-vlm is not installed", allow_module_level=True)

from cold_run import prompt
from guesses import guess_by
from host import Host, finished, text_of
from mlx_lm.models.cache import make_prompt_cache
from msgspec.structs import replace
from PIL import Image as Pillow
from rig import BLOCK
from vision_families import IMAGE_TOKENS, VISION_FAMILIES, build_vision_family, picture
from vision_rig import VisionRig, image

from omlxd.chat import (
    Conversation,
    GenerateRequest,
    ImagePart,
    Message,
    Part,
    Sampling,
    TextPart,
    ToolCallPart,
    ToolResultPart,
)
from omlxd.engine import mlx_adapter
from omlxd.engine.mlx_adapter.model import load as loading
from omlxd.engine.mlx_adapter.model.vlm import vision
from omlxd.engine.prompt.turn_memory import Scope
from omlxd.engine.schedule.memory_admission import MemoryAdmission
from omlxd.errors import InvalidRequest, ModelError
from omlxd.models.footprint import footprint, vision_obstacle

LONG = " ".join(f"line {i} of the file" for i in range(40))


def encoded(seed: int, format: str = "PNG", width: int = 112, height: int = 112) -> ImagePart:
    out = io.BytesIO()
    Pillow.fromarray(picture(seed, width, height)).save(out, format, lossless=True)
    return ImagePart(out.getvalue(), f"image/{format.lower()}")


def user(*parts: str | Part) -> Message:
    return Message("user", tuple(TextPart(part) if isinstance(part, str) else part for part in parts))


def request(*messages: Message, n: int = 8) -> GenerateRequest:
    talk = Conversation(messages, thinking=False)
    return GenerateRequest(talk, sampling=Sampling(temperature=0.0, max_tokens=n))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_vision_family("qwen3_vl", tmp_path_factory.mktemp("qwen3_vl"))


@pytest.fixture(scope="module")
def host(model: Path) -> Iterator[Host]:
    host = Host(model)
    yield host
    host.close()


# --------------------------------------------------------------------------- a request


def test_a_child_waits_for_the_first_image(host: Host):
    deadline = time.monotonic() + 60
    while not (idle := host.engine.media._children._idle) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert idle and idle[0].process.poll() is None


def test_an_image_is_read_and_hit_again(host: Host):
    towers = host.engine.images.towers
    ask = request(user(LONG, encoded(1), "What is it? " + LONG))
    first, second = host.ask(ask), host.ask(ask)
    assert text_of(first) == text_of(second) != ""
    usage = finished(second).usage
    assert usage.cached_hot == (usage.prompt_tokens - 1) // BLOCK * BLOCK
    assert host.engine.images.towers == towers + 1
    assert host.engine.count(ask.prompt) == usage.prompt_tokens
    assert host.engine.info.images and host.engine.info.blind == ""


def test_the_same_picture_in_another_encoding_is_the_same(host: Host):
    of_png, of_webp = (
        finished(host.ask(request(user(LONG, encoded(7, format), LONG)))).usage for format in ("PNG", "WEBP")
    )
    assert of_webp.cached_hot == (of_png.prompt_tokens - 1) // BLOCK * BLOCK


def test_text_before_an_image_is_shared_with_text_alone(host: Host):
    host.ask(request(user("Shared. " + LONG)))
    usage = finished(host.ask(request(user("Shared. " + LONG, encoded(1))))).usage
    assert usage.cached_hot >= 2 * BLOCK


def test_an_image_in_a_tools_result(host: Host):
    call = Message("assistant", (ToolCallPart("call-1", "read", {"path": "a.png"}),))
    result = Message("tool", (ToolResultPart("call-1", "a.png: " + LONG, images=(encoded(2),)),))
    ask = request(user("Read a.png"), call, result, user(LONG))
    first, second = host.ask(ask), host.ask(ask)
    assert text_of(first) == text_of(second)
    assert finished(second).usage.cached_hot > BLOCK
    other = replace(result.parts[0], images=(encoded(3),))
    changed = finished(
        host.ask(request(user("Read a.png"), call, Message("tool", (other,)), user(LONG)))
    ).usage
    assert 0 < changed.cached_hot < finished(second).usage.cached_hot


def test_an_answer_after_an_image_is_put_back_as_it_was_generated(host: Host):
    asked = request(user(LONG, encoded(4), "What?"), n=40)
    answer = Message("assistant", (TextPart(text_of(host.ask(asked))),))
    assert isinstance(asked.prompt, Conversation)
    longer = replace(asked.prompt, messages=(*asked.prompt.messages, answer, user("Go on", encoded(5))))
    rendered = host.engine.prompts.render(longer, scope=Scope())
    assert rendered.unknown == 0 and not rendered.refused
    usage = finished(host.ask(replace(asked, prompt=longer))).usage
    assert usage.cached_hot >= finished(host.ask(asked)).usage.prompt_tokens // BLOCK * BLOCK


def test_a_placeholder_that_somebody_typed_is_text(host: Host):
    typed = "".join(IMAGE_TOKENS[i] for i in (0, 2, 1))
    alone = text_of(host.ask(request(user(f"This is {typed}, a token"))))
    assert alone
    ask = request(user(f"This is {typed}, and this a picture", encoded(1), typed))
    rendered = host.engine.prompts.render(ask.prompt)
    assert rendered.tokens.count(host.engine.images.processor.placeholder_id) == 1
    assert text_of(host.ask(ask))


def test_an_image_of_the_assistant_is_refused(host: Host):
    with pytest.raises(InvalidRequest, match="assistant"):
        host.ask(request(user("Hello"), Message("assistant", (encoded(1),)), user("More")))


def test_why_a_prompt_missed_names_the_image(host: Host, tmp_path: Path):
    explainer: Any = host.engine.explain(0, request(user(LONG, encoded(8), LONG)), -1)
    assert explainer.cause == "never_stored"  # Without a cold tier nothing is known of what stands there.


# --------------------------------------------------------------------------- folders


def test_the_template_of_an_older_model_stands_beside_its_processor(tmp_path: Path):
    folder = build_vision_family("smolvlm", tmp_path)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": settings.pop("chat_template")}))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    host = Host(folder)
    try:
        assert host.engine.info.images
        assert text_of(host.ask(request(user("Look", encoded(1)))))
    finally:
        host.close()


def test_folders_without_a_tower_or_of_another_family_hold_text_models(model: Path, tmp_path: Path):
    config = json.loads((model / "config.json").read_text())
    assert vision_obstacle(model, config) == ""
    assert vision_obstacle(tmp_path, config) is None  # No weights of a tower.
    assert vision_obstacle(model, {**config, "vision_config": None}) is None
    assert "florence2" in (vision_obstacle(model, {**config, "model_type": "florence2"}) or "")
    assert "Python file" in (vision_obstacle(model, {**config, "model_file": "a.py"}) or "")


def test_without_mlx_vlm_a_vision_model_says_what_to_install(model: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("omlxd.models.footprint.find_spec", lambda name: None)
    blind = vision.blindness(model)
    assert blind and "omlxd[vision]" in blind and f"mlx-vlm=={vision.VLM_VERSION}" in blind
    assert footprint(model).blind == blind
    host = Host(model)
    try:
        with pytest.raises(InvalidRequest, match=re.escape(f"this model takes no images: {blind}")):
            host.ask(request(user("Look", encoded(1))))
    finally:
        host.close()
    with pytest.raises(ModelError, match="pip install"):
        mlx_adapter.load(build_vision_family("glm4v", model.parent / "glm4v"))


PROPORTIONAL = {
    "full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 1e6, "rope_type": "proportional"},
    "sliding_attention": {"rope_theta": 1e4, "rope_type": "default"},
}
"""As published configs of Gemma 4 have it. Without it mlx-lm and mlx-vlm take different ones."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "changes"), [("qwen3_5", {}), ("gemma4", {"rope_parameters": PROPORTIONAL})]
)
def test_text_is_computed_as_mlx_lm_does(family: str, changes: dict[str, Any], tmp_path: Path):
    config = VISION_FAMILIES[family].config
    text = config["text_config"] | changes
    config = config | {"text_config": text, "vocab_size": text["vocab_size"]}
    changed = dataclasses.replace(VISION_FAMILIES[family], config=config)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(VISION_FAMILIES, family, changed)
        build_vision_family(family, tmp_path)
    tokens = mx.array([prompt(100)])
    rows: list[np.ndarray] = []
    for blind in ("", None):
        model, *_ = loading.read_model(tmp_path, blind=blind)
        rows.append(np.array(model(tokens, cache=make_prompt_cache(model))[0]))
    assert np.abs(rows[0] - rows[1]).max() < 1e-4
    assert np.array_equal(rows[0].argmax(-1), rows[1].argmax(-1))


# --------------------------------------------------------------------------- keys


@pytest.fixture(scope="module")
def rig(model: Path) -> Iterator[VisionRig]:
    with VisionRig("qwen3_vl", model, reuse=False) as rig:
        yield rig


def test_blocks_that_hold_an_image_are_named_for_it_and_no_others(rig: VisionRig):
    _, images = rig.place([(200, 1), image(1, 224, 224), (40, 2), image(2), (300, 3)])
    one, two = images.spans
    keys = images.extra_keys(BLOCK)
    assert sorted(keys) == sorted(
        {block for span in (one, two) for block in range(span.start // BLOCK, (span.stop - 1) // BLOCK + 1)}
    )
    first = one.start // BLOCK
    assert keys[first][0] == ("image", f"{one.image.digest}@{one.start - first * BLOCK}")
    assert keys[first + 1][0] == ("image", f"{one.image.digest}@{one.start - (first + 1) * BLOCK}")


def test_a_block_of_many_images_has_one_key(rig: VisionRig):
    many = [image(seed, 56, 56) for seed in range(12)]
    keys, other = (rig.place(each)[1].extra_keys(BLOCK) for each in (many, [*many[:9], image(40, 56, 56)]))
    assert [kind for kind, _ in keys[0]] == ["images"] and keys[0] != other[0]


def test_guesses_behind_an_image_are_checked_at_their_places(
    model: Path, rig: VisionRig, monkeypatch: pytest.MonkeyPatch
):
    talk = [(150, 1), image(1), (70, 2)]
    right = rig.ask(talk, 40)[0].sequence.tokens

    guess_by(monkeypatch, lambda tokens: [*right[len(tokens) : len(tokens) + 5], 7])
    with VisionRig("qwen3_vl", model, reuse=False, speculate=True) as guessing:
        passes = guessing.scheduler.counts.steps
        output = guessing.begin(talk, 40)
        output.tokens()
        guessing.settle()
        assert output.sequence.tokens == right
        assert (
            guessing.scheduler.counts.steps - passes < 30
        )  # Most guesses were right, so each was at its place.


@pytest.mark.slow
def test_quantised_kv_of_images_is_hit_and_batched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    family = VISION_FAMILIES["qwen3_vl"]
    text = family.config["text_config"]
    wide = text | {"head_dim": 64, "rope_scaling": {"type": "default", "mrope_section": [8, 12, 12]}}
    changed = dataclasses.replace(family, config=family.config | {"text_config": wide})
    monkeypatch.setitem(VISION_FAMILIES, "qwen3_vl", changed)
    folder = build_vision_family("qwen3_vl", tmp_path)
    talk, plain = [(150, 1), image(1), (70, 2)], [(90, 3)]
    with (
        VisionRig("qwen3_vl", folder, kv_bits=8, reuse=False) as uncached,
        VisionRig("qwen3_vl", folder, kv_bits=8) as rig,
    ):
        alone = [uncached.ask(each, 8)[0].got for each in (talk, plain)]
        assert rig.ask(talk, 8)[0].got == alone[0]
        together = [rig.begin(each, 8) for each in (talk, plain)]
        assert [output.tokens() for output in together] == alone
        assert together[0].hot == 3 * BLOCK


# --------------------------------------------------------------------------- memory


def test_an_image_that_the_tower_has_no_memory_for_waits_or_is_refused(model: Path, rig: VisionRig):
    memory = [10**9, 10**9]
    wants: list[Any] = []
    admission = MemoryAdmission(
        rig.loaded, 0, wants.append, tower=footprint(model).tower, measure=lambda: (memory[0], memory[1])
    )
    rig.on_engine(lambda: setattr(rig.scheduler, "memory", admission))
    try:
        talk = [(60, 1), image(1, 224, 224)]
        assert len(rig.ask(talk)[0].got) == 4
        memory[:] = [10**6, 10**6]
        rig.on_engine(rig.images.give_memory_back)  # With its features it would need no tower.
        with pytest.raises(InvalidRequest, match=r"of it for its largest image, and at most .* smaller"):
            rig.begin(talk).tokens()
        assert len(rig.ask([(140, 1)])[0].got) == len(rig.ask([(60, 1), image(1, 56, 56)])[0].got) == 4
        memory[0] = 10**9
        waiting = rig.begin(talk)
        while not wants:
            rig.on_engine(lambda: None)
        assert not waiting.got and waiting.sequence.kv.cache is None
        memory[1] = 10**9
        assert len(waiting.tokens()) == 4
    finally:
        rig.on_engine(lambda: setattr(rig.scheduler, "memory", None))


# --------------------------------------------------------------------------- traps


def logits(
    model: Any, rig: VisionRig, segments: Any, size: int, cut: Any = lambda inputs: inputs
) -> np.ndarray:
    """Of every token, in passes of `size` tokens; `cut` changes what a pass gets."""
    tokens, images = rig.place(segments)
    images._images = FreshImages(model, rig)
    cache, rows = model.make_cache(), []
    stops = [stop for stop in range(size, len(tokens), size) if images.may_end(stop)]
    for start, stop in zip([0, *stops], [*stops, len(tokens)], strict=True):
        inputs = cut(images.inputs(start, stop))
        rows.append(model(mx.array([tokens[start:stop]]), cache=cache, **inputs)[0])
    return np.array(mx.concatenate(rows))


class FreshImages:
    """In place of `Images`, for a model of this thread."""

    def __init__(self, model: Any, rig: VisionRig):
        self.model, self._rig = model, rig

    def features_of(self, image: Any, pixels: Any) -> Any:
        return self.model.see_image(image.tokens.tolist(), pixels())

    def write_features(self, image: Any, prompt_tokens: int) -> None: ...

    def places_of(self, image: Any) -> np.ndarray:
        return self.model.image_places(image.tokens.tolist(), image.grid)

    def take_pixels(self, span: Any) -> Any:
        return self._rig.images.take_pixels(span)


TALK = [(40, 1), image(1), (30, 2), image(2, 168), (20, 3)]


def test_deepstack_features_go_with_their_tokens(model: Path, rig: VisionRig):
    loaded, _ = vision.load_vision_model(model)
    whole = logits(loaded, rig, TALK, 10_000)
    assert np.array_equal(logits(loaded, rig, TALK, 16), whole)

    def without(inputs: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in inputs.items() if "visual" not in name}

    assert np.abs(logits(loaded, rig, TALK, 16, without) - whole).max() > 0.1


def test_positions_behind_an_image_are_moved(model: Path, rig: VisionRig):
    loaded, _ = vision.load_vision_model(model)
    tokens, images = rig.place(TALK)
    images._images = FreshImages(loaded, rig)
    whole = logits(loaded, rig, [*TALK, [400, 401]], 10_000)[-1]
    for deltas, same in (([None], False), ([images.inputs(0, 1) and images.delta], True)):
        cache = loaded.make_cache()
        loaded(mx.array([tokens]), cache=cache, **images.inputs(0, len(tokens)))
        for token in (400, 401):
            last = loaded(mx.array([[token]]), cache=cache, deltas=deltas if deltas[0] else None)
        assert np.array_equal(np.array(last[0, -1]), whole) == same


def test_nothing_of_a_prompt_stays_in_the_model(model: Path, rig: VisionRig):
    loaded, _ = vision.load_vision_model(model)
    plain = logits(loaded, rig, TALK, 16)
    loaded.vlm.language_model._rope_deltas = mx.array([[50]])
    loaded.vlm.language_model._position_ids = mx.zeros((3, 1, 500), mx.int32)
    assert np.array_equal(logits(loaded, rig, TALK, 16), plain)


def test_features_have_the_type_of_texts_embeddings():
    """KV of a pass with an image must have the type that the model's layout says."""

    def get_input_embeddings(ids: mx.array, pixel_values: Any = None, mask: Any = None) -> Any:
        dtype = mx.bfloat16 if pixel_values is None else mx.float32
        embeds = mx.ones((1, ids.shape[1], 8), dtype)
        return SimpleNamespace(**(dict.fromkeys(vision._FEATURES) | {"inputs_embeds": embeds}))

    vlm = SimpleNamespace(
        config=SimpleNamespace(), language_model=None, get_input_embeddings=get_input_embeddings
    )
    features = vision.VisionModel(vlm).see_image([1, 2, 3], {"pixel_values": np.ones(3)})
    assert features.embeds.dtype == mx.bfloat16


@pytest.mark.slow
def test_an_images_tokens_see_each_other_behind_a_cached_prefix_too(tmp_path: Path):
    """Gemma 4: mlx-vlm makes a pass behind a prefix causal."""
    model = build_vision_family("gemma4", tmp_path)
    with VisionRig("gemma4", model, reuse=False) as rig:
        loaded, _ = vision.load_vision_model(model)
        assert loaded.whole_images
        whole = logits(loaded, rig, TALK, 10_000)
        assert np.array_equal(logits(loaded, rig, TALK, 16), whole)
        del loaded.vlm.language_model.model._apply_blockwise_bidirectional_overlay  # The class's own is left.
        assert np.array_equal(logits(loaded, rig, TALK, 10_000), whole)
        assert np.abs(logits(loaded, rig, TALK, 16) - whole).max() > 0.1
        sequence = rig.begin([(100, 1), image(1), (20, 2)], 1).sequence
        inside = range(sequence.prompt.images.spans[0].start + 1, sequence.prompt.images.spans[0].stop)
        assert sequence.last_boundary(BLOCK) not in inside and not sequence.may_end(inside[0])
