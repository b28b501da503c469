"""`omlxd serve`: bind, serve, stop in order.

The socket is bound and listens before anything else is imported, so that a port in use is known
at once and connections are taken from the first moment; the model loads behind it.

Stopping, on SIGTERM or ^C: no new connections, answers under way end (`DRAIN_S`), the engine
flushes its blocks and quits, exit 0. A second signal ends everything at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import shlex
import signal
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from .. import __version__
from ..config import Settings
from ..errors import ConfigError, ModelError
from ..models.resolve import check_folder, is_local

if TYPE_CHECKING:
    from .pool import EnginePool

log = logging.getLogger(__name__)

BACKLOG = 1024
KEEP_ALIVE_S = 75.0
"""Agents pause between turns; a new connection a turn costs them, an idle one costs us nothing."""
MAX_HEADERS = 64 * 1024
END_S = 3.0
"""How long connections may take to close once their last answer has ended."""


def serve(settings: Settings) -> int:
    """Serve until told to stop; returns the exit status. Raises ConfigError for what can't be right."""
    _log_to_stderr(settings.log_level)
    if settings.model and is_local(settings.model):
        try:
            check_folder(Path(settings.model).expanduser().absolute())
        except ModelError as error:
            source = settings.sources.get("model", "--model")
            raise ConfigError(error.message.replace("--model", source, 1), param=source) from error
    try:
        listening = bind(settings.host, settings.port)
    except OSError as error:
        print(f"omlxd: {_why_not_bound(settings, error)}", file=sys.stderr)
        return 1
    return asyncio.run(_serve(settings, listening))


def bind(host: str, port: int) -> socket.socket:
    """A socket that listens on the first address that `host` means. Raises OSError."""
    family, kind, protocol, _, address = sorted(
        socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE),
        key=lambda found: found[0] != socket.AF_INET,  # localhost is 127.0.0.1 to most clients.
    )[0]
    made = socket.socket(family, kind, protocol)
    try:
        # A restart must not wait for the old daemon's connections to leave TIME_WAIT.
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        made.bind(address)
        made.listen(BACKLOG)
    except BaseException:
        made.close()
        raise
    return made


def _why_not_bound(settings: Settings, error: OSError) -> str:
    host, port = settings.host, settings.port
    if error.errno == errno.EADDRINUSE:
        return (
            f"port {port} on {host} is in use; stop the program that holds it, or choose another port "
            "with --port (0 takes a free one)."
        )
    if error.errno in (errno.EACCES, errno.EPERM):
        return f"port {port} on {host} is not allowed to this user; choose one above 1023 with --port."
    if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
        return f"{settings.sources.get('host', '--host')}: {host} is no address of this machine."
    return f"can't listen on {host} port {port}: {error}."


async def _serve(settings: Settings, listening: socket.socket) -> int:
    # Imported here, after the socket listens: this is most of the start.
    from hypercorn.asyncio import serve as run_hypercorn

    from .app import create_app
    from .engine_link import ENGINE_COMMAND
    from .http_settings import HttpSettings
    from .pool import EnginePool

    url = _url(listening)
    command = shlex.split(os.environ.get("OMLXD_ENGINE_COMMAND", ""))
    pool = EnginePool(settings, command or ENGINE_COMMAND)
    stop = asyncio.Event()
    _stop_on_signals(stop, pool)
    pool.start()
    app = create_app(pool, HttpSettings(host=settings.host, api_key=settings.api_key))
    server = asyncio.create_task(
        run_hypercorn(app, _hypercorn_config(listening), shutdown_trigger=stop.wait),  # type: ignore[arg-type]
        name="hypercorn",
    )
    with contextlib.suppress(OSError):  # Nobody may read it.
        print(
            f"omlxd {__version__} listening on {url} (model {', '.join(e.model_id for e in pool.models())})",
            flush=True,
        )
    stopped = asyncio.create_task(stop.wait())
    await asyncio.wait({server, stopped}, return_when=asyncio.FIRST_COMPLETED)
    log.info("stopping")
    await pool.close()
    await asyncio.wait({server}, timeout=END_S)
    if not server.done():
        server.cancel()
        await asyncio.wait({server}, timeout=END_S)
    elif error := server.exception():
        log.error("the HTTP server failed: %s", error, exc_info=error)
        return 1
    return 0


def _hypercorn_config(listening: socket.socket):
    from hypercorn.config import Config

    config = Config()
    config.bind = [f"fd://{listening.detach()}"]
    config.backlog = BACKLOG
    config.keep_alive_timeout = KEEP_ALIVE_S
    config.keep_alive_max_requests = 1_000_000
    config.h11_max_incomplete_size = MAX_HEADERS
    config.include_server_header = False
    config.accesslog = None
    config.errorlog = logging.getLogger("omlxd.http")
    config.loglevel = "WARNING"
    # Answers are ended by the pool; this bounds only connections that then don't close.
    config.graceful_timeout = 3600.0
    return config


def _url(listening: socket.socket) -> str:
    host, port = listening.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _stop_on_signals(stop: asyncio.Event, pool: EnginePool) -> None:
    def on_signal() -> None:
        if stop.is_set():
            pool.kill()
            os._exit(1)
        stop.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)


def _log_to_stderr(level: str) -> None:
    """Our own loggers at `level`; libraries at warning, since some print headers (and keys) below it."""
    handler = logging.StreamHandler()
    handler.setFormatter(
        logging.Formatter("%(asctime)s.%(msecs)03d %(levelname)s %(name)s: %(message)s", "%Y-%m-%dT%H:%M:%S")
    )
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    logging.getLogger("omlxd").setLevel(level.upper())
    logging.getLogger("omlxd.http").setLevel(logging.WARNING)
