"""Models that make a vector of a text or a score of a pair, by mlx-vlm.

What this file relies on, each tested in tests/engine/test_embedder.py:
- `embedding_loader` and `reranker_loader` load a folder without running code of it;
- an embedding model takes `attention_mask` of 1 and 0, pools as its `pooling_config` says (sentence-
  transformers' `1_Pooling/config.json`), and gives `text_embeds` of length 1; a reranker gives `logits`;
- rows padded on the right give what they give alone.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from ....errors import ModelError
from ....models.footprint import INSTALL_VISION, kind_of, read_config
from .load import context_length, make_float32, tree_bytes
from .vlm.vision import import_vlm

Rows = Sequence[Sequence[int]]
"""Token ids of each text."""


class Embedder:
    """Load on the thread that computes. Raises ModelError.

    float32  make the weights float32
    kind     `embedding` or `rerank`
    limit    tokens of a text at most
    """

    def __init__(self, path: Path, float32: bool):
        config = read_config(path)
        self.kind = kind_of(path, config)
        self.model_type = str(config.get("model_type"))
        try:
            self._model: Any = self._load(path)
        except ImportError as error:
            raise ModelError(f"embeddings need mlx-vlm ({error}): {INSTALL_VISION}") from error
        except (ValueError, NotImplementedError) as error:
            raise ModelError(str(error)) from error
        if float32:
            make_float32(self._model)
        mx.eval(self._model.parameters())
        self.weight_bytes = tree_bytes(self._model.parameters())
        self.tokenizer = _tokenizer(path)
        # Of XLM-R's positions the first two are none.
        spare = 2 if self.model_type == "xlm-roberta" else 0
        self.limit = min(context_length(config) - spare, self.tokenizer.model_max_length)

    def _load(self, path: Path) -> Any:
        if self.kind == "rerank":
            return import_vlm("reranker_loader").load_sequence_classification_model(path, lazy=True)
        model = import_vlm("embedding_loader").load_embedding_model(path, lazy=True)
        if (pooling := import_vlm("models.pooling").read_pooling_config(path)) is not None:
            model.pooling_config = pooling
        if self.model_type == "gemma3_text":
            for layer in model.layers:
                if layer.self_attn.is_sliding:
                    layer.self_attn = _Windowed(layer.self_attn, model.config.sliding_window)
        return model

    def tokens(self, text: str, pair: str | None = None) -> tuple[list[int], list[int]]:
        """Token ids and their types. `pair`: the second text of a pair."""
        coded = self.tokenizer(text, pair, return_token_type_ids=True)
        return coded["input_ids"], coded["token_type_ids"]

    def compute(self, rows: Rows, types: Rows) -> np.ndarray:
        """float32: a vector of length 1 a row, or of a reranker a score in (0, 1)."""
        width = max(map(len, rows))

        def padded(values: Rows) -> mx.array:
            return mx.array([[*row, *([0] * (width - len(row)))] for row in values])

        inputs = {"attention_mask": padded([[1] * len(row) for row in rows]), "token_type_ids": padded(types)}
        out = self._model(padded(rows), **inputs)
        values = mx.sigmoid(out.logits.astype(mx.float32)) if self.kind == "rerank" else out.text_embeds
        return np.array(values.astype(mx.float32))


class _Windowed(nn.Module):
    """Attention of EmbeddingGemma's sliding layers: half the window to either side.

    mlx-vlm's lets every layer see the whole text.
    """

    def __init__(self, attention: Any, window: int):
        super().__init__()
        self.attention, self._half = attention, window // 2

    def __call__(self, x: mx.array, mask: mx.array, cache: Any = None) -> mx.array:
        at = mx.arange(x.shape[1])
        near = mx.abs(at[:, None] - at[None]) <= self._half
        # Not -inf: a row of padding has nothing near, and would become NaN.
        far = mx.minimum(mask, mx.array(-1e9, mask.dtype))
        return self.attention(x, mx.where(near, mask, far), cache)


def _tokenizer(path: Path) -> Any:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    tokenizer.model_max_length = min(tokenizer.model_max_length or sys.maxsize, sys.maxsize)
    return tokenizer
