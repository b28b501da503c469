"""Vision models, by mlx-vlm: which folder holds one, its model, its image processor.

Pinned to mlx-vlm 0.7.10. What this file relies on, each tested in tests/engine/vision:
- `get_input_embeddings(tokens, pixel_values, mask=…)` of the tokens of one image alone gives the embeddings
  that they have in any prompt; without pixels it gives those of text;
- a language model with `get_rope_index` takes `position_ids` of shape (3, rows, tokens) for exactly the
  tokens of a pass, and keeps positions of its own in `_position_ids` and `_rope_deltas` unless reset;
- Qwen3-VL takes `visual_pos_masks` and `deepstack_visual_embeds` of exactly the tokens of a pass;
- a tower computes an image alone as it does beside others;
- its KVCache and RotatingKVCache keep what mlx-lm's do.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
import msgspec
import numpy as np
from mlx_lm.models.cache import CacheList, KVCache, RotatingKVCache

from .....common.files import read_small
from .....errors import ModelError
from .....models.footprint import PROCESSOR_FILES, VLM_VERSION, read_config, vision_obstacle
from ...attention import hooks as attention
from ...attention.backend import current
from ...cache.chosen import LatentKVCache, PooledKVCache, QSAKVCache, attend_by_rows
from ...cache.kinds import Cache, add_arrays_kind, leaves, spec_of
from ...cache.rows import RowBatch
from . import tower

log = logging.getLogger(__name__)

_FEATURES = ("inputs_embeds", "per_layer_inputs", "visual_pos_masks", "deepstack_visual_embeds")

Pixels = Mapping[str, Any]
"""What a processor makes of one image: `pixel_values` and its shape in the family's own words, NumPy arrays
or lists of them."""


# --------------------------------------------------------------------------- which folder holds one


def blindness(folder: Path) -> str | None:
    """As `vision_obstacle`; also for a family that mlx-vlm doesn't have."""
    config = read_config(folder)
    if (obstacle := vision_obstacle(folder, config)) == "":
        try:
            _model_package(config)
        except (ImportError, ValueError, KeyError) as error:
            return f"mlx-vlm {VLM_VERSION} has no such family: {error}"
    return obstacle


def import_vlm(name: str) -> ModuleType:
    """A module of mlx-vlm, without running its `__init__`, which imports servers, converters and training."""
    if "mlx_vlm" not in sys.modules:
        spec = importlib.util.find_spec("mlx_vlm")
        if spec is None:
            raise ImportError("mlx-vlm is not installed")
        log.info("importing mlx-vlm for this model: slow the first time, and on a busy machine")
        sys.modules["mlx_vlm"] = importlib.util.module_from_spec(spec)
    return importlib.import_module(f"mlx_vlm.{name}")


def _model_package(config: dict[str, Any]) -> ModuleType:
    take_attention()
    return import_vlm("utils").get_model_and_args(dict(config))[0]


def take_attention() -> None:
    """Let models of mlx-vlm that are imported from now on attend as mlx-lm's do."""
    attention.install()
    # Before models take the function from there.
    cast(Any, import_vlm("models.base")).scaled_dot_product_attention = attention.attend


# --------------------------------------------------------------------------- the model


@dataclass(slots=True, frozen=True)
class Features:
    """What an image gives the language model, evaluated.

    embeds     (tokens, hidden)
    visual     (tokens,), NumPy booleans: which of the tokens are the tower's; None: no deepstack
    deepstack  of each layer that adds some: (tower's tokens, hidden)
    """

    embeds: mx.array
    visual: np.ndarray | None = None
    deepstack: tuple[mx.array, ...] = ()

    @property
    def nbytes(self) -> int:
        return self.embeds.nbytes + sum(layer.nbytes for layer in self.deepstack)

    @property
    def finite(self) -> bool:
        return all(bool(mx.isfinite(each).all()) for each in (self.embeds, *self.deepstack))


class _Packed(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """`Features` as bytes. widths: of `embeds`, then of each layer of `deepstack`; all of one dtype."""

    dtype: str
    widths: list[int]
    visual: bytes
    data: bytes


_DTYPES = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}


def pack_features(features: Features) -> bytes:
    arrays = [features.embeds, *features.deepstack]
    packed = msgspec.msgpack.encode(
        _Packed(
            str(features.embeds.dtype).rpartition(".")[2],
            [each.shape[-1] for each in arrays],
            features.visual.tobytes() if features.visual is not None else b"",
            b"".join(np.array(each.view(mx.uint8)).tobytes() for each in arrays),
        )
    )
    current().check_work()  # They are going to be written.
    return packed


def unpack_features(data: bytes, tokens: int) -> Features:
    """Inverse of `pack_features`, for an image of so many tokens. Raises ValueError."""
    packed = msgspec.msgpack.decode(data, type=_Packed)
    dtype = _DTYPES.get(packed.dtype)
    visual = np.frombuffer(packed.visual, bool) if packed.visual else None
    rows = [tokens, *[int(visual.sum()) if visual is not None else 0] * (len(packed.widths) - 1)]
    if dtype is None or not packed.widths or (visual is not None and len(visual) != tokens):
        raise ValueError("these are no features of it")
    sizes = [count * width * dtype.size for count, width in zip(rows, packed.widths, strict=True)]
    if sum(sizes) != len(packed.data):
        raise ValueError("these are no features of it")
    arrays, at = [], 0
    for count, size in zip(rows, sizes, strict=True):
        flat = mx.array(np.frombuffer(packed.data, np.uint8, size, at))
        arrays.append(flat.view(dtype).reshape(count, -1))
        at += size
    mx.eval(arrays)
    return Features(arrays[0], visual, tuple(arrays[1:]))


@dataclass(slots=True, frozen=True)
class Piece:
    """Tokens `start` to `stop` of an image, from token `at` of a pass on."""

    at: int
    features: Features
    start: int
    stop: int


class VisionModel(nn.Module):
    """An mlx-vlm model that is called as mlx-lm's are: model(tokens, cache=…) gives logits.

    whole_images  an image's tokens see each other, so that no pass may end within one
    pause         gets the result of each part of a tower (tower.py)

    A pass over an image's tokens also takes `pass_inputs`. Nothing of a request stays in it.
    """

    def __init__(self, vlm: Any):
        super().__init__()
        self.vlm = vlm
        self._mrope = hasattr(vlm.language_model, "get_rope_index")
        names = ("image_token_id", "image_token_index", "video_token_id", "video_token_index")
        self.whole_images = _let_images_see_themselves(vlm.language_model)
        _let_rows_mask_themselves(vlm.language_model)
        self.pause: tower.Pause = lambda result: None
        self._visual_ids = [id for name in names if isinstance(id := getattr(vlm.config, name, None), int)]

    @property
    def layers(self) -> Any:
        return self.vlm.layers

    @property
    def tower_layers(self) -> list[Any]:
        """The layers of the vision tower."""
        modules = dict(self.vlm.named_modules()).items()
        towers = [module for name, module in modules if not name.startswith("language_model")]
        lists = [module.get(name) for module in towers for name in ("blocks", "layers", "layer")]
        return [layer for each in lists if isinstance(each, list) for layer in each]

    @property
    def mrope(self) -> bool:
        """Whether an image's tokens have places in three dimensions, and what follows it is moved by that."""
        return self._mrope

    def make_cache(self) -> Cache:
        return own_cache(self.vlm.language_model)

    def __call__(
        self, tokens: mx.array, cache: Any = None, deltas: Sequence[int] | None = None, **inputs: Any
    ) -> mx.array:
        """Logits of `tokens` (rows, tokens).

        deltas  of each row: by how much its images move its positions; None: by nothing
        inputs  as `pass_inputs` gives them
        """
        language = self.vlm.language_model
        if self._mrope:
            language._position_ids = language._rope_deltas = None
            inputs.setdefault("position_ids", positions(cache, tokens.shape, deltas))
        return language(tokens, cache=cache, **inputs).logits

    # ----------------------------------------------------------------- images

    def see_image(self, tokens: Sequence[int], pixels: Pixels) -> Features:
        """Run the tower. `tokens`: those that stand for the image in a prompt, all of them."""
        with tower.in_parts(self.pause):
            out = self._embed(tokens, **{name: _arrays(value) for name, value in pixels.items()})
        # Some towers keep the pixels' float32, and KV must have the type that text gives it.
        dtype = self._embed(tokens[:1])["inputs_embeds"].dtype
        layers = out["deepstack_visual_embeds"]
        deepstack = tuple(layer.astype(dtype) for layer in layers) if layers is not None else ()
        visual = np.array(out["visual_pos_masks"][0]) if deepstack else None
        features = Features(mx.contiguous(out["inputs_embeds"][0].astype(dtype)), visual, deepstack)
        mx.eval(features.embeds, *deepstack)
        return features

    def image_places(self, tokens: Sequence[int], grid: np.ndarray) -> np.ndarray:
        """Positions (3, tokens) of an image's tokens, from the first one's on; text follows the largest."""
        # Some families look for an image behind this token.
        start = getattr(self.vlm.config, "vision_start_token_id", 0)
        ids = mx.array([[start, *tokens]])
        places, _ = self.vlm.language_model.get_rope_index(ids, mx.array(grid), None, mx.ones_like(ids))
        return np.array(places, np.int32)[:, 0, 1:] - 1

    def pass_inputs(
        self,
        tokens: Sequence[int],
        start: int,
        pieces: Sequence[Piece],
        spans: Sequence[tuple[int, int]],
    ) -> dict[str, Any]:
        """Embeddings of a pass over the last of `tokens`, from `start` on.

        pieces  of images in the pass, in order
        spans   of all images of the prompt
        """
        if not pieces:
            return {}
        out = self._embed(tokens[start:])
        embeds, at, joined = out["inputs_embeds"], 0, []
        for piece in pieces:
            joined += [embeds[:, at : piece.at], piece.features.embeds[None, piece.start : piece.stop]]
            at = piece.at + piece.stop - piece.start
        inputs = {"inputs_embeds": mx.concatenate([*joined, embeds[:, at:]], axis=1)}
        if out["per_layer_inputs"] is not None:
            inputs["per_layer_inputs"] = out["per_layer_inputs"]
        if self.whole_images:
            types = self._is_visual(np.array(tokens), spans)
            inputs["mm_token_type_ids"] = mx.array(types[None].astype(np.int32))
        return inputs | _deepstack(len(tokens) - start, pieces)

    def _is_visual(self, tokens: np.ndarray, spans: Sequence[tuple[int, int]]) -> np.ndarray:
        """(tokens,), booleans: which are the tower's."""
        image = np.zeros(len(tokens), dtype=bool)
        for start, stop in spans:
            image[start:stop] = True
        return image & np.isin(tokens, self._visual_ids)

    def _embed(self, tokens: Sequence[int], **pixels: Any) -> dict[str, Any]:
        ids = mx.array([tokens])
        pixels.setdefault("pixel_values", None)
        features = self.vlm.get_input_embeddings(ids, mask=mx.ones_like(ids), **pixels)
        return {name: getattr(features, name) for name in _FEATURES}


def _deepstack(length: int, pieces: Sequence[Piece]) -> dict[str, Any]:
    """Features that some layers add to an image's tokens."""
    if not pieces[0].features.deepstack:
        return {}
    mask = np.zeros((1, length), dtype=bool)
    layers: list[list[mx.array]] = [[] for _ in pieces[0].features.deepstack]
    for piece in pieces:
        visual = piece.features.visual
        assert visual is not None
        mask[0, piece.at : piece.at + piece.stop - piece.start] = visual[piece.start : piece.stop]
        first, last = int(visual[: piece.start].sum()), int(visual[: piece.stop].sum())
        for rows, layer in zip(layers, piece.features.deepstack, strict=True):
            rows.append(layer[first:last])
    return {
        "visual_pos_masks": mx.array(mask),
        "deepstack_visual_embeds": [mx.concatenate(rows) for rows in layers],
    }


def _let_images_see_themselves(language: Any) -> bool:
    """Whether an image's tokens see each other (Gemma 4); lets them do so behind a cached prefix too.

    mlx-vlm does it only in a pass over a whole prompt, whose mask is square: another pass is causal.
    """
    text: Any = getattr(language, "model", None)
    if getattr(getattr(text, "config", None), "use_bidirectional_attention", None) != "vision":
        return False

    def overlay(base_mask: mx.array, types: mx.array) -> mx.array:
        """`types` (1, tokens): of all tokens up to the pass's end."""
        blocks = text._block_sequence_ids_for_mask(types)
        queries, keys = (blocks[:, -length:] for length in base_mask.shape[-2:])
        same = (queries[:, :, None] != -1) & (queries[:, :, None] == keys[:, None])
        return base_mask | same[:, None]

    text._apply_blockwise_bidirectional_overlay = overlay
    return True


def _let_rows_mask_themselves(language: Any) -> None:
    """Let layers of a batch whose rows keep arrays of their own say what they hide (cache/rows.py).

    mlx-vlm's Gemma 4 asks its windows for arrays behind the first tokens. No image is in such a pass.
    """
    text: Any = getattr(language, "model", None)
    if (own := getattr(text, "_make_masks", None)) is None:
        return

    def masks(h: mx.array, cache: Sequence[Any], types: mx.array | None = None) -> list[Any]:
        if types is not None or not any(isinstance(layer, RowBatch) for layer in cache):
            return own(h, cache, types)
        kinds = [layer.layer_type for layer in text.layers]
        windows = {"sliding_attention": text.window_size}
        made = {  # By the first layer of each kind, since the last ones may read others' KV.
            kind: cache[kinds.index(kind)].make_mask(h.shape[1], windows.get(kind)) for kind in set(kinds)
        }
        return [made[kind] for kind in kinds]

    text._make_masks = masks


def positions(cache: Any, shape: tuple[int, ...], deltas: Sequence[int] | None = None) -> mx.array:
    """(3, rows, tokens): the places after what `cache` holds, all three dimensions alike.

    deltas  as `VisionModel.__call__` has them
    """
    offset = next(leaf.offset for _, leaf in leaves(cache) if hasattr(leaf, "offset"))
    start = mx.array(offset).reshape(-1, 1)
    if deltas is not None:
        start = start + mx.array(list(deltas)).reshape(-1, 1)
    return mx.broadcast_to((start + mx.arange(shape[1]))[None], (3, *shape))


def own_cache(language: Any) -> Cache:
    """An empty cache of a language model of mlx-vlm: of mlx-lm's classes, if all of its layers have such."""
    made = import_vlm("models.cache").make_prompt_cache(language)
    module = sys.modules[type(language).__module__]
    own = [_chosen(layer, module) or _own(layer) for layer in made]
    return own if all(spec_of(leaf) is not None for _, leaf in leaves(own)) else made


def _chosen(layer: Any, module: Any) -> Any:
    """The cache of a layer that chooses what it looks at; None: it is no such, as far as we know."""
    if module.__name__ == "mlx_vlm.models.qwen4_exp.language" and isinstance(layer, module.QSAKVCache):
        attend_by_rows(module)
        return QSAKVCache()
    if module.__name__ == "mlx_vlm.models.glm5_next.language" and isinstance(layer, module.CacheList):
        attend_by_rows(module)
        return PooledKVCache(layer[2].ratio) if len(layer.caches) == 4 else LatentKVCache()
    return None


def _own(layer: Any) -> Any:
    """mlx-lm's cache in place of mlx-vlm's of the same kind."""
    theirs = import_vlm("models.cache")
    if type(layer) is theirs.CacheList:
        return CacheList(*map(_own, layer.caches))
    if type(layer) is theirs.KVCache:
        return KVCache()
    if type(layer) is theirs.RotatingKVCache:
        return RotatingKVCache(max_size=layer.max_size, keep=layer.keep)
    if type(layer) is theirs.ArraysCache:
        add_arrays_kind(theirs.ArraysCache)
    return layer


def _arrays(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return mx.array(value)
    return [_arrays(item) for item in value] if isinstance(value, list) else value


def load_vision_model(folder: Path) -> tuple[VisionModel, dict[str, Any]]:
    """The model, its weights not read yet, and its config. Raises what mlx-vlm raises."""
    utils = import_vlm("utils")
    tower.cut_attention()
    return VisionModel(utils.load_model(folder, lazy=True)), utils.load_config(folder)


# --------------------------------------------------------------------------- its image processor


class ImageProcessor:
    """One model's image processor. Thread-safe; nothing of it runs on the engine thread.

    placeholder  the token, as text and as id, that a chat template writes for an image
    digest       of its settings
    """

    def __init__(self, folder: Path, shown: str):
        """`shown`: what the chat template makes of a message with an image. Raises ModelError."""
        self._utils = import_vlm("utils")
        self._lock = threading.Lock()
        settings = sha256()
        for name in PROCESSOR_FILES:
            if (folder / name).is_file():
                settings.update(read_small(folder / name))
        self.digest = settings.digest()
        try:
            self._processor = self._utils.load_processor(
                folder, False, trust_remote_code=False, local_files_only=True
            )
            image_processor = self._utils.load_image_processor(folder)
        except Exception as error:  # A processor's own code, and what the folder says.
            raise ModelError(f"its image processor can't be made: {error}") from error
        if image_processor is not None:
            self._processor.image_processor = image_processor
        self.placeholder, self.placeholder_id = self._find_placeholder(shown)

    def _find_placeholder(self, shown: str) -> tuple[str, int]:
        tokenizer = getattr(self._processor, "tokenizer", self._processor)
        named = [
            getattr(holder, name, None)
            for name in ("image_token", "boi_token")
            for holder in (self._processor, tokenizer)
        ]
        for token in [*named, "<image>", "<IMG_CONTEXT>"]:
            token = getattr(token, "content", token)
            if isinstance(token, str) and token and shown.count(token) == 1:
                ids = tokenizer.encode(token, add_special_tokens=False)
                if len(ids) == 1:
                    return token, ids[0]
        raise ModelError("its chat template shows no image, or not as one token")

    def process_image(self, rgb: np.ndarray) -> tuple[list[int], dict[str, Any]]:
        """(tokens that stand for the image, its pixels for the tower). `rgb`: (height, width, 3), bytes."""
        from PIL import Image

        with self._lock:
            out = self._utils.prepare_inputs(
                self._processor,
                images=[Image.fromarray(rgb)],
                prompts=self.placeholder,
                add_special_tokens=False,
            )
            pixels = {
                name: _numpy(value)
                for name, value in out.items()
                if name not in ("input_ids", "attention_mask") and value is not None
            }
            return [int(id) for id in np.array(out["input_ids"]).reshape(-1)], pixels


def _numpy(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_numpy(item) for item in value]
    if isinstance(value, mx.array) and value.dtype == mx.bfloat16:
        value = value.astype(mx.float32)
    return np.array(value)
