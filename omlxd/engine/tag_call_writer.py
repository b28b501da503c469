"""The writer of a call whose parameters stand between tags."""

from __future__ import annotations

from .call_spellings import READINGS, TagReading
from .call_writer import MAX_HEAD, Properties, Writer
from .tool_calls import NAME, json_text, typed_text


class TagWriter(Writer):
    """A head that holds the name, then parameters, each a key and a value between tags."""

    def __init__(self, properties: Properties, tags: TagReading):
        super().__init__(properties)
        self._tags = tags
        self._looked = 0

    @property
    def whole(self) -> str:
        return self.arguments + "}" if self.arguments else "{}"

    def feed(self, text: str) -> None:
        self._text += text
        if self.dead or not (self.name or self._begin()):
            return
        close = self._tags.close  # nothing is looked for before it comes
        while self._text.find(close, self._looked) >= 0:
            match = self._tags.parameter.match(self._text)
            if match is None:
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

    def cut(self) -> str:
        return self.arguments

    def _begin(self) -> bool:
        match = self._tags.head.match(self._text)
        if match is None:
            return False
        name = match[1].strip()
        if match.end() > MAX_HEAD or not NAME.fullmatch(name):
            self.dead = True
            return False
        self.name = name
        self._types = self._properties(name)
        self._text = self._text[match.end() :]
        return True

    def _member(self, key: str, value: str) -> None:
        told = json_text(typed_text(value, self._types.get(key), key in self._types))
        self.arguments += f"{', ' if self.arguments else '{'}{json_text(key)}: {told}"


def tag_writer(text: str, properties: Properties) -> TagWriter | None:
    """The writer for a call that begins with `text`; None: it has no tags, or not yet, or quoted names."""
    tags = next((tags for tags in READINGS if tags.fits(text)), None)
    return TagWriter(properties, tags) if tags is not None and not tags.quoted else None
