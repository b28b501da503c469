"""Attention of few new tokens a row: each row reads its own KV alone, with sums in a fixed order.

MLX hands attention to cuDNN. Rows of unequal length need a mask there, which costs five times as much
(tables in attention_kernel.py), and their padding is read. Each shape, so each length of the KV, is
planned at its first call, which takes 36 to 120 ms where there are several new tokens: for the end of each
prompt and each pass with guesses. And for single tokens its sums come in another order from run to run. The
kernels of attention_kernel.py read a row from its own first token, in spans cut at fixed positions, and
merge them by log-sum-exp. Longer ends of prompts, and windows of all their passes, have a kernel of their own
(prompt_attention.py).

A window's row is read from its oldest token on, wherever in its ring that lies, and its spans are counted
from there: its column depends on when the row joined whom, so that spans of columns would give other bits in
other company.

They take over for up to `MOST_NEW` tokens of each row of a `KVCache`, a window or a batch of either, in 16
bits, also with sinks, once a check beside MLX's own passed. Everything else goes on to MLX: heads that are no
multiple of 8 wide, or over 256 and not 512; keys and values of unequal width (MiMo V2); what is derived from
the KV that a cache holds. Latents of MLA have a kernel of their own (latent_kernel.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import mlx.core as mx
from mlx_lm.models.cache import BatchKVCache, BatchRotatingKVCache, KVCache, RotatingKVCache

from .....common.units import PREFILL_CHUNK
from ...attention.backend import AttentionCall
from ...attention.hooks import giver_of, giver_of_keys, is_causal_mask, mlx_own, note_given, note_mask
from ...cache.growth import round_up
from ...cache.packed import Quantisation, is_packed
from ...cache.segments import SequenceKVCache
from .. import prompt_shapes
from ..compile import launch
from . import attention_packed, checks, prompt_attention, segment_attention, segments
from .attention_kernel import MOST_NEW, SPAN, Kernel, Tails
from .segment_attention import SegmentKernel

CLOSE = 0.03
"""Largest difference from MLX's own in float32, for values of a normal distribution: bfloat16's rounding.

A kernel that leaves out sinks, a window or a ring's turn differs by 0.8 and more in the check."""

Places = tuple[list[int], list[int]]
"""First column of each row, and its end."""

_kernels: dict[tuple[int, int, Any, bool, bool], Kernel | None] = {}


def reads_own_rows() -> bool:
    """Whether decode reads no padding: some kernel is in use."""
    return any(_kernels.values()) or attention_packed.in_use()


NOTED = (KVCache, BatchKVCache, RotatingKVCache, BatchRotatingKVCache)
"""Caches whose KV the kernels read."""


def note_caches() -> None:
    """Let the caches of `NOTED` note what they give out, for `own_rows`. Does nothing the second time."""
    if hasattr(RotatingKVCache.make_mask, "notes"):
        return
    for cache in NOTED:
        for name in ("update_and_fetch", "keys_and_values"):
            setattr(cache, name, _noting(getattr(cache, name)))
    cast(Any, RotatingKVCache).make_mask = _noting_mask(RotatingKVCache.make_mask)


def _noting(fetch: Any) -> Any:
    """`fetch`, which also notes the arrays that it returns."""

    def noted(self: Any, *new: Any) -> Any:
        keys, values = fetch(self, *new)
        note_given(keys, values, self)
        return keys, values

    return noted


def _noting_mask(make_mask: Any) -> Any:
    def noted(
        self: Any, N: int, window_size: int | None = None, return_array: bool = False
    ) -> mx.array | str | None:
        mask = make_mask(self, N, window_size=window_size, return_array=return_array)
        if window_size in (None, self.max_size):
            note_mask(mask, self.max_size)
        return mask

    cast(Any, noted).notes = True
    return noted


def attend(call: AttentionCall) -> mx.array | None:
    """Attention by a kernel where one takes it; None: MLX's own does."""
    queries, keys, values, cache, scale, mask, sinks = call
    if cache is None:
        cache = giver_of_keys(keys)
        own = getattr(cache, "attend", None)
        if own is not None and (out := own(queries, keys, values, scale, mask, sinks)) is not None:
            return out
    if is_packed(cache):
        return _attend_packed(call._replace(cache=cache))
    new, call = queries.shape[2], call._replace(cache=cache)
    if prompt_shapes.are_fixed() and (out := _attend_prompt(*call, windows_alone=True)) is not None:
        return out
    if (out := prompt_shapes.attend(queries, keys, values, scale, mask, sinks)) is not None:
        return out
    if new <= MOST_NEW and (found := own_rows(cache, keys, values, mask, new)) is not None:
        held, places, window = found
        kernel = kernel_for(queries, held.keys, window > 0, sinks)
        if kernel is not None and new <= kernel.most_new:
            return kernel(queries, held.keys, held.values, places, scale, window=window, sinks=sinks)
    if new > 1:
        if (out := _attend_prompt(*call)) is not None:
            return out
        if new > MOST_NEW:  # A plan is for what the arrays have room for, too.
            keys, values = mx.contiguous(keys), mx.contiguous(values)
            return mlx_own(queries, keys, values, cache, scale, mask, sinks)
    return None


def _attend_packed(call: AttentionCall) -> mx.array:
    """Attention to packed KV, by the kernel where it can, else by MLX's own."""
    queries, keys, values, cache, scale, mask, sinks = call
    new = queries.shape[2]
    if not isinstance(keys, list):
        out = prompt_shapes.attend(queries, keys, values, scale, mask, sinks)
        if out is not None:
            return out
    if new <= attention_packed.MOST_NEW and sinks is None and cache.gave(keys, values):
        *places, even = cache.places()
        plain = is_causal_mask(mask, new, even)
        kernel = attention_packed.kernel_for(queries, cache.keys, cache.values, cache.how) if plain else None
        if kernel is not None:
            return kernel(queries, cache.keys, cache.values, places, scale)
    if sinks is None and isinstance(keys, list):  # MLX has no product of packed KV for CUDA.
        keys, values, cache = cache.how.unpack(keys), cache.how.unpack(values), None
    return mlx_own(queries, keys, values, cache, scale, mask, sinks)


def attend_over_segments(call: AttentionCall) -> mx.array | None:
    """Attention of a row to its segments and its tail, by a kernel; None: none reads them."""
    queries, keys, values, cache, scale, _, sinks = call
    if is_packed(cache):
        return None if sinks is not None else _packed_by_address(queries, cache, scale)
    kernel = segment_kernel_for(queries, keys, sinks)
    if kernel is None or queries.shape[2] > kernel.most_new:
        return None
    shared, places = segments.shared_in(cache), ([0], [cache.offset - cache.base])
    assert shared is not None
    return kernel(queries, shared, keys, values, places, scale, sinks)


def _packed_by_address(queries: mx.array, cache: SequenceKVCache, scale: float) -> mx.array | None:
    """What the kernel for packed KV gives of one row; None: it does not read this."""
    each = cache.segments[0].tokens
    if each % attention_packed.SPAN or queries.shape[2] > attention_packed.MOST_NEW:
        return None
    how = cast(Quantisation, cache.how)
    if (kernel := attention_packed.kernel_for(queries, cache.keys, cache.values, how)) is None:
        return None
    arrays = [*cache.keys, *cache.values]
    own = cast(list[int], launch.addresses_of(arrays).tolist())
    most = round_up(len(cache.segments), segments.MOST_STEP)
    before = segments.addresses_before(cache.segments, cache.layer, most, 6)
    table = mx.array([[*own, arrays[0].shape[2], *before]], mx.uint64)
    tails = Tails(table, round_up(cache.offset, attention_packed.SPAN), each)
    return kernel.over_tails(queries, tails, ([0], [cache.offset]), scale)


def _attend_prompt(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    cache: Any,
    scale: float,
    mask: Any,
    sinks: mx.array | None,
    windows_alone: bool = False,
) -> mx.array | None:
    """By the kernel for a prompt's pass; None where that is not for it.

    It takes each pass over a window, of any length: so the bits of KV do not depend on where passes begin.
    """
    new, tokens, dtype = queries.shape[2], keys.shape[2], queries.dtype
    if len(queries) > 1 or keys.dtype != dtype:
        return None
    window, before, places, found = 0, 0, (0, tokens), own_rows(cache, keys, values, mask, new)
    if found is not None:
        held, (starts, ends), window = found
        if ends[0] > held.keys.shape[2]:
            return None
        keys, values, places = held.keys, held.values, (starts[0], ends[0])
        if window:
            had = held.offset if isinstance(held.offset, int) else held.tokens()[0]
            before = had - (ends[0] - starts[0])
    elif not isinstance(mask, str) or keys.shape != values.shape:
        return None
    if not window and (windows_alone or not prompt_attention.fits(new, tokens, PREFILL_CHUNK)):
        return None
    width, group = queries.shape[3], queries.shape[1] // keys.shape[1]
    if sinks is not None and sinks.dtype != dtype:
        return None
    kernel = prompt_attention.checked(width, group, dtype, sinks is not None)
    how: dict[str, Any] = {"window": window, "sinks": sinks, "before": before}
    return kernel and kernel(queries, keys, values, places, scale, **how)


def own_rows(
    cache: Any, keys: mx.array, values: mx.array, mask: Any, new: int
) -> tuple[Any, Places, int] | None:
    """(the cache whose own KV `keys` and `values` are, where in its arrays the rows lie, window or 0).

    None: they are other arrays, of unequal width, or the mask hides more than what lies outside of a row or a
    window, and what comes after a token.
    """
    held = giver_of(keys, values)
    if held is None or held.keys.shape != held.values.shape or (cache is not None and cache is not held):
        return None
    places, window = _places(held, mask, new)
    return (held, places, window) if places is not None else None


def _places(cache: Any, mask: Any, new: int) -> tuple[Places | None, int]:
    """(where in `cache`'s own arrays the rows lie, window or 0).

    None: the mask hides more than what lies outside of a row or a window, and what comes after a token.
    """
    window = getattr(cache, "max_size", 0)
    alone = issubclass(type(cache), KVCache | RotatingKVCache)
    plain = is_causal_mask(mask, new, alone or (not window and getattr(cache, "is_even", False)), window)
    if not plain or getattr(cache, "keep", 0):
        return None, window
    if window:
        tokens = [cache.offset] if alone else cache.tokens()
        return window_places(tokens, cache._idx, cache.keys.shape[2], window, new), window
    return ([0], [cache.offset]) if alone else (cache.starts, cache.ends), 0


def window_places(tokens: list[int], end: int, ring: int, window: int, new: int = 1) -> Places:
    """Of rows that have had so many `tokens`, the newest of each in the column before `end`."""
    counts = [min(count, window + new - 1) for count in tokens]
    starts = [(end - count) % ring for count in counts]
    return starts, [start + count for start, count in zip(starts, counts, strict=True)]


def kernel_for(
    queries: mx.array, keys: mx.array, window: bool = False, sinks: mx.array | None = None
) -> Kernel | None:
    """Of attention over such KV, or over a window of it, if it is in use."""
    width, group = queries.shape[3], queries.shape[1] // keys.shape[1]
    key = width, group, queries.dtype, window, sinks is not None
    if sinks is not None and sinks.dtype != queries.dtype:
        return None
    if key not in _kernels:
        fits = width % 8 == 0 and (16 <= width <= 256 or width == 512) and keys.dtype == queries.dtype
        fits = fits and queries.dtype in (mx.bfloat16, mx.float16)
        _kernels[key] = _checked(*key) if fits else None
    return _kernels[key]


def segment_kernel_for(
    queries: mx.array, keys: mx.array, sinks: mx.array | None = None
) -> SegmentKernel | None:
    """What reads segments and tails together; None: MLX's products do."""
    tails = kernel_for(queries, keys, sinks=sinks)
    return segment_attention.checked(tails, sinks is not None) if tails is not None else None


def _checked(width: int, group: int, dtype: Any, window: bool, sinks: bool) -> Kernel | None:
    """A kernel that computes what MLX's own does, on rows of unequal length; None, and a line in the log."""
    kind = width, group, dtype, window, sinks

    def made() -> Kernel:
        kernel = Kernel(width, group, dtype, ring=window, sinks=sinks)
        kernel.compile_ahead()
        return kernel

    def difference(kernel: Kernel) -> float:
        check = _Check(kernel, *kind)
        far = max(check.difference(*case) for case in ((ENDS[0], 1), (ENDS[1], 1), (ENDS[1], 5)))
        return max(far, check.step_difference())

    return checks.checked(
        made,
        difference,
        CLOSE,
        "decode attends by MLX's own kernels: ours",
        f"decode attends by omlxd's kernel ({dtype}, {width} wide, {group} query heads a KV head"
        f"{', windows' * window}{', sinks' * sinks})",
        remember=("attention", kind),
    )


ENDS = SPAN - 100, 3 * SPAN + 17
"""Tokens of a row, in a check: one span, and several."""


class _Check:
    """Of a kernel, on two rows of unequal length."""

    def __init__(self, kernel: Any, width: int, group: int, dtype: Any, window: bool, sinks: bool):
        self._kernel, self._width, self._group, self._dtype = kernel, width, group, dtype
        self._window = window
        # Scores of a few tokens lead, and sinks come near: else what is missing would hide among all others.
        self._scale = 3 * width**-0.5
        self._sinks = self._some(9, (2 * group,)) + 10 if sinks else None

    def _some(self, seed: int, shape: tuple[int, ...]) -> mx.array:
        return mx.random.normal(shape, key=mx.random.key(seed)).astype(self._dtype)

    def difference(self, end: int, new: int) -> float:
        """The largest from MLX's own in float32, for `new` tokens of each row; NaN is infinite. So are other
        bits of rows with arrays of their own."""
        capacity, window = end + 15, (end - 70 if new == 1 else end // 3) if self._window else 0
        shape = (2, 2, capacity, self._width)
        queries = self._some(0, (2, 2 * self._group, new, self._width))
        keys, values = self._some(1, shape), self._some(2, shape)
        places = [0, end // 3], [end // 2, end]
        if window and new == 1:
            places = window_places([end // 2, 9 * end], end // 3, capacity, window)
        how: dict[str, Any] = {"window": window, "sinks": self._sinks}
        got = self._kernel(queries, keys, values, places, self._scale, **how)
        newest = [
            mx.concatenate(
                [mx.roll(a[row : row + 1], new - at, 2)[:, :, :new] for row, at in enumerate(places[1])]
            )
            for a in (keys, values)
        ]
        own = self._over_tails(queries, (keys, values), places, newest, how)
        if not mx.array_equal(own, got).item():
            return float("inf")
        far = 0.0
        for row, (start, stop) in enumerate(zip(*places, strict=True)):
            columns = mx.arange(start, stop)
            own = mx.arange(stop - new, stop)[:, None]
            mask = (columns <= own) & (columns > own - (window or stop))
            exact = [
                mx.roll(array[row : row + 1], -(start % capacity), 2)[:, :, : stop - start]
                for array in (keys, values)
            ]
            want = mx.fast.scaled_dot_product_attention(
                *(array.astype(mx.float32) for array in (queries[row : row + 1], *exact)),
                scale=self._scale,
                mask=mask,
                sinks=None if self._sinks is None else self._sinks.astype(mx.float32),
            )
            far = max(far, checks.far(got[row : row + 1], want))
        return far

    def _over_tails(
        self, queries: mx.array, held: Any, places: Places, newest: Sequence[mx.array], how: dict[str, Any]
    ) -> mx.array:
        """What the kernel gives of rows with arrays of their own: rings that begin elsewhere, or one of the
        rows in longer arrays."""
        capacity = held[0].shape[2]
        turn, more = (capacity // 2, 0) if how["window"] else (0, 64)
        starts = [(start + turn) % capacity for start in places[0]]
        ends = [to + end - start for to, start, end in zip(starts, *places, strict=True)]
        rows = [
            [
                mx.pad(mx.roll(array[row : row + 1], turn, 2), [(0, 0), (0, 0), (0, more * row), (0, 0)])
                for array in held
            ]
            for row in range(2)
        ]
        return checks.over_tails_of(self._kernel, queries, rows, (starts, ends), newest, self._scale, **how)

    def step_difference(self) -> float:
        """The largest of what `Kernel.step` gives and puts, from what it should, and of a row of one span in
        small arrays from the same in large ones; no rounding: infinite or 0."""
        end, shape = SPAN - 17, (2, 2, SPAN + 40, self._width)
        queries = self._some(0, (2, 2 * self._group, 1, self._width))
        keys, values = self._some(1, shape), self._some(2, shape)
        starts, ends = [3, 0], [end, end - 9]

        def attend(*held: mx.array) -> mx.array:
            how = {"window": shape[2] if self._window else 0, "sinks": self._sinks}
            return self._kernel(queries, *held, (starts, ends), self._scale, **how)

        long, short = attend(keys, values), attend(keys[:, :, :SPAN], values[:, :, :SPAN])
        if self._window:
            starts, ends = [SPAN, 0], [SPAN + end, end - 9]
        want = attend(keys, values)
        columns = [(end - 1) % shape[2] for end in ends]
        fresh = tuple(
            mx.concatenate([array[row : row + 1, :, at : at + 1] for row, at in enumerate(columns)])
            for array in (keys, values)
        )
        seen = mx.arange(shape[2]) != mx.array(columns)[:, None]
        held = tuple(mx.where(seen[:, None, :, None], array, 0) for array in (keys, values))
        mx.eval(want, long, short, fresh, held)
        places = mx.array(starts), mx.array(ends)
        got = self._kernel.step(queries, fresh, held, *places, self._scale, self._sinks)
        mx.eval(got)
        return 0.0 if checks.are_equal((*got, short), (want, keys, values, long)) else float("inf")
