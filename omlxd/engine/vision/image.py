"""An image as a model gets it, and the facts in its processed pixels."""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import numpy as np


@dataclass(slots=True, frozen=True)
class Image:
    """An image as the model gets it.

    digest  of processed pixels, their shape and the processor's settings, in hex
    tokens  that stand for it in a prompt
    grid    (1, 3), its patches in time, height and width; None: its family's positions don't need them
    values  numbers that the tower gets; tiles: parts of it that don't see each other
    """

    digest: str
    tokens: array[int]
    grid: np.ndarray | None
    values: int = 0
    tiles: int = 1

    @property
    def nbytes(self) -> int:
        return 500 + self.tokens.itemsize * len(self.tokens)


def image_of(tokens: list[int], pixels: Mapping[str, Any], settings: bytes) -> Image:
    """Make an Image. `settings`: a digest of the processor's."""
    state = sha256(settings)
    state.update(repr(tokens).encode())
    for name in sorted(pixels):
        for each in _flat(pixels[name]):
            state.update(f"{name} {each.dtype} {each.shape} ".encode())
            state.update(np.ascontiguousarray(each).data)
    grid = pixels.get("image_grid_thw")
    return Image(state.hexdigest(), array("I", tokens), grid, *_extent(pixels["pixel_values"]))


def bytes_of(pixels: Mapping[str, Any]) -> int:
    return sum(each.nbytes for value in pixels.values() for each in _flat(value))


def _extent(pixels: Any) -> tuple[int, int]:
    """Return (numbers, tiles) of an image's pixels: (patches, values), (tiles, patches, values), or tiles of
    (channels, height, width).
    """
    arrays = _flat(pixels)
    tiles = [
        math.prod(each.shape[:-3]) if each.ndim > 3 else each.shape[0] if each.ndim == 3 else 1
        for each in arrays
    ]
    # What has three dimensions may be one tile's channels.
    return sum(each.size for each in arrays), max(1, sum(count for count in tiles if count != 3))


def _flat(value: Any) -> list[np.ndarray]:
    if isinstance(value, list):
        return [each for item in value for each in _flat(item)]
    return [np.asarray(value)]
