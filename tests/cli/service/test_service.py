"""`omlxd service`, whatever the service manager: what is to run, what is refused, the examples."""

# ruff: noqa: F811 -- `port` and `tools` are fixtures of service_tools.py

from __future__ import annotations

import plistlib
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from service_tools import Tools, agent_file, port, service, tools  # noqa: F401

from omlxd.cli import main
from omlxd.cli.service import launchd, manager, plan, systemd
from omlxd.cli.service.plan import Plan
from omlxd.front.engines import pool
from omlxd.front.process import serve
from tests.models.test_resolve import make

REPO = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize("platform", ["darwin", "linux"])
def test_a_port_in_use_is_told_before_anything_is_written(
    tools: Tools, tmp_path: Path, port: str, platform: str
):
    with socket.create_server(("127.0.0.1", int(port))):
        status, _, err = service(tmp_path, "install", "--", "--port", port, platform=platform)
        joins = service(
            tmp_path, "install", "--join", "--", "--listen", f"127.0.0.1:{port}", platform=platform
        )
    assert status == 1 and f"port {port} on 127.0.0.1 is in use" in err
    assert "or give another --port." in err and "or give another --listen." in joins[2]
    assert not list((tmp_path / "home").rglob("*omlxd*.*"))


INSTALLED = {"ActiveState omlxd.socket": "active", "UnitFileState omlxd.socket": "enabled"}


@pytest.mark.parametrize("platform", ["darwin", "linux"])
def test_what_is_installed_goes_on_when_another_port_is_in_use(
    tools: Tools, tmp_path: Path, port: str, platform: str
):
    assert service(tmp_path, "install", "--", "--port", port, platform=platform)[0] == 0
    tools.set(show=INSTALLED)
    tools.calls()
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = str(other.getsockname()[1])
        assert service(tmp_path, "install", "--", "--port", taken, platform=platform)[0] == 1
    assert tools.calls() == []  # It was not even stopped.
    assert service(tmp_path, "install", "--", "--port", port, platform=platform)[1].startswith(
        "installed already"
    )


@pytest.mark.parametrize(
    ("platform", "show", "again"),
    [
        ("darwin", {}, "launchctl bootstrap gui"),
        ("linux", INSTALLED, "systemctl --user enable --now omlxd.socket"),
        (
            "linux",
            {**INSTALLED, "UnitFileState omlxd.service": "enabled"},
            "systemctl --user enable --now omlxd.socket omlxd.service",
        ),
        # Stopped by hand, but to be there after the next login.
        ("linux", {"UnitFileState omlxd.socket": "enabled"}, "systemctl --user enable omlxd.socket"),
    ],
)
def test_what_is_installed_is_put_back_when_its_own_port_was_taken(
    tools: Tools, tmp_path: Path, port: str, platform: str, show: dict[str, str], again: str
):
    install = ("install", "--", "--port", port)
    assert service(tmp_path, *install, platform=platform)[0] == 0
    tools.set(show=show)
    tools.calls()
    with socket.create_server(("127.0.0.1", int(port))):
        status, _, err = service(tmp_path, *install, "--no-cache", platform=platform)
    assert status == 1 and "in use" in err
    assert tools.calls()[-1].startswith(again)
    files = [path.read_text() for path in (tmp_path / "home").rglob("*omlxd*.*")]
    assert files and not any("--no-cache" in text for text in files)


# --------------------------------------------------------------------------- what is to run


def test_flags_are_checked_before_anything_is_installed(tools: Tools, tmp_path: Path, port: str):
    for flags, words in (
        (("--prot", "1"), "--prot is not a flag"),
        (("--port", "x"), "--port: 'x'"),
        (("--port",), "expected one argument"),
        (("--port", "0"), "needs a port that stays"),
        (("--api-key", "s3cret"), "omlxd key add"),
        (("--host", "0.0.0.0", "--base-path", str(tmp_path)), "a key is needed"),
        (("--config", str(tmp_path / "no.toml")), "there is no file"),
        (("--model", str(tmp_path / "typo")), f"--model: there is no folder {tmp_path}/typo; give"),
        (("--model", str(tmp_path)), "is no model folder"),
        (("--model", "typo.gguf"), "typo.gguf"),
    ):
        status, _, err = service(tmp_path, "install", "--", *flags)
        assert status == 2 and words in err and "s3cret" not in err, flags
    assert service(tmp_path, "stop", "--", "--port", "1")[0] == 2
    assert tools.calls() == []


def test_paths_are_meant_from_here_and_variables_of_this_shell_are_not_taken(
    tools: Tools, tmp_path: Path, port: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    make(tmp_path / "tiny")
    (tmp_path / "my.toml").write_text(f"[serve]\nport = {port}\n")
    monkeypatch.setenv("OMLXD_PORT", "1")
    monkeypatch.setenv("HF_HOME", "/elsewhere")
    monkeypatch.setenv("HUGGINGFACE_HUB_CACHE", "/there")
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    monkeypatch.setenv("TRANSFORMERS_OFFLINE", "1")
    monkeypatch.setenv("AGX_RELAX_CDM_CTXSTORE_TIMEOUT", "1")
    monkeypatch.setenv("HF_TOKEN", "secret")
    status, out, err = service(tmp_path, "install", "--", "--model", "./tiny", "--config", "my.toml")
    assert status == 0 and f"port {port}" in out and "does not see OMLXD_PORT" in err
    agent = plistlib.loads(agent_file(tmp_path).read_bytes())
    words = agent["ProgramArguments"]
    assert words[words.index("--model") + 1] == str(tmp_path / "tiny")
    assert words[words.index("--config") + 1] == str(tmp_path / "my.toml")
    assert agent["EnvironmentVariables"]["HF_HOME"] == "/elsewhere"
    assert agent["EnvironmentVariables"]["HUGGINGFACE_HUB_CACHE"] == "/there"
    assert agent["EnvironmentVariables"]["XDG_CACHE_HOME"] == "/caches"
    assert agent["EnvironmentVariables"]["TRANSFORMERS_OFFLINE"] == "1"
    assert agent["EnvironmentVariables"]["AGX_RELAX_CDM_CTXSTORE_TIMEOUT"] == "1"
    assert "secret" not in agent_file(tmp_path).read_text()


def test_a_service_finds_the_package_from_anywhere():
    """Installed or not: with the variables that it gives, it starts in / with nothing else."""
    extra = plan._import_path(sys.executable)
    bare = {"PATH": "/usr/bin:/bin", **extra}
    said = subprocess.run(
        [sys.executable, "-m", "omlxd", "--version"], cwd="/", env=bare, capture_output=True, text=True
    )
    assert said.stdout.startswith("omlxd ")
    with pytest.raises(main.ConfigError, match="can't start omlxd outside of this shell"):
        plan._import_path(shutil.which("false") or "/bin/false")


def test_the_service_manager_waits_longer_than_we_take_to_stop():
    assert pool.DRAIN_S + pool.FLUSH_S + 2 * serve.END_S < plan.EXIT_TIMEOUT_S


# --------------------------------------------------------------------------- the examples in the repository

SAMPLE = Plan(
    program=("/usr/local/bin/python3", "-m", "omlxd", "serve"),
    environ={"OMLXD_SERVICE": "1"},
    host="127.0.0.1",
    port=8000,
)


def bare(text: str) -> list[str]:
    return [line for line in text.splitlines() if line and not line.startswith("#")]


def test_the_examples_are_what_install_writes(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(manager, "_has_ipv6", lambda: True)
    log = ("--log-file", "/Users/me/Library/Logs/omlxd/omlxd.log")
    mac = Plan(
        program=(*SAMPLE.program, *log), environ=SAMPLE.environ, host="127.0.0.1", port=8000, at_login=True
    )
    example = plistlib.loads((REPO / "launchd/dev.omlxd.serve.plist").read_bytes())
    assert example == launchd.agent(mac, Path("/Users/me/Library/Logs/omlxd/stdio.log"))
    assert bare((REPO / "config/omlxd.service").read_text()) == bare(systemd.service_unit(SAMPLE))
    assert bare((REPO / "config/omlxd.socket").read_text()) == bare(systemd.socket_unit(SAMPLE))


@pytest.mark.parametrize("platform", ["darwin", "linux"])
def test_a_host_that_joins_is_a_service_of_its_own(tools: Tools, tmp_path: Path, port: str, platform: str):
    """Beside that of `omlxd serve`, with the address of its own flag."""
    folder = make(tmp_path / "model")
    flags = ("--listen", f"127.0.0.1:{port}", "--model", str(folder))
    status, said, err = service(tmp_path, "install", "--join", "--", *flags, platform=platform)
    assert (status, err) == (0, ""), said
    assert f"listens on 127.0.0.1 port {port}" in said
    written = [file for file in (tmp_path / "home").rglob("*join*") if file.is_file()]
    text = "\n".join(file.read_text() for file in written)
    assert "join" in text and "--listen" in text and port in text and str(folder) in text
    assert service(tmp_path, "status", platform=platform)[0] == 4  # That of `omlxd serve`.
    status, _, err = service(tmp_path, "install", "--join", "--", "--port", port, platform=platform)
    assert status == 2 and "--port is not a flag of `omlxd join`" in err
    assert service(tmp_path, "uninstall", "--join", platform=platform)[0] == 0
    assert not [file for file in written if file.exists()]
