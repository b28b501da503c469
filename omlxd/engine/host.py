"""A loaded model and all that serves it: scheduler, KV store, prompt pipeline, output.

Built on the engine thread by `load`; its methods are called by the threads that handle requests.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import psutil

from .. import wire
from ..chat import Conversation, GenerateRequest, RawPrompt
from ..errors import InvalidRequest, PromptTooLong
from ..kv.admission import admission_of
from ..kv.block_file import BlockFormat
from ..kv.block_pool import BlockPool
from ..kv.checkpoints import CheckpointFiles, Checkpoints
from ..kv.cold_tier import ColdTier
from ..kv.flusher import Flusher
from ..kv.hashing import BlockHash, chain_root, hash_blocks, namespace_of
from ..kv.namespace_file import describe_namespace
from ..kv.paths import namespace_dir
from ..kv.space import Space
from ..kv.store import KVStore
from ..kv.store_writer import StoreWriter
from ..models.footprint import footprint
from . import mlx_adapter
from .admission import MemoryAdmission
from .answer import Answer
from .constraint import Constraint, ConstraintCompiler
from .correctness import Correctness
from .explain import Explainer
from .fingerprint import weight_fingerprints
from .flush_clock import FlushClock
from .harvest import KVBridge
from .healing import Place, Scope
from .hot_budget import HotBudget
from .mlx_adapter import LoadedModel, Quantisation
from .output import OutputParser, prepare
from .output_thread import OutputThread
from .prompt import PromptPipeline, RenderedPrompt
from .request_sink import RequestSink, usage_of
from .sampling import RowSampling, SamplerRow, SamplingDefaults
from .scheduler import Scheduler
from .sequence import Sequence
from .sessions import Lineage, Sessions, Standing, lineage_of
from .staging import transport
from .state_keeper import StateKeeper

log = logging.getLogger(__name__)

KV_FORMAT = 1
"""Part of the namespace: raise it when the meaning of stored bytes changes."""

MLX_CACHE_BYTES = 2 << 30
"""Freed arrays that MLX may keep for reuse; without a limit they count as memory in use for good."""

WRITE_QUEUE_FRACTION = 0.05
"""Of the machine's memory: payloads on their way to disk."""


class EngineHost:
    """`space`: where the cold tier gets its room. `output`: where events go.

    want  asks the front for memory, which answers by `set_budget`
    """

    def __init__(
        self, load: wire.Load, output: OutputThread, space: Space, want: Callable[[wire.Wants], None]
    ):
        mx.set_cache_limit(MLX_CACHE_BYTES)
        self._settings = load.cache
        self._path = load.model_path
        self._output = output
        self._clock: FlushClock | None = None
        self.loaded = mlx_adapter.load(Path(load.model_path), _quantisation(load.cache))
        self.scheduler = Scheduler(
            self.loaded, None, slots=load.max_concurrent, block_size=load.cache.block_size
        )
        self.namespace = self._namespace(Path(load.model_path))
        self._load_peak = mx.get_peak_memory()
        if load.guard:
            working = footprint(Path(load.model_path)).working
            self.scheduler.memory = MemoryAdmission(self.loaded, working, want)
            self.scheduler.memory.take(load.budget)
        if self.loaded.layout is not None and load.cache.enabled:
            self.scheduler.bridge = self._bridge(self.loaded, space)
            if self.scheduler.memory is not None:
                self.scheduler.memory.store = self.scheduler.bridge.store
            self._describe(load, self.scheduler.bridge.store.cold)
            if (flusher := self.scheduler.bridge.store.flusher) is not None:
                self._clock = FlushClock(flusher, self.scheduler.post)
        self.prompts = PromptPipeline(
            self.loaded.tokenizer, healing=load.prompts.healing, hoist_system=load.prompts.hoist_system
        )
        self._sessions = Sessions()
        self._correctness = Correctness(load.cache.block_size)
        self._timeout_s = load.prompts.request_timeout_s or math.inf
        prepare(self.loaded.tokenizer)
        self._constraints = ConstraintCompiler(self.loaded.tokenizer, self.loaded.vocab_size)
        for note in self.prompts.notes:
            log.info("%s: %s", load.model_id, note)
        self._defaults = _sampling_defaults(Path(load.model_path))
        self.info = self._info(load)

    # ----------------------------------------------------------------- building

    def _namespace(self, path: Path) -> BlockHash:
        layout = self.loaded.layout
        if layout is None:
            return bytes(32)
        memo = Path(self._settings.cold_dir) if self._settings.cold_dir else None
        self._facts: dict[str, Any] = {
            "format": KV_FORMAT,
            "weights": weight_fingerprints(path, memo),
            "layout": layout.facts(),
            "states": self.loaded.states.facts() if self.loaded.states else [],
            "block_size": self._settings.block_size,
            "versions": mlx_adapter.versions(),
            "adapter": "",
            "kv_bits": _quantisation_facts(self._settings),
            "world": [1, 0],
        }
        return namespace_of(self._facts)

    def _describe(self, load: wire.Load, cold: ColdTier | None) -> None:
        """Say in the namespace's folder whose it is, for `omlxd cache`."""
        if cold is not None:
            describe_namespace(
                Path(load.cache.cold_dir),
                self.namespace,
                model_id=load.model_id,
                model_path=load.model_path,
                model_type=self.loaded.model_type,
                block_size=load.cache.block_size,
                block_bytes=cold.bytes_per_block,
                facts=self._facts,
            )

    def _bridge(self, loaded: LoadedModel, space: Space) -> KVBridge:
        assert loaded.layout is not None
        settings = self._settings
        pool = BlockPool(settings.initial_blocks)
        cold = flusher = None
        if settings.cold_dir:
            format = BlockFormat(
                self.namespace,
                loaded.layout,
                settings.block_size,
                read_bytes=transport().read_bytes,
            )
            cold = ColdTier(Path(settings.cold_dir), format)
            queue_bytes = int(psutil.virtual_memory().total * WRITE_QUEUE_FRACTION)
            flusher = Flusher(
                pool,
                StoreWriter(cold, space, max_queue_bytes=queue_bytes),
                self.scheduler.post,
                admission_of(settings.admission),
                settings.write_back,
            )
        hot_budget = self._hot_budget = HotBudget(settings.hot_max_bytes, lambda: pool.hot_bytes)
        store = KVStore(
            block_size=settings.block_size,
            pool=pool,
            hot_budget=hot_budget,
            post=self.scheduler.post,
            cold=cold,
            flusher=flusher,
            space=space if cold else None,
        )
        return KVBridge(loaded.model, loaded.layout, store, self.scheduler.post, self._keeper(loaded, store))

    def _keeper(self, loaded: LoadedModel, store: KVStore) -> StateKeeper | None:
        """For a model with state that exists only at a position."""
        states, settings = loaded.states, self._settings
        if states is None or not states.tensors or loaded.layout is None:
            return None
        files = None
        if settings.cold_dir:
            files = CheckpointFiles(
                Path(settings.cold_dir), self.namespace, states.at, read_bytes=transport().read_bytes
            )
        return StateKeeper(states, loaded.layout, Checkpoints(store, files), settings.block_size)

    def _info(self, load: wire.Load) -> wire.ModelInfo:
        loaded = self.loaded
        reason = loaded.kv_reuse if load.cache.enabled else "--no-cache"
        if reason:
            log.warning("%s: prefixes are not reused: %s", load.model_id, reason)
        return wire.ModelInfo(
            model_id=load.model_id,
            model_type=loaded.model_type,
            context_length=loaded.context_length,
            vocab_size=loaded.vocab_size,
            weight_bytes=loaded.weight_bytes,
            kv_bytes_per_token=loaded.layout.nbytes(1) if loaded.layout else 0,
            kv_reuse=reason,
            namespace=namespace_dir(self.namespace) if loaded.layout else "",
            block_size=load.cache.block_size,
            backend=mlx_adapter.backend(),
            supports_tools=bool(loaded.tokenizer.has_tool_calling),
            supports_thinking=bool(loaded.tokenizer.has_thinking),
            note=_note(Path(load.model_path)),
        )

    # ----------------------------------------------------------------- requests

    def count(self, prompt: Conversation | RawPrompt, session: str = "") -> int:
        """Prompt tokens of `prompt` in `session`. Raises OmlxdError."""
        most = self.loaded.context_length - 1
        return len(self.prompts.render(prompt, scope=Scope(session, ""), most=most).tokens)

    def start(self, id: int, request: GenerateRequest, end: Callable[[], None]) -> Sequence:
        """Render, hash and submit a request; its events go to the output thread. Raises OmlxdError.

        `end()` runs on the output thread after the last event.
        """
        context = min(request.context_limit or self.loaded.context_length, self.loaded.context_length)
        scope = Scope(request.session, request.cache_salt)
        rendered = self.prompts.render(request.prompt, scope=scope, most=context - 1)
        tokens = rendered.tokens
        room = context - len(tokens)
        if room <= 0:
            raise PromptTooLong(len(tokens), context - 1)
        if not tokens:
            raise InvalidRequest("the prompt has no tokens", param="prompt")
        if bad := next((t for t in tokens if not 0 <= t < self.loaded.vocab_size), None):
            raise InvalidRequest(f"token id {bad} is not in this model's vocabulary", param="prompt")
        constraint = self._constraints.compile(request, thinking=rendered.starts_in_thinking)
        wanted = request.sampling.max_tokens
        block = self._settings.block_size
        root = chain_root(self.namespace, request.cache_salt)
        parser = OutputParser(
            self.loaded.tokenizer,
            tools=getattr(request.prompt, "tools", ()) if rendered.tool_calls else (),
            starts_in_thinking=rendered.starts_in_thinking,
            stop=request.sampling.stop,
            reasoning=rendered.reasoning,
            one_call=not getattr(request.prompt, "parallel_calls", True),
        )
        sink = RequestSink(id, self._output, parser, end)
        sequence = Sequence(
            id=id,
            tokens=tokens,
            prompt_length=len(tokens),
            root=root,
            hashes=hash_blocks(root, tokens, block) if self.scheduler.bridge else [],
            max_new=room if wanted is None else min(wanted, room),
            eos=frozenset(self.loaded.tokenizer.eos_token_ids),
            sampler=self._sampler(request, tokens, constraint),
            sink=sink,
            session=request.session,
        )
        lineage = lineage_of(request, rendered, sequence.hashes)
        standing = self._sessions.begin(lineage) if lineage else Standing()
        sequence.shelter = standing.shelter
        sink.over = lambda: self._over(sequence, rendered, lineage, standing)
        sequence.deadline = sequence.received + min(self._timeout_s, request.timeout_s or math.inf)
        sink.stop = lambda: self.scheduler.cancel(sequence)
        sink.usage = lambda: usage_of(sequence)
        sink.learn = lambda answer: self._learn(rendered.place, sequence, answer)
        if isinstance(request.prompt, RawPrompt) and request.prompt.echo:
            sink.echo(self.loaded.tokenizer.decode(tokens))
        self.scheduler.submit(sequence)
        return sequence

    def _over(
        self, sequence: Sequence, rendered: RenderedPrompt, lineage: Lineage | None, standing: Standing
    ) -> None:
        if lineage is not None and not sequence.timed_out:
            self._sessions.end(lineage, sequence.prompt_length // self._settings.block_size)
        self._correctness.note(sequence, rendered, standing)

    def _learn(self, place: Place | None, sequence: Sequence, answer: Answer) -> None:
        """A turn has ended by itself: later prompts get it as it was generated."""
        tokens, start = sequence.tokens, sequence.prompt_length
        if len(tokens) > start and tokens[-1] in sequence.eos:
            self.prompts.learn(place, answer, tokens[:start], tokens[start:-1])

    def _sampler(
        self, request: GenerateRequest, tokens: list[int], constraint: Constraint | None
    ) -> SamplerRow:
        params = RowSampling.of(request.sampling, self._defaults)
        return SamplerRow(
            params,
            prompt=tokens if params.penalised else (),
            constraint=constraint,
            logprobs=request.sampling.logprobs,
        )

    def _tokens(self, request: GenerateRequest) -> list[int]:
        scope = Scope(request.session, request.cache_salt)
        return self.prompts.render(request.prompt, scope=scope, most=self.loaded.context_length - 1).tokens

    def explain(self, request: GenerateRequest, reached: int) -> wire.Explanation:
        """Why `request` misses where it does; see engine/explain.py. Any thread. Raises OmlxdError."""
        bridge, settings = self.scheduler.bridge, self._settings
        tokenizer = self.loaded.tokenizer
        states = bridge.states if bridge is not None else None
        return Explainer(
            tokens_of=self._tokens,
            text_of=lambda tokens: tokenizer.decode(list(tokens)),
            namespace=self.namespace,
            block_size=settings.block_size,
            where=bridge.store.where if bridge is not None else lambda block_hash: "",
            stands=states.checkpoints.stands if states is not None else None,
            root=Path(settings.cold_dir) if settings.cold_dir else None,
            model_id=self.info.model_id,
            model_path=self._path,
            reuse_off=self.info.kv_reuse,
        ).explain(request, reached)

    def set_budget(self, budget: wire.Budget) -> None:
        """What this engine may hold from now on. Any thread."""

        def take() -> None:
            if self.scheduler.memory is not None:
                self.scheduler.memory.take(budget)
            if self.scheduler.bridge is not None:
                self._hot_budget.share = budget.hot
                self.scheduler.bridge.store.trim_hot()
                mx.clear_cache()  # Else what was evicted stays ours.

        self.scheduler.post(take)

    # ----------------------------------------------------------------- figures and the end

    def stats(self) -> dict[str, float]:
        """Counters and gauges by name; vLLM's names where it has one."""
        scheduler = self.scheduler
        values = {
            **scheduler.load_figures(),
            "prompt_tokens_total": float(scheduler.prefilled_tokens),
            "generation_tokens_total": float(scheduler.decoded_tokens),
            **self.prompts.figures(),
            **self._sessions.figures(),
            **self._correctness.figures(),
            "requests_timed_out_total": float(scheduler.watchdog.expired),
            "mlx_active_bytes": float(mx.get_active_memory()),
            "mlx_peak_bytes": float(
                max(mx.get_peak_memory(), scheduler.memory.peak if scheduler.memory else 0)
            ),
            "mlx_load_peak_bytes": float(self._load_peak),
            "mlx_cache_bytes": float(mx.get_cache_memory()),
        }
        if scheduler.bridge is not None:
            values |= _store_figures(scheduler.bridge.store)
        # A flag or a NumPy number among them would be a frame that the front refuses.
        return {name: float(value) for name, value in values.items()}

    def close(self, deadline_s: float) -> None:
        """Flush the store. The scheduler must have stopped."""
        if self._clock is not None:
            self._clock.stop()
        if self.scheduler.bridge is not None and not self.scheduler.bridge.close(deadline_s):
            log.warning("not every block was stored before the deadline")


def _quantisation(settings: wire.CacheSettings) -> Quantisation | None:
    return Quantisation(settings.kv_bits, settings.kv_group_size) if settings.kv_bits else None


def _quantisation_facts(settings: wire.CacheSettings) -> object:
    """Plain JSON, for the namespace."""
    return [settings.kv_bits, settings.kv_group_size] if settings.kv_bits else 0


def _store_figures(store: KVStore) -> dict[str, float]:
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
            "kv_cold_tier_on": float(flusher.health.is_on),
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


def _sampling_defaults(model: Path) -> SamplingDefaults:
    """From generation_config.json, whose `do_sample: false` means greedy."""
    try:
        config = json.loads((model / "generation_config.json").read_text())
    except (OSError, ValueError):
        return SamplingDefaults()
    known = {f: config[f] for f in SamplingDefaults.__slots__ if isinstance(config.get(f), int | float)}
    if config.get("do_sample") is False:
        known["temperature"] = 0.0
    return SamplingDefaults(**known)


def _note(model: Path) -> str:
    """The demo model's own warning."""
    try:
        return str(json.loads((model / "omlxd_demo.json").read_text()).get("note", ""))
    except (OSError, ValueError):
        return ""
