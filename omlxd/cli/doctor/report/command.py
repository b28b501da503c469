"""Writes the report, a line at a time."""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from ....common.units import human
from ....config import Settings
from ....models.catalog import default_model
from ....models.footprint import kind_of, likely_backend, read_config, weight_bytes
from ....wire import SAMPLE_KERNELS, MeasureJob
from ...service.manager import ServiceError
from .. import disk
from . import agent, busy, folders, system
from .bounds import Budget, ended_by_signals, within
from .inside import Inside, surroundings
from .measure import Measured, measure
from .privacy import Privacy
from .system import ABSENT, Lines

TOTAL_S = 110.0
FACTS_S, FOLDERS_S, DISK_S, AGENT_S = 10.0, 30.0, 20.0, 60.0
FIRST = ("device", "eval", "bandwidth", *SAMPLE_KERNELS, "model", "pass", "hits")
LAST = ("sdpa 512", "sdpa 4,096", "sdpa 16,384", "longest kernel")
MOST_MODEL_BYTES = 25 * 10**8
WRITES = ", and writes 268 MB beside the SSD cache, which it removes"
TAKES = (
    "It opens Documents, Desktop, Downloads and iCloud Drive (macOS may ask you), and launchd runs its job.",
    f"It loads a model of up to 2.5 GB{WRITES}.",
    "On a Mac it checks and times Metal kernels (--metal-kernels off: none).",
)
LEFT_OUT = "left out (--no-disk-test)"
HEAD = "omlxd doctor --report: paths, prompts, keys and names are left out. Paste all of it into an issue."
NO_FOLDER = (
    "not measured: no folder for temporary files can be written; make room, or set TMPDIR to another one"
)
WIDTH = 16


class Report:
    """Prints lines by `show`, without what is private. A part that fails says so, and others go on."""

    def __init__(self, budget: Budget, show: Callable[[str], None], privacy: Privacy):
        self.budget, self._show, self._privacy = budget, show, privacy
        self.failed: list[str] = []
        self.left_out: list[str] = []
        self.values: dict[str, float] = {}

    def line(self, name: str, text: str) -> None:
        self._show(f"{name:<{WIDTH}}  {self._privacy.clean(' '.join(text.split()))}".rstrip())

    def fail(self, name: str, why: str) -> None:
        """Say why a part has no figures: for lack of time, or it failed."""
        (self.left_out if why.startswith("left out: ") else self.failed).append(name)
        self.line(name, self._privacy.error(why))

    def part(self, name: str, call: Callable[[], Lines], seconds: float = FACTS_S) -> None:
        """Print the lines of `call`, which has so many seconds."""
        self.attempt(name, lambda: within(self.budget.part(seconds), call))

    def attempt(self, name: str, call: Callable[[], Lines]) -> None:
        """Print the lines of `call`, which bounds itself."""
        try:
            for each in call():
                self.line(*each)
        except TimeoutError as error:
            self.fail(name, str(error))
        except Exception as error:
            self.fail(name, f"failed: {type(error).__name__}: {error}")

    def measured(self, result: Measured) -> None:
        """Print what was measured in the shell."""
        self.values |= result.values
        self._lines(result, "")

    def inside(self, result: Measured) -> None:
        """Print what was measured in the agent, and its share of the shell's."""
        shares = [
            f"{name} {value / self.values[name]:.2f}"
            for name, value in result.values.items()
            if self.values.get(name) and name != "wired"
        ]
        self._lines(result, "agent: ", f" [agent / shell: {', '.join(shares)}]" if shares else "")

    def _lines(self, result: Measured, head: str, end: str = "") -> None:
        if result.error:
            self.fail(head + result.part, result.error)
        for name, text in result.lines:
            self.line(head + name if name else "", text + end)
            end = ""


def write(
    settings: Settings,
    show: Callable[[str], None],
    clock: Callable[[], float] = time.monotonic,
    mistakes: Sequence[str] = (),
    disk_test: bool = True,
) -> int:
    """Print the report; returns the exit status: 1 if a part failed. `mistakes`: of the settings."""
    budget = Budget(TOTAL_S, clock)
    report = Report(budget, show, Privacy(more_secrets=[settings.api_key or ""], models=_names(settings)))
    for text in (HEAD, *TAKES):
        show(text if disk_test else text.replace(WRITES, ""))
    with ended_by_signals():
        with contextlib.suppress(OSError, ServiceError):
            agent.remove_leftovers()
        load, daemon = busy.load(), busy.daemon(settings)
        for text in mistakes:
            text = re.sub(r"^[~/].*? line (?=\d)", "the file's line ", text)
            report.fail("settings", f"not read: {text}")
        _facts(report, settings, disk_test)
        try:
            made = tempfile.TemporaryDirectory(prefix=f"{agent.FOLDER}{os.getpid()}-")
        except OSError:
            for name in (*FIRST, "agent", *LAST):
                report.fail(name, NO_FOLDER)
        else:
            with made:
                _measure(report, settings, Path(made.name))
        loads = f"load average {load} at the beginning, {busy.load()} at the end, of {os.cpu_count()} cores"
        report.part("busy", lambda: [("busy", "; ".join([loads, daemon, *busy.power(), busy.variables()]))])
    report.line("took", f"{budget.spent:.0f} s; {_summary(report)}")
    return int(bool(report.failed))


def _summary(report: Report) -> str:
    names, left = (list(dict.fromkeys(each)) for each in (report.failed, report.left_out))
    failed = f"{len(names) or 'no'} part{'s' * (len(names) > 1)} failed"
    lists = [(failed, names), (f"{len(left)} left out for lack of time", left)]
    return "; ".join(": ".join(filter(None, [what, ", ".join(of)])) for what, of in lists[: 1 + bool(left)])


def _facts(report: Report, settings: Settings, disk_test: bool) -> None:
    report.part("omlxd", system.programs)
    report.part("machine", system.machine)
    report.part("memory", system.memory)
    report.part("GPU limits", system.limits)
    report.part("surroundings", lambda: [("surroundings", surroundings())])
    report.part("folders", lambda: [("folders", folders.describe(folders.places(settings)))], FOLDERS_S)
    rates = (lambda: disk.describe_rates(settings)) if disk_test else lambda: LEFT_OUT
    report.part("disk", lambda: [("disk", rates())], DISK_S)


def _measure(report: Report, settings: Settings, folder: Path) -> None:
    """Measure MLX and the engine, some of it again in the agent, and attention. `folder`: for files."""
    job = folder / "job.json"
    model = small_model(settings) or folder / "model"
    asked = MeasureJob(str(model), str(folder / "ssd"), settings.metal_kernels)
    job.write_bytes(msgspec.json.encode(asked))
    before = system.wired()
    measure(job, FIRST, report.budget, report.measured)
    after = system.wired()
    report.attempt("agent", lambda: _agent(report, folders.places(settings), job))
    measure(job, LAST, report.budget, report.measured)
    report.part("wired", lambda: [("wired", _wired(before, report.values.get("wired"), after))])


def _names(settings: Settings) -> set[str]:
    """Return the names of the owner's models."""
    own = settings.models.values()
    paths = [settings.model, *settings.models, *(m.draft_model for m in own), *(m.adapter for m in own)]
    with contextlib.suppress(Exception):  # Whatever is wrong with it, it is not measured.
        paths.append((chosen := default_model(settings)) and chosen.folder)
    return {name for path in filter(None, paths) for name in (str(path), Path(path).name)}


def _agent(report: Report, places: dict[str, str], job: Path) -> Lines:
    """Measure some of it again where the service runs; its manager has time beside to start and end it."""
    seconds = report.budget.part(AGENT_S)
    inside = Inside(places, str(job), str(job.with_name("inside.jsonl")), seconds)
    how, failed, lines, results = agent.measure_inside(inside, job.parent, seconds)
    if failed:
        report.fail("agent", failed)
    else:
        report.line("agent", how)
    for result in results:
        report.inside(result)
    return lines


def _wired(before: int | None, with_model: float | None, after: int | None) -> str:
    if before is None or after is None:
        return ABSENT
    beside = human(int(with_model)) if with_model else "unknown"
    return f"{human(before)} before, {beside} with the model, {human(after)} after its process ended"


def small_model(settings: Settings) -> Path | None:
    """Return the folder of the configured model, or of the default one; None if it is not here or large."""
    if likely_backend() == "cpu":  # It would take minutes.
        return None
    try:
        chosen = default_model(settings)
        if chosen is None or chosen.folder is None or chosen.source == "demo":
            return None
        small = weight_bytes(chosen.folder) <= MOST_MODEL_BYTES
        return (
            chosen.folder if small and kind_of(chosen.folder, read_config(chosen.folder)) == "chat" else None
        )
    except Exception:  # Whatever is wrong with it, another one will do.
        return None
