"""Where the last, short segment of a prompt ends, and who holds it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from backends import use_backend
from cold_run import Reference, assert_same, prompt
from families import build_family
from rig import BLOCK, Output, Rig

from omlxd.engine import mlx_adapter
from omlxd.engine.kvio import transport as staging
from omlxd.engine.kvio.transport import StagedTransport
from omlxd.engine.mlx_adapter import LiveSegments
from omlxd.engine.mlx_adapter.cache import segments
from omlxd.engine.mlx_adapter.cuda import backend as cuda_backend
from omlxd.engine.mlx_adapter.model import checks

from .test_shared_prefix import Watching, assert_nothing_is_left

SEGMENT, SHORT = 512, 128
N = 40


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_family("qwen3", tmp_path_factory.mktemp("model") / "qwen3")


@pytest.fixture(scope="module")
def uncached(model: Path):
    with Reference(model) as reference:
        yield reference


def sharing(model: Path, root: Path | None = None, **options: Any) -> Rig:
    rig = Rig(model, root, segment=SEGMENT, **options)
    rig.loaded.segments.short = SHORT
    return rig


class Cut(Output):
    """Notes where the tail begins as its first token comes."""

    base = -1

    def token(self, token: int, likelihood: Any = None) -> None:
        if not self.got and self.sequence.kv.cache is not None:
            self.base = self.sequence.kv.cache[0].base
        super().token(token, likelihood)


@pytest.mark.parametrize(
    ("length", "ends"),
    [
        *((1, []), (256, []), (257, [256]), (320, [256]), (321, [256]), (512, [256]), (513, [512])),
        *((995, [768]), (2048, [1792]), (2049, [2048]), (2304, [2048]), (2305, [2048, 2304])),
        (4097, [2048, 4096]),
    ],
)
def test_a_cut_depends_on_the_length_alone(length: int, ends: list[int]):
    live = LiveSegments(mlx_adapter.SEGMENT, segments.SHORT_SEGMENT)
    hashes = [bytes([block]) for block in range(length // BLOCK)]
    names = live.names(hashes, BLOCK, length)
    assert names == {hashes[end // BLOCK - 1]: end for end in ends}
    assert list(live.names(hashes[:-1], BLOCK, length).values()) == [
        end for end in ends if end <= (len(hashes) - 1) * BLOCK
    ]
    assert not LiveSegments().names(hashes, BLOCK, length)
    full = [end for end in ends if end % mlx_adapter.SEGMENT == 0]
    assert list(LiveSegments(mlx_adapter.SEGMENT).names(hashes, BLOCK, length).values()) == full


def test_a_block_longer_than_a_short_segment_is_not_cut():
    live, hashes = LiveSegments(mlx_adapter.SEGMENT, 256), [b"1", b"2", b"3"]
    assert live.names(hashes, 512, 1536) == {b"2": 1024}
    assert live.names(hashes, 512, 1537) == {b"3": 1536}


def test_where_kernels_read_segments_all_are_full(model: Path, monkeypatch: pytest.MonkeyPatch):
    assert mlx_adapter.load(model, segment=SEGMENT).segments.short == segments.SHORT_SEGMENT
    use_backend(monkeypatch, "cuda")
    monkeypatch.setattr(cuda_backend, "steps_share", lambda model: True)
    monkeypatch.setattr(checks, "use_own_rows", lambda model: True)
    shared = mlx_adapter.share_prefixes(mlx_adapter.load(model).model, SEGMENT)
    assert (shared.tokens, shared.short) == (SEGMENT, 0)


LENGTHS = (20, 128, 129, 511, 513, 576, 641)


@pytest.mark.parametrize("direct", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_every_length_has_the_bits_of_a_cold_run(
    model: Path, uncached: Reference, tmp_path: Path, direct: bool, monkeypatch: pytest.MonkeyPatch
):
    """Computed, from RAM, from SSD with and without a RAM tier; cut at the same place each time."""
    if not direct:
        monkeypatch.setattr(staging, "_chosen", StagedTransport())
    tokens = {length: prompt(length, seed=length) for length in LENGTHS}

    def check(rig: Rig, hot: int = 0, cold: int = 0) -> None:
        for length in LENGTHS:
            known = (length - 1) // BLOCK * BLOCK
            assert_same(rig, tokens[length], uncached, hot=hot * known, cold=cold * known, n=3)

    def check_cuts(rig: Rig) -> None:
        for length in LENGTHS:
            output = Cut()
            rig.run(tokens[length], 1, output=output)
            assert output.base == max((length - 1) // SEGMENT * SEGMENT, (length - 1) // SHORT * SHORT)

    with sharing(model, tmp_path, record=True) as rig:
        check(rig)
        check(rig, hot=1)
        check_cuts(rig)
        assert_nothing_is_left(rig)
    with sharing(model, tmp_path, record=True) as rig:
        check(rig, cold=1)
    with sharing(model, tmp_path, record=True, hot=0) as rig:
        check(rig, cold=1)
        check_cuts(rig)
        assert_nothing_is_left(rig)
    with sharing(model, reuse=False) as rig:
        check_cuts(rig)


def held_by(rig: Rig, prompts: list[list[int]], uncached: Reference) -> int:
    """Bytes of segments while all of these decode at once."""
    watching = [Watching(rig) for _ in prompts]
    running = rig.on_engine(
        lambda: [rig.start(t, N, output=o) for t, o in zip(prompts, watching, strict=True)]
    )
    assert [output.tokens() for output in running] == [uncached.once(tokens, N)[0] for tokens in prompts]
    (held,) = {output.bytes[len(prompts)][0] for output in watching if len(prompts) in output.bytes}
    assert_nothing_is_left(rig)
    return held


def test_only_the_same_prefix_of_the_same_length_is_held_once(model: Path, uncached: Reference):
    start, other, end = prompt(300), prompt(300, seed=1), prompt(100, seed=2)
    with sharing(model) as rig:
        layout = rig.loaded.layout
        assert layout is not None
        cut, longer = layout.nbytes(3 * SHORT), layout.nbytes(SEGMENT)
        alike = [start + end, start + end[:90] + prompt(10, seed=3)]
        assert held_by(rig, alike, uncached) == cut
        assert held_by(rig, [start + end, other + end], uncached) == 2 * cut, "they end alike"
        assert held_by(rig, [*alike, start + end + prompt(120, seed=4)], uncached) == cut + longer


@pytest.mark.parametrize("origin", ["cold", "ssd"])
def test_one_that_is_cancelled_meanwhile_leaves_the_others(
    model: Path, uncached: Reference, tmp_path: Path, origin: str
):
    start = prompt(3 * SHORT + 20)
    prompts = [start + prompt(30 + index, seed=index + 1) for index in range(3)]

    class Cancelled(Output):
        def progress(self, event: Any) -> None:
            rig.scheduler.cancel(self.sequence)
            super().progress(event)

    if origin == "ssd":
        with sharing(model, tmp_path) as rig:
            rig.run(prompts[0], 1)
    with sharing(model, tmp_path, hot=1 << 30 if origin == "cold" else 0) as rig:
        outputs = [Cancelled(), Output(), Output()]
        running = rig.on_engine(
            lambda: [rig.start(t, N, output=o) for t, o in zip(prompts, outputs, strict=True)]
        )
        for tokens, output in zip(prompts[1:], running[1:], strict=True):
            assert output.tokens() == uncached.once(tokens, N)[0]
        assert not outputs[0].got
        assert_nothing_is_left(rig)
