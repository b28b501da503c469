"""Which blocks are written to the cold tier: all, those asked for twice, or those of long prompts.

Flash wears by what is written to it, and much of what is computed is never asked for again. A policy
only says when a block is written; what it holds back stays in RAM as any block does, and is asked about
again whenever a request uses it (flusher.py).

Recorded sessions of Claude Code, 19 requests and 667,476 prompt tokens, RAM lost between sessions
(tools/bench/wear.py; written: MB, and of the payload that had to be; recomputed: tokens more than `always`):

                     RAM for all           RAM for 20,000 tokens   no RAM          with checkpoints
                     written   recomputed  written   recomputed    recomputed      written   recomputed
    always           1,669 1.016        0  1,669 1.016        0             0      4,101 1.097        0
    second-use       1,251 0.762      192  1,251 0.762   41,856        75,392      2,740 0.733   49,344
    min-length:8000  1,669 1.016        0  1,669 1.016        0             0      4,101 1.097        0
    min-length:16000 1,433 0.872        0  1,433 0.872        0        12,288      3,616 0.967        0

(16 KiB of KV a token; with checkpoints: 24 KiB, and 64 MiB a checkpoint.) `always` is the default: it is
within 1.05 of the payload for dense models and 1.2 with checkpoints as it is, and a quarter less wear is
not worth 6 to 11% of all tokens computed again where RAM is short, or half of what models with
checkpoints restore from disk. `second-use` is for machines with RAM for all their sessions.
"""

from __future__ import annotations

import re
from typing import Protocol

from .hashing import BlockHash

SEEN_BITS = 1 << 20
"""Bits of each of the two filters of `SecondUse`: 256 KiB of RAM in all."""
SEEN_EACH = 100_000
"""Names after which a filter is full: one in a hundred is then taken for seen that was not."""


class Admission(Protocol):
    def admits(self, block_hash: BlockHash, tokens: int) -> bool:
        """Whether a block is written now that a request of `tokens` tokens stores it or uses it again."""
        ...


class Always:
    """On the first store."""

    def admits(self, block_hash: BlockHash, tokens: int) -> bool:
        return True


class MinLength:
    """For requests of at least `least` tokens."""

    def __init__(self, least: int):
        self._least = least

    def admits(self, block_hash: BlockHash, tokens: int) -> bool:
        return tokens >= self._least


class SecondUse:
    """When a block is asked for the second time: stored again, or found by another request.

    What has been seen is kept in two Bloom filters, the older of which is emptied when the newer is
    full: from 100,000 to 200,000 names, in bounded memory. A name taken for seen that was not costs one
    write. They don't survive a restart: what was asked for once before it must be asked for twice after.
    """

    def __init__(self) -> None:
        self._newer, self._older = bytearray(SEEN_BITS // 8), bytearray(SEEN_BITS // 8)
        self._count = 0

    def admits(self, block_hash: BlockHash, tokens: int) -> bool:
        # Names are SHA-256 digests, so any part of them is as good as a hash of its own.
        bits = [int.from_bytes(block_hash[at : at + 4], "little") % SEEN_BITS for at in (0, 4, 8, 12)]
        for seen in (self._newer, self._older):
            if all(seen[bit >> 3] & (1 << (bit & 7)) for bit in bits):
                return True
        if self._count == SEEN_EACH:
            self._newer, self._older = bytearray(SEEN_BITS // 8), self._newer
            self._count = 0
        for bit in bits:
            self._newer[bit >> 3] |= 1 << (bit & 7)
        self._count += 1
        return False


def admission_of(text: str) -> Admission:
    """`always`, `second-use` or `min-length:N`, N in tokens. Raises ValueError."""
    if text == "always":
        return Always()
    if text == "second-use":
        return SecondUse()
    if found := re.fullmatch(r"min-length:(\d{1,9})", text):
        return MinLength(int(found[1]))
    raise ValueError(f"{text!r} is none of always, second-use, min-length:N")
