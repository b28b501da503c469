"""MLX's types by safetensors' names, and what computes with them."""

from __future__ import annotations

import sys
from importlib.metadata import version
from typing import Any

import mlx.core as mx

from ...process import blas

SAFETENSORS_DTYPE = {
    mx.float32: "F32",
    mx.float16: "F16",
    mx.bfloat16: "BF16",
    mx.uint32: "U32",
    mx.uint8: "U8",
}


_BY_NAME = {name: dtype for dtype, name in SAFETENSORS_DTYPE.items()}


def storage_dtype(dtype: str) -> Any:
    """The MLX type in which bytes of safetensors type `dtype` are kept: one that Python can view."""
    return mx.uint16 if dtype == "BF16" else _BY_NAME[dtype]


def compute_dtype(dtype: str) -> Any:
    """The MLX type that a model computes with."""
    return _BY_NAME[dtype]


def versions() -> dict[str, str]:
    """What computes the KV: part of the namespace, since a release may mend a model, and a BLAS may round
    otherwise than another one."""
    kind = backend()
    computes = f"{kind} {blas.name()}" if kind == "cpu" and blas.name() else kind
    return {"mlx": version("mlx"), "mlx-lm": version("mlx-lm"), "backend": computes}


def backend() -> str:
    """`cpu`, `metal` or `cuda`."""
    if mx.default_device() == mx.Device(mx.cpu):
        return "cpu"
    return "metal" if sys.platform == "darwin" else "cuda"
