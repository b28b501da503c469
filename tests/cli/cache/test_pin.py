"""`omlxd cache pin`: what is pinned is evicted last, also after a restart; a session is exported."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

import httpx
import pytest
from daemon import Daemon, prose, wait_until

from omlxd.cli.cache import command
from omlxd.cli.cache.pinned import FILE_NAME, PinnedChain
from omlxd.errors import ConfigError, InvalidRequest, NotFound, OmlxdError
from omlxd.front.engines.ledger.cold_ledger import ColdLedger
from omlxd.front.engines.ledger.pins import MOST_NAMES, Pins
from omlxd.front.engines.names.model_book import ModelBook
from omlxd.kv.ledger.eviction_order import FileOrder
from omlxd.kv.ledger.ledger import Ledger

NS = "a" * 32


def cache(*words: object) -> int:
    return command.main([str(word) for word in words], argparse.ArgumentParser())


def path(number: int, namespace: str = NS) -> str:
    name = f"{number:064x}"
    return f"{namespace}/{name[:2]}/{name}.safetensors"


def test_pinned_files_go_last_in_their_order_and_others_as_before():
    order = FileOrder()
    for number in range(6):
        order.add(path(number), 4096)
    order.pin(dict.fromkeys([path(9), path(1), path(0)]).keys())  # A child before its parent.
    order.set_orphans({NS})
    order.touch(path(2))
    order.add(path(9), 4096)
    gone = [order.pop_oldest() for _ in range(5)]
    assert [each and each[0] for each in gone] == [path(3), path(4), path(5), path(2), path(1)]
    order.pin(frozenset())
    assert [(order.pop_oldest() or "")[0] for _ in range(2)] == [path(9), path(0)]
    assert order.pop_oldest() is None and order.nbytes == 0


async def test_pins_survive_a_restart_and_take_half_of_the_cache_at_most(tmp_path: Path, caplog):
    cold = ColdLedger(tmp_path, 100_000)
    for number in range(20):
        put(tmp_path, number)
    assert await cold.open()
    chain = PinnedChain("m", [path(1), path(0)], 1.0)
    pins = await cold.pin("mine", chain)
    assert pins is not None and [(pin.name, pin.files, pin.bytes) for pin in pins.pins] == [("mine", 2, 8192)]
    pins = await cold.pin("shared", PinnedChain("m", [path(2), path(1), path(0)], 2.0))
    # A file that two pins share takes its room once.
    assert pins is not None and [pin.bytes for pin in pins.pins] == [8192, 12288]
    assert (pins.bytes, pins.most_bytes) == (12288, 50_000)
    await cold.pin("shared", None)
    with pytest.raises(InvalidRequest, match=r"81\.9 kB would be pinned, and at most half"):
        await cold.pin("all", PinnedChain("m", [path(n) for n in range(20)], 1.0))
    with pytest.raises(NotFound, match="Nothing is pinned as 'yours'"):
        await cold.pin("yours", None)
    await cold.close()

    assert "are pinned" not in caplog.text
    small = ColdLedger(tmp_path, 3 * 4096)
    assert await small.open()
    stats = await small.ledger_stats()
    assert stats is not None and stats.files == 3
    assert "8.2 kB are pinned, more than half of its limit (6.1 kB), and go last: unpin" in caplog.text
    assert (tmp_path / path(0)).exists() and (tmp_path / path(1)).exists()
    pins = await small.pin("mine", None)
    assert pins is not None and pins.pins == [] and json.loads((tmp_path / FILE_NAME).read_text()) == {}
    await small.close()


async def pinned(cold: ColdLedger) -> list[tuple[str, int, int]]:
    return [(pin.name, pin.files, pin.bytes) for pin in (await cold.pins()).pins]


def put(root: Path, number: int) -> None:
    file = root / path(number)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(bytes(4096))


async def test_a_pin_goes_with_its_files(tmp_path: Path):
    for number in range(4):
        put(tmp_path, number)
    cold = ColdLedger(tmp_path, 100_000)
    assert await cold.open()
    await cold.pin("one", PinnedChain("m", [path(1), path(0)], 1.0))
    await cold.pin("two", PinnedChain("m", [path(3), path(2)], 2.0))
    assert await cold.pinned_files() == {path(n): ["one" if n < 2 else "two"] for n in (1, 0, 3, 2)}
    await cold.forget_files([path(0), path(1), path(3)], True)
    assert await pinned(cold) == [("two", 1, 4096)]
    await cold.close()
    (tmp_path / path(2)).unlink()
    again = ColdLedger(tmp_path, 100_000)
    assert await again.open()
    assert await pinned(again) == [] and json.loads((tmp_path / FILE_NAME).read_text()) == {}
    await again.close()


@pytest.mark.parametrize("text", ["", "[]", "{", '{"a": {"model": "m"}}', '{"a": {"files": 3}}'])
def test_a_file_of_pins_that_makes_no_sense_holds_none(tmp_path: Path, text: str):
    (tmp_path / FILE_NAME).write_text(text)
    pins = Pins(tmp_path)
    pins.load()
    assert not pins.by_name and not pins.files()


async def test_what_the_owner_pinned_is_on_disk_before_its_name_is(tmp_path: Path, monkeypatch):
    """A power cut would leave an empty file, and no pins."""
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append(os.fstat(fd).st_ino))
    Pins(tmp_path).put("mine", PinnedChain("m", [path(3)], 1.0))
    book = ModelBook(tmp_path / "models.json")
    book.set_pinned("tiny", True)
    await book.close(10)
    assert synced == [(tmp_path / name).stat().st_ino for name in (FILE_NAME, "models.json")]


def test_names_are_bounded_and_foreign_paths_are_none_of_a_pin(tmp_path: Path):
    pins = Pins(tmp_path)
    pins.by_name = {str(n): PinnedChain("m", [], 1.0) for n in range(MOST_NAMES)}
    with pytest.raises(InvalidRequest, match="are pinned"):
        pins.put("one more", PinnedChain("m", [], 1.0))
    pins.put("0", PinnedChain("m", ["../../etc/passwd", path(3)], 2.0))
    again = Pins(tmp_path)
    again.load()
    assert list(again.files()) == [path(3)] and list(again.by_name)[-1] == "0"


def test_pins_that_could_not_be_read_again_are_refused(tmp_path: Path):
    """Sessions that share a long beginning: each pin names all of its files."""
    pins, files = Pins(tmp_path), [path(number) for number in range(50_000)]
    kept = 0
    with pytest.raises(InvalidRequest, match="unpin some of them first"):
        for kept in range(6):
            pins.put(str(kept), PinnedChain("m", files, 1.0))
    again = Pins(tmp_path)
    again.load()
    assert len(again.by_name) == kept > 1


async def test_another_folder_in_the_place_of_the_one_that_was_opened_keeps_its_own_pins(tmp_path: Path):
    for name, number in (("cache", 1), ("other", 2)):
        cold = ColdLedger(tmp_path / name, 100_000)
        assert await cold.open()
        put(tmp_path / name, number)
        assert await cold.pin(name, PinnedChain("m", [path(number)], 1.0))
        await cold.close()
    cold = ColdLedger(tmp_path / "cache", 100_000)
    assert await cold.open() and await pinned(cold) == [("cache", 1, 4096)]
    (tmp_path / "cache").rename(tmp_path / "gone")
    (tmp_path / "other").rename(tmp_path / "cache")
    await cold.submit(Ledger.check_folder)
    assert await pinned(cold) == [("other", 1, 4096)]
    put(tmp_path / "cache", 3)
    await cold.pin("more", PinnedChain("m", [path(3)], 1.0))
    await cold.close()
    assert sorted(json.loads((tmp_path / "cache" / FILE_NAME).read_text())) == ["more", "other"]


@pytest.mark.slow
def test_a_pinned_session_stays_while_others_go(tmp_path: Path, capsys):
    here, archive = tmp_path / "here", tmp_path / "session.tar"
    (tmp_path / "prompt.txt").write_text(prose(100, seed=3))
    flags = ("--hot-cache-max-size", "0", "--paged-ssd-cache-max-size", "6MB")

    def ask(daemon: Daemon, text: str, session: str) -> int:
        headers = {"x-session-id": session}
        body = {"model": daemon.model, "prompt": text, "max_tokens": 1}
        answer = daemon.http.post("/v1/completions", json=body, headers=headers).json()
        return answer["usage"]["omlxd"]["cached_cold"]

    with Daemon(here, *flags) as daemon:
        text = prose(300)
        ask(daemon, text, "mine")
        wait_until(lambda: ask(daemon, text, "mine") >= 640)
        assert cache("pin", "mine", "--url", daemon.url) == 0
        said = capsys.readouterr().out
        assert said.splitlines()[1].startswith("mine ") and "1 pinned, " in said
        with pytest.raises(OmlxdError, match="no request is kept"):
            cache("pin", "nobody", "--url", daemon.url)
        with pytest.raises(OmlxdError, match="Nothing of it is cached"):
            cache("pin", tmp_path / "prompt.txt", "--url", daemon.url)
        (tmp_path / "short.txt").write_text("Hello")
        with pytest.raises(OmlxdError, match=r"its \d+ tokens? are less than one block of 64"):
            cache("pin", tmp_path / "short.txt", "--url", daemon.url)
        with pytest.raises(ConfigError, match="--off: say what"):
            cache("pin", "--off", "--url", daemon.url)
        assert cache("export", archive, "--session", "mine", "--url", daemon.url) == 0
        for body in (
            {"session": "mine", "name": "n" * 201},
            {"name": "gone", "pinned": False},
            {"pinned": 1},
            {},
            {"name": "unsaid"},
        ):
            assert daemon.http.post("/omlxd/cache/pin", json=body).status_code in (400, 404)
    with Daemon(here, *flags) as daemon:
        for seed in range(1, 9):
            ask(daemon, prose(200, seed=seed), str(seed))
        daemon.settled()
        wait_until(lambda: status(daemon.http)["evicted_files"] >= 4)
        assert ask(daemon, prose(200, seed=1), "1") < 640  # The oldest of the others: leaves go first.
        assert ask(daemon, text, "mine") >= 640
        assert cache("pin", "--json", "--url", daemon.url) == 0
        pins = json.loads(capsys.readouterr().out.partition("{")[2].join(("{", "")))
        assert pins["pins"][0]["files"] >= 10 and pins["bytes"] <= pins["most_bytes"]
        assert cache("pin", "--off", "--name", "mine", "--url", daemon.url) == 0
    other = tmp_path / "other"
    assert cache("import", archive, "--base-path", other / "omlxd", "--paged-ssd-cache-max-size", "1MB") == 1
    assert "files left out: the SSD cache may take 1 MB" in capsys.readouterr().out
    assert sum(file.stat().st_size for file in (other / "omlxd").rglob("*.safetensors")) <= 1_000_000
    assert cache("import", archive, "--base-path", other / "omlxd") == 0
    with Daemon(other, "--hot-cache-max-size", "0") as daemon:
        assert ask(daemon, text, "elsewhere") >= 640


def status(http: httpx.Client) -> dict:
    return http.get("/omlxd/status").json()["cold"]
