"""How the bytes of payloads get between MLX's arrays and files: in place, or through a host buffer.

On a CPU and on Metal, Python's view of an array is the array: files are read into it and written from
it (`DirectTransport`).

On CUDA an array that Python has looked at moves to managed memory for good, and its pages then follow
whoever touches them: a payload that a writer has read costs forty times more at the next hit, and one
read from disk is fetched page by page at its first use. So there payloads stay on the device, and
their bytes pass through one buffer a thread (`StagedTransport`). It is managed memory too, advised to
stay with the host and be mapped by the device: both sides reach it at full speed, no page ever moves.

Figures (H100, a model of 8B shape, 16,384 tokens, blocks of 64, page cache warm, tools/bench/gpu.py).
Files to the first token, GB/s, by I/O threads; and a hot hit on blocks whose files have been written:

    threads                1      4      8     16     hot hit
    views of the arrays    1.3    2.5    2.9    3.3    281 ms
    staged                 4.3   11.5   18.8   21.3      9.5 ms (8.3 on blocks never written)
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, cast

import mlx.core as mx
import numpy as np

from ...kv.files.block_file import READ_BYTES
from ...kv.layout import KVLayout
from ..mlx_adapter import attention_backend, blank_arrays, storage_dtype

log = logging.getLogger(__name__)

Load = Callable[[list[memoryview]], bool]
"""Fills byte views, in file order. False: what they hold is not usable."""

STAGED_READ_BYTES = 16 << 20
"""As `block_file.READ_BYTES`, into a staging buffer: a whole block of most models. Each read and each digest
lets go of Python's lock, and to get it again takes longer than what the processor's cache saves."""

_SPARE = 16
"""Words beyond what is used: an assignment to a whole array would replace it instead of filling it."""


def byte_view(array: mx.array) -> memoryview:
    """A writable byte view of an evaluated array. MLX's stubs don't say that it has the buffer protocol."""
    return memoryview(cast(Any, array)).cast("B")


def typed_view(array: mx.array) -> np.ndarray[Any, Any]:
    """A writable numpy view of an evaluated array in storage type."""
    return np.asarray(memoryview(cast(Any, array)))


class DirectTransport:
    """Views of the arrays themselves; they keep them alive and stay good as long as they are held.

    Arrays are payloads': one a group of a layout, in storage type, evaluated. Any thread.
    """

    direct = True
    """I/O threads may write into the very arrays that the model will use."""
    read_bytes = READ_BYTES
    """Bytes that are best read at a time."""

    def views(self, arrays: Sequence[mx.array]) -> list[memoryview]:
        """Byte views of `arrays`, in file order; good until this thread's next call."""
        return [byte_view(array) for array in arrays]

    def read_arrays(self, layout: KVLayout, block_size: int, load: Load) -> tuple[mx.array, ...] | None:
        """New arrays that `load` has filled; None if it says False."""
        arrays = tuple(blank_arrays([(g.shape(block_size), g.dtype) for g in layout.groups]))
        return arrays if load(self.views(arrays)) else None


class StagedTransport:
    """As `DirectTransport`, through a buffer of each thread's own, as large as the largest payload moved."""

    direct = False
    read_bytes = STAGED_READ_BYTES

    def __init__(self) -> None:
        self._local = threading.local()

    def views(self, arrays: Sequence[mx.array]) -> list[memoryview]:
        sizes = [array.nbytes for array in arrays]
        if not arrays:
            return []
        buffer = self._buffer(sizes)
        words = [array.reshape(-1).view(buffer.word) for array in arrays]
        buffer.fill(mx.concatenate(words) if len(words) > 1 else words[0])
        return buffer.views(sizes)

    def read_arrays(self, layout: KVLayout, block_size: int, load: Load) -> tuple[mx.array, ...] | None:
        sizes = [group.nbytes(block_size) for group in layout.groups]
        if not sizes:
            return () if load([]) else None
        buffer = self._buffer(sizes)
        if not load(buffer.views(sizes)):
            return None
        arrays = [
            words.view(storage_dtype(group.dtype)).reshape(group.shape(block_size))
            for group, words in zip(layout.groups, buffer.copies(sizes), strict=True)
        ]
        mx.eval(arrays)
        return tuple(arrays)

    def _buffer(self, sizes: Sequence[int]) -> _Buffer:
        word = mx.uint32 if all(size % 4 == 0 for size in sizes) else mx.uint8
        held: _Buffer | None = getattr(self._local, "buffer", None)
        if held is None or held.word != word or held.nbytes < sum(sizes):
            self._local.buffer = None
            self._local.buffer = held = _Buffer(word, sum(sizes))
        return held


class _Buffer:
    """`nbytes` of staging in words of type `word`. One thread."""

    def __init__(self, word: mx.Dtype, nbytes: int):
        self.word, self.nbytes = word, nbytes
        self._words = mx.zeros((nbytes // word.size + _SPARE,), dtype=word, stream=mx.cpu)
        mx.eval(self._words)
        _place(byte_view(self._words))

    def fill(self, words: mx.array) -> None:
        buffer = self._words
        self._words = cast(Any, None)  # `buffer` is the only reference: it is filled in place
        buffer[: words.size] = words
        mx.eval(buffer)
        self._words = buffer

    def views(self, sizes: Sequence[int]) -> list[memoryview]:
        words = byte_view(self._words)
        views: list[memoryview] = []
        at = 0
        for size in sizes:
            views.append(words[at : at + size])
            at += size
        return views

    def copies(self, sizes: Sequence[int]) -> list[mx.array]:
        """New arrays of words, lazy: evaluate them before the buffer is used again."""
        arrays: list[mx.array] = []
        at = 0
        for size in sizes:
            words = size // self.word.size
            arrays.append(self._words[at : at + words] + mx.array(0, self.word))
            at += words
        return arrays


@cache
def _place_warning(reason: str) -> None:
    log.warning("staging: memory can't be placed (%s): restoring and storing are slower", reason)


def _place(view: memoryview) -> None:
    """Without it staging is right, but slow."""
    if reason := attention_backend().keep_on_host(view):
        _place_warning(reason)


Transport = DirectTransport | StagedTransport
_chosen: Transport | None = None


def transport() -> Transport:
    """The one for MLX's default device."""
    global _chosen
    if _chosen is None:
        _chosen = DirectTransport() if attention_backend().views_in_place else StagedTransport()
    return _chosen
