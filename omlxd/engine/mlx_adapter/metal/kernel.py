"""A Metal kernel, made of its source by MLX when it is first called."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

Sizes = tuple[int, int, int]


class Kernel:
    """A kernel of `mx.fast.metal_kernel`.

    name             of the function
    inputs, outputs  names of its buffers in `source`, in order: 31 at most, with those that MLX adds
    source           the function's body
    header           what stands before the function
    writes           inputs that it changes in place, whole arrays that nobody else may write
    """

    def __init__(
        self,
        name: str,
        inputs: Sequence[str],
        outputs: Sequence[str],
        source: str,
        header: str = "",
        writes: Sequence[str] = (),
    ):
        self.name, self.inputs, self.outputs = name, tuple(inputs), tuple(outputs)
        self.source, self.header, self.writes = source, header, tuple(writes)
        self._made: Any = None

    @property
    def made(self) -> Any:
        """What MLX makes of it. Nothing is compiled before it is called."""
        if self._made is None:
            self._made = mx.fast.metal_kernel(
                name=self.name,
                input_names=list(self.inputs),
                output_names=list(self.outputs),
                source=self.source,
                header=self.header,
            )
        return self._made

    def __call__(
        self,
        arrays: Sequence[mx.array],
        *,
        template: Sequence[tuple[str, Any]] = (),
        grid: Sizes,
        threadgroup: Sizes,
        output_shapes: Sequence[Sequence[int]],
        output_dtypes: Sequence[Any],
    ) -> list[mx.array]:
        """Return its outputs, not computed yet.

        template            types, numbers and bools that are compiled in; each set is a kernel of its own
        grid, threadgroup   threads of the launch, and of a threadgroup, as `metal_kernel` has them
        """
        how: dict[str, Any] = {"grid": grid, "threadgroup": threadgroup}
        return run(self, arrays, template, output_shapes=output_shapes, output_dtypes=output_dtypes, **how)


def on_device(
    kernel: Kernel, arrays: Sequence[mx.array], template: Sequence[tuple[str, Any]], **how: Any
) -> list[mx.array]:
    """Have MLX launch it, on a Mac."""
    if template:
        how["template"] = list(template)
    return kernel.made(inputs=list(arrays), **how)


run = on_device
"""What calls a kernel. Tests without a Mac put another in its place."""
