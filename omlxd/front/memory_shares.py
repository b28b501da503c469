"""How one budget of memory is divided among the engines that are loaded. Pure arithmetic, in bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..wire import Budget

SLACK = 64 << 20
"""An engine may have this much more for its hot tier than it uses, so that it can grow."""
FREED_PART = 32
"""All engines' MLX may keep one part of so many of what is left, for arrays to come."""


@dataclass(frozen=True, slots=True)
class Holding:
    """What one engine holds. `firm`: weights and live KV, which nothing but its end gives back.

    `freed`: what its MLX keeps for arrays to come.
    """

    firm: int
    hot: int
    freed: int = 0

    @property
    def spare(self) -> int:
        """What it can give back."""
        return self.hot + self.freed


def shares(
    holdings: Mapping[str, Holding], total: int, hot_most: int | None = None, claimed: int = 0
) -> dict[str, Budget]:
    """The budget of each engine, by name. They never add up to more than `total`.

    hot_most  of all hot tiers together; None: what is left
    claimed   promised to models that are loading

    Hot tiers share what weights and live KV leave: alike, but one that uses less than its part leaves
    the rest to the others. Any engine's prompts may take all that is left, since hot tiers give way.
    """
    spare = max(0, total - claimed - sum(held.firm for held in holdings.values()))
    freed = spare // (FREED_PART * max(1, len(holdings)))
    spare -= freed * len(holdings)
    hot_left = spare if hot_most is None else min(spare, hot_most)
    budgets: dict[str, Budget] = {}
    by_use = sorted(holdings, key=lambda name: holdings[name].hot)
    for done, name in enumerate(by_use):
        held = holdings[name]
        alike = hot_left // (len(by_use) - done)
        last = done == len(by_use) - 1
        hot = alike if last else min(alike, held.hot + max(SLACK, held.hot // 4))
        hot_left -= hot
        budgets[name] = Budget(hot=hot, live=held.firm + spare, freed=freed)
    return budgets
