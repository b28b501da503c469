"""Arrays that reads fill, and freed arrays that are given back to the system.

MLX has no uninitialised arrays: `mx.empty` of 0.32.4 is `mx.zeros`, which writes every byte on one thread.
But `mx.load` of a file-like object allocates arrays and asks the object to fill them; `_Unwritten` fills in
nothing. 490 MB for a prefix of 3,328 tokens of an 8B shape, huge pages, one virtual CPU: zeros 32 to 37 ms,
these 15 ms; reading the prefix's files into either, 44 ms. The bytes may be anything, another request's KV
or a NaN: write all that is ever read of such an array.

`mx.clear_cache` and `mx.set_cache_limit` of 0.32.4 wait for every CPU stream and hold Python's lock
meanwhile; a stream that reads by a Python object, as those above do, waits for that lock: a deadlock, in
which nothing of Python ever runs again. So the library's own functions are called by ctypes, which releases
the lock. The wheels for Linux and macOS export them; another build gives nothing back. (24 other calls of MLX
were tried beside such reads, 4 s each: none hung.)
"""

from __future__ import annotations

import ctypes
import gc
import json
import logging
import math
import threading
from collections.abc import Callable, Sequence
from typing import Any, BinaryIO, cast

import mlx.core as mx
import mlx.nn as nn

from ....kv.layout import ITEM_BYTES
from ....wire import Budget
from .device import backend

_STORED_AS = {"BF16": "U16"}


def blank_arrays(shapes: Sequence[tuple[tuple[int, ...], str]]) -> list[mx.array]:
    """Allocated arrays of (shape, safetensors dtype), in storage type. CPU and Metal. Any thread."""
    entries: dict[str, object] = {}
    end = 0
    for index, (shape, dtype) in enumerate(shapes):
        start, end = end, end + math.prod(shape) * ITEM_BYTES[dtype]
        stored = _STORED_AS.get(dtype, dtype)
        entries[str(index)] = {"dtype": stored, "shape": list(shape), "data_offsets": [start, end]}
    file = cast(BinaryIO, _Unwritten(json.dumps(entries).encode(), end))
    loaded = mx.load(file, format="safetensors", stream=mx.cpu)
    assert isinstance(loaded, dict)
    arrays = [loaded[str(index)] for index in range(len(shapes))]
    mx.eval(arrays)
    return arrays


def rows_at(array: mx.array, rows: Sequence[int]) -> mx.array:
    """`array[rows]`. MLX compiles a kernel for that on CUDA, 3.4 s on an H100's host, and none for slices."""
    return mx.concatenate([array[row : row + 1] for row in rows])


CLOSE = 0.05
"""A check fails from this `distance` on. bfloat16's rounding is 0.01; rows that read others' tokens, or one
token less, are at 0.3 and more."""


def distance(got: mx.array, want: mx.array) -> float:
    """Root of the mean square of their difference, as a share of that of `want`."""
    got, want = got.astype(mx.float32), want.astype(mx.float32)
    return cast(float, mx.sqrt(mx.square(got - want).mean() / mx.square(want).mean()).item())


class _Unwritten:
    """A safetensors file whose header can be read and whose data reads leave buffers as they are."""

    closed = False

    def __init__(self, header: bytes, data_bytes: int):
        self._head = len(header).to_bytes(8, "little") + header
        self._size = len(self._head) + data_bytes
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def writable(self) -> bool:
        return False

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = (0, self._at, self._size)[whence] + offset
        return self._at

    def readinto(self, buffer: memoryview) -> int:
        part = self._head[self._at : self._at + len(buffer)]
        buffer[: len(part)] = part
        self._at += len(buffer)
        return len(buffer)


log = logging.getLogger(__name__)

CLEAR, CACHE_LIMIT = "_ZN3mlx4core11clear_cacheEv", "_ZN3mlx4core15set_cache_limitEm"
"""`void mlx::core::clear_cache()` and `size_t mlx::core::set_cache_limit(size_t)`, by their C++ names."""

_library = ctypes.CDLL(mx.__file__)
_clear: Any = getattr(_library, CLEAR, None)
_limit_cache: Any = getattr(_library, CACHE_LIMIT, None)
if _clear is None or _limit_cache is None:
    log.warning("this build of MLX has no %s: memory that it keeps is not given back", CLEAR)
    _clear, _limit_cache = None, mx.set_cache_limit
else:
    _clear.argtypes, _clear.restype = (), None
    _limit_cache.argtypes, _limit_cache.restype = (ctypes.c_size_t,), ctypes.c_size_t


MOST = 2 << 30
FIXED, PART = 128 << 20, 4
"""A pass takes bytes that grow with the weights: keep so many, and a part of the weights."""
WIRED_FIXED, WIRED_FACTOR = 512 << 20, 1.05
"""Bytes that are wired for a pass, beside so many times the weights."""
RELEASE_S = 2.0
"""Seconds that a process that ends may take to give its memory back."""


limits: dict[str, float] = {}
"""Bytes, by the names of engine/server/metrics.py; wired 0: not on Metal."""
_DEFAULT_LIMIT = mx.get_memory_limit()
_released = threading.Event()


def set_limits(weights: int, budget: Budget) -> None:
    """Have MLX keep to `budget`, for a model of `weights` bytes.

    cache   of freed arrays: no more than the model has use for, nor than `budget.freed`
    memory  above `budget.most` MLX waits for passes under way before it begins others
    wired   Metal alone: arrays that macOS may not page out, or a large model decodes slowly. The weights
            and what a pass needs, as far as Metal recommends it: arrays are wired as they come, and idle
            blocks in RAM must be able to give way. Never run on a Mac.
    """
    if _released.is_set():
        return
    cache = min(MOST, FIXED + weights // PART)
    cache = cache if budget.freed is None else min(cache, budget.freed)
    memory = _DEFAULT_LIMIT if budget.most is None else max(0, budget.most)
    wired = 0
    _limit_cache(cache)
    mx.set_memory_limit(memory)
    if backend() == "metal":
        most = int(mx.device_info()["max_recommended_working_set_size"])
        wired = min(most, int(weights * WIRED_FACTOR) + WIRED_FIXED)
        mx.set_wired_limit(wired)
    for name, nbytes in (("cache", cache), ("memory", memory), ("wired", wired)):
        limits[f"mlx_{name}_limit_bytes"] = float(nbytes)
    if mx.get_cache_memory() > cache:
        give_memory_back()


def give_memory_back() -> None:
    """Free what MLX keeps for arrays to come. Waits for what the CPU computes. Any thread."""
    if _clear is not None:
        _clear()


def release_memory(idle: bool = False) -> None:
    """Unwire and free MLX's memory, since this process ends: macOS may lose what is wired otherwise.

    Any thread; raises nothing. After a GPU fault, or beside a pass, calls may fail or hang: it returns after
    `RELEASE_S` at the latest.

    idle  this thread is the one that computed: wait for its work, and drop the models, too
    """
    _released.set()
    if idle:
        _try(mx.synchronize)
        _try(_drop_models)
    if backend() == "metal":  # Elsewhere nothing is wired.
        last = threading.Thread(target=_unwire, name="release", daemon=True)
        last.start()
        last.join(RELEASE_S)


def _unwire() -> None:
    _try(lambda: mx.set_wired_limit(0))
    limits["mlx_wired_limit_bytes"] = 0.0
    _try(give_memory_back)


def _drop_models() -> None:
    """Empty all modules: nobody knows who else holds one."""
    gc.unfreeze()
    for each in gc.get_objects():
        if issubclass(type(each), nn.Module):
            each.clear()


def _try(step: Callable[[], object]) -> None:
    try:
        step()
    except Exception as error:
        log.debug("memory is not given back: %s", error)


_steps_to_copy = 0
"""Calls of `give_outgrown_back` until those who outgrew their arrays have been copied. Engine thread."""


def note_outgrown() -> None:
    """Arrays of KV are copied into larger ones by what is built now."""
    global _steps_to_copy
    _steps_to_copy = 2


def give_outgrown_back() -> None:
    """Call it after each decode step: what KV has outgrown is freed once it has been copied.

    MLX would keep it for arrays to come, of a size that does not come again: behind 6,000 tokens of the demo
    model 37 MB. The step that copies is read by the next one, so it takes two.
    """
    global _steps_to_copy
    if _steps_to_copy:
        _steps_to_copy -= 1
        if not _steps_to_copy:
            give_memory_back()
