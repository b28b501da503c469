"""Whether the rank at the other end lives, and what ranks agree on. No process, no clock but the test's."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from daemon import family_model, wait_until

from omlxd import wire
from omlxd.engine.mlx_adapter import LinkTimes
from omlxd.engine.schedule.counts import Counts
from omlxd.engine.server.ranks.figures import OLD_S, LinkFigures
from omlxd.engine.server.ranks.lead import share_of_load
from omlxd.engine.server.ranks.lead_bridge import MOST_ROUNDS, _Agreement
from omlxd.engine.server.ranks.link import BUSY_S, LOADING_S, PING_S, SILENCE_S, Link, silence_of
from omlxd.errors import ModelError
from omlxd.wire import plan


def test_a_rank_that_is_heard_lives():
    """Pings are answered by the thread that reads, whatever the others do; silence counts from the first
    frame on, as a rank that starts says nothing for seconds."""
    now = [100.0]
    ours, theirs = socket.socketpair()
    lead = Link(ours, plan.FromRank, lambda: now[0])
    other = Link(theirs, plan.ToRank, lambda: now[0], lambda: plan.Pong(pid=7))
    heard: list[Any] = []
    came = threading.Event()

    def take(message: Any) -> None:
        heard.append(message)
        came.set()

    threads = [threading.Thread(target=link.read, args=(take,)) for link in (lead, other)]
    threads[1].start()
    assert lead.silence() == 0
    now[0] += 100 * SILENCE_S
    assert lead.silence() == 0
    lead.send(plan.Ping())
    threads[0].start()
    other.send(plan.Matched(7, 64))
    assert came.wait(30)
    wait_until(lambda: lead.last.pid == 7)
    assert heard == [plan.Matched(7, 64)]  # Neither Ping nor Pong.
    assert lead.silence() == 0
    now[0] += 100 * SILENCE_S  # This process stood still, and perhaps has not read yet.
    assert lead.silence() == 2 * PING_S
    for _ in range(10):
        now[0] += PING_S
        silent = lead.silence()
    assert silent == 12 * PING_S > SILENCE_S
    came.clear()
    other.send(plan.Matched(7, 64))
    assert came.wait(30)
    assert lead.silence() == 0
    ours.shutdown(socket.SHUT_RDWR)
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    lead.send(plan.Ping())  # The other end is gone: nothing is raised.


def test_a_process_that_waits_for_a_processor_is_not_stopped():
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        assert silence_of(process.pid, loads=False) == BUSY_S
        process.send_signal(signal.SIGSTOP)
        status = psutil.Process(process.pid).status
        wait_until(lambda: status() == psutil.STATUS_STOPPED)
        assert silence_of(process.pid, loads=True) == SILENCE_S
    finally:
        process.kill()
        process.communicate()
    assert silence_of(process.pid, loads=True) == SILENCE_S  # It is gone.
    assert silence_of(None, loads=True) == LOADING_S and silence_of(None, loads=False) == SILENCE_S


class _Ranks:
    """A bridge and a lead; `finds`: blocks that each rank finds within a limit, round by round."""

    def __init__(self, *finds: list[int]):
        self.finds, self.limits = finds, list[int]()
        self.store = SimpleNamespace(block_size=64)
        self.lead = SimpleNamespace(world=len(finds), match=self._match, forget=lambda row: None)
        self._later: list[Callable[[], None]] = []

    def _found(self, rank: int, limit: int) -> int:
        found = self.finds[rank]
        return 64 * min(limit, found.pop(0) if len(found) > 1 else found[0])

    def _match(self, row: int, limit: int, take: Callable[[int, int], None]) -> None:
        self.limits.append(limit)
        for rank in range(1, len(self.finds)):
            self._later.append(lambda rank=rank, limit=limit: take(rank, self._found(rank, limit)))

    def restore(self, sequence: Any, limit: int, done: Callable[[], None]) -> None:
        sequence.kv.length = self._found(0, limit)
        done()

    def agree(self) -> int:
        sequence = SimpleNamespace(kv=SimpleNamespace(length=0))
        ready: list[int] = []
        _Agreement(self, sequence, 1, lambda: ready.append(sequence.kv.length)).restore(20)  # type: ignore[arg-type]
        while self._later:
            assert not ready
            self._later.pop(0)()
        assert len(ready) == 1
        return ready[0] // 64


@pytest.mark.parametrize(
    ("finds", "agreed", "limits"),
    [
        ([[9], [9]], 9, [20]),
        ([[9], [5]], 5, [20, 5]),
        ([[3], [9], [5]], 3, [20, 3]),
        ([[9], [0]], 0, [20, 0]),
        ([[8, 4], [7]], 4, [20, 7, 4]),  # Blocks went, or a checkpoint stands earlier.
        ([[9, 8, 6, 5], [8, 7, 5, 4]], 0, [20, 8, 7, 0]),  # They would go on for ever.
    ],
)
def test_a_hit_is_what_all_ranks_have(finds: list[list[int]], agreed: int, limits: list[int]):
    ranks = _Ranks(*finds)
    assert ranks.agree() == agreed
    assert ranks.limits == limits
    assert len(ranks.limits) <= MOST_ROUNDS + 1


def test_what_several_ranks_can_not_do(tmp_path: Path):
    model = str(family_model("llama"))
    load = wire.Load(model, "m", wire.CacheSettings(hot_cache_bytes=100, cold_cache_bytes=90), ranks=2)
    shared = share_of_load(load)
    assert (shared.cache.hot_cache_bytes, shared.cache.cold_cache_bytes) == (50, 45)
    assert (shared.speculate, shared.share_prefix) == (False, "off")
    for more, why in (
        ({"adapter": "/somewhere"}, "LoRA adapter"),
        ({"draft_path": "/somewhere"}, "draft model"),
        ({"cache": wire.CacheSettings(enabled=False)}, "--no-cache"),
        ({"model_path": str(family_model("gemma3_text"))}, "mlx-lm splits the heads of"),
        ({"ranks": 3}, "which 3 does not divide"),
        ({"link": "nccl"}, "GPUs of CUDA"),
    ):
        with pytest.raises(ModelError, match=why):
            share_of_load(
                wire.Load(**{"model_path": model, "model_id": "m", "cache": load.cache, "ranks": 2} | more)
            )


def test_the_link_is_timed_again_where_it_was_used_and_is_told_beside_the_steps_since():
    now, counts, values = 0.0, Counts(), {}
    link = LinkFigures(counts, lambda: now)
    link.take(LinkTimes(exchanges=10, step_s=0.001, bytes_per_s=1e9))
    link.add_to(values)
    assert (values["link_latency_us"], values["link_step_share"]) == (pytest.approx(100), 0)
    now = 2 * OLD_S
    assert not link.is_old  # Nobody has used it.
    counts.decodes, counts.decode_s = 4, 0.02
    link.add_to(values)
    assert values["link_step_share"] == pytest.approx(0.2) and link.is_old
    link.take(LinkTimes(exchanges=10, step_s=0.002, bytes_per_s=1e9))
    link.add_to(values)  # By the steps before, until there is one.
    assert values["link_step_share"] == pytest.approx(0.4) and not link.is_old
