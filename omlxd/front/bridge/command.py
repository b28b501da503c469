"""`omlxd engine`: the program. Only lines of the protocol ever stand on standard output.

It ends, with status 0 and all that was computed stored, by `quit`, SIGTERM or ^C
(answers under way then have some seconds to end), when its input ends (all answers come first), or
when nobody reads its output (they are cancelled; status 1 if that is no closed pipe but a full disk).
A second signal ends it at once.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import sys
from collections.abc import Sequence

from msgspec.structs import replace

from ... import __version__
from ...config import OPTIONS, Settings, add_flags, load_settings
from ...errors import ConfigError, Unavailable
from ...kv.ledger.ledger import LedgerBusy
from ..process.logs import Logs
from ..process.own_process import allow_many_files, leave, make_base, pool_and_stop, what_to_do
from .bridge import LINE_BYTES, Bridge
from .messages import PROTOCOL, failure, line_out
from .pipes import LineReader, LineWriter

log = logging.getLogger(__name__)

ANSWERS_S = 10.0
"""Seconds that answers under way go on after `quit`."""
LAST_LINES_S = 5.0
"""Seconds for the last lines to be read."""

_NOT_HERE = frozenset(
    {
        *("host", "port", "ollama_port", "api_key", "cors_origin", "allowed_host"),
        *("log_file", "log_file_size", "log_file_count"),
        *("model_ttl", "max_loaded_models", "no_jit_load"),
    }
)
"""Options of `omlxd serve` that mean nothing with one model and no HTTP."""


def main(argv: Sequence[str], parser: argparse.ArgumentParser) -> int:
    """Run and end the process, with status 1 if another omlxd holds the SSD cache. Raises ConfigError."""
    add_flags(parser, *(option.name for option in OPTIONS if option.name not in _NOT_HERE))
    flags = {name: value for name, value in vars(parser.parse_args(argv)).items() if value is not None}
    settings = replace(
        load_settings({**flags, "host": "127.0.0.1"}),
        log_file=None,
        no_jit_load=False,
        max_loaded_models=0,
        model_ttl=float("inf"),
    )
    source, sink = _own_pipes()
    Logs(settings)
    make_base(settings)
    allow_many_files()
    os.environ.pop("OMLXD_API_KEY", None)
    with asyncio.Runner() as runner:
        leave(runner.run(_run(settings, source, sink)))


def _own_pipes() -> tuple[int, int]:
    """Open the protocol's input and output. What anybody else prints goes to standard error."""
    if not (_is_open(0) and _is_open(1)):
        raise ConfigError("Standard input and output must be open: requests and answers go there.")
    source, sink = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDWR)
    try:
        os.dup2(null, 0)
        os.dup2(2 if _is_open(2) else null, 1)
    finally:
        os.close(null)
    return source, sink


def _is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


async def _run(settings: Settings, source: int, sink: int) -> int:
    pool, stop = pool_and_stop(settings)
    out = LineWriter(sink)
    busy = await pool.cold.claim()
    if isinstance(busy, LedgerBusy) and settings.if_cache_busy == "stop" and not stop.is_set():
        print(f"omlxd: {what_to_do(busy)}", file=sys.stderr)
        out.put_line(failure(None, Unavailable(what_to_do(busy))))
        await pool.cold.close()
        await out.close(LAST_LINES_S)
        return 1
    bridge = Bridge(settings, pool, out)
    if not stop.is_set():
        pool.start(first=False)
        out.put_line(line_out(None, "ready", version=__version__, protocol=PROTOCOL))
        if settings.model:
            bridge.load_first()
        await _until_the_end(bridge, LineReader(source, LINE_BYTES), out, stop)
    if out.broken.is_set():
        bridge.drop()
    elif bridge.quit.is_set():  # What has several answers asks the engine several times.
        await bridge.finish_answers(ANSWERS_S)
    await pool.close()
    await bridge.finish_answers(LAST_LINES_S)
    out.put_line(bridge.bye)
    await out.close(LAST_LINES_S)
    if out.trouble is None or isinstance(out.trouble, BrokenPipeError):
        return 0
    print(f"omlxd: Standard output can't be written: {out.trouble.strerror}.", file=sys.stderr)
    return 1


async def _until_the_end(bridge: Bridge, lines: LineReader, out: LineWriter, stop: asyncio.Event) -> None:
    async def read() -> None:
        async for line in lines:
            await out.room()
            bridge.take_line(line)
            if bridge.quit.is_set():
                return await bridge.loaded()
        await bridge.finish_answers()

    tasks = [asyncio.create_task(work) for work in (read(), out.broken.wait(), stop.wait())]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()
    for ended in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(ended, Exception):
            log.error("the input is read no more", exc_info=ended)
