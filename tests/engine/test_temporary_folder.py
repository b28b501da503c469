"""Where an engine's MLX keeps compiled kernels: a folder of the user, whoever owns the shared one."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from omlxd.engine.process.prepare import use_own_temporary_folder


@pytest.mark.skipif(os.uname().sysname != "Linux", reason="elsewhere the temporary folder is the user's own")
def test_a_folder_of_the_user_is_used_and_anything_else_is_left_alone(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    own = tmp_path / f"omlxd-{os.getuid()}"
    own.symlink_to("/")
    use_own_temporary_folder()
    assert os.environ["TMPDIR"] == str(tmp_path)
    own.unlink()
    for _ in range(2):
        use_own_temporary_folder()
        assert os.environ["TMPDIR"] == str(own) and own.stat().st_mode & 0o777 == 0o700
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
