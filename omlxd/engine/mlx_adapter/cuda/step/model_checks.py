"""What is found out once about a model's decode steps: whether they are fused, and what they read."""

from __future__ import annotations

import logging
import time
from functools import partial
from typing import Any, cast

import mlx.core as mx
from mlx.utils import tree_flatten

from ..attention import attention_packed, segment_attention
from ..attention.fused_attention import ARCHITECTURES
from ..compile import driver as cuda_driver
from ..compile import kernel_store
from .fused_step import FusedStep, Unfusable
from .step_kv import StepKV

log = logging.getLogger(__name__)


def fused_step(model: Any) -> FusedStep | None:
    """What computes `model`'s steps in fewer kernels; None, and why in the log, where its own do. Kept."""
    found = vars(model).get("omlxd_fused", False)
    if found is False:
        found, began = None, time.perf_counter()
        try:
            if cuda_driver.architecture() not in ARCHITECTURES:
                raise Unfusable("another GPU than an H100's kind")
            step = FusedStep(model)
            if not step.most_rows:
                raise Unfusable("MLX's own products are used")
            step.compile_ahead()
            known = kernel_store.knows("fused steps", kind_of(model))
            passed = partial(_passed, step, model)
            step.passed = kernel_store.remembered("fused steps", kind_of(model), passed, all)
            found = step
            log.info(
                "decode steps are fused%s: %s in %.1f s",
                ", passes with guesses too" if step.is_repeatable else "",
                "remembered" if known else "checked",
                time.perf_counter() - began,
            )
        except Exception as error:
            log.info("decode steps are not fused: %s", error)
        object.__setattr__(model, "omlxd_fused", found)
    return found


def _passed(step: FusedStep, model: Any) -> list[bool]:
    """What the checks of `step` find. Raises Unfusable."""
    step.check(model, StepKV)
    step.repeats(StepKV)
    return step.passed


def kind_of(model: Any) -> tuple[Any, ...]:
    """What checks of a model's steps depend on: its classes, and the shapes and types of its weights."""
    weights = cast(list[tuple[str, mx.array]], tree_flatten(model.parameters()))
    held = sorted((name, array.shape, str(array.dtype)) for name, array in weights)
    kinds = sorted({f"{type(each).__module__}.{type(each).__name__}" for each in model.modules()})
    return kinds, repr(getattr(model, "args", None)), held


def steps_share(model: Any) -> bool:
    """Whether steps of `model`, fused or not, read segments by our kernels; else the log says why not."""
    fused = vars(model).get("omlxd_fused") or None
    if segment_attention.in_use() and fused is not None:

        def passed() -> list[bool]:
            example = partial(segment_attention.example, fused.heads)
            fused.check(model, StepKV, example)
            if fused.is_repeatable and not fused.repeats(StepKV, example):
                log.info("passes with guesses over segments do not have the bits of steps: none are fused")
            return fused.passed

        try:
            depends = kind_of(model), fused.passed
            fused.passed = kernel_store.remembered("fused steps over segments", depends, passed, all)
        except Exception as error:
            log.warning("prefixes are not shared: fused steps over segments: %s", error)
            return False
    return segment_attention.in_use()


def packed_share(tokens: int) -> bool:
    """Whether our kernels read packed KV in segments of so many tokens."""
    return attention_packed.in_use() and tokens % attention_packed.SPAN == 0


def reads_by_address(model: Any, shares: bool) -> bool:
    """Whether fused steps of `model`, if it has any, read rows' own arrays; `shares`: behind segments too."""
    fused = vars(model).get("omlxd_fused") or None
    if fused is None:
        return True
    example = partial(segment_attention.example, fused.heads)

    def reads() -> bool:
        return fused.reads_tails(StepKV) and (not shares or fused.reads_tails(StepKV, example))

    try:
        return kernel_store.remembered("rows' own arrays", (kind_of(model), fused.passed, shares), reads)
    except Exception as error:
        log.warning("fused steps do not run over rows' own arrays: %s", error)
        return False
