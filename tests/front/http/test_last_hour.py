"""The figures of the last hour: added up by time, never more than an hour of them."""

import time

import pytest
from prometheus_client.core import CollectorRegistry

from omlxd.chat import Progress, TextDelta, Usage
from omlxd.front.http.observe.last_hour import SLOT_S, SLOTS, LastHour
from omlxd.front.http.observe.request_metrics import Requests


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [33_333_333.0 * SLOT_S]
    monkeypatch.setattr(time, "time", lambda: now[0])
    return now


def test_requests_of_one_slot_are_added_up(clock: list[float]):
    hour = LastHour()
    hour.add(Usage(prompt_tokens=100, cached_hot=64, cached_cold=16, completion_tokens=5), 0.5)
    hour.add(Usage(prompt_tokens=50, completion_tokens=2), 1.5)
    hour.add(Usage(prompt_tokens=10), None)
    (slot,) = hour.since(0)
    assert (slot.requests, slot.prompt, slot.cached_hot, slot.cached_cold) == (3, 160, 64, 16)
    assert (slot.first, slot.ttft_sum, slot.ttft_max, slot.completion) == (2, 2.0, 1.5, 7)


def test_an_hour_is_kept_and_no_more(clock: list[float]):
    hour = LastHour()
    for _ in range(3 * SLOTS):
        hour.add(Usage(prompt_tokens=1), 0.1)
        clock[0] += SLOT_S
    kept = hour.since(0)
    assert len(kept) == SLOTS and kept[0].at >= clock[0] - 3600
    assert hour.since(kept[-2].at) == kept[-2:]
    clock[0] += 3600
    assert hour.since(0) == [], "what is older than an hour is not told, though nobody asked meanwhile"


def test_a_clock_that_goes_back_loses_nothing(clock: list[float]):
    hour = LastHour()
    hour.add(Usage(prompt_tokens=1), 0.1)
    clock[0] -= 500
    hour.add(Usage(prompt_tokens=1), 0.1)
    assert [slot.prompt for slot in hour.since(0)] == [2]


def test_a_clock_that_was_ahead_for_a_while_holds_nothing_up(clock: list[float]):
    hour, now = LastHour(), clock[0]
    for ahead in (86400, 86400 + SLOT_S, 0, SLOT_S):
        clock[0] = now + ahead
        hour.add(Usage(prompt_tokens=1), 0.1)
    assert [(slot.at, slot.requests) for slot in hour.since(0)] == [(now, 3), (now + SLOT_S, 1)]


def test_a_request_that_was_stopped_counts_what_it_hit(clock: list[float]):
    requests = Requests(CollectorRegistry())
    with requests.watch("m", time.monotonic()) as watch:
        for event in (Progress(192, 200, cold=64), Progress(200, 200), TextDelta("a")):
            watch.event(event)
    (slot,) = requests.last_hour.since(0)
    assert (slot.requests, slot.prompt, slot.cached_hot, slot.cached_cold) == (1, 200, 128, 64)
