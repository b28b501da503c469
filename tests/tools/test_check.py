"""tools/check.py: which tests a changed file runs."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import check


def tree(root: Path) -> Path:
    for name in (
        "kv/test_store.py",
        "kv/files/test_block_file.py",
        "engine/test_frames.py",
        "engine/prompt/test_template.py",
        "api/test_streams.py",
        "tools/test_replay.py",
        "config/test_config.py",
    ):
        (root / "tests" / name).parent.mkdir(parents=True, exist_ok=True)
        (root / "tests" / name).write_text("from rig import Rig\n" if "frames" in name else "")
    return root


def chosen(root: Path, *changed: str) -> list[str]:
    return [name.removeprefix("tests/") for name in check.tests_for(tree(root), changed)]


def test_a_file_runs_the_tests_of_its_own_room_and_of_no_room_below(tmp_path: Path):
    assert chosen(tmp_path, "omlxd/kv/store.py") == ["kv/test_store.py"]
    assert chosen(tmp_path, "omlxd/kv/files/fs.py") == ["kv/files/test_block_file.py"]


def test_a_room_without_tests_runs_those_of_the_room_above(tmp_path: Path):
    assert chosen(tmp_path, "omlxd/engine/vision/encoder.py") == ["engine/test_frames.py"]


def test_tests_that_name_the_changed_module_run_before_the_others_of_the_room(tmp_path: Path):
    tree(tmp_path)
    (tmp_path / "tests/kv/test_loss.py").write_text("from omlxd.kv.files.fs import unlink\n")
    (tmp_path / "tests/kv/test_writes.py").write_text("from omlxd.kv.block_pool import BlockPool\n")
    assert chosen(tmp_path, "omlxd/kv/block_pool.py") == [
        "kv/test_writes.py",
        "kv/test_loss.py",
        "kv/test_store.py",
    ]


def test_a_changed_test_runs_first_and_a_helper_runs_its_importers(tmp_path: Path):
    assert chosen(tmp_path, "omlxd/kv/store.py", "tests/tools/test_replay.py") == [
        "tools/test_replay.py",
        "kv/test_store.py",
    ]
    assert chosen(tmp_path, "tests/support/rig.py") == ["engine/test_frames.py"]


def test_shared_structs_tools_and_documents_have_tests_too(tmp_path: Path):
    assert chosen(tmp_path, "omlxd/chat.py") == ["api/test_streams.py"]
    assert chosen(tmp_path, "tools/replay.py") == ["tools/test_replay.py"]
    assert chosen(tmp_path, "README.md") == ["config/test_config.py"]


def test_a_step_says_whether_it_passed_failed_or_was_cut(tmp_path: Path):
    def result(code: str, seconds: float = 20.0) -> str:
        return check.Step("tests", [sys.executable, "-c", code]).wait(time.monotonic() + seconds)

    assert result("pass") == "passed"
    assert result("raise SystemExit(1)") == "failed"
    assert result("import time; time.sleep(60)", check.END_S + 0.5) == "unfinished"
    assert check.Step("types", [str(tmp_path / "pyright")]).wait(0.0) == "unfinished"


def test_subjects_name_a_room_and_are_short():
    good = ["schedule: measure prefill before the first chunk", "front/http: close after both lengths"]
    assert check.bad_subjects([*good, 'Revert "kv: keep two"']) == []
    bad = [
        "Measure prefill",
        "Schedule: measure",
        "kv:no space",
        "kv: ",
        "kv: ends with a dot.",
        "kv: " + "x" * 69,
    ]
    assert check.bad_subjects(bad) == bad
