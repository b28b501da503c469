"""The rule by which a Metal kernel is used, with MLX's operations in place of kernels and a clock of ours."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from omlxd.engine.mlx_adapter.metal import rule
from omlxd.engine.mlx_adapter.runtime import gpu_faults

ONES = mx.ones((4, 8))
TWO = mx.array([[1000.0] * 4, [1e-3] * 4])


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rule, "_verdicts", {})
    monkeypatch.setattr(rule, "_notes", rule._Notes())


def refuse(*_: Any) -> Any:
    raise RuntimeError("[metal::Device] Unable to build metal library\nprogram_source:9: error: no such type")


CASES: dict[str, tuple[dict[str, Any], str]] = {
    "right": ({}, "fake is used (4 × 8): it equals MLX's own, the same in company; not timed"),
    "alone": ({"company": lambda: ()}, "it equals MLX's own, not compared in company; not timed; judged"),
    "a small row": ({"ours": lambda: [TWO * mx.array([[1], [9]])], "mlx": lambda: [TWO]}, "own by 8"),
    "a shape": (
        {"ours": lambda: [ONES[:1]]},
        "results are float32 of (1, 8), and MLX's own float32 of (4, 8)",
    ),
    "a type": ({"ours": lambda: [ONES.astype(mx.float16)]}, "its results are float16 of (4, 8), and"),
    "nothing": ({"ours": lambda: [], "mlx": lambda: []}, "its results are none, and MLX's own none"),
    "other numbers": ({"ours": lambda: [ONES * 1.1]}, "its numbers differ from MLX's own by 0.1"),
    "no numbers": ({"ours": lambda: [ONES * float("nan")]}, "its numbers differ from MLX's own by inf"),
    "company": ({"company": lambda: [(ONES, ONES + 1e-6)]}, "a row's bits depend on the other rows"),
    "compile": ({"ours": refuse}, "it does not run here (program_source:9: error: no such type)"),
    "in company": ({"company": refuse}, "it does not run here"),
}


@pytest.mark.parametrize("name", CASES)
def test_a_line_says_what_came_out(name: str, caplog: pytest.LogCaptureFixture):
    changes, said = CASES[name]
    how: dict[str, Any] = {"ours": lambda: [ONES], "mlx": lambda: [ONES], "close": 1e-3}
    how["company"] = lambda: [(ONES, ONES)]
    how.update(changes)
    caplog.set_level(logging.INFO)
    verdict = rule.judged(rule.Case("fake", "4 × 8", **how))
    assert said in verdict.told() and verdict.told() in caplog.text
    assert verdict.is_right == verdict.is_used == (name in ("right", "alone"))
    assert rule.judged(rule.Case("fake", "4 × 8", **how | {"ours": refuse})) is verdict  # Once a process.
    assert list(rule.verdicts().values()) == [verdict]


@pytest.fixture
def evaluations(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], float]]:
    """A clock by which each link of a kernel takes 5 µs, one of MLX's 20, in an evaluation of 250."""
    now = [0.0]
    pending = [0.0]
    own = mx.eval

    def evaluated(*arrays: Any) -> None:
        own(*arrays)
        now[0] += 250e-6 + pending[0]
        pending[0] = 0.0

    monkeypatch.setattr(mx, "eval", evaluated)

    def clock() -> float:
        return now[0]

    clock.pending = pending  # type: ignore[attr-defined]
    yield clock


@pytest.mark.parametrize(("ours_s", "used"), [(5e-6, True), (20e-6, True), (30e-6, False)])
def test_the_time_of_a_kernel_decides_under_the_wait_of_an_evaluation(
    evaluations: Any, ours_s: float, used: bool
):
    def link(seconds: float) -> Callable[[mx.array], mx.array]:
        def run(array: mx.array) -> mx.array:
            evaluations.pending[0] += seconds
            return array + 1

        return run

    timed = rule.Timed("4 rows", link(ours_s), link(20e-6), ONES)
    case = rule.Case("fake", "x", lambda: [ONES], lambda: [ONES], 1e-3, timed=lambda: [timed])
    verdict = rule.judged(case, evaluations)
    assert verdict.is_used == used and verdict.is_right
    assert verdict.ratios["4 rows"] == pytest.approx(ours_s / 20e-6, rel=0.01)
    assert ("is used (x)" if used else "is not used (x)") in verdict.told()


def test_a_gpu_fault_in_a_check_ends_the_process(monkeypatch: pytest.MonkeyPatch):
    told = list[str]()
    monkeypatch.setattr(gpu_faults, "_marks", ("[METAL] Command buffer",))
    monkeypatch.setattr(gpu_faults, "_end", told.append)

    def fault() -> Any:
        raise RuntimeError("[METAL] Command buffer execution failed: Impacting Interactivity")

    rule.judged(rule.Case("fake", "y", fault, lambda: [ONES], 1e-3))
    assert told == ["[METAL] Command buffer execution failed: Impacting Interactivity"]


def test_a_kernel_that_ended_two_processes_is_left_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    rule.use_folder(tmp_path / "kernels")
    case = rule.Case("fake", "z", lambda: [ONES], lambda: [ONES], 1e-3)

    class Ended(BaseException):
        """In place of the end of the process."""

    def end(said: str) -> None:
        raise Ended(said)

    def fault() -> Any:
        raise RuntimeError("[METAL] Command buffer execution failed")

    def fail() -> None:
        with monkeypatch.context() as patched:
            patched.setattr(gpu_faults, "_marks", ("[METAL] Command buffer",))
            patched.setattr(gpu_faults, "_end", end)
            patched.setattr(Path, "unlink", lambda self, missing_ok=False: None)  # Nothing runs after an end.
            with pytest.raises(Ended):
                rule.judged(replace(case, ours=fault))

    fail()
    (note,) = (tmp_path / "kernels").iterdir()
    once = note.stat().st_size

    def stop() -> Any:
        assert note.stat().st_size == 2 * once
        rule.stopped()
        assert note.stat().st_size == once
        raise Ended

    with monkeypatch.context() as patched, pytest.raises(Ended):
        patched.setattr(Path, "unlink", lambda self, missing_ok=False: None)
        rule.judged(replace(case, ours=stop))
    rule._notes.ended = False
    fail()
    assert note.stat().st_size == 2 * once
    verdict = rule.judged(case)
    assert not verdict.is_used and f"remove {note}" in verdict.told() and "ended twice" in verdict.told()
    with monkeypatch.context() as patched:
        patched.setattr(rule, "_sources", lambda: "of another version")
        rule._verdicts.clear()
        assert rule.judged(case).is_used
    note.unlink()
    rule._verdicts.clear()
    assert rule.judged(case).is_used and not [*(tmp_path / "kernels").iterdir()]


@pytest.mark.parametrize("later_s", [1.0, rule.HANGS_S])
def test_a_stop_is_no_fault_of_a_kernel_unless_that_hangs(
    later_s: float, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    rule.use_folder(tmp_path)
    began = time.monotonic()
    kept = list[int]()

    def stop() -> Any:
        monkeypatch.setattr(rule.time, "monotonic", lambda: began + later_s + 1)
        rule.stopped()
        kept.append(len([*tmp_path.iterdir()]))
        return [ONES]

    monkeypatch.setattr(rule.time, "monotonic", lambda: began + 1)
    rule.judged(rule.Case("fake", "z", stop, lambda: [ONES], 1e-3))
    rule.judged(rule.Case("fake", "next", lambda: kept.append(len([*tmp_path.iterdir()])) or [], list, 1e-3))
    assert kept == [int(later_s >= rule.HANGS_S), 0]
