"""Rows of several adapters decode in one pass, and each says what it says alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from adapters import make_adapter
from guesses import guess_by
from rig import Output, Rig

from omlxd.engine.server.metrics import adapter_metrics, metrics_of
from omlxd.engine.speculate.verify import WIDTHS
from omlxd.errors import OmlxdError
from omlxd.models import demo

PROMPT = list(range(20, 120))


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return demo.build_demo(tmp_path_factory.mktemp("models") / "base")


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_rows_say_what_they_say_alone(base: Path, tmp_path: Path, kind: str):
    with Rig(base) as rig:
        folders = [make_adapter(base, tmp_path / str(n), n, rank=2 * n, fine_tune_type=kind) for n in (1, 2)]
        one, two = rig.on_engine(lambda: [rig.loaded.adapters.add(str(folder)) for folder in folders])
        kinds = [None, one, two, one, None]
        alone = {each: rig.run(PROMPT, n=24, adapter=each).tokens() for each in (None, one, two)}
        assert len({tuple(tokens) for tokens in alone.values()}) == 3
        widths: set[tuple[int, int]] = set()  # Rows of a batch, and how many adapters they have.

        def look() -> None:
            batches = [batch.rows for batch in rig.scheduler._batches]
            widths.update((len(rows), len({row.adapter for row in rows})) for rows in batches)

        rig.scheduler.watchdog.check = lambda sequences: look()  # It is asked at each turn.
        started = [rig.start(PROMPT, n=24, adapter=each) for each in kinds]
        assert [output.tokens() for output in started] == [alone[each] for each in kinds]
        rig.settle()
    mixed = {kinds for _, kinds in widths}
    assert (max(mixed) == 3 and (5, 3) in widths) if kind == "lora" else mixed == {1}


def test_no_adapters_blocks_are_kept_as_the_models(base: Path, tmp_path: Path):
    """The scheduler offers them to the adapter's own store, here to none."""
    with Rig(base) as rig:
        folder = str(make_adapter(base, tmp_path / "a", 1))
        adapter = rig.on_engine(lambda: rig.loaded.adapters.add(folder))
        rig.run(PROMPT, n=2, adapter=adapter)
        assert rig.store.stats.puts == 0 and rig.run(PROMPT, n=2).hot == 0
        assert rig.run(PROMPT, n=2, adapter=adapter).hot == 0
        assert rig.run(PROMPT, n=2).hot > 0


def test_guesses_and_tokens_are_counted_by_whose_they_are(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    guess_by(monkeypatch, lambda tokens: tokens[-2:])
    with Rig(base, speculate=True) as rig:
        folder = str(make_adapter(base, tmp_path / "a", 1))
        adapter = rig.on_engine(lambda: rig.loaded.adapters.add(folder))
        started = [rig.start(PROMPT, n=n, adapter=each) for n, each in ((9, None), (17, adapter))]
        assert all(output.tokens() for output in started)
        rig.settle()
        both = metrics_of(rig.scheduler, 0), adapter_metrics(rig.scheduler, adapter)
    for output, values, tokens in zip(started, both, (9, 17), strict=True):
        assert values["prompt_tokens_total"] == len(PROMPT)
        assert values["generation_tokens_total"] == tokens
        drafted = values["spec_decode_num_draft_tokens_total"]
        assert drafted == output.sequence.stats.drafted > 0
        assert values["spec_decode_num_accepted_tokens_total"] == output.sequence.stats.accepted
        held = [count for name, count in values.items() if "accepted_tokens_per_pos_" in name]
        assert len(held) == WIDTHS[-1] and sum(held) == output.sequence.stats.accepted
        assert held == sorted(held, reverse=True) and held[0] <= values["spec_decode_num_drafts_total"]


def test_a_compiled_step_inside_an_adapters_prefill_is_the_bases(base: Path, tmp_path: Path):
    """A compiled step calls the model when it is traced: its rows have no adapter of the pass around it."""

    class Traced:
        compiles = True

        def __init__(self, model: Any):
            self.model = model

        def __call__(self, tokens: Any, cache: Any, *_: Any) -> Any:
            return self.model(tokens, cache=cache)

        def most_tokens(self, cache: Any) -> int:
            return 0

    long = [(place * 7) % 300 + 5 for place in range(1200)]
    with Rig(base) as rig:
        folder = str(make_adapter(base, tmp_path / "a", 1))
        adapter = rig.on_engine(lambda: rig.loaded.adapters.add(folder))
        alone = rig.run(PROMPT, n=60).got
        rig.scheduler.compiled = Traced(rig.loaded.model)  # type: ignore[assignment]
        rig.scheduler.step_due = lambda: rig.scheduler.decodes
        row = rig.start(PROMPT, n=60)
        assert row.first.wait(60)
        rig.start(long, n=1, adapter=adapter).tokens()
        assert row.tokens() == alone


def test_a_request_whose_adapter_has_left_is_not_computed_with_others(base: Path, tmp_path: Path):
    with Rig(base) as rig:
        one, two = rig.on_engine(
            lambda: [rig.loaded.adapters.add(str(make_adapter(base, tmp_path / str(n), n))) for n in (1, 2)]
        )
        alone = rig.run(PROMPT, n=8, adapter=one).tokens()
        rig.on_engine(lambda: rig.loaded.adapters.remove(two))
        outputs: list[Output] = []
        rig.on_engine(lambda: outputs.extend(rig.start(PROMPT, n=8, adapter=each) for each in (one, two)))
        assert outputs[0].tokens() == alone
        with pytest.raises(OmlxdError, match="adapter is being unloaded"):
            outputs[1].tokens()
