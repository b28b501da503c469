"""What a Mac would install has what omlxd needs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import mlx.core
import pytest

from tools.mac_wheels import ROOT, missing_names, names_used


def test_names_of_mlx_are_in_its_stubs():
    """Those of this machine's wheel, which the macOS wheel has as well."""
    folder = Path(mlx.core.__file__).parent / "core"
    stubs = {file.stem: file.read_text() for file in folder.glob("*.pyi")}
    used = names_used()
    assert {"eval", "fast.rms_norm", "set_wired_limit", "metal.is_available"} <= used
    assert missing_names(used | {"eval_all", "fast.rms", "float32.size"}, stubs) == ["eval_all", "fast.rms"]


@pytest.mark.slow
def test_macos_has_a_wheel_of_each_package_and_mlx_each_name():
    done = subprocess.run(
        [sys.executable, "-m", "tools.mac_wheels"], cwd=ROOT, capture_output=True, text=True
    )
    if done.returncode == 3:
        pytest.skip(f"no network: {done.stderr}")
    assert done.returncode == 0 and done.stdout.count("each a wheel") == 4, done.stdout + done.stderr
