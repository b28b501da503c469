"""Loading a model, and learning what it keeps."""

from __future__ import annotations

import json
import logging
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from textwrap import shorten
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.utils import load_model as mlx_load_model
from mlx_lm.utils import load_tokenizer as mlx_load_tokenizer

from ....common.files import read_small
from ....errors import AdapterError, ModelError
from ....kv.layout import KVLayout
from ....models.footprint import read_config
from ..attention import hooks as attention
from ..attention.backend import current
from ..cache.kinds import (
    Cache,
    StateLayout,
    is_batchable,
    layout_of,
    quantise_obstacle,
    quantised,
    reuse_obstacle,
    state_arrays,
    states_of,
)
from ..cache.live_segments import LiveSegments
from ..cache.packed import Quantisation
from ..runtime.device import backend
from ..runtime.mapped import MappedWeights
from . import checks
from .adapters.lora import Adapters, read_adapter
from .layer_hook import LayerHook
from .positions import last_position_only
from .split import Group, all_agree, read_share, split_of, take_share
from .vlm import vision, vlm_text

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
    split    the share of it that this rank holds (split.py); "": all of it
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
    split: str = ""
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
    group: Group | None = None,
) -> LoadedModel:
    """Load weights and tokenizer, and learn the KV layout from a forward pass of one token.

    kv       keep per-token KV so; None: in the model's own type
    adapter  folder of a LoRA adapter; "": none
    weights_mmap  `on`, `auto` or `off`, as `MappedWeights` has it
    segment  tokens of a segment of KV that sequences share, where the model can; 0: they share none. On a CPU
             only in float32: products of 16 bits would be rounded where segments meet
    segments_pay  share none on a GPU unless fused steps read segments there

    Call on the engine thread: MLX's streams are a thread's own. Raises ModelError where `kv` is not possible,
    AdapterError where `adapter` is not, and what mlx-lm raises.
    """
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    attention.install()
    blind, mapped = vision.blindness(path), MappedWeights(weights_mmap, float32)
    with mapped.reading():
        model, tokenizer, config, converted = read_model(path, float32, blind, group)
    vlm_text.check(model)
    if adapter:
        _add_adapter(model, adapter, blind, converted)
    weight_bytes = tree_bytes(model.parameters())
    current().prepare(model)
    last_position_only(model)
    cache, logits = run_passes(model, [[0]])
    if kv is not None:
        cache = _quantise(model, cache, kv, str(config.get("model_type", "this model")))
    obstacle = reuse_obstacle(cache)
    batchable = _is_batchable(model, cache, group)
    layout, hook = None if obstacle else layout_of(cache), LayerHook(model)
    alone = batchable and group is None
    live = _let_batch(model, layout, segment, segments_pay) if alone else LiveSegments()
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
        split=split_of(model),
    )


def _is_batchable(model: Any, cache: Cache, group: Group | None) -> bool:
    """As `LoadedModel` has it; `cache`: one of `model`'s."""
    able = is_batchable(cache) and vlm_text.can_batch(model, cache)
    if group is not None:
        return all_agree(able and checks.joins_rows(model), group)
    if able:
        current().decode_step(model)  # Whether its steps are fused, `_let_batch` asks.
    return able


def _let_batch(model: Any, layout: KVLayout | None, segment: int, segments_pay: bool) -> LiveSegments:
    """Prepare a model that batches, and return the segments of its sequences. As `load` has it."""
    exact = layout is not None and (
        backend() != "cpu" or all(g.dtype == "F32" for g in layout.groups if g.dtype != "U32")
    )
    live = checks.share_prefixes(model, segment if exact else 0, segments_pay and backend() != "cpu")
    if not checks.has_own_rows(model) and current().rows_pay():
        checks.use_own_rows(model)
    current().warm_up(model)
    return live


def read_model(
    path: Path, float32: bool = False, blind: str | None = None, group: Group | None = None
) -> tuple[Any, TokenizerWrapper, dict[str, Any], bool]:
    """Model, tokenizer and config, as mlx-lm's own `load` gives them; whether weights became float32.

    blind  as `LoadedModel` has it; `group`: as of `load`

    The tokenizer is read while the weights are: those of large vocabularies take a second, and MLX
    computes without Python's lock. Modules of models are imported by this thread, before: they may
    hold arrays, and MLX's streams are a thread's own.
    """
    model, config = _model_and_config(path, blind)
    converted = float32 and make_float32(model)
    if group is not None:
        take_share(model, group)
    current().before_weights(model)
    mx.eval(mx.zeros(1) + 1)  # MLX makes ready what all threads share.
    with ThreadPoolExecutor(2, thread_name_prefix="load") as aside:
        tokenizer = aside.submit(load_tokenizer, path, config.get("eos_token_id"))
        ready = aside.submit(current().beside_weights, model)
        if group is None:
            mx.eval(model.parameters())
        else:
            read_share(model)
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
    """By mlx-vlm if it takes images or mlx-lm does not have it, else by mlx-lm; weights are not read yet."""
    if blind == "":
        return vision.load_vision_model(path)
    if vlm_text.lacks(read_config(path)):
        return vlm_text.load_text_model(path)
    try:
        return mlx_load_model(path, lazy=True)
    except ValueError as error:
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


def _quantise(model: Any, plain: Cache, kv: Quantisation, model_type: str) -> Cache:
    """From now on `model`'s caches keep per-token KV as `kv` says; a cache of one token of that kind.

    plain  one with a token in it. Raises ModelError, naming what is in the way.
    """
    if reason := quantise_obstacle(plain, kv):
        raise _refusal(model_type, kv, reason)
    fresh = checks.cache_maker(model)
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
