"""Launches machine code, and finds the addresses of arrays for kernels that read them by address."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import mlx.core as mx

from . import kernel_store

AT_ONCE = 24
"""Arrays of a launch that asks for addresses."""


def run(
    code: tuple[str, bytes], inputs: Sequence[mx.array], scalars: Sequence[int], **how: Any
) -> list[mx.array]:
    """Launch `code`, (function, machine code), and return its outputs; inputs are made contiguous."""
    function, machine_code = code
    return mx.fast.precompiled_cuda_kernel(
        name=function,
        compiled_source=machine_code,
        inputs=inputs,
        scalars=scalars,
        **{"ensure_row_contiguous": True, **how},
    )


class Code:
    """Compiles several sources at once, and runs each by its key. Raises what NVRTC and the driver raise."""

    def __init__(self, sources: dict[Any, tuple[str, str]]):
        with ThreadPoolExecutor(len(sources), thread_name_prefix="nvrtc") as aside:
            codes = list(aside.map(lambda source: kernel_store.machine_code(source[1]), sources.values()))
        self._held = {
            key: (source[0], code) for (key, source), code in zip(sources.items(), codes, strict=True)
        }

    def run(self, key: Any, inputs: list[mx.array], scalars: list[int], **how: Any) -> list[mx.array]:
        return run(self._held[key], inputs, scalars, **how)


@cache
def _addresses_code() -> Code:
    return Code({"": addresses_source(AT_ONCE)})


def addresses_of(arrays: Sequence[mx.array]) -> mx.array:
    """Return the address of each of `arrays` in the GPU's memory, in uint64, evaluated. Each is contiguous.

    An array that Python looks at moves for good, and so does each view of it: let Python look at none of
    these as long as a kernel reads them by address.
    """
    mx.eval(list(arrays))
    code, found = _addresses_code(), list[mx.array]()
    for first in range(0, len(arrays), AT_ONCE):
        some = arrays[first : first + AT_ONCE]
        found += code.run(
            "",
            [*some, *[some[0]] * (AT_ONCE - len(some))],
            [],
            grid=(1, 1, 1),
            threadgroup=(1, 1, 1),
            output_shapes=[(AT_ONCE,)],
            output_dtypes=[mx.uint64],
            ensure_row_contiguous=False,  # A copy's address would be that of nothing.
        )
    addresses = mx.contiguous(mx.concatenate(found)[: len(arrays)])
    mx.eval(addresses)
    return addresses


def addresses_source(count: int) -> tuple[str, str]:
    """Return (function, CUDA source) of a kernel that writes the addresses of its `count` arrays."""
    name = f"omlxd_addresses_{count}"
    arguments = ", ".join(f"const void* x{i}" for i in range(count))
    body = " ".join(f"out[{i}] = (unsigned long long)x{i};" for i in range(count))
    return name, f'extern "C" __global__ void {name}({arguments}, unsigned long long* out) {{ {body} }}\n'
