"""Rows of embeddings by our kernel, with MLX's own operation in its place."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

from omlxd.engine.mlx_adapter.cuda.products import embedding_kernel


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    made: list[tuple[int, ...]] = []

    def rows_of(table: mx.array, tokens: mx.array) -> mx.array:
        made.append(table.shape)
        return table[tokens]

    monkeypatch.setattr(embedding_kernel, "rows_of", rows_of)
    monkeypatch.setattr(embedding_kernel, "_is_right", lambda: True)
    monkeypatch.setattr(nn.Embedding, "__call__", nn.Embedding.__call__)
    monkeypatch.setattr(nn.QuantizedEmbedding, "__call__", nn.QuantizedEmbedding.__call__)
    return made


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16, mx.float32])
@pytest.mark.parametrize("bits", [0, 4, 8])
def test_embeddings_are_what_mlx_gives(calls: list[Any], bits: int, dtype: mx.Dtype):
    embedding: Any = nn.Embedding(20, 64)
    embedding.weight = embedding.weight.astype(dtype)
    if bits:
        embedding = embedding.to_quantized(32, bits)
    tokens = mx.array([[3, 0, 19], [7, 7, 1]])
    want = embedding(tokens)
    embedding_kernel.install()
    got = embedding(tokens)
    assert got.dtype == want.dtype and mx.array_equal(got, want)
    assert len(calls) == (3 if bits else 1)


def test_rows_that_are_no_whole_words_are_mlx_own(calls: list[Any]):
    embedding = nn.Embedding(20, 3)
    embedding.weight = embedding.weight.astype(mx.bfloat16)
    want = embedding(mx.array([1, 2]))
    embedding_kernel.install()
    assert mx.array_equal(embedding(mx.array([1, 2])), want) and not calls
