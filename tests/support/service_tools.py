"""Fakes of launchctl and systemctl on PATH, and `omlxd service` run before them; for tests of the service."""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
from pathlib import Path

import pytest
from daemon import free_port

from omlxd.cli import main
from omlxd.cli.service import command, launchd, plan

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
if verb == "print-disabled":
    end(0, state["disabled"])
elif verb == "print":
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
        self.set(loaded=False, slow=0, leaving=0, print="", disabled="", forced={}, show={})
        monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
        monkeypatch.setattr(launchd, "POLL_S", 0.01)

    def set(self, **changes: object) -> None:
        path = self.folder / "state.json"
        state = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps({**state, **changes}))

    def calls(self) -> list[str]:
        """What was called since the last time, without questions after the state."""
        path = self.folder / "calls.txt"
        said = path.read_text().splitlines() if path.exists() else []
        path.unlink(missing_ok=True)
        return [line for line in said if " print" not in line and " show " not in line]


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
    return str(free_port())


def service(tmp_path: Path, *argv: str, platform: str = "darwin") -> tuple[int, str, str]:
    """(exit status, standard output, standard error) of `omlxd service argv` on that platform."""
    with (
        contextlib.redirect_stdout(io.StringIO()) as out,
        contextlib.redirect_stderr(io.StringIO()) as err,
    ):
        try:
            parser = main._Parser(prog="omlxd service")
            status = command.main(argv, parser, platform=platform, home=tmp_path / "home")
        except main.OmlxdError as error:
            status = main.report(error)
    return status, out.getvalue(), err.getvalue()


def agent_file(tmp_path: Path) -> Path:
    return tmp_path / "home" / "Library" / "LaunchAgents" / "dev.omlxd.serve.plist"
