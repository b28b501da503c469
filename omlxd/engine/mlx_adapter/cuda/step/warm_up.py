"""Compiles and checks a model's decode steps at its load, so that no request does."""

from __future__ import annotations

import logging
from typing import Any

import mlx.core as mx

from ...cache.joining import extend, keep_rows, merge
from ...cache.kinds import can_take_back, copied, state_arrays, trim
from ...model.load import run_passes
from .compiled_step import AFTER, CompiledStep

log = logging.getLogger(__name__)


def compiles(model: Any) -> bool:
    """Whether steps of `model` are compiled: not where they would have other bits than its own. Kept."""
    if "omlxd_compiles" not in vars(model):
        step, equal = CompiledStep(model), True
        batch = merge([run_passes(model, [[*range(5, 12)]])[0]])
        extend(batch, run_passes(model, [[3, 4]])[0])
        other = copied(batch)
        for at in range(3):
            tokens = mx.array([[20 + at], [30 + at]])
            if (got := step(tokens, batch, AFTER)) is None:
                return False
            want = model(tokens, cache=other)
            mx.eval(got, want, state_arrays(batch), state_arrays(other))
            equal = equal and bool(mx.array_equal(got, want))
        if not equal:
            log.info("decode steps are not compiled: their bits would differ from those of the model's own")
        object.__setattr__(model, "omlxd_compiles", equal)
    return bool(vars(model)["omlxd_compiles"])


def attend_unequal(model: Any) -> None:
    """One token for rows of unequal length, which end together and apart: what that needs is compiled and
    checked now, in no request. An H100's host takes 7 s for rows that end apart."""
    step, one = CompiledStep(model), run_passes(model, [[0]])[0]
    mx.eval(step(mx.array([[0]]), one, AFTER), state_arrays(one))
    batch = merge([one])
    extend(batch, run_passes(model, [[0, 1]])[0])
    mx.eval(model(mx.array([[0], [0]]), cache=batch))
    mx.eval(step(mx.array([[0], [0]]), batch, AFTER), state_arrays(batch))
    if can_take_back(batch, 2):
        trim(batch, [1, 0])
        mx.eval(model(mx.array([[0], [0]]), cache=batch))
    keep_rows(batch, [0])
    mx.eval(state_arrays(batch))
