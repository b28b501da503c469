"""Hot tails: KV of less than a block, for prompts that leave a chain inside of a block.

A block is found only whole. What follows a prompt's last full block, and what a prompt shares with a
block whose end differs, would be computed again: up to a block less a token. A tail is what is known to
follow a block: up to a block of tokens and their KV. It lives in RAM alone and is never written.

| kind | its KV                                   | bytes                        |
|------|------------------------------------------|------------------------------|
| own  | a copy of a partly filled block's tokens | its own, in the hot tier's   |
| note | a full block of the pool, while hot      | none: the tokens, and a name |

`many` of a tail's first tokens were computed in passes of several tokens; the rest, an answer's and a
prompt's last token, each in a pass of its own. Kernels may round the two differently (MLA, quantised KV):
what a prompt takes of a tail ends with the former, unless it goes on into the answer, as with full blocks.

Pure bookkeeping: no I/O, no MLX, no clock.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .block import Payload
from .hashing import BlockHash

MOST_OWN = 256
MOST_NOTES = 4096
MOST_A_PARENT = 8

Hot = Callable[[BlockHash], Payload | None]
"""The payload of a full block, while it has one."""


@dataclass(slots=True, eq=False)
class Tail:
    """`tokens` and their KV, known to follow the block `parent` (or a chain's root).

    source  own: the KV's copy; note: the name of a full block
    """

    parent: BlockHash
    tokens: array[int]
    many: int
    source: Payload | BlockHash

    @property
    def nbytes(self) -> int:
        return 0 if isinstance(self.source, bytes) else self.source.nbytes

    def payload(self, hot: Hot) -> Payload | None:
        return hot(self.source) if isinstance(self.source, bytes) else self.source

    def begins(self, tokens: Sequence[int]) -> int:
        """How many of `tokens` this has KV for, that they may take."""
        count = 0
        for mine, other in zip(self.tokens, tokens, strict=False):
            if mine != other:
                break
            count += 1
        return count if count > self.many + 1 else min(count, self.many)

    def covers(self, tokens: Sequence[int], many: int) -> bool:
        """Whether a tail of these would give nobody more than this one does."""
        return (
            self.many >= many
            and len(self.tokens) >= len(tokens)
            and all(mine == other for mine, other in zip(self.tokens, tokens, strict=False))
        )


class Tails:
    """At most `MOST_A_PARENT` tails a parent, and `MOST_OWN` and `MOST_NOTES` in all, the newest used."""

    def __init__(self) -> None:
        self._own: OrderedDict[Tail, None] = OrderedDict()  # The least recently used first.
        self._notes: OrderedDict[Tail, None] = OrderedDict()
        self._children: dict[BlockHash, list[Tail]] = {}
        self.nbytes = 0

    def __len__(self) -> int:
        return len(self._own) + len(self._notes)

    # ----------------------------------------------------------------- looking

    def known(self, parent: BlockHash, tokens: Sequence[int], many: int, hot: Hot) -> bool:
        """Whether a tail covers these already; that one becomes the most recently used."""
        for tail in self._children.get(parent, ()):
            if tail.covers(tokens, many) and tail.payload(hot) is not None:
                self._use(tail)
                return True
        return False

    def longest(self, parent: BlockHash, tokens: Sequence[int], hot: Hot) -> tuple[Payload, int, int] | None:
        """Of the tail with most of `tokens`: (KV, how many of them it begins with, its `many`)."""
        best: Tail | None = None
        found: Payload | None = None
        most = 0
        for tail in list(self._children.get(parent, ())):
            payload = tail.payload(hot)
            if payload is None:
                self._drop(tail)  # A note of a block that has left RAM.
            elif (count := tail.begins(tokens)) > most:
                best, found, most = tail, payload, count
        if best is None or found is None:
            return None
        self._use(best)
        return found, most, best.many

    # ----------------------------------------------------------------- keeping

    def put(self, parent: BlockHash, tokens: Sequence[int], many: int, source: Payload | BlockHash) -> None:
        """Keep a tail; those of its parent that it covers go."""
        new = Tail(parent, array("I", tokens), many, source)
        for tail in list(self._children.get(parent, ())):
            if new.covers(tail.tokens, tail.many):
                self._drop(tail)
        beside = self._children.setdefault(parent, [])
        beside.append(new)
        self._queue(new)[new] = None
        self.nbytes += new.nbytes
        if len(beside) > MOST_A_PARENT:
            self._drop(beside[0])
        for queue, most in ((self._own, MOST_OWN), (self._notes, MOST_NOTES)):
            if len(queue) > most:
                self._drop(next(iter(queue)))

    def shed(self, nbytes: int) -> int:
        """Drop tails, the least recently used first, until `nbytes` are gone. Returns bytes freed."""
        freed = 0
        while freed < nbytes and self._own:
            oldest = next(iter(self._own))
            freed += oldest.nbytes
            self._drop(oldest)
        return freed

    def _queue(self, tail: Tail) -> OrderedDict[Tail, None]:
        return self._notes if isinstance(tail.source, bytes) else self._own

    def _use(self, tail: Tail) -> None:
        self._queue(tail).move_to_end(tail)
        beside = self._children[tail.parent]
        beside.remove(tail)
        beside.append(tail)

    def _drop(self, tail: Tail) -> None:
        del self._queue(tail)[tail]
        self.nbytes -= tail.nbytes
        beside = self._children[tail.parent]
        beside.remove(tail)
        if not beside:
            del self._children[tail.parent]

    # ----------------------------------------------------------------- checking

    def check(self) -> None:
        """Assert every invariant, in O(tails)."""
        queued = [*self._own, *self._notes]
        assert self.nbytes == sum(tail.nbytes for tail in self._own)
        assert all(not isinstance(tail.source, bytes) for tail in self._own)
        assert {id(tail) for tail in queued} == {id(t) for ts in self._children.values() for t in ts}
        assert len(queued) == sum(map(len, self._children.values()))
        assert all(0 < len(ts) <= MOST_A_PARENT for ts in self._children.values())
        assert all(t.parent == parent for parent, ts in self._children.items() for t in ts)
        assert len(self._own) <= MOST_OWN and len(self._notes) <= MOST_NOTES
        assert all(0 <= tail.many <= len(tail.tokens) for tail in queued)
