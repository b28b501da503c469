"""When a sequence's state is copied into a checkpoint, and how it comes back (kv/checkpoint.py).

| where                          | kept hot | written                                      |
|--------------------------------|----------|----------------------------------------------|
| every `interval` prompt tokens | yes      | yes: a prompt may diverge anywhere           |
| where a prompt left an earlier | yes      | yes: it missed one here, as others will that |
| one, if far behind the last    |          | begin the same                               |
| before images, if not close    | yes      | no: another image may follow, most don't     |
| behind the last one            |          |                                              |
| the prompt's last boundary     | yes      | no: soon superseded by the turn's end        |
| the turn's last boundary       | yes      | yes: the next turn goes on from there        |

A checkpoint that was left in RAM alone is written once another request resumes from it: the same prompt
has been asked twice, or another turn goes on from where one was edited.

While a turn is generated the newest boundary's state is held aside and replaced, so a turn writes
one checkpoint however long it is. One that is broken off writes its last too, and its prompt's: the
same prompt is likely to be asked again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import mlx.core as mx

from ...kv.checkpoint import Checkpoints, checkpoint_name
from ...kv.hashing import BlockHash
from ...kv.layout import KVLayout
from .. import mlx_adapter
from ..mlx_adapter import Cache, StateLayout
from ..sequence.sequence import Sequence
from .payload import MLXPayload, copy_state, read_payload, view_state

log = logging.getLogger(__name__)

SHARE = 0.2
"""Checkpoints at intervals take at most this share of the bytes of the KV between them.

So bytes written stay below 1.2 of the new KV and one checkpoint a turn, however long a prompt is. On
traces of Claude Code (19 prompts, 667,000 tokens, of which 100,884 must be computed by any cache; one
checkpoint where prompts fork included; tools/bench/checkpoints.py), chosen intervals with a star:

    model              MB a checkpoint   interval   computed beyond   bytes written over the least
    gpt-oss-20b                    3.1      2,048*           +1,664   1.05
    qwen3-next-80b-a3b              77      8,192            +3,712   1.22
                                           16,384*          +11,200   1.14
    gemma-3-12b                    336     16,384           +11,200   1.18
                                           32,768*          +43,968   1.13
                                           none             +43,968   1.05
    mamba2-2.7b                     86      8,192            +3,712   1.53
    (no KV: no forks)                      16,384           +20,096   1.26
                                           32,768*          +69,248   1.16

Without the checkpoints at forks the two long intervals compute +20,096 and +69,248.
"""

LEAST_INTERVAL = 2048
BARE_INTERVAL = 32768
"""Tokens, for a model without per-token KV, where `SHARE` has nothing to be a share of."""

LEAST_FORK = 2048
"""Tokens that a checkpoint where prompts fork must save the next one."""

LEAST_TEXT = 256
"""Tokens before an image that a checkpoint must save another one there. Less, and each turn that brings a
screenshot would leave one more: it begins some tens of tokens behind the last turn's."""

MOST_RESTORES = 3
"""Restores that one sequence tries: a file that can't be read must not be tried for ever."""

States = Callable[[], dict[str, mx.array]]


class Checkpointer:
    """`tokens`: the model's per-token layout, for the interval. Engine thread, but for `read`."""

    def __init__(self, layout: StateLayout, tokens: KVLayout, checkpoints: Checkpoints, block_size: int):
        self._layout = layout
        self._block = block_size
        self.checkpoints = checkpoints
        self.interval = _interval(layout, tokens)
        self.least_fork = LEAST_FORK
        self.least_text = LEAST_TEXT
        self._sees_forks = bool(tokens.groups)

    # ----------------------------------------------------------------- out of a sequence

    def after_chunk(self, sequence: Sequence, last_boundary: int, states: States) -> None:
        """A prefill chunk has ended: keep the state if this is a place for it."""
        position = sequence.kv.length
        lasting = position % self.interval == 0 or position == sequence.kv.divergence * self._block
        if lasting or position >= last_boundary or position // self._block in sequence.kv.before_images:
            self.at_boundary(sequence, states)
            if (
                sequence.kv.last_checkpoint is not None
                and sequence.kv.last_checkpoint[0] * self._block == position
            ):
                self._put(sequence, write=lasting)

    def at_boundary(self, sequence: Sequence, states: States) -> None:
        """A sequence has reached a block boundary, or is about to end at one: hold its state aside."""
        blocks, rest = divmod(sequence.kv.length, self._block)
        held = sequence.kv.last_checkpoint
        if rest or not blocks or (held is not None and held[0] == blocks):
            return
        sequence.hash_output(blocks, self._block)
        try:
            sequence.kv.last_checkpoint = (blocks, copy_state(self._layout.at(sequence.kv.length), states()))
        except Exception:  # No memory for a copy, most likely: nobody's answer fails for it.
            log.exception("%s: its state after %d blocks is not kept", sequence.name, blocks)

    def _put(self, sequence: Sequence, *, write: bool) -> None:
        assert sequence.kv.last_checkpoint is not None
        blocks, payload = sequence.kv.last_checkpoint
        block_hash = sequence.kv.hashes[blocks - 1]
        was_hot = self.checkpoints.hot(block_hash) is not None
        had_file = self.checkpoints.put(block_hash, blocks * self._block, payload, write=write)
        if not was_hot:
            name = checkpoint_name(block_hash)
            sequence.kv.stored[name] = had_file and sequence.kv.stored.get(name, True)

    def finish(self, sequence: Sequence) -> list[BlockHash]:
        """The sequence ends, however: what it holds aside is kept. Names of the checkpoints it used."""
        ends = [sequence.kv.resume_at] if sequence.kv.resume_at else []
        if sequence.kv.resume_at and sequence.generated:
            self._write_hot(sequence, sequence.kv.resume_at)
        prompt_end = sequence.last_boundary(self._block) // self._block
        computed = 0 < prompt_end * self._block <= sequence.kv.length
        if sequence.cancelled and computed and self._write_hot(sequence, prompt_end):
            ends.insert(0, prompt_end)
        if sequence.kv.last_checkpoint is not None:
            self._put(sequence, write=True)
            ends.insert(0, sequence.kv.last_checkpoint[0])
            sequence.kv.last_checkpoint = None
        return [checkpoint_name(sequence.kv.hashes[blocks - 1]) for blocks in ends]

    def _write_hot(self, sequence: Sequence, blocks: int) -> bool:
        """Write the checkpoint after `blocks` blocks, unless it has a file. False: it is not hot."""
        block_hash = sequence.kv.hashes[blocks - 1]
        payload = self.checkpoints.hot(block_hash)
        if not isinstance(payload, MLXPayload):
            return False
        self.checkpoints.put(block_hash, blocks * self._block, payload, write=True)
        return True

    # ----------------------------------------------------------------- into a sequence

    def match(self, sequence: Sequence, usable: int) -> int:
        """Blocks up to the deepest checkpoint within `usable`, the end of the match; noted in `resume_at`.

        usable  blocks that the chain of token blocks reaches; where it ends a prompt diverges
        """
        if sequence.kv.restores >= MOST_RESTORES:
            sequence.kv.resume_at = sequence.kv.divergence = 0
            return 0
        sequence.kv.resume_at = self.checkpoints.deepest(sequence.kv.hashes, usable)
        gap = usable - sequence.kv.resume_at
        sequence.kv.divergence = usable if self._sees_forks and gap * self._block >= self.least_fork else 0
        if gap * self._block > self.interval:
            sequence.kv.unreached = gap
        sequence.kv.before_images = self._before_images(sequence)
        return sequence.kv.resume_at

    def _before_images(self, sequence: Sequence) -> tuple[int, ...]:
        """Blocks after which images begin, far enough behind the last checkpoint."""
        places: list[int] = []
        last = sequence.kv.resume_at
        for blocks in (
            sequence.prompt.images.beginnings(self._block) if sequence.prompt.images is not None else ()
        ):
            position = blocks * self._block
            last = max(last, position // self.interval * self.interval // self._block)
            if position - last * self._block >= self.least_text and sequence.may_end(position):
                places.append(blocks)
                last = blocks
        return tuple(places)

    def deepest_hot(self, sequence: Sequence, usable: int) -> int:
        """Blocks up to the deepest checkpoint in RAM within `usable`."""
        hot = (n for n in range(usable, 0, -1) if self.checkpoints.hot(sequence.kv.hashes[n - 1]) is not None)
        return next(hot, 0)

    def nbytes(self, blocks: int) -> int:
        """Of a checkpoint after that many blocks."""
        return self._layout.nbytes(blocks * self._block)

    def hot(self, sequence: Sequence) -> MLXPayload | None:
        """The checkpoint that the sequence resumes from, if it is in RAM. Any thread."""
        payload = self.checkpoints.hot(sequence.kv.hashes[sequence.kv.resume_at - 1])
        return payload if isinstance(payload, MLXPayload) else None

    def read(self, sequence: Sequence) -> tuple[MLXPayload | None, bool]:
        """(the checkpoint that the sequence resumes from, whether the disk was read). Any thread."""
        block_hash, position = (
            sequence.kv.hashes[sequence.kv.resume_at - 1],
            sequence.kv.resume_at * self._block,
        )
        if (hot := self.hot(sequence)) is not None:
            return hot, False
        return self.read_file(block_hash, position), True

    def read_file(self, block_hash: BlockHash, position: int) -> MLXPayload | None:
        """The checkpoint after that block, `position` tokens, from its file. Any thread."""
        return read_payload(
            self._layout.at(position),
            1,
            lambda views: self.checkpoints.load_into(block_hash, position, views),
        )

    def is_finite(self, sequence: Sequence) -> bool:
        """Whether the checkpoint that the sequence resumed from holds no NaN or infinity. Reads the disk."""
        position = sequence.kv.resume_at * self._block
        payload, _ = self.read(sequence)
        if payload is None:
            return True
        states = view_state(self._layout.at(position), payload, self._layout.shapes(position)).values()
        return all(bool(mx.isfinite(a).all().item()) for a in states if mx.issubdtype(a.dtype, mx.floating))

    def keep_hot(self, sequence: Sequence, payload: MLXPayload) -> None:
        """A checkpoint came from the cold tier: keep it in RAM too, if there is room."""
        block_hash = sequence.kv.hashes[sequence.kv.resume_at - 1]
        self.checkpoints.put(block_hash, sequence.kv.resume_at * self._block, payload, write=False)

    def put_into(self, cache: Cache, payload: MLXPayload, position: int) -> None:
        """Set the state of a cache that holds `position` tokens."""
        shapes = self._layout.shapes(position)
        mlx_adapter.put_states(cache, view_state(self._layout.at(position), payload, shapes), position)


def _interval(layout: StateLayout, tokens: KVLayout) -> int:
    per_token = tokens.nbytes(1)
    if not per_token:
        return BARE_INTERVAL
    interval = LEAST_INTERVAL
    while layout.nbytes(1 << 20) > SHARE * interval * per_token:
        interval *= 2
    return interval
