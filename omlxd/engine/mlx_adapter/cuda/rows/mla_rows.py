"""Rows of MLA (cache/mla_rows.py) whose latents latent_kernel.py reads by address."""

from __future__ import annotations

from typing import Any, cast

import mlx.core as mx

from ...cache.mla_rows import LatentRows
from ...cache.segments import Pair
from ..attention import latent_kernel
from .addressed_rows import AddressedKVCache, tails_of


class AddressedLatentsKVCache(LatentRows, AddressedKVCache):
    """A layer of a batch."""

    latents = True

    @property
    def lengths(self) -> list[int]:
        return [base + end for base, end in zip(self.bases, self.ends, strict=True)]

    def places(self, new: int, more: int = 0) -> tuple[list[int], list[int]]:
        """Tokens of each row: in segments, and all once `more` have come."""
        return self.bases, [length + more for length in self.lengths]

    @property
    def seen(self) -> list[int]:
        """How many tokens of its row each of the newest `new` ones sees, itself included."""
        return [length - self.new + i + 1 for length in self.lengths for i in range(self.new)]

    def _put(self, keys: mx.array, values: mx.array) -> None:
        AddressedKVCache._put(self, keys, values)
        self.put_fresh()

    def _row_kv(self, row: int) -> Pair:
        return self.joined(row, 0, self.ends[row])

    def attend(
        self, queries: mx.array, keys: mx.array, values: mx.array, scale: float, mask: Any, sinks: Any
    ) -> mx.array:
        out = super().attend(queries, keys, values, scale, mask, sinks)
        # Of several tokens nothing else asks for what puts them into the tails.
        return out if queries.shape[2] == 1 else cast(Any, mx.depends)(out, self._behind)

    def _attend(self, queries: mx.array, rope_queries: mx.array, scale: float, chosen: Any) -> mx.array:
        kernel = latent_kernel.kernel_for(queries, rope_queries)
        if kernel is None or self._behind is None or chosen is not None:
            raise RuntimeError("no kernel reads these latents by address")
        (tails,) = tails_of([self], 1)
        return kernel.over_tails(queries, rope_queries, tails, self.seen, scale, self._behind)
