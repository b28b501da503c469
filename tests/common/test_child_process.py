"""Children find what their parent finds, and nothing that lies about."""

from __future__ import annotations

from pathlib import Path

import pytest

from omlxd.common.child_process import ChildProcesses

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
