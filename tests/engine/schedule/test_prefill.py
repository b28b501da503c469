"""The budget: whose chunk is next; the ends of several prompts in one pass."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from backends import use_backend
from cold_run import prompt
from families import build_family
from fast_or_slow import rest_slow
from kv_fakes import check_pool
from rig import BLOCK, Output, Rig

from omlxd.chat import Sampling
from omlxd.engine.schedule import forward as prompt_passes
from omlxd.engine.schedule import prefill
from omlxd.engine.schedule.prefill import PrefillBudget
from omlxd.engine.sequence.sampling import RowSampling, SamplerRow, SamplingDefaults
from omlxd.engine.sequence.sequence import Prompt, Sequence, SequenceStats
from omlxd.errors import OmlxdError


def waiting(length: int) -> Sequence:
    row = SamplerRow(RowSampling.of(Sampling(), SamplingDefaults()), max_new=1)
    return Sequence(0, [1] * length, Prompt(length, bytes(32)), row)


def test_short_prompts_go_first_and_cost_a_long_one_no_more_than_it_takes_itself():
    budget = PrefillBudget(64)
    long = waiting(9000)
    long.kv.length = 2048
    picked = [budget.pick_sequence([long, waiting(100)]) is long for _ in range(200)]
    before = picked.index(True)
    assert all(picked[before:]), "then it goes on to its end"
    assert before == -(-(9000 - 2048 - 100 + 1) // min(100, budget.chunk_end(0)))
    assert budget.pick_sequence([long, waiting(5000)]) is long, "one that is not much shorter waits"


def test_what_a_prompt_finds_in_ram_counts_as_computed():
    budget, first, turn = PrefillBudget(64), waiting(9000), waiting(8000)
    first.kv.length = 2048
    assert budget.pick_sequence([first, turn]) is first
    turn.kv.table = cast(Any, SimpleNamespace(blocks=[None] * 115))  # 640 tokens are left.
    assert budget.pick_sequence([first, turn]) is turn
    turn.kv.compute_to = 7000  # A reader has what follows; the front is computed.
    assert budget.pick_sequence([first, turn]) is first


class Agent(Output):
    """One whose next turn follows each answer. `order`: whose first tokens came, and of which turn."""

    def __init__(self, rig: Rig, name: int, turns: int, order: list[tuple[int, int]], turn: int = 0):
        super().__init__()
        self._given, self.turn, self.name, self.order = (rig, name, turns, order), turn, name, order
        self.over = threading.Event()

    def token(self, token: int, likelihood: Any = None) -> None:
        if not self.got:
            self.order.append((self.name, self.turn))
        super().token(token, likelihood)

    def finished(self, sequence: Sequence, reason: str) -> None:
        super().finished(sequence, reason)
        rig, _, turns, _ = self._given
        if self.turn + 1 == turns:
            self.over.set()
            return
        following = Agent(*self._given, turn=self.turn + 1)
        following.over = self.over
        more = prompt(2 * BLOCK, seed=100 * self.name + self.turn)
        rig.start([*sequence.tokens, *more], 2, output=following)


def test_sub_agents_that_begin_together_take_turns(tmp_path: Path):
    """The last of four over one new prompt: what the first computed counts as found, so that nobody's second
    turn goes before its first."""
    prefix, order = prompt(40 * BLOCK, seed=1), list[tuple[int, int]]()
    with Rig(build_family("qwen3", tmp_path / "model")) as rig:
        agents = [Agent(rig, name, 5, order) for name in range(4)]
        rig.on_engine(
            lambda: [
                rig.start(prefix + prompt(12, seed=50 + agent.name), 2, output=agent) for agent in agents
            ]
        )
        assert all(agent.over.wait(120) for agent in agents)
    assert len(order) == 20
    assert {name for name, turn in order if turn == 0} == set(range(4))
    assert max(order.index((name, 0)) for name in range(4)) < 6, order


def test_a_request_whose_blocks_can_not_be_looked_up_ends_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    prompts = [prompt(5 * BLOCK, seed=seed) for seed in (1, 2, 3)]
    with Rig(build_family("qwen3", tmp_path / "model")) as rig:
        bridge = rig.scheduler.bridge
        assert bridge is not None

        def look_again(sequence: Sequence) -> None:
            if sequence.tokens[0] == prompts[1][0]:
                raise OSError("the record is gone")

        monkeypatch.setattr(bridge, "look_again", look_again)
        good, bad, other = rig.on_engine(lambda: [rig.start(tokens, 4) for tokens in prompts])
        with pytest.raises(OmlxdError, match="the record is gone"):
            bad.tokens()
        assert len(good.tokens()) == len(other.tokens()) == 4
        rig.settle()
        rig.on_engine(lambda: check_pool(rig.pool))


def test_a_prompt_waits_until_its_first_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    begin_pass, noted = SequenceStats.begin_pass, list[tuple[float, float]]()
    with Rig(build_family("qwen3", tmp_path / "model")) as rig:

        def noting(stats: SequenceStats) -> None:
            begin_pass(stats)
            load = rig.scheduler.load_metrics()
            noted.append((load["num_requests_running"], load["num_requests_waiting"]))

        monkeypatch.setattr(SequenceStats, "begin_pass", noting)
        prompts = [prompt(5 * BLOCK, seed=seed) for seed in (1, 2, 3)]
        for output in rig.on_engine(lambda: [rig.start(tokens, 40) for tokens in prompts]):
            output.tokens()
        rig.settle()
    assert noted[0] == (1, 2) and noted[-1] == (3, 0) and all(sum(each) == 3 for each in noted)


# --------------------------------------------------------------------------- ends of several prompts


def test_short_rests_are_brought_to_their_ends_first():
    """Of three behind a hit one could begin: the others' full blocks go before, up to 256 tokens of them."""
    budget, rests = PrefillBudget(64), [behind_a_hit(20 + 64 * more) for more in (0, 1, 2)]
    first, second, third = rests
    assert budget.pick_sequence(rests) is first
    assert budget.before_its_end(first, rests) is second
    second.kv.length += 64
    for _ in range(2):
        assert budget.before_its_end(first, rests) is third
        third.kv.length += 64
    assert budget.before_its_end(first, rests) is None
    assert budget.ends_together(first, rests) == rests
    assert budget.before_its_end(first, [*rests, behind_a_hit(84)]) is None, "it has waited for 192 tokens"
    first.stats.overtaken = 0
    long, full, alone, short, wide = *map(behind_a_hit, (300, 64, 84)), waiting(60), behind_a_hit(64 + 63)
    alone.prompt.keys_file = "keys.safetensors"
    for other in (long, full, alone, short, wide):
        assert budget.before_its_end(first, [first, other]) is None, "it is long, or its end joins none"


def test_ends_that_need_much_padding_do_not_share_a_pass(monkeypatch: pytest.MonkeyPatch):
    budget = PrefillBudget(64)
    ends = [behind_a_hit(tokens) for tokens in (18, 50, 20, 19, 18)]
    first, long, *_ = ends
    assert budget.ends_together(first, ends) == [sequence for sequence in ends if sequence is not long]
    assert budget.ends_together(long, ends) == [long]
    few = [behind_a_hit(tokens) for tokens in (1, 16, 3, 2)]
    assert budget.ends_together(few[0], few) == few, "a block has room"
    use_backend(monkeypatch, "cuda")
    assert budget.ends_together(first, ends) == ends, "steps need none"


def test_no_pass_is_larger_than_the_limit(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(prefill.mlx_adapter, "backend", lambda: "metal")
    for limit, largest in ((0, 2048), (9000, 2048), (512, 512), (250, 192), (16, 64)):
        budget = PrefillBudget(64, limit)
        budget.record_pass(100_000, 1.0)
        assert budget.largest == largest and 0 < budget.chunk_end(64 * 31) - 64 * 31 <= largest
        ends = [behind_a_hit(tokens) for tokens in (18, 20, 19, 18)]
        assert len(budget.ends_together(ends[0], ends)) == (3 if largest == 64 else 4)
        budget.set_limit(0)
        assert (budget.largest, budget.together) == (2048, prefill.TOGETHER), "the owner has lifted it"


def behind_a_hit(rest: int) -> Sequence:
    sequence = waiting(2560 + rest)
    sequence.kv.length = 2560
    return sequence


def test_a_prompt_whose_keys_are_written_is_computed_alone():
    budget, (one, two) = PrefillBudget(BLOCK), (waiting(100), waiting(100))
    one.kv.length = two.kv.length = 80
    assert budget.ends_together(one, [one, two]) == [one, two]
    two.prompt.keys_file = "keys.safetensors"
    assert budget.ends_together(one, [one, two]) == [one]
    assert budget.ends_together(two, [one, two]) == [two]


class Passes:
    """A model that notes the shapes of its passes."""

    def __init__(self, model: Any):
        self._model = model
        self.shapes: list[tuple[int, ...]] = []

    def __call__(self, tokens: Any, cache: Any, **inputs: Any) -> Any:
        self.shapes.append(tokens.shape)
        return self._model(tokens, cache=cache, **inputs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


@pytest.mark.parametrize(
    ("backend", "family", "kv_bits"),
    rest_slow(
        [
            *(("cpu", "qwen3", 8), ("cpu", "deepseek_v3", 0)),
            *(("cuda", "qwen3", 0), ("cuda", "deepseek_v3", 0)),
        ],
        ("cuda", "qwen3", 0),
    ),
)
def test_ends_of_prompts_are_computed_together(
    family: str, kv_bits: int, backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Later turns of several talks at once: their answers, and those behind them, are the ones alone."""
    folder = build_family(family, tmp_path / family, changes={"head_dim": 64} if kv_bits else {})
    talks = [prompt(length, seed=length) for length in (130, 200, 70, 330)]
    ends = [prompt(more, seed=more) for more in (7, 1, 12, 30)]
    kv = {"kv_bits": kv_bits}

    def turns(rig: Rig, at_once: bool) -> list[list[int]]:
        answers = []
        for number in range(2):
            prompts = [
                talk[: len(talk) // BLOCK * BLOCK] + end for talk, end in zip(talks, ends, strict=True)
            ]
            if number:
                prompts = [
                    tokens + got + prompt(9, seed=number)
                    for tokens, got in zip(prompts, answers, strict=False)
                ]
            if at_once:
                started = rig.on_engine(lambda asked=prompts: [rig.start(tokens, 40) for tokens in asked])
            else:
                started = [rig.run(tokens, 40) for tokens in prompts]
            answers += [output.tokens() for output in started]
            rig.settle()
            assert all(output.hot and output.sequence.stats.first_token_s for output in started)
        return answers

    with Rig(folder, **kv) as rig:
        for talk in talks:
            rig.run(talk, 2)
        alone = turns(rig, at_once=False)
    with Rig(folder, **kv) as rig:
        use_backend(monkeypatch, "mlx", pads_last_chunks=backend == "cpu")
        for talk in talks:
            rig.run(talk, 2)
        rig.loaded.model = passes = Passes(rig.loaded.model)
        assert turns(rig, at_once=True) == alone
        together = [shape for shape in passes.shapes if min(shape) > 1]
        assert together and all(rows * tokens <= 256 for rows, tokens in together)
        rig.on_engine(lambda: check_pool(rig.pool))


@pytest.mark.parametrize("kv_bits", [0, 8])
def test_rests_of_more_than_a_block_end_together(kv_bits: int, tmp_path: Path):
    """Full blocks, which are stored, have passes of their own; one pass computes all ends but a token."""
    folder = build_family("qwen3", tmp_path / "qwen3", changes={"head_dim": 64})
    prefix = prompt(5 * BLOCK)
    prompts = [prefix + prompt(BLOCK + more, seed=more) for more in (9, 4, 14)]
    with Rig(folder, kv_bits=kv_bits) as rig:
        alone = [rig.run(tokens, 12).got for tokens in prompts]
    with Rig(folder, kv_bits=kv_bits) as rig:
        rig.run(prefix + prompt(3), 1)
        rig.loaded.model = passes = Passes(rig.loaded.model)
        running = rig.on_engine(lambda: [rig.start(tokens, 12) for tokens in prompts])
        assert [output.tokens() for output in running] == alone
        rig.settle()
        assert passes.shapes[:5] == [*[(1, BLOCK)] * 3, (3, 13), (3, 1)]
        rig.on_engine(lambda: check_pool(rig.pool))


def test_one_of_several_prompts_that_is_cancelled_meanwhile_leaves_the_others(tmp_path: Path):
    folder = build_family("qwen3", tmp_path / "qwen3")
    prompts = [prompt(80 + index, seed=index) for index in range(3)]
    with Rig(folder) as rig:
        alone = [rig.run(tokens, 20).got for tokens in prompts]
    with Rig(folder) as rig:
        for tokens in prompts:
            rig.run(tokens, 2)
        compute = prompt_passes.compute_ends
        started: list[Output] = []

        def cancelled(model: Any, sequences: Any, steps: Any) -> Any:
            rig.scheduler.cancel(started[1].sequence)
            rig.scheduler.look_up()
            return compute(model, sequences, steps)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(prompt_passes, "compute_ends", cancelled)
            rig.on_engine(lambda: started.extend(rig.start(tokens, 20) for tokens in prompts))
            assert [started[0].tokens(), started[2].tokens()] == [alone[0], alone[2]]
        rig.settle()
        assert not started[1].got and not rig.scheduler._batches
        rig.on_engine(lambda: check_pool(rig.pool))


def test_a_pass_over_several_ends_that_fails_fails_those(tmp_path: Path):
    folder = build_family("qwen3", tmp_path / "qwen3")
    prompts = [prompt(80 + index, seed=index) for index in range(2)]
    with Rig(folder) as rig:
        alone = [rig.run(tokens, 20).got for tokens in prompts]

        def broken(model: Any, sequences: Any, steps: Any) -> Any:
            raise RuntimeError("no memory")

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(prompt_passes, "compute_ends", broken)
            for output in rig.on_engine(lambda: [rig.start(tokens, 20) for tokens in prompts]):
                with pytest.raises(OmlxdError, match="no memory"):
                    output.tokens()
        rig.settle()
        assert [rig.run(tokens, 20).got for tokens in prompts] == alone
        rig.on_engine(lambda: check_pool(rig.pool))


# --------------------------------------------------------------------------- one prompt, several times


@pytest.mark.parametrize("known", [True, False], ids=["hit", "cold"])
@pytest.mark.parametrize("reuse", [True, False], ids=["cached", "no cache"])
def test_one_prompt_asked_for_several_times_is_computed_once(tmp_path: Path, known: bool, reuse: bool):
    folder, tokens = build_family("qwen3", tmp_path / "qwen3"), prompt(3 * BLOCK + 21, seed=5)
    samplings = [Sampling(temperature=0.0), *(Sampling(temperature=1.5, seed=seed) for seed in range(3))]

    def start(rig: Rig) -> list[Output]:
        return rig.on_engine(lambda: [rig.start(tokens, 20, sampling=sampling) for sampling in samplings])

    with Rig(folder, reuse=reuse) as rig:
        alone = [rig.run(tokens, 20, sampling=sampling).got for sampling in samplings]
    assert len(set(map(tuple, alone))) > 2
    with Rig(folder, reuse=reuse) as rig:
        if known:
            rig.run(tokens, 2)
        rig.loaded.model = passes = Passes(rig.loaded.model)
        rig.scheduler.counts.prefilled.clear()
        running = start(rig)
        assert [output.tokens() for output in running] == alone
        computed = 21 if known and reuse else len(tokens)
        ends = sum(len(tokens) - output.hot for output in running[1:])
        assert rig.scheduler.counts.prefilled.total() == computed + ends
        assert all(output.sequence.stats.prefill_s > 0 for output in running)
        assert sum(shape[1] for shape in passes.shapes if shape[0] == 1 and shape[1] > 1) <= computed
        hit = 3 * BLOCK if reuse else 0
        assert [output.hot for output in running[1:]] == [hit] * 3
        assert [output.progressed[0] for output in running[1:]] == [(hit, len(tokens))] * 3
        rig.settle()
        assert [output.tokens() for output in start(rig)] == alone
        rig.settle()
        if reuse:
            rig.on_engine(lambda: check_pool(rig.pool))


def test_the_others_go_on_if_one_is_cancelled_or_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder, tokens = build_family("qwen3", tmp_path / "qwen3"), prompt(BLOCK + 9, seed=5)
    with Rig(folder) as rig:
        alone = rig.run(tokens, 20).got
    with Rig(folder) as rig:
        rig.run(tokens, 2)
        compute, broken = prompt_passes.compute_chunk, [True]

        def once_broken(model: Any, sequence: Sequence, stop: int, **how: Any) -> Any:
            if broken.pop():
                raise RuntimeError("no memory")
            broken.append(False)
            rig.scheduler.cancel(started[2].sequence)
            rig.scheduler.look_up()
            return compute(model, sequence, stop, **how)

        monkeypatch.setattr(prompt_passes, "compute_chunk", once_broken)
        broken.insert(0, False)
        started: list[Output] = []
        rig.on_engine(lambda: started.extend(rig.start(tokens, 20) for _ in range(4)))
        with pytest.raises(OmlxdError, match="no memory"):
            started[0].tokens()
        assert [started[1].tokens(), started[3].tokens()] == [alone, alone]
        rig.settle()
        assert not started[2].got and not rig.scheduler._batches
        rig.on_engine(lambda: check_pool(rig.pool))


def test_which_prompts_are_the_same(tmp_path: Path):
    with Rig(build_family("qwen3", tmp_path / "qwen3")) as rig:
        passes = rig.scheduler.passes
        one, two, shorter = waiting(BLOCK + 9), waiting(BLOCK + 9), waiting(BLOCK + 8)
        assert passes._key(one) == passes._key(two) != passes._key(shorter)
        two.prompt.root = bytes([1] * 32)
        assert passes._key(one) != passes._key(two), "another client's salt"
        two = waiting(BLOCK + 9)
        two.tokens[-1] = 2
        assert passes._key(one) != passes._key(two)
        two = waiting(BLOCK + 9)
        two.kv.hashes, one.kv.hashes = [bytes([1] * 32)], [bytes([2] * 32)]
        assert passes._key(one) != passes._key(two)
        one.prompt.keys_file = "keys.safetensors"
        assert passes._key(one) is None


def test_what_is_restored_from_disk_goes_before_an_older_prompt_a_bounded_number_of_times():
    """One whose KV was read, and none computed, has not begun."""
    budget, cold, overtook = PrefillBudget(64), waiting(6000), 0
    while overtook < 100:
        warm = waiting(12000)
        warm.kv.length = warm.stats.restored_cold = 9600
        while warm.kv.length < warm.prompt.length:
            picked = budget.pick_sequence([cold, warm])
            picked.begun = True
            picked.kv.length += 64
            if picked is cold:
                return
        overtook += 1
    pytest.fail("the older one starves")
