"""Models and rigs of the `family` that a module names; of a module that skips without mlx-vlm."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="module")
def model(family: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from vision_families import build_vision_family

    return build_vision_family(family, tmp_path_factory.mktemp(family))


@pytest.fixture(scope="module")
def uncached(family: str, model: Path) -> Iterator[Any]:
    """A `VisionRig` without reuse."""
    from vision_rig import VisionRig

    with VisionRig(family, model, reuse=False) as rig:
        yield rig
