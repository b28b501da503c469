"""A decode step of one token a row by compiled functions: what Python does for it is done once a shape.

On CUDA a step of an 8B shape waits for the host, which builds a graph of some 1,500 arrays in Python,
evaluates it and launches its kernels. `mx.compile` replays the graph that was built when the model was called
with the same shapes; lengths are arrays there. attention_kernel.py puts each layer's new KV into its place,
so that no copy of it is a kernel of its own.

A function belongs to (tokens, rows, capacity of the KV, and of the windows). Many of these come for a few
steps alone. A model that can't be traced so, or whose attention is not `attention.attend`, goes on step by
step, and so does a step that must make a window's arrays longer, or shorter after a pass of several tokens.
Where the kernel does not run (Metal, CPU) nothing is compiled.

One row of OLMo 3's kind, four layers of 512, windows in two of them, in bfloat16 on an H200: 0.52 ms a token,
and 0.96 step by step. Four rows of Qwen3.5's kind, twelve layers of 2,560, nine with recurrent state, on an
H100: 4.1 ms and 5.5.

`warm_up.compiles` compares bits with those of the model's own steps. Where they differ (Falcon H1) no step is
compiled, since the first ones behind a join never are.

A model that fused_step.py knows takes all its steps by that, compiled or not, so that what comes out does not
depend on when rows joined. So do passes with guesses, of up to `FusedStep.most_rows` tokens, but for
packed KV: their logits are those of steps without guesses, bit for bit.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import CacheList, KVCache, RotatingKVCache

from ...attention.backend import DecodeStep, current
from ...cache.batch import EvenBatchKVCache, WindowBatchKVCache
from ...cache.kinds import KINDS, Cache, leaves
from ...cache.packed import Quantisation
from ...cache.segments import SequenceKVCache
from ..attention import segment_attention, segments
from ..attention.attention_kernel import Tails
from ..attention.fused_attention import MOST_NEW, owners_of
from ..attention.segments import Shared
from ..rows.addressed_rows import AddressedKVCache, tails_of
from ..rows.mla_rows import AddressedLatentsKVCache
from .fused_step import Between, Layer
from .model_checks import fused_step
from .places import advance, places_with_room, shape_of, tails_in, window_of
from .step_kv import StepKV, StepState, Untraceable

log = logging.getLogger(__name__)

FUNCTIONS = 128
"""Compiled functions that are kept. One of 30 layers takes 9 MB of RAM."""

FUSED_FUNCTIONS = 512
"""Of fused steps, each of 5 layers: 16 rows that end one by one, with guesses, have some hundred shapes."""

AFTER = 4
"""Steps of a batch before its shape is compiled, which takes as long as some steps.

Of a fused step one layer is compiled, at once, and called for each. An 8B shape's took an H100 30 to 40 ms to
compile as a whole, whenever a row joined or left, a pass with guesses likewise: the largest gaps of agents at
once. A step takes as long either way, 5.8 ms, as the host has time left. And what MLX made of all layers
together were kernels of its own, of which the first took 15 s on a new machine, in the middle of an answer.
"""


@dataclass(slots=True, frozen=True)
class Plan:
    """What a model's steps of one shape have in common.

    windows  of each leaf of its cache that keeps KV
    shares   whether rows hold segments of it
    states   numbers of the leaves with recurrent state
    tree     the number of each layer's leaf, or those of the members of a `CacheList`
    """

    windows: list[int]
    shares: list[bool]
    states: list[int]
    tree: list[int | list[int]]


def _tree(cache: Cache) -> list[int | list[int]]:
    numbers = count()
    return [
        [next(numbers) for _ in layer.caches] if isinstance(layer, CacheList) else next(numbers)
        for layer in cache
    ]


def _is_state(leaf: Any) -> bool:
    """Whether it keeps recurrent state of all rows, without padding."""
    row = KINDS.get(type(leaf))
    return (
        row is not None
        and row.kind == "state"
        and leaf.lengths is None
        and leaf.left_padding is None
        and not any(array is None for array in leaf.cache)
    )


TRACED = {
    *(KVCache, EvenBatchKVCache, RotatingKVCache, WindowBatchKVCache),
    *(SequenceKVCache, AddressedKVCache, AddressedLatentsKVCache),
}
"""Classes of the layers of a cache, no other subclass."""


def _is_traced(layer: Any) -> bool:
    """Whether it is one of `TRACED`, and no row alone with packed segments."""
    kind = type(layer)
    return kind in TRACED and not (kind is SequenceKVCache and layer.how is not None and layer.layer)


def _kv_and_states(cache: Cache) -> tuple[Cache, list[int], list[Any]]:
    """(leaves that keep KV, numbers of those with recurrent state, and these)."""
    if all(map(_is_traced, cache)):
        return cache, [], []
    every = [leaf for _, leaf in leaves(cache)]
    states = [at for at, leaf in enumerate(every) if _is_state(leaf)]
    return [leaf for at, leaf in enumerate(every) if at not in states], states, [every[at] for at in states]


def _are_traced(cache: Cache) -> bool:
    """Whether steps take leaves of these classes: rows have arrays of their own in all layers, or in none."""
    own = [layer for layer in cache if isinstance(layer, AddressedKVCache)]
    return (
        all(map(_is_traced, cache))
        and bool(cache)
        and (not own or (len(own) == len(cache) and bool(own[0].tails)))
    )


class CompiledStep(DecodeStep):
    """Of one model. Call it as the model, for few tokens a row; None: it must be done by the model itself."""

    most_new = MOST_NEW

    def __init__(self, model: Any):
        self._model = model
        self._off = current().name != "cuda"
        self._fused = None if self._off else fused_step(model)
        self._functions: OrderedDict[tuple[Any, ...], Callable[..., Any]] = OrderedDict()
        self.compiles = False
        """Whether the newest call was the first of its shape."""
        self._how: Quantisation | None = None  # Of packed KV: the same in all steps of a model.

    def __call__(
        self, tokens: mx.array, cache: Cache, steps: int, counts: Sequence[int] = ()
    ) -> mx.array | None:
        """Logits of `tokens` (rows, n); n > 1 where the step is fused, and up to `most_tokens(cache)` in all.

        steps   that the batch has done since its rows changed: the first makes the arrays contiguous
        counts  tokens of each row, where `tokens` is (any,): those of the first row, of the second, and so
                on, then what has no meaning. Where rows have fewer than others, their KV is trimmed later as
                if they had as many
        """
        if self._off or (self._fused is None and vars(self._model).get("omlxd_compiles") is False):
            return None
        tree, (cache, states, recurrent) = _tree(cache), _kv_and_states(cache)
        if not _are_traced(cache):
            return None
        first, sharing = cache[0], [segments.shared_in(layer) for layer in cache]
        tails, shared = tails_in(first), next((one for one in sharing if one is not None), None)
        if shared is not None and ((not tails and first.keys is None) or not segment_attention.in_use()):
            return None
        size, counts = tokens.size, counts or [tokens.shape[1]] * len(tokens)
        count, fused = max(counts), self._fuses(tokens, tails[0].keys if tails else first.keys)
        several = fused and 1 < count <= MOST_NEW and size <= self.most_tokens(cache)
        if not (fused or steps or tails) or not (count == 1 or several):
            return None
        windows = [window_of(layer) for layer in cache]
        grows = "first" if fused and not steps else "late" if fused or tails else ""
        if (places := places_with_room(cache, windows, count, grows)) is None:
            return None
        keys: list[Any] = tails_of(cache, count, count) if tails else [layer.keys for layer in cache]
        shape: tuple[Any, ...] = size, *(shape_of(at.layer) for at in places.values())
        if tails:
            shape = size, len(tails), keys[0].table.shape[1]
            shape += tuple(keys[windows.index(window)].most for window in places)
        self._how = next((how for layer in cache if (how := getattr(layer, "how", None))), None)
        held: list[Any] = []
        if shared is not None:
            shared = segments.shared_by(first, counts, size) if count > 1 else shared
            held = [*shared[1:], *(one.addresses for one in sharing if one is not None)]
            shape += shared.table.shape[0], *shared[3:]
        if shape not in self._functions and not fused and steps < AFTER:
            return None
        values = [() if tails else layer.values for layer in cache]
        plan = Plan(windows, [one is not None for one in sharing], states, tree)
        try:
            function = self._function(shape, cache, plan, fused)
            arrays = [at.arrays(counts, size) for at in places.values()]
            given = held, [owners_of(counts, size)] if count > 1 else [], [leaf.cache for leaf in recurrent]
            logits, keys, values, after = function(tokens, keys, values, arrays, *given)
        except Exception as error:
            log.info("decode steps are not compiled: %s", error)
            self._off = True
            return None
        for leaf, now in zip(recurrent, after, strict=True):
            leaf.cache = now
        # Of a step it is lazy: an array of the host's takes CUDA 30 µs, and few passes ask for this one.
        at = places[windows[0]]
        offset = arrays[0][2] + 1 if size == len(counts) else mx.array(at.lengths) + (count - 1)
        for layer, own_keys, own_values, window in zip(cache, keys, values, windows, strict=True):
            advance(layer, own_keys, own_values, window, offset, count)
        return logits

    def _fuses(self, tokens: mx.array, keys: Any) -> bool:
        fused, dtype = self._fused, (keys[1] if isinstance(keys, list) else keys).dtype
        return fused is not None and tokens.size <= fused.most_rows and dtype == fused.heads.dtype

    def most_tokens(self, cache: Cache) -> int:
        """Tokens of a pass, at most `MOST_NEW` of a row, that has the bits of steps; 0: no pass has them."""
        fused = self._fused
        if self._off or fused is None or not fused.is_repeatable or getattr(cache[0], "how", None):
            return 0
        return fused.most_rows if all(map(_is_traced, cache)) else 0

    def _function(self, shape: tuple[Any, ...], cache: Cache, plan: Plan, fused: bool) -> Callable[..., Any]:
        """What computes a step of this shape, as `_trace` does. `cache`: leaves with KV."""
        function = self._functions.pop(shape, None)
        self.compiles = function is None
        if function is None:
            of_window = list(zip(plan.windows, cache, strict=True))
            held = {window: shape_of(layer) for window, layer in of_window}
            if any(shape_of(layer) != held[window] and not tails_in(layer) for window, layer in of_window):
                raise Untraceable("layers keep different KV")
            if fused:
                function = partial(self._trace, plan, mx.compile(self._trace_layers))
            else:
                function = mx.compile(partial(self._trace, plan, None))
            if len(self._functions) >= (FUSED_FUNCTIONS if fused else FUNCTIONS):
                self._functions.popitem(last=False)
        self._functions[shape] = function
        return function

    def _trace_layers(
        self,
        weights: Sequence[Layer],
        x: Between,
        turns: mx.array,
        held: Sequence[tuple[Any, Any] | Tails],
        places: tuple[mx.array, mx.array, mx.array],
        shared: Sequence[Shared | None],
        owners: mx.array | None,
    ) -> tuple[Between, list[tuple[Any, ...]]]:
        """Layers of a fused step: what comes out of them; keys and values of those behind each, but for rows'
        tails."""
        assert self._fused is not None
        kvs = [
            StepKV(
                *((its, None) if isinstance(its, Tails) else its),
                *(*places, 0, own, self._how_of(its if isinstance(its, Tails) else its[0]), owners),
            )
            for its, own in zip(held, shared, strict=True)
        ]
        x = self._fused.layers(weights, x, turns, kvs)
        return x, [() if isinstance(kv.held, Tails) else kv.held for kv in kvs]

    def _trace(
        self,
        plan: Plan,
        some: Callable[..., Any] | None,
        tokens: mx.array,
        keys: list[Any],
        values: list[Any],
        places: list[tuple[mx.array, mx.array, mx.array]],
        held: list[Any],
        owners: list[mx.array],
        states: list[list[mx.array]],
    ) -> tuple[mx.array, list[Any], list[Any], list[list[mx.array]]]:
        """Logits; keys, values and states behind them.

        some    `_trace_layers`, compiled, of a fused step
        places  as `Next.arrays`, of each window in the order of the layers
        held    what layers that share have of `Shared`, and the addresses of each; empty where none does
        owners  empty where each row has one token
        states  arrays of each leaf with recurrent state
        """
        at = dict(zip(dict.fromkeys(plan.windows), places, strict=True))
        addresses = iter(held[5:])
        shared = [Shared(next(addresses), *held[:5]) if its else None for its in plan.shares]
        of_layers = zip(keys, values, plan.windows, shared, strict=True)
        layers = [
            StepKV(
                own_keys,
                own_values,
                *at[window],
                window,
                its,
                self._how_of(own_keys),
                *owners,
            )
            for own_keys, own_values, window, its in of_layers
        ]
        if self._fused is not None and some is not None:
            logits = self._fused(tokens, layers, partial(_call_layers, some))
        else:
            recurrent = [StepState(arrays) for arrays in states]
            every: list[Any] = list(layers)
            for number, state in zip(plan.states, recurrent, strict=True):
                every.insert(number, state)
            tree = [[every[m] for m in own] if isinstance(own, list) else every[own] for own in plan.tree]
            logits = self._model(tokens, cache=tree)
            states = [state.arrays for state in recurrent]
        if not all(layer.done for layer in layers):
            raise Untraceable("a layer does not attend by its cache")
        kept = [((), ()) if isinstance(layer.held, Tails) else layer.held for layer in layers]
        return logits, [keys for keys, _ in kept], [values for _, values in kept], states

    def _how_of(self, keys: Any) -> Quantisation | None:
        """How `keys` are packed: of rows with arrays of their own, `Tails`."""
        packed = keys.is_packed if isinstance(keys, Tails) else isinstance(keys, list)
        return self._how if packed else None


def _call_layers(
    function: Callable[..., Any], weights: Sequence[Layer], x: Between, turns: mx.array, kvs: Sequence[StepKV]
) -> Between:
    """As `FusedStep.layers`, by `_trace_layers`."""
    held, first = [kv.held for kv in kvs], kvs[0]
    places = first.starts, first.ends, first.offset
    x, held = function(weights, x, turns, held, places, [kv.shared for kv in kvs], first.owners)
    for kv, now in zip(kvs, held, strict=True):
        if now:
            kv.keys, kv.values = now
        kv.done = True
    return x
