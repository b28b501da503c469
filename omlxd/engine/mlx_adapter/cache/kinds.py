"""What a model keeps of its context, and one table of the cache classes that keep it.

A cache is a list of layers. A layer is one of mlx-lm's cache classes, or a `CacheList` of some; `leaves`
names each, and `spec_of` says what it keeps. `KINDS` has a row for each class that omlxd can store and bring
back: a model family with another class needs another row, and nothing else. Other classes decode, and batch
if mlx-lm can batch them, but nothing of such a model is reused.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import mlx.core as mx
from mlx.utils import tree_map
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    KVCache,
    RotatingKVCache,
    make_prompt_cache,
)

from ....kv.layout import Group, KVLayout
from ..attention import backend
from ..attention.kv_spec import KVKind, KVSpec, is_per_token
from ..runtime.device import SAFETENSORS_DTYPE
from .batch import EvenBatchKVCache, WindowBatchKVCache
from .chosen import ChosenKVCache, ChosenRowsKVCache, LatentKVCache, PooledKVCache, QSAKVCache
from .growth import round_up
from .packed import Quantisation, is_packed, parts_of
from .rows import OwnRowsKVCache, RowBatch
from .segments import Segment, SequenceKVCache, part_names, segmented_layers

Cache = list[Any]
"""One cache object a layer, of one sequence or of a batch."""


@dataclass(slots=True, frozen=True)
class StateTensor:
    """One tensor of state. `shape` is a batch of one's; `window` > 0: axis 2 is a window of that size."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    window: int


@dataclass(slots=True, frozen=True)
class StateLayout:
    """Everything that a model keeps at a position besides per-token KV."""

    tensors: tuple[StateTensor, ...]

    def shape(self, tensor: StateTensor, position: int) -> tuple[int, ...]:
        """Shape after `position` tokens."""
        if not tensor.window:
            return tensor.shape
        return (*tensor.shape[:2], min(position, tensor.window), *tensor.shape[3:])

    def at(self, position: int) -> KVLayout:
        """The layout of a checkpoint after `position` tokens: a group a tensor, flat."""
        groups = [Group((t.name,), 1, prod(self.shape(t, position)), t.dtype) for t in self.tensors]
        return KVLayout(tuple(groups))

    def shapes(self, position: int) -> dict[str, tuple[int, ...]]:
        """Shapes after `position` tokens, by name."""
        return {t.name: self.shape(t, position) for t in self.tensors}

    def nbytes(self, position: int) -> int:
        """Bytes of a checkpoint after `position` tokens."""
        return self.at(position).nbytes(1)

    def facts(self) -> list[list[object]]:
        """Plain JSON, for the namespace."""
        return [[t.name, list(t.shape), t.dtype, t.window] for t in self.tensors]


# --------------------------------------------------------------------------- the table


@dataclass(slots=True, frozen=True)
class CacheKind:
    """How omlxd handles one cache class.

    kind       of its `KVSpec`. Per token it keeps one entry a token, on axis 2, and nothing else
    state_of   a cache's arrays by name: per token as allocated, state in canonical form (lazy); None where
               it has none yet
    restore    (cache, arrays as `state_of` gives them, tokens that they hold)
    batch      the class whose `merge` makes a batch of such caches, but for rows with arrays of their own
               (rows.py); `state_of` reads it where `kind` is per token. Its `merge` asks a cache for
               `size()`, `offset`, `keys` and `values`. None: such caches can't be batched
    trim       forgets the last tokens of a pass of several, of one sequence; None, for `state`: only by going
               back to what was there before (`before_pass`)
    """

    kind: KVKind
    state_of: Callable[[Any], dict[str, Any]]
    restore: Callable[[Any, Mapping[str, mx.array], int], None]
    batch: Any
    trim: Callable[[Any, int], object] | None

    @property
    def per_token(self) -> bool:
        """Return `is_per_token` of its kind."""
        return is_per_token(self.kind)


def _pair(cache: Any) -> dict[str, Any]:
    return {"keys": cache.keys, "values": cache.values}


def _put_pair(cache: Any, arrays: Mapping[str, mx.array], tokens: int) -> None:
    cache.keys, cache.values, cache.offset = arrays["keys"], arrays["values"], tokens


def _parts(cache: Any) -> dict[str, Any]:
    """Keys and values, packed or not."""
    names = part_names(getattr(cache, "how", None))
    held = [None] * len(names) if cache.keys is None else [*parts_of(cache.keys), *parts_of(cache.values)]
    return dict(zip(names, held, strict=True))


def _put_parts(cache: Any, arrays: Mapping[str, mx.array], tokens: int) -> None:
    if not is_packed(cache):
        _put_pair(cache, arrays, tokens)
        return
    parts = [arrays[name] for name in part_names(cache.how)]
    cache.keys, cache.values, cache.offset = parts[:3], parts[3:], tokens


def _window(cache: Any) -> dict[str, Any]:
    """The last tokens, as many as fit, in temporal order."""
    if cache.keys is None:
        return _pair(cache)
    length = min(cache.offset, cache.max_size)
    return {name: cache._temporal_order(array)[..., -length:, :] for name, array in _pair(cache).items()}


def _put_window(cache: Any, arrays: Mapping[str, mx.array], tokens: int) -> None:
    _put_pair(cache, arrays, tokens)
    cache._idx = cache.keys.shape[2]


def _trim_window(cache: Any, tokens: int) -> None:
    """A pass of several tokens leaves the window in order, and behind it what the last of them needs."""
    left = cache.keys.shape[2] - tokens
    # In one piece: a compiled step writes the next token into them.
    cache.keys, cache.values = (mx.contiguous(array[..., :left, :]) for array in (cache.keys, cache.values))
    cache.offset -= tokens
    cache._idx = left


def _numbered(cache: Any) -> dict[str, Any]:
    return {f"state.{index}": array for index, array in enumerate(cache.cache)}


def _put_numbered(cache: Any, arrays: Mapping[str, mx.array], tokens: int) -> None:
    cache.cache = [arrays[f"state.{index}"] for index in range(len(cache.cache))]


def _chosen(cache: Any) -> dict[str, Any]:
    return {name: getattr(cache, name) for name in cache.parts}


def _put_chosen(cache: Any, arrays: Mapping[str, mx.array], tokens: int) -> None:
    keys = arrays["keys"]
    cache.keys, cache.values = keys, arrays.get("values", mx.zeros((*keys.shape[:3], 0), keys.dtype))
    cache.index, cache.blocks, cache.offset = arrays.get("index"), None, tokens


KINDS: dict[Any, CacheKind] = {
    KVCache: CacheKind("kv", _parts, _put_parts, EvenBatchKVCache, KVCache.trim),
    SequenceKVCache: CacheKind("kv", _parts, _put_parts, EvenBatchKVCache, KVCache.trim),
    RotatingKVCache: CacheKind("window", _window, _put_window, WindowBatchKVCache, _trim_window),
    ArraysCache: CacheKind("state", _numbered, _put_numbered, ArraysCache, None),
}
"""By the class itself, no subclass. A batch has the row of its rows' class."""
_CHOSEN = CacheKind("chosen", _chosen, _put_chosen, ChosenRowsKVCache, ChosenKVCache.trim)
KINDS |= dict.fromkeys((QSAKVCache, PooledKVCache, LatentKVCache), _CHOSEN)
KINDS |= {
    kind.batch: kind
    for kind in KINDS.values()
    if kind.batch is not None and not issubclass(kind.batch, RowBatch)  # Those have a spec.
}


def add_arrays_kind(type: Any) -> None:
    """Add a row for mlx-vlm's own ArraysCache, which its models need and which is batched as mlx-lm's.

    Last tokens, as `qwen4_exp` keeps them, are of 64 bits there, and stored in 32.
    """

    def state_of(cache: Any) -> dict[str, Any]:
        held = _numbered(cache)
        return {
            k: a.astype(mx.uint32) if a is not None and a.dtype == mx.int64 else a for k, a in held.items()
        }

    def restore(cache: Any, arrays: Mapping[str, mx.array], tokens: int) -> None:
        wide = {k: a.astype(mx.int64) if a.dtype == mx.uint32 else a for k, a in arrays.items()}
        _put_numbered(cache, wide, tokens)

    KINDS[type] = CacheKind("state", state_of, restore, type, None)


def spec_of(leaf: Any) -> KVSpec | None:
    """Return what a leaf keeps, of one sequence or of a batch; None: omlxd does not know its class."""
    if isinstance(leaf, RowBatch):
        return leaf.spec
    if (row := KINDS.get(type(leaf))) is None:
        return None
    if is_packed(leaf):
        return KVSpec("packed", tuple(part_names(leaf.how)), bits=leaf.how.bits)
    if row.kind == "state":
        return KVSpec("state", tuple(row.state_of(leaf)))
    if row.kind == "chosen":
        return KVSpec("chosen", leaf.parts)
    kind: KVKind = getattr(leaf, "mla_kind", None) or row.kind
    return KVSpec(kind, tuple(part_names(None)), window=getattr(leaf, "max_size", 0))


# --------------------------------------------------------------------------- what a model keeps


def leaves(cache: Cache) -> list[tuple[str, Any]]:
    """(name, cache) of every layer, the members of a `CacheList` each for itself."""
    return [leaf for index, layer in enumerate(cache) for leaf in _leaves(f"layers.{index}", layer)]


def _leaves(name: str, layer: Any) -> list[tuple[str, Any]]:
    if not isinstance(layer, CacheList):
        return [(name, layer)]
    return [leaf for index, member in enumerate(layer.caches) for leaf in _leaves(f"{name}.{index}", member)]


def map_leaves(change: Callable[..., Any], *layers: Any) -> Any:
    """`change(*leaves)` for the leaves at each place of `layers`, which are built alike."""
    if not isinstance(layers[0], CacheList):
        return change(*layers)
    members = zip(*(layer.caches for layer in layers), strict=True)
    return CacheList(*(map_leaves(change, *member) for member in members))


def _of_kind(cache: Cache, *, per_token: bool) -> Iterable[tuple[str, Any, CacheKind]]:
    """(name, leaf, its row) of the leaves of one sequence's cache that have a row of that sort.

    A batch whose rows keep arrays of their own has a spec, and no row. The row alone is asked, since verify
    steps come here: specs of 36 layers take 100 to 200 microseconds, rows 20.
    """
    for name, leaf in leaves(cache):
        row = KINDS.get(type(leaf))
        if row is not None and row.per_token == per_token:
            yield name, leaf, row


def _named(name: str, arrays: Mapping[str, Any]) -> dict[str, Any]:
    return {f"{name}.{part}": array for part, array in arrays.items()}


def _restore(name: str, leaf: Any, kind: CacheKind, arrays: Mapping[str, mx.array], tokens: int) -> None:
    """The inverse of `state_of`, from arrays by the names that `tensors` and `state_tensors` give them."""
    kind.restore(leaf, {part: arrays[f"{name}.{part}"] for part in kind.state_of(leaf)}, tokens)


def reuse_obstacle(cache: Cache) -> str:
    """Empty when all that the model keeps can be stored and brought back; else the reason why not.

    cache  one of one token
    """
    held = [leaf for _, leaf in leaves(cache)]
    if unknown := [leaf for leaf in held if spec_of(leaf) is None]:
        names = {type(one).__name__ for leaf in unknown for one in getattr(leaf, "caches", [leaf])}
        others = names - {kind.__name__ for kind in KINDS} or names  # mlx-vlm's have the same names.
        return f"layers of this model keep {', '.join(sorted(others))}: state that omlxd can't store yet"
    if any(_keeps_first(leaf) for leaf in held):
        return "layers of this model keep their first tokens beside a window: omlxd can't store that yet"
    arrays = [array for leaf in held for array in KINDS[type(leaf)].state_of(leaf).values()]
    if any(array is None for array in arrays):
        return "a layer of this model keeps no state of its own"
    if any(array.dtype not in SAFETENSORS_DTYPE for array in arrays):
        return "its state has a type that can't be stored"
    return ""


def _keeps_first(leaf: Any) -> bool:
    """Whether a window keeps the first tokens too."""
    return bool(getattr(leaf, "keep", 0))


def quantise_obstacle(cache: Cache, how: Quantisation) -> str:
    """Empty when `quantised` may do for a model with such a cache, of one token; else the reason why not."""
    if obstacle := reuse_obstacle(cache):
        return obstacle
    tokens = [leaf for _, leaf, _ in _of_kind(cache, per_token=True) if not is_packed(leaf)]
    if not tokens:
        names = ", ".join(sorted({type(leaf).__name__ for _, leaf in leaves(cache)}))
        return f"its layers keep {names} alone, which have no quantised form"
    for leaf in tokens:
        if isinstance(leaf, ChosenKVCache):
            return f"its layers keep {type(leaf).__name__}, which has no quantised form"
        keys, values = leaf.keys, leaf.values
        if keeps_latents(leaf):
            return "its KVCache holds the latent of MLA, which its attention expands itself"
        if width := next((a.shape[3] for a in (keys, values) if a.shape[3] % how.group), 0):
            widths = [a.shape[3] for leaf in tokens for a in (leaf.keys, leaf.values)]
            fits = [group for group in (64, 32) if not any(each % group for each in widths)]
            hint = f" (--kv-group-size {fits[0]} would)" if fits else ""
            return f"its KVCache has heads {width} wide, which groups of {how.group} don't divide{hint}"
    return ""


def quantised(cache: Cache, how: Quantisation) -> Cache:
    """`cache`, empty, in which a cache that packs its KV as `how` says replaces every `KVCache`."""

    def replaced(leaf: Any) -> Any:
        return SequenceKVCache(how=how) if type(leaf) is KVCache else leaf

    return [map_leaves(replaced, layer) for layer in cache]


def segmented(cache: Cache, mla: Mapping[str, KVKind] | None = None) -> Cache:
    """`cache`, empty, in which a cache that can hold segments replaces every `KVCache`, packed or not.

    mla  kinds of the layers that `mla_kinds` names

    Returns an empty list if it has no `KVCache`.
    """
    names = {id(leaf): name for name, leaf in leaves(cache)}

    def change(leaf: Any) -> Any:
        if type(leaf) not in (KVCache, SequenceKVCache):
            return leaf
        held = SequenceKVCache(names[id(leaf)], getattr(leaf, "how", None))
        held.mla_kind = (mla or {}).get(held.layer, "")
        return held

    changed = [map_leaves(change, layer) for layer in cache]
    return changed if segmented_layers(changed) else []


def is_batchable(cache: Cache) -> bool:
    """Whether mlx-lm can decode several such caches as one."""
    return all(
        (KINDS[type(leaf)].batch is not None if type(leaf) in KINDS else hasattr(type(leaf), "merge"))
        and not _keeps_first(leaf)
        for _, leaf in leaves(cache)
    )


def layout_of(cache: Cache) -> KVLayout:
    """The layout of the per-token KV of a model with such a cache, of one token."""
    members: dict[tuple[int, int, str], list[str]] = {}
    for name, array in tensors(cache).items():
        shape = (array.shape[1], array.shape[3], SAFETENSORS_DTYPE[array.dtype])
        members.setdefault(shape, []).append(name)
    return KVLayout(tuple(Group(tuple(names), *shape) for shape, names in members.items()))


def states_of(cache: Cache) -> StateLayout:
    """The layout of what a model with such a cache, of one token, keeps besides."""
    return StateLayout(
        tuple(
            StateTensor(tensor, tuple(a.shape), SAFETENSORS_DTYPE[a.dtype], getattr(leaf, "max_size", 0))
            for name, leaf, kind in _of_kind(cache, per_token=False)
            for tensor, a in _named(name, kind.state_of(leaf)).items()
        )
    )


# --------------------------------------------------------------------------- caches of one sequence


def new_cache(model: Any, capacity: int) -> Cache:
    """An empty cache whose first allocation holds `capacity` tokens, where the class allows it.

    Growing copies the whole array (facts: 1.6 times the peak, quadratic time), and at admission
    the size is known.
    """
    backend.current().trim_memory()
    cache = make_prompt_cache(model)
    for _, leaf, _ in _of_kind(cache, per_token=True):
        leaf.step = round_up(capacity)
    return cache


def filled_cache(
    model: Any, arrays: dict[str, mx.array], length: int, segments: Sequence[Segment] = (), base: int = 0
) -> Cache:
    """A cache over `arrays` (by layout name, each (1, heads, capacity, dim)) holding `length` tokens.

    segments  hold the first `base` of these, and `arrays` the others; without `arrays` there are none
    """
    backend.current().trim_memory()
    cache = make_prompt_cache(model)
    for name, leaf, kind in _of_kind(cache, per_token=True):
        if segments:
            leaf.segments, leaf.base, leaf.offset = list(segments), base, base
        if arrays:
            _restore(name, leaf, kind, arrays, length)
    return cache


def open_tails(cache: Cache) -> None:
    """Make arrays for the next tokens of one sequence, where all that it has are in segments."""
    for leaf in segmented_layers(cache):
        leaf.open_tail()


def _base(leaf: Any) -> int:
    """Tokens before those that the leaf's own arrays hold."""
    return getattr(leaf, "base", 0)


def append_tokens(cache: Cache, arrays: dict[str, mx.array], start: int, count: int, capacity: int) -> None:
    """Write `count` tokens of KV at position `start` of a plain cache.

    arrays    by layout name, each (1, heads, count, dim), in the type that the cache keeps
    capacity  tokens to allocate for when the cache is still empty
    """
    for name, leaf, kind in _of_kind(cache, per_token=True):
        held = _named(name, kind.state_of(leaf))
        first, most = start - _base(leaf), capacity - _base(leaf)
        for tensor, have in held.items():
            new = arrays[tensor]
            if have is None or have.shape[2] < first + count:
                room = round_up(max(most, first + count))
                _, heads, _, dim = new.shape
                grown = mx.zeros((1, heads, room, dim), dtype=new.dtype)
                if have is not None and first:
                    grown[..., :first, :] = have[..., :first, :]
                have = grown
            have[..., first : first + count, :] = new
            held[tensor] = have
        _restore(name, leaf, kind, held, start + count)


def can_take_back(cache: Cache, rows: int) -> bool:
    """Whether the last tokens of a pass can be forgotten, of each row as many as it likes.

    Recurrent states only of one row: what held is computed again, and rows of unequal number would be padded.
    Nor beside windows, which can't forget a pass and then take it again.
    """
    rows_of = [
        leaf.spec if isinstance(leaf, RowBatch) else KINDS.get(type(leaf)) for _, leaf in leaves(cache)
    ]
    kinds = {row.kind for row in rows_of if row is not None}
    return all(rows_of) and not ("state" in kinds and ("window" in kinds or rows > 1))


RecurrentState = tuple[Any, CacheKind, dict[str, Any]]
"""A leaf, its row, and its arrays."""


def recurrent_states(cache: Cache) -> list[RecurrentState]:
    """Of states that can't be trimmed. Costs nothing: a pass makes new arrays."""
    held = _of_kind(cache, per_token=False)
    return [(leaf, kind, kind.state_of(leaf)) for _, leaf, kind in held if kind.trim is None]


def put_back(states: Sequence[RecurrentState], position: int) -> None:
    """Set the state after `position` tokens, which `recurrent_states` gave."""
    for leaf, kind, arrays in states:
        kind.restore(leaf, arrays, position)


def trim(cache: Cache, counts: Sequence[int]) -> None:
    """Forget the last `counts[row]` tokens of each row, after a pass of several; recurrent states stay."""
    for _, leaf in leaves(cache):
        if isinstance(leaf, OwnRowsKVCache):
            for row, count in zip(leaf.rows, counts, strict=True):
                trim([row], [count])
        elif hasattr(leaf, "trim_rows"):
            leaf.trim_rows(counts)
        elif (forget := KINDS[type(leaf)].trim) is not None and counts[0]:
            forget(leaf, counts[0])


def tensors(cache: Cache) -> dict[str, mx.array]:
    """The per-token KV arrays by the layout's names, as they are now; keep no reference.

    A live reference or view makes MLX copy the whole array at the next append.
    """
    return _arrays(cache, per_token=True)


def token_range(cache: Cache, start: int, stop: int) -> dict[str, mx.array]:
    """Per-token KV of tokens `start` to `stop` by the layout's names; lazy, evaluate it soon."""
    return {
        tensor: _span(tensor, array, 0, getattr(leaf, "segments", ()), start, stop)
        for name, leaf, kind in _of_kind(cache, per_token=True)
        for tensor, array in _named(name, kind.state_of(leaf)).items()
    }


def _span(
    tensor: str, tail: mx.array, column: int, segments: Sequence[Segment], start: int, stop: int
) -> mx.array:
    """Tokens `start` to `stop`: of `segments`, and of `tail`, which goes on behind them in `column`."""
    parts: list[mx.array] = []
    at = 0
    for segment in segments:
        array = segment.tensors[tensor]
        end = at + array.shape[2]
        if start < end and at < stop:
            parts.append(array[:, :, max(start - at, 0) : stop - at])
        at = end
    if stop > at or not parts:
        parts.append(tail[:, :, column + max(start - at, 0) : column + stop - at])
    elif len(parts) == 1:  # A copy: a backend may have told a kernel where it lies.
        parts.append(parts[0][:, :, :0])
    return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=2)


def state_tensors(cache: Cache) -> dict[str, mx.array]:
    """State that exists only at the cache's position, by name, in canonical form; lazy."""
    return _arrays(cache, per_token=False)


def _arrays(cache: Cache, *, per_token: bool) -> dict[str, mx.array]:
    named = (_named(name, kind.state_of(leaf)) for name, leaf, kind in _of_kind(cache, per_token=per_token))
    return {tensor: array for arrays in named for tensor, array in arrays.items()}


def put_states(cache: Cache, states: dict[str, mx.array], position: int) -> None:
    """Set the state after `position` tokens. `states` as `state_tensors` gave them."""
    for name, leaf, kind in _of_kind(cache, per_token=False):
        _restore(name, leaf, kind, states, position)


def state_arrays(cache: Cache) -> list[mx.array]:
    """Every array of a cache, of whatever class: what must be evaluated after a chunk."""
    return arrays_of([layer.state for layer in cache])


def arrays_of(tree: Any) -> list[mx.array]:
    """Every array in nested lists and tuples."""
    if isinstance(tree, mx.array):
        return [tree]
    return [a for child in tree for a in arrays_of(child)] if isinstance(tree, list | tuple) else []


def copied(cache: Cache) -> Cache:
    """A cache that goes on by itself. Arrays of one sequence's are copied when one of the two is written to,
    and at once where MLX does not see who writes."""
    copies = copy.deepcopy(cache)
    for _, leaf in leaves(copies) if backend.current().writes_rows else ():
        if hasattr(leaf, "own_rows") and leaf.keys is not None:
            leaf.keys, leaf.values = tree_map(lambda part: part + 0, (leaf.keys, leaf.values))
    return copies


# --------------------------------------------------------------------------- caches of a batch


def keeps_latents(leaf: Any) -> bool:
    """Whether a leaf with tokens in it keeps latents of MLA."""
    spec = spec_of(leaf)
    if spec is None or not spec.per_token or spec.kind == "chosen" or spec.bits or leaf.keys is None:
        return False
    return leaf.keys.shape[1] == 1 and leaf.keys.shape[3] != leaf.values.shape[3]


def mla_kinds(cache: Cache) -> dict[str, KVKind]:
    """`mla` or `index`, by name, of each leaf that keeps latents of MLA or an index of these.

    cache  one with tokens in it
    """
    found: dict[str, KVKind] = {}
    for at, layer in enumerate(cache):
        members = _leaves(f"layers.{at}", layer)
        if keeps_latents(members[0][1]):
            found |= {name: "mla" if keeps_latents(leaf) else "index" for name, leaf in members}
    return found


def joins_alone(cache: Cache) -> bool:
    """Whether a row alone is better off in a batch, as the backend says. With latents of MLA it is: passes
    over one sequence's cache are the model's, which makes keys and values of each head."""
    held = [leaf for _, leaf in leaves(cache) if hasattr(leaf, "own_rows")]
    if any(leaf.mla_kind == "mla" for leaf in held):
        return True
    return bool(held) and all(map(backend.current().joins_alone, held))


def row_tensors(batch: Cache, row: int, start: int, stop: int) -> dict[str, mx.array]:
    """Per-token KV of tokens `start` to `stop` of one row of a batch; lazy slices, evaluate them soon."""
    found: dict[str, mx.array] = {}
    for name, leaf in leaves(batch):
        if (spec := spec_of(leaf)) is None or not spec.per_token:
            continue
        if isinstance(leaf, RowBatch):
            held, segments = leaf.held_by(row)
            kind = KINDS.get(type(held))
            parts = [*parts_of(held.keys), *parts_of(held.values)]
            arrays = kind.state_of(held) if kind is not None else zip(spec.parts, parts, strict=True)
            for tensor, array in _named(name, dict(arrays)).items():
                part = _span(tensor, array, 0, segments, start, stop)
                if not leaf.gives_views and (part.shape[1] == 1 or part.shape == array.shape):
                    part = mx.concatenate([part, part[:, :, :0]], axis=2)  # A view else.
                found[tensor] = part
        else:
            for tensor, array in _named(name, KINDS[type(leaf)].state_of(leaf)).items():
                found[tensor] = _span(tensor, array[row : row + 1], leaf.starts[row], (), start, stop)
    return found


def row_states(batch: Cache, row: int) -> dict[str, mx.array]:
    """`state_tensors` of one row of a batch."""
    found: dict[str, mx.array] = {}
    for name, leaf in leaves(batch):
        if (spec := spec_of(leaf)) is None or spec.per_token:
            continue
        if hasattr(leaf, "window_of"):
            found |= _named(name, leaf.window_of(row))
        else:
            alone = leaf.extract(row)
            found |= _named(name, KINDS[type(alone)].state_of(alone))
    return found
