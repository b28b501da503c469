"""What an engine counts and measures, by name; vLLM's names where it has one."""

from __future__ import annotations

import mlx.core as mx

from ..kv.store import KVStore
from .scheduler import Scheduler


def figures_of(scheduler: Scheduler, load_peak: int) -> dict[str, float]:
    """Counters and gauges. `load_peak`: the most bytes that MLX held until the model was loaded."""
    values = {
        **scheduler.load_figures(),
        "prompt_tokens_total": float(scheduler.prefilled_tokens),
        "generation_tokens_total": float(scheduler.decoded_tokens),
        "requests_timed_out_total": float(scheduler.watchdog.expired),
        "mlx_active_bytes": float(mx.get_active_memory()),
        "mlx_peak_bytes": float(max(mx.get_peak_memory(), scheduler.memory.peak if scheduler.memory else 0)),
        "mlx_load_peak_bytes": float(load_peak),
        "mlx_cache_bytes": float(mx.get_cache_memory()),
    }
    if scheduler.bridge is not None:
        values |= store_figures(scheduler.bridge.store)
    return values


def store_figures(store: KVStore) -> dict[str, float]:
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
