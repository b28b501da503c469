"""What checks of several kernels have in common: rows with arrays of their own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from ...cache.packed import parts_of
from ..compile import launch
from .attention_kernel import Tails, put


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
    """What `kernel.over_tails` gives of `rows`, the arrays of each, once the `newest` tokens are put there.

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
