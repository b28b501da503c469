"""The scheduler: fairness, cancellation, faults, what is kept of work cut short."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
from cold_run import prompt
from daemon import family_model, wait_until
from families import VOCAB, build_family
from host import Host
from kv_fakes import check_pool
from msgspec.structs import replace
from rig import BLOCK, Output, Rig

from omlxd.chat import Finished, GenerateRequest, RawPrompt, Sampling
from omlxd.engine.mlx_adapter.cache import batch as batch_kv
from omlxd.engine.mlx_adapter.cache import rows as own_rows
from omlxd.engine.mlx_adapter.cache import tails
from omlxd.engine.schedule import decode_batch
from omlxd.engine.schedule import scheduler as scheduler_module
from omlxd.engine.schedule.decode_batch import DecodeBatch
from omlxd.engine.sequence.sequence import Sequence
from omlxd.errors import OmlxdError


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_family("qwen3", tmp_path_factory.mktemp("model") / "qwen3")


def slow_down(rig: Rig, seconds: float) -> None:
    """Make every forward pass take at least `seconds`."""
    whole = rig.loaded.model

    class Slow:
        def __call__(self, tokens, cache):
            time.sleep(seconds)
            return whole(tokens, cache=cache)

        def __getattr__(self, name):
            return getattr(whole, name)

    rig.loaded.model = Slow()


def test_rows_that_join_and_leave_at_any_time_get_the_tokens_they_get_alone(model: Path):
    prompts = [prompt(20 + 37 * i, seed=i) for i in range(8)]
    lengths = [3, 40, 11, 25, 1, 33, 7, 18]
    with Rig(model, reuse=False) as rig:
        alone = [rig.run(p, n).got for p, n in zip(prompts, lengths, strict=True)]
    with Rig(model, slots=5) as rig:
        running = []
        for p, n in zip(prompts, lengths, strict=True):
            running.append(rig.start(p, n))
            time.sleep(0.01)
        assert [output.tokens() for output in running] == alone
        rig.settle()
        assert not rig.scheduler._batches and not rig.scheduler.active_sequences


@pytest.mark.slow
def test_each_that_waits_for_a_slot_has_a_line_with_its_id(caplog: pytest.LogCaptureFixture):
    caplog.set_level("INFO", "omlxd.engine.schedule.scheduler")
    host = Host(family_model("qwen3"), slots=1)
    asked = GenerateRequest(RawPrompt(tokens=prompt(20)), Sampling(max_tokens=300, temperature=0.0))
    ids = [host.send(replace(asked, name=f"req_{number}")) for number in range(3)]
    ids.append(host.send(replace(asked, name="req_2", again=True)))
    assert all(isinstance(host.events(id)[-1], Finished) for id in ids)
    host.close()
    assert [record.getMessage() for record in caplog.records] == [
        f"req_{number} (prompt=20) waits for a slot: 1 run, {number - 1} came before it" for number in (1, 2)
    ]


def test_a_short_prompt_overtakes_a_long_one(model: Path):
    with Rig(model) as rig:
        done: list[str] = []

        class Named(Output):
            def __init__(self, name: str):
                super().__init__()
                self.name = name

            def finished(self, sequence: Sequence, reason: str) -> None:
                done.append(self.name)
                super().finished(sequence, reason)

        both_are_there = threading.Event()
        rig.scheduler.post(both_are_there.wait)
        long = rig.start(prompt(1500), 1, output=Named("long"))
        short = rig.start(prompt(40, seed=1), 1, output=Named("short"))
        both_are_there.set()
        long.tokens()
        short.tokens()
        assert done == ["short", "long"]


def test_more_requests_than_slots_wait_their_turn(model: Path):
    with Rig(model, slots=2) as rig:
        running = [rig.start(prompt(50, seed=i), 10) for i in range(9)]
        most = 0
        while not all(o._done.is_set() for o in running):
            most = max(most, len(rig.scheduler.running))
            time.sleep(0.001)
        assert most <= 2
        assert all(len(o.got) == 10 for o in running)


@pytest.mark.parametrize("after", ["waiting", "prefill", "decode"])
def test_a_cancelled_request_frees_its_slot_and_keeps_what_it_computed(model: Path, after: str):
    tokens = prompt(1000)
    with Rig(model, slots=1) as rig:
        slow_down(rig, 0.02)
        first = rig.start(prompt(30, seed=9), 40) if after == "waiting" else None
        output = rig.start(tokens, 500)
        if after == "prefill":
            while not output.progressed or output.progressed[-1][0] < 640:
                time.sleep(0.005)
        elif after == "decode":
            while len(output.got) < 80:
                time.sleep(0.005)
        rig.scheduler.cancel(output.sequence)
        if first:
            first.tokens()
        rig.settle()
        assert not rig.scheduler.active_sequences
        rig.on_engine(lambda: check_pool(rig.pool, {}))
        kept = rig.run(tokens + output.got[:70] + [5] * 10, 1).hot
        least = {"waiting": 0, "prefill": 640, "decode": 1000 + 70}[after]
        assert kept >= least - BLOCK


def test_a_stop_token_ends_the_request_and_is_not_given_out(model: Path):
    tokens = prompt(40)
    with Rig(model) as rig:
        free = rig.run(tokens, 12).got
        stop = free[5]
        output = rig.run(tokens, 12, eos=[stop])
        assert output.got == free[: free.index(stop)]
        assert output.reason == "stop"


def test_a_fault_fails_the_requests_of_that_step_and_no_others(model: Path):
    with Rig(model) as rig:
        whole = rig.loaded.model

        class Faulty:
            def __call__(self, tokens, cache):
                if tokens.shape[1] > 1 and tokens[0, 0].item() == 299:
                    raise ValueError("a kernel did not compile")
                return whole(tokens, cache=cache)

            def __getattr__(self, name):
                return getattr(whole, name)

        rig.loaded.model = Faulty()
        fine = rig.start(prompt(100), 50)
        bad = rig.start([299, *prompt(60)], 5)
        with pytest.raises(OmlxdError, match="a kernel did not compile"):
            bad.tokens()
        assert len(fine.tokens()) == 50
        rig.settle()
        rig.on_engine(lambda: check_pool(rig.pool, {}))


def test_a_fault_while_decoding_fails_the_batch_and_the_engine_stays_up(model: Path):
    with Rig(model) as rig:
        whole = rig.loaded.model
        running = [rig.start(prompt(50, seed=i), 10_000) for i in range(3)]
        for output in running:
            assert output.first.wait(60)

        class Broken:
            def __call__(self, tokens, cache):
                raise RuntimeError("out of memory")

        def break_it():
            for batch in rig.scheduler._batches:
                batch._model = Broken()

        rig.on_engine(break_it)
        for output in running:
            with pytest.raises(OmlxdError, match="out of memory"):
                output.tokens()
        rig.loaded.model = whole
        assert len(rig.run(prompt(50), 5).got) == 5
        rig.on_engine(lambda: check_pool(rig.pool, {}))


def test_a_salt_keeps_its_holders_blocks_apart(model: Path):
    tokens = prompt(300)
    with Rig(model) as rig:
        rig.run(tokens, 1)
        assert rig.run(tokens, 1, salt="mine").hot == 0
        assert rig.run(tokens, 1, salt="mine").hot == 256


def test_the_context_limit_ends_a_request(model: Path):
    with Rig(model) as rig:
        rig.loaded.context_length = 60
        output = rig.run(prompt(50), 1000)
        assert output.reason == "length"
        assert len(output.got) == 10


def test_a_corrupt_file_ends_the_prefix_and_is_computed_again(model: Path, tmp_path: Path):
    tokens = prompt(400)
    with Rig(model, tmp_path) as rig:
        want = rig.run(tokens, 8).got
        third = rig.store.cold.path_of(rig.start(tokens, 1).sequence.kv.hashes[2])
    path = tmp_path / third
    data = bytearray(path.read_bytes())
    data[-100] ^= 1
    path.write_bytes(data)
    with Rig(model, tmp_path) as rig:
        output = rig.run(tokens, 8)
        assert output.got == want
        assert output.cold == 2 * BLOCK
        assert rig.store.stats.corrupt == 1
        again = rig.run(tokens, 8)
        assert again.got == want and again.hot == 6 * BLOCK


def test_seeded_sampling_agrees_over_batch_and_cache(model: Path):
    sampling = Sampling(temperature=1.0, top_p=0.9, seed=7)
    tokens = prompt(200)
    with Rig(model) as rig:
        alone = rig.run(tokens, 20, sampling=sampling).got
        others = [rig.start(prompt(60, seed=i), 40) for i in range(3)]
        assert rig.run(tokens, 20, sampling=sampling).got == alone
        for output in others:
            output.tokens()
    assert len(set(alone)) > 1 and max(alone) < VOCAB


def test_an_idle_engine_gives_memory_back(model: Path, monkeypatch):
    monkeypatch.setattr(scheduler_module, "IDLE_S", 0.05)
    with Rig(model) as rig:
        rig.run(prompt(300), 1)
        assert rig.pool.hot_bytes > 0
        rig.hot = rig.pool.hot_bytes // 2  # memory has become short
        wait_until(lambda: rig.pool.hot_bytes <= rig.hot)
        assert 0 < rig.pool.hot_bytes <= rig.hot
        # What is left is the beginning of the chain, so it is still of use.
        assert rig.run(prompt(300), 1).hot > 0


def test_a_change_of_the_model_that_is_asked_for_in_the_last_pass_does_not_wait(model: Path):
    with Rig(model) as rig:
        changed, asked = threading.Event(), []
        look = rig.scheduler.passes.between_layers

        def between_layers() -> None:
            if not asked:
                asked.append(time.monotonic())
                rig.scheduler.change_model(changed.set)
            look()

        rig.scheduler.passes.between_layers = between_layers  # type: ignore[method-assign]
        rig.scheduler.passes._is_long = lambda tokens: True  # type: ignore[method-assign]
        rig.start(prompt(30, seed=1), 1).tokens()
        assert changed.wait(scheduler_module.IDLE_S / 2)


def test_a_row_that_finds_no_memory_to_join_leaves_the_others_alone(
    model: Path, monkeypatch: pytest.MonkeyPatch
):
    with Rig(model) as rig:
        alone = rig.run(prompt(30, seed=1), 200).got
        row = rig.start(prompt(30, seed=1), 200)
        assert row.first.wait(30)
        calls: list[int] = []
        for kind in (own_rows.OwnRowsKVCache, tails.TailRowsKVCache, batch_kv.EvenBatchKVCache):

            def extend(self: Any, other: Any, extend: Any = kind.extend) -> None:
                calls.append(1)
                if len(calls) == 2:
                    raise RuntimeError("[malloc] Unable to allocate")
                extend(self, other)

            monkeypatch.setattr(kind, "extend", extend)
        with pytest.raises(OmlxdError, match="Unable to allocate"):
            rig.start(prompt(40, seed=2), 20).tokens()
        assert row.tokens() == alone and len(calls) == 2


def test_a_row_that_fails_as_it_joins_is_no_row_of_the_batch(model: Path, monkeypatch: pytest.MonkeyPatch):
    with Rig(model, speculate=True) as rig:
        row = rig.start(prompt(30, seed=1), 10_000)
        assert row.first.wait(30)

        def fails(*_: Any) -> None:
            raise MemoryError("no marks")

        monkeypatch.setattr(decode_batch, "RowSpeculator", fails)
        for output in (rig.start(prompt(40, seed=2), 20), row):
            with pytest.raises(OmlxdError, match="no marks"):
                output.tokens()
        monkeypatch.undo()
        assert len(rig.run(prompt(40, seed=2), 20).got) == 20
        rig.on_engine(lambda: check_pool(rig.pool, {}))


def test_an_error_that_names_a_sequence_tells_nothing_of_its_prompt(model: Path):
    asked = prompt(30)
    with Rig(model) as rig:

        def fails(sequence: Sequence, logits: Any) -> None:
            raise KeyError(sequence)

        rig.scheduler.passes.first_token = fails  # type: ignore[method-assign]
        with pytest.raises(OmlxdError, match="KeyError") as told:
            rig.run(asked, 1)
    assert str(asked)[1:-1] not in str(told.value)


def test_a_batch_whose_step_fails_while_it_is_waited_for_leaves_the_prompt_alone(
    model: Path, monkeypatch: pytest.MonkeyPatch
):
    asked = prompt(2000, seed=5)
    with Rig(model) as rig:
        alone = rig.run(asked, 5).got
    with Rig(model, reuse=False) as rig:
        row = rig.start(prompt(30, seed=1), 2000)
        assert row.first.wait(30)

        waits: list[int] = []

        def fails(batch: DecodeBatch) -> None:
            waits.append(len(batch.rows))
            if len(waits) == 1:
                raise RuntimeError("command buffer failed")

        monkeypatch.setattr(DecodeBatch, "wait", fails)
        rig.scheduler.step_due = lambda: rig.scheduler.decodes
        assert rig.start(asked, 5).tokens() == alone
        with pytest.raises(OmlxdError, match="command buffer failed"):
            row.tokens()


@pytest.mark.parametrize("labels", [(), [[400], [401]]], ids=["ends", "scores"])
def test_one_whose_cached_blocks_can_not_be_taken_fails_alone(model: Path, labels: list[list[int]]):
    with Rig(model) as rig:
        shared = prompt(2 * BLOCK)
        rig.run([*shared, 7], 1)
        bridge = rig.scheduler.bridge
        assert bridge is not None
        match, asked, broken = bridge.match, [shared + [9 + n] * 8 for n in range(3)], []

        def fails_before_its_pass(sequence: Sequence, ready: Any) -> bool:
            if sequence.tokens[:-1] == asked[1][:-1] and sequence.kv.table is not None:
                broken.append(sequence)
                raise RuntimeError("[malloc] Unable to allocate")
            return match(sequence, ready)

        bridge.match = fails_before_its_pass  # type: ignore[method-assign]
        all_are_there = threading.Event()
        rig.scheduler.post(all_are_there.wait)
        outputs = [rig.start(tokens, 3, labels=labels) for tokens in asked]
        all_are_there.set()
        with pytest.raises(OmlxdError, match="Unable to allocate"):
            outputs[1].tokens()
        assert [len(output.tokens()) for output in (outputs[0], outputs[2])] == [0 if labels else 3] * 2
        rig.settle()
        assert len(broken) == 1
        rig.on_engine(lambda: check_pool(rig.pool, {}))


def test_a_change_of_the_model_that_fails_ends_no_request(model: Path):
    with Rig(model) as rig:
        row = rig.start(prompt(30), 200)
        assert row.first.wait(30)

        def fails() -> None:
            raise RuntimeError("no memory for its matrices")

        rig.scheduler.change_model(fails)
        assert len(row.tokens(30)) == 200


@pytest.mark.parametrize("family", ["qwen3", "gemma3_text"])
def test_an_engine_that_ends_amid_an_answer_keeps_what_it_computed(family: str, tmp_path: Path):
    folder = build_family(family, tmp_path / "model")
    with Rig(folder, tmp_path / "cache") as rig:
        outputs = [rig.start(prompt(100 + n, seed=n), 10_000) for n in range(2)]
        while min(len(output.got) for output in outputs) < 2 * BLOCK:
            time.sleep(0.005)
    assert not any(output.error or output.reason for output in outputs), "the front may send them again"
    with Rig(folder, tmp_path / "cache") as rig:
        for n, output in enumerate(outputs):
            kept = rig.run(prompt(100 + n, seed=n) + output.got + [5] * BLOCK, 1).cold
            assert kept >= 100 + len(output.got) - BLOCK - 2
