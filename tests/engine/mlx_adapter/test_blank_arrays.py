"""Unwritten arrays: what MLX makes of a file that fills in nothing; that nobody reads what was in them."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from daemon import REPO
from families import VOCAB, build_family
from rig import Rig

from omlxd.engine.kvio import payload, transport
from omlxd.engine.kvio.transport import byte_view
from omlxd.engine.mlx_adapter import blank_arrays, storage_dtype


def test_they_have_shape_and_storage_type_and_take_what_is_written_in_place():
    wanted = [((1, 2, 64, 8), "BF16"), ((3, 5), "F32"), ((2, 4), "U32"), ((7,), "F16"), ((9,), "U8")]
    arrays = blank_arrays(wanted)
    assert [(a.shape, a.dtype) for a in arrays] == [(shape, storage_dtype(d)) for shape, d in wanted]
    for index, array in enumerate(arrays):
        byte_view(array)[:] = bytes([index + 1]) * array.nbytes
    for index, array in enumerate(arrays):
        assert bytes(byte_view(mx.contiguous(array + 0))) == bytes([index + 1]) * array.nbytes
    assert blank_arrays([]) == []


def test_an_append_to_one_is_in_place():
    (array,) = blank_arrays([((1, 2, 64, 8), "F32")])
    byte_view(array)[:] = bytes(array.nbytes)
    where = np.array(array, copy=False).ctypes.data
    array[:, :, 3:4] = mx.ones((1, 2, 1, 8))
    mx.eval(array)
    assert np.array(array, copy=False).ctypes.data == where
    assert array.sum().item() == 16


@pytest.mark.slow
def test_memory_is_given_back_while_one_is_made():
    """In a process of its own: where it goes wrong, nothing of Python ever runs again."""
    told = """
import threading, time
import mlx.core as mx
from omlxd.engine.mlx_adapter import give_memory_back, limits, set_limits
from omlxd.engine.mlx_adapter.runtime import arrays as blank
from omlxd.wire import Budget
inside, readinto = threading.Event(), blank._Unwritten.readinto
def slow(self, buffer):
    if self._at >= len(self._head):
        inside.set()
        time.sleep(1.0)
    return readinto(self, buffer)
blank._Unwritten.readinto = slow
freed = mx.zeros(1 << 22)
mx.eval(freed)
del freed
making = threading.Thread(target=blank.blank_arrays, args=([((64, 64), "F32")],))
making.start()
inside.wait()
assert mx.get_cache_memory() > 1 << 20
set_limits(0, Budget(freed=1 << 25))  # As the front divides the memory of several engines.
give_memory_back()
print(mx.get_cache_memory() < 1 << 20, flush=True)
making.join()
print(mx.set_cache_limit(0) == limits["mlx_cache_limit_bytes"] == 1 << 25, flush=True)
"""
    done = subprocess.run([sys.executable, "-c", told], cwd=REPO, capture_output=True, text=True, timeout=120)
    assert done.stdout == "True\nTrue\n", done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3", "gemma3_text", "deepseek_v3"])
def test_what_was_in_their_memory_is_never_read(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Memory full of NaNs: a single one that is read would reach the logits."""

    def poisoned(shapes):
        arrays = blank_arrays(shapes)
        for array in arrays:
            byte_view(array)[:] = b"\xff" * array.nbytes
        return arrays

    monkeypatch.setattr(payload, "blank_arrays", poisoned)
    monkeypatch.setattr(transport, "blank_arrays", poisoned)
    model = build_family(family, tmp_path / family)
    rng = random.Random(1)
    prompt = [rng.randrange(300, VOCAB) for _ in range(300)]
    shorter = prompt[:130] + prompt[:90]
    with Rig(model, reuse=False, record=True) as cold:
        beside = cold.run(shorter, 40).got
        cold.recorder.logits.clear()
        expected = cold.run(prompt, 40).got
        rows = [row for _, row in cold.recorder.logits]
    with Rig(model, tmp_path / "cache") as rig:
        rig.run(prompt, 1)
        rig.run(shorter, 1)
    with Rig(model, tmp_path / "cache", record=True) as rig:
        for hit in ("cold", "hot"):
            rig.recorder.logits.clear()
            run = rig.run(prompt, 40)
            assert getattr(run, hit) == 256
            assert run.got == expected
            got = [row for _, row in rig.recorder.logits]
            assert all(np.isfinite(row).all() for row in got)
            assert np.array_equal(got[-40], rows[-40])
    with Rig(model, tmp_path / "cache") as rig:  # two of different length, joined into one batch
        runs = rig.start(prompt, 40), rig.start(shorter, 40)
        assert [run.tokens() for run in runs] == [expected, beside]
