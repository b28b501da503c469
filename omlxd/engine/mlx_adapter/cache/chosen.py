"""KV of attention that chooses blocks of tokens to look at, of one sequence and of a batch's rows.

Qwen Sparse Attention (`qwen4_exp`) and that of GLM-5-Next keep a second key of each token. They make one key
of each block's, and choose blocks by it. Here the second keys are kept per token, as the KV is, and blocks
are made of them: so they can be stored, brought back and forgotten at any token. mlx-vlm keeps GLM-5-Next's
blocks, and the tokens behind the last.

A batch of mlx-vlm's own attends to all tokens where rows of `qwen4_exp` have unequal lengths, not to those
that it chose (`left_padded_decode` of mlx-vlm 0.7.10), and so gives other tokens than each row alone. Here
each row attends by itself: `attend_by_rows` changes the functions that do.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import KVCache

from ..attention.kv_spec import KVSpec
from .rows import RowBatch, each_row, offsets_of


class ChosenKVCache(KVCache):
    """Of one sequence.

    parts   what it keeps of each token; latents have no values
    index   (1, 1, capacity, width), what blocks are made of; new ones come before or behind their tokens' KV
    ratio   tokens of a block
    blocks  what was made of `index` by now, a block each; the model makes what is missing
    """

    parts = ("keys", "values", "index")
    _axis = 1
    """Of `blocks`."""

    def __init__(self, ratio: int = 1):
        super().__init__()
        self.ratio = ratio
        self.index: mx.array | None = None
        self.blocks: mx.array | None = None

    def put_index(self, new: mx.array, start: int) -> mx.array:
        """Put `new` (1, tokens, width) behind `start` tokens, and return those of all, (1, tokens, width)."""
        end = start + new.shape[1]
        if self.index is None or end > self.index.shape[2]:
            room = mx.zeros((1, 1, -(-end // self.step) * self.step - start, new.shape[2]), new.dtype)
            held = [] if self.index is None else [self.index[:, :, :start]]
            self.index = mx.concatenate([*held, room], axis=2)
        self.index[:, 0, start:end] = new
        return self.index[:, 0, :end]

    @property
    def state(self) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return [*super().state, *(a for a in (self.index, self.blocks) if a is not None)]

    def trim(self, n: int) -> int:
        n = super().trim(n)
        if self.blocks is not None:
            kept = mx.arange(min(self.offset // self.ratio, self.blocks.shape[self._axis]))
            self.blocks = mx.take(self.blocks, kept, axis=self._axis)
        return n


class QSAKVCache(ChosenKVCache):
    """Of a layer of `qwen4_exp`, which has names of its own for what it made. Text's positions are known."""

    _axis = 2

    @property
    def index_block_keys(self) -> mx.array | None:
        return self.blocks

    @index_block_keys.setter
    def index_block_keys(self, blocks: mx.array | None) -> None:
        self.blocks = blocks

    @property
    def index_block_ratio(self) -> int:
        return self.ratio

    @index_block_ratio.setter
    def index_block_ratio(self, ratio: int) -> None:
        self.ratio = ratio

    def update_indexer(self, keys: mx.array, position_ids: mx.array) -> tuple[mx.array, mx.array]:
        """Keys that choose, and positions, of all tokens so far. `keys`: (1, tokens, width), of new ones."""
        held = self.put_index(keys, self.offset)
        end = held.shape[1]
        return held, mx.broadcast_to(mx.arange(end), (*position_ids.shape[:-1], end))


class PooledKVCache(ChosenKVCache):
    """Of a layer of GLM-5-Next, which reads it as a list of four caches: latents; which tokens are no
    padding; pools; keys and values of all heads. The fourth is None here: the model then makes them in each
    pass, as it does by itself from 32,768 tokens on.

    `index` holds keys and gates.
    """

    parts = ("keys", "index")

    def __getitem__(self, which: int) -> Any:
        return (self, _AllTokens(self), _Pools(self), None)[which]


class LatentKVCache(ChosenKVCache):
    """Of a layer of GLM-5-Next that looks at what another chose."""

    parts = ("keys",)

    def __getitem__(self, which: int) -> Any:
        return (self, None)[which]


class _AllTokens:
    """Says that none of the tokens is padding. `latents` have the new ones already."""

    def __init__(self, latents: KVCache):
        self._latents = latents

    def update_and_fetch(self, valid: mx.array, values: mx.array) -> tuple[mx.array, None]:
        return mx.ones((1, 1, self._latents.offset, 1), mx.bool_), None


class _Pools:
    """mlx-vlm's PoolingCache over what `cache` keeps."""

    offset = 0
    """No array: a single row."""

    def __init__(self, cache: ChosenKVCache):
        self._cache = cache

    def accumulate_windows(self, kv: mx.array, gate: mx.array, offset: int) -> tuple[mx.array, mx.array, int]:
        """Keys and gates of complete blocks that are not made yet, and where they begin."""
        held, ratio = self._cache.put_index(mx.concatenate([kv, gate], axis=-1), offset), self._cache.ratio
        made = self._cache.blocks
        start = 0 if made is None else made.shape[1] * ratio
        ready = held[:, start : held.shape[1] // ratio * ratio]
        return ready[..., : kv.shape[2]], ready[..., kv.shape[2] :], start

    def update_and_fetch(self, new: mx.array) -> mx.array:
        made = self._cache.blocks
        self._cache.blocks = new if made is None else mx.concatenate([made, new], axis=1)
        return self._cache.blocks


class ChosenRowsKVCache(RowBatch):
    """A layer of a batch. `rows`: a cache of one sequence each, all of one class."""

    def __init__(self, rows: Iterable[ChosenKVCache]):
        super().__init__()
        self.rows = list(rows)
        self.spec = KVSpec("chosen", self.rows[0].parts)

    @classmethod
    def merge(cls, rows: Iterable[ChosenKVCache]) -> ChosenRowsKVCache:
        return cls(rows)

    @property
    def offset(self) -> mx.array:
        """(rows,): tokens of each row."""
        return offsets_of(tuple(row.offset for row in self.rows))

    @property
    def state(self) -> list[Any]:
        return [row.state for row in self.rows if row.keys is not None]

    def make_mask(self, N: int, window_size: int | None = None, return_array: bool = False) -> Any:
        return None if N == 1 else "causal"

    def extend(self, other: ChosenRowsKVCache) -> None:
        self.rows += other.rows

    def filter(self, batch_indices: Sequence[int]) -> None:
        self.rows = [self.rows[row] for row in batch_indices]

    def held_by(self, row: int) -> tuple[ChosenKVCache, Sequence[Any]]:
        return self.rows[row], ()

    def trim_rows(self, counts: Sequence[int]) -> None:
        for row, count in zip(self.rows, counts, strict=True):
            row.trim(count)


# --------------------------------------------------------------------------- attention of a batch


def attend_by_rows(module: Any) -> None:
    """Let attention of `module`, a language model of mlx-vlm, take the rows of a batch one by one."""
    if hasattr(module, "omlxd_by_rows"):
        return
    module.omlxd_by_rows = True
    if hasattr(module, "Glm5NextAttention"):
        _by_rows(module.Glm5NextAttention, "__call__", _glm)
        return
    _choose_no_token_before(module.Qwen4ExpQSAIndexer)
    _by_rows(module.Qwen4ExpAttention, "__call__", _qwen)
    _by_rows(module.Qwen4ExpBatchInvariantForward, "_qsa_attention", _qwen_step)


def _choose_no_token_before(indexer: Any) -> None:
    """Have masks of `indexer` leave out blocks -1, which are none.

    mlx-vlm marks their tokens, -4 to -1, as chosen. Behind 2 tokens that is a byte in front of the mask's
    memory: MLX keeps an array's size there, and said that 2**64 bytes were in use.
    """
    own = indexer.build_mask

    def build_mask(self: Any, selection: Any) -> mx.array:
        mended, blocks = copy.copy(selection), selection.selected_blocks
        mended.selected_blocks = mx.where(blocks < 0, selection.key_len, blocks)
        return own(self, mended)

    indexer.build_mask = build_mask


def _by_rows(kind: Any, name: str, of_batch: Callable[..., Any]) -> None:
    """Have method `name` be `of_batch` where it gets a batch of ours, with the method in front."""
    own = getattr(kind, name)

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        if any(isinstance(each, ChosenRowsKVCache) for each in (*args, *kwargs.values())):
            return of_batch(lambda *row: own(self, *row), *args, **kwargs)
        return own(self, *args, **kwargs)

    setattr(kind, name, method)


def _qwen(own: Any, x: Any, mask: Any, cache: ChosenRowsKVCache, position_ids: Any) -> Any:
    rows = zip(each_row(x), cache.rows, _places(position_ids), strict=True)
    return mx.concatenate([own(one, mask, row, places) for one, row, places in rows])


def _qwen_step(own: Any, layer: Any, x: Any, cache: ChosenRowsKVCache, position_ids: Any, mask: Any) -> Any:
    rows = zip(each_row(x), cache.rows, _places(position_ids), strict=True)
    return mx.concatenate([own(layer, one, row, places, mask) for one, row, places in rows])


def _glm(own: Any, x: Any, mask: Any, cache: ChosenRowsKVCache, chosen: Any, last_only: bool = False) -> Any:
    """(what it gives, what it chose), of as many tokens in each row."""
    before = each_row(chosen) if chosen is not None else [None] * len(cache.rows)
    rows = zip(each_row(x), cache.rows, before, strict=True)
    outs, chose = zip(*(own(one, mask, row, from_, last_only) for one, row, from_ in rows), strict=True)
    return mx.concatenate([*outs]), mx.concatenate([*chose])


def _places(position_ids: mx.array) -> list[mx.array]:
    """(3, 1, tokens) each, of (3, rows, tokens)."""
    return [position_ids[:, row : row + 1] for row in range(position_ids.shape[1])]
