"""Products of few rows with quantised weights, by Metal kernels run on this machine's processor."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from families import build_family
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from metal.draws import draws
from metal.mutants import survivors
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.models.switch_layers import QuantizedSwitchLinear

from omlxd.engine import mlx_adapter
from omlxd.engine.mlx_adapter.metal import rule
from omlxd.engine.mlx_adapter.metal.kernel import Kernel
from omlxd.engine.mlx_adapter.metal.products import install, product
from omlxd.engine.mlx_adapter.metal.products.product import Weights, few_row_product, gathered_product

CLOSE = {mx.float32: 1e-6, mx.float16: 1e-3, mx.bfloat16: 1e-2}
DTYPES = st.sampled_from([*CLOSE])


def normal(seed: int, *shape: int, dtype: Any = mx.float32) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(seed)).astype(dtype)


def exactly(array: mx.array) -> np.ndarray:
    return np.array(array.astype(mx.float32), np.float64)


def quantised(seed: int, shape: tuple[int, ...], bits: int, group: int, dtype: Any, biased: bool) -> Weights:
    parts = mx.quantize(normal(seed, *shape, dtype=dtype), group_size=group, bits=bits)
    return Weights(*parts, bits, group, normal(seed + 1, *shape[:-1], dtype=dtype) if biased else None)


def numbers(weights: Weights) -> np.ndarray:
    """(N, K) in float64."""
    scales, biases = exactly(weights.scales), exactly(weights.biases)
    ones = [mx.ones_like(weights.scales, dtype=mx.float32), mx.zeros_like(weights.biases, dtype=mx.float32)]
    whole = exactly(mx.dequantize(weights.words, *ones, group_size=weights.group, bits=weights.bits))
    grouped = whole.reshape(*scales.shape, weights.group) * scales[..., None] + biases[..., None]
    return grouped.reshape(whole.shape)


def far(got: mx.array, want: np.ndarray) -> float:
    return np.abs(exactly(got) - want).max() / np.abs(want).max()


@given(st.data())
@settings(max_examples=draws(12), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_product_is_that_of_float64_and_a_rows_bits_its_own(on_cpu: Any, data: st.DataObject):
    bits, group = data.draw(st.sampled_from(product.BITS)), data.draw(st.sampled_from([32, 64, 128]))
    rows, n, groups = (data.draw(st.integers(*ends)) for ends in ((1, 16), (9, 21), (1, 6)))
    dtype, biased = data.draw(DTYPES), data.draw(st.booleans())
    weights = quantised(3, (n, groups * group), bits, group, dtype, biased)
    x = normal(5, rows, groups * group, dtype=dtype)
    got = few_row_product(x, weights)
    want = exactly(x) @ numbers(weights).T
    assert far(got, want if weights.added is None else want + exactly(weights.added)) < CLOSE[dtype]
    at = data.draw(st.integers(0, rows - 1))
    assert mx.array_equal(few_row_product(x[at : at + 1], weights)[0], got[at])


@given(st.data())
@settings(max_examples=draws(8), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_pairs_have_their_experts_and_bits_of_their_own(on_cpu: Any, data: st.DataObject):
    bits, dtype = data.draw(st.sampled_from([4, 8])), data.draw(DTYPES)
    tokens, experts, chosen = (data.draw(st.integers(1, most)) for most in (9, 5, 3))
    own_rows, biased = data.draw(st.booleans()), data.draw(st.booleans())
    weights = quantised(3, (experts, 9, 64), bits, 32, dtype, biased)
    indices = mx.array(
        data.draw(st.lists(st.integers(0, experts - 1), min_size=tokens * chosen, max_size=tokens * chosen))
    ).reshape(tokens, chosen)
    x = normal(5, tokens, chosen if own_rows else 1, 1, 64, dtype=dtype)
    got = gathered_product(x, weights, indices)
    assert got.shape == (tokens, chosen, 1, 9)
    of_pair = numbers(weights)[np.array(indices)]
    want = np.einsum("tcok,tcnk->tcn", np.broadcast_to(exactly(x), (tokens, chosen, 1, 64)), of_pair)
    if weights.added is not None:
        want += exactly(weights.added)[np.array(indices)]
    assert far(got[:, :, 0], want) < CLOSE[dtype]
    at = data.draw(st.integers(0, tokens - 1))
    alone = gathered_product(x[at : at + 1], weights, indices[at : at + 1])
    assert mx.array_equal(alone[0], got[at])


def call_of(kernel: Kernel, weights: Weights, x: mx.array, indices: mx.array | None) -> mx.array:
    """The product by `kernel`, a mutant."""
    original = "DENSE" if indices is None else "GATHERED"
    held = getattr(product, original)
    setattr(product, original, kernel)
    try:
        return few_row_product(x, weights) if indices is None else gathered_product(x, weights, indices)
    finally:
        setattr(product, original, held)


MUTANTS = [
    ("at < k;", "at + 32 < k;"),
    ("at / GROUP]);\n      bias", "at / GROUP + 1]);\n      bias"),
    ("own[i + 3] * number[i + 3]", "own[i + 3] * number[i + 2]"),
    ("const float sum = simd_sum(sums[m * 4 + out]);", "const float sum = sums[m * 4 + out];"),
    ("sums[m * 4 + out] += scale[out]", "sums[m * 4 + out] = scale[out]"),
    ("lane == 0 && first + out < n", "lane == 0"),
    ("count = min(ROWS, sizes[2] - start);", "count = ROWS;"),
    ("int(simdgroup_index_in_threadgroup)) * 4", "int(simdgroup_index_in_threadgroup)) * 2"),
]


def test_faults_of_a_product_are_found(on_cpu: Any):
    weights = quantised(3, (13, 1088), 4, 64, mx.float32, True)
    x = normal(5, 3, 1088)
    want = exactly(x) @ numbers(weights).T + exactly(weights.added)

    def check(kernel: Kernel) -> None:
        assert far(call_of(kernel, weights, x, None), want) < 1e-6

    assert survivors(product.DENSE, MUTANTS, check) == []


def test_faults_of_experts_are_found(on_cpu: Any):
    weights = quantised(3, (3, 9, 64), 8, 32, mx.float32, True)
    indices = mx.array([[0, 1], [2, 1], [1, 0], [1, 2], [1, 1]])
    x = normal(5, 5, 1, 1, 64)
    want = np.einsum("tk,tcnk->tcn", exactly(x)[:, 0, 0], numbers(weights)[np.array(indices)])
    want += exactly(weights.added)[np.array(indices)]

    def check(kernel: Kernel) -> None:
        assert far(call_of(kernel, weights, x, indices)[:, :, 0], want) < 1e-6

    edits = [
        ("if (before % ROWS != 0) return;", "if (before != 0) return;"),
        ("rows[m] = i / each;", "rows[m] = i;"),
        ("outs[m] = i;", "outs[m] = pair;"),
        ("added_at = expert * n", "added_at = 0"),
        ("const size_t of_expert = size_t(expert) * n;", "const size_t of_expert = size_t(expert);"),
        ("i < pairs && count < ROWS", "i + 1 < pairs && count < ROWS"),
    ]
    assert survivors(product.GATHERED, edits, check) == []


# --------------------------------------------------------------------------- in MLX's layers


@pytest.fixture
def installed(on_cpu: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, float]]:
    """Ratios of time by the names of cases; 0.5 where nothing is said."""
    on_cpu(orders=(0,))
    ratios = dict[str, float]()
    monkeypatch.setattr(rule, "_verdicts", {})
    monkeypatch.setattr(rule, "ratio_of", lambda timed, clock: ratios.get(timed.name, 0.5))
    install.reset()
    yield ratios
    install.reset()


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 24).to_quantized(32, 4)
        self.embed = nn.Embedding(24, 64).to_quantized(32, 8)
        self.experts = QuantizedSwitchLinear(64, 16, 4, group_size=32, bits=4)


def counted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kernels that are called from now on."""
    called = list[str]()

    def note(name: str) -> None:
        own = getattr(install, name)
        monkeypatch.setattr(install, name, lambda *how: called.append(name) or own(*how))

    note("few_row_product")
    note("gathered_product")
    return called


def test_mlx_layers_call_what_is_not_slower(installed: dict[str, float], monkeypatch: pytest.MonkeyPatch):
    installed["16 rows"] = 1.5
    layers, indices = Layers(), mx.array([[[0, 1], [2, 1], [3, 0]]])
    x, tokens = normal(1, 1, 3, 64), normal(2, 1, 3, 1, 1, 64)
    want = layers.linear(x), layers.embed.as_linear(x), layers.experts(tokens, indices)
    install.prepare(layers)
    called = counted(monkeypatch)
    got = layers.linear(x), layers.embed.as_linear(x), layers.experts(tokens, indices)
    assert called == ["few_row_product", "few_row_product", "gathered_product"]
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)
    called.clear()
    layers.linear(normal(1, 9, 64))  # Up to 16 rows it is slower.
    layers.linear(normal(1, 3, 64).astype(mx.float16))  # Weights of another type.
    assert called == []


def test_nothing_is_patched_where_a_kernel_does_not_run(
    installed: dict[str, float], monkeypatch: pytest.MonkeyPatch
):
    def broken(*_: Any) -> Any:
        raise RuntimeError("Unable to build metal library")

    monkeypatch.setattr(install, "few_row_product", broken)
    monkeypatch.setattr(install, "gathered_product", broken)
    own = nn.QuantizedLinear.__call__
    install.prepare(Layers())
    assert nn.QuantizedLinear.__call__ is own
    assert all("does not run here" in verdict.why for verdict in rule.verdicts().values())


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_a_model_answers_as_by_mlx_alone(
    family: str, installed: dict[str, float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Steps of four rows, and a row's bits alone and in company."""
    model = mlx_adapter.load(build_family(family, tmp_path / family)).model
    nn.quantize(model, group_size=32, bits=4)
    tokens = mx.arange(20, 24)[:, None]

    def logits(tokens: mx.array) -> mx.array:
        return model(tokens, cache=make_prompt_cache(model))[:, -1]

    want = logits(tokens)
    install.prepare(model)
    called = counted(monkeypatch)
    got = logits(tokens)
    assert set(called) == {"few_row_product", "gathered_product"} - {
        "gathered_product" if family == "qwen3" else ""
    }
    np.testing.assert_allclose(got, want, atol=1e-3)
    two = logits(mx.concatenate([tokens[2:3], tokens[:1]]))
    assert mx.array_equal(two[0], got[2]) and mx.array_equal(two[1], got[0])
