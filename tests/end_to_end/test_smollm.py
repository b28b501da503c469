"""SmolLM2-135M-Instruct, where it is installed: a conversation answers alike when its engine is killed."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
from daemon import Daemon, own_usage

from omlxd.models.catalog import looks_like_model
from omlxd.models.resolve import default_folder

MODEL = default_folder(Path.home() / ".omlxd")
QUESTIONS = (
    "What is the capital of France?",
    "Which river runs through it?",
    "Name one museum there.",
    "What can be seen in that museum?",
    "Write one sentence about bread.",
    "How many days has a week?",
    "Name three colours.",
    "Which of them is the colour of the sky?",
    "What is the capital of Italy?",
    "Say goodbye in one sentence.",
)
KILLED_BEFORE, KILLED_AMID = 3, 6
"""Turns, counted from 0."""
FAST = {"OMLXD_CPU_BLAS": "auto"}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not looks_like_model(MODEL), reason=f"there is no {MODEL}: `omlxd models pull {MODEL.name}`"
    ),
]


def test_the_capital_of_france(tmp_path: Path):
    with Daemon(tmp_path, model=MODEL, env=FAST) as daemon:
        answer = daemon.chat(QUESTIONS[0], max_tokens=32)
    assert "Paris" in answer["choices"][0]["message"]["content"]


def test_ten_turns_answer_alike_when_the_engine_is_killed(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    runs = [converse(tmp_path / name, kills=name == "killed") for name in ("undisturbed", "killed")]
    with capsys.disabled():
        print("\nturn  prompt  cached  TTFT s  |  with kill -9: cached  TTFT s")
        for turn, ((_, plain), (_, killed)) in enumerate(zip(*runs, strict=True), 1):
            first, second = own_usage(plain), own_usage(killed)
            print(
                f"{turn:4}  {plain['usage']['prompt_tokens']:6}  {cached(first):6}  {first['ttft_s']:6.2f}  |"
                f"               {cached(second):6}  {second['ttft_s']:6.2f}"
            )
    assert [text for text, _ in runs[0]] == [text for text, _ in runs[1]]
    after = own_usage(runs[1][KILLED_BEFORE][1])
    assert cached(after) > 0  # What the first engine computed is read from SSD.


def cached(usage: dict[str, Any]) -> int:
    return usage["cached_hot"] + usage["cached_cold"]


def converse(home: Path, *, kills: bool) -> list[tuple[str, dict[str, Any]]]:
    """Answers of all turns, greedy, and their bodies."""
    turns: list[dict[str, str]] = []
    result: list[tuple[str, dict[str, Any]]] = []
    with Daemon(home, model=MODEL, env=FAST) as daemon:
        for turn, question in enumerate(QUESTIONS):
            turns.append({"role": "user", "content": question})
            if kills and turn == KILLED_BEFORE:
                daemon.settled()
                daemon.kill_engine()
            if kills and turn == KILLED_AMID:
                threading.Thread(target=kill_soon, args=(daemon,)).start()
            answer = daemon.chat(*turns, max_tokens=16)
            text = answer["choices"][0]["message"]["content"]
            turns.append({"role": "assistant", "content": text})
            result.append((text, answer))
    return result


def kill_soon(daemon: Daemon) -> None:
    time.sleep(0.3)
    daemon.kill_engine()
