"""--log-cache-misses: what stays in the file, what never gets into it, and what a later daemon reads."""

import asyncio
import os
import stat
from pathlib import Path

import msgspec
import pytest
from app_client import body as request_body
from app_client import client
from fake_engine import USAGE, FakeEngine, FakeEngines

from omlxd.cli.cache.why_miss import as_text
from omlxd.cli.daemon.owner_api import RequestLine, WhyMiss
from omlxd.front.app import create_app
from omlxd.front.http.settings import HttpSettings
from omlxd.front.owner.cache.miss_log import KEPT_S, LoggedRequest, MissLog
from omlxd.wire.explanation import Explanation

CHAT = "/v1/chat/completions"
TEXTS = (
    "SECRET-opening",
    "SECRET-session",
    "SECRET-before",
    "SECRET-prompt",
    "SECRET-stored",
    "SECRET-image",
)
OPENING, SESSION, BEFORE, PROMPT, STORED, IMAGE = TEXTS
WHY = Explanation(
    cause="differs",
    prompt_tokens=900,
    block_size=64,
    position=130,
    missing=f"{'a' * 32}/bb/bb{'0' * 62}.safetensors",
    before=BEFORE,
    prompt=PROMPT,
    stored=STORED,
    image=IMAGE,
)


def logged(id: str, began: float) -> LoggedRequest:
    return LoggedRequest(RequestLine(id, "m", SESSION, CHAT, began, 900, 128, "ok", OPENING), 0, WHY)


def ids(log: MissLog) -> list[str]:
    return [each.request.id for each in log.newest_first()]


def test_hashes_stay_and_texts_do_not(tmp_path: Path):
    file = tmp_path / "misses.jsonl"
    file.touch(0o644)
    os.chmod(file, 0o644)
    now = 1e9
    log = MissLog(file, lambda: now)
    for id in ("req_1", "req_2"):
        log.append(logged(id, now))
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    written = file.read_text()
    assert not any(text in written for text in TEXTS)
    assert WHY.missing in written
    later = MissLog(file, lambda: now)
    assert ids(later) == ["req_2", "req_1"]
    for found in (later.find("req_1"), later.find(session=SESSION), later.find()):
        assert found is not None and found.explanation is not None
        assert (found.explanation.cause, found.explanation.position) == ("differs", 130)
    assert later.find("req_3") is None and later.find(session="none") is None


@pytest.mark.parametrize("end", [b"", b'{"request":{"id":"req_t', b"\xff\x00", b"[]\n{}\n", b"\n\n"])
def test_a_torn_line_costs_itself_alone(tmp_path: Path, end: bytes):
    file = tmp_path / "misses.jsonl"
    log = MissLog(file, lambda: 1e9)
    log.append(logged("req_1", 1e9))
    with file.open("ab") as torn:
        torn.write(end)
    assert ids(log) == ["req_1"]
    MissLog(file, lambda: 1e9).append(logged("req_2", 1e9))
    assert ids(log) == ["req_2", "req_1"]


def test_seven_days_and_no_more_bytes_than_its_limit(tmp_path: Path):
    file, now = tmp_path / "misses.jsonl", 1e9
    log = MissLog(file, lambda: now, most_bytes=8000)
    for at in range(200):
        log.append(logged(f"req_{at}", now))
        assert file.stat().st_size <= 8000
    newest = ids(log)
    assert newest == [f"req_{at}" for at in range(199, 199 - len(newest), -1)] and len(newest) >= 5
    now += KEPT_S + 1
    assert ids(log) == []
    log.append(logged("req_new", now))
    assert file.read_bytes().count(b"\n") == 1 and ids(log) == ["req_new"]


def test_what_is_no_file_of_ours_is_left_alone(tmp_path: Path, caplog):
    os.mkfifo(fifo := tmp_path / "fifo")
    (link := tmp_path / "link").symlink_to(target := tmp_path / "target")
    target.write_text("theirs")
    for path in (fifo, link, tmp_path / "none" / "file", tmp_path):
        log = MissLog(path)
        for _ in range(2):
            log.append(logged("req_1", 1e9))
        assert caplog.text.count(f"{path} can't be written") == 1
    assert target.read_text() == "theirs"


async def test_a_later_daemon_says_why(tmp_path: Path):
    file = tmp_path / "misses.jsonl"
    settings = HttpSettings(miss_log=file)
    engine = FakeEngine()
    engine.explanation = WHY
    engines = FakeEngines(engine)
    log = MissLog(file)

    async def lines(count: int) -> None:
        async with asyncio.timeout(60):
            while len(ids(log)) < count:
                await asyncio.sleep(0.01)

    async with client(create_app(engines, settings)) as http:
        engines.cold.evicted_log.note(WHY.missing, "evicted")
        asked = request_body(CHAT) | {"prompt_cache_key": SESSION}
        id = (await http.post(CHAT, json=asked)).headers["x-request-id"]
        await lines(1)
        assert [each["id"] for each in (await http.get("/omlxd/requests")).json()["requests"]] == [id]
        told = (await http.post("/omlxd/why-miss", json={"request_id": id})).json()
        assert told["explanation"]["given"] == PROMPT and not told.get("logged")
        engine.state = "unloaded"
        engine.script = ()
        unknown = (await http.post(CHAT, json=request_body(CHAT))).headers["x-request-id"]
        await lines(2)
    assert not any(text in file.read_text() for text in TEXTS)
    explained = engine.explained
    async with client(create_app(FakeEngines(engine), settings)) as http:
        listed = (await http.get("/omlxd/requests")).json()["requests"]
        assert [(each["id"], each["logged"]) for each in listed] == [(unknown, True), (id, True)]
        assert listed[1]["cached_tokens"] == USAGE.cached_tokens and not listed[1]["opening"]
        for asked in ({"request_id": id}, {"session": SESSION}, {"session": listed[1]["session"]}):
            found = msgspec.convert((await http.post("/omlxd/why-miss", json=asked)).json(), WhyMiss)
            assert found.logged and found.request_id == id and found.reached == USAGE.cached_tokens
            assert found.explanation.cause == "evicted" and found.explanation.missing == WHY.missing
            assert "which holds no texts" in as_text(found)
        for asked in ({"request_id": "last"}, {"request_id": unknown}):
            refused = await http.post("/omlxd/why-miss", json=asked)
            assert refused.status_code == 404 and unknown in refused.json()["error"]["message"]
    assert engine.explained is explained
    async with client(create_app(FakeEngines(engine))) as http:
        assert (await http.get("/omlxd/requests")).json()["requests"] == []
