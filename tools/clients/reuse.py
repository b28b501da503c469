"""What the engine computed of each request, against what it could have taken from the cache.

Read from the scripted engine's own log, in the model's tokens. The ideal of a request is the longest
prefix that its prompt shares with what the daemon had computed before it: prompts and answers, of a
cancelled request as much as it came to. All but the last block of it must have been reused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from .played import Played


@dataclass(slots=True)
class Reuse:
    """One request.

    tokens    prompt and answer
    ideal     tokens of its prompt that could have been reused
    lost      of these, those that were computed again; below 0: more was shared while it ran
    """

    played: Played
    tokens: np.ndarray
    ideal: int

    @property
    def lost(self) -> int:
        return self.ideal - self.played.cached


class ReuseLog:
    """Reads the engine's log as it grows. `folder`: where engines of one daemon log, each life alike."""

    def __init__(self, path: Path):
        self._path = path
        self._at = 0
        self.known: list[Reuse] = []

    def read(self) -> list[Reuse]:
        """Requests that ended since the last call, in the order in which they began."""
        if not self._path.exists():
            return []
        data = self._path.read_bytes()[self._at :]
        whole = data[: data.rfind(b"\n") + 1]
        self._at += len(whole)
        new = [msgspec.json.decode(line, type=Played) for line in whole.splitlines()]
        found = []
        for played in sorted(new, key=lambda played: played.began):
            reuse = Reuse(played, np.array(played.tokens, "<u4"), 0)
            found.append(reuse)
            self.known.append(reuse)
        for reuse in found:
            reuse.ideal = self._ideal(reuse)
        return found

    def _ideal(self, reuse: Reuse) -> int:
        prompt = reuse.tokens[: reuse.played.prompt]
        earlier = (e for e in self.known if e.played.ended <= reuse.played.began)
        shared = max((common_prefix(prompt, e.tokens[: e.played.computed]) for e in earlier), default=0)
        return min(shared, len(prompt) - 1)


def common_prefix(one: np.ndarray, two: np.ndarray) -> int:
    """Tokens that both begin with."""
    size = min(len(one), len(two))
    differ = np.flatnonzero(one[:size] != two[:size])
    return int(differ[0]) if len(differ) else size


def changed(before: Reuse | None, after: Reuse | None) -> tuple[int, int] | None:
    """Where `after`'s prompt departs from `before`'s prompt and answer: (token, tokens not kept), or None.

    The end-of-turn token is not looked at: templates write what they like after it. The same prompt
    again departs from nothing.
    """
    if before is None or after is None:
        return None
    whole, prompt = before.tokens[:-1], after.tokens[: after.played.prompt]
    kept = common_prefix(whole, prompt)
    return None if kept >= min(len(whole), len(prompt)) else (kept, len(whole) - kept)


def main_of(reuses: Sequence[Reuse]) -> list[Reuse]:
    """The conversation itself, of all that a client asked: what begins like its longest request."""
    if not reuses:
        return []
    longest = max(reuses, key=lambda reuse: reuse.played.prompt)
    return [r for r in reuses if common_prefix(r.tokens, longest.tokens) * 2 > longest.played.prompt]
