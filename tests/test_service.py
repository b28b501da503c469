"""`omlxd service`: the files it writes, and the exact commands it gives, before fakes on PATH."""

from __future__ import annotations

import contextlib
import io
import os
import plistlib
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from omlxd import cli
from omlxd.front import pool, serve
from omlxd.service import command, launchd, plan, systemd
from omlxd.service.plan import Plan

REPO = Path(__file__).resolve().parents[1]
GUI = f"gui/{os.getuid()}"
JOB = f"{GUI}/dev.omlxd.serve"

FAKE = r"""#!{python} -ISE
import json, sys
here = {here!r}
words = sys.argv[1:]
with open(here + "/calls.txt", "a") as calls:
    calls.write(" ".join([{name!r}, *words]) + "\n")
with open(here + "/state.json") as file:
    state = json.load(file)
def end(status, text=""):
    with open(here + "/state.json", "w") as file:
        json.dump(state, file)
    print(text, file=sys.stderr if status else sys.stdout)
    sys.exit(status)
if words[0] in state["forced"]:
    end(state["forced"].pop(words[0]), words[0] + " was told to fail")
{body}
"""

LAUNCHCTL = r"""
verb = words[0]
if verb == "print":
    if state["leaving"]:
        state["leaving"] -= 1
        state["loaded"] = state["leaving"] > 0
    if not state["loaded"]:
        end(113, 'Could not find service "dev.omlxd.serve" in domain for user gui')
    end(0, "dev.omlxd.serve = {\n\tactive count = 1\n" + state["print"] + "}")
elif verb == "bootstrap":
    if state["loaded"]:
        end(5, "Bootstrap failed: 5: Input/output error")
    state["loaded"] = True
elif verb == "bootout":
    if not state["loaded"]:
        end(3, "Boot-out failed: 3: No such process")
    if state["slow"]:
        state["leaving"], state["slow"] = state["slow"], 0
        end(36, "Boot-out failed: 36: Operation now in progress")
    state["loaded"] = False
elif verb == "kickstart" and not state["loaded"]:
    end(113, "Could not find service")
end(0)
"""

SYSTEMCTL = r"""
words = words[1:]  # --user
if words[0] == "show":
    end(0, state["show"].get(words[2] + " " + words[4], ""))
if words[0] in state["forced"]:
    end(state["forced"].pop(words[0]), "Failed to connect to bus: No medium found")
end(0)
"""


class Tools:
    """Fakes of launchctl and systemctl on PATH, what they were told, and what they are to say."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch):
        self.folder = folder
        for name, body in (("launchctl", LAUNCHCTL), ("systemctl", SYSTEMCTL)):
            script = folder / name
            script.write_text(
                FAKE.replace("{python}", sys.executable)
                .replace("{here!r}", repr(str(folder)))
                .replace("{name!r}", repr(name))
                .replace("{body}", body)
            )
            script.chmod(0o755)
        self.set(loaded=False, slow=0, leaving=0, print="", forced={}, show={})
        monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
        monkeypatch.setattr(launchd, "POLL_S", 0.01)

    def set(self, **changes: object) -> None:
        import json

        path = self.folder / "state.json"
        state = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps({**state, **changes}))

    def calls(self) -> list[str]:
        """What was called since the last time, without questions after the state."""
        path = self.folder / "calls.txt"
        said = path.read_text().splitlines() if path.exists() else []
        path.unlink(missing_ok=True)
        return [line for line in said if " print " not in line and " show " not in line]


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tools:
    for name in list(os.environ):
        if name.startswith(("OMLXD_", "HF_", "XDG_CONFIG")):
            monkeypatch.delenv(name)
    (tmp_path / "bin").mkdir()
    monkeypatch.setattr(plan, "_import_path", lambda python: {})  # Two processes each time.
    return Tools(tmp_path / "bin", monkeypatch)


@pytest.fixture
def port() -> str:
    with socket.create_server(("127.0.0.1", 0)) as one:
        return str(one.getsockname()[1])


def service(tmp_path: Path, *argv: str, platform: str = "darwin") -> tuple[int, str, str]:
    """(exit status, standard output, standard error) of `omlxd service argv` on that platform."""
    with (
        contextlib.redirect_stdout(io.StringIO()) as out,
        contextlib.redirect_stderr(io.StringIO()) as err,
    ):
        try:
            parser = cli._Parser(prog="omlxd service")
            status = command.main(argv, parser, platform=platform, home=tmp_path / "home")
        except cli.ConfigError as error:
            print(error.message, file=sys.stderr)
            status = 2
    return status, out.getvalue(), err.getvalue()


def agent_file(tmp_path: Path) -> Path:
    return tmp_path / "home" / "Library" / "LaunchAgents" / "dev.omlxd.serve.plist"


# --------------------------------------------------------------------------- launchd

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
    (listeners,) = agent["Sockets"].items()
    assert listeners == (
        "Listeners",
        {"SockNodeName": "127.0.0.1", "SockServiceName": port, "SockFamily": "IPv4", "SockType": "stream"},
    )
    assert {key: type(value) for key, value in listeners[1].items()} == SOCKET_KEYS
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
    ):
        tools.set(print=said)
        got = service(tmp_path, "status")
        assert got[0] == status and words in got[1], said
    assert service(tmp_path, "stop")[0] == 0
    assert service(tmp_path, "status")[0] == 3
    logs = tmp_path / "home/Library/Logs/omlxd"
    assert launchd.Launchd(tmp_path / "home").logs(7, True) == [
        *("tail", "-n", "7", "-F", str(logs / "stdio.log"), str(logs / "omlxd.log"))
    ]
    (logs / "omlxd.log").write_text("one\ntwo\n")
    done = subprocess.run(launchd.Launchd(tmp_path / "home").logs(1, False), capture_output=True, text=True)
    assert done.stdout == "two\n"


def test_a_file_that_is_not_ours_is_left_alone(tools: Tools, tmp_path: Path, port: str):
    agent_file(tmp_path).parent.mkdir(parents=True)
    agent_file(tmp_path).write_bytes(plistlib.dumps({"Label": "dev.omlxd.serve"}))
    for verb in ("install", "uninstall", "start", "stop", "status"):
        status, _, err = service(tmp_path, verb)
        assert status == 1 and "not written by `omlxd service install`" in err
    assert tools.calls() == [] and agent_file(tmp_path).exists()


@pytest.mark.parametrize("platform", ["darwin", "linux"])
def test_a_port_in_use_is_told_before_anything_is_written(
    tools: Tools, tmp_path: Path, port: str, platform: str
):
    with socket.create_server(("127.0.0.1", int(port))):
        status, _, err = service(tmp_path, "install", "--", "--port", port, platform=platform)
    assert status == 1 and f"port {port} on 127.0.0.1 is in use" in err
    assert not list((tmp_path / "home").rglob("*omlxd*.*"))


# --------------------------------------------------------------------------- systemd


def units(tmp_path: Path) -> dict[str, str]:
    folder = tmp_path / "home/.config/systemd/user"
    return {path.name: path.read_text() for path in folder.iterdir()}


def test_the_units_and_their_commands(tools: Tools, tmp_path: Path, port: str):
    install = ("install", "--", "--port", port)
    assert service(tmp_path, *install, platform="linux")[0] == 0
    assert tools.calls() == [
        "systemctl --user daemon-reload",
        "systemctl --user daemon-reload",
        "systemctl --user enable --now omlxd.socket",
    ]
    found = units(tmp_path)
    assert set(found) == {"omlxd.service", "omlxd.socket"}
    assert f"ListenStream=127.0.0.1:{port}\n" in found["omlxd.socket"]
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
        "systemctl --user enable --now omlxd.socket",
        "systemctl --user enable --now omlxd.service",
    ]
    for verb, called in (
        ("start", "start omlxd.socket omlxd.service"),
        ("stop", "stop omlxd.socket omlxd.service"),
        ("restart", "restart omlxd.service"),
    ):
        assert service(tmp_path, verb, platform="linux")[0] == 0
        assert tools.calls() == [f"systemctl --user {called}"]
    assert service(tmp_path, "uninstall", platform="linux")[0] == 0
    assert units(tmp_path) == {}
    assert tools.calls()[0] == "systemctl --user disable --now omlxd.service omlxd.socket"


def test_status_and_logs_of_systemd(tools: Tools, tmp_path: Path, port: str):
    assert service(tmp_path, "install", "--", "--port", port, platform="linux")[0] == 0
    for show, status, words in (
        ({"ActiveState omlxd.service": "active", "MainPID omlxd.service": "7"}, 0, "running, process 7"),
        ({"ActiveState omlxd.service": "inactive", "ActiveState omlxd.socket": "active"}, 0, "waiting"),
        ({"ActiveState omlxd.service": "failed", "ExecMainStatus omlxd.service": "2"}, 3, "status 2"),
        ({"ActiveState omlxd.service": "inactive", "ActiveState omlxd.socket": "inactive"}, 3, "stopped"),
    ):
        tools.set(show=show)
        got = service(tmp_path, "status", platform="linux")
        assert got[0] == status and words in got[1]
    assert systemd.Systemd(tmp_path / "home").logs(9, True) == (
        ["journalctl", "--user", "--unit", "omlxd.service", "--lines", "9", "--output", "cat", "--follow"]
    )


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


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not here")
def test_systemd_finds_nothing_wrong_with_the_units(tmp_path: Path):
    made = Plan(
        program=("/usr/bin/env", "--port", "1", "a b"), environ={"A": "b c"}, host="127.0.0.1", port=1
    )
    (tmp_path / "omlxd.service").write_text(systemd.service_unit(made))
    (tmp_path / "omlxd.socket").write_text(systemd.socket_unit(made))
    done = subprocess.run(
        ["systemd-analyze", "verify", "--user", "--man=no", "omlxd.service", "omlxd.socket"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env={**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)},
    )
    assert [line for line in done.stderr.splitlines() if "omlxd" in line] == []
    assert done.returncode == 0, done.stderr


# --------------------------------------------------------------------------- what is to run


def test_flags_are_checked_before_anything_is_installed(tools: Tools, tmp_path: Path, port: str):
    for flags, words in (
        (("--prot", "1"), "--prot is no flag"),
        (("--port", "x"), "--port: 'x'"),
        (("--port",), "expected one argument"),
        (("--port", "0"), "needs a port that stays"),
        (("--api-key", "s3cret"), "omlxd key add"),
        (("--host", "0.0.0.0", "--base-path", str(tmp_path)), "a key is needed"),
        (("--config", str(tmp_path / "no.toml")), "there is no file"),
    ):
        status, _, err = service(tmp_path, "install", "--", *flags)
        assert status == 2 and words in err and "s3cret" not in err, flags
    assert service(tmp_path, "stop", "--", "--port", "1")[0] == 2
    assert tools.calls() == []


def test_paths_are_meant_from_here_and_variables_of_this_shell_are_not_taken(
    tools: Tools, tmp_path: Path, port: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny").mkdir()
    (tmp_path / "my.toml").write_text(f"[serve]\nport = {port}\n")
    monkeypatch.setenv("OMLXD_PORT", "1")
    monkeypatch.setenv("HF_HOME", "/elsewhere")
    monkeypatch.setenv("HF_TOKEN", "secret")
    status, out, err = service(tmp_path, "install", "--", "--model", "./tiny", "--config", "my.toml")
    assert status == 0 and f"port {port}" in out and "does not see OMLXD_PORT" in err
    agent = plistlib.loads(agent_file(tmp_path).read_bytes())
    words = agent["ProgramArguments"]
    assert words[words.index("--model") + 1] == str(tmp_path / "tiny")
    assert words[words.index("--config") + 1] == str(tmp_path / "my.toml")
    assert agent["EnvironmentVariables"]["HF_HOME"] == "/elsewhere"
    assert "secret" not in agent_file(tmp_path).read_text()


def test_a_service_finds_the_package_from_anywhere():
    """Installed or not: with the variables that it gives, it starts in / with nothing else."""
    extra = plan._import_path(sys.executable)
    bare = {"PATH": "/usr/bin:/bin", **extra}
    said = subprocess.run(
        [sys.executable, "-m", "omlxd", "--version"], cwd="/", env=bare, capture_output=True, text=True
    )
    assert said.stdout.startswith("omlxd ")
    with pytest.raises(cli.ConfigError, match="can't start omlxd outside of this shell"):
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


def test_the_examples_are_what_install_writes():
    log = ("--log-file", "/Users/me/Library/Logs/omlxd/omlxd.log")
    mac = Plan(
        program=(*SAMPLE.program, *log), environ=SAMPLE.environ, host="127.0.0.1", port=8000, at_login=True
    )
    example = plistlib.loads((REPO / "launchd/dev.omlxd.serve.plist").read_bytes())
    assert example == launchd.agent(mac, Path("/Users/me/Library/Logs/omlxd/stdio.log"))
    assert bare((REPO / "config/omlxd.service").read_text()) == bare(systemd.service_unit(SAMPLE))
    assert bare((REPO / "config/omlxd.socket").read_text()) == bare(systemd.socket_unit(SAMPLE))
