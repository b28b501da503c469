"""A loaded model and all that serves it: scheduler, KV store, prompt pipeline, output.

Built on the engine thread by `load`; its methods are called by the threads that handle requests.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import takewhile
from pathlib import Path

import mlx.core as mx
import msgspec

from ... import wire
from ...chat import Conversation, GenerateRequest, RawPrompt, Sampling, first_image
from ...common.units import CPU_SLOTS, SLOTS
from ...errors import ModelError, PromptTooLong, bad_field
from ...kv.cold.writer import Lease
from ...kv.files.paths import namespace_dir
from ...models.footprint import Footprint, footprint
from ...wire.explanation import Explanation
from ...wire.plan import Trim
from ...wire.token_bytes import COUNTED_CONTEXTS
from .. import mlx_adapter
from ..kvio.bridge import KVBridge
from ..kvio.fingerprint import file_identities
from ..kvio.open_store import ModelStore
from ..output.parser import prepare
from ..output.sink import OutputThread, RequestSink, usage_of
from ..output.unopened import UnopenedThoughts
from ..prompt.pipeline import PromptPipeline, RenderedPrompt
from ..prompt.sessions import Lineage, Sessions, Standing, is_side_request, lineage_of
from ..prompt.template.template import TOOLS_AS_TEXT
from ..prompt.turn_memory import Answer, Scope
from ..schedule.memory_admission import MemoryAdmission
from ..schedule.rehearsal import rehearse
from ..schedule.scheduler import Scheduler
from ..sequence.sequence import Sequence
from ..vision.documents import read_documents
from ..vision.images import Images, make_images, place_images, prompt_with_images
from ..vision.media import Media
from .adapters import Adapters, Served
from .explain import Explainer, ExtraKeys, Placed
from .metrics import TrafficCounters, adapter_metrics, metrics_of
from .model_load import load_model, load_speculation, model_info
from .new_sequence import SequenceMaker
from .ranks.lead import Lead
from .ranks.lead_bridge import LeadBridge
from .request import RequestChecks, parser_of

log = logging.getLogger(__name__)

TIDY_S = 1.0


class EngineHost:
    """`lease`: where the cold tier gets its room. `output`: where events go.

    want  asks the front for memory, which answers by `set_budget`
    lead  of the ranks that share the model; None: this process has all of it
    """

    def __init__(
        self,
        load: wire.Load,
        output: OutputThread,
        lease: Lease,
        want: Callable[[wire.Wants], None] = lambda wants: None,
        lead: Lead | None = None,
    ):
        mlx_adapter.set_limits(0, load.budget)
        # Of this thread, which is the one that samples: MLX's own begin with the time of day.
        mx.random.seed(secrets.randbits(63) if load.seed is None else load.seed)
        self._load = load
        self._output = output
        self._lead = lead
        self._load_model(load)
        prints = footprint(Path(load.model_path), self.loaded.float32)
        self._open_store(load, prints, lease, want)
        self._make_prompts(load)
        takes_images = self.images is not None
        others = lead.others if lead is not None else []
        self.info = model_info(load, self.loaded, self.namespace, prints, self.prompts, takes_images, others)
        kv_off = self.info.kv_reuse if self.scheduler.bridge is None else None
        self._checks = RequestChecks(self.loaded, self.prompts, load.cache.block_size, kv_off, self._unopened)
        self._sequences = SequenceMaker(load, self.loaded)
        base = Served(None, self._store, self.info)
        self.adapters = Adapters(base, load.channel, self.loaded, self.scheduler, lease)
        self._store.read_newest(self.scheduler.post)

    def _load_model(self, load: wire.Load) -> None:
        """The model, its scheduler, and its store, not opened yet. Digests of weights are made beside it."""
        try:
            files = file_identities(Path(load.model_path), load.adapter)
        except FileNotFoundError as error:
            raise ModelError(f"there is no file {error.filename}") from None
        aside = ThreadPoolExecutor(1, thread_name_prefix="digests")
        idle = mlx_adapter.attention_backend().loads_beside_cpu
        digests = aside.submit(ModelStore.weight_digests, load) if idle else None
        aside.shutdown(wait=False)
        self.loaded = load_model(load, self._lead and self._lead.join())
        self.scheduler = Scheduler(
            self.loaded,
            None,
            slots=load.max_concurrent or (CPU_SLOTS if mlx_adapter.backend() == "cpu" else SLOTS),
            block_size=load.cache.block_size,
            speculation=load_speculation(load, self.loaded),
            pass_limit=load.pass_limit,
        )
        mlx_adapter.set_limits(self.loaded.weight_bytes, load.budget)
        if self._lead is None:
            rate = rehearse(self.loaded, load.cache.block_size, load.pass_limit)
            self.scheduler.prefill_budget.begin_with(rate)
        self._store = ModelStore(load, self.loaded, files, digests)
        self.namespace = self._store.namespace
        self._load_peak = mx.get_peak_memory()

    def _open_store(
        self, load: wire.Load, prints: Footprint, lease: Lease, want: Callable[[wire.Wants], None]
    ) -> None:
        """Have the scheduler watch memory and reuse KV, as far as `load` says so."""
        memory = None
        if load.guard:
            self.scheduler.memory = memory = MemoryAdmission(
                self.loaded,
                prints.working,
                want,
                pair=prints.pair,
                chunk=self.scheduler.prefill_budget.largest,
                tower=prints.tower,
            )
            speculation = self.scheduler.speculation
            memory.draft_model = speculation and speculation.draft_model
            memory.take_budget(load.budget)
        if self._lead is not None and self.loaded.layout is None:
            raise ModelError(f"several ranks can't serve this model: {self.loaded.kv_reuse}", param="--ranks")
        if self.loaded.layout is not None and load.cache.enabled:
            bridge = self._open_bridge(lease)
            bridge.reads.warm_up()
            bridge.weights_changed = self.loaded.mapped.changed
            if memory is not None:
                memory.store = bridge.store
                self._store.leave_room_for(lambda: memory.promised([*self.scheduler.running]))

    def _open_bridge(self, lease: Lease) -> KVBridge:
        if self._lead is None:
            self.scheduler.bridge = self._store.open(lease, self.scheduler.post)
            return self.scheduler.bridge
        bridge = self._store.open(self._lead.lease_of(0), self.scheduler.post, LeadBridge)
        bridge.lead, self.scheduler.bridge = self._lead, bridge
        self.scheduler.passes.on_ranks = bridge
        namespace, scheduler = namespace_dir(self.namespace), self.scheduler
        self._lead.begin(self.loaded.model, namespace, bridge.store, scheduler.post, scheduler.counts)
        if not self.loaded.batchable:
            log.warning("requests have a pass each: on %d ranks they can't share one", self._lead.world)
        return bridge

    def _make_prompts(self, load: wire.Load) -> None:
        """What reads prompts and images, and remembers of them."""
        self.media = Media()
        self._most_images = load.prompts.max_images
        self.prompts = PromptPipeline(
            self.loaded.tokenizer,
            turn_memory=load.prompts.healing,
            hoist_system=load.prompts.hoist_system,
            files=self._store.turns,
            read_documents=self._read_documents,
            images=self.loaded.blind == "",
            starts_in_thinking=load.prompts.starts_in_thinking,
        )
        self.images = self.scheduler.images = self._make_images()
        self._unopened = UnopenedThoughts(load.model_id)
        self._sessions = Sessions()
        self._traffic = TrafficCounters(load.cache.block_size)
        prepare(self.loaded.tokenizer)
        for note in self.prompts.notes:
            log.info("%s: %s", load.model_id, note)
        self._warns_of_tools = not self.prompts.traits.tools

    def _make_images(self) -> Images | None:
        """None for a model that takes none; `loaded.blind` says why."""
        if self.loaded.blind != "":
            return None
        try:
            shown, files = self.prompts.traits.image, self._store.images
            images = make_images(Path(self._load.model_path), shown, self.loaded.model, self.media, files)
        except ModelError as error:
            self.loaded.blind = error.message
            return None
        threading.Thread(target=images.warm_up, name="first-image", daemon=True).start()
        return images

    # ----------------------------------------------------------------- requests

    def count(self, prompt: Conversation | RawPrompt, session: str = "", id: int = 0) -> int:
        """Prompt tokens of `prompt` in `session`; `id`: of the question. Raises OmlxdError."""
        served = self.adapters.of_request(id)
        most = self.loaded.context_length - 1
        refuse = COUNTED_CONTEXTS * most
        try:
            rendered = self.prompts.render(
                prompt, scope=Scope(session, served.salt("")), most=most, refuse=refuse
            )
            return len(place_images(rendered, self.images, refuse)[0])
        except PromptTooLong as error:
            raise PromptTooLong(error.tokens, most, least=error.least) from None

    def start(self, id: int, request: GenerateRequest, end: Callable[[], None]) -> Sequence:
        """Render, hash and submit a request; its events go to the output thread. Raises OmlxdError.

        `end()` runs on the output thread after the last event.
        """
        self._check_mapping()
        served = self.adapters.of_request(id)
        context = self._context(request)
        rendered = self._render(served, request, context)
        if rendered.tool_calls and self._warns_of_tools:
            self._warns_of_tools = False
            log.warning("%s: its chat template has no tools: %s", self.info.model_id, TOOLS_AS_TEXT)
        tokens, images = place_images(rendered, self.images, context - 1)
        checked = self._checks.check(request, rendered, tokens, images, context)

        def over() -> None:
            self.prompts.end(rendered.place)
            end()

        parser = parser_of(request, rendered, self.loaded.tokenizer, self._unopened)
        sink = RequestSink(id, self._output, parser, over)
        sequence = self._sequences.make(
            id, request, checked, served, sink, has_store=self.scheduler.bridge is not None
        )
        if images is not None:
            images.fetch(self._cached_tokens(sequence))
        lineage = lineage_of(request, rendered, sequence.kv.hashes)
        standing = self._sessions.begin(lineage) if lineage else Standing()
        sequence.prompt.pins = standing.pins
        sequence.prompt.side = is_side_request(request, standing)
        sink.name = sequence.name
        sink.over = lambda: self._over(sequence, rendered, lineage, standing)
        sink.stop = lambda: self.scheduler.cancel(sequence)
        sink.usage = lambda: usage_of(sequence)
        sink.is_silent = checked.wanted == 0
        sink.hides_thinking = request.hides_thinking
        if request.return_token_ids:
            sink.prompt = tuple(checked.tokens)
        sink.shows_stop = request.sampling.shows_stop
        if not checked.labels and not sink.is_silent and _is_turn(request.sampling):
            sink.learn = lambda answer, count: self._learn(rendered, sequence, answer, count)
        if isinstance(request.prompt, RawPrompt) and request.prompt.echo:
            sink.echo(self.loaded.tokenizer.decode(checked.tokens))
        self.prompts.begin(rendered)
        self.scheduler.submit(sequence)
        return sequence

    def _check_mapping(self) -> None:
        if changed := self.loaded.mapped.changed():
            raise ModelError(
                f"{changed} was written to under its mapping; the model is loaded again: ask again"
            )

    def _over(
        self, sequence: Sequence, rendered: RenderedPrompt, lineage: Lineage | None, standing: Standing
    ) -> None:
        if lineage is not None and not sequence.timed_out:
            self._sessions.end(lineage, sequence.prompt.length // self._load.cache.block_size)
        self._traffic.note_request(sequence, rendered, standing)

    def cancel(self, sequence: Sequence) -> None:
        """The client of `sequence` has gone away. Any thread."""
        sink = sequence.sink  # First: the engine thread lets it go, at the latest when it takes this cancel.
        self.scheduler.cancel(sequence)
        if sink is not None:  # Else the answer's last event is on its way.
            sink.abandon()

    def _learn(self, rendered: RenderedPrompt, sequence: Sequence, answer: Answer, count: int) -> None:
        """A turn of `count` tokens is over, but for the one that ends turns: later prompts get it as it was
        generated, each image a placeholder again."""
        tokens, start = sequence.tokens, sequence.prompt.length
        if len(tokens) > start and not sequence.timed_out:
            prompt = tokens[:start] if sequence.prompt.images is None else rendered.tokens
            self.prompts.learn(rendered.place, answer, prompt, tokens[start : start + count])

    def _render(self, served: Served, request: GenerateRequest, context: int) -> RenderedPrompt:
        scope = Scope(request.session, served.salt(request.cache_salt))
        return self.prompts.render(request.prompt, scope=scope, most=context - 1, refuse=context - 1)

    def _read_documents(self, prompt: Conversation) -> Conversation:
        """`prompt` with its PDFs as texts or images. Raises InvalidRequest."""
        if self.loaded.blind and (image := first_image(prompt)):
            raise bad_field(image.param or "messages", f"this model takes no images: {self.loaded.blind}")
        sees = self.images is not None
        return read_documents(prompt, self.media, sees=sees, most_images=self._most_images)

    def _cached_tokens(self, sequence: Sequence) -> int:
        """Tokens of the prompt that are cached now: whose images need no pixels."""
        if (bridge := self.scheduler.bridge) is None:
            return 0
        cached = takewhile(bridge.store.where, sequence.kv.hashes)
        return sum(1 for _ in cached) * self._load.cache.block_size

    def _context(self, request: GenerateRequest) -> int:
        return min(request.context_limit or self.loaded.context_length, self.loaded.context_length)

    def explain(self, id: int, request: GenerateRequest, reached: int) -> Explanation:
        """Why `request` misses where it does; see engine/server/explain.py. Any thread. Raises OmlxdError."""
        return self._explainer(id, lambda rendered: None).explain_request(request, reached)

    def cached_files(self, id: int, request: GenerateRequest) -> Explanation:
        """Which files `request` is restored from now, records of its turns last. Raises OmlxdError."""
        records: list[str] = []

        def note(rendered: RenderedPrompt) -> None:
            places = [*rendered.turns, *([rendered.place] if rendered.place is not None else ())]
            records.extend(self.prompts.memory.files_of(places) if self.prompts.memory is not None else ())

        found = self._explainer(id, note).files_of(request)
        return msgspec.structs.replace(found, files=(*found.files, *records)) if found.files else found

    def _explainer(self, id: int, note: Callable[[RenderedPrompt], None]) -> Explainer:
        """`note` is given each prompt that it renders."""
        served = self.adapters.of_request(id)

        def prompt_of(request: GenerateRequest) -> tuple[list[int], ExtraKeys, list[Placed]]:
            rendered = self._render(served, request, self._context(request))
            note(rendered)
            return prompt_with_images(rendered, self.images, settings.block_size)

        bridge, settings = served.bridge, self._load.cache
        tokenizer = self.loaded.tokenizer
        states = bridge.states if bridge is not None else None
        return Explainer(
            prompt_of=prompt_of,
            text_of=lambda tokens: tokenizer.decode(list(tokens)),
            namespace=served.namespace,
            block_size=settings.block_size,
            where=bridge.store.where if bridge is not None else lambda block_hash: "",
            stands=states.checkpoints.stands if states is not None else None,
            root=Path(settings.cold_dir) if settings.cold_dir else None,
            model_id=served.info.model_id,
            model_path=self._load.model_path,
            reuse_off=self.info.kv_reuse,
        )

    def set_pass_limit(self, tokens: int) -> None:
        """Bound the passes over prompts, as `wire.Load` does. Any thread."""

        def bound() -> None:
            self.scheduler.prefill_budget.set_limit(tokens)
            if self.scheduler.memory is not None:
                self.scheduler.memory.chunk = self.scheduler.prefill_budget.largest

        self.scheduler.post(bound)

    def set_budget(self, budget: wire.Budget) -> None:
        """What this engine may hold from now on. Any thread."""

        if self._lead is not None:
            budget = self._lead.share(budget)

        def take() -> None:
            if self.scheduler.memory is not None:
                self.scheduler.memory.take_budget(budget)
            for store in (self._store, *self.adapters.stores()):
                store.share_hot(budget.hot)
            mlx_adapter.set_limits(self.loaded.weight_bytes, budget)

        self.scheduler.post(take)

    def tidy_memory(self, trim: bool, reset_peak: bool) -> None:
        """Do so on the engine thread; returns once it is done, or after `TIDY_S`: a pass may be long.

        trim        give back freed arrays, images' features and RAM blocks that no request uses
        reset_peak  count MLX's peak anew
        """
        done = threading.Event()

        def tidy() -> None:
            if trim:
                self.scheduler.give_memory_back(everything=True)
                if self._lead is not None:
                    self._lead.send(Trim())
            if reset_peak:
                mx.reset_peak_memory()
                if self.scheduler.memory is not None:
                    self.scheduler.memory.peak = 0
            done.set()

        self.scheduler.post(tidy)
        done.wait(TIDY_S)

    # ----------------------------------------------------------------- figures and the end

    @property
    def channels(self) -> list[int]:
        """Of the model and of its adapters (wire/)."""
        return self.adapters.channels

    def engine_stats(self, id: int = 0) -> dict[str, float]:
        """Counters and gauges by name; vLLM's names where it has one. Of an adapter, its own alone."""
        served = self.adapters.find(id)
        if served is None:
            return {}
        if served.adapter is not None:
            return adapter_metrics(self.scheduler, served.adapter)
        values = {
            **metrics_of(self.scheduler, self._load_peak),
            **self.prompts.figures(),
            **self._sessions.figures(),
            **self._traffic.metrics(),
            "adapter_bytes": self.adapters.nbytes,
            **(self.images.figures() if self.images is not None else {}),
        }
        if self._lead is not None:
            self._lead.add_figures(values)
        # A flag or a NumPy number among them would be a frame that the front refuses.
        return {name: float(value) for name, value in values.items()}

    def peer_trouble(self, id: int = 0) -> str:
        """Why nothing comes from --peer, a clause; "": it may, or there is none."""
        served = self.adapters.find(id)
        bridge = self.scheduler.bridges.get(served.adapter) if served is not None else None
        return bridge.peer.trouble if bridge is not None and bridge.peer is not None else ""

    @property
    def disk_hangs(self) -> bool:
        """Whether somebody waits in vain for the SSD cache's folder. Any thread."""
        return any(store.hangs for store in (self._store, *self.adapters.stores()))

    def close(self, deadline_s: float) -> None:
        """Flush the stores. The scheduler must have stopped."""
        end = time.monotonic() + deadline_s
        if self._lead is not None:
            self._lead.quit(deadline_s)
        for store in (self._store, *self.adapters.stores()):
            store.close(max(0.0, end - time.monotonic()))
        if self._lead is not None:
            self._lead.wait_closed(max(0.0, end - time.monotonic()))


def _is_turn(sampling: Sampling) -> bool:
    """Whether the answer is one as templates write it, and may be put back into later prompts."""
    return not (sampling.ignore_eos or sampling.shows_special or sampling.shows_stop)
