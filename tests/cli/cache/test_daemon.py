"""omlxd cache against a running daemon: figures, removals through it, and its account after them."""

import itertools
import json
import shutil
from pathlib import Path

import pytest
from app_client import client
from daemon import Daemon, own_usage, prose, wait_until
from fake_engine import FakeEngine, app_of

from omlxd.cli import main
from omlxd.kv.files.paths import is_stored_path
from omlxd.kv.ledger.ledger import Ledger

NAMESPACE = "ab" * 16


def test_what_a_blocks_path_is():
    good = f"{NAMESPACE}/cd/{'cd' * 32}.safetensors"
    assert is_stored_path(good)
    for bad in (
        *("", "x", f"../{good}", f"/{good}", good + ".1-2.tmp", good.replace("/cd/", "/ce/")),
        *(f"{NAMESPACE}/../{good}", f"{NAMESPACE}/cd/../../x", f"{NAMESPACE}/cd/model.safetensors"),
    ):
        assert not is_stored_path(bad)


def test_the_ledger_forgets_what_the_owner_takes_away(tmp_path: Path):
    paths = [f"{NAMESPACE}/{n:02x}/{f'{n:02x}' * 32}.safetensors" for n in range(4)]
    for path in paths:
        (tmp_path / path).parent.mkdir(parents=True)
        (tmp_path / path).write_bytes(bytes(5000))
    ledger = Ledger(tmp_path, 10**9)
    ledger.open()
    assert ledger.stats().files == 4
    # Not removed and still there: it stays. Gone: it leaves the account.
    (tmp_path / paths[0]).unlink()
    assert ledger.forget(paths[:2], remove=False) == (1, 8192, [])
    assert ledger.forget(paths[:3], remove=True) == (2, 16384, [])
    shutil.rmtree((tmp_path / paths[3]).parent)
    (tmp_path / paths[3]).mkdir(parents=True)
    files, nbytes, troubles = ledger.forget(paths[3:], remove=True)
    assert (files, nbytes) == (0, 0) and troubles
    assert ledger.stats().files == 1 and ledger.evicted_log.of(paths[1]).what == "cleared"
    assert ledger.evicted_log.of(paths[0]).what == "damaged"
    ledger.close()


def test_the_ledger_remembers_what_it_evicted(tmp_path: Path):
    paths = [f"{NAMESPACE}/{n:02x}/{f'{n:02x}' * 32}.safetensors" for n in range(3)]
    for path in paths:
        (tmp_path / path).parent.mkdir(parents=True)
        (tmp_path / path).write_bytes(bytes(4096))
    ledger = Ledger(tmp_path, 2 * 4096)
    ledger.open()
    gone = [path for path in paths if not (tmp_path / path).exists()]
    assert len(gone) == 1
    assert [path for path in paths if ledger.evicted_log.of(path)] == gone
    assert ledger.evicted_log.of(gone[0]).what == "evicted"
    ledger.close()


async def test_only_block_files_can_be_named():
    async with client(app_of(FakeEngine(), api_key="k")) as http:
        path = "/omlxd/cache/forget"
        assert (await http.post(path, json={"paths": []})).status_code == 401
        http.headers["x-api-key"] = "k"
        for paths in (["/etc/passwd"], [f"{NAMESPACE}/../x"], 5):
            answer = await http.post(path, json={"paths": paths, "remove": True})
            assert answer.status_code == 400
        answer = await http.post(path, json={"paths": []})
        assert answer.status_code == 503 and "no SSD cache" in answer.text


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory):
    with Daemon(tmp_path_factory.mktemp("home")) as daemon:
        yield daemon


SEEDS = itertools.count(10)


@pytest.fixture
def running(started: Daemon) -> Daemon:
    """With at least five files that its account knows."""
    before = account(started)["files"]
    started.chat(prose(100, seed=next(SEEDS)))
    settled(started)
    assert len(files(started)) >= before + 5
    return started


def files(daemon: Daemon) -> list[Path]:
    """Blocks and checkpoints, then records of answers."""
    return [path for kind in ("safetensors", "record") for path in daemon.cache.rglob(f"*.{kind}")]


def settled(daemon: Daemon) -> None:
    """Every block is written, and the account knows of each."""
    daemon.settled()
    wait_until(lambda: account(daemon)["files"] == len(files(daemon)))


def run(daemon: Daemon, *argv: str) -> int:
    folder = str(daemon.cache)
    return main.main(["cache", *argv, "--paged-ssd-cache-dir", folder, "--url", daemon.url])


def account(daemon: Daemon) -> dict[str, int]:
    return daemon.http.get("/omlxd/status").json()["cold"]


def test_an_address_alone_means_the_folder_and_the_cap_of_the_daemon_there(running: Daemon, capsys):
    assert main.main(["cache", "stats", "--url", running.url, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["cache_dir"] == str(running.cache) and shown["files"] == len(files(running))
    assert (shown["cap_bytes"], shown["cap_source"]) == (account(running)["cap"], "the daemon's")
    assert main.main(["cache", "stats", "--url", "http://127.0.0.1:1"]) == 1
    assert "Nothing answers at http://127.0.0.1:1" in capsys.readouterr().err


def test_the_folder_of_the_daemon_of_the_base_folder_is_meant(tmp_path: Path, capsys):
    base, other = tmp_path / "omlxd", tmp_path / "small"
    asked = ("--base-path", str(base))

    def folder(*words: str) -> str:
        assert main.main(["cache", "stats", *words, "--json"]) == 0
        return json.loads(capsys.readouterr().out)["cache_dir"]

    with Daemon(tmp_path, "--paged-ssd-cache-dir", str(other), wait=False):
        assert folder(*asked) == str(other)
        assert main.main(["cache", "clear", *asked]) == 0
        assert capsys.readouterr().out == f"{other}\nnothing to remove\n"
        named = str(tmp_path / "named")
        assert folder(*asked, "--paged-ssd-cache-dir", named) == named
        assert folder("--base-path", str(tmp_path / "other")) == str(tmp_path / "other" / "cache")
    assert folder(*asked) == str(base / "cache")


def test_stats_tell_of_the_daemon(running: Daemon, capsys):
    running.chat(prose(100))
    assert run(running, "stats") == 0
    out = capsys.readouterr().out
    assert f"{running.model}: " in out and "prompt tokens restored" in out and "written" in out
    assert run(running, "stats", "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert told["live"]["pid"] == running.process.pid == told["daemon_pid"]


def test_clear_goes_through_the_daemon_and_its_account_is_right(running: Daemon, capsys):
    running.chat(prose(100))
    settled(running)
    assert run(running, "clear", "--model", "no-such-model", "--yes") == 2
    assert run(running, "clear", "--older-than", "1h", "--yes") == 0
    assert "nothing to remove" in capsys.readouterr().out
    assert run(running, "clear", "--model", running.model, "--yes") == 0
    assert "removed" in capsys.readouterr().out
    assert files(running) == [] and account(running)["bytes"] == account(running)["files"] == 0
    # It serves on, from RAM, and writes again what a request uses.
    assert own_usage(running.chat(prose(100)))["cached_hot"] > 0
    wait_until(lambda: len(files(running)) >= 4)
    running.chat(prose(100, seed=5))
    settled(running)
    assert len(files(running)) >= 4


def test_bad_files_leave_the_account_too(running: Daemon, capsys):
    before = account(running)["files"]
    bad, worse = files(running)[:2]
    bad.write_bytes(b"nonsense")
    assert run(running, "check", "--delete-bad") == 1
    assert account(running)["files"] == before - 1
    worse.write_bytes(b"nonsense")
    assert run(running, "scrub") == 0
    assert account(running)["files"] == before - 2 == len(files(running))
    assert "counts the removed files" not in capsys.readouterr().out
    worse.with_name(worse.name + f".{2**31 - 1}-0.tmp").write_bytes(bytes(10))
    worse.with_name(worse.name + f".{running.process.pid}-0.tmp").write_bytes(bytes(10))
    assert run(running, "scrub") == 1
    assert "leftovers stay: a daemon" in capsys.readouterr().out
    worse.with_name(worse.name + f".{2**31 - 1}-0.tmp").unlink()
    assert run(running, "scrub") == 0  # The other one is being written.


def test_a_daemon_that_does_not_answer_is_in_the_way(running: Daemon, capsys):
    folder = str(running.cache)
    argv = ["cache", "clear", "--yes", "--paged-ssd-cache-dir", folder, "--url", "http://127.0.0.1:1"]
    assert main.main(argv) == 1
    assert "is using" in capsys.readouterr().err and len(files(running)) >= 5
