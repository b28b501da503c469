"""Whether rows of a batch attend by themselves or in one call: both ways are timed at a load, and the rule.

A batch in one call of MLX's own needs a mask and reads padding; rows by themselves are more calls, whose
results are joined, and each writes its new KV. Which is faster depends on the device, and on how long rows
are: on a CPU the load decides, on Metal whoever joins a batch has it decided anew (cache/joining.py). It has
not run on a Mac.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import mlx.core as mx

from ..runtime.chains import Clock, Link, seconds_of
from ..runtime.device import backend
from ..runtime.gpu_faults import end_if_fault

log = logging.getLogger(__name__)

FAVOUR = 1.1
"""Times MLX's own time that rows by themselves may take: then rows join without copies, a row's sums do not
depend on other rows, and a noisy clock does not choose anew at each start."""


class Shape(NamedTuple):
    """Heads of a model's layers: how attention is called there."""

    heads: int
    kv_heads: int
    width: int
    dtype: Any
    kv_dtype: Any


class Seconds(NamedTuple):
    """What attention of a layer takes one way, as it was measured.

    rows, lengths  two sizes of each
    taken          seconds of few rows of both lengths, then of many
    """

    rows: tuple[int, int]
    lengths: tuple[int, int]
    taken: tuple[float, float, float, float]

    def of(self, rows: int, length: float) -> float:
        """Return the seconds of `rows` rows of `length` tokens. What lies between was not measured; rows of
        fewer tokens take as long as the short ones, and numbers of rows beyond in proportion."""
        (few, many), (short, long) = self.rows, self.lengths
        near = min(max(rows, few), many)
        share = (near - few) / (many - few)
        at_short, at_long = (self.taken[at] * (1 - share) + self.taken[at + 2] * share for at in (0, 1))
        a_token = max(0.0, at_long - at_short) / (long - short)
        return (at_short + a_token * max(0.0, length - short)) * rows / near


class Costs(NamedTuple):
    """What attention of a layer takes.

    joint  in one call of MLX's own for all rows, with a mask and padding
    alone  in a call for each row
    """

    joint: Seconds
    alone: Seconds

    def pays_alone(self, length: int) -> bool:
        """Whether a row that is in no batch is better off by itself."""
        return self.alone.of(1, length) <= FAVOUR * self.joint.of(1, length)


_costs: dict[Shape, Costs | None] = {}

HALF: tuple[Sequence[int], int] = [512] * 4, 1024
LONG: tuple[Sequence[int], int] = [8192] * 4, 16384
"""Rows of half their batch's length: what is told of a measurement."""


def ratio(lengths: Sequence[int] = HALF[0], columns: int = HALF[1]) -> float | None:
    """Time of rows of these lengths by themselves, by that of MLX's own, where they lie in `columns` columns,
    in a layer of each shape. None: nothing was measured."""
    known = [costs for costs in _costs.values() if costs is not None]
    if not known:
        return None
    rows = len(lengths)
    alone = sum(costs.alone.of(rows, sum(lengths) / rows) for costs in known)
    joint = sum(costs.joint.of(rows, columns) for costs in known)
    return alone / max(joint, 1e-12)


def ratios() -> dict[str, float]:
    """Return the ratios that were measured, by the names of engine/server/metrics.py."""
    cases = {"attention_rows_alone_ratio": HALF}
    if backend() != "cpu":
        cases["attention_long_rows_alone_ratio"] = LONG
    return {name: taken for name, case in cases.items() if (taken := ratio(*case)) is not None}


def pays() -> bool:
    """Whether rows of a batch are better off by themselves, on Metal of some lengths: a load asks that."""
    cases = [HALF] if backend() == "cpu" else [HALF, LONG]
    return any((taken := ratio(*case)) is not None and taken <= FAVOUR for case in cases)


def pays_for(lengths: Sequence[int], are_apart: bool) -> bool:
    """Whether rows of these lengths are better off by themselves; `are_apart`: they are so now.

    A change copies all their KV, as a join of rows in one array does, so either way must be better than the
    one that they have. On a CPU the load decides: a row's bits do not depend on others there.
    """
    if backend() == "cpu" or (taken := ratio(lengths, max(lengths))) is None:
        return True
    return taken <= (FAVOUR if are_apart else 1 / FAVOUR)


def costs_for(queries: mx.array, keys: mx.array, one_row: OneRow) -> Costs | None:
    """What both ways cost for such heads; measured once. None: it can't be measured."""
    shape = Shape(queries.shape[1], keys.shape[1], queries.shape[3], queries.dtype, keys.dtype)
    if shape not in _costs:
        began = time.perf_counter()
        try:
            _costs[shape] = measured(shape, CPU if backend() == "cpu" else GPU, one_row)
        except Exception as error:
            end_if_fault(error)
            log.warning("rows attend together, by MLX's own attention: it can't be measured (%s)", error)
            _costs[shape] = None
            return None
        log.info("%s; measured in %.2f s", _told(shape), time.perf_counter() - began)
    return _costs[shape]


def _told(shape: Shape) -> str:
    heads = f"{shape.heads} query heads, {shape.kv_heads} KV heads, {shape.width} wide, {shape.dtype}"
    half, long = ratio(*HALF) or 0.0, ratio(*LONG) or 0.0
    if backend() != "cpu":
        how = f"{half:.2f} times as long as MLX's own call at 512 tokens each, {long:.2f} times at 8,192"
        return f"rows of a batch attend by themselves where that is faster ({heads}; they take {how})"
    way = "row by row" if half <= FAVOUR else "in one call of MLX's own"
    how = f"row by row takes {half:.2f} times as long as MLX's own call"
    why = f"is chosen up to {FAVOUR:g} times, since rows then join without copies"
    return f"a batch attends {way} ({heads}; {how}, and {why})"


# --------------------------------------------------------------------------- the measurement


class Plan(NamedTuple):
    """A measurement. A chain has `links` calls at most; the least of `turns` times counts."""

    rows: tuple[int, int]
    lengths: tuple[int, int]
    links: int
    turns: int


GPU = Plan((4, 8), (512, 8192), 64, 5)
"""Chains (runtime/chains.py). Metal has other kernels for long rows than for short ones, and runs those of
several rows at once, as far as it can."""

CPU = Plan((1, 4), (128, 512), 1, 9)
"""Single calls, which take a CPU longer than an evaluation does: 0.02 to 0.25 s of a processor in all (1 head
of 32, and 32 on 8 of 128). Others use the machine: with 5 turns of one way before those of the other, a CPU
under a load of 5 to 8 chose the slower way at three of seven starts, so the ways take turns; and chains of 4
ms are cut by others' slices, so that under a load of 13 ratios of three starts were 0.9, 1.9 and 0.4, where
those of single calls are 0.72, 0.77 and 0.87."""

MOST_BYTES = 256 << 20
"""Keys and values at most: of fewer tokens where heads are many and wide."""


OneRow = Callable[[mx.array, mx.array, mx.array, float], mx.array]
"""Attention of a row by itself: of queries to keys and values, with a scale."""


def measured(shape: Shape, plan: Plan, one_row: OneRow, clock: Clock = time.perf_counter) -> Costs:
    """Time both ways for rows and lengths of two sizes."""
    a_token = 2 * plan.rows[1] * shape.kv_heads * shape.width * shape.kv_dtype.size
    short, long = plan.lengths
    lengths = short, max(2 * short, min(long, MOST_BYTES // a_token))
    cases = [(rows, length) for rows in plan.rows for length in lengths]
    taken = [_both_ways(shape, *case, plan, one_row, clock) for case in cases]
    joint, alone = zip(*taken, strict=True)
    return Costs(Seconds(plan.rows, lengths, joint), Seconds(plan.rows, lengths, alone))


class Ways(NamedTuple):
    """Passes of one token a row in a layer, whose KV they put into `rooms`.

    joint    a call for all rows
    alone    a call for each row
    queries  (rows, heads, 1, width), evaluated, as are `rooms`
    """

    joint: Link
    alone: Link
    queries: mx.array
    rooms: Sequence[mx.array]


def ways(shape: Shape, rows: int, length: int, one_row: OneRow) -> Ways:
    """Return both ways for rows of `length` tokens each."""
    queries = mx.ones((rows, shape.heads, 1, shape.width), shape.dtype)
    keys, values = (mx.ones((rows, shape.kv_heads, length, shape.width), shape.kv_dtype) for _ in range(2))
    mask = mx.broadcast_to(mx.arange(length) >= 1, (rows, 1, 1, length))
    pairs = [*zip(mx.split(keys, rows), mx.split(values, rows), strict=True)]
    rooms = [mx.zeros((count, shape.kv_heads, 2, shape.width), shape.dtype) for count in (rows, *[1] * rows)]
    mx.eval(queries, keys, values, mask, pairs, rooms)
    scale = shape.width**-0.5

    def put(room: mx.array, queries: mx.array) -> None:
        """Write the KV of a new token."""
        for part in (0, 1):
            room[..., part : part + 1, :] = queries[:, : shape.kv_heads]

    def joint(queries: mx.array) -> mx.array:
        put(rooms[0], queries)
        return mx.fast.scaled_dot_product_attention(queries, keys, values, scale=scale, mask=mask)

    def alone(queries: mx.array) -> mx.array:
        each = mx.split(queries, rows)
        for room, query in zip(rooms[1:], each, strict=True):
            put(room, query)
        return mx.concatenate([one_row(q, *pair, scale) for q, pair in zip(each, pairs, strict=True)])

    return Ways(joint, alone, queries, rooms)


def _both_ways(
    shape: Shape, rows: int, length: int, plan: Plan, one_row: OneRow, clock: Clock
) -> tuple[float, float]:
    """Return the seconds of a call for all rows and of calls for each row, in a pass of many."""
    joint, alone, queries, rooms = ways(shape, rows, length, one_row)
    taken = seconds_of((joint, alone), queries, plan.links, plan.turns, rooms, clock)
    return taken[0], taken[1]
