"""Assistant turns as they were generated, for clients that echo them in another shape.

A client sends an assistant's turn back without its thinking, or with its calls' arguments written
anew; a template may strip old thinking itself. Rendered from that, the turn has other tokens than
those that were generated, and the cached prefix ends there. So the exact tokens are remembered and
put in place of the rendered turn (splicing.py) where all of this holds:

- the same scope (session and cache salt), the same canonical conversation before it;
- the echo's text and calls are those that the client was sent; its thinking too, if it has any;
- the prompt that the turn was generated from is, token for token, the prompt that is being built.

So the model sees nothing that it did not write itself, or that the client did not send; a turn that
the client has edited is rendered as the client sent it. Turns that ended by themselves are remembered
alone: not those cut off by a limit, a stop string or a client that went away.

In memory only. After a restart an old conversation is healed from its next turn on; what comes
before is computed once more where its template strips thinking, and is found in the cold tier where
it doesn't.
"""

from __future__ import annotations

import hashlib
import threading
from array import array
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from .canonical import Digest

MOST_BYTES = 32 << 20
"""Of remembered turns: about eight million generated tokens."""

REASONS = ("edited", "thinking_edited", "ambiguous", "prefix", "template", "too_long")
"""Why a turn is rendered as the client sent it, though one was generated at its place:

edited, thinking_edited  the client changed its text or calls, or its thinking
ambiguous                two conversations without a name look the same, and theirs differed
prefix                   what stands before it has other tokens than it was generated from
template                 the template's text can't be told apart around it
too_long                 the prompt would no longer fit
"""

_TURN_BYTES = 400
"""What a turn costs beside its tokens."""


class PrefixDigest:
    """Digest of a growing list of token ids."""

    __slots__ = ("_state",)

    def __init__(self, tokens: Sequence[int] = ()):
        self._state = hashlib.blake2b(digest_size=16)
        self.add(tokens)

    def add(self, tokens: Sequence[int]) -> PrefixDigest:
        self._state.update(array("I", tokens).tobytes())
        return self

    def copy(self) -> PrefixDigest:
        other = PrefixDigest.__new__(PrefixDigest)
        other._state = self._state.copy()
        return other

    @property
    def value(self) -> Digest:
        return self._state.digest()


@dataclass(slots=True, frozen=True)
class Turn:
    """A turn that the model wrote.

    prompt         digest of the tokens it was generated from, `prompt_length` of them
    tokens         what was generated, without the token that ended the turn
    whole          digest of both
    thought        digest of its thinking; None: it had none
    """

    prompt: Digest
    prompt_length: int
    tokens: array[int]
    whole: Digest
    thought: Digest | None

    @property
    def length(self) -> int:
        """Tokens of the prompt and the turn."""
        return self.prompt_length + len(self.tokens)


class Scope(NamedTuple):
    """Whose turns: `session` as the client named it, "" where it didn't; `salt` of its cache.

    A sub-agent's session is a scope of its own: `name/agent`.
    """

    session: str = ""
    salt: str = ""


@dataclass(slots=True, frozen=True)
class Place:
    """Where a turn stands. `implicit`: the session's name is made of its first messages."""

    scope: tuple[str, str]
    before: Digest
    implicit: bool = False


class TurnMemory:
    """Turns by place and answer, the least recently used dropped first. Thread-safe.

    refusals  reason → turns that were not healed
    """

    def __init__(self, max_bytes: int = MOST_BYTES):
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._turns: OrderedDict[tuple[tuple[str, str], Digest, Digest], Turn | None] = OrderedDict()
        self._answers: Counter[tuple[tuple[str, str], Digest]] = Counter()
        self._bytes = 0
        self.healed = 0
        self.refusals: Counter[str] = Counter()

    @property
    def nbytes(self) -> int:
        return self._bytes

    def remember(
        self,
        place: Place,
        answer: Digest,
        thought: Digest | None,
        prompt: Sequence[int],
        generated: Sequence[int],
    ) -> None:
        """`generated` without the token that ended the turn."""
        digest = PrefixDigest(prompt)
        before = digest.value
        turn = Turn(before, len(prompt), array("I", generated), digest.add(generated).value, thought)
        key = (place.scope, place.before, answer)
        with self._lock:
            known = self._turns.get(key)
            if key not in self._turns:
                self._answers[key[:2]] += 1
            elif place.implicit and (known is None or known.whole != turn.whole):
                # Two conversations that look the same to the last word: nothing tells whose it is.
                self._put(key, None)
                return
            self._put(key, turn)
            while self._bytes > self._max_bytes:
                self._drop()

    def _put(self, key: tuple[tuple[str, str], Digest, Digest], turn: Turn | None) -> None:
        if key in self._turns:
            self._bytes -= _cost(self._turns.pop(key))
        self._turns[key] = turn
        self._bytes += _cost(turn)

    def _drop(self) -> None:
        key, turn = self._turns.popitem(last=False)
        self._bytes -= _cost(turn)
        self._answers[key[:2]] -= 1
        if self._answers[key[:2]] <= 0:
            del self._answers[key[:2]]

    def find(self, place: Place, answer: Digest, thought: Digest | None) -> Turn | str:
        """The turn, or why there is none; "" where nothing was generated at this place."""
        key = (place.scope, place.before, answer)
        with self._lock:
            if key not in self._turns:
                return "edited" if self._answers[key[:2]] else ""
            self._turns.move_to_end(key)
            turn = self._turns[key]
        if turn is None:
            return "ambiguous"
        if thought is not None and thought != turn.thought:
            return "thinking_edited"
        return turn

    def count(self, healed: int, refused: Sequence[str]) -> None:
        """Note what became of a prompt's turns."""
        if healed or refused:
            with self._lock:
                self.healed += healed
                self.refusals.update(refused)


def _cost(turn: Turn | None) -> int:
    return _TURN_BYTES + (len(turn.tokens) * turn.tokens.itemsize if turn is not None else 0)
