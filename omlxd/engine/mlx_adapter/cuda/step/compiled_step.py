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
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any, cast

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.models.cache import CacheList, KVCache, RotatingKVCache

from ...attention import hooks as attention
from ...attention.backend import DecodeStep, current
from ...cache.batch import EvenBatchKVCache, WindowBatchKVCache
from ...cache.kinds import COPIED, Cache, arrays_of, leaves, spec_of
from ...cache.mla_rows import same_parts
from ...cache.packed import Quantisation
from ...cache.segments import SequenceKVCache
from ..attention import attend, attention_packed, latent_kernel, segment_attention, segments
from ..attention.attention_kernel import Tails, put
from ..attention.fused_attention import ARCHITECTURES, MOST_NEW, owners_of
from ..attention.segments import Shared
from ..compile import driver as cuda_driver
from ..compile import kernel_store
from ..rows.addressed_rows import AddressedKVCache, Tail, tails_of
from ..rows.mla_rows import AddressedLatentsKVCache
from .fused_step import Between, FusedStep, Layer, Unfusable

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


class Untraceable(Exception):
    """The model does with its KV what a compiled step can't."""


@dataclass(slots=True, frozen=True)
class Next:
    """Where the next token of each row goes, in all layers of one window.

    layer    one of them
    lengths  tokens of each row, with the next one
    """

    layer: Any
    starts: list[int]
    ends: list[int]
    lengths: list[int]

    def arrays(self, counts: Sequence[int], size: int) -> tuple[mx.array, mx.array, mx.array]:
        """(size,) each: start, end and tokens before it of each next token. A row has as many of these as
        `counts` says, one row's behind the other's; zeros fill the arrays up."""
        rows = list(zip(self.starts, self.ends, self.lengths, counts, strict=True))
        places = (
            [start for start, _, _, count in rows for _ in range(count)],
            [end + i for _, end, _, count in rows for i in range(count)],
            [length - 1 + i for _, _, length, count in rows for i in range(count)],
        )
        # One array, cut into these three, takes the host 0.1 ms longer (CUDA).
        starts, ends, offset = (mx.array(at + [0] * (size - len(at)), mx.int32) for at in places)
        return starts, ends, offset


def _window_of(layer: Any) -> int:
    return layer.window if isinstance(layer, AddressedKVCache) else getattr(layer, "max_size", 0)


def _next(layer: Any, count: int = 1) -> Next | None:
    """None: the arrays have no room for `count` tokens, or keep their first tokens beside a window."""
    if isinstance(layer, AddressedKVCache):
        lengths = [base + end + 1 for base, end in zip(layer.bases, layer.ends, strict=True)]
        return Next(layer, *layer.places(1, 1), lengths) if layer.has_room(count) else None
    alone, ring = isinstance(layer, KVCache | RotatingKVCache), _shape(layer)[2]
    if window := _window_of(layer):
        lengths = [tokens + 1 for tokens in ([layer.offset] if alone else layer.tokens())]
        grows = ring < window and (layer.offset if alone else layer._offset) >= ring
        if ring > window or grows or getattr(layer, "keep", 0):
            return None
        return Next(layer, *attend.window_places(lengths, layer._idx % window + 1, ring, window), lengths)
    base = getattr(layer, "base", 0)
    ends = [layer.offset - base] if alone else layer.ends
    starts = [0] if alone else layer.starts
    if max(ends) + count > ring:
        return None
    lengths = [base + end + 1 - start for start, end in zip(starts, ends, strict=True)]
    return Next(layer, starts, [end + 1 for end in ends], lengths)


def _places(cache: Cache, windows: list[int], count: int) -> dict[int, Next | None]:
    """`_next` of the first layer of each window; `windows`: of each layer."""
    return {window: _next(cache[windows.index(window)], count) for window in dict.fromkeys(windows)}


def _tails(layer: Any) -> Sequence[Tail]:
    """Of a batch whose rows have tails of their own; else none."""
    return getattr(layer, "tails", ())


def _shape(layer: Any, name: str = "keys") -> tuple[int, ...]:
    """Of the array of keys (or values), or of the first where they are packed; (rows, …) of rows' tails."""
    if tails := _tails(layer):
        return len(tails), *tails[0].parts[0].shape[1:]
    held = getattr(layer, name)
    return tuple((held[0] if isinstance(held, list) else held).shape)


class StepState:
    """Stands for a layer's recurrent state while a step is traced: its arrays, by number."""

    lengths = left_padding = None

    def __init__(self, arrays: Sequence[mx.array]):
        self.arrays = list(arrays)

    def __getitem__(self, at: int) -> mx.array:
        return self.arrays[at]

    def __setitem__(self, at: int, array: mx.array) -> None:
        self.arrays[at] = array

    def make_mask(self, N: int) -> None:
        """A new token of each row hides nothing."""

    def advance(self, N: int) -> None:
        """No row has lengths of its own."""


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
    spec = spec_of(leaf)
    return (
        spec is not None
        and spec.kind == "state"
        and leaf.lengths is None
        and leaf.left_padding is None
        and not any(array is None for array in leaf.cache)
    )


class StepKV:
    """Stands for a layer's cache while a step is traced. `offset`, `starts`, `ends`: (rows,); of a fused pass
    of several tokens they and `owners` as `FusedStep` and `FusedAttention` have them.

    `keys` and `values` hold the new token once attention was computed, or `keys` tells where each row's lie.
    `window`: 0 where all tokens are kept. `shared`: what rows hold in segments before them. `how`: keys and
    values are packed so.
    """

    def __init__(
        self,
        keys: Any,
        values: Any,
        starts: mx.array,
        ends: mx.array,
        offset: mx.array,
        window: int = 0,
        shared: Shared | None = None,
        how: Quantisation | None = None,
        owners: mx.array | None = None,
    ):
        self.keys, self.values, self.shared, self.how = keys, values, shared, how
        self.owners = owners
        self.starts, self.ends, self.offset, self._window = starts, ends, offset, window
        self._fresh: tuple[mx.array, mx.array] | None = None
        self.done = False

    @property
    def held(self) -> tuple[Any, Any] | Tails:
        """As `FusedAttention` takes it."""
        return self.keys if isinstance(self.keys, Tails) else (self.keys, self.values)

    @property
    def _latents(self) -> bool:
        return isinstance(self.keys, Tails) and self.keys.latents

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        if self._fresh is not None:
            raise Untraceable("a layer keeps KV twice in a step")
        self._fresh = keys, values
        attention.note_given(keys, values, self)
        return keys, same_parts(values) if self._latents else values

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        if self._fresh is None:
            raise Untraceable("a layer reads another's KV before it is there")
        return self._fresh

    def make_mask(self, N: int, *, return_array: bool = False, window_size: int | None = None) -> None:
        if (return_array and not self._latents) or (window_size or self._window) != self._window:
            raise Untraceable("a layer wants a mask")

    def attend(
        self, queries: mx.array, keys: Any, values: Any, scale: float, mask: Any, sinks: Any
    ) -> mx.array:
        """Layers that share this one's KV attend by it too, after it."""
        fresh = self._fresh
        if self._latents and fresh is not None and keys is values is fresh[0] and sinks is None:
            return self._attend_latents(queries, fresh, mask, scale)
        if fresh is None or keys is not fresh[0] or values is not fresh[1] or mask is not None:
            raise Untraceable("attention does not read the KV that its cache gave")
        put = () if self.done else fresh
        held, ends, step = self.held, (self.starts, self.ends), None
        if not isinstance(held, Tails):  # addressed_rows.py has looked at those.
            dtype = (self.keys if self.how is None else self.keys[1]).dtype
            if fresh[0].dtype != dtype or _shape(self) != _shape(self, "values"):
                raise Untraceable("keys and values of several kinds")
        if self.how is not None:
            its = self.how.pack(fresh[0]), self.how.pack(fresh[1])
            packed = attention_packed.kernel_for(queries, *its, self.how) if sinks is None else None
            step = packed and packed.step(queries, its if put else (), held, *ends, scale)
        elif self.shared is None:
            kernel = attend.kernel_for(queries, fresh[0], self._window > 0, sinks)
            step = kernel and kernel.step(queries, put, held, *ends, scale, sinks)
        else:
            over_segments = attend.segment_kernel_for(queries, fresh[0], sinks)
            step = over_segments and over_segments.step(queries, put, held, self.shared, *ends, scale, sinks)
        if step is None:
            raise Untraceable("no kernel for this attention")
        out, self.keys, self.values = step
        self.done = True
        return out

    def _attend_latents(self, queries: mx.array, fresh: Any, rope_queries: Any, scale: float) -> mx.array:
        """As `AddressedLatentsKVCache`, once."""
        kernel = None if self.done else latent_kernel.kernel_for(queries, rope_queries)
        if kernel is None:
            raise Untraceable("no kernel for this attention")
        behind = put(fresh, self.keys, self.ends - self.starts)
        self.done = True
        return kernel.step(queries, rope_queries, self.keys, self.ends, scale, behind)


def fused_step(model: Any) -> FusedStep | None:
    """What computes `model`'s steps in fewer kernels; None, and why in the log, where its own do. Kept."""
    found = vars(model).get("omlxd_fused", False)
    if found is False:
        found, began = None, time.perf_counter()
        try:
            if cuda_driver.architecture() not in ARCHITECTURES:
                raise Unfusable("another GPU than an H100's kind")
            step = FusedStep(model)
            if not step.most_rows:
                raise Unfusable("MLX's own products are used")
            step.compile_ahead()
            known = kernel_store.knows("fused steps", kind_of(model))
            passed = partial(_passed, step, model)
            step.passed = kernel_store.remembered("fused steps", kind_of(model), passed, all)
            found = step
            log.info(
                "decode steps are fused%s: %s in %.1f s",
                ", passes with guesses too" if step.is_repeatable else "",
                "remembered" if known else "checked",
                time.perf_counter() - began,
            )
        except Exception as error:
            log.info("decode steps are not fused: %s", error)
        object.__setattr__(model, "omlxd_fused", found)
    return found


def _passed(step: FusedStep, model: Any) -> list[bool]:
    """What the checks of `step` find. Raises Unfusable."""
    step.check(model, StepKV)
    step.repeats(StepKV)
    return step.passed


def kind_of(model: Any) -> tuple[Any, ...]:
    """What checks of a model's steps depend on: its classes, and the shapes and types of its weights."""
    weights = cast(list[tuple[str, mx.array]], tree_flatten(model.parameters()))
    held = sorted((name, array.shape, str(array.dtype)) for name, array in weights)
    kinds = sorted({f"{type(each).__module__}.{type(each).__name__}" for each in model.modules()})
    return kinds, repr(getattr(model, "args", None)), held


def steps_share(model: Any) -> bool:
    """Whether steps of `model`, fused or not, read segments by our kernels; else the log says why not."""
    fused = vars(model).get("omlxd_fused") or None
    if segment_attention.in_use() and fused is not None:

        def passed() -> list[bool]:
            example = partial(segment_attention.example, fused.heads)
            fused.check(model, StepKV, example)
            if fused.is_repeatable and not fused.repeats(StepKV, example):
                log.info("passes with guesses over segments do not have the bits of steps: none are fused")
            return fused.passed

        try:
            depends = kind_of(model), fused.passed
            fused.passed = kernel_store.remembered("fused steps over segments", depends, passed, all)
        except Exception as error:
            log.warning("prefixes are not shared: fused steps over segments: %s", error)
            return False
    return segment_attention.in_use()


def packed_share(tokens: int) -> bool:
    """Whether our kernels read packed KV in segments of so many tokens."""
    return attention_packed.in_use() and tokens % attention_packed.SPAN == 0


def reads_by_address(model: Any, shares: bool) -> bool:
    """Whether fused steps of `model`, if it has any, read rows' own arrays; `shares`: behind segments too."""
    fused = vars(model).get("omlxd_fused") or None
    if fused is None:
        return True
    example = partial(segment_attention.example, fused.heads)

    def reads() -> bool:
        return fused.reads_tails(StepKV) and (not shares or fused.reads_tails(StepKV, example))

    try:
        return kernel_store.remembered("rows' own arrays", (kind_of(model), fused.passed, shares), reads)
    except Exception as error:
        log.warning("fused steps do not run over rows' own arrays: %s", error)
        return False


def _make_room(cache: Cache, count: int) -> None:
    """Make the KV's arrays contiguous, with room for `count` tokens of each row.

    Some layers at a time: MLX keeps what a launch graph reads until it ran, and a fused step is one graph.
    """
    waiting: list[mx.array] = []
    for layer in cache:
        if _tails(layer):
            layer.make_room(count)
            continue
        layer.update_and_fetch(*(_blank(layer, held, count) for held in (layer.keys, layer.values)))
        layer.unread = None  # What a layer with segments gave out.
        if isinstance(layer, EvenBatchKVCache):
            layer.trim_rows([count] * layer.offset.shape[0])
        else:
            layer.offset -= count
        waiting += arrays_of([layer.keys, layer.values])
        if sum(array.nbytes for array in waiting) > COPIED:
            mx.eval(waiting)
            waiting.clear()


def _blank(layer: Any, held: Any, count: int) -> mx.array:
    """Zeros for `count` tokens of each row, as what `held` keeps is made of."""
    if not isinstance(held, list):
        return mx.zeros((*held.shape[:2], count, held.shape[3]), held.dtype)
    words, scales, _ = held
    return mx.zeros((*words.shape[:2], count, words.shape[3] * 32 // layer.how.bits), scales.dtype)


TRACED = {
    *(KVCache, EvenBatchKVCache, RotatingKVCache, WindowBatchKVCache),
    *(SequenceKVCache, AddressedKVCache, AddressedLatentsKVCache),
}
"""Classes of the layers of a cache, no other subclass."""


def _is_traced(layer: Any) -> bool:
    """Whether it is one of `TRACED`, and no row alone with packed segments."""
    kind = type(layer)
    return kind in TRACED and not (kind is SequenceKVCache and layer.how is not None and layer.layer)


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
        states, recurrent, tree = list[int](), list[Any](), _tree(cache)
        if not all(map(_is_traced, cache)):
            every = [leaf for _, leaf in leaves(cache)]
            states = [at for at, leaf in enumerate(every) if _is_state(leaf)]
            recurrent = [every[at] for at in states]
            cache = [leaf for at, leaf in enumerate(every) if at not in states]
        if not cache:
            return None
        kinds, first = {type(layer) for layer in cache}, cache[0]
        own = [kind for kind in kinds if issubclass(kind, AddressedKVCache)]
        if not all(map(_is_traced, cache)) or (own and not (len(kinds) == len(own) and first.tails)):
            return None
        tails, sharing = _tails(first), [segments.shared_in(layer) for layer in cache]
        shared = next((one for one in sharing if one is not None), None)
        if shared is not None and ((not tails and first.keys is None) or not segment_attention.in_use()):
            return None
        counts = counts or [tokens.shape[1]] * len(tokens)
        count, fused = max(counts), self._fuses(tokens, tails[0].keys if tails else first.keys)
        several = fused and 1 < count <= MOST_NEW and tokens.size <= self.most_tokens(cache)
        if not (fused or steps or tails) or not (count == 1 or several):
            return None
        windows = [_window_of(layer) for layer in cache]
        places = _places(cache, windows, count)
        if (fused and not steps) or ((fused or tails) and not all(places.values())):
            _make_room(cache, count)
            places = _places(cache, windows, count)
        if not all(places.values()):
            return None
        size = tokens.size
        keys: list[Any] = tails_of(cache, count, count) if tails else [layer.keys for layer in cache]
        shape: tuple[Any, ...] = size, *(_shape(at.layer) for at in places.values() if at is not None)
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
        try:
            plan = Plan(windows, [one is not None for one in sharing], states, tree)
            function = self._function(shape, cache, plan, fused)
            arrays = [at.arrays(counts, size) for at in places.values() if at is not None]
            owners = [owners_of(counts, size)] if count > 1 else []
            before = [leaf.cache for leaf in recurrent]
            logits, keys, values, after = function(tokens, keys, values, arrays, held, owners, before)
        except Exception as error:
            log.info("decode steps are not compiled: %s", error)
            self._off = True
            return None
        for leaf, now in zip(recurrent, after, strict=True):
            leaf.cache = now
        at = places[windows[0]]
        assert at is not None
        # Of a step it is lazy: an array of the host's takes CUDA 30 µs, and few passes ask for this one.
        offset = arrays[0][2] + 1 if size == len(counts) else mx.array(at.lengths) + (count - 1)
        for layer, own_keys, own_values, window in zip(cache, keys, values, windows, strict=True):
            if isinstance(layer, AddressedKVCache):
                layer.advance(count)
                continue
            layer.keys, layer.values = own_keys, own_values
            if isinstance(layer, RotatingKVCache):
                layer._idx = layer._idx % window + 1
                layer.offset += 1
            elif isinstance(layer, KVCache):
                layer.offset += count
            elif count > 1:
                layer.advance(offset, count)
            else:
                layer.advance(offset)
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
            held = {window: _shape(layer) for window, layer in of_window}
            if any(_shape(layer) != held[window] and not _tails(layer) for window, layer in of_window):
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
