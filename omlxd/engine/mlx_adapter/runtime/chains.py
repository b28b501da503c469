"""Times of calls inside one evaluation: chains of them, each of which needs the last one's result.

A Mac spends 150 to 300 µs on an evaluation, as others measured, and 5 to 25 on a call: of single calls, each
in an evaluation of its own, any two ways take as long.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import mlx.core as mx

Link = Callable[[mx.array], mx.array]
"""Makes the next array of the last one: a call whose result has its shape."""

Clock = Callable[[], float]

CHAIN_S = 0.004
"""Seconds from which on a chain has fewer links."""

MOST_S = 0.25
"""Seconds from which on there is no further turn."""


def seconds_of(
    links: Sequence[Link],
    first: mx.array,
    most_links: int,
    turns: int,
    beside: Sequence[mx.array] = (),
    clock: Clock = time.perf_counter,
) -> list[float]:
    """Return the seconds of a link of each way: the least of the turns that they take, less an empty chain.

    beside  arrays that links change, evaluated too
    """

    def chain(link: Link, count: int) -> float:
        out = first
        for _ in range(count):
            out = link(out)
        began = clock()
        mx.eval(out, *beside)
        return clock() - began

    def nothing(array: mx.array) -> mx.array:
        return array + 1

    for link in links:
        chain(link, 1)
    empty = min(chain(nothing, 1) for _ in range(3))
    once = [max(1e-9, chain(link, 2) - empty) / 2 for link in links]
    counts = [max(1, min(most_links, int(CHAIN_S / seconds))) for seconds in once]
    taken: list[list[float]] = [[] for _ in links]
    until = clock() + MOST_S
    while len(taken[0]) < turns and (clock() < until or not taken[0]):
        empty = min(empty, chain(nothing, 1))
        for link, count, own in zip(links, counts, taken, strict=True):
            own.append(chain(link, count))
    return [max(0.0, min(own) - empty) / count for own, count in zip(taken, counts, strict=True)]
