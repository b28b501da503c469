"""Whether there is memory for a prompt's KV beside what is live, before it is computed.

A prompt that does not fit waits while others run. When none does, the front is asked, which may let
idle models go; what then still does not fit is refused with both figures: for good (400) if it could
not fit into an engine with nothing else in it, for now (503) otherwise.

On the engine thread. What computing takes besides is measured a chunk at a time, and counted with
the next prompt.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import mlx.core as mx

from ...common.units import PREFILL_CHUNK, human
from ...errors import InvalidRequest, OmlxdError, Unavailable
from ...kv.block import Block
from ...kv.store import KVStore
from ...models.footprint import Tower
from ...wire import KV_RESERVE, Budget, Wants
from .. import mlx_adapter
from ..kvio.hot_budget import memory
from ..mlx_adapter import Adapter, LoadedModel
from ..sequence.sequence import Sequence, State
from ..speculate.draft_model import DraftModel
from ..speculate.drafter import DrafterModel
from .hot_blocks import Held, HotBlocks, nbytes_of

log = logging.getLogger(__name__)

ANSWER_S = 15.0
"""How long the front may take to find memory."""
MEASURABLE_TOKENS = 256
"""A shorter chunk says little of a long one."""
REACH = 4
"""How far beyond the longest context measured a chunk's work is thought to go on growing, where attention
is fused: a prompt that is much longer is tried, and measured, rather than refused for a guess. An H100
refused 103,431 tokens, which it computes in 8 s, for what chunks of 4,000 had taken."""
LOOK_S = 0.2
"""Between two looks at what the tiers have of a prompt that waits."""
ANSWERS_SHARE, ANSWER_SHARE = 1 / 4, 1 / 8
"""Of free memory, what answers may have room in before they are that long, beside `KV_RESERVE` tokens each;
of what is left of that, what one gets. The first one's 32nd of 16 GB is 4,000 tokens of an 8B shape."""
RESERVE_FRACTION = 0.02
"""Of the memory, left free in any case; `AttentionBackend.memory_reserve` may be more."""


@dataclass(slots=True)
class ChunkCost:
    """What computing a chunk takes besides its KV, in bytes: as thought, then as measured.

    per_token  of a token of a first chunk
    pair       of the scores of a token with another, all of which are there where attention is not fused
    per_pair   of a token with another, in the chunk that ended at `farthest`
    seen       tokens of the chunk that `per_token` was measured in; 0: it was not
    """

    per_token: float
    pair: float
    per_pair: float = 0.0
    farthest: int = 0
    seen: int = 0
    measured: bool = False

    def of(self, chunk: int, length: int, *, fused: bool) -> int:
        """Return what `chunk` tokens take in a prompt of `length` tokens, at its worst chunk."""
        context = min(length, REACH * self.farthest) if fused else length
        attention = context * self.per_pair
        if not fused:  # What is beyond the contexts whose scores are in `per_token`.
            attention = max(attention, (context - self.seen) * self.pair)
        return int(chunk * (self.per_token + attention))

    def learn(self, start: int, stop: int, took: int) -> None:
        """Learn from what tokens `start` to `stop` took, over what was there and what stays.

        As ratios, so that a long prompt's peak says nothing of a short one: a first chunk's by its tokens,
        and what the farthest takes over that, which is attention's, by tokens times context. From near,
        tokens times context tell too little of what is far: what the scores take stays the least, unless
        they take less.
        """
        tokens = stop - start
        if not start:
            if not self.measured or took / tokens > self.per_token:
                self.per_token, self.seen = took / tokens, tokens
            self.measured = True
        elif stop >= self.farthest:
            self.farthest = stop
            over = max(0.0, took / tokens - self.per_token)
            self.per_pair = over / stop
            if stop >= 2 * self.seen:
                self.pair = min(self.pair, over / (stop - self.seen))


@dataclass(slots=True)
class _Question:
    """What the front was asked for: memory for `sequence`, at `asked_at`."""

    sequence: Sequence
    asked_at: float
    answered: bool = False


class MemoryAdmission:
    """`working`: bytes that computing `PREFILL_CHUNK` tokens is thought to take, until it has been measured.
    `pair`: bytes of the scores of a token with another, all of which are there where attention is not fused.
    `chunk`: tokens that are computed in one pass at most. `tower`: what an image takes.

    store  whose hot tier gives way to prompts; None: there is none; `stores`: those of adapters, likewise
    draft_model  which keeps KV of each sequence too; None: there is none
    want   asks the front for memory; answered by `take_budget`
    """

    def __init__(
        self,
        loaded: LoadedModel,
        working: int,
        want: Callable[[Wants], None],
        *,
        pair: int = 0,
        chunk: int = PREFILL_CHUNK,
        tower: Tower | None = None,
        measure: Callable[[], tuple[int, int]] = memory,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._loaded = loaded
        self._want = want
        self._measure = measure
        self._clock = clock
        self.cost = ChunkCost(working / PREFILL_CHUNK, float(pair))
        self.chunk = chunk
        self._vision = tower or Tower()
        self._fused = mlx_adapter.backend() != "cpu"
        self.store: KVStore | None = None
        self.stores: dict[Adapter, KVStore] = {}
        self._hot = HotBlocks(self._all_stores, self._store_of)
        self.draft_model: DraftModel | DrafterModel | None = None
        self.live: int | None = None
        self.most: int | None = None
        self.peak = 0
        self._before = 0
        self._ticket = 0
        self._asked: _Question | None = None
        self._looked: dict[
            int, tuple[float, int]
        ] = {}  # By arrival: when to look again, and what was needed.

    # ----------------------------------------------------------------- deciding

    def has_room_for(
        self,
        sequence: Sequence,
        running: list[Sequence],
        stuck: Sequence | None = None,
        waiting: Iterable[Sequence] = (),
    ) -> bool:
        """Whether `sequence` may begin beside `running`; else it waits. Raises OmlxdError to refuse it.

        stuck    who waits for memory before it: then it is not refused, nor is the front asked for it
        waiting  all that wait: their blocks in RAM are the last to go
        """
        shared = self._shared(sequence, running)
        need = self.need(sequence) - shared
        total, room = self._room(running)
        extra, held, soon = need, Held(0, 0, False), False
        if need > room - self._hot.nbytes:
            extra = min(need, self._beside_hot(sequence) - shared)
            held = self._hot.held(running, [sequence, *waiting])
            room -= held.now
            # Better wait until others have copied their blocks than evict what comes next.
            soon = held.copying and extra > room - held.coming
        if need > room:  # What is cached is not computed. Not asked otherwise: that may touch the disk.
            through, hot = self._through_cache(sequence, room + shared)
            if through - shared < need:
                need, extra = through - shared, through - shared - nbytes_of(hot)
        if need <= room and not soon:
            self._clear_the_way(extra, running, [sequence, *waiting])
            self._widen(sequence, need, running)
            self.note_end_of_wait(sequence, "got memory")
            return True
        never = need > self._most(total)
        if stuck or soon or (not never and (running or self._may_hope(sequence, need - room))):
            self._note_wait(sequence, need, max(0, room - held.coming), held, running)
            return False
        self._asked = None
        raise self._refusal(sequence, need, self._most(total) if never else room, never)

    def _widen(self, sequence: Sequence, need: int, running: list[Sequence]) -> None:
        """Where the setting is auto, have `sequence` allocate what its answer may need, as memory allows.

        Growing copies all KV, and needs both arrays at once. It takes nothing from the hot tier, and nobody
        waits for it: who finds no memory gets `KV_RESERVE` tokens.
        """
        layout = self._loaded.layout
        if sequence.sampling.reserve is not None or layout is None or not (per_token := layout.nbytes(1)):
            return
        unused = per_token * sum(max(0, each.capacity - each.kv.length) for each in running)
        free = self._room(running)[1] - self._hot.nbytes - need
        share = ANSWER_SHARE * (ANSWERS_SHARE * (free + unused) - unused)
        sequence.sampling.reserve = KV_RESERVE + max(0, int(share / per_token))

    def need(self, sequence: Sequence) -> int:
        """Bytes that a sequence will add: its KV, as it is allocated, and a chunk's work or an image's."""
        return self._kv(sequence) + max(self.working(sequence.prompt.length), self._tower(sequence))

    def _tower(self, sequence: Sequence, cached: int = 0) -> int:
        """Bytes that the vision tower takes for the largest image behind the first `cached` tokens."""
        images = sequence.prompt.images.seen_from(cached) if sequence.prompt.images is not None else ()
        return max((self._vision.working(i.values, i.tiles, self._fused) for i in images), default=0)

    def working(self, length: int, cached: int = 0) -> int:
        """Bytes that computing a prompt of `length` tokens, but for its first `cached`, takes besides.

        At its worst chunk.
        """
        return self.cost.of(min(length - cached, self.chunk), length, fused=self._fused)

    def _through_cache(self, sequence: Sequence, room: int) -> tuple[int, list[Block]]:
        """What `sequence` will add with what the tiers have of it, and which blocks of that are hot.

        What is cached is there twice while it is restored: as blocks, and as the sequence's own. Of models
        that go on from checkpoints nothing is taken to be cached. What was more than `room` a moment ago is
        not looked up again: who waits is asked for with every step that others decode.
        """
        now = self._clock()
        self._looked = {arrival: look for arrival, look in self._looked.items() if now < look[0]}
        if (look := self._looked.get(sequence.arrival)) and look[1] > room:
            return look[1], []
        layout, states, cached = self._loaded.layout, self._loaded.states, 0
        hot: list[Block] = []
        store = self._store_of(sequence)
        if store is not None and layout is not None and not (states and states.tensors):
            size = store.block_size
            for name in sequence.kv.hashes[: (sequence.prompt.length - 1) // size]:
                tier = store.where(name)
                if not tier:
                    break
                cached += size
                if tier == "hot" and (block := store.pool.get_cached_block(name)) is not None:
                    hot.append(block)
        twice = layout.nbytes(cached) if layout is not None and cached else 0
        work = max(self.working(sequence.prompt.length, cached), self._tower(sequence, cached))
        through = self._kv(sequence) + twice + work
        self._looked[sequence.arrival] = now + LOOK_S, through
        return through, hot

    def _shared(self, sequence: Sequence, others: list[Sequence]) -> int:
        """Bytes of KV, in segments, that `sequence` begins with and one of `others` holds, or will."""
        live, layout = self._loaded.segments, self._loaded.layout
        if not live.tokens or layout is None or self.store is None:
            return 0
        block, most = self.store.block_size, 0
        mine = live.names(sequence.kv.hashes, block, sequence.prompt.length)
        for other in others:
            theirs = live.names(other.kv.hashes, block, other.prompt.length)
            most = max([most, *(mine[name] for name in mine.keys() & theirs.keys())])
        return layout.nbytes(most) if most else 0

    def _kv(self, sequence: Sequence) -> int:
        tokens = mlx_adapter.round_up(sequence.capacity)
        per_token = self._loaded.layout.nbytes(tokens) if self._loaded.layout else 0
        states = self._loaded.states
        draft = self.draft_model.kv_bytes(sequence) if self.draft_model is not None else 0
        return per_token + draft + (states.nbytes(tokens) if states and states.tensors else 0)

    def _room(self, running: list[Sequence]) -> tuple[int, int]:
        """(all memory, bytes that a prompt may take now, the hot tier giving way)."""
        total, available = self._measure()
        hot = self._hot.nbytes
        reserve = mlx_adapter.attention_backend().memory_reserve
        room = available + hot - int(total * reserve)
        if self.live is not None:
            room = min(room, self.live - (mx.get_active_memory() - hot))
        return total, max(0, room - self.promised(running))

    def promised(self, running: list[Sequence]) -> int:
        """Bytes of KV that sequences which were admitted have still to take."""
        return sum(
            self._kv(sequence) - self._shared(sequence, running[:index])
            for index, sequence in enumerate(running)
            if sequence.kv.cache is None and sequence.state is not State.DECODING
        )

    def room(self, running: list[Sequence]) -> int:
        """Bytes that may be taken now beside `running`, the hot tier giving way."""
        return self._room(running)[1]

    def _most(self, total: int) -> int:
        """What there would be with nothing but the weights in memory."""
        usable = int(total * (1 - RESERVE_FRACTION))
        return max(0, (usable if self.most is None else min(usable, self.most)) - self._loaded.weight_bytes)

    def _all_stores(self) -> list[KVStore]:
        return [*([self.store] if self.store is not None else []), *self.stores.values()]

    def _store_of(self, sequence: Sequence) -> KVStore | None:
        return self.store if sequence.adapter is None else self.stores.get(sequence.adapter)

    def _beside_hot(self, sequence: Sequence) -> int:
        """Bytes that `sequence` will add where its blocks in RAM stay. As for `_through_cache`."""
        cached, states = 0, self._loaded.states
        if (store := self._store_of(sequence)) is not None and not (states and states.tensors):
            for block, name in zip(self._hot.of(sequence), sequence.kv.hashes, strict=False):
                if block.block_hash != name:
                    break
                cached += store.block_size
        work = max(self.working(sequence.prompt.length, cached), self._tower(sequence, cached))
        return self._kv(sequence) + work

    def _clear_the_way(self, need: int, running: list[Sequence], waiting: list[Sequence]) -> None:
        """Free hot blocks that stand where the first of `waiting` must go."""
        excess = need - (self._room(running)[1] - self._hot.nbytes)
        if excess > 0:
            self._hot.free(excess, running, waiting)
            mlx_adapter.attention_backend().trim_memory()

    def _note_wait(
        self, sequence: Sequence, need: int, room: int, held: Held, running: list[Sequence]
    ) -> None:
        if sequence.stats.waiting_for_memory_since:
            return
        sequence.stats.waiting_for_memory_since = self._clock()
        layout, prompt = self._loaded.layout, mlx_adapter.round_up(sequence.prompt.length)
        answer = self._kv(sequence) - layout.nbytes(prompt) if layout else 0
        log.info(
            "%s (prompt=%d) waits for memory: it needs %s, %s of that for its answer (kv-reserve), "
            "and %s can be had beside %d others; %s of blocks in RAM must stay until they are copied or on "
            "disk",
            sequence.name,
            sequence.prompt.length,
            human(need),
            human(answer),
            human(room),
            len(running),
            human(held.now + held.coming),
        )

    def note_end_of_wait(self, sequence: Sequence, how: str) -> None:
        """Forget that the front was asked for it, and log it with the access log's `prompt=` and `queue=`."""
        if self._asked is not None and self._asked.sequence is sequence:
            self._asked = None
        if sequence.stats.waiting_for_memory_since:
            waited = time.monotonic() - sequence.stats.received
            log.info("%s (prompt=%d) %s, queue=%.3fs", sequence.name, sequence.prompt.length, how, waited)

    def _refusal(self, sequence: Sequence, need: int, room: int, never: bool) -> OmlxdError:
        what = f"This prompt of {sequence.prompt.length} tokens needs about {human(need)} of memory"
        advice = "shorten it"
        if (tower := self._tower(sequence)) > self.working(sequence.prompt.length):
            what += f", {human(tower)} of it for its largest image,"
            advice = "send that one smaller"
        if never:
            return InvalidRequest(f"{what} and at most {human(room)} can be had; {advice}.")
        return Unavailable(
            f"{what} and {human(room)} are free now; retry when other requests or programs gave some back.",
            retry_after=15,
        )

    # ----------------------------------------------------------------- asking the front

    def _may_hope(self, sequence: Sequence, lacking: int) -> bool:
        """Whether the front has still to say what it can do for `sequence`; asks it at first."""
        if self._asked is None or self._asked.sequence is not sequence:
            self._asked = _Question(sequence, self._clock())
            self._ticket += 1
            self._want(Wants(ticket=self._ticket, nbytes=lacking))
            return True
        return not self._asked.answered and self._clock() - self._asked.asked_at < ANSWER_S

    def take_budget(self, budget: Budget) -> None:
        """The front's word: what this engine may hold from now on."""
        self.live, self.most = budget.live, budget.most
        if budget.ticket == self._ticket and self._asked is not None:
            self._asked.answered = True

    # ----------------------------------------------------------------- learning

    def begin_chunk(self) -> None:
        """A chunk of a prompt is about to be computed."""
        self.peak = max(self.peak, mx.get_peak_memory())
        mx.reset_peak_memory()
        self._before = mx.get_active_memory()

    def end_chunk(self, start: int, stop: int) -> None:
        """It has been, of tokens `start` to `stop`: learn from its peak. A short chunk tells nothing: what it
        takes is the same for a token as for a hundred."""
        if stop - start >= min(MEASURABLE_TOKENS, self.chunk):
            took = max(0, mx.get_peak_memory() - max(self._before, mx.get_active_memory()))
            self.cost.learn(start, stop, took)
