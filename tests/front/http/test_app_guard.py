"""Who may ask, how much, and what the front process drags in."""

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from app_client import DOORS, EMBEDDING, PAGES, body, client, message_of
from fake_engine import FakeEngine, app_of, served


async def test_key():
    async with client(app_of(FakeEngine(), api_key="s3cret")) as http:
        for headers in (
            {},
            {"authorization": "Bearer wrong"},
            {"authorization": "s3cret"},
            {"x-api-key": "s3cre"},
            {"x-api-key": "schlüssel".encode("latin-1")},
        ):
            for path in DOORS:
                answer = await http.post(path, json=body(path), headers=headers)
                assert answer.status_code == 401 and answer.headers["www-authenticate"] == "Bearer"
                assert "s3cret" not in message_of(path, answer)
            for path in PAGES:
                assert (await http.get(path, headers=headers)).status_code == 401
            assert (await http.delete("/api/delete", headers=headers)).status_code == 401
        for headers in (
            {"authorization": "Bearer s3cret"},
            {"authorization": "bearer s3cret"},
            {"x-api-key": "s3cret"},
            {"x-api-key": "s3cret", "authorization": "Bearer other"},
        ):
            assert (await http.get("/v1/models", headers=headers)).status_code == 200
        assert (await http.get("/health")).status_code == 200


async def test_claude_code_finds_somebody_there():
    """It asks for this before it has a key, as it starts."""
    async with client(app_of(FakeEngine(), api_key="s3cret")) as http:
        assert (await http.head("/api/hello")).status_code == 200
        assert (await http.get("/api/hello")).json() == {"message": "hello"}


async def test_host():
    async with client(app_of(FakeEngine(), allowed_hosts=("my.name",))) as http:
        served = ("localhost", "LOCALHOST:1", "127.0.0.1:8000", "[::1]:8000", "my.name")
        for host in (*served, "localhost.", "localhost:", "[0:0:0:0:0:0:0:1]"):
            assert (await http.get("/health", headers={"host": host})).status_code == 200
        for host in ("evil.example", "localhost.evil.example:8000", "127.0.0.1.evil.example", "[::2]"):
            for path in PAGES:
                answer = await http.get(path, headers={"host": host})
                assert answer.status_code == 400 and "Host" in message_of(path, answer)
            for path in DOORS:
                answer = await http.post(path, json=body(path), headers={"host": host})
                assert answer.status_code == 400 and "Host" in message_of(path, answer)
    async with client(app_of(FakeEngine(), host="0.0.0.0", api_key="k")) as http:
        assert (await http.get("/health", headers={"host": "any.example"})).status_code == 200


NO_HOSTS = [
    *(
        "[::1]evil.com",
        "[::1",
        "::1",
        "[localhost]",
        "[]",
        "[::1].",
        "[::1]:80x",
        "localhost..",
        ".localhost",
    ),
    *(
        "local..host",
        ".",
        "localhost:80x",
        "localhost:-1",
        "localhost:65536",
        "localhost:80:80",
        "localhost:evil",
    ),
    *("localhost/x", "localhost?", "localhost#x", "a@localhost", "localhost@evil.com", "localhost, evil.com"),
    *(
        "localhost evil.com",
        "localhost\\evil.com",
        "localhost\xa0",
        "\xa0localhost",
        "localhost:\xb2",
        "[::1]@x",
    ),
]


@pytest.mark.parametrize("open_to_all", [False, True])
async def test_what_is_no_name_and_port_is_no_host(open_to_all: bool):
    settings = {"host": "0.0.0.0", "api_key": "k"} if open_to_all else {}
    async with client(app_of(FakeEngine(), **settings)) as http:
        for host in NO_HOSTS:
            answer = await http.get("/health", headers={"host": host.encode("latin-1")})
            assert answer.status_code == 400 and "Host" in answer.text, host


async def test_a_page_of_another_site_gives_no_orders():
    site = {"sec-fetch-site": "cross-site"}
    async with client(app_of(FakeEngine())) as http:
        for path in ("/models/load", "/models/unload", "/api/generate", "/api/pull"):
            answer = await http.post(path, json={"model": "tiny"}, headers=site)
            assert answer.status_code == 400 and "pages of other sites" in answer.text
        for path in ("/models/sse", "/api/ps"):
            assert (await http.get(path, headers=site)).status_code == 400


@pytest.mark.parametrize("path", DOORS)
async def test_browsers_may_not_post_without_a_preflight_and_get_no_cors(path: str):
    async with client(app_of(FakeEngine())) as http:
        raw = json.dumps(body(path))
        origin = {"origin": "https://evil.example"}
        for kind in ("text/plain", "application/x-www-form-urlencoded", None):
            headers = origin | ({"content-type": kind} if kind else {})
            assert (await http.post(path, content=raw, headers=headers)).status_code == 400
        headers = origin | {"content-type": "application/json; charset=utf-8"}
        answer = await http.post(path, content=raw, headers=headers)
        assert answer.status_code == 200 or (path in EMBEDDING and "makes no" in answer.text)
        preflight = await http.options(path, headers=origin)
        assert preflight.status_code == 405
        for response in (answer, preflight):
            assert not any(name.startswith("access-control") for name in response.headers)


@pytest.mark.slow
async def test_body_limit():
    engine = FakeEngine()
    big = b'{"x":"' + b"a" * 50_000_000 + b'"}'

    async def chunks():
        for _ in range(50):
            yield b"a" * 1_000_000

    async with served(app_of(engine)) as url, httpx.AsyncClient(base_url=url) as http:
        for path in DOORS:
            answer = await http.post(path, content=big)
            assert answer.status_code == 413 and "33554432" in message_of(path, answer)
        assert (await http.post("/v1/messages", content=chunks())).status_code == 413
        assert (await http.post("/v1/messages", json=body("/v1/messages"))).status_code == 200
    async with client(app_of(engine, max_body_bytes=100)) as http:
        for path in DOORS:
            assert (await http.post(path, content=b" " * 100)).status_code == 400
            assert (await http.post(path, content=b" " * 101)).status_code == 413


class Instant(asyncio.SelectorEventLoop):
    """Its clock stands still while anything runs, and jumps to what is next."""

    def __init__(self) -> None:
        super().__init__()
        self._now = 0.0
        select = self._selector.select  # type: ignore[attr-defined]

        def skip(timeout: float | None) -> list:
            self._now += timeout or 0.0
            return select(0)

        self._selector.select = skip  # type: ignore[attr-defined]

    def time(self) -> float:
        return self._now


@pytest.mark.parametrize(("pause", "taken"), [(20.0, 50), (40.0, 1)])
def test_who_is_still_writing_a_refused_body_sees_the_answer(pause: float, taken: int):
    """However long it takes, and its connection is not reset; but for one that does not go on."""
    parts = iter([{"type": "http.request", "body": b"x", "more_body": number < 49} for number in range(50)])
    sent: list[tuple[int, bool]] = []
    done = 0

    async def receive():
        nonlocal done
        if done:
            await asyncio.sleep(pause)
        done += 1
        return next(parts)

    async def send(message):
        if message["type"] == "http.response.body":
            sent.append((done, message["more_body"]))

    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/messages",
        "query_string": b"",
        "headers": [(b"host", b"localhost"), (b"content-length", b"50000000")],
    }
    with asyncio.Runner(loop_factory=Instant) as runner:
        runner.run(app_of(FakeEngine())(scope, receive, send))
    assert sent == [(0, True), (taken, False)], "the answer is out before the rest of the body is read"


def test_the_app_imports_nothing_heavy():
    script = "import sys, omlxd.front.app; print(*{name.partition('.')[0] for name in sys.modules})"
    command, repo = [sys.executable, "-c", script], Path(__file__).resolve().parents[3]
    out = subprocess.run(command, cwd=repo, capture_output=True, text=True, check=True)
    heavy = {"mlx", "mlx_lm", "numpy", "transformers", "torch", "huggingface_hub", "hypercorn", "httpx"}
    assert "starlette" in out.stdout.split()
    assert not heavy & set(out.stdout.split())
