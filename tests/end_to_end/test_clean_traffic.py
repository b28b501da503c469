"""Recorded agent sessions through a real daemon: whatever counts trouble stays at zero, cold and restarted.

The counters are read from /metrics by what their names say, so that a new one is held to it too.
"""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from daemon import REPO, Daemon, demo_model, session_folder, wait_until
from families import build_family
from prometheus_client.parser import text_string_to_metric_families

TRACES = Path(os.environ.get("OMLXD_TRACES", REPO.parent / "shared" / "traces"))

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not TRACES.is_dir(), reason=f"no recorded traces in {TRACES}"),
]

BAD_ENDS = ("abort", "error")
TROUBLE = re.compile(
    r"healed|rejected|missing|corrupt|lost|_bad|dropped|not_kept|left_unwritten|exposed|timed_out"
    r"|restarts|evicted|damaged|failed|expired"
)
KNOWN = (
    "omlxd_prompt_turns_healed_total",
    "omlxd_prompt_turns_not_healed_prefix_total",
    "omlxd_prompt_turn_records_bad_total",
    "omlxd_prompt_turn_records_dropped_total",
    "omlxd_prompt_canonical_rejected_total",
    "omlxd_prompt_control_tokens_exposed_total",
    "omlxd_kv_checkpoint_missing_total",
    "omlxd_kv_corrupt_files_total",
    "omlxd_kv_lost_files_total",
    "omlxd_kv_stores_dropped_total",
    "omlxd_kv_blocks_not_kept_total",
    "omlxd_requests_timed_out_total",
    "omlxd_engine_restarts_total",
    "omlxd_cold_evicted_files_total",
)
"""Some that must be there: a page without them would prove nothing."""


@pytest.fixture(scope="module")
def replay() -> ModuleType:
    spec = importlib.util.spec_from_file_location("replay_of_clean_traffic", REPO / "tools" / "replay.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def counters(daemon: Daemon) -> Iterator[tuple[str, dict[str, str], float]]:
    for family in text_string_to_metric_families(daemon.metrics()):
        if family.type == "counter":
            yield from ((sample.name, sample.labels, sample.value) for sample in family.samples)


def total(daemon: Daemon, name: str) -> float:
    return sum(value for found, _, value in counters(daemon) if found == name)


def assert_no_trouble(daemon: Daemon, requests: int, tier: str, tokens: int) -> None:
    """After `requests` that found `tokens` or more in `tier`."""
    wait_until(lambda: total(daemon, "vllm:request_success_total") == requests, 30)
    wait_until(lambda: total(daemon, f"omlxd_prefix_cache_hits_{tier}_total") >= tokens, 30)
    page = list(counters(daemon))
    assert set(KNOWN) <= {name for name, _, _ in page}
    bad = [(name, labels, value) for name, labels, value in page if TROUBLE.search(name) and value]
    bad += [
        (name, labels, value)
        for name, labels, value in page
        if value and (labels.get("outcome", "ok") != "ok" or labels.get("finished_reason") in BAD_ENDS)
    ]
    assert not bad, bad
    logged = [line for line in daemon.logged().splitlines() if "WARNING" in line or "ERROR" in line]
    logged = [line for line in logged if "random weights" not in line]  # The demo model's own note.
    assert not logged, logged


def replayed(replay: ModuleType, daemon: Daemon, traces: list[Path], state: Path) -> int:
    options = ["--url", daemon.url, "--model-path", str(daemon.model_folder), "--state", str(state)]
    return replay.main([*map(str, traces), *options])


def some(folder: Path, name: str, first: int, last: int) -> Path:
    """Turns `first` to `last` of a trace, from one on."""
    lines = (TRACES / name).read_text().splitlines()[first - 1 : last]
    path = folder / name
    path.write_text("\n".join(lines))
    return path


def test_sessions_sub_agents_and_a_restart(replay, tmp_path: Path, capsys):
    """A session with sub-agents, then another in the same folder; then all of it again, from the SSD."""
    traces = [TRACES / "claude_code_subagents.jsonl", some(tmp_path, "claude_code_session.jsonl", 1, 2)]
    for tier in ("hot", "cold"):
        with Daemon(tmp_path / "home", model=demo_model()) as daemon:
            assert replayed(replay, daemon, traces, tmp_path / "state") == 0, capsys.readouterr()
            assert_no_trouble(daemon, 7, tier, 20_000)
            assert daemon.stop(60) == 0


def test_a_model_with_checkpoints(replay, tmp_path: Path, capsys):
    """Half its layers have a window: a hit ends where a checkpoint stands."""
    model = build_family(
        "gemma3_text", session_folder() / "windows", changes={"max_position_embeddings": 1 << 17}
    )
    trace = some(tmp_path, "claude_code_subagents.jsonl", 3, 4)
    for tier in ("hot", "cold"):
        with Daemon(tmp_path / "home", model=model) as daemon:
            replayed(replay, daemon, [trace], tmp_path / "state")
            assert_no_trouble(daemon, 2, tier, 4000)
            assert daemon.stop(60) == 0
