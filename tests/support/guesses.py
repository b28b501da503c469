"""Guesses of every kind in place of the n-grams', checked in every pass, whatever that costs."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from omlxd.engine.speculate.controller import Speculation
from omlxd.engine.speculate.row import RowSpeculator

Guesser = Callable[[list[int]], list[int]]
"""Tokens so far → guesses."""


def check_always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is guessed is checked, also where that takes longer."""
    monkeypatch.setattr(
        Speculation, "best_width", lambda self, offers, packed=0: max(own.guesses for own in offers)
    )


def guess_by(monkeypatch: pytest.MonkeyPatch, guesser: Guesser, *, forced: bool = False) -> None:
    """forced: what a grammar forces stays a guess."""
    propose = RowSpeculator._propose

    def instead(self: RowSpeculator) -> None:
        propose(self)
        if not (forced and self._kind == "forced"):
            tokens: Any = self._proposer._ids[: self._proposer._count]
            self.draft, self._kind = guesser(tokens.tolist()), "short"

    monkeypatch.setattr(RowSpeculator, "_propose", instead)
    check_always(monkeypatch)


def half_right(rights: Collection[list[int]], seed: int) -> Guesser:
    """Guesses of any number for these sequences, true up to some place and something else behind."""
    rng = random.Random(seed)

    def guesser(tokens: list[int]) -> list[int]:
        right = next((right for right in rights if right[: len(tokens)] == tokens), tokens)
        following = right[len(tokens) : len(tokens) + rng.randrange(12)]
        cut = rng.randrange(len(following) + 1)
        return following[:cut] + [rng.randrange(500) for _ in following[cut:]]

    return guesser


def draft_always(monkeypatch: pytest.MonkeyPatch, width: int = 4) -> None:
    """The draft model guesses `width` tokens for every row that has no other guess."""
    monkeypatch.setattr(
        Speculation, "draft_width", lambda self, offers, rates, most=15, packed=0: min(width, most)
    )
    check_always(monkeypatch)
    monkeypatch.setattr(RowSpeculator, "draft_rate", 0.01)


def like_it(model: Path, folder: Path, noise: float) -> Path:
    """In `folder`, `model` with noise on its weights, as a part of their own spread."""
    shutil.copytree(model, folder)
    file = folder / "model.safetensors"
    weights: Any = mx.load(str(file))
    mx.random.seed(1)
    for name, array in weights.items():
        weights[name] = array + noise * mx.std(array) * mx.random.normal(array.shape)
    mx.save_safetensors(str(file), weights, {"format": "mlx"})
    return folder
