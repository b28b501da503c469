"""What an engine counts and measures, by name; vLLM's names where it has one. Zero on clean traffic are:

| counter                           | means                                                            |
|-----------------------------------|------------------------------------------------------------------|
| prompt_turns_healed               | an echo would have had other tokens than were generated          |
| prompt_turns_not_healed_<reason>  | and they could not be put back (engine/prompt/turn_memory.py)    |
| prompt_turn_records_bad           | a remembered turn's file failed its check (prompt/turn_store.py) |
| prompt_canonical_rejected         | a conversation goes on as before, and its tokens do not          |
| prompt_control_tokens_exposed     | somebody's control tokens are read as such: the text can't be cut |
| kv_checkpoint_missing             | blocks are cached further than the deepest checkpoint             |
| requests_timed_out                | the watchdog ended it                                             |

Log lines hold no text: counts, reasons, token positions, and a digest of the session's name.
"""

from __future__ import annotations

import hashlib
import logging
import threading

import mlx.core as mx

from ...kv.store import KVStore
from .. import mlx_adapter
from ..kvio.bridge import KVBridge
from ..kvio.reads.peer_reads import PeerReads
from ..mlx_adapter import Adapter
from ..prompt.pipeline import RenderedPrompt
from ..prompt.sessions import Standing
from ..schedule.scheduler import Scheduler
from ..sequence.sequence import Sequence
from ..speculate.controller import DraftCounts
from ..speculate.verify import WIDTHS

log = logging.getLogger(__name__)


def metrics_of(scheduler: Scheduler, load_peak: int) -> dict[str, float]:
    """Counters and gauges. `load_peak`: the most bytes that MLX held until the model was loaded."""
    active = mx.get_active_memory()
    values: dict[str, float] = {
        **scheduler.load_metrics(),
        **_computed(scheduler, None),
        "decode_steps_total": scheduler.counts.decodes,
        "requests_timed_out_total": scheduler.watchdog.expired,
        "mlx_active_bytes": active,
        "mlx_peak_bytes": max(mx.get_peak_memory(), active, scheduler.memory.peak if scheduler.memory else 0),
        "mlx_load_peak_bytes": load_peak,
        "mlx_cache_bytes": mx.get_cache_memory(),
        **mlx_adapter.limits,
        **mlx_adapter.rows_alone_ratios(),
        **mlx_adapter.attention_backend().kernel_metrics(),
        "attention_reads_own_rows": float(
            mlx_adapter.attention_backend().reads_own_rows() or mlx_adapter.rows_attend_alone()
        ),
    }
    if scheduler.speculation is not None:
        draft = scheduler.speculation.draft_model
        values["spec_decode_draft_model"] = draft is not None and draft.is_named
        values["spec_decode_credit_steps"] = scheduler.speculation.credit
    if scheduler.bridge is not None:
        values |= _bridge_metrics(scheduler.bridge)
        # Of the whole process, which counts it as what it can give back.
        values["kv_hot_bytes"] = sum(bridge.store.pool.hot_bytes for bridge in scheduler.bridges.values())
    return values


def adapter_metrics(scheduler: Scheduler, adapter: Adapter) -> dict[str, float]:
    """What an adapter has of its own, beside the figures of its engine."""
    bridge = scheduler.bridges.get(adapter)
    values = _computed(scheduler, adapter) | (_bridge_metrics(bridge) if bridge is not None else {})
    disk = ("kv_cold_tier_on", "kv_cold_disk_full", "kv_read_bytes_per_s")
    shared = ("kv_hot_bytes", "kv_hot_budget_bytes", *disk)
    return {name: float(value) for name, value in values.items() if name not in shared}


def _computed(scheduler: Scheduler, adapter: Adapter | None) -> dict[str, float]:
    """Tokens and guesses of an adapter; None: of the model itself."""
    values: dict[str, float] = {
        "prompt_tokens_total": scheduler.counts.prefilled[adapter],
        "prompt_tokens_hot_total": scheduler.counts.restored_hot[adapter],
        "prompt_tokens_cold_total": scheduler.counts.restored_cold[adapter],
        "generation_tokens_total": scheduler.counts.decoded[adapter],
    }
    if scheduler.speculation is not None:
        counts = scheduler.speculation.counts.get(adapter, DraftCounts())
        names = ("drafts", "draft_tokens", "accepted_tokens")
        for name, count, of_model in zip(
            names, (counts.drafts, counts.drafted, counts.accepted), counts.of_model, strict=True
        ):
            values[f"spec_decode_num_{name}_total"] = count
            values[f"spec_decode_num_{name}_of_draft_model_total"] = of_model
        for position in range(WIDTHS[-1]):
            name = f"spec_decode_num_accepted_tokens_per_pos_{position}_total"
            values[name] = counts.accepted_at(position)
    return values


def _bridge_metrics(bridge: KVBridge) -> dict[str, float]:
    return {
        **_store_metrics(bridge.store),
        "kv_tokens_recomputed_total": bridge.reads.recomputed,
        "kv_read_bytes_per_s": bridge.reads.rates.read,
        **(_peer_metrics(bridge.peer) if bridge.peer is not None else {}),
    }


def _peer_metrics(peer: PeerReads) -> dict[str, float]:
    return {
        "kv_peer_on": peer.is_on,
        "kv_peer_files_total": peer.stats.blocks,
        "kv_peer_bytes_total": peer.stats.nbytes,
        "kv_peer_bad_files_total": peer.stats.bad,
        "kv_peer_failures_total": peer.stats.failures,
        "kv_peer_bytes_per_s": peer.rates.read,
    }


def _store_metrics(store: KVStore) -> dict[str, float]:
    stats, pool = store.stats, store.pool
    values: dict[str, float] = {
        "prefix_cache_queries_total": stats.queries,
        "prefix_cache_hits_hot_total": stats.hits_hot,
        "prefix_cache_hits_cold_total": stats.hits_cold,
        "kv_blocks_cached": pool.num_cached,
        "kv_blocks_evicted_total": pool.evicted,
        "kv_hot_bytes": pool.hot_bytes,
        "kv_hot_budget_bytes": store.hot_budget(),
        "kv_corrupt_files_total": stats.corrupt,
        "kv_lost_files_total": stats.lost,
        "kv_files_restored_total": stats.restored,
        "kv_bytes_restored_total": stats.restored_bytes,
        "kv_blocks_put_total": stats.puts,
        "kv_blocks_not_kept_total": stats.not_kept,
    }
    if store.flusher is not None:
        flusher, writer = store.flusher, store.flusher.writer.stats
        values |= {
            "kv_cold_tier_on": flusher.health.is_on,
            "kv_cold_disk_full": flusher.health.is_full,
            "kv_new_token_bytes_total": stats.new_token_bytes,
            "kv_new_state_bytes_total": stats.new_state_bytes,
            "kv_unwritten_blocks": len(flusher.unwritten.due),
            "kv_unwritten_bytes": flusher.unwritten.due_bytes,
            "kv_stores_held_back_total": flusher.held_back,
            "kv_blocks_left_unwritten_total": flusher.left_unwritten,
            "kv_files_written_total": writer.written,
            "kv_bytes_written_total": writer.written_bytes,
            "kv_stores_dropped_total": writer.dropped_full + writer.refused + writer.failed,
            "kv_store_queue_bytes": flusher.writer.queued_bytes,
        }
    return values


class TrafficCounters:
    """Counts what is zero on clean traffic. Thread-safe. `block_size` in tokens."""

    def __init__(self, block_size: int):
        self._block = block_size
        self._lock = threading.Lock()
        self._exposed = 0
        self._missing = 0

    def note_request(self, sequence: Sequence, rendered: RenderedPrompt, standing: Standing) -> None:
        """A request is over, however it ended."""
        oddities: dict[str, object] = {}
        if rendered.spliced:
            oddities["healed"] = rendered.spliced
        if rendered.refused:
            oddities["not_healed"] = ",".join(rendered.refused)
        if rendered.exposed:
            oddities["control_tokens_exposed"] = "yes"
        if standing.rejected_at is not None:
            oddities["canonical_rejected_at_token"] = standing.rejected_at * self._block
        if sequence.kv.unreached:
            oddities["checkpoint_missing_tokens"] = sequence.kv.unreached * self._block
        with self._lock:
            self._exposed += rendered.exposed
            self._missing += bool(sequence.kv.unreached)
        log.log(
            logging.INFO if oddities else logging.DEBUG,
            "%s: session=%s %s prompt=%d cached=%d %s",
            sequence.name,
            hashlib.blake2b(sequence.prompt.session.encode("utf-8", "replace"), digest_size=4).hexdigest(),
            "extends" if standing.extends else "begins",
            sequence.prompt.length,
            sequence.stats.restored_hot + sequence.stats.restored_cold,
            " ".join(f"{name}={value}" for name, value in oddities.items()) or "clean",
        )

    def metrics(self) -> dict[str, float]:
        return {
            "prompt_control_tokens_exposed_total": self._exposed,
            "kv_checkpoint_missing_total": self._missing,
        }
