"""What nobody can do to the daemon, or through it: a test for each promise that has no file of its own.

Keys are in test_keys.py, Host and Origin in test_app_guard.py, bodies in test_bad_input.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import stat
from collections.abc import AsyncIterator
from typing import Any, cast
from urllib.parse import quote

import h11
import httpx
import pytest
from addresses import Canary, canary, cases_with  # noqa: F401 (canary: a fixture)
from app_client import PATHS, body, client, message_of
from daemon import BLOCK, Daemon, prose, wait_until
from daemon import body as message
from fake_engine import FakeEngine, app_of
from hypercorn.asyncio.worker_context import WorkerContext
from hypercorn.events import Closed, RawData
from hypercorn.typing import ConnectionState

from omlxd.chat import Finished, TextDelta, Usage
from omlxd.front.http import hypercorn_fixes
from omlxd.front.http.hypercorn_fixes import Http1, Turns
from omlxd.front.process import serve
from omlxd.front.process.sockets import bind
from tests.front.process.test_serve import Daemon as StubDaemon
from tests.models.test_resolve import make

# --------------------------------------------------------------------------- browsers

PAGE = {"origin": "https://chat.example"}


async def test_cors_is_opened_for_the_pages_that_are_named_and_for_no_other():
    async with client(app_of(FakeEngine(), cors_origins=("https://chat.example",), api_key="k")) as http:
        asks = {"access-control-request-method": "POST", "access-control-request-headers": "authorization"}
        preflight = await http.options("/v1/messages", headers=PAGE | asks)
        assert preflight.status_code == 200
        assert preflight.headers["access-control-allow-origin"] == "https://chat.example"
        assert "authorization" in preflight.headers["access-control-allow-headers"].lower()
        assert "access-control-allow-credentials" not in preflight.headers
        other = {"origin": "https://evil.example"}
        refused = await http.options("/v1/messages", headers=other | asks)
        assert refused.status_code == 400 and "access-control-allow-origin" not in refused.headers

        key = {"x-api-key": "k"}
        answer = await http.post("/v1/messages", json=body("/v1/messages"), headers=PAGE | key)
        assert answer.status_code == 200
        assert answer.headers["access-control-allow-origin"] == "https://chat.example"
        # A page must be able to read why it was refused.
        error = await http.post("/v1/messages", json=body("/v1/messages"), headers=PAGE)
        assert error.status_code == 401 and "access-control-allow-origin" in error.headers
        answer = await http.get("/v1/models", headers=other | key)
        assert "access-control-allow-origin" not in answer.headers


async def test_another_name_of_this_machine_is_served_when_it_is_allowed():
    async with client(app_of(FakeEngine(), allowed_hosts=("models.lan",))) as http:
        assert (await http.get("/health", headers={"host": "models.lan:8000"})).status_code == 200
        assert (await http.get("/health", headers={"host": "other.lan"})).status_code == 400


async def test_a_websocket_is_refused():
    async with client(app_of(FakeEngine())) as http:
        headers = {"connection": "upgrade", "upgrade": "websocket", "sec-websocket-version": "13"}
        assert (await http.get("/v1/chat/completions", headers=headers)).status_code == 405


# --------------------------------------------------------------------------- slow and endless clients


@contextlib.asynccontextmanager
async def hypercorn(app: Any, **changes: Any) -> AsyncIterator[int]:
    """The app as `omlxd serve` runs it, but for `changes` of Hypercorn's settings; yields the port."""
    from hypercorn.asyncio import serve as run

    listening = bind("127.0.0.1", 0)
    port = listening.getsockname()[1]
    config = serve._hypercorn_config([listening])
    for name, value in changes.items():
        assert hasattr(config, name)
        setattr(config, name, value)
    stop = asyncio.Event()
    server = asyncio.create_task(run(app, config, shutdown_trigger=stop.wait))
    try:
        yield port
    finally:
        stop.set()
        await asyncio.wait_for(server, 60)


async def ended(reader: asyncio.StreamReader) -> bytes:
    """All that the server still says before it hangs up, soon."""
    said = b""
    with contextlib.suppress(ConnectionResetError):  # It says so if more was on its way to it.
        async with asyncio.timeout(60):
            while part := await reader.read(1 << 16):
                said += part
    return said


async def test_headers_that_come_drop_by_drop_end_at_a_deadline():
    assert serve.KEEP_ALIVE_S <= 120
    async with hypercorn(app_of(FakeEngine()), keep_alive_timeout=0.5) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /health HTTP/1.1\r\nHost: localhost\r\n")

        async def drip() -> None:
            with contextlib.suppress(ConnectionError):
                while True:
                    writer.write(b"x-a: b\r\n")
                    await writer.drain()
                    await asyncio.sleep(0.05)

        dripping = asyncio.create_task(drip())
        assert b"200" not in await ended(reader)
        dripping.cancel()
        writer.close()


async def test_headers_without_end_are_refused():
    async with hypercorn(app_of(FakeEngine())) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /health HTTP/1.1\r\nHost: localhost\r\nx-a: " + b"a" * (serve.MAX_HEADERS + 1000))
        assert (await ended(reader)).startswith((b"HTTP/1.1 4", b""))
        async with httpx.AsyncClient(trust_env=False) as http:
            assert (await http.get(f"http://127.0.0.1:{port}/health")).status_code == 200
        writer.close()


async def test_headers_are_bounded_however_they_come():
    app = app_of(FakeEngine())
    async with hypercorn(app) as port, httpx.AsyncClient(trust_env=False, timeout=60) as http:
        headers = {"x-a": "a" * (serve.MAX_HEADERS - 1000)}
        assert (await http.get(f"http://127.0.0.1:{port}/health", headers=headers)).status_code == 200

    # Whole with the second read of the socket: h11 has nothing against them then.
    said: list[Any] = []

    async def send(event: Any) -> None:
        said.append(event)

    with bind("127.0.0.1", 0) as listening:
        config = serve._hypercorn_config([listening])
        context: Any = WorkerContext(None)
        made = Http1(
            cast(Any, app), config, context, cast(Any, None), ConnectionState({}), False, None, None, send
        )
        head = b"GET /health HTTP/1.1\r\nHost: localhost\r\nx-a: " + b"a" * serve.MAX_HEADERS + b"\r\n\r\n"
        for part in (head[:60_000], head[60_000:]):
            await made.handle(RawData(part))
    answer = b"".join(event.data for event in said if isinstance(event, RawData))
    assert answer.startswith(b"HTTP/1.1 431 ") and b"connection: close" in answer.lower()
    assert isinstance(said[-1], Closed)


@pytest.mark.parametrize(
    "limits", [{"body_pause_s": 0.3}, {"body_total_s": 0.5}], ids=["a pause", "drop by drop"]
)
async def test_a_body_that_does_not_come_ends_at_a_deadline(limits: dict[str, float]):
    engine = FakeEngine()
    async with hypercorn(app_of(engine, drain_s=0.1, **limits)) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        head = "POST /v1/messages HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        writer.write(f"{head}Content-Length: 1000\r\n\r\n{{".encode())
        if "body_total_s" in limits:

            async def drip() -> None:
                with contextlib.suppress(ConnectionError):
                    while True:
                        writer.write(b" ")
                        await writer.drain()
                        await asyncio.sleep(0.05)

            dripping = asyncio.create_task(drip())
        said = await ended(reader)
        assert said.startswith(b"HTTP/1.1 408") and b"did not come in time" in said
        if "body_total_s" in limits:
            dripping.cancel()
        writer.close()


@pytest.mark.slow
async def test_a_long_answer_is_no_slow_body():
    from omlxd.chat import Finished, TextDelta, Usage

    engine = FakeEngine([TextDelta("a"), 2.5, TextDelta("b"), Finished("stop", Usage())])
    async with hypercorn(app_of(engine, body_pause_s=1.5, body_total_s=2.0)) as port:
        async with httpx.AsyncClient(trust_env=False) as http:
            answer = await http.post(
                f"http://127.0.0.1:{port}/v1/chat/completions", json=body("/v1/chat/completions")
            )
        assert answer.status_code == 200


LOCAL = b"HTTP/1.1\r\nHost: localhost\r\n"


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (
            b"GET /health " + LOCAL + b"Connection: Upgrade, HTTP2-Settings\r\n"
            b"Upgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAAP__\r\n\r\n",
            b"200",
        ),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"4"),
        (
            b"GET /v1/models " + LOCAL + b"Connection: Upgrade\r\nUpgrade: websocket\r\n"
            b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n",
            b"426",
        ),
        (b"GET /health " + LOCAL + b"Host: evil.example\r\n\r\n", b"400"),
        (b"GET /health HTTP/1.1\r\n\r\n", b"400"),
        (
            b"POST /v1/messages "
            + LOCAL
            + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
            b"400",
        ),
        # A target with scheme and host: the host is the request's, whatever its Host says.
        (b"GET http://localhost/health " + LOCAL + b"\r\n", b"200"),
        (b"GET HTTP://127.0.0.1:1/health?a=http://b/ HTTP/1.1\r\nHost: evil.example\r\n\r\n", b"200"),
        (b"HEAD http://localhost " + LOCAL + b"\r\n", b"200"),
        (b"GET http://evil.example/health " + LOCAL + b"\r\n", b"400"),
        (b"GET http://localhost@evil.example/health " + LOCAL + b"\r\n", b"400"),
        (b"GET http:///health " + LOCAL + b"\r\n", b"400"),
        (b"GET ftp://localhost/health " + LOCAL + b"\r\n", b"400"),
        (b"GET health " + LOCAL + b"\r\n", b"400"),
    ],
    ids=[
        *("h2c", "h2", "websocket", "two hosts", "no host", "two lengths"),
        *("absolute", "absolute alone", "no path", "other host", "user", "empty host", "scheme", "no slash"),
    ],
)
async def test_nothing_but_plain_http_1(request_: bytes, status: bytes):
    async with hypercorn(app_of(FakeEngine())) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(request_)
        said = await asyncio.wait_for(reader.readline(), 60)
        assert said.startswith(b"HTTP/1.1 " + status), said
        writer.close()


def asked(path: str, **more: Any) -> bytes:
    """A request of the door `path`, as bytes."""
    content = json.dumps(body(path, **more)).encode()
    return b"POST %s %sContent-Length: %d\r\n\r\n%s" % (path.encode(), LOCAL, len(content), content)


async def test_nothing_follows_a_request_with_two_lengths():
    """Where the next one begins is anybody's guess."""
    content = json.dumps(body("/v1/messages")).encode()
    lengths = b"Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n"
    chunked = b"%x\r\n%s\r\n0\r\n\r\n" % (len(content), content)
    async with hypercorn(app_of(FakeEngine())) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"POST /v1/messages " + LOCAL + lengths + chunked + b"GET /health " + LOCAL + b"\r\n")
        said = await ended(reader)
        assert said.startswith(b"HTTP/1.1 200") and said.count(b"HTTP/1.1") == 1
        writer.close()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_closes_its_sending_half_is_answered(stream: bool):
    """Here in the middle of its answer, too: what it is sent to see whether it is there changes nothing."""
    said = [TextDelta("Hello"), 0.4, TextDelta(" there"), 0.4, Finished("stop", Usage())]
    async with hypercorn(app_of(FakeEngine(said))) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(asked("/v1/chat/completions", stream=stream))
        writer.write_eof()
        parser = h11.Connection(h11.CLIENT)
        parser.send(h11.Request(method="GET", target="/", headers=[("host", "x")]))
        parser.send(h11.EndOfMessage())
        parser.receive_data(await ended(reader))
        events: list[Any] = []
        while not events or not isinstance(events[-1], h11.EndOfMessage):
            events.append(parser.next_event())
            assert events[-1] is not h11.NEED_DATA
        text = b"".join(event.data for event in events if isinstance(event, h11.Data))
        assert b"Hello" in text and b" there" in text and (not stream or b"[DONE]" in text)
        writer.close()


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/chat/completions", "/api/chat"])
@pytest.mark.parametrize("moment", ["before", "waits", "streams"])
async def test_a_client_that_left_costs_nothing_more(path: str, moment: str):
    """No request begins of one that is gone already; one that has begun ends, at once."""
    engine = FakeEngine([TextDelta("Hello"), 3600.0] if moment == "streams" else [3600.0])
    async with hypercorn(app_of(engine)) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(asked(path, stream=moment == "streams"))
        async with asyncio.timeout(60):
            while moment != "before" and not engine.requests:
                await asyncio.sleep(0.01)
            if moment == "streams":
                await reader.readuntil(b"Hello")
            writer.close()
            await writer.wait_closed()
            if moment != "before":
                await engine.closed.wait()
        if moment == "before":
            async with httpx.AsyncClient(trust_env=False) as http:
                await http.get(f"http://127.0.0.1:{port}/v1/models")  # Behind it, in order of arrival.
            assert not engine.requests


async def test_requests_begin_one_a_turn_and_probes_before_all():
    turns, began = Turns(), []

    async def begin(name: int) -> None:
        await turns.wait()
        began.append((name, at[0]))

    at = [0]
    tasks = [asyncio.create_task(begin(name)) for name in range(6)]
    await asyncio.sleep(0)
    tasks[3].cancel()
    for _ in range(8):
        at[0] += 1
        await asyncio.sleep(0)
    names, when = zip(*began, strict=True)
    assert names == (0, 1, 2, 4, 5) and len(set(when)) == len(when)
    assert {b"/health", b"/ready", b"/metrics"} <= hypercorn_fixes.AT_ONCE


async def test_connections_that_clients_close_are_closed_at_once():
    """Each costs a file: kept until their idle time ends, they would use up all there are."""
    import psutil

    front = psutil.Process()
    async with hypercorn(app_of(FakeEngine())) as port:
        before = front.num_fds()
        for at in range(30):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            if at % 3:
                writer.write(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
                assert await reader.readuntil(b"\r\n\r\n")
            if at % 3 == 2:
                writer.write(b"GET /hea")
            writer.close()
            await writer.wait_closed()
        async with asyncio.timeout(60):
            while front.num_fds() > before:
                await asyncio.sleep(0.02)


# --------------------------------------------------------------------------- other addresses, other files


NAMES = ["../tiny", "/etc/passwd", "..", ".", "a/../../tiny", "~/tiny", "file:///etc/passwd", "\x00", "C:\\x"]


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory):
    before = os.umask(0o022)
    try:
        with Daemon(tmp_path_factory.mktemp("safe")) as daemon:
            yield daemon
    finally:
        os.umask(before)


def test_no_address_in_a_request_is_ever_fetched(daemon: Daemon, canary: Canary):  # noqa: F811
    """Through the engine too, which reads schemas; what each request is told: test_addresses.py."""
    for url in (canary.url, canary.url.replace("127.0.0.1", "localhost"), "file:///etc/passwd"):
        for case in cases_with(url):
            answer = daemon.post(case.path, {"model": daemon.model, **case.fields})
            assert "root:" not in answer.text
            # A schema that is not strict is left out, and its answer says so.
            assert answer.status_code == 400 or "not_enforced" in answer.text, answer.text
    assert canary.connections() == 0


@pytest.mark.parametrize("name", NAMES)
def test_a_models_name_is_never_a_path(daemon: Daemon, name: str):
    for path in PATHS:
        answer = daemon.post(path, body(path, model=name))
        assert answer.status_code in (400, 404), answer.text
        assert "root:" not in message_of(path, answer)
    assert daemon.engine_pid()


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory):
    """A daemon with a stub engine and a model dir, beside a model that is not in it."""
    root = tmp_path_factory.mktemp("house")
    for name in ("models/tiny", "models/org/deep", "outside"):
        make(root / name)
    (root / "models/loop").symlink_to(root / "models")
    daemon = StubDaemon(root, "--model-dir", str(root / "models"), "--no-hf-cache", model=False)
    yield daemon
    daemon.process.kill()
    daemon.process.wait()
    daemon.process.stdout.close()  # type: ignore[union-attr]
    daemon.log.close()


def test_no_name_leads_out_of_the_model_dir(house: StubDaemon):
    outside = house.home / "outside"
    names = ["../outside", "tiny/../../outside", str(outside), "org/../tiny", "loop/../../outside"]
    with httpx.Client(base_url=house.url, timeout=120, trust_env=False) as http:
        served = [model["id"] for model in http.get("/v1/models").json()["data"]]
        assert {"tiny", "org/deep"} <= set(served) and not any("outside" in name for name in served)
        for name in names:
            given = {"model": name}
            for verb in ("load", "unload", "pin"):
                answer = http.post(f"/omlxd/models/{verb}", json={**given, "pinned": True})
                assert answer.status_code in (400, 404), (verb, name, answer.text)
            answer = http.post("/omlxd/models/alias", json={"alias": "x", **given})
            assert answer.status_code in (400, 404)
            assert http.get(f"/omlxd/models/{quote(name, safe='')}").status_code in (400, 404)
            answer = http.post("/v1/completions", json={**given, "prompt": "x"})
            assert answer.status_code in (400, 404), answer.text
    assert "outside" not in house.notes()


def test_no_words_of_a_conversation_are_in_the_log_of_a_real_engine(daemon: Daemon):
    word = "Quetzalcoatlus"
    before = daemon.logged().count("/v1/")
    text = f"{word} and {word} again. " * 30
    tool = {"name": "look", "description": word, "input_schema": {"type": "object", "title": word}}
    assert daemon.messages(text, max_tokens=4, system=word, tools=[tool], stop_sequences=[word])
    assert daemon.chat(text, max_tokens=4, user=word, stop=[word], metadata={"x": word})
    with daemon.stream("/v1/messages", message(daemon.model, text, max_tokens=3)) as answer:
        assert answer.read()
    given = {"model": daemon.model}

    def says(**turn: object) -> dict[str, Any]:
        return {**given, "max_tokens": 1, "messages": [turn]}

    for path, broken in (
        (
            "/v1/messages",
            says(role=word, content=text),
        ),
        ("/v1/messages", {**given, "max_tokens": word, "messages": text}),
        (
            "/v1/chat/completions",
            says(role="user", content={word: 1}),
        ),
        (
            "/v1/chat/completions",
            says(role="user", content=[{"type": word}]),
        ),
        ("/v1/chat/completions", {**given, "messages": [], "response_format": {"type": word}}),
        ("/v1/responses", {**given, "input": text, "previous_response_id": "resp_x"}),
        ("/v1/responses", {**given, "input": text, "text": {"format": {"type": word}}}),
        ("/v1/completions", {**given, "prompt": [[word]]}),
    ):
        answer = daemon.http.post(path, content=json.dumps(broken).encode())
        assert 400 <= answer.status_code < 500, (path, answer.text)
    wait_until(
        lambda: daemon.logged().count("/v1/") >= before + 11, why=daemon.logged
    )  # A line follows its answer.
    log = daemon.logged()
    assert [line for line in log.splitlines() if word in line] == []


@pytest.mark.parametrize("path", ["/v1/models/../../etc/passwd", "/v1/models/%2e%2e%2fetc", "//etc/passwd"])
def test_a_path_is_never_a_file(daemon: Daemon, path: str):
    with contextlib.closing(
        socket.create_connection(("127.0.0.1", int(daemon.url.rpartition(":")[2])))
    ) as raw:
        raw.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
        raw.settimeout(60)
        said = b""
        while part := raw.recv(4096):
            said += part
    assert said.startswith(b"HTTP/1.1 404") and b"root:" not in said


def test_what_the_daemon_keeps_is_its_owners_alone(daemon: Daemon):
    daemon.messages(prose(BLOCK * 2), max_tokens=2)
    daemon.settled()
    base = daemon.home / "omlxd"
    found = [base, *base.rglob("*")]
    assert any(path.suffix == ".safetensors" for path in found)
    loose = {}
    for path in found:
        with contextlib.suppress(FileNotFoundError):  # A temporary one.
            if (mode := path.lstat().st_mode) & 0o077:
                loose[str(path.relative_to(base))] = oct(stat.S_IMODE(mode))
    assert loose == {}
