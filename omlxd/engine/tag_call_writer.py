"""The writer of a call whose parameters stand between tags."""

from __future__ import annotations

import re

from .call_writer import MAX_HEAD, Properties, Writer
from .tool_calls import NAME, json_text, typed_text

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


class TagWriter(Writer):
    """A head that holds the name, then parameters, each a key and a value between tags.

    ends  the tag that ends a parameter: nothing is looked for before it comes
    """

    def __init__(self, properties: Properties, head: re.Pattern[str], parameter: re.Pattern[str], ends: str):
        super().__init__(properties)
        self._head: re.Pattern[str] | None = head
        self._parameter = parameter
        self._ends = ends
        self._looked = 0

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


def tag_writer(text: str, properties: Properties) -> TagWriter | None:
    """The writer for a call that begins with `text`; None: it has no tags, or not yet."""
    if text.startswith("<function="):
        return TagWriter(properties, _FUNCTION, _PARAMETER, "</parameter>")
    if (pair := _ARG_KEY.search(text)) and not text.startswith("<function"):
        prefix = pair[1]
        return TagWriter(properties, _PAIRS[prefix][0], _PAIRS[prefix][1], f"</{prefix}arg_value>")
    return None
