"""`omlxd cache scrub` and `clear`: what goes, and what stays."""
# ruff: noqa: F811 -- `cache` is a fixture of cache_folder.py

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path

import pytest
from cache_folder import (
    DAY,
    HEADER,
    Cache,
    blocks_in,
    cache,  # noqa: F401
    describe,
    flip,
    no_settings,  # noqa: F401
)
from kv_fakes import NAMESPACE

from omlxd.cli.cache import command
from omlxd.cli.cache.pinned import FILE_NAME
from omlxd.kv.files.namespace import read_namespace
from omlxd.kv.files.paths import namespace_dir

# --------------------------------------------------------------------- scrub


def test_scrub_removes_what_crashes_leave(cache: Cache, capsys: pytest.CaptureFixture[str]):
    flip(cache.path(0), HEADER)
    cache.path(1).with_name(cache.path(1).name + ".7-0.tmp").write_bytes(bytes(5000))
    for name in ("fingerprints", "pins"):
        (cache.root / f"{name}.json.77.tmp").write_text("{")
    (cache.root / "fingerprints.json").write_text("{}")
    empty = cache.root / ("ab" * 16)
    (empty / "cd").mkdir(parents=True)
    notes = cache.root / namespace_dir(NAMESPACE) / "notes"
    notes.write_text("hello")
    judging = _judging(cache)
    assert cache.run("scrub") == 0
    told = capsys.readouterr().out
    assert "its payload fails its digest; removed" in told
    # The bad block's folder may hold others; the empty namespace is two folders.
    assert "removed 4 leftovers, " in told and not empty.exists() and notes.exists()
    assert not judging.exists()
    assert (cache.root / "fingerprints.json").exists() and not list(cache.root.rglob("*.tmp"))
    assert cache.run("scrub") == 0
    assert "checked 10 files" in (told := capsys.readouterr().out) and "removed 0 leftovers" in told
    assert "orphan" not in told


def _judging(cache: Cache) -> Path:
    """A note of a kernel with which an engine ended, as rule.py of mlx_adapter/metal keeps it."""
    note = cache.root / "kernels" / "judging-0123456789abcdef"
    note.parent.mkdir()
    note.write_text("attend_rows")
    return note


def test_orphans_are_told_and_removed_only_when_asked(
    cache: Cache, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "model").rmdir()
    assert cache.run("scrub") == 0
    told = capsys.readouterr().out
    assert "orphan: org/tiny" in told and f"no longer there: {tmp_path / 'model'}\n" in told
    assert "--orphans" in told and cache.path(0).exists()
    assert cache.run("scrub", "--orphans") == 0
    assert "removed 9 files of orphans" in capsys.readouterr().out
    assert not (cache.root / namespace_dir(NAMESPACE)).exists()
    assert len(blocks_in(cache.root)) == 2


def test_copies_of_a_model_share_their_kv(cache: Cache, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """One of them is removed, and what the other would hit stays; each one's name means it."""
    (copy := tmp_path / "copy").mkdir()
    describe(cache.root, copy, "org/copy")
    assert cache.run("stats") == 0
    assert "org/copy, org/tiny" in capsys.readouterr().out
    for name in ("copy", "org/tiny", str(copy)):
        assert cache.run("clear", "--model", name) == 2  # Nobody answers its question.
        told = capsys.readouterr().out
        assert "org/copy, org/tiny [" in told and "9 files" in told and "with equal files share it" in told
    copy.rmdir()
    assert cache.run("scrub", "--orphans") == 0
    assert "orphan" not in capsys.readouterr().out and cache.path(0).exists()
    assert cache.run("clear", "--model", "copy") == 2
    assert "org/tiny [" in (told := capsys.readouterr().out) and "share it" not in told and "copy" not in told
    (tmp_path / "model").rmdir()
    assert cache.run("scrub") == 0
    assert f"no longer there: {copy}, {tmp_path / 'model'}\n" in capsys.readouterr().out


def test_a_renamed_model_keeps_its_kv(cache: Cache, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "model" / "config.json").write_text("{}")
    describe(cache.root, tmp_path / "model")
    (tmp_path / "model").rename(tmp_path / "renamed")
    assert cache.run("scrub", "--orphans") == 0
    assert "orphan" not in capsys.readouterr().out and cache.path(0).exists()
    shutil.rmtree(tmp_path / "renamed")
    assert cache.run("scrub", "--orphans") == 0
    assert "removed 9 files of orphans" in capsys.readouterr().out


# --------------------------------------------------------------------- clear


def test_clear_all(cache: Cache, capsys: pytest.CaptureFixture[str]):
    assert cache.run("clear", "--yes") == 0
    told = capsys.readouterr().out
    assert "org/tiny" in told and "9 files" in told and "removed 11 files" in told
    assert [path.name for path in cache.root.iterdir()] == [".lock"]
    judging = _judging(cache)
    assert cache.run("clear", "--model", "tiny", "--yes") == 2 and judging.exists()
    assert cache.run("clear", "--yes") == 0 and not judging.exists()
    assert "1 Metal kernel that an engine ended with" in capsys.readouterr().out
    assert cache.run("clear", "--yes") == 0
    assert "nothing to remove" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["org/tiny", "tiny", namespace_dir(NAMESPACE)[:8]])
def test_clear_a_model(name: str, cache: Cache):
    assert cache.run("clear", "--model", name, "--yes") == 0
    assert len(blocks_in(cache.root)) == 2


def test_clear_a_model_that_is_not_there(cache: Cache, capsys: pytest.CaptureFixture[str]):
    assert cache.run("clear", "--model", "huge", "--yes") == 2
    assert "'huge'" in (told := capsys.readouterr().err) and "org/tiny" in told
    assert len(blocks_in(cache.root)) == 11


def test_clear_leaves_what_is_pinned(cache: Cache, capsys: pytest.CaptureFixture[str]):
    kept = str(cache.path(0).relative_to(cache.root))
    (cache.root / FILE_NAME).write_text(json.dumps({"mine": {"model": "m", "files": [kept], "at": 1.0}}))
    assert cache.run("clear", "--yes") == 0
    told = capsys.readouterr().out
    assert "left alone: 1 pinned file (mine); --pinned removes" in told and "removed 10 files" in told
    assert [str(path.relative_to(cache.root)) for path in blocks_in(cache.root)] == [kept]
    (cache.root / FILE_NAME).write_text("{")
    assert cache.run("clear", "--yes") == 1 and blocks_in(cache.root)
    assert "what is pinned in" in capsys.readouterr().err
    assert cache.run("clear", "--pinned", "--yes") == 0 and not blocks_in(cache.root)


def test_clear_what_is_old(cache: Cache, capsys: pytest.CaptureFixture[str]):
    then = time.time() - 40 * DAY
    for index in (6, 7):
        os.utime(cache.path(index), (then, then))
    assert cache.run("clear", "--older-than", "30d", "--yes") == 0
    assert "removed 2 files" in capsys.readouterr().out
    assert not cache.path(6).exists() and not cache.path(7).exists() and cache.path(5).exists()
    assert read_namespace(cache.root, namespace_dir(NAMESPACE)) is not None
    for wrong in ("30", "d", "-1d", "30y"):
        assert cache.run("clear", f"--older-than={wrong}") == 2
        assert "--older-than" in capsys.readouterr().err


def test_clear_asks(cache: Cache, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    assert cache.run("clear") == 2
    said = capsys.readouterr()
    assert "--yes" in said.err and said.out.startswith(f"{cache.root}\n")
    monkeypatch.setattr(command.sys.stdin, "isatty", lambda: True, raising=False)
    asked: list[str] = []
    monkeypatch.setattr("builtins.input", lambda text: asked.append(text) or "n")
    assert cache.run("clear") == 1
    assert "remove 11 files" in asked[0] and len(blocks_in(cache.root)) == 11
    monkeypatch.setattr("builtins.input", lambda text: "y")
    assert cache.run("clear") == 0
    assert not blocks_in(cache.root)
