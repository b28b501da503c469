"""Products of few rows, and when their kernel is in use, with one of MLX's ops in its place."""

from __future__ import annotations

import math
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from backends import use_backend
from families import build_family
from mlx_lm.models import deepseek_v3

from omlxd.engine import mlx_adapter
from omlxd.engine.mlx_adapter.cuda.products import products, products_kernel
from omlxd.engine.mlx_adapter.model import load as loading

K, N = 64, 40
ROWS = len(products._ROWS)


def drawn(*shape: int, dtype: Any = mx.bfloat16) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(sum(shape))).astype(dtype)


def exact(array: mx.array) -> np.ndarray:
    return np.array(array.astype(mx.float32), np.float64)


class Kernel:
    """Stands for the one that runs on CUDA: the same by MLX's ops, row by row. Counts its calls."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, ...]] = []
        self.wrong = 0.0
        self.of_one = True

    def __call__(
        self, x: Any, weights: Any, biases: Any, norm: Any = None, eps: float = 0.0
    ) -> list[mx.array]:
        self.calls.append(tuple(x.shape))
        if norm is not None:
            x = mx.fast.rms_norm(x, norm, eps)
        rows = x.reshape(-1, 1, x.shape[-1])
        results: list[mx.array] = []
        for weight, bias in zip(weights, biases, strict=True):
            out = [products._plain(row, weight, bias) for row in rows]
            if not self.of_one and len(out) > 1:
                out[0] = 2 * out[0]
            results.append(mx.concatenate(out).reshape(*x.shape[:-1], -1) * (1 + self.wrong))
        return results


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch):
    """In the place of CUDA's, found right and quick."""
    stand_in = Kernel()
    monkeypatch.setattr(products, "run", stand_in)
    monkeypatch.setattr(products, "_in_use", {})
    monkeypatch.setattr(products, "_seconds", lambda weights: ([1.0] * ROWS, [1.0] * ROWS))
    yield stand_in
    products.uninstall()


@pytest.mark.parametrize("rows", [1, 3, 33])
@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
def test_what_it_computes(rows: int, dtype: Any):
    x, gate, up = drawn(rows, 1, K, dtype=dtype), drawn(N, K, dtype=dtype), drawn(N + 8, K, dtype=dtype)
    norm, bias = drawn(K, dtype=dtype), drawn(N, dtype=dtype)
    close: Any = lambda got, want: np.testing.assert_allclose(exact(got), want, rtol=0.03, atol=0.3)  # noqa: E731

    first, second = products.products(x, [gate, up], biases=[bias, None])
    close(first, exact(x) @ exact(gate).T + exact(bias))
    close(second, exact(x) @ exact(up).T)

    normed = exact(x) / np.sqrt((exact(x) ** 2).mean(-1, keepdims=True) + 1e-5) * exact(norm)
    (out,) = products.products(x, [gate], norm=norm, eps=1e-5)
    close(out, normed @ exact(gate).T)


def test_it_is_in_use_for_few_rows_of_weights_that_were_checked(kernel: Kernel):
    layer, other = nn.Linear(K, N, bias=True), nn.Linear(K, N + 8, bias=False)
    for one in (layer, other):
        one.set_dtype(mx.bfloat16)
    products.prepare(nn.Sequential(layer))
    assert products.most_rows([layer.weight]) == products.MOST_ROWS
    assert not products.most_rows([layer.weight, other.weight])
    kernel.calls.clear()
    want = exact(products._own_linear(layer, drawn(3, 1, K)))
    np.testing.assert_allclose(exact(layer(drawn(3, 1, K))), want, rtol=0.02, atol=0.02)
    assert kernel.calls == [(3, 1, K)]

    other(drawn(3, 1, K)), layer(drawn(1, products.SET + 1, K)), layer(drawn(3, K, dtype=mx.float32))
    assert kernel.calls == [(3, 1, K)], "other weights, more rows, another type"
    layer(drawn(products.SET, 1, K))
    assert len(kernel.calls) == 2
    for rows in (products.MOST_ROWS, products.MOST_ROWS + 1):
        products.products(drawn(rows, K), [layer.weight])
    assert len(kernel.calls) == 3, "for a fused step, of more rows"


@pytest.mark.parametrize(
    "ours, most",
    [([1, 1, 1, 1.2, 1.2], 128), ([1, 1, 1.5, 1, 1.3], 64), ([1, 1, 1, 1.3, 1], 32), ([1.3] * 5, 0)],
)
def test_it_takes_as_many_rows_as_are_quick(
    ours: list[float], most: int, kernel: Kernel, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(products, "_seconds", lambda weights: (ours, [1.0] * ROWS))
    layer = nn.Linear(K, N, bias=False)
    layer.set_dtype(mx.bfloat16)
    products.prepare(layer)
    assert products.most_rows([layer.weight]) == most


def test_half_precision_is_normed_by_mlx(kernel: Kernel):
    x, weight, norm = 300 * drawn(2, K, dtype=mx.float16), drawn(N, K, dtype=mx.float16), mx.full(K, 400.0)
    norm = norm.astype(mx.float16)
    products.prepare(nn.Sequential(layer := nn.Linear(K, N, bias=False)))
    layer.weight = weight
    products.prepare(layer)
    (out,) = products.products(x, [weight], norm=norm, eps=1e-5)
    assert kernel.calls and np.isfinite(exact(out)).all()


@pytest.mark.parametrize("fault", ["wrong", "nan", "of others", "slow", "refused"])
def test_a_kernel_that_fails_its_check_is_not_used(
    fault: str, kernel: Kernel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    layer = nn.Linear(K, N, bias=False)
    layer.set_dtype(mx.float16)
    kernel.wrong = {"wrong": 0.05, "nan": math.nan}.get(fault, 0.0)
    kernel.of_one = fault != "of others"
    if fault == "slow":
        monkeypatch.setattr(products, "_seconds", lambda weights: ([1.3] * ROWS, [1.0] * ROWS))
    if fault == "refused":

        def refuse(*_: Any) -> list[mx.array]:
            raise RuntimeError("no such instruction")

        monkeypatch.setattr(products, "run", refuse)
    with caplog.at_level("INFO"):
        products.prepare(layer)
    assert "MLX's own kernels" in caplog.text
    kernel.calls.clear()
    layer(drawn(1, K, dtype=mx.float16))
    assert not products.most_rows([layer.weight]) and not kernel.calls


def test_the_time_of_a_models_products_is_taken(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(products, "_ours", products._mlx_own)
    for times in products._seconds([drawn(N, K), drawn(N, K), drawn(K, N)]):
        assert len(times) == ROWS and all(0 < time < 60 for time in times)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_loaded_model_answers_as_without(
    family: str, kernel: Kernel, tmp_path, monkeypatch: pytest.MonkeyPatch
):
    folder = build_family(family, tmp_path / family)
    monkeypatch.setattr(products, "TYPES", {mx.float32: "float"})
    tokens = mx.array([[5, 6, 7]])
    want = np.array(mlx_adapter.load(folder).model(tokens))
    assert not kernel.calls
    use_backend(monkeypatch, "mlx", prepare=products.prepare)
    loaded = mlx_adapter.load(folder)
    kernel.calls.clear()
    np.testing.assert_allclose(np.array(loaded.model(tokens)), want, atol=2e-4)
    layers = len(loaded.model.layers)
    assert len(kernel.calls) == 7 * layers + 1, "all of a layer's products, and those of the vocabulary"


def test_a_source_names_what_its_launch_is_given():
    plain, source = products_kernel.source_of("bfloat16", 1, (False,))
    head = source[: source.index("using T")]
    for argument in ("norm", "bias0", "w1"):
        assert f" {argument}," not in head
    function, source = products_kernel.source_of("bfloat16", 2, (True, False), True)
    head = source[: source.index("using T")]
    assert function != plain and f"#define FUNCTION {function}\n" in head
    for argument in ("x", "w0", "w1", "norm", "bias0", "y0", "y1", "n1", "k"):
        assert f" {argument}," in head
    assert "bias1," not in head


@pytest.mark.parametrize("eights", products_kernel.FORMS)
def test_a_form_fits_an_h100(eights: int):
    form = products_kernel.FORMS[eights]
    assert form.blocks * (form.shared(eights) + 1024) <= 228 << 10
    assert products_kernel.CHUNKS % form.chunks == 0 and form.stages >= 2


def test_a_kernel_that_does_not_run_is_not_in_use():
    layer = nn.Linear(K, N, bias=False)
    layer.set_dtype(mx.bfloat16)
    try:
        products.prepare(layer)
        assert not products.most_rows([layer.weight]) and loading.backend() != "cuda"
    finally:
        products.uninstall()


class Routed(nn.Module):
    """DeepSeek V3's router, beside a product of another kind."""

    def __init__(self) -> None:
        super().__init__()
        args = deepseek_v3.ModelArgs(
            hidden_size=K, n_routed_experts=8, num_experts_per_tok=2, n_group=1, topk_group=1
        )
        self.gate, self.other = deepseek_v3.MoEGate(args), nn.Linear(K, N)
        self.gate.weight = drawn(8, K)
        self.set_dtype(mx.bfloat16)


class Weighs(deepseek_v3.MoEGate):
    """Does more with its weight."""

    def __call__(self, x: mx.array) -> Any:
        experts, scores = super().__call__(x)
        return experts, scores * self.weight.sum()


Weighs.__name__ = "MoEGate"


def test_a_router_s_products_have_the_same_bits_in_company(kernel: Kernel):
    model, x = Routed(), drawn(5, 1, K)
    want = [model.gate(row[None]) for row in x]
    products.prepare(model)
    kernel.calls.clear()
    experts, scores = model.gate(x)
    assert kernel.calls == [(5, 1, K)] and model.gate["weight"].shape == (8, K)
    for row, (its, own) in enumerate(want):
        assert mx.array_equal(experts[row : row + 1], its) and mx.array_equal(scores[row : row + 1], own)
    model.gate(drawn(products.SET + 1, 1, K))
    assert len(kernel.calls) == 1, "more rows are MLX's own"


def test_a_router_that_needs_its_weight_otherwise_stays_as_it_is(kernel: Kernel):
    model = Routed()
    model.gate.__class__ = Weighs
    products.prepare(model)
    kernel.calls.clear()
    model.gate(drawn(5, 1, K))
    assert type(model.gate) is Weighs and not kernel.calls
