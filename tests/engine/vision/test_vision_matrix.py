"""Every vision family × ways to come back to a prefix with images, against a run without reuse.

One family of each kind of cache comes back in every way, any other in every second one: `some`.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

if not all(map(importlib.util.find_spec, ("mlx_vlm", "PIL"))):
    pytest.skip("mlx-vlm is not installed", allow_module_level=True)

from rig import BLOCK
from vision_families import IMAGE, VISION_FAMILIES
from vision_rig import Segments, VisionRig, image

from omlxd.engine.mlx_adapter.model.vlm import vision

FAST = ("qwen3_vl", "gemma4")
ALL = [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in VISION_FAMILIES]
WHOLE = (*FAST, "qwen3_5")
"""Of KV per token alone, with windows, with recurrent layers."""


def some(turn: int) -> pytest.MarkDecorator:
    """A slow test of `WHOLE` and of each second other family, from the first or the second on."""
    others = [name for name in VISION_FAMILIES if name not in WHOLE]
    names = [pytest.param(name, marks=pytest.mark.slow) for name in (*WHOLE, *others[turn::2])]
    return pytest.mark.parametrize("family", names, indirect=True, scope="module")


TALK: Segments = [(150, 1), image(1), (70, 2)]
CLOSE = 1e-3
"""Largest difference of logits of about 6, for families whose kernels look at a chunk's bounds."""


@pytest.fixture(scope="module", params=ALL)
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def rig(family: str, model: Path, tmp_path: Path) -> Iterator[VisionRig]:
    with VisionRig(family, model, tmp_path) as rig:
        yield rig


def check(rig: VisionRig, uncached: VisionRig, segments: Segments) -> tuple[int, np.ndarray]:
    """The answer is that of a run without reuse; (tokens restored, first logits)."""
    output, rows = rig.ask(segments)
    want, want_rows = uncached.ask(segments)
    assert output.got == want.got
    differ = max(float(np.abs(a - b).max()) for a, b in zip(rows, want_rows, strict=True))
    print(f"logits differ by {differ:.2g}, {output.hot} hot, {output.cold} cold")
    assert differ <= (0 if rig.family.exact else CLOSE)
    return output.hot + output.cold, rows[0]


def last_boundary(rig: VisionRig, segments: Segments) -> int:
    return rig.begin(segments, 1).sequence.last_boundary(BLOCK)


def before_image(rig: VisionRig, segments: Segments, number: int = 0) -> int:
    """Where the image's first block begins."""
    return rig.place(segments)[1].spans[number].start // BLOCK * BLOCK


def test_it_loads_and_its_prefixes_are_reused(rig: VisionRig):
    assert rig.loaded.blind == "" and rig.loaded.kv_reuse == "" and rig.loaded.batchable
    assert rig.family.per_token == (rig.checkpointer is None)


def test_the_tower_is_looked_into_between_its_layers(rig: VisionRig):
    def count() -> int:
        calls: list[int] = []
        image_of, hook = rig.place(TALK)[1].spans[0], rig.loaded.hook
        hook.call = lambda: calls.append(1)
        rig.images.model.see_image(image_of.image.tokens.tolist(), rig.images.take_pixels(image_of))
        hook.call = None
        return len(calls)

    assert rig.on_engine(count) == 2


@some(0)
def test_the_same_prompt_again_and_from_disk(family: str, model: Path, uncached: VisionRig, tmp_path: Path):
    longer = [*TALK, image(2, 168), (40, 3)]
    with VisionRig(family, model, tmp_path) as rig:
        assert check(rig, uncached, TALK)[0] == 0
        reach = last_boundary(rig, TALK)
        assert reach > before_image(rig, TALK)
        assert check(rig, uncached, TALK)[0] == reach
        assert rig.images.towers == 1
        check(rig, uncached, longer)
        assert rig.images.towers == 2  # For the second image alone.
    with VisionRig(family, model, tmp_path) as restarted:
        assert check(restarted, uncached, longer)[0] == last_boundary(restarted, longer)
        assert restarted.images.towers <= 1  # The second may lie in the last block.


def test_another_image_at_the_same_place_misses_from_itself_on(rig: VisionRig, uncached: VisionRig):
    _, first = check(rig, uncached, TALK)
    other = [TALK[0], image(2), TALK[2]]
    restored, logits = check(rig, uncached, other)
    assert 0 < restored <= before_image(rig, other)
    if rig.family.per_token:
        assert restored == before_image(rig, other)
    assert np.abs(first - logits).max() > 1e-3  # The model sees which.


@some(1)
def test_text_before_an_image_is_kept_for_another_image(rig: VisionRig, uncached: VisionRig):
    """Windows and recurrent layers have state there too, between two of the usual checkpoints."""
    talks = [[(210, 1), image(seed), (10, 2), image(seed + 1), (200, 3)] for seed in (1, 3, 5)]
    assert before_image(rig, talks[0]) % 128
    if rig.checkpointer is not None:
        rig.checkpointer.least_text = BLOCK
    assert check(rig, uncached, talks[0])[0] == 0
    assert check(rig, uncached, talks[1])[0] == before_image(rig, talks[1])
    if rig.checkpointer is not None:  # Not for less than it is worth, and none within the run of images.
        rig.checkpointer.least_text = 4 * BLOCK
        sequence = rig.begin([(130, 7), *talks[0][1:]], 1).sequence
        assert sequence.kv.before_images == ()


@some(0)
def test_the_image_at_another_place_is_computed_there(rig: VisionRig, uncached: VisionRig):
    check(rig, uncached, TALK)
    towers = rig.images.towers
    assert check(rig, uncached, [(90, 9), image(1), (70, 2)])[0] == 0
    assert rig.images.towers == towers  # Its features are kept.


@some(1)
def test_two_images_of_which_the_second_changes(rig: VisionRig, uncached: VisionRig):
    two = [*TALK, image(2, 168), (70, 3)]
    check(rig, uncached, two)
    changed = [*TALK, image(3, 168), (70, 3)]
    restored, _ = check(rig, uncached, changed)
    assert 0 < restored <= before_image(rig, changed, 1)


@some(0)
def test_an_answer_is_a_prefix_too(rig: VisionRig, uncached: VisionRig):
    output, _ = rig.ask(TALK, n=80)
    restored, _ = check(rig, uncached, [*TALK, output.got, (40, 4)])
    assert restored >= output.sequence.prompt.length + 80 - 2 * BLOCK


@some(1)
def test_a_prompt_that_was_broken_off_is_gone_on_with(rig: VisionRig, uncached: VisionRig):
    long = [(150, 1), image(1), (300, 2), image(2), (100, 3)]
    broken = rig.begin(long)
    compute, passes = rig.scheduler.passes.compute, []

    def until_cancelled(sequence):
        if sequence is broken.sequence and len(passes) == 3:
            rig.scheduler.cancel(sequence)
        passes.append(sequence)
        compute(sequence)

    rig.scheduler.passes.compute = until_cancelled  # type: ignore[method-assign]
    rig.settle()
    assert broken.sequence.cancelled
    restored, _ = check(rig, uncached, long)
    assert restored > 0


def test_rows_with_and_without_images_decode_together(rig: VisionRig, uncached: VisionRig):
    prompts: list[Segments] = [
        TALK,
        [(100, 5)],
        [(40, 6), image(2, 168), (30, 7), image(1), (10, 8)],
        [(200, 7)],
    ]
    alone = [uncached.ask(each, 12)[0].got for each in prompts]
    together = [rig.begin(each, 12) for each in prompts]
    assert [output.tokens() for output in together] == alone
    rig.settle()


def test_mlx_vlms_own_generate_says_the_same(rig: VisionRig, model: Path):
    output, _ = rig.ask(TALK, n=12)
    tokens, images = rig.place(TALK)
    pixels = {name: vision._arrays(value) for name, value in rig.images.take_pixels(images.spans[0]).items()}
    loaded, _ = vision.load_vision_model(model)
    ids = mx.array([tokens])
    if "mm_token_type_ids" in pixels:  # Of the whole prompt.
        pixels["mm_token_type_ids"] = (ids == IMAGE).astype(mx.int32)
    theirs = vision.import_vlm("generate.ar").generate_step(
        ids,
        loaded.vlm,
        pixels.pop("pixel_values"),
        mx.ones_like(ids),
        max_tokens=12,
        temperature=0.0,
        **pixels,
    )
    assert [int(token) for token, _ in theirs] == output.got


def test_positions_are_those_of_the_model(rig: VisionRig):
    """Where an image's tokens have places in three dimensions: mlx-vlm's own of the prompt as one."""
    tokens, images = rig.place([(30, 1), image(1), image(2, 168), (20, 3), image(1), (9, 4)])
    if not images._images.model.mrope:
        return
    language = images._images.model.vlm.language_model
    ids = mx.array([tokens])
    grids = mx.array(np.concatenate([span.image.grid for span in images.spans]))
    want, delta = language.get_rope_index(ids, grids, None, mx.ones_like(ids))
    assert np.array_equal(np.array(want)[:, 0], images._positions(0, len(tokens)))
    assert images.delta == int(delta.item()) < 0
    for start in range(0, len(tokens) - 16, 7):
        own = images._positions(start, start + 16)
        assert np.array_equal(np.array(want)[:, 0, start : start + 16], own)
