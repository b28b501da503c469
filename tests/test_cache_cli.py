"""`omlxd cache`: every verb, files damaged in every way, beside a daemon and without one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from daemon import REPO, Daemon, family_model, own_usage, prose
from kv_fakes import BLOCK, LAYOUT, NAMESPACE, OTHER_NAMESPACE, block_format, chain, payload_of

from omlxd.cache_cli import command
from omlxd.cache_cli.lock import DaemonRuns, exclusive, holder
from omlxd.cache_cli.verify import Verdict, Verifier
from omlxd.cli import main
from omlxd.kv.block_file import BlockFormat, BlockKey
from omlxd.kv.checkpoints import CheckpointFiles, checkpoint_name
from omlxd.kv.cold_tier import ColdTier
from omlxd.kv.ledger import Ledger
from omlxd.kv.namespace_file import describe_namespace, read_namespace
from omlxd.kv.paths import namespace_dir

DAY = 86400
KEYS = chain(range(8 * BLOCK))


def blocks_in(root: Path) -> list[Path]:
    return list(root.rglob("*.safetensors"))


class Cache:
    """A cache dir of two models: `org/tiny` with blocks and a checkpoint, and one without description."""

    def __init__(self, root: Path, model: Path):
        self.root = root
        model.mkdir()
        self.tier = ColdTier(root, block_format())
        for key in KEYS:
            self.tier.store(key, payload_of(key.block_hash).buffers())
        other = chain(range(2 * BLOCK), OTHER_NAMESPACE)
        self.other = ColdTier(root, block_format(OTHER_NAMESPACE))
        for key in other:
            self.other.store(key, payload_of(key.block_hash).buffers())
        at = KEYS[3].block_hash
        self.checkpoint = CheckpointFiles(root, NAMESPACE, lambda position: LAYOUT).at(16)
        buffers = [memoryview(bytes(g.nbytes(1))) for g in LAYOUT.groups]
        self.checkpoint.store(BlockKey(checkpoint_name(at), at, [16]), buffers)
        describe(root, model)

    def path(self, index: int = 0) -> Path:
        return self.root / self.tier.path_of(KEYS[index].block_hash)

    def run(self, *words: str) -> int:
        return main(["cache", *words, "--paged-ssd-cache-dir", str(self.root)])


def describe(root: Path, model: Path, name: str = "org/tiny") -> None:
    describe_namespace(
        root,
        NAMESPACE,
        model_id=name,
        model_path=str(model),
        model_type="qwen3",
        block_size=BLOCK,
        block_bytes=20480,
    )


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    return Cache(tmp_path / "cache", tmp_path / "model")


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [name for name in os.environ if name.startswith("OMLXD_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))


# --------------------------------------------------------------------- stats


def test_stats_as_json(cache: Cache, capsys: pytest.CaptureFixture[str]):
    then = time.time() - 3 * DAY
    os.utime(cache.path(0), (then, then))
    assert cache.run("stats", "--json", "--paged-ssd-cache-max-size", "5GB") == 0
    told = json.loads(capsys.readouterr().out)
    tiny, other = told.pop("namespaces")
    assert told == {
        "cache_dir": str(cache.root),
        "bytes": tiny["bytes"] + other["bytes"],
        "files": 11,
        "cap_bytes": 5_000_000_000,
        "cap_source": "--paged-ssd-cache-max-size",
        "daemon": False,
        "daemon_pid": None,
        "temporary": 0,
        "temporary_bytes": 0,
        "misplaced": 0,
        "strangers": 0,
        "live": None,
    }
    assert (tiny["namespace"], tiny["model_id"], tiny["model_type"]) == (
        namespace_dir(NAMESPACE),
        "org/tiny",
        "qwen3",
    )
    assert (tiny["files"], tiny["token_blocks"], tiny["checkpoints"], tiny["block_size"]) == (9, 8, 1, BLOCK)
    assert tiny["token_bytes"] == 8 * cache.tier.bytes_per_block
    assert tiny["checkpoint_bytes"] == cache.checkpoint.bytes_per_block
    assert tiny["bytes"] == tiny["token_bytes"] + tiny["checkpoint_bytes"]
    assert abs(tiny["oldest_use"] - then) < 1 and tiny["newest_use"] > then + 2 * DAY
    assert (other["model_id"], other["token_blocks"], other["checkpoints"]) == ("", 2, 0)


def test_stats_as_text(cache: Cache, capsys: pytest.CaptureFixture[str]):
    temp = cache.path(0).with_name(cache.path(0).name + ".7-0.tmp")
    temp.write_bytes(bytes(100))
    (cache.root / namespace_dir(NAMESPACE) / "notes").write_text("hello")
    assert cache.run("stats") == 0
    told = capsys.readouterr().out
    assert "org/tiny" in told and "(unknown)" in told and namespace_dir(OTHER_NAMESPACE)[:8] in told
    assert "in 11 files; cap: 100 GB (default)" in told and "daemon: none on this folder" in told
    assert "temporary: 1 files" in told and "not blocks: 1 entries" in told


def test_stats_of_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["cache", "stats", "--paged-ssd-cache-dir", str(tmp_path / "none")]) == 0
    assert "nothing cached yet" in capsys.readouterr().out
    assert not (tmp_path / "none").exists()
    assert main(["cache", "check", "--paged-ssd-cache-dir", str(tmp_path / "none")]) == 1
    assert f"there is no SSD cache at {tmp_path / 'none'}" in capsys.readouterr().err


# --------------------------------------------------------------------- check


def test_a_sound_cache_is_all_good(cache: Cache, capsys: pytest.CaptureFixture[str]):
    before = {path: path.stat().st_mtime_ns for path in blocks_in(cache.root)}
    assert cache.run("check") == 0
    assert "checked 11 files" in (told := capsys.readouterr().out) and "all good" in told
    assert {path: path.stat().st_mtime_ns for path in blocks_in(cache.root)} == before
    assert not (cache.root / ".lock").exists()


def flip(path: Path, at: int, bits: int = 1) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= bits
    path.write_bytes(data)


def replace(path: Path, old: bytes, new: bytes) -> None:
    data = path.read_bytes()
    assert old in data and len(old) == len(new)
    path.write_bytes(data.replace(old, new, 1))


def put(path: Path, key: BlockKey, format: BlockFormat) -> None:
    """A file that is whole in itself, where it doesn't belong."""
    elsewhere = ColdTier(path.parents[2], format)
    elsewhere.store(key, payload_of(key.block_hash).buffers())
    (path.parents[2] / elsewhere.path_of(key.block_hash)).replace(path)


HEADER = block_format().header_bytes
WRONG_TOKENS = BlockKey(KEYS[0].block_hash, KEYS[0].parent, [9, 9, 9, 9])
DAMAGE = {
    "its payload fails its digest": lambda path: flip(path, HEADER + 5),
    "its header is not this block's": lambda path: flip(path, HEADER - 1, ord(" ") ^ ord("\t")),
    "the length of its header makes no sense": lambda path: flip(path, 6),
    "its header can't be read": lambda path: flip(path, 8),
    "bytes instead of": lambda path: os.truncate(path, path.stat().st_size - 1),
    "bytes are no block": lambda path: os.truncate(path, 0),
    "ends within its header": lambda path: os.truncate(path, HEADER - 1),
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

    def then_replaced(self: Verifier, where: str, namespace: str, name: str) -> Verdict:
        found = verify(self, where, namespace, name)
        if found.fault:
            fresh = path.with_suffix(".new")
            fresh.write_bytes(good)
            fresh.rename(path)
        return found

    monkeypatch.setattr(Verifier, "verify", then_replaced)
    assert cache.run("check", "--delete-bad") == 1
    assert path.read_bytes() == good


# --------------------------------------------------------------------- scrub


def test_scrub_removes_what_crashes_leave(cache: Cache, capsys: pytest.CaptureFixture[str]):
    flip(cache.path(0), HEADER)
    cache.path(1).with_name(cache.path(1).name + ".7-0.tmp").write_bytes(bytes(5000))
    (cache.root / "fingerprints.json.77.tmp").write_text("{")
    (cache.root / "fingerprints.json").write_text("{}")
    empty = cache.root / ("ab" * 16)
    (empty / "cd").mkdir(parents=True)
    notes = cache.root / namespace_dir(NAMESPACE) / "notes"
    notes.write_text("hello")
    assert cache.run("scrub") == 1
    told = capsys.readouterr().out
    assert "its payload fails its digest; removed" in told
    # The bad block's folder may hold others; the empty namespace is two folders.
    assert "removed 2 leftovers, " in told and not empty.exists() and notes.exists()
    assert (cache.root / "fingerprints.json").exists() and not list(cache.root.rglob("*.tmp"))
    assert cache.run("scrub") == 0
    assert "checked 10 files" in (told := capsys.readouterr().out) and "removed 0 leftovers" in told
    assert "orphan" not in told


def test_orphans_are_told_and_removed_only_when_asked(
    cache: Cache, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "model").rmdir()
    assert cache.run("scrub") == 0
    told = capsys.readouterr().out
    assert "orphan: org/tiny" in told and f"{tmp_path / 'model'} is no longer there" in told
    assert "--orphans" in told and cache.path(0).exists()
    assert cache.run("scrub", "--orphans") == 0
    assert "removed 9 files of orphans" in capsys.readouterr().out
    assert not (cache.root / namespace_dir(NAMESPACE)).exists()
    assert len(blocks_in(cache.root)) == 2


# --------------------------------------------------------------------- clear


def test_clear_all(cache: Cache, capsys: pytest.CaptureFixture[str]):
    assert cache.run("clear", "--yes") == 0
    told = capsys.readouterr().out
    assert "org/tiny" in told and "9 files" in told and "removed 11 files" in told
    assert [path.name for path in cache.root.iterdir()] == [".lock"]
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
    assert "--yes" in capsys.readouterr().err
    monkeypatch.setattr(command.sys.stdin, "isatty", lambda: True, raising=False)
    asked: list[str] = []
    monkeypatch.setattr("builtins.input", lambda text: asked.append(text) or "n")
    assert cache.run("clear") == 1
    assert "remove 11 files" in asked[0] and len(blocks_in(cache.root)) == 11
    monkeypatch.setattr("builtins.input", lambda text: "y")
    assert cache.run("clear") == 0
    assert not blocks_in(cache.root)


# --------------------------------------------------------------------- the lock


def test_a_held_cache_is_looked_at_but_not_cleared(cache: Cache, capsys: pytest.CaptureFixture[str]):
    ledger = Ledger(cache.root, 10**9)
    ledger.open()
    assert holder(cache.root) == os.getpid()
    assert cache.run("check") == 0 and cache.run("stats") == 0
    assert f"daemon: running, process {os.getpid()}" in capsys.readouterr().out
    assert cache.run("clear", "--yes") == 1
    assert f"a daemon (process {os.getpid()}) is using" in capsys.readouterr().err
    with pytest.raises(DaemonRuns), exclusive(cache.root):
        pass
    ledger.close()
    assert holder(cache.root) is None or not Path("/proc/locks").exists()
    with exclusive(cache.root):
        pass
    assert holder(cache.root) is None


def test_nobody_holds_what_a_dead_process_left(tmp_path: Path):
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    (tmp_path / ".lock").write_text(f"{gone.pid}\n")
    assert holder(tmp_path) is None
    (tmp_path / ".lock").write_text("nonsense")
    assert holder(tmp_path) is None and holder(tmp_path / "none") is None


# --------------------------------------------------------------------- the description


def test_a_description_keeps_its_first_time(cache: Cache, tmp_path: Path):
    folder = namespace_dir(NAMESPACE)
    first = read_namespace(cache.root, folder)
    assert first is not None and first.facts_digest == NAMESPACE.hex() and first.block_bytes == 20480
    stamp = (cache.root / folder / "namespace.json").stat().st_mtime_ns
    describe(cache.root, tmp_path / "model")
    assert (cache.root / folder / "namespace.json").stat().st_mtime_ns == stamp
    describe(cache.root, tmp_path / "elsewhere", "org/renamed")
    again = read_namespace(cache.root, folder)
    assert again is not None and (again.model_id, again.created) == ("org/renamed", first.created)
    assert [path.name for path in (cache.root / folder).glob("namespace*")] == ["namespace.json"]
    for nonsense in (b"", b"[", b'{"model_id": 5}', b"\xff"):
        (cache.root / folder / "namespace.json").write_bytes(nonsense)
        assert read_namespace(cache.root, folder) is None


def test_a_description_that_cannot_be_written_is_no_trouble(tmp_path: Path):
    (tmp_path / "file").write_text("")
    describe(tmp_path / "file", tmp_path)
    assert (tmp_path / "file").read_text() == ""


# --------------------------------------------------------------------- a real daemon


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """A model with a sliding window, so that there are checkpoints too, and one answer of it on disk."""
    model = family_model("gemma3_text")
    with Daemon(tmp_path_factory.mktemp("cache-cli"), model=model) as daemon:
        daemon.messages(prose(150), max_tokens=4)
        daemon.settled()
        yield daemon


NOT_ASKED = ("--url", "http://127.0.0.1:1")
"""The daemon holds the folder, and does not answer there."""


def cache_command(daemon: Daemon, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [
            sys.executable,
            "-m",
            "omlxd",
            "cache",
            *words,
            "--base-path",
            str(daemon.home / "omlxd"),
            *NOT_ASKED,
        ],
        capture_output=True,
        text=True,
        cwd=REPO,
    )


def test_beside_a_running_daemon(served: Daemon):
    told = cache_command(served, "stats", "--json")
    stats = json.loads(told.stdout)
    (model,) = stats["namespaces"]
    assert (stats["daemon"], stats["daemon_pid"]) == (True, served.process.pid)
    assert model["model_id"] == served.model and model["model_path"] == str(served.model_folder)
    assert model["model_type"] == "gemma3_text" and model["block_size"] == 64
    assert model["token_blocks"] > 5 and model["checkpoints"] >= 1
    checked = cache_command(served, "check")
    assert checked.returncode == 0 and f"checked {stats['files']} files" in checked.stdout, checked.stdout
    refused = cache_command(served, "clear", "--yes")
    assert refused.returncode == 1 and str(served.process.pid) in refused.stderr
    scrubbed = cache_command(served, "scrub")
    assert scrubbed.returncode == 0 and "leftovers stay: a daemon" in scrubbed.stdout


def test_a_bad_file_may_go_under_a_running_daemon(served: Daemon):
    blocks = sorted((served.home / "omlxd" / "cache").rglob("*.safetensors"))
    flip(blocks[0], blocks[0].stat().st_size - 1)
    told = cache_command(served, "check", "--delete-bad")
    assert told.returncode == 1 and "1 bad, 1 removed" in told.stdout
    assert "the running daemon counts the removed files" in told.stdout and not blocks[0].exists()
    again = served.messages(prose(150), max_tokens=4)
    assert own_usage(again)["cached_hot"] > 0 and "Traceback" not in served.logged()
