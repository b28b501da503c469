"""What omlxd does on a Mac alone. MLX computes on this machine's processor: support/pretend_metal.py."""

from __future__ import annotations

import os
from pathlib import Path

import mlx.core as mx
import pretend_metal
import psutil
import pytest
from awake_programs import AwakePrograms
from daemon import NO_END, PATIENCE_S, Daemon, body, own_usage, prose, wait_until

from omlxd.common import darwin
from omlxd.common.units import process_memory
from omlxd.engine import mlx_adapter

pytestmark = pytest.mark.skipif(not pretend_metal.is_installed(), reason="needs --pretend-metal")
MOST = pretend_metal.DEVICE["max_recommended_working_set_size"]


def test_an_engine_is_one_of_metal_answers_and_unwires_before_it_ends(tmp_path: Path):
    awake = AwakePrograms(tmp_path / "bin")
    wired = tmp_path / "wired.txt"
    environ = {"OMLXD_KEEP_AWAKE": "on", "PATH": f"{awake.folder}:{os.environ['PATH']}"}
    environ["PRETENDED_WIRED"] = str(wired)
    with Daemon(tmp_path, env=environ) as daemon:
        (model,) = daemon.http.get("/omlxd/status").json()["models"]
        assert model["values"]["prefill_tokens_per_s"] > 0, "a load measures the first prompt's rate"
        first, again = (daemon.messages(prose(100)) for _ in range(2))
        assert first["content"] == again["content"] and own_usage(again)["cached_hot"] == 576
        (model,) = daemon.http.get("/omlxd/status").json()["models"]
        assert model["backend"] == "metal" and 0 < model["values"]["mlx_wired_limit_bytes"] <= MOST
        assert "loaded omlxd-demo (qwen3, metal)" in daemon.logged()
        assert "Time Machine may back" not in daemon.logged()
        wait_until(lambda: not awake.pids())
        request = body(daemon.model, "Hello", max_tokens=12_000, logit_bias=NO_END)
        with daemon.stream("/v1/chat/completions", request):
            wait_until(awake.pids)
            words = psutil.Process(awake.pids()[0]).cmdline()
            assert words[1:] == [str(awake.folder / "caffeinate"), "-i", "-w", str(daemon.process.pid)]
        for end in ("SIGTERM", "SIGTERM in an answer", "unload"):
            daemon.messages("Hello")
            engine = psutil.Process(daemon.engine_pid())
            pid, limit = map(int, wired.read_text().splitlines()[-1].split())
            assert pid == engine.pid and limit > 512 << 20, end  # Weights and a pass.
            if end == "SIGTERM in an answer":
                with daemon.stream("/v1/chat/completions", request) as stream:
                    next(stream.iter_lines())
                    engine.terminate()
            elif end == "SIGTERM":
                engine.terminate()
            else:
                daemon.post("/omlxd/models/unload", {"model": daemon.model})
            engine.wait(PATIENCE_S)
            assert wired.read_text().splitlines()[-1] == f"{engine.pid} 0", end


def test_functions_of_macos_are_called_as_they_are_declared():
    share = darwin.sysctl_int("kern.memorystatus_level")
    assert share is not None and 0 < share <= 100 and darwin.sysctl_int("no.such.name") is None
    assert process_memory(psutil.Process()) == pytest.approx(darwin.phys_footprint(os.getpid()), rel=0.1)
    assert darwin.phys_footprint(1 << 30) is None
    assert mlx_adapter.backend() == "metal"
    with pytest.raises(ValueError, match="maximum working set size"):
        mx.set_wired_limit(MOST + 1)
