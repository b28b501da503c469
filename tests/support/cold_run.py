"""A run without any reuse, against which every hit is held: the same tokens, the same logits bit by bit."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
from family_configs import VOCAB
from rig import Rig


def prompt(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(300, VOCAB) for _ in range(length)]


class Reference:
    """What a run without any reuse gives: tokens and every logits row, for any prompt."""

    def __init__(self, model: Path, **options: Any):
        self.rig = Rig(model, reuse=False, record=True, **options)
        self._memo: dict[tuple[tuple[int, ...], int], tuple[list[int], list[np.ndarray]]] = {}

    def __call__(self, tokens: list[int], n: int = 8) -> tuple[list[int], list[np.ndarray]]:
        self.rig.recorder.logits.clear()
        got = self.rig.run(tokens, n).got
        return got, outputs(self.rig, n)

    def once(self, tokens: list[int], n: int) -> tuple[list[int], list[np.ndarray]]:
        """As a call, remembered: for whoever changes nothing about the scheduler meanwhile."""
        key = (tuple(tokens), n)
        if key not in self._memo:
            self._memo[key] = self(tokens, n)
        return self._memo[key]

    def close(self) -> None:
        self.rig.close()

    def __enter__(self) -> Reference:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def outputs(rig: Rig, n: int) -> list[np.ndarray]:
    """The logits rows from which the last request's `n` tokens were sampled."""
    # The step in flight when the last token was read computed one row more.
    rows = [row for _, row in rig.recorder.logits][-n - 1 : -1]
    assert len(rows) == n
    return rows


def same_bits(rows: list[np.ndarray], others: list[np.ndarray]) -> bool:
    return all(
        np.array_equal(a.view(np.uint32), b.view(np.uint32)) for a, b in zip(rows, others, strict=True)
    )


def assert_same(rig: Rig, tokens: list[int], uncached: Reference, *, hot: int, cold: int, n: int = 8) -> None:
    """A request hits `hot` and `cold` tokens, and gives what a run without reuse gives."""
    rig.recorder.logits.clear()
    output = rig.run(tokens, n)
    want_tokens, want_rows = uncached.once(tokens, n)
    assert (output.hot, output.cold) == (hot, cold)
    assert output.got == want_tokens
    assert same_bits(outputs(rig, n), want_rows), "logits differ in some bit"
