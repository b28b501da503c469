"""Splits generated text into reasoning, answer and calls by its tags. Sans-I/O and without a tokenizer.

    state      | sees               | then
    -----------|--------------------|-----------------------------------------------------------
    ANSWER     | think start        | REASONING
               | think end          | an orphan: dropped
               | call start         | CALL
               | call end           | dropped right after a call, else text
    REASONING  | think end          | ANSWER
               | think start        | dropped at the block's beginning, else text
               | the output's end   | calls at the block's end are made, if the model ended it
    CALL       | call end           | a call, or its text as answer; ANSWER
               | the output's end   | a call, a cut call, or its text as answer

Only what may be the beginning of a tag is held back. How the text is cut into chunks does not matter.
"""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass

from .held_text import Beginnings


class State(enum.Enum):
    ANSWER = enum.auto()
    REASONING = enum.auto()
    CALL = enum.auto()


@dataclass(slots=True, frozen=True)
class CallTags:
    """Tags of a call. `end` "": it runs to the output's end. `in_text`: the tags are part of the text."""

    start: str
    end: str
    in_text: bool = False


@dataclass(slots=True, frozen=True)
class Tags:
    """Tags of thoughts and calls; empty: no such markup. No tag may be the beginning of another."""

    think_start: str = ""
    think_end: str = ""
    calls: tuple[CallTags, ...] = ()

    def of(self, state: State) -> tuple[str, ...]:
        """Return the tags that mean something in `state` (ANSWER or REASONING)."""
        tags = [self.think_start, self.think_end]
        if state is State.ANSWER:
            tags += [tag for call in self.calls for tag in (call.start, call.end)]
        return tuple(dict.fromkeys(tag for tag in tags if tag))


class Sink:
    """Receives a `Splitter`'s output in the text's order; a subclass overrides what it needs.

    answer, reasoning  text, without space at the beginning of a block
    call_begins        what looks like a call follows, by `call_text`
    call               whether `text` was a call; if not, the splitter shows it as answer
    call_breaks        the output ends in a call without its end tag: return whether nothing of it is text
    call_holds         whether a call that is being sent is inside a string, where an end tag may be text
    call_resumes       whether `text`, after that end tag, completes it; None: it is still in a string
    call_broken        the call ended at that end tag
    is_call            whether `text` would be a call
    boundary           a block of reasoning begins or ends here
    """

    def answer(self, text: str) -> None: ...
    def reasoning(self, text: str) -> None: ...
    def call_begins(self) -> None: ...
    def call_text(self, text: str) -> None: ...

    def call(self, text: str) -> bool:
        return False

    def call_breaks(self, tag: str, text: str, ended: bool) -> bool:
        return False

    def call_holds(self) -> bool:
        return False

    def call_resumes(self, text: str) -> bool | None: ...
    def call_broken(self) -> None: ...

    def is_call(self, text: str) -> bool:
        return False

    def boundary(self) -> None: ...


class Splitter:
    """Splits text from `feed`, in any chunks; then `finish` once.

    held  a grammar writes the answer: tags in it are its text
    """

    def __init__(self, tags: Tags, sink: Sink, state: State = State.ANSWER, held: bool = False):
        self.state = state
        self.position = 0
        """Letters of the text that are done."""
        self.first_tag = ""
        """First tag that ended a thought, or began one or a call."""
        self._tags = tags
        self._sink = sink
        self._all_text = False  # nothing is markup any more
        self._is_held = held
        self._scans = {s: Beginnings(tags.of(s)) for s in (State.ANSWER, State.REASONING)}
        self._text = ""
        self._bare = state is State.REASONING  # nothing but space since the last tag
        self._after_call = False
        self._thought: list[str] = []  # the text of this block of reasoning
        self._call: list[str] = []
        self._held: int | None = None  # where in the call an end tag stands that may be text
        self._call_tags = CallTags("", "")
        self._call_end = Beginnings(())

    @property
    def in_answer(self) -> bool:
        return self.state is State.ANSWER

    def feed(self, text: str) -> None:
        self._text += text
        while self._step_call() if self.state is State.CALL else self._step_text():
            pass

    def finish(self, ended: bool) -> None:
        """End the text. `ended`: the model ended its turn, it was not cut off."""
        while self.state is State.CALL:
            self._end_open_call(ended)
            self.feed("")
        self._show(self._take(len(self._text)))
        if self.state is State.REASONING and ended and self._tags.calls:
            self._call_from_thought()

    def _call_from_thought(self) -> None:
        """Take calls from the end of a turn that ended in thought; other calls were only considered."""
        last = _LastCalls(self._sink)
        splitter = Splitter(Tags(calls=self._tags.calls), last)
        splitter.feed("".join(self._thought))
        splitter.finish(ended=True)
        for text in last.calls:
            self._sink.call_begins()
            self._sink.call(text)

    # ----------------------------------------------------------------- reasoning and answer

    def _step_text(self) -> bool:
        """Process the text up to the next tag; False when more is needed."""
        if self._all_text:
            self._show(self._take(len(self._text)))
            return False
        scan = self._scans[self.state]
        match = scan.search(self._text)
        if match is None:
            self._show(self._take(len(self._text) - scan.held(self._text)))
            return False
        self._show(self._take(match.start()))
        self._take(len(match[0]))
        self._tag(match[0])
        return True

    def _take(self, size: int) -> str:
        taken, self._text = self._text[:size], self._text[size:]
        self.position += size
        return taken

    def _tag(self, tag: str) -> None:
        if self.state is State.REASONING:
            if tag == self._tags.think_end:
                self._enter(State.ANSWER, tag)
            elif not self._bare:
                self._show(tag)
        elif tag == self._tags.think_start:
            self._enter(State.REASONING, tag)
        elif tag == self._tags.think_end:
            self._enter(State.ANSWER, tag)
        elif call := next((call for call in self._tags.calls if call.start == tag), None):
            self.state = State.CALL
            self.first_tag = self.first_tag or tag
            self._call, self._call_tags = [], call
            self._sink.call_begins()
            if call.in_text:
                self._sink.call_text(call.start)
            self._call_end = Beginnings((call.end,) if call.end else ())
        elif not (self._after_call and self._bare):
            self._show(tag)

    def _enter(self, state: State, tag: str) -> None:
        self._sink.boundary()
        self.first_tag = self.first_tag or tag
        self.state = state
        self._bare = True
        self._after_call = False
        self._thought.clear()

    def _show(self, text: str) -> None:
        if self._bare:
            text = text.lstrip()
        if text:
            self._bare = False
            self._all_text |= self._is_held and self.state is State.ANSWER and not text.isspace()
            if self.state is State.REASONING and self._tags.calls:
                self._thought.append(text)
            (self._sink.answer if self.state is State.ANSWER else self._sink.reasoning)(text)

    # ----------------------------------------------------------------- calls

    def _step_call(self) -> bool:
        """Look for the call's end. An end tag inside an open JSON string is part of that string."""
        end = self._call_tags.end
        at = self._text.find(end) if end else -1
        if at < 0:
            self._in_call(self._take(len(self._text) - self._call_end.held(self._text)))
            return False
        self._in_call(self._take(at))
        self._take(len(end))
        body = "".join(self._call)
        if self._call_tags.in_text:
            self._sink.call_text(end)
        if self._held is not None:
            self._resume(body, end)
        elif self._read(body, end):
            self._after_call = True
        elif self._sink.call_holds():
            self._held, self._call = len(body), [body, end]
        elif in_json_string(body):
            self._call = [body]
            self._in_call(end)
        else:
            self._give_back(body + end)
        return True

    def _in_call(self, text: str) -> None:
        self._call.append(text)
        if self._held is None:
            self._sink.call_text(text)

    def _resume(self, body: str, end: str) -> None:
        """Continue a call at another end tag behind one that may have been text."""
        ended = self._sink.call_resumes(body[self._held :])
        if ended is None:
            self._call = [body, end]
        elif ended:
            self._leave_call()
        else:
            self._break(body + end)

    def _break(self, body: str) -> None:
        """End the call at its first end tag after all; the text behind it is read again."""
        assert self._held is not None
        rest = body[self._held + len(self._call_tags.end) :]
        self._sink.call_broken()
        self._leave_call()
        self._text = rest + self._text
        self.position -= len(rest)

    def _leave_call(self) -> None:
        self.state = State.ANSWER
        self._bare = self._after_call = True
        self._held = None

    def _read(self, body: str, end: str) -> bool:
        tags = self._call_tags
        if not self._sink.call(tags.start + body + end if tags.in_text else body):
            return False
        self.state = State.ANSWER
        self._bare = True
        return True

    def _end_open_call(self, ended: bool) -> None:
        self._in_call(self._take(len(self._text)))
        body = "".join(self._call)
        end = self._call_tags.end
        if self._held is not None:
            if ended and self._sink.call_resumes(body[self._held :]):
                self._leave_call()
            else:
                self._break(body)
            return
        if self._sink.call_breaks(self._call_tags.start, body, ended):
            self._leave_call()
            return
        if (ended or not end) and self._read(body, ""):
            return
        # Up to its first end tag it is text for certain; calls may follow behind that.
        head, tag, self._text = body.partition(end) if end else (body, "", "")
        self.position -= len(self._text)
        self._give_back(head + tag)

    def _give_back(self, body: str) -> None:
        """Give back as answer text what looked like a call."""
        self.state = State.ANSWER
        self._show(self._call_tags.start + body)


class _LastCalls(Sink):
    """Keeps the calls behind which there is no text."""

    def __init__(self, sink: Sink):
        self.calls: list[str] = []
        self._sink = sink

    def answer(self, text: str) -> None:
        if text.strip():
            self.calls.clear()

    def call(self, text: str) -> bool:
        if self._sink.is_call(text):
            self.calls.append(text)
            return True
        return False


_ESCAPE = re.compile(r"\\.", re.DOTALL)


def in_json_string(text: str) -> bool:
    """Return whether JSON `text` ends inside a string."""
    return text.lstrip().startswith(("{", "[")) and _ESCAPE.sub("", text).count('"') % 2 == 1
