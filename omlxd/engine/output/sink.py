"""The output side of requests: tokens in from the engine thread, events out to the front.

One thread serves all requests; the events of one step leave in one frame.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from functools import partial

from msgspec.structs import replace

from ... import chat
from ...errors import OmlxdError
from ..prompt.turn_memory import Answer
from ..sequence.sequence import Drawn, LabelScores, Likelihood, Sequence
from .parser import OutputParser
from .unopened import GuessingParser

log = logging.getLogger(__name__)

Work = Callable[[], list[tuple[int, chat.Event]]]


MOST_EVENTS = 256
"""Events of a frame at most: without a bound, none is sent while tokens come as fast as they are parsed."""


class OutputThread:
    """Runs work in order and sends its events, as many as there are in one frame."""

    def __init__(self, send: Callable[[tuple[tuple[int, chat.Event], ...]], None]):
        self._send = send
        self._queue: queue.SimpleQueue[Work | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="output", daemon=True)
        self._thread.start()

    def put(self, work: Work) -> None:
        self._queue.put(work)

    def close(self, timeout: float) -> None:
        """Finish what is queued."""
        self._queue.put(None)
        self._thread.join(timeout)

    def _run(self) -> None:
        closing = False
        while not closing:
            events: list[tuple[int, chat.Event]] = []
            work = None  # It may hold a request, and would as long as nothing comes.
            work = self._queue.get()
            while True:
                if work is None:
                    closing = True
                    break
                try:
                    events += work()
                except Exception:
                    log.exception("output failed")
                if len(events) >= MOST_EVENTS:
                    break
                try:
                    work = self._queue.get_nowait()
                except queue.Empty:
                    break
            if events:
                self._send_all(events)

    def _send_all(self, events: list[tuple[int, chat.Event]]) -> None:
        """Send events in one frame, or else each alone: this thread serves everybody, and must not end."""
        try:
            self._send(tuple(events))
            return
        except Exception:
            log.exception("a frame of events can't be sent")
        for id, event in events:
            try:
                self._send(((id, event),))
            except Exception as error:
                failed = chat.Failed(
                    code="internal", message=f"the answer can't be sent: {type(error).__name__}"
                )
                self._send(((id, failed),))


class RequestSink:
    """Takes one request's output from the scheduler. `end()` is called after the last event or `abandon`.

    stop()   asks the scheduler to end the sequence: at a stop string, or after the one call
    shows_stop  the stop token that ends the answer goes to the parser, too
    is_silent  the client wants the prompt computed and no answer
    hides_thinking  the client wants no text of thoughts
    over()   called once if the request did not fail and its client stayed
    prompt   its tokens, where the client wants token ids; they go with the first token
    learn()  gets what the client was sent, and of how many tokens, before the last event, if the turn may be
             remembered
    """

    def __init__(
        self, id: int, output: OutputThread, parser: OutputParser | GuessingParser, end: Callable[[], None]
    ):
        self._id = id
        self._output = output
        self._parser = parser
        self._end = end
        self._ended = False
        self._answer = Answer()
        self._cut = False
        self._taken = 0
        self.name = f"request {id}"
        self.stop: Callable[[], None] = _nothing
        self.is_silent = self.shows_stop = self.hides_thinking = False
        self.prompt: tuple[int, ...] | None = None
        self._ids: list[
            chat.Event
        ] = []  # the answer's, where they are wanted: they come again if it restarts
        self.learn: Callable[[Answer, int], None] | None = None
        self.usage: Callable[[], chat.Usage] = chat.Usage
        self.over: Callable[[], None] = _nothing

    # ----------------------------------------------------------------- engine thread

    def progress(self, event: chat.Progress) -> None:
        spent = self.usage()
        event = replace(event, restore_s=spent.restore_s, prefill_s=spent.prefill_s)
        self._output.put(lambda: self._emit([event]))

    def echo(self, text: str) -> None:
        """Send text of the prompt that the client wants back."""
        self._output.put(lambda: self._emit([chat.TextDelta(text)]))

    def take(self, drawn: Seq[Drawn], count: Callable[[], None]) -> None:
        """Take the tokens of one pass. `count` is called for each token that becomes part of the answer."""
        self._output.put(lambda: self._guarded(lambda: self._take(drawn, count)))

    def count(self, work: Callable[[], None]) -> None:
        """Have the output thread count something in order, unless the answer has ended before it.

        The engine is ahead of a stop string, by as much as the output thread happens to be behind.
        """
        self._output.put(lambda: self._counted(work))

    def scored(self, scores: LabelScores) -> None:
        self._output.put(lambda: self._guarded(lambda: self._scored(scores)))

    def finished(self, sequence: Sequence, reason: chat.FinishReason) -> None:
        now = time.monotonic()
        self._output.put(lambda: self._guarded(lambda: self._finish(reason, usage_of(sequence, now))))

    def failed(self, sequence: Sequence, error: OmlxdError) -> None:
        self._output.put(lambda: self._fail(error.as_event()))

    # ----------------------------------------------------------------- any thread

    def abandon(self) -> None:
        """Drop the events to come, since the client has gone."""
        self._output.put(self._abandon)

    # ----------------------------------------------------------------- output thread

    def _abandon(self) -> list[tuple[int, chat.Event]]:
        self._close()
        return []

    def _emit(self, events: list[chat.Event]) -> list[tuple[int, chat.Event]]:
        if self._ended:
            return []
        if self.hides_thinking:
            events = [event for event in events if not isinstance(event, chat.ReasoningDelta)]
        for event in events:
            if isinstance(event, chat.Restarted):
                self._answer, self._cut = Answer(), False
            self._answer.add(event)
            self._cut = self._cut or isinstance(event, chat.ToolCallCut)
        return [(self._id, event) for event in events]

    def _guarded(self, work: Work) -> list[tuple[int, chat.Event]]:
        """Fail a request whose output breaks: else its client would wait for ever."""
        try:
            return [] if self._ended else work()
        except Exception as error:
            log.exception("%s: can't parse its output", self.name)
            self.stop()
            return self._fail(OmlxdError(f"can't parse the output: {error}").as_event())

    def _counted(self, work: Callable[[], None]) -> list[tuple[int, chat.Event]]:
        if not self._ended and not self.is_silent:
            work()
        return []

    def _take(self, drawn: Seq[Drawn], count: Callable[[], None]) -> list[tuple[int, chat.Event]]:
        events: list[tuple[int, chat.Event]] = []
        for token, likelihood in drawn:
            self._counted(count)
            events += self._guarded(partial(self._token, token, likelihood))
        return _joined(events) if len(drawn) > 1 else events

    def _token(self, token: int, likelihood: Likelihood | None) -> list[tuple[int, chat.Event]]:
        self._taken += 1
        events: list[tuple[int, chat.Event]] = []
        if self.prompt is not None:
            self._ids.append(chat.TokenIds(() if self.is_silent else (token,), self.prompt))
            events = self._emit(self._ids[-1:])
            self.prompt = ()
        if self.is_silent:
            return events
        events += self._emit(self._parser.add_token(token, likelihood))
        if self._parser.current.ended:
            self.stop()
            events += self._finish("stop", _cut(self.usage(), self._taken))
        return events

    def _scored(self, scores: LabelScores) -> list[tuple[int, chat.Event]]:
        likeliest = self._parser.current.spelled(*scores.likeliest)
        return self._emit([chat.Scored(scores.logprobs, scores.logits, likeliest)])

    def _finish(self, reason: chat.FinishReason, usage: chat.Usage) -> list[tuple[int, chat.Event]]:
        if self.is_silent:
            reason, usage = "length", replace(usage, completion_tokens=0)
        in_answer = self._parser.current.in_answer
        last = self._parser.finish(reason)
        if last and isinstance(last[0], chat.Restarted):
            last[1:1] = self._ids
        events = _joined(self._emit(last))
        stopped = self._parser.current.stopped
        # A broken call comes back as something else. What came beside its one call nobody was sent.
        complete = stopped is None and not self._cut and not self._parser.current.dropped
        if complete and self.learn and (reason == "stop" or (in_answer and any(self._answer.texts))):
            self.learn(self._answer, self._taken)
        if stopped is not None and not self._answer.calls:
            reason = "stop_sequence"
        elif reason == "stop" and (self._answer.calls or self._cut):
            reason = "tool_calls"
        stopped = stopped if reason == "stop_sequence" else None  # Clients run calls whose reason says so.
        self.over()
        usage = replace(usage, reasoning_tokens=self._parser.current.reasoning_tokens)
        events += self._emit([chat.Finished(reason=reason, usage=usage, stop_sequence=stopped)])
        self._close()
        return events

    def _fail(self, failed: chat.Failed) -> list[tuple[int, chat.Event]]:
        events = self._emit([failed])
        self._close()
        return events

    def _close(self) -> None:
        if not self._ended:
            self._ended = True
            self._end()
            # They hold the request, which holds this sink: its tokens would wait for the collector.
            self.stop = self.over = _nothing
            self.learn, self.usage = None, chat.Usage


def _nothing() -> None:
    pass


def _joined(events: list[tuple[int, chat.Event]]) -> list[tuple[int, chat.Event]]:
    """Join texts in a row, without logprobs, into one event: a client reads one for each pass."""
    joined: list[tuple[int, chat.Event]] = []
    for id, event in events:
        match joined[-1][1] if joined else None, event:
            case chat.TextDelta(before, (), count), chat.TextDelta(text, ()):
                joined[-1] = id, chat.TextDelta(before + text, pieces=count + 1)
            case chat.ReasoningDelta(before, count), chat.ReasoningDelta(text):
                joined[-1] = id, chat.ReasoningDelta(before + text, pieces=count + 1)
            case _:
                joined.append((id, event))
    return joined


def _cut(usage: chat.Usage, tokens: int) -> chat.Usage:
    """Cut `usage` to an answer that a stop string ends after so many tokens. The first was no draft token."""
    names = ("accepted", "model_accepted", "predicted_accepted")
    held = {name: min(getattr(usage, name), tokens - 1) for name in names}
    return replace(usage, completion_tokens=tokens, **held)


def usage_of(sequence: Sequence, now: float | None = None) -> chat.Usage:
    """Return the counts of a sequence now. `now`: monotonic time; None: the time."""
    now = now or time.monotonic()
    ttft_s = sequence.stats.first_token_s or now - sequence.stats.asked
    prefill_s = sequence.stats.prefill_s + (
        now - sequence.stats.pass_since if sequence.stats.pass_since else 0.0
    )
    reached = max(sequence.kv.length, sequence.stats.restored_hot + sequence.stats.restored_cold)
    limits = sequence.sampling.constraint
    cut = sequence.timed_out and not sequence.stats.first_token_s
    return chat.Usage(
        prompt_tokens=sequence.prompt.length,
        cached_hot=sequence.stats.restored_hot,
        cached_cold=sequence.stats.restored_cold,
        completion_tokens=sequence.generated,
        ttft_s=ttft_s,
        queue_s=max(0.0, ttft_s - sequence.stats.restore_s - prefill_s),
        restore_s=sequence.stats.restore_s,
        prefill_s=prefill_s,
        decode_s=max(0.0, now - sequence.stats.asked - ttft_s),
        peak_bytes=sequence.stats.peak_bytes,
        drafted=sequence.stats.drafted,
        accepted=sequence.stats.accepted,
        model_drafted=sequence.stats.model_drafted,
        model_accepted=sequence.stats.model_accepted,
        predicted=sequence.stats.predicted,
        predicted_accepted=sequence.stats.predicted_accepted,
        recomputed=sequence.stats.recomputed,
        left_over=max(0, sequence.prompt.length - reached) if cut else 0,
        limited=replace(
            limits.report() if limits is not None else chat.Limited(),
            priority=sequence.prompt.priority,
            side_request=sequence.prompt.side,
        ),
    )
