"""Block payloads as MLX arrays: copies of a sequence's KV, packed by the layout's groups.

Bytes are kept in a type that Python can view (bf16 as u16), evaluated, so that any thread may read
them, and contiguous, so that they neither pin the sequence's arrays nor stop MLX from appending to
them in place (an evaluated view would do both). How they get to files and back: engine/kvio/transport.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import mlx.core as mx

from ...kv.layout import ITEM_BYTES, Group, KVLayout
from ..mlx_adapter import (
    Cache,
    append_tokens,
    attention_backend,
    blank_arrays,
    compute_dtype,
    state_arrays,
)
from .transport import Load, byte_view, transport, typed_view


class MLXPayload:
    """One block. `arrays`: one a group, each (tensors, heads, block_size, dim) in storage type."""

    __slots__ = ("arrays", "nbytes")

    def __init__(self, arrays: tuple[mx.array, ...]):
        self.arrays = arrays
        self.nbytes = sum(array.nbytes for array in arrays)

    def buffers(self) -> list[memoryview]:
        """The bytes, in file order, to read. Any thread; good until that thread's next payload."""
        return transport().views(self.arrays)


def read_payload(layout: KVLayout, block_size: int, load: Load) -> MLXPayload | None:
    """A payload whose bytes `load` fills in; None if it says False. Any thread."""
    arrays = transport().read_arrays(layout, block_size, load)
    return None if arrays is None else MLXPayload(arrays)


def copy_blocks(
    layout: KVLayout, tensors: Mapping[str, mx.array], starts: Sequence[int], block_size: int
) -> list[MLXPayload]:
    """Copy the blocks that begin at columns `starts` (adjacent, ascending) out of `tensors`, evaluated.

    Raises RuntimeError if the GPU has failed at what they are copies of.

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
    attention_backend().check_work()
    return [MLXPayload(tuple(arrays)) for arrays in cut]


def copy_state(layout: KVLayout, tensors: Mapping[str, mx.array]) -> MLXPayload:
    """Copy a checkpoint's tensors, evaluated. `layout`: `StateLayout.at` the tensors' position."""
    copied: list[mx.array] = []
    for group in layout.groups:
        flat = mx.contiguous(tensors[group.names[0]]).reshape(group.shape(1))
        # A tensor that is contiguous already would be shared, and pin or be changed with its owner.
        copied.append((flat.view(mx.uint16) if group.dtype == "BF16" else flat) + 0)
    mx.eval(copied)
    attention_backend().check_work()
    return MLXPayload(tuple(copied))


def view_state(
    layout: KVLayout, payload: MLXPayload, shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, mx.array]:
    """The inverse, by name; the cache that gets them must not change them in place: copies, lazy."""
    states: dict[str, mx.array] = {}
    for group, array in zip(layout.groups, payload.arrays, strict=True):
        own = array + 0
        typed = own.view(compute_dtype(group.dtype)) if group.dtype == "BF16" else own
        states[group.names[0]] = typed.reshape(shapes[group.names[0]])
    return states


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


def append_blocks(
    layout: KVLayout,
    cache: Cache,
    payloads: Sequence[MLXPayload],
    start: int,
    block_size: int,
    capacity: int,
) -> None:
    """Copy blocks to position `start`, the end, of a plain cache, evaluated. Engine thread.

    capacity  tokens to allocate for when the cache is still empty
    """
    for run in runs(layout, payloads, block_size) if payloads else ():
        count = len(run) * block_size
        append_tokens(cache, join_blocks(layout, run), start, count, capacity)
        mx.eval(state_arrays(cache))
        start += count


class DirectBuffers:
    """Arrays of their final size into which I/O threads put blocks, before any graph uses them.

    For a transport that is direct.

    One array a tensor, each (1, heads, capacity, dim): slices of a joint array would pin all of it.
    """

    __slots__ = ("_rows", "arrays", "block_size", "layout")

    def __init__(self, layout: KVLayout, capacity: int, block_size: int):
        self.layout = layout
        self.block_size = block_size
        shapes = {
            name: ((1, group.heads, capacity, group.dim), group.dtype)
            for group in layout.groups
            for name in group.names
        }
        self.arrays = dict(zip(shapes, blank_arrays(list(shapes.values())), strict=True))
        self._rows: list[tuple[Group, list[memoryview]]] = []
        for group in layout.groups:
            rows: list[memoryview] = []
            for name in group.names:
                data = byte_view(self.arrays[name])
                width = data.nbytes // group.heads
                rows += [data[h * width : (h + 1) * width] for h in range(group.heads)]
            self._rows.append((group, rows))

    def pieces(self, index: int) -> list[memoryview]:
        """Byte views of block `index`, in file order: one a tensor and head."""
        pieces: list[memoryview] = []
        for group, rows in self._rows:
            each = group.nbytes(self.block_size) // (len(group.names) * group.heads)
            start, stop = index * each, (index + 1) * each
            pieces += [row[start:stop] for row in rows]
        return pieces

    def put_block(self, index: int, payload: MLXPayload) -> None:
        """Copy a hot block to its place.

        A tensor at a time by numpy, which lets go of the interpreter meanwhile: copying 576 byte views of
        an 8B shape held it for half a millisecond a block, and the engine thread waits for it.
        """
        at = slice(index * self.block_size, (index + 1) * self.block_size)
        for group, source in zip(self.layout.groups, payload.arrays, strict=True):
            for name, tensor in zip(group.names, typed_view(source), strict=True):
                typed_view(self.arrays[name])[0, :, at] = tensor

    def take_arrays(self) -> dict[str, mx.array]:
        """The arrays in compute type, by layout name. The landing must not be written to afterwards."""
        self._rows = []
        taken: dict[str, mx.array] = {}
        for group in self.layout.groups:
            for name in group.names:
                array = self.arrays.pop(name)
                taken[name] = array.view(mx.bfloat16) if group.dtype == "BF16" else array
        return taken
