"""A batch on CUDA whose rows keep arrays of their own: kernels are told where each row's lie.

Joining and leaving copies nobody's KV, and a row grows alone. Layers may keep all tokens or a window of them,
packed or not, behind segments that rows share or without any. cache/rows.py has the same for MLX's own.

A kernel puts new tokens into arrays that MLX takes for unchanged. So nobody else may write there (`tails_of`
sees to it), what is read of them later is in another evaluation, and none is freed while a kernel may write.

8B shape in bfloat16, one H100, milliseconds until the first step behind it is computed, as one array and with
rows' own: the last of 32 rows of 500 to 1,647 tokens joins, 45 to 54 and 18 to 19; one of them leaves, 86 to
88 and 30 to 32. A step takes 8.85 to 8.96 and 8.76 to 8.83.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy, deepcopy
from functools import partial
from itertools import islice
from typing import Any, cast

import mlx.core as mx
from mlx.utils import tree_map

from ...cache.growth import MOST_ROOM, round_up
from ...cache.packed import parts_of
from ...cache.rows import RowBatch, offsets_of
from ...cache.segments import OWN_MASK, Pair, Segment
from ...runtime.arrays import CLOSE, distance
from ..attention import attend, attention_packed, segments
from ..attention.attention_kernel import Tails, constant, put
from ..attention.segments import Shared
from ..compile import launch
from .tail import Tail, laid_out, written

TAIL_STEP = 1024
"""Tokens. A step is compiled anew for each multiple of these that the longest tail passes."""

MOST_TAKEN_BACK = 16
"""Tokens that a ring holds beside its window. A pass of so many overwrites no token that its first one sees,
and its guesses can be forgotten. Before a longer pass the ring grows."""


class AddressedKVCache(RowBatch):
    """A layer of a batch. Of rows of one class: KVCache, SequenceKVCache, RotatingKVCache.

    window    tokens that a new one sees; 0: all
    how       keys and values are packed so, or None
    ends      tokens of each row, behind its `segments`
    tails     none until the first tokens come, of rows that have none

    `attend` has the kernels read the other tokens. Raises RuntimeError where there is no kernel for it, too.
    """

    latents = False
    """Whether it keeps latents of MLA."""
    gives_views = False
    """A kernel writes where it was told that an array lies (`launch.addresses_of`)."""

    def __init__(self, rows: Sequence[Any]):
        super().__init__()
        first = rows[0]
        self.window: int = getattr(first, "max_size", 0)
        self.how = getattr(first, "how", None)
        self.layer: str = getattr(first, "layer", "")
        for row in rows:
            if row.keys is None and getattr(row, "segments", ()):
                row.open_tail()
        self.segments: list[list[Segment]] = [list(getattr(row, "segments", ())) for row in rows]
        self.bases = [getattr(row, "base", 0) for row in rows]
        """Tokens before each row's tail."""
        self.ends = [row.offset - base for row, base in zip(rows, self.bases, strict=True)]
        self.tails = [self._tail_of(row) for row in rows if row.keys is not None]
        if len(self.tails) not in (0, len(rows)):
            raise RuntimeError("rows with KV and without it don't mix")
        self.table: mx.array | None = None  # As `Tails` has it.
        self._fresh: tuple[Any, ...] = ()  # To be put into the tails.
        self._behind: mx.array | None = None  # As `Kernel.over_tails` has it.
        self._shared: Shared | None = None

    def _tail_of(self, row: Any) -> Tail:
        if not self.window:
            return Tail(row.keys, row.values)
        ordered, end = [row._temporal_order(array) for array in (row.keys, row.values)], row.offset
        held, capacity = ordered[0].shape[2], self._room(0, end, 1)
        first = end - min(end, held, self.window)
        return Tail(*(laid_out(array, first, end, capacity, end - held) for array in ordered))

    def _room(self, capacity: int, end: int, more: int) -> int:
        """The capacity to have before `more` tokens come behind `end`, now that it is `capacity`."""
        ring = self.window + max(more, MOST_TAKEN_BACK)
        if capacity >= (min(end + more, ring) if self.window else end + more):
            return capacity
        wanted = round_up(end + max(more, min(end // 4, MOST_ROOM)))
        return min(wanted, ring) if self.window else wanted

    def has_room(self, count: int) -> bool:
        """Whether each of `tails` has it for `count` more tokens."""
        held = zip(self.tails, self.ends, strict=True)
        return all(self._room(tail.capacity, end, count) == tail.capacity for tail, end in held)

    def make_room(self, count: int) -> None:
        """For `count` tokens behind each of `tails`."""
        for tail, end in zip(self.tails, self.ends, strict=True):
            if (capacity := self._room(tail.capacity, end, count)) > tail.capacity:
                tail.grow(max(0, end - tail.capacity), end, capacity)
                self.table = None

    @property
    def offset(self) -> mx.array:
        """(rows,): tokens of each row."""
        return offsets_of(tuple(base + end for base, end in zip(self.bases, self.ends, strict=True)))

    @property
    def state(self) -> list[mx.array]:
        return [part for tail in self.tails for part in tail.parts]

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

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        self._give(keys, values)
        self._put(keys, values)
        return keys, values

    def _put(self, keys: mx.array, values: mx.array) -> None:
        """Make room for new tokens, which `attend` or `put_fresh` puts there."""
        count = keys.shape[2]
        fresh = [self.how.pack(array) for array in (keys, values)] if self.how else [keys, values]
        if not self.tails:
            self.tails = [Tail(*(_empty(held, self._room(0, 0, count)) for held in fresh)) for _ in self.ends]
        if [part.dtype for held in fresh for part in parts_of(held)] != [
            p.dtype for p in self.tails[0].parts
        ]:
            raise RuntimeError("new tokens are of another type than the KV before")
        self.make_room(count)
        self.ends = [end + count for end in self.ends]
        self._fresh, self._behind = tuple(fresh), None

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
            return self._by_mlx(queries, scale, sinks)
        out = attend(queries, tails, places, scale, fresh=fresh, behind=self._behind)
        if self.is_checked:
            mx.eval(out)  # So that the new token is in its place.
            if not (far := distance(out, self._by_mlx(queries, scale, sinks))) < CLOSE:  # NaN too
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

    def _by_mlx(self, queries: mx.array, scale: float, sinks: Any) -> mx.array:
        """Attention of more new tokens than the kernels take, row by row."""
        new, out = queries.shape[2], list[mx.array]()
        if self._behind is not None:
            mx.eval(self._behind)  # MLX does not know that this put there what it reads.
        for row, end in enumerate(self.ends):
            first = max(0, end - self.window - new + 1) if self.window else 0
            tokens, own = mx.arange(first, end), mx.arange(end - new, end)[:, None]
            whole = self.joined(row, first, end)
            mask: Any = (tokens <= own) & (tokens > own - self.window) if self.window else "causal"
            out.append(
                mx.fast.scaled_dot_product_attention(
                    queries[row : row + 1], *whole, scale=scale, mask=mask, sinks=sinks
                )
            )
        return mx.concatenate(out)

    def joined(self, row: int, first: int, end: int) -> Pair:
        """Copies of keys and values, unpacked: of the row's segments, and of tokens `first` to `end` of its
        tail."""
        held = self.tails[row].in_order(first, end)
        pairs = [one.pair(self.layer) for one in self.segments[row]]
        pairs.append(held if self.how is None else cast(Pair, tuple(map(self.how.unpack, held))))
        keys, values = (mx.concatenate(list(each), axis=2) for each in zip(*pairs, strict=True))
        return keys, values

    def extend(self, other: AddressedKVCache) -> None:
        if bool(self.tails) != bool(other.tails):
            raise RuntimeError("rows with KV and without it don't mix")
        self.tails, self.ends = self.tails + other.tails, self.ends + other.ends
        self.bases, self.segments = self.bases + other.bases, self.segments + other.segments
        self.table = self._shared = None

    def filter(self, batch_indices: Sequence[int]) -> None:
        for name in ("tails", "ends", "bases", "segments"):
            held = getattr(self, name)
            setattr(self, name, [held[row] for row in batch_indices] if held else [])
        self.table = self._shared = None

    def __deepcopy__(self, memo: dict[int, Any]) -> AddressedKVCache:
        other = copy(self)
        other.tails, other.segments = deepcopy((self.tails, self.segments), memo)
        other.table = None
        return other

    def advance(self, count: int) -> None:
        """`count` new tokens of each row have been put into the tails."""
        self.ends = [end + count for end in self.ends]

    def trim_rows(self, counts: Sequence[int]) -> None:
        """Forget the last `counts[row]` tokens of each row."""
        self.ends = [end - count for end, count in zip(self.ends, counts, strict=True)]

    def held_by(self, row: int) -> tuple[Any, Sequence[Any]]:
        return self.tails[row], self.segments[row]

    def window_of(self, row: int) -> dict[str, mx.array]:
        """Copies of keys and values of a row's window, in order."""
        held = self.tails[row].in_order(max(0, self.ends[row] - self.window), self.ends[row])
        return dict(zip(("keys", "values"), held, strict=True))


def _empty(held: Any, capacity: int) -> Any:
    return tree_map(lambda part: mx.zeros((1, part.shape[1], capacity, part.shape[3]), part.dtype), held)


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
