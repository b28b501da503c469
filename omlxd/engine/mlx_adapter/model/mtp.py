"""Heads for multi-token prediction (MTP): layers in a model's own files that guess for it.

mlx-lm and mlx-vlm leave them out of the model that they load. mlx-vlm has drafters that hold them; those of
Qwen3.5, its MoE and Qwen3-Next are used here, of other families none. Such a head takes the model's last
hidden state at a token and the token that follows it, and guesses the one behind.

Pinned to mlx-vlm 0.7.10. What this file relies on, each tested in tests/engine/mlx_adapter/test_mtp.py:
- `get_mtp_splitter` finds a family's heads, and its `load` makes a drafter of a model's own folder;
- `_forward_tokens(tokens, hidden, dtype)`, both of one row, adds KV to `_cache` from `_next_position` on;
- `_lm_head_fn` is the model's own head after `bind`.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import mlx.core as mx

from ....models.footprint import read_config
from ..cache.kinds import Cache
from . import vision
from .load import LoadedModel, make_float32, tree_bytes
from .positions import keep_hidden

FAMILIES = {"qwen3_5", "qwen3_5_moe", "qwen3_next"}
"""Their drafters read the hidden states that the model's own head takes, after its last norm."""


@dataclass(slots=True)
class MtpState:
    """KV that heads have of one sequence. `position`: of the next token's hidden state."""

    cache: Cache
    position: int


class MtpHeads:
    """`weight_bytes`: of the heads alone. `token_bytes`: of their KV for a token."""

    def __init__(self, drafter: Any, vocab_size: int):
        self._drafter = drafter
        self.weight_bytes = tree_bytes(drafter.parameters())
        hidden = mx.zeros((1, 2, drafter.config.text_config.hidden_size), drafter.norm.weight.dtype)
        state = self.new_state(0)
        logits, _ = self.forward(state, [0, 1], hidden)
        if logits.shape != (1, vocab_size):
            raise ValueError(f"they give {logits.shape[-1]} logits, and the model {vocab_size}")
        mx.eval(logits)
        self.token_bytes = sum(leaf.keys.nbytes + leaf.values.nbytes for leaf in state.cache) // max(
            1, state.cache[0].keys.shape[2]
        )

    def new_state(self, position: int) -> MtpState:
        """For a sequence whose hidden states are there from `position` on."""
        return MtpState(self._drafter.make_cache(), position)

    def forward(
        self, state: MtpState, tokens: list[int] | mx.array, hidden: mx.array
    ) -> tuple[mx.array, mx.array]:
        """What comes behind the last of `tokens`: its logits (1, vocabulary), and the heads' hidden state
        (1, 1, hidden), which stands for the model's at that token.

        tokens  (n,), the ones that follow those of the states
        hidden  (1, n, hidden): states of the model, or of the heads
        """
        drafter = self._drafter
        drafter._cache, drafter._next_position = state.cache, state.position
        out = drafter._forward_tokens(mx.array(tokens)[None], hidden, mx.int32)[:, -1:]
        state.position = drafter._next_position
        return drafter._lm_head_fn(out)[:, -1], out

    def take_back(self, state: MtpState, count: int) -> None:
        """Forget the last `count` tokens."""
        for leaf in state.cache:
            leaf.trim(count)
        state.position -= count


def load_mtp(path: Path, loaded: LoadedModel) -> MtpHeads | None:
    """Heads in the model's folder; from now on passes keep their hidden states. None: it has none.

    Raises ValueError and what mlx-vlm raises, where the folder has heads that can't be loaded.
    """
    config = read_config(path)
    if config.get("model_type") not in FAMILIES or not all(map(find_spec, ("mlx_vlm", "PIL", "requests"))):
        return None
    splitter = vision.import_vlm("speculative.drafters.mtp_split").get_mtp_splitter(source_config=config)
    if splitter is None or not any(
        True for _ in splitter.iter_selected(path, splitter.read_text_config(config))
    ):
        return None
    drafter = splitter.load(path, lazy=True, source_config=config)
    if loaded.float32:
        make_float32(drafter)
    drafter.bind(getattr(loaded.model, "vlm", loaded.model))
    mx.eval(drafter.parameters())
    heads = MtpHeads(drafter, loaded.vocab_size)
    keep_hidden()
    return heads
