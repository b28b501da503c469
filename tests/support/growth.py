"""Whether the time of some work grows as its size does, and not by its square."""

from __future__ import annotations

from collections.abc import Callable


def assert_linear(seconds: Callable[[int], float], few: int) -> None:
    """Ten times `few` take less than 40 times as long; work that grows by the square takes 100 times as long.

    `seconds` does work of a size, and returns its processor time. `few` runs ten times, so that both sides
    take about as long, and a moment in which others use the machine weighs little in either.
    """
    each = sum(seconds(few) for _ in range(10)) / 10
    assert min(seconds(10 * few) for _ in range(3)) < 40 * each
