"""Weights as views of their files: pages of the page cache, which engines of one model share.

`MappedWeights.reading` has `mx.load` of a safetensors file give views, for as long as a model is loaded.
Neighbouring tensors are taken together, as a window of whole pages:

| where      | a window is                                                                               |
|------------|-------------------------------------------------------------------------------------------|
| Metal      | `mx.from_dlpack` of a numpy view of the mapping, without a copy. **Never tried**          |
| Linux, CPU | MLX 0.32.4 refuses that without a copy ("Cannot import a CPU array without a copy"), as its |
|            | arrays begin behind a word of the allocator's. So the file's pages are mapped over those  |
|            | of an array that nothing was written to; freeing the array unmaps them                    |
| CUDA       | none: a GPU reads its own memory                                                          |

A mapping lives as long as the last array made of it: DLPack's deleter holds it, or it is the array's memory.
MLX may keep that for arrays to come, up to its cache's limit; once a view has gone, what it keeps is freed.
It is private: what is written to an array reaches no file. The other way, what somebody writes into the file
is seen, and one who cuts it ends the engine by SIGBUS; `changed` tells of the first, the front of the second.
Files that are replaced by others, as downloads are, do no harm: the mapping is of the old one.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import logging
import math
import mmap
import os
import sys
import threading
import weakref
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import numpy as np

from ....common.files import safetensors_header
from ....errors import ModelError
from .arrays import blank_arrays, give_memory_back
from .device import backend

log = logging.getLogger(__name__)

LEAST_WINDOW = 33 << 20
"""Bytes. glibc gives an array of more than 32 MiB pages of its own, and takes them away with it."""
MOST_WINDOW = 1 << 30
"""Bytes: a window has fewer than 2^31 elements."""
UNMAP_AFTER_S = 0.2
"""Between the end of a view and that of its mapping."""
_PAGE = mmap.PAGESIZE
_DTYPES = {
    "F64": mx.float64,
    "F32": mx.float32,
    "F16": mx.float16,
    "BF16": mx.bfloat16,
    "I64": mx.int64,
    "I32": mx.int32,
    "I16": mx.int16,
    "I8": mx.int8,
    "U64": mx.uint64,
    "U32": mx.uint32,
    "U16": mx.uint16,
    "U8": mx.uint8,
}
_WIDE = ("F64", "F32", "I64", "I32", "I16", "I8", "U64", "U16", "U8")
"""Of a model that is made float32 these stay as they are; U32 is packed."""

_MAP_FIXED = 0x10


class Unmappable(Exception):
    """Why weights can't be views here."""


class MappedWeights:
    """Of one load. `mode`: `on`, `auto` (where it pays) or `off`; `float32`: weights are made so.

    nbytes  of the windows
    """

    def __init__(self, mode: str, float32: bool):
        self.nbytes = 0
        self._mode = mode
        self._float32 = float32
        self._files: dict[str, tuple[int, tuple[int, int]]] = {}
        self._load = mx.load

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Within it, what this thread loads by `mx.load` is mapped where it can be. Engine thread."""
        if self._mode == "off" or (self._mode == "auto" and backend() != "cpu"):
            yield
            return
        mx.load = self._loaded
        try:
            yield
        finally:
            mx.load = self._load

    def changed(self) -> str:
        """The file that was written to since it was mapped; "": none. Any thread."""
        return next((path for path, (fd, was) in self._files.items() if _facts(fd) != was), "")

    def _loaded(self, file: Any, *args: Any, **kwargs: Any) -> Any:
        loaded = self._load(file, *args, **kwargs)  # Lazy: what has a view is never read.
        if not isinstance(file, str | Path) or not str(file).endswith(".safetensors"):
            return loaded
        if not isinstance(loaded, dict):
            return loaded
        try:
            loaded.update(self._views(str(file)))
        except Unmappable as why:
            if self._mode == "on":
                log.warning("weights-mmap: %s is read, not mapped: %s", file, why)
        return loaded

    def _views(self, path: str) -> dict[str, mx.array]:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            tensors = _tensors(file, size, path)
            if self._mode == "auto" and self._float32 and any(t[1] not in _WIDE for t in tensors):
                raise Unmappable("its weights are made float32")
            if self._float32 and any(tensor[1] not in _WIDE for tensor in tensors):
                log.warning("weights-mmap: %s is mapped, and then copied: its weights are made float32", path)
            whole = size if _lays_over() else size // _PAGE * _PAGE
            windows = [w for w in _windows(tensors, whole) if w.nbytes >= LEAST_WINDOW]
            if not windows:
                raise Unmappable(
                    "its tensors are small, or at odd offsets, as `mx.save_safetensors` has them"
                )
            fd = os.dup(file.fileno())
        self._files[path] = fd, _facts(fd)  # For as long as the engine lives.
        views: dict[str, mx.array] = {}
        for window in windows:
            array = _window(fd, window.first, window.last)
            for name, dtype, shape, begin, end in window.tensors:
                part = array[begin - window.first : end - window.first]
                views[name] = part.view(_DTYPES[dtype]).reshape(shape)
            mx.eval([views[name] for name, *_ in window.tensors])
            for name, *_ in window.tensors:
                weakref.finalize(views[name], _UNMAPPER.view_gone).atexit = False
            self.nbytes += window.nbytes
        return views


class _Unmapper:
    """Frees what MLX keeps, soon after views have gone: one's memory goes to MLX behind its finalizer."""

    def __init__(self) -> None:
        self._is_due = False

    def view_gone(self) -> None:
        """Any thread; a model's hundreds of views go together."""
        if not self._is_due:
            self._is_due = True
            timer = threading.Timer(UNMAP_AFTER_S, self._unmap)
            timer.daemon = True
            timer.start()

    def _unmap(self) -> None:
        self._is_due = False
        give_memory_back()


_UNMAPPER = _Unmapper()

_Tensor = tuple[str, str, tuple[int, ...], int, int]
"""(name, dtype, shape, first byte in the file, behind its last)."""


class _Window:
    """Neighbouring tensors, and the whole pages that they lie in."""

    def __init__(self, tensors: list[_Tensor]):
        self.tensors = tensors
        self.first = tensors[0][3] // _PAGE * _PAGE
        self.last = -(-tensors[-1][4] // _PAGE) * _PAGE

    @property
    def nbytes(self) -> int:
        return self.last - self.first


def _tensors(file: Any, size: int, path: str) -> list[_Tensor]:
    """Those of a safetensors file, by place. Raises ModelError where it is cut off or makes no sense."""
    header = safetensors_header(file, size)
    if header is None:
        raise ModelError(f"{path} is no safetensors file, or it is cut off; download it again")
    start = 8 + len(header)
    tensors: list[_Tensor] = []
    try:
        for name, entry in json.loads(header).items():
            if name == "__metadata__":
                continue
            first, last = (start + int(offset) for offset in entry["data_offsets"])
            shape = tuple(int(length) for length in entry["shape"])
            tensors.append((name, str(entry["dtype"]), shape, first, last))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{path} has a header that makes no sense: {error}") from error
    missing = max((tensor[4] for tensor in tensors), default=start) - size
    if missing > 0:
        raise ModelError(f"{path} is cut off: {missing} bytes are missing; download it again")
    return sorted(tensors, key=lambda tensor: tensor[3])


def _windows(tensors: list[_Tensor], whole: int) -> list[_Window]:
    """Each of neighbours that can be views, up to `MOST_WINDOW` bytes, in the file's first `whole` bytes."""
    windows: list[_Window] = []
    for fits, run in groupby(tensors, lambda tensor: tensor[4] <= whole and _can_be_view(tensor)):
        if not fits:
            continue
        group: list[_Tensor] = []
        for tensor in run:
            if group and tensor[4] - group[0][3] > MOST_WINDOW - 2 * _PAGE:
                windows.append(_Window(group))
                group = []
            group.append(tensor)
        windows.append(_Window(group))
    return windows


def _can_be_view(tensor: _Tensor) -> bool:
    """Its dtype is one of MLX's, its bytes are as many as they should be and aligned: else it is copied."""
    _, dtype, shape, first, last = tensor
    if dtype not in _DTYPES or not shape or last <= first or last - first > MOST_WINDOW - 2 * _PAGE:
        return False
    size = _DTYPES[dtype].size
    return first % size == 0 and last - first == math.prod(shape) * size


def _lays_over() -> bool:
    return backend() == "cpu" and sys.platform == "linux"


def _window(fd: int, first: int, last: int) -> mx.array:
    """Bytes `first` to `last` of a file, whole pages, without a copy: (bytes,) uint8. Raises Unmappable."""
    array = _laid_over(fd, first, last) if _lays_over() else _by_dlpack(fd, first, last)
    if bytes(memoryview(cast(Any, array[:64]))) != os.pread(fd, 64, first):
        raise Unmappable("a view holds other bytes than its file")
    return array


def _by_dlpack(fd: int, first: int, last: int) -> mx.array:
    mapping = mmap.mmap(fd, last - first, access=mmap.ACCESS_COPY, offset=first)
    try:
        return mx.from_dlpack(np.frombuffer(mapping, np.uint8), copy=False)
    except (ValueError, RuntimeError, BufferError) as error:
        raise Unmappable(str(error)) from error


def _laid_over(fd: int, first: int, last: int) -> mx.array:
    """An array of which all but the ends is the file's pages, and the part of it that is."""
    nbytes = last - first
    (array,) = blank_arrays([((nbytes + _PAGE,), "U8")])
    address = np.asarray(memoryview(cast(Any, array))).ctypes.data
    skipped = -address % _PAGE
    _map_over(address + skipped, nbytes, fd, first)
    return array[skipped : skipped + nbytes]


def _map_over(address: int, nbytes: int, fd: int, offset: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_int64]
    access, flags = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | _MAP_FIXED
    if libc.mmap(address, nbytes, access, flags, fd, offset) != address:
        raise Unmappable(os.strerror(ctypes.get_errno()))


def _facts(fd: int) -> tuple[int, int]:
    facts = os.fstat(fd)
    return facts.st_size, facts.st_mtime_ns
