"""What fails beside the model: copying KV out, starting a restore, numbers that are none."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from backends import let_rows_pay
from cold_run import prompt
from daemon import wait_until
from families import build_family
from kv_fakes import check_pool, retry_now
from rig import BLOCK, Rig

from omlxd.chat import Sampling
from omlxd.engine.kvio import checkpointer, copier
from omlxd.engine.kvio.reads.restore import Restore
from omlxd.engine.mlx_adapter.cache.batch import EvenBatchKVCache
from omlxd.errors import OmlxdError
from omlxd.kv.files.fs import FileSystem
from omlxd.kv.store import KVStore


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_family("qwen3", tmp_path_factory.mktemp("model") / "qwen3")


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_family("qwen3_next", tmp_path_factory.mktemp("model") / "qwen3_next")


def no_memory(*_: Any, **__: Any) -> Any:
    raise RuntimeError("[malloc] Unable to allocate")


def nothing_is_held(rig: Rig) -> None:
    """Every slot and reference is given back."""
    rig.settle()
    assert not rig.scheduler.running and not rig.scheduler._batches
    rig.on_engine(lambda: check_pool(rig.pool, {}))


@pytest.mark.parametrize("family", ["model", "hybrid"])
def test_a_copy_that_fails_costs_nobody_an_answer(family: str, request, monkeypatch):
    folder = request.getfixturevalue(family)
    prompts = [prompt(150, seed=1), prompt(70, seed=2)]
    with Rig(folder, reuse=False) as rig:
        alone = [rig.run(p, 20).got for p in prompts]
    with Rig(folder) as rig:
        monkeypatch.setattr(copier, "copy_blocks", no_memory)
        monkeypatch.setattr(checkpointer, "copy_state", no_memory)
        running = [rig.start(p, 20) for p in prompts]
        assert [output.tokens() for output in running] == alone
        nothing_is_held(rig)
        monkeypatch.undo()
        assert rig.run(prompts[0], 20).got == alone[0]
        assert rig.run(prompts[0], 20).hot == 2 * BLOCK


def test_a_copy_that_fails_at_a_cancel_gives_the_slot_back(model: Path, monkeypatch):
    with Rig(model, slots=2) as rig:
        stays = rig.start(prompt(30), 6000)
        leaves = rig.start(prompt(100, seed=1), 6000)
        assert stays.first.wait(60) and leaves.first.wait(60)
        monkeypatch.setattr(copier, "copy_blocks", no_memory)
        rig.scheduler.cancel(leaves.sequence)
        wait_until(lambda: leaves.sequence not in rig.scheduler.running, 30)
        so_far = len(stays.got)
        wait_until(lambda: len(stays.got) > so_far, 30)
        rig.scheduler.cancel(stays.sequence)
        nothing_is_held(rig)
        assert stays.error is None


def test_a_restore_that_can_not_start_fails_its_request_alone(model: Path, tmp_path: Path, monkeypatch):
    with Rig(model, tmp_path) as rig:
        rig.run(prompt(200))
    with Rig(model, tmp_path) as rig:
        with monkeypatch.context() as patched:
            patched.setattr(Restore, "start", no_memory)
            with pytest.raises(OmlxdError, match="Unable to allocate"):
                rig.start(prompt(200)).tokens()
        nothing_is_held(rig)
        assert rig.run(prompt(200)).cold == 3 * BLOCK


def test_a_restore_that_can_not_be_settled_is_computed_instead(model: Path, tmp_path: Path, monkeypatch):
    with Rig(model, tmp_path) as rig:
        want = rig.run(prompt(200)).got
    with Rig(model, tmp_path) as rig:
        with monkeypatch.context() as patched:
            patched.setattr(Restore, "_keep_or_lose", no_memory)
            assert rig.run(prompt(200)).got == want
        nothing_is_held(rig)


def test_a_row_that_can_not_be_released_does_not_stop_the_engine(model: Path, monkeypatch):
    with Rig(model) as rig:
        with monkeypatch.context() as patched:
            patched.setattr(KVStore, "record_use", no_memory)
            rig.start(prompt(100), 5).tokens()
            wait_until(lambda: not rig.scheduler.running, 30)
        nothing_is_held(rig)
        assert len(rig.run(prompt(100), 5).got) == 5


@pytest.mark.parametrize("out_of_time", [False, True], ids=["cancelled", "out of time"])
def test_a_row_that_can_not_leave_its_batch_gives_its_slot_back(
    out_of_time: bool, model: Path, monkeypatch: pytest.MonkeyPatch
):
    let_rows_pay(monkeypatch, False)
    with Rig(model, slots=2) as rig:
        stays, leaves = (rig.start(prompt(100, seed=seed), 6000) for seed in (1, 2))
        wait_until(lambda: any(len(batch.rows) == 2 for batch in rig.scheduler._batches), 60)
        with monkeypatch.context() as patched:
            patched.setattr(EvenBatchKVCache, "filter", no_memory)
            if out_of_time:
                leaves.sequence.deadline = 0.0
            else:
                rig.scheduler.post(lambda: rig.scheduler.cancel(leaves.sequence))  # Between two steps.
            with pytest.raises(OmlxdError, match="Unable to allocate"):
                stays.tokens(30)
            wait_until(lambda: not rig.scheduler.running, 30)
        nothing_is_held(rig)
        assert leaves.error is None
        assert len(rig.run(prompt(100), 5).got) == 5


class NaNAfter:
    """A model whose logits are no numbers from its `passes`-th pass on, for prompts with token `mark`."""

    def __init__(self, model: Any, passes: int):
        self._model, self._left = model, passes

    def __call__(self, tokens: mx.array, cache: Any) -> mx.array:
        self._left -= 1
        logits = self._model(tokens, cache=cache)
        return logits if self._left > 0 else logits * float("nan")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


@pytest.mark.parametrize(
    "sampling", [Sampling(temperature=0.0), Sampling(temperature=0.7, top_p=0.9, top_k=9)]
)
@pytest.mark.parametrize("passes", [1, 9])
def test_logits_that_are_no_numbers_are_an_error_and_no_answer(model: Path, sampling: Sampling, passes: int):
    with Rig(model) as rig:
        whole = rig.loaded.model
        rig.loaded.model = NaNAfter(whole, passes)
        output = rig.start(prompt(60), 40, sampling=sampling)
        with pytest.raises(OmlxdError, match="not numbers"):
            output.tokens()
        assert len(output.got) < 9
        nothing_is_held(rig)
        assert rig.pool.num_cached == 0, "what no number comes of is not kept"
        rig.loaded.model = whole
        assert len(rig.run(prompt(60), 5).got) == 5


@pytest.fixture(scope="module")
def recurrent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a family without per-token KV: its prefixes are checkpoints alone."""
    return build_family("mamba2", tmp_path_factory.mktemp("model") / "mamba2")


def test_a_disk_that_fails_is_left_alone_by_checkpoints_too(recurrent: Path, tmp_path: Path):
    with Rig(recurrent, tmp_path) as rig:
        rig.run(prompt(200), 5)
    with Rig(recurrent, tmp_path) as rig:
        assert rig.store.flusher is not None
        rig.store.flusher.health._clock = lambda: 0.0  # The pause is not over, however long this takes.
        rig.store.flusher.health.read_failed(OSError(errno.EIO, "Input/output error"))
        output = rig.run(prompt(200), 5)
        assert output.cold == 0 and output.sequence.kv.restores == 0
        retry_now(rig.store.flusher.health)
        assert rig.run(prompt(200, seed=1)[:100] + prompt(90), 5).cold == 0


def test_a_damaged_checkpoint_that_can_not_be_removed_is_written_anew(
    recurrent: Path, tmp_path: Path, monkeypatch
):
    with Rig(recurrent, tmp_path) as rig:
        rig.run(prompt(200), 5)
    for file in tmp_path.rglob("*.safetensors"):
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(data)
    with Rig(recurrent, tmp_path) as rig:

        def denied(self: Any, path: str) -> None:
            raise PermissionError(errno.EACCES, "Permission denied", path)

        with monkeypatch.context() as patched:
            patched.setattr(FileSystem, "unlink", denied)
            assert rig.run(prompt(200), 5).cold == 0
    with Rig(recurrent, tmp_path) as rig:
        assert rig.run(prompt(200), 5).cold == 3 * BLOCK
