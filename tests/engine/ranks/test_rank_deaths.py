"""A rank stands still at an exact moment of its work, the others go on until they wait for it; one of all is
killed or stopped. All end, start again, and what was there before is a hit."""

from __future__ import annotations

import itertools
import os
import signal
from pathlib import Path

import psutil
import pytest
from cold_files import all_on_disk, settled, unsettled
from daemon import READY_S, alive, family_model, own_usage, prose, restored, wait_until
from dying import BASE, CAP, MOMENTS, Asking, Dying

pytestmark = pytest.mark.slow

KILL, STOP = signal.SIGKILL, signal.SIGSTOP
Round = tuple[str, int, int, signal.Signals]
"""The moment, the rank that stands, the one that is killed or stopped."""

ROUNDS: dict[int, list[Round]] = {
    2: [
        ("loading", 0, 1, KILL),
        ("prefill", 1, 0, STOP),
        ("writing", 1, 1, KILL),
        ("restoring", 0, 1, STOP),
        ("decode", 0, 0, KILL),
    ],
    3: [("matching", 0, 1, STOP), ("restoring", 2, 2, KILL), ("writing", 0, 0, STOP)],
}
FAMILIES = {2: "llama", 3: "qwen3_next"}
"""Heads of the first are split, layers of the second."""


def rounds(ranks: int) -> list[Round]:
    """With RANK_ROUNDS=all every one that there is."""
    if os.environ.get("RANK_ROUNDS") != "all":
        return ROUNDS[ranks]
    numbers = range(ranks)
    cases = itertools.product(numbers, numbers, (KILL, STOP), (*MOMENTS, "matching"))
    return [(moment, stands, dies, how) for stands, dies, how, moment in cases]


@pytest.mark.parametrize("ranks", ROUNDS)
def test_a_rank_dies_at_each_moment(ranks: int, tmp_path: Path):
    """Requests of which nothing was sent are answered by the next engine."""
    dying = Dying(tmp_path, "--ranks", str(ranks), model=family_model(FAMILIES[ranks]))
    with dying.daemon as daemon:
        for seed, (moment, stands, dies, how) in enumerate(rounds(ranks)):
            print(f"{moment}: rank {stands} stands, {how.name} to rank {dies}", flush=True)
            dying.stop_at(f"{moment}@{stands}" if stands else moment)
            new = moment in ("prefill", "writing", "loading")
            prompt = prose(200, seed=seed + 5) if new else BASE
            asking = Asking(daemon, prompt, stream=True, max_tokens=30)
            wait_until(dying.stands, READY_S, daemon.show_stacks)
            lead = psutil.Process(daemon.engine_pid())
            others = [each for each in lead.children() if "--follow" in each.cmdline()]
            all_ranks = [lead, *sorted(others, key=lambda each: each.create_time())]
            assert len(all_ranks) == ranks and all_ranks[stands].pid == dying.engine()
            all_ranks[dies].send_signal(how)
            wait_until(lambda each=all_ranks: not any(map(alive, each)), why=daemon.logged)
            (dying.folder / "there").unlink()
            asking.join(READY_S)
            assert not asking.is_alive(), daemon.show_stacks()
            assert not asking.error or asking.heard or moment == "loading"
            again = daemon.messages(BASE, max_tokens=20)
            assert restored(own_usage(again)) > 0 and again["content"] == dying.base["content"]
            wait_until(lambda: settled(daemon), why=lambda: unsettled(daemon))
        assert all_on_disk(dying.cache) <= CAP
        family = [daemon.front(), *daemon.front().children(recursive=True)]
        assert daemon.stop() == 0
        wait_until(lambda: not any(map(alive, family)), why=daemon.logged)
