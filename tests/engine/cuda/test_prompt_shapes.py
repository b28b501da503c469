"""Passes before a prompt's last, in the shapes in which they are computed on CUDA."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from backends import use_backend
from cold_run import prompt
from families import build_family
from hypothesis import given
from hypothesis import strategies as st
from mlx.utils import tree_flatten
from rig import BLOCK, Rig

from omlxd.engine.mlx_adapter import Quantisation
from omlxd.engine.mlx_adapter.attention import hooks as attention
from omlxd.engine.mlx_adapter.attention.backend import MlxBackend
from omlxd.engine.mlx_adapter.cache.segments import SequenceKVCache
from omlxd.engine.mlx_adapter.cuda import prompt_shapes
from omlxd.engine.mlx_adapter.cuda.products import products
from omlxd.engine.mlx_adapter.cuda.prompt_shapes import (
    FINE,
    MOST_MORE,
    PREFILL_CHUNK,
    fixed_shapes,
    shape_of,
)
from omlxd.engine.schedule import forward as prompt_passes


@pytest.fixture
def on_cuda(monkeypatch: pytest.MonkeyPatch):
    use_backend(monkeypatch, "cuda")
    monkeypatch.setattr(prompt_shapes, "_least", {})
    monkeypatch.setattr(prompt_shapes, "keeps_bits", lambda *kind: True)


@given(st.integers(0, 200_000), st.integers(1, 5000))
def test_a_shape_holds_the_pass_and_costs_little_more(start: int, new: int):
    tokens = start + new
    queries, end = shape_of(new, tokens)
    assert queries <= end and end - queries <= start and tokens <= end
    assert end % FINE == 0 and queries % FINE == 0
    small = -(-end // FINE) * FINE <= tokens + FINE and queries <= new + 2 * FINE
    assert small or (queries - new) * end <= MOST_MORE


def test_whole_chunks_and_most_of_what_a_hit_leaves_share_shapes():
    assert {shape_of(PREFILL_CHUNK, n * PREFILL_CHUNK) for n in (1, 9)} == {
        (PREFILL_CHUNK, PREFILL_CHUNK),
        (PREFILL_CHUNK, 9 * PREFILL_CHUNK),
    }
    ends = {shape_of(new, start + new) for start in range(0, 16_000, 64) for new in (64, 2048 - start % 2048)}
    assert len(ends) == 11
    assert shape_of(64, 100_096) == (256, 100_096), "among 2,048 queries it would take ten times as long"


@pytest.mark.parametrize("start, new", [(0, 5), (0, 300), (448, 64), (1984, 64), (2048, 700), (30_000, 70)])
def test_attention_in_its_shape_is_attention(start: int, new: int, on_cuda):
    queries = mx.random.normal((1, 4, new, 16), key=mx.random.key(0))
    keys, values = (mx.random.normal((1, 2, start + new, 16), key=mx.random.key(i)) for i in (1, 2))
    want = mx.fast.scaled_dot_product_attention(queries, keys, values, scale=0.25, mask="causal")
    with fixed_shapes(True):
        got = attention.attend(queries, keys, values, None, 0.25, "causal")
    np.testing.assert_allclose(got, want, atol=1e-5)


def test_what_is_left_as_it_was(on_cuda, monkeypatch: pytest.MonkeyPatch):
    calls: list[tuple[int, ...]] = []
    monkeypatch.setattr(prompt_shapes, "_attend", lambda q, *_: calls.append(q.shape) or q)
    queries, keys = mx.ones((1, 4, 100, 16)), mx.ones((1, 2, 120, 16))
    attention.attend(queries, keys, keys, None, 0.25, "causal")
    with fixed_shapes(True):
        with fixed_shapes(False):  # As for rows that decode beside the pass.
            attention.attend(queries, keys, keys, None, 0.25, "causal")
        attention.attend(queries, keys, keys, None, 0.25, None)
        two, held = (mx.concatenate([array] * 2) for array in (queries, keys))
        attention.attend(two, held, held, None, 0.25, "causal")
        attention.attend(queries, keys, mx.ones((1, 2, 120, 8)), None, 0.25, "causal")
        assert not calls
        attention.attend(queries, keys, keys, None, 0.25, "causal")
        attention.attend(queries, keys, keys, None, 0.25, "causal", sinks=mx.ones(4))
    assert calls == [(1, 4, 256, 16)] * 2 and not prompt_shapes._fixed
    with MlxBackend().chunk(final=False):
        assert not prompt_shapes._fixed


def test_packed_kv_is_attended_to_in_shapes_too(on_cuda, monkeypatch: pytest.MonkeyPatch):
    own, calls = prompt_shapes._attend, list[tuple[int, ...]]()
    monkeypatch.setattr(prompt_shapes, "_attend", lambda q, *given: calls.append(q.shape) or own(q, *given))
    cache, new = SequenceKVCache(how=Quantisation(8, 32)), mx.random.normal((1, 2, 100, 32))
    keys, values = cache.update_and_fetch(new, new)
    queries = mx.random.normal((1, 4, 100, 32))
    want = attention.attend(queries, keys, values, cache, 0.2, "causal")
    assert not calls
    with fixed_shapes(True):
        got = attention.attend(queries, keys, values, cache, 0.2, "causal")
    assert calls == [(1, 4, 256, 32)]
    np.testing.assert_allclose(got, want, atol=1e-5)


class Products:
    """`nn.Linear.__call__`, whose bits are others below so many rows."""

    def __init__(self, least: int):
        self.least, self.rows = least, list[int]()

    def __call__(self, module: Any, x: mx.array) -> mx.array:
        rows = x.size // x.shape[-1]
        self.rows.append(rows)
        return own_linear(module, x) * (1 if rows >= self.least else 1.01)


own_linear = prompt_shapes._own_linear


@pytest.mark.parametrize("least, found", [(1, 64), (65, 128), (192, 192), (512, 512), (513, 0), (4096, 64)])
def test_products_have_as_many_rows_as_have_the_bits_of_a_chunk(
    least: int, found: int, on_cuda, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(prompt_shapes, "_own_linear", own := Products(least))
    layer = nn.Linear(8, 16)
    layer.set_dtype(mx.bfloat16)
    with caplog.at_level("INFO"):
        prompt_shapes.check_products([layer])
    assert f"of at least {found} rows" in caplog.text
    assert ("other bits" in caplog.text) == (not found)
    x = mx.random.normal((1, 40, 8)).astype(mx.bfloat16)
    for rows, computed in ((40, max(found, 40)), (1, max(found, 1))):
        got = prompt_shapes.linear(layer, x[:, :rows], found)
        assert own.rows[-1] == computed
        if least <= PREFILL_CHUNK and found:
            assert mx.array_equal(got, own_linear(layer, x[:, :rows]))


def test_products_are_checked_before_weights_are_read(
    on_cuda, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """What is checked ahead has the model's shapes, none of its weights, and is not checked again."""
    model = nn.Module()
    model.layers = [nn.Linear(8, 16, bias=False), nn.Linear(8, 16), nn.Linear(16, 8, bias=False)]
    model.set_dtype(mx.bfloat16)
    file = tmp_path / "weights.safetensors"
    mx.save_safetensors(str(file), dict(tree_flatten(model.parameters())))
    weights = mx.load(str(file))
    with file.open("r+b") as written:
        written.truncate(100)  # Whoever reads these weights now fails.
    model.load_weights([*weights.items()])
    products.compile_activations(model)
    assert len(prompt_shapes._least) == 3 and all(prompt_shapes._least.values())
    monkeypatch.setattr(prompt_shapes, "_least_of", None)
    prompt_shapes.check_products(model.layers)
    with pytest.raises(RuntimeError):
        mx.eval(model.parameters())


def test_a_check_that_fails_ahead_is_left_to_the_load(on_cuda, monkeypatch: pytest.MonkeyPatch):
    def fail(module: nn.Linear) -> int:
        raise MemoryError

    layer = nn.Linear(8, 16)
    with monkeypatch.context() as patch:
        patch.setattr(prompt_shapes, "_least_of", fail)
        prompt_shapes.check_ahead([layer])
    assert not prompt_shapes._least
    prompt_shapes.check_products([layer])
    assert prompt_shapes._least


def test_the_head_is_not_checked(on_cuda, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(prompt_shapes, "LARGEST", 16)
    layers = nn.Linear(8, 16), nn.Linear(8, 17)
    prompt_shapes.check_products(layers)
    assert len(prompt_shapes._least) == 1
    assert prompt_shapes.linear(layers[1], mx.ones((3, 8)), 0).shape == (3, 17)
    assert not prompt_shapes.least_rows(layers[0])
    with fixed_shapes(True):
        assert prompt_shapes.least_rows(layers[0]) and not prompt_shapes.least_rows(layers[1])


def test_passes_before_the_last_have_them_and_a_model_answers_as_without(
    tmp_path: Path, on_cuda, reference, monkeypatch: pytest.MonkeyPatch
):
    """The last pass has its tokens by the prompt alone; what decodes has shapes of its own."""
    passes: list[tuple[int, bool]] = []
    attended: list[tuple[int, ...]] = []
    own, own_attend = prompt_passes._pass, prompt_shapes._attend

    def noted(model: Any, sequence: Any, start: int, stop: int, *more: Any) -> mx.array:
        def call(*given: Any, **named: Any) -> mx.array:
            passes.append((stop, prompt_shapes._fixed))
            return model(*given, **named)

        return own(call, sequence, start, stop, *more)

    def attend(queries: mx.array, *given: Any) -> mx.array:
        attended.append(queries.shape)
        return own_attend(queries, *given)

    folder, tokens = build_family("qwen3", tmp_path / "model"), prompt(3 * BLOCK + 5)
    with Rig(folder) as rig:
        want = rig.run(tokens, 8).tokens()
    monkeypatch.setattr(prompt_passes, "_pass", noted)
    monkeypatch.setattr(prompt_shapes, "_attend", attend)
    reference()
    products.install()
    try:
        with Rig(folder) as rig:
            model: Any = rig.loaded.model
            prompt_shapes.check_products([m for _, m in model.named_modules() if type(m) is nn.Linear])
            assert rig.run(tokens, 8).tokens() == want
    finally:
        products.uninstall()
    early = {stop: fixed for stop, fixed in passes if stop <= 3 * BLOCK}
    assert early and all(early.values())
    assert passes[-1] == (len(tokens), False)
    assert {shape[2] for shape in attended} == {FINE}
