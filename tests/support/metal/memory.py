"""Buffers between pages that nobody may touch."""

from __future__ import annotations

import ctypes
import mmap

import numpy as np

LIBC = ctypes.CDLL(None)
PAGE = mmap.PAGESIZE
NONE, READ, WRITE = 0, 1, 2


class Fenced:
    """A copy of `array`, at the fence behind it or at the one before it.

    name         for messages
    off          bytes beyond an address of 16
    fill         what the bytes between it and its fences are
    is_writable  whether the kernel may write; else a write is a fault
    """

    def __init__(
        self, name: str, array: np.ndarray, *, off: int, fill: int, at_start: bool, is_writable: bool
    ):
        self.name, self.is_writable, self._fill = name, is_writable, fill
        size = array.nbytes
        room = -(-max(1, size + off) // PAGE) * PAGE
        self._pages = mmap.mmap(-1, room + 2 * PAGE)
        self.start = ctypes.addressof(ctypes.c_char.from_buffer(self._pages))
        self.end = self.start + room + 2 * PAGE
        self._inside = np.frombuffer(self._pages, np.uint8, room, PAGE)
        self._inside[...] = fill
        # MLX gives a kernel a slice where it lies: loads of 16 bytes need an address of 16 there, too. Up to
        # 15 bytes are left between the array and its fence.
        before = off if at_start else (room - size - off) // 16 * 16 + off
        self._before, self._size = before, size
        self.array = self._inside[before : before + size].view(array.dtype).reshape(array.shape)
        self.array[...] = array
        self.address = self.start + PAGE + before
        protected = READ | WRITE if is_writable else READ
        for at, length, how in ((0, PAGE, NONE), (PAGE, room, protected), (PAGE + room, PAGE, NONE)):
            if LIBC.mprotect(ctypes.c_void_p(self.start + at), ctypes.c_size_t(length), how):
                raise OSError("mprotect")

    def is_clean(self) -> bool:
        """Whether nothing was written between it and its fences."""
        around = self._inside[: self._before], self._inside[self._before + self._size :]
        return all(bool((part == self._fill).all()) for part in around)

    def element(self, address: int) -> str | None:
        """Return the name of the element at `address`, if it is here."""
        byte = address - self.address
        return f"{self.name}[{byte // self.array.itemsize}]" if 0 <= byte < self._size else None

    def told(self, address: int) -> str | None:
        """Return what an access to `address` did, if it is here."""
        if not self.start <= address < self.end:
            return None
        byte = address - self.address
        if 0 <= byte < self._size:
            return f"it writes into its input {self.name}, at element {byte // self.array.itemsize}"
        where = f"before the start of {self.name}" if byte < 0 else f"past the end of {self.name}"
        return f"it reads or writes {where}, at element {byte // self.array.itemsize} of {self.array.size}"
