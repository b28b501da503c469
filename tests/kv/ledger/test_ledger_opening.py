"""A ledger is opened: over leftovers and strangers, beside another, in a folder that resists."""
# ruff: noqa: F811 -- `ledger` is a fixture of ledger_files.py

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from kv_fakes import files_in
from ledger_files import (
    NS,
    PAGE,
    REPO,
    account,
    file_name,
    ledger,  # noqa: F401
    name,
    put,
    store,
)

import omlxd.kv.ledger.ledger as ledger_module
from omlxd.kv.ledger.ledger import Ledger, LedgerBusy


def test_leftovers_go_and_strangers_stay(tmp_path):
    put(tmp_path, name(1))
    temps = [put(tmp_path, f"{name(1)}.77-{i}.tmp")[0] for i in range(3)]
    strangers = ["README", f"{NS}/notes.txt", f"{NS}/00/other.bin", "org/name/model.safetensors"]
    strangers += [f"{NS}/00/model.safetensors", f"models/00/{file_name(1)}", f"{NS}/xyz/{file_name(1)}"]
    for path in strangers:
        put(tmp_path, path)
    (tmp_path / NS / "00" / file_name(7)).mkdir(parents=True)
    (tmp_path / NS / "00" / file_name(8)).symlink_to("/etc/passwd")
    (tmp_path / "linked").symlink_to("/etc")
    ledger = Ledger(tmp_path, 10 * PAGE)
    ledger.open()
    assert not any((tmp_path / path).exists() for path in temps)
    assert all((tmp_path / path).exists() for path in strangers)
    assert (ledger.stats().files, ledger.stats().bytes_used) == (1, PAGE)
    ledger.close()


def test_a_leftover_that_cannot_be_removed_is_on_the_account_and_goes_first(tmp_path, monkeypatch):
    for number in range(9):
        put(tmp_path, name(number))
    temp, _ = put(tmp_path, f"{name(1)}.77-0.tmp")
    with monkeypatch.context() as patch:
        patch.setattr(ledger_module, "unlink", lambda path: PermissionError(13, "no", str(path)))
        ledger = Ledger(tmp_path, 10 * PAGE)
        ledger.open()
    account(ledger)
    assert ledger.stats().files == 10
    assert store(ledger, 10)
    assert not (tmp_path / temp).exists() and len(files_in(tmp_path)) == 10
    ledger.close()


def test_a_missing_folder_is_made(tmp_path):
    ledger = Ledger(tmp_path / "a" / "b", PAGE)
    ledger.open()
    assert (tmp_path / "a" / "b").is_dir()
    ledger.close()


def test_a_file_in_the_folders_place_is_an_oserror(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError):
        Ledger(tmp_path / "file", PAGE).open()


def test_a_second_ledger_is_told_that_the_folder_is_busy(ledger, tmp_path):
    with pytest.raises(LedgerBusy):
        Ledger(tmp_path, PAGE).open()
    code = (
        "import sys; from pathlib import Path; from omlxd.kv.ledger.ledger import *\n"
        "try: Ledger(Path(sys.argv[1]), 4096).open()\n"
        "except LedgerBusy: print('busy')"
    )
    command = [sys.executable, "-c", code, tmp_path]
    run = subprocess.run(command, cwd=REPO, capture_output=True, text=True, check=True)
    assert run.stdout == "busy\n"
    assert (tmp_path / ".lock").read_text() == f"{os.getpid()}\n"
    ledger.close()
    again = Ledger(tmp_path, PAGE)
    again.open()
    again.close()


def test_an_open_that_fails_gives_the_lock_up(tmp_path, monkeypatch):
    (tmp_path / NS / "00").mkdir(parents=True)
    scandir = os.scandir

    def refuse(path):
        if str(path).endswith("00"):
            raise PermissionError(13, "no", str(path))
        return scandir(path)

    with monkeypatch.context() as patch:
        patch.setattr(os, "scandir", refuse)
        with pytest.raises(PermissionError):
            Ledger(tmp_path, PAGE).open()
    ledger = Ledger(tmp_path, PAGE)
    ledger.open()
    ledger.close()


def test_a_full_disk_can_be_opened(tmp_path, monkeypatch):
    def full(fd, data):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        ledger = Ledger(tmp_path, PAGE)
        ledger.open()
    assert ledger.reserve(PAGE) == PAGE
    ledger.close()
