"""Models as a person reads them."""

from __future__ import annotations

from collections.abc import Sequence

from ..durations import spoken
from ..models.messages import InstalledStatus
from ..sizes import human

_HEAD = ("MODEL", "STATE", "ON DISK", "IN RAM", "CONTEXT", "STAYS", "ALIASES")


def as_table(models: Sequence[InstalledStatus]) -> str:
    """A line a model, `*` before the default one."""
    if not models:
        return "no model is installed; `omlxd models pull ORG/NAME` downloads one"
    rows = [("  " + _HEAD[0], *_HEAD[1:]), *map(_row, models)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEAD))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def _row(model: InstalledStatus) -> tuple[str, ...]:
    return (
        ("* " if model.default else "  ") + model.id,
        model.state + (f" ({model.in_flight} in flight)" if model.in_flight else ""),
        _bytes(model.disk_bytes),
        _bytes(model.memory_bytes),
        str(model.context_length or "-"),
        _stays(model),
        ", ".join(model.aliases) or "-",
    )


def _stays(model: InstalledStatus) -> str:
    if model.pinned:
        return "pinned"
    if model.expires_in_s is not None:
        return spoken(model.expires_in_s)
    return spoken(model.idle_s) if model.state == "ready" else "-"


def _bytes(nbytes: int | None) -> str:
    return human(nbytes) if nbytes else "-"


def as_page(model: InstalledStatus) -> str:
    """A line a fact."""
    facts = {
        "state": model.state + (f" ({model.in_flight} requests in flight)" if model.in_flight else ""),
        "default": "yes" if model.default else "no",
        "folder": model.folder or "not here yet",
        "source": model.source,
        "on disk": _bytes(model.disk_bytes),
        "to load it": f"about {_bytes(model.load_bytes)}",
        "in RAM": _bytes(model.memory_bytes),
        "context": f"{model.context_length} tokens" if model.context_length else "-",
        "KV": f"{human(model.kv_bytes_per_token)} a token" if model.kv_bytes_per_token else "-",
        "stays": _stays(model),
        "aliases": ", ".join(model.aliases) or "-",
        "process": str(model.pid or "-"),
        "trouble": model.trouble or "none",
    }
    width = max(map(len, facts))
    return "\n".join([model.id, *(f"  {name.ljust(width)}  {value}" for name, value in facts.items())])
