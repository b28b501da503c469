"""Requests of no client's, at a load."""

from __future__ import annotations

import itertools
import logging
from pathlib import Path
from types import SimpleNamespace

import pytest
from families import build_family

from omlxd.engine import mlx_adapter
from omlxd.engine.schedule import rehearsal
from omlxd.engine.schedule.prefill import PrefillBudget


@pytest.mark.parametrize("family", ["qwen3", "gemma3_text"])
def test_its_requests_are_answered_and_leave_nothing(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(rehearsal, "PROMPTS", ((130, 6), (70, 5), (20, 3), (5, 2)))
    loaded = mlx_adapter.load(build_family(family, tmp_path / family))
    with caplog.at_level(logging.INFO, rehearsal.log.name):
        rehearsal.rehearse(loaded, 64, anywhere=True)
    assert [record.levelname for record in caplog.records] == ["INFO"], caplog.text
    assert "4 requests were rehearsed" in caplog.text


def test_passes_that_follow_a_rate_begin_with_that_of_the_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    record, sizes = PrefillBudget.record_pass, list[int]()
    loaded = mlx_adapter.load(build_family("qwen3", tmp_path / "qwen3"))

    def at_a_rate(budget: PrefillBudget, tokens: int, seconds: float) -> None:
        sizes.append(tokens)
        record(budget, tokens, tokens / (100 if len(sizes) == 1 else 700))  # The first pass loads kernels.

    monkeypatch.setattr(PrefillBudget, "record_pass", at_a_rate)
    monkeypatch.setattr(mlx_adapter, "backend", lambda: "metal")
    rate = rehearsal.rehearse(loaded, 64)
    assert sizes == [64, 64, 128, 256, 256, 256, 64] and rate == pytest.approx(700)
    metal, (cpu, cold) = PrefillBudget(64), (PrefillBudget(64), PrefillBudget(64))
    metal.begin_with(rate)
    assert metal.chunk_end(0) == 256 and cold.chunk_end(0) == 64
    monkeypatch.setattr(mlx_adapter, "backend", lambda: "cpu")
    assert rehearsal.rehearse(loaded, 64) == 0
    cpu = PrefillBudget(64)
    cpu.begin_with(rate)
    assert cpu.chunk_end(0) == 64 and cpu.rate == 0


def test_one_that_takes_too_long_ends_with_the_pass_under_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    loaded = mlx_adapter.load(build_family("qwen3", tmp_path / "qwen3"))
    now = itertools.count(0, rehearsal.MOST_S)
    monkeypatch.setattr(rehearsal, "time", SimpleNamespace(monotonic=lambda: next(now)))
    with caplog.at_level(logging.INFO, rehearsal.log.name):
        rehearsal.rehearse(loaded, 64, anywhere=True)
    assert "4 requests were rehearsed" in caplog.text


def test_one_that_fails_is_told_and_ends_no_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    loaded = mlx_adapter.load(build_family("qwen3", tmp_path / "qwen3"))
    monkeypatch.setattr(type(loaded.model), "__call__", lambda *args, **how: 1 / 0)
    rehearsal.rehearse(loaded, 64, anywhere=True)
    assert "rehearsal" in caplog.text and "division by zero" in caplog.text
