"""What a client was sent of a turn: what it may send back."""

from __future__ import annotations

import json
from dataclasses import dataclass, field

from ..chat import Event, ReasoningDelta, TextDelta, ToolCall
from .canonical import Digest, answer_digest, thought_digest


@dataclass(slots=True)
class Answer:
    """Texts are runs between calls; a call is (name, arguments)."""

    texts: list[str] = field(default_factory=lambda: [""])
    thoughts: list[str] = field(default_factory=list)
    calls: list[tuple[str, str]] = field(default_factory=list)

    def add(self, event: Event) -> None:
        if isinstance(event, TextDelta):
            self.texts[-1] += event.text
        elif isinstance(event, ReasoningDelta):
            self.thoughts.append(event.text)
        elif isinstance(event, ToolCall):
            self.calls.append((event.name, event.arguments))
            self.texts.append("")

    @property
    def digest(self) -> Digest:
        """As `canonical.answer_of` gives it of the echo."""
        return answer_digest(self.texts, ((name, json.loads(arguments)) for name, arguments in self.calls))

    @property
    def thought(self) -> Digest | None:
        return thought_digest(["".join(self.thoughts)])
