"""`omlxd bench` on tiny models: every column is there, and what can't be measured is a sentence."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from daemon import demo_model, family_model

REPO = Path(__file__).resolve().parents[2]


def run(home: Path, *argv: str) -> subprocess.CompletedProcess[str]:
    environ = {"PATH": os.environ["PATH"], "HOME": str(home), "PYTHONPATH": str(REPO)}
    command = [sys.executable, "-m", "omlxd", "bench", *argv]
    return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=300)


def test_speed_and_quality_of_the_demo_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    done = run(tmp_path, str(demo_model()), "--lengths", "256,512", "--quick", "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["cache_bytes"] > 0 and report["kv_bytes_per_token"] > 0
    for length, row in zip((256, 512), report["lengths"], strict=True):
        assert abs(row["prompt_tokens"] - length) < length * 0.1
        assert row["equal_tokens"] and not row["trouble"]
        # A hit ends with a block of 64, and leaves a token to compute.
        assert row["prompt_tokens"] - 65 <= row["ram_cached"] < row["prompt_tokens"]
        assert row["ssd_cached"] == row["ram_cached"]
        assert min(row[name] for name in ("cold_s", "ram_s", "ssd_s", "prefill_tokens_per_s")) > 0
    plain, eight, four, mixed = report["kv"]
    assert [row["kv"] for row in (eight, four, mixed)] == ["8", "4", "keys 8, values 4"]
    assert plain["same_choice"] == 1 and plain["tokens"] == 1024
    assert eight["same_choice"] > mixed["same_choice"] > four["same_choice"]
    assert abs(eight["perplexity"] / plain["perplexity"] - 1) < 0.05


def test_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """A recurrent model: nothing of it has fewer bits."""
    done = run(tmp_path, str(family_model("mamba2")), "--lengths", "128", "--quick")
    with capsys.disabled():
        print("\n" + done.stdout + done.stderr)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("mamba2 on ")
    assert "TOKENS  PREFILL/S  DECODE/S  COLD" in done.stdout
    assert "8, 4: its layers keep ArraysCache alone, which have no quantised form" in done.stdout


def test_what_makes_no_sense_is_a_sentence(tmp_path: Path):
    for argv, sentence in (
        (["--lengths", "1k;2k"], "--lengths: '1k;2k' is no list of lengths; write 1k,4k."),
        (["--lengths", "5"], "--lengths: 5 is too short; 128 is the least."),
    ):
        done = run(tmp_path, str(demo_model()), *argv)
        assert (done.returncode, done.stderr) == (2, f"omlxd: {sentence}\n")
    done = run(tmp_path, str(tmp_path / "none"))
    assert done.returncode == 1 and "none could be started: --model: there is no folder" in done.stderr
    done = run(tmp_path, str(demo_model()), "--lengths", "9999k")
    assert done.returncode == 1 and "none fits" in done.stderr
