"""Layers of gated delta net whose decode steps are step.py's, where the rule lets them.

The class of such modules is changed at a load. What the kernel does not take is the class's own: prompts,
passes with padding or without a cache, a first token.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Sequence
from functools import cache, partial
from types import SimpleNamespace
from typing import Any, cast

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache, make_prompt_cache
from mlx_lm.models.qwen3_next import Qwen3NextGatedDeltaNet

from ...cache.kinds import leaves
from .. import rule
from . import prompts
from .step import MOST_NEW, MOST_WIDTH, Shape, Weights, rates_of, step

CLOSE = {mx.float32: 1e-5, mx.float16: 4e-3, mx.bfloat16: 3e-2}
"""Largest difference from MLX's own, which rounds as well, by the largest number."""

NEEDED = ("conv1d", "A_log", "dt_bias", "norm", "out_proj", "num_k_heads", "num_v_heads", "head_k_dim")
APART = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
SAMPLE = {
    "hidden_size": 64,  # Of products, which are not judged.
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "rms_norm_eps": 1e-6,
}
"""What samples take of a config."""

MIXED = ("in_proj_qkvz", "in_proj_qkvz", "in_proj_ba", "in_proj_ba")


def prepare(model: Any) -> None:
    """Judge the kernels for the layers of gated delta net in `model`, and change the class of those that use
    them."""
    found = [(module, shape) for module in model.modules() if (shape := shape_of(module)) is not None]
    held = leaves(make_prompt_cache(model)) if found else ()
    kinds = {type(leaf) for _, leaf in held if len(getattr(leaf, "cache", ())) == 2}
    for module, shape in found if len(kinds) == 1 else ():
        prompts.prepare(module, shape)
        verdict = _judged(module, shape, *kinds)
        if verdict.is_used and all(map(verdict.pays, verdict.ratios)):  # Else bits would tell of company.
            _change(module, shape)


def judge_prompts() -> None:
    """Judge MLX's kernel for prompts at a layer with the heads of Qwen3-Next."""
    module = _sample()
    if (shape := shape_of(module)) is not None:
        prompts.prepare(module, shape)


def judge_steps() -> None:
    """Judge the step at a layer with the heads of Qwen3-Next."""
    module = _sample()
    if (shape := shape_of(module)) is not None:
        _judged(module, shape, ArraysCache)


def _sample() -> Any:
    module = Qwen3NextGatedDeltaNet(cast(Any, SimpleNamespace(**SAMPLE)))
    module.set_dtype(mx.float16)
    mx.eval(module.parameters())
    module.eval()  # As a load has it: layers that are trained keep MLX's own steps.
    return module


def shape_of(module: Any) -> Shape | None:
    """Return the shape of a module that looks like Qwen3.5's or Qwen3-Next's; None: of another. That it
    computes the same is the rule's to find."""
    if hasattr(module, "omlxd_shape") or not all(hasattr(module, name) for name in NEEDED):
        return None
    called, weight = inspect.signature(type(module).__call__).parameters, module.conv1d.weight
    mixed = "in_proj_qkvz" in module
    if list(called) != ["self", "inputs", "mask", "cache"] or "bias" in module.conv1d:
        return None
    heads = module.num_k_heads, module.num_v_heads, module.head_k_dim, module.head_v_dim
    shape = Shape(*heads, weight.shape[1], mixed, weight.dtype, module.norm.eps)
    fits = all(width % 32 == 0 and width <= MOST_WIDTH for width in heads[2:]) and weight.dtype in CLOSE
    fits &= weight.shape == (shape.channels, shape.taps, 1) and 2 <= shape.taps <= 8
    fits &= module.norm.weight.dtype == weight.dtype
    return shape if fits and all(name in module for name in (MIXED if mixed else APART)) else None


def _change(module: Any, shape: Shape) -> None:
    object.__setattr__(module, "omlxd_shape", shape)
    module.__class__ = _by_steps(type(module))


@cache
def _by_steps(kind: Any) -> Any:
    def __call__(self: Any, inputs: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        if mask is not None or not _takes(self, inputs, cache):
            return kind.__call__(self, inputs, mask, cache)
        own = Weights(self.conv1d.weight, self.norm.weight, _rates(self))
        out, cache[0], cache[1] = step(self.omlxd_shape, _given(self, inputs), (cache[0], cache[1]), own)
        cache.advance(inputs.shape[1])
        return self.out_proj(out)

    return type(kind.__name__, (kind,), {"__call__": __call__})


def _takes(module: Any, inputs: mx.array, cache: Any) -> bool:
    if cache is None or cache[0] is None or cache[1] is None or cache.lengths is not None:
        return False
    kinds = inputs.dtype, cache[0].dtype, module.conv1d.weight.dtype, module.norm.weight.dtype
    return (
        inputs.shape[1] <= MOST_NEW
        and all(kind == module.omlxd_shape.dtype for kind in kinds)
        and cache[1].dtype == mx.float32
        and not module.training
        and getattr(module, "sharding_group", None) is None
    )


def _given(module: Any, inputs: mx.array) -> list[mx.array]:
    """What the projections give, as `step` takes it."""
    if not module.omlxd_shape.mixed:
        return [getattr(module, name)(inputs) for name in APART]
    return [array for array in (module.in_proj_qkvz(inputs), module.in_proj_ba(inputs)) for _ in range(2)]


def _rates(module: Any) -> mx.array:
    """`rates_of` it, made anew when its weights are others."""
    of, made = module.__dict__.get("omlxd_rates", ((), None))
    now = module.A_log, module.dt_bias
    if len(of) != 2 or of[0] is not now[0] or of[1] is not now[1]:
        made = rates_of(*now)
        mx.eval(made)
        object.__setattr__(module, "omlxd_rates", (now, made))
    return made


# --------------------------------------------------------------------------- judging


def _judged(module: Any, shape: Shape, kind: Any) -> rule.Verdict:
    """Judge the kernel beside the module's own code. `kind`: the class of its cache."""
    trial, every = _Trial(module, shape, kind), (0, 1, 2)
    return rule.judged(
        rule.Case(
            "gated_delta_net_step",
            str(shape),
            lambda: [array for new in (1, 3) for array in trial.call(every, new, ours=True)],
            lambda: [array for new in (1, 3) for array in trial.call(every, new, ours=False)],
            CLOSE[shape.dtype],
            lambda: [
                (alone, joint[row : row + 1])
                for row in every
                for alone, joint in zip(trial.call((row,), 3), trial.call(every, 3), strict=True)
            ],
            lambda: [
                rule.Timed(
                    f"{rows} row{'s' * (rows > 1)}",
                    trial.link(range(rows), ours=True),
                    trial.link(range(rows), ours=False),
                    trial.first(rows, 1),
                )
                for rows in (1, 4)
            ],
        )
    )


class _Trial:
    """Calls of a module whose projections give drawn numbers: those of a row are the same in any company."""

    def __init__(self, module: Any, shape: Shape, kind: Any):
        self._module, self._shape, self._kind = module, shape, kind

    def _draw(self, seed: int, rows: Sequence[int], *shape: int) -> mx.array:
        drawn = [mx.random.normal((1, *shape), key=mx.random.key(seed + 100 * row)) for row in rows]
        return mx.concatenate(drawn).astype(self._shape.dtype)

    def _twin(self, rows: Sequence[int], new: int, ours: bool) -> Any:
        twin, shape = copy.copy(self._module), self._shape
        all_values = shape.heads * shape.width
        if shape.mixed:
            widths = {"in_proj_qkvz": shape.channels + all_values, "in_proj_ba": 2 * shape.heads}
        else:
            widths = dict(zip(APART, (shape.channels, all_values, shape.heads, shape.heads), strict=True))
        for at, (name, width) in enumerate(widths.items()):
            setattr(twin, name, partial(_behind, self._draw(at, rows, new, width)))
        twin.out_proj = _same
        if ours:
            _change(twin, shape)
        return twin

    def _cache(self, rows: Sequence[int]) -> Any:
        shape, held = self._shape, self._kind(2)
        held[0] = self._draw(10, rows, shape.taps - 1, shape.channels)
        held[1] = self._draw(11, rows, shape.heads, shape.width, shape.key_width).astype(mx.float32)
        return held

    def first(self, rows: int, new: int) -> mx.array:
        return mx.zeros((rows, new, self._shape.heads * self._shape.width), self._shape.dtype)

    def link(self, rows: Sequence[int], ours: bool) -> Callable[[mx.array], mx.array]:
        """One token a row, again and again."""
        twin, held = self._twin(rows, 1, ours), self._cache(rows)
        return lambda x: twin(x, None, held)

    def call(self, rows: Sequence[int], new: int, ours: bool = True) -> list[mx.array]:
        """What a pass gives, and the states behind it."""
        twin, held, first = self._twin(rows, new, ours), self._cache(rows), self.first(len(rows), new)
        if ours and not _takes(twin, first, held):
            raise RuntimeError("the kernel does not take what this layer gives it")
        out = twin(first, None, held)
        return [out, held[0], held[1]]


def _behind(given: mx.array, x: mx.array) -> mx.array:
    """`given`, once `x` is there."""
    return mx.depends([given], [x])[0]


def _same(x: mx.array) -> mx.array:
    return x
