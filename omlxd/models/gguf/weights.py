"""ggml's quantised blocks as MLX's affine ones: `weight = scale * q + bias` for each group of 32 along a row.

| ggml         | MLX bits | exact                                                    |
|--------------|----------|----------------------------------------------------------|
| Q4_0, Q4_1   | 4        | yes                                                      |
| Q5_0, Q5_1   | 5        | yes                                                      |
| Q8_0         | 8        | yes                                                      |
| Q4_K, Q5_K   | 4, 5     | but for the product of two scales, rounded to 16 bits    |
| Q6_K         | 8        | no: its groups of 16 are quantised again in groups of 32 |

Block layouts: ggml-quants.c of https://github.com/ggml-org/ggml.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

GROUP = 32
"""Values that share a scale and a bias."""
BITS = {"Q4_0": 4, "Q4_1": 4, "Q5_0": 5, "Q5_1": 5, "Q8_0": 8, "Q4_K": 4, "Q5_K": 5, "Q6_K": 8}
"""MLX's bits for a ggml type; a type that is missing here is not quantised."""


class Affine(NamedTuple):
    """Affine groups. q: uint8 (groups, GROUP). scale, bias: float32 (groups, 1)."""

    q: np.ndarray
    scale: np.ndarray
    bias: np.ndarray

    def values(self) -> np.ndarray:
        """Return the values, float32 (groups, GROUP)."""
        return self.scale * self.q + self.bias


def unpack(kind: str, raw: np.ndarray) -> Affine:
    """Unpack the groups of `raw`, uint8 (blocks, bytes of a block) of ggml type `kind`, a key of BITS."""
    return _UNPACK[kind](raw)


def pack(q: np.ndarray, bits: int) -> np.ndarray:
    """Pack uint8 (rows, columns) into uint32 (rows, columns * bits / 32), lowest bits first."""
    rows, columns = q.shape
    if bits == 8:
        return q.view("<u4")
    if bits == 4:
        return (q[:, 0::2] | q[:, 1::2] << 4).view("<u4")
    streamed = np.unpackbits(q[:, :, None], axis=2, count=bits, bitorder="little")
    return np.packbits(streamed.reshape(rows, columns * bits), axis=1, bitorder="little").view("<u4")


def quantise(values: np.ndarray, bits: int) -> Affine:
    """Return the nearest affine groups of float32 (groups, GROUP)."""
    low = values.min(axis=1, keepdims=True)
    scale = (values.max(axis=1, keepdims=True) - low) / np.float32(2**bits - 1)
    scale = scale.astype(np.float16).astype(np.float32)
    low = low.astype(np.float16).astype(np.float32)
    steps = np.divide(values - low, scale, out=np.zeros_like(values), where=scale != 0)
    return Affine(np.rint(steps).clip(0, 2**bits - 1).astype(np.uint8), scale, low)


def _half(raw: np.ndarray, at: int) -> np.ndarray:
    return raw[:, at : at + 2].copy().view("<f2").astype(np.float32)


def _nibbles(raw: np.ndarray) -> np.ndarray:
    """Return the low halves, then the high halves."""
    return np.concatenate([raw & 15, raw >> 4], axis=1)


def _fifth_bits(raw: np.ndarray) -> np.ndarray:
    return np.unpackbits(np.ascontiguousarray(raw), axis=1, bitorder="little") << 4


def _q4_0(raw: np.ndarray) -> Affine:
    d = _half(raw, 0)
    return Affine(_nibbles(raw[:, 2:]), d, -8 * d)


def _q4_1(raw: np.ndarray) -> Affine:
    return Affine(_nibbles(raw[:, 4:]), _half(raw, 0), _half(raw, 2))


def _q5_0(raw: np.ndarray) -> Affine:
    d = _half(raw, 0)
    return Affine(_nibbles(raw[:, 6:]) | _fifth_bits(raw[:, 2:6]), d, -16 * d)


def _q5_1(raw: np.ndarray) -> Affine:
    return Affine(_nibbles(raw[:, 8:]) | _fifth_bits(raw[:, 4:8]), _half(raw, 0), _half(raw, 2))


def _q8_0(raw: np.ndarray) -> Affine:
    d = _half(raw, 0)
    return Affine(raw[:, 2:] ^ np.uint8(128), d, -128 * d)  # Two's complement plus 128.


def _k_scales(raw: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return scale and bias, float32 (blocks * 8, 1), of Q4_K and Q5_K: 6 bits each, packed in 12 bytes."""
    d, least, packed = _half(raw, 0), _half(raw, 2), raw[:, 4:16]
    low, middle, high = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = np.concatenate([low & 63, high & 15 | low >> 6 << 4], axis=1)
    mins = np.concatenate([middle & 63, high >> 4 | middle >> 6 << 4], axis=1)
    return (d * scales).reshape(-1, 1), (-least * mins).reshape(-1, 1)


def _k_nibbles(raw: np.ndarray) -> np.ndarray:
    """Return uint8 (blocks, 8, 32) of 128 bytes: each 32 bytes hold one group low and the next one high."""
    quarters = raw.reshape(-1, 4, 1, 32)
    return np.concatenate([quarters & 15, quarters >> 4], axis=2).reshape(-1, 8, 32)


def _q4_k(raw: np.ndarray) -> Affine:
    return Affine(_k_nibbles(raw[:, 16:]).reshape(-1, GROUP), *_k_scales(raw))


def _q5_k(raw: np.ndarray) -> Affine:
    fifth = raw[:, 16:48].reshape(-1, 1, 32) >> np.arange(8, dtype=np.uint8).reshape(1, 8, 1) & 1
    return Affine((_k_nibbles(raw[:, 48:]) | fifth << 4).reshape(-1, GROUP), *_k_scales(raw))


def _q6_k(raw: np.ndarray) -> Affine:
    low = raw[:, :128].reshape(-1, 2, 2, 32)
    high = raw[:, 128:192].reshape(-1, 2, 1, 32)
    nibbles = np.concatenate([low & 15, low >> 4], axis=2)
    pairs = high >> np.array([0, 2, 4, 6], np.uint8).reshape(1, 1, 4, 1) & 3
    q = (nibbles | pairs << 4).reshape(-1, 16, 16).astype(np.float32) - 32
    scales = raw[:, 192:208].copy().view(np.int8).astype(np.float32) * _half(raw, 208)
    return quantise((q * scales[:, :, None]).reshape(-1, GROUP), BITS["Q6_K"])


_UNPACK = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}
