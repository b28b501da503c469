"""Where a thought ends by its budget or for going round, and an answer for going round.

A thought is ended by its closing mark: the mark's tokens are the only ones that may be drawn, one after the
other, as where a grammar leaves no choice. They are ordinary tokens of the answer: their KV is stored, and
guesses of them are checked like any.

    what happens                     | the mark begins
    ---------------------------------|------------------------------------------------------------------
    the prompt opens the thought     | behind as many tokens as the budget has
    the answer's first tokens do     | likewise
    a later one opens one            | likewise, `LAG` tokens behind at least
    the thought goes round           | `LAG` tokens behind the one that shows it

So a step in which no mark may begin need not wait for the tokens before it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ...chat import Limited
from .harmony_grammar import CONTROLS
from .repetition import Repetition

if TYPE_CHECKING:
    from ...errors import OmlxdError
    from .constraint import Constraint

LAG = 16
"""Tokens that may be drawn before one has been looked at: as many as the widest verify step draws."""


@dataclass(slots=True, frozen=True)
class Marks:
    """How a model opens and closes a thought, as tokens.

    before, after  what stands around the closing mark as its template writes it
    barred         a token that may not follow these: it would begin another thought; None: any may
    decode         a token's text
    vocab          width of the logits
    """

    start: tuple[int, ...]
    end: tuple[int, ...]
    before: tuple[int, ...]
    after: tuple[int, ...]
    barred: int | None
    decode: Callable[[list[int]], str]
    vocab: int

    @classmethod
    def of(cls, tokenizer: Any, vocab: int, spaces: tuple[str, str]) -> Marks | None:
        """Return those of `tokenizer` (mlx-lm's); None: its model does not think.

        spaces  around the closing mark in its template
        """

        def encode(text: str) -> tuple[int, ...]:
            return tuple(tokenizer.encode(text, add_special_tokens=False)) if text else ()

        added = {str(token): int(id) for id, token in tokenizer.added_tokens_decoder.items()}
        if added.keys() >= set(CONTROLS):  # Another analysis may not follow.
            start, head = encode("<|channel|>analysis<|message|>"), encode("<|start|>assistant<|channel|>")
            return cls(start, (added["<|end|>"],), (), head, start[1], tokenizer.decode, vocab)
        if not tokenizer.think_end_tokens:
            return None
        start, end = tuple(tokenizer.think_start_tokens), tuple(tokenizer.think_end_tokens)
        before, after = map(encode, spaces)
        return cls(start, end, before, after, None, tokenizer.decode, vocab)

    def only(self, token: int) -> np.ndarray:
        """Return a mask (vocabulary,) of one token."""
        mask = np.zeros(self.vocab, np.bool_)
        mask[token] = True
        return mask

    def closing(self, newest: Sequence[int]) -> tuple[int, ...]:
        """Return what closes a thought that ends in `newest`, whose end may have begun the mark."""
        for begun in range(min(len(newest), len(self.end) - 1), 0, -1):
            if tuple(newest[-begun:]) == self.end[:begun]:
                return (*self.end[begun:], *self.after)
        ends_line = bool(newest) and self.decode([newest[-1]]).endswith("\n")
        return (*(() if ends_line else self.before), *self.end, *self.after)


class Limits:
    """The limits of one answer, and its grammar if it has one. Engine thread.

    `mask` has its next tokens, `advance` takes the token drawn.

    grammar     what the answer is held to; None: nothing
    marks       None: no thought is read in the answer
    budget      tokens of thought; None: any number
    thinking    the answer begins inside a thought
    repetition  looks for loops; None: nobody does
    least       no loop ends the answer before so many tokens

    ends_at        the answer ends at so many tokens; None: it goes on
    thought_ended  `budget` or `repetition`, whichever ended a thought; "": the model did
    period         tokens of the repetition that ended a thought or the answer; 0: none did
    news           a sentence for the log, until somebody takes it
    """

    def __init__(
        self,
        grammar: Constraint | None = None,
        marks: Marks | None = None,
        budget: int | None = None,
        *,
        thinking: bool = False,
        repetition: Repetition | None = None,
        least: int = 0,
    ):
        self._grammar, self._marks = grammar, marks
        self._left = budget if marks is not None else None
        self._repetition, self._least = repetition, least
        self._count = self._opened_at = 0
        self._newest: tuple[int, ...] = ()
        self._thinking = False
        self._close_at: int | None = None
        self._forced: tuple[int, ...] = ()
        self._bars = False
        self._loop = 0  # the period of the thought that goes round
        self.ends_at: int | None = None
        self.thought_ended = ""
        self.period = 0
        self.news = ""
        if thinking and marks is not None:
            self._open()
            self._force_if_due()

    # ----------------------------------------------------------------- what the next token may be

    @property
    def error(self) -> OmlxdError | None:
        """Why the answer can't go on."""
        return self._grammar.error if self._grammar is not None else None

    def report(self) -> Limited:
        """Return what the client is told."""
        left_out = self._grammar.left_out if self._grammar is not None else ()
        ended = "repetition" if self.ends_at is not None else ""
        return Limited(left_out, self.thought_ended, ended, self.period)

    @property
    def binds(self) -> bool:
        """Whether the next token can't be drawn before the newest has been looked at."""
        if self._grammar is not None or self._forced or self._bars:
            return True
        if self._close_at is not None:
            return self._count + LAG >= self._close_at
        return self._left is not None and self._left < LAG and self._is_beginning

    @property
    def mask(self) -> np.ndarray | None:
        """(vocabulary,) bool, or None: anything."""
        allowed = self._grammar.mask if self._grammar is not None else None
        if self._marks is None:
            return allowed
        if self._forced:
            return self._marks.only(self._forced[0])
        if self._bars and self._marks.barred is not None:
            barred = ~self._marks.only(self._marks.barred)
            return barred if allowed is None else allowed & barred
        return allowed

    def forced_tokens(self) -> list[int]:
        """Return the tokens that come next for certain, as far as they are known."""
        if self._forced:
            return [*self._forced]
        return self._grammar.forced_tokens() if self._grammar is not None else []

    def masks_along(self, guesses: Sequence[int]) -> list[np.ndarray | None]:
        """Return the masks of the next token and of the one after each draft token, as far as they are
        allowed. Changes nothing."""
        trial = copy(self)
        trial._repetition = None  # What it finds has no effect within `LAG` tokens.
        trial._grammar = self._grammar and self._grammar.trial()
        masks = [self.mask]
        for guess in guesses:
            mask, grammar = masks[-1], trial._grammar
            if (mask is not None and not mask[guess]) or (grammar is not None and grammar.breaks_at(guess)):
                break
            trial.advance(guess)
            if trial.error is not None:
                break
            masks.append(trial.mask)
        return masks

    # ----------------------------------------------------------------- the token drawn

    def advance(self, token: int) -> None:
        """Advance by one token; call it for each, in order. Never raises; see `error`."""
        if self._grammar is not None:
            self._grammar.advance(token)
        self._count += 1
        if self._marks is not None:
            self._follow(token, self._marks)
        if self._repetition is not None:
            self._watch(token, self._repetition)
        self._force_if_due()

    @property
    def _is_beginning(self) -> bool:
        """Whether the next token may be one of a mark that opens the answer, behind two of space at most."""
        return self._marks is not None and self._count < len(self._marks.start) + 2

    def _follow(self, token: int, marks: Marks) -> None:
        was_forced, self._bars = bool(self._forced), False
        if was_forced:
            self._forced = self._forced[1:] if self._forced[0] == token else ()
            self._bars = not self._forced and marks.barred is not None
        self._newest = (*self._newest, token)[-max(len(marks.start), len(marks.end)) :]
        if self._thinking:
            if self._newest[-len(marks.end) :] == marks.end:
                self._close()
        elif self._newest[-len(marks.start) :] == marks.start and not self._is_written:
            self._open()

    @property
    def _is_written(self) -> bool:
        """Whether a grammar writes the answer by now, in which a mark is text."""
        has_marks = self._marks is not None and self._marks.barred is None
        return self._grammar is not None and self._grammar.has_begun and has_marks

    def _open(self) -> None:
        assert self._marks is not None
        self._thinking, self._opened_at = True, self._count
        if self._left is not None:
            least = 0 if self._count <= len(self._marks.start) + 2 else LAG
            self._close_at = self._count + max(least, self._left - len(self._marks.before))

    def _close(self) -> None:
        self._thinking, self._close_at, self._loop = False, None, 0
        if self._left is not None:
            self._left = max(0, self._left - (self._count - self._opened_at))
        if self._repetition is not None:
            self._repetition.begin_anew()

    def _force_if_due(self) -> None:
        """Begin the closing mark where it is time; leave it where a grammar does not let it stand."""
        at = self._close_at
        if self._thinking and not self._forced and at is not None and self._count >= at:
            assert self._marks is not None
            self._forced = self._marks.closing(self._newest if self._count > self._opened_at else ())
            self.thought_ended = "repetition" if self._loop else "budget"
            if self._loop:
                self._tell("reasoning", self._loop)
        if self._forced and self._grammar is not None:
            allowed = self._grammar.mask
            if allowed is not None and not allowed[self._forced[0]]:
                self._forced, self._close_at = (), None

    def _watch(self, token: int, repetition: Repetition) -> None:
        repetition.add(token)
        if self._thinking:
            if not self._loop and repetition.ends_thought():
                self._loop = repetition.period
                latest = self._count + LAG
                self._close_at = latest if self._close_at is None else min(self._close_at, latest)
            return
        may_end = self.ends_at is None and self._count >= self._least
        if may_end and repetition.ends_answer(written=self._grammar is not None):
            self._tell("the answer", repetition.period)
            self.ends_at = self._count

    def _tell(self, what: str, period: int) -> None:
        self.period = period
        self.news = (
            f"{what} is ended after {self._count} tokens, as it repeats the same {period} over and over; "
            "--loop-stop off lets it go on"
        )
