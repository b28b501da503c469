"""Whether a cached prefix is better read, computed, or both at once: by measured rates.

A token's KV needs all tokens before it, so computing begins at the front, and a reader that is to help
begins at the end (tail_read.py): with r seconds to read all and c to compute all, both together take
r*c/(r+c). Where the disk is ten times as fast that saves a tenth, and keeps the device busy: then nothing is
computed.

After Jin et al., "Compute or Load KV Cache? Why Not Both?" (Cake, 2024).
"""

from __future__ import annotations

LEAST_SHARE, LEAST_S = 0.2, 0.1
"""Computing must save this share of the time of reading, and this many seconds."""

LEAST_BOTH_S = 0.3
"""Likewise, to do both at once: with 0.1 an H200 took 0.48 s to have 16,384 tokens of an 8B shape that are
read in 0.37 and computed in 0.61 (tools/bench/load_or_compute.py)."""

UNMEASURED_S = 1.0
"""Seconds of reading from which on computing is tried though no prompt has been computed yet."""

WEIGHT = 0.5
"""Of the newest restore in the rate of reading."""


class Rates:
    """One engine's. Any thread: a torn read costs nothing.

    block_bytes  of a block's KV
    read         bytes a second from the cold tier; 0: not measured yet
    prefill      tokens a second of computing prompts; 0: not measured yet
    """

    def __init__(self, block_size: int, block_bytes: int):
        self._block, self.block_bytes = block_size, block_bytes
        self.read = self.prefill = 0.0

    def record_read(self, nbytes: int, seconds: float, *, ended_early: bool = False) -> None:
        """`nbytes` were read in `seconds`. `ended_early`: since it was slow, which is believed at once."""
        if nbytes and seconds > 0:
            rate = nbytes / seconds
            known = self.read if self.read and not ended_early else rate
            self.read = (1 - WEIGHT) * known + WEIGHT * rate

    def doubt(self) -> None:
        """Nothing was read, since it seemed slow: think it twice as fast, so that it is tried again."""
        self.read *= 2

    def read_s(self, nbytes: int) -> float:
        """Seconds that reading `nbytes` is thought to take; 0: not known."""
        return nbytes / self.read if self.read else 0.0

    def compute_s(self, blocks: int) -> float:
        """Seconds that computing `blocks` is thought to take; 0: not known."""
        return blocks * self._block / self.prefill if self.prefill else 0.0

    def both_pay(self, read_s: float, blocks: int) -> bool:
        """Whether to compute some of `blocks`, which take `read_s` to read, meanwhile."""
        compute_s = self.compute_s(blocks)
        if not compute_s:
            return read_s > UNMEASURED_S
        share = read_s / (read_s + compute_s)
        return share > LEAST_SHARE and share * read_s > LEAST_BOTH_S

    def computing_pays(self, read_s: float, blocks: int) -> bool:
        """Whether to compute `blocks` instead of what takes `read_s` to read."""
        return 0 < self.compute_s(blocks) < read_s - max(LEAST_S, LEAST_SHARE * read_s)
