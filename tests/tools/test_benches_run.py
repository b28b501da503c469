"""The benchmarks still run and check what they measure; what they print is for a quiet machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from daemon import family_model

from tools.bench.trace_order import Place, order
from tools.bench.wear import superseded
from tools.replay import Request

REPO = Path(__file__).resolve().parents[2]

RUNS = {
    "gpu": ("--shape tiny --tokens 4000 --blocks 64 --only same", "| cold hit |"),
    "restart": ("--model {llama} --tokens 200 --restarts 1 --least 0", "Restore._settle"),
    "restore": ("--shape small --megabytes 20 --threads 1 --blocks 64", "peak memory"),
    "load_or_compute": ("--shape tiny --tokens 640 --disk 1,0 --rounds 1", "| 1.00 |"),
    "block_files": ("--shape small --megabytes 20 --threads 1", "ColdTier.store"),
    "gpu_identity": ("--rows llama-fp32", "llama-fp32"),
    "cpu_prefill": ("{llama} --tokens 128", "| of attention: softmax |"),
    "prefill_gap": ("--shape tiny --prompt 512", "15 tokens of a turn"),
    "prompt_ends": ("{llama} --prefix 128 --ends 2x4 --rounds 1", "| 2 x 4 | one |"),
    "joins": ("--model {llama} --rows 3 --context 40 --turns 2 --rounds 1", "| ratio |"),
    "images": ("--shape tiny --peers omlxd --rounds 1 --turns 1 --size 112x112", "| second turn, TTFT |"),
    "tower_gap": ("--size 224x112", "| parts |"),
    "streams": ("--model {llama} --contexts 40 40,50 --output 8", "| omlxd | 2 | 40 to 50 |"),
    "turns": ("--model {llama} --grow 40+20 30+10 --trace {trace} --output 4", "| omlxd | 2 | 8 of 8 |"),
    "step_bytes": ("", "| 8B dense | 4 | shared |"),
    "store": ("--streams 1 --output 8 --prompt 70 --rounds 1", "written:"),
}


def said(role: str, *blocks: str | dict[str, Any], **mark: Any) -> dict[str, Any]:
    texts = [{"type": "text", "text": block} if isinstance(block, str) else block for block in blocks]
    return {"role": role, "content": [*texts[:-1], {**texts[-1], **mark}]}


def call(name: str, **given: str) -> dict[str, Any]:
    return {"type": "tool_use", "id": name, "name": name, "input": given}


def result(name: str) -> dict[str, Any]:
    return said("user", {"type": "tool_result", "tool_use_id": name, "content": "done"})


def talks() -> list[list[dict[str, Any]]]:
    """A main agent that spawns two, of which one spawns another; and one that nobody spawned."""
    ask, rules = (
        said("user", "Reminder", "Do it", cache_control={"type": "ephemeral"}),
        said("system", "Be short"),
    )
    main = [said("user", "Reminder", "Do it"), {"role": "system", "content": "Be short"}]
    spawn = [*main, said("assistant", "So.", call("Agent", prompt="Read a"), call("Agent", prompt="Read b"))]
    one, two, three = ([said("user", "Reminder", f"Read {name}")] for name in "abc")
    nested = [*one, said("assistant", call("Agent", prompt="Read c")), result("Agent")]
    return [
        [ask, rules],
        one,
        two,
        [said("user", "Another matter")],
        three,
        nested,
        [*three, said("assistant", "c"), said("user", "More")],
        [*spawn, result("Agent")],
    ]


def test_requests_of_a_trace_wait_for_their_agents_and_for_those_they_spawned():
    requests = [Request("/v1/messages", {"messages": talk}) for talk in talks()]
    assert order(requests) == [
        Place(0, 0),
        Place(1, 0, {0}),
        Place(2, 0, {0}),
        Place(3, 0),
        Place(4, 0, {1}),
        Place(1, 1, {1, 4}),
        Place(4, 1, {4}),
        Place(0, 1, {0, 5, 2}),
    ]
    # The same request again, as a client tries it again: of nobody's.
    assert order(requests[:1] * 2) == [Place(0, 0), Place(1, 0)]


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
def test_it_runs(bench: str, tmp_path: Path):
    if bench in ("images", "tower_gap"):
        pytest.importorskip("mlx_vlm", reason="mlx-vlm is not installed")
    arguments, shown = RUNS[bench]
    trace = tmp_path / "trace.jsonl"
    bodies = [{"path": "/v1/messages", "body": {"messages": talk}} for talk in talks()]
    trace.write_text("".join(f"{json.dumps(body)}\n" for body in bodies))
    arguments = arguments.format(llama=family_model("llama"), trace=trace)
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
