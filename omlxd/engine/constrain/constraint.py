"""Masks over the vocabulary for grammars and JSON schemas (llguidance).

| state    | allowed                                                  | next                           |
|----------|----------------------------------------------------------|--------------------------------|
| open     | what the grammar allows, or the tag that opens thinking  | open, grammar, thinking        |
| thinking | anything but the end of the turn                         | gap, at the tag that closes it |
| gap      | what the grammar allows, or space (`GAP_TOKENS`)         | gap, grammar                   |
| grammar  | what the grammar allows; the turn's end where that may be | done, at the turn's end       |
| done     | anything: the row leaves the batch                       |                                |

A request's thread compiles. The engine thread computes one mask a step and row, while the device works on
the forward pass (decode_batch.py). The first constraint imports llguidance.
"""

from __future__ import annotations

import enum
import logging
import threading
from collections.abc import Sequence
from copy import copy
from itertools import takewhile
from typing import TYPE_CHECKING, Any

import numpy as np

from ...chat import AnswerFormat, Conversation, GenerateRequest
from ...errors import InvalidRequest, OmlxdError, bad_field
from .call_formats import format_name
from .grammar import Grammars, Wanted, brief
from .vocabulary import Vocabulary

if TYPE_CHECKING:
    from llguidance import LLMatcher


log = logging.getLogger(__name__)

GAP_TOKENS = 2
"""Tokens of space between the end of thinking and the answer, where models write an empty line."""


class _State(enum.Enum):
    OPEN = enum.auto()
    THINKING = enum.auto()
    GAP = enum.auto()
    GRAMMAR = enum.auto()
    DONE = enum.auto()


class Constraint:
    """The constraint of one request: `mask` has its next tokens, `advance` takes the token drawn.

    mask   (vocabulary,) bool, or None: anything
    error  why it can't go on, or None; the request has to fail then

    left_out  what of the request's schemas it does not enforce
    bounded   numbers have no more digits than `Vocabulary.end_digits` lets them have
    """

    def __init__(
        self,
        matcher: LLMatcher,
        facts: Vocabulary,
        *,
        thinking: bool,
        may_think: bool,
        bounded: bool = False,
    ):
        self._matcher = matcher
        self._facts = facts
        self._bits = np.zeros((facts.matcher_vocab + 31) // 32, np.int32)
        self._state = _State.THINKING if thinking else _State.OPEN if may_think else _State.GRAMMAR
        self._recent: list[int] = []
        self._gap = 0
        self._bounded = bounded
        self._tail = ""
        self._shared = 0  # tokens so far of a tag that opens thinking, which the grammar allows too
        self.left_out: tuple[str, ...] = ()
        self.error: OmlxdError | None = None
        self.mask: np.ndarray | None = self._next_mask()
        if thinking:  # What follows is computed later; whether it can be is known now.
            self._compute_bits()

    def advance(self, token: int) -> None:
        """Advance by one token; call it for each, in order. Never raises; see `error`."""
        if self.error is None and self._state is not _State.DONE:
            self._take(token)
            self.mask = self._next_mask()

    def forced_tokens(self) -> list[int]:
        """Return the model's tokens of the one text that the grammar leaves, in their usual spelling."""
        if self._state is not _State.GRAMMAR or self.error is not None:
            return []
        trial = self._matcher.deep_copy()  # It may fail; a copy takes some 30 us.
        tokens = trial.compute_ff_tokens()
        valid = tokens[: trial.validate_tokens(tokens)]  # A text that is a control token is spelled as one.
        return [*takewhile(lambda token: token < self._facts.vocab, valid)]

    def masks_along(self, guesses: Sequence[int]) -> list[np.ndarray | None]:
        """Return the masks of the next token and of the one after each draft token, as far as they are
        allowed.

        A guess that ends the turn, or opens thinking, is not gone along with. Changes nothing.
        """
        trial, masks = self.trial(), [self.mask]
        for guess in guesses:
            mask = masks[-1]
            if (mask is not None and not mask[guess]) or trial.breaks_at(guess):
                break
            trial.advance(guess)
            if trial.error is not None:
                break
            masks.append(trial.mask)
        return masks

    def trial(self) -> Constraint:
        """Return a copy that can be advanced by itself."""
        trial = copy(self)
        trial._matcher = self._matcher.deep_copy()  # Some 30 us; a rollback would not mend an error.
        return trial

    def breaks_at(self, guess: int) -> bool:
        """Whether an allowed guess is not gone along with."""
        opens = self._state is _State.OPEN and self._opens_thinking(guess)
        return opens or guess in self._facts.ends

    @property
    def has_begun(self) -> bool:
        """Whether the grammar writes the answer by now."""
        return self._state in (_State.GRAMMAR, _State.DONE)

    def _take(self, token: int) -> None:
        facts = self._facts
        if self._state is _State.OPEN and self._opens_thinking(token):
            self._shared += 1
            if self._shared == len(facts.think_start) or not self._in_grammar(token):
                self._state = _State.THINKING
                self._matcher.rollback(self._shared - 1)
            else:
                self._matcher.consume_token(token)
        elif self._state is _State.THINKING:
            self._recent = [*self._recent, token][-len(facts.think_end) :]
            if tuple(self._recent) == facts.think_end:
                self._state = _State.GAP
        elif self._state is _State.GAP and token in facts.spaces and self._gap < GAP_TOKENS:
            self._gap += 1
        elif token in facts.ends:
            self._state = _State.DONE
        else:
            self._state = _State.GRAMMAR
            if self._bounded:
                self._tail = facts.add(self._tail, token)
            if not self._matcher.consume_token(token):
                self._fail()

    def _opens_thinking(self, token: int) -> bool:
        """Return whether `token` continues the tag that opens thinking, where the grammar may begin alike."""
        return self._facts.think_start[self._shared : self._shared + 1] == (token,)

    def _in_grammar(self, token: int) -> bool:
        return self._matcher.validate_tokens([token]) == 1

    def _next_mask(self) -> np.ndarray | None:
        facts = self._facts
        if self._state is _State.DONE or self.error is not None:
            return None
        if self._state is _State.THINKING:
            return facts.not_ended
        if not self._compute_bits():
            return None
        mask = np.unpackbits(self._bits.view(np.uint8), bitorder="little")[: facts.vocab].view(np.bool_)
        self._correct(mask)
        if self._state is _State.OPEN and facts.think_start:
            mask[facts.think_start[self._shared]] = True
        elif self._state is _State.GAP and self._gap < GAP_TOKENS:
            mask[facts.space_ids] = True
        return mask

    def _compute_bits(self) -> bool:
        """Compute the grammar's own mask; if it fails, returns False, and `error` says why."""
        self._matcher.unsafe_compute_mask_ptr(self._bits.ctypes.data, self._bits.nbytes)
        if self._matcher.is_error():
            self._fail()
        return self.error is None

    def _correct(self, mask: np.ndarray) -> None:
        """Take from `mask` the tokens that llguidance allows against the grammar's meaning.

        - A control token alone, where the grammar wants a text that is spelled as one.
        - A token that ends the turn before the grammar accepts, where a grammar names it.
        - Digits without end.
        """
        facts = self._facts
        if np.count_nonzero(self._bits) == 1 and facts.is_control(only := int(mask.argmax())):
            forced = self._matcher.compute_ff_bytes()
            of_grammar = forced.startswith(b"\xff")  # llguidance's mark of a control token
            if forced and not of_grammar and not self._matcher.validate_tokens([only]):
                mask[:] = False
                mask[facts.plain_start(forced)] = True
        if mask[facts.end_ids].any() and not self._matcher.is_accepting():
            mask[[end for end in facts.end_ids if mask[end] and not self._completes(int(end))]] = False
            if not mask.any():
                self._fail("it names a token that ends the model's turn before its own end")
        if self._bounded:
            facts.end_digits(self._tail, mask)

    def _completes(self, token: int) -> bool:
        trial = self._matcher.deep_copy()
        return trial.consume_token(token) and trial.is_accepting()

    def _fail(self, reason: str = "") -> None:
        reason = reason or brief(self._matcher.get_error())
        log.warning("a grammar failed: %s", reason)
        self.error = InvalidRequest(f"the answer's format can't be held to; give a simpler one: {reason}")


class ConstraintCompiler:
    """Compiles for one model. `tokenizer`: mlx-lm's; `vocab`: width of its logits. Thread-safe.

    The first constraint waits for a table of the tokenizer, about a second for a large one.
    """

    def __init__(self, tokenizer: Any, vocab: int):
        self._tokenizer = tokenizer
        self._vocab = vocab
        self._building = threading.Lock()
        self._made: tuple[Grammars, Vocabulary] | None = None

    def compile(self, request: GenerateRequest, *, thinking: bool) -> Constraint | None:
        """Return the constraint of `request`, or None. Raises InvalidRequest. `thinking`: the prompt ends in
        it.
        """
        prompt = request.prompt
        chat = prompt if isinstance(prompt, Conversation) else None
        wanted = Wanted.of(request, lambda: self._parts("tools")[0].bare_text)
        if wanted is None:
            return None
        from llguidance import LLMatcher

        if chat is not None and request.format is not None:
            self._refuse_tags(request.format)
        grammars, facts = self._parts(wanted.param)
        begun = chat is not None and chat.continue_final
        if begun and grammars.harmony:
            raise InvalidRequest(
                f"{wanted.param}: it can't stand beside an assistant's message to continue: this model "
                "writes a call or a format as a message of its own",
                param=wanted.param,
            )
        grammar, left_out = grammars.of(wanted)
        matcher = LLMatcher(grammars.vocabulary, grammar, log_level=0)
        if matcher.is_error():
            raise InvalidRequest(f"{wanted.param}: {brief(matcher.get_error())}", param=wanted.param)
        may_think = chat is not None and chat.thinking is not False and not begun
        bounded = wanted.format is None or wanted.format.kind == "json" or bool(wanted.tools)
        constraint = Constraint(matcher, facts, thinking=thinking, may_think=may_think, bounded=bounded)
        if constraint.error is not None:  # Its first mask: nothing is computed for such a request.
            raise bad_field(wanted.param, constraint.error.message)
        constraint.left_out = left_out
        return constraint

    def _refuse_tags(self, format: AnswerFormat) -> None:
        """Raise InvalidRequest for a choice that begins with a tag of thinking, as JSON never does."""
        tags = (self._tokenizer.think_start, self._tokenizer.think_end)
        for choice in format.choices:
            if tag := next((tag for tag in tags if tag and choice.lstrip().startswith(tag)), None):
                why = f"{choice[:60]!r} begins with {tag}, the model's tag of thinking"
                raise bad_field(format.param, why)

    # ----------------------------------------------------------------- the tokenizer

    def _parts(self, param: str) -> tuple[Grammars, Vocabulary]:
        with self._building:
            if self._made is None:
                self._made = self._make(param)
            return self._made

    def _make(self, param: str) -> tuple[Grammars, Vocabulary]:
        from llguidance import LLTokenizer
        from llguidance.hf import from_tokenizer

        inner = getattr(self._tokenizer, "_tokenizer", self._tokenizer)
        try:
            made = from_tokenizer(
                inner,
                n_vocab=max(self._vocab, len(inner)),
                eos_token=sorted(self._tokenizer.eos_token_ids),
                slices=LLTokenizer.json_slices(),
            )
        except Exception as error:  # no fast tokenizer, or one that llguidance can't read
            log.warning("no grammars for this tokenizer: %s", error)
            raise bad_field(param, "this model's tokenizer can't be held to a grammar") from error
        added = {str(token): id for id, token in inner.added_tokens_decoder.items()}
        controls = {token: id for token, id in added.items() if made.is_special_token(id)}
        return Grammars(made, format_name(self._tokenizer), controls), Vocabulary(
            self._tokenizer, self._vocab, made
        )
