"""A machine over guesses: requests ask, guess, are cancelled, stored, and come back in another engine.

Whatever the guesses and whoever else decodes, each answer is that of an engine that neither guesses nor
remembers.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
from cold_run import Reference, prompt
from daemon import wait_until
from families import build_family
from guesses import draft_always, guess_by, half_right, like_it
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test
from kv_fakes import check_pool
from rig import GREEDY, Output, Rig

from omlxd.chat import Sampling
from omlxd.engine.speculate.controller import DraftCounts

SAMPLED = Sampling(temperature=0.8, top_k=30, seed=4)


class GuessMachine(RuleBasedStateMachine):
    """`folder`, `plain`, `kv`: the model, an engine without guesses, the bits of its KV.

    draft  a model that guesses where nobody else does; None: there is none
    """

    folder: Path
    draft: Path | None
    plain: Reference
    kv: dict[str, Any]
    rights: list[list[int]]
    """Prompts and their plain answers."""
    guesses: DraftCounts
    """Of all engines so far."""

    def __init__(self) -> None:
        super().__init__()
        self.home = tempfile.TemporaryDirectory()
        self.talks = [prompt(length, seed=length) for length in (20, 70, 140)]
        self.running: list[tuple[Output, list[int]]] = []
        self.open()

    def open(self) -> None:
        self.rig = Rig(self.folder, Path(self.home.name), speculate=True, draft=self.draft, **self.kv)

    @rule(talk=st.integers(0, 2), more=st.integers(0, 40), n=st.integers(1, 90), sampled=st.booleans())
    def ask(self, talk: int, more: int, n: int, sampled: bool) -> None:
        """Some turn of a talk."""
        tokens = self.talks[talk] + prompt(more, seed=more)
        sampling = SAMPLED if sampled else GREEDY
        want = self.plain.rig.run(tokens, n, sampling=sampling).got
        self.rights.append(tokens + want)
        self.running.append((self.rig.start(tokens, n, sampling=sampling), want))
        if len(self.running) > 6:
            self.finish(0)

    @precondition(lambda self: self.running)
    @rule(which=st.integers(0, 5), tokens=st.integers(1, 60))
    def wait(self, which: int, tokens: int) -> None:
        output, _ = self.running[which % len(self.running)]
        wait_until(lambda: len(output.got) >= tokens or output.reason or output.error)

    @precondition(lambda self: self.running)
    @rule(which=st.integers(0, 5))
    def cancel(self, which: int) -> None:
        output, want = self.running.pop(which % len(self.running))
        self.rig.scheduler.cancel(output.sequence)
        got = list(output.got)
        assert got == want[: len(got)]

    @precondition(lambda self: self.running)
    @rule()
    def settle(self) -> None:
        """All that runs ends; the store has what they offered."""
        while self.running:
            self.finish(0)
        self.rig.settle()
        self.rig.on_engine(lambda: check_pool(self.rig.pool))

    @precondition(lambda self: self.running)
    @rule(which=st.integers(0, 5))
    def finish(self, which: int) -> None:
        """The talk goes on behind this answer."""
        output, want = self.running.pop(which % len(self.running))
        assert output.tokens() == want
        talk = min(range(3), key=lambda index: len(self.talks[index]))
        self.talks[talk] = output.sequence.tokens[:400]

    @rule()
    def restart(self) -> None:
        """What was stored is read by another engine."""
        self.close()
        self.open()

    def close(self) -> None:
        self.settle()
        shared = self.rig.scheduler.speculation
        assert shared is not None
        counts = shared.counts[None]
        self.guesses.record(counts.drafted, counts.accepted)
        self.rig.close()

    def teardown(self) -> None:
        self.close()
        self.home.cleanup()


@pytest.mark.parametrize(
    ("family", "kv_bits", "drafts", "examples"),
    [
        ("qwen3", 0, True, 3),
        pytest.param("qwen3", 0, False, 4, marks=pytest.mark.slow),
        pytest.param("qwen3", 0, True, 5, marks=pytest.mark.slow),
        pytest.param("qwen3", 8, True, 3, marks=pytest.mark.slow),
        pytest.param("gemma3_text", 0, True, 3, marks=pytest.mark.slow),
        pytest.param("qwen3_5", 0, True, 3, marks=pytest.mark.slow),
        pytest.param("gemma3_text", 8, True, 3, marks=pytest.mark.slow),
        pytest.param("qwen3_5", 8, True, 3, marks=pytest.mark.slow),
    ],
)
def test_guesses_cancels_and_restarts_change_no_token(
    family: str, kv_bits: int, drafts: bool, examples: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    run_machine(family, kv_bits, drafts, examples, monkeypatch, tmp_path)


def run_machine(
    family: str, kv_bits: int, drafts: bool, examples: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    kv, rights = {"kv_bits": kv_bits}, list[list[int]]()
    guess_by(monkeypatch, half_right(rights, 6))
    folder = build_family(family, tmp_path / family, changes={"head_dim": 64} if kv_bits else {})
    draft = None
    if drafts:  # One that is often right, or one that seldom is.
        draft_always(monkeypatch, width=3)
        like = folder if family == "qwen3" else build_family("qwen3", tmp_path / "other")
        draft = like_it(like, tmp_path / "draft", 0.02)
    plain = Reference(folder, **kv)
    guesses = DraftCounts()
    own = {"folder": folder, "draft": draft, "plain": plain, "kv": kv, "rights": rights, "guesses": guesses}
    machine = type("Machine", (GuessMachine,), own)
    how = settings(max_examples=examples, stateful_step_count=12, deadline=None)
    run_state_machine_as_test(machine, settings=how)
    print(f"{family}, {kv_bits} bits: {guesses.drafted} guesses, {guesses.accepted} held")
    assert 0 < guesses.accepted < guesses.drafted
    plain.rig.close()
