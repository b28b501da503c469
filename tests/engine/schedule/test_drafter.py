"""A drafter guesses by hidden states; answers, their KV and what is stored stay those of plain decoding."""

from __future__ import annotations

from pathlib import Path

import pytest
from cold_run import prompt
from drafters import KINDS, build_drafter
from families import build_family
from fast_or_slow import rest_slow
from guesses import draft_always
from host import Host, chat, finished
from rig import GREEDY, Rig

from omlxd.chat import Sampling
from omlxd.engine import mlx_adapter
from omlxd.errors import ModelError

SAMPLED = Sampling(temperature=0.9, top_p=0.9, top_k=20, seed=5)
ASKED = prompt(150, seed=3)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_family("qwen3", tmp_path_factory.mktemp("models") / "qwen3")


@pytest.fixture(scope="module")
def plain(model: Path) -> list[list[int]]:
    """Its answers to `ASKED` without guesses."""
    with Rig(model) as rig:
        return [rig.run(ASKED, 80, sampling=sampling).got for sampling in (GREEDY, SAMPLED)]


@pytest.fixture(scope="module", params=["eagle3", "dflash"])
def drafter(
    request: pytest.FixtureRequest,
    model: Path,
    plain: list[list[int]],
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    """It has learned the model's answers to `ASKED`."""
    folder = tmp_path_factory.mktemp("drafters") / str(request.param)
    losses = build_drafter(request.param, folder, model, [ASKED + answer for answer in plain])
    assert losses[1] < losses[0] / 2
    return folder


@pytest.mark.slow
def test_answers_and_their_kv_are_those_of_plain_decoding(
    model: Path,
    drafter: Path,
    plain: list[list[int]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    """Alone, in company, behind a hit and after a restart.

    A drafter that has learned one token ahead, and is fed as it should be, is often right.
    """
    then = ASKED + plain[0] + prompt(20, seed=4)
    with Rig(model) as rig:
        other = rig.run(prompt(60, seed=9), 40).got
        rig.run(ASKED, 80)
        turn = rig.run(then, 20)
    draft_always(monkeypatch, 4)
    with Rig(model, speculate=True, draft=drafter, root=tmp_path / "kv") as rig:
        for sampling, expected in zip((GREEDY, SAMPLED), plain, strict=True):
            output = rig.run(ASKED, 80, sampling=sampling)
            assert output.got == expected
            assert output.sequence.stats.model_accepted > output.sequence.stats.model_drafted / 20 > 5
        again = rig.run(then, 20)
        assert (again.hot, again.got) == (turn.hot, turn.got)
        asks = [(ASKED, 80, GREEDY), (ASKED, 80, SAMPLED), (prompt(60, seed=9), 40, GREEDY)]
        both = [rig.start(tokens, count, sampling=sampling) for tokens, count, sampling in asks]
        assert [output.tokens() for output in both] == [*plain, other]
        assert all(output.sequence.stats.model_drafted for output in both)
        accepted = [output.sequence.stats for output in both[:2]]
        assert all(stats.model_accepted > stats.model_drafted / 20 for stats in accepted)
        rig.settle()
    with Rig(model, speculate=True, draft=drafter, root=tmp_path / "kv") as rig:
        output = rig.run(then, 20)
        assert output.cold and output.got == turn.got
        assert output.sequence.stats.model_drafted


@pytest.mark.parametrize("kind", rest_slow(KINDS, "eagle3", "dflash"))
def test_a_drafter_that_knows_nothing_changes_no_answer(
    model: Path, plain: list[list[int]], tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
):
    draft_always(monkeypatch, 3)
    build_drafter(kind, tmp_path / kind, model)
    with Rig(model, speculate=True, draft=tmp_path / kind) as rig:
        both = [rig.start(ASKED, 80, sampling=sampling) for sampling in (GREEDY, SAMPLED)]
        assert [output.tokens() for output in both] == plain
        assert all(output.sequence.stats.model_drafted > 100 for output in both)
        rig.settle()


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({"hidden_size": 32}, "hidden size is 32, and the model's 64"),
        ({"vocab_size": 300}, "vocabulary is 300, and the model's"),
    ],
    ids=["hidden", "vocabulary"],
)
def test_a_drafter_of_another_model_is_an_error_that_lasts(
    model: Path, tmp_path: Path, config: dict[str, int], told: str
):
    for kind in ("eagle3", "dflash"):
        build_drafter(kind, tmp_path / kind, model, **config)
        with pytest.raises(ModelError, match=told) as caught:
            Rig(model, speculate=True, draft=tmp_path / kind)
        assert "name a drafter that was made for this model" in caught.value.message


def test_an_engine_takes_a_drafter_without_a_tokenizer_for_its_draft_model(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    draft_always(monkeypatch, 2)
    build_drafter("dflash", tmp_path / "dflash", model)
    engine = Host(model, draft=str(tmp_path / "dflash"))
    try:
        usage = finished(engine.ask(chat(max_tokens=30, temperature=0))).usage
        counts = engine.engine.engine_stats()
        assert counts["spec_decode_num_draft_tokens_of_draft_model_total"] == usage.model_drafted > 0
        loaded = engine.engine.loaded
        assert engine.engine.info.weight_bytes > mlx_adapter.tree_bytes(loaded.model.parameters())
    finally:
        engine.close()
