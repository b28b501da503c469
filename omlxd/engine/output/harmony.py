"""Splits gpt-oss's output (harmony) into reasoning, answer and calls. Sans-I/O and without a tokenizer.

    <|channel|>analysis<|message|>…<|end|><|start|>assistant<|channel|>final<|message|>…<|return|>
    <|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{…}<|call|>

A message is a header, `<|message|>`, a body and a tag that ends it. The output begins inside a header.

    the header says              | the body is
    -----------------------------|------------------------------------------------------------
    a recipient of `functions.`  | that function's arguments as JSON
    analysis                     | reasoning, whatever else the header says
    any other recipient          | the arguments of a tool of that name
    commentary, final, none      | answer

Tags are tokens and come by `control`, so no argument ends its call. What makes no sense is shown as text. A
model that is held to a grammar writes no headers: the `Splitter` for other models reads its text.
"""

from __future__ import annotations

import re

from ..constrain.harmony_grammar import CONTROLS
from .calls.reader import MAX_NAME, NAME, json_text
from .splitter import Sink, Splitter, State, Tags

_START, _CHANNEL, _CONSTRAIN, _MESSAGE, *_ = CONTROLS
_NAMED = '{"name": '
_MAX_HEADER = 300
"""Letters of a header at most; longer text, or of two lines, is none."""
_NAME = re.compile(r"\s*(analysis|commentary|final)")
_TO = re.compile(r"to=\s*(\S+)")
_ROLES = ("assistant", "user", "system", "developer", "tool", "all")


class HarmonySplitter:
    """Text by `feed`, in any chunks, and tags by `control`; then `finish` once. As `Splitter` otherwise.

    calls  whether calls are looked for
    tags   of text without headers
    """

    def __init__(self, tags: Tags, sink: Sink, calls: bool):
        self._tags = tags
        self._sink = sink
        self._calls = calls
        self._position = 0
        self._state: State | None = None  # None: in a header
        self._plain: Splitter | None = None
        self._opening = True  # nothing but space since the beginning or the last message's end
        self._role, self._channel = "", ""
        self._gap = ""  # goes before the next letter of the body
        self._bare = True
        self._shown: set[State] = set()  # kinds of blocks since the last call
        self._recipient = self._head = ""
        self._body: list[str] = []

    @property
    def state(self) -> State:
        if self._plain is not None:
            return self._plain.state
        return self._state or State.ANSWER

    @property
    def in_answer(self) -> bool:
        return self._plain.in_answer if self._plain is not None else self._state is State.ANSWER

    @property
    def position(self) -> int:
        return self._plain.position if self._plain is not None else self._position

    def feed(self, text: str) -> None:
        if self._plain is not None:
            self._plain.feed(text)
        elif self._state is None:
            self._in_header(text)
        elif self._state is State.CALL:
            self._position += len(text)
            self._body.append(text)
            self._sink.call_text(text)
        else:
            self._show(text)

    def control(self, tag: str) -> None:
        """Take one of `CONTROLS`."""
        in_header = self._state is None and self._plain is None
        if tag == _MESSAGE and in_header:
            self._open()
        elif tag == _CONSTRAIN and in_header:
            self._add(" ")
        elif tag == _CHANNEL and in_header:
            self._channel = " "
        elif tag not in (_MESSAGE, _CONSTRAIN):
            self._end(ended=True)
            self._opening = tag != _START
            self._channel = " " if tag == _CHANNEL else ""

    def finish(self, ended: bool) -> None:
        """End the text. `ended`: the model ended its turn, it was not cut off."""
        self._end(ended)

    # ----------------------------------------------------------------- headers

    def _add(self, text: str) -> None:
        if self._channel:
            self._channel += text
        else:
            self._role += text

    def _in_header(self, text: str) -> None:
        self._position += len(text)
        self._add(text)
        header = (self._role + self._channel).lstrip()
        most = _MAX_HEADER + MAX_NAME * ("to=" in header)
        words = self._opening and not self._channel and not "to=".startswith(header[:3])
        if words or "\n" in header or len(header) > most:
            self._spill()

    def _spill(self) -> None:
        """Pass on as text what was taken for a header."""
        text = (self._role + _NAME.sub("", self._channel, count=1)).lstrip()
        self._position -= len(text)
        self._plain = Splitter(self._tags, self._sink)
        self._plain.position = self._position
        self._role = self._channel = ""
        self._plain.feed(text)

    def _open(self) -> None:
        """Begin the message of a complete header."""
        named = _NAME.match(self._channel)
        channel = named[1] if named else ""
        to = _TO.search(f"{self._role} {self._channel}")
        self._role = self._channel = ""
        self._recipient = to[1] if to and to[1] not in _ROLES else ""
        function = self._recipient.removeprefix("functions.")
        if channel == "analysis" and function == self._recipient:
            self._begin(State.REASONING)
        elif not function:
            self._begin(State.ANSWER)
        elif self._calls and NAME.fullmatch(function):
            self._state, self._body = State.CALL, []
            self._head = f'{_NAMED}{json_text(function)}, "arguments": '
            self._sink.call_begins()
            self._sink.call_text(self._head)
        else:
            self._begin_unread()

    # ----------------------------------------------------------------- bodies

    def _begin(self, state: State) -> None:
        self._sink.boundary()
        self._state, self._bare = state, True
        self._gap = "\n\n" if state in self._shown else ""

    def _begin_unread(self) -> None:
        """Begin an answer that should have been a call."""
        self._begin(State.ANSWER)
        self._gap += f"to={self._recipient} "

    def _show(self, text: str) -> None:
        size, shown = len(text), text.lstrip() if self._bare else text
        if not shown:
            self._position += size
            return
        show = self._sink.answer if self._state is State.ANSWER else self._sink.reasoning
        if self._gap:
            self._sink.reasoning("")  # the header's letters are none of the answer's
            show(self._gap)
            self._gap = ""
        self._bare = False
        self._shown.add(self.state)
        self._position += size
        show(shown)

    def _end(self, ended: bool) -> None:
        """End the message; a header follows, or nothing."""
        if self._plain is not None:
            self._plain.finish(ended)
            self._shown.add(State.ANSWER)
            self._position, self._plain = self._plain.position, None
        elif self._state is State.CALL:
            self._end_call(ended)
        elif self._state is None and self._opening and not self._channel and self._role.strip():
            self._spill()
            self._end(ended)
        self._state = None
        self._role = self._channel = ""

    def _end_call(self, ended: bool) -> None:
        body = "".join(self._body)
        arguments = body if body.strip() else "{}"
        if ended and self._sink.is_call(self._head + arguments + "}"):
            rest = "}" if arguments is body else "{}}"
            self._sink.call_text(rest)
            done = self._sink.call(self._head + arguments + "}")
        else:
            done = self._sink.call_breaks(_NAMED, self._head.removeprefix(_NAMED) + body, ended)
        if done:
            self._shown.clear()
            return
        self._position -= len(body)
        self._begin_unread()
        self._show(body)
