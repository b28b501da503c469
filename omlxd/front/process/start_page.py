"""The start page of `omlxd serve`, printed once its model is loaded: facts, and commands to type next.

The line before it, which programs read, says where the daemon listens, and comes as soon as it does.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shlex
import shutil
import sys
from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING

from ... import __version__
from ...common.units import MOST_CACHE, counted, disk_free, human, most_text
from ...config import Settings, load_settings
from ...errors import AGENT_CONTEXT, ConfigError, OmlxdError
from ...models.footprint import weight_bytes

if TYPE_CHECKING:
    from ...kv.ledger.ledger import LedgerStats
    from ...wire import ModelInfo
    from ..engines.model import ModelEngine
    from ..engines.pool import EnginePool

COUNT_S = 2.0
"""Seconds that the page waits for the count of a large cache."""

Rows = list[tuple[str, str]]


def print_address(urls: str, model: str) -> None:
    """Print the line that says where the daemon listens."""
    with contextlib.suppress(OSError):  # Nobody may read it.
        print(f"omlxd {__version__} listening on {urls} (model {model})", flush=True)


async def print_start_page(
    pool: EnginePool,
    settings: Settings,
    url: str,
    *,
    key_required: bool,
    peers: Sequence[tuple[str, str]] = (),
) -> str:
    """Wait until the default model is loaded, or can't be, and print the page.

    Returns why its files are no model, and prints nothing then; else "".

    url    the first address, as a client writes it
    peers  rows on --peer-listen and --peer
    """
    engine = pool.default()
    trouble = engine.trouble if engine is not None else ""
    if engine is not None and engine.state == "loading":
        try:
            with _shown_on_terminal(f"  loading {engine.model_id} …"):
                await engine.process.load()
        except OmlxdError as error:
            trouble = error.message
    if engine is not None and trouble and engine.broken:
        return trouble
    rows = _model_rows(engine, len(pool.models()), trouble)
    stats, complete = await _count(pool)
    cache = "off: --no-cache" if settings.no_cache else _cache(pool.cold.folder, stats, complete)
    rows.append(("cache", cache))
    if stats is not None and not settings.no_cache:
        rows.append(("", _cap(settings, stats, complete)))
    if stats is not None and settings.hot_cache_bytes == 0:
        rows.append(("", "none in RAM: --hot-cache-max-size 0 means no RAM cache; auto: as memory allows"))
    rows += peers
    rows.append(("page", f"{url}/"))
    if engine is not None and not trouble:
        rows += _commands(engine, url, settings, key_required)
    # A terminal that is stopped with ^S holds up whoever writes to it.
    await asyncio.to_thread(_print, rows)
    return ""


@contextlib.contextmanager
def _shown_on_terminal(text: str) -> Generator[None]:
    """Show `text` on a terminal until the block ends."""
    if not sys.stdout.isatty():
        yield
        return
    with contextlib.suppress(OSError):
        print(text, end="\r", flush=True)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            print("\x1b[K", end="", flush=True)


def _model_rows(engine: ModelEngine | None, models: int, trouble: str) -> Rows:
    if engine is None:
        return [("model", "none is installed; `omlxd models pull ORG/NAME` downloads one")]
    if trouble:
        return [("model", trouble)]
    info = engine.info
    if info is None:
        return [("model", f"none is loaded; {models} load when they are asked for: `omlxd models list`")]
    return [
        ("model", f"{info.model_id} ({info.model_type})"),
        ("memory", _memory(engine, info)),
        ("context", f"{engine.context_length} tokens"),
        ("backend", f"{info.backend}: {info.speed}" if info.speed else info.backend),
    ]


def _memory(engine: ModelEngine, info: ModelInfo) -> str:
    """Say what takes memory: on a CPU weights may be several times what they are on disk."""
    on_disk = weight_bytes(engine.installed.folder) if engine.installed.folder is not None else None
    kind = " in float32" if "float32" in info.speed else ""
    disk = f" ({human(on_disk)} on disk)" if on_disk else ""
    return (
        f"{human(info.weight_bytes)} for weights{kind}{disk}, {human(info.kv_bytes_per_token)} a token of KV"
    )


async def _count(pool: EnginePool) -> tuple[LedgerStats | None, bool]:
    """Return the SSD cache's account, and whether its files are counted to the end."""
    try:
        return await asyncio.wait_for(pool.cold.ledger_stats(), COUNT_S), True
    except TimeoutError:
        return pool.cold.peek(), False


def _cache(folder: str, stats: LedgerStats | None, complete: bool) -> str:
    if stats is None:
        return "in RAM alone; there is no SSD cache"
    held = f"{counted(stats.files, 'file')}, {human(stats.bytes_used)} of "
    held += most_text(stats.capacity, stats.cold_cache_bytes)
    return f"{folder}: {held}" + ("" if complete else ", and still counting")


def _cap(settings: Settings, stats: LedgerStats, complete: bool) -> str:
    """Say the SSD cache's limit, and why one that nobody set is small."""
    if settings.cold_cache_bytes is None and not complete:
        return "`omlxd status` says the most that it takes once it is counted"
    text = f"it takes {human(stats.cold_cache_bytes)} at most"
    if settings.cold_cache_bytes is not None or stats.cold_cache_bytes >= MOST_CACHE:
        return text
    free = stats.bytes_used + disk_free(settings.paged_ssd_cache_dir)
    which = "are free or its own" if stats.bytes_used else "are free"
    left = f"{human(max(0, free - stats.cold_cache_bytes))} of them are left to others"
    why = f"{human(free)} {which}, and {left}; it moves with the disk"
    return f"{text}: {why}, and --paged-ssd-cache-max-size sets another"


def _commands(engine: ModelEngine, url: str, settings: Settings, key_required: bool) -> Rows:
    body = {"model": engine.model_id, "messages": [{"role": "user", "content": "Hello"}]}
    key = ' -H "Authorization: Bearer $OMLXD_API_KEY"' if key_required else ""
    curl = f"curl {url}/v1/chat/completions{key} -H 'Content-Type: application/json' -d '{json.dumps(body)}'"
    where = "" if _is_default(url) else f" --url {url}"
    agent = (
        [("", f"{command()} launch claude{where}")] if (engine.context_length or 0) >= AGENT_CONTEXT else []
    )
    return [("try", f"{command()} chat{where}"), *agent, ("", curl)]


def command() -> str:
    """Return a shell's name for this `omlxd`: its path where `PATH` has none, or another one."""
    own = os.path.join(os.path.dirname(sys.executable), "omlxd")
    found = shutil.which("omlxd")
    if not os.path.exists(own) or (found and os.path.realpath(found) == os.path.realpath(own)):
        return "omlxd"
    near = os.path.relpath(own)
    return shlex.quote(own if near.startswith("..") else near)


def _is_default(url: str) -> bool:
    """Return whether commands look at `url` without a variable."""
    from ...cli.daemon.client import daemon_of

    try:
        return daemon_of(load_settings({}, {})).url == url
    except ConfigError:
        return False


def _print(rows: Sequence[tuple[str, str]]) -> None:
    with contextlib.suppress(OSError):
        if not sys.stdout.isatty():
            print("\n".join(f"  {name:<9}{text}" for name, text in rows), flush=True)
            return
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        table = Table.grid(padding=(0, 2))
        for name, text in rows:
            table.add_row(Text(name, "cyan"), Text(text, overflow="fold"))
        console = Console()
        console.print()
        console.print(table)
        console.print(Text("^C ends the daemon.", "dim"))
