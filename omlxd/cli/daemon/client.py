"""Asks a running daemon over HTTP. A key from a settings file goes to no address but that file's own."""

from __future__ import annotations

import argparse
import contextlib
import http.client
import os
import socket
import urllib.error
import urllib.request
from collections.abc import Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TypeVar
from urllib.parse import urlsplit

import msgspec
import psutil

from ...config import Settings, is_loopback, load_settings
from ...config.address import recorded_address, recorded_join
from ...config.keys import NONE_LEFT
from ...errors import ConfigError, OmlxdError
from ...kv.files.paths import LOCK_NAME
from .agent import user_agent
from .owner_api import DaemonStatus

ANSWER_S = 10.0
STREAM_S = 3600.0
"""Seconds of silence in a stream: the daemon sends a ping every few seconds, but a machine may sleep."""
KEY_VARIABLE = "OMLXD_API_KEY"
_PROC_LOCKS = Path("/proc/locks")
CLOCKS_S = 5.0
"""Seconds between a process's and a file's clock at most."""
_PIECE = 1 << 20
Body = msgspec.Struct | bytes | Iterable[bytes]
T = TypeVar("T")


class DaemonError(OmlxdError):
    """The daemon gave no usable answer; the message says what to do."""


class NotThere(DaemonError):
    """The daemon has nothing of this name."""


class StreamError(DaemonError):
    """What the daemon was asked for failed, by the stream of its answer."""


class NoDaemon(DaemonError):
    """No daemon answers at the address."""


class Cached(msgspec.Struct):
    """Tokens of a prompt: what was restored, and what was computed where the request took one token. And the
    answer's tokens a second, by the engine's clock; 0: there are too few."""

    cached_hot: int = 0
    cached_cold: int = 0
    computed: int = 0
    tokens_per_s: float = 0.0

    @property
    def all(self) -> int:
        return self.cached_hot + self.cached_cold


class Usage(msgspec.Struct):
    """Token counts of any protocol; the first two are OpenAI's."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    omlxd: Cached = msgspec.field(default_factory=Cached)


def add_url(parser: argparse.ArgumentParser) -> None:
    """Add the flag that `find_daemon` reads."""
    parser.add_argument(
        "--url",
        help="the daemon's address; default: that of OMLXD_HOST and OMLXD_PORT or of the settings file, else "
        "that of the daemon that runs with this base folder (OMLXD_BASE_PATH) or SSD cache",
    )


def pieces(source: IO[bytes]) -> Iterator[bytes]:
    """Yield the unread part of a file, as a body."""
    while piece := source.read(_PIECE):
        yield piece


@dataclass(frozen=True, slots=True)
class Daemon:
    """A daemon's address, and its key, "" for none. Every method raises DaemonError."""

    url: str
    key: str = ""

    def fetch(
        self,
        path: str,
        type: type[T],
        body: Body | None = None,
        seconds: float = ANSWER_S,
        headers: Mapping[str, str] | None = None,
    ) -> T:
        """Return the answer at `path`; a POST if there is a `body`: JSON, or pieces of anything."""
        with self._sentences(seconds), self._open(path, body, seconds, headers) as answer:
            return msgspec.json.decode(answer.read(), type=type)

    def version(self, seconds: float = ANSWER_S) -> str:
        """Return the version of the daemon, which needs no key."""
        return Daemon(self.url).fetch("/health", _Health, seconds=seconds).version

    def status(self, seconds: float = ANSWER_S) -> DaemonStatus:
        return self.fetch("/omlxd/status", DaemonStatus, seconds=seconds)

    def download(self, path: str, body: msgspec.Struct) -> Generator[bytes]:
        """Yield the answer to a POST, in pieces."""
        with self._sentences(STREAM_S), self._open(path, body, STREAM_S) as answer:
            yield from pieces(answer)
            if answer.length:
                raise http.client.IncompleteRead(b"", answer.length)

    def stream(self, path: str, body: bytes, type: type[T]) -> Generator[T]:
        """Yield the events of a POST that is answered as SSE, to `[DONE]`. Closing it ends the request.

        DaemonError also for an event that is an error, and for a stream that breaks off.
        """
        with self._sentences(STREAM_S), self._open(path, body, STREAM_S) as answer:
            while line := answer.readline():
                if not line.startswith(b"data: "):
                    continue
                data = line[6:].strip()
                if data == b"[DONE]":
                    return
                if data.startswith(b'{"error"') and (message := _message(data)):
                    raise StreamError(message)
                yield msgspec.json.decode(data, type=type)
            raise ConnectionResetError

    def _open(
        self, path: str, body: Body | None, seconds: float, headers: Mapping[str, str] | None = None
    ) -> http.client.HTTPResponse:
        body = msgspec.json.encode(body) if isinstance(body, msgspec.Struct) else body
        request = urllib.request.Request(
            f"{self.url}{path}", body, {"User-Agent": user_agent(), **(headers or {})}
        )
        if body is not None:
            kind = "application/json" if isinstance(body, bytes) else "application/octet-stream"
            request.add_header("Content-Type", kind)
        if self.key:
            request.add_header("Authorization", f"Bearer {self.key}")
        # No proxy of the environment's may stand before the loopback.
        handlers: list[urllib.request.BaseHandler] = [_StaysHere()]
        if is_loopback(urlsplit(self.url).hostname or ""):
            handlers.append(urllib.request.ProxyHandler({}))
        return urllib.request.build_opener(*handlers).open(request, timeout=seconds)

    @contextlib.contextmanager
    def _sentences(self, seconds: float) -> Generator[None]:
        """Turn a request's failures into DaemonError."""
        try:
            yield
        except urllib.error.HTTPError as error:
            with error:
                said = _message(error.read(65536))
            if error.code == 401 and NONE_LEFT in said:
                said = NONE_LEFT
            elif error.code == 401 and self.key:
                said = f"The daemon at {self.url} doesn't take the key in {KEY_VARIABLE}: it is wrong."
            elif error.code == 401:
                said = f"The daemon at {self.url} wants its key: set {KEY_VARIABLE}."
            kind = NotThere if error.code == 404 and said else DaemonError
            raise kind(said or f"{error.url} answers with status {error.code}; is it omlxd?") from None
        except msgspec.MsgspecError:
            problem = f"{self.url} answers, but not as omlxd does; give the daemon's own --url."
            raise DaemonError(problem) from None
        except ValueError:  # What HTTP can't carry in a header, a line break say.
            problem = f"{KEY_VARIABLE}: a key is letters, digits and signs, with no spaces."
            raise DaemonError(problem) from None
        except (OSError, http.client.HTTPException) as error:
            if isinstance(error, TimeoutError) or isinstance(getattr(error, "reason", None), TimeoutError):
                problem = f"{self.url} does not answer within {seconds:.0f} s; see its log, or `omlxd status`"
                raise DaemonError(f"{problem} later.") from None
            if isinstance(error, (http.client.IncompleteRead, ConnectionResetError)):
                problem = f"The daemon at {self.url} ended in the middle of its answer; see its log."
                raise DaemonError(problem) from None
            problem = f"Nothing answers at {self.url}; start the daemon with `omlxd serve`, or say with --url"
            raise NoDaemon(f"{problem} where it is.") from None


def find_daemon(url: str | None, settings: Settings | None = None) -> Daemon:
    """Return the daemon at --url, else that of `settings`; None: the environment's.

    Where they name no address, the one that the daemon of their base folder left there comes first. Where
    none listens there, it is the one that holds their cache dir, on another port. Raises ConfigError.
    """
    if url is None:
        settings = settings or load_settings({})
        own = [daemon_of(settings).url] if settings.port else []
        named = own and any(settings.sources[name] != "default" for name in ("host", "port"))
        recorded = [] if named else _recorded(settings.base_path)
        cache_dir = settings.paged_ssd_cache_dir
        others = [] if join_here(settings, holder(cache_dir) or 0) else _addresses_of_holder(cache_dir)
        for where in recorded + own + others if recorded or others else []:
            with contextlib.suppress(DaemonError):
                (daemon := Daemon(where, settings.api_key)).version(ANSWER_S)
                return daemon
        return daemon_of(settings)
    try:
        parts = urlsplit(url)
        fine = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        fine = False
    if not fine:
        raise ConfigError(f"--url: {url!r} is no address like http://127.0.0.1:8000.")
    return Daemon(url.rstrip("/").removesuffix("/v1"), os.environ.get(KEY_VARIABLE, ""))


def daemon_of(settings: Settings) -> Daemon:
    """Return the daemon of these settings. Raises ConfigError where its port is any free one."""
    if not settings.port:
        raise ConfigError(
            f"{settings.sources['port']}: port 0 is any free one; say with --url where the daemon listens."
        )
    return Daemon(_url(settings.host, settings.port), settings.api_key)


def join_here(settings: Settings, process: int | None = None) -> str:
    """Say what the `omlxd join` with this base folder does, which answers no HTTP; "": none runs, or it is
    another than `process`.
    """
    if (found := recorded_join(settings.base_path)) is None:
        return ""
    pid, host, port, share, written = found
    if process not in (None, pid) or not _began_before(pid, written):
        return ""
    does = f"has a share of {share}" if share else "waits for a lead"
    return f"`omlxd join` runs here (process {pid}, at {host}:{port}) and {does}"


def _url(host: str, port: int) -> str:
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def _recorded(base_path: Path) -> list[str]:
    """Return the addresses of the daemon of `base_path`, if its process lives."""
    if (found := recorded_address(base_path)) is None:
        return []
    pid, host, port, written = found
    return [_url(host, port)] if _began_before(pid, written) else []


def _addresses_of_holder(cache_dir: Path) -> list[str]:
    """Return the addresses of the daemon that holds `cache_dir`, as far as the system knows, IPv4 first."""
    pid = holder(cache_dir)
    if not pid:
        return []
    try:
        sockets = psutil.Process(pid).net_connections("tcp")
    except psutil.Error:
        return []
    # The system's order is any; that of the files is the order in which they were opened.
    sockets.sort(key=lambda one: (one.family == socket.AF_INET6, one.fd))
    return [_url(one.laddr.ip, one.laddr.port) for one in sockets if one.status == psutil.CONN_LISTEN]


def holder(root: Path) -> int | None:
    """Return the process id of the daemon that holds the folder; 0: unknown; None: nobody.

    Where the system doesn't list locks (macOS), a living process of the last daemon's id counts, unless it
    is younger than the file: after a restart of the machine another program has that id.
    """
    path = root / LOCK_NAME
    try:
        text = path.read_text(encoding="ascii", errors="replace").strip()
        facts = path.stat()
    except OSError:
        return None
    pid = int(text) if text.isdigit() and len(text) < 11 else 0
    try:
        lines = _PROC_LOCKS.read_text().splitlines()
    except OSError:
        return pid if pid and _began_before(pid, facts.st_mtime) else None
    # "1: FLOCK ADVISORY WRITE 10244 fe:00:2146918 0 EOF"; some file systems give another device than stat.
    held = any("FLOCK" in line and f":{facts.st_ino} " in line for line in lines)
    return pid if held else None


def _began_before(pid: int, seconds: float) -> bool:
    with contextlib.suppress(psutil.Error):
        return psutil.Process(pid).create_time() < seconds + CLOCKS_S
    return False


class _StaysHere(urllib.request.HTTPRedirectHandler):
    """Follows no redirect: the key would go along. Such an answer is an error by its status."""

    def redirect_request(self, req, fp, code, msg, headers, newurl) -> None:
        return None


class _Health(msgspec.Struct):
    version: str
    status: str


class _ErrorText(msgspec.Struct):
    message: str = ""


class _Problem(msgspec.Struct):
    error: _ErrorText


def _message(body: bytes) -> str:
    """Return the sentence of an error in OpenAI's shape, "" for none."""
    try:
        return msgspec.json.decode(body, type=_Problem).error.message
    except msgspec.MsgspecError:
        return ""
