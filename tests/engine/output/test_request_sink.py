"""A request's way out: whatever breaks there, its client hears of an end, and so do all the others."""

from __future__ import annotations

import gc
import queue
import threading
from pathlib import Path
from typing import Any

import pytest
from daemon import wait_until
from host import Host, chat
from msgspec.structs import replace

from omlxd import wire
from omlxd.chat import (
    Event,
    Failed,
    Finished,
    ReasoningDelta,
    Sampling,
    TextDelta,
    TokenIds,
    TokenLogprob,
    ToolCall,
    Usage,
)
from omlxd.engine.output.sink import OutputThread, RequestSink, _joined
from omlxd.engine.schedule.scheduler import Scheduler
from omlxd.engine.sequence.sampling import RowSampling, SamplerRow, SamplingDefaults
from omlxd.engine.sequence.sequence import Prompt, Sequence
from omlxd.models import demo


class Parser:
    """Every token is its number in words; `faulty` names the method that raises."""

    def __init__(self, faulty: str = "", stops_at: int = -1, dropped: bool = False):
        self.faulty, self.stops_at, self.dropped = faulty, stops_at, dropped
        self.reasoning_tokens = 0
        self.stopped: str | None = None
        self.in_answer = True

    @property
    def current(self) -> Parser:
        return self

    @property
    def ended(self) -> bool:
        return self.stopped is not None

    def add_token(self, token: int, likelihood: Any = None) -> list[Event]:
        if self.faulty == "add_token":
            raise RuntimeError("no such token")
        if token == self.stops_at:
            self.stopped = "stop"
            return []
        return [TextDelta(str(token))]

    def finish(self, reason: str) -> list[Event]:
        if self.faulty == "finish":
            raise RuntimeError("no end")
        return []


def sequence() -> Sequence:
    row = SamplerRow(RowSampling.of(Sampling(), SamplingDefaults()), max_new=10)
    return Sequence(1, [1, 2, 3], Prompt(3, bytes(32)), row)


class Line:
    """Where frames go: encoded, as to the front."""

    def __init__(self) -> None:
        self.events: queue.SimpleQueue[tuple[int, Event]] = queue.SimpleQueue()

    def send(self, events: tuple[tuple[int, Event], ...]) -> None:
        wire.encode(wire.Events(events=events))
        for event in events:
            self.events.put(event)

    def next(self) -> tuple[int, Event]:
        return self.events.get(timeout=60)


@pytest.fixture
def line() -> Line:
    return Line()


@pytest.fixture
def output(line: Line):
    output = OutputThread(line.send)
    yield output
    output.close(60)


@pytest.mark.parametrize("faulty", ["add_token", "finish", "learn", "over"])
def test_a_request_whose_output_breaks_ends_all_the_same(faulty: str, line: Line, output: OutputThread):
    ended: list[int] = []
    sink = RequestSink(1, output, Parser(faulty), lambda: ended.append(1))

    def broken(*_: Any) -> None:
        raise RuntimeError("broken")

    if faulty in ("learn", "over"):
        setattr(sink, faulty, broken)
    sink.take([(7, None)], int)
    sink.finished(sequence(), "stop")
    event = line.next()[1]
    while not isinstance(event, Failed | Finished):
        event = line.next()[1]
    assert isinstance(event, Failed)
    sink.take([(8, None)], int)  # Nothing follows an end.
    other = RequestSink(2, output, Parser(), lambda: None)
    other.take([(9, None)], int)
    assert line.next() == (2, TextDelta("9"))
    assert ended == [1]


def test_what_nobody_hears_any_more_ends_once(line: Line, output: OutputThread):
    ended: list[int] = []
    sink = RequestSink(1, output, Parser(), lambda: ended.append(1))
    sink.take([(7, None)], int)
    assert line.next() == (1, TextDelta("7"))
    sink.abandon()
    sink.take([(8, None)], int)
    sink.abandon()
    sink.finished(sequence(), "stop")
    other = RequestSink(2, output, Parser(), lambda: None)
    other.take([(9, None)], int)
    assert line.next() == (2, TextDelta("9"))
    assert ended == [1]


def test_an_event_that_can_not_be_sent_fails_its_request_and_no_other(line: Line, output: OutputThread):
    output.put(
        lambda: [(1, TextDelta("one")), (2, TextDelta("half a pair: \ud800")), (3, TextDelta("three"))]
    )
    got = [line.next() for _ in range(3)]
    assert got[0] == (1, TextDelta("one")) and got[2] == (3, TextDelta("three"))
    assert got[1][0] == 2 and isinstance(got[1][1], Failed)
    output.put(lambda: [(1, TextDelta("goes on"))])
    assert line.next() == (1, TextDelta("goes on"))


class OneCall(Parser):
    """The answer ends with its one call, whose last token is 12."""

    called = False

    @property
    def ended(self) -> bool:
        return self.called or super().ended

    def add_token(self, token: int, likelihood: Any = None) -> list[Event]:
        if token != 12:
            return super().add_token(token)
        self.called = True
        return [ToolCall("call_1", "paint", "{}")]


class SomeCalls(OneCall):
    """The answer goes on behind its call."""

    @property
    def ended(self) -> bool:
        return self.stopped is not None


@pytest.mark.parametrize(
    ("parser", "learned"),
    [(OneCall(), [3]), (OneCall(dropped=True), []), (OneCall(stops_at=11), []), (Parser(), [5])],
)
def test_what_is_learned_of_a_turn(parser: Parser, learned: list[int], line: Line, output: OutputThread):
    """Up to its one call, behind which the engine may be some steps ahead.

    Nothing of a turn that was stopped, or that holds more than the client was sent.
    """
    sink, got = RequestSink(1, output, parser, lambda: None), list[int]()
    sink.learn = lambda answer, count: got.append(count)
    for token in (10, 11, 12, 13, 14):
        sink.take([(token, None)], int)
    sink.finished(sequence(), "stop")
    while not isinstance(line.next()[1], Finished):
        pass
    assert got == learned


@pytest.mark.parametrize("stops_at", [11, 13])
def test_calls_before_a_stop_string_are_the_reason(stops_at: int, line: Line, output: OutputThread):
    sink = RequestSink(1, output, SomeCalls(stops_at=stops_at), lambda: None)
    for token in (10, 11, 12, 13):
        sink.take([(token, None)], int)
    while not isinstance(event := line.next()[1], Finished):
        pass
    wanted = ("tool_calls", None) if stops_at > 12 else ("stop_sequence", "stop")
    assert (event.reason, event.stop_sequence) == wanted


def test_tokens_behind_a_stop_string_are_not_counted(line: Line, output: OutputThread):
    """The engine is some steps ahead by the time the stop string is found."""
    sink = RequestSink(1, output, Parser(stops_at=12), lambda: None)
    sink.usage = lambda: Usage(prompt_tokens=3, completion_tokens=9)
    for token in (10, 11, 12, 13, 14):
        sink.take([(token, None)], int)
    event = line.next()[1]
    while not isinstance(event, Finished):
        event = line.next()[1]
    assert event.reason == "stop_sequence" and event.usage.completion_tokens == 3


def test_a_request_that_is_over_is_freed_without_the_collector(tmp_path: Path):
    """A prompt of 96k tokens is 4 MB of integers, and the collector looks once in hundreds of requests."""
    host = Host(demo.build_demo(tmp_path / "demo"))

    def held() -> int:
        return sum(type(thing) is Sequence and thing.prompt.session == "freed" for thing in gc.get_objects())

    gc.collect()
    gc.disable()
    try:
        for number in range(4):
            host.ask(replace(chat(f"Hello {number}", max_tokens=3), session="freed"))
        wait_until(lambda: not held())
    finally:
        gc.enable()
        host.close()


def test_a_client_that_leaves_as_its_answer_ends_costs_nothing(tmp_path: Path, monkeypatch):
    """The thread that reads frames cancels it, and with that thread the engine would end."""
    host = Host(demo.build_demo(tmp_path / "demo"))
    ended = threading.Event()
    try:
        over = host.start(chat(max_tokens=500), ended.set)

        def cancel_at_once(sequence: Sequence) -> None:
            Scheduler.cancel(host.engine.scheduler, sequence)
            wait_until(lambda: sequence.sink is None)

        monkeypatch.setattr(host.engine.scheduler, "cancel", cancel_at_once)
        host.engine.cancel(over)
        assert ended.wait(60)
        monkeypatch.undo()
        host.engine.cancel(over)
        assert isinstance(host.ask(chat(max_tokens=3))[-1], Finished)
    finally:
        host.close()


def test_events_leave_where_tokens_come_as_fast_as_they_are_parsed():
    sent, left = threading.Event(), iter(range(10_000))
    out = OutputThread(lambda events: sent.set())

    def work() -> list[tuple[int, Event]]:
        if not sent.is_set() and next(left, None) is not None:
            out.put(work)
        return [(1, TextDelta("x"))]

    out.put(work)
    assert sent.wait(30) and next(left, None) is not None
    out.close(5)


def test_the_text_of_a_pass_is_one_event_and_nothing_behind_its_end_is_counted(
    line: Line, output: OutputThread
):
    counted: list[int] = []
    sink = RequestSink(1, output, Parser(), lambda: None)
    sink.take([(7, None), (8, None), (9, None)], lambda: counted.append(1))
    assert line.next() == (1, TextDelta("789", pieces=3)) and len(counted) == 3
    sink.finished(sequence(), "stop")
    assert isinstance(line.next()[1], Finished)
    sink.take([(7, None), (8, None)], lambda: counted.append(1))
    other = RequestSink(2, output, Parser(), lambda: None)
    other.take([(9, None)], int)
    assert line.next() == (2, TextDelta("9")) and len(counted) == 3


def test_pieces_of_other_kinds_and_with_logprobs_stay_apart():
    logprob = TokenLogprob("b", -1.0, 0)
    events: list[Any] = [ReasoningDelta("a"), ReasoningDelta("b"), TextDelta("c"), TextDelta("d", (logprob,))]
    events += [TextDelta("e"), TextDelta("f"), TokenIds((1,), ()), TextDelta("g")]
    joined = [event for _, event in _joined([(1, event) for event in events])]
    assert joined == [ReasoningDelta("ab", 2), *events[2:4], TextDelta("ef", pieces=2), *events[6:]]


def test_what_was_said_before_a_token_breaks_is_sent(line: Line, output: OutputThread):
    parser = Parser()
    sink = RequestSink(1, output, parser, lambda: None)
    own = parser.add_token

    def breaks_at_8(token: int, likelihood: Any = None) -> list[Event]:
        return own(token) if token < 8 else [][token]

    parser.add_token = breaks_at_8
    sink.take([(6, None), (7, None), (8, None), (7, None)], int)
    assert line.next() == (1, TextDelta("67", pieces=2))
    assert isinstance(line.next()[1], Failed)
