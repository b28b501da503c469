"""A draft model guesses; answers, their distribution and their KV stay those of plain decoding."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from cold_run import prompt
from daemon import wait_until
from families import build_family
from fast_or_slow import rest_slow
from guesses import draft_always, like_it
from host import Host, chat, finished, text_of
from rig import GREEDY, Output, Rig

from omlxd import wire
from omlxd.chat import AnswerFormat, Sampling
from omlxd.engine import mlx_adapter
from omlxd.engine.schedule.decode_batch import DecodeBatch
from omlxd.engine.sequence.sequence import Prompt, SamplerRow, Sequence
from omlxd.engine.server.host import EngineHost
from omlxd.engine.speculate import draft_model
from omlxd.engine.speculate.controller import MOST_CREDIT, Speculation
from omlxd.engine.speculate.row import DRAFT, KINDS, HoldRate, Offer, RowSpeculator
from omlxd.errors import ModelError

SAMPLED = Sampling(temperature=0.9, top_p=0.9, top_k=20, seed=5)
PENALISED = Sampling(temperature=0.9, seed=3, repetition_penalty=1.3, frequency_penalty=0.7)
FREE = Sampling(temperature=0.7)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """One, and a draft model that agrees with it now and then."""
    folder = tmp_path_factory.mktemp("models")
    model = build_family("qwen3", folder / "qwen3")
    return model, like_it(model, folder / "draft", 0.02)


def drafted(rig: Rig) -> list[int]:
    assert rig.scheduler.speculation is not None
    return rig.scheduler.speculation.counts[None].of_model


@pytest.mark.parametrize(
    "sampling",
    rest_slow([GREEDY, SAMPLED, PENALISED], SAMPLED),
    ids=["greedy", "seeded", "penalised"],
)
def test_the_answer_and_its_kv_are_those_of_plain_decoding(
    models: tuple[Path, Path], sampling: Sampling, monkeypatch: pytest.MonkeyPatch
):
    model, draft = models
    asked = prompt(150, seed=3)
    with Rig(model) as rig:
        plain = rig.run(asked, 90, sampling=sampling).got
        then = asked + plain + prompt(20, seed=4)
        turn = rig.run(then, 20)
    draft_always(monkeypatch)
    with Rig(model, speculate=True, draft=draft) as rig:
        output = rig.run(asked, 90, sampling=sampling)
        assert output.got == plain
        checks, guesses, held = drafted(rig)
        assert checks > 10 and 0 < held < guesses
        assert (output.sequence.stats.model_drafted, output.sequence.stats.model_accepted) == (guesses, held)
        again = rig.run(then, 20)
        assert (again.hot, again.got) == (turn.hot, turn.got)


def test_each_row_of_a_batch_takes_its_own_number_of_guesses(
    models: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
):
    """Rows of unequal length come and go, one of them cancelled, one with logprobs."""
    model, draft = models
    asks: list[tuple[int, dict[str, Any]]] = [
        (30, {"n": 60}),
        (150, {"n": 30, "sampling": SAMPLED}),
        (200, {"n": 45, "sampling": PENALISED}),
        (64, {"n": 35, "top_logprobs": 2}),
    ]
    with Rig(model) as rig:
        alone = [rig.run(prompt(length, seed=length), **ask) for length, ask in asks]
    draft_always(monkeypatch)
    with Rig(model, speculate=True, draft=draft) as rig:
        cancelled = rig.start(prompt(20, seed=9), 300)
        cancelled.first.wait(60)
        running: list[Output] = []
        for length, ask in asks:
            running.append(rig.start(prompt(length, seed=length), **ask))
            wait_until(lambda: len(running[-1].got) >= 5 or running[-1].reason)
        rig.scheduler.cancel(cancelled.sequence)
        for output, plain in zip(running, alone, strict=True):
            assert output.tokens() == plain.got
        assert all(each is not None for each in running[3].likelihoods)
        assert sum(output.sequence.stats.model_accepted > 0 for output in running) >= 3
        rig.settle()


@pytest.mark.slow
def test_draws_without_a_seed_have_the_distribution_of_plain_decoding(
    models: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
):
    """Of the second and third tokens, by a chi-squared test against plain draws."""
    model, draft = models
    asked, few = prompt(20, seed=8), Sampling(temperature=0.8, top_k=3)

    def draws(rig: Rig) -> Counter[tuple[int, ...]]:
        return Counter(tuple(rig.run(asked, 3, sampling=few).got[1:]) for _ in range(200))

    with Rig(model) as rig:
        plain = draws(rig)
    draft_always(monkeypatch, width=2)
    with Rig(model, speculate=True, draft=draft) as rig:
        guessed = draws(rig)
        assert 60 < drafted(rig)[2] < drafted(rig)[1]
    common = [key for key in plain | guessed if plain[key] + guessed[key] >= 10]
    off = sum((plain[key] - guessed[key]) ** 2 / (plain[key] + guessed[key]) for key in common)
    assert len(common) > 2 and off < 3 * len(common) + 12, (plain, guessed)


def test_a_model_that_guesses_as_it_answers_has_every_guess_hold(
    models: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
):
    """Sampled too: both draw with the same noise."""
    model, _ = models
    draft_always(monkeypatch)
    with Rig(model, speculate=True, draft=model) as rig:
        output = rig.run(prompt(100, seed=1), 60, sampling=FREE)
        assert output.sequence.stats.model_accepted >= 0.95 * output.sequence.stats.model_drafted > 20


def test_an_engine_counts_its_memory_and_its_guesses_and_grammars_hold(
    models: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
):
    model, draft = models
    schema = {"type": "object", "properties": {"a": {"type": "string"}, "b": {"type": "integer"}}}
    request = chat(max_tokens=60, temperature=0.9, seed=3, format=AnswerFormat("json", schema=schema))
    engine = Host(model)
    plain, alone = engine.ask(request), engine.engine.loaded.weight_bytes
    engine.close()
    draft_always(monkeypatch)
    engine = Host(model, draft=str(draft))
    try:
        events = engine.ask(request)
        assert engine.engine.info.weight_bytes == 2 * alone
        usage, counts = finished(events).usage, engine.engine.engine_stats()
        assert text_of(events) == text_of(plain)
        assert counts["spec_decode_num_draft_tokens_of_draft_model_total"] == usage.model_drafted > 0
        assert counts["spec_decode_draft_model"] == 1
        memory, loaded = engine.engine.scheduler.memory, engine.engine.loaded
        sequence = Sequence(0, [1] * 1000, Prompt(1000, b""), SamplerRow(None, max_new=500))
        assert memory is not None and memory.draft_model is not None and loaded.layout is not None
        with_draft, memory.draft_model = memory.need(sequence), None
        assert with_draft - memory.need(sequence) == loaded.layout.nbytes(1536)
    finally:
        engine.close()


@pytest.mark.slow
def test_a_long_prompt_is_read_from_its_end_and_in_chunks(
    models: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
):
    model, _ = models
    monkeypatch.setattr(draft_model, "DRAFT_CONTEXT", 200)
    draft_always(monkeypatch)
    with Rig(model, speculate=True, draft=model) as rig:
        asked = prompt(900, seed=2)
        output = rig.run(asked, 60)
        assert output.sequence.stats.model_drafted > 20
        assert rig.scheduler.speculation is not None
        shared = rig.scheduler.speculation.draft_model
        assert shared is not None and shared.kv_bytes(output.sequence) < shared.loaded.layout.nbytes(600)  # pyright: ignore


def test_a_tokenizer_of_another_model_is_refused_before_weights_are_read(
    models: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    model, _ = models
    other = like_it(model, tmp_path / "other", 0)
    file = other / "tokenizer.json"
    file.write_text(file.read_text().replace('"!"', '"¡"'))
    with pytest.raises(ModelError, match="draft-model: other has another tokenizer than qwen3"):
        Rig(model, speculate=True, draft=other)
    monkeypatch.setattr(mlx_adapter, "load", lambda *_: pytest.fail("weights were read first"))
    load = wire.Load(model_path=str(model), model_id="m", cache=wire.CacheSettings(), draft_path=str(other))
    with pytest.raises(ModelError, match="draft-model: other has another tokenizer than m "):
        EngineHost(load, None, None)  # type: ignore[arg-type]


@pytest.mark.parametrize("family", ["gemma3_text", "qwen3_5"])
def test_a_draft_model_that_cannot_take_guesses_back_is_refused(
    models: tuple[Path, Path], family: str, tmp_path: Path
):
    with pytest.raises(ModelError, match="keeps more than KV of each token"):
        Rig(models[0], speculate=True, draft=build_family(family, tmp_path / family))


# --------------------------------------------------------------------------- whether it pays


def measured(plain: float, checks: dict[int, float], drafts: dict[int, float]) -> Speculation:
    shared = Speculation(credit=MOST_CREDIT)
    shared.times.record_step(1, plain)
    for width, seconds in checks.items():
        for _ in range(40):
            shared.times.record_verify(1, width, seconds)
    for width, seconds in drafts.items():
        shared.record_draft(1, width, seconds)
    return shared


def test_it_guesses_where_its_time_and_the_checks_are_less_than_the_tokens():
    checks = {2: 1.1, 4: 1.2, 8: 1.4, 15: 1.8}
    cheap = measured(1.0, checks, {2: 0.1, 4: 0.2, 8: 0.4, 15: 0.8})
    assert cheap.draft_width([Offer(0.5, 0)], [0.8]) in (4, 7)
    assert not cheap.draft_width([Offer(0.5, 0)], [0.05]), "its guesses fail"
    assert not cheap.draft_width([Offer(0.9, 15)], [0.8]), "a row's own guesses cost nothing"
    assert not cheap.draft_width([Offer(0.5, 0)], [0.0]), "a row with images"
    dear = measured(1.0, checks, {2: 1.8, 4: 3.6, 8: 7.2, 15: 13.0})
    assert not dear.draft_width([Offer(0.5, 0)], [0.95])


def test_what_failed_is_tried_again_by_later_requests():
    shared = measured(1.0, {2: 1.2}, {2: 0.1})
    for _ in range(40):
        shared.rates[DRAFT].record(0, 1)
    assert not shared.draft_width([Offer(0.5, 0)], [shared.rates[DRAFT].value])
    for _ in range(50):
        shared.rates[DRAFT].forget()
    assert shared.draft_width([Offer(0.5, 0)], [shared.rates[DRAFT].value])


def test_a_rows_guesses_are_the_draft_models_once_it_has_some():
    row = RowSpeculator([1, 2, 3, 4], None, {kind: HoldRate(0.7 if kind == DRAFT else 0.5) for kind in KINDS})
    assert (row.offer(), row.draft_rate, row.of_model) == (Offer(0.5, 0), 0.7, False)
    row.take_draft([5, 6, 7])
    assert row.of_model and row.offer() == Offer(0.7, 3)
    row.add_tokens([9], checked=3)
    assert row.draft_rate < 0.4 and not row.of_model


def test_a_row_that_joins_does_not_undo_what_the_draft_model_has_read(
    models: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
):
    model, draft = models
    draft_always(monkeypatch)
    drafts: list[Any] = []
    compose = DecodeBatch._compose

    def composed(self: DecodeBatch) -> None:
        compose(self)
        drafts.append(self._drafts)

    monkeypatch.setattr(DecodeBatch, "_compose", composed)
    with Rig(model, speculate=True, draft=draft) as rig:
        outputs = [rig.start(prompt(1200, seed=1), 60)]
        for seed in range(10, 14):
            assert outputs[-1].first.wait(60)
            outputs.append(rig.start(prompt(30, seed=seed), 60))
        for output in outputs:
            output.tokens()
    assert len(drafts) > 4 and all(each is drafts[0] for each in drafts)
