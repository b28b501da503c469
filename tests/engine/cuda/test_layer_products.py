"""The products of a layer as one launch: what it is given, and when it stands for four."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from omlxd.engine.mlx_adapter.cuda.attention import fused_attention
from omlxd.engine.mlx_adapter.cuda.attention.fused_attention import FusedAttention, Heads, Launch
from omlxd.engine.mlx_adapter.cuda.attention.segments import Shared
from omlxd.engine.mlx_adapter.cuda.products import layer_products, products
from omlxd.engine.mlx_adapter.cuda.products.layer_products import MOST_SHARED, LayerProducts
from omlxd.engine.mlx_adapter.cuda.products.products_kernel import FORMS, SET, WARPS, form_of

HIDDEN, WIDE, FFN = 64, 96, 144


def drawn(*shape: int) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(sum(shape))).astype(mx.bfloat16)


def layer_of(
    nexts: tuple[int, ...] = (96, 32, 32), biased: tuple[int, ...] = (), wide: int = WIDE
) -> LayerProducts:
    """`biased`: numbers of the weights that have a bias."""
    shapes = [(HIDDEN, wide), (FFN, HIDDEN), (FFN, HIDDEN), (HIDDEN, FFN), *((n, HIDDEN) for n in nexts)]
    biases = [drawn(shape[0]) if i in biased else None for i, shape in enumerate(shapes)]
    return LayerProducts(
        [drawn(*shape) / 8 for shape in shapes], biases, (drawn(HIDDEN), drawn(HIDDEN)), 1e-5
    )


def wanted(x: mx.array, residual: mx.array, layer: LayerProducts) -> list[mx.array]:
    """By the definition, in float32."""
    arrays = [array.astype(mx.float32) for array in (x, residual, *layer.norms, *layer.weights)]
    x, residual, norm, next_norm, *weights = arrays
    biases = [0 if bias is None else bias.astype(mx.float32) for bias in layer.biases]
    by = [lambda x, w=w, b=b: x @ w.T + b for w, b in zip(weights, biases, strict=True)]
    total = residual + by[0](x)
    x = mx.fast.rms_norm(total, norm, layer.eps)
    gate = by[1](x)
    total = total + by[3](gate * mx.sigmoid(gate) * by[2](x))
    return [total, *(one(mx.fast.rms_norm(total, next_norm, layer.eps)) for one in by[4:])]


@pytest.mark.parametrize("biased", [(), (0, 1, 3, 5), tuple(range(7))], ids=["none", "some", "all"])
def test_four_products_are_the_layers(biased: tuple[int, ...]):
    layer, x, residual = layer_of(biased=biased), drawn(5, WIDE), drawn(5, HIDDEN)
    got = products.of_layer(x, residual, layer)
    assert [array.shape for array in got] == [(5, HIDDEN), (5, 96), (5, 32), (5, 32)]
    for ours, want in zip(got, wanted(x, residual, layer), strict=True):
        apart = np.array(ours.astype(mx.float32)) - np.array(want)
        assert np.sqrt((apart**2).mean() / (np.array(want) ** 2).mean()) < 0.02


@pytest.mark.parametrize(
    ("rows", "most", "launches"), [(1, SET, 1), (SET, SET, 1), (SET + 1, 128, 1), (128, 128, 1), (3, 2, 0)]
)
def test_rows_that_one_launch_takes(rows: int, most: int, launches: int, monkeypatch: pytest.MonkeyPatch):
    layer, asked = layer_of(), list[Any]()
    monkeypatch.setattr(products, "most_rows", lambda weights: most if len(weights) > 3 else 0)
    monkeypatch.setattr(layer_products, "run", lambda *given: asked.append(given) or [])
    products.of_layer(drawn(rows, WIDE), drawn(rows, HIDDEN), layer)
    assert len(asked) == launches


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[dict[str, Any]]]:
    """Launches on a GPU of two multiprocessors, whose code is its source. They give zeros."""
    asked: list[dict[str, Any]] = []

    def launch(**given: Any) -> list[mx.array]:
        asked.append(given)
        shapes, dtypes = given["output_shapes"], given["output_dtypes"]
        return [mx.zeros(shape, dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]

    monkeypatch.setattr(mx.fast, "precompiled_cuda_kernel", launch, raising=False)
    monkeypatch.setattr(layer_products.mx, "compile", lambda function: function)
    monkeypatch.setattr(layer_products.cuda_driver, "multiprocessors", lambda: 2)
    for module in (layer_products, fused_attention):
        monkeypatch.setattr(module.kernel_store, "machine_code", lambda source: source.encode())
    for cached in (layer_products.code, layer_products._launch, layer_products._counters):
        cached.cache_clear()
    yield asked
    for cached in (layer_products.code, layer_products._launch, layer_products._counters):
        cached.cache_clear()


def arguments_of(given: dict[str, Any]) -> list[tuple[str, str]]:
    """(type, name) of each argument of the kernel."""
    source = given["compiled_source"].decode()
    head = re.search(r"#define TAKES (.*)\n", source)
    assert head is not None and f"#define FUNCTION {given['name']}\n" in source
    assert source.count("{") == source.count("}")
    words = [argument.strip().rsplit(" ", 1) for argument in head[1].split(",")]
    return [(kind, name) for kind, name in words]


def check_names(given: dict[str, Any], named: dict[str, mx.array]) -> dict[str, int]:
    """Arrays are those that the source names so, and outputs are as many. Returns its numbers."""
    arguments = arguments_of(given)
    inputs = [name for kind, name in arguments if kind.startswith("const") and kind.endswith("*")]
    for array, name in zip(given["inputs"], inputs, strict=True):
        assert name == "counters" or array is named[name] or mx.array_equal(array, named[name]).item(), name
    assert len(given["output_shapes"]) == sum(not kind.startswith("const") for kind, _ in arguments)
    numbers = [name for kind, name in arguments if kind == "const int"]
    return dict(zip(numbers, given["scalars"], strict=True))


def names_of(residual: mx.array, layers: list[LayerProducts]) -> dict[str, mx.array]:
    named = {"residual": residual}
    for at, layer in enumerate(layers):
        named |= {f"norm0_{at}": layer.norms[0], f"norm1_{at}": layer.norms[1]}
        named |= {f"w{i}_{at}": weight for i, weight in enumerate(layer.weights)}
        named |= {f"bias{i}_{at}": bias for i, bias in enumerate(layer.biases) if bias is not None}
    return named


@pytest.mark.parametrize("rows", [1, 9, 32, 33, 128])
@pytest.mark.parametrize("nexts", [(96, 32, 32), (512,)], ids=["queries, keys and values", "head"])
def test_a_launch_gives_the_source_what_it_names(rows: int, nexts: tuple[int, ...], asked):
    biased = (1, 4) if len(nexts) > 1 else ()
    x, residual, layer = drawn(rows, WIDE), drawn(rows, HIDDEN), layer_of(nexts, biased)
    out = layer_products.run(x, residual, [layer])
    assert [array.shape[1] for array in out] == [HIDDEN, *nexts]
    (given,) = asked
    values = check_names(given, {"x": x, **names_of(residual, [layer])})
    assert (values["rows"], values["wide"], values["hidden"], values["ffn"]) == (rows, WIDE, HIDDEN, FFN)
    eights, sets = form_of(rows)
    form, blocks = FORMS[eights], [values[f"blocks{i}"] for i in range(4)]
    assert all(0 < count <= max(1, 2 * form.blocks // sets) for count in blocks)
    assert given["grid"] == (sets * sum(blocks) * 32 * WARPS * form.groups, 1, 1)


def attention_of(rows: int, shared: int = 0, norm: bool = True) -> Launch:
    """`shared`: rows that hold each segment; 0: there is none."""
    heads = Heads(128, 8, 2, 128, False, norm, 0.1, 1e-6, mx.bfloat16)
    held, weight = (drawn(rows, 2, 1280, 128), drawn(rows, 2, 1280, 128) + 1), drawn(128)
    starts, ends = mx.zeros((rows,), mx.int32), mx.full((rows,), 1100, mx.int32)
    table, counts = mx.zeros((3, 1 + 2 * rows), mx.int32), mx.ones((rows,), mx.int32)
    its = Shared(mx.zeros((3, 2), mx.uint64), table, counts, 2048, 3, shared) if shared else None
    norms = (weight, weight + 1) if norm else None
    return FusedAttention(heads).launch(norms, mx.zeros((rows, 128)), held, starts, ends, None, its)


NEXTS = 1024, 256, 256
INPUTS = "turns keys values tails starts ends owners addresses table counts counters"


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("shared", [0, 1])
@pytest.mark.parametrize("count", [1, 3])
def test_layers_end_with_attention(count: int, shared: int, norm: bool, asked):
    attentions = [attention_of(1, shared, norm) for _ in range(count)]
    x, residual = drawn(1, 1024), drawn(1, HIDDEN)
    layers = [layer_of(NEXTS, (1,), wide=1024) for _ in range(count)]
    out = layer_products.run(x, residual, layers, attentions)
    assert [array.shape[1] for array in out] == [HIDDEN, 1024], "the residual, and what attention gives"
    (given,) = asked
    words = [*(("q_norm", "k_norm") if norm else ()), *INPUTS.split()]
    its: dict[str, mx.array] = {}
    for at, attention in enumerate(attentions):
        arrays = zip(words, [*attention.norms, *attention.inputs], strict=True)
        its |= {f"its_{name}{f'_{at}' * (name in layer_products.OWN)}": array for name, array in arrays}
    values = check_names(given, {"x": x, **its, **names_of(residual, layers)})
    assert values["its_rows"] == values["rows"] == 1 and values["its_segments"] == (3 if shared else 0)
    of_attention = (8 if shared else 2), 2
    assert (values["across_blocks"], values["down_blocks"]) == attentions[0].blocks == of_attention
    blocks = sum(values[f"blocks{i}"] for i in range(4)) + values["across_blocks"] * values["down_blocks"]
    assert given["grid"] == (count * blocks * 32 * WARPS, 1, 1)
    assert given["shared_memory"] <= MOST_SHARED
    parts = 16 + (6 if shared else 0)
    assert given["output_shapes"][-3:] == [(1, 1024), (1, 8, parts, 128), (1, 8, parts, 2)]


@pytest.mark.parametrize(
    ("rows", "shared", "launches"),
    [(1, 1, 1), (2, 2, 1), (8, 2, 1), (3, 3, 4), (8, 0, 1), (9, 0, 1), (32, 0, 1), (128, 0, 1)],
)
def test_of_more_rows_or_queries_of_a_segment_attention_has_its_own_launch(
    rows: int, shared: int, launches: int, asked, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(products, "most_rows", lambda weights: 128)
    layers, attentions = [layer_of(NEXTS, wide=1024)] * 2, [attention_of(rows, shared)] * 2
    total, attended = products.of_layers(drawn(rows, 1024), drawn(rows, HIDDEN), layers, attentions)
    assert len(asked) == launches and total.shape == (rows, HIDDEN) and attended.shape == (rows, 1024)


@pytest.mark.parametrize(("most", "jobs"), [(0, 0), (SET, 6), (128, 6)])
def test_all_launches_are_compiled_ahead(most: int, jobs: int, monkeypatch: pytest.MonkeyPatch):
    asked: list[tuple[Any, ...]] = []
    monkeypatch.setattr(products, "most_rows", lambda weights: most)
    monkeypatch.setattr(layer_products, "code", lambda *form: asked.append(form))
    layers = [layer_of(), layer_of(), layer_of((512,))]
    products.compile_ahead(layers)
    assert len(set(asked)) == len(asked) == jobs, "out and down are of one kind"
    asked.clear()
    launch = attention_of(1)
    products.compile_ahead(layers, (launch.heads, launch.shape), {5, 2})
    assert len(asked) == jobs + 2 * len(FORMS) * (most > 0), "none follows the head"


def test_each_kind_has_its_own_source():
    kinds = [
        (eights, kind, biases)
        for kind in ("bfloat16", "float16")
        for eights in FORMS
        for biases in ((False,) * 7, (False,) * 5, (True,) * 7, (False,) * 4 + (True,) * 3)
    ]
    sources = [layer_products.source_of(*kind) for kind in kinds]
    assert len({name for name, _ in sources}) == len(sources)
    assert all(name.isidentifier() for name, _ in sources)
