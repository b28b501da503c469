"""`omlxd bench` on tiny models: every column is there, and what can't be measured is a sentence."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from daemon import demo_model, family_model

from omlxd.cli import bench
from omlxd.cli.daemon.client import Daemon

REPO = Path(__file__).resolve().parents[2]


def run(home: Path, *argv: str) -> subprocess.CompletedProcess[str]:
    environ = {"PATH": os.environ["PATH"], "HOME": str(home), "PYTHONPATH": str(REPO)}
    command = [sys.executable, "-m", "omlxd", "bench", *argv]
    return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=300)


@pytest.mark.slow
def test_speed_and_quality_of_the_demo_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    done = run(tmp_path, str(demo_model()), "--lengths", "256,512", "--quick", "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["cache_bytes"] > 0 and report["kv_bytes_per_token"] > 0
    for length, row in zip((256, 512), report["lengths"], strict=True):
        assert 0.9 * length < row["prompt_tokens"] <= 1.01 * length
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


@pytest.mark.slow
def test_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """A recurrent model: nothing of it has fewer bits."""
    done = run(tmp_path, str(family_model("mamba2")), "--lengths", "128", "--quick")
    with capsys.disabled():
        print("\n" + done.stdout + done.stderr)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("mamba2 on ")
    assert "TOKENS   PREFILL/S  DECODE/S  COLD" in done.stdout
    assert "8, 4: its layers keep ArraysCache alone, which have no quantised form" in done.stdout


def test_a_prompt_fits_though_the_texts_first_lines_have_more_letters_a_token(
    monkeypatch: pytest.MonkeyPatch,
):
    def count(self: Daemon, path: str, type: Any, body: bytes, seconds: float) -> Any:
        return type(len(json.loads(body)["messages"][0]["content"]) // 3)

    made = object.__new__(bench._Bench)
    made._daemon, made._model, made._text, made._letters_per_token = Daemon(""), "m", "x" * 1000, 3.85
    monkeypatch.setattr(Daemon, "fetch", count)
    assert 7800 < len(made._prompt(7915)) // 3 <= 7915


def test_each_result_is_there_as_soon_as_it_is_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """Nothing waits for the perplexity, nor one of its rows for the next. A length too long is told."""
    seen: list[str] = []

    class Measured:
        def __init__(self, url: str):
            pass

        def report(self) -> bench.Report:
            return bench.Report(
                model="m", backend="cpu", speed="", context_length=2048, kv_bytes_per_token=64
            )

        def folder(self) -> Path:
            return Path("m")

        def cache_bytes(self) -> int:
            return 10**6

        def cold_and_hot(self, length: int) -> tuple[bench.LengthResult, str]:
            assert seen[0].startswith("m on cpu\n")
            return bench.LengthResult(prompt_tokens=length), ""

        def after_restart(self, length: int, result: bench.LengthResult, text: str) -> bench.LengthResult:
            assert length == 128 or seen[-1].startswith("128 ")
            return result

    def perplexity(*_: object) -> Iterator[bench.KVResult]:
        assert seen[-2].startswith("256 ")
        yield bench.KVResult(kv="16", tokens=1024, perplexity=2.0, same_choice=1.0)
        assert seen[-1].startswith("16 ")
        yield bench.KVResult(kv="8", trouble="it has none")

    monkeypatch.setattr(bench, "own_daemon", lambda *flags: contextlib.nullcontext(""))
    monkeypatch.setattr(bench, "_Bench", Measured)
    monkeypatch.setattr(bench, "perplexity", perplexity)
    bench.measure("m", [128, 256, *bench._lengths("99999999")], 1024, seen.append)
    assert seen[-1] == "8: it has none"
    assert "--lengths: 99999999: more than the 1955 tokens that fit the context" in capsys.readouterr().err


def test_a_model_of_the_list_and_of_a_model_dir(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    seen: list[object] = []

    def measure(model: str, wanted: object, tokens: int, show: object, more: list[str]) -> bench.Report:
        seen.extend((model, more))
        return bench.Report(model=model, backend="", speed="", context_length=1, kv_bytes_per_token=1)

    monkeypatch.setattr(bench, "measure", measure)
    monkeypatch.setattr(bench, "as_listed", lambda name, settings: ("org/" + name, settings.base_path))
    for flag in ("--base-path", "--model-dir"):
        assert bench.main(["a", flag, str(tmp_path)], argparse.ArgumentParser()) == 0
    named = ["--base-path", str(tmp_path), "--model-dir", str(tmp_path)]
    assert seen == ["org/a", named, "a", ["--model-dir", str(tmp_path)]]


@pytest.mark.slow
def test_what_makes_no_sense_is_a_sentence(tmp_path: Path):
    for argv, sentence in (
        (["--lengths", "1k;2k"], "--lengths: '1k;2k' is no list of lengths; write 1k,4k."),
        (["--lengths", "5"], "--lengths: 5 is too short; 128 is the least."),
    ):
        done = run(tmp_path, str(demo_model()), *argv)
        assert (done.returncode, done.stderr) == (2, f"omlxd: {sentence}\n")
    done = run(tmp_path, str(tmp_path / "none"))
    assert done.returncode == 1 and done.stderr.startswith(f"omlxd: there is no folder {tmp_path / 'none'}; ")
    done = run(tmp_path, str(demo_model()), "--lengths", "9999k")
    assert done.returncode == 1 and "none fits" in done.stderr
