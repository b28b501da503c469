"""What stands for a layer's cache while a decode step is traced."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from ...attention import hooks as attention
from ...cache.mla_rows import same_parts
from ...cache.packed import Quantisation
from ..attention import attend, attention_packed, latent_kernel
from ..attention.attention_kernel import Tails, put
from ..attention.segments import Shared
from .places import shape_of


class Untraceable(Exception):
    """The model does with its KV what a compiled step can't."""


class StepState:
    """Stands for a layer's recurrent state while a step is traced: its arrays, by number."""

    lengths = left_padding = None

    def __init__(self, arrays: Sequence[mx.array]):
        self.arrays = list(arrays)

    def __getitem__(self, at: int) -> mx.array:
        return self.arrays[at]

    def __setitem__(self, at: int, array: mx.array) -> None:
        self.arrays[at] = array

    def make_mask(self, N: int) -> None:
        """A new token of each row hides nothing."""

    def advance(self, N: int) -> None:
        """No row has lengths of its own."""


class StepKV:
    """Stands for a layer's cache while a step is traced. `offset`, `starts`, `ends`: (rows,); of a fused pass
    of several tokens they and `owners` as `FusedStep` and `FusedAttention` have them.

    `keys` and `values` hold the new token once attention was computed, or `keys` tells where each row's lie.
    `window`: 0 where all tokens are kept. `shared`: what rows hold in segments before them. `how`: keys and
    values are packed so.
    """

    def __init__(
        self,
        keys: Any,
        values: Any,
        starts: mx.array,
        ends: mx.array,
        offset: mx.array,
        window: int = 0,
        shared: Shared | None = None,
        how: Quantisation | None = None,
        owners: mx.array | None = None,
    ):
        self.keys, self.values, self.shared, self.how = keys, values, shared, how
        self.owners = owners
        self.starts, self.ends, self.offset, self._window = starts, ends, offset, window
        self._fresh: tuple[mx.array, mx.array] | None = None
        self.done = False

    @property
    def held(self) -> tuple[Any, Any] | Tails:
        """As `FusedAttention` takes it."""
        return self.keys if isinstance(self.keys, Tails) else (self.keys, self.values)

    @property
    def _latents(self) -> bool:
        return isinstance(self.keys, Tails) and self.keys.latents

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        if self._fresh is not None:
            raise Untraceable("a layer keeps KV twice in a step")
        self._fresh = keys, values
        attention.note_given(keys, values, self)
        return keys, same_parts(values) if self._latents else values

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        if self._fresh is None:
            raise Untraceable("a layer reads another's KV before it is there")
        return self._fresh

    def make_mask(self, N: int, *, return_array: bool = False, window_size: int | None = None) -> None:
        if (return_array and not self._latents) or (window_size or self._window) != self._window:
            raise Untraceable("a layer wants a mask")

    def attend(
        self, queries: mx.array, keys: Any, values: Any, scale: float, mask: Any, sinks: Any
    ) -> mx.array:
        """Layers that share this one's KV attend by it too, after it."""
        fresh = self._fresh
        if self._latents and fresh is not None and keys is values is fresh[0] and sinks is None:
            return self._attend_latents(queries, fresh, mask, scale)
        if fresh is None or keys is not fresh[0] or values is not fresh[1] or mask is not None:
            raise Untraceable("attention does not read the KV that its cache gave")
        put = () if self.done else fresh
        held, ends, step = self.held, (self.starts, self.ends), None
        if not isinstance(held, Tails):  # addressed_rows.py has looked at those.
            dtype = (self.keys if self.how is None else self.keys[1]).dtype
            if fresh[0].dtype != dtype or shape_of(self) != shape_of(self, "values"):
                raise Untraceable("keys and values of several kinds")
        if self.how is not None:
            its = self.how.pack(fresh[0]), self.how.pack(fresh[1])
            packed = attention_packed.kernel_for(queries, *its, self.how) if sinks is None else None
            step = packed and packed.step(queries, its if put else (), held, *ends, scale)
        elif self.shared is None:
            kernel = attend.kernel_for(queries, fresh[0], self._window > 0, sinks)
            step = kernel and kernel.step(queries, put, held, *ends, scale, sinks)
        else:
            over_segments = attend.segment_kernel_for(queries, fresh[0], sinks)
            step = over_segments and over_segments.step(queries, put, held, self.shared, *ends, scale, sinks)
        if step is None:
            raise Untraceable("no kernel for this attention")
        out, self.keys, self.values = step
        self.done = True
        return out

    def _attend_latents(self, queries: mx.array, fresh: Any, rope_queries: Any, scale: float) -> mx.array:
        """As `AddressedLatentsKVCache`, once."""
        kernel = None if self.done else latent_kernel.kernel_for(queries, rope_queries)
        if kernel is None:
            raise Untraceable("no kernel for this attention")
        behind = put(fresh, self.keys, self.ends - self.starts)
        self.done = True
        return kernel.step(queries, rope_queries, self.keys, self.ends, scale, behind)
