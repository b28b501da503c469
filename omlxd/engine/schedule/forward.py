"""Passes over prompts: chunks, images, ends of several together, labels, and the first token.

Between the layers of a pass that may take long, or beside which others decode, the engine looks up: rows
whose step is due get it, a request that was cancelled or whose time is up ends the pass, and a layer counts
as progress.

Requests with one and the same prompt, as the choices of n > 1, compute its end once. Where a backend
fuses decode steps, ends are computed as answers are (end_steps.py).

Passes end on block boundaries, and the last one begins at the last boundary before the prompt's
end, whatever was restored: cached and uncached runs give their first logits from a forward pass of
the same shape.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import mlx.core as mx

from ...chat import Progress
from ...errors import OmlxdError
from .. import mlx_adapter
from ..mlx_adapter import DecodeStep, LoadedModel, PromptCacheFile
from ..sequence.sampling import sample_one
from ..sequence.sequence import Drawn, Sequence, State
from ..speculate.controller import Speculation
from ..speculate.draft_model import clock
from .bridges import Bridges
from .counts import Counts
from .decode_batch import DecodeBatch
from .end_steps import LONGEST, EndSteps
from .memory_admission import MemoryAdmission
from .prefill import PrefillBudget
from .scoring import score, tokens_to_score
from .waiting.priority import pass_levels

log = logging.getLogger(__name__)

LONG_PASS_S = 0.2
"""Seconds above which a pass is looked into between its layers."""


class Interrupted(Exception):
    """The requests whose pass is being computed have been cancelled."""


class OnRanks(Protocol):
    """What is computed on several ranks."""

    def compute(
        self, sequence: Sequence, start: int, tokens: list[int], cache: mlx_adapter.Cache
    ) -> mx.array:
        """Logits of a pass over `tokens`, behind the `start` ones that the cache holds; evaluated."""
        ...

    def new_batch(self) -> DecodeBatch:
        """Rows that decode together on all of them."""
        ...


class Turn(Protocol):
    """The scheduler as a pass sees it, in whose turn it is computed.

    memory   is told of chunks; None: nobody looks after it
    decodes  whether any sequence does
    """

    memory: MemoryAdmission | None

    @property
    def decodes(self) -> bool: ...

    def match(self, sequence: Sequence) -> bool:
        """Give a sequence its cached prefix. True: the disk is read first."""
        ...

    def take(self, sequence: Sequence, drawn: Drawn) -> bool:
        """Take the first token of `sequence`. False: it ended with it, and is released."""
        ...

    def join(self, sequences: Seq[Sequence], add: Callable[[DecodeBatch], None]) -> None:
        """Let `sequences` decode, in the batch that `add` adds them to."""
        ...

    def end(self, sequence: Sequence, error: Exception | None = None, *, spoiled: bool = False) -> None:
        """End `sequence`; tell its client of an `error`, or that its logits are `spoiled`."""
        ...

    def between_layers(self, is_over: Callable[[], bool]) -> bool:
        """Do what can't wait for the end of a pass. False: nobody wants that any more."""
        ...


class PromptPasses:
    """Computes the prompts of `running`, the sequences that have a slot. Engine thread.

    computing   sequences of the pass under way
    last_alone  the prompt's last token gets a pass of its own. On a GPU that costs as much as a whole last
                chunk: it reads all the weights. A CPU takes about as long a token either way, and saves the
                last layer's MLP for all but the last token (tools/bench's `cpu` shape, 50 tokens: 718 ms
                against 960)
    layer_s     seconds of the newest layer that was looked up behind
    pass_tokens  of the newest pass, until a decode step shows that it went well; 0 of an image
    """

    def __init__(
        self,
        turn: Turn,
        loaded: LoadedModel,
        block_size: int,
        *,
        running: Seq[Sequence],
        budget: PrefillBudget,
        bridges: Bridges,
        counts: Counts,
        compiled: DecodeStep,
        speculation: Speculation | None,
    ):
        self._turn, self._running, self._budget = turn, running, budget
        self._bridges, self._counts = bridges, counts
        self._compiled, self._speculation = compiled, speculation
        self._loaded = loaded
        self._block = block_size
        self.last_alone = mlx_adapter.backend() == "cpu"
        states = loaded.states
        plain = loaded.batchable and not loaded.split and states is not None and not states.tensors
        example = mlx_adapter.new_cache(loaded.model, 1)
        self._step_tokens = compiled.most_tokens(example) if plain else 0
        pads = mlx_adapter.attention_backend().pads_last_chunks
        self._merges = plain and (self._step_tokens > 0 or pads)  # See `TOGETHER`.
        self.computing: Seq[Sequence] = ()
        self.layer_s = self._looked_at = 0.0
        self.pass_tokens = 0
        self.on_ranks: OnRanks | None = None

    def compute_next(self) -> bool:
        """One pass of one sequence, or over the ends of several. False: none is prefilling."""
        sequences = self._prefilling()
        if not sequences:
            return False
        if len(sequences) > 1:
            for sequence in sequences:
                if (bridge := self._bridges.of(sequence)) is not None:
                    with self._over_if_broken([sequence]):
                        bridge.look_again(sequence)
            if not (sequences := self._prefilling()):
                return True
        together = [self._budget.pick_sequence(sequences)]
        if self._merges and not self._same_prompt(together[0]):
            together = self._of_one_pass(together[0], sequences)
        with self._over_if_broken(together):
            if len(together) > 1:
                self._compute_ends(together)
            else:
                self.compute(together[0])
        for sequence in together:
            sequence.stats.end_pass()
        return True

    def _of_one_pass(self, first: Sequence, sequences: list[Sequence]) -> list[Sequence]:
        """Those whose ends are computed with that of `first`; or one that goes before, so that more are.

        All are of the same level: nobody waits for one that it goes before.
        """
        levels, every = pass_levels(sequences), sequences
        sequences = [sequence for sequence in every if levels[sequence] == levels[first]]
        if self._step_tokens:
            fit = [sequence for sequence in sequences if self._takes_steps(sequence)]
            return self._budget.ends_together(first, fit) if first in fit else [first]
        keys = {sequence: self._key(sequence) for sequence in every}
        held = [*keys.values()]
        once = [sequence for sequence in sequences if held.count(keys[sequence]) == 1]
        other = self._budget.before_its_end(first, once)
        return self._budget.ends_together(first, sequences) if other is None else [other]

    def _prefilling(self) -> list[Sequence]:
        return [sequence for sequence in self._running if sequence.state is State.PREFILLING]

    @contextmanager
    def _over_if_broken(self, sequences: Seq[Sequence]) -> Iterator[None]:
        """Compute something of `sequences`, which end if that is interrupted or fails."""
        try:
            yield
        except Interrupted:
            for sequence in sequences:
                sequence.kv.cache = None  # Half written. What earlier passes computed has been offered.
                self._turn.end(sequence)
        except Exception as error:
            if not isinstance(error, OmlxdError):
                log.exception("prefill failed")
            for sequence in sequences:
                self._turn.end(sequence, error)

    def _is_matched(self, sequence: Sequence) -> bool:
        """Match it again. False: the disk is read first, or that failed, which ends it and no other."""
        waits = True
        with self._over_if_broken([sequence]):
            waits = self._turn.match(sequence)
        return not waits

    def _prepare(self, sequence: Sequence) -> None:
        """Before a pass of a sequence that has been matched again: its time runs from here."""
        sequence.stats.begin_pass()
        if sequence.kv.cache is None:
            sequence.kv.cache = mlx_adapter.new_cache(self._loaded.model, sequence.capacity)
        self._tell_begin(sequence, sequence.kv.length)
        if sequence.kv.length >= sequence.last_boundary(self._block):
            # Whatever was restored and whoever shares: bits follow the cuts.
            length, capacity = sequence.prompt.length, sequence.capacity
            self._loaded.segments.cut(
                sequence.kv.cache, sequence.kv.hashes, self._block, length, capacity, last=True
            )

    def _tell_begin(self, sequence: Sequence, restored: int) -> None:
        """Report, once, of how many tokens its KV was `restored`."""
        if not sequence.begun:
            sequence.begun = True
            sequence.sink.progress(
                Progress(restored, sequence.prompt.length, cold=sequence.stats.restored_cold)
            )

    # ----------------------------------------------------------------- one sequence

    def compute(self, sequence: Sequence) -> None:
        """The next pass of `sequence`."""
        memory = self._turn.memory
        if sequence.prompt.import_file is not None:
            self._take_file(sequence, sequence.prompt.import_file)
            return
        if self._turn.match(sequence):
            return  # Somebody has computed it meanwhile, and it lies on disk.
        self._prepare(sequence)
        length, start = sequence.prompt.length, sequence.kv.length
        if start and start >= sequence.last_boundary(self._block) and self._takes_steps(sequence):
            self._finish_ends([sequence])
            return
        stop = self._budget.next_stop(sequence)
        if sequence.prompt.images is not None:
            with self._looking_up([sequence], 0):
                saw = sequence.prompt.images.see_next(start, stop)
            if saw:
                self._counts.steps += 1
                return  # A turn for each image: what else waits has its own in between.
        if sequence.prompt.labels and stop == length:
            self._score(sequence)
            return
        if memory is not None:
            memory.begin_chunk()
        began, decoded = time.perf_counter(), self._counts.decode_s
        compared = clock()
        with self._looking_up([sequence], stop - start):
            logits = compute_chunk(
                self._loaded.model, sequence, stop, last_alone=self.last_alone, on_ranks=self.on_ranks
            )
        if self._speculation is not None and decoded == self._counts.decode_s:
            mx.eval(logits if stop == length else [])
            self._speculation.times.record_prompt(stop - start, clock() - compared)
        if stop < length:
            seconds = time.perf_counter() - began - (self._counts.decode_s - decoded)
            self._budget.record_pass(stop - start, seconds)
            if (bridge := self._bridges.of(sequence)) is not None:
                bridge.reads.rates.prefill = self._budget.rate
            if memory is not None and decoded == self._counts.decode_s:
                memory.end_chunk(start, stop)
        self._counts.steps += 1
        self._counts.count_prompt(sequence, stop - start)
        sequence.kv.length = stop
        sequence.stats.peak_bytes = max(sequence.stats.peak_bytes, mx.get_peak_memory())
        if stop < length:
            del logits
            self._bridges.offer(sequence)
            sequence.sink.progress(Progress(stop, length))
            return
        last, others = logits[:, -1, :], self._same_prompt(sequence)
        held = [(other, mlx_adapter.copied(sequence.kv.cache or []), sequence.kv.hidden) for other in others]
        before_s = sequence.stats.prefill_s
        self.first_token(sequence, last)
        for other, cache, hidden in held:  # As if each had computed it: the pass counts for all.
            with self._over_if_broken([other]):
                self._take_copy(other, cache)
                other.kv.hidden = hidden
                other.stats.prefill_s += sequence.stats.prefill_s - before_s
                self.first_token(other, last)

    def _take_copy(self, other: Sequence, cache: mlx_adapter.Cache) -> None:
        """Go on behind a copy of what another sequence with the same prompt has computed."""
        if (bridge := self._bridges.of(other)) is None:
            other.kv.cache, other.kv.length = cache, other.prompt.length
        else:
            bridge.take_copy(other, cache)
        cached = other.stats.restored_hot + other.stats.restored_cold
        self._counts.count_prompt(other, other.prompt.length - cached)
        self._tell_begin(other, cached)

    def _same_prompt(self, sequence: Sequence) -> list[Sequence]:
        """Other sequences that wait for a pass over the same prompt; none where the model keeps state at a
        position."""
        states = self._loaded.states
        if (
            states is None
            or states.tensors
            or not self._loaded.batchable
            or self._loaded.split
            or (key := self._key(sequence)) is None
        ):
            return []
        return [other for other in self._prefilling() if other is not sequence and self._key(other) == key]

    def _key(self, sequence: Sequence) -> tuple[Any, ...] | None:
        """Equal for sequences whose prompts have the same KV and logits; None: more is done with it."""
        more = (
            sequence.prompt.images,
            sequence.prompt.labels,
            sequence.prompt.keys_file,
            sequence.prompt.write_kv,
            sequence.prompt.import_file,
        )
        if any(more) or sequence.kv.compute_to or sequence.cancelled:
            return None
        rest = sequence.tokens[len(sequence.kv.hashes) * self._block :]
        return sequence.prompt.root, sequence.adapter, sequence.prompt.length, sequence.kv.hashes[-1:], rest

    def _take_file(self, sequence: Sequence, file: PromptCacheFile) -> None:
        """Verify some of the KV in `file`; once all is done, go on behind it as behind a cached prefix."""
        bridge = self._bridges.of(sequence)
        assert bridge is not None
        if sequence.kv.checked is None:
            sequence.kv.checked = mlx_adapter.checked_kv(self._loaded, file, sequence.tokens, self._block)
        self._counts.steps += 1
        sequence.stats.begin_pass()
        with mlx_adapter.row_adapters([sequence.adapter]):
            cache = next(sequence.kv.checked)
        if cache is not None:
            sequence.prompt.import_file = sequence.kv.checked = None
            bridge.adopt(sequence, cache, file.at)

    def first_token(self, sequence: Sequence, logits: mx.array) -> None:
        """Draw it by the `logits` (1, vocabulary) of the prompt's end; the sequence decodes from now on."""
        assert sequence.kv.cache is not None
        if sequence.prompt.keys_file:
            attention: list[mx.array] | None = None
            if sequence.prompt.query is not None:
                at = sequence.prompt.query % sequence.prompt.length
                with mlx_adapter.row_adapters([sequence.adapter]):
                    attention = mlx_adapter.attention_from(
                        self._loaded.model, sequence.kv.cache, sequence.tokens[at], at
                    )
            mlx_adapter.write_keys(
                Path(sequence.prompt.keys_file),
                sequence.kv.cache,
                sequence.kv.length,
                sequence.prompt.values,
                attention,
            )
        if sequence.prompt.write_kv is not None:
            sequence.prompt.write_kv(sequence.kv.cache)
        if sequence.prompt.keys_file or sequence.prompt.write_kv is not None:
            mlx_adapter.attention_backend().check_work()
        drawn = sample_one(sequence.sampling, logits)
        if self._turn.take(sequence, drawn):
            self._turn.join([sequence], lambda batch: batch.add_row(sequence))

    # ----------------------------------------------------------------- several together

    def _compute_ends(self, sequences: Seq[Sequence]) -> None:
        """Compute the ends of several prompts in one pass; their batch's next step draws the first tokens."""
        waits = False
        for sequence in sequences:  # What one cuts the next one shares, before it has its own.
            if self._is_matched(sequence):
                self._prepare(sequence)
            else:
                waits = True
        if waits:
            return  # As in `compute`; the others' turn comes again.
        if any(sequence.kv.length < sequence.last_boundary(self._block) for sequence in sequences):
            for sequence in sequences:
                sequence.stats.end_pass()
            self.compute(sequences[0])  # Blocks have gone meanwhile.
            return
        self._finish_ends(sequences)

    def _takes_steps(self, sequence: Sequence) -> bool:
        """Whether its prompt's end is computed as its answer is: by fused steps.

        Then its bits are those that it has beside others. An end that fills a block has a pass of its own:
        what is stored of a prompt has been computed as prompt.
        """
        more = (
            sequence.adapter,
            sequence.prompt.images,
            sequence.prompt.labels,
            sequence.prompt.keys_file,
            sequence.prompt.write_kv,
        )
        plain = self._step_tokens > 0 and not any(more) and not mlx_adapter.keeps_hidden()
        return plain and 0 < sequence.prompt.length % self._block <= LONGEST + 1

    def _finish_ends(self, sequences: Seq[Sequence]) -> None:
        """Compute ends of prompts but for the last tokens. Their batch's next step draws the first tokens."""
        first, before_s, steps = sequences[0], sequences[0].stats.prefill_s, None
        others = self._same_prompt(first) if len(sequences) == 1 else []
        tokens = [sequence.remaining_prefill for sequence in sequences]
        if self._step_tokens:
            steps = EndSteps(self._compiled, self._step_tokens, self._loaded.hook)
        with self._looking_up(sequences, sum(tokens)):
            cache = compute_ends(self._loaded.model, sequences, steps)
        self._counts.steps += 1
        for sequence, computed in zip(sequences, tokens, strict=True):
            self._counts.count_prompt(sequence, computed)
        copies = [mlx_adapter.copied(cache) for _ in others]
        self._add_prompts(sequences, cache if len(sequences) > 1 else mlx_adapter.merge([cache]))
        first.stats.end_pass()
        for other, copy in zip(others, copies, strict=True):  # As if each had computed it.
            with self._over_if_broken([other]):
                self._take_copy(other, copy)
                other.stats.prefill_s += first.stats.prefill_s - before_s
                self._add_prompts([other], mlx_adapter.merge([other.take_cache()]))

    def _add_prompts(self, sequences: Seq[Sequence], cache: mlx_adapter.Cache) -> None:
        """Let them decode, from the last tokens of their prompts on."""
        for sequence in sequences:
            sequence.kv.length = sequence.prompt.length - 1
        self._turn.join(sequences, lambda batch: batch.add_prompts(sequences, cache))

    def _score(self, first: Sequence) -> None:
        """Score the labels of `first`, which stands at its prompt's end, and of others that do."""
        together, tokens = [first], tokens_to_score(first)
        for other in sorted(self._running, key=lambda each: (each.prompt.priority, each.arrival)):
            alone = first.prompt.images or other.prompt.images or not self._loaded.batchable
            if other is first or alone or not other.prompt.labels or other.state is not State.PREFILLING:
                continue
            if not self._is_matched(other) or other.kv.length < other.last_boundary(self._block):
                continue
            if tokens + (more := tokens_to_score(other)) > self._budget.together:
                break
            self._prepare(other)
            together.append(other)
            tokens += more
        with self._over_if_broken(together):
            with self._looking_up(together, tokens):
                scores = [*score(self._loaded, together)]
            self._counts.steps += 1
            for sequence, its_scores in scores:
                self._counts.count_prompt(sequence, sequence.remaining_prefill)
                if its_scores is not None and not sequence.cancelled:
                    self._counts.note_good(sequence)
                    sequence.sink.scored(its_scores)
                    sequence.sink.finished(sequence, "stop")
                self._turn.end(sequence, spoiled=its_scores is None)

    # ----------------------------------------------------------------- between layers

    def _is_long(self, tokens: int) -> bool:
        return self._budget.seconds(tokens) > LONG_PASS_S if tokens else mlx_adapter.backend() == "cpu"

    @contextmanager
    def _looking_up(self, sequences: Seq[Sequence], tokens: int) -> Iterator[None]:
        """Compute `tokens` of `sequences`, or an image (0); look up between layers if it may take long, or
        rows decode.

        Raises Interrupted, the caches half written, once all of them are cancelled.
        """
        hook = self._loaded.hook
        # What several ranks compute is not interrupted: they are all in it.
        if self.on_ranks is None and (self._turn.decodes or self._is_long(tokens)):
            hook.call = self.between_layers
        self.computing, self.pass_tokens = sequences, tokens
        self._looked_at = time.perf_counter()
        try:
            yield
        finally:
            hook.call, self.computing = None, ()

    def between_layers(self) -> None:
        self.layer_s = time.perf_counter() - self._looked_at
        if not self._turn.between_layers(lambda: all(sequence.cancelled for sequence in self.computing)):
            raise Interrupted
        self._looked_at = time.perf_counter()


def compute_chunk(
    model: Any, sequence: Sequence, stop: int, *, last_alone: bool, on_ranks: OnRanks | None = None
) -> mx.array:
    """Compute the KV of `sequence` from where it stands to `stop`, into its cache.

    Returns the logits (1, tokens, vocabulary) of its last pass, not evaluated: before the prompt's
    end only the KV is.
    """
    start, length = sequence.kv.length, sequence.prompt.length
    assert sequence.kv.cache is not None
    if last_alone and start < length - 1 and stop == length and sequence.may_end(stop - 1):
        _pass(model, sequence, start, stop - 1, on_ranks)
        mx.eval(mlx_adapter.state_arrays(sequence.kv.cache))
        start = stop - 1
    logits = _pass(model, sequence, start, stop, on_ranks)
    if stop < length:
        mx.eval(mlx_adapter.state_arrays(sequence.kv.cache), sequence.kv.hidden or ())
    return logits


def _pass(model: Any, sequence: Sequence, start: int, stop: int, on_ranks: OnRanks | None = None) -> mx.array:
    if on_ranks is not None:
        assert sequence.kv.cache is not None
        return on_ranks.compute(sequence, start, sequence.tokens[start:stop], sequence.kv.cache)
    inputs = sequence.prompt.images.inputs(start, stop) if sequence.prompt.images is not None else {}
    chunk = mlx_adapter.attention_backend().chunk(final=stop >= sequence.prompt.length)
    with mlx_adapter.row_adapters([sequence.adapter]), chunk:
        logits = model(mx.array([sequence.tokens[start:stop]]), cache=sequence.kv.cache, **inputs)
    sequence.keep_hidden(start, mlx_adapter.take_hidden())
    return logits


def compute_ends(model: Any, sequences: Seq[Sequence], steps: EndSteps | None = None) -> mlx_adapter.Cache:
    """Compute the ends of several prompts, but for their last tokens, into a batch cache: in one pass, or by
    `steps`. Of one sequence it is that one's cache.

    Only where layers keep per-token KV alone, and some of each sequence.
    """
    caches = [sequence.take_cache() for sequence in sequences]
    if steps is not None:
        for cache in caches:
            mlx_adapter.open_tails(cache)
    cache = mlx_adapter.merge(caches) if len(caches) > 1 else caches[0]
    ends = [sequence.tokens[sequence.kv.length : sequence.prompt.length - 1] for sequence in sequences]
    if steps is not None:
        ends = steps.compute(cache, ends)
    if width := max(map(len, ends)):
        with mlx_adapter.row_adapters([sequence.adapter for sequence in sequences]):
            model(mx.array([[*end, *[0] * (width - len(end))] for end in ends]), cache=cache)
        hidden = mlx_adapter.take_hidden()
        for index, (sequence, end) in enumerate(zip(sequences, ends, strict=True)):
            own = hidden[index : index + 1, : len(end)] if hidden is not None else None
            sequence.keep_hidden(sequence.kv.length, own)
        mlx_adapter.trim(cache, [width - len(end) for end in ends])
        mx.eval(mlx_adapter.state_arrays(cache))
    return cache
