"""Finds calls that a model writes without its format's tags, where an answer has nothing else.

| written                                              | by                                         |
|------------------------------------------------------|--------------------------------------------|
| `{"name": NAME, "arguments": {…}}`, or `parameters`  | Llama 3.x, small models of any family      |
| several, or a list; `"type": "function"` beside it   | Llama 3.x, Mistral without its first token |
| within a fence, `<tools>`, `functools` and the like  | Qwen2.5 Coder, Gemma 3, Phi 4, Granite     |
| `[NAME(key="text")]`; no brackets in a `tool_code`   | Llama 3.2 and 4, Gemma 3                   |
| `<function=NAME>{…}</function>`, or a tag a key      | Llama 3.1, Qwen's coders                   |
| `<｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME …`  | DeepSeek                                   |

A sentence may stand before the calls, and nothing behind them but a stop string. Text is held back from the
first letter that may begin a call, as long as every letter fits one of a listed tool. At the first that does
not, all of it is text again, and so is the rest of the answer.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Generator, Iterable
from typing import Any

from ..held_text import Beginnings
from .languages import pythonic_calls
from .reader import ParsedCall, ToolCallReader, loads

MOST_HELD = 1 << 17
"""Letters held back at most: a file that a call writes."""
MOST_LEAD = 300
"""Letters before the first call at most."""
MOST_BEHIND = 4096
"""Letters behind the calls in which a stop string is looked for."""
_MOST_DEPTH = 64

_LABELS = ("json", "tool_code", "tool_call", "tool_calls", "tools", "python", "xml")
_CODE = ("tool_code", "tool_call", "tool_calls")
"""Labels of fences whose calls need no brackets; other code that calls something is an answer."""
_FRAMES = ("tools", "tool_call", "tool_calls", "function_call", "|tool_call|", "|tool_calls|")
_BEGIN, _SEPARATOR = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>"
_FUNCTION, _FUNCTION_END, _PARAMETER = "<function=", "</function>", "<parameter="
_OPEN_TAGS = (*(f"<{name}>" for name in _FRAMES), "<|python_tag|>", "<｜tool▁calls▁begin｜>")
_CLOSE_TAGS = (
    *(f"</{name}>" for name in _FRAMES),
    *("<|/tool_call|>", "<|/tool_calls|>", _FUNCTION_END, "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"),
)
_TAGS = (*_OPEN_TAGS, *_CLOSE_TAGS, _FUNCTION, _BEGIN)
_OPENINGS = Beginnings(("{", "[", "```", "functools[", *_OPEN_TAGS, _FUNCTION, _BEGIN))
_KEYS = ('"name"', '"arguments"', '"parameters"', '"type"', '"id"', '"function"')

_SPACE = " \t\r\n"
_PLAIN = {quote: re.compile(rf"[^{quote}\\]*") for quote in "\"'"}
_NUMBER = re.compile(r"[-+.\deE]*")
_PARENS = re.compile(r"[^\"'()\[\]{}]*")
_CLOSING = {"(": ")", "[": "]", "{": "}"}
_SENTENCE = re.compile(r"[.!?]\s+|[。！？]")

_Steps = Generator[None, None, None]
_Letter = Generator[None, None, str]
"""Yields while it waits for more text."""


class UntaggedCalls:
    """Takes an answer's text, in any chunks.

    names  of the tools that may be called; none: nothing is held back
    stops  strings that end the answer
    """

    def __init__(self, reader: ToolCallReader, names: Collection[str], stops: Iterable[str] = ()):
        self._reader, self._names = reader, names
        self._stops = Beginnings(stop for stop in stops if stop)
        self._restart()

    def _restart(self) -> None:
        self._lead = self._held = ""
        self._follower: _Follower | None = None
        self._is_over = not self._names

    @property
    def held(self) -> int:
        """Letters held back."""
        return len(self._follower.text) if self._follower else len(self._held)

    @property
    def stopped_by(self) -> str:
        """The held text from behind the calls to the end of a stop string; "": there is none."""
        return self._follower.stopped_by if self._follower else ""

    def feed(self, text: str) -> str:
        """Return the text that is no call for certain."""
        if self._is_over:
            return text
        shown = ""
        if self._follower is None:
            text, self._held = self._held + text, ""
            opening = _OPENINGS.search(text)
            at = opening.start() if opening else len(text) - _OPENINGS.held(text)
            shown, text = text[:at], text[at:]
            self._lead += shown
            if not _is_lead(self._lead):
                self._is_over = True
                return shown + text
            if opening is None:
                self._held = text
                return shown
            self._follower = _Follower(self._reader, self._names, self._stops)
        if self._follower.feed(text):
            return shown
        self._is_over = True
        text, self._follower = self._follower.text, None
        return shown + text

    def end(self) -> tuple[list[ParsedCall], str]:
        """End this part of the answer: return its calls, or else the held text. Another part may follow."""
        follower, text = self._follower, self._held
        self._restart()
        if follower is None:
            return [], text
        return (follower.calls, "") if follower.is_complete else ([], follower.text)


def _is_lead(text: str) -> bool:
    """Return whether `text` is at most a sentence; "Sure!" and the like are none."""
    sentences = (len(part.split()) > 2 for part in _SENTENCE.split(text))
    return len(text) <= MOST_LEAD and sum(sentences) <= 1


class _Refused(Exception):
    """The text can't be calls."""


class _Follower:
    """Follows text that may be calls, each letter once.

    text   all of it
    calls  those that are complete; `stopped_by`: as UntaggedCalls has it
    """

    def __init__(self, reader: ToolCallReader, names: Iterable[str], stops: Beginnings):
        self.text = self.stopped_by = ""
        self._stops = stops
        self.calls: list[ParsedCall] = []
        self._reader = reader
        self._quoted = [f'"{name}"' for name in names]
        self._names = tuple(names)
        self._at = self._end = 0
        self._is_between = False  # calls and tags
        self._fenced = self._in_code = False
        self._steps = self._read()

    @property
    def is_complete(self) -> bool:
        return bool(self.stopped_by) or (bool(self.calls) and self._is_between)

    def feed(self, text: str) -> bool:
        """Return whether all text so far may still be calls."""
        self.text += text
        try:
            next(self._steps)
        except Exception:  # the model wrote something else; readers raise what they like
            return self._may_stop()
        return self._may_stop() or len(self.text) <= MOST_HELD

    def _may_stop(self) -> bool:
        """Look for a stop string right behind complete calls: whether there is one, or one may begin."""
        if not self.calls or self.stopped_by:
            return bool(self.stopped_by)
        behind = self.text[self._end : self._end + MOST_BEHIND]
        if (stop := self._stops.search(behind)) and not behind[: stop.start()].strip():
            self.stopped_by = behind[: stop.end()]
            return True
        begun = self._stops.held(behind) if len(behind) < MOST_BEHIND else 0
        return begun > 0 and not behind[:-begun].strip()

    # ----------------------------------------------------------------- letters

    def _peek(self) -> _Letter:
        while self._at == len(self.text):
            yield
        return self.text[self._at]

    def _skip(self, letters: str = _SPACE) -> _Letter:
        while (letter := (yield from self._peek())) in letters:
            self._at += 1
        return letter

    def _one_of(self, words: Iterable[str]) -> _Letter:
        """Read one of `words`, none of which begins another."""
        size = 0
        while True:
            letter = yield from self._peek()
            words = [word for word in words if word[size] == letter]
            size += 1
            self._at += 1
            if not words:
                raise _Refused
            if size == len(words[0]):
                return words[0]

    def _named(self, end: str) -> _Letter:
        """Read a tool's name and `end`; returns the name."""
        name = yield from self._one_of([name + end for name in self._names])
        return name.removesuffix(end)

    # ----------------------------------------------------------------- calls and what stands around them

    def _read(self) -> _Steps:
        while True:
            self._is_between, self._end = True, self._at
            if self._may_stop() and self.stopped_by:
                return
            letter = yield from self._skip(_SPACE + ",;")
            self._is_between = False
            start = self._at
            if letter == "{":
                yield from self._json_call(nested=False)
                self._add_json(start)
            elif letter == "[":
                yield from self._list(start)
            elif letter == "<":
                yield from self._tag(start)
            elif letter == "`":
                yield from self._fence()
            elif self._in_code:
                yield from self._python_call()
                self._add_python(f"[{self.text[start : self._at]}]")
            else:
                yield from self._one_of(("functools",))

    def _fence(self) -> _Steps:
        yield from self._one_of(("```",))
        self._fenced, self._in_code = not self._fenced, False
        label = ""
        self._is_between = True
        while self._fenced and ((letter := (yield from self._peek())).isalpha() or letter == "_"):
            self._is_between = False
            self._at += 1
            label += letter
            if not any(each.startswith(label) for each in _LABELS):
                raise _Refused
        if label and label not in _LABELS:
            raise _Refused
        self._in_code = label in _CODE

    def _tag(self, start: int) -> _Steps:
        tag = yield from self._one_of(_TAGS)
        if tag == _FUNCTION:
            yield from self._function(start)
        elif tag == _BEGIN:
            yield from self._deepseek()

    def _list(self, start: int) -> _Steps:
        self._at += 1
        if (yield from self._skip()) == "{":
            yield from self._json_call(nested=False)
            while (yield from self._part("]")):
                yield from self._json_call(nested=False)
            self._add_json(start)
            return
        heads = [name + "(" for name in self._names]
        head = yield from self._one_of([*heads, "TOOL_CALLS]", "/TOOL_CALLS]"])
        if head not in heads:
            return
        yield from self._parentheses()
        while (yield from self._part("]")):
            yield from self._python_call()
        self._add_python(self.text[start : self._at])

    def _part(self, closing: str) -> Generator[None, None, bool]:
        """Read what stands behind a member: True for a comma, and the next one begins."""
        yield from self._skip()
        if (yield from self._one_of((",", closing))) == closing:
            return False
        yield from self._skip()
        return True

    def _function(self, start: int) -> _Steps:
        name = yield from self._named(">")
        if (yield from self._skip()) == "{":
            yield from self._arguments(name)
            return
        at = self._at
        yield from self._one_of((_PARAMETER, _FUNCTION_END))
        while (end := self.text.find(_FUNCTION_END, at)) < 0:
            at = max(at, len(self.text) - len(_FUNCTION_END))
            yield
        self._at = end + len(_FUNCTION_END)
        self._add(self._reader.read(self.text[start : self._at]) or [])

    def _deepseek(self) -> _Steps:
        head = yield from self._one_of([name + _SEPARATOR for name in ("function", *self._names)])
        name, fenced = head.removesuffix(_SEPARATOR), head.startswith(f"function{_SEPARATOR}")
        if fenced:
            name = yield from self._named("\n")
            yield from self._one_of(("```json",))
        yield from self._skip()
        yield from self._arguments(name)
        if fenced:
            yield from self._skip()
            yield from self._one_of(("```",))

    def _arguments(self, name: str) -> _Steps:
        start = self._at
        yield from self._object(0)
        self._add([self._reader.typed(name, loads(self.text[start : self._at]))])

    # ----------------------------------------------------------------- JSON

    def _json_call(self, nested: bool) -> _Steps:
        yield from self._one_of(("{",))
        yield from self._skip()
        while True:
            key = yield from self._one_of(_KEYS)
            yield from self._colon()
            letter = yield from self._peek()
            if key in ('"arguments"', '"parameters"') and letter in '{"n':
                yield from self._value(0)
            elif key == '"function"' and letter == "{" and not nested:
                yield from self._json_call(nested=True)
            elif key == '"type"':
                yield from self._one_of(('"function"',))
            elif key == '"id"':
                yield from self._value(0)
            else:
                yield from self._one_of(self._quoted)
            if not (yield from self._part("}")):
                return

    def _colon(self) -> _Steps:
        yield from self._skip()
        yield from self._one_of((":",))
        yield from self._skip()

    def _value(self, depth: int) -> _Steps:
        letter = yield from self._peek()
        if letter == '"':
            yield from self._string('"')
        elif letter == "{":
            yield from self._object(depth)
        elif letter == "[":
            yield from self._array(depth)
        elif letter in "-0123456789":
            while (match := _NUMBER.match(self.text, self._at)) and match.end() == len(self.text):
                yield
            assert match
            self._at = match.end()
        else:
            yield from self._one_of(("true", "false", "null"))

    def _object(self, depth: int) -> _Steps:
        yield from self._open("{", depth)
        if (yield from self._skip()) == "}":
            self._at += 1
            return
        while True:
            yield from self._string('"')
            yield from self._colon()
            yield from self._value(depth + 1)
            if not (yield from self._part("}")):
                return

    def _array(self, depth: int) -> _Steps:
        yield from self._open("[", depth)
        if (yield from self._skip()) == "]":
            self._at += 1
            return
        while True:
            yield from self._value(depth + 1)
            if not (yield from self._part("]")):
                return

    def _open(self, bracket: str, depth: int) -> _Steps:
        if depth > _MOST_DEPTH:
            raise _Refused
        yield from self._one_of((bracket,))

    def _string(self, quote: str) -> _Steps:
        yield from self._one_of((quote,))
        while True:
            match = _PLAIN[quote].match(self.text, self._at)
            assert match
            self._at = match.end()
            letter = yield from self._peek()
            self._at += 1
            if letter == quote:
                return
            if letter == "\\":
                yield from self._peek()
                self._at += 1

    # ----------------------------------------------------------------- Python

    def _python_call(self) -> _Steps:
        yield from self._named("(")
        yield from self._parentheses()

    def _parentheses(self) -> _Steps:
        """Read arguments behind `(`, up to its `)`."""
        closing = [")"]
        while closing:
            match = _PARENS.match(self.text, self._at)
            assert match
            self._at = match.end()
            letter = yield from self._peek()
            if letter in _PLAIN:
                yield from self._string(letter)
                continue
            self._at += 1
            if letter in _CLOSING:
                closing.append(_CLOSING[letter])
            elif letter in ")]}" and closing.pop() != letter:
                raise _Refused

    # ----------------------------------------------------------------- what was read

    def _add(self, calls: list[ParsedCall]) -> None:
        if not calls or not all(map(self._reader.accepts, calls)):
            raise _Refused
        self.calls += calls

    def _add_json(self, start: int) -> None:
        value = loads(self.text[start : self._at])
        self._add([self._call_of(item) for item in (value if isinstance(value, list) else [value])])

    def _call_of(self, item: dict[str, Any]) -> ParsedCall:
        if isinstance(item.get("function"), dict):
            item = item["function"]
        name = item.get("name") or item["function"]
        arguments = item["arguments"] if "arguments" in item else item["parameters"]
        return self._reader.typed(name, loads(arguments) if isinstance(arguments, str) else arguments or {})

    def _add_python(self, text: str) -> None:
        calls = pythonic_calls(text, self._reader.parameters) or []
        self._add([self._reader.typed(name, arguments) for name, arguments in calls])
