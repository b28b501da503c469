"""Children find what their parent finds, and nothing that lies about."""

from __future__ import annotations

from pathlib import Path

import pytest

from omlxd.common import child_process
from omlxd.common.child_process import ChildLost, ChildProcesses

SCRIPT = """
def answer(name):
    try:
        return __import__(name).WHERE
    except ImportError:
        return ""
"""


def test_packages_of_pythonpath_are_there_and_those_of_the_folder_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """`pip install --target` with PYTHONPATH is an install like any other."""
    for folder in ("target", "here"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / f"lies_{folder}.py").write_text(f"WHERE = {folder!r}\n")
    (tmp_path / "script.py").write_text(SCRIPT)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "target"))
    monkeypatch.chdir(tmp_path / "here")
    children = ChildProcesses(tmp_path / "script.py", 1 << 30, 10)
    try:
        assert children.call(("lies_target",), str, 10.0) == "target"
        assert children.call(("lies_here",), str, 10.0) == ""
    finally:
        children.close()


def test_a_child_that_is_ended_is_told_with_what_it_may_take(tmp_path: Path):
    (tmp_path / "script.py").write_text("import os, signal\ndef answer():\n    os.kill(os.getpid(), 9)\n")
    children = ChildProcesses(tmp_path / "script.py", 1 << 30, 10)
    with pytest.raises(ChildLost, match="it may take 1024 MiB and 10 s of processor time"):
        children.call((), str, 10.0)
    children.close()


def test_all_tries_of_a_call_have_its_time_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A page that takes a child's memory after most of its time took a second child, and as long again."""
    now, given = [100.0], []

    def ask(child: object, frame: bytes, seconds: float) -> bytes:
        given.append(seconds)
        now[0] += 12.0
        raise EOFError

    (tmp_path / "script.py").write_text("def answer(): ...\n")
    children = ChildProcesses(tmp_path / "script.py", 1 << 30, 10)
    monkeypatch.setattr(child_process._Child, "ask", ask)
    monkeypatch.setattr(child_process.time, "monotonic", lambda: now[0])
    for seconds, tries in ((20.0, [20.0]), (60.0, [60.0, 48.0])):
        given.clear()
        with pytest.raises(ChildLost):
            children.call((), str, seconds)
        assert given == tries
    children.close()


def test_a_call_is_given_the_processor_time_that_a_busy_machine_keeps_from_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A third conversation at once was refused, as its template did not end: a child was starting."""
    now, used, share = [100.0], [3.0], [0.0]
    (tmp_path / "script.py").write_text("import time\ndef answer():\n    time.sleep(60)\n")
    children = ChildProcesses(tmp_path / "script.py", 1 << 30, 10)
    monkeypatch.setattr(child_process.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(child_process._Child, "_cpu_s", lambda child: used[0])

    def pass_time(child: child_process._Child) -> None:
        now[0] += 1.0
        used[0] += share[0]

    monkeypatch.setattr(child_process._Child, "_check_memory", pass_time)
    for share[0], lasts in ((1.0, 6.0), (0.25, 21.0), (0.0, 31.0)):
        now[0], used[0] = 100.0, 3.0
        with pytest.raises(ChildLost, match="did not end within 5 s"):
            children.call((), str, 5.0)
        assert now[0] == 100.0 + lasts
