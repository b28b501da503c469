"""Answers that begin inside a thought which neither the template nor the model opens.

Only the closing tag tells. An answer that nobody reads before its end is then parsed anew, as one that began
inside a thought, and `Restarted` takes back what was sent. A streamed answer is sent as it comes, so until
the engine ends the model is remembered: its next answers begin inside a thought. One that ends by itself
without a closing tag was none: its text is sent as text, and the memory is taken back.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from ... import chat
from ..sequence.sequence import Likelihood
from .parser import OutputParser

log = logging.getLogger(__name__)


class UnopenedThoughts:
    """Knows whether the model's answers begin inside a thought; `model`: its name in the log."""

    def __init__(self, model: str):
        self.expected = False
        self._model = model
        self._is_logged = False

    def note(self, seen: bool) -> None:
        if seen and not self._is_logged:
            self._is_logged = True
            log.warning(
                "%s: an answer began inside a thought that the template does not open, and the next ones are "
                "taken to begin so, too; `starts-in-thinking = true` for this model says so from the start",
                self._model,
            )
        self.expected = seen


class GuessingParser:
    """Parses an answer that may begin inside a thought. `current`: the parser in charge.

    make       makes one; True: the answer begins inside a thought
    assume     whether the answer may be taken to begin so because the last ones did
    collected  the client reads nothing before the end
    """

    def __init__(
        self, make: Callable[[bool], OutputParser], memory: UnopenedThoughts, assume: bool, collected: bool
    ):
        self._make = make
        self._memory = memory
        self._assumed = assume and memory.expected
        self._collected = collected
        self.current = make(self._assumed)
        self._tokens: list[tuple[int, Likelihood | None]] | None = []
        """All tokens so far; None: they will not be parsed anew."""
        if not (collected or self._assumed):
            self._tokens = None
        self._followed = False  # something was said behind the closing tag

    def add_token(self, token: int, likelihood: Likelihood | None = None) -> list[chat.Event]:
        if self._tokens is not None:
            self._tokens.append((token, likelihood))
        closed = self.current.closes_unopened
        events = self.current.add_token(token, likelihood)
        self._followed |= closed and bool(events)
        if self._tokens and self.current.first_tag and not (self._collected and self._unopened):
            self._tokens = None  # Its first tag is as it should be.
        return events

    def finish(self, reason: chat.FinishReason) -> list[chat.Event]:
        closed = self.current.closes_unopened
        events = self.current.finish(reason)
        self._followed |= closed and bool(events)
        if self._assumed:
            if self.current.first_tag or reason == "length":
                return events
            self._memory.note(seen=False)
            again = self._parsed(False, reason)
            return [chat.Restarted(), *again] if self._collected else [*events, *again]
        if self._unopened and (self._followed or reason == "length"):
            self._memory.note(seen=True)
            if self._collected:
                return [chat.Restarted(), *self._parsed(True, reason)]
        return events

    @property
    def _unopened(self) -> bool:
        return not self._assumed and self.current.closes_unopened

    def _parsed(self, in_thought: bool, reason: chat.FinishReason) -> list[chat.Event]:
        """Return the answer's events, parsed as begun inside a thought, or not."""
        self.current = self._make(in_thought)
        events: list[chat.Event] = []
        for token, likelihood in self._tokens or ():
            events += self.current.add_token(token, likelihood)
        self._tokens = None
        return events + self.current.finish(reason)
