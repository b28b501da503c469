"""`omlxd memory`: the memory of each loaded model, and orders to hold less."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from ...common.units import human
from ...errors import ConfigError
from ..daemon.client import add_url, find_daemon
from ..daemon.owner_api import DaemonStatus, ModelStatus, TidyMemory
from .status import as_json, ram_tier, table

_HEAD = ("MODEL", "WEIGHTS", "LIVE KV", "RAM TIER", "FREED", "PEAK", "WIRED", "PROCESS")

LEAST = 4096
"""Bytes that count as KV: less is the state that draws tokens."""


def main(argv: Sequence[str], parser: argparse.ArgumentParser) -> int:
    """Run the verb. Raises ConfigError and DaemonError."""
    add_url(parser)
    parser.add_argument("model", nargs="?", default="", help="show this model alone, or give back of it")
    parser.add_argument(
        "--trim",
        action="store_true",
        help="give back freed arrays and RAM blocks, an engine's adapters included; the SSD keeps its copies",
    )
    parser.add_argument("--reset-peak", action="store_true", help="count the peak anew")
    parser.add_argument("--json", action="store_true", help="one JSON object")
    args = parser.parse_args(argv)
    daemon = find_daemon(args.url)
    if args.trim or args.reset_peak:
        body = TidyMemory(model=args.model, trim=args.trim, reset_peak=args.reset_peak)
        status = daemon.fetch("/omlxd/memory", DaemonStatus, body)
    else:
        status = daemon.status()
        if args.model:
            asked = [m for m in status.models if args.model in (m.id, m.id.rpartition("/")[2])]
            ids = {id for model in asked for id in (model.id, model.shares)}
            status.models = [model for model in status.models if model.id in ids]
            if not asked:
                raise ConfigError(f"The daemon knows no model {args.model!r}; see `omlxd status`.")
    print(as_json(status) if args.json else as_text(status))
    return 0


def as_text(status: DaemonStatus) -> str:
    """Format a line a loaded model, and why memory slows one. `of …`: the limit MLX keeps to."""
    loaded = [model for model in status.models if "mlx_active_bytes" in model.values]
    slow = [f"{model.id}: {model.speed}" for model in loaded if "weights as stored: " in model.speed]
    shared = [
        f"{model.id} is in the engine of {model.shares}: a figure there, or a --trim, is of all in it"
        for model in status.models
        if model.shares
    ]
    lines = [*table([_HEAD, *map(_row, loaded)]), *slow, *shared]
    return "\n".join(lines) if loaded else "no model is loaded"


def _row(model: ModelStatus) -> tuple[str, ...]:
    held = {name: int(value) for name, value in model.values.items() if name.endswith("_bytes")}
    weights = model.weight_bytes + held.get("adapter_bytes", 0)
    live = held["mlx_active_bytes"] - weights - held.get("kv_hot_bytes", 0)
    live = live if live >= LEAST else 0
    wired = held.get("mlx_wired_limit_bytes", 0)
    return (
        model.id,
        human(weights),
        human(live),
        ram_tier(model),
        f"{human(held.get('mlx_cache_bytes', 0))} of {human(held.get('mlx_cache_limit_bytes', 0))}",
        f"{human(held.get('mlx_peak_bytes', 0))} of {human(held.get('mlx_memory_limit_bytes', 0))}",
        f"up to {human(wired)}" if wired else "-",
        human(model.resident) if model.resident else "-",
    )
