"""Who goes first, as a request, its header and its key say."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from app_client import DOORS, body, client
from fake_engine import FakeEngine, app_of

from omlxd.config.keys import add_key, keys_path
from omlxd.front.http.settings import KeyRing

CHAT = "/v1/chat/completions"
ANSWERING = [*DOORS[: DOORS.index("/api/show")], "/completion", "/v1beta/models/tiny:generateContent"]


@pytest.mark.parametrize("path", ANSWERING)
async def test_every_door_reads_it(path, caplog):
    caplog.set_level("INFO", "omlxd.access")
    engine = FakeEngine()
    async with client(app_of(engine)) as http:
        for more in ({}, {"priority": 3}, {"priority": -(2**63)}, {"priority": 2.0}, {"priority": None}):
            assert (await http.post(path, json=body(path, **more))).status_code == 200
        assert [request.priority for request in engine.requests] == [0, 3, -(2**63), 2, 0]
        listed = (await http.get("/omlxd/requests")).json()["requests"]
        assert [each["priority"] for each in listed] == [0, 2, -(2**63), 3, 0], "the newest first"
        assert caplog.text.count(" priority=") == 3 and " priority=3" in caplog.text
        refused = await http.post(path, json=body(path, priority="high"))
        assert refused.status_code == 400 and "priority" in refused.text
        assert not re.search(r"ignored=\S*priority", caplog.text), "it is no field that nobody reads"


@pytest.mark.parametrize("value", ["", "1", 1.5, True, 2**63, [1], {"level": 1}])
async def test_what_is_no_number_is_refused_by_name(value):
    engine = FakeEngine()
    async with client(app_of(engine)) as http:
        error = (await http.post(CHAT, json=body(CHAT, priority=value))).json()["error"]
        assert error["param"] == "priority" and error["type"] == "invalid_request_error"
        for word in ("", "high", "1"):
            refused = await http.post(CHAT, json=body(CHAT), headers={"x-omlxd-priority": word})
            error = refused.json()["error"]
            assert refused.status_code == 400 and error["param"] == "x-omlxd-priority"
            assert "interactive or background" in error["message"]
    assert not engine.requests


async def test_the_body_goes_before_the_header_and_neither_before_the_key(tmp_path: Path):
    path, engine = keys_path(tmp_path), FakeEngine()
    laptop, batch = add_key(path, "laptop"), add_key(path, "batch", "background")

    async def asked(key: str, word: str = "", **more: Any) -> int:
        headers = {"x-api-key": key} | ({"X-Omlxd-Priority": word} if word else {})
        answer = await http.post(CHAT, json=body(CHAT, **more), headers=headers)
        assert answer.status_code == 200
        return engine.requests[-1].priority

    async with client(app_of(engine, keys=KeyRing("own", path))) as http:
        assert [await asked(key) for key in ("own", laptop, batch)] == [0, 0, 1]
        assert [await asked(laptop, word) for word in ("background", "Interactive")] == [1, 0]
        assert [await asked(batch, word) for word in ("background", "interactive")] == [1, 1]
        numbers = [(await asked(key, "background", priority=-7)) for key in ("own", laptop, batch)]
        assert numbers == [-7, 0, 1], "a key is a floor; that of --api-key is none"
        assert [await asked(batch, priority=number) for number in (0, 5)] == [1, 5]
