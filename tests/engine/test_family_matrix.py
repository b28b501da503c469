"""Every family × every way to come back to a prefix, hot or cold, against a run without reuse.

One family of each kind of cache comes back from both tiers in every way, any other from one tier in
each way, one with the caches of another or a variant of it in every second way: `tiers`.

A scenario is what was served before, and what is asked afterwards. The hot rows do both in one
engine. The cold rows serve the first part in a process of its own, which is then killed with SIGKILL,
and the second in another, from disk. Each answer must be the cold run's, tokens and logits
(family_configs.py says to which bit), and each request may compute anew at most what was not known
before, and one block.
"""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest
from cold_run import Reference, outputs, prompt, same_bits
from families import DType, build_family
from family_configs import CONFIGS, NOT_REUSED, VLM_TEXT, Family
from kv_fakes import check_pool
from rig import BLOCK, Output, Rig

from omlxd.engine import mlx_adapter

GRID = 128
"""Tokens a prefill chunk, and between two checkpoints: so that short prompts have several of both."""

ANSWER = 70
"""Tokens of an answer that the next turn goes on from: more than a block."""


# --------------------------------------------------------------------------- rows and columns


@dataclass(slots=True, frozen=True)
class Row:
    family: str
    dtype: DType = "fp32"
    kv_bits: int = 0
    segment: int = 0

    @property
    def options(self) -> dict[str, int]:
        """Of its rigs."""
        return {"kv_bits": self.kv_bits, "segment": self.segment}

    @property
    def config(self) -> Family:
        return (CONFIGS | VLM_TEXT)[self.family]

    def build(self, folder: Path) -> Path:
        # Groups of KV are 64 wide.
        changes = {"head_dim": 64} if self.kv_bits else {}
        return build_family(self.family, folder, dtype=self.dtype, changes=changes)

    def __str__(self) -> str:
        bits = f"-kv{self.kv_bits}" if self.kv_bits else ""
        return f"{self.family}-{self.dtype}{bits}" + ("-shared" if self.segment else "")


ROWS = [
    *(Row(name) for name in (*CONFIGS, *VLM_TEXT) if name not in NOT_REUSED),
    *(Row(name, "bf16") for name in ("qwen3", "llama")),
    *(Row(name, kv_bits=8) for name in ("qwen3", "qwen3_moe", "gemma3_text", "qwen3_5")),
    *(Row(name, kv_bits=4) for name in ("qwen3", "falcon_h1")),
    *(Row(name, segment=GRID) for name in ("gemma3_text", "qwen3_5", "gpt_oss", "gemma4_text", "gemma3n")),
    *(Row(name, segment=GRID) for name in ("deepseek_v3", "kimi_linear")),
    *(Row(name, kv_bits=bits, segment=GRID) for name, bits in (("qwen3", 8), ("falcon_h1", 4))),
]
FAST = (Row("gemma3_text", segment=GRID), Row("qwen3_5", segment=GRID))
"""One with windows, one with recurrent layers; test_identity.py has those that keep KV per token alone."""
WHOLE = {*FAST, *(Row(name) for name in ("qwen3", "mamba2", "deepseek_v3")), Row("qwen3", kv_bits=8)}
"""One of each kind of cache, of packed KV, and of layers that share a prefix beside others."""
TOGETHER = 8
"""Rows whose models and first parts are made together, as the first of them is tested."""


@dataclass(slots=True, frozen=True)
class Ask:
    """A request for `n` tokens, maybe broken off.

    abort     when: in the second prefill chunk, or after some tokens of the answer
    known     tokens of its prefix whose KV some request before has computed
    answered  part of what is known was computed a token at a time
    inside    what is known ends where no checkpoint of the turn's or prompt's end stands
    off_grid  a hit begins inside of one of the cold run's chunks
    """

    tokens: list[int]
    n: int = 3
    abort: Literal["", "prefill", "decode"] = ""
    known: int = 0
    answered: bool = False
    inside: bool = False
    off_grid: bool = False


Answer = Callable[[list[int], int], list[int]]
"""What the model answers, by a run without reuse."""
Scenario = Callable[[Answer], tuple[list[Ask], list[Ask]]]
"""(asked before, asked afterwards and checked); the first part needs no answers."""


def same_prompt(answer: Answer):
    tokens = prompt(300, seed=1)
    other_end, whole_blocks = tokens[:290] + prompt(50, seed=2), tokens[: 4 * BLOCK]
    return [Ask(tokens)], [
        Ask(tokens, known=300),
        Ask(other_end, known=290),
        Ask(whole_blocks, known=4 * BLOCK, inside=True),
    ]


def prompt_that_grows(answer: Answer):
    tokens = prompt(200, seed=16)
    return [Ask(tokens)], [Ask(tokens + prompt(150, seed=17), known=200, off_grid=True)]


def shorter_than_a_block(answer: Answer):
    tokens = prompt(40, seed=3)
    turn = tokens + answer(tokens, 8) + prompt(9, seed=4)
    return [Ask(tokens, 8)], [Ask(tokens, known=40), Ask(turn, known=47, answered=True)]


def divergence_in_the_middle(answer: Answer):
    tokens = prompt(500, seed=5)
    return [Ask(tokens)], [Ask(tokens[:330] + prompt(80, seed=6), known=330, inside=True)]


def branch_and_return(answer: Answer):
    trunk = prompt(300, seed=7)
    branch = trunk[:200] + prompt(100, seed=8)
    there = trunk + answer(trunk, ANSWER) + prompt(30, seed=9)
    return (
        [Ask(trunk, ANSWER), Ask(branch)],
        [Ask(there, known=300 + ANSWER - 1, answered=True), Ask(branch, known=300)],
    )


def turns_that_append(answer: Answer):
    first = prompt(150, seed=10)
    second = first + answer(first, ANSWER) + prompt(40, seed=11)
    third = second + answer(second, 8) + prompt(20, seed=12)
    return (
        [Ask(first, ANSWER)],
        [
            Ask(second, 8, known=150 + ANSWER - 1, answered=True),
            Ask(third, known=len(second) + 8 - 1, answered=True),
        ],
    )


def aborted_while_prefilling(answer: Answer):
    tokens = prompt(420, seed=13)
    return [Ask(tokens, abort="prefill")], [Ask(tokens, known=2 * GRID)]


def aborted_while_answering(answer: Answer):
    tokens = prompt(200, seed=14)
    got = answer(tokens, ANSWER)
    turn = tokens + got[: ANSWER - 20] + prompt(30, seed=15)
    return (
        [Ask(tokens, 2 * ANSWER, abort="decode")],
        [Ask(tokens, known=200), Ask(turn, known=200 + ANSWER - 20, answered=True)],
    )


SCENARIOS: tuple[Scenario, ...] = (
    same_prompt,
    prompt_that_grows,
    shorter_than_a_block,
    divergence_in_the_middle,
    branch_and_return,
    turns_that_append,
    aborted_while_prefilling,
    aborted_while_answering,
)


# --------------------------------------------------------------------------- doing them


def matrix_rig(model: Path, root: Path | None = None, **options: Any) -> Rig:
    rig = Rig(model, root, record=True, **options)
    rig.use_grid(GRID)
    if rig.scheduler.bridge is not None and rig.scheduler.bridge.reads is not None:
        # A loaded machine's disk may seem slower than computing these models.
        rig.scheduler.bridge.reads.rates.computing_pays = lambda *_: False  # type: ignore[method-assign]
        rig.scheduler.bridge.reads.rates.both_pay = lambda *_: False  # type: ignore[method-assign]
    return rig


class Aborting(Output):
    """Breaks its request off from inside of the engine, so always at the same token."""

    def __init__(self, rig: Rig, ask: Ask):
        super().__init__()
        self._rig, self._ask = rig, ask

    def progress(self, event: Any) -> None:
        super().progress(event)
        if self._ask.abort == "prefill" and event.done >= 2 * GRID:
            self._rig.scheduler.cancel(self.sequence)

    def token(self, token: int, likelihood: Any = None) -> None:
        super().token(token, likelihood)
        if self._ask.abort == "decode" and len(self.got) == ANSWER:
            self._rig.scheduler.cancel(self.sequence)


def serve(rig: Rig, asks: list[Ask]) -> None:
    for ask in asks:
        if not ask.abort:
            rig.run(ask.tokens, ask.n)
            continue
        output = rig.start(ask.tokens, ask.n, output=Aborting(rig, ask))
        rig.settle()
        assert not output.reason and not output.error and output.sequence.cancelled, "it was to be broken off"


def check(rig: Rig, asks: list[Ask], uncached: Reference, row: Row, *, tier: str) -> None:
    for ask in asks:
        rig.recorder.logits.clear()
        output = rig.run(ask.tokens, ask.n)
        want, want_rows = uncached.once(ask.tokens, ask.n)
        assert output.got == want
        if promises_bits(ask, row):
            assert same_bits(outputs(rig, ask.n), want_rows), "logits differ in some bit"
        assert len(ask.tokens) - output.hot - output.cold <= allowed(ask, row), "computed again"
        # A hot hit never touches the disk; after a restart the first hit comes from nowhere else.
        assert output.cold == 0 if tier == "hot" else output.hot + output.cold >= 0


def promises_bits(ask: Ask, row: Row) -> bool:
    if row.family in ("qwen3_4bit", "qwen3_5", "qwen3_next") and mlx_adapter.backend() == "metal":
        return False  # Few rows or tokens have a kernel of their own there, and the end of a prompt is few.
    if ask.answered:
        # A pass of one token reads quantised KV packed, one of many unpacked: they round differently.
        return row.config.promise == "bits" and not row.kv_bits
    return not (row.config.grid and ask.off_grid)


def allowed(ask: Ask, row: Row) -> int:
    """Tokens that a request may compute: what is new, and one block, or back to the last checkpoint."""
    known = min(ask.known, len(ask.tokens))
    slack = GRID if ask.inside and not row.config.per_token else 0
    return len(ask.tokens) - known + BLOCK + slack


# --------------------------------------------------------------------------- the matrix


def tiers(row: Row, scenario: Scenario) -> tuple[str, ...]:
    """Where `row` finds `scenario`'s prefix: in "hot", in "cold", once in each, or nowhere.

    A double has every second scenario.
    """
    if row in WHOLE:
        return ("hot", "cold")
    if is_double(row) and (ROWS.index(row) + SCENARIOS.index(scenario)) % 2:
        return ()
    return (in_turn(row, scenario),)


def is_fast(row: Row, scenario: Scenario) -> bool:
    """Each scenario of one in `FAST`, in pairs so that both come back from both tiers."""
    return row in FAST and (SCENARIOS.index(scenario) // 2 + [*FAST].index(row)) % 2 == 0


def is_double(row: Row) -> bool:
    """Whether it has KV per token alone, or is a variant (8 bits, a shared prefix), as a row of `WHOLE`."""
    if row == Row(row.family):
        return row.config.per_token and not row.family.startswith(("deepseek", "glm_moe"))  # These have MLA.
    variant = row.dtype, row.kv_bits, row.segment
    return variant in {(one.dtype, one.kv_bits, one.segment) for one in WHOLE}


def in_turn(row: Row, scenario: Scenario) -> str:
    """The tier of `row` and `scenario` where one of both is enough."""
    number = ROWS.index(row) + SCENARIOS.index(scenario)
    return "hot" if (number // 2 if is_double(row) else number) % 2 else "cold"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    tier = metafunc.function.__name__.removeprefix("test_")
    metafunc.parametrize(
        ("row", "scenario"),
        [
            pytest.param(
                *(row, scenario),
                id=f"{row}-{scenario.__name__}",
                marks=() if tier == in_turn(row, scenario) and is_fast(row, scenario) else pytest.mark.slow,
            )
            for row in ROWS
            for scenario in SCENARIOS
            if tier in tiers(row, scenario)
        ],
        indirect=["row"],
        scope="module",
    )


@pytest.fixture(scope="module")
def row(request: pytest.FixtureRequest) -> Row:
    return request.param


@pytest.fixture(scope="session")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Row], Path]:
    """A row's folder, its model in `model`."""

    @functools.cache
    def folder(row: Row) -> Path:
        made = tmp_path_factory.mktemp(str(row))
        row.build(made / "model")
        return made

    return folder


@pytest.fixture(scope="session")
def killed(request: pytest.FixtureRequest, folder_of: Callable[[Row], Path]) -> Callable[[Row], Path]:
    """A row's first parts, served to a cold tier by a process that was then killed."""
    selected = [
        item.callspec.params["row"]
        for item in request.session.items
        if isinstance(item, pytest.Function) and item.path == Path(__file__) and hasattr(item, "callspec")
    ]
    rows, roots = list(dict.fromkeys(selected)), dict[Row, Path]()

    def root(row: Row) -> Path:
        if row not in roots:
            first = rows.index(row) // TOGETHER * TOGETHER
            roots.update(served({one: folder_of(one) for one in rows[first : first + TOGETHER]}))
        return roots[row]

    return root


def served(folders: dict[Row, Path]) -> dict[Row, Path]:
    roots = {row: folder / "cold" for row, folder in folders.items()}
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    arguments = [str(a) for row in roots for a in (folders[row] / "model", roots[row], ROWS.index(row))]
    child = subprocess.Popen(
        [sys.executable, __file__, *arguments], env=env, stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    try:
        assert child.stdout.readline() == "served\n"
    finally:
        child.send_signal(signal.SIGKILL)
        assert child.wait(120) == -signal.SIGKILL
        child.stdout.close()
    return roots


@pytest.fixture(scope="module")
def model(row: Row, folder_of: Callable[[Row], Path]) -> Path:
    return folder_of(row) / "model"


@pytest.fixture(scope="module")
def uncached(row: Row, model: Path) -> Iterator[Reference]:
    reference = Reference(model, **row.options)
    reference.rig.use_grid(GRID)
    yield reference
    reference.close()


@pytest.fixture(scope="module")
def answer(uncached: Reference) -> Answer:
    return lambda tokens, n: uncached.once(tokens, n)[0]


@pytest.fixture(scope="module")
def hot(row: Row, model: Path) -> Iterator[Rig]:
    with matrix_rig(model, **row.options) as rig:
        assert rig.loaded.segments.tokens == row.segment
        yield rig


@pytest.fixture(scope="module")
def restarted(row: Row, model: Path, killed: Callable[[Row], Path]) -> Iterator[Rig]:
    with matrix_rig(model, killed(row), **row.options) as rig:
        yield rig


def test_hot(scenario: Scenario, row: Row, hot: Rig, uncached: Reference, answer: Answer):
    before, after = scenario(answer)
    serve(hot, before)
    check(hot, after, uncached, row, tier="hot")
    hot.on_engine(lambda: check_pool(hot.pool, {}))


def test_cold(scenario: Scenario, row: Row, restarted: Rig, uncached: Reference, answer: Answer):
    _, after = scenario(answer)
    check(restarted, after, uncached, row, tier="cold")
    restarted.on_engine(lambda: check_pool(restarted.pool, {}))


if __name__ == "__main__":  # the child that is killed
    open_until_killed = []
    for folder, root, index in zip(*(sys.argv[i::3] for i in range(1, 4)), strict=True):
        its_row = ROWS[int(index)]
        child_rig = matrix_rig(Path(folder), Path(root), **its_row.options)
        open_until_killed.append(child_rig)
        for each in SCENARIOS:
            if "cold" in tiers(its_row, each):
                serve(child_rig, each(lambda tokens, n: [])[0])
    print("served", flush=True)
    time.sleep(600)
