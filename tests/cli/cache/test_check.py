"""`omlxd cache check`: files damaged in every way."""
# ruff: noqa: F811 -- `cache` is a fixture of cache_folder.py

from __future__ import annotations

import os
from pathlib import Path

import pytest
from cache_folder import (
    HEADER,
    KEYS,
    Cache,
    blocks_in,
    cache,  # noqa: F401
    flip,
    no_settings,  # noqa: F401
    replace,
)
from kv_fakes import LAYOUT, NAMESPACE, OTHER_NAMESPACE, block_format, payload_of

from omlxd.cli.cache.checks.verify import Verdict, Verifier
from omlxd.kv.checkpoint import checkpoint_name
from omlxd.kv.cold.tier import ColdTier
from omlxd.kv.files.block_file import BlockFormat, BlockKey
from omlxd.kv.files.paths import namespace_dir


def test_a_sound_cache_is_all_good(cache: Cache, capsys: pytest.CaptureFixture[str]):
    before = {path: path.stat().st_mtime_ns for path in blocks_in(cache.root)}
    assert cache.run("check") == 0
    assert "checked 11 files" in (told := capsys.readouterr().out) and "all good" in told
    assert {path: path.stat().st_mtime_ns for path in blocks_in(cache.root)} == before
    assert not (cache.root / ".lock").exists()


def put(path: Path, key: BlockKey, format: BlockFormat) -> None:
    """A file that is whole in itself, where it doesn't belong."""
    elsewhere = ColdTier(path.parents[2], format)
    elsewhere.store(key, payload_of(key.block_hash).buffers())
    (path.parents[2] / elsewhere.path_of(key.block_hash)).replace(path)


WRONG_TOKENS = BlockKey(KEYS[0].block_hash, KEYS[0].parent, [9, 9, 9, 9])
DAMAGE = {
    "its payload fails its digest": lambda path: flip(path, HEADER + 5),
    "its header is not this block's": lambda path: flip(path, HEADER - 1, ord(" ") ^ ord("\t")),
    "its length makes no sense": lambda path: flip(path, 6),
    "its header can't be read": lambda path: flip(path, 8),
    "bytes instead of": lambda path: os.truncate(path, path.stat().st_size - 1),
    "makes no sense (0 bytes)": lambda path: os.truncate(path, 0),
    f"makes no sense ({HEADER - 1} bytes)": lambda path: os.truncate(path, HEADER - 1),
    "has format 'omlxd-kv-9'": lambda path: replace(path, b"omlxd-kv-1", b"omlxd-kv-9"),
    "is of unknown kind": lambda path: replace(path, b'"kind":"tokens"', b'"kind":"tokenz"'),
    "none of a block's": lambda path: replace(path, b'"dtype":"F16"', b'"dtype":"F61"'),
    "its tokens can't be read": lambda path: replace(path, b'"tokens":"0,1', b'"tokens":"0;1'),
    "belongs to namespace": lambda path: put(path, KEYS[0], block_format(OTHER_NAMESPACE)),
    "is the file of": lambda path: put(path, KEYS[1], block_format()),
    "don't give its name": lambda path: put(path, WRONG_TOKENS, block_format()),
}


@pytest.mark.parametrize("reason", DAMAGE)
def test_damage_is_told_and_removed_only_when_asked(
    reason: str, cache: Cache, capsys: pytest.CaptureFixture[str]
):
    path = cache.path(0)
    DAMAGE[reason](path)
    assert cache.run("check") == 1
    told = capsys.readouterr().out
    relative = str(path.relative_to(cache.root))
    assert f"bad: {relative}: " in told and reason in told.splitlines()[0]
    assert "1 bad, 0 removed" in told and path.exists()
    assert cache.run("check", "--delete-bad") == 1
    assert "; removed" in capsys.readouterr().out and not path.exists()
    assert cache.run("check") == 0


def test_a_checkpoint_is_tied_to_its_place(cache: Cache, capsys: pytest.CaptureFixture[str]):
    wrong = BlockKey(checkpoint_name(KEYS[3].block_hash), KEYS[4].block_hash, [16])
    cache.checkpoint.store(wrong, [memoryview(bytes(g.nbytes(1))) for g in LAYOUT.groups])
    assert cache.run("check") == 1
    assert "its parent doesn't give its name" in capsys.readouterr().out


def test_every_byte_of_a_header_counts(cache: Cache):
    path, verifier = cache.path(0), Verifier()
    name = (namespace_dir(NAMESPACE), KEYS[0].block_hash.hex())
    good = verifier.verify(str(path), *name)
    assert good.fault == "" and good == verifier.verify(str(cache.path(1)), name[0], KEYS[1].block_hash.hex())
    whole = path.read_bytes()
    with path.open("r+b") as file:
        for at in [*range(1200), *range(1200, len(whole), 97)]:
            os.pwrite(file.fileno(), bytes([whole[at] ^ 4]), at)
            assert verifier.verify(str(path), *name) != good, at
            os.pwrite(file.fileno(), whole[at : at + 1], at)
    assert verifier.verify(str(path), *name) == good


def test_tensors_of_other_names_than_their_siblings(cache: Cache, capsys: pytest.CaptureFixture[str]):
    replace(cache.path(0), b'"k1"', b'"kX"')
    assert cache.run("check", "--delete-bad") == 1
    assert "its tensors are not those of its namespace; removed" in capsys.readouterr().out
    assert not cache.path(0).exists() and len(blocks_in(cache.root)) == 10


def test_what_is_no_file_or_in_the_wrong_place(cache: Cache, capsys: pytest.CaptureFixture[str]):
    folder = cache.root / namespace_dir(NAMESPACE)
    secret = cache.root.parent / "secret"
    secret.write_text("keep")
    link, made = folder / "00" / f"{'00' * 32}.safetensors", folder / "11" / f"{'11' * 32}.safetensors"
    link.parent.mkdir(exist_ok=True)
    link.symlink_to(secret)
    (made / "full").mkdir(parents=True)
    wrong_fan = folder / "zz.safetensors"
    wrong_fan.write_bytes(cache.path(0).read_bytes())
    mine = cache.root / "models" / "00" / "model.safetensors"  # Not in a namespace: not omlxd's.
    mine.parent.mkdir(parents=True)
    mine.write_text("weights")
    assert cache.run("check", "--delete-bad") == 1
    told = capsys.readouterr().out
    assert "a link, not a file; removed" in told and "not where or what a block's file is; removed" in told
    assert "a folder, not a file; can't be removed" in told and "3 bad, 2 removed" in told
    assert not link.is_symlink() and not wrong_fan.exists()
    assert (made / "full").exists() and secret.read_text() == "keep" and mine.read_text() == "weights"


def test_a_sample_is_a_part(cache: Cache, capsys: pytest.CaptureFixture[str]):
    assert cache.run("check", "--sample", "1/3") == 0
    assert "checked 4 files" in capsys.readouterr().out
    for wrong in ("0/3", "4/3", "x", "1"):
        assert cache.run("check", "--sample", wrong) == 2
        assert "--sample" in capsys.readouterr().err


def test_a_file_that_was_replaced_meanwhile_stays(cache: Cache, monkeypatch: pytest.MonkeyPatch):
    path = cache.path(0)
    good = path.read_bytes()
    flip(path, HEADER)
    verify = Verifier.verify

    def then_replaced(self: Verifier, where: str, namespace: str, name: str, *, is_record: bool) -> Verdict:
        found = verify(self, where, namespace, name, is_record=is_record)
        if found.fault:
            fresh = path.with_suffix(".new")
            fresh.write_bytes(good)
            fresh.rename(path)
        return found

    monkeypatch.setattr(Verifier, "verify", then_replaced)
    assert cache.run("check", "--delete-bad") == 1
    assert path.read_bytes() == good
