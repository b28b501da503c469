"""Drafters: small models that read the hidden states of a larger one, and guess what it says next.

mlx-vlm has their classes. A drafter gets states of its target at some tokens, and the token that follows
each. It keeps KV of these, and of none of its guesses. Those in a folder of their own are in
drafter_folder.py, heads in a model's own files in mtp.py.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ...cache.kinds import Cache, arrays_of, can_take_back
from ..load import LoadedModel, run_passes, tree_bytes
from ..positions import take_hidden
from ..vlm import vision

Draw = Callable[[mx.array], mx.array]
"""Logits (1, vocabulary) of the next position → its token (1,)."""

_EMBEDDINGS = ("embed_tokens", "embeddings", "wte", "word_embeddings", "tok_embeddings")


@dataclass(slots=True)
class DrafterState:
    """KV that a drafter has of one sequence. `position`: of the next token's hidden state."""

    cache: Cache
    position: int


class Drafter:
    """A drafter, bound to its target. Raises ValueError for one that does not fit.

    weight_bytes  of its own weights
    token_bytes   of its KV for a token
    """

    def __init__(self, module: Any, vocab_size: int, hidden: mx.array):
        """`hidden`: example states (1, tokens, any) of the target."""
        self._module, self._vocab_size = module, vocab_size
        self.weight_bytes = tree_bytes(module.parameters())
        tokens = hidden.shape[1]
        self._bind()
        state = self.new_state(0)
        plain = vision.import_vlm("models.cache").KVCache
        self._trims = all(type(leaf) is plain for leaf in _leaves(state.cache))
        drawn = self.draft(state, [0] * tokens, hidden, 2, self._check)
        mx.eval(drawn)
        held = arrays_of([leaf.state for leaf in _leaves(state.cache)])
        self.token_bytes = sum(array.nbytes for array in held) // tokens

    def _bind(self) -> None:
        """Take the target's embeddings and head, which are none of its own weights."""

    def _check(self, logits: mx.array) -> mx.array:
        if logits.shape != (1, self._vocab_size):
            raise ValueError(f"it gives {logits.shape[-1]} logits, and the model {self._vocab_size}")
        return mx.argmax(logits, axis=-1)

    def new_state(self, position: int) -> DrafterState:
        """For a sequence whose hidden states are there from `position` on."""
        return DrafterState(self._module.make_cache(), position)

    def draft(
        self, state: DrafterState, following: list[int], hidden: mx.array, width: int, draw: Draw
    ) -> list[mx.array]:
        """Draw up to `width` tokens that may come behind the last of `following`.

        following  (n), the tokens that follow those of the states
        hidden     (1, n, any): states of the target, from `state.position` on
        """
        raise NotImplementedError


class ChainDrafter(Drafter):
    """A drafter that guesses each token from its own hidden state at the one before."""

    def forward(
        self, state: DrafterState, tokens: list[int] | mx.array, hidden: mx.array
    ) -> tuple[mx.array, mx.array]:
        """What comes behind the last of `tokens`: its logits (1, vocabulary), and the drafter's hidden state
        (1, 1, any), which stands for the target's at that token.

        tokens  (n,), the ones that follow those of the states
        hidden  (1, n, any): states of the target, or of the drafter
        """
        raise NotImplementedError

    def draft(
        self, state: DrafterState, following: list[int], hidden: mx.array, width: int, draw: Draw
    ) -> list[mx.array]:
        logits, own = self.forward(state, following, hidden)
        drawn, ahead = [draw(logits)], state
        if width > 1 and not self._trims:
            ahead = DrafterState(copy.deepcopy(state.cache), state.position)
        while len(drawn) < width:
            logits, own = self.forward(ahead, drawn[-1], own)
            drawn.append(draw(logits))
        if ahead is state:
            self.take_back(state, width - 1)
        return drawn

    def take_back(self, state: DrafterState, count: int) -> None:
        """Forget the last `count` tokens."""
        for leaf in _leaves(state.cache):
            leaf.trim(count)
        state.position -= count


def _leaves(cache: Cache) -> Iterator[Any]:
    for leaf in cache:
        yield from _leaves(leaf.caches) if hasattr(leaf, "caches") else (leaf,)


class NothingGuessesError(ValueError):
    """No drafter guesses for this model, whichever is named."""


def example_states(loaded: LoadedModel) -> mx.array:
    """Hidden states (1, 2, any) of two tokens, as passes of `loaded` keep them.

    Raises NothingGuessesError where they keep none, or can't be taken back.
    """
    cache, _ = run_passes(loaded.model, [[0, 1]])
    hidden = take_hidden()
    if not can_take_back(cache, 1):
        raise NothingGuessesError("the model's cache can't take back tokens, so nothing guesses for it")
    if hidden is None or hidden.ndim != 3:
        raise NothingGuessesError("the model's layers give no hidden states that can be read")
    return hidden


def text_config(loaded: LoadedModel) -> dict[str, Any]:
    return loaded.config.get("text_config") or loaded.config


def hidden_size(loaded: LoadedModel) -> int:
    return int(text_config(loaded).get("hidden_size") or 0)


def embeddings_of(model: Any) -> tuple[Any, Any]:
    """(embeddings, head) of a model. Raises NothingGuessesError where they have other names."""
    embeddings = head = None
    for name, module in model.named_modules():
        if "vision" in name or "per_layer" in name:
            continue
        if embeddings is None and name.split(".")[-1] in _EMBEDDINGS and hasattr(module, "as_linear"):
            embeddings = module
        if head is None and isinstance(own := getattr(module, "lm_head", None), nn.Module):
            head = own
    if embeddings is None:
        raise NothingGuessesError("the model's embeddings have a name that is not known here")
    return embeddings, head or embeddings.as_linear


def target_of(loaded: LoadedModel) -> Any:
    """What mlx-vlm's drafters look at in a target, of any model."""
    embeddings, head = embeddings_of(loaded.model)
    values = text_config(loaded) | {"vocab_size": loaded.vocab_size}
    scale = hidden_size(loaded) ** 0.5 if loaded.model_type.startswith("gemma") else 1.0
    layers = loaded.model.layers
    values.setdefault("num_hidden_layers", len(layers))
    inner = SimpleNamespace(embed_tokens=embeddings, embed_scale=scale, layers=layers)
    language_model = SimpleNamespace(
        config=SimpleNamespace(**values),
        model=inner,
        lm_head=head,
        rollback_speculative_cache=None,
    )
    return SimpleNamespace(language_model=language_model)
