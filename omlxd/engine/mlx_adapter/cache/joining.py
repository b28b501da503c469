"""Rows join and leave a batch, whose layers have one of two forms.

apart  each row keeps arrays of its own (rows.py): nobody's KV is copied, and attention goes row by row
joint  one array has all rows, padded to the longest (batch.py): one call of attention, and joins copy all

Layers that may be apart (`own_rows`, as `checks.use_own_rows` sets it) are so where the backend says that it
pays for rows of these lengths; whoever joins has that asked anew. All of a batch have one form, since a model
makes one mask for all layers of a kind. Rows of MLA and rows that hold segments are apart in any case.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, Protocol

import mlx.core as mx

from ..attention import backend
from .batch import WindowBatchKVCache
from .dsa_rows import IndexRowsKVCache
from .kinds import KINDS, Cache, leaves, map_leaves, spec_of, state_arrays
from .mla_rows import LatentRowsKVCache
from .rows import OwnRowsKVCache, RowBatch

_ROW_BATCHES = {"mla": LatentRowsKVCache, "index": IndexRowsKVCache}
"""Classes of a batch's layer, where the backend has none of its own; for other kinds `OwnRowsKVCache`."""


def merge(caches: Sequence[Cache], apart: bool = False) -> Cache:
    """Return one batch cache of several single ones, layer by layer.

    Rows that are apart keep their arrays, which the batch takes; joint rows are copied.

    apart  make them apart, whatever is faster
    """
    apart = apart or len(caches) == 1 or _be_apart(caches, True)
    return [map_leaves(partial(_merged, apart), *layers) for layers in zip(*caches, strict=True)]


def extend(batch: Cache, single: Cache) -> None:
    """Add a row to a batch cache, whose joint arrays are copied. Takes the layers out of `single`."""
    _extend(batch, single, lambda layer: map_leaves(partial(_merged, True), layer))


def extend_batch(batch: Cache, other: Cache) -> None:
    """Add the rows of another batch cache, and take its layers out of it; joint arrays are copied."""
    _extend(batch, other, lambda layer: layer)


def _extend(batch: Cache, other: Cache, as_batch: Callable[[Any], Any]) -> None:
    was_apart = _is_apart(batch)
    apart, copied = _be_apart([batch, other], was_apart), _copier(batch)

    def extended(into: Any, more: Any) -> Any:
        into = _formed(into, apart)
        into.extend(_formed(more, apart))
        return into

    try:
        for index, layer in enumerate(batch):
            batch[index] = map_leaves(extended, layer, as_batch(other[index]))
            other[index] = None
            copied(batch[index])
    except Exception:  # `keep_rows` drops what has joined.
        batch[:] = [map_leaves(partial(_formed, apart=was_apart), layer) for layer in batch]
        raise


# --------------------------------------------------------------------------- the two forms


def _may_be_apart(leaf: Any) -> bool:
    """Of one sequence or of a batch."""
    return isinstance(leaf, RowBatch) or hasattr(leaf, "own_rows") or hasattr(leaf, "empty_row")


def _is_apart(batch: Cache) -> bool:
    return any(isinstance(leaf, RowBatch) for _, leaf in leaves(batch))


def _be_apart(caches: Sequence[Cache], are_apart: bool) -> bool:
    """Return whether rows of `caches`, each of a sequence or a batch, shall be apart.

    are_apart  they are now
    """
    may = [[leaf for _, leaf in leaves(cache) if _may_be_apart(leaf)] for cache in caches]
    if not all(may) or any(_must_be_apart(leaf) for held in may for leaf in held):
        return True
    full = [next((leaf for leaf in held if not getattr(leaf, "max_size", 0)), held[0]) for held in may]
    return backend.current().rows_pay_for([tokens for leaf in full for tokens in _lengths(leaf)], are_apart)


def _must_be_apart(leaf: Any) -> bool:
    """Whether its rows keep latents of MLA, may hold segments, or are a backend's own."""
    if isinstance(leaf, RowBatch) and not isinstance(leaf, OwnRowsKVCache):
        return True
    row = leaf.rows[0] if isinstance(leaf, OwnRowsKVCache) else getattr(leaf, "empty_row", leaf)
    return getattr(row, "mla_kind", "") in _ROW_BATCHES or bool(getattr(row, "layer", ""))


def _lengths(leaf: Any) -> list[int]:
    """Tokens that each row of a leaf keeps, of one sequence or of a batch."""
    if isinstance(leaf, OwnRowsKVCache):
        return [tokens for row in leaf.rows for tokens in _lengths(row)]
    if hasattr(leaf, "ends"):
        return [end - start for start, end in zip(leaf.starts, leaf.ends, strict=True)]
    tokens = leaf.tokens() if isinstance(leaf, WindowBatchKVCache) else [leaf.offset]
    return [min(each, getattr(leaf, "max_size", each)) for each in tokens]


def _merged(apart: bool, *rows: Any) -> Any:
    """A layer of a batch, of the layers of one sequence each."""
    kind, spec = KINDS.get(type(rows[0])), spec_of(rows[0])
    if not hasattr(rows[0], "own_rows") or kind is None or spec is None:
        return (kind.batch if kind is not None else type(rows[0])).merge(list(rows))
    if not apart:
        batch = kind.batch.merge(list(rows))
        batch.empty_row = copy.copy(rows[0])
        batch.empty_row.keys = batch.empty_row.values = None
        return batch
    made = backend.current().row_batch(rows, spec)
    batch = _ROW_BATCHES.get(spec.kind, OwnRowsKVCache)(rows) if made is None else made
    batch.spec = spec
    return batch


def _formed(leaf: Any, apart: bool) -> Any:
    """A layer of a batch in the form that is asked for, as far as it has both."""
    if isinstance(leaf, OwnRowsKVCache) and not apart:
        return _merged(apart, *leaf.rows)
    return _merged(apart, *_rows(leaf)) if apart and hasattr(leaf, "empty_row") else leaf


def _rows(leaf: Any) -> Iterator[Any]:
    """The rows of a joint layer, each with copies of its arrays, as a cache of one sequence."""
    kind = KINDS[type(leaf.empty_row)]
    for at, tokens in enumerate(_lengths(leaf)):
        row = copy.copy(leaf.empty_row)
        if kind.per_token:
            start, end = leaf.starts[at], leaf.ends[at]
            arrays = {
                name: mx.contiguous(array[at : at + 1, :, start:end])
                for name, array in KINDS[type(leaf)].state_of(leaf).items()
            }
        else:
            alone = leaf.extract(at)
            arrays, tokens = kind.state_of(alone), alone.offset
        kind.restore(row, arrays, tokens)
        yield row


# --------------------------------------------------------------------------- large batches, and who leaves


LARGE = 1 << 30
"""Bytes of a batch from which on layers are copied in turns: originals go before other copies come. An H100
ran out of memory where rows of 4.8 GB joined lazily, and where the pool that MLX allocates from kept what
they left in pieces."""

COPIED = 1 << 28
"""Bytes of a turn's copies, at least. Each layer by itself, a row that left four of 8,000 tokens, whose tails
have 1.2 GB, took 40 ms of an H200."""


def _copier(batch: Cache) -> Callable[[Any], None]:
    """What to call with each layer of `batch` that has a lazy copy: of a large batch it is made at once."""
    joint = [leaf for _, leaf in leaves(batch) if not isinstance(leaf, RowBatch)]
    if sum(array.nbytes for array in state_arrays(joint)) < LARGE:
        return lambda layer: None

    waiting: list[mx.array] = []

    def copied(layer: Any) -> None:
        waiting.extend(state_arrays([layer]))
        if sum(array.nbytes for array in waiting) >= COPIED:
            mx.eval(waiting)
            waiting.clear()
            backend.current().trim_memory()

    return copied


class RowTail(Protocol):
    """What a backend's kernels write to of one row and layer."""

    def let_go(self) -> None:
        """Note that no kernel writes to it any more."""


def let_go(tails: Iterable[RowTail]) -> None:
    """Note that no kernel writes to any of `tails` any more."""
    for tail in tails:
        tail.let_go()


def keep_rows(batch: Cache, rows: Sequence[int]) -> list[RowTail]:
    """Drop every other row of a batch cache.

    Returns the tails of those rows, which the step on its way still writes to. Keep them until that step has
    been computed, then call `let_go`. A tail that is freed before waits for the step: 1 ms a row of SmolLM2
    on an H100.
    """
    tails = [(row, tail) for _, leaf in leaves(batch) for row, tail in enumerate(getattr(leaf, "tails", ()))]
    copied = _copier(batch)
    for layer in batch:
        layer.filter(list(rows))
        copied(layer)
    return [tail for row, tail in tails if row not in rows]
