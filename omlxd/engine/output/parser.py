"""Turns a request's tokens into chat events: text, reasoning, tool calls, in order.

One parser serves streams and collected answers; it does no I/O and knows only the tokenizer: detokenizer →
splitter or harmony → stop strings → events. Space beside a tag is dropped, as templates write it themselves.
"""

from __future__ import annotations

import copy
import functools
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ... import chat
from ..constrain.call_formats import CODER, HERMES, MAX_HEAD, begun_call, opening_of
from ..constrain.harmony_grammar import CONTROLS
from ..sequence.sequence import Likelihood
from .calls.reader import ParsedCall, ToolCallReader, valid_object
from .calls.untagged import UntaggedCalls
from .calls.writers import Writer, writer_for
from .detokenizer import detokenizer
from .harmony import HarmonySplitter
from .held_text import StopStrings, TrailingSpaces
from .logprobs import AnswerLogprobs
from .splitter import CallTags, Sink, Splitter, State, Tags

_HERMES = CallTags(opening_of(HERMES), HERMES.after.rpartition("\n")[2])
_BARE_FUNCTION = CallTags(*CODER.inner, in_text=True)
"""Matches a call without the `<tool_call>` that Qwen's coders at times leave out."""


class OutputParser:
    """Parses the output of one request. Not thread-safe; any one thread at a time.

    tools               the tools of the request; with none, calls are not looked for
    starts_in_thinking  the prompt ended inside a thinking block
    stop                strings that end the answer; they don't apply to reasoning
    reasoning           thinking tags are markup; False for a raw prompt
    one_call            the answer ends with its first call
    min_tokens          stop strings are looked for behind so many tokens
    shows_special       special tokens are text of the answer, but for tags
    shows_stop          the answer's text ends with the stop string that ends it
    must_call           the answer is nothing but calls: no part of a call that is cut off is text
    held                the answer is written by a grammar: a tag within it is text
    allowed             names of the tools that may be called; none: all

    stopped           the stop string that ended the answer, or None
    dropped           the tokens so far hold more than the one call, which nobody is sent
    reasoning_tokens  tokens inside thinking blocks so far, tags not counted
    """

    def __init__(
        self,
        tokenizer: Any,
        tools: Sequence[chat.Tool] = (),
        starts_in_thinking: bool = False,
        stop: tuple[str, ...] = (),
        reasoning: bool = True,
        one_call: bool = False,
        must_call: bool = False,
        min_tokens: int = 0,
        shows_special: bool = False,
        shows_stop: bool = False,
        held: bool = False,
        allowed: Sequence[str] = (),
    ):
        facts = _facts_of(tokenizer)
        tags = Tags(
            think_start=facts.tags.think_start if reasoning else "",
            think_end=facts.tags.think_end if reasoning else "",
            calls=facts.tags.calls if tools else (),
        )
        hidden = frozenset[int]()
        self._think_end = tags.think_end
        self._hidden, self._dropped = (hidden, hidden) if shows_special else (facts.hidden, facts.dropped)
        self._stopless = min_tokens
        self._controls = facts.controls if reasoning else {}
        self._detokenizer = detokenizer(tokenizer)
        reader = ToolCallReader(tools, tokenizer.tool_parser)
        self._must_call = must_call
        names = [] if held or must_call or self._controls else reader.names
        names = [name for name in names if not allowed or name in allowed]
        untagged = UntaggedCalls(reader, names, () if min_tokens else stop)
        stops, logprobs = StopStrings(stop, shows_stop), AnswerLogprobs(tokenizer)
        self._sink = _EventSink(stops, reader, logprobs, untagged, one_call)
        begin = State.REASONING if starts_in_thinking and reasoning else State.ANSWER
        self._splitter: Splitter | HarmonySplitter
        if self._controls:
            self._splitter = HarmonySplitter(tags, self._sink, bool(tools))
        else:
            self._splitter = Splitter(tags, self._sink, begin, held)
        self._sink.splitter = self._splitter
        self.reasoning_tokens = 0

    @property
    def current(self) -> OutputParser:
        """The parser in charge: this one. `GuessingParser` may replace its own."""
        return self

    @property
    def ended(self) -> bool:
        """Whether the answer is over: a stop string was found, or the one call is made."""
        return self._sink.ended

    @property
    def dropped(self) -> bool:
        return self._sink.dropped

    @property
    def first_tag(self) -> str:
        """First tag that ended a thought, or began one or a call; "": none so far."""
        return self._splitter.first_tag if isinstance(self._splitter, Splitter) else ""

    @property
    def closes_unopened(self) -> bool:
        """Whether `first_tag` ends a thought which no tag of the answer opened."""
        return bool(self.first_tag) and self.first_tag == self._think_end

    @property
    def in_answer(self) -> bool:
        """Whether the next letter belongs to the answer."""
        return self._splitter.in_answer

    @property
    def stopped(self) -> str | None:
        return self._sink.stops.matched

    def add_token(self, token: int, likelihood: Likelihood | None = None) -> list[chat.Event]:
        """Return the events that `token` makes certain. `likelihood`: if log-probabilities are asked for."""
        self._sink.stops.off = self._stopless > 0
        self._stopless -= 1
        if tag := self._controls.get(token):
            return self._control(token, tag)
        before = self._splitter.state
        if token in self._dropped or (token in self._hidden and before is not State.CALL):
            return []
        text = self._detokenizer.add(token)
        self._sink.logprobs.add(token, text, likelihood)
        events = self.add_text(text)
        if before is State.REASONING and self._splitter.state is State.REASONING:
            self.reasoning_tokens += 1
        return events

    def spelled(self, token: int, likelihood: Likelihood) -> chat.TokenLogprob:
        """Return a token in clients' spelling, outside of the answer."""
        return self._sink.logprobs.spelled(token, likelihood)

    def _control(self, token: int, tag: str) -> list[chat.Event]:
        text = self._detokenizer.finish()
        self._sink.logprobs.add(token, text, None)
        events = self.add_text(text)
        if isinstance(self._splitter, HarmonySplitter) and not self.ended:
            self._splitter.control(tag)
        return events + self._sink.take()

    def add_text(self, text: str) -> list[chat.Event]:
        """Return the events that `text` makes certain."""
        if text and not self.ended:
            self._splitter.feed(text)
        return self._sink.take()

    def finish(self, reason: chat.FinishReason) -> list[chat.Event]:
        """Return the last events. `reason` `length`: the text was cut off."""
        if not self.ended:
            self._sink.muted = self._must_call and reason == "length"
            self._splitter.feed(self._detokenizer.finish())
            self._splitter.finish(ended=reason != "length")
            self._sink.finish()
        return self._sink.take()


class _EventSink(Sink):
    """Turns the splitter's calls into events."""

    splitter: Splitter | HarmonySplitter

    def __init__(
        self,
        stops: StopStrings,
        reader: ToolCallReader,
        logprobs: AnswerLogprobs,
        untagged: UntaggedCalls,
        one_call: bool,
    ):
        self.logprobs = logprobs
        self._untagged = untagged
        self._passed = 0  # letters of the answer that stop strings have let through
        self._one_call = one_call
        self._called = False
        self.stops = stops
        self._reader = reader
        self._writer, self._id = Writer(reader.parameters), ""
        self._trial: tuple[Writer, int] | None = None  # that goes on behind an end tag; letters it has
        self._spaces = TrailingSpaces()  # of the answer
        self._thought = TrailingSpaces()  # of the reasoning
        self._events: list[chat.Event] = []
        self.muted = False  # more answer text is the beginning of a call
        self.dropped = False

    @property
    def ended(self) -> bool:
        return self.stops.matched is not None or (self._one_call and self._called)

    def answer(self, text: str) -> None:
        if self.ended or self.muted:
            self.dropped |= bool(text.strip())
            return
        self.logprobs.answer(len(text), self.splitter.position)
        self._answer(self._untagged.feed(text))
        if stop := self._untagged.stopped_by:
            self._end_untagged()
            self.stops.feed(stop)

    def _answer(self, text: str) -> None:
        self._say(self.stops.feed(text))
        if self.stops.matched is not None:
            self._flush_spaces()

    def _end_untagged(self) -> None:
        """Make the calls that were held back, or release the text."""
        letters = self._untagged.held
        calls, text = self._untagged.end()
        if self.ended:
            self.dropped |= bool(calls or text.strip())
            return
        if not calls:
            self._answer(text)
            return
        self._id = ""
        self._flush()
        self._passed += letters
        self.logprobs.drop(self._passed, letters)
        self._make(calls)

    def reasoning(self, text: str) -> None:
        self.logprobs.other(self.splitter.position)
        if not self.ended and (text := self._thought.feed(text)):
            self._events.append(chat.ReasoningDelta(text))

    def call_begins(self) -> None:
        self._writer, self._id, self._trial = Writer(self._reader.parameters), "", None

    def call_text(self, text: str) -> None:
        if self.ended:
            return
        if type(self._writer) is Writer and len(self._writer.pending) <= MAX_HEAD:
            text = self._writer.pending + text
            self._writer = writer_for(text, self._reader.parameters)
        self._writer.feed(text)
        self._send_news()

    def _send_news(self) -> None:
        if not (text := self._writer.news()):
            return
        if not self._id:
            self.boundary()
            self._id = _new_id()
        self._events.append(chat.ToolCallDelta(self._id, self._writer.name, text))

    def _end_complete(self) -> None:
        self._called = True
        self._events.append(chat.ToolCall(self._id, self._writer.name, self._writer.arguments))

    def _end_live(self, truncated: bool) -> None:
        """End the call under way, which is incomplete."""
        writer = self._writer
        self._called = True
        arguments = writer.cut() if truncated and not writer.dead else writer.arguments
        self._events.append(chat.ToolCallCut(self._id, writer.name, arguments, writer.members))
        if (writer.dead or not truncated) and (rest := writer.pending.strip()) and not self.ended:
            rest += "\n"
            self.logprobs.answer(len(rest), self.splitter.position)
            self._say(rest)

    def call_holds(self) -> bool:
        return bool(self._id) and not self.ended and self._writer.in_string

    def call_resumes(self, text: str) -> bool | None:
        if self.ended:
            return True
        trial, fed = self._trial or (copy.copy(self._writer), 0)
        trial.feed(text[fed:])
        if trial.in_string:
            self._trial = trial, len(text)
            return None
        if not trial.close():
            return False
        self._writer = trial
        self._send_news()
        self._end_complete()
        return True

    def call_broken(self) -> None:
        if not self.ended:
            self._end_live(truncated=True)

    def call_breaks(self, tag: str, text: str, ended: bool) -> bool:
        if self.ended:
            return False
        if not self._id:
            return not ended and self._cut_unsent(tag, text)
        if ended and self._writer.close():
            self._end_complete()
        else:
            self._end_live(truncated=not ended)
        return True

    def _cut_unsent(self, tag: str, text: str) -> bool:
        """Report a call that was cut off before any of it was sent; False: `text` begins no call."""
        known = self._writer.name and not self._writer.dead
        live = (self._writer.name, self._writer.cut()) if known else None
        if (begun := live or begun_call(tag, text, self._reader.names)) is None:
            return False
        self.boundary()
        name, arguments = begun
        if name:
            self._called = True
            self._events.append(chat.ToolCallCut(_new_id(), name, arguments, valid_object(arguments)))
        return True

    def call(self, text: str) -> bool:
        begun = bool(self._id) and not self.ended
        if begun and self._writer.in_string:
            return False
        if begun and self._writer.close():
            self._end_complete()
            return True
        calls = [] if self.ended else self._reader.read(text)
        if begun and not (calls and self._is_begun(calls[0])):
            self._end_live(truncated=False)
            return True
        if calls is None:
            return False
        self.boundary()
        self._make(calls)
        return True

    def _make(self, calls: Sequence[ParsedCall]) -> None:
        self.dropped |= self._one_call and len(calls) > 1
        for call in calls[:1] if self._one_call else calls:
            self._called = True
            self._events.append(chat.ToolCall(self._id or _new_id(), call.name, call.arguments))
            self._id = ""

    def _is_begun(self, call: ParsedCall) -> bool:
        """Return whether the sent part begins `call`."""
        return self._writer.name == call.name and call.arguments.startswith(self._writer.arguments)

    def is_call(self, text: str) -> bool:
        return self._reader.read(text) is not None

    def boundary(self) -> None:
        """Release held text at a tag, which no stop string spans."""
        self._end_untagged()
        self._flush()

    def _flush(self) -> None:
        if not self.ended:
            self._say(self.stops.flush())
        self.logprobs.drop(self._passed, self._spaces.held)
        self._spaces.drop()
        self._thought.drop()

    def finish(self) -> None:
        self._end_untagged()
        if not self.ended:
            self._say(self.stops.flush())
            self._flush_spaces()

    def take(self) -> list[chat.Event]:
        events, self._events = self._events, []
        return events

    def _say(self, text: str) -> None:
        self._passed += len(text)
        if text := self._spaces.feed(text):
            self._show(text)

    def _flush_spaces(self) -> None:
        if text := self._spaces.flush():
            self._show(text)

    def _show(self, text: str) -> None:
        self._events.append(chat.TextDelta(text, self.logprobs.take(self._passed - self._spaces.held)))


def _new_id() -> str:
    """Make an id that is unique over all requests, as clients keep results by it."""
    return f"call_{secrets.token_hex(12)}"


# --------------------------------------------------------------------------- of a tokenizer


@dataclass(slots=True, frozen=True)
class _Facts:
    """A tokenizer's facts for the parser.

    hidden    ids that are no text outside a call; dropped: nowhere (end of turn, padding)
    controls  harmony's tags by their ids; empty: another model
    """

    tags: Tags
    hidden: frozenset[int]
    dropped: frozenset[int]
    controls: dict[int, str]


def prepare(tokenizer: Any) -> None:
    """Build at load time the tables over the vocabulary, for which the first request would wait."""
    _facts_of(tokenizer)
    detokenizer(tokenizer)


@functools.lru_cache(maxsize=1)
def _facts_of(tokenizer: Any) -> _Facts:
    calls = (_HERMES, _BARE_FUNCTION)
    if tokenizer.has_tool_calling and tokenizer.tool_call_start != _HERMES.start:
        calls = (CallTags(tokenizer.tool_call_start, tokenizer.tool_call_end or ""),)
    tags = Tags(tokenizer.think_start or "", tokenizer.think_end or "", calls)
    markup: set[int] = set()
    for tag in tags.of(State.ANSWER):
        markup.update(tokenizer.encode(tag, add_special_tokens=False))
    ends = {*tokenizer.eos_token_ids, tokenizer.bos_token_id, tokenizer.pad_token_id} - {None}
    special = {*tokenizer.all_special_ids}
    special |= {int(i) for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    added = {str(token): int(i) for i, token in tokenizer.added_tokens_decoder.items()}
    controls = {added[tag]: tag for tag in CONTROLS} if added.keys() >= set(CONTROLS) else {}
    return _Facts(tags, frozenset(special - markup), frozenset(ends - markup), controls)
