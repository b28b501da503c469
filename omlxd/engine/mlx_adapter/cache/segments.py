"""Per-token KV in segments: sequences that begin alike hold what they share once.

The KV of a prompt is cut at multiples of `SEGMENT` tokens, as far as its last pass begins behind them,
and by some backends once more, at the last multiple of `SHORT_SEGMENT` there. What lies before is in
`Segment`s: immutable, so any number of sequences may hold the same one. The rest is the sequence's own tail,
which decoding extends without another cut.

| pass                     | attention reads                         | bits                               |
|--------------------------|-----------------------------------------|------------------------------------|
| not cut (yet)            | the tail                                | MLX's own                          |
| before a prompt's last   | a joint copy of all, a layer at a time  | MLX's own                          |
| the last, and decoding,  | segments and tail by products of their  | MLX's own with its wheel's BLAS;   |
| up to `FEW` tokens a row | own, with one softmax over all          | with others sums follow the cuts   |
| the same, more tokens    | a joint copy of all; in batches as above| MLX's own; as above                |
| by a backend's kernels,  | each segment once for all rows, and     | the kernels': sums in a fixed      |
| up to 64 tokens          | tails (`over_segments`)                 | order                              |

Packed KV (packed.py) is unpacked for any of these; a backend's kernel may read a row's
segments and its tail as they are, each row by itself. Windows and recurrent state of other layers are each
sequence's own. live_segments.py says where a prompt is cut.

Elsewhere each row's tail is read by itself, and the segments that rows begin with once for all of them. With
the wheel's BLAS, which adds in order, bits depend on the prompt alone: not on who shares a segment, nor on
who else is in the batch.

`attend` of attention/hooks.py is put in place of mlx-lm's `scaled_dot_product_attention`, and of mlx-vlm's
(model/vlm/vision.py); `can_share` says whether all attention of a model's layers with segments goes through
it.

SmolLM2's shape in float32, 20,000 tokens that rows share and 500 of each's own, 2 CPUs with a load of 6,
OpenBLAS, fastest step (tools/bench/shared_prefix.py): one row 714 ms and 552 in segments; four rows 1,544
and 927, with 3,779 and 1,231 MB of KV. 64 tokens of a prompt, whose bits are equal, 7.8 s and 8.1.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import CacheList, KVCache

from ..attention import hooks as attention
from ..attention.backend import AttentionCall, current
from ..attention.by_rows import fold
from ..runtime.arrays import rows_at
from ..runtime.gpu_faults import end_if_fault
from .packed import PARTS, MaybePacked, Quantisation, parts_of

SEGMENT = 2048
"""Tokens. With 4,096, four rows of the bench took as long and held 283 MB more."""

SHORT_SEGMENT = 256
"""Tokens. Behind its full segments a prompt has a short one, of a multiple of these.

MB of KV of eight requests with room for answers of 64 tokens, SmolLM2's shape: over one prompt of 995 tokens,
and over prompts of 930 to 993 that begin with the same 900. Smaller multiples leave less to each, and fewer
prompts that end otherwise are cut at the same place.

| multiple of | one prompt | prompts that begin alike |
|-------------|------------|--------------------------|
| not cut     | 472        | 425                      |
| 64          | 139        | 313                      |
| 128         | 136        | 324                      |
| 256         | 224        | 177                      |
| 512         | 307        | 260                      |

With 256, tails have got room by blocks since: the one prompt takes 153 where it is computed, and still 224
behind a hit.

Median step with OpenBLAS, not cut and cut by 256, two runs on two CPUs beside other work, ms: one row of 500
tokens 76 and 82, 77 and 81; of 1,000 82 and 80, 82 and 82; of 5,000 125 and 123, 126 and 127; eight rows of
1,000 179 and 178, 170 and 161.
"""

FEW = 16
"""Tokens of a pass. More would make scores that take longer to join than the KV takes to copy."""

Pair = tuple[mx.array, mx.array]


class Segment:
    """KV of some tokens, by layout name, each (1, heads, tokens, dim). Nobody may change it.

    how        it is packed so
    on_device  what the backend keeps of it; None: nothing
    """

    __slots__ = ("__weakref__", "how", "on_device", "tensors")

    def __init__(self, tensors: dict[str, mx.array], how: Quantisation | None = None):
        self.tensors, self.how = tensors, how
        self.on_device: Any = None

    def parts(self, layer: str) -> list[mx.array]:
        """Arrays of keys, then of values, of the layer that is named so."""
        return [self.tensors[f"{layer}.{name}"] for name in part_names(self.how)]

    def pair(self, layer: str) -> Pair:
        """K and V of the layer, unpacked."""
        return unpacked(self.parts(layer), self.how)

    @property
    def tokens(self) -> int:
        return next(iter(self.tensors.values())).shape[2]

    @property
    def layers(self) -> list[str]:
        """Their names, in order."""
        end = f".{part_names(self.how)[0]}"
        return [name.removesuffix(end) for name in self.tensors if name.endswith(end)]

    def __deepcopy__(self, memo: object) -> Segment:
        return self

    def __del__(self) -> None:
        if self.on_device is not None:  # MLX does not know what a kernel reads that was told addresses.
            current().wait()


def part_names(how: Quantisation | None) -> list[str]:
    """Of arrays of keys, then of values, as the layout has them behind a layer's name."""
    ends = [""] if how is None else [f".{part}" for part in PARTS]
    return [f"{name}{end}" for name in ("keys", "values") for end in ends]


def unpacked(parts: Sequence[mx.array], how: Quantisation | None) -> Pair:
    """K and V of `parts`, the arrays of keys, then of values."""
    if how is None:
        return parts[0], parts[1]
    return how.unpack(parts[:3]), how.unpack(parts[3:])


class SequenceKVCache(MaybePacked, KVCache):
    """Per-token KV of one sequence: packed or not, behind segments or none.

    layer      its name in the layout, if it may begin with segments; else ""
    mla_kind   `mla` or `index`: a pass gets a joint copy, since models multiply parts by themselves; rows of
               a batch do without (mla_rows.py). "": it keeps other KV
    joint      attention reads a joint copy of segments and tail
    base       tokens in segments; `keys` and `values` are the tail, and `offset` counts all tokens
    unread     what `update_and_fetch` gave, until `attend` gets it
    on_device  what the backend keeps of its segments; None: nothing

    Packed segments and their tail are unpacked in each pass, but for a backend's kernel. SmolLM2's shape in
    float32, 8,192 tokens that rows share and 500 of each's own, 2 CPUs beside other work, OpenBLAS, median
    step by MLX's products of packed KV in one piece and in segments (tools/bench/shared_prefix.py --kv-bits
    8): one row 305 ms and 220; four rows 1,496 and 414, with 504 and 132 MB of KV. In 4 bits 403 and 286;
    1,249 and 500, with 280 and 73 MB.
    """

    offset: int

    def __init__(self, layer: str = "", how: Quantisation | None = None):
        super().__init__()
        self.layer, self.how = layer, how
        self.mla_kind = ""
        self.joint = True
        self.segments: list[Segment] = []
        self.base = 0
        self.unread: Any = None
        self.on_device: Any = None

    def _append(self, keys: mx.array, values: mx.array) -> Any:
        """Put new tokens behind the first `offset` columns; what attention gets where there is no segment."""
        if self.how is None:
            return super().update_and_fetch(keys, values)
        self._write(keys, values, self.offset)
        self.offset += keys.shape[2]
        return None if self.segments else self._read(self.offset, keys.shape[2])

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> Any:
        if not self.segments:
            return self._append(keys, values)
        _check_read(self)
        self.offset -= self.base
        self._append(keys, values)
        self.offset += self.base
        self.__dict__.pop("bits", None)  # By which mlx-lm's attention tells packed KV.
        if self.mla_kind:
            return self.all_kv()
        self.unread = self.keys, self.values
        if self.how is None:
            attention.note_given(self.keys, self.values, self)
        return self.unread

    def keys_and_values(self) -> Any:
        return self.tail() if self.how is None else self._read_again(self.offset - self.base)

    def places(self) -> tuple[list[int], list[int], bool]:
        return [0], [self.offset], True

    def attend(
        self, queries: mx.array, keys: Any, values: Any, scale: float, mask: Any, sinks: Any
    ) -> mx.array | None:
        """Attention to segments and tail; None: there are no segments, or it got a joint copy already.

        Raises RuntimeError where other attention has missed the segments.
        """
        if not self.segments or self.mla_kind:
            return None
        if self.unread is not None and self.unread[0] is keys and self.unread[1] is values:
            self.unread = None
        _check_read(self)  # Layers that share this one's KV read it again.
        call = AttentionCall(queries, keys, values, self, scale, mask, sinks)
        if (mask is None or isinstance(mask, str)) and not self.joint:
            if (out := current().over_segments(call)) is not None:
                return out
            if queries.shape[2] <= FEW:
                parts = [*(segment.pair(self.layer) for segment in self.segments), self.tail()]
                return fold(queries, [], [parts], scale, sinks)
        keys, values = self.all_kv()
        return attention.by_backend(call._replace(keys=keys, values=values))

    @property
    def _parts(self) -> list[mx.array]:
        """Of the tail: arrays of keys, then of values, as allocated."""
        return [*parts_of(self.keys), *parts_of(self.values)]

    def tail(self) -> Pair:
        """K and V of the tail, unpacked."""
        length = self.offset - self.base
        return unpacked([part[..., :length, :] for part in self._parts], self.how)

    def open_tail(self) -> None:
        """Make the tail's arrays, of `step` tokens, if all tokens are in segments."""
        if self.keys is None and self.segments:
            self._take(
                [
                    mx.zeros((*part.shape[:2], self.step, part.shape[3]), part.dtype)
                    for part in self.segments[-1].parts(self.layer)
                ]
            )

    def _take(self, parts: list[mx.array]) -> None:
        """Have these parts as tail."""
        self.keys, self.values = parts if self.how is None else (parts[:3], parts[3:])

    def all_kv(self) -> Pair:
        """K and V of all tokens, joined and unpacked; lazy."""
        each = [segment.parts(self.layer) for segment in self.segments]
        if (length := self.offset - self.base) or not each:
            each.append([part[..., :length, :] for part in self._parts])
        return unpacked([mx.concatenate(list(parts), axis=2) for parts in zip(*each, strict=True)], self.how)

    def add_segment(self, segment: Segment) -> None:
        """The next tokens are in `segment`, and no longer in the tail."""
        self.segments.append(segment)
        self.on_device = None
        self.base += segment.tokens
        self.offset = max(self.offset, self.base)

    def cut(self, ends: Sequence[int], room: int) -> list[dict[str, mx.array]]:
        """Cut the tail at tokens `ends`, and take what is before them, by layout name, evaluated;
        `add_segment` must follow.

        room  tokens that what is left has room for
        """
        parts, places = self._parts, [end - self.base for end in ends]
        self.keys = self.values = None
        cuts: list[list[mx.array]] = []
        rests: list[mx.array] = []
        parts.reverse()
        while parts:  # Each goes before the next one's copies come.
            array = parts.pop()
            if [array.shape[2]] == places:
                cuts.append([array])
                continue
            cuts.append([mx.contiguous(array[..., a:b, :]) for a, b in pairwise([0, *places])])
            left = array[..., places[-1] : self.offset - self.base, :]
            mx.eval(cuts[-1])
            if left.shape[2]:
                rest = mx.zeros((*left.shape[:2], max(room, left.shape[2]), left.shape[3]), left.dtype)
                rest[..., : left.shape[2], :] = left
                mx.eval(rest)
                rests.append(rest)
        if rests:
            self._take(rests)
        names = [f"{self.layer}.{name}" for name in part_names(self.how)]
        return [dict(zip(names, arrays, strict=True)) for arrays in zip(*cuts, strict=True)]


OWN_MASK = "a row sees its own tokens"
"""In place of a mask, which `attend` does without. A model that looks into it fails the check at load
(`checks.use_own_rows`)."""


def _check_read(cache: Any) -> None:
    """What the pass before was given went to `attend`: any other attention has missed the segments."""
    if cache.unread is not None:
        raise RuntimeError(
            "this model's attention does not read KV in segments: serve it with --share-prefix off"
        )


# --------------------------------------------------------------------------- attention


def by_rows(
    queries: mx.array,
    layer: str,
    held: Sequence[Sequence[Segment]],
    tails: Sequence[Pair],
    scale: float,
    sinks: mx.array | None = None,
    latents: bool = False,
) -> mx.array:
    """(rows, heads, n, width): each row attends to the segments that it has, `held`, and to its tail. Rows
    that begin with the same segments read those once, together.

    tails    unpacked
    latents  as `fold` has it
    """
    out: list[mx.array] = [queries] * len(tails)
    for rows, shared in _sharing(held):
        own = [[*(segment.pair(layer) for segment in held[row][len(shared) :]), tails[row]] for row in rows]
        before = [segment.pair(layer) for segment in shared]
        some = rows_at(queries, rows) if len(rows) < len(held) else queries
        got = fold(some, before, own, scale, sinks, latents)
        for index, row in enumerate(rows):
            out[row] = got[index : index + 1]
    return mx.concatenate(out)


def _sharing(segments: Sequence[Sequence[Segment]]) -> list[tuple[list[int], list[Segment]]]:
    """(rows, the segments that all of them begin with), each row once."""
    found: dict[int, tuple[list[int], list[Segment]]] = {}
    for row, own in enumerate(segments):
        if not own or (group := found.get(id(own[0]))) is None:
            found[id(own[0]) if own else -1 - row] = [row], list(own)
            continue
        rows, shared = group
        same = next((i for i, (a, b) in enumerate(zip(shared, own, strict=False)) if a is not b), None)
        del shared[len(own) if same is None else same :]
        rows.append(row)
    return list(found.values())


def can_share(model: Any, make_cache: Any) -> bool:
    """Whether a model whose `make_cache()` gives caches with segments attends to these by `attend` alone.

    Passes behind a segment are put together, and none is computed.
    """
    try:
        for new in (1, 2, FEW + 1):
            single = _behind_a_segment(model, make_cache())
            model(mx.zeros((1, new), mx.int32), cache=single)
            if any(leaf.unread is not None for leaf in segmented_layers(single)):
                return False
    except Exception as error:
        end_if_fault(error)
        return False
    return True


def logits_behind(model: Any, make_cache: Any) -> tuple[mx.array, mx.array]:
    """Logits of two tokens behind `FIRST` in a segment, and behind the same that are not."""
    model(mx.array([FIRST]), cache=(whole := make_cache()))
    single = _behind_a_segment(model, make_cache())
    got, want = (model(mx.array([[34, 35]]), cache=cache) for cache in (single, whole))
    mx.eval(got, want)  # As long as the segment lives: a kernel was told where it lies.
    return got, want


FIRST = [*range(5, 21)]
"""Tokens of a check: as many as the kernel reads at once, which it must not leave out."""


def _behind_a_segment(model: Any, cache: Any) -> Any:
    model(mx.array([FIRST]), cache=cache)
    for leaf in segmented_layers(cache):
        leaf.add_segment(Segment(leaf.cut([len(FIRST)], 0)[0], leaf.how))
        leaf.joint = False
    return cache


# --------------------------------------------------------------------------- segments of a whole cache


def segmented_layers(cache: Iterable[Any]) -> list[SequenceKVCache]:
    """Layers of a sequence's cache that can hold segments, members of a `CacheList` among them. Others keep
    windows or recurrent state."""
    found: list[SequenceKVCache] = []
    for layer in cache:
        if isinstance(layer, CacheList):
            found += segmented_layers(layer.caches)
        elif isinstance(layer, SequenceKVCache) and layer.layer:
            found.append(layer)
    return found


def add_segment(cache: Iterable[Any], segment: Segment) -> None:
    """The next tokens of `cache` are in `segment`."""
    for leaf in segmented_layers(cache):
        leaf.add_segment(segment)
