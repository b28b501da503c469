"""What is kept of images on disk: nothing is decoded or seen again after a restart."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import SimpleNamespace

import pytest

if not all(map(importlib.util.find_spec, ("mlx_vlm", "PIL"))):
    pytest.skip("mlx-vlm is not installed", allow_module_level=True)

import mlx.core as mx
import numpy as np
from rig import BLOCK
from vision_rig import Segments, VisionRig, image

from omlxd.engine.mlx_adapter.model.vlm.vision import Features, pack_features, unpack_features
from omlxd.engine.vision import image_files
from omlxd.errors import OmlxdError
from omlxd.kv.cold.health import ColdHealth

FAMILIES = ("qwen2_5_vl", "qwen3_vl")
ENDS_IN_LAST_BLOCK: Segments = [(150, 1), image(1), (3, 2)]


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return request.param


def records(root: Path) -> list[Path]:
    return sorted(root.rglob("*.record"))


def same(rig: VisionRig, uncached: VisionRig, segments: Segments) -> None:
    output, rows = rig.ask(segments)
    want, want_rows = uncached.ask(segments)
    assert output.got == want.got
    assert all(np.array_equal(a, b) for a, b in zip(rows, want_rows, strict=True))


@pytest.mark.slow
def test_after_a_restart_an_image_in_the_last_block_is_not_seen_again(family, model, uncached, tmp_path):
    with VisionRig(family, model, tmp_path) as rig:
        same(rig, uncached, ENDS_IN_LAST_BLOCK)
        assert (rig.images.towers, rig.album.decoded) == (1, 1)
    with VisionRig(family, model, tmp_path) as restarted:
        fetch(restarted, ENDS_IN_LAST_BLOCK)
        same(restarted, uncached, ENDS_IN_LAST_BLOCK)
        assert (restarted.images.towers, restarted.album.decoded) == (0, 0)
        fetch(restarted, elsewhere := [(90, 9), image(1), (70, 2)])
        same(restarted, uncached, elsewhere)
        assert (restarted.images.towers, restarted.album.decoded) == (0, 0)


def fetch(rig: VisionRig, segments: Segments) -> None:
    """As a request thread does, nothing being cached."""
    rig.place(segments)[1].fetch(0)


def test_damaged_and_missing_records_are_done_without(family, model, uncached, tmp_path):
    with VisionRig(family, model, tmp_path) as rig:
        same(rig, uncached, ENDS_IN_LAST_BLOCK)
    before = records(tmp_path)
    assert len(before) == 2
    for file in before:
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 1
        file.write_bytes(data)
    with VisionRig(family, model, tmp_path) as rig:
        fetch(rig, ENDS_IN_LAST_BLOCK)
        same(rig, uncached, ENDS_IN_LAST_BLOCK)
        assert (rig.images.towers, rig.album.decoded) == (1, 1)
    assert records(tmp_path) == before  # Written anew.
    for file in before:
        file.unlink()
    with VisionRig(family, model, tmp_path) as rig:
        same(rig, uncached, ENDS_IN_LAST_BLOCK)
        assert (rig.images.towers, rig.album.decoded) == (1, 1)
    assert records(tmp_path) == before


def test_features_in_several_records_need_all_of_them(family, model, uncached, tmp_path, monkeypatch):
    monkeypatch.setattr(image_files, "PART_BYTES", 1000)
    with VisionRig(family, model, tmp_path) as rig:
        same(rig, uncached, ENDS_IN_LAST_BLOCK)
    before = records(tmp_path)
    assert len(before) > 4
    with VisionRig(family, model, tmp_path) as rig:
        fetch(rig, ENDS_IN_LAST_BLOCK)
        same(rig, uncached, ENDS_IN_LAST_BLOCK)
        assert rig.images.towers == 0
    largest = max(before, key=lambda file: file.stat().st_size)
    largest.unlink()
    with VisionRig(family, model, tmp_path) as rig:
        fetch(rig, ENDS_IN_LAST_BLOCK)
        same(rig, uncached, ENDS_IN_LAST_BLOCK)
        assert rig.images.towers == 1
    assert records(tmp_path) == before


def test_a_processor_of_other_settings_remembers_no_picture_of_these(family, model, uncached, tmp_path):
    with VisionRig(family, model, tmp_path) as rig:
        same(rig, uncached, ENDS_IN_LAST_BLOCK)
    with VisionRig(family, model, tmp_path) as rig:
        assert rig.files is not None
        rig.files.processor = b"others"
        rig.place(ENDS_IN_LAST_BLOCK)
        assert rig.album.decoded == 1


def test_what_the_cap_or_the_write_policy_refuses_is_done_without(family, model, uncached, tmp_path):
    with VisionRig(family, model, tmp_path / "full") as rig:
        assert rig.files is not None
        full = SimpleNamespace(submit=lambda *_: False, health=ColdHealth(), after_queued=lambda action: None)
        rig.files._writer = full  # type: ignore[assignment]
        same(rig, uncached, ENDS_IN_LAST_BLOCK)
        tokens = len(rig.place(ENDS_IN_LAST_BLOCK)[0])
        [known] = rig.images._by_digest.values()
        assert rig.files.wants(known.digest, tokens)  # The next prompt tries again.
    assert not records(tmp_path / "full")
    with VisionRig(family, model, tmp_path / "held") as rig:
        asked: list[int] = []
        assert rig.files is not None
        rig.files._admits = lambda digest, tokens: bool(asked.append(tokens))
        same(rig, uncached, ENDS_IN_LAST_BLOCK)
        assert asked == [len(rig.place(ENDS_IN_LAST_BLOCK)[0])]
    assert len(records(tmp_path / "held")) == 1  # The picture's.


def test_features_that_are_no_numbers_are_not_kept(family, model, tmp_path):
    with VisionRig(family, model, tmp_path) as rig:
        see = rig.images.model.see_image

        def fail(tokens, pixels):
            seen = see(tokens, pixels)
            return Features(seen.embeds * float("nan"), seen.visual, seen.deepstack)

        rig.images.model.see_image = fail
        with pytest.raises(OmlxdError, match="not numbers"):
            rig.ask(ENDS_IN_LAST_BLOCK)
        rig.images.model.see_image = see
        assert len(rig.images._features) == 0
        rig.ask([(90, 9), image(1), (70, 2)])
        assert rig.images.towers == 2 and len(rig.images._features) == 1


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_features_are_the_same_bits_again(dtype):
    visual = np.array([True, False, True, True])
    rows = mx.random.normal((4, 8)).astype(dtype)
    features = Features(rows, visual, (rows[:3] * 2, rows[1:] + 1))
    again = unpack_features(pack_features(features), 4)
    assert again.visual is not None and np.array_equal(again.visual, visual)
    for one, other in zip((rows, *features.deepstack), (again.embeds, *again.deepstack), strict=True):
        assert one.dtype == other.dtype and bool(mx.array_equal(one, other))
    assert again.finite and unpack_features(pack_features(Features(rows)), 4).visual is None
    for wrong in (b"", b"\x90", pack_features(features)[:-1]):
        with pytest.raises(ValueError):
            unpack_features(wrong, 4)
    with pytest.raises(ValueError, match="no features of it"):
        unpack_features(pack_features(features), 5)


def test_a_disk_that_cannot_be_read_is_left_alone(family, model, uncached, tmp_path):
    with VisionRig(family, model, tmp_path) as rig:
        same(rig, uncached, ENDS_IN_LAST_BLOCK)
    with VisionRig(family, model, tmp_path) as rig:
        assert rig.files is not None
        reads: list[bytes] = []

        def load(name: bytes) -> bytes:
            reads.append(name)
            raise OSError(5, "a disk that fails")

        rig.files._records = SimpleNamespace(load=load, path_of=lambda name: "")  # type: ignore[assignment]
        assert rig.files.load_features("00" * 32) is None
        assert rig.files.load_picture((b"", 0, 0)) is None
        assert len(reads) == 1


def test_what_was_seen_before_an_abort_is_not_seen_again(family, model, uncached, tmp_path):
    """In the tower of the second image: the first one's features and the blocks before it stay."""
    talk = [(150, 1), image(1), image(2, 168), (20, 2)]
    with VisionRig(family, model, tmp_path) as rig:
        looked_up = rig.scheduler.passes.between_layers

        def cancel_in_the_second_tower():
            if rig.images.towers == 1:
                for sequence in rig.scheduler.passes.computing:
                    rig.scheduler.cancel(sequence)
            looked_up()

        rig.scheduler.passes.between_layers = cancel_in_the_second_tower
        broken = rig.begin(talk)
        rig.settle()
        rig.scheduler.passes.between_layers = looked_up
        assert broken.sequence.cancelled and rig.images.towers == 1
        output, _ = rig.ask(talk)
        assert rig.images.towers == 2 and output.hot >= 2 * BLOCK
        assert output.got == uncached.ask(talk)[0].got
