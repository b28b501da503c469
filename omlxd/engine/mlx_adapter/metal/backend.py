"""The backend of Metal: MLX's own attention, and the kernels of this folder where rule.py lets them."""

from __future__ import annotations

from pathlib import Path

from ..attention.backend import MlxBackend
from . import rule


class MetalBackend(MlxBackend):
    name = "metal"

    def use_kernel_folder(self, folder: Path) -> None:
        rule.use_folder(folder)
