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
from mlx_lm.models.switch_layers import SwitchGLU

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
    tokens, experts, chosen = (data.draw(st.integers(1, most)) for most in (16, 5, 3))
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
    ("row_groups + at / GROUP", "row_groups + (at + GROUP / 2) / GROUP"),
    ("float(number[i + 3])", "float(number[i + 2])"),
    ("min(out, last)", "out"),
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
    # More than 32 pairs; two of an expert are 32 apart.
    indices = mx.array([0 if at in (0, 32) else 1 + (at % 3 == 0) for at in range(40)]).reshape(20, 2)
    x = normal(5, 20, 1, 1, 64)
    want = np.einsum("tk,tcnk->tcn", exactly(x)[:, 0, 0], numbers(weights)[np.array(indices)])
    want += exactly(weights.added)[np.array(indices)]

    def check(kernel: Kernel) -> None:
        assert far(call_of(kernel, weights, x, indices)[:, :, 0], want) < 1e-6

    edits = [
        ("% ROWS != 0) return;", "!= 0) return;"),
        ("i < pair; i += 32", "i < min(pair, 32); i += 32"),
        ("from += 32", "from += 33"),
        ("place == m", "place >= m"),
        ("outs[m] / each;", "outs[m];"),
        ("i - pair", "i"),
        ("i < pairs && int", "int"),
        ("added_at = expert * n", "added_at = 0"),
        ("const size_t of_expert = size_t(expert) * n;", "const size_t of_expert = size_t(expert);"),
    ]
    assert survivors(product.GATHERED, edits, check) == []


QUANTIZED_H = Path(mx.__file__).parent / "include/mlx/backend/metal/kernels/quantized.h"


def by_mlx(x: mx.array, weights: Weights) -> mx.array:
    """The product by MLX's own kernel for one row, of the header in its wheel."""
    text = QUANTIZED_H.read_text()
    parts = (
        ("template <int bits, int wsize = 8>\ninline constexpr short get_pack", "inline U load_vector_safe("),
        ("template <typename U, int values_per_thread, int bits>\ninline U qdot(", "inline U qdot_safe("),
        ("template <typename T, int group_size, int bits, bool partial_rows", "METAL_FUNC void qmv_impl("),
    )
    header = "#define METAL_FUNC inline\nconstant constexpr int SIMD_SIZE = 32;\n"
    for first, behind in parts:
        header += text[text.index(first) : text.rindex("template", 0, text.index(behind))]
    kernel = Kernel(
        "qmv_fast",
        ("w", "scales", "biases", "x", "in_size", "out_size"),
        ("y",),
        """qmv_fast_impl<T, GROUP, BITS>(w, scales, biases, x, y, in_size[0], out_size[0],
             threadgroup_position_in_grid, simdgroup_index_in_threadgroup, thread_index_in_simdgroup);""",
        header,
    )
    n, k = weights.shape
    (out,) = kernel(
        [weights.words, weights.scales, weights.biases, x, mx.array([k]), mx.array([n])],
        template=[("T", x.dtype), ("GROUP", weights.group), ("BITS", weights.bits)],
        grid=(32 * x.shape[0], 2 * n // 8, 1),
        threadgroup=(32, 2, 1),
        output_shapes=[(x.shape[0], n)],
        output_dtypes=[x.dtype],
    )
    return out


@pytest.mark.parametrize(("bits", "group", "dtype"), [(4, 64, mx.float16), (8, 32, mx.bfloat16)])
def test_a_rows_bits_are_those_of_mlx_kernel_for_one_row(on_cpu: Any, bits: int, group: int, dtype: Any):
    on_cpu(orders=(0,))
    weights = quantised(3, (16, 1024), bits, group, dtype, False)
    x = normal(5, 3, 1024, dtype=dtype)
    assert mx.array_equal(few_row_product(x, weights), by_mlx(x, weights))


# --------------------------------------------------------------------------- in MLX's layers


@pytest.fixture
def installed(on_cpu: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, float]]:
    """Ratios of time by the names of cases; 0.5 where nothing is said."""
    on_cpu(orders=(0,))
    ratios = dict[str, float]()
    monkeypatch.setattr(rule, "_verdicts", {})
    monkeypatch.setattr(rule, "times_of", lambda timed, clock: (ratios.get(timed.name, 0.5), 1.0))
    install.reset()
    yield ratios
    install.reset()


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 24).to_quantized(32, 4)
        self.embed = nn.Embedding(24, 64).to_quantized(32, 8)
        self.experts = SwitchGLU(64, 32, 4)
        nn.quantize(self.experts, group_size=32, bits=4)


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
    x = normal(1, 1, 3, 64)
    want = layers.linear(x), layers.embed.as_linear(x), layers.experts(x, indices)
    install.prepare(layers)
    called = counted(monkeypatch)
    got = layers.linear(x), layers.embed.as_linear(x), layers.experts(x, indices)
    assert called == ["few_row_product", "few_row_product", *["gathered_product"] * 3]
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)
    called.clear()
    layers.linear(normal(1, 9, 64))  # Up to 16 rows it is slower.
    layers.linear(normal(1, 3, 64).astype(mx.float16))  # Weights of another type.
    assert called == []


def test_pairs_that_mlx_lm_sorts_have_the_bits_of_a_token_alone(
    installed: dict[str, float], monkeypatch: pytest.MonkeyPatch
):
    experts = Layers().experts
    x = normal(1, 16, 64)
    indices = mx.stack([mx.random.permutation(4, key=mx.random.key(at)) for at in range(16)])
    want = experts(x, indices)
    install.prepare(experts)
    called = counted(monkeypatch)
    got = experts(x, indices)
    np.testing.assert_allclose(got, want, atol=1e-5)
    assert mx.array_equal(experts(x[5:6], indices[5:6])[0], got[5])
    assert called == ["gathered_product"] * 6


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
