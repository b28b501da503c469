"""`omlxd cache`: figures, the lock, descriptions; beside a daemon and without one."""
# ruff: noqa: F811 -- `cache` is a fixture of cache_folder.py

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from cache_folder import (
    DAY,
    Cache,
    cache,  # noqa: F401
    describe,
    flip,
    no_settings,  # noqa: F401
)
from daemon import REPO, Daemon, family_model, own_usage, prose
from kv_fakes import BLOCK, NAMESPACE, OTHER_NAMESPACE

from omlxd.cli.cache.holder import DaemonRuns, exclusive
from omlxd.cli.daemon.client import holder
from omlxd.cli.main import main
from omlxd.kv.files.namespace import read_namespace
from omlxd.kv.files.paths import WRITES_NAME, namespace_dir
from omlxd.kv.ledger.ledger import Ledger

# --------------------------------------------------------------------- stats


def test_stats_as_json(cache: Cache, capsys: pytest.CaptureFixture[str]):
    then = time.time() - 3 * DAY
    os.utime(cache.path(0), (then, then))
    (cache.root / WRITES_NAME).write_text('{"day": "1999-12-31", "bytes": 9, "written": 5, "ever": 800}')
    assert cache.run("stats", "--json", "--paged-ssd-cache-max-size", "5GB") == 0
    told = json.loads(capsys.readouterr().out)
    tiny, other = told.pop("namespaces")
    assert told == {
        "cache_dir": str(cache.root),
        "bytes": tiny["bytes"] + other["bytes"],
        "files": 11,
        "cap_bytes": 5_000_000_000,
        "cap_source": "--paged-ssd-cache-max-size",
        "daemon": False,
        "daemon_pid": None,
        "temporary": 0,
        "temporary_bytes": 0,
        "misplaced": 0,
        "strangers": 0,
        "written_today": 0,
        "written_ever": 800,
        "live": None,
        "join": "",
    }
    assert (tiny["namespace"], tiny["model_id"], tiny["model_type"]) == (
        namespace_dir(NAMESPACE),
        "org/tiny",
        "qwen3",
    )
    assert (tiny["files"], tiny["token_blocks"], tiny["checkpoints"], tiny["block_size"]) == (9, 8, 1, BLOCK)
    assert tiny["token_bytes"] == 8 * cache.tier.bytes_per_block
    assert tiny["checkpoint_bytes"] == cache.checkpoint.bytes_per_block
    assert tiny["bytes"] == tiny["token_bytes"] + tiny["checkpoint_bytes"]
    assert abs(tiny["oldest_use"] - then) < 1 and tiny["newest_use"] > then + 2 * DAY
    assert (other["model_id"], other["token_blocks"], other["checkpoints"]) == ("", 2, 0)


def test_stats_as_text(cache: Cache, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("omlxd.config.settings.disk_room", lambda folder: 10**12)
    temp = cache.path(0).with_name(cache.path(0).name + ".7-0.tmp")
    temp.write_bytes(bytes(100))
    (cache.root / namespace_dir(NAMESPACE) / "notes").write_text("hello")
    assert cache.run("stats") == 0
    told = capsys.readouterr().out
    assert "org/tiny" in told and "(unknown)" in told and namespace_dir(OTHER_NAMESPACE)[:8] in told
    assert "in 11 files; cap: 100 GB (default)" in told and "daemon: none on this folder" in told
    assert "temporary: 1 file, " in told and "entries that are no blocks: 1;" in told


def test_stats_of_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["cache", "stats", "--paged-ssd-cache-dir", str(tmp_path / "none")]) == 0
    assert "nothing cached yet" in capsys.readouterr().out
    assert not (tmp_path / "none").exists()
    assert main(["cache", "check", "--paged-ssd-cache-dir", str(tmp_path / "none")]) == 1
    assert f"there is no SSD cache at {tmp_path / 'none'}" in capsys.readouterr().err


# --------------------------------------------------------------------- the lock


def test_a_held_cache_is_looked_at_but_not_cleared(cache: Cache, capsys: pytest.CaptureFixture[str]):
    ledger = Ledger(cache.root, 10**9)
    ledger.open()
    assert holder(cache.root) == os.getpid()
    assert cache.run("check") == 0 and cache.run("stats") == 0
    assert f"daemon: running, process {os.getpid()}" in capsys.readouterr().out
    assert cache.run("clear", "--yes") == 1
    assert f"a daemon (process {os.getpid()}) is using" in capsys.readouterr().err
    with pytest.raises(DaemonRuns), exclusive(cache.root):
        pass
    ledger.close()
    assert holder(cache.root) is None or not Path("/proc/locks").exists()
    with exclusive(cache.root):
        pass
    assert holder(cache.root) is None


def test_nobody_holds_what_a_dead_process_left(tmp_path: Path):
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    (tmp_path / ".lock").write_text(f"{gone.pid}\n")
    assert holder(tmp_path) is None
    (tmp_path / ".lock").write_text("nonsense")
    assert holder(tmp_path) is None and holder(tmp_path / "none") is None


# --------------------------------------------------------------------- the description


def test_a_description_keeps_its_first_time(cache: Cache, tmp_path: Path):
    folder = namespace_dir(NAMESPACE)
    first = read_namespace(cache.root, folder)
    assert first is not None and first.facts_digest == NAMESPACE.hex() and first.block_bytes == 20480
    stamp = (cache.root / folder / "namespace.json").stat().st_mtime_ns
    describe(cache.root, tmp_path / "model")
    assert (cache.root / folder / "namespace.json").stat().st_mtime_ns == stamp
    (tmp_path / "elsewhere").mkdir()
    describe(cache.root, tmp_path / "elsewhere", "org/renamed")
    again = read_namespace(cache.root, folder)
    assert again is not None and (again.model_id, again.created) == ("org/renamed", first.created)
    assert [path.name for path in (cache.root / folder).glob("namespace*")] == ["namespace.json"]
    for nonsense in (b"", b"[", b'{"model_id": 5}', b"\xff"):
        (cache.root / folder / "namespace.json").write_bytes(nonsense)
        assert read_namespace(cache.root, folder) is None


def test_a_description_that_cannot_be_written_is_no_trouble(tmp_path: Path):
    (tmp_path / "file").write_text("")
    describe(tmp_path / "file", tmp_path)
    assert (tmp_path / "file").read_text() == ""


# --------------------------------------------------------------------- a real daemon


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """A model with a sliding window, so that there are checkpoints too, and one answer of it on disk."""
    model = family_model("gemma3_text")
    with Daemon(tmp_path_factory.mktemp("cache-cli"), model=model) as daemon:
        daemon.messages(prose(150), max_tokens=4)
        daemon.settled()
        yield daemon


NOT_ASKED = ("--url", "http://127.0.0.1:1")
"""The daemon holds the folder, and does not answer there."""


def cache_command(daemon: Daemon, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [
            sys.executable,
            "-m",
            "omlxd",
            "cache",
            *words,
            "--base-path",
            str(daemon.home / "omlxd"),
            *NOT_ASKED,
        ],
        capture_output=True,
        text=True,
        cwd=REPO,
    )


def test_beside_a_running_daemon(served: Daemon):
    told = cache_command(served, "stats", "--json")
    stats = json.loads(told.stdout)
    (model,) = stats["namespaces"]
    assert (stats["daemon"], stats["daemon_pid"]) == (True, served.process.pid)
    assert model["model_id"] == served.model and model["model_path"] == str(served.model_folder)
    assert model["model_type"] == "gemma3_text" and model["block_size"] == 64
    assert model["token_blocks"] > 5 and model["checkpoints"] >= 1
    checked = cache_command(served, "check")
    assert checked.returncode == 0 and f"checked {stats['files']} files" in checked.stdout, checked.stdout
    refused = cache_command(served, "clear", "--yes")
    assert refused.returncode == 1 and str(served.process.pid) in refused.stderr
    scrubbed = cache_command(served, "scrub")
    assert scrubbed.returncode == 0 and "leftovers" not in scrubbed.stdout, scrubbed.stdout


def test_a_bad_file_may_go_under_a_running_daemon(served: Daemon):
    blocks = sorted(served.cache.rglob("*.safetensors"))
    flip(blocks[0], blocks[0].stat().st_size - 1)
    told = cache_command(served, "check", "--delete-bad")
    assert told.returncode == 1 and "1 bad, 1 removed" in told.stdout
    assert "the running daemon counts the removed files" in told.stdout and not blocks[0].exists()
    again = served.messages(prose(150), max_tokens=4)
    assert own_usage(again)["cached_hot"] > 0 and "Traceback" not in served.logged()
