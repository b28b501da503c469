"""A turn that the model wrote, and the place where it stands: what healing.py remembers."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from .canonical import Digest


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


Said = tuple[Digest, Digest | None]
"""What a client was sent of a turn: digests of its text and calls, and of its thinking."""


@dataclass(slots=True, frozen=True)
class Turn:
    """A turn that the model wrote.

    prompt         digest of the tokens it was generated from, `prompt_length` of them
    tokens         what was generated, without the token that ended the turn
    whole          digest of both
    """

    prompt: Digest
    prompt_length: int
    tokens: array[int]
    whole: Digest

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

    @property
    def key(self) -> tuple[tuple[str, str], Digest]:
        return self.scope, self.before
