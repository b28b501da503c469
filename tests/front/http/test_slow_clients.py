"""Clients that read slowly, or are many: nobody else waits for them, and memory stays bounded.

Clients that *send* slowly are in test_safe.py. The heavier ones, over a real daemon, are marked slow.
"""

import asyncio
import contextlib
import json
import resource
import socket
import time
from urllib.parse import urlsplit

import httpx
import psutil
import pytest
from fake_engine import USAGE, FakeEngine, app_of, served

from omlxd.chat import Event, Failed, Finished, GenerateRequest, Progress, RawPrompt, TextDelta
from omlxd.front.http.sending.event_pump import BATCH, EventPump
from omlxd.front.http.sending.slow_reader import PIECE_BYTES, PacedSend, TooSlow
from tests.front.process.test_serve import Daemon, start  # noqa: F401  (a fixture)

PIECE = TextDelta("x" * 2000)
LONG = [step for _ in range(8_000) for step in (PIECE, 0.0)]
"""16 MB, more than a socket's buffers hold, and no end."""


def request_of(url: str, path: str, body: dict) -> bytes:
    content = json.dumps(body).encode()
    host = urlsplit(url).netloc
    head = f"POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
    return head.encode() + f"Content-Length: {len(content)}\r\n\r\n".encode() + content


async def connect(url: str, receive_bytes: int = 4096):
    """A connection that holds little of what it was sent."""
    where = urlsplit(url)
    raw = socket.socket()
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    raw.setblocking(False)
    await asyncio.get_running_loop().sock_connect(raw, (where.hostname, where.port))
    return await asyncio.open_connection(sock=raw, limit=1)


REQUEST = GenerateRequest(RawPrompt("hi"))
ASKED = {"model": "tiny", "prompt": "hi", "max_tokens": 5}

# --------------------------------------------------------------------------- reading


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_does_not_read_is_let_go(stream):
    engine = FakeEngine(LONG if stream else [*LONG, Finished("stop", USAGE)])
    async with served(app_of(engine, send_pause_s=0.5)) as url, httpx.AsyncClient() as other:
        reader, writer = await connect(url)
        writer.write(request_of(url, "/v1/completions", {**ASKED, "stream": stream}))
        if stream:  # its request ends in the engine, though it is connected still
            await asyncio.wait_for(engine.closed.wait(), 60)
        else:
            while not engine.finished:
                await asyncio.sleep(0.05)
        engine.script = FakeEngine().script
        answer = await other.post(url + "/v1/completions", json=ASKED)
        assert answer.status_code == 200
        port = writer.get_extra_info("sockname")[1]
        async with asyncio.timeout(60):  # The server holds the connection no longer.
            while any(c.raddr and c.raddr.port == port for c in psutil.Process().net_connections("tcp")):
                await asyncio.sleep(0.05)
        assert await rest_of(reader) < 12_000_000
        writer.close()


async def rest_of(reader: asyncio.StreamReader) -> int:
    """Bytes that still come until the connection ends, soon."""
    got = 0
    with contextlib.suppress(ConnectionError):
        async with asyncio.timeout(60):
            while data := await reader.read(1 << 20):
                got += len(data)
    return got


async def test_a_client_that_reads_a_byte_at_a_time_is_let_go_too():
    engine = FakeEngine(LONG)
    async with served(app_of(engine, send_pause_s=0.5)) as url:
        reader, writer = await connect(url)
        writer.write(request_of(url, "/v1/completions", {**ASKED, "stream": True}))
        with contextlib.suppress(ConnectionError):
            async with asyncio.timeout(60):
                # What the sockets hold comes to an end, though never by itself at this rate.
                while not engine.closed.is_set() and await reader.read(1):
                    await asyncio.sleep(0.01)
        assert engine.closed.is_set()
        writer.close()


async def test_a_slow_client_that_reads_on_gets_everything():
    engine = FakeEngine([*LONG[:1000], Finished("stop", USAGE)])
    async with served(app_of(engine, send_pause_s=10.0)) as url:
        reader, writer = await connect(url)
        writer.write(request_of(url, "/v1/completions", {**ASKED, "stream": True}))
        got = b""
        async with asyncio.timeout(60):
            while b"[DONE]" not in got[-200:]:
                got += await reader.read(1 << 15)
                await asyncio.sleep(0.002)
        assert got.count(b"x" * 2000) == 500
        writer.close()


async def test_who_counts_events_and_fails_keeps_no_client_waiting():
    def broken(event: Event) -> None:
        raise ValueError(event)

    pump = EventPump(FakeEngine([PIECE, Finished("stop", USAGE)]).generate(REQUEST), broken)
    events = await asyncio.wait_for(pump.next(None), 60)
    assert events[0] == PIECE and isinstance(events[-1], Failed)
    await pump.close()


async def test_an_answer_that_nobody_reads_is_kept_up_to_a_limit():
    engine = FakeEngine([*[TextDelta("y" * 100)] * 1000, Finished("stop", USAGE)])
    pump = EventPump(engine.generate(REQUEST), unread_bytes=20_000)
    await asyncio.wait_for(engine.closed.wait(), 60)
    events = await pump.next(1.0)
    assert 20_000 / 300 < len(events) < 20_000 / 200
    assert isinstance(events[-1], Failed) and "slowly" in events[-1].message
    await pump.close()


async def test_events_are_given_out_in_bounded_numbers():
    engine = FakeEngine([Progress(0, 9), *[TextDelta("y")] * 600, Finished("stop", USAGE)])
    pump = EventPump(engine.generate(REQUEST))
    await asyncio.sleep(0.05)
    sizes = [len(await pump.next(1.0)) for _ in range(3)]
    assert sizes == [BATCH, BATCH, 602 - 2 * BATCH]
    assert await pump.next(0.01) == []
    await pump.close()


async def test_large_bodies_leave_in_pieces():
    sent = []

    async def send(message):
        sent.append(message)

    body = bytes(range(256)) * 1024
    await PacedSend(send, 1.0)({"type": "http.response.body", "body": body})
    assert b"".join(message["body"] for message in sent) == body
    assert [len(message["body"]) for message in sent] == [PIECE_BYTES] * 4
    assert [message["more_body"] for message in sent] == [True, True, True, False]


async def test_a_send_that_hangs_is_given_up():
    async def send(message):
        await asyncio.sleep(600)

    with pytest.raises(TooSlow):
        await PacedSend(send, 0.05)({"type": "http.response.body", "body": b"x"})


# --------------------------------------------------------------------------- bodies


async def test_bodies_together_are_bounded():
    app = app_of(FakeEngine(), bodies_bytes=100_000)
    async with served(app) as url, httpx.AsyncClient(base_url=url) as client:
        _, writer = await connect(url)
        whole = request_of(url, "/v1/completions", {**ASKED, "prompt": "x" * 60_000})
        writer.write(whole[:-10])
        await writer.drain()
        large = {**ASKED, "prompt": "y" * 60_000}
        async with asyncio.timeout(60):  # Until what was written has been read.
            while (refused := await client.post("/v1/completions", json=large)).status_code == 200:
                pass
        assert refused.status_code == 503 and 0 < int(refused.headers["retry-after"]) <= 60
        assert (await client.post("/v1/completions", json=ASKED)).status_code == 200
        refused = await client.post("/v1/messages", json={**large, "messages": []})
        assert refused.status_code in (503, 529) and refused.json()["type"] == "error"
        writer.write(whole[-10:])
        async with asyncio.timeout(60):  # The first one is done soon: there is room again.
            while (await client.post("/v1/completions", json=large)).status_code != 200:
                pass
        writer.close()


# --------------------------------------------------------------------------- many, over a real daemon


def resident(daemon: Daemon) -> float:
    """MiB of the front."""
    return psutil.Process(daemon.process.pid).memory_info().rss / 2**20


@contextlib.contextmanager
def files(count: int):
    """This process may have `count` files open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < count:
        pytest.skip(f"no more than {hard} files may be open")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, count), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.slow
def test_more_than_may_wait_are_told_when_to_come_again(start):  # noqa: F811
    daemon = start("--max-concurrent-requests", "8")
    assert daemon.complete("a").status_code == 200

    async def ask() -> list[httpx.Response]:
        limits = httpx.Limits(max_connections=200)
        async with httpx.AsyncClient(
            base_url=daemon.url, timeout=120, limits=limits, trust_env=False
        ) as client:
            body = {"model": daemon.model, "prompt": "gate done"}
            asked = [asyncio.create_task(client.post("/v1/completions", json=body)) for _ in range(100)]
            async with asyncio.timeout(60):
                while sum(each.done() for each in asked) < 28:
                    await asyncio.sleep(0.02)
            (daemon.home / "gate").touch()
            return await asyncio.gather(*asked)

    before = resident(daemon)
    answers = asyncio.run(ask())
    refused = [answer for answer in answers if answer.status_code != 200]
    # 8 that run, 64 that wait.
    assert len(answers) - len(refused) == 72
    assert all(a.status_code == 503 and 1 <= int(a.headers["retry-after"]) <= 60 for a in refused)
    assert resident(daemon) - before < 30
    assert daemon.complete("again").status_code == 200


@pytest.mark.slow
def test_a_thousand_idle_connections(start):  # noqa: F811
    daemon = start()
    assert daemon.complete("a").status_code == 200
    before = resident(daemon)
    where = urlsplit(daemon.url)
    with files(1200), contextlib.ExitStack() as stack:
        for _ in range(1000):
            stack.enter_context(socket.create_connection((where.hostname, where.port)))
        assert daemon.complete("b").json()["choices"][0]["text"] == "b"
        grown = resident(daemon) - before
        print(f"1000 idle connections: {grown:.1f} MiB")
        assert grown < 100
    assert daemon.complete("c").status_code == 200


@pytest.mark.slow
def test_a_client_that_stops_reading_costs_bounded_memory(start):  # noqa: F811
    daemon = start()
    assert daemon.complete("a").status_code == 200
    before = resident(daemon)

    async def read_nothing() -> None:
        _, writer = await connect(daemon.url)
        # 27 MB of answer: words of 300 letters, each an event.
        prompt = " ".join(["z" * 300] * 90_000)
        asked = {"model": daemon.model, "prompt": prompt, "stream": True}
        writer.write(request_of(daemon.url, "/v1/completions", asked))
        await writer.drain()
        deadline = time.monotonic() + 300  # The front lets a client go after two minutes.
        while "cancel" not in daemon.notes():
            assert time.monotonic() < deadline, "the engine still works for nobody"
            await asyncio.sleep(0.1)
        grown = resident(daemon) - before
        print(f"a client that reads nothing: {grown:.1f} MiB, its own prompt of 27 MB included")
        assert grown < 200
        # The engine was not held up, and neither is anybody else.
        answer = await asyncio.to_thread(daemon.complete, "b")
        assert answer.status_code == 200
        writer.close()

    asyncio.run(read_nothing())
