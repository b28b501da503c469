"""What a daemon does on a Mac alone. MLX computes on this machine's processor: support/pretend_metal.py."""

from __future__ import annotations

from pathlib import Path

import pretend_metal
import pytest
from daemon import Daemon, own_usage, prose

pytestmark = pytest.mark.skipif(not pretend_metal.is_installed(), reason="needs --pretend-metal")


def test_an_engine_is_one_of_metal_and_answers(tmp_path: Path):
    with Daemon(tmp_path) as daemon:
        first, again = (daemon.messages(prose(100)) for _ in range(2))
        assert first["content"] == again["content"] and own_usage(again)["cached_hot"] == 576
        (model,) = daemon.http.get("/omlxd/status").json()["models"]
        most = pretend_metal.DEVICE["max_recommended_working_set_size"]
        assert model["backend"] == "metal" and 0 < model["values"]["mlx_wired_limit_bytes"] <= most
        assert "loaded omlxd-demo (qwen3, metal)" in daemon.logged()
