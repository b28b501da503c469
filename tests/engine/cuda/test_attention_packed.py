"""Where packed KV has its own kernel, with one of MLX's ops in its place: it runs on CUDA alone."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from backends import let_rows_pay
from families import build_family

from omlxd.engine import mlx_adapter
from omlxd.engine.mlx_adapter import Quantisation
from omlxd.engine.mlx_adapter.attention import hooks as attention
from omlxd.engine.mlx_adapter.cache.batch import EvenBatchKVCache
from omlxd.engine.mlx_adapter.cache.packed import is_packed
from omlxd.engine.mlx_adapter.cuda.attention import attention_packed
from omlxd.engine.mlx_adapter.cuda.step import compiled_step
from omlxd.engine.mlx_adapter.cuda.step.compiled_step import CompiledStep

from .conftest import PackedReference, Reference, known_addresses
from .test_compiled_step import STEPS, Steps, batch_of

WIDE = {"head_dim": 64}
LENGTHS = (5, 40, 17)


@pytest.fixture
def loaded(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> mlx_adapter.LoadedModel:
    let_rows_pay(monkeypatch, False)  # Rows of a batch are one array, as on CUDA.
    family, bits = request.param
    return mlx_adapter.load(build_family(family, tmp_path / family, changes=WIDE), Quantisation(bits))


models = pytest.mark.parametrize("loaded", [("qwen3", 8), ("qwen3", 4), ("gemma3_text", 8)], indirect=True)


@models
@pytest.mark.parametrize("lengths", [LENGTHS, (33, 33), (33,)], ids=["unequal", "equal", "one row"])
def test_single_tokens_compiled_or_not(loaded: mlx_adapter.LoadedModel, lengths, reference):
    want = Steps(loaded, batch_of(loaded, lengths), None).run(len(lengths))
    reference()
    got = Steps(loaded, cache := batch_of(loaded, lengths), None).run(len(lengths))
    np.testing.assert_allclose(got, want, atol=2e-4)
    assert Reference.calls > 0
    compiled = Steps(loaded, again := batch_of(loaded, lengths), CompiledStep(loaded.model))
    np.testing.assert_allclose(compiled.run(len(lengths)), want, atol=2e-4)
    assert compiled.done == STEPS - compiled_step.AFTER, "beside windows too"
    for row, length in enumerate(lengths if len(lengths) > 1 else ()):
        held, once_more = (mlx_adapter.row_tensors(c, row, 0, length + STEPS) for c in (cache, again))
        assert all(mx.array_equal(held[name], once_more[name]).item() for name in held)


@models
def test_several_tokens_rows_that_end_apart_leave_and_join(loaded: mlx_adapter.LoadedModel, reference):
    tokens = [[int(token) for token in np.random.default_rng(seed).integers(5, 200, 60)] for seed in range(4)]
    windows = any(not is_packed(layer) for layer in mlx_adapter.new_cache(loaded.model, 4))

    def run() -> list[np.ndarray]:
        out, at = [], [9, 30, 21]
        batch = batch_of(loaded, (9, 30, 21))

        def step(count: int) -> None:
            inputs = [tokens[row][:count] for row in range(len(at))]
            with mlx_adapter.last_positions(count):
                out.append(np.array(loaded.model(mx.array(inputs), cache=batch)))

        step(5)
        if not windows:
            mlx_adapter.trim(batch, [0, 4, 2])
        step(1)
        step(4)
        mlx_adapter.keep_rows(batch, [0, 2])
        at = [0, 2]
        step(1)
        mlx_adapter.extend(batch, batch_of(loaded, (12,)))
        at = [0, 1, 2]
        step(1)
        step(3)
        return out

    want = run()
    reference()
    for got, expected in zip(run(), want, strict=True):
        np.testing.assert_allclose(got, expected, atol=2e-4)
    assert Reference.several > 0


def test_what_it_can_not_read_goes_on_to_mlx(reference):
    reference()
    cache, one = EvenBatchKVCache([0, 2], Quantisation(8, 32)), mx.ones((2, 1, 1, 32))
    queries = mx.ones((2, 2, 1, 32))

    def attend(keys, values, mask, queries=queries):
        return attention.attend(queries, keys, values, cache, 1.0, mask)

    cache.update_and_fetch(mx.ones((2, 1, 4, 32)), mx.ones((2, 1, 4, 32)))
    windowed, plain = cache.make_mask(1, window_size=2), cache.make_mask(1)
    given = cache.update_and_fetch(one, one)
    attend(*given, windowed)
    attend(given[0], [part[...] for part in given[1]], plain)
    assert Reference.calls == 0
    np.testing.assert_allclose(np.array(attend(*given, plain)), 1.0, atol=1e-2)
    assert Reference.calls == 1
    long = attention_packed.MOST_NEW + 1
    many = mx.ones((2, 1, long, 32))
    mask = cache.make_mask(long)
    attend(*cache.update_and_fetch(many, many), mask, mx.ones((2, 2, long, 32)))
    assert Reference.calls == 1


@pytest.mark.parametrize("bits", [8, 4])
def test_the_check_finds_a_kernel_that_differs(bits: int, monkeypatch: pytest.MonkeyPatch):
    known_addresses(monkeypatch)
    how = Quantisation(bits)

    class Off(PackedReference):
        def __call__(self, *args, **how):
            return super().__call__(*args, **how) + 0.5

    class Late(PackedReference):
        def step(self, queries, fresh, held, starts, ends, scale, sinks=None):
            return super().step(queries, fresh, held, starts, ends, scale)[0], *held

    def far(kernel, new: int) -> float:
        return attention_packed.difference(kernel, 64, 4, mx.float32, how, new)

    assert far(PackedReference(how), 5) < 1e-4
    assert far(Off(how), 5) > attention_packed.CLOSE
    assert far(Late(how), 1) == float("inf")


def test_sources_are_complete():
    """No machine here compiles them: each kernel has a name of its own."""
    made = [
        attention_packed.source_of(name, width, group, dtype, how)
        for name in ("spans", "step")
        for width in attention_packed.WIDTHS
        for group in (1, 7)
        for dtype in (mx.bfloat16, mx.float16)
        for how in (Quantisation(8), Quantisation(4), Quantisation(8, 32), Quantisation(4, 32))
    ]
    assert len({name for name, _ in made}) == len(made)
    for name, source in made:
        assert f"#define FUNCTION {name}\n" in source
    assert attention_packed.fits(96, Quantisation(4, 32)) and not attention_packed.fits(
        96, Quantisation(8, 64)
    )
    assert attention_packed.fits(512, Quantisation(8)) and not attention_packed.fits(
        512, Quantisation(8, 128)
    )
    assert not attention_packed.fits(80, Quantisation(8, 16))
