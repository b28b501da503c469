"""Continuous batching: which sequence gets the next piece of the device's time.

Prompts are computed pass by pass (forward.py), and sequences decode together (decode_batch.py). Runs on
the engine thread alone; `submit`, `cancel` and `post` may be called from any thread.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from ...common.heap import trim_heap
from ...errors import OmlxdError, Unavailable
from .. import mlx_adapter
from ..kvio.bridge import KVBridge
from ..kvio.hot_budget import evict_unused
from ..mlx_adapter import Adapter, LoadedModel
from ..sequence.sampling import NO_TOKEN
from ..sequence.sequence import Drawn, Sequence, State
from ..speculate.controller import Speculation
from ..vision.images import Images
from .bridges import Bridges
from .counts import Counts
from .decode_batch import DecodeBatch, best_batch
from .forward import PromptPasses
from .memory_admission import MemoryAdmission
from .prefill import SMOOTHING, PrefillBudget, slice_seconds
from .waiting.priority import later_ones
from .waiting.queue import Inbox, RequestQueue, Watchdog

log = logging.getLogger(__name__)

SHORT_S = 0.2
"""Seconds between two looks at whether there is memory for who is next."""
IDLE_S = 5.0
"""Seconds without work after which memory is given back, and between two looks at it."""


@dataclass(slots=True)
class _LastStep:
    """seconds: what a step beside a prefill takes; ended_at: when the last one ended."""

    seconds: float = 0.0
    ended_at: float = 0.0


class Scheduler:
    """Runs the sequences of one model.

    bridge       of the model's KV; None: no reuse
    slots        sequences that hold a cache at once
    speculation  passes may check guesses; None: they don't
    pass_limit   tokens of a prompt that a pass computes, at most; 0: as suits the device
    """

    def __init__(
        self,
        loaded: LoadedModel,
        bridge: KVBridge | None,
        *,
        slots: int,
        block_size: int,
        speculation: Speculation | None = None,
        pass_limit: int = 0,
    ):
        self._loaded = loaded
        self.bridges = Bridges()
        self.bridge = bridge
        self.counts = Counts()
        self._changes = Inbox()
        self._slots = slots
        self._block = block_size
        self.compiled = mlx_adapter.attention_backend().decode_step(loaded.model)
        self._inbox = Inbox()
        self.waiting = RequestQueue()
        self.running: list[Sequence] = []  # They hold a slot each.
        self._batches: list[DecodeBatch] = []
        self.prefill_budget = PrefillBudget(block_size, pass_limit)
        self.speculation = speculation
        self.passes = PromptPasses(
            self,
            loaded,
            block_size,
            running=self.running,
            budget=self.prefill_budget,
            bridges=self.bridges,
            counts=self.counts,
            compiled=self.compiled,
            speculation=speculation,
        )
        self.watchdog = Watchdog(self._cancel)
        self._stopping = False
        self.memory: MemoryAdmission | None = None
        self.images: Images | None = None
        self._short = False  # Who is next waits for memory.
        self._last_step = _LastStep()

    @property
    def bridge(self) -> KVBridge | None:
        return self.bridges.get(None)

    @bridge.setter
    def bridge(self, bridge: KVBridge | None) -> None:
        self.bridges.pop(None, None)
        if bridge is not None:
            self.bridges[None] = bridge

    # ----------------------------------------------------------------- from other threads

    def post(self, call: Callable[[], None]) -> None:
        """Run `call` on the engine thread, soon."""
        self._inbox.post(call)

    def change_model(self, call: Callable[[], None]) -> None:
        """Run `call` on the engine thread while no pass is under way."""
        self.post(lambda: self._changes.post(call))

    def submit(self, sequence: Sequence) -> None:
        self.post(lambda: self._take(sequence))

    def _take(self, sequence: Sequence) -> None:
        if sequence.adapter is None or sequence.adapter in self._loaded.adapters.loaded:
            self.waiting.add_request(sequence)
        else:  # It left while the prompt was rendered.
            self.fail(sequence, Unavailable("this adapter is being unloaded; retry", retry_after=1))

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
        self.look_up(block=not self._busy())
        self._changes.drain(0.0)
        self._admit()
        prefilling = self.passes.compute_next()
        if not prefilling or self.step_due():
            self.decode(beside_prefill=prefilling)

    def _busy(self) -> bool:
        return (
            bool(self._batches or self._changes)
            or any(sequence.state is State.PREFILLING for sequence in self.running)
            or bool(self.waiting and not self._short and len(self.running) < self._slots)
        )

    def look_up(self, block: bool = False) -> None:
        """Do what other threads have posted, wait for something if `block`; end whose time is up."""
        patience = SHORT_S if self._short else IDLE_S
        if not self._inbox.drain(patience if block else 0.0) and block:
            self.give_memory_back()
        self.watchdog.check((*self.waiting, *self.running))

    def give_memory_back(self, everything: bool = False) -> None:
        """Give back what others may need more. `everything`: blocks in RAM that no sequence uses, too."""
        for bridge in self.bridges.values():
            if everything:
                evict_unused(bridge.store)
            bridge.store.trim_hot()
        dropped = self.images is not None and self.images.give_memory_back()
        mlx_adapter.give_memory_back()
        if dropped or everything:
            trim_heap()

    def _stop(self) -> None:
        self._stopping = True
        for sequence in (*self.waiting, *self.running):
            sequence.cancelled = True  # The front tells its client, or sends it to the next engine.
        for batch in list(self._batches):
            self.leave(batch, list(batch.rows))
        for sequence in (*self.waiting, *self.running):
            self._cancel(sequence)

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
        return self.counts.steps + sum(bridge.store.stats.restored for bridge in list(self.bridges.values()))

    @property
    def pass_tokens(self) -> int:
        """Tokens of the pass over a prompt that is under way, or may still turn out to have failed."""
        return self.passes.pass_tokens

    def load_metrics(self) -> dict[str, float]:
        """Gauges; a prompt with a slot waits for its first pass. Any thread: a torn read costs nothing."""
        slots = [*self.running]
        waiting = sum(each.state is State.PREFILLING and not each.stats.was_in_pass for each in slots)
        return {
            "num_requests_running": len(slots) - waiting,
            "num_requests_waiting": len(self.waiting) + waiting,
            "prefill_tokens_per_s": self.prefill_budget.rate,
            "kv_shared_segment_tokens": self._loaded.segments.tokens,
        }

    # ----------------------------------------------------------------- admission

    def _admit(self) -> None:
        stuck: Sequence | None = None
        while len(self.running) < self._slots or later_ones(self.running, self.waiting):
            sequence = self.waiting.next_request(self.running, stuck)
            if sequence is None or (len(self.running) >= self._slots and not self._give_way(sequence)):
                break
            try:
                if self.memory and not self.memory.has_room_for(sequence, self.running, stuck, self.waiting):
                    if self._give_way(sequence):
                        continue  # It had promised itself memory.
                    if stuck is not None:
                        break  # Nor is there memory for the shortest.
                    stuck = sequence
                    continue
                self.waiting.take_request(sequence)
                self.running.append(sequence)
                sequence.state = State.PREFILLING
                sequence.stats.admitted = time.monotonic()
                self.match(sequence)
            except Exception as error:
                if not isinstance(error, OmlxdError):
                    log.exception("admission failed")
                self.fail(sequence, error)
        self._short = stuck is not None
        self._tell_waiters(stuck)

    def _give_way(self, sequence: Sequence) -> bool:
        """Have one that has begun nothing, with a higher number than `sequence`, wait again for a slot."""
        if not (later := later_ones(self.running, [sequence])):
            return False
        last = max(later, key=lambda each: (each.prompt.priority, each.stats.admitted))
        self.bridges.finish(last)
        self.running.remove(last)
        last.state, last.stats.admitted = State.WAITING, 0.0
        self.waiting.put_back(last)
        return True

    def _tell_waiters(self, stuck: Sequence | None) -> None:
        """A line for each that waits; who is next and waits for memory has its own (memory_admission.py)."""
        for place, sequence in enumerate(self.waiting):
            if not sequence.wait_logged and not sequence.stats.waiting_for_memory_since:
                sequence.wait_logged = True
                log.info(
                    "%s (prompt=%d) waits for %s: %d run, %d came before it",
                    sequence.name,
                    sequence.prompt.length,
                    f"memory behind {stuck.name}" if stuck else "a slot",
                    len(self.running),
                    place,
                )

    def match(self, sequence: Sequence) -> bool:
        """Give a sequence its cached prefix. True: the disk is read first, and `_restored` follows."""
        if (bridge := self.bridges.of(sequence)) is None or sequence.prompt.import_file is not None:
            return False
        began = time.monotonic()

        def restored() -> None:
            sequence.stats.restore_s += time.monotonic() - began
            self._restored(sequence)

        if not bridge.match(sequence, restored):
            sequence.stats.restore_s += time.monotonic() - began
            return False
        sequence.state = State.RESTORING  # Not if that raised: somebody has to settle it.
        return True

    def _restored(self, sequence: Sequence) -> None:
        self.counts.steps += 1
        if sequence.cancelled or sequence.state is State.DONE:
            self.release(sequence)
        else:
            sequence.state = State.PREFILLING

    # ----------------------------------------------------------------- decode

    def join(self, sequences: Seq[Sequence], add: Callable[[DecodeBatch], None]) -> None:
        """Let `sequences` decode, in the batch that `add` adds them to. Raises what `add` raises."""
        batch = self._batch_for(max(sequences, key=lambda sequence: sequence.kv.length))
        with self._dropped_if_joined(batch, sequences[0]):
            add(batch)
        for sequence in sequences:
            sequence.state = State.DECODING
        self.leave(batch, [sequence for sequence in sequences if sequence.cancelled])

    def _batch_for(self, sequence: Sequence) -> DecodeBatch:
        """One that gains by taking the sequence in; else a new one."""
        best = best_batch(self._batches, sequence, self._loaded)
        if best is None:
            best = self._new_batch()
            self._batches.append(best)
        return best

    def _new_batch(self) -> DecodeBatch:
        if self.passes.on_ranks is not None:
            return self.passes.on_ranks.new_batch()
        states = self._loaded.states
        grid = self._block if states is not None and states.tensors else 0
        return DecodeBatch(self._loaded.model, self.speculation, grid, self.compiled)

    @property
    def decodes(self) -> bool:
        """Whether any sequence does."""
        return bool(self._batches)

    def step_due(self) -> bool:
        """Whether those that decode have waited long enough for a prompt."""
        if not self.decodes:
            return False
        prompts = sum(sequence.state is State.PREFILLING for sequence in self.running)
        rows = sum(len(batch.rows) for batch in self._batches)
        least = slice_seconds(self._last_step.seconds, self.passes.layer_s, prompts, rows)
        return time.perf_counter() - self._last_step.ended_at >= least

    def between_layers(self, is_over: Callable[[], bool]) -> bool:
        """Look up while a pass over prompts is under way, and run a decode step if one is due.

        False: the pass `is_over` by then, and there was no step.
        """
        self.counts.steps += 1
        self.look_up()
        if is_over():
            return False
        if self.step_due():
            hook = self._loaded.hook
            call, hook.call = hook.call, None
            # Not those of the pass under way.
            with mlx_adapter.row_adapters(()), mlx_adapter.attention_backend().chunk(final=True):
                self.decode(beside_prefill=True)
            hook.call = call
        return True

    def decode(self, *, beside_prefill: bool) -> None:
        """Run a step of every batch; wait for its end beside a prefill, so that each is timed by itself."""
        began = time.perf_counter()
        prompts = [row for batch in self._batches for row in batch.rows if not row.stats.first_token_s]
        for sequence in prompts:  # Their ends were computed together, but for the last tokens.
            sequence.stats.begin_pass()
        for batch in list(self._batches):
            self._step(batch)
        if beside_prefill:
            for batch in list(self._batches):
                with self._dropped_if_broken(batch):
                    batch.wait()
        for sequence in prompts:
            sequence.stats.end_pass()
        self._last_step.ended_at = time.perf_counter()
        took = self._last_step.ended_at - began
        self.counts.decodes += len(self._batches)
        self.counts.decode_s += took
        for sequence in self.passes.computing:
            sequence.stats.pass_since += took
        if not beside_prefill:  # It has read the KV of all passes.
            self.passes.pass_tokens = 0
        if beside_prefill:  # One slow step is no reason to keep decoders waiting as long again.
            usual = self._last_step.seconds or took
            self._last_step.seconds = min(took, (1 - SMOOTHING) * usual + SMOOTHING * took)

    def _step(self, batch: DecodeBatch) -> None:
        with self._dropped_if_broken(batch):
            self.counts.steps += 1
            drawn: dict[Sequence, list[Drawn]] = {}
            for sequence, token, likelihood in batch.step():
                drawn.setdefault(sequence, []).append((token, likelihood))
            ended: list[Sequence] = []
            for sequence, own in drawn.items():
                if not self.accept(sequence, own):
                    sequence.kv.length = min(sequence.kv.length, len(sequence.tokens))
                    ended.append(sequence)
            batch.end_turn()
            self.leave(batch, ended)
            mlx_adapter.give_outgrown_back()
            for sequence in batch.rows:
                self.bridges.offer(sequence, batch)

    @contextmanager
    def _dropped_if_broken(self, batch: DecodeBatch) -> Iterator[None]:
        """An error in here fails the rows of `batch`, and no others."""
        rows = list(batch.rows)
        try:
            yield
        except Exception as error:
            log.exception("decode failed")
            self.drop_batch(batch, rows, error)

    @contextmanager
    def _dropped_if_joined(self, batch: DecodeBatch, sequence: Sequence) -> Iterator[None]:
        """`sequence` joins in here. After an error `batch` goes on only without it."""
        try:
            yield
        except Exception as error:
            if not batch.rows or sequence in batch.rows:
                self.drop_batch(batch, batch.rows, error)
            raise

    def drop_batch(self, batch: DecodeBatch, rows: list[Sequence], error: Exception) -> None:
        """Fail its `rows`."""
        self._batches = [other for other in self._batches if other is not batch]
        for sequence in list(rows):
            self.fail(sequence, error)

    def leave(self, batch: DecodeBatch, rows: list[Sequence]) -> None:
        if not rows:
            return
        for sequence in rows:
            self.bridges.finish(sequence, batch)
        try:
            batch.remove_rows(rows)
        except Exception as error:  # No memory to copy the others, most likely: layers differ now.
            log.exception("decode failed")
            self.drop_batch(batch, batch.rows, error)
        else:
            if not batch.rows:
                self._batches.remove(batch)
        for sequence in rows:
            self._over(sequence)

    def take(self, sequence: Sequence, drawn: Drawn) -> bool:
        """Take the first token of `sequence`. False: it ended with it, and is released."""
        if not self.accept(sequence, [drawn]):
            self.release(sequence)
            return False
        self.bridges.offer(sequence)  # The token is out; now there is time to store the last blocks.
        return True

    def accept(self, sequence: Sequence, drawn: Seq[Drawn]) -> bool:
        """Take the tokens that a pass drew. False: the sequence ends with one of them."""
        if drawn[0][0] != NO_TOKEN:
            self.counts.note_good(sequence)
        kept, end = list[Drawn](), ""
        for token, likelihood in drawn:
            if token == NO_TOKEN:
                end = "spoiled"
                break
            sequence.tokens.append(token)
            if sequence.cancelled:
                return False
            if token in sequence.sampling.eos:
                end = "stop"
                if sequence.sink.shows_stop:
                    kept.append((token, likelihood))
                break
            kept.append((token, likelihood))
            if (
                sequence.generated >= sequence.sampling.max_new
                or len(sequence.tokens) >= self._loaded.context_length
            ):
                end = "length"
                break
        count = partial(self.counts.count_token, sequence.adapter)
        if kept:
            sequence.sink.take(kept, count)
        if end == "spoiled":
            self._spoiled(sequence)
        elif end:
            if end == "stop" and not sequence.sink.shows_stop:
                sequence.sink.count(count)
            sequence.sink.finished(sequence, end)
        return not end

    def _spoiled(self, sequence: Sequence) -> None:
        """Logits are not finite: fail the request and withdraw the KV that it stored."""
        if not sequence.cancelled:
            sequence.sink.failed(sequence, OmlxdError("the model's logits are not numbers", code="internal"))
        self.bridges.finish(sequence, spoiled=True)
        sequence.cancelled = True

    # ----------------------------------------------------------------- ends

    def _cancel(self, sequence: Sequence) -> None:
        sequence.cancelled = True
        if sequence.state is State.WAITING:
            self.waiting.remove_request(sequence)
            self._over(sequence)
        elif sequence.state is State.PREFILLING and sequence not in self.passes.computing:
            self.release(sequence)
        elif sequence.state is State.DECODING:
            for batch in list(self._batches):
                if sequence in batch.rows:
                    self.leave(batch, [sequence])
        # RESTORING: `_restored` releases it once the I/O threads have let go of its arrays. Whose pass
        # is being computed is released when that is interrupted.

    def end(self, sequence: Sequence, error: Exception | None = None, *, spoiled: bool = False) -> None:
        """End `sequence`, whose pass is over. `spoiled`: the logits are not finite."""
        if spoiled:
            self._spoiled(sequence)
        if error is None:
            self.release(sequence)
        else:
            self.fail(sequence, error)

    def release(self, sequence: Sequence) -> None:
        """Slot, cache and references back."""
        self.bridges.finish(sequence)
        self._over(sequence)

    def fail(self, sequence: Sequence, error: Exception) -> None:
        """End `sequence`, and tell its client why."""
        if sequence.state is State.DONE:
            return
        if not sequence.cancelled:
            if not isinstance(error, OmlxdError):
                what = f"the engine failed on this request: {type(error).__name__}: {error}"
                error = OmlxdError(what, code="internal")
            sequence.sink.failed(sequence, error)
        sequence.cancelled = True
        if sequence.state is State.RESTORING or sequence in self.passes.computing:
            return  # As in `_cancel`.
        sequence.kv.cache = None
        self.bridges.finish(sequence)
        self.waiting.remove_request(sequence)
        self._over(sequence)

    def _over(self, sequence: Sequence) -> None:
        """Nothing of it is held any more; its sink, which holds it, is let go."""
        if self.memory and not sequence.stats.admitted:
            self.memory.note_end_of_wait(sequence, "ended before it got memory")
        if sequence.begun and sequence.state is not State.DONE:
            self.counts.count_restored(sequence)
        sequence.kv.cache = sequence.kv.last_checkpoint = sequence.kv.checked = sequence.sink = None
        sequence.state = State.DONE
        if sequence in self.running:
            self.running.remove(sequence)
