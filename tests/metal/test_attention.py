"""Attention of a batch's rows by Metal kernels, whose source runs here as C++: they give numpy's numbers, and
a row's bits do not depend on who is beside it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from metal import harness, pretended
from metal.draws import draws
from metal.mutants import survivors
from mlx_lm.models.cache import RotatingKVCache

from omlxd.engine.mlx_adapter.cache.packed import Quantisation
from omlxd.engine.mlx_adapter.cache.segments import OWN_MASK, Segment, SequenceKVCache, part_names, unpacked
from omlxd.engine.mlx_adapter.metal import kernel as kernel_module
from omlxd.engine.mlx_adapter.metal.attention import kernels, launch
from omlxd.engine.mlx_adapter.metal.attention.rows import SpanRowsKVCache

FAR = {mx.float32: 1e-6, mx.float16: 1e-3, mx.bfloat16: 1e-2}
"""As the issue has it: the largest difference by the largest number."""
LAYER = "layers.0"


@dataclass
class Row:
    """Tokens of its tail, the segments that it has before, and the capacity of its arrays."""

    tail: int
    segments: tuple[int, ...] = ()
    capacity: int = 0


@dataclass
class Story:
    """A pass of `new` tokens a row. `segments`: tokens of each. `far`: 1, -1: scores of thousands."""

    rows: Sequence[Row]
    segments: Sequence[int] = ()
    dtype: Any = mx.float32
    width: int = 64
    heads: int = 4
    kv_heads: int = 2
    new: int = 1
    window: int = 0
    sinks: bool = False
    how: Quantisation | None = None
    seed: int = 0
    far: int = 0
    drawn: dict[str, mx.array] = field(default_factory=dict, init=False)

    def draw(self, name: str, *shape: int) -> mx.array:
        """The same for one name."""
        if name not in self.drawn:
            key = mx.random.key(self.seed + sum(map(ord, name)) * 7919)
            drawn = mx.random.normal(shape, key=key)
            if self.far and name.startswith("queries"):
                drawn = mx.abs(drawn) * 20
            elif self.far and name.endswith("keys"):
                drawn = mx.abs(drawn) * 20 * self.far
            self.drawn[name] = drawn.astype(self.dtype)
        return self.drawn[name]

    def kv(self, name: str, tokens: int) -> list[mx.array]:
        """Keys and values of one row, as a model gives them."""
        shape = (1, self.kv_heads, tokens, self.width)
        return [self.draw(f"{name} {what}", *shape) for what in ("keys", "values")]

    def kept(self, arrays: Sequence[mx.array]) -> list[mx.array]:
        """As caches keep them: arrays of keys, then of values."""
        return [part for array in arrays for part in (self.how.pack(array) if self.how else [array])]

    def seen(self, arrays: Sequence[mx.array]) -> list[np.ndarray]:
        """As attention sees them, in float64."""
        kept = self.kept(arrays)
        if self.how is not None:
            words = [part if part.dtype == mx.uint32 else part.astype(mx.float32) for part in kept]
            kept = [*unpacked(words, self.how)]
        return [exact(array)[0] for array in kept]

    def cache(self, at: int, segments: Sequence[Segment]) -> Any:
        """Of one sequence, without the new tokens."""
        row = self.rows[at]
        arrays = self.kv(f"tail {at}", row.tail)
        if self.window:
            ring = RotatingKVCache(self.window)
            for token in range(row.tail):
                ring.update_and_fetch(*(array[:, :, token : token + 1] for array in arrays))
            return ring
        cache = SequenceKVCache(LAYER, self.how)
        cache.segments = [segments[each] for each in row.segments]
        cache.base = sum(self.segments[each] for each in row.segments)
        cache.step = max(row.capacity, row.tail)
        if row.tail:
            cache._append(*arrays)
        cache.offset += cache.base
        return cache

    def held_segments(self) -> list[Segment]:
        return [
            Segment(
                dict(
                    zip(
                        [f"{LAYER}.{name}" for name in part_names(self.how)],
                        self.kept(self.kv(f"segment {at}", tokens)),
                        strict=True,
                    )
                ),
                self.how,
            )
            for at, tokens in enumerate(self.segments)
        ]

    def batch(self, rows: Sequence[int]) -> SpanRowsKVCache:
        segments = self.held_segments()
        return SpanRowsKVCache([self.cache(at, segments) for at in rows])

    def attend(self, batch: SpanRowsKVCache, rows: Sequence[int], step: int = 0) -> mx.array:
        """(rows, heads, n, width) of the next tokens of these rows."""
        new = [self.kv(f"new {at} {step}", self.new) for at in rows]
        keys, values = (mx.concatenate(list(arrays)) for arrays in zip(*new, strict=True))
        queries = mx.concatenate(
            [self.draw(f"queries {at} {step}", 1, self.heads, self.new, self.width) for at in rows]
        )
        got = batch.update_and_fetch(keys, values)
        sinks = self.draw("sinks", self.heads) if self.sinks else None
        return batch.attend(queries, *got, self.width**-0.5, OWN_MASK, sinks)

    def wanted(self, at: int, steps: int = 1) -> np.ndarray:
        """(heads, n, width) of the newest of so many passes, by numpy in float64."""
        row, new = self.rows[at], self.new
        names = [(f"segment {each}", self.segments[each]) for each in row.segments]
        names += [(f"tail {at}", row.tail)] * (row.tail > 0)
        names += [(f"new {at} {step}", new) for step in range(steps)]
        parts = [self.seen(self.kv(*each)) for each in names]
        keys, values = (np.concatenate(list(each), axis=1) for each in zip(*parts, strict=True))
        queries = exact(self.draw(f"queries {at} {steps - 1}", 1, self.heads, new, self.width))[0]
        group, length = self.heads // self.kv_heads, keys.shape[1]
        scores = np.repeat(keys, group, 0) @ queries.swapaxes(1, 2) * self.width**-0.5
        tokens, own = np.arange(length)[:, None], np.arange(length - new, length)[None]
        hidden = (tokens > own) | ((tokens <= own - self.window) if self.window else False)
        weights = np.exp(np.where(hidden, -np.inf, scores) - scores.max())
        total = weights.sum(1, keepdims=True)
        if self.sinks:
            total += np.exp(exact(self.draw("sinks", self.heads))[:, None, None] - scores.max())
        return (weights / total).swapaxes(1, 2) @ np.repeat(values, group, 0)

    def check(self, rows: Sequence[int] | None = None, steps: int = 1) -> mx.array:
        """That these rows get what numpy gives, pass by pass; what the last one gave."""
        rows = range(len(self.rows)) if rows is None else rows
        batch, got = self.batch(rows), mx.zeros(0)
        for step in range(steps):
            got = self.attend(batch, rows, step)
            for index, at in enumerate(rows):
                want = self.wanted(at, step + 1)
                far = np.abs(exact(got)[index] - want).max() / np.abs(want).max()
                # A score of thousands is rounded by more than the numbers behind it may be off.
                assert far < FAR[self.dtype] * (100 if self.far else 1), (far, at, step)
        return got


def exact(array: mx.array) -> np.ndarray:
    return np.array(array.astype(mx.float32)).astype(np.float64)


SHARED = Story([Row(77, (0, 1), 128), Row(300, (0,)), Row(5, (0, 1)), Row(33)], (160, 40))

FAR_BELOW = Story([Row(40), Row(9)], heads=1, kv_heads=1, far=-1)

STORIES = {
    "float32": SHARED,
    "float16, 128 wide, 3 new": replace(SHARED, dtype=mx.float16, width=128, new=3),
    "bfloat16, 256 wide, 1 KV head": replace(SHARED, dtype=mx.bfloat16, width=256, kv_heads=1),
    "float32, 256 wide, 8 new": replace(SHARED, width=256, new=8, heads=2),
    "bfloat16, 80 wide": replace(SHARED, dtype=mx.bfloat16, width=80, heads=6),
    "float16, 96 wide": replace(SHARED, dtype=mx.float16, width=96, new=2),
    "float16, 192 wide": replace(SHARED, dtype=mx.float16, width=192, heads=2),
    "sinks": replace(SHARED, sinks=True, new=2),
    "a window": Story([Row(100), Row(20), Row(65)], window=40, new=1),
    "a window, 4 new": Story([Row(100), Row(20), Row(65)], window=40, new=4, sinks=True),
    "8 bits": replace(SHARED, how=Quantisation(8, 64)),
    "4 bits, 128 wide": replace(SHARED, how=Quantisation(4, 32), width=128, dtype=mx.float16, new=2),
    "more parts than a launch": Story([Row(3 + at, (at,)) for at in range(8)], [32] * 8, heads=2),
    "scores far below 0": FAR_BELOW,
    "scores far above 0": replace(FAR_BELOW, far=1),
    "a long row": Story([Row(1900)], heads=2, kv_heads=1),
}


@pytest.mark.parametrize("name", STORIES)
def test_rows_get_what_numpy_gives(name: str, on_cpu: Any):
    """Also behind tokens that the kernel put into the tails itself, and of each alone the same bits."""
    story = STORIES[name]
    together = story.check(steps=3)
    for at in (0, len(story.rows) - 1):
        assert mx.array_equal(story.check([at], steps=3)[0], together[at])


@pytest.mark.parametrize("name", STORIES)
def test_the_stand_in_gives_the_same(name: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(kernel_module, "run", pretended.run)
    test_rows_get_what_numpy_gives(name, None)


@given(data=st.data())
@settings(max_examples=draws(8), deadline=None)
def test_any_rows_get_what_numpy_gives(data: st.DataObject):
    """Rows of any length, behind any segments, with any number of new tokens."""
    segments = data.draw(st.lists(st.integers(1, 200), max_size=3))
    row = st.builds(
        lambda tail, held, room: Row(tail, tuple(range(held)), tail + room),
        *(st.integers(0, 200), st.integers(0, len(segments)), st.integers(0, 40)),
    )
    rows = data.draw(st.lists(row, min_size=1, max_size=4))
    window = 0 if segments else data.draw(st.sampled_from([0, 0, 5, 130]))
    if window:
        rows = [Row(max(1, each.tail)) for each in rows]
    if len({bool(each.tail or each.segments) for each in rows}) > 1:
        rows = [replace(each, tail=max(1, each.tail)) for each in rows]
    kv_heads, group = data.draw(st.sampled_from([(1, 1), (1, 4), (2, 3)]))
    story = Story(
        *(rows, segments, mx.float32, 64, kv_heads * group, kv_heads, data.draw(st.integers(1, 8))),
        **{"window": window, "sinks": data.draw(st.booleans()), "seed": data.draw(st.integers(0, 99))},
    )
    with harness.in_place_of_metal(orders=(0, 1)):
        together = story.check(steps=2)
        at = data.draw(st.integers(0, len(rows) - 1))
        assert mx.array_equal(story.check([at], steps=2)[0], together[at])


BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);\n      "
SPANS = [
    (BARRIER + "Own::spread(ahead, tile, keys", "Own::spread(ahead, tile, keys"),
    ("place, thread_at, token, piece);\n      " + BARRIER, "place, thread_at, token, piece);\n"),
    ("own <= last[s]", "own <= last[s] + 1"),
    ("own > last[s] - window", "own >= last[s] - window"),
    ("sum[s][e] *= kept", "sum[s][e] *= 1"),
    ("part[END] - fresh", "part[END]"),
    ("held.put(", "if (false) held.put("),
    ("lane * (Own::STRIDE / 4)", "lane * (Own::CHUNK / 4)"),
    ("place.has(own) && own", "own"),
    ("most[s] = -INFINITY;\n    total", "most[s] = 0;\n    total"),
    ("none ? 1.0f : exp(most[s] - next)", "exp(most[s] - next)"),
    ("none ? 0.0f : exp(x - next)", "exp(x - next)"),
]
MERGE = [
    ("const float share = exp(own[WIDTH] - most);", "const float share = 1;"),
    ("span * table[entry + APART];\n      const device", "span;\n      const device"),
    ("exp(sink - most)", "0.0f"),
    ("most = max(most, from", "most = max(0.0f, from"),
]


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("name", ["spans", "merge"])
def test_mutants_of_the_kernels_are_found(name: str, monkeypatch: pytest.MonkeyPatch):
    shared = Story([Row(40, (0,)), Row(150, (0,)), Row(9)], [170], new=3, sinks=True, heads=2, kv_heads=1)
    # Of the 32 tokens read first, the first query sees the last one, and the second query none.
    window = Story([Row(54), Row(20)], window=24, new=2, heads=1, kv_heads=1)

    def check(kernel: Any) -> None:
        monkeypatch.setattr(launch, f"{name}_kernel", lambda _: kernel)
        shared.check(steps=2)
        window.check(steps=2)
        FAR_BELOW.check()

    kernel, edits = (
        (kernels.spans_kernel(kernels.PLAIN), SPANS) if name == "spans" else (kernels.merge_kernel(1), MERGE)
    )
    assert survivors(kernel, edits, check) == []
