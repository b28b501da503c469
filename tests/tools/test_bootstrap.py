"""bootstrap.py: which Pythons it refuses, what it neutralises, when it installs again."""

import importlib.util
import io
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from omlxd.models.footprint import VLM_VERSION

REPO = Path(__file__).resolve().parents[2]
SCRIPT = REPO / "tools" / "bootstrap.py"


@pytest.fixture
def bootstrap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script as a module whose checkout is an empty folder."""
    spec = importlib.util.spec_from_file_location("bootstrap", SCRIPT)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    venv = tmp_path / ".venv"
    monkeypatch.setattr(module, "ROOT", str(tmp_path))
    monkeypatch.setattr(module, "VENV", str(venv))
    monkeypatch.setattr(module, "PYTHON", str(venv / "bin" / "python"))
    monkeypatch.setattr(module, "STAMP", str(venv / "stamp.json"))
    return module


WANTED = {"root": "/r", "digest": "d", "cuda": False, "test": False, "vision": "v"}


def stamp(module: ModuleType, **values: object) -> None:
    Path(module.VENV).mkdir(exist_ok=True)
    Path(module.STAMP).write_text(json.dumps(values))


def test_this_python_is_right(bootstrap: ModuleType):
    assert bootstrap.wrong_python() == ""


@pytest.mark.parametrize(
    ("target", "attribute", "value", "words"),
    [
        ("platform", "python_implementation", lambda: "PyPy", "CPython"),
        ("sys", "maxsize", 2**31 - 1, "32-bit"),
        ("sys", "platform", "win32", "macOS and Linux"),
        ("platform", "libc_ver", lambda: ("", ""), "musl"),
        ("platform", "machine", lambda: "riscv64", "riscv64"),
        ("sysconfig", "get_config_var", lambda name: 1, "free-threaded"),
    ],
)
def test_a_wrong_python_is_refused(bootstrap, monkeypatch, target, attribute, value, words):
    monkeypatch.setattr(bootstrap.sys, "platform", "linux")
    monkeypatch.setattr(getattr(bootstrap, target), attribute, value)
    assert words in bootstrap.wrong_python()


@pytest.mark.parametrize(("has_arm", "words"), [(True, "Rosetta"), (False, "Intel processor")])
def test_an_intel_python_on_a_mac_is_refused(bootstrap, monkeypatch, has_arm: bool, words: str):
    monkeypatch.setattr(bootstrap.sys, "platform", "darwin")
    monkeypatch.setattr(bootstrap.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(bootstrap, "apple_silicon", lambda: has_arm)
    assert words in bootstrap.wrong_python()


def test_an_old_python_goes_on_with_a_newer_one_or_is_refused(bootstrap, monkeypatch, tmp_path, capsys):
    became: list[list[str]] = []
    monkeypatch.setattr(bootstrap.os, "execve", lambda path, argv, env: became.append(argv) or sys.exit(0))
    monkeypatch.setattr(bootstrap.glob, "glob", lambda pattern: [])
    monkeypatch.setattr(bootstrap.sys, "version_info", (3, 9, 6))
    monkeypatch.setattr(bootstrap.shutil, "which", lambda name, path: None)
    with pytest.raises(SystemExit) as caught:
        bootstrap.become_newer_python({"PATH": str(tmp_path)})
    assert caught.value.code == 1 and became == []
    assert "3.9" in capsys.readouterr().err
    monkeypatch.setattr(
        bootstrap.shutil, "which", lambda name, path: sys.executable if "12" in name else None
    )
    with pytest.raises(SystemExit) as caught:
        bootstrap.become_newer_python({"PATH": str(tmp_path)})
    assert caught.value.code == 0 and became[0][0] == sys.executable


def test_pythons_of_uv_are_found(bootstrap, monkeypatch, tmp_path):
    """Where no shell's profile puts them on PATH: a fresh Mac has the 3.9 of Xcode's tools alone."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(bootstrap.sys, "version_info", (3, 9, 6))
    places: list[str] = []
    monkeypatch.setattr(bootstrap.shutil, "which", lambda name, path: places.extend(path.split(os.pathsep)))
    for build in ("cpython-3.13.7-macos-aarch64-none", "cpython-3.14.0+freethreaded-macos-aarch64-none"):
        (tmp_path / ".local/share/uv/python" / build / "bin").mkdir(parents=True)
    with pytest.raises(SystemExit):
        bootstrap.become_newer_python({"PATH": "/bin"})
    uv = f"{tmp_path}/.local/share/uv/python/cpython-3.13.7-macos-aarch64-none/bin"
    assert places[:1] == ["/bin"] and {f"{tmp_path}/.local/bin", uv} <= {*places}
    assert not any("freethreaded" in place for place in places)


def test_contaminants_are_dropped_and_named(bootstrap: ModuleType, capsys: pytest.CaptureFixture):
    clean = bootstrap.clean_environment(
        {
            "PYTHONPATH": "/x",
            "PYTHONHOME": "/y",
            "PIP_TARGET": "/z",
            "CONDA_PREFIX": "/conda",
            "LD_LIBRARY_PATH": "/conda/lib:/mine",
            "PATH": "/bin",
        }
    )
    assert clean == {
        "CONDA_PREFIX": "/conda",
        "LD_LIBRARY_PATH": "/mine",
        "PATH": "/bin",
        "PYTHONNOUSERSITE": "1",
    }
    said = capsys.readouterr().err
    assert all(name in said for name in ("PYTHONPATH", "PYTHONHOME", "PIP_TARGET", "LD_LIBRARY_PATH"))


def test_it_installs_when_something_changed_and_only_then(bootstrap: ModuleType):
    assert f"mlx-vlm=={VLM_VERSION}" == bootstrap.VISION
    assert not bootstrap.is_installed(WANTED)
    stamp(bootstrap, **WANTED)
    assert bootstrap.is_installed(WANTED)
    assert not bootstrap.is_installed({**WANTED, "test": True})
    stamp(bootstrap, **{**WANTED, "test": True})
    assert bootstrap.is_installed(WANTED) and bootstrap.is_installed({**WANTED, "test": True})
    for key, value in (("digest", "other"), ("cuda", True), ("root", "/elsewhere"), ("vision", "w")):
        assert not bootstrap.is_installed({**WANTED, key: value})
    Path(bootstrap.STAMP).write_text("{ half")
    assert not bootstrap.is_installed(WANTED)


def test_an_install_that_fails_leaves_no_stamp(bootstrap: ModuleType, monkeypatch: pytest.MonkeyPatch):
    stamp(bootstrap, **WANTED)
    ran: list[tuple[str, ...]] = []
    monkeypatch.setattr(bootstrap, "pip", lambda environ, *arguments: ran.append(arguments) or sys.exit(1))
    with pytest.raises(SystemExit):
        bootstrap.install({**WANTED, "digest": "new"}, {})
    assert not Path(bootstrap.STAMP).exists()
    monkeypatch.setattr(bootstrap, "pip", lambda environ, *arguments: ran.append(arguments))
    bootstrap.install({**WANTED, "test": True}, {})
    assert ran[-2:] == [
        ("install", "--editable", bootstrap.ROOT + "[test,vision]"),
        ("install", "--no-deps", bootstrap.VISION),
    ]
    assert bootstrap.is_installed({**WANTED, "test": True})


PIP = """
import os, sys
site = os.path.join(sys.argv[1], "lib", "python3.11", "site-packages")
say = lambda text: print(text, flush=True)
say("Obtaining file:///x")
for name in ("mlx[cpu]==0.32.4", "rich>=15"):
    say("Collecting " + name + " (from omlxd==0.1)")
say("  Downloading rich-15.0-py3-none-any.whl.metadata (18 kB)")
say("Downloading mlx-0.32.4-cp311.whl (60.1 MB)")
say("Collecting rich>=15")
say("Using cached rich-15.0-py3-none-any.whl (243 kB)")
say("Installing collected packages: mlx, rich")
for name in ("mlx", "rich"):
    os.makedirs(os.path.join(site, name + "-1.dist-info"))
say("ERROR: at the end")
sys.exit(int(sys.argv[2]))
"""


class Stream(io.StringIO):
    def __init__(self, terminal: bool):
        super().__init__()
        self.isatty = lambda: terminal  # type: ignore[method-assign]


@pytest.mark.parametrize(("terminal", "status"), [(True, 0), (False, 0), (True, 1)])
def test_an_install_has_a_bar_on_a_terminal_and_lines_elsewhere(bootstrap, terminal, status, capsys):
    stream = Stream(terminal)
    parts: list[float] = []

    class Watched(bootstrap.Bar):
        def line(self, text: str) -> None:
            super().line(text)
            self.draw()
            parts.append(self.part)

    command = [sys.executable, "-c", PIP, bootstrap.VENV, str(status)]
    assert bootstrap.run_with_bar(command, dict(os.environ), Watched(stream)) == status
    assert parts == sorted(parts) and parts[0] == 0 and parts[-1] == 1.0
    said = stream.getvalue()
    if terminal:
        assert "fetching mlx (60.1 MB)" in said and "finding rich" in said and "unpacking 2 packages" in said
        assert "[" + "#" * bootstrap.WIDTH + "] 100 %" in said and said.endswith("\r\033[K")
    else:
        assert [line.split()[1] for line in said.splitlines()] == ["finding", "fetching", "unpacking"]
    assert ("ERROR: at the end" in capsys.readouterr().err) is bool(status)


def test_cuda_replaces_the_cpu_wheel_and_back(bootstrap: ModuleType, monkeypatch: pytest.MonkeyPatch):
    Path(bootstrap.VENV).mkdir()
    ran: list[str] = []
    monkeypatch.setattr(bootstrap, "pip", lambda environ, *arguments: ran.append(" ".join(arguments)))
    monkeypatch.setattr(bootstrap, "PYTHON", sys.executable)
    bootstrap.install({**WANTED, "cuda": True}, dict(os.environ))
    assert ran[0].endswith("[cuda,vision]") and ran[2] == "uninstall --yes mlx-cpu"
    assert ran[3].startswith("install --force-reinstall --no-deps mlx-cuda-13==")
    ran.clear()
    bootstrap.install(WANTED, dict(os.environ))
    assert ran[2].startswith("uninstall --yes mlx-cuda-13") and "mlx-cpu==" in ran[3]


def test_a_broken_venv_is_found(bootstrap: ModuleType, tmp_path: Path):
    Path(bootstrap.PYTHON).parent.mkdir(parents=True)
    assert "gone" in bootstrap.broken_venv({})
    Path(bootstrap.PYTHON).symlink_to(tmp_path / "vanished")
    assert "gone" in bootstrap.broken_venv({})
    Path(bootstrap.PYTHON).unlink()
    Path(bootstrap.PYTHON).symlink_to(shutil.which("false") or "/bin/false")
    assert "doesn't work" in bootstrap.broken_venv({})
    stamp(bootstrap, root="/elsewhere")
    assert "/elsewhere" in bootstrap.broken_venv({})


@pytest.mark.slow
def test_a_venv_is_made_and_then_left_alone(bootstrap: ModuleType, monkeypatch: pytest.MonkeyPatch):
    environ = bootstrap.clean_environment(dict(os.environ))
    bootstrap.make_venv(environ)
    assert bootstrap.broken_venv(environ) == ""
    marker = Path(bootstrap.VENV) / "marker"
    marker.touch()
    bootstrap.make_venv(environ)
    assert marker.exists()
    Path(bootstrap.PYTHON).unlink()
    bootstrap.make_venv(environ)
    assert not marker.exists() and bootstrap.broken_venv(environ) == ""


@pytest.mark.parametrize(("verb", "fetches"), [("serve", True), ("test", False)])
def test_only_serve_may_fetch_a_model(bootstrap, monkeypatch, tmp_path: Path, verb: str, fetches: bool):
    """Tests that met a download would need a network."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("OMLXD_FETCH_MODEL", raising=False)
    (tmp_path / "pyproject.toml").write_text("")
    for step in ("make_venv", "install"):
        monkeypatch.setattr(bootstrap, step, lambda *args: None)
    started: list[dict[str, str]] = []
    monkeypatch.setattr(bootstrap.os, "execve", lambda path, argv, environ: started.append(environ))
    bootstrap.main([verb])
    assert [("OMLXD_FETCH_MODEL" in environ) for environ in started] == [fetches]


def test_usage():
    done = subprocess.run([sys.executable, str(SCRIPT), "fly"], capture_output=True, text=True)
    assert done.returncode == 2 and "bootstrap.py serve" in done.stdout
    done = subprocess.run([sys.executable, str(SCRIPT), "--help"], capture_output=True, text=True)
    assert done.returncode == 0
