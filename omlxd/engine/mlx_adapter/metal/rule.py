"""The rule for every kernel here: it is used where it is right and not slower than MLX's own.

At a load a kernel is judged on this machine, at the shapes of the model: it compiles, its numbers are MLX's
within rounding, a row has the same bits in other company, and it is timed in chains beside MLX's own. What
comes out is a line in the log, which `omlxd doctor --report` prints. A kernel that is not used is a line,
never an error: one whose process ended twice as it was judged is not judged again.
"""

from __future__ import annotations

import hashlib
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx

from ....wire import Kernel
from ..runtime.chains import Clock, Link, seconds_of
from ..runtime.gpu_faults import end_if_fault

log = logging.getLogger(__name__)

NOT_SLOWER = 1.03
"""Times MLX's own time that a kernel may take: what a clock's noise leaves of "not slower"."""

LINKS, TURNS = 64, 5
"""Of chains (runtime/chains.py), as row_costs.py has them."""


class Timed(NamedTuple):
    """What is timed: the kernel, and MLX's own for the same.

    name    of the case, as `4 rows`
    first   the first link's argument, evaluated; each link gives an array of its shape
    beside  arrays that links change
    """

    name: str
    ours: Link
    mlx: Link
    first: mx.array
    beside: Sequence[mx.array] = ()


@dataclass(slots=True)
class Case:
    """A kernel at one shape, and how it is judged.

    kernel   its name, as the issue and the log have it: `few_row_product`
    shape    in words, nothing of which is a path or a name of the user's
    ours     results of the kernel; called once, it compiles what the model needs
    mlx      the same by MLX's own operations
    close    largest difference, by the largest number of MLX's own in that row (the first axis)
    company  pairs of arrays that must have the same bits: a row's result alone, and in company
    timed    cases whose time decides; a caller may use a kernel in some of them alone
    """

    kernel: str
    shape: str
    ours: Callable[[], Sequence[mx.array]]
    mlx: Callable[[], Sequence[mx.array]]
    close: float
    company: Callable[[], Sequence[tuple[mx.array, mx.array]]] = lambda: ()
    timed: Callable[[], Sequence[Timed]] = lambda: ()


@dataclass(slots=True)
class Verdict:
    """What came out.

    is_right  it ran, its numbers are MLX's, and company changes no bit
    seconds   of the kernel, and of MLX's own, by the names of `Case.timed`
    far       the largest difference, by the largest number of its row; None: it did not run
    company   whether bits were compared in company
    why       it is not right
    note      file that keeps it from being judged
    """

    kernel: str
    shape: str
    is_right: bool = False
    seconds: dict[str, tuple[float, float]] = field(default_factory=dict)
    far: float | None = None
    company: bool = False
    why: str = ""
    note: str = ""
    took: float = 0.0

    @property
    def ratios(self) -> dict[str, float]:
        """Its time by MLX's own."""
        return {name: ours / max(mlx, 1e-12) for name, (ours, mlx) in self.seconds.items()}

    def pays(self, name: str) -> bool:
        """Whether it is right, and not slower in the case of this name."""
        return self.is_right and self.ratios.get(name, 1.0) <= NOT_SLOWER

    @property
    def is_used(self) -> bool:
        """Whether it is right, and not slower in some case, or none was timed."""
        return self.is_right and (not self.ratios or any(map(self.pays, self.ratios)))

    def told(self) -> str:
        """Return the line of the log."""
        if not self.is_right:
            return f"{self.kernel} is not used ({self.shape}): {self.why}"
        times = f"; {self._times()}" if self.seconds else "; not timed"
        is_used = "is used" if self.is_used else "is not used"
        if self.is_used and not all(map(self.pays, self.ratios)):
            is_used += " where it is not slower"
        near = f"it is within {self.far:.2g} of MLX's own" if self.far else "it equals MLX's own"
        near += ", the same in company" if self.company else ", not compared in company"
        return f"{self.kernel} {is_used} ({self.shape}): {near}{times}; judged in {self.took:.2f} s"

    def _times(self) -> str:
        """Return its time by MLX's own, and its own, in each case."""
        ratios = self.ratios
        each = [
            f"{ratios[name]:.2f} ({name}: {ours * 1e3:.3g} ms)" for name, (ours, _) in self.seconds.items()
        ]
        return f"time by MLX's own: {', '.join(each)}"

    def as_wire(self) -> Kernel:
        why = self.why or ("" if self.is_used else f"slower; {self._times()}")
        return Kernel(self.kernel, self.shape, why, self.note)


MOST_TRIES = 2
"""Of judging a kernel whose process ended meanwhile: a GPU fault, or by chance. The front starts an engine
three times in a row."""
HANGS_S = 60.0
"""Seconds of judging a kernel after which a stop counts as a try: it may never end by itself."""


BLOCKED = (
    "not judged: the engine was ended {} while it was judged (a GPU fault, or a stop); remove {} to judge it "
    "again"
)


@dataclass(slots=True)
class _Note:
    """The file of a kernel that is being judged. `before`: its bytes of earlier tries. `began`: when."""

    file: Path
    before: int
    began: float


class _Notes:
    """Where notes are kept, if anywhere. `tries`: of a kernel. `ended`: this process judges no more."""

    folder: Path | None = None
    tries = MOST_TRIES
    now: _Note | None = None
    ended = False


_verdicts: dict[tuple[str, str], Verdict] = {}
_notes = _Notes()


def use_folder(folder: Path, tries: int = MOST_TRIES) -> None:
    """Keep a file in `folder`, whose parent exists, for as long as a kernel is judged. The first call
    decides."""
    if _notes.folder is None:
        _notes.folder, _notes.tries = folder, tries


def stopped() -> None:
    """Note that this process ends because somebody stops it, which is no fault of a kernel. In a signal's
    handler, too."""
    _notes.ended = True
    if (note := _notes.now) is not None and time.monotonic() - note.began < HANGS_S:
        _take_back(note)


def _take_back(note: _Note) -> None:
    """Leave the file as it was before this process judged."""
    with suppress(OSError):
        if note.before:
            os.truncate(note.file, note.before)
        else:
            note.file.unlink(missing_ok=True)


def verdicts() -> Mapping[tuple[str, str], Verdict]:
    """What this process judged, by kernel and shape."""
    return _verdicts


def judged(case: Case, clock: Clock = time.perf_counter) -> Verdict:
    """Return the verdict on `case`, which is judged once a process."""
    at = case.kernel, case.shape
    if at not in _verdicts:
        began = clock()
        log.log(logging.DEBUG if _verdicts else logging.INFO, "judging Metal kernels: %s (%s)", *at)
        verdict = Verdict(*at)
        try:
            with _noted(case) as note:
                if note is None:
                    _judge(case, verdict, clock)
                else:
                    verdict.note = str(note)
                    verdict.why = BLOCKED.format("twice" if _notes.tries > 1 else "once", note)
        except Exception as error:  # Also MLX's "Unable to build metal library", with the compiler's words.
            end_if_fault(error)
            verdict.is_right = False
            verdict.why = f"it does not run here ({_short(error)})"
        verdict.took = clock() - began
        _verdicts[at] = verdict
        (log.info if verdict.is_right else log.warning)("%s", verdict.told())
    return _verdicts[at]


@contextmanager
def _noted(case: Case) -> Iterator[Path | None]:
    """Leave a file if the process ends in here. Gives the file, if `_notes.tries` processes ended so
    before; else None."""
    if (folder := _notes.folder) is None:
        yield None
        return
    what = f"{case.kernel} {case.shape} {version('mlx')} {_sources()}\n".encode()
    note = folder / f"judging-{hashlib.sha256(what).hexdigest()[:16]}"
    with suppress(OSError):  # A full disk: then nothing is noted.
        before = note.stat().st_size if note.exists() else 0
        if before >= _notes.tries * len(what):
            yield note
            return
        folder.mkdir(mode=0o700, exist_ok=True)
        _notes.now = _Note(note, before, time.monotonic())
        with note.open("ab") as file:
            file.write(what)
        if _notes.ended:
            _take_back(_notes.now)
    try:
        yield None
    except Exception as error:
        end_if_fault(error)  # Before the file goes.
        raise
    finally:
        _notes.now = None
        with suppress(OSError):
            note.unlink(missing_ok=True)


@cache
def _sources() -> str:
    """A digest of the kernels, and of what judges and launches them: a changed one is another kernel."""
    state = hashlib.sha256()
    for file in sorted(Path(__file__).parent.rglob("*")):
        if file.suffix in (".py", ".metal"):
            state.update(file.read_bytes())
    return state.hexdigest()[:16]


def _judge(case: Case, verdict: Verdict, clock: Clock) -> None:
    ours, mlx = list(case.ours()), list(case.mlx())
    kinds = [[(array.shape, array.dtype) for array in each] for each in (ours, mlx)]
    if not ours or kinds[0] != kinds[1]:
        verdict.why = f"its results are {_kinds(ours)}, and MLX's own {_kinds(mlx)}"
        return
    verdict.far = max(_far(got, want) for got, want in zip(ours, mlx, strict=True))
    if not verdict.far < case.close:  # NaN too
        verdict.why = f"its numbers differ from MLX's own by {verdict.far:.3g}"
        return
    pairs = list(case.company())
    verdict.company = bool(pairs)
    if not all(mx.array_equal(alone, company).item() for alone, company in pairs):
        verdict.why = "a row's bits depend on the other rows of its pass"
        return
    verdict.is_right = True
    verdict.seconds = {each.name: times_of(each, clock) for each in case.timed()}


def times_of(timed: Timed, clock: Clock = time.perf_counter) -> tuple[float, float]:
    """Return the seconds of a link of the kernel's, and of MLX's own."""
    links = timed.ours, timed.mlx
    ours, mlx = seconds_of(links, timed.first, LINKS, TURNS, timed.beside, clock)
    return ours, mlx


def _far(got: mx.array, want: mx.array) -> float:
    """Return the largest difference by the largest number of its row; infinite for NaN."""
    a, b = (
        each.astype(mx.float32).reshape(each.shape[0] if each.ndim > 1 else 1, -1) for each in (got, want)
    )
    rows = mx.abs(a - b).max(axis=1) / mx.maximum(mx.abs(b).max(axis=1), 1e-12)
    apart: Any = rows.max().item()
    return apart if apart == apart else float("inf")


def _kinds(arrays: Sequence[mx.array]) -> str:
    each = [f"{str(array.dtype).rpartition('.')[2]} of {array.shape}" for array in arrays]
    return ", ".join(each[:4]) or "none"


def _short(error: Exception) -> str:
    """Return the first line of an error that says something, of a compiler's first complaint."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    first = next((line for line in lines if "error:" in line), lines[0])
    return first[:200]
