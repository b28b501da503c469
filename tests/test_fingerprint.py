"""Weights' digests: another byte is another namespace, and the same files are read once."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from daemon import wait_until

from omlxd.engine import fingerprint
from omlxd.engine.fingerprint import weight_fingerprints


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model-1.safetensors").write_bytes(b"a" * 1000)
    (folder / "model-2.safetensors").write_bytes(b"b" * 1000)
    (folder / "config.json").write_text("{}")
    return folder


def test_every_file_that_decides_counts(model: Path):
    before = weight_fingerprints(model, None)
    assert set(before) == {"model-1.safetensors", "model-2.safetensors", "config.json"}
    for name in before:
        data = bytearray((model / name).read_bytes())
        data[-1] ^= 1
        (model / name).write_bytes(data)
        after = weight_fingerprints(model, None)
        assert [n for n in after if after[n] != before[n]] == [name]
        before = after


def test_a_file_is_read_once_and_again_when_it_changes(model: Path, tmp_path: Path, monkeypatch):
    memo = tmp_path / "memo"
    first = weight_fingerprints(model, memo)
    opened: list[str] = []
    whole = open

    def watched(path, *args, **kwargs):
        opened.append(Path(path).name)
        return whole(path, *args, **kwargs)

    monkeypatch.setattr(fingerprint, "open", watched, raising=False)
    assert weight_fingerprints(model, memo) == first
    assert opened == []
    # Same size, and the old modification time put back: the change time still tells.
    path = model / "model-1.safetensors"
    stat = path.stat()

    def rewritten_later() -> bool:
        """A file system's clock ticks some hundred times a second."""
        path.write_bytes(b"c" * 1000)
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
        return path.stat().st_ctime_ns != stat.st_ctime_ns

    wait_until(rewritten_later)
    assert weight_fingerprints(model, memo)["model-1.safetensors"] != first["model-1.safetensors"]
    assert opened == ["model-1.safetensors"]


def test_a_hub_blob_is_named_by_its_digest(model: Path, tmp_path: Path):
    blob = tmp_path / "blobs" / ("ab" * 32)
    blob.parent.mkdir()
    blob.write_bytes(b"weights")
    link = model / "model-3.safetensors"
    link.symlink_to(blob)
    assert weight_fingerprints(model, None)["model-3.safetensors"] == "ab" * 32


@pytest.mark.parametrize("content", ["", "not json", "[1, 2]", '{"a": 1}'])
def test_a_damaged_memo_is_made_anew(model: Path, tmp_path: Path, content: str):
    memo = tmp_path / "memo"
    memo.mkdir()
    (memo / "fingerprints.json").write_text(content)
    assert weight_fingerprints(model, memo) == weight_fingerprints(model, None)


def test_a_memo_that_cannot_be_written_is_no_fault(model: Path, tmp_path: Path):
    taken = tmp_path / "file"
    taken.write_text("")
    assert weight_fingerprints(model, taken / "sub") == weight_fingerprints(model, None)
