"""What a model's attention can do, checked at load: share prefixes, and keep arrays of each row's own."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import KVCache, make_prompt_cache

from ..attention import by_rows as row_attention
from ..attention.backend import current
from ..attention.kv_spec import KVKind
from ..cache import segments
from ..cache.dsa_rows import let_choose
from ..cache.joining import merge
from ..cache.kinds import (
    Cache,
    copied,
    leaves,
    mla_kinds,
    row_states,
    row_tensors,
    segmented,
    spec_of,
    state_tensors,
    token_range,
)
from ..cache.live_segments import LiveSegments
from ..cache.mla_rows import MOST_NEW, attentions, calls_of, take_tokens_for_rows
from ..cache.rows import RowBatch
from ..runtime.arrays import CLOSE, distance
from ..runtime.gpu_faults import end_if_fault

log = logging.getLogger(__name__)


def share_prefixes(model: Any, tokens: int, by_kernel: bool = False) -> LiveSegments:
    """From now on `model`'s caches can hold segments of so many tokens.

    Where the model can't, or `tokens` is 0, nothing changes and its KV is not cut. `by_kernel`: nor where
    steps that read them are neither fused nor compiled. Rows that share segments keep arrays of their own in
    a batch. Kernels take segments of equal length, so where there are any no short one is cut.
    """
    fresh = cache_maker(model)
    if not tokens or not (held := segmented(fresh())):
        return LiveSegments()
    mla = _mla_kinds(model)

    def make_cache() -> Cache:
        return segmented(fresh(), mla)

    if not segments.can_share(model, make_cache):
        return LiveSegments()
    if len(holders := segments.segmented_layers(held)) < len(leaves(held)):
        # Layers of several kinds: some may read others' KV.
        far = distance(*segments.logits_behind(model, make_cache))
        if not far < CLOSE:  # NaN too
            log.info("prefixes are not shared: logits behind segments differ by %.3g", far)
            return LiveSegments()
    how = holders[0].how
    if not mla and not current().shares_prefix(model, tokens, how):
        return LiveSegments()
    model.make_cache = make_cache
    if not use_own_rows(model) or (by_kernel and not current().steps_read_segments(model)):
        model.make_cache = fresh
        object.__setattr__(model, "omlxd_own_rows", False)
        return LiveSegments()
    return LiveSegments(tokens, 0 if current().equal_segments else segments.SHORT_SEGMENT, how)


def use_own_rows(model: Any) -> bool:
    """Whether rows of `model`'s batches keep arrays of their own from now on (cache/rows.py,
    cache/mla_rows.py, or the backend's own).

    Rows of all layers with KV; or else, as where windows are masked otherwise, of those with plain KV alone.
    Where a backend has kernels of its own, a row must attend as by MLX's, to the KV that it has alone;
    elsewhere passes are put together, and none is computed but for latents of MLA.
    """
    fresh, obstacle = cache_maker(model), ""
    shares = any(leaf.how is None for leaf in segments.segmented_layers(fresh()))
    if not current().reads_rows(model, shares):
        log.info("rows of a batch are copied as others join and leave: fused steps have other bits")
        return False
    if mla := _mla_kinds(model):
        modules = attentions(model)
        take_tokens_for_rows(modules)
        let_choose(modules)
    every: tuple[KVKind, ...] = "kv", "mla", "index", "packed", "window"
    for kinds in (every, every[:3]):
        make_cache = partial(_with_own_rows, fresh, kinds, mla)
        depends = kinds, shares, sorted(mla)
        try:
            current().remembered("rows", model, depends, partial(_check_own_rows, model, make_cache, mla))
        except Exception as error:
            end_if_fault(error)
            obstacle = obstacle or str(error)
            continue
        model.make_cache = make_cache
        object.__setattr__(model, "omlxd_own_rows", True)
        return True
    log.info("rows of a batch are copied as others join and leave: %s", obstacle)
    return False


def _check_own_rows(model: Any, make_cache: Callable[[], Cache], mla: Mapping[str, KVKind]) -> bool:
    """Raise what `_try_own_rows` and `_compare_latents` raise, or return True."""
    for new in (1, 2, row_attention.MOST_NEW + 1):
        _try_own_rows(model, make_cache, new)
    if mla:
        _compare_latents(model, make_cache)
    return True


def _try_own_rows(model: Any, make_cache: Callable[[], Cache], new: int) -> None:
    """Raise what a pass of `new` tokens of two rows with arrays of their own raises, or RuntimeError."""
    tokens, rows = mx.arange(2 * new).reshape(2, new) % 7, [make_cache(), make_cache()]
    for length, row in enumerate(rows, 2):
        model(mx.zeros((1, length), mx.int32), cache=row)
    alone = [copied(row) for row in rows] if current().compares_rows else []
    batch = merge(rows, apart=True)
    own = [leaf for _, leaf in leaves(batch) if isinstance(leaf, RowBatch)]
    for leaf in {leaf.spec: leaf for leaf in reversed(own)}.values():
        leaf.is_checked = True
    out = model(tokens, cache=batch)
    if alone:
        mx.eval(out)  # So that new tokens are in their places.
    if not own or any(leaf.pending for leaf in own):
        raise RuntimeError("the model's attention does not read them one by one")
    first = next(name for name, leaf in leaves(batch) if leaf is own[0])
    for row, cache in enumerate(alone):
        model(tokens[row : row + 1], cache=cache)
        want = token_range(cache, row + 2, row + 2 + new) | state_tensors(cache)
        got = row_tensors(batch, row, row + 2, row + 2 + new) | row_states(batch, row)
        # Behind the first layers they may differ by more: rounding adds up.
        for name in (name for name in want if name.startswith(f"{first}.")):
            if want[name].dtype != mx.uint32 and not (far := distance(got[name], want[name])) < CLOSE:
                raise RuntimeError(f"{name} of a row differs by {far:.3g} from what it has alone")


def joins_rows(model: Any) -> bool:
    """Whether a pass over two rows in one array can be put together. None is computed."""
    try:
        rows = [make_prompt_cache(model), make_prompt_cache(model)]
        for length, row in enumerate(rows, 2):
            model(mx.zeros((1, length), mx.int32), cache=row)
        model(mx.zeros((2, 1), mx.int32), cache=merge(rows))
    except Exception as error:
        log.info("rows can't decode together: %s", error)
        return False
    return True


def has_own_rows(model: Any) -> bool:
    """Whether rows of its batches keep arrays of their own."""
    return bool(vars(model).get("omlxd_own_rows"))


def cache_maker(model: Any) -> Callable[[], Cache]:
    """What makes an empty cache of `model`."""
    return getattr(model, "make_cache", None) or (lambda: [KVCache() for _ in model.layers])


def _with_own_rows(fresh: Callable[[], Cache], kinds: Sequence[KVKind], mla: Mapping[str, KVKind]) -> Cache:
    """A fresh cache whose leaves of these kinds say that rows of a batch keep arrays of their own."""
    cache = fresh()
    for name, leaf in leaves(cache):
        if (spec := spec_of(leaf)) is not None and spec.kind in kinds:
            leaf.own_rows, leaf.mla_kind = True, mla.get(name, "")
    return cache


def _mla_kinds(model: Any) -> dict[str, KVKind]:
    """`mla_kinds` of a cache of `model`. Puts a pass together, and computes none."""
    cache = make_prompt_cache(model)
    model(mx.array([[0]]), cache=cache)
    return mla_kinds(cache)


def _compare_latents(model: Any, make_cache: Callable[[], Cache]) -> None:
    """Raise RuntimeError unless attention by latents gives two rows in a batch what it gives each alone.

    It gets the same there: logits of experts would differ by more, as rounding chooses others. Rounding may
    make an index choose others, too, so its choice is compared in float32 alone.
    """
    if not (modules := attentions(model)):
        raise RuntimeError("its attention over latents takes other arguments than DeepSeek V3's")
    index = getattr(modules[0], "indexer", None)
    for new in (1, 2, MOST_NEW + 1):
        _compare_attention(model, make_cache, modules[0], new)
        if index is not None and index.wk.weight.dtype == mx.float32:
            most, index.index_topk = index.index_topk, 3
            try:
                _compare_attention(model, make_cache, modules[0], new)
            finally:
                index.index_topk = most


def _compare_attention(model: Any, make_cache: Callable[[], Cache], module: Any, new: int) -> None:
    """`_compare_latents` of a pass of `new` tokens a row."""
    rows = [make_cache(), make_cache()]
    for length, row in enumerate(rows, 2):
        model(mx.arange(7, 7 + length)[None], cache=row)
    batch = merge([copied(row) for row in rows], apart=True)
    with calls_of(module) as calls:
        for row in rows:
            model(mx.arange(11, 11 + new)[None], cache=row)
    layer = batch[next(at for at, own in enumerate(rows[0]) if own is calls[0][1])]
    mask = leaves([layer])[0][1].make_mask(new, return_array=True)
    got = module(mx.concatenate([x for x, _, _ in calls]), mask, layer)
    if not (far := distance(got, mx.concatenate([out for _, _, out in calls]))) < CLOSE:  # NaN too
        raise RuntimeError(f"attention of {new} tokens a row differs by {far:.3g} from a row's alone")
