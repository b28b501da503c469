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

from .call_writers import Properties, Writer, writer_for
from .tool_calls import ParsedCall


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
            self._writer = writer_for(self._text.lstrip(), self._properties)
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

    def begins(self, call: ParsedCall) -> bool:
        """Whether what has gone out is the beginning of `call`."""
        return self.writer.name == call.name and call.arguments.startswith(self.writer.arguments)

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
