"""Per-token KV in 8 or 4 bits: caches of one sequence, and of a batch whose rows keep no arrays of their own
(rows.py).

mlx-lm's `QuantizedKVCache` is for one sequence; nothing of its kind can be batched (0.32.2). These two
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
from mlx_lm.models.cache import create_attention_mask

from ..runtime.device import backend
from .batch import EvenBatchKVCache, GrowingStep, put_tokens, round_up

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


class PackedKV:
    """What both caches have in common: parts, and how attention reads them."""

    how: Quantisation
    keys: Any
    values: Any
    step: Any
    _given_out: tuple[Any, Any] = None, None  # Weak references: one that holds would have arrays copied.

    def _read(self, length: int, tokens: int) -> tuple[Any, Any]:
        """K and V of the first `length` columns, for a pass of `tokens` tokens."""
        keys, values = ([part[..., :length, :] for part in parts] for parts in (self.keys, self.values))
        if tokens == 1:
            self.bits, self.group_size = self.how.bits, self.how.group
            self._given_out = weakref.ref(keys[0]), weakref.ref(values[0])
            return keys, values
        self.__dict__.pop("bits", None)
        plain = self.how.unpack(keys), self.how.unpack(values)
        self._given_out = weakref.ref(plain[0]), weakref.ref(plain[1])
        return plain

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
        packed = self.how.pack(keys), self.how.pack(values)
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
        return sum(part.nbytes for parts in (self.keys, self.values) for part in parts or ())


def _grown(part: mx.array | None, like: mx.array, length: int, room: int) -> mx.array:
    """The first `length` columns of `part`, and `room` more."""
    more = mx.zeros((*like.shape[:2], room, like.shape[3]), like.dtype)
    return more if part is None else mx.concatenate([part[..., :length, :], more], axis=2)


class QuantisedKVCache(PackedKV):
    """Of one sequence, as `KVCache`."""

    step = GrowingStep()

    def __init__(self, how: Quantisation):
        self.how = how
        self.keys: Any = None
        self.values: Any = None
        self.offset = 0

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
        self._write(keys, values, self.offset)
        self.offset += keys.shape[2]
        return self._read(self.offset, keys.shape[2])

    def keys_and_values(self) -> tuple[Any, Any]:
        """As the last pass got them."""
        return self._read(self.offset, 1 if hasattr(self, "bits") else 2)

    def places(self) -> tuple[list[int], list[int], bool]:
        return [0], [self.offset], True

    def make_mask(self, *args: Any, **kwargs: Any) -> Any:
        return create_attention_mask(*args, offset=self.offset, **kwargs)

    @property
    def state(self) -> tuple[Any, Any, int]:
        return self.keys, self.values, self.offset

    def size(self) -> int:
        return self.offset

    def empty(self) -> bool:
        return self.keys is None

    def is_trimmable(self) -> bool:
        return True

    def trim(self, tokens: int) -> int:
        self.offset -= tokens
        return tokens


class QuantisedBatchKVCache(PackedKV, EvenBatchKVCache):
    """Of a batch, padded on the left, as `BatchKVCache`. Padding is zeros: no weight, no scale, no bias."""

    def __init__(self, how: Quantisation, left_padding: list[int]):
        EvenBatchKVCache.__init__(self, left_padding)
        self.how = how

    @classmethod
    def of(cls, cache: QuantisedKVCache) -> QuantisedBatchKVCache:
        """A batch of one, which shares the cache's arrays."""
        batch = cls(cache.how, [0])
        batch.keys, batch.values = cache.keys, cache.values
        batch._idx = cache.offset
        batch.offset = mx.array([cache.offset])
        return batch

    @classmethod
    def merge(cls, caches: Sequence[QuantisedKVCache]) -> QuantisedBatchKVCache:
        if caches[0].keys is None:
            return cls(caches[0].how, [0] * len(caches))  # All are empty.
        batch = cls.of(caches[0])
        for cache in caches[1:]:
            batch.extend(cls.of(cache))
        return batch

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
        more = keys.shape[2]
        if self.keys is None or self._idx + more > self.keys[0].shape[2]:
            self._set_step(more)
        self._write(keys, values, self._idx, self._ends)
        self._set_ends([end + more for end in self.ends])
        self.offset = self.offset + more
        return self._read(self._idx, more)

    def keys_and_values(self) -> tuple[Any, Any]:
        """As the last pass got them."""
        return self._read(self._idx, 1 if hasattr(self, "bits") else 2)

    def places(self) -> tuple[list[int], list[int], bool]:
        return self.starts, self.ends, self.is_even
