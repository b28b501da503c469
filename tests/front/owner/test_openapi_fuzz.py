"""What the OpenAPI document says is sent, whatever that is; what comes back is what it says, and never a 500.

schemathesis makes the requests, from seeds that stay the same. The fast half asks the app before a fake
engine; the slow half a real daemon with a real (tiny) model, where templates, grammars and samplers meet
the same bodies.
"""

import asyncio
import json
import re
from collections import Counter
from typing import Any

import httpx
import pytest
import schemathesis
from daemon import Daemon
from fake_engine import FakeEngine, app_of
from fast_or_slow import counts
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from request_bodies import BOLD, VALID, ruined
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tools.clients.script_model import build_script_model

CHECKS = [
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]
GENERATING = ("/v1/messages", "/v1/chat/completions", "/v1/completions", "/v1/responses")
COUNTING = "/v1/messages/count_tokens"
ENDLESS = ("/omlxd/events", "/models/sse")
"""Streams without an end."""


def document() -> dict[str, Any]:
    async def get() -> Any:
        transport = httpx.ASGITransport(app=app_of(FakeEngine()))
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            return (await client.get("/openapi.json")).json()

    return asyncio.run(get())


DOCUMENT = document()
SCHEMA = schemathesis.openapi.from_dict(DOCUMENT)
SCHEMA.config.base_url = "http://127.0.0.1"
OPERATIONS = [
    (method, path)
    for path, methods in DOCUMENT["paths"].items()
    for method in methods
    if method != "parameters" and path not in ENDLESS
]


def examples(count: int):
    return settings(
        max_examples=count,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )


def cases(method: str, path: str) -> st.SearchStrategy:
    return SCHEMA[path][method].as_strategy()


class Asker:
    """Sends cases to an app or a daemon. `model`: put into bodies, as random names are all unknown."""

    def __init__(self, client: httpx.Client, model: str):
        self._client = client
        self._model = model

    def ask(self, case: Any) -> None:
        content = case.body
        if isinstance(content, dict):
            content = {**content, "model": self._model}
            if case.path in GENERATING:
                content |= {"max_output_tokens" if case.path == "/v1/responses" else "max_tokens": 8}
                content.pop("max_completion_tokens", None)
        has_body = "requestBody" in DOCUMENT["paths"][case.path][case.method.lower()]
        answer = self._client.request(
            case.method,
            case.formatted_path,
            content=json.dumps(content).encode() if has_body else None,
            headers={"content-type": "application/json"} if has_body else None,
        )
        # 503 and 529 say that it may go through later, and are in the document.
        assert answer.status_code < 500 or answer.status_code in (503, 529), answer.text
        if answer.headers["content-type"].startswith(("text/event-stream", "application/x-ndjson")):
            # The document doesn't tell a stream's events.
            assert answer.status_code == 200 and (b"data: " in answer.content or b'{"' in answer.content)
            assert b"went wrong inside" not in answer.content, answer.text
        else:
            case.validate_response(answer, checks=CHECKS)


class AppClient(httpx.Client):
    """A client of the app itself, with no socket."""

    def request(self, method: str, url: Any, **more: Any) -> httpx.Response:
        async def send() -> httpx.Response:
            transport = httpx.ASGITransport(app=app_of(FakeEngine()), raise_app_exceptions=False)
            async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
                return await client.request(method, url, **more)

        return asyncio.run(send())


@counts(2, 10)
@pytest.mark.parametrize(("method", "path"), OPERATIONS)
def test_the_app_keeps_its_document(method, path, count):
    @examples(count)
    @given(case=cases(method, path))
    def ask(case):
        Asker(AppClient(), "tiny").ask(case)

    ask()


# --------------------------------------------------------------------------- a real model behind it


@pytest.fixture(scope="module")
def daemon(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fuzz")
    # Random weights never come to an end: what a body without a limit gets must be short.
    with Daemon(folder, model=build_script_model(folder / "tiny", context=512)) as daemon:
        yield daemon
        print(sorted(Counter(re.findall(r"POST (\S+) .* status=(\d+)", daemon.logged())).items()))
        # Nothing that was asked has ended the engine.
        assert "Traceback" not in daemon.logged(), daemon.logged()[-3000:]
        assert daemon.state() == "ready"


@pytest.mark.slow
@pytest.mark.parametrize("path", [*GENERATING, COUNTING])
@examples(20)
@given(data=st.data())
def test_a_daemon_keeps_its_document(daemon, path, data):
    Asker(daemon.http, "tiny").ask(data.draw(cases("post", path)))


@pytest.mark.slow
@pytest.mark.parametrize("path", VALID)
@examples(20)
@given(data=st.data())
def test_a_daemon_takes_bodies_that_make_sense_and_those_that_no_longer_do(daemon, path, data):
    body = data.draw(VALID[path])
    if data.draw(st.booleans()):
        body = ruined(data, body)
    served_or_refused(daemon, path, body)


@pytest.mark.slow
@pytest.mark.parametrize("path", BOLD)
@examples(50)
@given(data=st.data())
def test_a_daemon_takes_or_refuses_bodies_that_ask_for_a_lot(daemon, path, data):
    served_or_refused(daemon, path, data.draw(BOLD[path]))


def served_or_refused(daemon: Daemon, path: str, body: dict[str, Any]) -> None:
    answer = daemon.post(path, json.dumps(body).encode())
    assert answer.status_code in (200, 400, 404), answer.text
    if answer.status_code == 200 and not body.get("stream"):
        answer.json()
    assert b"went wrong inside" not in answer.content
