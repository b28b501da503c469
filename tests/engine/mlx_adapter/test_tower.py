"""A vision tower in parts: the same features, whoever waits, and a look-up behind each part."""

from __future__ import annotations

import importlib.util

import pytest

if not importlib.util.find_spec("mlx_vlm"):
    pytest.skip("mlx-vlm is not installed", allow_module_level=True)

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from omlxd.engine.mlx_adapter.model.vlm import tower


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tower, "backend", lambda: "cpu")
    monkeypatch.setattr(tower, "PART", 1 << 14)
    monkeypatch.setattr(tower, "LEAST_ROWS", 8)


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(16, 32)
        self.language_model = nn.Linear(16, 32)


def test_products_are_cut_by_rows_and_those_of_the_language_model_are_not():
    model, parts = Tower(), []
    x = mx.random.normal((2, 50, 16))
    whole = model.fc(x)
    tower.cut_products(model)
    assert type(model.language_model) is nn.Linear and isinstance(model.fc, nn.Linear)
    assert mx.array_equal(model.fc(x), whole)  # Nothing is cut outside of a tower.
    with tower.in_parts(parts.append):
        cut = model.fc(x)
        model.language_model(x)
    assert [part.shape[0] for part in parts] == [32, 32, 32, 4]
    assert cut.shape == whole.shape and np.allclose(np.array(cut), np.array(whole), atol=1e-5)
    with tower.in_parts(lambda result: mx.eval(result)):
        assert mx.array_equal(model.fc(x), cut)  # Whether somebody looks or not.


@pytest.mark.parametrize("mask", ["none", "rows", "keys"])
def test_attention_is_cut_by_its_queries(monkeypatch: pytest.MonkeyPatch, mask: str):
    monkeypatch.setattr(mx.fast, "scaled_dot_product_attention", mx.fast.scaled_dot_product_attention)
    tower.cut_attention()
    q, k, v = (mx.random.normal((1, 2, 50, 8)) for _ in range(3))
    masks = {"none": None, "rows": mx.random.normal((1, 1, 50, 50)), "keys": mx.random.normal((1, 1, 1, 50))}
    options = {"scale": 0.3, "mask": masks[mask]}
    whole, parts = mx.fast.scaled_dot_product_attention(q, k, v, **options), []
    with tower.in_parts(parts.append):
        cut = mx.fast.scaled_dot_product_attention(q, k, v, **options)
    assert [part.shape[2] for part in parts] == [50] * 3 + [10] * 5
    assert np.allclose(np.array(cut), np.array(whole), atol=1e-5)


def test_what_is_computed_in_a_pause_is_not_cut():
    model, seen = Tower(), []
    tower.cut_products(model)
    x = mx.random.normal((40, 16))

    def pause(result: mx.array) -> None:
        seen.append(result.shape)
        model.fc(x)

    with tower.in_parts(pause):
        model.fc(x)
    assert seen == [(32, 32), (8, 32)]


def test_attention_of_no_tokens_gives_none(monkeypatch: pytest.MonkeyPatch):
    lengths: list[int] = []
    monkeypatch.setattr(
        mx.fast, "scaled_dot_product_attention", lambda q, *_, **__: lengths.append(q.shape[2]) or q
    )
    tower.cut_attention()
    for length in (0, 3):
        q = mx.zeros((1, 2, length, 8))
        assert mx.fast.scaled_dot_product_attention(q, q, q, scale=1.0).shape == q.shape
    assert lengths == [3]
