"""Blocks that were used last are in RAM again after a load: hits of the same bits, and nothing else goes."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from cold_run import Reference, assert_same, prompt
from families import build_family
from fast_or_slow import SOME_FAMILIES, rest_slow
from kv_fakes import check_pool
from rig import BLOCK, Rig

from omlxd.engine.kvio import newest
from omlxd.engine.kvio.newest import Newest
from omlxd.kv.files.paths import block_path

FAMILIES = ("qwen3", "gemma3_text", "qwen3_next", "mamba2")


def read_newest(rig: Rig) -> Newest:
    """All of it: returned when it is over."""
    reading = Newest(rig.scheduler.bridge, rig.scheduler.post, idle_s=0)
    reading.start()
    reading._thread.join(120)
    rig.settle()
    return reading


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_family("qwen3", tmp_path_factory.mktemp("model") / "qwen3")


@pytest.mark.parametrize("family", rest_slow(FAMILIES, *SOME_FAMILIES))
def test_the_first_request_after_a_restart_is_a_hot_hit_with_a_cold_runs_logits(family: str, tmp_path: Path):
    model, root = build_family(family, tmp_path / family), tmp_path / "kv"
    with Rig(model, root) as rig:
        rig.run(prompt(260), 1)
    turn = prompt(260) + prompt(20, seed=1)
    with Rig(model, root, record=True) as rig:
        assert read_newest(rig).nbytes == rig.pool.hot_bytes > 0
        with Reference(model) as uncached:
            assert_same(rig, turn, uncached, hot=256, cold=0)
        check_pool(rig.pool)


def test_a_share_of_the_room_is_filled_with_what_was_used_last_and_is_older_than_what_is_used_now(
    qwen3: Path, tmp_path: Path
):
    with Rig(qwen3, tmp_path) as rig:
        each = rig.loaded.layout.nbytes(BLOCK)
        old, new = (rig.run(prompt(4 * BLOCK + 1, seed=seed), 1).sequence.kv.hashes for seed in (1, 2))
    with Rig(qwen3, tmp_path, hot=6 * each) as rig:
        assert read_newest(rig).nbytes == 3 * each
        assert [rig.store.where(name) for name in new] == ["hot", "hot", "hot", "cold"]
        assert {rig.store.where(name) for name in old} == {"cold"}
        used = rig.run(prompt(5 * BLOCK + 1, seed=3), 1).sequence.kv.hashes
        # Leaves go first, and what the request used stays.
        assert {rig.store.where(name) for name in used} == {"hot"}
        assert [rig.store.where(name) for name in new] == ["hot", "cold", "cold", "cold"]
        check_pool(rig.pool)


def test_a_request_ends_it(qwen3: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with Rig(qwen3, tmp_path) as rig:
        rig.run(prompt(6 * BLOCK + 1), 1)
    with Rig(qwen3, tmp_path) as rig:
        at_second, go_on, looked = threading.Event(), threading.Event(), []
        read_claims = newest.read_claims

        def read(path: str):
            looked.append(path)
            if len(looked) == 2:
                at_second.set()
                assert go_on.wait(120)
            return read_claims(path)

        monkeypatch.setattr(newest, "read_claims", read)
        reading = Newest(rig.scheduler.bridge, rig.scheduler.post, idle_s=0)
        reading.start()
        assert at_second.wait(120)
        rig.run(prompt(BLOCK + 1, seed=2), 1)
        go_on.set()
        reading._thread.join(120)
        rig.settle()
        assert len(looked) == 2
        assert not any(block.ref_cnt for block in rig.pool._blocks)
        check_pool(rig.pool)


def test_a_load_that_a_request_waits_for_reads_nothing(qwen3: Path, tmp_path: Path):
    with Rig(qwen3, tmp_path) as rig:
        rig.run(prompt(2 * BLOCK + 1), 1)
    with Rig(qwen3, tmp_path) as rig:
        reading = Newest(rig.scheduler.bridge, rig.scheduler.post, idle_s=3600)
        reading.start()
        assert rig.run(prompt(2 * BLOCK + 1), 1).cold == 2 * BLOCK
        reading._thread.join(120)
        assert not reading._thread.is_alive() and reading.nbytes == 0


def test_a_file_under_another_blocks_name_is_not_taken_and_a_damaged_one_is_removed(
    qwen3: Path, tmp_path: Path
):
    with Rig(qwen3, tmp_path) as rig:
        names = rig.run(prompt(4 * BLOCK + 1), 1).sequence.kv.hashes
        files = [tmp_path / block_path(rig.namespace, name) for name in names]
    stranger = tmp_path / block_path(bytes.fromhex(files[0].parts[-3]) + bytes(16), bytes(32))
    stranger.parent.mkdir(exist_ok=True)
    stranger.write_bytes(files[0].read_bytes())
    data = bytearray(files[1].read_bytes())
    data[-1] ^= 1
    files[1].write_bytes(data)
    files[2].write_bytes(b"no header")
    with Rig(qwen3, tmp_path) as rig:
        read_newest(rig)
        assert [rig.store.where(name) for name in names] == ["hot", "", "cold", "hot"]
        assert rig.store.stats.corrupt == 1 and rig.store.where(bytes(32)) == "cold"
        assert rig.run(prompt(4 * BLOCK + 1), 1).hot >= BLOCK
