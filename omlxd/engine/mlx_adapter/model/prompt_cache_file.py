"""mlx-lm's prompt-cache files, which `mlx_lm.cache_prompt` writes and `mlx_lm.generate` reads.

Such a file holds the KV of one prompt, and nothing in it says of which. So a file, and the tokens that are
given for it, are believed as far as the model computes the same again, within `ROUNDING`:

| what is compared                            | of which tokens           | finds                          |
|---------------------------------------------|---------------------------|--------------------------------|
| KV of the first layer that keeps one entry  | all                       | another prompt, by one token   |
| a token, and of the windows before it       |                           |                                |
| KV of all layers, behind that of the file   | the last block, and of    | other weights, another adapter |
|                                             | `SAMPLED` more, by chance |                                |

Recurrent state can't be compared without computing the whole prompt: it is written, and not taken in.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
from mlx_lm.models.cache import (
    ArraysCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
    make_prompt_cache,
    save_prompt_cache,
)
from safetensors import SafetensorError, safe_open

from ....errors import InvalidRequest
from ..cache.kinds import (
    KINDS,
    Cache,
    filled_cache,
    leaves,
    map_leaves,
    new_cache,
    put_states,
    spec_of,
    state_arrays,
    state_tensors,
    token_range,
)
from ..cache.packed import PARTS, is_packed
from ..cache.segments import SequenceKVCache
from ..runtime.device import SAFETENSORS_DTYPE
from .load import LoadedModel

SAMPLED = 7
CHUNK = 1024
"""Tokens of a pass through the first layers."""

ROUNDING = {"F32": 2e-3, "F16": 0.03, "BF16": 0.06}
PACKED = {8: 0.06, 4: 0.1}
"""Most that K or V of a token may differ, as a share of its norm; more where it is packed: mlx-lm computes a
prompt's first 2,048 tokens before it packs any. Random weights, 3 and 24 layers, on a CPU: the same bits in
float32 and bfloat16; 3 layers, 0.03 in 8 bits, 0.5 in 4, and so mlx-lm's own files in 4 bits are refused."""

_NAMES = {"packed": "QuantizedKVCache", "window": "RotatingKVCache", "state": "ArraysCache"}
_TOKENS = "tokens"
"""Of the metadata that omlxd adds: token ids, with commas."""


# --------------------------------------------------------------------------- out


def unwritable(loaded: LoadedModel) -> str:
    """Why mlx-lm can't read this model's KV from a file; "": it can."""
    if loaded.blind == "":
        return "mlx-vlm serves this model, since it reads images: mlx-lm places its tokens otherwise"
    others = {type(leaf).__name__ for _, leaf in leaves(make_prompt_cache(loaded.model)) if not _name(leaf)}
    return f"its layers keep {', '.join(sorted(others))}, which mlx-lm's files can't hold" if others else ""


def write_prompt_cache(
    file: Path, loaded: LoadedModel, cache: Cache, tokens: Sequence[int], metadata: Mapping[str, str]
) -> None:
    """Write what `cache` keeps of `tokens`, all that it holds, so that mlx-lm goes on from there.

    KV that is float32 because the weights were made so gets the type that mlx-lm will compute in.
    """
    held = {**token_range(cache, 0, len(tokens)), **state_tensors(cache)}
    own = str(loaded.config.get("torch_dtype") or loaded.config.get("dtype")) if loaded.float32 else ""
    dtype = {"bfloat16": mx.bfloat16, "float16": mx.float16}.get(own.removeprefix("torch."))

    def plain(name: str, leaf: Any) -> Any:
        arrays = {part: held[f"{name}.{part}"] for part in KINDS[type(leaf)].state_of(leaf)}
        made: Any
        if dtype is not None and _name(leaf) != "ArraysCache":
            arrays = {p: a if a.dtype == mx.uint32 else a.astype(dtype) for p, a in arrays.items()}
        if is_packed(leaf):
            made = QuantizedKVCache(leaf.how.group, leaf.how.bits)
            made.keys, made.values = ([arrays[f"{of}.{part}"] for part in PARTS] for of in ("keys", "values"))
            made.offset = len(tokens)
            return made
        if _name(leaf) == "ArraysCache":
            made = ArraysCache(len(leaf.cache))
        elif isinstance(leaf, RotatingKVCache):
            made = RotatingKVCache(leaf.max_size)
        else:
            made = KVCache()
        KINDS[type(made)].restore(made, arrays, len(tokens))
        return made

    made = {id(leaf): plain(name, leaf) for name, leaf in leaves(cache)}
    layers = [map_leaves(lambda leaf: made[id(leaf)], layer) for layer in cache]
    # What `mlx_lm.generate` asks of a file, and the tokens.
    known = {"tokenizer_config": "{}", _TOKENS: ",".join(map(str, tokens)), **metadata}
    save_prompt_cache(str(file), layers, known)


def _name(leaf: Any) -> str:
    """Of mlx-lm's class for the same; "" if it has none."""
    spec = spec_of(leaf)
    if spec is None or getattr(leaf, "keep", 0):
        return ""
    if spec.kind != "state" and not isinstance(leaf, KVCache | SequenceKVCache | RotatingKVCache):
        return ""  # Another class keeps its tokens in another way.
    return _NAMES.get(spec.kind, "KVCache")


# --------------------------------------------------------------------------- in


@dataclass(slots=True)
class PromptCacheFile:
    """A file whose header fits a model. tokens: whose KV it holds; at: of these, those that can be used.

    windows  arrays that are windows, by layout name: (max_size, where the next token goes)
    """

    path: Path
    tokens: int = 0
    at: int = 0
    names: dict[str, str] = field(default_factory=dict)
    windows: dict[str, tuple[int, int]] = field(default_factory=dict)

    @property
    def is_whole(self) -> bool:
        """Whether its windows hold all tokens, so that it can be cut anywhere."""
        return all(size >= self.tokens for size, _ in self.windows.values())

    def read_arrays(self) -> dict[str, mx.array]:
        """By layout name; lazy. Per token (1, heads, tokens, dim), windows as they were after all tokens."""
        loaded: Any = mx.load(str(self.path))
        arrays = {ours: loaded[theirs] for theirs, ours in self.names.items()}
        for name, array in arrays.items():
            if name not in self.windows:
                arrays[name] = array[..., : self.tokens, :]
                continue
            size, index = self.windows[name]
            ring = RotatingKVCache(size)
            ring.offset, ring._idx = self.tokens, index
            arrays[name] = ring._temporal_order(array)[..., -min(size, self.tokens) :, :]
        return arrays


def open_prompt_cache(path: Path, loaded: LoadedModel, block_size: int) -> PromptCacheFile:
    """Compare the header with what `loaded` keeps. Reads no KV. Any thread. Raises InvalidRequest."""
    try:
        with safe_open(str(path), framework="numpy") as file:
            metadata = file.metadata() or {}
            parts = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            shapes = {name: (part.get_dtype(), tuple(part.get_shape())) for name, part in parts.items()}
            reader = _Header(metadata, shapes, file.get_tensor)
            return reader.fit(path, loaded, block_size)
    except (SafetensorError, OSError) as error:
        raise _refused(f"it is damaged or no safetensors file ({error})") from None


def _refused(why: str) -> InvalidRequest:
    return InvalidRequest(f"The prompt cache is not taken: {why}.", param="file")


class _Header:
    """metadata; of each tensor its type and shape; `read(name)`: a small one as numpy has it."""

    def __init__(self, metadata: dict[str, str], shapes: dict[str, tuple[str, tuple[int, ...]]], read: Any):
        self._metadata, self._shapes, self._read = metadata, shapes, read

    def fit(self, path: Path, loaded: LoadedModel, block_size: int) -> PromptCacheFile:
        if loaded.layout is None or loaded.states is None:
            raise _refused(f"this model's prefixes are not reused: {loaded.kv_reuse}")
        if loaded.blind == "":
            raise _refused(unwritable(loaded))
        if "1.0" not in self._metadata or "2.0" not in self._metadata:
            raise _refused("its metadata is not what mlx-lm 0.32 writes; make it again with that version")
        cache = make_prompt_cache(loaded.model)
        layers = sum(name.startswith("1.") for name in self._metadata)
        if layers != len(cache):
            raise _refused(f"it has {layers} layers, and this model {len(cache)}")
        file, lengths = PromptCacheFile(path), set[int]()
        for name, leaf in leaves(cache):
            lengths.add(self._note_leaf(file, name, leaf))
        if len(lengths) != 1 or not 0 < (tokens := lengths.pop()) < 1 << 31:
            raise _refused("its layers hold unequal numbers of tokens: it is damaged")
        file.tokens = tokens
        shapes = {n: (g.dtype, (1, g.heads, g.dim)) for g in loaded.layout.groups for n in g.names}
        shapes |= {t.name: (t.dtype, (*t.shape[:2], *t.shape[3:])) for t in loaded.states.tensors}
        for theirs, ours in file.names.items():
            self._check_shape(file, theirs, ours, *shapes[ours])
        file.at = _usable(file, block_size)
        return file

    def _note_leaf(self, file: PromptCacheFile, name: str, leaf: Any) -> int:
        """Note the arrays of a leaf: `layers.I` or, in a `CacheList`, `layers.I.J`; its tokens."""
        place = name.split(".")[1:]
        path, theirs = place[0], self._metadata.get(f"1.{place[0]}", "")
        if len(place) > 1 and theirs == "CacheList":
            path, theirs = f"{'.'.join(place)}.0", self._text(f"{'.'.join(place)}.1")
        if theirs != (ours := _name(leaf) or type(leaf).__name__):
            bits = f" (--kv-bits {leaf.how.bits})" if is_packed(leaf) else ""
            raise _refused(f"it keeps {name} as {theirs[:40]}, and this model is served with {ours}{bits}")
        if ours == "ArraysCache":
            raise _refused(
                "this model keeps recurrent state, which can't be verified without computing the prompt, and "
                "`omlxd cache warm` computes it"
            )
        if is_packed(leaf):
            for at, of in enumerate(("keys", "values")):
                file.names |= {f"{path}.{at}.{i}": f"{name}.{of}.{part}" for i, part in enumerate(PARTS)}
            bits, group = self._number(f"{path}.4"), self._number(f"{path}.3")
            if (bits, group) != (leaf.how.bits, leaf.how.group):
                raise _refused(
                    f"its KV has {bits} bits in groups of {group}, and this model is served with --kv-bits "
                    f"{leaf.how.bits} --kv-group-size {leaf.how.group}"
                )
            return self._number(f"{path}.2")
        file.names |= {f"{path}.0": f"{name}.keys", f"{path}.1": f"{name}.values"}
        if isinstance(leaf, RotatingKVCache):
            keep, size = self._number(f"{path}.3"), self._number(f"{path}.4")
            if keep or size != leaf.max_size:
                raise _refused(f"it has a window of {size} tokens, and this model one of {leaf.max_size}")
            file.windows |= dict.fromkeys(
                (f"{name}.keys", f"{name}.values"), (size, self._number(f"{path}.5"))
            )
        return self._number(f"{path}.2")

    def _check_shape(
        self, file: PromptCacheFile, theirs: str, ours: str, dtype: str, rest: tuple[int, ...]
    ) -> None:
        """`rest`: the shape without its tokens."""
        held, shape = self._shapes.get(theirs, ("", ()))
        if held != dtype and held in SAFETENSORS_DTYPE.values():
            hint = "; `--cpu-weights as-stored` keeps what is in the files" if dtype == "F32" else ""
            raise _refused(f"its KV is {held}, and this model is served with {dtype}{hint}")
        if held != dtype or len(shape) != 4 or (*shape[:2], shape[3]) != rest:
            raise _refused(f"its {ours} is {held} {list(shape)}: it is another model's, or damaged")
        size, index = file.windows.get(ours, (file.tokens, shape[2]))
        if shape[2] < min(size, file.tokens) or not 0 <= index <= shape[2]:
            raise _refused(f"its {ours} has no room for {file.tokens} tokens: it is damaged")

    def _number(self, name: str) -> int:
        array = self._small(name)
        return int(array.item()) if array.size == 1 and array.dtype.kind in "iu" else -1

    def _text(self, name: str) -> str:
        array = self._small(name)
        return "".join(map(chr, array.tolist())) if array.dtype.kind in "iu" and array.ndim == 1 else ""

    def _small(self, name: str) -> Any:
        shape = self._shapes.get(name, ("", (99,)))[1]
        if prod(shape) > 64:
            raise _refused(f"its {name} is missing or no number: it is damaged")
        return self._read(name)


def _usable(file: PromptCacheFile, block_size: int) -> int:
    """Tokens that can be used: whole blocks, and a token is left to compute. Raises InvalidRequest."""
    if file.is_whole:
        if not (at := (file.tokens - 1) // block_size * block_size):
            raise _refused(f"it holds {file.tokens} tokens, and a block of the cache {block_size}")
        return at
    if file.tokens % block_size:
        whole = file.tokens // block_size * block_size
        raise _refused(
            f"its windows stand after token {file.tokens}, where no block of {block_size} tokens ends; make "
            f"it of {whole} tokens"
        )
    return file.tokens - 1  # The last is computed again, and the windows then stand where the block ends.


# --------------------------------------------------------------------------- verified


def checked_kv(
    loaded: LoadedModel, file: PromptCacheFile, tokens: Sequence[int], block_size: int
) -> Iterator[Cache | None]:
    """Yield None after each piece of work, at last a cache of the first `file.at` of `tokens`.

    Engine thread. Raises InvalidRequest if the KV is not what `loaded` computes of them.
    """
    arrays = file.read_arrays()
    yield from _check_tokens(loaded, file, tokens, arrays)
    starts = [file.tokens - 1]
    if file.is_whole:
        *others, last = range(0, file.tokens, block_size)
        starts = [*sorted(random.sample(others, min(SAMPLED, len(others)))), last]
    for start in starts:
        stop = min(start + block_size, file.tokens)
        cache = _first(loaded, arrays, file, start)
        loaded.model(mx.array([tokens[start:stop]]), cache=cache)
        mx.eval(state_arrays(cache))
        ours = token_range(cache, start, stop) | state_tensors(cache)
        for name, leaf in leaves(cache):
            own, theirs = (_pair(name, leaf, held, start - stop) for held in (ours, _cut(arrays, stop)))
            if not _close(leaf, own, theirs):
                raise _refused(
                    f"its {name} is not what this model computes behind token {start}: it was made with "
                    "other weights, another adapter or other settings"
                )
        yield None
    yield _first(loaded, arrays, file, file.at)


def _check_tokens(
    loaded: LoadedModel, file: PromptCacheFile, tokens: Sequence[int], arrays: Mapping[str, mx.array]
) -> Iterator[None]:
    """Compute all tokens up to the first layer that keeps an entry for each."""
    cache = new_cache(loaded.model, file.tokens)
    windows: list[tuple[str, Any]] = []
    for name, leaf in leaves(cache):
        if (spec := spec_of(leaf)) is not None and spec.per_token:
            break
        windows.append((name, leaf))
    else:
        raise _refused("no layer of this model keeps an entry for each token")
    update = leaf.update_and_fetch

    def stop_here(*pair: mx.array) -> None:
        update(*pair)
        raise _Enough

    leaf.update_and_fetch = stop_here
    for start in range(0, file.tokens, CHUNK):
        stop = min(start + CHUNK, file.tokens)
        with suppress(_Enough):
            loaded.model(mx.array([tokens[start:stop]]), cache=cache)
        held = {f"{name}.{part}": array for part, array in KINDS[type(leaf)].state_of(leaf).items()}
        mx.eval(held, [each.state for _, each in windows])
        own, theirs = (_pair(name, leaf, _cut(of, stop), start - stop) for of in (held, arrays))
        differ = mx.maximum(*_differences(own, theirs)) <= _limit(leaf, theirs)
        if not mx.all(differ).item():
            at = start + cast(list[bool], differ.tolist()).index(False)
            raise _refused(f"its KV is not of this prompt from token {at} on")
        yield None
    for name, leaf in windows:
        own, theirs = (_pair(name, leaf, held, -file.tokens) for held in (state_tensors(cache), arrays))
        if not _close(leaf, own, theirs):
            raise _refused(f"its window {name} is not of this prompt")


class _Enough(Exception):
    """The layer that is looked at has what it keeps: nothing behind it is computed."""


def _first(loaded: LoadedModel, arrays: Mapping[str, mx.array], file: PromptCacheFile, length: int) -> Cache:
    """A cache of the first `length` tokens."""
    if not length:
        return new_cache(loaded.model, 1)
    # Other handles: a cache writes into the arrays that it is given.
    cache = filled_cache(loaded.model, {name: array[...] for name, array in arrays.items()}, length)
    windows = {name: array for name, array in arrays.items() if name in file.windows}
    if file.is_whole:
        windows = _cut(windows, length)
    elif length < file.tokens:
        # All but the last token: the pass of the next overwrites the oldest place, whatever it holds.
        windows = {n: mx.concatenate([a[..., :1, :], a[..., :-1, :]], axis=2) for n, a in windows.items()}
    put_states(cache, windows, length)
    return cache


Pair = tuple[mx.array, mx.array]


def _cut(arrays: Mapping[str, mx.array], stop: int) -> dict[str, mx.array]:
    return {name: array[..., :stop, :] for name, array in arrays.items()}


def _pair(name: str, leaf: Any, arrays: Mapping[str, mx.array], first: int) -> Pair:
    """K and V of a leaf from column `first` on, of arrays by layout name."""
    if not is_packed(leaf):
        return arrays[f"{name}.keys"][..., first:, :], arrays[f"{name}.values"][..., first:, :]
    keys, values = (
        leaf.how.unpack([arrays[f"{name}.{of}.{part}"][..., first:, :] for part in PARTS])
        for of in ("keys", "values")
    )
    return keys, values


def _differences(ours: Pair, theirs: Pair) -> list[mx.array]:
    """Of K and of V, for each token, as a share of its norm."""
    shares: list[mx.array] = []
    for pair in zip(ours, theirs, strict=True):
        own, other = (array.astype(mx.float32) for array in pair)
        norm = mx.sqrt(mx.square(other).sum(axis=(0, 1, 3)))
        shares.append(mx.sqrt(mx.square(own - other).sum(axis=(0, 1, 3))) / mx.maximum(norm, 1e-12))
    return shares


def _close(leaf: Any, ours: Pair, theirs: Pair) -> bool:
    """Whether the mean over all tokens is within the limit. NaN is not."""
    means = mx.stack([shares.mean() for shares in _differences(ours, theirs)])
    return bool(mx.all(means <= _limit(leaf, theirs)).item())


def _limit(leaf: Any, pair: Pair) -> float:
    packed = PACKED[leaf.how.bits] if is_packed(leaf) else 0.0
    return packed + ROUNDING[SAFETENSORS_DTYPE[pair[0].dtype]]
