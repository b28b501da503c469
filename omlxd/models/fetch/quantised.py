"""Estimates how large a model is in other bits, and what a token reads of it, by its config alone."""

from __future__ import annotations

from typing import Any

import msgspec

from ..footprint import FLOAT32_FRACTION, Footprint, element_of, expected, footprint_of

GROUP = 64
"""Weights that share a scale and a bias of 16 bits each, as mlx-lm quantises."""
_SCALES = {"mxfp4": (8, 32), "mxfp8": (8, 32), "nvfp4": (8, 16)}
"""Mode of quantisation → bits of a group's scale, and weights in a group."""
_METHODS = {"fp8": 8, "mxfp4": 4}
"""Other programs' `quant_method` → bits, where they name none."""


def bits_of(config: dict[str, Any]) -> int:
    """Return the bits of most weights, as their config says."""
    own = _own(config)
    bits = own.get("bits") or _METHODS.get(str(own.get("quant_method")))
    return bits if isinstance(bits, int) and 1 <= bits <= 32 else 8 * element_of(config)


def parameters_of(config: dict[str, Any], weights: int) -> int:
    """Estimate how many parameters `weights` bytes are."""
    own, bits = _own(config), bits_of(config)
    if bits >= 16:
        return weights * 8 // bits
    mode, group = str(own.get("mode") or own.get("quant_method")), own.get("group_size")
    scale, size = _SCALES.get(mode, (32, group if isinstance(group, int) and group > 0 else GROUP))
    return int(weights * 8 / (bits + scale / size))


def _own(config: dict[str, Any]) -> dict[str, Any]:
    own = config.get("quantization") or config.get("quantization_config")
    return own if isinstance(own, dict) else {}


def weights_in(parameters: int, bits: int) -> int:
    """Return the bytes of `parameters` in so many bits, with the scales that mlx-lm adds below 16."""
    return int(parameters * (bits if bits >= 16 else bits + 32 / GROUP) / 8)


class Load(msgspec.Struct, frozen=True):
    """A model as this machine loads it. `read`: bytes of weights that one token reads."""

    prints: Footprint
    read: int


def load_of(config: dict[str, Any], weights: int, parameters: int, backend: str, float32_in: int) -> Load:
    """Return how `weights` bytes are loaded: on a CPU as float32, but for quantised experts, where that takes
    at most its part of the free memory and of `float32_in` bytes.
    """
    prints = footprint_of(config, weights, element_of(config))
    byte = weights / max(1, parameters)
    experts = min(prints.experts, parameters)
    if backend == "cpu":
        kept = experts * byte if byte < 2 else 4 * experts
        large = footprint_of(config, int(4 * (parameters - experts) + kept), 4)
        fits = large.loading(backend) <= float32_in * FLOAT32_FRACTION
        if fits and expected(prints, large, backend) is large:
            idle = (1 - prints.chosen) * kept + 4 * prints.table
            return Load(large, max(0, large.weights - int(idle)))
    idle = byte * ((1 - prints.chosen) * experts + prints.table)
    return Load(prints, max(0, weights - int(idle)))
