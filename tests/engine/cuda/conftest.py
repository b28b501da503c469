"""What tests of attention share: a kernel of MLX's ops in place of the one that runs on CUDA alone."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterable, Iterator
from itertools import count, islice
from pathlib import Path
from typing import Any, ClassVar, cast
from weakref import WeakValueDictionary

import mlx.core as mx
import numpy as np
import pytest
from backends import let_rows_pay, use_backend
from mlx_lm.models.cache import RotatingKVCache

from omlxd.engine.mlx_adapter import Quantisation
from omlxd.engine.mlx_adapter.attention import hooks as attention
from omlxd.engine.mlx_adapter.cuda.attention import (
    attend,
    attention_kernel,
    attention_packed,
    checks,
    latent_kernel,
    segment_attention,
)
from omlxd.engine.mlx_adapter.cuda.attention.attention_kernel import Tails
from omlxd.engine.mlx_adapter.cuda.attention.segments import Shared
from omlxd.engine.mlx_adapter.cuda.compile import launch
from omlxd.engine.mlx_adapter.cuda.rows import addressed_rows
from omlxd.engine.mlx_adapter.cuda.step import fused_step, step_kv


class Reference:
    """Attends row by row over each row's own columns. Counts its calls, and those of several new tokens."""

    calls = several = steps = by_address = 0
    most_new = attention_kernel.MOST_NEW

    def compile_ahead(self) -> None:
        """Nothing to compile."""

    def over_tails(
        self,
        queries: Any,
        tails: Tails,
        places: tuple[list[int], list[int]],
        scale: float,
        *,
        fresh: Any = (),
        behind: mx.array | None = None,
        window: int = 0,
        sinks: mx.array | None = None,
    ) -> mx.array:
        """As `Kernel.over_tails`; writes in place."""
        Reference.by_address += 1
        assert max(end - start for start, end in zip(*places, strict=True)) <= tails.most
        before = [segments_by_number(tails, row) for row in range(len(queries))]
        if fresh:
            own_ends = [end - tails.each * len(own) for end, own in zip(places[1], before, strict=True)]
            put_by_number(fresh, tails, mx.array(own_ends))
        out = []
        for row, (start, end) in enumerate(zip(*places, strict=True)):
            held, columns = arrays_by_number(tails, row), mx.arange(start, end)
            if before[row]:
                held = [mx.concatenate(list(parts), axis=2) for parts in zip(*before[row], held, strict=True)]
            assert end <= held[0].shape[2] or window
            inorder = self.joined([array[:, :, columns % array.shape[2]] for array in held])
            query, own = queries[row : row + 1], ([0], [end - start])
            out.append(self(query, *inorder, own, scale, window=window, sinks=sinks))
        return mx.concatenate(out)

    def joined(self, parts: list[mx.array]) -> list[Any]:
        """Keys and values."""
        return parts

    def __call__(
        self,
        queries: Any,
        keys: Any,
        values: Any,
        places: tuple[list[int], list[int]],
        scale: float,
        *,
        window: int = 0,
        sinks: mx.array | None = None,
    ) -> mx.array:
        new, rows = queries.shape[2], []
        Reference.calls += 1
        Reference.several += new > 1
        for row, (start, end) in enumerate(zip(*places, strict=True)):
            columns, own = mx.arange(start, end), mx.arange(end - new, end)[:, None]
            assert end <= keys.shape[2] or (window and new == 1), "a ring is in order after several tokens"
            rows.append(
                mx.fast.scaled_dot_product_attention(
                    queries[row : row + 1],
                    *(array[row : row + 1, :, columns % keys.shape[2]] for array in (keys, values)),
                    scale=scale,
                    mask=(columns <= own) & (columns > own - (window or end)),
                    sinks=sinks,
                )
            )
        return mx.concatenate(rows)

    def step(
        self,
        queries: Any,
        fresh: Any,
        held: Any,
        starts: mx.array,
        ends: mx.array,
        scale: float,
        sinks: mx.array | None = None,
    ) -> tuple[mx.array, mx.array, mx.array]:
        """As `Kernel.step`, for a compiled step; makes new arrays instead of writing in place, but where it
        is told addresses."""
        Reference.steps += 1
        if isinstance(held, Tails):
            places = cast(Any, (starts.tolist(), ends.tolist()))
            window = max(end - start for start, end in zip(*places, strict=True))
            how = {"window": window, "sinks": sinks}
            return self.over_tails(queries, held, places, scale, fresh=fresh, **how), held, cast(Any, None)
        ring = held[0].shape[2]
        keys, values = put_newest(held, fresh, (ends - 1) % ring + 1) if fresh else held
        columns = (starts[:, None] + mx.arange(ring)) % ring
        inorder = [mx.take_along_axis(array, columns[:, None, :, None], axis=2) for array in (keys, values)]
        seen = mx.arange(ring) < (ends - starts)[:, None]
        inorder = only_seen(inorder, seen)
        out = mx.fast.scaled_dot_product_attention(
            queries, *inorder, scale=scale, mask=seen[:, None, None], sinks=sinks
        )
        return out, keys, values


def partial_attention(
    queries: mx.array, keys: mx.array, values: mx.array, scale: float, seen: mx.array | None = None
) -> tuple[mx.array, mx.array]:
    """(what keys and values give alone, the logarithm of their mass) for queries (…, heads, n, width)."""
    group = queries.shape[-3] // keys.shape[-3]
    keys, values = (mx.repeat(array, group, axis=-3) for array in (keys, values))
    scores = (queries * scale) @ keys.swapaxes(-1, -2)
    scores = scores if seen is None else mx.where(seen, scores, -mx.inf)
    return mx.softmax(scores, axis=-1) @ values, mx.logsumexp(scores, axis=-1, keepdims=True)


def arrays_by_number(tails: Tails, row: int, parts: int = 0) -> list[mx.array]:
    parts = parts or (6 if tails.is_packed else 2)
    *numbers, capacity = np.array(tails.table)[row, : parts + 1].tolist()
    arrays = [SegmentReference.arrays[number] for number in numbers]
    assert {array.shape[2] for array in arrays} == {capacity}
    return arrays


def segments_by_number(tails: Tails, row: int) -> list[list[mx.array]]:
    """What a row holds in packed segments, in parts each."""
    if not tails.is_packed:
        return []
    before, *numbers = np.array(tails.table)[row, 7:].tolist()
    count = before // tails.each if before else 0
    assert count * tails.each == before and not any(numbers[6 * count :])
    arrays = [SegmentReference.arrays[number] for number in numbers[: 6 * count]]
    assert all(array.shape[2] == tails.each for array in arrays)
    return [arrays[first : first + 6] for first in range(0, len(arrays), 6)]


def put_by_number(fresh: Any, tails: Tails, ends: mx.array) -> mx.array:
    """As attention_kernel.put, in arrays that known numbers stand for."""
    parts = [part for held in fresh for part in (held if isinstance(held, list) else [held])]
    for row, end in enumerate(np.array(ends).tolist()):
        for part, array in zip(parts, arrays_by_number(tails, row, len(parts)), strict=True):
            new = part.shape[2]
            array[:, :, mx.arange(end - new, end) % array.shape[2]] = part[row : row + 1]
    return mx.array([1])


class SegmentReference:
    """What segment_attention.SegmentKernel computes, in its way: parts, merged by log-sum-exp. It reads which
    rows hold what, and where, as the kernel does."""

    calls = several = 0
    arrays: ClassVar[WeakValueDictionary[int, mx.array]] = WeakValueDictionary()
    """By what stands for their addresses, as long as somebody has them."""
    most_new = attention_kernel.MOST_NEW

    def __call__(
        self,
        queries: mx.array,
        shared: Shared,
        keys: mx.array,
        values: mx.array,
        places: tuple[list[int], list[int]],
        scale: float,
        sinks: mx.array | None = None,
    ) -> mx.array:
        starts, ends = (mx.array(at) for at in places)
        return self._attend(queries, shared, keys, values, starts, ends, scale, sinks)

    def step(
        self,
        queries: mx.array,
        fresh: Any,
        held: Any,
        shared: Shared,
        starts: mx.array,
        ends: mx.array,
        scale: float,
        sinks: mx.array | None = None,
    ) -> tuple[mx.array, mx.array, mx.array]:
        if isinstance(held, Tails):
            places = starts.tolist(), ends.tolist()
            out = self.over_tails(queries, held, places, scale, shared=shared, fresh=fresh, sinks=sinks)
            return out, held, cast(Any, None)
        keys, values = put_newest(held, fresh, ends)
        return self._attend(queries, shared, keys, values, starts, ends, scale, sinks), keys, values

    def over_tails(
        self,
        queries: mx.array,
        tails: Tails,
        places: Any,
        scale: float,
        *,
        shared: Shared,
        fresh: Any = (),
        behind: mx.array | None = None,
        sinks: mx.array | None = None,
    ) -> mx.array:
        """As `SegmentKernel.over_tails`; writes in place."""
        Reference.by_address += 1
        if fresh:
            put_by_number(fresh, tails, mx.array(places[1]))
        each = [arrays_by_number(tails, row) for row in range(len(queries))]
        most = max(array.shape[2] for arrays in each for array in arrays)
        held = [
            mx.concatenate([with_room(array, most) for array in arrays]) for arrays in zip(*each, strict=True)
        ]
        starts, ends = (mx.array(at) for at in places)
        return self._attend(queries, shared, held[0], held[1], starts, ends, scale, sinks)

    def _attend(
        self,
        queries: mx.array,
        shared: Shared,
        keys: mx.array,
        values: mx.array,
        starts: mx.array,
        ends: mx.array,
        scale: float,
        sinks: mx.array | None = None,
    ) -> mx.array:
        SegmentReference.calls += 1
        new = queries.shape[2]
        SegmentReference.several += new > 1
        columns, rows = mx.arange(keys.shape[2]), mx.arange(len(queries))
        last = ends[:, None] - new + mx.arange(new)
        seen = (columns >= starts[:, None, None]) & (columns <= last[..., None])
        keys, values = only_seen((keys, values), seen[:, -1])
        parts = [partial_attention(queries, keys, values, scale, seen[:, None])]
        table = shared.table
        for slot, (key, value) in enumerate(np.array(shared.addresses)):
            out, mass = partial_attention(queries, self.arrays[int(key)], self.arrays[int(value)], scale)
            holders = table[slot, 1::2][None], mx.arange(table.shape[1] // 2)[None] < table[slot, 0]
            holds = mx.any((holders[0] == rows[:, None]) & holders[1], axis=1)[:, None, None, None]
            parts.append((out, mx.where(holds, mass, -mx.inf)))
        if sinks is not None:
            mass = mx.broadcast_to(sinks[:, None, None], parts[0][1].shape)
            parts.append((mx.zeros_like(parts[0][0]), mass))
        masses = mx.concatenate([mass for _, mass in parts], axis=-1)
        weights = mx.softmax(masses, axis=-1)
        return sum((out * weights[..., i : i + 1] for i, (out, _) in enumerate(parts)), mx.array(0.0))


def known_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers in place of addresses."""
    monkeypatch.setattr(SegmentReference, "arrays", arrays := WeakValueDictionary[int, mx.array]())
    unused = count()

    def addresses_of(given: list[mx.array]) -> mx.array:
        numbers = list(islice(unused, len(given)))
        arrays.update(zip(numbers, given, strict=True))
        return mx.array(numbers, mx.uint64)

    monkeypatch.setattr(launch, "addresses_of", addresses_of)
    for module in (addressed_rows, step_kv, latent_kernel, checks):
        monkeypatch.setattr(module, "put", put_by_number)


def with_room(array: mx.array, capacity: int) -> mx.array:
    """With more columns behind."""
    return mx.pad(array, [(0, 0), (0, 0), (0, capacity - array.shape[2]), (0, 0)])


def only_seen(arrays: Iterable[mx.array], seen: mx.array) -> list[mx.array]:
    """Without the columns that no kernel reads, where anything may stand. `seen`: (rows, columns)."""
    return [mx.where(seen[:, None, :, None], array, 0) for array in arrays]


def put_newest(held: Any, fresh: Any, ends: mx.array) -> list[mx.array]:
    """New arrays with the newest tokens in their columns."""
    return [
        mx.put_along_axis(array, mx.broadcast_to((ends - 1)[:, None, None, None], new.shape), new, axis=2)
        for array, new in zip(held, fresh, strict=True)
    ]


class PackedReference(Reference):
    """The same over packed KV, which it unpacks."""

    def __init__(self, how: Quantisation):
        self._how = how

    def joined(self, parts: list[mx.array]) -> list[Any]:
        return [parts[:3], parts[3:]]

    def __call__(
        self,
        queries: Any,
        keys: Any,
        values: Any,
        places: tuple[list[int], list[int]],
        scale: float,
        *,
        window: int = 0,
        sinks: mx.array | None = None,
    ) -> mx.array:
        keys, values = self._how.unpack(keys), self._how.unpack(values)
        return super().__call__(queries, keys, values, places, scale)

    def step(
        self,
        queries: Any,
        fresh: Any,
        held: Any,
        starts: mx.array,
        ends: mx.array,
        scale: float,
        sinks: mx.array | None = None,
    ) -> tuple[mx.array, Any, Any]:
        if isinstance(held, Tails):
            return super().step(queries, fresh, held, starts, ends, scale)
        columns = (ends - 1)[:, None, None, None]
        keys, values = (
            [
                mx.put_along_axis(part, mx.broadcast_to(columns, new.shape), new, axis=2)
                for part, new in zip(*parts, strict=True)
            ]
            for parts in zip(held, fresh, strict=True)
        )
        plain = self._how.unpack(keys), self._how.unpack(values)
        return super().step(queries, (), plain, starts, ends, scale)[0], keys, values


class LatentReference:
    """What latent_kernel.LatentKernel computes, token by token."""

    calls = 0

    def over_tails(
        self,
        queries: mx.array,
        rope_queries: mx.array,
        tails: Tails,
        ends: list[int],
        scale: float,
        behind: mx.array,
    ) -> mx.array:
        LatentReference.calls += 1
        out, new = list[mx.array](), len(queries) // len(tails.table)
        for token, end in enumerate(ends):
            latents, parts = self.held(tails, token // new)
            assert end <= min(latents.shape[2], tails.most)
            latents, parts = latents[:, :, :end], parts[:, :, :end]
            own = slice(token, token + 1)
            scores = (queries[own] * scale) @ latents.swapaxes(-1, -2)
            scores = scores + rope_queries[own] @ parts.swapaxes(-1, -2)
            out.append(mx.softmax(scores, axis=-1) @ latents)
        return mx.concatenate(out)

    def step(
        self,
        queries: mx.array,
        rope_queries: mx.array,
        tails: Tails,
        ends: mx.array,
        scale: float,
        behind: Any,
    ) -> mx.array:
        return self.over_tails(queries, rope_queries, tails, cast(Any, ends.tolist()), scale, behind)

    @staticmethod
    def held(tails: Tails, row: int) -> list[mx.array]:
        """Latents and parts of a row, those in segments first."""
        *numbers, capacity, before = np.array(tails.table)[row].tolist()[:4]
        count = before // max(tails.each, 1)
        assert count * tails.each == before
        more = np.array(tails.table)[row].tolist()[4 : 4 + 2 * count]
        pieces = [
            [SegmentReference.arrays[number] for number in pair]
            for pair in zip(more[::2], more[1::2], strict=True)
        ]
        pieces.append([SegmentReference.arrays[number] for number in numbers])
        assert {part.shape[2] for part in pieces[-1]} == {capacity}
        return [mx.concatenate(list(parts), axis=2) for parts in zip(*pieces, strict=True)]


FEW_CHECKS = {
    "UNEQUAL_TOKENS": 40,
    "CHECKED_ROWS": (3, 4),
    "REPEATED_ROWS": (1, 3),
    "JOINED": ((1, 1), (2, 3)),
}
"""What a load's checks of fused steps draw. These kernels have no spans, and one form for any rows."""


NO_FUSE = 2
"""Of mlx/compile.h's `CompileMode`."""


@pytest.fixture
def compiling() -> Iterator[None]:
    """`mx.compile` replays graphs, which tests/conftest.py has off.

    It fuses nothing, for which a CPU's MLX runs g++. Python's MLX has no name for this mode.
    """
    mx.enable_compile()
    with contextlib.suppress(OSError, AttributeError):
        library = ctypes.CDLL(str(next(Path(mx.__file__).parent.glob("lib/libmlx.*"))))
        library._ZN3mlx4core16set_compile_modeENS0_11CompileModeE(NO_FUSE)
    yield
    if "MLX_DISABLE_COMPILE" in os.environ:
        mx.disable_compile()


@pytest.fixture
def reference(monkeypatch: pytest.MonkeyPatch):
    """What `install` changes is put back after the test, in modules that the test imports too."""
    use_backend(monkeypatch, "mlx", forward=lambda call: None)  # All of MLX's own.
    let_rows_pay(monkeypatch, False)
    for cache in attend.NOTED:
        for name in ("update_and_fetch", "keys_and_values"):
            monkeypatch.setattr(cache, name, getattr(cache, name))
    monkeypatch.setattr(RotatingKVCache, "make_mask", RotatingKVCache.make_mask)
    kernel = Reference()
    Reference.calls = Reference.several = Reference.steps = Reference.by_address = 0
    over_segments = SegmentReference()
    SegmentReference.calls = SegmentReference.several = LatentReference.calls = 0
    known_addresses(monkeypatch)

    def install(few_checks: bool = True) -> None:
        use_backend(monkeypatch, "cuda")
        for name, few in FEW_CHECKS.items() if few_checks else ():
            monkeypatch.setattr(fused_step, name, few)
        monkeypatch.setattr(attend, "kernel_for", lambda *_: kernel)
        monkeypatch.setattr(attend, "segment_kernel_for", lambda *_: over_segments)
        monkeypatch.setattr(segment_attention, "in_use", lambda: True)
        monkeypatch.setattr(attention_packed, "kernel_for", lambda *parts: PackedReference(parts[-1]))
        monkeypatch.setattr(latent_kernel, "kernel_for", lambda *_: LatentReference())
        attention.install()

    return install
