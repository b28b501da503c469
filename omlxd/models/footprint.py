"""Estimates a model's memory from config.json and the headers of its weights.

Once it runs, front/engines/names/model_book.py keeps a factor for it.
"""

from __future__ import annotations

import importlib.metadata
import math
import os
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import msgspec

from ..common.files import read_small
from ..common.units import CPU_PREFILL_CHUNK, DRAFT_CONTEXT, PREFILL_CHUNK, available_ram
from ..errors import ModelError
from .config.json_files import BrokenJSON, read_json
from .resolve import Tensor, WeightIndex, parse_config, read_tensors

PROCESS_BYTES = 200 * 10**6
"""Bytes of an engine without a model: Python, MLX and its libraries."""

FLOAT32_FRACTION = 0.5
"""Part of free memory up to which a CPU's weights are made float32. The rest is for KV."""

VISION_FAMILIES = frozenset(
    {
        *("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe", "glm4v"),
        *("gemma3", "gemma4", "lfm2_vl", "lfm2-vl", "mistral3", "pixtral"),
        *("idefics3", "smolvlm", "internvl_chat", "internvl"),
    }
)
"""Families whose images get mlx-vlm's values, whatever is cached: tests/engine/vision. Another family may
look both ways in its prompt, or keep positions that nothing here knows.
"""
PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")
"""Settings of a vision model's image processor."""
VLM_VERSION = "0.7.10"
"""Version of mlx-vlm."""
INSTALL_VISION = f"`pip install 'omlxd[vision]'`, then `pip install --no-deps mlx-vlm=={VLM_VERSION}`"

RESERVE_FRACTION = 0.05
RESERVE_BYTES = 2 << 30


def reserve_of(total: int) -> int:
    """Return the bytes of a device's `total` that other programs keep."""
    return min(RESERVE_BYTES, int(total * RESERVE_FRACTION))


_GEMMA3 = {
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "sliding_window_pattern": 6,
    "vocab_size": 262208,
}
"""Values that Google's configs leave out, as their classes' default."""
_DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
_HEADER_BYTES = {"F32": 4, "F16": 2, "BF16": 2}


class Tower(msgspec.Struct, frozen=True):
    """Memory of a vision tower at work.

    values  numbers that are a patch's pixels
    patch   bytes of a patch's activations, in its widest layer
    scores  bytes of one patch's scores with another
    mask    bytes of a mask between them, which some families make
    """

    values: int = 1
    patch: int = 0
    scores: int = 0
    mask: int = 0

    def working(self, values: int, tiles: int, fused: bool) -> int:
        """Return the bytes for an image of so many numbers in all its tiles, which don't see each other.

        fused  attention keeps no scores
        """
        patches = -(-values // self.values)
        pair = self.mask + (0 if fused else self.scores)
        return patches * (self.patch + patches // tiles * pair)


class Footprint(msgspec.Struct, frozen=True):
    """Bytes, but for `context_length` in tokens.

    weights       of the weight files
    kv_per_token  of the KV that each token of a sequence adds
    kv_fixed      of what a sequence keeps whatever its length: full windows, recurrent state
    working       while a GPU computes a chunk of a prompt, but for the scores of its attention
    pair          of the scores of one token with another, in a layer of full attention
    blind         why a vision model takes no images; "": it takes them; None: it is a text model
    tower         what that takes to see an image
    layers, hidden_size, vocab_size  of its language model
    experts       parameters of all experts among which a router chooses; a token reads `chosen` of them
    table         parameters of an embedding table that is no head as well: a token reads one row
    """

    weights: int
    kv_per_token: int
    kv_fixed: int
    working: int
    context_length: int | None
    pair: int = 0
    blind: str | None = None
    tower: Tower = Tower()
    layers: int = 0
    hidden_size: int = 0
    vocab_size: int = 0
    experts: int = 0
    chosen: float = 1.0
    table: int = 0

    def loading(self, backend: str = "") -> int:
        """Return the bytes to load the model and answer briefly. `backend`: `cpu` has shorter passes; "":
        unknown.
        """
        chunk = CPU_PREFILL_CHUNK if backend == "cpu" else PREFILL_CHUNK
        working = self.working * chunk // PREFILL_CHUNK
        return PROCESS_BYTES + self.weights + working + self.sequence(PREFILL_CHUNK)

    def with_draft(self, draft: Footprint) -> Footprint:
        """Add a draft model."""
        return msgspec.structs.replace(
            self,
            weights=self.weights + draft.weights,
            kv_fixed=self.kv_fixed + draft.sequence(DRAFT_CONTEXT),
        )

    def part(self, here: int, ranks: int) -> Footprint:
        """Return what `here` of `ranks` that share the model take."""
        if here == ranks:
            return self
        shared = ("weights", "kv_per_token", "kv_fixed", "pair")
        return msgspec.structs.replace(
            self, **{name: math.ceil(getattr(self, name) * here / ranks) for name in shared}
        )

    def sequence(self, tokens: int) -> int:
        """Return the bytes of one sequence of so many tokens, without shared ones."""
        return self.kv_fixed + tokens * self.kv_per_token

    def context_in(self, room: int, backend: str = "") -> int:
        """Return the tokens that one sequence may have if all of the model takes `room` bytes; 0: it does not
        load there.
        """
        left = room - self.loading(backend)
        if left < 0 or not self.kv_per_token:
            return 0 if left < 0 else self.context_length or 0
        tokens = PREFILL_CHUNK + left // self.kv_per_token
        return min(tokens, self.context_length or tokens)


def footprint(folder: Path, float32: bool = False) -> Footprint:
    """Estimate the model in `folder`; values missing in its config count as nothing.

    float32  its weights are made float32 when it is loaded (engine/mlx_adapter/model/load.py)
    """
    config = read_config(folder)
    weights = _float32_bytes(folder, config) if float32 else weight_bytes(folder)
    element = 4 if float32 else _element(folder, config)
    return footprint_of(config, weights, element, vision_obstacle(folder, config))


def footprint_of(config: dict[str, Any], weights: int, element: int, blind: str | None = None) -> Footprint:
    """Estimate a model of `weights` bytes by its config, which computes with numbers of `element` bytes."""
    text = _text(config)
    experts, chosen = _experts(text)
    tied = {**text, **config}.get("tie_word_embeddings", True)
    return Footprint(
        weights=weights,
        kv_per_token=_token_kv(text) * element,
        kv_fixed=_kv_fixed(text, element),
        working=_working(text, element),
        context_length=_context(config),
        pair=_int(text, "num_attention_heads", "n_head") * element if "full" in _kinds(text) else 0,
        blind=blind,
        tower=_tower(config, element),
        layers=_layers(text),
        hidden_size=_hidden(text),
        vocab_size=_int(text, "vocab_size"),
        experts=experts,
        chosen=chosen,
        table=0 if tied else _int(text, "vocab_size") * _hidden(text),
    )


def expected(stored: Footprint, float32: Footprint | None, backend: str) -> Footprint:
    """Return the footprint of a load on `backend` now: float32 weights where a CPU has room for them.

    float32  None: the owner wants the weights as stored
    """
    if float32 is None or backend != "cpu":
        return stored
    return float32 if float32.loading(backend) <= available_ram() * FLOAT32_FRACTION else stored


def likely_backend() -> str:
    """Guess `cpu` or "" from this machine and the installed MLX; an engine knows."""
    if sys.platform != "linux":
        return ""
    names = (name for name in ("mlx-cuda-12", "mlx-cuda-13") if _is_installed(name))
    return "" if Path("/dev/nvidia0").exists() and any(names) else "cpu"


def _is_installed(name: str) -> bool:
    try:
        return bool(importlib.metadata.distribution(name))
    except importlib.metadata.PackageNotFoundError:
        return False


def has_vlm() -> bool:
    """Return whether mlx-vlm is installed, with what its models need."""
    return all(map(find_spec, ("mlx_vlm", "PIL", "requests")))


def vision_obstacle(folder: Path, config: dict[str, Any]) -> str | None:
    """Say why the vision model in `folder` takes no images; "": it does; None: it is a text model.

    A folder whose config names a tower, but without the tower's weights, holds a text model.
    """
    if not isinstance(config.get("vision_config"), dict) or not _holds_tower(folder):
        return None
    if (family := str(config.get("model_type"))) not in VISION_FAMILIES:
        return f"images of {family} models are not supported"
    if not any(os.path.isfile(folder / name) for name in PROCESSOR_FILES):
        return "its folder has no preprocessor_config.json"
    if config.get("model_file"):
        return "its config.json names a Python file, and code of a model is never run"
    if not has_vlm():
        return f"mlx-vlm is not installed: {INSTALL_VISION}"
    return ""


ENCODERS = frozenset({"bert", "modernbert", "xlm-roberta"})
_POOLED = frozenset({"qwen3", "gemma3_text", "lfm2", "ministral3"})
"""Decoders that embed, if their folder says how to pool, or is named so."""
ModelKind = Literal["chat", "embedding", "rerank"]


def kind_of(folder: Path, config: dict[str, Any]) -> ModelKind:
    """Return what the model in `folder` does: chat, embed, or score pairs of texts."""
    family, names = str(config.get("model_type")), config.get("architectures")
    if family in ENCODERS:
        scores = isinstance(names, list) and any(str(n).endswith("ForSequenceClassification") for n in names)
        return "rerank" if scores else "embedding"
    hub = folder.parent.name == "snapshots"
    name = (folder.parent.parent if hub else folder).name.lower()
    pools = os.path.isfile(folder / "1_Pooling" / "config.json") or "embed" in name
    return "embedding" if family in _POOLED and pools and "rerank" not in name else "chat"


def _holds_tower(folder: Path) -> bool:
    """Return whether a weight's name is one of a vision tower."""
    try:
        index = read_json(folder / "model.safetensors.index.json", WeightIndex)
        names = iter(index.weight_map)
    except (OSError, BrokenJSON):
        names = (name for file in weight_files(folder) for name in _header(file))
    return any("vision" in name or "visual" in name for name in names)


def read_config(folder: Path) -> dict[str, Any]:
    """Read config.json; empty when it can't be read."""
    try:
        config = parse_config(read_small(folder / "config.json"))
    except (OSError, ValueError, RecursionError):
        return {}
    return config if isinstance(config, dict) else {}


def weight_files(folder: Path) -> list[Path]:
    """Return the weight files to load: Mistral's folders hold the weights in its own layout too."""
    files = list(folder.glob("[!.]*.safetensors"))  # Not macOS's `._` files.
    return [file for file in files if not file.name.startswith("consolidated")] or files


def weight_bytes(folder: Path) -> int:
    """Return the bytes of the weight files; 0 when there are none to be read."""
    try:
        return sum(file.stat().st_size for file in weight_files(folder))
    except OSError:
        return 0


def _text(config: dict[str, Any]) -> dict[str, Any]:
    """Return the language model's part of a config."""
    inner = config.get("text_config")
    left_out = _GEMMA3 if config.get("model_type") == "gemma3" else {}
    return {**left_out, **config, **inner} if isinstance(inner, dict) else config


def _context(config: dict[str, Any]) -> int | None:
    names = ("max_position_embeddings", "max_sequence_length", "n_positions", "seq_length")
    return _int(config, *names) or _int(_text(config), *names) or None


def _int(config: dict[str, Any], *names: str, default: int = 0) -> int:
    """Return the first of `names` that holds a positive integer."""
    for name in names:
        value = config.get(name)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return default


def _element(folder: Path, config: dict[str, Any]) -> int:
    """Return the bytes of a number that the model computes with, as its norms: nobody quantises those."""
    for file in sorted(weight_files(folder)):
        for name, tensor in _header(file).items():
            if "norm" in name and tensor.dtype in _HEADER_BYTES:
                return _HEADER_BYTES[tensor.dtype]
    return element_of(config)


def element_of(config: dict[str, Any]) -> int:
    """Return the bytes of a number that the model computes with, by what its config says."""
    text = _text(config)
    name = config.get("torch_dtype") or config.get("dtype") or text.get("torch_dtype") or text.get("dtype")
    return _DTYPE_BYTES.get(str(name).removeprefix("torch."), 2)


def _float32_bytes(folder: Path, config: dict[str, Any]) -> int:
    """Return the bytes of float32 weights; stacks of quantised experts stay as they are."""
    quantization = config.get("quantization")
    options: dict[str, Any] = quantization if isinstance(quantization, dict) else {}
    total = 0
    for file in weight_files(folder):
        tensors = _header(file)
        packed = {
            path: len(tensors[path + ".weight"].shape) == 2
            for name in tensors
            if (path := name.removesuffix(".scales")) != name and path + ".weight" in tensors
        }
        awq = {name.removesuffix(".qweight") for name in tensors if name.endswith(".qweight")}
        for name, tensor in tensors.items():
            path, _, part = name.rpartition(".")
            if path in awq and part in ("qweight", "scales", "qzeros"):
                total += 4 * 8 * math.prod(tensor.shape) if part == "qweight" else 0  # 4 bits: 8 a word.
            elif packed.get(path) and part in ("weight", "scales", "biases"):
                own = options.get(path)
                group = _int(
                    {**options, **own} if isinstance(own, dict) else options, "group_size", default=64
                )
                total += 4 * group * math.prod(tensor.shape) if part == "scales" else 0
            elif tensor.dtype in _HEADER_BYTES:
                total += 4 * math.prod(tensor.shape)
            else:
                start, end = tensor.data_offsets
                total += end - start
    return total


def _header(file: Path) -> dict[str, Tensor]:
    """Return a weight file's tensors by name; empty when it can't be read."""
    try:
        return read_tensors(file)
    except (OSError, ModelError):
        return {}


# --------------------------------------------------------------------------- layers

_NAMED = {
    "full_attention": "full",
    "attention": "full",
    "qwen_sparse_attention": "full",
    "deepseek_sparse_attention": "full",
    "sliding_attention": "window",
    "chunked_attention": "window",
    "*": "full",
    "-": "none",
    "E": "none",
}
"""Config's name of a layer → what it keeps; any other name is recurrent."""

MOST_LAYERS = 512
"""Layers that are read at most; the largest models have some 130, but a config may say anything."""


def _kinds(text: dict[str, Any]) -> Sequence[str]:
    """Return what each layer keeps: `full`, `window`, `state` or `none`."""
    layers = min(_layers(text), MOST_LAYERS)
    kinds = list(_layer_kinds(text, layers))
    return kinds[: len(kinds) - _int(text, "num_kv_shared_layers")]  # The last ones read what others keep.


def _layer_kinds(text: dict[str, Any], layers: int) -> Sequence[str]:
    pattern = text.get("hybrid_override_pattern")
    if isinstance(pattern, list | str):  # a letter a layer, MLPs counted
        return [_NAMED.get(str(letter), "state") for letter in pattern]
    named = text.get("layer_types")
    if isinstance(named, list) and len(named) >= layers:
        return [_NAMED.get(str(name), "state") for name in named[:layers]]
    blocks = text.get("block_types")
    if isinstance(blocks, list) and blocks:
        return ["window" if blocks[i % len(blocks)] == "attention" else "state" for i in range(layers)]
    if (full := _full_layers(text)) is not None:
        return ["full" if index in full else "state" for index in range(layers)]
    if interval := _int(text, "full_attention_interval"):
        return ["full" if (index + 1) % interval == 0 else "state" for index in range(layers)]
    if period := _int(text, "attn_layer_period"):
        offset = _int(text, "attn_layer_offset")
        return ["full" if index % period == offset else "state" for index in range(layers)]
    if str(text.get("model_type", "")).startswith(("mamba", "rwkv")):
        return ["state"] * layers
    if text.get("sliding_window") and (pattern := _int(text, "sliding_window_pattern")):
        return ["full" if (index + 1) % pattern == 0 else "window" for index in range(layers)]
    return ["full"] * layers


def _layers(text: dict[str, Any]) -> int:
    return _int(text, "num_hidden_layers", "n_layer", "n_layers")


def _hidden(text: dict[str, Any]) -> int:
    return _int(text, "hidden_size", "n_embd")


_EXPERT_STEPS = ("decoder_sparse_step", "interleave_moe_layer_step", "expert_layer_period")
"""Config's names of how many layers have one with experts among them."""


def _experts(text: dict[str, Any]) -> tuple[int, float]:
    """Return the parameters of all routed experts, three matrices each, and the part that a token reads."""
    count = _int(text, "num_experts", "num_local_experts", "n_routed_experts")
    inner = _int(text, "moe_intermediate_size", "intermediate_size")
    chosen = _int(text, "num_experts_per_tok", "num_experts_per_token", "top_k_experts")
    if not count or not chosen:
        return 0, 1.0
    layers = min(_layers(text), MOST_LAYERS) - _int(text, "first_k_dense_replace")
    layers //= _int(text, *_EXPERT_STEPS, default=1)
    return max(0, layers) * count * 3 * _hidden(text) * inner, min(1.0, chosen / count)


def _full_layers(text: dict[str, Any]) -> set[int] | None:
    """Return indexes of layers with full attention, where a config lists them."""
    linear = text.get("linear_attn_config")
    for listed, first in (
        (text.get("full_attn_idxs"), 0),
        (linear.get("full_attn_layers") if isinstance(linear, dict) else None, 1),
    ):
        if isinstance(listed, list):
            return {index - first for index in listed if isinstance(index, int)}
    return None


def _token_kv(text: dict[str, Any]) -> int:
    """Return the numbers that one token adds to all layers."""
    if not (ratios := _ratios(text)):
        return _kinds(text).count("full") * _layer_kv(text)
    dim, index = _int(text, "head_dim"), _int(text, "index_head_dim")
    return sum((dim + index) // 4 if ratio == 4 else dim // 128 for ratio in ratios if ratio in (4, 128))


def _ratios(text: dict[str, Any]) -> list[Any]:
    """Return how many tokens each layer of DeepSeek V4 keeps as one, beside a window."""
    ratios = text.get("compress_ratios")
    return ratios[:MOST_LAYERS] if isinstance(ratios, list) else []


def _layer_kv(text: dict[str, Any], kind: str = "full") -> int:
    """Return the numbers that one token adds to one attention layer."""
    if rank := _int(text, "kv_lora_rank"):
        return rank + _int(text, "qk_rope_head_dim") + 2 * _int(text, "index_head_dim")
    heads = _int(text, "num_attention_heads", "n_head", default=1)
    dim = _int(text, "head_dim", default=_hidden(text) // heads)
    kv_heads = _int(text, "num_key_value_heads", default=heads)
    if kind == "full":
        dim = _int(text, "global_head_dim", default=dim)
        if text.get("attention_k_eq_v"):
            kv_heads = _int(text, "num_global_key_value_heads", default=kv_heads)
    values = 0 if _ratios(text) else dim  # Or keys are the values, too.
    return kv_heads * (dim + values) + _int(text, "indexer_head_dim")


def _kv_fixed(text: dict[str, Any], element: int) -> int:
    kinds = ["window" for _ in _ratios(text)] or _kinds(text)
    window = _int(text, "sliding_window", "attention_window_size")
    windows = kinds.count("window") * window * _layer_kv(text, "window") * element
    # Models that put a recurrent layer beside each attention have no name for it.
    states = kinds.count("state") or (len(kinds) if "mamba_d_ssm" in text else 0)
    # Recurrent state is kept in float32 by most.
    return windows + states * 4 * _state_size(text)


def _state_size(text: dict[str, Any]) -> int:
    """Return the numbers in a recurrent layer's state: a key by value matrix a head, and a convolution's
    past.
    """
    hidden = _hidden(text)
    if "conv_L_cache" in text:
        return hidden * (_int(text, "conv_L_cache") - 1)
    if "conv1d_width" in text:
        return _int(text, "lru_width", default=hidden) * _int(text, "conv1d_width")
    if "decay_low_rank_dim" in text:
        return hidden * (_int(text, "head_dim") + 2)
    linear = text.get("linear_attn_config")
    if isinstance(linear, dict):
        heads, dim = _int(linear, "num_heads"), _int(linear, "head_dim")
        return heads * dim * (dim + 3 * (_int(linear, "short_conv_kernel_size") - 1))
    heads = _int(text, "linear_num_value_heads", "mamba_num_heads", "mamba_n_heads", "num_heads")
    key = _int(text, "linear_key_head_dim", "mamba_d_state", "ssm_state_size", "state_size")
    past = max(0, _int(text, "linear_conv_kernel_dim", "mamba_d_conv", "conv_kernel") - 1)
    if not heads:  # the first Mamba: one matrix for all
        inner = hidden * _int(text, "mamba_expand", "expand", default=2)
        return inner * (key + past)
    value = _int(text, "linear_value_head_dim", "mamba_head_dim", "mamba_d_head", "head_dim")
    groups = _int(text, "linear_num_key_heads", "mamba_n_groups", "n_groups")
    return heads * key * value + past * (heads * value + 2 * groups * key)


def _tower(config: dict[str, Any], element: int) -> Tower:
    """Estimate a tower; those of 13 families, 2 layers and width 256, took 0.7 to 0.97 of it on a CPU."""
    vision = config.get("vision_config")
    if not isinstance(vision, dict):
        return Tower()
    hidden = _int(vision, "embed_dim", "hidden_size")  # Qwen2-VL's `hidden_size` is the language model's.
    inner = _int(vision, "intermediate_size", default=4 * hidden)
    patch = _int(vision, "patch_size", default=14)
    values = 3 * patch * patch * _int(vision, "temporal_patch_size", default=1)
    return Tower(
        values=values,
        patch=(14 * hidden + 5 * inner + 2 * values) * element,
        scores=4 * _int(vision, "num_heads", "num_attention_heads", default=1),
        mask=element if vision.get("model_type") == "pixtral" else 0,
    )


def _working(text: dict[str, Any], element: int) -> int:
    """Return the bytes of a chunk's activations in the widest layer, and of one position's logits."""
    hidden = _hidden(text)
    experts = max(1, _int(text, "num_experts_per_tok"))
    routed = experts * _int(text, "moe_intermediate_size")
    inner = max(_int(text, "intermediate_size", "n_inner", default=4 * hidden), routed)
    heads = _int(text, "num_attention_heads", default=1)
    dim = _int(text, "head_dim", default=hidden // heads)
    width = 4 * hidden + 3 * inner + 3 * heads * dim
    return PREFILL_CHUNK * width * element + 8 * _int(text, "vocab_size")
