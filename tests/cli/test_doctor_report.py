"""omlxd doctor --report: nothing private in it, failures that cost their own line, time that is bounded."""

from __future__ import annotations

import argparse
import json
import os
import plistlib
import re
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from omlxd.cli.doctor import command as doctor
from omlxd.cli.doctor import disk
from omlxd.cli.doctor.report import agent, busy, command, inside, measure, privacy, system
from omlxd.cli.doctor.report.bounds import Budget, ended_by_signals
from omlxd.cli.doctor.report.inside import END, Inside
from omlxd.cli.doctor.report.measure import Measured
from omlxd.cli.doctor.report.privacy import Privacy
from omlxd.cli.service.manager import Ran
from omlxd.config import load_settings
from omlxd.engine.server.measure.timing import short
from omlxd.errors import ConfigError

KEY = "sk-live-4711abcdef"
PRIVATE = ("jane", "Roe", "Janes-Mac", "4711", "acme", "secret", "3F2504E0", "/Users", "/Volumes/")


@pytest.fixture
def person(monkeypatch: pytest.MonkeyPatch) -> Privacy:
    """Jane Roe, who uses this machine."""
    for name, value in {"HOME": "/Users/jane.roe", "USER": "jane.roe", "LOGNAME": "jane.roe"}.items():
        monkeypatch.setenv(name, value)
    for name, value in {"ACME_API_KEY": KEY, "GITHUB_PAT": "4711 pat", "x_token": "tok-4711"}.items():
        monkeypatch.setenv(name, value)
    entry = type("Entry", (), {"pw_name": "jane.roe", "pw_gecos": "Jane Roe,,,"})
    monkeypatch.setattr(privacy.pwd, "getpwuid", lambda uid: entry)
    monkeypatch.setattr(privacy.socket, "gethostname", lambda: "Janes-Mac.local")
    return Privacy(more_secrets=["hunter2secret"], models=["/models/Acme-secret 7B", "Acme-secret 7B"])


def report_of(budget: Budget, privacy: Privacy) -> tuple[command.Report, list[str]]:
    lines: list[str] = []
    return command.Report(budget, lines.append, privacy), lines


@pytest.mark.parametrize(
    ("text", "cleaned"),
    [
        ("No safetensors found in /Users/jane.roe/acme secret/Roe", "No safetensors found in <path>"),
        ("can't read '/Volumes/acme secret/x y': denied", "can't read <path>"),
        ("see ~/acme secret", "see <path>"),
        ("jane.roe@Janes-Mac.local: roe, JANE ROE on janes-mac", "<mail>: <user>, <user> on <host>"),
        (f"Bearer {KEY}, hunter2secret, 4711 pat, tok-4711", "Bearer <key>, <key>, <key>, <key>"),
        ("ghp_secret4711, hf_4711secret4711", "<key>, <key>"),
        ("id 3F2504E0-4F89-41D3-9A0C-0305E82C3301", "id <id>"),
        (
            "192.168.47.11:80, fe80::4711, 127.0.0.1, 0.3.34.481.3",
            "<address>:80, <address>, 127.0.0.1, 0.3.34.481.3",
        ),
        ("no 'Acme-secret 7B' here", "no '<model>' here"),
        ("4 GB/s, agent / shell 1.02, /Volumes, ~", "4 GB/s, agent / shell 1.02, /Volumes, ~"),
    ],
)
def test_what_is_private_is_taken_out(person: Privacy, text: str, cleaned: str):
    assert person.clean(text) == cleaned
    report, lines = report_of(Budget(60), person)

    def fail() -> system.Lines:
        raise OSError(text)

    report.part("a part", fail)
    report.measured(Measured("another", [("a line", text)], error=text))
    assert len(lines) == 3 and not [
        line for line in lines for part in PRIVATE if part in line.replace("/Volumes, ~", "")
    ]


def test_a_part_costs_its_own_line_and_all_of_them_the_budget(person: Privacy):
    now = [0.0]
    report, lines = report_of(Budget(100, lambda: now[0]), person)
    forever = threading.Event()

    def spend(seconds: float) -> Callable[[], system.Lines]:
        def run() -> system.Lines:
            now[0] += seconds
            return [("took", f"{seconds}")]

        return run

    report.part("first", spend(60))
    report.part("broken", lambda: [("x", str(1 // 0))])
    report.part("hangs", lambda: [("x", str(forever.wait()))], 0.01)
    report.part("second", spend(41))
    report.part("third", spend(1))
    measure.measure(Path("job"), ["a", "b"], report.budget, report.measured, ["starts nothing"])
    forever.set()
    assert [" ".join(line.split()) for line in lines] == [
        "took 60",
        "broken failed: ZeroDivisionError: integer division or modulo by zero",
        "hangs no end within 0 s",
        "took 41",
        "third left out: 100 s are over",
        "a left out: 100 s are over",
        "b left out: 100 s are over",
    ]
    assert (
        command._summary(report) == "2 parts failed: broken, hangs; 3 left out for lack of time: third, a, b"
    )


@pytest.mark.parametrize(
    "text",
    [
        "acme-secret/Roe is no repository",
        "in 'acme secret/x'",
        "open('/Users/jane.roe/x y', b'4711')",
        "a /x\nacme",
    ],
)
def test_behind_a_path_nothing_of_an_error_is_printed(text: str):
    error = Privacy({}).error(f"ValueError: {text}")
    assert error.endswith("<path>") and not [part for part in ("x y", *PRIVATE) if part in error]


CHILD = """
import json, os, sys, time
print(json.dumps({"part": "start"}), flush=True)
for part in sys.argv[2:]:
    if part == "crash": os.abort()
    if part == "raise": sys.exit("no memory for " + part)
    if part == "hang": time.sleep(600)
    print(json.dumps({"part": part, "lines": [["x", str(os.getpid())]]}), flush=True)
"""


def test_a_crash_and_a_hang_cost_one_part(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(measure, "PART_S", {"hang": 0.05})
    took: list[Measured] = []
    parts = ["a", "b", "crash", "c", "raise", "hang", "d"]
    child = [sys.executable, "-S", "-c", CHILD]
    first = [part for part in parts if part != "hang"]
    measure.measure(Path("job"), first, Budget(600), took.append, child)
    measure.measure(Path("job"), ["hang"], Budget(600), took.append, child)
    assert [each.part for each in took] == [*first, "hang"]
    errors = {each.part: each.error for each in took if each.error}
    assert errors == {
        "crash": "failed: its process ended with SIGABRT",
        "raise": "failed: its process ended with status 1: no memory for raise",
        "hang": "no end within 0 s",
    }
    assert took[0].lines == took[1].lines != took[3].lines  # One process, until it crashes.


def test_launchd_runs_one_job_and_has_forgotten_it_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    calls: list[str] = []
    jobs: list[dict[str, object]] = []
    wanted = Inside({}, "job", str(tmp_path / "out.jsonl"), 5)

    def launchctl(program: str, verb: str, *words: str, timeout: float) -> Ran:
        calls.append(" ".join([program, verb, words[0]]))
        if verb == "bootstrap":
            jobs.append(plistlib.loads(Path(words[1]).read_bytes()))
            status = [0, 5][len(jobs) - 1]
            Path(wanted.out).write_bytes(msgspec.json.encode(Measured(END)) + b"\n")
            return Ran(status, "", "Bootstrap failed: 5: Input/output error" if status else "")
        said = (
            "gui/501/x = {\n\tstate = running\n\tspawn type = interactive (4)\n}" if verb == "print" else ""
        )
        return Ran(
            {"kickstart": 37, "bootout": 0 if calls.count(calls[-1]) == 1 else 3}.get(verb, 0), said, ""
        )

    monkeypatch.setattr(agent.sys, "platform", "darwin")
    monkeypatch.setattr(agent, "run", launchctl)
    how, failed, lines, results = agent.measure_inside(wanted, tmp_path, 5)
    assert (
        not failed
        and how == "a one-shot launchd agent, ProcessType Interactive"
        and [r.part for r in results] == [END]
    )
    assert lines == [
        (
            "launchctl",
            "bootstrap 0, bootstrap 5, kickstart 37, print 0, bootout 0, bootout 3; "
            "while it ran: state = running, spawn type = interactive (4)",
        )
    ]
    domain = f"gui/{os.getuid()}"
    assert (
        calls[0] == f"launchctl bootstrap {domain}"
        and calls[-1] == f"launchctl bootout {domain}/{agent.LABEL}"
    )
    job = jobs[0]
    assert job["RunAtLoad"] is True and job["ProcessType"] == "Interactive" and "KeepAlive" not in job
    assert job["ProgramArguments"][1:3] == ["-m", "omlxd.cli.doctor.report.inside"]  # type: ignore[index]

    monkeypatch.setattr(agent, "run", lambda *words, timeout: Ran(125, "", "Domain does not support it"))
    _, failed, lines, _ = agent.measure_inside(wanted, tmp_path, 5)
    assert failed.startswith("failed: launchd would not take the job (bootstrap 125): Domain") and not lines


def test_a_start_removes_what_killed_reports_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    dead, own = 2**30, os.getpid()
    for name in (f"{dead}-a", f"{own}-a", "old"):
        (tmp_path / f"omlxd-report-{name}").mkdir()
    calls: list[tuple[str, ...]] = []

    def launchctl(*words: str, timeout: float) -> Ran:
        calls.append(words[1:])
        return Ran(0, "".join(f"-\t0\tdev.omlxd.report.{pid}\n" for pid in (dead, own)), "")

    monkeypatch.setattr(agent.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(agent.psutil, "pid_exists", lambda pid: pid != dead)
    monkeypatch.setattr(agent.sys, "platform", "darwin")
    monkeypatch.setattr(agent, "run", launchctl)
    agent.remove_leftovers()
    assert calls == [("list",), ("bootout", f"gui/{os.getuid()}/dev.omlxd.report.{dead}")]
    assert sorted(each.name for each in tmp_path.iterdir()) == [f"omlxd-report-{own}-a", "omlxd-report-old"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_cleans_up_and_a_second_one_does_not_stop_that(number: int):
    cleaned, before = False, signal.getsignal(number)
    with pytest.raises(SystemExit) as ended, ended_by_signals():
        try:
            signal.raise_signal(number)
        finally:
            signal.raise_signal(number)
            cleaned = True
    assert cleaned and ended.value.code == 128 + number and signal.getsignal(number) == before


def test_without_a_temporary_folder_the_rest_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    def none(*args: object, **more: object) -> None:
        raise FileNotFoundError(2, f"No usable temporary directory found in ['{tmp_path}']")

    monkeypatch.setattr(command.disk, "describe_rates", lambda settings: "quick")
    monkeypatch.setattr(command.busy, "daemon", lambda settings: "no daemon")
    settings = load_settings({"base_path": str(tmp_path)}, {})
    lines: list[str] = []
    mistakes = [f"{tmp_path}/my settings.toml line 3 (port): 'x' is no number."]
    with monkeypatch.context() as patch:
        patch.setattr(tempfile, "mkdtemp", none)
        patch.setattr(tempfile, "gettempdir", none)
        assert command.write(settings, lines.append, mistakes=mistakes, disk_test=False) == 1
    text = "\n".join(lines)
    assert text.count(command.NO_FOLDER) == len((*command.FIRST, *command.LAST, "agent"))
    assert "settings          not read: the file's line 3 (port): 'x' is no number." in text
    assert "disk              left out (--no-disk-test)\n" in text
    assert "; 19 parts failed: settings, device," in lines[-1] and str(tmp_path) not in text
    assert re.search(r"busy +load average [\d.]+ at the beginning, [\d.]+ at the end", text)
    assert capfd.readouterr() == ("", "")


def test_macos_says_what_slows_it(monkeypatch: pytest.MonkeyPatch):
    said = {
        "batt": "Now drawing from 'Battery Power'\n -InternalBattery-0 (id=4711)\t73%; discharging; 3:10",
        "-g": " standby 1\n lowpowermode         1\n",
        "therm": "Note: No thermal warning level has been recorded\n\tCPU_Speed_Limit \t= 60\n",
    }
    monkeypatch.setattr(busy, "said_by", lambda *words: said[words[-1]])
    assert busy.power() == ["Battery Power", "73%", "lowpowermode 1", "CPU_Speed_Limit = 60"]
    assert busy.variables({"MLX_A": "x", "PATH": "y"}) == "set: MLX_A"


def test_times_have_no_exponent():
    times = (0.0, 2.5e-8, 999.4e-6, 999.6e-6, 0.9996, 12.346)
    assert ", ".join(map(short, times)) == "less than 0.01 µs, 0.025 µs, 999 µs, 1 ms, 1.00 s, 12.35 s"


def test_a_report_is_no_json():
    with pytest.raises(ConfigError, match="has no --json"):
        doctor.main(["--report", "--json"], argparse.ArgumentParser())


def test_the_agent_says_what_it_sees(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(
        inside, "measure", lambda job, parts, budget, take: take(Measured("pass", values={"pass": 2.0}))
    )
    (tmp_path / "open").mkdir()
    places = {"Documents": str(tmp_path / "open"), "Desktop": str(tmp_path / "no"), "the log": __file__}
    job = Inside(places, "job", str(tmp_path / "out"), 5)
    (tmp_path / "job").write_bytes(msgspec.json.encode(job))
    inside.main(str(tmp_path / "job"))
    results = [json.loads(line) for line in (tmp_path / "out").read_text().splitlines()]
    assert [each["part"] for each in results] == ["surroundings", "folders", "pass", END]
    assert results[1]["lines"] == [["folders", "readable: Documents, the log; absent: Desktop"]]
    assert "flock of a folder works" in results[0]["lines"][0][1]
    report, lines = report_of(Budget(60), Privacy({}))
    report.measured(Measured("pass", values={"pass": 1.0, "wired": 5.0}))
    report.inside(Measured("pass", [("pass", "2 s")], {"pass": 2.0, "wired": 9.0}))
    assert lines == ["agent: pass       2 s [agent / shell: pass 2.00]"]


def test_macos_says_how_much_memory_is_free(monkeypatch: pytest.MonkeyPatch):
    said = {
        "sysctl": "kern.memorystatus_level: 80\nkern.memorystatus_vm_pressure_level: 1\n",
        "vm_stat": "Mach Virtual Memory Statistics: (page size of 16384 bytes)\n"
        "Pages free:                    100.\nFile-backed pages:           1000000.\n"
        "Pages occupied by compressor:  200.\n",
    }
    monkeypatch.setattr(system, "said_by", lambda program, *words: said[Path(program).name])
    monkeypatch.setattr(system, "total_ram", lambda: 10**10)
    lines = dict(system.memory())
    assert "so 8 GB are free by memory_pressure" in lines["pressure"]
    assert "File-backed pages 16.4 GB, Pages occupied by compressor 3.3 MB" in lines["pressure"]


def test_the_disk_is_timed_past_the_page_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    settings = load_settings({"base_path": str(tmp_path)}, {})
    monkeypatch.setattr(disk.sys, "platform", "linux")
    assert re.search(
        r"the SSD cache's: writes .*/s with .*fsync.*, reads .*/s", disk.describe_rates(settings, disk._CHUNK)
    )
    asked: list[int] = []
    monkeypatch.setattr(disk.sys, "platform", "darwin")
    monkeypatch.setattr(disk.fcntl, "F_NOCACHE", 48, raising=False)
    monkeypatch.setattr(disk.fcntl, "F_FULLFSYNC", 51, raising=False)
    monkeypatch.setattr(disk.fcntl, "fcntl", lambda fd, what, on=0: asked.append(what))
    assert "F_FULLFSYNC behind another" in disk.describe_rates(settings, disk._CHUNK)
    assert asked == [48, 51, 48] and list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.cpu_rules("what it measures of Metal takes minutes on a CPU")
def test_a_real_report_has_every_line_and_nothing_private(tmp_path: Path):
    home = tmp_path / "jane"
    home.mkdir()
    environ = {**os.environ, "HOME": str(home), "USER": "jane", "LOGNAME": "jane", "ACME_API_KEY": KEY}
    done = subprocess.run(
        [sys.executable, "-m", "omlxd", "doctor", "--report"], env=environ, capture_output=True, text=True
    )
    lines = [line for line in done.stdout.splitlines() if not line.startswith((" ", "It "))]
    assert done.returncode == 0, done.stderr
    heads = [re.split(r"  +", line)[0] for line in lines[1:]]
    for name in (
        "omlxd",
        "machine",
        "memory",
        "folders",
        "disk",
        "device",
        "eval",
        "bandwidth",
        "model",
        "kernels",
    ):
        assert name in heads
    for name in ("pass", "agent: pass", "sdpa 16,384", "wired", "took"):
        assert name in heads
    hits = [line for line in lines if re.match("second cold run|hot hit|cold-tier hit", line)]
    assert len(hits) == 3 and all("the same 16 tokens, the same logits" in hit for hit in hits)
    assert lines[-1].endswith("no part failed") and done.stderr == ""
    assert not [word for word in ("jane", KEY, str(tmp_path)) if word in done.stdout]
    assert list(home.iterdir()) == []
