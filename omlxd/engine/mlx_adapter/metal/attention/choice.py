"""Whether attention's kernels are used: for which heads of a model, by the rule of rule.py.

A load's passes say how a model attends. Each kind of heads is judged when it is first seen, beside MLX's own
attention: rows of unequal length, of which some share a segment, one and several new tokens, sinks and a
window. Times decide for a batch's rows and for a row alone.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cache, partial
from typing import Any, NamedTuple, cast

import mlx.core as mx
from mlx_lm.models.cache import KVCache, RotatingKVCache

from ...attention import row_costs
from ...attention.backend import AttentionCall
from ...attention.by_rows import one_row
from ...cache.packed import Quantisation, parts_of
from ...cache.segments import OWN_MASK, Segment, SequenceKVCache, part_names
from .. import rule
from .kernels import WIDTHS
from .rows import SpanRowsKVCache

log = logging.getLogger(__name__)

KERNEL, NO_KERNEL = "attend_rows", "no Metal kernel fits this model"
CLOSE = {mx.float32: 1e-5, mx.float16: 4e-3, mx.bfloat16: 3e-2}
"""Largest difference from MLX's own, which rounds as well, by the largest number."""


class Heads(NamedTuple):
    """How attention is called. `how`: KV is packed so."""

    heads: int
    kv_heads: int
    width: int
    dtype: Any
    how: Quantisation | None = None

    def __str__(self) -> str:
        packed = "" if self.how is None else f", KV in {self.how.bits} bits"
        kind = str(self.dtype).removeprefix("mlx.core.")
        return f"{self.heads} query heads, {self.kv_heads} KV heads, {self.width} wide, {kind}{packed}"


SAMPLE = 32, 8, 128, mx.float16
"""Heads that `judge_sample` takes."""


class Choice(NamedTuple):
    """Whether the kernels are used for rows of a batch, and for a row alone."""

    rows: bool = False
    alone: bool = False


class Choices:
    """What was chosen, in this process. `since_load`: for the heads that the newest load met. `misfits`: why
    no kernel is for a call."""

    def __init__(self) -> None:
        self._of: dict[Heads, Choice] = {}
        self.since_load: dict[Heads | None, Choice] = {}
        self.misfits: list[str] = []

    def note(self, call: AttentionCall) -> Choice:
        """Return what is chosen for such a call. Judges what it has not seen."""
        heads = heads_of(call)
        if isinstance(heads, str):
            if heads not in self.misfits:
                self.misfits.append(heads)
                log.info("%s is not used: %s: %s", KERNEL, NO_KERNEL, heads)
            return self.since_load.setdefault(None, Choice())
        if heads not in self._of:
            self._of[heads] = _judged(heads)
        self.since_load[heads] = self._of[heads]
        return self._of[heads]

    def judge_sample(self, how: Quantisation | None) -> None:
        """Judge the heads of an 8B model, its KV packed so."""
        heads = Heads(*SAMPLE, how)
        if heads not in self._of:
            self._of[heads] = _judged(heads)

    @property
    def rows(self) -> bool:
        """Whether all of the newest load's attention over rows is by the kernels."""
        return bool(self.since_load) and all(choice.rows for choice in self.since_load.values())

    @property
    def writes(self) -> bool:
        """Whether the kernels are used for any rows of this process."""
        return any(choice.rows for choice in self._of.values())

    def of_row(self, row: Any) -> Choice:
        """Return what is chosen for rows such as this one, the cache of one sequence."""
        if not isinstance(row, KVCache | RotatingKVCache) or getattr(row, "mla_kind", ""):
            return Choice()
        how, held = getattr(row, "how", None), [*parts_of(row.keys), *parts_of(row.values)]
        if held[0] is None:
            if not getattr(row, "segments", ()):
                return Choice(self.rows)
            held = cast(Any, row).segments[0].parts(cast(Any, row).layer)
        width = held[0].shape[3] if how is None else held[0].shape[3] * 32 // how.bits
        kept = held[0].shape[1], width, held[-1].dtype, how
        chosen = [choice for heads, choice in self._of.items() if heads[1:] == kept]
        if not chosen or held[0].shape != held[len(held) // 2].shape:
            return Choice()
        return Choice(*(all(each) for each in zip(*chosen, strict=True)))


def heads_of(call: AttentionCall) -> Heads | str:
    """Heads of a call that a cache's own KV is read by; a text: why the kernels know no such attention."""
    queries, keys, values, cache = call[:4]
    how = getattr(cache, "how", None)
    if not isinstance(cache, KVCache | RotatingKVCache) or keys is values:
        return f"a layer reads no KV of its own ({type(cache).__name__})"
    if isinstance(keys, list):
        if how is None:
            return "packed KV of another kind"
        keys, values = keys[1], values[1]
    heads, kv_heads, width = queries.shape[1], keys.shape[1], queries.shape[3]
    kind = queries.dtype if queries.dtype == keys.dtype else None
    if width not in WIDTHS:
        return f"heads {width} wide ({', '.join(map(str, WIDTHS))} are known)"
    if keys.shape != values.shape or (how is None and keys.shape[3] != width) or heads % kv_heads:
        return f"{heads} query heads, {width} wide, over keys and values of other shapes"
    if kind not in CLOSE:
        return f"queries in {_word(queries.dtype)} over KV in {_word(keys.dtype)}"
    return Heads(heads, kv_heads, width, kind, how)


def _word(dtype: mx.Dtype) -> str:
    return str(dtype).rpartition(".")[2]


# --------------------------------------------------------------------------- judging

SEGMENTS, TAILS = [160, *[8] * 13], (70, 300, 1100)
"""Tokens: of the segments that the first two rows have, more than a launch reads, and of rows' tails, which
end amid spans of both sizes."""

SHORT, LONG, ONE = (8, 512), (4, 8192), (1, 2048)
"""Rows, and tokens of each, that are timed: rows in one array, which short rows are better off with, rows by
themselves, which suits long ones, and a row alone."""


def _judged(heads: Heads) -> Choice:
    names = [f"{rows} row{'s' * (rows > 1)} of {tokens:,}" for rows, tokens in (SHORT, LONG, ONE)]
    passes, every = cache(partial(_passes, heads)), tuple(range(len(TAILS)))
    verdict = rule.judged(
        rule.Case(
            KERNEL,
            str(heads),
            lambda: [ours for ours, _ in passes(every)],
            lambda: [mlx for _, mlx in passes(every)],
            CLOSE[heads.dtype],
            lambda: [
                (alone, ours[row : row + 1])
                for row in every
                for (alone, _), (ours, _) in zip(passes((row,)), passes(every), strict=True)
            ],
            lambda: [_timed(heads, *case) for case in zip(names, (SHORT, LONG, ONE), strict=True)],
        )
    )
    rows = verdict.is_used and all(map(verdict.pays, names[:2]))
    return Choice(rows, rows and verdict.pays(names[2]))


class _Trial:
    """A batch of drawn rows, and what their next tokens get. The same for the same `rows`, in any company."""

    def __init__(
        self, heads: Heads, rows: Sequence[int], window: int = 0, sinks: bool = False, shares: bool = False
    ):
        self.heads, self.rows, self.window = heads, rows, window
        segments = [self._segment(at, tokens) for at, tokens in enumerate(SEGMENTS if shares else ())]
        self.batch = SpanRowsKVCache([self._cache(row, segments if row < 2 else []) for row in rows])
        self.sinks = self._draw(98, heads.heads) if sinks else None

    def _draw(self, seed: int, *shape: int) -> mx.array:
        return mx.random.normal(shape, key=mx.random.key(seed)).astype(self.heads.dtype)

    def _kept(self, seed: int, tokens: int) -> list[mx.array]:
        """Keys and values, as caches keep them."""
        shape, how = (1, self.heads.kv_heads, tokens, self.heads.width), self.heads.how
        pair = [self._draw(seed + at, *shape) for at in (0, 1000)]
        return [part for array in pair for part in (how.pack(array) if how else [array])]

    def _segment(self, at: int, tokens: int) -> Segment:
        names = [f"{_LAYER}.{name}" for name in part_names(self.heads.how)]
        return Segment(dict(zip(names, self._kept(200 + at, tokens), strict=True)), self.heads.how)

    def _cache(self, row: int, segments: list[Segment]) -> Any:
        kept = self._kept(row, TAILS[row])
        if self.window:
            ring = RotatingKVCache(self.window)
            ring.update_and_fetch(*kept)
            return ring
        held = SequenceKVCache(_LAYER, self.heads.how)
        held._take(kept)
        held.segments, held.base = segments, sum(segment.tokens for segment in segments)
        held.offset = held.base + TAILS[row]
        return held

    def attend(self, new: int) -> tuple[mx.array, mx.array]:
        """What the kernels give, evaluated, and MLX's own for the same."""
        kv_heads, width = self.heads.kv_heads, self.heads.width
        keys, values = (
            mx.concatenate([self._draw(row + at + new, 1, kv_heads, new, width) for row in self.rows])
            for at in (2000, 3000)
        )
        queries = mx.concatenate(
            [self._draw(row + 4000 + new, 1, self.heads.heads, new, width) for row in self.rows]
        )
        scale = width**-0.5
        out = self.batch.attend(
            queries, *self.batch.update_and_fetch(keys, values), scale, OWN_MASK, self.sinks
        )
        mx.eval(out)
        return out, self.batch.by_mlx(queries, scale, self.sinks)


_LAYER = "layers.0"


def _passes(heads: Heads, rows: tuple[int, ...]) -> list[tuple[mx.array, mx.array]]:
    """Of both ways: passes of one and of three tokens, behind segments, with sinks, and in windows."""
    trials = [_Trial(heads, rows, shares=True), _Trial(heads, rows, sinks=True)]
    if heads.how is None:
        trials.append(_Trial(heads, rows, window=48, sinks=True))
    return [trial.attend(new) for trial in trials for new in (1, 3)]


def _timed(heads: Heads, name: str, size: tuple[int, int]) -> rule.Timed:
    """Passes of one token a row, whose KV is put into rows' arrays."""
    rows, length = size
    shape = row_costs.Shape(heads.heads, heads.kv_heads, heads.width, heads.dtype, heads.dtype)
    length = max(
        64, min(length, row_costs.MOST_BYTES // (2 * rows * heads.kv_heads * heads.width * heads.dtype.size))
    )
    ways = row_costs.ways(shape, rows, length, one_row)
    batch = SpanRowsKVCache([_filled(heads, length) for _ in range(rows)])
    new = mx.ones((rows, heads.kv_heads, 1, heads.width), heads.dtype)
    mx.eval(batch.state, new)

    def ours(queries: mx.array) -> mx.array:
        out = batch.attend(queries, *batch.update_and_fetch(new, new), heads.width**-0.5, OWN_MASK, None)
        batch.trim_rows([1] * rows)
        return out

    mlx = ways.joint if size == SHORT else ways.alone
    return rule.Timed(name, ours, mlx, ways.queries, ways.rooms)


def _filled(heads: Heads, length: int) -> SequenceKVCache:
    cache = SequenceKVCache(_LAYER, heads.how)
    cache.step = length + 64
    kv = mx.ones((1, heads.kv_heads, length, heads.width), heads.dtype)
    cache._append(kv, kv)
    return cache
