"""Writes a tool call's arguments while the model still generates them.

The pieces are the bytes of the finished call's JSON. A string goes out letter by letter, any other value when
it is complete, a parameter between tags at its end tag. Nothing goes out before the first member begins, so
that text which only looks like a call stays text. How the text is cut into chunks does not matter.

| the call begins with         | format                                        |
|------------------------------|-----------------------------------------------|
| `{"name": …, "arguments": {` | JSON, that key first (Hermes, Qwen)           |
| `<function=NAME>`            | a tag a parameter (Qwen coder)                |
| `NAME<arg_key>`              | a tag a key and a value (GLM, LongCat)        |
| anything else                | read when it is complete (reader.py)          |

A call that breaks off ends as a `ToolCallCut`: at the limit of tokens with all that the model wrote of it;
malformed with its complete members, and the rest is text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Set

from ...constrain.call_formats import MAX_HEAD, READINGS, TagReading
from .reader import NAME, coerce, json_text, loads, typed_text

Parameters = Callable[[str], Mapping[str, Set[str]]]
"""Looks up a tool's name → the JSON types that each parameter may have: `ToolCallReader.parameters`."""


class Writer:
    """Takes the text of a call. This class writes nothing before the call is complete.

    name       of the tool; "" until it is known
    arguments  JSON text that is certain
    dead       what came is malformed, from `pending` on
    """

    def __init__(self, parameters: Parameters):
        self.name = ""
        self.arguments = ""
        self.dead = False
        self._parameters = parameters
        self._kinds: Mapping[str, Set[str]] = {}
        self._text = ""
        self._sent = 0

    @property
    def in_string(self) -> bool:
        """Whether the text so far ends inside a JSON string, so that a tag there is part of it."""
        return False

    @property
    def pending(self) -> str:
        """Text that `arguments` does not have yet, in any form."""
        return self._text

    @property
    def members(self) -> str:
        """Complete members, as an object."""
        return "{}"

    def feed(self, text: str) -> None:
        self._text += text

    def close(self) -> bool:
        """End the call's text. False: it is no complete call."""
        return False

    def cut(self) -> str:
        """Return the arguments, with the known part of the member that was cut off."""
        return self.arguments

    def news(self) -> str:
        """Return the arguments that were not returned before."""
        news, self._sent = self.arguments[self._sent :], len(self.arguments)
        return news


class TagWriter(Writer):
    """Reads a head with the name, then parameters, each a key and a value between tags."""

    def __init__(self, parameters: Parameters, tags: TagReading):
        super().__init__(parameters)
        self._tags = tags
        self._looked = 0

    @property
    def members(self) -> str:
        return self.arguments + "}" if self.arguments else "{}"

    def feed(self, text: str) -> None:
        self._text += text
        if self.dead or not (self.name or self._begin()):
            return
        close = self._tags.close  # nothing is looked for before it comes
        while self._text.find(close, self._looked) >= 0:
            # The pattern of a whole parameter begins at its beginning each time.
            ends = self._tags.closing.search(self._text, self._looked)
            match = self._tags.parameter.match(self._text) if ends else None
            if match is None:
                self._pass_over(self._text.rfind(close))
                return
            self._member(match[1].strip(), self._tags.value(match))
            self._text, self._looked = self._text[match.end() :], 0
        self._looked = max(0, len(self._text) - len(close))

    def close(self) -> bool:
        if self.dead or not self.arguments or not self._tags.end.fullmatch(self._text.rstrip()):
            return False
        self.arguments += "}"
        self._text = ""
        return True

    def _begin(self) -> bool:
        match = self._tags.head.match(self._text)
        if match is None:
            self.dead = len(self._text) > MAX_HEAD
            return False
        name = match[1].strip()
        if match.end() > MAX_HEAD or not NAME.fullmatch(name):
            self.dead = True
            return False
        self.name = name
        self._kinds = self._parameters(name)
        self._text = self._text[match.end() :]
        return True

    def _pass_over(self, at: int) -> None:
        """Pass over an end tag at `at` that ends no value yet, as long as the text behind it may change
        that.
        """
        behind = at + len(self._tags.close)
        rest = self._text[behind:].lstrip()
        open_yet = not rest or (rest[0] == "<" and ">" not in rest)
        self._looked = at if open_yet else behind

    def _member(self, key: str, value: str) -> None:
        value_json = json_text(typed_text(value, self._kinds.get(key)))
        self.arguments += f"{', ' if self.arguments else '{'}{json_text(key)}: {value_json}"


_STRING = r'"(?:[^"\\]|\\.)*"'
_HEAD = re.compile(
    rf'\s*\{{\s*"name"\s*:\s*({_STRING})\s*,\s*"(?:arguments|parameters)"\s*:\s*\{{', re.DOTALL
)
_KEY = re.compile(rf"\s*({_STRING})\s*:\s*(?=\S)", re.DOTALL)
_LETTERS = re.compile(r'(?:[^"\\]|\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))+')
_LONE = re.compile(r'\\(?:[^"\\/bfnrtu]|u[0-9a-fA-F]{0,3}[^0-9a-fA-F])')
"""Matches a backslash that begins no escape: see `double_escapes`."""
_HIGH_HALF = re.compile(r"\\u[dD][89abAB][0-9a-fA-F]{2}$")
_NEXT = re.compile(r"\s*([,}])")


class JsonWriter(Writer):
    """Reads `{"name": "NAME", "arguments": {…}}`."""

    def __init__(self, parameters: Parameters):
        super().__init__(parameters)
        self._members_end = 0  # of `arguments`, behind the last whole member
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
    def members(self) -> str:
        return self.arguments[: self._members_end] + "}" if self._members_end else "{}"

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
        arguments, step = self.arguments, self._step
        if step is JsonWriter._value:
            return arguments + self._prefix + self._text
        if step is JsonWriter._member:
            return arguments + (", " if self._members_end else "{") + self._text.lstrip()
        return arguments

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
            self.name = loads(match[1])
        except ValueError:
            return self._die()
        if not NAME.fullmatch(self.name):
            return self._die()
        self._kinds = self._parameters(self.name)
        self._take(match.end())
        self._step = JsonWriter._member
        return True

    def _member(self) -> bool:
        left = self._text = self._text.lstrip()  # A model may go on with space: it is looked at once.
        match = _KEY.match(left)
        if len(left if match is None else match[0]) > MAX_HEAD:
            return self._die()  # no key is so long, and it would be looked at again and again
        if match is None:
            if left.startswith("}") and not self._members_end:
                return self._die()  # no arguments: nothing to send on
            return self._die() if left and not left.startswith('"') else False
        try:
            self._key = loads(match[1])
        except ValueError:
            return self._die()
        self._prefix = (", " if self._members_end else "{") + json_text(self._key) + ": "
        self._take(match.end())
        kinds = self._kinds.get(self._key)
        if self._text.startswith('"') and (not kinds or "string" in kinds):
            self._take(1)
            self.arguments += self._prefix + '"'
            self._step = JsonWriter._letters
        else:
            self._at, self._depth, self._quoted = 0, 0, False
            self._step = JsonWriter._value
        return True

    def _letters(self) -> bool:
        """Take letters of a string. Half of a pair of surrogates waits for the other."""
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
            self._members_end = len(self.arguments)
            self._step = JsonWriter._between
            return True
        if _LONE.match(self._text):
            self._take(1)
            self.arguments += r"\\"
            return True
        return False

    def _value(self) -> bool:
        """Take a value of another kind, once it is complete."""
        end = self._value_end()
        if end is None:
            return False
        try:
            value = loads(self._text[:end])
            value_json = json_text(coerce(value, self._kinds.get(self._key)))
        except (ValueError, RecursionError):
            return self._die()
        self._take(end)
        self.arguments += self._prefix + value_json
        self._members_end = len(self.arguments)
        self._step = JsonWriter._between
        return True

    def _value_end(self) -> int | None:
        """Return the end of the value, if known; goes on from where the last search stopped."""
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
        self._text = self._text.lstrip()
        match = _NEXT.match(self._text)
        if match is None:
            return self._die() if self._text else False
        self._take(match.end())
        if match[1] == "}":
            self.arguments += "}"
            self._step = JsonWriter._tail
            return False
        self._step = JsonWriter._member
        return True

    def _tail(self) -> bool:
        return False


def writer_for(text: str, parameters: Parameters) -> Writer:
    """Return the writer for a call's beginning; a plain one while none fits, or if names are quoted."""
    begins = text.lstrip()
    if begins.startswith("{"):
        return JsonWriter(parameters)
    tags = next((tags for tags in READINGS if tags.fits(begins)), None)
    return Writer(parameters) if tags is None or tags.quoted else TagWriter(parameters, tags)
