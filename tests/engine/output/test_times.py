"""Where a request's seconds go: what it waited for, what it read, and what it computed itself."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from host import Host, finished, raw
from msgspec.structs import replace

from omlxd.chat import Progress
from omlxd.models import demo


@pytest.fixture
def host(tmp_path: Path):
    host = Host(demo.build_demo(tmp_path / "demo"))
    yield host
    host.close()


def test_what_a_request_waited_before_the_engine_had_it_counts(host: Host):
    """A load, say. Its time limit begins when the engine has it."""
    asked = time.monotonic() - 50
    usage = finished(host.ask(replace(raw(max_tokens=3), asked=asked, timeout_s=40.0))).usage
    assert usage.completion_tokens == 3
    assert 50 <= usage.queue_s < usage.ttft_s < time.monotonic() - asked
    assert usage.queue_s + usage.restore_s + usage.prefill_s == pytest.approx(usage.ttft_s)
    assert usage.decode_s < 50


def test_progress_tells_the_seconds_so_far_of_the_pass_under_way_too(host: Host):
    events = host.ask(raw("word " * 300, max_tokens=1))
    first, *more = [event for event in events if isinstance(event, Progress)]
    assert len(more) > 2 and first.prefill_s < more[0].prefill_s
    passed = [event.prefill_s for event in more]
    assert passed == sorted(passed) and passed[0] > 0
    assert passed[-1] <= finished(events).usage.prefill_s
    assert 0 < more[-1].restore_s <= finished(events).usage.restore_s
