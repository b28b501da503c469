"""Rows of several adapters decode in one pass, and each says what it says alone."""

from __future__ import annotations

from pathlib import Path

import pytest
from adapters import make_adapter
from rig import Rig

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
