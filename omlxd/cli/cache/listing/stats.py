"""`omlxd cache stats`: disk space of each model's KV, from names, sizes and times.

One file of each size in a namespace is opened for its kind; the others of that size count as the same kind.
"""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

import msgspec

from ....common.units import counted, human, spoken, written_text
from ....config import Settings, ssd_cap
from ....kv.checkpoint import KIND
from ....kv.files.namespace import NamespaceInfo
from ....kv.ledger.write_budget import bytes_written
from ...daemon.client import join_here
from ...daemon.owner_api import DaemonStatus
from ...watch.status import table
from .. import inventory
from ..holder import holder
from ..inventory import CacheFile
from .tree import read_head

_CHECKPOINT = f'"kind":"{KIND}"'.encode()


class NamespaceStats(msgspec.Struct, kw_only=True):
    """Figures of one model's KV. Bytes as the cap counts them; times in seconds since 1970, None without a
    file.

    model_id, model_type, model_path  "" where the folder has no description
    names    of all models that have it: those with equal files share one
    ranks    that share the model: files and bytes are of all, blocks and checkpoints are those of rank 0
    records  answers as they were generated, for turns that clients send back in another shape; what is known
             of images, their features included
    """

    namespace: str
    model_id: str = ""
    model_type: str = ""
    model_path: str = ""
    names: list[str] = []
    block_size: int = 0
    ranks: int = 1
    files: int = 0
    bytes: int = 0
    token_blocks: int = 0
    token_bytes: int = 0
    checkpoints: int = 0
    checkpoint_bytes: int = 0
    records: int = 0
    record_bytes: int = 0
    oldest_use: float | None = None
    newest_use: float | None = None


class CacheStats(msgspec.Struct, kw_only=True):
    """The statistics of a cache dir.

    cap_bytes   of the daemon that holds the folder, if it answers; else of this command's settings
    cap_source  `the daemon's`, `default`, a flag, a variable, or a line of the file
    daemon_pid  None where it isn't known
    written_today, written_ever  bytes written to SSD today and in all, but for the last seconds
    join        what the `omlxd join` does that holds the folder; "": none does
    temporary   files being written, or left by a crash; misplaced, strangers: see `cache check`
    """

    cache_dir: str
    bytes: int
    files: int
    cap_bytes: int
    cap_source: str
    daemon: bool
    daemon_pid: int | None
    temporary: int
    temporary_bytes: int
    misplaced: int
    strangers: int
    written_today: int
    written_ever: int
    namespaces: list[NamespaceStats]
    live: DaemonStatus | None = None
    join: str = ""


def collect(root: Path, settings: Settings) -> CacheStats:
    """Collect the statistics; a missing cache dir is empty. Raises OSError for an unreadable folder."""
    infos: dict[str, NamespaceInfo | None] = {}
    with contextlib.suppress(FileNotFoundError):
        infos = inventory.namespaces(root)
    rows: dict[str, NamespaceStats] = {}
    for name, shares in inventory.by_lead(infos).items():
        rows[name] = _described(name, infos[name])
        rows[name].ranks += len(shares)
        rows |= dict.fromkeys(shares, rows[name])
    others: dict[str, list[CacheFile]] = {"temporary": [], "misplaced": [], "stranger": []}
    is_checkpoint: dict[tuple[str, int], bool] = {}
    for file in inventory.walk(root, list(infos)):
        if file.kind not in ("block", "record"):
            others[file.kind].append(file)
            continue
        of_size = (file.namespace, file.size)
        if file.kind == "block" and of_size not in is_checkpoint:
            with contextlib.suppress(OSError):
                is_checkpoint[of_size] = _CHECKPOINT in read_head(f"{root}/{file.path}")
        _count(rows[file.namespace], file, is_checkpoint.get(of_size, False))
    pid = holder(root)
    found = [row for name, row in rows.items() if row.namespace == name]
    held = sum(row.bytes for row in found)
    today, ever = bytes_written(root)
    return CacheStats(
        cache_dir=str(root),
        bytes=held,
        files=sum(row.files for row in found),
        cap_bytes=0 if settings.no_cache else ssd_cap(settings, held),
        cap_source=settings.sources["paged_ssd_cache_max_size"],
        written_today=today,
        written_ever=ever,
        daemon=pid is not None,
        daemon_pid=pid or None,
        join=join_here(settings, pid or 0),
        temporary=len(others["temporary"]),
        temporary_bytes=sum(file.disk for file in others["temporary"]),
        misplaced=len(others["misplaced"]),
        strangers=len(others["stranger"]),
        namespaces=sorted(found, key=lambda row: -row.bytes),
    )


def _described(namespace: str, info: NamespaceInfo | None) -> NamespaceStats:
    names = ("model_id", "model_type", "model_path", "block_size", "names") if info else ()
    return NamespaceStats(namespace=namespace, **{name: getattr(info, name) for name in names})


def _count(row: NamespaceStats, file: CacheFile, is_checkpoint: bool) -> None:
    row.files += 1
    row.bytes += file.disk
    if file.kind == "record":
        row.records += 1
        row.record_bytes += file.disk
    elif is_checkpoint:
        row.checkpoints += file.namespace == row.namespace
        row.checkpoint_bytes += file.disk
    else:
        row.token_blocks += file.namespace == row.namespace
        row.token_bytes += file.disk
    row.oldest_use = file.used if row.oldest_use is None else min(row.oldest_use, file.used)
    row.newest_use = file.used if row.newest_use is None else max(row.newest_use, file.used)


# --------------------------------------------------------------------------- as text


def as_text(stats: CacheStats) -> str:
    """Format a table, and the notes around it."""
    what = ("MODEL", "NAMESPACE", "SIZE", "FILES", "BLOCKS", "CHECKPOINTS", "RECORDS")
    rows = [(*what, "OLDEST USE", "NEWEST USE"), *map(_row, stats.namespaces)]
    lines = [stats.cache_dir, *table(rows)] if stats.namespaces else [stats.cache_dir, "nothing cached yet"]
    cap = f"{human(stats.cap_bytes)} ({stats.cap_source})" if stats.cap_bytes else "no SSD cache in settings"
    lines.append(f"total: {human(stats.bytes)} in {counted(stats.files, 'file')}; cap: {cap}")
    cold = stats.live.cold if stats.live is not None else None
    written = cold.written if cold is not None else written_text(stats.written_today, stats.written_ever)
    lines.append(f"written to SSD: {written}")
    if stats.join:
        lines.append(f"daemon: none, but {stats.join}")
    elif stats.daemon:
        lines.append("daemon: running" + (f", process {stats.daemon_pid}" if stats.daemon_pid else ""))
    else:
        lines.append("daemon: none on this folder")
    if stats.live is not None:
        lines += _live(stats.live)
    if stats.temporary:
        lines.append(f"temporary: {counted(stats.temporary, 'file')}, {human(stats.temporary_bytes)}")
    if stats.misplaced or stats.strangers:
        lines.append(
            f"entries that are no blocks: {stats.misplaced + stats.strangers}; see `omlxd cache check`"
        )
    return "\n".join(lines)


def _live(status: DaemonStatus) -> list[str]:
    """Report since the daemon's start the restored tokens of each model, and the written bytes."""
    lines: list[str] = []
    for model in status.models:
        values = model.values
        if not values.get("prefix_cache_queries_total"):
            continue
        asked, hot = values["prefix_cache_queries_total"], values.get("prefix_cache_hits_hot_total", 0.0)
        cold = values.get("prefix_cache_hits_cold_total", 0.0)
        lines.append(
            f"{model.id}: {(hot + cold) / asked:.0%} of {asked:.0f} prompt tokens restored "
            f"({hot / asked:.0%} RAM, {cold / asked:.0%} SSD); "
            f"RAM tier {human(int(values.get('kv_hot_bytes', 0)))}; "
            f"written {human(int(values.get('kv_bytes_written_total', 0)))}, "
            f"read {human(int(values.get('kv_bytes_restored_total', 0)))}"
        )
    return lines


def _row(row: NamespaceStats) -> tuple[str, ...]:
    return (
        (", ".join(row.names) or "(unknown)") + (f" on {row.ranks} ranks" if row.ranks > 1 else ""),
        row.namespace[:8],
        human(row.bytes),
        str(row.files),
        str(row.token_blocks),
        str(row.checkpoints),
        str(row.records),
        ago(row.oldest_use),
        ago(row.newest_use),
    )


def ago(when: float | None) -> str:
    """Format how long ago `when` was, in seconds since 1970."""
    return "-" if when is None else f"{spoken(max(0.0, time.time() - when))} ago"
