"""No address in a request is fetched: whoever sends one is told so, and which field it was."""

from __future__ import annotations

import pytest
from addresses import Canary, Case, canary, cases_with  # noqa: F401 (canary: a fixture)
from app_client import client
from fake_engine import FakeEngine, app_of

CASES = [case for case in cases_with("") if not case.name.endswith("a schema")]
"""Schemas are read by the engine: test_safe.py, with a real one."""


@pytest.mark.parametrize("name", [case.name for case in CASES])
async def test_an_address_is_refused_by_its_field_and_not_fetched(name: str, canary: Canary):  # noqa: F811
    engine = FakeEngine()
    for url in (canary.url, "https://10.0.0.1/a.png", "file:///etc/passwd", "//localhost/a"):
        case: Case = next(case for case in cases_with(url) if case.name == name)
        async with client(app_of(engine)) as http:
            answer = await http.post(case.path, json={"model": "tiny", **case.fields})
        assert answer.status_code == 400, answer.text
        error = answer.json()["error"]
        assert error["type"] == "invalid_request_error" and error["message"].startswith(f"{case.param}: ")
        assert error.get("param", case.param) == case.param
        assert "not fetched" in error["message"]
    assert canary.connections() == 0 and not engine.requests
