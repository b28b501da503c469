"""Continuous batching: which sequence gets the next piece of the device's time.

Prompts are computed pass by pass (engine/schedule/prefill.py). Between the layers of a pass that may take
long, or beside which others decode, the scheduler looks up: rows whose step is due get it, a request that
was cancelled or whose time is up ends the pass, and a layer counts as progress.

Passes end on block boundaries, and the last one begins at the last boundary before the prompt's
end, whatever was restored: cached and uncached runs give their first logits from a forward pass of
the same shape.

Runs on the engine thread alone; `submit`, `cancel` and `post` may be called from any thread.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import mlx.core as mx

from ...chat import FinishReason, Progress
from ...errors import OmlxdError
from .. import mlx_adapter
from ..kvio.bridge import KVBridge, last_token_alone
from ..kvio.hot_budget import evict_unused
from ..mlx_adapter import Adapter, CompiledStep, LoadedModel, PromptCacheFile
from ..sequence import LabelScores, Likelihood, Sequence, State
from ..vision.images import Images
from .decode_batch import DecodeBatch, best_batch
from .draft_model import clock
from .memory_admission import MemoryAdmission
from .prefill import SMOOTHING, TOGETHER, PrefillBudget, compute_chunk, compute_ends, slice_seconds
from .queue import Inbox, RequestQueue, Watchdog
from .sampling import NO_TOKEN, sample_one
from .scoring import score, tokens_to_score
from .speculation import Speculation

log = logging.getLogger(__name__)

LONG_PASS_S = 0.2
"""Seconds above which a pass is looked into between its layers."""

SHORT_S = 0.2
"""Seconds between two looks at whether there is memory for who is next."""
IDLE_S = 5.0
"""Seconds without work after which memory is given back, and between two looks at it."""


class Interrupted(Exception):
    """The request whose pass is being computed has been cancelled."""


class Sink(Protocol):
    """Where a sequence's output goes. Called on the engine thread; must not block."""

    def progress(self, event: Progress) -> None: ...

    def token(self, token: int, likelihood: Likelihood | None) -> None: ...

    def scored(self, scores: LabelScores) -> None: ...

    def finished(self, sequence: Sequence, reason: FinishReason) -> None: ...

    def failed(self, sequence: Sequence, error: OmlxdError) -> None: ...


class Scheduler:
    """Runs the sequences of one model.

    bridge       None: no reuse; `bridges`: those of adapters, whose KV is their own
    slots        sequences that hold a cache at once
    speculation  passes may check guesses; None: they don't
    """

    def __init__(
        self,
        loaded: LoadedModel,
        bridge: KVBridge | None,
        *,
        slots: int,
        block_size: int,
        speculation: Speculation | None = None,
    ):
        self._loaded = loaded
        self._model = loaded.model
        self.bridge = bridge
        self.bridges: dict[Adapter, KVBridge] = {}
        self._changes: list[Callable[[], None]] = []
        self._slots = slots
        self._block = block_size
        self._compiled = CompiledStep(self._model)
        self._inbox = Inbox()
        self.waiting = RequestQueue()
        self.running: list[Sequence] = []  # They hold a slot each.
        self._batches: list[DecodeBatch] = []
        self._last_alone = last_token_alone()
        states = loaded.states
        plain = loaded.batchable and states is not None and not states.tensors
        self._merges_prompts = plain and mlx_adapter.backend() != "cuda"  # See `TOGETHER`.
        self.prefill_budget = PrefillBudget(block_size)
        self.watchdog = Watchdog(self._cancel)
        self._stopping = False
        self.memory: MemoryAdmission | None = None
        self.images: Images | None = None
        self._short = False  # Who is next waits for memory.
        self._computing: list[Sequence] = []
        self._decode_s = self._step_s = self._layer_s = 0.0  # All steps; a step, a layer beside the other.
        self._looked_at = self._stepped_at = 0.0  # When the last layer began, when the last step ended.
        self.speculation = speculation
        self.prefilled_tokens = 0
        self.decoded_tokens = 0
        self.steps = 0

    # ----------------------------------------------------------------- from other threads

    def post(self, call: Callable[[], None]) -> None:
        """Run `call` on the engine thread, soon."""
        self._inbox.post(call)

    def change_model(self, call: Callable[[], None]) -> None:
        """Run `call` on the engine thread while no pass is under way."""
        self.post(lambda: self._changes.append(call))

    def submit(self, sequence: Sequence) -> None:
        self.post(lambda: self.waiting.add_request(sequence))

    def cancel(self, sequence: Sequence) -> None:
        """Stop `sequence` and give its slot to another; what it computed stays cached."""
        sequence.cancelled = True
        self.post(lambda: self._cancel(sequence))

    def stop(self) -> None:
        self.post(self._stop)

    # ----------------------------------------------------------------- the loop

    def run(self) -> None:
        """Until `stop`. An exception inside a step fails that step's sequences and no others."""
        while not self._stopping:
            self.turn()

    def turn(self) -> None:
        """One pass of a prompt, and a step of every batch if that is due. Waits if there is no work."""
        self._drain(block=not self._busy())
        while self._changes:
            self._changes.pop(0)()
        self.watchdog.check((*self.waiting, *self.running))
        self._admit()
        prefilling = self._prefill_one()
        if not prefilling or self._step_due():
            self._decode(beside_prefill=prefilling)

    def _busy(self) -> bool:
        return (
            bool(self._batches)
            or any(sequence.state is State.PREFILLING for sequence in self.running)
            or bool(self.waiting and not self._short and len(self.running) < self._slots)
        )

    def _drain(self, block: bool) -> None:
        """Do what other threads have posted; wait for something if `block`."""
        patience = SHORT_S if self._short else IDLE_S
        if not self._inbox.drain(patience if block else 0.0) and block:
            self.give_memory_back()

    def give_memory_back(self, everything: bool = False) -> None:
        """Give back what others may need more. `everything`: blocks in RAM that no sequence uses, too."""
        for bridge in self.all_bridges:
            if everything:
                evict_unused(bridge.store)
            bridge.store.trim_hot()
        dropped = self.images is not None and self.images.give_memory_back()
        mlx_adapter.give_memory_back()
        if dropped or everything:
            mlx_adapter.trim_heap()

    def _stop(self) -> None:
        self._stopping = True
        error = OmlxdError("the engine is shutting down", code="unavailable", retry_after=5)
        for sequence in [*self.waiting, *self.running]:
            self._fail(sequence, error)

    @property
    def all_bridges(self) -> list[KVBridge]:
        return [*([self.bridge] if self.bridge is not None else []), *self.bridges.values()]

    def _bridge_of(self, sequence: Sequence) -> KVBridge | None:
        return self.bridge if sequence.adapter is None else self.bridges.get(sequence.adapter)

    def uses(self, adapter: Adapter) -> bool:
        """Whether a sequence that waits or runs has `adapter`."""
        return any(sequence.adapter is adapter for sequence in (*self.waiting, *self.running))

    @property
    def active_sequences(self) -> int:
        """Sequences that wait for a slot or hold one. Any thread."""
        return len(self.running) + len(self.waiting) + len(self._inbox)

    @property
    def progress(self) -> int:
        """Grows while work gets done: steps, and blocks that are read from disk. Any thread."""
        return self.steps + sum(bridge.store.stats.restored for bridge in self.all_bridges)

    def load_metrics(self) -> dict[str, float]:
        """Gauges. Any thread: a torn read costs nothing."""
        return {
            "num_requests_running": len(self.running),
            "num_requests_waiting": len(self.waiting),
            "prefill_tokens_per_s": self.prefill_budget.rate,
        }

    # ----------------------------------------------------------------- admission

    def _admit(self) -> None:
        stuck: Sequence | None = None
        while len(self.running) < self._slots:
            sequence = self.waiting.next_request(self.running, stuck)
            if sequence is None:
                break
            try:
                if self.memory and not self.memory.has_room_for(sequence, self.running, stuck):
                    if stuck is not None:
                        break  # Nor is there memory for the shortest.
                    stuck = sequence
                    continue
                self.waiting.take_request(sequence)
                self.running.append(sequence)
                sequence.state = State.PREFILLING
                sequence.admitted = time.monotonic()
                self._match(sequence)
            except Exception as error:
                if not isinstance(error, OmlxdError):
                    log.exception("admission failed")
                self._fail(sequence, _internal(error))
        self._short = stuck is not None

    def _match(self, sequence: Sequence) -> bool:
        """Give a sequence its cached prefix. True: the disk is read first, and `_restored` follows."""
        if (bridge := self._bridge_of(sequence)) is None or sequence.kv_from is not None:
            return False
        began = time.monotonic()

        def restored() -> None:
            sequence.restore_s += time.monotonic() - began
            self._restored(sequence)

        if not bridge.match(sequence, restored):
            sequence.restore_s += time.monotonic() - began
            return False
        sequence.state = State.RESTORING  # Not if that raised: somebody has to settle it.
        return True

    def _restored(self, sequence: Sequence) -> None:
        self.steps += 1
        if sequence.cancelled or sequence.state is State.DONE:
            self._release(sequence)
        else:
            sequence.state = State.PREFILLING

    # ----------------------------------------------------------------- prefill

    def _prefill_one(self) -> bool:
        """One pass of one sequence. False: none is prefilling."""
        sequences = [sequence for sequence in self.running if sequence.state is State.PREFILLING]
        if not sequences:
            return False
        together = [self.prefill_budget.pick_sequence(sequences)]
        if self._merges_prompts:
            together = self.prefill_budget.ends_together(together[0], sequences)
        with self._over_if_broken(together):
            if len(together) > 1:
                self._prefill_ends(together)
            else:
                self._prefill(together[0])
        return True

    @contextmanager
    def _over_if_broken(self, sequences: list[Sequence]) -> Iterator[None]:
        """Compute something of `sequences`, which end if that is interrupted or fails."""
        try:
            yield
        except Interrupted:
            for sequence in sequences:
                sequence.cache = None  # Half written. What earlier passes computed has been offered.
                self._release(sequence)
        except Exception as error:
            if not isinstance(error, OmlxdError):
                log.exception("prefill failed")
            for sequence in sequences:
                self._fail(sequence, _internal(error))

    def _cut(self, sequence: Sequence) -> None:
        """Before the prompt's last pass, whatever was restored and whoever shares: bits follow the cuts."""
        if sequence.cache is not None and sequence.kv_length >= sequence.last_boundary(self._block):
            self._loaded.segments.cut(
                sequence.cache, sequence.hashes, self._block, sequence.capacity, last=True
            )

    def _begin(self, sequence: Sequence) -> None:
        """Report what was restored, before the first pass of a sequence."""
        if not sequence.begun:
            sequence.begun = True
            sequence.sink.progress(Progress(sequence.kv_length, sequence.prompt_length))

    def _prefill_ends(self, sequences: list[Sequence]) -> None:
        """Compute the ends of several prompts in one pass; their batch's next step draws the first tokens."""
        waits = False
        for sequence in sequences:  # What one cuts the next one shares, before it has its own.
            waits |= self._match(sequence)
            self._cut(sequence)
        if waits:
            return  # As in `_prefill`; the others' turn comes again.
        if any(sequence.kv_length < sequence.last_boundary(self._block) for sequence in sequences):
            self._prefill(sequences[0])  # Blocks have gone meanwhile.
            return
        for sequence in sequences:
            self._begin(sequence)
        tokens = sum(sequence.remaining_prefill for sequence in sequences)
        with self._looking_up(sequences, self.prefill_budget.seconds(tokens) > LONG_PASS_S):
            cache = compute_ends(self._model, sequences)
        batch = self._batch_for(max(sequences, key=lambda sequence: sequence.kv_length))
        try:
            batch.add_prompts(sequences, cache)
        except Exception as error:
            self._batches = [other for other in self._batches if other is not batch]
            for sequence in batch.rows:
                self._fail(sequence, _internal(error))
            raise
        self.steps += 1
        self.prefilled_tokens += tokens
        for sequence in sequences:
            sequence.state = State.DECODING
        self._leave(batch, [sequence for sequence in sequences if sequence.cancelled])

    def _take_file(self, sequence: Sequence, file: PromptCacheFile) -> None:
        """Verify some of the KV in `file`; once all is done, go on behind it as behind a cached prefix."""
        bridge = self._bridge_of(sequence)
        assert bridge is not None
        if sequence.checked is None:
            sequence.checked = mlx_adapter.checked_kv(self._loaded, file, sequence.tokens, self._block)
        self.steps += 1
        with mlx_adapter.row_adapters([sequence.adapter]):
            cache = next(sequence.checked)
        if cache is not None:
            sequence.kv_from = sequence.checked = None
            bridge.adopt(sequence, cache, file.at)

    def _prefill(self, sequence: Sequence) -> None:
        if sequence.kv_from is not None:
            self._take_file(sequence, sequence.kv_from)
            return
        if self._match(sequence):
            return  # Somebody has computed it meanwhile, and it lies on disk.
        length, start = sequence.prompt_length, sequence.kv_length
        if sequence.cache is None:
            sequence.cache = mlx_adapter.new_cache(self._model, sequence.capacity)
        self._begin(sequence)
        self._cut(sequence)
        stop = self.prefill_budget.next_stop(sequence)
        if sequence.images is not None:
            # A CPU may take minutes.
            with self._looking_up([sequence], mlx_adapter.backend() == "cpu"):
                saw = sequence.images.see_next(start, stop)
            if saw:
                self.steps += 1
                return  # A turn for each image: what else waits has its own in between.
        if sequence.labels and stop == length:
            self._score(sequence)
            return
        if self.memory is not None:
            self.memory.begin_chunk()
        began, decoded = time.perf_counter(), self._decode_s
        compared = clock()
        logits = self._compute(sequence, stop)
        if self.speculation is not None and decoded == self._decode_s:
            mx.eval(logits if stop == length else [])
            self.speculation.times.record_prompt(stop - start, clock() - compared)
        if stop < length:
            self.prefill_budget.record_pass(
                stop - start, time.perf_counter() - began - (self._decode_s - decoded)
            )
            if (bridge := self._bridge_of(sequence)) is not None:
                bridge.reads.rates.prefill = self.prefill_budget.rate
            if self.memory is not None and decoded == self._decode_s:
                self.memory.end_chunk(start, stop)
        self.steps += 1
        self.prefilled_tokens += stop - start
        sequence.kv_length = stop
        sequence.peak_bytes = max(sequence.peak_bytes, mx.get_peak_memory())
        if stop < length:
            del logits
            self._offer(sequence)
            sequence.sink.progress(Progress(stop, length))
            return
        self._first_token(sequence, logits[:, -1, :])

    def _score(self, first: Sequence) -> None:
        """Score the labels of `first`, which stands at its prompt's end, and of others that do."""
        together, tokens = [first], tokens_to_score(first)
        for other in sorted(self.running, key=lambda sequence: sequence.arrival):
            alone = first.images or other.images or not self._loaded.batchable
            if other is first or alone or not other.labels or other.state is not State.PREFILLING:
                continue
            if self._match(other) or other.kv_length < other.last_boundary(self._block):
                continue
            if tokens + (more := tokens_to_score(other)) > TOGETHER:
                break
            if other.cache is None:
                other.cache = mlx_adapter.new_cache(self._model, other.capacity)
            self._begin(other)
            self._cut(other)
            together.append(other)
            tokens += more
        with self._over_if_broken(together):
            with self._looking_up(together, self.prefill_budget.seconds(tokens) > LONG_PASS_S):
                found = [*score(self._loaded, together)]
            self.steps += 1
            for sequence, scores in found:
                self.prefilled_tokens += sequence.remaining_prefill
                sequence.peak_bytes = max(sequence.peak_bytes, mx.get_peak_memory())
                if scores is None:
                    self._spoiled(sequence)
                elif not sequence.cancelled:
                    sequence.first_token_s = time.monotonic() - sequence.received
                    sequence.stored.clear()
                    sequence.sink.scored(scores)
                    sequence.sink.finished(sequence, "stop")
                self._release(sequence)

    def _compute(self, sequence: Sequence, stop: int) -> mx.array:
        """As `compute_chunk`. Raises Interrupted, the cache half written, when `sequence` is cancelled."""
        long = self.prefill_budget.seconds(stop - sequence.kv_length) > LONG_PASS_S
        with self._looking_up([sequence], long):
            return compute_chunk(self._model, sequence, stop, last_alone=self._last_alone)

    @contextmanager
    def _looking_up(self, sequences: list[Sequence], long: bool) -> Iterator[None]:
        """Compute something of `sequence`; look up between layers if it is `long`, or rows decode."""
        hook = self._loaded.hook
        if self._batches or long:
            hook.call = self._between_layers
        self._computing = sequences
        self._looked_at = time.perf_counter()
        try:
            yield
        finally:
            hook.call, self._computing = None, []

    def _between_layers(self) -> None:
        hook = self._loaded.hook
        self._layer_s = time.perf_counter() - self._looked_at
        self.steps += 1
        self._drain(block=False)
        self.watchdog.check((*self.waiting, *self.running))
        if all(sequence.cancelled for sequence in self._computing):
            raise Interrupted
        if self._step_due():
            hook.call = None
            self._decode(beside_prefill=True)
            hook.call = self._between_layers
        self._looked_at = time.perf_counter()

    def _first_token(self, sequence: Sequence, logits: mx.array) -> None:
        assert sequence.cache is not None
        if sequence.keys_file:
            attention: list[mx.array] | None = None
            if sequence.query is not None:
                at = sequence.query % sequence.prompt_length
                with mlx_adapter.row_adapters([sequence.adapter]):
                    attention = mlx_adapter.attention_from(
                        self._model, sequence.cache, sequence.tokens[at], at
                    )
            mlx_adapter.write_keys(
                Path(sequence.keys_file), sequence.cache, sequence.kv_length, sequence.values, attention
            )
        if sequence.write_kv is not None:
            sequence.write_kv(sequence.cache)
        token, likelihood = sample_one(sequence.sampler, logits)
        self.decoded_tokens += 1
        mlx_adapter.after_prefill(sequence.cache, sequence.kv_length)
        if self._accept(sequence, token, likelihood):
            # The token is out; now there is time to store the last blocks.
            self._offer(sequence)
            sequence.state = State.DECODING
            self._batch_for(sequence).add_row(sequence)
        else:
            self._release(sequence)

    # ----------------------------------------------------------------- decode

    def _batch_for(self, sequence: Sequence) -> DecodeBatch:
        """One that gains by taking the sequence in; else a new one."""
        best = best_batch(self._batches, sequence, self._loaded)
        if best is None:
            states = self._loaded.states
            grid = self._block if states is not None and states.tensors else 0
            best = DecodeBatch(self._model, self.speculation, grid, self._compiled)
            self._batches.append(best)
        return best

    def _step_due(self) -> bool:
        since = time.perf_counter() - self._stepped_at
        return bool(self._batches) and since >= slice_seconds(self._step_s, self._layer_s)

    def _decode(self, *, beside_prefill: bool) -> None:
        """Run a step of every batch; wait for its end beside a prefill, so that each is timed by itself."""
        began = time.perf_counter()
        for batch in list(self._batches):
            self._step(batch)
        if beside_prefill:
            for batch in self._batches:
                batch.wait()
        self._stepped_at = time.perf_counter()
        took = self._stepped_at - began
        self._decode_s += took
        if beside_prefill:  # One slow step is no reason to keep decoders waiting as long again.
            usual = self._step_s or took
            self._step_s = min(took, (1 - SMOOTHING) * usual + SMOOTHING * took)

    def _step(self, batch: DecodeBatch) -> None:
        rows = list(batch.rows)
        try:
            self.steps += 1
            tokens = batch.step()
            ended: list[Sequence] = []
            for sequence, token, likelihood in tokens:
                if sequence not in ended:
                    self.decoded_tokens += 1
                    if not self._accept(sequence, token, likelihood):
                        sequence.kv_length = min(sequence.kv_length, len(sequence.tokens))
                        ended.append(sequence)
            self._leave(batch, ended)
            for sequence in batch.rows:
                self._offer(sequence, batch)
        except Exception as error:
            log.exception("decode failed")
            self._batches = [other for other in self._batches if other is not batch]
            for sequence in rows:
                self._fail(sequence, _internal(error))

    def _leave(self, batch: DecodeBatch, rows: list[Sequence]) -> None:
        if not rows:
            return
        for sequence in rows:
            self._finish(sequence, batch)
        batch.remove_rows(rows)
        if not batch.rows:
            self._batches.remove(batch)
        for sequence in rows:
            self._over(sequence)

    def _offer(self, sequence: Sequence, batch: DecodeBatch | None = None) -> None:
        if (bridge := self._bridge_of(sequence)) is not None:
            bridge.offer(sequence, batch)
            if self.bridges:  # They divide one RAM tier, and another one's share may have shrunk.
                for other in self.all_bridges:
                    other.store.trim_hot()

    def _finish(self, sequence: Sequence, batch: DecodeBatch | None = None, *, spoiled: bool = False) -> None:
        if (bridge := self._bridge_of(sequence)) is not None:
            bridge.finish(sequence, batch, spoiled=spoiled)

    def _accept(self, sequence: Sequence, token: int, likelihood: Likelihood | None) -> bool:
        """Take a sampled token. False: the sequence ends with it."""
        if token == NO_TOKEN:
            self._spoiled(sequence)
            return False
        sequence.first_token_s = sequence.first_token_s or time.monotonic() - sequence.received
        sequence.stored.clear()  # Its KV so far gave finite logits.
        sequence.peak_bytes = max(sequence.peak_bytes, mx.get_peak_memory())
        sequence.tokens.append(token)
        if sequence.cancelled:
            return False
        if token in sequence.eos:
            sequence.sink.finished(sequence, "stop")
            return False
        sequence.sink.token(token, likelihood)
        full = len(sequence.tokens) >= self._loaded.context_length
        if sequence.generated >= sequence.max_new or full:
            sequence.sink.finished(sequence, "length")
            return False
        return True

    def _spoiled(self, sequence: Sequence) -> None:
        """Logits are not finite: fail the request and withdraw the KV that it stored."""
        if not sequence.cancelled:
            sequence.sink.failed(sequence, OmlxdError("the model's logits are not numbers", code="internal"))
        self._finish(sequence, spoiled=True)
        sequence.cancelled = True

    # ----------------------------------------------------------------- ends

    def _cancel(self, sequence: Sequence) -> None:
        sequence.cancelled = True
        if sequence.state is State.WAITING:
            self.waiting.remove_request(sequence)
            self._over(sequence)
        elif sequence.state is State.PREFILLING and sequence not in self._computing:
            self._release(sequence)
        elif sequence.state is State.DECODING:
            for batch in list(self._batches):
                if sequence in batch.rows:
                    self._leave(batch, [sequence])
        # RESTORING: `_restored` releases it once the I/O threads have let go of its arrays. Whose pass
        # is being computed is released when that is interrupted.

    def _release(self, sequence: Sequence) -> None:
        """Slot, cache and references back."""
        self._finish(sequence)
        self._over(sequence)

    def _fail(self, sequence: Sequence, error: OmlxdError) -> None:
        if sequence.state is State.DONE:
            return
        if not sequence.cancelled:
            sequence.sink.failed(sequence, error)
        sequence.cancelled = True
        if sequence.state is State.RESTORING or sequence in self._computing:
            return  # As in `_cancel`.
        sequence.cache = None
        self._finish(sequence)
        self.waiting.remove_request(sequence)
        self._over(sequence)

    def _over(self, sequence: Sequence) -> None:
        """Nothing of it is held any more; its sink, which holds it, is let go."""
        sequence.cache = sequence.last_checkpoint = sequence.checked = sequence.sink = None
        sequence.state = State.DONE
        if sequence in self.running:
            self.running.remove(sequence)


def _internal(error: Exception) -> OmlxdError:
    if isinstance(error, OmlxdError):
        return error
    return OmlxdError(f"the engine failed on this request: {type(error).__name__}: {error}", code="internal")
