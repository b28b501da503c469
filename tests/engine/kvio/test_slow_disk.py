"""A disk that is slower than computing: one part of a cached prefix is read, the other computed.

Whatever the split, and whatever happens meanwhile, the answer is that of a run without reuse, bit by bit, no
reference is kept, and no file is written again. Rates are told to the engine, so nothing here depends on how
fast this machine is.
"""

from __future__ import annotations

import random
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cold_run import Reference, assert_same, outputs, prompt, same_bits
from families import build_family
from fast_or_slow import rest_slow
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kv_fakes import check_pool
from rig import BLOCK, Output, Rig

from omlxd.engine.kvio import transport as staging
from omlxd.engine.kvio.reads.rates import Rates
from omlxd.engine.kvio.transport import StagedTransport
from omlxd.engine.mlx_adapter.attention import backend
from omlxd.engine.sequence.sequence import State
from omlxd.kv.files.fs import FileSystem
from omlxd.kv.hashing import chain_root, hash_blocks

TOKENS = prompt(1300)
CACHED = 1280


class SlowDisk(FileSystem):
    """Each block takes `seconds`, one after the other. `names`: files that were read, in order."""

    def __init__(self, seconds: float = 0.0):
        super().__init__()
        self.seconds, self.reads = seconds, 0
        self._one = threading.Lock()

    def readv(self, fd: int, buffers: Any, offset: int) -> int:
        if not offset:
            with self._one:
                time.sleep(self.seconds)
                self.reads += 1
        return super().readv(fd, buffers, offset)


class ToldRates(Rates):
    """A block takes `read_block_s` to be read, as long as none has been, and `compute_block_s` to compute."""

    def __init__(self, rig: Rig, read_block_s: float, compute_block_s: float):
        block_bytes = rig.scheduler.bridge.reads.rates.block_bytes  # type: ignore[union-attr]
        super().__init__(BLOCK, block_bytes)
        self.read = block_bytes / read_block_s if read_block_s else 0.0
        self._compute_block_s = compute_block_s

    def compute_s(self, blocks: int) -> float:
        return blocks * self._compute_block_s


def tell(rig: Rig, read_block_s: float, compute_block_s: float) -> None:
    assert rig.scheduler.bridge is not None
    rig.scheduler.bridge.reads.rates = ToldRates(rig, read_block_s, compute_block_s)


def blocks_files(root: Path) -> list[Path]:
    return sorted(path for path in root.rglob("*.safetensors"))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_family("qwen3", tmp_path_factory.mktemp("qwen3"))


@pytest.fixture(scope="module")
def reference(model: Path) -> Iterator[Reference]:
    with Reference(model) as made:
        yield made


@pytest.fixture(scope="module")
def written(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("written") / "cache"
    with Rig(model, folder) as rig:
        rig.run(TOKENS, 1)
    return folder


@pytest.fixture
def cache(written: Path, tmp_path: Path) -> Path:
    """The prompt's blocks, on disk."""
    return shutil.copytree(written, tmp_path / "cache")


@pytest.fixture(params=["direct", "staged"])
def either(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "staged":
        monkeypatch.setattr(backend.current(), "keep_on_host", lambda view: "no GPU here")
        monkeypatch.setattr(staging, "_chosen", StagedTransport())


def is_right(rig: Rig, output: Output, reference: Reference) -> None:
    """The answer is the reference's, and the tokens add up."""
    tokens, rows = reference.once(TOKENS, 8)
    assert output.got == tokens
    assert same_bits(outputs(rig, 8), rows)
    assert output.known == CACHED
    rig.on_engine(lambda: check_pool(rig.pool, {}))
    assert not rig.scheduler.bridge.reads._tails  # type: ignore[union-attr]
    assert not rig.scheduler.bridge.reads._under_way  # type: ignore[union-attr]


@pytest.mark.usefixtures("either")
@pytest.mark.parametrize("segment", [0, 256, 2048])
def test_both_ends_meet_with_the_bits_of_a_run_without_reuse(
    segment: int, cache: Path, model: Path, reference: Reference
):
    disk = SlowDisk(0.02)
    with Rig(model, cache, record=True, fs=disk, segment=segment) as rig:
        tell(rig, 0.1, 0.05)
        output = rig.run(TOKENS, 8)
        is_right(rig, output, reference)
        assert output.hot == 0
        assert output.cold > 0
        assert output.sequence.stats.recomputed > 0
        assert output.cold == disk.reads * BLOCK, "what was read is used"
        assert rig.store.flusher is not None
        assert rig.store.flusher.writer.stats.written <= 2, "what was computed again is not written again"
        assert rig.store.stats.hits_cold == output.cold
        again = rig.run(TOKENS, 8)
        assert (again.hot, again.cold, again.sequence.stats.recomputed) == (CACHED, 0, 0)


def test_what_is_in_ram_is_neither_read_nor_computed(cache: Path, model: Path, reference: Reference):
    disk = SlowDisk()
    with Rig(model, cache, record=True, fs=disk) as rig:
        rig.run(TOKENS[:400], 1)
        before, disk.seconds = disk.reads, 0.02
        tell(rig, 0.1, 0.05)
        output = rig.run(TOKENS, 8)
        is_right(rig, output, reference)
        assert output.hot == 384
        assert output.cold == (disk.reads - before) * BLOCK
        assert output.cold and output.sequence.stats.recomputed


def test_a_fast_disk_is_read_alone(cache: Path, model: Path, reference: Reference):
    with Rig(model, cache, record=True) as rig:
        tell(rig, 0.001, 0.05)
        output = rig.run(TOKENS, 8)
        is_right(rig, output, reference)
        assert (output.cold, output.sequence.stats.recomputed) == (CACHED, 0)


def test_nothing_is_split_where_the_hot_tier_has_no_room(cache: Path, model: Path, reference: Reference):
    with Rig(model, cache, record=True, hot=0, fs=SlowDisk(0.01)) as rig:
        tell(rig, 0.1, 0.05)
        output = rig.run(TOKENS, 8)
        is_right(rig, output, reference)
        assert (output.cold, output.sequence.stats.recomputed) == (CACHED, 0)


def test_a_long_restore_is_progress(cache: Path, model: Path):
    """Or the stall watch would end the engine over a slow disk."""
    with Rig(model, cache, fs=SlowDisk(0.05)) as rig:
        tell(rig, 0, 10.0)
        output = rig.start(TOKENS, 1)
        grown: set[int] = set()
        while not output.first.wait(0.01):
            if output.sequence.state is State.RESTORING:
                grown.add(rig.scheduler.progress)
        assert len(grown) > 3


@pytest.mark.usefixtures("either")
def test_a_restore_that_turns_out_to_be_slow_ends_early(cache: Path, model: Path, reference: Reference):
    disk = SlowDisk(0.06)
    with Rig(model, cache, record=True, fs=disk) as rig:
        tell(rig, 0, 0.05)
        output = rig.run(TOKENS, 8)
        is_right(rig, output, reference)
        assert output.cold == disk.reads * BLOCK
        assert output.cold and output.sequence.stats.recomputed
        assert rig.scheduler.bridge is not None
        assert (
            rig.scheduler.bridge.reads.rates.read < 1.1 * rig.scheduler.bridge.reads.rates.block_bytes / 0.06
        )


@pytest.mark.slow
@pytest.mark.parametrize("bad", [(19,), (10,), (0, 7, 8, 18), tuple(range(20))])
def test_computing_goes_through_damaged_blocks(
    bad: tuple[int, ...], cache: Path, model: Path, reference: Reference
):
    with Rig(model, cache, record=True, fs=SlowDisk(0.01)) as rig:
        tell(rig, 0.1, 0.05)
        assert rig.store.cold is not None
        hashes = hash_blocks(chain_root(rig.namespace, ""), TOKENS, BLOCK)
        for index in bad:
            path = cache / rig.store.cold.path_of(hashes[index])
            data = bytearray(path.read_bytes())
            data[-7] ^= 1
            path.write_bytes(data)
        output = rig.run(TOKENS, 8)
        is_right(rig, output, reference)
        assert output.sequence.stats.recomputed >= len(bad) * BLOCK
        found = rig.store.stats.corrupt
    with Rig(model, cache, record=True) as rig:
        rig.run(TOKENS, 1)
        assert rig.store.stats.corrupt == len(bad) - found, "those that were found were written anew"
    with Rig(model, cache, record=True) as rig:
        assert_same(rig, TOKENS, reference, hot=0, cold=CACHED)


def test_two_over_one_prefix_compute_it_once(cache: Path, model: Path, reference: Reference):
    disk = SlowDisk(0.02)
    with Rig(model, cache, fs=disk) as rig:
        tell(rig, 0.1, 0.05)
        one, two = rig.start(TOKENS, 8), rig.start(TOKENS, 8)
        want = reference.once(TOKENS, 8)[0]
        assert one.tokens() == two.tokens() == want
        rig.settle()
        assert one.sequence.stats.recomputed and not two.sequence.stats.recomputed
        assert (two.hot, two.cold) == (CACHED, 0)
        assert disk.reads * BLOCK == one.cold
        rig.on_engine(lambda: check_pool(rig.pool, {}))


@pytest.mark.parametrize("when", rest_slow([0.0, 0.05, 0.15, 0.3], 0.05, 0.3))
def test_a_cancelled_one_keeps_no_reference_and_wakes_who_waits(
    when: float, cache: Path, model: Path, reference: Reference
):
    with Rig(model, cache, fs=SlowDisk(0.03)) as rig:
        tell(rig, 0.1, 0.05)
        one, two = rig.start(TOKENS, 8), rig.start(TOKENS, 8)
        time.sleep(when)
        rig.scheduler.cancel(one.sequence)
        assert two.tokens() == reference.once(TOKENS, 8)[0]
        rig.settle()
        rig.on_engine(lambda: check_pool(rig.pool, {}))
        assert not rig.scheduler.bridge.reads._under_way  # type: ignore[union-attr]


def test_one_whose_read_can_not_begin_keeps_nobody_waiting(
    cache: Path, model: Path, reference: Reference, monkeypatch: pytest.MonkeyPatch
):
    with Rig(model, cache, hot=0, fs=SlowDisk(0.03)) as rig:
        reads = rig.scheduler.bridge.reads  # type: ignore[union-attr]
        begin, broken = reads.begin, list[str]()

        def begin_or_not(sequence: Any, plan: Any, ready: Any) -> bool:
            if sequence is started[1].sequence and sequence.state is State.RESTORING and not broken:
                broken.append(sequence.name)
                raise MemoryError
            return begin(sequence, plan, ready)

        monkeypatch.setattr(reads, "begin", begin_or_not)
        held = threading.Event()
        rig.scheduler.post(lambda: held.wait(60) and None)
        started = [rig.start(TOKENS, 8) for _ in range(3)]
        held.set()
        assert [output.tokens() for output in started] == [reference.once(TOKENS, 8)[0]] * 3
        rig.settle()
        rig.on_engine(lambda: check_pool(rig.pool, {}))
        assert broken and not reads._under_way


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gemma3_text", "qwen3_next"])
def test_a_model_with_checkpoints_is_computed_where_that_is_faster(family: str, tmp_path: Path):
    model, tokens = build_family(family, tmp_path / family), prompt(600)
    cache = tmp_path / "cache"
    with Rig(model, cache) as rig:
        rig.run(tokens, 1)
    with Reference(model) as reference:
        disk = SlowDisk()
        with Rig(model, cache, record=True, fs=disk) as rig:
            tell(rig, 0.5, 0.01)
            assert_same(rig, tokens, reference, hot=0, cold=0)
            assert disk.reads == 0
            assert rig.store.flusher is not None
            assert rig.store.flusher.writer.stats.written <= 2
            rig.on_engine(lambda: check_pool(rig.pool, {}))
        disk = SlowDisk(0.5)
        with Rig(model, cache, record=True, fs=disk) as rig:  # Not known before.
            tell(rig, 0, 0.01)
            output = rig.run(tokens, 8)
            assert (output.hot, output.cold) == (0, 0)
            assert output.sequence.stats.recomputed == 576
            assert output.got == reference(tokens, 8)[0]
            rig.on_engine(lambda: check_pool(rig.pool, {}))


@pytest.mark.parametrize("family", ["gemma3_text"])
def test_a_disk_that_stalled_once_is_read_again_some_requests_later(family: str, tmp_path: Path):
    model, tokens = build_family(family, tmp_path / family), prompt(600)
    with Rig(model, tmp_path / "cache") as rig:
        rig.run(tokens, 1)
    with Rig(model, tmp_path / "cache", hot=0, fs=SlowDisk()) as rig:
        tell(rig, 0.5, 0.01)  # Fifty times slower than computing: six requests double the rate to as fast.
        cold = [rig.run(tokens, 1).cold for _ in range(8)]
    assert cold[0] == cold[1] == 0
    assert cold[-1] == 576


@pytest.mark.slow
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_rates_any_damage_any_cancel(
    data: st.DataObject, model: Path, reference: Reference, tmp_path: Path
):
    cache = tmp_path / "cache"
    with Rig(model, cache) as rig:  # Writes anew what the example before it has damaged.
        rig.run(TOKENS, 1)
    number = data.draw(st.integers(0, 2**32))
    rng = random.Random(number)
    disk = SlowDisk(rng.choice([0.0, 0.002, 0.01, 0.03]))
    with Rig(model, cache, record=True, fs=disk, segment=rng.choice([0, 256, 2048])) as rig:
        if rng.random() < 0.5:
            rig.run(TOKENS[: rng.randrange(64, 1200)], 1)
        tell(rig, rng.choice([0, 0.01, 0.1, 1.0]), rng.choice([0.001, 0.02, 0.1]))
        for path in rng.sample(blocks_files(cache), rng.choice([0, 1, 3])):
            path.write_bytes(b"damaged") if rng.random() < 0.5 else path.unlink()
        others = [rig.start(TOKENS, 8) for _ in range(rng.choice([0, 1, 2]))]
        for other in others:
            time.sleep(rng.random() * 0.1)
            rig.scheduler.cancel(other.sequence)
        output = rig.start(TOKENS, 8)
        for _ in range(rng.choice([0, 3])):
            time.sleep(rng.random() * 0.05)
            rig.on_engine(lambda: rig.pool.evict(1 << 30))
            rng.choice(blocks_files(cache)).unlink(missing_ok=True)
        assert output.tokens() == reference.once(TOKENS, 8)[0], number
        rig.settle()
        rig.on_engine(lambda: check_pool(rig.pool, {}))
        assert not rig.scheduler.bridge.reads._under_way  # type: ignore[union-attr]
        assert not rig.scheduler.bridge.reads._tails  # type: ignore[union-attr]
