"""One piece of a prompt through the model."""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from . import mlx_adapter
from .sequence import Sequence


def compute_chunk(model: Any, sequence: Sequence, stop: int, *, last_alone: bool) -> mx.array:
    """Compute the KV of `sequence` from where it stands to `stop`, into its cache.

    Returns the logits (1, tokens, vocabulary) of its last pass, not evaluated: before the prompt's
    end only the KV is.
    """
    start, length = sequence.kv_length, sequence.prompt_length
    assert sequence.cache is not None
    if last_alone and start < length - 1 and stop == length:
        model(mx.array([sequence.tokens[start : stop - 1]]), cache=sequence.cache)
        mx.eval(mlx_adapter.state_arrays(sequence.cache))
        start = stop - 1
    logits = model(mx.array([sequence.tokens[start:stop]]), cache=sequence.cache)
    if stop < length:
        mx.eval(mlx_adapter.state_arrays(sequence.cache))
    return logits


def last_token_alone() -> bool:
    """Whether the prompt's last token gets a pass of its own.

    On a GPU a pass for one token costs as much as one for a whole last chunk: it reads all the
    weights. A CPU takes about as long a token either way, and saves the last layer's MLP for all
    but the last token (tools/bench's `cpu` shape, 50 tokens: 718 ms against 960).
    """
    return mlx_adapter.backend() == "cpu"
