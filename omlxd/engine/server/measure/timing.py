"""Times of what MLX computes."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import mlx.core as mx

MOST_S = 0.5
"""Seconds of repetitions of one call."""
LINKS = 32


class Measured(NamedTuple):
    """What a part has measured.

    lines   (name, text)
    values  numbers that the report compares, or shows elsewhere
    """

    lines: list[tuple[str, str]]
    values: dict[str, float] = {}  # noqa: RUF012


def times(call: Callable[[], Any], most_s: float = MOST_S, turns: int = 50) -> list[float]:
    """Return the seconds of each of up to `turns` evaluations; a first one is not counted."""
    taken: list[float] = []
    mx.eval(call())
    until = time.perf_counter() + most_s
    while len(taken) < turns and (not taken or time.perf_counter() < until):
        began = time.perf_counter()
        mx.eval(call())
        taken.append(time.perf_counter() - began)
    return taken


def empty_eval() -> float:
    """Return the seconds of an evaluation that computes one number: what each evaluation costs."""
    one = mx.array(1.0)
    mx.eval(one)
    return statistics.median(times(lambda: one + one))


def chained(link: Callable[[Any], Any], first: Any) -> float:
    """Return the seconds of a call whose argument is the last one's result, by chains inside one evaluation.

    An evaluation of nothing is subtracted: what a call costs inside a model's pass is left.
    """

    def chain(links: int) -> Callable[[], Any]:
        def run() -> Any:
            out = first
            for _ in range(links):
                out = link(out)
            return out

        return run

    once, empty = min(times(chain(1), MOST_S / 4, 5)), empty_eval()
    if once > MOST_S / 4:  # A slow device: repetitions take too long, and an evaluation is little of it.
        return once - empty
    links = int(max(1, min(LINKS, MOST_S / 2 / once)))
    return max(0.0, min(times(chain(links), turns=9)) - empty) / links


def short(seconds: float) -> str:
    """Return `12.3 µs`, `4.56 ms` or `1.23 s`."""
    for unit, name in ((1e-6, "µs"), (1e-3, "ms")):
        if float(rounded := f"{seconds / unit:.3g}") < 1000:
            return f"{rounded if seconds >= 1e-8 else 'less than 0.01'} {name}"
    return f"{seconds:.2f} s"
