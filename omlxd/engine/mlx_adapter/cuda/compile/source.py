"""Makes the CUDA source of a kernel: `#define`s and constants, then files of kernels/. The source includes
no header, since NVRTC finds none (nvrtc.py)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files

import mlx.core as mx

TYPES = {mx.bfloat16: "bfloat16", mx.float16: "float16"}

MOST_ROWS = 128
"""Rows of a decode step's kernels, at most."""


KERNELS = files("omlxd.engine.mlx_adapter.cuda") / "kernels"


@cache
def text_of(name: str) -> str:
    """Return the text of kernels/`name`.cu."""
    return (KERNELS / f"{name}.cu").read_text()


def source(
    names: Sequence[str],
    words: Mapping[str, str | int],
    kind: str = "",
    numbers: Mapping[str, float] | None = None,
) -> str:
    """Return a kernel's CUDA source: `#define`s, constants, then these files in their order.

    words    macros, by their names; a flag is 0 or 1
    kind     what numbers of 16 bits are: header.cu and `using T` come before the files
    numbers  constants of the files, by their names
    """
    parts = [f"#define {word} {meaning}\n" for word, meaning in words.items()]
    if kind:
        parts.append(f"{text_of('header')}using T = {kind};\n")
    for name, number in (numbers or {}).items():
        is_float = isinstance(number, float)
        parts.append(f"constexpr {'float' if is_float else 'int'} {name} = {number!r}{'f' * is_float};\n")
    return "".join([*parts, *map(text_of, names)])
