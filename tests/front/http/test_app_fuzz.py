"""No body makes a 500, and every refusal has the shape of its protocol.

Bodies begin as requests that make sense, and lose that in up to two places.
"""

import asyncio
import json

import httpx
import pytest
from fake_engine import FakeEngine, app_of
from fast_or_slow import counts
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from request_bodies import BOLD, VALID, junk, ruined

PATHS = [*VALID]


async def post(path: str, content: bytes) -> httpx.Response:
    transport = httpx.ASGITransport(app=app_of(FakeEngine()), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
        return await client.post(path, content=content)


def status(path: str, content: bytes) -> int:
    answer = asyncio.run(post(path, content))
    assert answer.status_code in (200, 400, 404), answer.text
    if answer.status_code != 200:
        given = answer.json()
        assert given["error"]["message"]
        assert ("request_id" in given) is path.startswith("/v1/messages")
    return answer.status_code


def quick(examples: int):
    return settings(max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck))


@counts(10, 50)
@pytest.mark.parametrize("path", PATHS)
def test_bodies_that_make_sense(path, count):
    @quick(count)
    @given(body=VALID[path])
    def check(body):
        assert status(path, json.dumps(body).encode()) == 200

    check()


@counts(12, 100)
@pytest.mark.parametrize("path", PATHS)
def test_bodies_that_no_longer_do(path, count):
    @quick(count)
    @given(data=st.data())
    def check(data):
        # json.dumps writes lone surrogates as escapes, as a careless client would.
        status(path, json.dumps(ruined(data, data.draw(VALID[path]))).encode())

    check()


@counts(12, 60)
@pytest.mark.parametrize("path", PATHS)
def test_any_bytes(path, count):
    @quick(count)
    @given(content=st.binary(max_size=60) | junk.map(lambda value: json.dumps(value).encode()))
    @example(content=b"[" * 100_000)
    @example(content=b'{"messages":' * 50_000)
    @example(content=b'{"model":"tiny","messages":[{"role":"user","content":"\\udfff"}]}')
    @example(content=b'{"model":"tiny","prompt":"x","messages":[],"temperature":1e400}')
    @example(content=b"\xef\xbb\xbf{}")
    def check(content):
        status(path, content)

    check()


@counts(12, 60)
@pytest.mark.parametrize("path", BOLD)
def test_bodies_that_ask_for_a_lot(path, count):
    @quick(count)
    @given(body=BOLD[path])
    def check(body):
        status(path, json.dumps(body).encode())

    check()
