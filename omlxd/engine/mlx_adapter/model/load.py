"""Loading a model, and learning what it keeps."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from textwrap import shorten
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import KVCache, make_prompt_cache
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.utils import load_model as mlx_load_model
from mlx_lm.utils import load_tokenizer as mlx_load_tokenizer

from ....common.files import read_small
from ....errors import AdapterError, ModelError
from ....kv.layout import KVLayout
from ..attention import by_rows as row_attention
from ..attention import hooks as attention
from ..attention.backend import current
from ..attention.kv_spec import KVKind
from ..cache import segments
from ..cache.dsa_rows import let_choose
from ..cache.kinds import (
    Cache,
    StateLayout,
    copied,
    is_batchable,
    layout_of,
    leaves,
    merge,
    mla_kinds,
    quantise_obstacle,
    quantised,
    reuse_obstacle,
    row_states,
    row_tensors,
    segmented,
    spec_of,
    state_arrays,
    state_tensors,
    states_of,
    token_range,
)
from ..cache.live_segments import LiveSegments
from ..cache.mla_rows import MOST_NEW, attentions, calls_of, take_tokens_for_rows
from ..cache.packed import Quantisation
from ..cache.rows import RowBatch
from ..runtime.arrays import CLOSE, distance
from ..runtime.device import backend
from ..runtime.mapped import MappedWeights
from . import vision
from .layer_hook import LayerHook
from .lora import Adapters, read_adapter
from .positions import last_position_only

log = logging.getLogger(__name__)


@dataclass(slots=True)
class LoadedModel:
    """A model ready to run.

    hook     runs between its layers
    float32  its weights are float32, and are not so in its files
    layout   its per-token KV; without groups when it keeps none
    states   its state that exists only at a position; without tensors when it keeps none
    Both None: its KV can't be reused, and `kv_reuse` says why.
    blind    why a vision model takes no images; None: it is a text model; "": it takes them
    mapped   weights that are views of their files
    segments  of its sequences, where those share them
    adapters  that rows may have, beside the one that it was loaded with
    """

    model: Any
    tokenizer: TokenizerWrapper
    config: dict[str, Any]
    context_length: int
    vocab_size: int
    weight_bytes: int
    layout: KVLayout | None
    states: StateLayout | None
    kv_reuse: str
    batchable: bool
    hook: LayerHook = field(default_factory=LayerHook)
    float32: bool = False
    blind: str | None = None
    mapped: MappedWeights = field(default_factory=lambda: MappedWeights("off", False))
    segments: LiveSegments = field(default_factory=LiveSegments)
    adapters: Adapters = field(init=False)

    def __post_init__(self) -> None:
        self.adapters = Adapters(self.model, self.float32)

    @property
    def model_type(self) -> str:
        return str(self.config.get("model_type", "unknown"))


def load(
    path: Path,
    kv: Quantisation | None = None,
    float32: bool = False,
    adapter: str = "",
    weights_mmap: str = "off",
    segment: int = 0,
    segments_pay: bool = False,
) -> LoadedModel:
    """Load weights and tokenizer, and learn the KV layout from a forward pass of one token.

    kv       keep per-token KV so; None: in the model's own type
    float32  make the weights float32
    adapter  folder of a LoRA adapter; "": none
    weights_mmap  `on`, `auto` or `off`, as `MappedWeights` has it
    segment  tokens of a segment of KV that sequences share, where the model can; 0: they share none. On a CPU
             only in float32: products of 16 bits would be rounded where segments meet
    segments_pay  share none on a GPU unless fused steps read segments there: MLX's own products are slower,
                  and other steps of ours were not timed

    Call on the engine thread: MLX's streams are a thread's own. Raises ModelError where `kv` is not possible,
    AdapterError where `adapter` is not, and what mlx-lm raises.
    """
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    attention.install()
    blind = vision.blindness(path)
    mapped = MappedWeights(weights_mmap, float32)
    with mapped.reading():
        model, tokenizer, config, converted = read_model(path, float32, blind)
    if adapter:
        _add_adapter(model, adapter, blind, converted)
    weight_bytes = tree_bytes(model.parameters())
    current().prepare(model)
    last_position_only(model)
    cache, logits = run_passes(model, [[0]])
    if kv is not None:
        cache = _quantise(model, cache, kv, str(config.get("model_type", "this model")))
    obstacle = reuse_obstacle(cache)
    batchable = is_batchable(cache)
    if batchable:
        current().decode_step(model)  # Whether its steps are fused, the checks below ask.
    layout = None if obstacle else layout_of(cache)
    exact = layout is not None and (
        backend() != "cpu" or all(g.dtype == "F32" for g in layout.groups if g.dtype != "U32")
    )
    shares = batchable and exact
    hook = LayerHook(model)
    live = share_prefixes(model, segment if shares else 0, segments_pay and backend() != "cpu")
    if batchable and not has_own_rows(model) and current().rows_pay():
        use_own_rows(model)
    if batchable:
        current().warm_up(model)
    return LoadedModel(
        model=model,
        tokenizer=tokenizer,
        config=config,
        context_length=context_length(config),
        vocab_size=int(logits.shape[-1]),
        weight_bytes=weight_bytes,
        layout=layout,
        states=None if obstacle else states_of(cache),
        kv_reuse=obstacle,
        batchable=batchable,
        hook=hook,
        float32=converted,
        blind=blind,
        mapped=mapped,
        segments=live,
    )


def read_model(
    path: Path, float32: bool = False, blind: str | None = None
) -> tuple[Any, TokenizerWrapper, dict[str, Any], bool]:
    """Model, tokenizer and config, as mlx-lm's own `load` gives them; whether weights became float32.

    blind  as `LoadedModel` has it

    The tokenizer is read while the weights are: those of large vocabularies take a second, and MLX
    computes without Python's lock. Modules of models are imported by this thread, before: they may
    hold arrays, and MLX's streams are a thread's own.
    """
    model, config = _model_and_config(path, blind)
    converted = float32 and make_float32(model)
    current().before_weights(model)
    mx.eval(mx.zeros(1) + 1)  # MLX makes ready what all threads share.
    with ThreadPoolExecutor(2, thread_name_prefix="load") as aside:
        tokenizer = aside.submit(load_tokenizer, path, config.get("eos_token_id"))
        ready = aside.submit(current().beside_weights, model)
        mx.eval(model.parameters())
        ready.result()
        return model, tokenizer.result(), config, converted


def _add_adapter(model: Any, adapter: str, blind: str | None, float32: bool) -> None:
    """Put the LoRA adapter in folder `adapter` beside the weights. Raises AdapterError."""
    if blind == "":
        raise AdapterError(f"{adapter}: a model that reads images takes no adapter here")
    read_adapter(model, adapter)
    if float32:
        model.set_dtype(mx.float32)
    mx.eval(model.parameters())
    model.eval()  # No dropout.


def _model_and_config(path: Path, blind: str | None) -> tuple[Any, dict[str, Any]]:
    """By mlx-vlm for a model that takes images, else by mlx-lm; weights are not read yet."""
    if blind == "":
        return vision.load_vision_model(path)
    try:
        return mlx_load_model(path, lazy=True)
    except ValueError as error:
        if blind:
            raise ModelError(f"mlx-lm does not have this vision model ({error}), and {blind}") from error
        # A line of each parameter that the file lacks is too much for a sentence.
        raise ModelError(f"mlx-lm can't load {path}: {shorten(str(error), 300, placeholder=' …')}") from error


def make_float32(model: Any) -> bool:
    """Make the weights of `model` float32, lazily; whether that changes any. Quantised experts stay packed.

    A CPU's quantised and 16-bit products use no BLAS. SmolLM2-135M, prefill in chunks of 64 with OpenBLAS,
    two virtual CPUs that others use as well, tokens a second: float32 36, float16 5.
    """
    plain = {nn.QuantizedLinear: nn.Linear, nn.QuantizedEmbedding: nn.Embedding}
    before = tree_bytes(model.parameters())
    for _, module in model.named_modules():
        if (kind := plain.get(type(module))) is None:
            continue
        packed = [module.pop(name, None) for name in ("weight", "scales", "biases")]
        # Affine scales are floats, and a product in their 16 bits would round; others are bytes.
        packed[1:] = [
            a.astype(mx.float32) if a is not None and a.dtype != mx.uint8 else a for a in packed[1:]
        ]
        module.weight = mx.dequantize(
            *packed, group_size=module.group_size, bits=module.bits, mode=module.mode
        )
        module.__class__ = kind
    model.set_dtype(mx.float32)
    return tree_bytes(model.parameters()) != before


def load_tokenizer(path: Path, eos_token_ids: Any = None) -> TokenizerWrapper:
    """Tokenizer and template alone, as `load` would give them. Raises what mlx-lm raises."""
    return mlx_load_tokenizer(path, _processors_template(path), eos_token_ids=eos_token_ids)


def _processors_template(path: Path) -> dict[str, Any]:
    """The chat template of older vision models, which stands beside the processor, not the tokenizer."""
    try:
        if "chat_template" in json.loads(read_small(path / "tokenizer_config.json")):
            return {}
        if (path / "chat_template.jinja").exists():
            return {}
        template = json.loads(read_small(path / "chat_template.json"))["chat_template"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return {}
    return {"chat_template": template} if isinstance(template, str) else {}


def run_passes(model: Any, passes: list[list[int]]) -> tuple[Cache, mx.array]:
    """(a cache, the last logits) after passes of these tokens."""
    cache = make_prompt_cache(model)
    logits = mx.array(0)
    for tokens in passes:
        logits = model(mx.array([tokens]), cache=cache)
        mx.eval(logits, state_arrays(cache))
    return cache, logits


def share_prefixes(model: Any, tokens: int, by_kernel: bool = False) -> LiveSegments:
    """From now on `model`'s caches can hold segments of so many tokens.

    Where the model can't, or `tokens` is 0, nothing changes and its KV is not cut. `by_kernel`: nor where
    steps that read them are neither fused nor compiled. Rows that share segments keep arrays of their own in
    a batch. Kernels take segments of equal length, so where there are any no short one is cut.
    """
    fresh = _make_cache(model)
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
    fresh, obstacle = _make_cache(model), ""
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
    batch = merge(rows)
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


def has_own_rows(model: Any) -> bool:
    """Whether rows of its batches keep arrays of their own."""
    return bool(vars(model).get("omlxd_own_rows"))


def _make_cache(model: Any) -> Callable[[], Cache]:
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
    batch = merge([copied(row) for row in rows])
    with calls_of(module) as calls:
        for row in rows:
            model(mx.arange(11, 11 + new)[None], cache=row)
    layer = batch[next(at for at, own in enumerate(rows[0]) if own is calls[0][1])]
    mask = leaves([layer])[0][1].make_mask(new, return_array=True)
    got = module(mx.concatenate([x for x, _, _ in calls]), mask, layer)
    if not (far := distance(got, mx.concatenate([out for _, _, out in calls]))) < CLOSE:  # NaN too
        raise RuntimeError(f"attention of {new} tokens a row differs by {far:.3g} from a row's alone")


def _quantise(model: Any, plain: Cache, kv: Quantisation, model_type: str) -> Cache:
    """From now on `model`'s caches keep per-token KV as `kv` says; a cache of one token of that kind.

    plain  one with a token in it. Raises ModelError, naming what is in the way.
    """
    if reason := quantise_obstacle(plain, kv):
        raise _refusal(model_type, kv, reason)
    fresh = _make_cache(model)
    model.make_cache = lambda: quantised(fresh(), kv)
    try:
        # Attention is asked for one token and for several, since it reads packed KV only for one.
        run_passes(model, [[0, 1], [2], [3, 4]])
        return run_passes(model, [[0]])[0]
    except Exception as error:
        raise _refusal(model_type, kv, f"its attention can't read a packed KVCache: {error}") from error


def _refusal(model_type: str, kv: Quantisation, reason: str) -> ModelError:
    return ModelError(
        f"{model_type} can't have --kv-bits {kv.bits}: {reason}; serve it with --kv-bits 0", param="--kv-bits"
    )


def context_length(config: dict[str, Any]) -> int:
    for holder in (config, config.get("text_config") or {}):
        for key in ("max_position_embeddings", "max_sequence_length", "n_positions", "seq_length"):
            if isinstance(value := holder.get(key), int) and value > 0:
                return value
    return 32768


def tree_bytes(tree: Any) -> int:
    if isinstance(tree, mx.array):
        return tree.nbytes
    children = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list) else ()
    return sum(tree_bytes(child) for child in children)
