"""Attention of a row by itself, and when it is used."""

from __future__ import annotations

from typing import Any, cast

import mlx.core as mx
import numpy as np
import pytest
from families import build_family
from mlx_lm.models import base

from omlxd.engine import mlx_adapter
from omlxd.engine.mlx_adapter.attention import by_rows as row_attention
from omlxd.engine.mlx_adapter.attention.by_rows import HALF, Costs

ALWAYS, NEVER = Costs(1.0, 0.0, 0.0, 0.0), Costs(0.0, 0.0, 1.0, 0.0)


@pytest.mark.parametrize("backend", ["cpu", "metal"])
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("heads", [(4, 4), (9, 3), (8, 1)], ids=str)
@pytest.mark.parametrize("new", [1, 2, 16, 40])
def test_a_row_gets_what_mlx_gives(
    new: int, heads: tuple[int, int], sinks: bool, backend: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(row_attention, "backend", lambda: backend)
    count, kv_heads = heads
    queries, sink = normal(0, (1, count, new, 16)), normal(3, (count,)) + 3 if sinks else None
    keys, values = (normal(seed, (1, kv_heads, 80, 16)) for seed in (1, 2))
    got = row_attention.one_row(queries, keys, values, 0.25, sink)
    mask = mx.arange(80) <= 80 - new + mx.arange(new)[:, None]
    want = mx.fast.scaled_dot_product_attention(queries, keys, values, scale=0.25, mask=mask, sinks=sink)
    np.testing.assert_allclose(got, want, atol=1e-5)


def test_the_rule():
    costs = Costs(call=10.0, column=1.0, row=20.0, token=0.9)
    assert costs.pays([100, 1000], 1000), "40 + 990 against 2,010"
    assert not costs.pays([3, 3, 3, 3], 3), "91 against 22"
    assert costs.pays([1], 1000), "one row in a wide array"


def test_a_load_measures_and_doctor_can_tell(tmp_path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(row_attention, "_costs", found := cast(dict[Any, Any], {}))
    mlx_adapter.load(build_family("llama", tmp_path / "llama"))
    (costs,) = found.values()
    assert all(cost >= 0 for cost in costs) and costs.row + costs.token > 0 and costs.call + costs.column > 0
    found["a kind"] = ALWAYS
    assert mlx_adapter.rows_attend_alone() and mlx_adapter.rows_alone_ratio() == ALWAYS.ratio(*HALF) <= 1
    found.clear()
    assert not mlx_adapter.rows_attend_alone() and mlx_adapter.rows_alone_ratio() is None
    assert base.scaled_dot_product_attention is not None


def test_what_can_not_be_measured_goes_on_by_mlx(monkeypatch: pytest.MonkeyPatch, caplog):
    monkeypatch.setattr(row_attention, "_costs", {})
    monkeypatch.setattr(row_attention, "_measured", lambda *key: 1 / 0)
    queries = mx.zeros((1, 2, 1, 8))
    assert row_attention.costs_for(queries, queries) is None
    assert "by MLX's own attention" in caplog.text


def test_the_log_says_why_the_slower_way_is_chosen(monkeypatch: pytest.MonkeyPatch, caplog):
    caplog.set_level("INFO", row_attention.log.name)
    monkeypatch.setattr(row_attention, "_costs", {})
    monkeypatch.setattr(row_attention, "_measured", lambda *key: row_attention.Costs(4.0, 0.0, 1.05, 0.0))
    queries = mx.zeros((1, 2, 1, 8))
    assert row_attention.costs_for(queries, queries) is not None
    assert "row by row takes 1.05 times" in caplog.text and "is chosen up to 1.1 times, since" in caplog.text


def normal(seed: int, shape: tuple[int, ...]) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(seed))


@pytest.mark.cpu_rules("on Metal MLX's own attention reads latents")
@pytest.mark.parametrize("rows", [1, 3])
def test_latents_are_read_once_for_all_heads(rows: int):
    """As MLX's own attention has it, with scores in place of a mask; a mask of truths goes to that."""
    queries, latents, scores = (
        mx.random.normal(shape, key=mx.random.key(seed))
        for seed, shape in enumerate([(rows, 8, 1, 64), (rows, 1, 50, 64), (rows, 8, 1, 50)])
    )
    want = mx.fast.scaled_dot_product_attention(queries, latents, latents, scale=0.3, mask=scores)
    assert row_attention._are_scores(scores, queries, latents)
    np.testing.assert_allclose(row_attention.over_latents(queries, latents, 0.3, scores), want, atol=2e-5)
    got = row_attention.attend(queries, latents, latents, None, 0.3, scores, None)
    np.testing.assert_allclose(got, want, atol=2e-5)
    for mask in (scores > 0, scores[:, :1], None, "causal"):
        assert not row_attention._are_scores(mask, queries, latents)
