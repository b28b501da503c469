"""Checks each attention kernel against MLX's own attention, and helps with rows that keep arrays."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar, cast

import mlx.core as mx

from ...cache.packed import parts_of
from ..compile import kernel_store, launch
from .attention_kernel import Tails, put
from .fused_attention import owners_of

log = logging.getLogger(__name__)
T = TypeVar("T")


def checked(
    make: Callable[[], T],
    difference: Callable[[T], float],
    close: float,
    instead: str,
    says: str,
    also: str = "",
    *,
    remember: tuple[str, object] | None = None,
) -> T | None:
    """Return the kernel that `make` makes, or None if it does not run or differs from MLX's own attention.
    The log says which.

    difference  returns the largest difference from MLX's own; `close` and more is too large
    instead     how the log's line of a refused kernel begins
    says, also  what the log says of a kernel that passed, and behind its difference
    remember    name of the check and what it depends on beside the machine; None: it runs at each load
    """
    began = time.perf_counter()
    try:
        kernel = make()
        if remember is None:
            far = difference(kernel)
        else:
            far = kernel_store.remembered(*remember, partial(difference, kernel), lambda far: far < close)
    except Exception as error:
        log.warning("%s does not run here (%s)", instead, error)
        return None
    if not far < close:  # NaN too
        log.warning("%s differs by %.3g", instead, far)
        return None
    took = time.perf_counter() - began
    log.info("%s: within %.4f of MLX's own%s, checked in %.1f s", says, far, also, took)
    return kernel


def far(got: mx.array, want: mx.array) -> float:
    """Return the largest difference from `want`, in float32; infinite for NaN."""
    apart = cast(float, mx.abs(got.astype(mx.float32) - want).max().item())
    return apart if apart == apart else float("inf")


def over_tails_of(
    kernel: Any,
    queries: mx.array,
    rows: Sequence[Sequence[mx.array]],
    places: tuple[Sequence[int], Sequence[int]],
    newest: Sequence[Any],
    scale: float,
    *,
    before: Sequence[Sequence[mx.array]] = (),
    **how: Any,
) -> mx.array:
    """Put the `newest` tokens into `rows`, the arrays of each row, and return what `kernel.over_tails` gives.

    newest  keys and values of as many tokens of each row as there are queries, or their parts; what the rows
            have in their place is wiped out first
    before  packed, a segment of each row; its tokens come first in `places`
    """
    new, each = queries.shape[2], before[0][0].shape[2] if before else 0
    parts = [part for held in newest for part in parts_of(held)]
    ends = [end - each for end in places[1]]
    for arrays, end in zip(rows, ends, strict=True):
        for array in arrays:
            for column in (at % array.shape[2] for at in range(end - new, end)):
                array[:, :, column : column + 1] = mx.zeros_like(array[:, :, :1])
    addresses = _addresses_of(rows)
    more = [[each]] * len(rows) if len(parts) > 2 else [[]] * len(rows)
    others = mx.array([[arrays[0].shape[2], *own] for arrays, own in zip(rows, more, strict=True)], mx.uint64)
    table = [addresses, others]
    if before:
        table.append(_addresses_of(before))
    most = max(arrays[0].shape[2] for arrays in rows) + each
    tails = Tails(mx.concatenate(table, axis=1), most, each)
    behind = put(parts, tails, mx.array(ends, mx.int32)) if new > 1 else None
    out = kernel.over_tails(
        queries, tails, places, scale, fresh=() if new > 1 else newest, behind=behind, **how
    )
    mx.eval(out)
    return out


def _addresses_of(rows: Sequence[Sequence[mx.array]]) -> mx.array:
    """(rows, arrays of one)."""
    return launch.addresses_of([array for arrays in rows for array in arrays]).reshape(len(rows), -1)


def are_equal(some: Sequence[mx.array], others: Sequence[mx.array]) -> bool:
    return all(mx.array_equal(a, b).item() for a, b in zip(some, others, strict=True))


def tails_of(arrays: Sequence[mx.array]) -> Tails:
    """Of keys and values of each row, evaluated, which must stay."""
    addresses, capacity = launch.addresses_of(arrays).reshape(-1, 2), arrays[0].shape[2]
    return Tails(mx.concatenate([addresses, mx.full((len(addresses), 1), capacity, mx.uint64)], 1), capacity)


def unequal_rows(rows: int, length: int) -> tuple[list[int], list[int]]:
    """First columns of so many rows, and the columns behind their last ones."""
    places = [(0, length), (5, length - 7), (length - 1, length)] * -(-rows // 3)
    return [start for start, _ in places[:rows]], [end for _, end in places[:rows]]


Ends = tuple[mx.array, mx.array, mx.array | None]


def places_of(starts: list[int], ends: list[int], tokens: range) -> Ends:
    """Start, end and owner of each of `tokens` of rows that end at `ends`, as `FusedAttention` has them."""
    count = len(tokens)
    begin = mx.array([start for start in starts for _ in tokens])
    end = mx.array([stop + i for stop in ends for i in tokens])
    return begin, end, owners_of([count] * len(starts), count * len(starts)) if count > 1 else None
