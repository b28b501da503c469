"""The products of a layer as one launch: what it is given, and when it stands for four."""

from __future__ import annotations

import re
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from omlxd.engine.mlx_adapter import layer_products, products
from omlxd.engine.mlx_adapter.layer_products import LayerProducts
from omlxd.engine.mlx_adapter.products_kernel import FORMS, SET, WARPS

HIDDEN, WIDE, FFN = 64, 96, 144


def drawn(*shape: int) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(sum(shape))).astype(mx.bfloat16)


def layer_of(nexts: tuple[int, ...] = (96, 32, 32), biased: tuple[int, ...] = ()) -> LayerProducts:
    """`biased`: numbers of the weights that have a bias."""
    shapes = [(HIDDEN, WIDE), (FFN, HIDDEN), (FFN, HIDDEN), (HIDDEN, FFN), *((n, HIDDEN) for n in nexts)]
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
    ("rows", "most", "launches"), [(1, SET, 1), (SET, SET, 1), (SET + 1, 128, 0), (3, 2, 0)]
)
def test_rows_that_one_launch_takes(rows: int, most: int, launches: int, monkeypatch: pytest.MonkeyPatch):
    layer, asked = layer_of(), list[Any]()
    monkeypatch.setattr(products, "most_rows", lambda weights: most if len(weights) > 3 else 0)
    monkeypatch.setattr(layer_products, "run", lambda *given: asked.append(given) or [])
    products.of_layer(drawn(rows, WIDE), drawn(rows, HIDDEN), layer)
    assert len(asked) == launches


@pytest.mark.parametrize("rows", [1, 9, 32])
@pytest.mark.parametrize("nexts", [(96, 32, 32), (512,)], ids=["queries, keys and values", "head"])
def test_a_launch_gives_the_source_what_it_names(rows: int, nexts: tuple[int, ...], monkeypatch):
    asked: list[dict[str, Any]] = []

    def launch(**given: Any) -> list[mx.array]:
        asked.append(given)
        shapes, dtypes = given["output_shapes"], given["output_dtypes"]
        return [mx.zeros(shape, dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]

    monkeypatch.setattr(mx.fast, "precompiled_cuda_kernel", launch, raising=False)
    monkeypatch.setattr(layer_products.mx, "compile", lambda function: function)
    monkeypatch.setattr(layer_products.cuda_driver, "multiprocessors", lambda: 2)
    monkeypatch.setattr(layer_products.nvrtc, "machine_code", lambda source: source.encode())
    for cached in (layer_products.code, layer_products._launch, layer_products._counters):
        cached.cache_clear()
    biased = (1, 4) if len(nexts) > 1 else ()
    x, residual, layer = drawn(rows, WIDE), drawn(rows, HIDDEN), layer_of(nexts, biased)
    out = layer_products.run(x, residual, layer)
    assert [array.shape[1] for array in out] == [HIDDEN, *nexts]
    for cached in (layer_products.code, layer_products._launch, layer_products._counters):
        cached.cache_clear()
    (given,) = asked
    monkeypatch.undo()
    source = given["compiled_source"].decode()
    head = re.search(rf"{given['name']}\(([^)]*)\)", source)
    assert head is not None
    names = [argument.split() for argument in head[1].split(",")]
    kinds = [" ".join(words[:-1]) for words in names]
    named = {"x": x, "residual": residual, "norm0": layer.norms[0], "norm1": layer.norms[1]}
    named |= {f"w{i}": weight for i, weight in enumerate(layer.weights)}
    named |= {f"bias{i}": bias for i, bias in enumerate(layer.biases)}
    inputs = [words[-1] for words in names if words[:-1] in (["const", "T*"], ["const", "int*"])]
    for array, name in zip(given["inputs"], inputs, strict=True):
        assert name == "counters" or mx.array_equal(array, named[name]).item(), name
    assert len(given["output_shapes"]) == sum(kind in ("T*", "float*") for kind in kinds)
    numbers = [words[-1] for words in names if words[:-1] == ["const", "int"]]
    values = dict(zip(numbers, given["scalars"], strict=True))
    assert (values["rows"], values["wide"], values["hidden"], values["ffn"]) == (rows, WIDE, HIDDEN, FFN)
    form = FORMS[next(eights for eights in FORMS if rows <= 8 * eights)]
    blocks = [values[f"blocks{i}"] for i in range(4)]
    assert all(0 < count <= 2 * form.blocks for count in blocks)
    assert given["grid"] == (sum(blocks) * 32 * WARPS * form.groups, 1, 1)
    assert source.count("{") == source.count("}")


@pytest.mark.parametrize(("most", "jobs"), [(0, 0), (SET, 6), (128, 6 + 4)])
def test_all_launches_are_compiled_ahead(most: int, jobs: int, monkeypatch: pytest.MonkeyPatch):
    asked: list[tuple[Any, ...]] = []
    monkeypatch.setattr(products, "most_rows", lambda weights: most)
    for module, name in ((layer_products, "code"), (products, "code")):
        monkeypatch.setattr(module, name, lambda *form, name=module.__name__: asked.append((name, *form)))
    products.compile_ahead([layer_of(), layer_of(), layer_of((512,))])
    assert len(set(asked)) == len(asked) == jobs, "out and down are of one kind"


def test_each_kind_has_its_own_source():
    kinds = [
        (eights, kind, biases)
        for kind in ("bfloat16", "float16")
        for eights in FORMS
        for biases in ((False,) * 7, (False,) * 5, (True,) * 7, (False,) * 4 + (True,) * 3)
    ]
    sources = [layer_products.source_of(*kind) for kind in kinds]
    assert len({name for name, _ in sources}) == len(sources)
    assert all(name.isidentifier() and "FIRST" not in source for name, source in sources)
