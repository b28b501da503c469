"""Drafters in a folder of their own, which `draft-model` names.

- EAGLE-3 reads the outputs of three layers, and guesses token by token from its own hidden state.
- DFlash, DFlash 2 and DSpark read the outputs of layers that their config names, and guess a block at once.
- A head for multi-token prediction (mtp.py) that was taken out of its model's files.

Pinned to mlx-vlm 0.7.10. What this file relies on, each tested in tests/engine/mlx_adapter/test_drafter.py:
- EAGLE-3's `_forward_tokens(tokens, hidden, dtype)`, both of one row, adds KV to `_cache`, at positions
  from `_next_position` on; `_logits` of what it gives are of its own vocabulary, and `d2t` leads to the
  target's;
- DFlash's `draft_block(token, hidden, cache, size, sampler)` adds KV of `hidden` alone to `cache`, and asks
  `sampler` for tokens, of all positions or of one after the other;
- `bind` takes the target's embeddings and head.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx

from .....models.config.drafters import drafter_kind
from .....models.footprint import INSTALL_VISION, VLM_VERSION, has_vlm, read_config, weight_files
from ..load import LoadedModel, make_float32
from ..positions import forgotten_on_error, keep_layers, last_positions
from ..vlm import vision
from .drafter import ChainDrafter, Drafter, DrafterState, Draw, example_states, hidden_size, target_of
from .mtp import mtp_of


class Eagle3(ChainDrafter):
    """EAGLE-3: its guesses may be of fewer tokens than its target knows."""

    def __init__(self, module: Any, target: Any, vocab_size: int, hidden: mx.array):
        self._target = target
        super().__init__(module, vocab_size, hidden)

    def _bind(self) -> None:
        if "embed_tokens" in self._module:
            self._module.bind(self._target)
        else:  # SGLang's files have none of their own.
            self._module.embed_tokens = self._target.language_model.model.embed_tokens
        to_target = self._module.d2t
        self._ids = None if to_target is None else mx.arange(len(to_target)) + to_target

    def forward(
        self, state: DrafterState, tokens: list[int] | mx.array, hidden: mx.array
    ) -> tuple[mx.array, mx.array]:
        module, tokens = self._module, mx.array(tokens)[None]
        module._cache, module._next_position = state.cache, state.position + 1
        out = module._forward_tokens(tokens, hidden, mx.int32)[:, -1:]
        state.position += tokens.shape[1]
        logits = module._logits(out)[:, -1]
        if self._ids is not None:
            every = mx.full((1, self._vocab_size), -mx.inf, logits.dtype)
            every[:, self._ids] = logits
            logits = every
        return logits, out


class BlockDrafter(Drafter):
    """DFlash and its kin: a block of guesses in one pass."""

    def __init__(self, module: Any, target: Any, vocab_size: int, hidden: mx.array):
        self._target = target
        self._most = max(1, module.config.block_size - 1)
        super().__init__(module, vocab_size, hidden)

    def _bind(self) -> None:
        self._module.bind(self._target)
        if any("v_proj" not in layer.self_attn for layer in getattr(self._module, "layers", ())):
            # Gemma 4's keys are values, too. mlx-vlm looks for a `v_proj` to project all layers at once.
            self._module._project_context_kv = lambda hidden: None

    def draft(
        self, state: DrafterState, following: list[int], hidden: mx.array, width: int, draw: Draw
    ) -> list[mx.array]:
        def each(logits: mx.array) -> mx.array:
            if logits.ndim == 2:
                return draw(logits)
            return mx.stack([draw(position) for position in mx.unstack(logits, axis=1)], axis=1)

        size = 1 + min(width, self._most)
        with last_positions(size):
            block = self._module.draft_block(following[-1], hidden, state.cache, size, each)
        state.position += len(following)
        return [*mx.unstack(block, axis=1)]


def load_drafter(path: Path, loaded: LoadedModel) -> Drafter:
    """The drafter in folder `path`, for `loaded`, whose passes keep hidden states from now on.

    Raises ValueError where it doesn't fit, and what mlx-vlm raises.
    """
    kind = drafter_kind(read_config(path))
    assert kind is not None
    if kind[0] == "refused":
        raise ValueError(kind[1])
    if not has_vlm():
        raise ValueError(f"it needs mlx-vlm: {INSTALL_VISION}")
    if kind[0] == "eagle3" and "transformer_layer_config" not in read_config(path):
        module = _load_sglang(path)
    else:
        module = _load_vlm(path)
    if kind[0] == "mtp":
        return mtp_of(module, loaded)
    if loaded.float32:
        make_float32(module)
    mx.eval(module.parameters())
    config, count = module.config, len(loaded.model.layers)
    if kind[0] == "eagle3":
        layers = eagle_layers(config, count)
        _fit("hidden size", config.target_hidden_size, hidden_size(loaded))
        _fit("vocabulary", module.target_vocab_size, loaded.vocab_size)
    else:
        layers = [*config.target_layer_ids]
        _fit("hidden size", getattr(config, "hidden_size", None), hidden_size(loaded))
        _fit("vocabulary", config.vocab_size, loaded.vocab_size)
    if not all(0 <= layer < count for layer in layers):
        raise ValueError(f"it reads layers {layers}, and the model has {count}")
    keep_layers(loaded.model, layers)
    make = Eagle3 if kind[0] == "eagle3" else BlockDrafter
    with forgotten_on_error():
        return make(module, target_of(loaded), loaded.vocab_size, example_states(loaded))


def _load_vlm(path: Path) -> Any:
    try:
        return vision.import_vlm("utils").load_model(path, lazy=True)
    except ValueError as error:
        if not str(error).startswith("Model type "):
            raise
        family = read_config(path).get("model_type")
        told = f"mlx-vlm {VLM_VERSION} has no drafter of type {family!r}, a newer omlxd may have it"
        raise ValueError(told) from error


def _load_sglang(path: Path) -> Any:
    """EAGLE-3 in SGLang's form: the config of a Llama, and its one layer called `midlayer`."""
    config = read_config(path)
    package = vision.import_vlm("speculative.drafters.eagle3")
    named = (config.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    own = {
        "transformer_layer_config": {**config, "num_hidden_layers": 1},
        "draft_vocab_size": config.get("draft_vocab_size") or config["vocab_size"],
        "target_hidden_size": config.get("target_hidden_size"),
        "eagle_aux_hidden_state_layer_ids": named,
    }
    module = package.Model(package.ModelConfig.from_dict(own))
    weights: dict[str, mx.array] = {}
    for file in weight_files(path):
        held: Any = mx.load(str(file))
        weights |= {
            name.removeprefix("model.").replace("midlayer.", "layers.0."): array
            for name, array in held.items()
        }
    if "embed_tokens.weight" not in weights:
        module.pop("embed_tokens")
    module.load_weights([*module.sanitize(weights).items()])
    return module


def eagle_layers(config: Any, count: int) -> list[int]:
    """Layers of a target with `count` whose outputs EAGLE-3 reads; its config may name the ones behind."""
    named = config.eagle_aux_hidden_state_layer_ids or [2, count // 2, count - 3]
    return [max(0, layer - 1) for layer in named]


def _fit(what: str, own: Any, other: int) -> None:
    if own is not None and own != other:
        raise ValueError(f"its target's {what} is {own:,}, and the model's {other:,}")
