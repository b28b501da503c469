"""Asks a running daemon over HTTP. A key from a settings file goes to no address but that file's own."""

from __future__ import annotations

import argparse
import contextlib
import http.client
import os
import time
import urllib.error
import urllib.request
from collections.abc import Generator, Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, TypeVar
from urllib.parse import urlsplit

import msgspec

from ..config import Settings, is_loopback, load_settings
from ..errors import ConfigError, OmlxdError
from ..kv.files.paths import LOCK_NAME

ANSWER_S = 10.0
STREAM_S = 3600.0
"""The daemon sends a ping every few seconds: only a machine that sleeps is silent for long."""
NO_HEADERS: Mapping[str, str] = {}
KEY_VARIABLE = "OMLXD_API_KEY"
_PROC_LOCKS = Path("/proc/locks")
_PIECE = 1 << 20
Body = bytes | Iterable[bytes]
T = TypeVar("T")


class DaemonError(OmlxdError):
    """No answer that makes sense; the message says what to do."""


class NoDaemon(DaemonError):
    """Nothing answers at the address."""


class TokenTimes:
    """Seconds from now to the first token of an answer and to its newest; 0 before there is one.

    count  pieces of the answer so far: it has at least as many tokens
    """

    def __init__(self) -> None:
        self._began = time.monotonic()
        self.first_s = self.last_s = 0.0
        self.count = 0

    def token_came(self) -> None:
        self.count += 1
        self.last_s = time.monotonic() - self._began
        self.first_s = self.first_s or self.last_s

    def tokens_per_s(self, tokens: int) -> float | None:
        """The rate of an answer of `tokens` tokens; None: they are too few."""
        seconds = self.last_s - self.first_s
        return (tokens - 1) / seconds if tokens > 1 and seconds > 0 else None


def add_url(parser: argparse.ArgumentParser) -> None:
    """Add the flag that `address` reads."""
    parser.add_argument("--url", help="the daemon's address; default: that of the one that runs")


def address(url: str | None, settings: Settings | None = None) -> tuple[str, str]:
    """Return (URL, key) of the daemon: of --url, else of `settings`; None: the environment's.

    Where none listens there, it is the one that holds the cache dir of `settings`, on another port. Raises
    ConfigError.
    """
    if url is None:
        settings = settings or load_settings({})
        others = _addresses_of_holder(settings.paged_ssd_cache_dir)
        for where in ([address_of(settings)[0]] if others and settings.port else []) + others:
            with contextlib.suppress(DaemonError):
                fetch(where, "", "/health", _Health, seconds=ANSWER_S)
                return where, settings.api_key
        return address_of(settings)
    try:
        parts = urlsplit(url)
        fine = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        fine = False
    if not fine:
        raise ConfigError(f"--url: {url!r} is no address like http://127.0.0.1:8000.", param="--url")
    return url.rstrip("/").removesuffix("/v1"), os.environ.get(KEY_VARIABLE, "")


def address_of(settings: Settings) -> tuple[str, str]:
    """(URL, key) of a daemon of these settings. Raises ConfigError where its port is any free one."""
    if not settings.port:
        raise ConfigError(
            f"{settings.sources['port']}: port 0 is any free one; say with --url where the daemon listens.",
            param="--url",
        )
    return _url(settings.host, settings.port), settings.api_key


def _url(host: str, port: int) -> str:
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def _addresses_of_holder(cache_dir: Path) -> list[str]:
    """Where the daemon that holds `cache_dir` listens, as far as the system says so."""
    pid = holder(cache_dir)
    if not pid:
        return []
    import psutil

    try:
        sockets = psutil.Process(pid).net_connections("tcp")
    except psutil.Error:
        return []
    return [_url(one.laddr.ip, one.laddr.port) for one in sockets if one.status == psutil.CONN_LISTEN]


def holder(root: Path) -> int | None:
    """Return the process id of the daemon that holds the folder; 0: unknown; None: nobody.

    Where the system doesn't list locks (macOS), a living process of the last daemon's id counts.
    """
    path = root / LOCK_NAME
    try:
        text = path.read_text(encoding="ascii", errors="replace").strip()
        inode = path.stat().st_ino
    except OSError:
        return None
    pid = int(text) if text.isdigit() and len(text) < 11 else 0
    try:
        lines = _PROC_LOCKS.read_text().splitlines()
    except OSError:
        return pid if pid and _is_alive(pid) else None
    # "1: FLOCK ADVISORY WRITE 10244 fe:00:2146918 0 EOF"; some file systems give another device than stat.
    held = any("FLOCK" in line and f":{inode} " in line for line in lines)
    return pid if held else None


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True  # It is somebody else's.
    return True


def fetch(
    url: str,
    key: str,
    path: str,
    type: type[T],
    body: Body | None = None,
    seconds: float = ANSWER_S,
    headers: Mapping[str, str] = NO_HEADERS,
) -> T:
    """The answer at `path`; a POST if there is a `body`: JSON, or pieces of anything. Raises DaemonError."""
    with _sentences(url, key, seconds), _open(url, key, path, body, seconds, headers) as answer:
        return msgspec.json.decode(answer.read(), type=type)


def pieces(source: IO[bytes]) -> Iterator[bytes]:
    """What is left of a file, as a body."""
    while piece := source.read(_PIECE):
        yield piece


def download(url: str, key: str, path: str, body: bytes, target: IO[bytes]) -> None:
    """Write the answer to a POST to `target`, all of it. Raises DaemonError; OSError as `target` does."""
    with _sentences(url, key, STREAM_S):
        answer = _open(url, key, path, body, STREAM_S)
    with answer:
        while piece := _read_piece(url, key, answer):
            target.write(piece)


def _read_piece(url: str, key: str, answer: http.client.HTTPResponse) -> bytes:
    with _sentences(url, key, STREAM_S):
        piece = answer.read(_PIECE)
        if not piece and answer.length:
            raise http.client.IncompleteRead(piece, answer.length)
        return piece


def stream(url: str, key: str, path: str, body: bytes, type: type[T]) -> Generator[T]:
    """The events of a POST that is answered as SSE, to `[DONE]`. Closing it ends the request.

    Raises DaemonError, also for an event that is an error and for a stream that breaks off.
    """
    with _sentences(url, key, STREAM_S), _open(url, key, path, body, STREAM_S) as answer:
        while line := answer.readline():
            if not line.startswith(b"data: "):
                continue
            data = line[6:].strip()
            if data == b"[DONE]":
                return
            if data.startswith(b'{"error"') and (message := _message(data)):
                raise DaemonError(message)
            yield msgspec.json.decode(data, type=type)
    raise DaemonError(f"The daemon at {url} ended in the middle of its answer; see its log.")


def _open(
    url: str, key: str, path: str, body: Body | None, seconds: float, headers: Mapping[str, str] = NO_HEADERS
) -> http.client.HTTPResponse:
    request = urllib.request.Request(f"{url}{path}", body, dict(headers))
    if body is not None:
        kind = "application/json" if isinstance(body, bytes) else "application/octet-stream"
        request.add_header("Content-Type", kind)
    if key:
        request.add_header("Authorization", f"Bearer {key}")
    # No proxy of the environment's may stand before the loopback.
    handlers: list[urllib.request.BaseHandler] = [_StaysHere()]
    if is_loopback(urlsplit(url).hostname or ""):
        handlers.append(urllib.request.ProxyHandler({}))
    return urllib.request.build_opener(*handlers).open(request, timeout=seconds)


@contextlib.contextmanager
def _sentences(url: str, key: str, seconds: float) -> Generator[None]:
    """Turn what goes wrong with a request into DaemonError."""
    try:
        yield
    except urllib.error.HTTPError as error:
        with error:
            said = _message(error.read(65536)) if error.code != 401 else ""
        if error.code == 401:
            if key:
                raise DaemonError(
                    f"The daemon at {url} doesn't take the key in {KEY_VARIABLE}: it is wrong."
                ) from None
            raise DaemonError(f"The daemon at {url} wants its key: set {KEY_VARIABLE}.") from None
        if said:
            raise DaemonError(said) from None
        raise DaemonError(f"{error.url} answers with status {error.code}; is it omlxd?") from None
    except msgspec.MsgspecError:
        raise DaemonError(f"{url} answers, but not as omlxd does; give the daemon's own --url.") from None
    except ValueError:  # What HTTP can't carry in a header, a line break say.
        raise DaemonError(f"{KEY_VARIABLE}: a key is letters, digits and signs, with no spaces.") from None
    except (OSError, http.client.HTTPException) as error:
        if isinstance(error, TimeoutError) or isinstance(getattr(error, "reason", None), TimeoutError):
            raise DaemonError(
                f"{url} does not answer within {seconds:.0f} s; see its log, or `omlxd status` later."
            ) from None
        if isinstance(error, (http.client.IncompleteRead, ConnectionResetError)):
            raise DaemonError(
                f"The daemon at {url} ended in the middle of its answer; see its log."
            ) from None
        raise NoDaemon(
            f"Nothing answers at {url}; start the daemon with `omlxd serve`, or say with --url where it is."
        ) from None


class _StaysHere(urllib.request.HTTPRedirectHandler):
    """Goes nowhere else: the key would go along. Such an answer is an error by its status."""

    def redirect_request(self, req, fp, code, msg, headers, newurl) -> None:
        return None


class _Health(msgspec.Struct):
    version: str


class _Told(msgspec.Struct):
    message: str = ""


class _Problem(msgspec.Struct):
    error: _Told


def _message(body: bytes) -> str:
    """The sentence of an error in OpenAI's shape, "" if it is none."""
    try:
        return msgspec.json.decode(body, type=_Problem).error.message
    except msgspec.MsgspecError:
        return ""
