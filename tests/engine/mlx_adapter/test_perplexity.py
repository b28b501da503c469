"""Perplexity by KV type: chunks change nothing, and rounding is what omlxd's own quantised cache does."""

from __future__ import annotations

import math

import mlx.core as mx
import pytest
from daemon import demo_model
from mlx_lm.models.cache import make_prompt_cache

from omlxd.engine.mlx_adapter.cache.kinds import quantised
from omlxd.engine.mlx_adapter.cache.packed import Quantisation
from omlxd.engine.mlx_adapter.model.load import read_model
from omlxd.engine.mlx_adapter.model.perplexity import RoundedKVCache, measure

TOKENS = [(i * i + 7 * i) % 90 + 3 for i in range(200)]


@pytest.fixture(scope="module")
def model():
    return read_model(demo_model())[0]


def test_it_is_what_one_pass_gives(model):
    logits = model(mx.array([TOKENS]))[0].astype(mx.float32)
    logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    picked = [logprobs[i, token].item() for i, token in enumerate(TOKENS[1:])]
    expected = math.exp(-sum(picked) / len(picked))
    assert measure(model, make_prompt_cache(model), TOKENS).perplexity == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("bits", [4, 8])
def test_rounding_is_what_the_quantised_cache_holds(model, bits: int):
    how = Quantisation(bits, 32)
    ours = measure(model, quantised(make_prompt_cache(model), how), TOKENS)
    rounded = measure(model, [RoundedKVCache(how, how) for _ in make_prompt_cache(model)], TOKENS)
    assert rounded == ours
