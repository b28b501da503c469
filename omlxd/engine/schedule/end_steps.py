"""Ends of prompts computed as answers are: by passes whose bits are those of decode steps.

A row's bits are then its own in any company, so the ends of several prompts share passes, and none waits for
another's.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import mlx.core as mx

from .. import mlx_adapter
from ..mlx_adapter import DecodeStep, LayerHook
from ..speculate.verify import filled_up

LONGEST = 32
"""Tokens of an end, without the last, that passes of steps compute, `most_new` of a row at most in each. A
longer end has a pass of its own.

8B shape, one H100, seconds to the first tokens behind 16,000 to 20,500 cached tokens:

| ends            | alone                  | all at once, one by one    | in passes of steps |
|-----------------|------------------------|----------------------------|--------------------|
| 8, 8, 8, 8      | 0.05 to 0.06 both ways | 0.06, 0.13, 0.20, 0.29     | all 0.13           |
| 40, 20, 50, 7   | 0.05; in steps to 0.08 | 0.16, 0.27, 0.38, 0.08     | all 0.18 to 0.28   |
| 8, 22, 26, 30 *)| 0.07 to 0.12 both ways | 0.07, 0.17, 0.27, 0.36     | all 0.15 to 0.16   |

*) behind 192, 128, 64 and no tokens that are computed before.
"""


class EndSteps:
    """most  tokens of a pass
    hook  its `call` runs between passes, once one is computed
    """

    def __init__(self, compiled: DecodeStep, most: int, hook: LayerHook):
        self._compiled, self._most, self._hook = compiled, most, hook

    def compute(self, cache: mlx_adapter.Cache, ends: Seq[list[int]]) -> list[list[int]]:
        """Compute each row's tokens into `cache`. Returns those that are left where there is no such pass."""
        left, passes = list(ends), 0
        while any(left):
            counts = pass_counts([len(own) for own in left], self._most, self._compiled.most_new)
            given = [own[:count] for own, count in zip(left, counts, strict=True)]
            logits = self._compiled(self._tokens(given, counts), cache, passes, counts)
            if logits is None:
                break
            if self._hook.call is None:
                mx.async_eval(logits)
            else:
                mx.eval(logits)
                self._hook.call()
            passes, longest = passes + 1, max(counts)
            mlx_adapter.trim(cache, [longest - len(own) for own in given])
            left = [own[len(now) :] for own, now in zip(left, given, strict=True)]
        return left

    def _tokens(self, given: Seq[list[int]], counts: Seq[int]) -> mx.array:
        """One row's behind the other's. A row without any has one of no meaning."""
        rows = len(counts)
        tokens = [token for own, count in zip(given, counts, strict=True) for token in own or [0] * count]
        if len(tokens) == rows:
            return mx.array(tokens)[:, None]
        return mx.array(filled_up(tokens, rows, self._most))


def pass_counts(left: Seq[int], most: int, of_row: int) -> list[int]:
    """Tokens of each row in a pass of `most` at most, where so many are `left`: one at least, `of_row` at
    most, and the more the longer a row is."""
    counts, limits = [1] * len(left), [min(tokens, of_row) for tokens in left]
    for _ in range(most - len(left)):
        row = max(range(len(left)), key=lambda row: limits[row] - counts[row])
        if counts[row] >= limits[row]:
            break
        counts[row] += 1
    return counts
