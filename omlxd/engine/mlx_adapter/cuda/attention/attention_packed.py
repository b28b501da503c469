"""CUDA kernel of attention over KV packed in 8 or 4 bits: `omlxd_packed`, for up to `MOST_NEW` tokens a row.

It reads words, scales and biases of a row's own KV as they are kept, in spans cut at fixed places, and
unpacks them in registers, once for 16 queries; attention_source.py's merge puts the spans together.
Numbers of 0 to 255 are exact in float16, so the tensor cores multiply those, and what belongs to a group is
added in float32:

    score of a token    sum over groups of  scale * (q . numbers) + bias * sum(q)
    share of a token    weight * scale  times its numbers, and  weight * bias

Queries are divided by a power of two, so that they fit into float16. `omlxd_packed_step` also puts the new
token's KV, packed, into its place, for compiled_step.py.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from ..compile import kernel_store, launch
from ..compile.source import TYPES, source
from . import checks
from .attention_kernel import MOST_NEW, Tails, constant, constants_of, kept
from .attention_source import WARPS
from .attention_source import source_of as merge_source

if TYPE_CHECKING:
    from ...cache.packed import Parts, Quantisation

log = logging.getLogger(__name__)

SPAN = 1024
"""Tokens of a row that one block of threads reads.

Milliseconds a layer, 32 query heads on 8 of 128 in bfloat16, KV in 8 bits, one H200 (20 calls, by a script
that is not kept). MLX's own unpacks all and attends, with a mask where rows are unequal; of packed KV and one
token it has no product. 16 bits: attention_kernel.py's.

| rows                | new | 256  | 512  | 1024 | MLX's own | 16 bits | bytes at 4.8 TB/s |
|---------------------|-----|------|------|------|-----------|---------|-------------------|
| 1: 16,000           | 1   | 0.05 | 0.05 | 0.04 | -         | 0.05    | 0.01              |
|                     | 5   |      | 0.08 | 0.06 | 0.25      |         |                   |
|                     | 16  |      |      | 0.09 | 0.26      |         |                   |
| 1: 500              | 1   | 0.03 | 0.03 | 0.03 | -         | 0.02    | 0.00              |
|                     | 5   |      | 0.03 | 0.03 | 0.06      |         |                   |
|                     | 16  |      |      | 0.03 | 0.05      |         |                   |
| 4: 16,000 to 20,500 | 1   | 0.16 | 0.11 | 0.11 | -         | 0.09    | 0.03              |
|                     | 5   |      | 0.21 | 0.16 | 1.25      |         |                   |
|                     | 16  |      |      | 0.27 | 1.40      |         |                   |

A step of an 8B shape with spans of 512, in process, ms in two runs: 1 x 500 6.1 and 6.1, 1 x 16,000 6.8 and
6.7, 4 rows 9.9 and 9.0, 8 x 32,000 20.9 and 21.5, 32 short ones 9.0 and 8.9.

So several long rows are faster in 16 bits. With the next tokens not on their way while a warp computes: 0.04,
0.03 and 0.12 for one token; with 8 warps a block and spans of 512 besides 0.06, 0.03 and 0.19.
"""

WIDTHS = (64, 96, 128, 256, 512)

CLOSE = 0.03
"""Largest difference from MLX's own in float32, for values of a normal distribution: bfloat16's rounding."""

_kernels: dict[tuple[int, int, Any, Quantisation], PackedKernel | None] = {}


def fits(width: int, how: Quantisation) -> bool:
    """Whether there is a kernel: for heads over 256 wide shared memory has no room for groups of 128."""
    return width in WIDTHS and width % how.group == 0 and (width <= 256 or how.group < 128)


def in_use() -> bool:
    """Whether some kernel is."""
    return any(_kernels.values())


def kernel_for(queries: mx.array, keys: Parts, values: Parts, how: Quantisation) -> PackedKernel | None:
    """Of attention over such KV, once a check beside MLX's own passed."""
    width, group = queries.shape[3], queries.shape[1] // keys[0].shape[1]
    key = width, group, queries.dtype, how
    if key not in _kernels:
        alike = keys[0].shape == values[0].shape and keys[1].dtype == values[1].dtype == queries.dtype
        has = alike and queries.dtype in TYPES and fits(width, how)
        if not has:
            log.info("packed KV is unpacked in each pass: no kernel for heads %d wide and %s", width, how)
        _kernels[key] = _checked(*key) if has else None
    return _kernels[key]


def _checked(width: int, group: int, dtype: Any, how: Quantisation) -> PackedKernel | None:
    """A kernel that computes what MLX's own does, on rows of unequal length; None, and a line in the log."""
    kind = width, group, dtype, how
    return checks.checked(
        lambda: PackedKernel(*kind),
        lambda kernel: max(difference(kernel, *kind, new) for new in (1, 5)),
        CLOSE,
        "packed KV is unpacked in each pass: omlxd's kernel",
        f"decode attends to packed KV by omlxd's kernel ({dtype}, {width} wide, {group} query heads a KV "
        f"head, {how.bits} bits in groups of {how.group})",
    )


def difference(kernel: Any, width: int, group: int, dtype: Any, how: Quantisation, new: int) -> float:
    """The largest from MLX's own in float32, for `new` tokens of each of two rows; NaN is infinite.

    Infinite too if `step` puts or gives anything else than `kernel` does where the token is in its place, or
    if rows with arrays of their own have other bits, by themselves or behind segments.
    """
    end = 2 * SPAN + 17
    shape, scale = (2, 2, end + 15, width), width**-0.5
    queries, keys, values = (
        mx.random.normal(size, key=mx.random.key(seed)).astype(dtype)
        for seed, size in enumerate([(2, 2 * group, new, width), shape, shape])
    )
    packed = how.pack(keys), how.pack(values)
    starts, ends = [0, SPAN + 5], [end - SPAN - 1, end]
    got = kernel(queries, *packed, (starts, ends), scale)
    exact = [
        how.unpack([parts[0], *(part.astype(mx.float32) for part in parts[1:])])[:, :, :end]
        for parts in packed
    ]
    own = mx.array(ends)[:, None, None, None] - new + mx.arange(new)[:, None]
    mask = (mx.arange(end) >= mx.array(starts)[:, None, None, None]) & (mx.arange(end) <= own)
    want = mx.fast.scaled_dot_product_attention(queries.astype(mx.float32), *exact, scale=scale, mask=mask)
    far = checks.far(got, want)
    if new == 1:
        rows, columns = mx.arange(2), mx.array(ends) - 1
        seen = (mx.arange(shape[2]) != columns[:, None])[:, None, :, None]
        fresh = tuple([part[rows, :, columns][:, :, None] for part in parts] for parts in packed)
        held = tuple([mx.where(seen, part, mx.zeros_like(part)) for part in parts] for parts in packed)
        mx.eval(got, fresh, held)
        put = kernel.step(queries, fresh, held, mx.array(starts), mx.array(ends), scale)
        mx.eval(put)
        if not checks.are_equal((put[0], *put[1], *put[2]), (got, *packed[0], *packed[1])):
            return float("inf")
    newest = [
        [mx.stack([part[row, :, at - new : at] for row, at in enumerate(ends)]) for part in parts]
        for parts in packed
    ]
    held = [[part[row : row + 1] + 0 for part in (*packed[0], *packed[1])] for row in range(2)]
    by_address = checks.over_tails_of(kernel, queries, held, (starts, ends), newest, scale)
    if not mx.array_equal(by_address, got).item():
        return float("inf")
    at = [0, 0], ends
    before = [[part[row : row + 1, :, :SPAN] + 0 for part in (*packed[0], *packed[1])] for row in range(2)]
    held = [[part[row : row + 1, :, SPAN:] + 0 for part in (*packed[0], *packed[1])] for row in range(2)]
    shared = checks.over_tails_of(kernel, queries, held, at, newest, scale, before=before)
    if not mx.array_equal(shared, kernel(queries, *packed, at, scale)).item():
        return float("inf")
    return far


def source_of(name: str, width: int, group: int, dtype: Any, how: Quantisation) -> tuple[str, str]:
    """(function, CUDA source) of a kernel: spans or step; `own_` before it where rows have arrays of their
    own."""
    kind = TYPES[dtype]
    function = f"omlxd_packed_{name}_{kind}_{width}_{group}_{how.bits}_{how.group}"
    numbers = {"D": width, "GROUP": group, "SPAN": SPAN, "WARPS": WARPS, "BITS": how.bits, "G": how.group}
    numbers["AHEAD"] = int(width <= 128)
    words = {"FUNCTION": function, "OWN": int(name.startswith("own_")), "STEP": int(name.endswith("step"))}
    return function, source(["packed"], words, kind, numbers)


class PackedKernel:
    """The kernels for one width, group, type and quantisation. They compile at their first calls. Raises what
    NVRTC, the driver and MLX raise."""

    most_new = MOST_NEW

    def __init__(self, width: int, group: int, dtype: Any, how: Quantisation):
        self._width, self._group, self._dtype, self.how = width, group, dtype, how
        self._code: dict[str, tuple[str, bytes]] = {}
        self._compiled = lru_cache(64)(lambda queries, held: mx.compile(partial(self._attend)))

    def __call__(
        self,
        queries: mx.array,
        keys: Parts,
        values: Parts,
        places: Sequence[Sequence[int]],
        scale: float,
    ) -> mx.array:
        """As `Kernel`'s; keys and values in parts, each (rows, KV heads, capacity, its words or groups)."""
        call = self._compiled(queries.shape, keys[0].shape)
        return call(queries, (keys, values), *constants_of(places), constant("scale", (scale,), mx.float32))

    def over_tails(
        self,
        queries: mx.array,
        tails: Tails,
        places: Sequence[Sequence[int]],
        scale: float,
        *,
        fresh: Sequence[Parts] = (),
        behind: mx.array | None = None,
    ) -> mx.array:
        """As `Kernel.over_tails`."""
        call = self._compiled((queries.shape, bool(fresh)), tails.most)
        scales = constant("scale", (scale,), mx.float32)
        return call(queries, tails, *constants_of(places), scales, fresh, behind)

    def step(
        self,
        queries: mx.array,
        fresh: Sequence[Parts],
        held: tuple[Parts, Parts] | Tails,
        starts: mx.array,
        ends: mx.array,
        scale: float,
        sinks: None = None,
    ) -> tuple[mx.array, Any, Any]:
        """As `Kernel.step`; `fresh` is packed, or nothing where it is in its place."""
        scales = constant("scale", (scale,), mx.float32)
        return self._attend(queries, held, starts, ends, scales, fresh), *kept(held)

    def _attend(
        self,
        queries: mx.array,
        held: tuple[Parts, Parts] | Tails,
        starts: mx.array,
        ends: mx.array,
        scale: mx.array,
        fresh: Sequence[Parts] = (),
        behind: mx.array | None = None,
    ) -> mx.array:
        rows, heads, new = queries.shape[:3]
        kv_heads, own = heads // self._group, isinstance(held, Tails)
        capacity = held.most if isinstance(held, Tails) else held[0][0].shape[2]
        spans, tiles, parts = -(-capacity // SPAN), -(-self._group * new // 16), 1 + (self._width > 256)
        given = [part for parts in fresh for part in parts]
        given += [held.table] if isinstance(held, Tails) else [*held[0], *held[1]]
        last = [ends if behind is None else behind] if own and not fresh else []
        table = [held.table.shape[1], held.each] if isinstance(held, Tails) else []
        sums, weights = self._run(
            "own_" * own + ("step" if fresh else "spans"),
            [queries, *given, starts, ends, scale, *last],
            [*([] if own else [capacity]), new, kv_heads, *table],
            grid=(spans * 32 * WARPS, kv_heads * tiles * parts, rows),
            threadgroup=(32 * WARPS, 1, 1),
            output_shapes=[(rows, heads * new, spans, self._width), (rows, heads * new, spans, 2)],
            output_dtypes=[mx.float32, mx.float32],
        )
        return self._run(
            "merge",
            [sums, weights, starts, ends],
            [spans, heads * new, new],
            grid=(rows * heads * new * self._width, 1, 1),
            threadgroup=(self._width, 1, 1),
            output_shapes=[queries.shape],
            output_dtypes=[self._dtype],
        )[0]

    def _run(self, name: str, inputs: list[mx.array], scalars: list[int], **how: Any) -> list[mx.array]:
        """One kernel, compiled at its first call."""
        if name not in self._code:
            shape = self._width, self._group, self._dtype
            made = merge_source(name, *shape, SPAN) if name == "merge" else source_of(name, *shape, self.how)
            self._code[name] = made[0], kernel_store.machine_code(made[1])
        return launch.run(self._code[name], inputs, scalars, **how)
