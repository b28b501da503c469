"""Block payloads as MLX arrays: copies of a sequence's KV, packed by the layout's groups.

Bytes are kept in a type that Python can view (bf16 as u16), evaluated, so that any thread may read
them, and contiguous, so that they neither pin the sequence's arrays nor stop MLX from appending to
them in place (an evaluated view would do both).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import mlx.core as mx

from ..kv.layout import ITEM_BYTES, Group, KVLayout
from .mlx_adapter import compute_dtype, storage_dtype


class MLXPayload:
    """One block. `arrays`: one a group, each (tensors, heads, block_size, dim) in storage type."""

    __slots__ = ("arrays", "nbytes")

    def __init__(self, arrays: tuple[mx.array, ...]):
        self.arrays = arrays
        self.nbytes = sum(array.nbytes for array in arrays)

    def buffers(self) -> list[memoryview]:
        """Byte views in file order. Any thread; they keep the arrays alive."""
        return [_bytes(array) for array in self.arrays]


def _bytes(array: mx.array) -> memoryview:
    """A writable byte view of an evaluated array. MLX's stubs don't say that it has the buffer protocol."""
    return memoryview(cast(Any, array)).cast("B")


def empty_payload(layout: KVLayout, block_size: int) -> MLXPayload:
    """A payload to read a file into. Any thread."""
    arrays = tuple(mx.zeros(g.shape(block_size), dtype=storage_dtype(g.dtype)) for g in layout.groups)
    mx.eval(arrays)
    return MLXPayload(arrays)


def copy_blocks(
    layout: KVLayout, tensors: Mapping[str, mx.array], starts: Sequence[int], block_size: int
) -> list[MLXPayload]:
    """Copy the blocks that begin at columns `starts` (adjacent, ascending) out of `tensors`, evaluated.

    tensors  by layout name, each (1, heads, columns, dim)

    All layers are first joined for the whole run and then cut into blocks: for 36 layers and a run
    of 32 blocks that is 104 copies to launch instead of 2,304.
    """
    first, last = starts[0], starts[-1] + block_size
    cut: list[list[mx.array]] = [[] for _ in starts]
    for group in layout.groups:
        joined = mx.concatenate([tensors[name][:, :, first:last] for name in group.names])
        if group.dtype == "BF16":
            joined = joined.view(mx.uint16)
        for blocks, start in zip(cut, starts, strict=True):
            at = start - first
            blocks.append(mx.contiguous(joined[:, :, at : at + block_size]))
    mx.eval(cut)
    return [MLXPayload(tuple(arrays)) for arrays in cut]


def copy_state(layout: KVLayout, tensors: Mapping[str, mx.array]) -> MLXPayload:
    """Copy a checkpoint's tensors, evaluated. `layout`: `StateLayout.at` the tensors' position."""
    copied: list[mx.array] = []
    for group in layout.groups:
        flat = mx.contiguous(tensors[group.names[0]]).reshape(group.shape(1))
        # A tensor that is contiguous already would be shared, and pin or be changed with its owner.
        copied.append((flat.view(mx.uint16) if group.dtype == "BF16" else flat) + 0)
    mx.eval(copied)
    return MLXPayload(tuple(copied))


def view_state(
    layout: KVLayout, payload: MLXPayload, shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, mx.array]:
    """The inverse, by name; the cache that gets them must not change them in place: copies, lazy."""
    found: dict[str, mx.array] = {}
    for group, array in zip(layout.groups, payload.arrays, strict=True):
        own = array + 0
        typed = own.view(compute_dtype(group.dtype)) if group.dtype == "BF16" else own
        found[group.names[0]] = typed.reshape(shapes[group.names[0]])
    return found


def join_blocks(layout: KVLayout, payloads: Sequence[MLXPayload]) -> dict[str, mx.array]:
    """The inverse of `copy_blocks`: tensors by layout name, each (1, heads, tokens, dim); lazy.

    Join at most `JOIN_ELEMENTS` a group at once (`runs`).
    """
    tensors: dict[str, mx.array] = {}
    for index, group in enumerate(layout.groups):
        joined = mx.concatenate([payload.arrays[index] for payload in payloads], axis=2)
        if group.dtype == "BF16":
            joined = joined.view(compute_dtype(group.dtype))
        for row, name in enumerate(group.names):
            tensors[name] = joined[row : row + 1]
    return tensors


JOIN_ELEMENTS = 1 << 29
"""Elements of a joint array at most: kernels index with 32 bits (an H100 failed on 32k tokens of an
8B model, 2.4e9 elements), and the joint array is memory beside the result."""


def runs(layout: KVLayout, payloads: Sequence[MLXPayload], block_size: int) -> list[Sequence[MLXPayload]]:
    """`payloads` cut into pieces that `join_blocks` may take."""
    largest = max(group.nbytes(block_size) // ITEM_BYTES[group.dtype] for group in layout.groups)
    width = max(1, JOIN_ELEMENTS // largest)
    return [payloads[i : i + width] for i in range(0, len(payloads), width)]


class Landing:
    """Arrays of their final size into which I/O threads put blocks, before any graph uses them.

    One array a tensor, each (1, heads, capacity, dim): slices of a joint array would pin all of it.
    """

    __slots__ = ("_rows", "arrays", "block_size", "layout")

    def __init__(self, layout: KVLayout, capacity: int, block_size: int):
        self.layout = layout
        self.block_size = block_size
        self.arrays: dict[str, mx.array] = {}
        self._rows: list[tuple[Group, list[memoryview]]] = []
        for group in layout.groups:
            dtype = storage_dtype(group.dtype)
            for name in group.names:
                self.arrays[name] = mx.zeros((1, group.heads, capacity, group.dim), dtype=dtype)
        mx.eval(self.arrays)
        for group in layout.groups:
            rows: list[memoryview] = []
            for name in group.names:
                whole = _bytes(self.arrays[name])
                width = whole.nbytes // group.heads
                rows += [whole[h * width : (h + 1) * width] for h in range(group.heads)]
            self._rows.append((group, rows))

    def pieces(self, index: int) -> list[memoryview]:
        """Byte views of block `index`, in file order: one a tensor and head."""
        found: list[memoryview] = []
        for group, rows in self._rows:
            each = group.nbytes(self.block_size) // (len(group.names) * group.heads)
            start, stop = index * each, (index + 1) * each
            found += [row[start:stop] for row in rows]
        return found

    def put(self, index: int, payload: MLXPayload) -> None:
        """Copy a hot block to its place."""
        pieces = self.pieces(index)
        at = 0
        for buffer in payload.buffers():
            done = 0
            while done < buffer.nbytes:
                piece = pieces[at]
                piece[:] = buffer[done : done + piece.nbytes]
                done += piece.nbytes
                at += 1

    def take(self) -> dict[str, mx.array]:
        """The arrays in compute type, by layout name. The landing must not be written to afterwards."""
        self._rows = []
        taken: dict[str, mx.array] = {}
        for group in self.layout.groups:
            for name in group.names:
                array = self.arrays.pop(name)
                taken[name] = array.view(mx.bfloat16) if group.dtype == "BF16" else array
        return taken
