"""`omlxd serve`: bind, serve, stop in order.

The sockets listen before anything else is imported, so that a port in use shows at once and
connections are taken from the first moment; the model loads behind them. A service manager may
have opened them already (front/process/sockets.py).

Stopping, on SIGTERM or ^C: no new connections, answers under way end (`DRAIN_S`), the engine
flushes its blocks and quits, exit 0; early_stop.py sees to those that come before there is anything to
end. A second signal ends everything at once, exit 1; once all has ended in order it changes nothing, and
the exit status stays 0. SIGHUP reads the configuration again (reload.py), unless a terminal's end sent it:
then it is a SIGTERM. With `WITH_STDIN` the end of standard input is one, too.

If the files of `--model` are no model, nothing listens, exit 2: a service manager need not try again. If
the import of a GGUF file fails, which takes longer to show, the daemon stops by itself, exit 1.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from ...common.heap import keep_heap_small
from ...config import Settings
from ...config.address import forget_address, record_address
from ...config.keys import keys_path
from ...config.settings import WITH_STDIN
from ...models.builder import remove_leftovers
from ...models.fetch.offer import offer_default_model
from ...models.local_stores import check_default_model
from ..http.settings import KeyRing
from .logs import Logs
from .notify import Notifier
from .own_process import allow_many_files, leave, make_base, pool_and_stop, what_to_do
from .peers import open_peer_socket, peer_rows, share_cache
from .sockets import AT_ONCE, CannotListen, addresses_of, all_loopback, for_asyncio, open_sockets, urls_of

if TYPE_CHECKING:  # Imported once the socket listens.
    from starlette.applications import Starlette

    from ..engines.pool import EnginePool

log = logging.getLogger(__name__)

KEEP_ALIVE_S = 75.0
"""Seconds that an idle connection stays: agents pause between turns, and a new connection costs them."""
MAX_HEADERS = 64 * 1024
CACHE_INDEX_AFTER_S = 20.0
"""Seconds after the start, with the default model loaded, until the SSD cache is read for later looks."""
END_S = 3.0
"""Seconds for connections to close once their last answer has ended."""


def serve(settings: Settings, read: Callable[[], Settings]) -> int:
    """Serve until the daemon is to stop, and end the process; returns status 1 if it can't listen.

    Raises ConfigError for what can't be right.

    read  the settings as flags, variables and file say now, for SIGHUP
    """
    keep_heap_small()
    reloads = _hangup_means_reload()
    logs = Logs(settings, has_page=True)
    if not reloads and signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        log.info("SIGHUP is ignored, as under nohup: the configuration is read at the next start only")
    check_default_model(settings)  # Before an address is shown.
    make_base(settings)
    remove_leftovers(settings.base_path / "models")
    keys = KeyRing(settings.api_key, keys_path(settings.base_path))
    try:
        for_peers = open_peer_socket(settings)
        sockets = open_sockets(settings, guarded=keys.required)
    except CannotListen as error:
        print(f"omlxd: {error}", file=sys.stderr)
        return 1
    allow_many_files()
    os.environ.pop("OMLXD_API_KEY", None)  # No engine needs it, nor a program that a model might run.
    with asyncio.Runner() as runner:
        runner.run(offer_default_model(settings))
        status = runner.run(_serve(settings, sockets, for_peers, keys, logs, read if reloads else None))
        forget_address(settings.base_path)
        leave(status)


def _hangup_means_reload() -> bool:
    """Return whether SIGHUP means a changed configuration, and not that the terminal is gone.

    Until there is a handler it is ignored: one that comes early must not end the start. One that
    nohup ignores stays so.
    """
    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    terminal = sys.stdin is not None and sys.stdin.isatty()
    if not terminal and not ignored:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
    return not terminal and not ignored


def _stop_with_stdin(stop: asyncio.Event) -> None:
    """Stop once our standard input closes: its holder is gone, however it ended."""
    loop = asyncio.get_running_loop()

    def read() -> None:
        if not os.read(0, 4096):
            loop.remove_reader(0)
            stop.set()

    loop.add_reader(0, read)


async def _serve(
    settings: Settings,
    sockets: list[socket.socket],
    for_peers: socket.socket | None,
    keys: KeyRing,
    logs: Logs,
    read: Callable[[], Settings] | None,
) -> int:
    # Imported here, after the socket listens: this is most of the start.
    from .reload import Reloader

    pool, stop = pool_and_stop(settings)
    of_command = bool(os.environ.pop(WITH_STDIN, ""))
    if of_command:
        _stop_with_stdin(stop)
    notify = Notifier()
    loopback = keys.may_open = all_loopback(sockets)
    if read is not None:
        reload = Reloader(settings, read, logs=logs, keys=keys, notify=notify, pool=pool, loopback=loopback)
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, reload)
    status = await _claim_cache(pool, settings, stop)
    if status is not None:
        return status
    pool.start()
    pool.cold.given = await asyncio.to_thread(share_cache, settings, for_peers)
    # On a thread, so that the engine is started meanwhile: its imports take five times as long.
    await asyncio.to_thread(_import_http)
    if stop.is_set():
        notify.stopping()
        await pool.close()
        return 0
    app = _make_app(pool, settings, sockets, keys, stop)
    urls, place = urls_of(sockets), sockets[0].getsockname()[:2]
    peers = peer_rows(settings, for_peers)
    server = _start_server(app, sockets, stop)  # It takes the sockets.
    if not of_command:
        record_address(settings.base_path, *place)
    page = _start_page(pool, settings, urls, keys, logs, peers)
    asyncio.get_running_loop().call_later(CACHE_INDEX_AFTER_S, app.state.cache_index.begin)
    return await _serve_until(stop, pool, server, page, notify, urls)


async def _claim_cache(pool: EnginePool, settings: Settings, stop: asyncio.Event) -> int | None:
    """Claim the SSD cache. Returns the exit status if the daemon is not to go on."""
    from ...kv.ledger.ledger import LedgerBusy

    busy = await pool.cold.claim()
    if stop.is_set():
        await pool.cold.close()
        return 0
    if isinstance(busy, LedgerBusy) and settings.if_cache_busy == "stop":
        print(f"omlxd: {what_to_do(busy)}", file=sys.stderr)
        await pool.cold.close()
        return 1
    return None


def _make_app(
    pool: EnginePool, settings: Settings, sockets: list[socket.socket], keys: KeyRing, stop: asyncio.Event
) -> Starlette:
    from ..app import create_app
    from ..http.settings import HttpSettings
    from ..owner.cache.miss_log import FILE_NAME as MISS_LOG
    from ..owner.models import admin_routes

    # The Host check goes by what we listen on, which a service manager may have chosen.
    http = HttpSettings(
        host="127.0.0.1" if all_loopback(sockets) else "0.0.0.0",
        keys=keys,
        cors_origins=settings.cors_origin,
        allowed_hosts=(*settings.allowed_host, settings.host, *addresses_of(sockets)),
        spool=settings.base_path / "spool",
        miss_log=settings.base_path / MISS_LOG if settings.log_cache_misses else None,
        stopping=stop,
    )
    return create_app(pool, http, admin_routes(pool))


def _start_server(app: Starlette, sockets: list[socket.socket], stop: asyncio.Event) -> asyncio.Task[None]:
    from hypercorn.asyncio import serve as run_hypercorn

    serving = run_hypercorn(app, _hypercorn_config(sockets), shutdown_trigger=stop.wait)  # type: ignore[arg-type]
    return asyncio.create_task(serving, name="hypercorn")


def _start_page(
    pool: EnginePool,
    settings: Settings,
    urls: str,
    keys: KeyRing,
    logs: Logs,
    peers: list[tuple[str, str]],
) -> asyncio.Task[str]:
    """Print where we listen; the rest of the page follows. It gives what keeps the daemon from serving."""
    from .start_page import print_address, print_start_page

    default = pool.default()
    print_address(urls, default.model_id if default else "none")
    page = asyncio.create_task(
        print_start_page(pool, settings, urls.partition(" ")[0], key_required=keys.required, peers=peers),
        name="start page",
    )
    page.add_done_callback(lambda _: logs.page_is_printed())
    return page


async def _serve_until(
    stop: asyncio.Event,
    pool: EnginePool,
    server: asyncio.Task[None],
    page: asyncio.Task[str],
    notify: Notifier,
    urls: str,
) -> int:
    """Serve until `stop`, or until the server or the start page fails; end all. Returns the exit status."""
    from .heap import keep_heap_trimmed

    notify.ready(f"listening on {urls}")
    notify.watch()
    heap = asyncio.create_task(keep_heap_trimmed(), name="heap")
    stopped = asyncio.create_task(stop.wait())
    first, _ = await asyncio.wait({server, stopped, page}, return_when=asyncio.FIRST_COMPLETED)
    trouble = "" if page not in first or page.exception() else page.result()
    if not trouble:
        await asyncio.wait({server, stopped}, return_when=asyncio.FIRST_COMPLETED)
    stop.set()
    log.info("stopping")
    notify.stopping()
    notify.unwatch()
    page.cancel()
    heap.cancel()
    await pool.close()
    await asyncio.wait({server}, timeout=END_S)
    if not server.done():
        server.cancel()
        await asyncio.wait({server}, timeout=END_S)
    elif error := server.exception():
        log.error("the HTTP server failed: %s", error, exc_info=error)
        return 1
    if trouble:
        print(f"omlxd: {trouble}", file=sys.stderr)
        return 1
    return 0


def _import_http() -> None:
    import hypercorn.asyncio  # noqa: F401

    from .. import app  # noqa: F401
    from ..owner import models as model_admin  # noqa: F401

    # What is imported stays: a full collection that visits it again and again takes a third of the time
    # of a front that hundreds of clients ask a second.
    gc.freeze()


def _hypercorn_config(sockets: list[socket.socket]):
    from hypercorn.config import Config, Sockets

    from ..http.hypercorn_fixes import use_for_every_connection

    config = Config()
    use_for_every_connection()
    listening: list[socket.socket] = [for_asyncio(one) for one in sockets]
    config.create_sockets = lambda: Sockets([], listening, [])
    config.backlog = AT_ONCE  # See Listening.
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
