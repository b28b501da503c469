"""`omlxd status`: the running daemon on one page, or as JSON. Imports no MLX and reads no cache dir."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence

import msgspec

from ...common.units import counted, human, most_text
from ...config import load_settings
from ..daemon.client import NoDaemon, add_url, find_daemon, join_here
from ..daemon.owner_api import AwakeStatus, DaemonStatus, ModelStatus

RESTORED = ("prefix_cache_hits_hot_total", "prefix_cache_hits_cold_total")
"""Counters of prompt tokens that came from RAM and from SSD."""


def hit_rate(model: ModelStatus) -> float | None:
    """Return the part of all prompt tokens that was restored; None before the first prompt."""
    asked = model.values.get("prefix_cache_queries_total", 0.0)
    return sum(model.values.get(name, 0.0) for name in RESTORED) / asked if asked else None


def rate(before: ModelStatus | None, now: ModelStatus, seconds: float, *counters: str) -> float:
    """Return the growth a second of `counters` between two looks; 0 without a look before."""
    if before is None or seconds <= 0:
        return 0.0
    grew = (now.values.get(name, 0.0) - before.values.get(name, 0.0) for name in counters)
    return sum(max(0.0, more) for more in grew) / seconds


def model_of(status: DaemonStatus | None, id: str) -> ModelStatus | None:
    return next((model for model in status.models if model.id == id), None) if status else None


def percent(part: float | None) -> str:
    return "-" if part is None else f"{part:.0%}"


def duration(seconds: float) -> str:
    """Format the two largest units: `3 d 4 h`, `5 min 2 s`, `12 s`."""
    left, words = int(seconds), list[str]()
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60), ("s", 1)):
        count, left = divmod(left, length)
        if count or (unit == "s" and not words):
            words.append(f"{count} {unit}")
        elif words:
            break  # `3 d 4 s` would tell less than it seems to.
    return " ".join(words[:2])


def main(argv: Sequence[str], parser: argparse.ArgumentParser) -> int:
    """Run the verb. Raises ConfigError and DaemonError."""
    add_url(parser)
    parser.add_argument("--json", action="store_true", help="one JSON object")
    args = parser.parse_args(argv)
    daemon = find_daemon(args.url)
    try:
        status = daemon.status()
    except NoDaemon:
        if args.url is None and (does := join_here(load_settings({}))):
            raise NoDaemon(f"No daemon answers at {daemon.url}, but {does}; ask the lead.") from None
        raise
    print(as_json(status) if args.json else as_text(status, daemon.url))
    return 0


def as_json(value: object) -> str:
    """Format `value` as JSON of several lines."""
    return msgspec.json.format(msgspec.json.encode(value)).decode()


def as_text(status: DaemonStatus, url: str) -> str:
    lines = [headline(status, url), ""]
    head = ("MODEL", "STATE", "RUNNING", "WAITING", "PROCESS", "MLX", "CONTEXT", "RESTORED", "RAM TIER")
    lines += table([head, *map(_row, status.models)])
    for model in status.models:
        if model.trouble:
            lines.append(f"{model.id}: {model.trouble}")
        if model.slowed:
            lines.append(f"{model.id}: {model.slowed}")
        if model.kv_reuse:
            lines.append(f"{model.id}: prefixes are not reused: {model.kv_reuse}")
        if model.by_priority.keys() - {0}:
            requests = ", ".join(f"{count} of {number}" for number, count in model.by_priority.items())
            lines.append(f"{model.id}: requests by priority: {requests}")
        lines += rank_lines(model)
    if status.awake is not None:
        lines.append(f"keeps the machine awake while it works: {_awake(status.awake)}")
    return "\n".join([*lines, cold_line(status), *written_lines(status)])


def headline(status: DaemonStatus, url: str) -> str:
    return (
        f"omlxd {status.version} at {url}, process {status.pid}, up {duration(status.uptime_s)}, "
        f"front {human(status.resident)}"
    )


def _awake(awake: AwakeStatus) -> str:
    if not awake.on:
        return "no (--keep-awake is off)"
    if awake.trouble and not awake.held:
        return f"no ({awake.trouble})"
    if awake.held:
        return "yes (now: held)"
    return "yes (now: not held)" if awake.was_held else "yes (not tried yet)"


def cold_line(status: DaemonStatus) -> str:
    cold = status.cold
    if cold is None:
        return "SSD cache: none"
    most = most_text(cold.capacity, cold.cap)
    text = f"SSD cache {cold.dir}: {human(cold.bytes)} of {most} in {counted(cold.files, 'file')}"
    text += f", {cold.evicted_files} evicted since the start" if cold.evicted_files else ""
    if cold.folder_away:
        return f"{text}; OFF, the folder is away: put it back, or restart omlxd"
    off = [model.values for model in status.models if model.values.get("kv_cold_tier_on") == 0]
    if off and all(values.get("kv_cold_disk_full") for values in off):
        ranks = [
            f"rank {rank.rank} of {model.id}" for model in status.models for rank in model.ranks if rank.disk
        ]
        whose = f"the disk of {' and '.join(ranks)}" if ranks else "its disk"
        return f"{text}; {whose} is FULL: writes wait for room, reads go on"
    return text + ("; OFF, its disk fails: see the log" if off else "")


def rank_lines(model: ModelStatus) -> list[str]:
    """Say what each of several ranks holds, and what the link between them costs."""
    return [f"{model.id}: {each}" for each in (*model.ranks, link_text(model)) if each]


def link_text(model: ModelStatus) -> str:
    """Say what the link between ranks takes; "": there is none."""
    exchanges, share = (model.values.get(f"link_{name}", 0) for name in ("exchanges_per_step", "step_share"))
    if not exchanges:
        return ""
    latency, speed = (model.values[f"link_{name}"] for name in ("latency_us", "bytes_per_s"))
    part, took = f", {share:.0%} of its time" * bool(share), exchanges * latency / 1000
    return (
        f"between ranks: the {counted(int(exchanges), 'exchange')} of a step take "
        f"{took:,.{0 if took >= 10 else 2}f} ms alone{part}; one takes {latency:,.0f} µs, and a large one "
        f"{human(int(speed))}/s"
    )


def _peer_lines(status: DaemonStatus) -> list[str]:
    asked = [model.values for model in status.models if "kv_peer_on" in model.values]
    if not asked:
        return []
    files, nbytes = (
        sum(values.get(f"kv_peer_{name}_total", 0.0) for values in asked) for name in ("files", "bytes")
    )
    text = f"from the peer: {counted(int(files), 'file')}, {human(int(nbytes))}, since the start"
    left_out = not all(values["kv_peer_on"] for values in asked)
    why = " and ".join(dict.fromkeys(model.peer for model in status.models if model.peer))
    if left_out:
        return [f"{text}; LEFT OUT for now: {why or 'see the log'}"]
    return [f"{text}; {why}" if why else text]


def written_lines(status: DaemonStatus) -> list[str]:
    """Say what was written to SSD, what others read, and what came from the peer."""
    cold = status.cold
    lines = [f"written to SSD: {cold.written}"] if cold else []
    if status.given is not None:
        files, nbytes = status.given
        lines.append(f"to paired machines: {counted(files, 'file')}, {human(nbytes)}, since the start")
    return lines + _peer_lines(status)


def _row(model: ModelStatus) -> tuple[str, ...]:
    return (
        model.id,
        model.state,
        str(model.running),
        str(model.waiting),
        human(model.resident) if model.resident else "-",
        mlx_memory(model),
        str(model.context_length) if model.context_length else "-",
        percent(hit_rate(model)),
        ram_tier(model),
    )


def mlx_memory(model: ModelStatus) -> str:
    """Format the bytes of MLX's arrays, and of the memory that it keeps for more."""
    active, freed = (int(model.values.get(f"mlx_{kind}_bytes", 0)) for kind in ("active", "cache"))
    return f"{human(active)} + {human(freed)}" if active else "-"


def ram_tier(model: ModelStatus) -> str:
    hot, budget = model.values.get("kv_hot_bytes"), model.values.get("kv_hot_budget_bytes")
    if hot is None:
        return "-"
    return human(int(hot)) + (f" of {human(int(budget))}" if budget is not None else "")


def table(rows: Iterable[tuple[str, ...]]) -> list[str]:
    rows = list(rows)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]
