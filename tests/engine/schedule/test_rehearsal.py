"""Requests of no client's, at a load."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from families import build_family

from omlxd.engine import mlx_adapter
from omlxd.engine.schedule import rehearsal


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


def test_one_that_fails_is_told_and_ends_no_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    loaded = mlx_adapter.load(build_family("qwen3", tmp_path / "qwen3"))
    monkeypatch.setattr(type(loaded.model), "__call__", lambda *args, **how: 1 / 0)
    rehearsal.rehearse(loaded, 64, anywhere=True)
    assert "rehearsal" in caplog.text and "division by zero" in caplog.text
