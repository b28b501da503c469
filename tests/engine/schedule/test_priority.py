"""Who goes first by priority, and that nobody starves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from cold_run import prompt
from families import build_family
from hypothesis import given
from hypothesis import strategies as st
from kv_fakes import check_pool
from rig import BLOCK, Output, Rig

from omlxd.chat import Sampling
from omlxd.engine.schedule.bridges import Bridges
from omlxd.engine.schedule.prefill import PrefillBudget
from omlxd.engine.schedule.scheduler import Scheduler
from omlxd.engine.schedule.waiting.priority import PATIENCE, Levels, later_ones
from omlxd.engine.schedule.waiting.queue import RequestQueue
from omlxd.engine.sequence.sampling import UNNAMED, RowSampling, SamplerRow
from omlxd.engine.sequence.sequence import Prompt, Sequence, State

GREEDY = RowSampling.of(Sampling(temperature=0.0), UNNAMED)
numbers = st.integers(-3, 3)


def sequence(
    priority: int = 0, session: str = "", client: str = "", side: bool = False, length: int = 1
) -> Sequence:
    prompt = Prompt(length, bytes(32), client=client, session=session, priority=priority, side=side)
    return Sequence(0, [1] * length, prompt, SamplerRow(GREEDY, max_new=1))


def line_of(*sequences: Sequence) -> RequestQueue:
    line = RequestQueue()
    for one in sequences:
        line.add_request(one)
    return line


def take(line: RequestQueue, running: list[Sequence] | None = None) -> Sequence:
    following = line.next_request(running or [])
    assert following is not None
    line.take_request(following)
    return following


# --------------------------------------------------------------------------- slots


def test_lower_numbers_go_first_and_the_same_number_in_order_of_arrival():
    waiting = [sequence(number) for number in (1, 0, -2, 0, 1, 5)]
    line = line_of(*waiting)
    taken = [take(line) for _ in waiting]
    assert [waiting.index(one) for one in taken] == [2, 1, 3, 0, 4, 5]


@given(number=numbers, asked=st.lists(st.tuples(st.sampled_from("ab"), st.sampled_from("xyz")), max_size=60))
def test_a_number_that_all_have_changes_nothing(number, asked):
    def order(priority: int) -> list[int]:
        waiting = [sequence(priority, session, client) for client, session in asked]
        line, running = line_of(*waiting), list[Sequence]()
        for _ in waiting:
            running = [*running, take(line, running)]
        return [waiting.index(one) for one in running]

    assert order(number) == order(0)


@given(st.data())
def test_nobody_waits_for_ever(data):
    """A request that comes, alone with its number, has a slot within the bound, whatever comes later."""
    line = line_of(*map(sequence, data.draw(st.lists(numbers, max_size=12))))
    for _ in range(data.draw(st.integers(0, 2 * PATIENCE))):
        line.add_request(sequence(data.draw(numbers)))
        take(line)
    mine = sequence(100, client="mine")
    others = len({one.prompt.priority for one in line})
    line.add_request(mine)
    for _turn in range((others + 1) * (PATIENCE + 1)):
        for number in data.draw(st.lists(st.integers(-3, 200).filter(lambda n: n != 100), max_size=2)):
            line.add_request(sequence(number, client="crowd"))
        if take(line) is mine:
            return
    raise AssertionError(f"it waits on, beside {others} numbers")


def test_many_that_wait_take_one_turn_in_patience_from_the_lowest():
    """However many there are, and whichever numbers they have."""
    line = line_of(*(sequence(1 + n % 40) for n in range(400)))
    taken = []
    for _ in range(200):
        line.add_request(sequence(0))
        taken.append(take(line).prompt.priority)
    assert taken.count(0) >= 200 - 200 // (PATIENCE + 1)


@given(turns=st.lists(st.lists(numbers, min_size=1, max_size=5), min_size=1, max_size=60))
def test_the_lowest_has_the_turn_but_one_in_patience(turns):
    levels, others = Levels[int](), []
    for waiting in turns:
        level = levels.next_level(waiting)
        levels.take_turn(level)
        others.append(level != min(waiting))
        assert sum(others[-PATIENCE - 1 :]) <= 1


def test_who_waits_for_memory_is_not_overtaken_by_a_higher_number():
    stuck, background, same = sequence(0, length=9), sequence(1), sequence(0, length=5)
    line = line_of(stuck, background)
    assert line.next_request([]) is stuck and line.next_request([], stuck) is None
    line.add_request(same)
    assert line.next_request([], stuck) is same
    line.add_request(urgent := sequence(-1, length=8))
    assert line.next_request([], stuck) is urgent


# --------------------------------------------------------------------------- side requests


def test_a_side_request_goes_behind_its_own_session_alone():
    title, main = sequence(session="s", side=True), sequence(session="s")
    child, other = sequence(session="s/agent", side=True), sequence(session="t", side=True)
    line = line_of(title, child, other, main)
    running: list[Sequence] = []
    for expected in (main, other, title, child):
        running.append(take(line, running))
        assert running[-1] is expected


def test_a_side_request_is_overtaken_patience_times_at_most():
    title = sequence(session="s", side=True)
    line = line_of(title)
    for _ in range(PATIENCE):
        line.add_request(sequence(session="s"))
        assert take(line) is not title
    line.add_request(sequence(session="s"))
    assert take(line) is title


# --------------------------------------------------------------------------- passes


def test_a_pass_is_of_the_lowest_number_even_before_one_that_has_begun():
    budget = PrefillBudget(64)
    begun, late = sequence(1, length=9000), sequence(0, length=9000)
    begun.begun, begun.kv.length = True, 4096
    assert budget.pick_sequence([begun, late]) is late
    picked = [budget.pick_sequence([begun, late]) for _ in range(10 * (PATIENCE + 1))]
    assert picked.count(begun) == 10, "one pass in PATIENCE + 1 is its own"


def test_a_title_has_its_pass_behind_its_sessions_prompt():
    budget = PrefillBudget(64)
    title, main = sequence(session="s", side=True, length=100), sequence(session="s", length=9000)
    other = sequence(session="t", side=True, length=100)
    assert budget.pick_sequence([title, main]) is main, "though it is much shorter"
    assert budget.pick_sequence([title, main, other]) is other
    assert budget.pick_sequence([title]) is title
    picked = [budget.pick_sequence([title, main]) for _ in range(2 * (PATIENCE + 1))]
    assert picked.count(title) == 2


# --------------------------------------------------------------------------- slots that have begun nothing


class Asked(Output):
    """Notes whose first token comes when in `order`; calls `at_first` when its prompt's first pass is due."""

    def __init__(self, name: str, order: list[str], at_first: Any = None):
        super().__init__()
        self.name, self._order, self._at_first = name, order, at_first

    def progress(self, event: Any) -> None:
        super().progress(event)
        if self._at_first is not None:
            call, self._at_first = self._at_first, None
            call()

    def token(self, token: int, likelihood: Any = None) -> None:
        if not self.got:
            self._order.append(self.name)
        super().token(token, likelihood)


@pytest.mark.parametrize("short_of", ["slots", "memory"])
def test_who_has_begun_nothing_gives_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, short_of):
    """Two background requests hold all slots, or all memory is promised to them, when another comes."""
    order = list[str]()
    texts = {
        name: prompt(6 * BLOCK + 9, seed=seed) for seed, name in enumerate(("one", "two", "three", "now"))
    }
    with Rig(build_family("qwen3", tmp_path / "model"), slots=2 if short_of == "slots" else 8) as rig:
        alone = {name: rig.run(text, 3, salt="alone").tokens() for name, text in texts.items()}
        if short_of == "memory":

            class Memory:
                def has_room_for(self, sequence: Any, running: list[Any], *_: Any) -> bool:
                    return len(running) < 2

                def __getattr__(self, name: str) -> Any:
                    return lambda *_: None

            rig.scheduler.memory = Memory()  # type: ignore[assignment]
        now = Asked("now", order)
        first = Asked("one", order, lambda: rig.start(texts["now"], 3, output=now))
        outputs = {"one": first, "two": Asked("two", order), "three": Asked("three", order), "now": now}
        rig.on_engine(
            lambda: [rig.start(texts[n], 3, output=outputs[n], priority=1) for n in ("one", "two", "three")]
        )
        assert {name: output.tokens() for name, output in outputs.items()} == alone
        rig.settle()
        assert order == ["now", "one", "two", "three"]
        assert [outputs[n].sequence.outranked for n in ("one", "two", "three")] == [0, 1, 1]
        rig.on_engine(lambda: check_pool(rig.pool))


class Slots(Scheduler):
    """Only who waits and who has a slot; nothing begins by itself."""

    def __init__(self, slots: int):
        self._slots, self.memory, self.bridges = slots, None, Bridges()
        self.waiting, self.running = RequestQueue(), []

    def match(self, sequence: Sequence) -> bool:
        return False

    def admit(self, *arrivals: int) -> None:
        for number in arrivals:
            self.waiting.add_request(sequence(number))
        self._admit()

    def end_one(self, at: int = 0, but: Sequence | None = None) -> None:
        """One begins, and is over."""
        others = [one for one in self.running if one is not but]
        self.running.remove(others[at % len(others)])


def keeps_slot(one: Sequence) -> bool:
    return one.state is State.PREFILLING and not later_ones([one], [sequence(-100)])


def test_of_17_slots_one_goes_to_who_has_waited_longest():
    """Three background requests behind a crowd that never ends; the first comes when it is their turn."""
    slots = Slots(8)
    slots.admit(*[0] * 8)
    gone, background = sequence(1), [sequence(1) for _ in range(3)]
    slots.waiting.add_request(gone)
    turns = list[int]()
    for turn in range(-PATIENCE, 40):
        if not turn:
            slots.waiting.remove_request(gone)
            for one in background:
                slots.waiting.add_request(one)
        slots.admit(0)
        slots.end_one()
        slots.admit()
        turns += [turn for one in background[len(turns) :] if one in slots.running]
        assert all(keeps_slot(one) for one in background[: len(turns)])
    assert turns == [(PATIENCE + 1) * n for n in range(3)]


@given(st.randoms(use_true_random=True), st.integers(1, 3), st.integers(0, 2))
def test_nobody_waits_for_ever_though_slots_are_given_back(chance, count, rate):
    """Lower numbers come whenever it has a slot, which it has not begun with."""
    slots, others = Slots(count), [-3, -2, -1, 0, 2, 3]
    for _ in range(chance.randint(0, 3 * PATIENCE)):
        slots.admit(*chance.choices(others, k=chance.randint(1, 1 + rate)))
        slots.end_one()
    mine = sequence(1)
    slots.waiting.add_request(mine)
    turns = 0
    while not keeps_slot(mine):
        slots.admit(*chance.choices(others, k=chance.randint(0, rate)))
        if mine in slots.running:
            slots.admit(*[0] * count)
            if mine in slots.running:
                return  # A higher number has the next turn, and nobody takes this slot before it.
        slots.end_one(chance.randint(0, 2), but=mine)
        turns += 1
        assert turns <= (len(others) + 2) * (PATIENCE + 1)
