"""Heads for multi-token prediction (MTP): layers in a model's own files that guess for it.

mlx-lm and mlx-vlm leave them out of the model that they load. mlx-vlm has drafters that hold them
(`FAMILIES`). Such a head takes the model's last hidden state at a token and the token that follows it, and
guesses the one behind.

Pinned to mlx-vlm 0.7.10. What this file relies on, each tested in tests/engine/mlx_adapter/test_mtp.py:
- `get_mtp_splitter` finds a family's heads, and its `load` makes a drafter of a model's own folder;
- `_forward_tokens(tokens, hidden, dtype)`, both of one row, adds KV to `_cache`, from `_next_position` on
  where it has one. It gives what the model's head takes; of some families, and what stands for the hidden
  state;
- `_input_embed` and `_lm_head_fn` are the model's own embeddings and head.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import mlx.core as mx

from .....models.footprint import has_vlm, read_config
from ..load import LoadedModel, make_float32
from ..positions import forgotten_on_error, keep_hidden, keep_streams
from ..vlm import vision
from .drafter import (
    ChainDrafter,
    DrafterState,
    NothingGuessesError,
    embeddings_of,
    example_states,
    hidden_size,
)

FAMILIES: dict[str, Literal["normed", "streams"]] = {
    **dict.fromkeys(("qwen3_5", "qwen3_5_moe", "qwen3_next", "glm_moe_dsa", "glm5_next"), "normed"),
    "nemotron_h": "normed",
    "qwen4_exp": "streams",
}
"""Families whose heads guess, by the hidden states that they read: what the model's own head takes, behind
its last norm; or the streams that go into its last mixer."""


UNUSED = {
    **dict.fromkeys(("deepseek_v4", "hy_v4"), "what this model keeps can't take back tokens"),
    **dict.fromkeys(("inkling", "inkling_mm_model"), "each of them guesses one token, and keeps a state"),
    "glm4_moe_lite": "mlx-vlm 0.7.10 finds them and has no class for them",
}
"""Families whose heads mlx-vlm finds, and why they don't guess."""


class MtpHeads(ChainDrafter):
    """Heads of a model, or of its files."""

    def __init__(self, module: Any, loaded: LoadedModel, hidden: mx.array):
        self._loaded = loaded
        super().__init__(module, loaded.vocab_size, hidden)

    def _bind(self) -> None:
        self._module._input_embed, self._module._lm_head_fn = embeddings_of(self._loaded.model)

    def forward(
        self, state: DrafterState, tokens: list[int] | mx.array, hidden: mx.array
    ) -> tuple[mx.array, mx.array]:
        module, tokens = self._module, mx.array(tokens)[None]
        module._cache, module._next_position = state.cache, state.position
        out = module._forward_tokens(tokens, hidden, mx.int32)
        normed, own = out if isinstance(out, tuple) else (out, out)
        state.position += tokens.shape[1]
        return module._lm_head_fn(normed[:, -1:])[:, -1], own[:, -1:]


def family(model_type: Any) -> str:
    return str(model_type).removesuffix("_text")


def load_mtp(path: Path, loaded: LoadedModel) -> MtpHeads | None:
    """Heads in the model's folder; from now on passes keep their hidden states. None: it has none.

    Raises ValueError and what mlx-vlm raises, where the folder has heads that can't be loaded.
    """
    config = read_config(path)
    if (kind := family(config.get("model_type"))) not in {*FAMILIES, *UNUSED} or not has_vlm():
        return None
    splitter = vision.import_vlm("speculative.drafters.mtp_split").get_mtp_splitter(source_config=config)
    if splitter is None or not any(
        True for _ in splitter.iter_selected(path, splitter.read_text_config(config))
    ):
        return None
    if why := UNUSED.get(kind):
        raise ValueError(why)
    return mtp_of(splitter.load(path, lazy=True, source_config=config), loaded)


def mtp_of(module: Any, loaded: LoadedModel) -> MtpHeads:
    """Heads that mlx-vlm has loaded, for `loaded`, whose passes keep hidden states from now on.

    Raises ValueError where they don't fit.
    """
    reads = FAMILIES.get(family(loaded.model_type))
    own = module.config.text_config
    kind = getattr(own, "model_type", loaded.model_type)
    if reads is None and family(kind) == family(loaded.model_type):
        raise NothingGuessesError(UNUSED.get(family(kind), f"heads of a {kind} are not read here"))
    if reads is None or family(kind) != family(loaded.model_type):
        raise ValueError(f"it guesses for a {kind}, and the model is a {loaded.model_type}")
    if own.hidden_size != hidden_size(loaded):
        raise ValueError(
            f"its target's hidden size is {own.hidden_size:,}, and the model's {hidden_size(loaded):,}"
        )
    if loaded.float32:
        make_float32(module)
    mx.eval(module.parameters())
    (keep_hidden if reads == "normed" else keep_streams)()
    with forgotten_on_error():
        return MtpHeads(module, loaded, example_states(loaded))
