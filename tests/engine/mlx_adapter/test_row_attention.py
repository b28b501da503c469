"""Attention of a row by itself, and when it is used."""

from __future__ import annotations

from typing import Any, cast

import mlx.core as mx
import numpy as np
import pytest
from backends import use_backend
from families import build_family
from mlx_lm.models import base

from omlxd.engine import mlx_adapter
from omlxd.engine.mlx_adapter.attention import by_rows as row_attention
from omlxd.engine.mlx_adapter.attention import row_costs
from omlxd.engine.mlx_adapter.attention.row_costs import Costs, Seconds

SIZES = (4, 8), (512, 8192)


def costs(joint: tuple[float, ...], alone: tuple[float, ...]) -> Costs:
    return Costs(*(Seconds(*SIZES, cast(Any, taken)) for taken in (joint, alone)))


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


def test_what_was_not_measured_lies_between():
    taken = Seconds((4, 8), (100, 300), (10.0, 30.0, 12.0, 52.0))
    assert [taken.of(rows, length) for rows in (4, 8) for length in (100, 300)] == [10.0, 30.0, 12.0, 52.0]
    assert taken.of(6, 200) == pytest.approx((10 + 30 + 12 + 52) / 4)
    assert taken.of(4, 10) == 10 and taken.of(4, 500) == pytest.approx(50)
    assert taken.of(16, 100) == 24 and taken.of(1, 100) == 2.5


def test_lengths_decide_on_metal_and_the_load_on_a_cpu(monkeypatch: pytest.MonkeyPatch):
    """Four short rows take half as long together, long ones 0.8 times as long by themselves."""
    monkeypatch.setattr(row_costs, "_costs", {"a shape": costs((10, 100, 20, 200), (20, 80, 40, 160))})
    cases: list[tuple[list[int], bool]] = [([512] * 4, True), ([8192] * 4, False), ([3000] * 8, True)]
    cases += [([3000] * 8, False), ([100] * 3 + [8192], False)]  # Padding is read, too.
    for backend, decided in (("metal", [False, True, True, False, True]), ("cpu", [True] * 5)):
        monkeypatch.setattr(row_costs, "backend", lambda backend=backend: backend)
        assert [row_costs.pays_for(*case) for case in cases] == decided
    monkeypatch.setattr(row_costs, "_costs", {"a shape": costs((10, 100, 20, 200), (40, 250, 60, 500))})
    assert not row_costs.pays()
    monkeypatch.setattr(row_costs, "_costs", {})
    assert row_costs.ratio() is None and row_costs.pays_for([1, 2], True)


@pytest.mark.parametrize("kernel", [5e-6, 25e-6])
def test_calls_are_measured_whatever_an_evaluation_takes(kernel: float, monkeypatch: pytest.MonkeyPatch):
    """On this Mac an evaluation waits for 250 µs, and a call takes `kernel` and what reading takes it."""
    now, due, evaluate = [0.0], [0.0], mx.eval

    def seconds(keys: mx.array) -> float:
        return kernel + 2 * keys.nbytes / 400e9

    def attend(queries: mx.array, keys: mx.array, *rest: Any, **how: Any) -> mx.array:
        due[0] += seconds(keys)
        return queries

    def wait(*arrays: Any) -> None:
        evaluate(*arrays)
        now[0] += 250e-6 + due[0]
        due[0] = 0.0

    monkeypatch.setattr(mx, "eval", wait)
    monkeypatch.setattr(mx.fast, "scaled_dot_product_attention", attend)
    plan = row_costs.GPU._replace(lengths=(64, 1024))
    shape = row_costs.Shape(8, 2, 16, mx.float32, mx.float32)
    joint, alone = row_costs.measured(shape, plan, attend, lambda: now[0])
    for rows, length, *taken in zip((4, 4, 8, 8), (64, 1024) * 2, joint.taken, alone.taken, strict=True):
        read = seconds(mx.zeros((rows, 2, length, 16))) - kernel
        assert taken == pytest.approx([kernel + read, rows * kernel + read])


def test_a_load_measures_and_doctor_can_tell(tmp_path, monkeypatch: pytest.MonkeyPatch):
    use_backend(monkeypatch, "mlx")
    monkeypatch.setattr(row_costs, "_costs", found := cast(dict[Any, Any], {}))
    mlx_adapter.load(build_family("llama", tmp_path / "llama"))
    (measured,) = found.values()
    assert min(*measured.joint.taken, *measured.alone.taken) >= 0 and measured.alone.of(4, 512) > 0
    assert mlx_adapter.rows_alone_ratios()["attention_rows_alone_ratio"] == row_costs.ratio(*row_costs.HALF)
    found.clear()
    assert not mlx_adapter.rows_attend_alone() and not mlx_adapter.rows_alone_ratios()
    assert base.scaled_dot_product_attention is not None


def test_what_can_not_be_measured_goes_on_by_mlx(monkeypatch: pytest.MonkeyPatch, caplog):
    monkeypatch.setattr(row_costs, "_costs", {})
    monkeypatch.setattr(row_costs, "measured", lambda *key: 1 / 0)
    queries = mx.zeros((1, 2, 1, 8))
    assert row_costs.costs_for(queries, queries, row_attention.one_row) is None
    assert "by MLX's own attention" in caplog.text


def test_the_log_says_why_the_slower_way_is_chosen(monkeypatch: pytest.MonkeyPatch, caplog):
    caplog.set_level("INFO", row_costs.log.name)
    queries = mx.zeros((1, 2, 1, 8))
    words = {
        "cpu": "row by row takes 1.05 times as long as MLX's own call, and is chosen up to 1.1 times, since",
        "metal": "they take 1.05 times as long as MLX's own call at 512 tokens each, 1.05 times at 8,192)",
    }
    for backend, said in words.items():
        monkeypatch.setattr(row_costs, "backend", lambda backend=backend: backend)
        monkeypatch.setattr(row_costs, "_costs", {})
        monkeypatch.setattr(row_costs, "measured", lambda *key: costs((4.0,) * 4, (4.2,) * 4))
        assert row_costs.costs_for(queries, queries, row_attention.one_row) is not None
        assert said in caplog.text


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
