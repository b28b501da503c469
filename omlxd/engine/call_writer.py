"""A tool call's arguments, sent on while the model still writes them.

What goes out is the JSON text that the whole call gets, in the same bytes: members in the model's
order, their values typed by the tool's schema. A string is sent letter by letter, any other value
once it is whole, and a parameter between tags once its end tag stands there. Nothing goes out before
the name is known and the first member has begun, so that text which only looks like a call is still
text. How the text is cut into chunks can't matter.

| the call begins with     | spelling                                           |
|--------------------------|----------------------------------------------------|
| `{"name": …, "arguments": {` | JSON, that key first (Hermes, Qwen)            |
| `<function=NAME>`        | a tag a parameter (Qwen coder)                     |
| `NAME<arg_key>`          | a tag a key and a value (GLM, LongCat)             |
| anything else            | not sent on: read when it is whole (tool_calls.py) |

A call that breaks off after its arguments began to go out can't be made text any more. It ends as a
`ToolCallCut`: cut off by the limit of tokens, with all that the model wrote of it; malformed, with the
members up to there, and the rest of it is text.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable
from typing import Any, Protocol

from .tool_calls import NAME, coerce, json_text, kinds_of, typed_text

Properties = Callable[[str], dict[str, Any]]
"""A tool's name → its parameters' schemas."""

MAX_HEAD = 2000
"""Letters before a call's first argument."""


class Writer(Protocol):
    """name       of the tool; "" until it is known
    arguments  JSON text that is certain
    dead       what came is malformed, from `rest` on
    in_string  the text so far ends inside a JSON string, so that a tag there is part of it
    """

    name: str
    arguments: str
    dead: bool

    @property
    def in_string(self) -> bool: ...

    @property
    def rest(self) -> str:
        """What has come and is in `arguments` in no form."""
        ...

    @property
    def whole(self) -> str:
        """The members that are whole, as an object."""
        ...

    def feed(self, text: str) -> None: ...

    def close(self) -> bool:
        """The call's text has ended. False: it is no whole call."""
        ...

    def cut(self) -> str:
        """The arguments with what is known of the member that was cut off."""
        ...


class LiveCall:
    """A call as its text arrives, in any spelling.

    begun  arguments have gone out
    """

    def __init__(self, properties: Properties):
        self._properties = properties
        self._text = ""
        self._sent = 0
        self._writer: Writer | None = None

    @property
    def begun(self) -> bool:
        return self._sent > 0

    def feed(self, text: str) -> str:
        """More of the arguments, or ""."""
        if self._writer is None:
            self._text += text
            self._writer = self._choose(self._text.lstrip())
            text = self._text
        if self._writer is None:
            return ""
        self._writer.feed(text)
        return self.news()

    @property
    def writer(self) -> Writer:
        assert self._writer is not None
        return self._writer

    def close(self) -> str | None:
        """The last of the arguments of a whole call; None: it is none."""
        return self.news() if self.writer.close() else None

    def resume(self, text: str) -> bool | None:
        """Whether the call is whole with `text` behind what came; None: `text` ends inside its string."""
        trial = copy.copy(self.writer)
        trial.feed(text)
        if trial.in_string:
            return None
        self._writer = trial if trial.close() else self._writer
        return self._writer is trial

    def news(self) -> str:
        """Arguments that have not been given out."""
        arguments = self.writer.arguments
        news, self._sent = arguments[self._sent :], len(arguments)
        return news

    def _choose(self, text: str) -> Writer | None:
        if text.startswith("{"):
            return JsonWriter(self._properties)
        if text.startswith("<function="):
            return TagWriter(self._properties, _FUNCTION, _PARAMETER, "</parameter>")
        if (pair := _ARG_KEY.search(text)) and not text.startswith("<function"):
            prefix = pair[1]
            return TagWriter(self._properties, _PAIRS[prefix][0], _PAIRS[prefix][1], f"</{prefix}arg_value>")
        return None


# --------------------------------------------------------------------------- JSON

_STRING = r'"(?:[^"\\]|\\.)*"'
_HEAD = re.compile(
    rf'\s*\{{\s*"name"\s*:\s*({_STRING})\s*,\s*"(?:arguments|parameters)"\s*:\s*\{{', re.DOTALL
)
_KEY = re.compile(rf"\s*({_STRING})\s*:\s*(?=\S)", re.DOTALL)
_LETTERS = re.compile(r'(?:[^"\\]|\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))+')
_HIGH_HALF = re.compile(r"\\u[dD][89abAB][0-9a-fA-F]{2}$")
_NEXT = re.compile(r"\s*([,}])")


class JsonWriter:
    """`{"name": "NAME", "arguments": {…}}`."""

    def __init__(self, properties: Properties):
        self.name = ""
        self.arguments = ""
        self.dead = False
        self._properties = properties
        self._types: dict[str, Any] = {}
        self._text = ""
        self._mark = 0  # of `arguments`, behind the last whole member
        self._step: Callable[[JsonWriter], bool] = JsonWriter._head
        self._prefix = ""
        self._key = ""
        self._at, self._depth, self._quoted = 0, 0, False

    @property
    def in_string(self) -> bool:
        return not self.dead and (
            self._step is JsonWriter._letters or (self._step is JsonWriter._value and self._quoted)
        )

    @property
    def rest(self) -> str:
        return self._text

    @property
    def whole(self) -> str:
        return self.arguments[: self._mark] + "}" if self._mark else "{}"

    def feed(self, text: str) -> None:
        self._text += text
        while not self.dead and self._step(self):
            pass

    def close(self) -> bool:
        if self.dead or self._step is not JsonWriter._tail or not self.arguments:
            return False
        try:
            json.loads('{"":0' + self._text)
        except (ValueError, RecursionError):
            return False
        self._text = ""
        return True

    def cut(self) -> str:
        if self._step is JsonWriter._value:
            return self.arguments + self._prefix + self._text
        if self._step is JsonWriter._member:
            return self.arguments + (", " if self._mark else "{") + self._text.lstrip()
        return self.arguments

    # ----------------------------------------------------------------- steps

    def _die(self) -> bool:
        self.dead = True
        return False

    def _take(self, size: int) -> str:
        taken, self._text = self._text[:size], self._text[size:]
        return taken

    def _head(self) -> bool:
        match = _HEAD.match(self._text)
        if match is None or match.end() > MAX_HEAD:
            return self._die() if len(self._text) > MAX_HEAD else False
        try:
            self.name = json.loads(match[1], strict=False)
        except ValueError:
            return self._die()
        if not NAME.fullmatch(self.name):
            return self._die()
        self._types = self._properties(self.name)
        self._take(match.end())
        self._step = JsonWriter._member
        return True

    def _member(self) -> bool:
        match = _KEY.match(self._text)
        if match is None:
            left = self._text.lstrip()
            if left.startswith("}") and not self._mark:
                return self._die()  # no arguments: nothing to send on
            return self._die() if left and not left.startswith('"') else False
        try:
            self._key = json.loads(match[1], strict=False)
        except ValueError:
            return self._die()
        self._prefix = (", " if self._mark else "{") + json_text(self._key) + ": "
        self._take(match.end())
        kinds = kinds_of(self._types.get(self._key))
        if self._text.startswith('"') and (not kinds or "string" in kinds):
            self._take(1)
            self.arguments += self._prefix + '"'
            self._step = JsonWriter._letters
        else:
            self._at, self._depth, self._quoted = 0, 0, False
            self._step = JsonWriter._value
        return True

    def _letters(self) -> bool:
        """Letters of a string. Half of a pair of surrogates waits for the other."""
        if match := _LETTERS.match(self._text):
            letters = match[0]
            half = _HIGH_HALF.search(letters)
            if half and len(self._text) - match.end() < 6 and '"' not in self._text[match.end() :]:
                letters = letters[: half.start()]
            if letters:
                self.arguments += json_text(json.loads(f'"{self._take(len(letters))}"', strict=False))[1:-1]
            if half and len(letters) < match.end():
                return False
        if self._text.startswith('"'):
            self._take(1)
            self.arguments += '"'
            self._mark = len(self.arguments)
            self._step = JsonWriter._between
            return True
        if self._text.startswith("\\") and len(self._text) > (5 if self._text[1:2] == "u" else 1):
            return self._die()
        return False

    def _value(self) -> bool:
        """A value of any other kind, taken once it is whole."""
        end = self._value_end()
        if end is None:
            return False
        try:
            value = json.loads(self._text[:end], strict=False)
            told = json_text(coerce(value, self._types.get(self._key)))
        except (ValueError, RecursionError):
            return self._die()
        self._take(end)
        self.arguments += self._prefix + told
        self._mark = len(self.arguments)
        self._step = JsonWriter._between
        return True

    def _value_end(self) -> int | None:
        """Where the value ends, if that is known; goes on from where it stopped looking."""
        text = self._text
        while self._at < len(text):
            letter = text[self._at]
            if self._quoted:
                if letter == "\\":
                    if self._at + 1 == len(text):
                        return None
                    self._at += 1
                elif letter == '"':
                    self._quoted = False
            elif letter == '"':
                self._quoted = True
            elif letter in "{[":
                self._depth += 1
            elif letter in "}],":
                if self._depth == 0:
                    return self._at
                self._depth -= letter != ","
            self._at += 1
        return None

    def _between(self) -> bool:
        match = _NEXT.match(self._text)
        if match is None:
            return self._die() if self._text.strip() else False
        self._take(match.end())
        if match[1] == "}":
            self.arguments += "}"
            self._step = JsonWriter._tail
            return False
        self._step = JsonWriter._member
        return True

    def _tail(self) -> bool:
        return False


# --------------------------------------------------------------------------- tags

_FUNCTION = re.compile(r"\s*<function=([^>]*)>")
_PARAMETER = re.compile(r"\s*<parameter=([^>]*)>(.*?)</parameter>\s*(?=<parameter=|</function>)", re.DOTALL)
_ARG_KEY = re.compile(r"<(longcat_|)arg_key>")
_PAIRS = {
    prefix: (
        re.compile(rf"\s*([^<]*?)\s*(?=<{prefix}arg_key>)"),
        re.compile(
            rf"\s*<{prefix}arg_key>(.*?)</{prefix}arg_key>\s*<{prefix}arg_value>(.*?)</{prefix}arg_value>",
            re.DOTALL,
        ),
    )
    for prefix in ("", "longcat_")
}


class TagWriter:
    """A head that holds the name, then parameters, each a key and a value between tags.

    ends  the tag that ends a parameter: nothing is looked for before it comes
    """

    def __init__(self, properties: Properties, head: re.Pattern[str], parameter: re.Pattern[str], ends: str):
        self.name = ""
        self.arguments = ""
        self.dead = False
        self._properties = properties
        self._types: dict[str, Any] = {}
        self._text = ""
        self._head: re.Pattern[str] | None = head
        self._parameter = parameter
        self._ends = ends
        self._looked = 0
        self.in_string = False

    @property
    def rest(self) -> str:
        return self._text

    @property
    def whole(self) -> str:
        return self.arguments + "}" if self.arguments else "{}"

    def feed(self, text: str) -> None:
        self._text += text
        if self.dead or (self._head is not None and not self._begin(self._head)):
            return
        while self._text.find(self._ends, self._looked) >= 0:
            match = self._parameter.match(self._text)
            if match is None:
                return
            self._member(match[1].strip(), match[2])
            self._text, self._looked = self._text[match.end() :], 0
        self._looked = max(0, len(self._text) - len(self._ends))

    def close(self) -> bool:
        rest = self._text.strip()
        if self.dead or not self.arguments or rest != ("</function>" if self._ends == "</parameter>" else ""):
            return False
        self.arguments += "}"
        self._text = ""
        return True

    def cut(self) -> str:
        return self.arguments

    def _begin(self, head: re.Pattern[str]) -> bool:
        match = head.match(self._text)
        if match is None:
            return False
        name = match[1].strip()
        if match.end() > MAX_HEAD or not NAME.fullmatch(name):
            self.dead = True
            return False
        self.name, self._head = name, None
        self._types = self._properties(name)
        self._text = self._text[match.end() :]
        return True

    def _member(self, key: str, value: str) -> None:
        if self._ends == "</parameter>":  # one newline each side belongs to the tags
            value = value.removeprefix("\n").removesuffix("\n")
        told = json_text(typed_text(value, self._types.get(key), key in self._types))
        self.arguments += f"{', ' if self.arguments else '{'}{json_text(key)}: {told}"
