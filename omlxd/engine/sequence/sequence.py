"""One request inside the engine: its tokens, its blocks, how far it has come.

| state      | means                                          | next                            |
|------------|------------------------------------------------|---------------------------------|
| waiting    | tokenised and hashed, no slot yet              | restoring, prefilling           |
| restoring  | I/O threads are filling its cache              | prefilling                      |
| prefilling | its prompt is being computed, chunk by chunk   | decoding, done                  |
| decoding   | a row of a `DecodeBatch`                       | done                            |
| done       | its slot, cache and references are given back  |                                 |

A cancelled sequence goes to `done` from anywhere; one that is restoring goes there once the I/O
threads have let go of its arrays.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

import mlx.core as mx

from ...kv.block import Block
from ...kv.block_pool import BlockTable
from ...kv.cold.writer import WritablePayload
from ...kv.files.block_file import BlockKey
from ...kv.hashing import BlockHash, ExtraKey, hash_blocks
from ...wire import KV_RESERVE
from ..constrain.limits import Limits
from ..mlx_adapter import Adapter, Cache, PromptCacheFile
from ..vision.images import PromptImages

MOST_STATES = 1024
"""Hidden states of a sequence that wait for a drafter at most: 8 MB of 4,096 numbers in 16 bits, or three
times that for EAGLE-3. With more, it begins anew at the newest."""


class State(Enum):
    WAITING = auto()
    RESTORING = auto()
    PREFILLING = auto()
    DECODING = auto()
    DONE = auto()


@dataclass(slots=True, frozen=True)
class Likelihood:
    """How likely a token was to the model, as natural logarithms; `top`: (token, logarithm), best first."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


Drawn = tuple[int, Likelihood | None]
"""A token, and how likely it was if the request wants that."""


@dataclass(slots=True, frozen=True)
class LabelScores:
    """As `chat.Scored` has them; `likeliest` is a token and its likelihood."""

    logprobs: tuple[tuple[float, ...], ...]
    logits: tuple[float, ...]
    likeliest: tuple[int, Likelihood]


@dataclass(slots=True)
class SamplerRow:
    """How a sequence's tokens are sampled and when they end, and what its sampler remembers
    (engine/sequence/sampling.py).

    params        its `RowSampling`
    prompt        token ids, kept only for a penalised row
    penalties     made at the first step: MLX arrays belong to the engine thread
    step          tokens sampled so far
    constraint    what its next token may be, and where it ends; sampling reads its `mask` while it `binds`
    top_logprobs  how many of the likeliest tokens to report beside each; None: report nothing
    max_new       tokens to generate at most; `reserve`: of these, how many its cache has room for at once
    eos           tokens that end it
    """

    params: Any
    prompt: Seq[int] = ()
    penalties: Any = None
    step: int = 0
    constraint: Limits | None = None
    top_logprobs: int | None = None
    max_new: int = 0
    reserve: int | None = KV_RESERVE
    eos: frozenset[int] = frozenset()

    @property
    def binding(self) -> Limits | None:
        """The constraint while it binds."""
        return self.constraint if self.constraint is not None and self.constraint.binds else None


@dataclass(slots=True, eq=False, repr=False)
class Prompt:
    """What a client asked for.

    length         tokens of the prompt
    root           parent of the first block
    images         those of its prompt; None: it has none
    extra_keys     of blocks, by index, beside their tokens
    labels         answers to be scored, as tokens: the sequence ends with its prompt; (): it generates
    prediction     tokens that the client predicts
    keys_file, values, query  as the request has them (chat.py)
    write_kv       writes what its cache holds of its prompt into a file
    import_file    the file of its KV, until that is its own; None: it has none
    pins           names of blocks to pin while it runs
    client, session  whose it is, and which conversation of theirs: for fairness alone
    priority       as the request has it (chat.py)
    side           it goes behind others of its session (engine/schedule/waiting/priority.py)
    """

    length: int
    root: BlockHash
    images: PromptImages | None = None
    extra_keys: Mapping[int, Seq[ExtraKey]] = field(default_factory=dict)
    labels: Seq[Seq[int]] = ()
    prediction: Seq[int] = ()
    keys_file: str = ""
    query: int | None = None
    values: bool = False
    write_kv: Callable[[Cache], None] | None = None
    import_file: PromptCacheFile | None = None
    pins: Seq[BlockHash] = ()
    client: str = ""
    session: str = ""
    priority: int = 0
    side: bool = False


@dataclass(slots=True, eq=False, repr=False)
class SequenceKV:
    """What a sequence holds of KV, and where that stands in the store.

    hashes         chain hashes of the prompt's full blocks, then of the output's as they fill up
    length         tokens whose KV is in the cache
    hidden         (end, states (1, tokens, any)) of its newest passes over tokens up to `end`, for a drafter
    offered        blocks that the store has been offered
    blocks_to_retry  indices of those that it had no room for, or that went to make some: to be offered again
    resume_at      blocks after which the checkpoint stands that the match ends at
    divergence     blocks after which a checkpoint is to be made, since the match missed one there; 0: none
    before_images  blocks after which one is to be made, since images begin there
    last_checkpoint  (blocks, payload) of the deepest state copied so far
    restores       how many were tried
    compute_to     token that its next passes end at or before, since a reader has what follows; 0: none does
    pinned         blocks of `Prompt.pins` that are (engine/kvio/bridge.py)
    stored         names of what it has stored since its last good token, or its match; and
                   whether a file of it was there before
    unreached      blocks cached behind the checkpoint that its prefix had to end at, past the usual
    checked        what is left to do until the KV of `Prompt.import_file` is its own
    """

    hashes: list[BlockHash] = field(default_factory=list)
    cache: Cache | None = None
    table: BlockTable | None = None
    length: int = 0
    hidden: tuple[int, mx.array] | None = None
    offered: int = 0
    blocks_to_retry: list[int] = field(default_factory=list)
    resume_at: int = 0
    divergence: int = 0
    before_images: Seq[int] = ()
    last_checkpoint: tuple[int, WritablePayload] | None = None
    restores: int = 0
    compute_to: int = 0
    pinned: list[Block] = field(default_factory=list)
    stored: dict[BlockHash, bool] = field(default_factory=dict)
    unreached: int = 0
    checked: Iterator[Cache | None] | None = None


@dataclass(slots=True, eq=False, repr=False)
class SequenceStats:
    """What a sequence took. Points in time are of the monotonic clock.

    received       when it was made; `asked`: when its client asked
    admitted       when it got its slot; 0: it has none yet
    waiting_for_memory_since  when it began to wait for memory; 0: it has not
    overtaken      tokens of other prompts that went before its own
    restored_hot, restored_cold  tokens of its prompt that came from RAM and from SSD
    recomputed     tokens of its cached prefix that were computed, as that was faster, or a file was damaged
    restore_s, first_token_s  seconds spent on its cached prefix; from `asked` to its first token
    prefill_s      seconds of passes over its prompt, those it shared with others included
    pass_since     when the pass under way began, later by what others' steps in it took; 0: none is under way
    peak_bytes     most that MLX held in its passes
    drafted, accepted  guesses that were checked, and those that held (engine/speculate/controller.py), as
                   far as its answer goes (`RequestSink.count`)
    model_drafted, model_accepted  of these, the draft model's
    predicted, predicted_accepted  of these, those that come from `Prompt.prediction`
    """

    received: float = field(default_factory=time.monotonic)
    asked: float = 0.0
    admitted: float = 0.0
    waiting_for_memory_since: float = 0.0
    overtaken: int = 0
    restored_hot: int = 0
    restored_cold: int = 0
    recomputed: int = 0
    restore_s: float = 0.0
    first_token_s: float = 0.0
    prefill_s: float = 0.0
    pass_since: float = 0.0
    peak_bytes: int = 0
    drafted: int = 0
    accepted: int = 0
    model_drafted: int = 0
    model_accepted: int = 0
    predicted: int = 0
    predicted_accepted: int = 0

    def __post_init__(self) -> None:
        self.asked = self.asked or self.received

    @property
    def was_in_pass(self) -> bool:
        """Whether any pass over its prompt began."""
        return bool(self.pass_since or self.prefill_s)

    def begin_pass(self) -> None:
        self.pass_since = time.monotonic()

    def end_pass(self) -> None:
        """Book the pass under way, if one is."""
        if self.pass_since:
            self.prefill_s += time.monotonic() - self.pass_since
            self.pass_since = 0.0


_arrivals = itertools.count()


@dataclass(slots=True, eq=False, repr=False)
class Sequence:
    """tokens: prompt and output, which no repr brings into a log. Compared by identity.

    adapter        what its passes add to the model; None: nothing
    sink           where output goes (engine/output/sink.py); opaque to the scheduler
    name           in log lines: its id in the access log
    again          as the request has it (chat.py): its prompt is not counted
    carried        its KV comes from a file or goes into one: no client's prompt, which nothing counts
    begun          its sink knows of how many tokens its KV was restored
    wait_logged    the log says that it waits behind others; never of an answer that is `again`
    outranked      turns that lower numbers had before it (engine/schedule/waiting/priority.py)
    deadline       on the monotonic clock, when the watchdog ends it; `timed_out`: it has
    """

    id: int
    tokens: list[int]
    prompt: Prompt
    sampling: SamplerRow
    kv: SequenceKV = field(default_factory=SequenceKV)
    stats: SequenceStats = field(default_factory=SequenceStats)
    adapter: Adapter | None = None
    sink: Any = None
    name: str = ""
    again: bool = False
    carried: bool = False
    state: State = State.WAITING
    cancelled: bool = False
    timed_out: bool = False
    begun: bool = False
    wait_logged: bool = False
    outranked: int = 0
    deadline: float = math.inf
    arrival: int = field(default_factory=lambda: next(_arrivals))

    def __post_init__(self) -> None:
        self.name = self.name or f"request {self.id}"

    @property
    def generated(self) -> int:
        return len(self.tokens) - self.prompt.length

    @property
    def has_begun_nothing(self) -> bool:
        """Whether it has a slot, and no KV, no reads and no pass yet."""
        idle = self.state is State.PREFILLING and not (self.begun or self.cancelled or self.stats.was_in_pass)
        kv = self.kv
        return idle and not (
            kv.cache is not None or kv.compute_to or kv.restores or kv.checked or self.prompt.import_file
        )

    @property
    def capacity(self) -> int:
        """Tokens to allocate its cache for: the prompt and some room, not all that it may ever need."""
        return self.prompt.length + min(
            self.sampling.max_new, KV_RESERVE if self.sampling.reserve is None else self.sampling.reserve
        )

    @property
    def remaining_prefill(self) -> int:
        return max(0, self.prompt.length - self.kv.length)

    def may_end(self, position: int) -> bool:
        """Whether a pass, and with it a cached prefix, may end at token `position`."""
        return self.prompt.images is None or self.prompt.images.may_end(position)

    def last_boundary(self, block_size: int) -> int:
        """The last multiple of a block before the prompt's end where a pass may end."""
        last = (self.prompt.length - 1) // block_size * block_size
        while not self.may_end(last):
            last -= block_size
        return last

    def take_cache(self) -> Cache:
        """Hand the cache over; the sequence keeps no reference, which would make appends copy."""
        cache, self.kv.cache = self.kv.cache, None
        assert cache is not None
        return cache

    def keep_hidden(self, start: int, hidden: mx.array | None) -> None:
        """Keep states (1, tokens, any) of a pass over tokens from `start` on, behind those right before it;
        none that are far from the prompt's end."""
        held, self.kv.hidden = self.kv.hidden, None
        if hidden is None or (end := start + hidden.shape[1]) <= self.prompt.length - MOST_STATES:
            return
        if held is not None and held[0] == start:
            hidden = mx.concatenate([held[1], hidden], axis=1)
        self.kv.hidden = end, hidden[:, -MOST_STATES:]

    def hash_output(self, blocks: int, block_size: int) -> None:
        """Hash the first `blocks` blocks, whose tokens are there, as far as that is not done."""
        hashed = len(self.kv.hashes)
        if blocks > hashed:
            parent = self.kv.hashes[-1] if hashed else self.prompt.root
            keys = {index - hashed: keys for index, keys in self.prompt.extra_keys.items() if index >= hashed}
            self.kv.hashes += hash_blocks(
                parent, self.tokens[hashed * block_size : blocks * block_size], block_size, keys
            )

    def key(self, index: int, block_size: int) -> BlockKey:
        """The key of block `index`; it must be hashed."""
        return BlockKey(
            self.kv.hashes[index],
            self.kv.hashes[index - 1] if index else self.prompt.root,
            self.tokens[index * block_size : (index + 1) * block_size],
            tuple(self.prompt.extra_keys.get(index, ())),
        )
