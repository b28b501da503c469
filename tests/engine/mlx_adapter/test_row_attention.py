"""Rows that attend by themselves on a CPU give what MLX's own attention gives for the batch."""

from __future__ import annotations

from typing import Any, cast

import mlx.core as mx
import numpy as np
import pytest
from families import build_family
from mlx_lm.models import base

from omlxd.engine import mlx_adapter
from omlxd.engine.mlx_adapter import row_attention
from omlxd.engine.mlx_adapter import segments as segments_module
from omlxd.engine.mlx_adapter.row_attention import Costs, by_rows
from omlxd.engine.mlx_adapter.segments import Segment, SegmentedBatchKVCache

PLACES = [0, 37, 99], [100, 80, 100]

ALWAYS, NEVER = Costs(1.0, 0.0, 0.0, 0.0), Costs(0.0, 0.0, 1.0, 0.0)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of each call of `by_rows`, which is always used."""
    calls: list[int] = []

    def noted(queries: Any, *rest: Any) -> mx.array:
        calls.append(queries.shape[0])
        return by_rows(queries, *rest)

    row_attention.install()
    monkeypatch.setattr(row_attention, "by_rows", noted)
    monkeypatch.setattr(row_attention, "costs_for", lambda queries, keys: ALWAYS)
    return calls


@pytest.mark.parametrize("backend", ["cpu", "metal"])
@pytest.mark.parametrize("heads", [(4, 4), (9, 3), (8, 1)], ids=str)
@pytest.mark.parametrize("new", [1, 2, 16])
def test_each_row_sees_its_own_tokens(
    new: int, heads: tuple[int, int], backend: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(row_attention, "backend", lambda: backend)
    count, kv_heads = heads
    queries = mx.random.normal((3, count, new, 16), key=mx.random.key(0))
    keys, values = (mx.random.normal((3, kv_heads, 128, 16), key=mx.random.key(seed)) for seed in (1, 2))
    got = by_rows(queries, keys, values, PLACES, 0.25)
    assert got.shape == queries.shape
    starts, ends = (mx.array(at)[:, None, None, None] for at in PLACES)
    own = ends - new + mx.arange(new)[:, None]
    mask = (mx.arange(128) >= starts) & (mx.arange(128) <= own)
    want = mx.fast.scaled_dot_product_attention(queries, keys, values, scale=0.25, mask=mask)
    for row, (start, end) in enumerate(zip(*PLACES, strict=True)):
        there = min(new, end - start)
        np.testing.assert_allclose(got[row, :, new - there :], want[row, :, new - there :], atol=1e-5)
        assert not np.array(got[row, :, : new - there]).any(), "what stands before a row's first token is 0"


def test_the_rule():
    costs = Costs(call=10.0, column=1.0, row=20.0, token=0.9)
    assert costs.pays([100, 1000], 1000), "40 + 990 against 2,010"
    assert not costs.pays([3, 3, 3, 3], 3), "91 against 22"
    assert costs.pays([1], 1000), "one row in a wide array"


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_model_decodes_the_same_with_it_and_without(family: str, tmp_path, counted: list[int], monkeypatch):
    loaded = mlx_adapter.load(build_family(family, tmp_path / family))

    def run() -> np.ndarray:
        rows: list[mlx_adapter.Cache] = []
        for seed, length in enumerate((70, 9, 33)):
            rows.append(cache := mlx_adapter.new_cache(loaded.model, 128))
            tokens = mx.random.randint(5, 200, (1, length), key=mx.random.key(seed))
            mx.eval(loaded.model(tokens, cache=cache))
            mlx_adapter.after_prefill(cache, length)
        batch = mlx_adapter.merge([rows[0]])
        for cache in rows[1:]:
            mlx_adapter.extend(batch, cache)
        out = [
            loaded.model(mx.array([[step + row for row in range(3)] for step in range(1, 6)]).T, cache=batch)
        ]
        mlx_adapter.trim(batch, [2, 0, 3])
        for step in range(3):
            out.append(loaded.model(mx.array([[step + 7]] * 3), cache=batch))
        mlx_adapter.keep_rows(batch, [0, 2])
        out.append(loaded.model(mx.array([[11], [12]]), cache=batch))
        return np.concatenate([np.array(each[:2, -1].astype(mx.float32)) for each in out])

    counted.clear()
    got, calls = run(), list(counted)
    assert {2, 3} <= set(calls)
    monkeypatch.setattr(row_attention, "costs_for", lambda queries, keys: NEVER)
    np.testing.assert_allclose(got, run(), atol=2e-4)
    assert counted == calls, "MLX's own did the second run"


def test_a_load_measures_and_doctor_can_tell(tmp_path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(row_attention, "_costs", found := cast(dict[Any, Any], {}))
    mlx_adapter.load(build_family("llama", tmp_path / "llama"))
    (costs,) = found.values()
    assert all(cost >= 0 for cost in costs) and costs.row + costs.token > 0 and costs.call + costs.column > 0
    found["a kind"] = ALWAYS
    assert mlx_adapter.rows_attend_alone()
    found.clear()
    assert not mlx_adapter.rows_attend_alone()
    assert base.scaled_dot_product_attention is not None


def test_what_can_not_be_measured_goes_on_by_mlx(monkeypatch: pytest.MonkeyPatch, caplog):
    monkeypatch.setattr(row_attention, "_costs", {})
    monkeypatch.setattr(row_attention, "_measured", lambda *key: 1 / 0)
    queries = mx.zeros((1, 2, 1, 8))
    assert row_attention.costs_for(queries, queries) is None
    assert "by MLX's own attention" in caplog.text


@pytest.mark.parametrize("new", [1, 3])
def test_what_rows_share_is_read_once_for_all_of_them(new: int):
    """Two rows behind two segments, one behind the first of them, one behind its own, one behind none."""
    lengths = (32, 32, 32)
    segments = [
        Segment(
            {f"l.{name}": normal(2 * at + kv, (1, 2, n, 16)) for kv, name in enumerate(("keys", "values"))}
        )
        for at, n in enumerate(lengths)
    ]
    held = [[0, 1], [0, 1], [0], [2], []]
    places = [3, 0, 9, 1, 0], [20, 20, 20, 20, 20]
    cache = SegmentedBatchKVCache(places[0])
    cache.layer, cache.segments = "l", [[segments[i] for i in own] for own in held]
    cache.keys, cache.values, cache._idx = normal(90, (5, 2, 24, 16)), normal(91, (5, 2, 24, 16)), 20
    cache.unread = cache.keys, cache.values
    queries = normal(92, (5, 6, new, 16))
    got = segments_module.attend(queries, cache.keys, cache.values, cache, 0.25, segments_module.OWN_MASK)
    for row, own in enumerate(held):
        start, end = places[0][row], places[1][row]
        keys, values = (
            mx.concatenate([*(pair[i] for pair in (segments[j].pair("l") for j in own)), tail], axis=2)
            for i, tail in enumerate(
                (cache.keys[row : row + 1, :, start:end], cache.values[row : row + 1, :, start:end])
            )
        )
        want = mx.fast.scaled_dot_product_attention(
            queries[row : row + 1], keys, values, scale=0.25, mask="causal"
        )
        np.testing.assert_allclose(got[row : row + 1], want, atol=1e-5)
    groups = segments_module._sharing(cache.segments)
    assert [(rows, len(shared)) for rows, shared in groups] == [([0, 1, 2], 1), ([3], 1), ([4], 0)]


def normal(seed: int, shape: tuple[int, ...]) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(seed))
