"""What kernels leave on disk: results of checks, machine code, and what MLX compiled."""

from __future__ import annotations

import json
import os
import sys
import threading
from pathlib import Path

import pytest

from omlxd.engine.mlx_adapter.cuda.compile import kernel_store


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """A call of it is a new engine process, whose facts it takes."""
    monkeypatch.delenv(kernel_store.VARIABLE, raising=False)

    def begin(machine: str = "an H100", sources: str = "these") -> Path:
        monkeypatch.setattr(kernel_store, "_folder", None)
        monkeypatch.setattr(kernel_store, "_passed", {})
        monkeypatch.setattr(kernel_store, "_made", {})
        monkeypatch.setattr(kernel_store, "_machine", lambda: machine)
        monkeypatch.setattr(kernel_store, "_gpu", lambda: machine)
        monkeypatch.setattr(kernel_store, "_sources", lambda: sources)
        os.environ.pop(kernel_store.VARIABLE, None)
        kernel_store.use_folder(tmp_path / "kernels")
        return tmp_path / "kernels"

    yield begin
    os.environ.pop(kernel_store.VARIABLE, None)


def checks(result: object) -> tuple[list[object], object]:
    made: list[object] = []

    def check() -> object:
        made.append(result)
        return result

    return made, check


@pytest.mark.parametrize("result", [True, 0.25, [True, True], [32, [0.1], [0.2]]])
def test_what_passed_is_not_checked_again(start, result: object):
    start()
    made, check = checks(result)
    for _ in range(2):
        assert kernel_store.remembered("products", (1, "bf16"), check) == result
    start()
    assert kernel_store.knows("products", (1, "bf16"))
    assert kernel_store.remembered("products", (1, "bf16"), check) == result
    assert len(made) == 1


@pytest.mark.parametrize("change", ["depends", "name", "machine", "sources"])
def test_it_is_checked_again_where_it_depends_on_something_else(start, change: str):
    start()
    made, check = checks(True)
    kernel_store.remembered("products", (1, "bf16"), check)
    start("an H200" if change == "machine" else "an H100", "others" if change == "sources" else "these")
    name = "attention" if change == "name" else "products"
    kernel_store.remembered(name, (2, "bf16") if change == "depends" else (1, "bf16"), check)
    assert len(made) == 2


@pytest.mark.parametrize("result", [False, 0, [], float("inf"), float("nan")])
def test_what_failed_is_checked_at_each_start(start, result: object):
    start()
    made, check = checks(result)
    passed = (lambda far: far < 0.01) if isinstance(result, float) else bool
    for _ in range(2):
        kernel_store.remembered("products", (), check, passed)
        start()
    assert len(made) == 2


@pytest.mark.parametrize("damage", [b"", b"[1, 2]", b"{", b"\xff" * 9, b"[" * 100_000])
def test_damaged_results_are_as_none(start, damage: bytes):
    folder = start()
    made, check = checks(True)
    kernel_store.remembered("products", (), check)
    (folder / "checks.json").write_bytes(damage)
    start()
    assert kernel_store.remembered("products", (), check) is True
    assert len(made) == 2 and json.loads((folder / "checks.json").read_bytes())


def test_two_engines_keep_each_other_s_results(start):
    folder = start()
    file = folder / "checks.json"
    kernel_store.remembered("one", (), lambda: True)
    file.write_bytes(json.dumps({"of another engine": 1} | json.loads(file.read_bytes())).encode())
    kernel_store.remembered("two", (), lambda: True)
    assert len(json.loads(file.read_bytes())) == 3


def test_machine_code_is_compiled_once_and_read_behind_a_start(start):
    folder, made = start(), list[str]()

    def compile() -> bytes:
        made.append("")
        return b"cubin"

    assert kernel_store.code("source", compile) == kernel_store.code("source", compile) == b"cubin"
    start()
    assert kernel_store.code("source", compile) == b"cubin"
    assert len(made) == 1
    for file in (folder / "code").iterdir():
        file.write_bytes(file.read_bytes()[:-1])  # As a full disk leaves it.
        assert file.stat().st_mode & 0o777 == 0o600
    start()
    assert kernel_store.code("source", compile) == b"cubin"
    assert len(made) == 2


def test_who_asks_for_what_is_being_compiled_waits_for_it(start):
    start()
    began, go, made = threading.Event(), threading.Event(), list[bytes]()

    def slowly() -> bytes:
        began.set()
        assert go.wait(30)
        return b"once"

    first = threading.Thread(target=lambda: made.append(kernel_store.code("source", slowly)))
    first.start()
    assert began.wait(30)
    others = [
        threading.Thread(target=lambda: made.append(kernel_store.code("source", lambda: b"twice")))
        for _ in range(3)
    ]
    for each in others:
        each.start()
    go.set()
    for each in (first, *others):
        each.join(30)
    assert made == [b"once"] * 4


def test_what_was_not_written_to_its_end_is_removed_before_mlx_reads_it(start):
    whole = Path(os.path.realpath(sys.executable)).read_bytes()
    folder = start()
    (mlx,) = folder.glob("mlx-*")
    assert os.environ[kernel_store.VARIABLE] == str(mlx)
    for name, data, names in (
        ("whole", whole, b"name\tmangled\n"),
        ("cut", whole[:-1], b"name\tmangled\n"),
        ("half", whole[: len(whole) // 2], b"name\tmangled\n"),
        ("empty", b"", b""),
        ("nameless", whole, b""),
    ):
        (mlx / f"{name}.ptx").write_bytes(data)
        (mlx / f"{name}.txt").write_bytes(names)
    start()
    assert [file.stem for file in mlx.glob("*.ptx")] == ["whole"]


def test_a_folder_that_cannot_be_had_changes_nothing(start, tmp_path: Path):
    (tmp_path / "kernels").write_bytes(b"a file")
    start()
    made, check = checks(True)
    for _ in range(2):
        assert kernel_store.remembered("products", (), check) is True
    assert len(made) == 2 and kernel_store.code("source", lambda: b"cubin") == b"cubin"
    assert kernel_store.VARIABLE not in os.environ


def test_a_users_own_folder_for_mlx_stays(start, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    start()
    monkeypatch.setattr(kernel_store, "_folder", None)
    os.environ[kernel_store.VARIABLE] = "/of/the/user"
    kernel_store.use_folder(tmp_path / "kernels")
    assert os.environ[kernel_store.VARIABLE] == "/of/the/user"


def test_nothing_is_kept_where_there_is_no_cuda(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    kernel_store.use_folder(tmp_path / "kernels")
    assert not (tmp_path / "kernels").exists() and kernel_store.VARIABLE not in os.environ
