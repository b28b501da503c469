"""A hit that goes on inside of a block: the tokens and bits of a run without reuse, and less to compute."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from cold_run import Reference, assert_same, outputs, prompt, same_bits
from families import DType, build_family
from rig import BLOCK, Output, Rig

from omlxd.engine import harvest, hot_tails
from omlxd.errors import OmlxdError


@dataclass(slots=True, frozen=True)
class Case:
    """alike: a token's KV has the same bits, computed alone or with others."""

    family: str
    dtype: DType = "fp32"
    kv_bits: int = 0
    alike: bool = True

    def __str__(self) -> str:
        return f"{self.family}-{self.dtype}" + (f"-kv{self.kv_bits}" if self.kv_bits else "")


CASES = [
    Case("qwen3"),
    Case("deepseek_v3", alike=False),
    Case("qwen3", "bf16", 8, alike=False),
    Case("llama", "bf16"),
    Case("qwen3_4bit", "bf16"),
    Case("qwen3_moe"),
]
FAST = 3


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(case, marks=() if index < FAST else pytest.mark.slow, id=str(case))
        for index, case in enumerate(CASES)
    ],
)
def case(request: pytest.FixtureRequest) -> Case:
    return request.param


@pytest.fixture(scope="module")
def model(case: Case, tmp_path_factory: pytest.TempPathFactory) -> Path:
    changes = {"head_dim": 64} if case.kv_bits else {}
    return build_family(case.family, tmp_path_factory.mktemp("model"), dtype=case.dtype, changes=changes)


@pytest.fixture(scope="module")
def uncached(case: Case, model: Path) -> Iterator[Reference]:
    with Reference(model, kv_bits=case.kv_bits) as reference:
        yield reference


@pytest.fixture
def rig(case: Case, model: Path) -> Iterator[Rig]:
    with Rig(model, record=True, kv_bits=case.kv_bits) as made:
        yield made
        made.settle()
        made.on_engine(lambda: made.pool.check({}))


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_family("qwen3", tmp_path_factory.mktemp("plain"))


# --------------------------------------------------------------------------- the same bits


def test_all_but_the_last_token_comes_back(rig: Rig, uncached: Reference):
    for seed, length in enumerate((40, BLOCK, BLOCK + 1, 300, 320, 321, 322)):
        tokens = prompt(length, seed)
        assert_same(rig, tokens, uncached, hot=0, cold=0, n=2)
        kept = length - 1
        if (length - 1) % BLOCK < hot_tails.LEAST:
            kept = (length - 1) // BLOCK * BLOCK
        assert_same(rig, tokens, uncached, hot=kept, cold=0, n=2)


def test_a_prompt_that_differs_inside_of_a_block_takes_what_is_equal(rig: Rig, uncached: Reference):
    tokens = prompt(300)
    rig.run(tokens, 2)
    for at in (270, 290, 299, 200, 150, 20):  # in the tail, in full blocks, in the first
        assert_same(rig, tokens[:at] + prompt(60, seed=at), uncached, hot=at, cold=0, n=2)
        changed = [*tokens[:at], tokens[at] ^ 1, *tokens[at + 1 :]]
        rig.run(changed, 1)


def test_a_pass_never_has_one_token_where_a_cold_run_has_more(rig: Rig, uncached: Reference):
    tokens = prompt(300)
    rig.run(tokens, 2)
    # But for the last token there is one token left of the tail, and one of the block.
    assert_same(rig, tokens[:290] + prompt(2, seed=1), uncached, hot=289, cold=0)
    assert_same(rig, tokens[:255] + prompt(90, seed=2), uncached, hot=254, cold=0)


def test_whatever_was_asked_before(case: Case, rig: Rig, uncached: Reference):
    """Prompts of what was asked and answered, cut and joined anywhere; against no reuse, and no tails."""
    rng = random.Random(3)
    known = [prompt(rng.randrange(1, 4 * BLOCK), seed) for seed in range(2)]
    computed = {True: 0, False: 0}
    with Rig(rig.model_path, tails=False, kv_bits=case.kv_bits) as without:
        for turn in range(24):
            stem = rng.choice(known)
            tokens = stem[: rng.randrange(1, len(stem) + 1)] + prompt(rng.randrange(1, 90), seed=100 + turn)
            n = rng.randrange(1, 12) if case.alike else 1
            rig.recorder.logits.clear()
            output, other = rig.run(tokens, n), without.run(tokens, n)
            want, rows = uncached(tokens, n)
            assert output.got == other.got == want
            assert same_bits(outputs(rig, n), rows), f"turn {turn}"
            for tails, each in ((True, output), (False, other)):
                computed[tails] += len(tokens) - each.hot
            known.append(tokens + want)
    assert computed[True] < computed[False]


def test_the_next_turn_goes_on_from_the_answers_last_token(case: Case, rig: Rig, uncached: Reference):
    tokens = prompt(100)
    answer = rig.run(tokens, 20).got
    turn = tokens + answer + prompt(30, seed=1)
    if case.alike:
        assert_same(rig, turn, uncached, hot=119, cold=0)
    else:
        output = rig.run(turn, 8)
        assert (output.hot, output.got) == (119, uncached(turn, 8)[0])
    # Its prompt alone, and a prompt that goes on otherwise, take nothing of the answer.
    assert_same(rig, tokens, uncached, hot=99, cold=0)
    assert_same(rig, tokens + prompt(30, seed=2), uncached, hot=99, cold=0)


# --------------------------------------------------------------------------- ends, and others beside


class Stopping(Output):
    """Breaks its request off at its fifth token, from inside of the engine."""

    def __init__(self, rig: Rig):
        super().__init__()
        self._rig = rig

    def token(self, token: int, told: object = None) -> None:
        super().token(token, told)
        if len(self.got) == 5:
            self._rig.scheduler.cancel(self.sequence)


def test_what_a_cancelled_answer_had_computed_is_kept(plain: Path):
    tokens = prompt(100)
    with Reference(plain) as uncached, Rig(plain, record=True) as rig:
        output = rig.start(tokens, 500, output=Stopping(rig))
        rig.settle()
        assert output.sequence.cancelled and len(output.got) == 5
        turn = tokens + output.got[:4] + prompt(20, seed=1)
        assert_same(rig, turn, uncached, hot=104, cold=0)


def test_requests_at_the_same_time(plain: Path):
    shared = prompt(200)
    prompts = [shared + prompt(20 + 7 * i, seed=i) for i in range(5)] + [shared + prompt(34, seed=2)]
    with Reference(plain) as uncached, Rig(plain, slots=4) as rig:
        for _ in range(2):
            running = [rig.start(p, 12) for p in prompts]
            got = [output.tokens() for output in running]
            assert got == [uncached(p, 12)[0] for p in prompts]
            rig.settle()
        assert [output.hot for output in running] == [len(p) - 1 for p in prompts]
        rig.on_engine(lambda: rig.pool.check({}))


def test_a_salt_keeps_its_holders_tails_apart(plain: Path):
    tokens = prompt(50)
    with Rig(plain) as rig:
        rig.run(tokens, 1)
        assert rig.run(tokens, 1, salt="mine").hot == 0
        assert rig.run(tokens, 1, salt="mine").hot == 49


# --------------------------------------------------------------------------- memory


def test_tails_are_a_small_part_of_the_tier(plain: Path):
    with Rig(plain) as rig:
        rig.run(prompt(50, 0), 1)
        one = rig.pool.tails.nbytes
        assert one == rig.loaded.layout.nbytes(49)
        rig.hot = 16 * (3 * one + one // 2)
        for seed in range(1, 8):
            rig.run(prompt(50, seed), 1)
            assert rig.pool.hot_bytes == rig.pool.tails.nbytes == min(3, seed + 1) * one
        assert rig.run(prompt(50, 7), 1).hot == 49 and rig.run(prompt(50, 1), 1).hot == 0
        rig.hot = 15 * one
        rig.run(prompt(50, 9), 1)
        assert rig.run(prompt(50, 9), 1).hot == 0, "one would be more than their part"
        rig.hot = 0
        rig.on_engine(rig.store.trim_hot)
        assert rig.pool.hot_bytes == 0
        rig.on_engine(lambda: rig.pool.check({}))


def test_they_are_given_back_first(plain: Path):
    with Rig(plain) as rig:
        rig.run(prompt(300), 1)
        blocks = rig.pool.hot_bytes - rig.pool.tails.nbytes
        assert rig.pool.tails.nbytes > 0
        rig.hot = blocks
        rig.on_engine(rig.store.trim_hot)
        assert rig.pool.hot_bytes == blocks
        assert rig.run(prompt(300), 1).hot == 256


def test_an_evicted_blocks_note_is_worth_nothing(plain: Path):
    with Rig(plain) as rig:
        rig.run(prompt(300), 1)
        rig.on_engine(lambda: rig.pool.evict(1 << 40))
        assert rig.pool.hot_bytes == 0
        assert rig.run(prompt(300), 1).hot == 0
        rig.on_engine(lambda: rig.pool.check({}))


def test_nothing_of_it_reaches_the_disk(plain: Path, tmp_path: Path):
    tokens = prompt(300)
    with Rig(plain, tmp_path) as rig:
        for _ in range(3):
            rig.run(tokens, 4)
        assert rig.store.writer is not None and rig.store.writer.stats.written == 4
    assert len(list(tmp_path.glob("*/*/*.safetensors"))) == 4
    with Reference(plain) as uncached, Rig(plain, tmp_path, record=True) as rig:
        assert_same(rig, tokens, uncached, hot=0, cold=256)
        output = rig.run(tokens, 4)
        assert output.hot + output.cold == 299


def test_no_memory_for_a_copy_costs_nobody_an_answer(plain: Path, monkeypatch: pytest.MonkeyPatch):
    def fails(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(hot_tails, "copy_blocks", fails)
    with Rig(plain) as rig:
        assert len(rig.run(prompt(50), 3).got) == 3
        assert rig.run(prompt(50), 3).hot == 0


class Broken:
    """A model whose logits are no numbers in passes of one token from `position` on."""

    def __init__(self, model: Any, position: int):
        self._model, self._position = model, position

    def __call__(self, tokens: Any, cache: Any) -> Any:
        logits = self._model(tokens, cache=cache)
        return logits * float("nan") if cache[0].offset > self._position else logits

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


def test_of_an_answer_that_breaks_only_what_gave_numbers_is_kept(plain: Path):
    tokens = prompt(100)
    with Rig(plain) as rig:
        whole = rig.loaded.model
        rig.scheduler._model = Broken(whole, 104)
        output = rig.start(tokens, 20)
        with pytest.raises(OmlxdError, match="not numbers"):
            output.tokens()
        rig.settle()
        rig.scheduler._model = whole
        assert output.got
        assert rig.run(tokens + output.got + prompt(20, seed=1), 2).hot == 99, "nothing of the answer"
        rig.scheduler._model = Broken(whole, 0)
        other = prompt(50, seed=2)
        with pytest.raises(OmlxdError, match="not numbers"):
            rig.start(other, 2).tokens()
        rig.settle()
        rig.scheduler._model = whole
        assert rig.run(other, 2).hot == 0


# --------------------------------------------------------------------------- where there are none


def test_a_gpu_has_none(plain: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(harvest, "last_token_alone", lambda: False)
    with Rig(plain) as rig:
        rig.run(prompt(300), 2)
        assert rig.run(prompt(300), 2).hot == 256 and len(rig.pool.tails) == 0


@pytest.mark.parametrize("family", ["gemma3_text", "qwen3_5", "mamba2"])
def test_a_model_with_other_state_has_none(family: str, tmp_path: Path):
    with Rig(build_family(family, tmp_path / "model")) as rig:
        rig.run(prompt(300), 2)
        assert rig.run(prompt(300), 2).hot % BLOCK == 0 and len(rig.pool.tails) == 0
