"""A prefix read from its end and computed from its front: each block once, in the time that both leave."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omlxd.engine.kvio.reads.rates import LEAST_S, Rates
from omlxd.engine.kvio.reads.tail_read import TailRead


class World:
    """A disk that gives a block every `read_s`, an engine that computes one in `compute_s`, and their clock.

    told      what the rates say at first of how long a block takes to be read
    beside_s  that the engine gives to others after each pass
    """

    def __init__(
        self,
        blocks: int,
        read_s: float,
        compute_s: float,
        *,
        threads: int = 4,
        told: float = 0.0,
        known: bool = True,
        start: int = 0,
        hot: frozenset[int] = frozenset(),
        bad: frozenset[int] = frozenset(),
        gone: frozenset[int] = frozenset(),
        cancel_at: float = float("inf"),
        beside_s: float = 0.0,
    ):
        self.now, self._events, self._order = 0.0, [], itertools.count()
        self._disk_free, self._bad, self._compute_s, self._read_s = 0.0, bad, compute_s, read_s
        self._beside_s = beside_s
        self.read: list[int] = []
        self.computed: list[int] = []
        self.taken: list[int] = []
        self.cancelled = self.ended = False
        self.rates = Rates(1, 1)
        self.rates.read = 1 / (told or read_s)
        self.rates.prefill = 1 / compute_s if known else 0.0
        self.tail: TailRead[int] = TailRead(
            start,
            blocks,
            {index: index for index in hot if index >= start},
            set(gone),
            read=self._load,
            submit=self._submit,
            post=lambda call: self._at(self.now, call),
            over=lambda: self.cancelled,
            rates=self.rates,
            threads=threads,
            clock=lambda: self.now,
        )
        self.tail.pump()
        if cancel_at < float("inf"):
            self._at(cancel_at, self._cancel)

    def _at(self, when: float, call: Callable[[], object]) -> None:
        heapq.heappush(self._events, (when, next(self._order), call))

    def _load(self, index: int) -> int | None:
        self.read.append(index)
        return None if index in self._bad else index

    def _submit(self, call: Callable[[], None]) -> None:
        self._disk_free = max(self.now, self._disk_free) + self._read_s
        self._at(self._disk_free, call)

    def _cancel(self) -> None:
        self.cancelled = True

    def _look(self) -> None:
        tail = self.tail
        if self.cancelled:
            self.ended = True
            tail.stop()
            return
        tail.news()
        self.taken += tail.take()
        if tail.at == tail.end:
            self.ended = True
            tail.stop()
        elif count := tail.claim():
            assert tail.at + count <= tail.end
            first = tail.at

            def done() -> None:
                self.computed += range(first, first + count)
                if not self.rates.prefill:
                    self.rates.prefill = 1 / self._compute_s
                tail.at = first + count
                self._look()

            self._at(self.now + count * self._compute_s + self._beside_s, done)
        else:
            tail.wait(self._look)

    def run(self) -> float:
        """Seconds until the whole prefix is there."""
        self._look()
        ended_at = 0.0
        while self._events:
            self.now, _, call = heapq.heappop(self._events)
            call()
            ended_at = ended_at or (self.now if self.ended else 0.0)
        assert self.ended, "it stands still"
        return ended_at


def limit(blocks: int, read_s: float, compute_s: float) -> float:
    return blocks / (1 / read_s + 1 / compute_s)


@pytest.mark.parametrize("read_s", [0.05, 0.2, 1.0])
@pytest.mark.parametrize("compute_s", [0.05, 0.2, 1.0])
def test_both_together_take_little_more_than_the_least_time(read_s: float, compute_s: float):
    world = World(200, read_s, compute_s)
    took, least = world.run(), limit(200, read_s, compute_s)
    if compute_s > 9 * read_s:
        assert not world.computed and took == pytest.approx(200 * read_s)
    else:
        assert took <= 1.05 * least + 2 * max(read_s, compute_s)
    assert not set(world.read) & set(world.computed)


@settings(deadline=None, max_examples=300)
@given(
    blocks=st.integers(1, 120),
    read_s=st.floats(0.001, 2.0),
    compute_s=st.floats(0.001, 2.0),
    wrong=st.floats(0.05, 20.0),
    threads=st.integers(1, 8),
    known=st.booleans(),
    data=st.data(),
)
def test_every_block_comes_once(
    blocks: int,
    read_s: float,
    compute_s: float,
    wrong: float,
    threads: int,
    known: bool,
    data: st.DataObject,
):
    some = st.frozensets(st.integers(0, blocks - 1), max_size=8)
    start = data.draw(st.integers(0, blocks - 1))
    hot, bad, gone = data.draw(some), data.draw(some), data.draw(some)
    gone -= hot
    world = World(
        blocks,
        read_s,
        compute_s,
        threads=threads,
        told=read_s * wrong,
        known=known,
        start=start,
        hot=hot,
        bad=bad,
        gone=gone,
    )
    world.run()
    got = world.computed + world.taken
    assert sorted(got) == list(range(start, blocks)), "each is there, and none twice"
    assert len(set(world.read)) == len(world.read)
    assert not set(world.read) & (hot | gone), "what is there is not read, nor what is gone"
    assert not (set(world.read) - bad) & set(world.computed), "nothing is both read and computed"


@settings(deadline=None, max_examples=200)
@given(
    blocks=st.integers(20, 150),
    read_s=st.floats(0.01, 1.0),
    ratio=st.floats(0.02, 50.0),
    wrong=st.floats(0.1, 10.0),
    threads=st.integers(1, 8),
)
def test_it_takes_no_longer_than_the_faster_of_both(
    blocks: int, read_s: float, ratio: float, wrong: float, threads: int
):
    """But for what an estimate that was wrong at first has cost: a first pass, and reads at one time."""
    compute_s = read_s * ratio
    took = World(blocks, read_s, compute_s, threads=threads, told=read_s * wrong).run()
    slack = (threads + 1) * read_s + max(LEAST_S, 2 * compute_s)
    assert took <= min(blocks * read_s, blocks * compute_s) * 1.1 + slack


@given(cancel_at=st.floats(0.0, 30.0), compute_s=st.floats(0.01, 3.0), threads=st.integers(1, 4))
@settings(deadline=None)
def test_a_cancelled_one_ends_with_the_reads_under_way(cancel_at: float, compute_s: float, threads: int):
    world = World(60, 0.5, compute_s, threads=threads, cancel_at=cancel_at)
    took = world.run()
    assert took <= max(cancel_at, 0) + max(60 * compute_s / 2, threads * 0.5) + 1
    assert not world.tail._reading


def test_the_reader_goes_on_while_the_engine_computes_for_others():
    world = World(200, 0.1, 0.02, beside_s=2.0)
    assert world.run() <= 13.0
    assert 80 <= len(world.taken) <= 120, "a pass of 25 blocks takes as long as reading as many"


def test_reading_that_proves_fast_is_left_alone():
    world = World(400, 0.001, 0.05, told=1.0)
    assert world.run() < 0.6
    assert len(world.computed) <= 2, "a first pass, since the disk was thought slow"


def test_a_disk_that_fails_leaves_everything_to_the_engine():
    world = World(50, 0.1, 0.05, bad=frozenset(range(50)))
    assert world.run() < 50 * 0.05 + 1
    assert sorted(world.computed) == list(range(50))


def test_a_read_that_raises_is_a_block_that_can_not_be_read():
    world = World(10, 0.1, 0.05)

    def fail(index: int) -> int:
        raise MemoryError

    world.tail._read = fail
    world.run()
    assert sorted(world.computed) == list(range(10))
