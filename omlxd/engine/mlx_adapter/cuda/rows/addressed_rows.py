"""A batch on CUDA whose rows keep arrays of their own (cache/tails.py), which kernels read by address.

Nobody else may write there: `tails_of` sees to it.

8B shape in bfloat16, one H100, milliseconds until the first step behind it is computed, as one array and with
rows' own: the last of 32 rows of 500 to 1,647 tokens joins, 45 to 54 and 18 to 19; one of them leaves, 86 to
88 and 30 to 32. A step takes 8.85 to 8.96 and 8.76 to 8.83.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import islice
from typing import Any, cast

import mlx.core as mx

from ...cache.growth import round_up
from ...cache.packed import parts_of
from ...cache.segments import OWN_MASK
from ...cache.tails import TailRowsKVCache
from ...runtime.arrays import CLOSE, distance
from ..attention import attend, attention_packed, segments
from ..attention.attention_kernel import Tails, constant, put
from ..attention.segments import Shared
from ..compile import launch
from .tail import Tail, written

TAIL_STEP = 1024
"""Tokens. A step is compiled anew for each multiple of these that the longest tail passes."""


class AddressedKVCache(TailRowsKVCache):
    """A layer of a batch.

    `attend` has the kernels read the other tokens. Raises RuntimeError where there is no kernel for it, too.
    """

    latents = False
    """Whether it keeps latents of MLA."""
    make_tail = Tail
    tails: list[Tail]

    def __init__(self, rows: Sequence[Any]):
        super().__init__(rows)
        self.changed()

    def changed(self) -> None:
        self.table: mx.array | None = None  # As `Tails` has it.
        self._shared: Shared | None = None

    @property
    def shared(self) -> Shared | None:
        """What the kernel reads beside the tails; None: no row has a segment, or `table` tells of them."""
        if self._shared is None and not self._tells and any(self.segments):
            self._shared = segments.shared_of(self.segments, self.layer)
        return self._shared

    @property
    def kind(self) -> tuple[Any, ...]:
        """Layers of one kind have as many columns and segments."""
        return self.window, self.how, self.latents

    @property
    def _tells(self) -> bool:
        """Whether `table` tells of segments."""
        return self.latents or self.how is not None

    @property
    def each(self) -> int:
        """Tokens of a segment that `table` tells of; 0: of none."""
        return next((own[0].tokens for own in self.segments if own), 0) if self._tells else 0

    def addresses(self) -> list[list[int]]:
        """`table`; `tails_of` has seen to it that the tails' are known."""
        if not self._tells:
            return [tail.address for tail in self.tails]
        most = round_up(max(map(len, self.segments)), segments.MOST_STEP)
        rows = zip(self.tails, self.segments, strict=True)
        parts = len(self.tails[0].parts)
        before = segments.addresses_before
        return [[*tail.address, *before(own, self.layer, most, parts)] for tail, own in rows]

    def places(self, new: int, more: int = 0) -> tuple[list[int], list[int]]:
        """Columns of what the newest `new` tokens of each row see, once `more` have come: starts and ends."""
        ends = self._columns(more)
        if not self.window:
            return [0] * len(ends), ends
        counts = [min(end, self.window + new - 1) for end in ends]
        starts = [
            (end - count) % tail.capacity for end, count, tail in zip(ends, counts, self.tails, strict=True)
        ]
        return starts, [start + count for start, count in zip(starts, counts, strict=True)]

    def _columns(self, more: int) -> list[int]:
        """Of each row, once `more` tokens have come. Segments that `table` tells of have columns before the
        tail's."""
        bases = self.bases if self._tells else [0] * len(self.ends)
        return [base + end + more for base, end in zip(bases, self.ends, strict=True)]

    def most(self, new: int, more: int = 0) -> int:
        """`Tails.most` for what `places` gives."""
        longest = round_up(max(self._columns(more)), TAIL_STEP)
        return min(longest, self.window + new - 1) if self.window else longest

    def put_fresh(self) -> None:
        """Put new tokens into the tails."""
        parts = [part for held in self._fresh for part in parts_of(held)]
        (tails,), ends = tails_of([self], parts[0].shape[2]), constant("put", tuple(self.ends), mx.int32)
        self._behind, self._fresh = put(parts, tails, ends), ()

    def attend(
        self, queries: mx.array, keys: mx.array, values: mx.array, scale: float, mask: Any, sinks: Any
    ) -> mx.array:
        """(rows, heads, n, width), once `update_and_fetch` got the KV of these n tokens: `keys`, `values`."""
        given = self.keys_and_values()
        if mask is not OWN_MASK or given[0] is not keys or given[1] is not values:
            raise RuntimeError("a layer masks more than what comes after a token, or reads other KV")
        if keys.shape != values.shape:
            raise RuntimeError("no kernel reads keys and values of unequal width")
        self.pending, new = False, queries.shape[2]
        (tails,), places = tails_of([self], new), self.places(new)
        attend, most_new = self._kernel(queries, keys, sinks)
        if self._fresh and new > 1:
            self.put_fresh()
        fresh, self._fresh = self._fresh, ()
        if new > most_new:
            return self.by_mlx(queries, scale, sinks)
        out = attend(queries, tails, places, scale, fresh=fresh, behind=self._behind)
        if self.is_checked:
            mx.eval(out)  # So that the new token is in its place.
            if not (far := distance(out, self.by_mlx(queries, scale, sinks))) < CLOSE:  # NaN too
                raise RuntimeError(f"attention differs by {far:.3g} from MLX's own")
        return out

    def _kernel(self, queries: mx.array, keys: mx.array, sinks: Any) -> tuple[Any, int]:
        """(what attends over `Tails`, new tokens that it takes)."""
        kernel: Any = None
        how: dict[str, Any] = {}
        if self.how is not None:
            tail = self.tails[0]
            kernel = attention_packed.kernel_for(queries, tail.keys, tail.values, self.how)
        elif self.shared is not None:
            kernel = attend.segment_kernel_for(queries, keys, sinks)
            how = {"shared": self.shared, "sinks": sinks}
        else:
            kernel = attend.kernel_for(queries, keys, self.window > 0, sinks)
            how = {"window": self.window, "sinks": sinks}
        if kernel is None or (sinks is not None and "sinks" not in how):
            raise RuntimeError("no kernel attends so to rows by address")
        return partial(kernel.over_tails, **how), kernel.most_new


def tails_of(layers: Sequence[AddressedKVCache], new: int, more: int = 0) -> list[Tails]:
    """Of each layer of a batch, for what `places` gives."""
    if any(layer.table is None for layer in layers):
        unknown = [tail for layer in layers for tail in layer.tails if not tail.is_known]
        while unknown:
            arrays = [part for tail in unknown for part in tail.parts]
            found = iter(cast(list[int], launch.addresses_of(arrays).tolist()))
            shared: list[Tail] = []
            for tail in unknown:
                tail.address = [*islice(found, len(tail.parts)), tail.capacity]
                if written.get(tail.address[0], tail) is not tail:  # Of requests with one prompt: n > 1.
                    tail.copy_arrays()
                    shared.append(tail)
                else:
                    written[tail.address[0]] = tail
            unknown = shared
        for layer in layers:
            layer.table = mx.array(layer.addresses(), mx.uint64)
    kinds = {layer.kind: layer for layer in layers}  # All layers have had the same tokens.
    most = {kind: (layer.most(new, more), layer.each, layer.latents) for kind, layer in kinds.items()}
    return [Tails(cast(mx.array, layer.table), *most[layer.kind]) for layer in layers]
