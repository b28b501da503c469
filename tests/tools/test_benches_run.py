"""The benchmarks still run and check what they measure; what they print is for a quiet machine."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from daemon import family_model

from tools.bench.wear import superseded

REPO = Path(__file__).resolve().parents[2]

RUNS = {
    "gpu": ("--shape tiny --tokens 4000 --blocks 64 --only same", "| cold hit |"),
    "restore": ("--shape small --megabytes 20 --threads 1 --blocks 64", "peak memory"),
    "load_or_compute": ("--shape tiny --tokens 640 --disk 1,0 --rounds 1", "| 1.00 |"),
    "block_files": ("--shape small --megabytes 20 --threads 1", "ColdTier.store"),
    "gpu_identity": ("--rows llama-fp32", "llama-fp32"),
    "cpu_prefill": ("{llama} --tokens 128", "| of attention: softmax |"),
    "prefill_gap": ("--shape tiny --prompt 512", "15 tokens of a turn"),
    "prompt_ends": ("{llama} --prefix 128 --ends 2x4 --rounds 1", "| 2 x 4 | one |"),
    "images": ("--shape tiny --peers omlxd --rounds 1 --turns 1 --size 112x112", "| second turn, TTFT |"),
    "tower_gap": ("--size 224x112", "| parts |"),
    "streams": ("--model {llama} --contexts 40 40,50 --output 8", "| omlxd | 2 | 40 to 50 |"),
    "turns": ("--model {llama} --grow 40+20 30+10 --output 4", "| omlxd | 1 | 4 of 4 |"),
    "store": ("--streams 1 --output 8 --prompt 70 --rounds 1", "written:"),
}


@pytest.mark.slow
def test_every_script_starts():
    """They import what is still there, and run programs that are."""
    names = sorted(path.stem for path in (REPO / "tools" / "bench").glob("*.py"))
    code = f"for name in {names}: __import__('tools.bench.' + name)\n"
    code += "import front_start; print(front_start.ENGINE.split()[1])"
    path = os.pathsep.join(map(str, (REPO / "tools" / "bench", REPO / "tools", REPO)))
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=REPO,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()).is_file()


@pytest.mark.slow
@pytest.mark.parametrize("bench", RUNS)
def test_it_runs(bench: str):
    if bench in ("images", "tower_gap"):
        pytest.importorskip("mlx_vlm", reason="mlx-vlm is not installed")
    arguments, shown = RUNS[bench]
    arguments = arguments.replace("{llama}", str(family_model("llama")))
    done = subprocess.run(
        [sys.executable, "-m", f"tools.bench.{bench}", *arguments.split()],
        cwd=REPO,
        env={**os.environ, "PYTHONPATH": str(REPO)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert shown in done.stdout
    if bench == "gpu":  # Equal tokens and logits, computed and restored.
        rows = [line.split(" | ") for line in done.stdout.splitlines() if " hit | " in line]
        assert [(row[-2], row[-1]) for row in rows] == [("True", "0 |")] * len(rows)


def test_a_tail_is_superseded_where_a_later_prompt_has_another_in_its_place():
    begins, tail, other = list(range(256)), list(range(1000, 1128)), list(range(2000, 2128))
    assert superseded([begins + tail, begins + tail + other]) == 0
    assert superseded([begins + tail, begins + other]) == 128
    assert superseded([begins + tail, begins]) == superseded([begins + tail]) == 0
    assert superseded([begins + tail, begins + other, begins + tail]) == 128
