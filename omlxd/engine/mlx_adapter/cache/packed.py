"""Per-token KV in 8 or 4 bits, of one sequence (segments.py) and of a batch (batch.py).

mlx-lm's `QuantizedKVCache` is for one sequence; nothing of its kind can be batched (0.32.2). These
keep the same numbers (`mx.quantize`, a group of neighbours in a head at a time, so a token's bytes
depend on that token alone: not on its chunk, nor on its batch) and give attention what suits it:

| tokens in a pass | attention gets               | why                                               |
|------------------|------------------------------|---------------------------------------------------|
| 1                | packed parts and `bits`      | mlx-lm's quantised attention reads fewest bytes   |
| more             | the same numbers, unpacked   | quantised attention would build a matrix of chunk |
|                  |                              | by context a head; the fused kernel builds none   |

A backend may have a kernel that reads the packed parts, so that nothing is unpacked, and no padding is read.

`bits` is how mlx-lm's attention tells a quantised cache; so it is there only after a pass of one token.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import mlx.core as mx

from ..runtime.device import backend
from .growth import put_tokens, round_up

PARTS = ("weight", "scales", "biases")
"""Tensors of one quantised K or V: u32 of (1, heads, tokens, dim * bits / 32), and two in the compute
type of (1, heads, tokens, dim / group)."""

Parts = list[mx.array]


def parts_of(held: Any) -> list[mx.array]:
    """The arrays of keys or of values: one, or three where they are packed."""
    return held if isinstance(held, list) else [held]


@dataclass(slots=True, frozen=True)
class Quantisation:
    """`bits` of a number: 8 or 4. `group`: neighbours that share a scale and a bias: 32, 64 or 128."""

    bits: int
    group: int = 64

    def pack(self, array: mx.array) -> Parts:
        return list(cast(Any, mx.quantize(array, group_size=self.group, bits=self.bits)))

    def unpack(self, parts: Sequence[mx.array]) -> mx.array:
        """On a CPU by its bytes: 2,048 tokens of 3 heads of 64 take 0.17 ms in 8 bits and 0.33 in 4, by MLX's
        own function 0.44 and 0.52, on two CPUs beside other work. The bits are the same."""
        words, scales, biases = parts
        if backend() != "cpu" or scales.dtype != mx.float32:
            return mx.dequantize(*parts, group_size=self.group, bits=self.bits)
        numbers = words.view(mx.uint8)
        if self.bits == 4:
            numbers = mx.stack([numbers & 15, numbers >> 4], axis=-1)
        numbers = numbers.reshape(*scales.shape, self.group).astype(mx.float32)
        return (numbers * scales[..., None] + biases[..., None]).reshape(*scales.shape[:-1], -1)


def is_packed(cache: Any) -> bool:
    """Whether a cache keeps packed KV."""
    return getattr(cache, "how", None) is not None


class MaybePacked:
    """What caches of one sequence and of a batch have in common: how they keep packed KV, and give it out.

    how  keys and values are lists of parts, packed so; None: they are arrays, as mlx-lm's
    """

    how: Quantisation | None = None
    keys: Any
    values: Any
    step: Any
    _given_out: tuple[Any, Any] = None, None  # Weak references: one that holds would have arrays copied.

    @property
    def _packing(self) -> Quantisation:
        assert self.how is not None
        return self.how

    def _read(self, length: int, tokens: int) -> tuple[Any, Any]:
        """K and V of the first `length` columns, for a pass of `tokens` tokens."""
        keys, values = ([part[..., :length, :] for part in parts] for parts in (self.keys, self.values))
        if tokens == 1:
            self.bits, self.group_size = self._packing.bits, self._packing.group
            self._given_out = weakref.ref(keys[0]), weakref.ref(values[0])
            return keys, values
        self.__dict__.pop("bits", None)
        plain = self._packing.unpack(keys), self._packing.unpack(values)
        self._given_out = weakref.ref(plain[0]), weakref.ref(plain[1])
        return plain

    def _read_again(self, length: int) -> tuple[Any, Any]:
        """K and V of the first `length` columns, as the last pass got them."""
        return self._read(length, 1 if hasattr(self, "bits") else 2)

    def places(self) -> tuple[list[int], list[int], bool]:
        """First column of each row, its end, and whether each column is every row's."""
        raise NotImplementedError

    def gave(self, *arrays: Any) -> bool:
        """Whether these are what `_read` gave last: a model may derive others from them."""
        return all(
            given is not None and given() is (array[0] if isinstance(array, list) else array)
            for given, array in zip(self._given_out, arrays, strict=True)
        )

    def _write(self, keys: mx.array, values: mx.array, start: int, ends: Sequence[int] | None = None) -> None:
        """Pack K and V into columns from `start` on, behind all; or row r's from `ends[r]` on."""
        packed = self._packing.pack(keys), self._packing.pack(values)
        stop = start + keys.shape[2]
        if self.keys is None or stop > self.keys[0].shape[2]:
            room = round_up(keys.shape[2], self.step)
            old = (self.keys, self.values) if self.keys is not None else (None, None)
            self.keys, self.values = (
                [_grown(part, like, start, room) for part, like in zip(parts or [None] * 3, new, strict=True)]
                for parts, new in zip(old, packed, strict=True)
            )
        for parts, new in zip((self.keys, self.values), packed, strict=True):
            for index, (part, fresh) in enumerate(zip(parts, new, strict=True)):
                if ends is not None:
                    parts[index] = put_tokens(part, fresh, ends)
                else:
                    part[..., start:stop, :] = fresh

    @property
    def nbytes(self) -> int:
        held = (self.keys, self.values) if self.keys is not None else ()
        return sum(part.nbytes for parts in held for part in parts_of(parts))


def _grown(part: mx.array | None, like: mx.array, length: int, room: int) -> mx.array:
    """The first `length` columns of `part`, and `room` more."""
    more = mx.zeros((*like.shape[:2], room, like.shape[3]), like.dtype)
    return more if part is None else mx.concatenate([part[..., :length, :], more], axis=2)
