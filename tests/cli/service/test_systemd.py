"""`omlxd service` on Linux: the units, and the exact commands, before a systemctl that plays its part.

tests/cli/service/test_systemd_user.py runs them under a real one.
"""

# ruff: noqa: F811 -- `port` and `tools` are fixtures of service_tools.py

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from service_tools import Tools, port, service, tools  # noqa: F401

from omlxd.cli.service import systemd
from omlxd.cli.service.plan import Plan, make_plan

FORGET = "systemctl --user reset-failed omlxd.service omlxd.socket"
"""A service that failed too often would not be started otherwise, mended or not."""


def units(tmp_path: Path) -> dict[str, str]:
    folder = tmp_path / "home/.config/systemd/user"
    return {path.name: path.read_text() for path in folder.iterdir()}


def test_the_units_and_their_commands(tools: Tools, tmp_path: Path, port: str):
    install = ("install", "--", "--port", port)
    assert service(tmp_path, *install, platform="linux")[0] == 0
    assert tools.calls() == [
        "systemctl --user daemon-reload",
        "systemctl --user daemon-reload",
        FORGET,
        "systemctl --user enable --now omlxd.socket",
    ]
    found = units(tmp_path)
    assert set(found) == {"omlxd.service", "omlxd.socket"}
    places = ["127.0.0.1", *(["[::1]"] if socket.has_dualstack_ipv6() else [])]
    listening = [line for line in found["omlxd.socket"].splitlines() if line.startswith("ListenStream=")]
    assert listening == [f"ListenStream={place}:{port}" for place in places]
    python = Path(sys.executable).absolute()
    assert f"ExecStart={python} -m omlxd serve --port {port}\n" in found["omlxd.service"]
    for line in ("Type=notify", "Restart=on-failure", "KillMode=mixed", "LimitNOFILE=8192", "UMask=0077"):
        assert f"\n{line}\n" in found["omlxd.service"]

    tools.set(show={"ActiveState omlxd.socket": "active"})
    assert service(tmp_path, *install, platform="linux")[1].startswith("installed already")
    assert tools.calls() == []
    assert service(tmp_path, "install", "--at-login", "--", "--port", port, platform="linux")[0] == 0
    assert tools.calls()[1:] == [
        "systemctl --user disable --now omlxd.service omlxd.socket",
        "systemctl --user daemon-reload",
        FORGET,
        "systemctl --user enable --now omlxd.socket",
        "systemctl --user enable --now omlxd.service",
    ]
    for verb, called in (
        ("start", [FORGET, "systemctl --user start omlxd.socket omlxd.service"]),
        ("stop", ["systemctl --user stop omlxd.socket omlxd.service"]),
        ("restart", [FORGET, "systemctl --user restart omlxd.service"]),
    ):
        assert service(tmp_path, verb, platform="linux")[0] == 0
        assert tools.calls() == called
    assert service(tmp_path, "uninstall", platform="linux")[0] == 0
    assert units(tmp_path) == {}
    assert tools.calls()[0] == "systemctl --user disable --now omlxd.service omlxd.socket"


KILLED = {
    "ActiveState omlxd.service": "failed",
    "Result omlxd.service": "signal",
    "ExecMainStatus omlxd.service": "9",
}


def test_status_and_logs(tools: Tools, tmp_path: Path, port: str, monkeypatch: pytest.MonkeyPatch):
    assert service(tmp_path, "install", "--", "--port", port, platform="linux")[0] == 0
    for show, status, words in (
        ({"ActiveState omlxd.service": "active", "MainPID omlxd.service": "7"}, 0, "running, process 7"),
        ({"ActiveState omlxd.service": "inactive", "ActiveState omlxd.socket": "active"}, 0, "waiting"),
        ({"ActiveState omlxd.service": "failed", "ExecMainStatus omlxd.service": "2"}, 3, "status 2"),
        (KILLED, 3, "failed, with signal 9; memory may have run out, or somebody killed it\nsystemd: "),
        ({**KILLED, "ActiveState omlxd.socket": "active"}, 3, "its port is open, and the next"),
        ({"ActiveState omlxd.service": "inactive", "ActiveState omlxd.socket": "inactive"}, 3, "stopped"),
    ):
        tools.set(show=show)
        got = service(tmp_path, "status", platform="linux")
        assert got[0] == status and words in got[1]
    own, rest = tmp_path / "journal/0123", ["--lines", "9", "--output", "cat", "--follow"]
    own.mkdir(parents=True)
    monkeypatch.setattr(systemd, "JOURNALS", (str(own.parent),))
    made = systemd.Systemd(tmp_path / "home")
    assert made.logs(9, True) == ["journalctl", "--user-unit", "omlxd.service", *rest]
    (own / f"user-{os.getuid()}.journal").touch()
    assert made.logs(9, True) == ["journalctl", "--user", "--unit", "omlxd.service", *rest]


def test_without_a_session_nothing_is_written(tools: Tools, tmp_path: Path, port: str):
    tools.set(forced={"daemon-reload": 1})
    status, _, err = service(tmp_path, "install", "--", "--port", port, platform="linux")
    assert status == 1 and "enable-linger" in err
    assert not (tmp_path / "home/.config").exists()


def test_words_that_mean_something_to_systemd(tmp_path: Path):
    made = Plan(
        program=("/a b/python", "-m", "omlxd", "serve", "--model", '/m/50% "of" $HOME\\x'),
        environ={"HF_HOME": "/a b/$x%"},
        host="::1",
        port=1,
    )
    unit = systemd.service_unit(made)
    assert 'ExecStart="/a b/python" -m omlxd serve --model "/m/50%% \\"of\\" $$HOME\\\\x"\n' in unit
    assert 'Environment="HF_HOME=/a b/$x%%"\n' in unit
    assert "ListenStream=[::1]:1\n" in systemd.socket_unit(made)
    with pytest.raises(systemd.ServiceError, match="quotes"):
        systemd.service_unit(msgspec.structs.replace(made, program=('/a"b/python',)))


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not here")
@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_systemd_finds_nothing_wrong_with_the_units(tmp_path: Path, host: str):
    """Those that install writes, and those with words that mean something to systemd."""
    folder = tmp_path / "a b %h $c"
    folder.mkdir()
    (folder / "python").symlink_to(sys.executable)
    real = make_plan({"port": "8000", "host": host}, log_file=None, at_login=False)
    odd = Plan(program=(str(folder / "python"), "%", "$x"), environ={"A": "b $c %"}, host=host, port=1)
    for made in (real, odd):
        (tmp_path / "omlxd.service").write_text(systemd.service_unit(made))
        (tmp_path / "omlxd.socket").write_text(systemd.socket_unit(made))
        done = subprocess.run(
            ["systemd-analyze", "verify", "--user", "--man=no", "omlxd.service", "omlxd.socket"],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=300,
            env={**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)},
        )
        assert [line for line in done.stderr.splitlines() if "omlxd" in line] == []
        assert done.returncode == 0, done.stderr
