"""Which block goes first, the least recently used or by cost; and superseded tails, on recorded traffic.

    python -m tools.bench.eviction TRACES

Prompts as in wear.py. A cache of blocks whose children go before their parents, smaller than all that the
traces hold; requests in their order, and sessions by turns, a request each. `aged` evicts the leaf of the
largest age / (sqrt(prompt's tokens) * log(1 + uses)). Figures are prompt tokens computed, beyond those that
a cache without end computes; all requests come twice.

    claude_code_*.jsonl, 1,567 blocks   in order             by turns
    room for                            LRU       aged       LRU       aged
    10%                                 904,000   904,000    943,936   904,000
    20%                                 581,504   577,792    636,032   579,136
    30%                                 347,392   349,760    441,600   364,864
    50%                                  83,712    99,008    180,416   149,760
    70%                                  75,008    53,312     67,776    62,400

`aged` wins where sessions take turns, and loses 18% at half the room where they don't. It also needs counts
of uses, which no file keeps over a restart, where least recently used is the file's time. So LRU stays.

A superseded tail is a full block that a session's next request has not, though it goes on: it was written for
nobody. These traces have none (0 of 1,567): what a next turn changes is the last, partial block, which is not
written. `--ssd-cache-admission second-use` is what writes a block only once another request extends it.
"""

from __future__ import annotations

import argparse
import itertools
import math
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from omlxd.kv.hashing import hash_blocks
from omlxd.models.demo import build_demo
from tools.bench.wear import BLOCK, NAMESPACE, sessions

SHARES = (0.1, 0.2, 0.3, 0.5, 0.7)


@dataclass(slots=True, eq=False)
class _Held:
    used: int
    length: int
    uses: int = 1
    children: int = 0
    parent: bytes = b""


@dataclass(slots=True)
class Cache:
    """Of `most` blocks. `aged`: cost-aware, else least recently used."""

    most: int
    aged: bool
    held: dict[bytes, _Held] = field(default_factory=dict)
    clock: int = 0

    def ask(self, hashes: Sequence[bytes], tokens: int) -> int:
        """Tokens that are computed."""
        reach = sum(1 for _ in itertools.takewhile(self.held.__contains__, hashes[: (tokens - 1) // BLOCK]))
        self.clock += 1
        parents = [NAMESPACE, *hashes]
        for index, name in enumerate(hashes):
            block = self.held.get(name)
            if block is None:
                block = self.held[name] = _Held(self.clock, tokens, 0, parent=parents[index])
                if (parent := self.held.get(parents[index])) is not None:
                    parent.children += 1
            block.used, block.length, block.uses = self.clock, tokens, block.uses + 1
        while len(self.held) > self.most:
            self._evict()
        return tokens - reach * BLOCK

    def _evict(self) -> None:
        def worth(name: bytes) -> float:
            block = self.held[name]
            if not self.aged:
                return block.used
            age = self.clock - block.used + 1
            return -age / (math.sqrt(block.length) * math.log(1 + block.uses))

        leaf = min((name for name, block in self.held.items() if not block.children), key=worth)
        # The whole of a chain's end that nothing else stands on goes alike: as far as is needed.
        while len(self.held) > self.most:
            block = self.held.pop(leaf)
            parent = self.held.get(block.parent)
            if parent is None:
                return
            parent.children -= 1
            leaf = block.parent
            same = (parent.used, parent.uses) == (block.used, block.uses)
            if parent.children or not same:
                return


def computed(requests: Iterable[tuple[list[bytes], int]], most: int, aged: bool) -> int:
    cache = Cache(most, aged)
    return sum(cache.ask(hashes, tokens) for hashes, tokens in requests)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.bench.eviction")
    parser.add_argument("traces", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        talks = [
            [(hash_blocks(NAMESPACE, tokens, BLOCK), len(tokens)) for tokens in session]
            for session in sessions(args.traces, build_demo(Path(folder)))
        ]
    every = {name for talk in talks for hashes, _ in talk for name in hashes}
    turns = [each for row in itertools.zip_longest(*talks) for each in row if each is not None]
    for order, requests in (("in order", list(itertools.chain(*talks))), ("by turns", turns)):
        requests = [*requests, *requests]  # Everybody comes back once.
        least = computed(requests, 1 << 60, False)
        for share in SHARES:
            most = int(len(every) * share)
            lru, aged = (computed(requests, most, aged) - least for aged in (False, True))
            print(
                f"{order}, room for {most} of {len(every)} blocks: LRU +{lru:,}, aged +{aged:,}", flush=True
            )
    tails = 0
    for talk in talks:
        for (hashes, _), (following, _) in itertools.pairwise(talk):
            after = {*following}
            shared = sum(name in after for name in hashes)
            tails += len(hashes) - shared if shared > len(hashes) // 2 else 0
    print(f"superseded tails: {tails} of {len(every)} blocks ({tails / len(every):.1%})")


if __name__ == "__main__":
    main()
