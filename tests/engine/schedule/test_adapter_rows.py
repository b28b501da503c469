"""Rows of several adapters decode in one pass, and each says what it says alone."""

from __future__ import annotations

from pathlib import Path

import pytest
from adapters import make_adapter
from guesses import guess_by
from rig import Rig

from omlxd.engine.metrics import adapter_metrics, metrics_of
from omlxd.engine.schedule.speculation import WIDTHS
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
        assert drafted == output.sequence.drafted > 0
        assert values["spec_decode_num_accepted_tokens_total"] == output.sequence.accepted
        held = [count for name, count in values.items() if "accepted_tokens_per_pos_" in name]
        assert len(held) == WIDTHS[-1] and sum(held) == output.sequence.accepted
        assert held == sorted(held, reverse=True) and held[0] <= values["spec_decode_num_drafts_total"]
