"""`omlxd top`: the running daemon, live. ^C ends it.

IN/S are prompt tokens computed a second, HIT/S restored, OUT/S generated, since the look before. HITS is the
restored part of all prompt tokens.
"""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Callable, Sequence

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from ...common.units import human
from ...errors import ConfigError
from ..daemon.client import DaemonError, NoDaemon, add_url, find_daemon
from ..daemon.owner_api import DaemonStatus, ModelStatus
from .status import (
    RESTORED,
    cold_line,
    duration,
    hit_rate,
    mlx_memory,
    model_of,
    percent,
    rank_lines,
    rate,
    written_lines,
)

INTERVAL_S = 1.0
WIDE = 100
"""Columns of a terminal with room for everything."""
NARROW = 80
NAME, LEAST_NAME = 24, 10
"""Characters of a model's name in a narrower terminal."""
_COLUMNS = ("RUN", "WAIT", "IN/S", "HIT/S", "OUT/S", "HITS", "RAM TIER", "PROCESS", "MLX")
_STATE_STYLES = {"ready": "green", "failed": "red"}


def main(argv: Sequence[str], parser: argparse.ArgumentParser) -> int:
    """Run the verb. Raises ConfigError, and DaemonError if there is no daemon at the start."""
    add_url(parser)
    parser.add_argument("--interval", metavar="S", default="1", help="seconds between updates (default: 1)")
    parser.add_argument("--looks", metavar="N", default="0", help="end after N updates (default: never)")
    args = parser.parse_args(argv)
    interval, looks = _number(args.interval, "--interval", 0.1), _number(args.looks, "--looks", 0)
    daemon = find_daemon(args.url)
    with contextlib.suppress(KeyboardInterrupt):
        watch(daemon.status, daemon.url, Console(), interval, int(looks))
    return 0


def _number(text: str, flag: str, least: float) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not least <= value <= 3600:
        raise ConfigError(f"{flag}: {text!r} is no number from {least:g} to 3600.")
    return value


def watch(
    look: Callable[[], DaemonStatus],
    url: str,
    console: Console,
    interval: float = INTERVAL_S,
    looks: int = 0,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Show `look()`, `looks` times (0: until ^C). Raises DaemonError at the first look alone."""
    now, before, seconds, trouble = look(), None, 0.0, ""
    at, done = time.monotonic(), 1
    live = Live(console=console, screen=True, auto_refresh=False) if console.is_terminal else None
    with live or contextlib.nullcontext():
        while True:
            shown = page(now, before, seconds, url, trouble, console.width >= WIDE)
            if live is not None:
                live.update(shown, refresh=True)
            else:
                console.print(shown)  # Into a file or a pipe, one page after another.
            if done == looks:
                return
            sleep(interval)
            done += 1
            try:
                new = look()
            except NoDaemon:
                trouble = f"nothing answers at {url} any more; waiting for it"
                continue
            except DaemonError as error:
                trouble = error.message
                continue
            began, at = at, time.monotonic()
            # Another process under the same address has counted from nothing.
            before = now if new.pid == now.pid else None
            now, seconds, trouble = new, at - began, ""


def page(
    now: DaemonStatus,
    before: DaemonStatus | None,
    seconds: float,
    url: str,
    trouble: str = "",
    wide: bool = True,
) -> RenderableType:
    """Draw one look, and what happened since the last one. Fits 80 columns unless `wide`."""
    head = Text(f"omlxd {now.version} ", style="bold")
    head.append(
        f"{url}  process {now.pid}  up {duration(now.uptime_s)}  front {human(now.resident)}", "default"
    )
    table = Table(box=None, pad_edge=False, collapse_padding=not wide, header_style="dim")
    table.add_column("MODEL", no_wrap=True, min_width=10)
    table.add_column("STATE", no_wrap=True, min_width=7)
    for name in _COLUMNS if wide else _COLUMNS[:-1]:
        table.add_column(name, justify="right", no_wrap=True, min_width=len(name))
    rows = [_row(model, model_of(before, model.id), seconds) for model in now.models]
    if not wide:  # Names are cut, so that all else is whole.
        rows = [row[:-1] for row in rows]
        columns = list(zip(("MODEL", "STATE", *_COLUMNS[:-1]), *rows, strict=True))[1:]
        room = NARROW - sum(1 + max(map(len, column)) for column in columns)
        for row in rows:
            row[0] = _short(str(row[0]), max(LEAST_NAME, min(NAME, room)))
    for row in rows:
        table.add_row(*row)
    parts: list[RenderableType] = [
        head,
        Text(),
        table,
        Text(),
        Text(cold_line(now) + _flow(now, before, seconds)),
        *map(Text, written_lines(now)),
    ]
    parts += [Text(line) for model in now.models for line in rank_lines(model)]
    parts += [Text(f"{model.id}: {model.trouble}", style="red") for model in now.models if model.trouble]
    if trouble:
        parts.append(Text(trouble, style="red"))
    return Group(*parts)


def _short(id: str, most: int) -> str:
    """Shorten a hub id or path to its last part of `most` characters, but not the name of an adapter."""
    name = id.rpartition("/")[2]
    tail = name[at:] if 0 < len(name) - (at := name.find(":")) < most // 2 else ""
    return name if len(name) <= most else name[: most - 1 - len(tail)] + "…" + tail


def _row(model: ModelStatus, before: ModelStatus | None, seconds: float) -> list[str | Text]:
    computed = rate(before, model, seconds, "prompt_tokens_total")
    generated = rate(before, model, seconds, "generation_tokens_total")
    return [
        model.id,
        Text(model.state, style=_STATE_STYLES.get(model.state, "yellow")),
        str(model.running),
        str(model.waiting),
        f"{computed:,.0f}",
        f"{rate(before, model, seconds, *RESTORED):,.0f}",
        f"{generated:,.1f}",
        percent(hit_rate(model)),
        human(int(model.values.get("kv_hot_bytes", 0))),
        human(model.resident) if model.resident else "-",
        mlx_memory(model),
    ]


def _flow(now: DaemonStatus, before: DaemonStatus | None, seconds: float) -> str:
    """Format the bytes a second to and from the SSD, over all models."""

    def flow(counter: str) -> str:
        return human(int(sum(rate(model_of(before, m.id), m, seconds, counter) for m in now.models)))

    return f"; written {flow('kv_bytes_written_total')}/s, read {flow('kv_bytes_restored_total')}/s"
