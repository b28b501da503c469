"""A compiled decode step beside the model's own, with a kernel of MLX's ops in place of CUDA's."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from families import FAMILIES, build_family
from family_configs import CONFIGS, WINDOW, WINDOWED
from fast_or_slow import SOME_FAMILIES, diagonal
from mlx_lm.models.cache import ArraysCache

from omlxd.engine import mlx_adapter
from omlxd.engine.mlx_adapter.cache.kinds import leaves
from omlxd.engine.mlx_adapter.cuda.step import compiled_step, warm_up
from omlxd.engine.mlx_adapter.cuda.step.compiled_step import CompiledStep

from .conftest import Reference

pytestmark = pytest.mark.usefixtures("compiling")
STEPS = 6


def batch_of(
    loaded: mlx_adapter.LoadedModel, lengths: tuple[int, ...], capacity: int = 64
) -> mlx_adapter.Cache:
    caches = []
    for seed, length in enumerate(lengths):
        cache = mlx_adapter.new_cache(loaded.model, capacity)
        tokens = mx.random.randint(5, 200, (1, length), key=mx.random.key(seed))
        mx.eval(loaded.model(tokens, cache=cache))
        caches.append(cache)
    if len(caches) == 1:
        return caches[0]
    batch = mlx_adapter.merge(caches[:1])
    for cache in caches[1:]:
        mlx_adapter.extend(batch, cache)
    return batch


class Steps:
    """Decodes the same tokens with `compiled` where it may, and counts the steps that it did."""

    def __init__(
        self, loaded: mlx_adapter.LoadedModel, cache: mlx_adapter.Cache, compiled: CompiledStep | None
    ):
        self.loaded, self.cache, self.compiled = loaded, cache, compiled
        self.at = self.done = self.count = 0

    def run(self, rows: int, steps: int = STEPS) -> list[np.ndarray]:
        out = []
        for _ in range(steps):
            tokens = mx.array([[10 + 7 * self.at + row] for row in range(rows)])
            logits = self.compiled(tokens, self.cache, self.count) if self.compiled else None
            self.done += logits is not None
            self.count, self.at = self.count + 1, self.at + 1
            logits = self.loaded.model(tokens, cache=self.cache) if logits is None else logits
            out.append(np.array(logits[:, -1].astype(mx.float32)))
        return out


@pytest.mark.parametrize(
    ("family", "lengths"),
    [
        *((name, (5, 40, 17)) for name in SOME_FAMILIES),
        *diagonal(sorted({*FAMILIES} - {*SOME_FAMILIES}), ((5, 40, 17), (33, 33), (33,))),
        *diagonal(SOME_FAMILIES, ((33, 33), (33,))),
    ],
)
def test_it_computes_what_the_model_does(family: str, lengths: tuple[int, ...], tmp_path, reference):
    loaded = mlx_adapter.load(build_family(family, tmp_path / family))
    reference()
    want = Steps(loaded, batch_of(loaded, lengths), None).run(len(lengths))
    steps = Steps(loaded, cache := batch_of(loaded, lengths), CompiledStep(loaded.model))
    np.testing.assert_allclose(steps.run(len(lengths)), want, atol=2e-4)
    if family in COMPILED:
        assert steps.done == STEPS - compiled_step.AFTER
        attending = len(loaded.model.layers)
        if family in HYBRIDS:
            attending = sum(not isinstance(leaf, ArraysCache) for _, leaf in leaves(cache))
        assert Reference.steps == attending, "shared KV included, traced once"
        for name, array in mlx_adapter.tensors(cache).items() if len(lengths) == 1 else ():
            again = batch_of(loaded, lengths)
            Steps(loaded, again, None).run(1)
            np.testing.assert_allclose(np.array(array), np.array(mlx_adapter.tensors(again)[name]), atol=1e-5)
    else:
        assert steps.done == 0


LATENTS = ("deepseek_v3", "deepseek_v32", "glm_moe_dsa", "kimi_linear")
HYBRIDS = tuple(name for name in FAMILIES if CONFIGS[name].classes > {"ArraysCache"} and name not in LATENTS)
"""Recurrent state beside KV."""
COMPILED = tuple(name for name in FAMILIES if CONFIGS[name].classes <= WINDOWED and name not in LATENTS)
COMPILED += HYBRIDS


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gpt_oss", "gemma4_text"])
def test_windows_that_come_round_while_rows_come_and_go(family: str, tmp_path, reference):
    """Steps by the model itself, compiled ones and guesses take turns, on rows below and above the window."""
    loaded = mlx_adapter.load(build_family(family, tmp_path / family))
    reference()
    got: list[list[np.ndarray]] = []
    for compiled in (None, CompiledStep(loaded.model)):
        batch = batch_of(loaded, (WINDOW - 3, 5, 2 * WINDOW + 3))
        steps, out = Steps(loaded, batch, compiled), []
        out += steps.run(3, 9)
        with mlx_adapter.last_positions(3):
            out.append(np.array(loaded.model(mx.array([[7, 8, 9]] * 3), cache=batch)))
        mlx_adapter.trim(batch, [0, 2, 1])
        out += steps.run(3, 3)
        mlx_adapter.keep_rows(batch, [0, 1])
        steps.count = 0
        out += steps.run(2, WINDOW + 5)
        mlx_adapter.extend(batch, batch_of(loaded, (WINDOW + 1,)))
        steps.count = 0
        out += steps.run(3, 7)
        got.append(out)
        done = steps.done
    for one, other in zip(*got, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-3 if family == "gemma4_text" else 2e-4)
    assert done > WINDOW


def test_steps_of_other_bits_are_not_compiled(tmp_path, reference, monkeypatch: pytest.MonkeyPatch, caplog):
    reference()
    loaded = mlx_adapter.load(build_family("qwen3", tmp_path / "qwen3"))
    model = loaded.model
    for off in (0.0, 1e-3):
        vars(model).pop("omlxd_compiles", None)

        def compiled(function, off=off, **how):
            def call(*given):
                logits, *others = function(*given)
                return (logits + off, *others)

            return call

        monkeypatch.setattr(mx, "compile", compiled)
        with caplog.at_level("INFO"):
            assert warm_up.compiles(model) == (off == 0)
        steps = Steps(loaded, batch_of(loaded, (5, 9)), CompiledStep(model))
        steps.run(2)
        assert bool(steps.done) == (off == 0)
    assert "their bits would differ" in caplog.text
