"""A model's own heads guess; answers, their KV and what is stored stay those of plain decoding."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import mlx.core as mx
import pytest
from cold_run import prompt
from families import build_family
from fast_or_slow import rest_slow
from guesses import draft_always
from host import Host, chat, finished, text_of
from mtp_heads import HEADS, add_heads
from rig import GREEDY, Rig
from vision_families import build_vision_family

from omlxd.chat import Sampling
from omlxd.engine import mlx_adapter

SAMPLED = Sampling(temperature=0.9, top_p=0.9, top_k=20, seed=5)
ASKED = prompt(150, seed=3)
OTHERS = [family for family in HEADS if not family.startswith(("qwen3_5", "qwen3_next"))]


@pytest.fixture(scope="module", params=rest_slow(["text", "vision"], "text"))
def untaught(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with heads that have learned nothing."""
    build = build_family if request.param == "text" else build_vision_family
    folder = build("qwen3_5", tmp_path_factory.mktemp("models") / "qwen3_5")
    add_heads(folder)
    return folder


@pytest.fixture(scope="module")
def model(untaught: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its heads have learned its answers to `ASKED`."""
    folder = shutil.copytree(untaught, tmp_path_factory.mktemp("taught") / "qwen3_5")
    with Rig(folder) as rig:
        answers = [rig.run(ASKED, 80, sampling=sampling).got for sampling in (GREEDY, SAMPLED)]
    losses = add_heads(folder, [ASKED + answer for answer in answers])
    assert losses[1] < losses[0] / 4
    return folder


@pytest.mark.slow
def test_answers_and_their_kv_are_those_of_plain_decoding(model: Path, monkeypatch: pytest.MonkeyPatch):
    """Guesses of heads that are fed as they should be often hold; a row that joins ends them for a while."""
    with Rig(model) as rig:
        plain = [rig.run(ASKED, 80, sampling=sampling).got for sampling in (GREEDY, SAMPLED)]
        then = ASKED + plain[0] + prompt(20, seed=4)
        turn = rig.run(then, 20)
    draft_always(monkeypatch, 2)
    with Rig(model, speculate=True, mtp=True) as rig:
        for sampling, expected in zip((GREEDY, SAMPLED), plain, strict=True):
            output = rig.run(ASKED, 80, sampling=sampling)
            assert output.got == expected
            assert output.sequence.stats.model_accepted > output.sequence.stats.model_drafted / 3 > 5
        again = rig.run(then, 20)
        assert (again.hot, again.got) == (turn.hot, turn.got)
        both = [rig.start(ASKED, 80, sampling=sampling) for sampling in (GREEDY, SAMPLED)]
        assert [output.tokens() for output in both] == plain
        rig.settle()


@pytest.mark.slow
@pytest.mark.parametrize("family", OTHERS)
def test_heads_of_other_families_change_no_answer(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """GLM's guess for each row of a batch."""
    folder = build_family(family, tmp_path / "model", changes=HEADS[family])
    add_heads(folder)
    asks = [(ASKED, GREEDY), (ASKED, SAMPLED), (prompt(60, seed=9), GREEDY)]
    with Rig(folder) as rig:
        plain = [rig.run(tokens, 30, sampling=sampling).got for tokens, sampling in asks]
    draft_always(monkeypatch, 2)
    with Rig(folder, speculate=True, mtp=True) as rig:
        first = rig.run(ASKED, 30)
        assert first.got == plain[0] and first.sequence.stats.model_drafted > 20
        both = [rig.start(tokens, 30, sampling=sampling) for tokens, sampling in asks]
        assert [output.tokens() for output in both] == plain
        if family == "glm_moe_dsa":
            assert all(output.sequence.stats.model_drafted > 20 for output in both)
        rig.settle()


def test_an_engine_finds_the_heads_and_counts_them(untaught: Path, monkeypatch: pytest.MonkeyPatch):
    draft_always(monkeypatch, 2)
    engine = Host(untaught)
    try:
        events, weights = (
            engine.ask(chat(max_tokens=30, temperature=0)),
            mx.load(str(untaught / "mtp.safetensors")),
        )
        usage, counts = finished(events).usage, engine.engine.engine_stats()
        assert counts["spec_decode_num_draft_tokens_of_draft_model_total"] == usage.model_drafted > 0
        assert isinstance(weights, dict)
        held = engine.engine.info.weight_bytes - sum(w.nbytes for w in weights.values())
        assert held == mlx_adapter.tree_bytes(engine.engine.loaded.model.parameters())
    finally:
        engine.close()


def test_heads_that_cannot_be_read_cost_the_guesses_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    draft_always(monkeypatch, 2)
    folder = build_family("qwen3_5", tmp_path / "model")
    add_heads(folder)
    weights = mx.load(str(folder / "mtp.safetensors"))
    assert isinstance(weights, dict)
    kept = {name: array for name, array in weights.items() if name != "mtp.fc.weight"}
    mx.save_safetensors(str(folder / "mtp.safetensors"), kept)
    with caplog.at_level(logging.WARNING):
        engine = Host(folder)
    try:
        events = engine.ask(chat(max_tokens=10))
        assert text_of(events) and not finished(events).usage.model_drafted
        assert "its MTP heads are not used" in caplog.text and "fc" in caplog.text
    finally:
        engine.close()
