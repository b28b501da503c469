"""`omlxd service` on macOS: the property list and the commands, before a launchctl that plays its part."""

# ruff: noqa: F811 -- `port` and `tools` are fixtures of service_tools.py

from __future__ import annotations

import os
import plistlib
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from service_tools import Tools, agent_file, port, service, tools  # noqa: F401

from omlxd.cli.service import launchd, protected
from tests.models.test_resolve import make

GUI = f"gui/{os.getuid()}"
JOB = f"{GUI}/dev.omlxd.serve"

DOCUMENTED = {  # launchd.plist(5)
    "Label": str,
    "ProgramArguments": list,
    "EnvironmentVariables": dict,
    "WorkingDirectory": str,
    "KeepAlive": dict,
    "ThrottleInterval": int,
    "ExitTimeOut": int,
    "ProcessType": str,
    "SoftResourceLimits": dict,
    "Umask": int,
    "StandardOutPath": str,
    "StandardErrorPath": str,
    "Sockets": dict,
}
SOCKET_KEYS = {"SockNodeName": str, "SockServiceName": str, "SockFamily": str, "SockType": str}


def test_the_agent_has_the_exact_flags_and_documented_keys(tools: Tools, tmp_path: Path, port: str):
    status, out, err = service(tmp_path, "install", "--", "--port", port, "--max-concurrent-requests", "3")
    assert (status, err) == (0, "") and f"launchd listens on 127.0.0.1 port {port}" in out
    agent = plistlib.loads(agent_file(tmp_path).read_bytes())
    assert {key: type(value) for key, value in agent.items()} == {
        key: kind for key, kind in DOCUMENTED.items() if key != "KeepAlive"
    }
    log = str(tmp_path / "home/Library/Logs/omlxd/omlxd.log")
    assert agent["ProgramArguments"] == [
        *(str(Path(sys.executable).absolute()), "-m", "omlxd", "serve"),
        *("--port", port, "--max-concurrent-requests", "3", "--log-file", log),
    ]
    assert [*agent["Sockets"]] == ["Listeners"]
    places = [("127.0.0.1", "IPv4"), *([("::1", "IPv6")] if socket.has_dualstack_ipv6() else [])]
    assert agent["Sockets"]["Listeners"] == [
        {"SockNodeName": address, "SockServiceName": port, "SockFamily": family, "SockType": "stream"}
        for address, family in places
    ]
    for listener in agent["Sockets"]["Listeners"]:
        assert {key: type(value) for key, value in listener.items()} == SOCKET_KEYS
    assert Path(agent["StandardErrorPath"]).parent.is_dir()  # launchd makes no folders.
    assert agent_file(tmp_path).stat().st_mode & 0o022 == 0  # launchd refuses what others can write.
    assert tools.calls() == [
        f"launchctl bootout {JOB}",
        f"launchctl enable {JOB}",
        f"launchctl bootstrap {GUI} {agent_file(tmp_path)}",
    ]


def test_at_login_it_is_kept_alive_on_failure_only(tools: Tools, tmp_path: Path, port: str):
    assert service(tmp_path, "install", "--at-login", "--", "--port", port)[0] == 0
    agent = plistlib.loads(agent_file(tmp_path).read_bytes())
    assert agent["KeepAlive"] == {"SuccessfulExit": False}
    assert {key: type(value) for key, value in agent.items()} == DOCUMENTED


def test_installed_again_it_does_nothing_or_takes_the_new_flags(tools: Tools, tmp_path: Path, port: str):
    install = ("install", "--", "--port", port)
    assert service(tmp_path, *install)[1].startswith("installed: ")
    tools.calls()
    assert service(tmp_path, *install)[1].startswith("installed already")
    assert tools.calls() == []
    assert service(tmp_path, *install, "--no-cache")[1].startswith("installed: ")
    assert [call.split()[1] for call in tools.calls()] == ["bootout", "enable", "bootstrap"]
    assert "--no-cache" in plistlib.loads(agent_file(tmp_path).read_bytes())["ProgramArguments"]


def test_the_verbs_and_their_commands(tools: Tools, tmp_path: Path, port: str):
    assert service(tmp_path, "install", "--", "--port", port)[0] == 0
    tools.calls()
    assert service(tmp_path, "start")[0] == 0
    assert tools.calls() == [f"launchctl kickstart {JOB}"]
    assert service(tmp_path, "stop")[0] == 0
    assert tools.calls() == [f"launchctl bootout {JOB}"]
    assert service(tmp_path, "stop")[0] == 0  # Launchctl says 3, and that is as well.
    tools.calls()
    assert service(tmp_path, "start")[0] == 0
    assert [call.split()[1] for call in tools.calls()] == ["enable", "bootstrap", "kickstart"]
    assert service(tmp_path, "restart")[0] == 0
    assert [call.split()[1] for call in tools.calls()] == ["bootout", "enable", "bootstrap", "kickstart"]
    (tmp_path / "home/Library/LaunchAgents/other.plist").write_text("someone else's")
    assert service(tmp_path, "uninstall")[0] == 0
    assert tools.calls() == [f"launchctl bootout {JOB}"]
    assert [f.name for f in (tmp_path / "home/Library/LaunchAgents").iterdir()] == ["other.plist"]
    assert service(tmp_path, "uninstall")[1] == "there was no service\n" and tools.calls() == []


def test_a_stop_waits_until_launchd_has_let_go(tools: Tools, tmp_path: Path, port: str):
    """36, operation now in progress: bootstrapped at once, it would be refused."""
    assert service(tmp_path, "install", "--", "--port", port)[0] == 0
    tools.set(slow=5)
    assert service(tmp_path, "restart")[0] == 0
    assert tools.calls()[-1] == f"launchctl kickstart {JOB}"


@pytest.mark.parametrize("status", [5, 17, 37])
def test_a_job_that_is_loaded_already_is_no_error(tools: Tools, tmp_path: Path, port: str, status: int):
    assert service(tmp_path, "install", "--", "--port", port)[0] == 0
    agent = launchd.Launchd(tmp_path / "home")
    tools.set(forced={"bootstrap": status})
    agent._bootstrap()
    tools.set(forced={"bootstrap": status}, loaded=False)
    with pytest.raises(launchd.ServiceError, match="launchd would not take"):
        agent._bootstrap()


def test_what_launchctl_refuses_is_told_in_one_line(tools: Tools, tmp_path: Path, port: str):
    install = ("install", "--", "--port", port)
    tools.set(forced={"bootstrap": 125})
    status, _, err = service(tmp_path, *install)
    assert status == 1 and "log in at the Mac's screen" in err and err.count("\n") == 1
    assert service(tmp_path, *install)[0] == 0  # What failed half-way is no obstacle.
    assert service(tmp_path, "stop")[0] == 0
    tools.set(forced={"bootstrap": 5})
    status, _, err = service(tmp_path, "start")
    assert (
        status == 1
        and "may be switched off in System Settings > General > Login" in err
        and err.count("\n") == 1
    )
    tools.set(forced={"kickstart": 3})
    assert service(tmp_path, "start")[0] == 1
    tools.set(forced={"bootout": 9})
    status, _, err = service(tmp_path, "stop")
    assert status == 1 and "would not let go" in err


def test_status_and_logs(tools: Tools, tmp_path: Path, port: str):
    assert service(tmp_path, "status")[:2] == (4, "not installed; `omlxd service install` does that\n")
    assert service(tmp_path, "install", "--", "--port", port)[0] == 0
    for said, status, words in (
        ("\tstate = waiting\n\tlast exit code = (never exited)\n", 0, "waiting"),
        ("\tstate = running\n\tpid = 4711\n\tlast exit code = 1\n", 0, "running, process 4711"),
        ("\tstate = not running\n\tlast exit code = 0\n", 0, "waiting"),
        ("\tstate = not running\n\tlast exit code = 78: EX_CONFIG\n", 3, "failed, with status 78: EX_CONFIG"),
        # A signal stands in place of the code, and stays while the next run goes on (macOS 26).
        (
            "\truns = 2\n\tlast terminating signal = Killed: 9\n",
            3,
            "signal Killed: 9; memory may have run out, or somebody killed",
        ),
        ("\tlast exit code = 2\n", 3, "`omlxd service logs` tells why\nits port is open, and the next conn"),
        ("\truns = 2\n\tlast terminating signal = Terminated: 15\n", 0, "waiting"),
        ("\tpid = 4711\n\tlast terminating signal = Killed: 9\n", 0, "running, process 4711"),
        ("\tlast exit reason = JETSAM_REASON_MEMORY\n", 3, "failed, with reason JETSAM_REASON_MEMORY"),
    ):
        tools.set(print=said)
        got = service(tmp_path, "status")
        assert got[0] == status and words in got[1], said
        assert ("its port is open" in got[1]) == (status == 3), said
    assert service(tmp_path, "stop")[0] == 0
    status, out, _ = service(tmp_path, "status")
    assert status == 3 and out.startswith("stopped; ") and out.count("\n") == 2
    tools.set(disabled='\t"dev.omlxd.serve" => disabled\n')
    assert "It may be switched off under System Settings > General > Login" in service(tmp_path, "status")[1]
    status, out, err = service(tmp_path, "logs")
    assert (
        (status, out) == (1, "") and err.startswith("omlxd: it has logged nothing yet") and "tail" not in err
    )
    logs = tmp_path / "home/Library/Logs/omlxd"
    (logs / "omlxd.log").write_text("one\ntwo\n")
    (logs / "stdio.log").touch()
    assert launchd.Launchd(tmp_path / "home").logs(7, True) == [
        *("tail", "-n", "7", "-F", str(logs / "stdio.log"), str(logs / "omlxd.log"))
    ]
    (logs / "stdio.log").unlink()
    done = subprocess.run(launchd.Launchd(tmp_path / "home").logs(1, False), capture_output=True, text=True)
    assert done.stdout == "two\n"


def test_a_file_that_is_not_ours_is_left_alone(tools: Tools, tmp_path: Path, port: str):
    agent_file(tmp_path).parent.mkdir(parents=True)
    agent_file(tmp_path).write_bytes(plistlib.dumps({"Label": "dev.omlxd.serve"}))
    for verb in ("install", "uninstall", "start", "stop", "status"):
        status, _, err = service(tmp_path, verb)
        assert status == 1 and "not written by `omlxd service install`" in err
    assert tools.calls() == [] and agent_file(tmp_path).exists()


def test_what_macos_keeps_from_services_is_refused(
    tools: Tools, tmp_path: Path, port: str, monkeypatch: pytest.MonkeyPatch
):
    """A terminal may read there and the agent may not, so that a trial in the terminal shows nothing."""
    home = tmp_path / "home"
    make(home / "Desktop")
    for folder in ("Documents/omlxd/omlxd", "Library/Mobile Documents/models", "fine"):
        (home / folder).mkdir(parents=True)
    (home / "mine").symlink_to(home / "Library/Mobile Documents")
    install = ("install", "--", "--port", port)
    for flags, words in (
        (
            ("--model-dir", str(home / "mine/models")),
            "/mine/models (the folder of models) is in iCloud Drive.\n",
        ),
        (("--model", str(home / "fine/../Desktop")), "/fine/../Desktop (the model) is in Desktop.\n"),
        (
            ("--paged-ssd-cache-dir", "/Volumes/fast/cache"),
            "/Volumes/fast/cache (the SSD cache) is in /Volumes.\n",
        ),
        (("--base-path", str(home / "downloads")), "/downloads (the base folder) is in Downloads.\n"),
        (("--log-file", str(home / "Desktop/omlxd.log")), "/omlxd.log (the log) is in Desktop.\n"),
    ):
        status, _, err = service(tmp_path, *install, *flags)
        assert status == 2 and words in err, (flags, err)
        assert "without a consent (TCC) that a service can't ask for.\nomlxd: Copy" in err
        assert err.count("\n") == 3, err  # What lies in it is not named, too.
    monkeypatch.setenv("HF_HOME", "/Volumes/Ext/hf")  # Which is not there yet.
    status, _, err = service(tmp_path, *install, "--no-hf-cache", "--model", "org/name")
    assert status == 2 and "/Volumes/Ext/hf/hub (the Hugging Face cache) is in /Volumes.\n" in err
    assert service(tmp_path, *install)[0] == 2
    monkeypatch.delenv("HF_HOME")
    assert tools.calls() == [] and not agent_file(tmp_path).exists()
    assert service(tmp_path, *install, "--no-cache", "--paged-ssd-cache-dir", "/Volumes/fast")[0] == 0
    monkeypatch.setattr(protected.omlxd, "__file__", str(home / "Documents/omlxd/omlxd/__init__.py"))
    monkeypatch.setattr(sys, "prefix", str(home / "Documents/omlxd/.venv"))
    status, _, err = service(tmp_path, *install)
    assert status == 2 and f"omlxd: {home}/Documents/omlxd (omlxd) is in Documents.\n" in err
    assert "tools/bootstrap.py serve --help`, which makes .venv anew" in err and err.count("\n") == 3


def test_status_says_when_its_python_is_gone(tools: Tools, tmp_path: Path, port: str):
    assert service(tmp_path, "install", "--at-login", "--", "--port", port)[0] == 0
    job = plistlib.loads(agent_file(tmp_path).read_bytes())
    (tmp_path / "python").symlink_to(tmp_path / "Cellar/python@3.13")
    job["ProgramArguments"][0] = str(tmp_path / "python")
    agent_file(tmp_path).write_bytes(plistlib.dumps(job))
    tools.set(print="\tlast exit code = (never exited)\n")
    status, out, _ = service(tmp_path, "status")
    assert status == 3 and out.startswith("failed\n") and f"Its Python is gone: {tmp_path}/python" in out
    assert f"starts: `omlxd service install --at-login -- --port {port} --log-file" in out
    tools.calls()
    for verb in ("start", "restart"):
        status, _, err = service(tmp_path, verb)
        assert status == 1 and f"Its Python is gone: {tmp_path}/python" in err and tools.calls() == []
