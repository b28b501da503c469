"""common/files.py: atomic writes and safetensors headers."""

from __future__ import annotations

import io
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from omlxd.common import files
from omlxd.common.files import leave_out_of_backups, safetensors_header, write_atomic


def test_a_write_replaces_the_file_and_leaves_nothing_beside_it(tmp_path):
    path = tmp_path / "one.json"
    write_atomic(path, b"old")
    write_atomic(path, b"new", 0o644, sync=True)
    assert path.read_bytes() == b"new" and path.stat().st_mode & 0o777 == 0o644
    assert os.listdir(tmp_path) == ["one.json"]


def test_a_write_that_fails_keeps_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "one.json"
    write_atomic(path, b"old")
    monkeypatch.setattr(os, "fsync", lambda fd: (_ for _ in ()).throw(OSError(28, "no space")))
    with pytest.raises(OSError, match="no space"):
        write_atomic(path, b"new", sync=True)
    assert path.read_bytes() == b"old" and os.listdir(tmp_path) == ["one.json"]


@pytest.mark.parametrize(
    ("data", "header"),
    [
        ((2).to_bytes(8, "little") + b"{}rest", b"{}"),
        ((2).to_bytes(8, "little") + b"{", None),
        ((1 << 60).to_bytes(8, "little") + b"{}", None),
        (b"short", None),
    ],
)
def test_a_header_that_ends_behind_the_file_is_none(data, header):
    assert safetensors_header(io.BytesIO(data), len(data)) == header


def test_time_machine_is_asked_to_leave_a_folder_out(tmp_path: Path, monkeypatch, caplog):
    tool, said = tmp_path / "tmutil", tmp_path / "said"
    tool.write_text(f'#!/bin/sh\nprintf "%s|" "$@" > {said}\n')
    tool.chmod(0o755)
    monkeypatch.setattr(files, "TMUTIL", str(tool))
    monkeypatch.setattr(files, "sys", SimpleNamespace(platform="linux"))
    leave_out_of_backups(tmp_path / "a cache")
    assert not said.exists()
    files.sys.platform = "darwin"
    leave_out_of_backups(tmp_path / "a cache")
    assert said.read_text() == f"addexclusion|{tmp_path / 'a cache'}|" and not caplog.records
    for script in ("#!/bin/sh\necho not allowed >&2; exit 3\n", "no program"):
        tool.write_text(script)
        leave_out_of_backups(tmp_path)
    assert [record.levelname for record in caplog.records] == ["WARNING"] * 2
    assert caplog.messages[0].endswith(": not allowed")
