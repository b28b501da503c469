"""Payloads that pass through a staging buffer, as on CUDA: forced on the CPU, where nothing can be placed.

Every bit comes back, whatever the layout; and prefixes restored through it give what a run without
reuse gives, from either tier, checkpoints too.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from backends import use_backend
from cache_folder import flip
from cold_run import Reference, assert_same, prompt
from families import build_family
from fast_or_slow import SOME_FAMILIES, rest_slow
from kv_fakes import check_pool
from rig import Rig

from omlxd.engine.kvio import transport as staging
from omlxd.engine.kvio.payload import MLXPayload, read_payload
from omlxd.engine.kvio.reads import arrival, cold_reads
from omlxd.engine.kvio.reads.arrival import StagedArrival
from omlxd.engine.kvio.reads.restore import Restore
from omlxd.engine.kvio.transport import Load, StagedTransport
from omlxd.engine.mlx_adapter import Cache, storage_dtype
from omlxd.engine.sequence.sequence import Sequence
from omlxd.kv.layout import Group, KVLayout

FAMILIES = ("qwen3", "deepseek_v3", "gemma3_text", "qwen3_next", "mamba2")


@pytest.fixture(autouse=True)
def staged(monkeypatch: pytest.MonkeyPatch) -> StagedTransport:
    use_backend(monkeypatch, "mlx", keep_on_host=lambda view: "no GPU here")  # Staging does without.
    transport = StagedTransport()
    monkeypatch.setattr(staging, "_chosen", transport)
    return transport


LAYOUTS = {
    "one group": KVLayout((Group(("a", "b"), 2, 8, "BF16"),)),
    "two widths": KVLayout((Group(("a",), 1, 12, "F16"), Group(("b",), 3, 20, "F32"))),
    "bytes": KVLayout((Group(("a",), 1, 3, "U8"), Group(("b",), 1, 5, "F16"))),
    "nothing": KVLayout(()),
}


def made(layout: KVLayout, block: int, seed: int) -> MLXPayload:
    """Any bits, NaNs among them."""
    rng = np.random.default_rng(seed)
    arrays = []
    for group in layout.groups:
        data = mx.array(rng.integers(0, 256, group.nbytes(block), dtype=np.uint8))
        arrays.append(data.view(storage_dtype(group.dtype)).reshape(group.shape(block)))
    mx.eval(arrays)
    return MLXPayload(tuple(arrays))


def raw(payload: MLXPayload) -> bytes:
    return b"".join(bytes(memoryview(array).cast("B")) for array in payload.arrays)  # type: ignore[arg-type]


def again(layout: KVLayout, block: int, data: bytes) -> MLXPayload | None:
    def load(views: list[memoryview]) -> bool:
        at = 0
        for view in views:
            view[:] = data[at : at + view.nbytes]
            at += view.nbytes
        return at == len(data)

    return read_payload(layout, block, load)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=list(LAYOUTS))
def test_every_bit_comes_back_whatever_was_staged_before(layout: KVLayout):
    for seed, block in enumerate((16, 4, 64, 5)):
        payload = made(layout, block, seed)
        stored = b"".join(payload.buffers())
        assert stored == raw(payload)
        twin = again(layout, block, stored)
        assert twin is not None and raw(twin) == stored and twin.nbytes == payload.nbytes
        # Neither shares the buffer, which others use by now.
        b"".join(made(layout, block, seed + 9).buffers())
        assert raw(twin) == raw(payload) == stored
        for array, group in zip(twin.arrays, layout.groups, strict=True):
            assert array.shape == group.shape(block) and array.dtype == storage_dtype(group.dtype)


def test_what_could_not_be_read_is_no_payload():
    assert read_payload(LAYOUTS["one group"], 16, lambda views: False) is None


def test_the_buffer_is_filled_in_place_and_is_the_threads_own():
    layout = LAYOUTS["one group"]

    def address(seed: int) -> int:
        return np.frombuffer(made(layout, 16, seed).buffers()[0], np.uint8).ctypes.data

    assert len({address(seed) for seed in range(5)}) == 1
    views = made(layout, 16, 7).buffers()
    before = b"".join(views)
    thread = threading.Thread(target=lambda: made(layout, 16, 8).buffers())
    thread.start()
    thread.join()
    assert b"".join(views) == before


@pytest.mark.slow
@pytest.mark.parametrize("family", rest_slow(FAMILIES, *SOME_FAMILIES))
def test_restored_prefixes_are_bit_identical(family: str, tmp_path: Path):
    model = build_family(family, tmp_path / family)
    reference, tokens = Reference(model), prompt(300)
    cache = tmp_path / "cache"
    with Rig(model, cache, record=True) as rig:
        assert_same(rig, tokens, reference, hot=0, cold=0)
        assert_same(rig, tokens, reference, hot=256, cold=0)
    with Rig(model, cache, record=True) as rig:
        assert_same(rig, tokens, reference, hot=0, cold=256)
        assert_same(rig, tokens, reference, hot=256, cold=0)  # the very payloads that were read
        rig.on_engine(lambda: check_pool(rig.pool, {}))
    with Rig(model, cache, hot=0, record=True) as rig:
        assert_same(rig, tokens, reference, hot=0, cold=256)
        assert_same(rig, tokens, reference, hot=0, cold=256)
        assert rig.pool.hot_bytes == 0
        rig.on_engine(lambda: check_pool(rig.pool, {}))
    reference.close()


def test_a_cache_that_can_not_be_filled_is_computed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    model = build_family("qwen3", tmp_path / "qwen3")
    reference, tokens = Reference(model), prompt(300)
    cache = tmp_path / "cache"
    with Rig(model, cache) as rig:
        rig.run(tokens, 4)

    def fail(*_: object) -> None:
        raise MemoryError

    with Rig(model, cache, hot=0, record=True) as rig:
        monkeypatch.setattr("omlxd.engine.kvio.reads.arrival.append_blocks", fail)
        assert_same(rig, tokens, reference, hot=0, cold=0)
        rig.on_engine(lambda: check_pool(rig.pool, {}))
    reference.close()


@pytest.fixture
def joined(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Blocks that were joined each time. The last one is not read before some are."""
    ends: list[int] = []
    load, join, any_joined = StagedArrival.load_block, StagedArrival._join, threading.Event()

    def wait_and_load(arrival: StagedArrival, index: int, read: Load) -> bool:
        if index == len(arrival._payloads) - 1:
            assert any_joined.wait(60)
        return load(arrival, index, read)

    def note(arrival: StagedArrival, cache: Cache, live: Any, sequence: Sequence, end: int) -> None:
        join(arrival, cache, live, sequence, end)
        ends.append(end)
        any_joined.set()

    monkeypatch.setattr(StagedArrival, "load_block", wait_and_load)
    monkeypatch.setattr(StagedArrival, "_join", note)
    monkeypatch.setattr(arrival, "JOINED_TOKENS", 128)
    return ends


@pytest.mark.parametrize("segment", [0, 128])
def test_what_came_is_joined_while_the_rest_is_read(tmp_path: Path, joined: list[int], segment: int):
    model = build_family("qwen3", tmp_path / "qwen3")
    reference, tokens = Reference(model), prompt(400)
    cache = tmp_path / "cache"
    with Rig(model, cache) as rig:
        rig.run(tokens, 4)
    with Rig(model, cache, record=True, segment=segment) as rig:
        assert_same(rig, tokens, reference, hot=0, cold=384)
        assert joined == [2, 4, 6]
        assert_same(rig, tokens, reference, hot=384, cold=0)
        rig.on_engine(lambda: check_pool(rig.pool, {}))
    reference.close()


@pytest.mark.usefixtures("joined")
@pytest.mark.parametrize("bad", range(2, 6))
def test_a_damaged_file_ends_what_is_joined(tmp_path: Path, bad: int):
    model = build_family("qwen3", tmp_path / "qwen3")
    reference, tokens = Reference(model), prompt(400)
    cache = tmp_path / "cache"
    with Rig(model, cache) as rig:
        name = rig.run(tokens, 4).sequence.kv.hashes[bad]
        rig.settle()
        assert rig.store.cold is not None
        path = cache / rig.store.cold.path_of(name)
    flip(path, -3, 0x10)
    with Rig(model, cache, record=True) as rig:
        assert_same(rig, tokens, reference, hot=(5 - bad) * 64, cold=bad * 64)
        assert rig.store.stats.corrupt == 1
        rig.on_engine(lambda: check_pool(rig.pool, {}))
    reference.close()


def test_without_memory_to_join_all_is_computed(
    tmp_path: Path, joined: list[int], monkeypatch: pytest.MonkeyPatch
):
    model = build_family("qwen3", tmp_path / "qwen3")
    reference, tokens = Reference(model), prompt(400)
    cache = tmp_path / "cache"
    with Rig(model, cache) as rig:
        rig.run(tokens, 4)
    real = arrival.append_blocks

    def fail_once(layout: Any, cache: Cache, payloads: Any, at: int, *sizes: int) -> None:
        real(layout, cache, payloads, at, *sizes)
        if at:
            raise MemoryError

    with Rig(model, cache, hot=0, record=True) as rig:
        monkeypatch.setattr(arrival, "append_blocks", fail_once)
        assert_same(rig, tokens, reference, hot=0, cold=0)
        assert set(joined) == {2}
        rig.on_engine(lambda: check_pool(rig.pool, {}))
    reference.close()


def test_a_damaged_file_ends_the_prefix(tmp_path: Path):
    model = build_family("qwen3", tmp_path / "qwen3")
    reference, tokens = Reference(model), prompt(300)
    cache = tmp_path / "cache"
    with Rig(model, cache) as rig:
        rig.run(tokens, 4)
        third = rig.start(tokens, 1).sequence.kv.hashes[2]
        rig.settle()
        assert rig.store.cold is not None
        path = cache / rig.store.cold.path_of(third)
    flip(path, -3, 0x10)
    with Rig(model, cache, record=True) as rig:
        assert_same(rig, tokens, reference, hot=64, cold=128)  # The fourth is good, and in RAM by then.
        assert rig.store.stats.corrupt == 1
        assert_same(rig, tokens, reference, hot=256, cold=0)
    reference.close()


def test_restores_whose_payloads_are_many_take_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Payloads of eight long prompts, read before any of them was joined, filled a GPU's memory."""
    model = build_family("qwen3", tmp_path / "qwen3")
    prompts = [prompt(300, seed) for seed in range(4)]
    cache = tmp_path / "cache"
    with Rig(model, cache) as rig:
        want = [rig.run(tokens, 4).tokens() for tokens in prompts]
    begun: list[int] = []
    start = Restore.start
    with Rig(model, cache, hot=0) as rig:

        def count(restore: Restore) -> None:
            begun.append(len(rig.scheduler.bridge.reads._under_way))
            start(restore)

        monkeypatch.setattr(Restore, "start", count)
        outputs = [rig.start(tokens, 4) for tokens in prompts]
        assert [output.tokens() for output in outputs] == want
        together, begun = max(begun), []
        monkeypatch.setattr(cold_reads, "STAGED_BYTES", 0)
        outputs = [rig.start(tokens, 4) for tokens in prompts]
        assert [output.tokens() for output in outputs] == want
        assert [output.cold for output in outputs] == [256] * len(prompts)
    assert (together, begun) == (3, [0] * len(prompts))
