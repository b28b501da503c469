"""Eight long prompts at once where memory holds the KV of all, but not their blocks in RAM beside it.

A scaled model of a GPU with 78 GiB, an 8B model in 16 bits and eight prompts of 32,000 tokens: weights take
19 % of the memory, the KV of a prompt 6 %, and the disk takes nothing until the test lets it.
"""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from backends import let_rows_pay, use_backend
from daemon import family_model
from kv_fakes import check_pool
from rig import BLOCK, Rig

from omlxd.engine import mlx_adapter
from omlxd.engine.kvio import hot_budget
from omlxd.engine.kvio import transport as staging
from omlxd.engine.kvio.hot_budget import HotTiers
from omlxd.engine.kvio.open_store import WRITE_QUEUE_FRACTION
from omlxd.engine.kvio.transport import StagedTransport
from omlxd.engine.mlx_adapter.cache import batch as batch_kv
from omlxd.engine.mlx_adapter.cuda.backend import MEMORY_RESERVE
from omlxd.engine.schedule import memory_admission
from omlxd.engine.schedule.decode_batch import DecodeBatch, Draw
from omlxd.engine.schedule.memory_admission import MemoryAdmission
from omlxd.kv.files.fs import FileSystem

LENGTH, STREAMS, WEIGHTS, PROMPT_KV = 1500, 8, 0.193, 0.056
PROMPTS = [[(n * 7 + i * 13) % 1000 + 1 for n in range(LENGTH)] for i in range(STREAMS)]
BLOCKS = LENGTH // BLOCK


class HeldDisk(FileSystem):
    """Writes nothing until `go` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.go = threading.Event()

    def writev(self, fd: int, buffers: Any) -> int:
        assert self.go.wait(600)
        return super().writev(fd, buffers)


class Device:
    """Its memory holds weights, and MLX's arrays from now on."""

    def __init__(self, rig: Rig):
        assert rig.loaded.layout is not None
        self.total = int(rig.loaded.layout.nbytes(mlx_adapter.round_up(LENGTH)) / PROMPT_KV)
        gc.collect()  # What earlier tests left is not freed while this one measures.
        self._before = mx.get_active_memory()

    def __call__(self) -> tuple[int, int]:
        used = int(WEIGHTS * self.total) + mx.get_active_memory() - self._before
        return self.total, max(0, self.total - used)


@pytest.fixture(autouse=True)
def scaled(monkeypatch: pytest.MonkeyPatch) -> None:
    def slow_step(batch: DecodeBatch) -> list[Draw]:
        time.sleep(0.1)  # Rows hardly grow while others join, on a busy machine too.
        return step(batch)

    step = DecodeBatch.step
    monkeypatch.setattr(DecodeBatch, "step", slow_step)
    monkeypatch.setattr(staging, "_chosen", StagedTransport())
    monkeypatch.setattr(hot_budget, "RESERVE_BYTES", 0)
    monkeypatch.setattr(hot_budget, "REFRESH_S", 0.0)
    monkeypatch.setattr(batch_kv, "MOST_ROOM", 64)
    let_rows_pay(monkeypatch, False)  # Rows of a batch are one array, as on CUDA.
    monkeypatch.setattr(memory_admission, "RESERVE_FRACTION", MEMORY_RESERVE)
    use_backend(monkeypatch, "mlx", memory_reserve=MEMORY_RESERVE)


@pytest.fixture(params=["disk", "no disk"])
def disk(request: pytest.FixtureRequest) -> HeldDisk | None:
    return HeldDisk() if request.param == "disk" else None


@pytest.fixture
def rig(disk: HeldDisk | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    with Rig(family_model("qwen3"), tmp_path if disk else None, fs=disk, slots=STREAMS) as made:
        device = Device(made)
        monkeypatch.setattr(hot_budget, "memory", device)
        tiers = HotTiers(None)
        admission = MemoryAdmission(made.loaded, 0, lambda wants: None, measure=device)
        admission.store, admission.end_chunk = made.store, lambda start, stop: None
        made.store.hot_budget = tiers.part_of(made.pool)
        tiers.budget.promised = lambda: admission.promised(made.scheduler.running)
        if made.store.flusher is not None:
            made.store.flusher.writer._max_queue_bytes = int(device.total * WRITE_QUEUE_FRACTION)
        made.on_engine(lambda: setattr(made.scheduler, "memory", admission))
        try:
            yield made
        finally:
            if disk is not None:
                disk.go.set()


def wait_for(what: Any, seconds: float = 300) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def are_on_disk(rig: Rig, names: list[bytes]) -> bool:
    """What is in RAM alone is written."""
    assert rig.store.flusher is not None and rig.store.cold is not None
    rig.store.flusher.tick()
    return all(map(rig.store.cold.has, names))


@pytest.mark.slow
def test_none_waits_for_the_disk_nor_is_computed_anew(
    rig: Rig, disk: HeldDisk | None, caplog: pytest.LogCaptureFixture
):
    caplog.set_level("INFO")
    first = [rig.start(prompt, 1).tokens() for prompt in PROMPTS]
    outputs = rig.on_engine(lambda: [rig.start(prompt, 10_000) for prompt in PROMPTS])
    wait_for(lambda: all(output.got for output in outputs))
    assert not any(output.reason for output in outputs), "all run at once"
    assert [output.got[:1] for output in outputs] == first
    # Rows that run grow while others wait, on a busy machine by more, and may take the room of a last block.
    assert all((BLOCKS - 1) * BLOCK <= output.hot <= BLOCKS * BLOCK for output in outputs)
    assert "(prompt=1500) waits for memory: it needs" in caplog.text and "got memory, queue=" in caplog.text
    sequences = [output.sequence for output in outputs]
    assert rig.on_engine(lambda: sum(len(sequence.kv.blocks_to_retry) for sequence in sequences)), (
        "blocks made room"
    )
    if disk is not None:  # They are written from the rows' own KV, while these decode.
        names = [name for sequence in sequences for name in sequence.kv.hashes[:BLOCKS]]
        disk.go.set()
        wait_for(lambda: rig.on_engine(lambda: are_on_disk(rig, names)))
    for sequence in sequences:
        rig.scheduler.cancel(sequence)
    rig.settle()
    rig.on_engine(lambda: check_pool(rig.pool, {}))
    if disk is not None:
        again = rig.run(PROMPTS[2], 1)
        assert again.known == BLOCKS * BLOCK and again.got == first[2]
