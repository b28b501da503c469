"""Requests whose time is up: wherever they are, they end with the length reason, and alone."""

from __future__ import annotations

import math
import time

import pytest
from families import build_family
from rig import BLOCK, Output, Rig

from omlxd.api.fields.body import ParsedRequest, with_timeout
from omlxd.chat import Conversation, GenerateRequest
from omlxd.engine.output.sink import usage_of
from omlxd.engine.schedule.waiting.queue import Watchdog
from omlxd.engine.sequence.sequence import Prompt, SequenceKV, SequenceStats
from omlxd.errors import InvalidRequest


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return build_family("qwen3", tmp_path_factory.mktemp("model"))


def tokens(length: int, seed: int = 7) -> list[int]:
    return [(i * 31 + seed) % 900 + 20 for i in range(length)]


def test_a_decoding_request_ends(model):
    with Rig(model) as rig:
        output = rig.start(tokens(100), n=100_000)
        assert output.first.wait(120)
        output.sequence.deadline = time.monotonic()
        got = output.tokens()
        assert output.reason == "length" and got
        assert usage_of(output.sequence).computed_tokens == 100
        rig.settle()
        assert rig.scheduler.watchdog.expired == 1
        assert rig.scheduler.active_sequences == 0
        assert rig.run(tokens(50), n=3).reason == "length"
        assert rig.scheduler.watchdog.expired == 1


def test_a_prefill_is_interrupted_between_two_chunks_and_keeps_its_blocks(model):
    with Rig(model) as rig:
        chunks: list[int] = []

        class Late(Output):
            def progress(self, event):
                super().progress(event)
                chunks.append(event.done)
                if event.done:
                    self.sequence.deadline = 0.0

        output = rig.start(tokens(8_000), n=5, output=Late())
        assert output.tokens() == [] and output.reason == "length"
        rig.settle()
        done = chunks[-1]
        assert 0 < done < 8_000
        usage = usage_of(output.sequence)
        assert (usage.prompt_tokens, usage.computed_tokens, usage.left_over) == (8_000, done, 8_000 - done)
        again = rig.run(tokens(8_000)[: done + 10], n=2)
        assert again.hot >= (done // BLOCK) * BLOCK - BLOCK


def test_a_waiting_request_ends(model):
    with Rig(model, slots=1) as rig:
        first = rig.start(tokens(100), n=100_000)
        assert first.first.wait(120)
        second = rig.start(tokens(60, seed=3), n=5)
        second.sequence.deadline = 0.0
        assert second.tokens() == [] and second.reason == "length"
        assert usage_of(second.sequence).computed_tokens == 0
        assert not first.reason
        first.sequence.deadline = 0.0
        assert first.tokens()


def test_a_restoring_request_ends(model, tmp_path):
    with Rig(model, tmp_path) as rig:
        rig.run(tokens(1000), n=2)
    with Rig(model, tmp_path) as rig:
        output = rig.start(tokens(1000), n=100_000)
        output.sequence.deadline = 0.0
        assert output.tokens() is not None and output.reason == "length"
        rig.settle()
        assert rig.scheduler.active_sequences == 0
        assert all(block.ref_cnt == 0 for block in rig.pool._blocks)


class Fake:
    """What the watchdog looks at."""

    def __init__(self, deadline: float, cancelled: bool = False):
        self.name, self.generated = "a", 0
        self.prompt, self.kv, self.stats = Prompt(10, bytes(32)), SequenceKV(), SequenceStats(received=0.0)
        self.deadline, self.cancelled, self.sink = deadline, cancelled, self
        self.reasons: list[str] = []

    def finished(self, sequence, reason):
        self.reasons.append(reason)


def test_only_those_past_their_deadline_and_each_once():
    cancelled = []

    def cancel(sequence):
        sequence.cancelled = True
        cancelled.append(sequence)

    watchdog = Watchdog(cancel, clock=lambda: 10.0)
    late, early, endless, gone = Fake(10.0), Fake(10.1), Fake(math.inf), Fake(1.0, cancelled=True)
    for _ in range(2):
        watchdog.check([late, early, endless, gone])  # type: ignore[list-item]
    assert cancelled == [late] and late.reasons == ["length"]
    assert watchdog.expired == 1 and not gone.reasons


def test_the_clients_own_limit():
    parsed = ParsedRequest("m", False, GenerateRequest(Conversation(())))
    assert with_timeout(parsed, {}) is parsed
    assert with_timeout(parsed, {"x-omlxd-timeout": "2.5"}).generate.timeout_s == 2.5
    for text in ("", "soon", "-1", "0", "nan", "inf"):
        with pytest.raises(InvalidRequest, match="seconds are needed"):
            with_timeout(parsed, {"x-omlxd-timeout": text})
