"""`/metrics` for Prometheus: vLLM's names where it has the same thing, `omlxd_…` for the rest.

Three sources: requests as the front sees them (`Requests`, request_metrics.py), what engines say
(engine_figures.py), and the SSD cache's ledger. A value that an engine reports under a name that
stands in no table here is exported all the same, as `omlxd_<name>`.

In vLLM's words the hot tier is the local prefix cache and the cold tier the external one.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import re
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from prometheus_client.core import CollectorRegistry, CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.openmetrics.exposition import ALLOWUTF8
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector
from starlette.requests import Request
from starlette.responses import Response

from ... import __version__
from ...kv.ledger.ledger import LedgerStats
from ..engines.pool import EnginePool
from ..http.observe.request_metrics import Requests
from .engine_metrics import COUNTER, OF_RANK, EngineMetrics, MetricsOf

if TYPE_CHECKING:
    from ...kv.peer.server import Given


MODEL = "model_name"
_PER_POS = re.compile(r"spec_decode_num_accepted_tokens_per_pos_(\d+)_total")
"""Engine values that vLLM has as one counter with the label `position`."""
_NAME = re.compile(r"[a-z][a-z0-9_]{0,99}")

RENAMED = {
    name: f"vllm:{name}"
    for name in (
        "generation_tokens_total",
        "spec_decode_num_drafts_total",
        "spec_decode_num_draft_tokens_total",
        "spec_decode_num_accepted_tokens_total",
    )
}
"""Engine values that vLLM has under another name."""

DERIVED = {
    "num_requests_running": "",
    "num_requests_waiting": "",
    "prompt_tokens_total": "",
    "prompt_tokens_hot_total": "",
    "prompt_tokens_cold_total": "",
    "prefix_cache_queries_total": "",
}
"""Engine values that are exported only as part of something else."""

NOT_HEALED = "Earlier answers not put back as generated"
ONCE = "once where a request has several answers"
EACH = "for each answer anew, as vLLM counts"

HELP = {
    "generation_tokens_total": "Tokens of answers as usage has them, the end-of-turn token among them.",
    "decode_steps_total": "Passes in which requests decode, all of a batch in one.",
    "spec_decode_num_drafts_total": "How often a pass checked guesses of a request, up to its end.",
    "spec_decode_num_draft_tokens_total": "Guessed tokens that were checked, as usage has them.",
    "spec_decode_num_accepted_tokens_total": "Guessed tokens that held, as usage has them.",
    "spec_decode_draft_model": "1 where a draft model is loaded, else 0.",
    "spec_decode_credit_steps": "Steps without guesses that guesses may cost now, as they have won or lost.",
    "spec_decode_num_drafts_of_draft_model_total": "Of the checks, those of the draft model's guesses.",
    "spec_decode_num_draft_tokens_of_draft_model_total": "Of the guesses, the draft model's.",
    "spec_decode_num_accepted_tokens_of_draft_model_total": "Of these, those that held.",
    "prefill_tokens_per_s": "Prompt tokens that prefill computes a second, as last measured.",
    "mlx_active_bytes": "Memory that MLX's arrays take, weights and live KV among it.",
    "mlx_peak_bytes": "The most that MLX's arrays took.",
    "ranks": "Processes that share the model, where several do; memory is of all of them.",
    "link_exchanges_per_step": "Sums and other exchanges of ranks in a decode step of a token.",
    "link_latency_us": "Microseconds of one of these, timed alone at load and every 5 minutes of use.",
    "link_bytes_per_s": "Bytes a second of a sum of 1 MiB over all ranks, timed with them.",
    "link_step_share": "Part of a decode step that they take by themselves, without waits for a slower rank.",
    "mlx_cache_bytes": "Freed memory that MLX keeps for reuse.",
    "prefix_cache_hits_hot_total": f"Prompt tokens restored from RAM, {EACH}.",
    "prefix_cache_hits_cold_total": f"Prompt tokens restored from SSD, {EACH}.",
    "attention_reads_own_rows": "1 where a row reads its own KV alone, by omlxd's kernel or row by row.",
    "attention_rows_alone_ratio": "Attention row by row by MLX's own call, in time, as measured at load.",
    "attention_long_rows_alone_ratio": "The same for rows of 8,192 tokens, where their lengths decide.",
    "metal_kernels_used": "Metal kernels of omlxd's own that loads chose, of each shape.",
    "metal_kernels_refused": "Those that are wrong here, or slower than MLX's own; the log says which.",
    "metal_attention_kernel": "1 where a batch's rows are read by omlxd's Metal kernel.",
    "kv_shared_segment_tokens": "Tokens of a segment of live KV that requests share; 0: they share none.",
    "kv_blocks_cached": "Blocks that the engine knows by name.",
    "kv_blocks_evicted_total": "Blocks that left the hot tier.",
    "kv_hot_bytes": "Bytes of the hot tier.",
    "kv_hot_budget_bytes": "Bytes that the hot tier may hold now.",
    "kv_corrupt_files_total": "Block files that failed their check, and were removed.",
    "kv_lost_files_total": "Block files that could not be read.",
    "kv_files_restored_total": "Block files that were read and passed their check.",
    "kv_bytes_restored_total": "Payload bytes read from block files.",
    "kv_read_bytes_per_s": "Bytes a second that reading from the SSD tier gives, as last measured.",
    "kv_tokens_recomputed_total": "Prompt tokens that lay on SSD and were computed, as was faster.",
    "kv_peer_on": "0 while the peer is left out because it failed, else 1.",
    "kv_peer_files_total": "Files of the SSD cache that came from the peer and passed their check.",
    "kv_peer_bytes_total": "Bytes of these.",
    "kv_peer_bad_files_total": "Files from the peer that failed their check, and were not kept.",
    "kv_peer_failures_total": "Times that the peer was left out: no answer, or a file that failed its check.",
    "kv_peer_bytes_per_s": "Bytes a second that the peer gives, as last measured.",
    "kv_blocks_put_total": "Blocks offered to the tiers.",
    "kv_blocks_not_kept_total": "Blocks that neither tier had room for.",
    "kv_files_written_total": "Files written: blocks, and records of answers and images.",
    "kv_bytes_written_total": "Bytes of these.",
    "kv_stores_dropped_total": "Files that were not written: queue full, no space granted, or failed.",
    "kv_store_queue_bytes": "Bytes that wait to be written.",
    "kv_cold_tier_on": "0 while the SSD tier is off because its disk fails or is full, else 1.",
    "kv_cold_disk_full": "1 while it is off because its disk is full: reads go on. Else 0.",
    "kv_new_token_bytes_total": "Bytes of KV computed for tokens, as if each block were written once.",
    "kv_new_state_bytes_total": "Bytes of state that exists only at a position, likewise.",
    "kv_unwritten_blocks": "Blocks in RAM whose turn to be written has not come.",
    "kv_unwritten_bytes": "Bytes of these.",
    "kv_stores_held_back_total": "Blocks that the admission policy did not write at once.",
    "kv_blocks_left_unwritten_total": "Blocks that left RAM without having been written.",
    "prompt_tokens_remembered_total": "Prompt tokens that needed no tokenising again.",
    "prompt_tokens_tokenised_total": "Prompt tokens that were tokenised.",
    "prompt_turns_healed_total": "Earlier answers put back into a prompt as they were generated.",
    "prompt_turns_unknown_total": "Earlier answers without a record: rendered as they were sent.",
    "prompt_turn_records_written_total": "Answers written beside the KV, as they were generated.",
    "prompt_turn_records_dropped_total": "Answers that were not: queue full, no space granted, or failed.",
    "prompt_turn_records_found_total": "Records of answers that were read and passed their check.",
    "prompt_turn_records_bad_total": "Records of answers that failed their check, and were removed.",
    "image_towers_total": "Images that the vision tower was run for.",
    "images_remembered_total": "Pictures that were known from disk, and not decoded.",
    "images_restored_total": "Images whose features were read from disk.",
    "images_written_total": "Images whose features were written beside the KV.",
    "requests_timed_out_total": "Requests that took longer than their time limit.",
    "mlx_load_peak_bytes": "The most that MLX's arrays took until the model was loaded.",
    "mlx_cache_limit_bytes": "The most that MLX keeps of freed memory.",
    "mlx_memory_limit_bytes": "Memory above which MLX waits for passes under way before it begins others.",
    "mlx_wired_limit_bytes": "Memory that macOS may not page out; 0: not on Metal.",
    "device_available_bytes": "Memory free where arrays live.",
    "adapter_bytes": "Memory of the adapters' weights.",
    "sessions": "Conversations whose place is known.",
    "session_branches": "Branches of these: sub-agents, and what was edited.",
    "requests_sheltering_parent_total": "Requests of sub-agents that kept their parent's blocks in RAM.",
    "kv_checkpoint_missing_total": "Requests with blocks cached further than the deepest checkpoint.",
    "prompt_canonical_rejected_total": "Conversations that went on as before, and whose tokens did not.",
    "prompt_control_tokens_exposed_total": "Control tokens in somebody's text that were read as such.",
    "prompt_turns_not_healed_edited_total": f"{NOT_HEALED}: the client changed their text or calls.",
    "prompt_turns_not_healed_thinking_edited_total": f"{NOT_HEALED}: the client changed their thinking.",
    "prompt_turns_not_healed_ambiguous_total": f"{NOT_HEALED}: two conversations without a name look alike.",
    "prompt_turns_not_healed_prefix_total": f"{NOT_HEALED}: the tokens before them differ.",
    "prompt_turns_not_healed_template_total": f"{NOT_HEALED}: the template's text around them is not found.",
    "prompt_turns_not_healed_too_long_total": f"{NOT_HEALED}: the prompt would no longer fit.",
}

RANK_HELP = {
    "pid": "Its process, on its host.",
    "resident_bytes": "Resident memory of its process.",
    "cold_bytes": "Bytes of its files in the SSD cache.",
}

LEDGER = {
    "bytes_used": ("omlxd_cold_bytes", "Bytes of the SSD cache."),
    "reserved": ("omlxd_cold_reserved_bytes", "Bytes granted to writers and not used yet."),
    "files": ("omlxd_cold_files", "Files of the SSD cache."),
    "cold_cache_bytes": ("omlxd_cold_cap_bytes", "The most that the SSD cache may take."),
    "evicted_files": ("omlxd_cold_evicted_files_total", "Files evicted from the SSD cache."),
    "evicted_bytes": ("omlxd_cold_evicted_bytes_total", "Bytes evicted from the SSD cache."),
    "orphans_evicted_total": ("omlxd_cold_orphans_evicted_total", "Of these, files of models that are gone."),
    "written_bytes_total": ("omlxd_cold_written_bytes_total", "Bytes of files put in place since the start."),
    "written_today_bytes": ("omlxd_cold_written_today_bytes", "Bytes written to the SSD cache today."),
    "written_ever_bytes": ("omlxd_cold_written_ever_bytes", "Bytes written in all, over restarts."),
    "daily_write_budget_bytes": ("omlxd_cold_daily_write_budget_bytes", "Of a day; 0: without limit."),
    "write_budget_used_up": ("omlxd_cold_write_budget_used_up", "1: something was refused today."),
    "capacity": ("omlxd_cold_capacity_bytes", "The limit, or less where the disk has less room."),
    "folder_away": ("omlxd_cold_folder_away", "1: the folder was removed, renamed or unmounted."),
}


class Metrics:
    """Everything that `/metrics` shows of a daemon. `requests` takes what the HTTP side sees."""

    def __init__(self, engines: EnginePool, metrics: MetricsOf):
        self._engines = engines
        self._engines_metrics = metrics
        self._registry = CollectorRegistry(auto_describe=False)
        self.requests = Requests(self._registry)
        self._polled = _Polled()
        self._registry.register(self._polled)
        ProcessCollector(registry=self._registry)

    async def page(self, request: Request) -> Response:
        """Answer a scrape."""
        metrics = await self._engines_metrics.read()
        for each in metrics:
            self.requests.show_model(each.model_id)
        self._polled.show(metrics, self._engines.cold.peek(), self._engines.cold.given)
        encoder, content_type = choose_encoder(request.headers.get("accept", ""))
        if isinstance(encoder, functools.partial):
            # Every name here is a plain one, which needs no escaping. prometheus-client takes a sample's name
            # for a label's: it would write `vllm_` for its `vllm:`, though not in the line of its type.
            encoder = functools.partial(encoder, escaping=ALLOWUTF8)
        return Response(encoder(self._registry), headers={"content-type": content_type})


class _Polled(Collector):
    """Turns metrics into samples."""

    def __init__(self) -> None:
        self._began = time.time()
        self._engines_metrics: Sequence[EngineMetrics] = ()
        self._ledger: LedgerStats | None = None
        self._given: Given | None = None

    def show(
        self, metrics: Sequence[EngineMetrics], ledger: LedgerStats | None, given: Given | None = None
    ) -> None:
        self._engines_metrics, self._ledger, self._given = metrics, ledger, given

    def collect(self) -> Iterable[Metric]:
        yield from self._daemon()
        yield from self._of_vllm()
        yield self._accepted_per_position()
        yield from self._of_ranks()
        yield from self._own()
        if self._ledger is not None:
            yield from _of_ledger(self._ledger)
        if self._given is not None:
            name = "omlxd_peer_given"
            yield CounterMetricFamily(
                f"{name}_files_total", "Files that paired machines read.", self._given.files
            )
            yield CounterMetricFamily(f"{name}_bytes_total", "Bytes of these.", self._given.nbytes)

    def _daemon(self) -> Iterator[Metric]:
        yield GaugeMetricFamily("omlxd_start_time_seconds", "When the daemon began, since 1970.", self._began)
        build = GaugeMetricFamily("omlxd_build_info", "Always 1; see its labels.", labels=["version", "pid"])
        build.add_metric([__version__, str(os.getpid())], 1)
        yield build
        state = GaugeMetricFamily("omlxd_model_state", "1 for the model's state.", labels=[MODEL, "state"])
        for each in self._engines_metrics:
            if each.state:
                state.add_metric([each.model_id, each.state], 1)
        yield state
        starts = self._counter("omlxd_engine_starts_total", "Engine processes started.")
        restarts = self._counter("omlxd_engine_restarts_total", "Engine processes that died or hung.")
        resident = self._gauge("omlxd_engine_resident_bytes", "Resident memory of the engine process.")
        age = self._gauge(
            "omlxd_engine_figures_age_seconds", "Since the engine said its values; 0: for this scrape."
        )
        for each in self._engines_metrics:
            starts.add_metric([each.model_id], each.starts)
            restarts.add_metric([each.model_id], each.deaths)
            resident.add_metric([each.model_id], each.resident)
            if each.state:
                age.add_metric([each.model_id], each.age_s)
        yield from (starts, restarts, resident, age)

    def _of_vllm(self) -> Iterator[Metric]:
        running = self._gauge("vllm:num_requests_running", "Requests that restore, prefill or decode.")
        waiting = self._gauge(
            "vllm:num_requests_waiting", "Requests that wait for a load, a slot or their first pass."
        )
        usage = self._gauge("vllm:kv_cache_usage_perc", "Part of the hot tier's budget in use; 1 is all.")
        prompt = self._counter("vllm:prompt_tokens_total", f"Prompt tokens, computed or restored; {ONCE}.")
        cached = self._counter(
            "vllm:prompt_tokens_cached_total", f"Prompt tokens restored, from RAM or SSD; {ONCE}."
        )
        source = CounterMetricFamily(
            "vllm:prompt_tokens_by_source_total",
            f"Prompt tokens computed, restored from RAM, restored from SSD; {ONCE}.",
            labels=[MODEL, "source"],
        )
        queries = self._counter("vllm:prefix_cache_queries_total", f"Prompt tokens looked up in RAM, {EACH}.")
        hits = self._counter("vllm:prefix_cache_hits_total", f"Prompt tokens restored from RAM, {EACH}.")
        cold_queries = self._counter(
            "vllm:external_prefix_cache_queries_total",
            f"Prompt tokens not found in RAM, looked up on SSD, {EACH}.",
        )
        cold_hits = self._counter(
            "vllm:external_prefix_cache_hits_total", f"Prompt tokens restored from SSD, {EACH}."
        )
        for each in self._engines_metrics:
            name = [each.model_id]
            counters = "prompt_tokens_total", "prompt_tokens_hot_total", "prompt_tokens_cold_total"
            computed, hot, cold = map(each.total, counters)
            running.add_metric(name, each.running)
            waiting.add_metric(name, each.waiting)
            if budget := each.gauges.get("kv_hot_budget_bytes"):
                usage.add_metric(name, min(1.0, each.gauges.get("kv_hot_bytes", 0.0) / budget))
            else:
                usage.add_metric(name, 0.0)
            prompt.add_metric(name, computed + hot + cold)
            cached.add_metric(name, hot + cold)
            by = (("local_compute", computed), ("local_cache_hit", hot), ("external_kv_transfer", cold))
            for label, value in by:
                source.add_metric([each.model_id, label], value)
            asked = each.total("prefix_cache_queries_total")
            hot, cold = map(each.total, ("prefix_cache_hits_hot_total", "prefix_cache_hits_cold_total"))
            queries.add_metric(name, asked)
            hits.add_metric(name, hot)
            cold_queries.add_metric(name, max(0.0, asked - hot))
            cold_hits.add_metric(name, cold)
        yield from (running, waiting, usage, prompt, cached, source, queries, hits, cold_queries, cold_hits)

    def _accepted_per_position(self) -> Metric:
        family = CounterMetricFamily(
            "vllm:spec_decode_num_accepted_tokens_per_pos_total",
            "Guessed tokens that held, by their position among the guesses of a pass, from 0.",
            labels=[MODEL, "position"],
        )
        for each in self._engines_metrics:
            for name, value in each.totals.items():
                if per_position := _PER_POS.fullmatch(name):
                    family.add_metric([each.model_id, per_position[1]], value)
        return family

    def _of_ranks(self) -> Iterable[Metric]:
        """Return what each rank says of itself."""
        families: dict[str, GaugeMetricFamily] = {}
        for each in self._engines_metrics:
            for number, values in each.ranks().items():
                for name, value in values.items():
                    help = f"Of one rank. {RANK_HELP.get(name) or HELP.get(name, 'As it says.')}"
                    made = GaugeMetricFamily(f"omlxd_rank_{name}", help, labels=[MODEL, "rank"])
                    families.setdefault(name, made).add_metric([each.model_id, str(number)], value)
        return families.values()

    def _own(self) -> Iterator[Metric]:
        """Yield the other engine values, under their own names."""
        families: dict[str, Metric] = {}
        for each in self._engines_metrics:
            for name, value in {**each.totals, **each.gauges}.items():
                elsewhere = name in DERIVED or _PER_POS.fullmatch(name) or OF_RANK.fullmatch(name)
                if elsewhere or not _NAME.fullmatch(name):
                    continue
                family = families.get(name)
                if family is None:
                    make = self._counter if name.endswith(COUNTER) else self._gauge
                    family = make(RENAMED.get(name, f"omlxd_{name}"), HELP.get(name, "As the engine says."))
                    families[name] = family
                assert isinstance(family, (CounterMetricFamily, GaugeMetricFamily))
                family.add_metric([each.model_id], value)
        yield from families.values()

    @staticmethod
    def _counter(name: str, help: str) -> CounterMetricFamily:
        return CounterMetricFamily(name, help, labels=[MODEL])

    @staticmethod
    def _gauge(name: str, help: str) -> GaugeMetricFamily:
        return GaugeMetricFamily(name, help, labels=[MODEL])


def _of_ledger(stats: LedgerStats) -> Iterator[Metric]:
    for field in dataclasses.fields(stats):
        value = getattr(stats, field.name)
        if not isinstance(value, (int, float)):
            continue
        name, help = LEDGER.get(field.name, (f"omlxd_cold_{field.name}", "Of the SSD cache."))
        family = CounterMetricFamily if name.endswith(COUNTER) else GaugeMetricFamily
        yield family(name, help, value)
