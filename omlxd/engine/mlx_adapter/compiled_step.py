"""A decode step of one token a row as one compiled function: what Python does for it is done once a shape.

On CUDA a step of an 8B shape waits for the host, which builds a graph of some 1,500 arrays in Python,
evaluates it and launches its kernels. `mx.compile` replays the graph that was built when the model was called
with the same shapes; lengths are arrays there. attention_kernel.py puts each layer's new KV into its place,
so that no copy of it is a kernel of its own.

A function belongs to (rows, capacity of the KV). A model that can't be traced so, or whose attention is not
`attention.attend`, goes on step by step. Where the kernel does not run (Metal, CPU) nothing is compiled.

A model that fused_step.py knows takes all its steps by that, compiled or not, so that what comes out does not
depend on when rows joined.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import KVCache

from . import attention, cuda_driver, products
from .batch_kv import EvenBatchKVCache
from .cache_kinds import Cache
from .fused_attention import ARCHITECTURES
from .fused_step import FusedStep, Unfusable

log = logging.getLogger(__name__)

FUNCTIONS = 64
"""Compiled functions that are kept."""

AFTER = 4
"""Steps of a batch before its shape is compiled, which takes as long as some steps."""


COPIED = 1 << 28
"""Bytes of KV that are copied at once as rows change."""


class Untraceable(Exception):
    """The model does with its KV what a compiled step can't."""


class StepKV:
    """Stands for a layer's cache while a step is traced. `offset`, `starts`, `ends`: (rows,).

    `keys` and `values` hold the new token once attention was computed.
    """

    def __init__(self, keys: mx.array, values: mx.array, starts: mx.array, ends: mx.array, offset: mx.array):
        self.keys, self.values = keys, values
        self.starts, self.ends, self.offset = starts, ends, offset
        self._fresh: tuple[mx.array, mx.array] | None = None
        self.done = False

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        if self._fresh is not None or self.done:
            raise Untraceable("a layer keeps KV twice in a step")
        self._fresh = keys, values
        return keys, values

    def make_mask(self, N: int, *, return_array: bool = False, window_size: int | None = None) -> None:
        if return_array or window_size:
            raise Untraceable("a layer wants a mask")

    def attend(
        self, queries: mx.array, keys: Any, values: Any, scale: float, mask: Any, sinks: Any
    ) -> mx.array:
        fresh = self._fresh
        if fresh is None or keys is not fresh[0] or values is not fresh[1] or mask is not None:
            raise Untraceable("attention does not read the KV that its cache gave")
        kernel = attention.kernel_for(queries, self.keys)
        if kernel is None or sinks is not None or fresh[0].dtype != self.keys.dtype:
            raise Untraceable("no kernel for this attention")
        held = self.keys, self.values
        out, self.keys, self.values = kernel.step(queries, fresh, held, self.starts, self.ends, scale)
        self._fresh, self.done = None, True
        return out


def fused_step(model: Any) -> FusedStep | None:
    """What computes `model`'s steps in fewer kernels; None, and why in the log, where its own do. Kept."""
    found = vars(model).get("omlxd_fused", False)
    if found is False:
        found, began = None, time.perf_counter()
        try:
            if cuda_driver.architecture() not in ARCHITECTURES:
                raise Unfusable("another GPU than an H100's kind")
            step = FusedStep(model)
            if not all(map(products.usable, step.weights)):
                raise Unfusable("MLX's own products are used")
            step.check(model, StepKV)
            found = step
            log.info("decode steps are fused: checked in %.1f s", time.perf_counter() - began)
        except Exception as error:
            log.info("decode steps are not fused: %s", error)
        object.__setattr__(model, "omlxd_fused", found)
    return found


def _make_room(cache: Cache) -> None:
    """Make the KV's arrays contiguous, with room for a token of each row.

    Some layers at a time: MLX keeps what a launch graph reads until it ran, and a fused step is one graph.
    """
    waiting: list[Any] = []
    for layer in cache:
        rows, heads, _, width = layer.keys.shape
        none = mx.zeros((rows, heads, 1, width), layer.keys.dtype)
        layer.update_and_fetch(none, mx.zeros((*none.shape[:3], layer.values.shape[3]), layer.values.dtype))
        if isinstance(layer, KVCache):
            layer.offset -= 1
        else:
            layer.trim_rows([1] * rows)
        waiting += [layer.keys, layer.values]
        if sum(array.nbytes for array in waiting) > COPIED:
            mx.eval(waiting)
            waiting.clear()


class CompiledStep:
    """Of one model. Call it as the model, for one token a row; None: it must be done by the model itself."""

    def __init__(self, model: Any):
        self._model = model
        self._off = not attention.installed()
        self._fused = None if self._off else fused_step(model)
        self._functions: OrderedDict[tuple[int, ...], Any] = OrderedDict()
        self._starts: tuple[list[int], mx.array] | None = None

    def __call__(self, tokens: mx.array, cache: Cache, steps: int) -> mx.array | None:
        """Logits of `tokens` (rows, 1).

        steps  that the batch has done since its rows changed: the first makes the arrays contiguous
        """
        first = cache[0]
        if self._off or type(first) not in (KVCache, EvenBatchKVCache):
            return None
        fused = self._fuses(tokens, first.keys)
        if not (steps or fused):
            return None
        alone = isinstance(first, KVCache)
        if fused and (not steps or (first.offset if alone else first._idx) >= first.keys.shape[2]):
            _make_room(cache)
        end = first.offset if alone else first._idx
        shape = tuple(first.keys.shape)
        new = shape not in self._functions and steps < AFTER
        if end >= shape[2] or (new and not fused):
            return None
        starts, ends = ([0], [end + 1]) if alone else (first.starts, [end + 1 for end in first.ends])
        if self._starts is None or self._starts[0] != starts:
            self._starts = starts, mx.array(starts, mx.int32)
        lengths = [end - start for start, end in zip(starts, ends, strict=True)]
        keys, values = [layer.keys for layer in cache], [layer.values for layer in cache]
        try:
            function = self._trace if new else self._function(shape, cache)
            places = self._starts[1], mx.array(ends, mx.int32), mx.array([n - 1 for n in lengths], mx.int32)
            logits, keys, values = function(tokens, keys, values, *places)
        except Exception as error:
            log.info("decode steps are not compiled: %s", error)
            self._off = True
            return None
        offset = mx.array(lengths)
        for layer, own_keys, own_values in zip(cache, keys, values, strict=True):
            layer.keys, layer.values = own_keys, own_values
            if alone:
                layer.offset += 1
            else:
                layer.advance(offset)
        return logits

    def _fuses(self, tokens: mx.array, keys: mx.array) -> bool:
        fused = self._fused
        return fused is not None and tokens.shape[0] <= products.MOST_ROWS and keys.dtype == fused.heads.dtype

    def _function(self, shape: tuple[int, ...], cache: Cache) -> Callable[..., Any]:
        function = self._functions.pop(shape, None)
        if function is None:
            kinds = {type(layer) for layer in cache}
            if len(kinds) > 1 or any(layer.keys.shape != cache[0].keys.shape for layer in cache):
                raise Untraceable("layers keep different KV")
            function = mx.compile(self._trace)
            if len(self._functions) >= FUNCTIONS:
                self._functions.popitem(last=False)
        self._functions[shape] = function
        return function

    def _trace(
        self,
        tokens: mx.array,
        keys: list[mx.array],
        values: list[mx.array],
        starts: mx.array,
        ends: mx.array,
        offset: mx.array,
    ) -> tuple[mx.array, list[mx.array], list[mx.array]]:
        layers = [StepKV(*pair, starts, ends, offset) for pair in zip(keys, values, strict=True)]
        if self._fused is not None and self._fuses(tokens, keys[0]):
            logits = self._fused(tokens, layers)
        else:
            logits = self._model(tokens, cache=layers)
        if not all(layer.done for layer in layers):
            raise Untraceable("a layer does not attend by its cache")
        return logits, [layer.keys for layer in layers], [layer.values for layer in layers]
