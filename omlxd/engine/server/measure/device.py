"""What MLX says of its device, and what the device's simplest calls cost."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

import mlx.core as mx

from ... import mlx_adapter
from ...kvio.hot_budget import memory
from ...process import blas
from .timing import Measured, chained, empty_eval, short, times

PACKAGES = ("mlx", "mlx-metal", "mlx-lm", "mlx-vlm", "transformers", "tokenizers", "safetensors", "numpy")
SUM_BYTES = 1 << 30
CPU_SUM_BYTES = 1 << 28
WIDTH = 4096


def facts() -> Measured:
    backend = mlx_adapter.backend()
    told = {key: value for key, value in mx.device_info().items() if not key.endswith(("uuid", "id"))}
    name = f"MLX on {backend}; " + ", ".join(f"{key} {value}" for key, value in sorted(told.items()))
    if backend == "cpu":
        name += f"; products by {blas.name() or 'its own BLAS'}, {blas.gflops():.0f} GFLOP/s"
    return Measured([("versions", ", ".join(filter(None, map(_version, PACKAGES)))), ("device", name)])


def _version(package: str) -> str:
    try:
        return f"{package} {version(package)}"
    except PackageNotFoundError:
        return ""


def evals() -> Measured:
    one = mx.array(1.0)
    mx.eval(one)
    empty, kernel = empty_eval(), chained(lambda x: _several(x, one), one) / SEVERAL
    text = f"an empty eval {short(empty)}; each of {SEVERAL} chained tiny kernels {short(kernel)}"
    return Measured([("eval", text)], {"eval": empty, "kernel": kernel})


SEVERAL = 100


def _several(x: mx.array, one: mx.array) -> mx.array:
    for _ in range(SEVERAL):
        x = x + one
    return x


def bandwidth() -> Measured:
    nbytes = CPU_SUM_BYTES if mlx_adapter.backend() == "cpu" else SUM_BYTES
    numbers = mx.zeros(nbytes // 4, dtype=mx.float32)
    mx.eval(numbers)
    seconds = max(1e-9, min(times(numbers.sum, turns=20)) - empty_eval())
    rate = nbytes / seconds
    text = f"the sum of {nbytes >> 20} MiB reads {rate / 1e9:.1f} GB/s"
    return Measured([("bandwidth", text)], {"sum": seconds})


def room() -> Measured:
    """Say how much memory the device has where arrays live."""
    return Measured([("backend", mlx_adapter.backend())], {"total": float(memory()[0])})


def decode_bandwidth() -> Measured:
    """Measure the bytes a second that a product of one row, the most of a decode step, reads of a matrix."""
    nbytes = CPU_SUM_BYTES if mlx_adapter.backend() == "cpu" else SUM_BYTES
    row, matrix = mx.ones((1, WIDTH)), mx.zeros((nbytes // 4 // WIDTH, WIDTH))
    mx.eval(row, matrix)
    seconds = max(1e-9, min(times(lambda: row @ matrix.T, turns=20)) - empty_eval())
    rate = nbytes / seconds
    text = f"a product of one row with {nbytes >> 20} MiB reads {rate / 1e9:.1f} GB/s"
    return Measured([("decode bandwidth", text)], {"read": rate})
