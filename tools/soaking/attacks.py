"""What a hostile client does to a daemon on this machine, each for a bounded time and count."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import io
import json
import tarfile
import time
import zlib
from collections import Counter
from collections.abc import Awaitable, Callable
from urllib.parse import urlsplit

from .own_daemon import MODELS

STORM_RATE = 250
"""Streams a second that are cancelled, at most."""
UNFINISHED = 200
"""Bodies that never end, 500 kB of each."""
HELD_S = 20.0
"""How long unfinished bodies are held, and how long an answer to what is no request is awaited."""
LARGE_BYTES, LARGE_AT_ONCE = 30_000_000, 4
CROWD, SESSIONS = 40, 100
BOMB_BYTES = 1 << 30
"""Of a PDF's page, once it is inflated."""
ANSWER_S = 60.0
BAD_BODIES = [
    b"",
    b"{",
    b"[" * 100_000,
    b'{"model": "first", "messages": ' + b'{"a":' * 10_000,
    b'{"model": "first", "messages": [], "max_tokens": ' + b"9" * 4000 + b"}",
    b'{"model": "first", "messages": [{"role": "user", "content": "\\ud800"}]}',
    b'{"model": "first", "messages": [{"role": "nobody", "content": "hi"}]}',
    b'{"model": "first", "messages": [{"role": "user", "content": [{"type": "image_url"}]}]}',
    b'{"model": "first", "messages": [{"role": "tool", "tool_call_id": "x", "content": "hi"}]}',
    b'{"model": "first", "messages": [{"role": "user", "content": "hi"}], "tools": [{"function": 3}]}',
    b'{"model": "first", "messages": [{"role": "user", "content": "hi"}], "temperature": "hot"}',
    b"\xff\xfe" + b"{}",
]


class Attacker:
    """`answers`: statuses, or what came instead. `notes`: what an attack has to say of itself."""

    def __init__(self, url: str):
        self._host, self._port = urlsplit(url).hostname, urlsplit(url).port
        self.answers: Counter[str] = Counter()
        self.notes: list[str] = []

    async def health_s(self) -> float:
        began = time.monotonic()
        await self._answer(await self._send(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"))
        return time.monotonic() - began

    # ----------------------------------------------------------------- attacks, until a monotonic time

    async def cancelled_streams(self, until: float) -> None:
        sent = _post("/v1/chat/completions", _chat("Tell me of kettles.", max_tokens=200, stream=True))
        while time.monotonic() < until:
            _, writer = await self._send(sent)
            self.answers["cancelled"] += 1
            asyncio.get_running_loop().call_later(0.02, writer.close)
            await asyncio.sleep(1 / STORM_RATE)

    async def unfinished_bodies(self, until: float) -> None:
        head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000000\r\n\r\n"
        while time.monotonic() < until:
            async with contextlib.AsyncExitStack() as held:
                for _ in range(UNFINISHED):
                    with contextlib.suppress(OSError):
                        _, writer = await self._send(head + b'{"a": "' + b"x" * 500_000)
                        held.callback(writer.close)
                        self.answers["left unfinished"] += 1
                    if time.monotonic() > until:
                        return
                await asyncio.sleep(min(HELD_S, max(0.0, until - time.monotonic())))

    async def large_bodies(self, until: float) -> None:
        """Some at once, whole: of one long text, of many small messages, and of many fields."""
        text = json.dumps({"role": "user", "content": "kettle " * (LARGE_BYTES // 7)}).encode()
        small = b'{"role": "user", "content": "a"}'
        many = b", ".join([small] * (LARGE_BYTES // (len(small) + 2)))
        head = b'{"model": "%s", "max_tokens": 4, "messages": [' % MODELS[0].encode()
        fields = b"".join(b', "k%d": 1' % number for number in range(LARGE_BYTES // 16))
        rests = (text + b"]}", many + b"]}", small + b"]" + fields + b"}")
        bodies = [_post("/v1/chat/completions", head + rest) for rest in rests]
        while time.monotonic() < until:
            await asyncio.gather(*(self._ask(bodies[at % len(bodies)]) for at in range(LARGE_AT_ONCE)))

    async def broken_http(self, until: float) -> None:
        """Requests that HTTP forbids, hosts that are not this machine, and headers that never end."""
        body = _chat("hi", 4)
        sized = b"Content-Length: %d\r\n" % len(body)
        chunked = b"Transfer-Encoding: chunked\r\n"
        post, here = b"POST /v1/chat/completions HTTP/1.1\r\n", b"Host: localhost\r\n"
        asked = [
            post + here + sized + chunked + b"\r\n0\r\n\r\nGET /omlxd/status HTTP/1.1\r\n" + here + b"\r\n",
            post + here + sized + sized.replace(b": ", b": 9") + b"\r\n" + body,
            post + here + chunked + b"\r\nffffffffffffffff\r\n" + body,
            post + here + b"Content-Length: -5\r\n\r\n" + body,
            *(
                b"GET /omlxd/status HTTP/1.1\r\nHost: %s\r\n\r\n" % host
                for host in (
                    b"[::1]evil.com",
                    b"localhost..",
                    b"localhost.evil.com",
                    b"127.0.0.1@evil.com",
                    b"",
                )
            ),
            b"GET http://evil.com/omlxd/status HTTP/1.1\r\n" + here + b"\r\n",
            b"GET /health HTTP/9.9\r\n" + here + b"\r\n",
            b"GET /" + b"x" * 100_000 + b" HTTP/1.1\r\n" + here + b"\r\n",
            b"GET /health HTTP/1.1\r\n" + here + b"X: y\r\n" * 20_000 + b"\r\n",
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
            b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
            b"\x00" * 1000,
        ]
        at = 0
        while time.monotonic() < until:
            await self._ask(asked[at % len(asked)], answer_s=HELD_S)
            at += 1

    async def bad_input(self, until: float) -> None:
        at = 0
        while time.monotonic() < until:
            path = ("/v1/chat/completions", "/v1/messages", "/api/chat")[at % 3]
            await self._ask(_post(path, BAD_BODIES[at % len(BAD_BODIES)]))
            at += 1

    async def hostile_archives(self, until: float) -> None:
        block = f"{'0' * 32}/00/{0:064x}.safetensors"
        archives = [
            _archive(block, 10**15),
            _archive(block, -512),
            _archive("../../evil", 4),
            _archive("/etc/evil", 4),
            _archive(block, 4, tarfile.SYMTYPE),
            *(_archive(f"{n:032x}/namespace.json", 1 << 20) + bytes(1 << 20) for n in range(8)),
        ]
        at = 0
        while time.monotonic() < until:
            said = await self._ask(_post("/omlxd/cache/import", archives[at % len(archives)]))
            if '"taken"' in said and self.answers["200"] == 1:
                self.notes.append(f"imported: {said[:200]}")
            at += 1

    async def half_closed_clients(self, until: float) -> None:
        sent = _post("/v1/chat/completions", _chat("hi", max_tokens=4))
        at = 0
        while time.monotonic() < until:
            at += 1
            reader, writer = await self._send(sent)
            writer.write_eof()
            if at % 2:
                writer.transport.abort()
                self.answers["gone"] += 1
            else:
                await self._count((reader, writer))

    async def sessions_of_one_client(self, until: float) -> None:
        """A crowd of one address with many sessions; another address asks one thing at a time."""

        async def crowd(at: int) -> None:
            while time.monotonic() < until:
                session = f"s{at % SESSIONS}"
                await self._ask(_post("/v1/chat/completions", _chat(f"{at} kettles", 48, session=session)))
                at += CROWD

        async def small() -> None:
            waits: list[float] = []
            while time.monotonic() < until:
                began = time.monotonic()
                await self._ask(_post("/v1/chat/completions", _chat("hi", 4)), "127.0.0.2")
                waits.append(time.monotonic() - began)
            self.notes.append(f"the other client waited {max(waits, default=0):.1f} s at worst")

        await asyncio.gather(small(), *map(crowd, range(CROWD)))

    async def pdf_bomb(self, until: float) -> None:
        bomb = base64.b64encode(_pdf_bomb()).decode()
        source = {"type": "base64", "media_type": "application/pdf", "data": bomb}
        content = [{"type": "document", "source": source}, {"type": "text", "text": "What is it?"}]
        body = {"model": MODELS[0], "max_tokens": 4, "messages": [{"role": "user", "content": content}]}
        waits: list[float] = []
        said = ""
        while time.monotonic() < until:
            began = time.monotonic()
            said = await self._ask(_post("/v1/messages", json.dumps(body).encode()))
            waits.append(time.monotonic() - began)
        worst = max(waits, default=0.0)
        self.notes.append(f"{len(bomb)} bytes, answered after {worst:.1f} s at worst; the last: {said[:160]}")

    async def one_request(self, model: str = MODELS[0], text: str = "kettle ") -> None:
        await self._ask(_post("/v1/chat/completions", _chat(text * 300, max_tokens=4, model=model)))

    async def unload(self) -> None:
        await self._ask(_post("/omlxd/models/unload", json.dumps({"model": MODELS[0]}).encode()))

    # ----------------------------------------------------------------- HTTP, without a client's good manners

    async def _send(self, data: bytes, own: str = "127.0.0.1") -> _Pipe:
        pipe = await asyncio.open_connection(self._host, self._port, local_addr=(own, 0))
        pipe[1].write(data)
        return pipe

    async def _ask(self, data: bytes, own: str = "127.0.0.1", answer_s: float = ANSWER_S) -> str:
        try:
            return await self._count(await self._send(data, own), answer_s)
        except OSError as error:
            self.answers[type(error).__name__] += 1
            return str(error)

    async def _count(self, pipe: _Pipe, answer_s: float = ANSWER_S) -> str:
        try:
            head, body = await self._answer(pipe, answer_s)
        except (OSError, TimeoutError) as error:
            self.answers[f"no answer ({type(error).__name__})"] += 1
            return ""
        self.answers[head.split(b" ")[1].decode() if head.count(b" ") > 1 else "no answer"] += 1
        return body.decode("utf-8", "replace")

    async def _answer(self, pipe: _Pipe, answer_s: float = ANSWER_S) -> tuple[bytes, bytes]:
        """Head and body, up to the end of the connection or of the body."""
        reader, writer = pipe
        try:
            async with asyncio.timeout(answer_s):
                head = await reader.readuntil(b"\r\n\r\n")
                while head.split(b" ", 2)[1].startswith(b"1"):  # Interim: is anybody there?
                    head = await reader.readuntil(b"\r\n\r\n")
                fields = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:] if line)
                size = int(fields.get(b"content-length", b"0"))
                return head, await reader.readexactly(size)
        except asyncio.IncompleteReadError as error:
            return error.partial, b""
        finally:
            writer.close()


_Pipe = tuple[asyncio.StreamReader, asyncio.StreamWriter]


def attacks(attacker: Attacker) -> list[tuple[str, Callable[[float], Awaitable[None]]]]:
    made = (
        *(attacker.cancelled_streams, attacker.unfinished_bodies, attacker.large_bodies),
        *(attacker.bad_input, attacker.broken_http),
        *(attacker.hostile_archives, attacker.half_closed_clients, attacker.sessions_of_one_client),
        attacker.pdf_bomb,
    )
    return [(attack.__name__.replace("_", " "), attack) for attack in made]


def _post(path: str, body: bytes) -> bytes:
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


def _chat(
    text: str, max_tokens: int, stream: bool = False, session: str = "", model: str = MODELS[0]
) -> bytes:
    body = {"model": model, "messages": [{"role": "user", "content": text}], "max_tokens": max_tokens}
    return json.dumps({**body, "stream": stream, "session_id": session or "only"}).encode()


def _archive(name: str, size: int, kind: bytes = tarfile.REGTYPE) -> bytes:
    """A header that claims `size` bytes, and 4 kB."""
    member = tarfile.TarInfo(name)
    member.type, member.linkname = kind, "/etc/passwd" if kind == tarfile.SYMTYPE else ""
    member.size = size
    return member.tobuf(tarfile.GNU_FORMAT) + bytes(4096)


def _pdf_bomb() -> bytes:
    """A PDF of some kB whose only page inflates to `BOMB_BYTES`."""
    inner, outer = zlib.compressobj(9), zlib.compressobj(9)
    made = io.BytesIO()
    text = b"BT /F1 9 Tf (a) Tj ET\n" * 50_000
    for _ in range(BOMB_BYTES // len(text)):
        made.write(outer.compress(inner.compress(text)))
    made.write(outer.compress(inner.flush()) + outer.flush())
    stream = made.getvalue()
    filters = b"/Filter [/FlateDecode /FlateDecode]"
    objects = [
        b"<< /Type /Catalog /Pages 2 0 R >>",
        b"<< /Type /Pages /Kids [3 0 R] /Count 1 >>",
        b"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 99 99] /Contents 4 0 R /Resources << /Font << /F1 "
        b"<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >> >> >> >>",
        b"<< /Length %d %s >>\nstream\n%s\nendstream" % (len(stream), filters, stream),
    ]
    out, places = io.BytesIO(b"%PDF-1.4\n"), []
    out.seek(0, io.SEEK_END)
    for number, content in enumerate(objects, 1):
        places.append(out.tell())
        out.write(b"%d 0 obj\n%s\nendobj\n" % (number, content))
    start = out.tell()
    out.write(b"xref\n0 %d\n0000000000 65535 f \n" % (len(objects) + 1))
    out.write(b"".join(b"%010d 00000 n \n" % place for place in places))
    out.write(b"trailer << /Size %d /Root 1 0 R >>\nstartxref\n%d\n%%%%EOF" % (len(objects) + 1, start))
    return out.getvalue()
