"""The kernel of DeepSeek V3.2's index, with one of MLX's ops in its place: it runs on CUDA alone."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest

from omlxd.engine.mlx_adapter.cache.dsa_rows import best
from omlxd.engine.mlx_adapter.cuda import index_kernel, segment_attention
from omlxd.engine.mlx_adapter.cuda.attention_kernel import Tails

from .conftest import IndexReference, known_addresses
from .test_segment_attention import Watched


class Late(IndexReference):
    """Sees a token less."""

    def scores(self, queries: Any, weights: Any, tails: Any, ends: Any, behind: Any) -> mx.array:
        return super().scores(queries, weights, tails, ends - 1, behind)


class Signed(IndexReference):
    """Adds what is under 0, too."""

    def scores(self, queries: Any, weights: Any, *given: Any) -> mx.array:
        rest = super().scores(-queries, weights, *given)
        return mx.where(rest == -mx.inf, rest, super().scores(queries, weights, *given) - rest)


class Unweighted(IndexReference):
    """Takes all heads alike."""

    def scores(self, queries: Any, weights: Any, *given: Any) -> mx.array:
        return super().scores(queries, mx.ones_like(weights), *given)


class OfCompany(IndexReference):
    """Its numbers depend on who is in the pass."""

    def scores(self, queries: Any, *given: Any) -> mx.array:
        return super().scores(queries, *given) * (1 + 1e-3 * len(queries))


class LastOfEquals(IndexReference):
    """Of equal scores it takes the last ones."""

    def best(self, scores: mx.array, ends: mx.array, most: int) -> mx.array:
        turned = super().best(scores[:, ::-1], ends, most)
        return mx.sort(scores.shape[1] - 1 - turned, axis=-1)


def test_the_check_finds_a_kernel_that_differs(monkeypatch: pytest.MonkeyPatch):
    known_addresses(monkeypatch)

    def far(kernel: Any) -> float:
        return index_kernel.difference(kernel, 16, 32, mx.float32)

    assert far(IndexReference()) < 1e-4
    for wrong in (Late, Signed, Unweighted, OfCompany, LastOfEquals):
        assert far(wrong()) > index_kernel.CLOSE, wrong


def test_which_indexes_it_reads(caplog: pytest.LogCaptureFixture):
    assert index_kernel.fits(64, 128, mx.bfloat16) and index_kernel.fits(32, 128, mx.float16)
    for heads, width, dtype in (
        *((64, 128, mx.float32), (2, 16, mx.bfloat16), (128, 128, mx.bfloat16)),
        *((64, 256, mx.bfloat16), (64, 80, mx.float16)),
    ):
        assert not index_kernel.fits(heads, width, dtype)
    index_kernel.checked.cache_clear()
    with caplog.at_level("INFO"):
        assert index_kernel.checked(64, 128, mx.bfloat16) is None  # There is no GPU here.
        assert index_kernel.checked(2, 16, mx.bfloat16) is None
    assert "omlxd's kernel does not run here" in caplog.text and "an index of 2 heads" in caplog.text
    index_kernel.checked.cache_clear()


def test_sources_are_complete():
    """No machine here compiles them: each kernel has a name of its own, and all of its constants."""
    sizes = ((64, 128), (32, 128), (16, 64))
    made = [index_kernel.source_of(*size, dtype) for size in sizes for dtype in (mx.bfloat16, mx.float16)]
    name, source = index_kernel.best_source()
    assert f"{name}(" in source and "THREADS = " in source and source.count("{") == source.count("}")
    assert len({name for name, _ in made}) == len(made)
    for name, source in made:
        assert f"{name}(" in source and source.count("{") == source.count("}")
        for word in ("HEADS = ", "D = ", "TILE = ", "WARPS = ", "using T = "):
            assert word in source


def test_two_launches_read_all_rows(monkeypatch: pytest.MonkeyPatch):
    watched = Watched()
    monkeypatch.setattr(mx.fast, "precompiled_cuda_kernel", watched, raising=False)
    monkeypatch.setattr(segment_attention.nvrtc, "machine_code", lambda source: b"")
    kernel = index_kernel.IndexKernel(64, 128, mx.float16)
    tails = Tails(mx.zeros((2, 4), mx.uint64), 1000)
    given = mx.zeros((6, 64, 1, 128), mx.float16), mx.zeros((6, 64), mx.float16)
    out = kernel.over_tails(*given, tails, [7, 8, 9, 600, 601, 602], mx.zeros((1,), mx.int32), 512)
    assert out.shape == (6, 512) and out.dtype == mx.int32
    names, counts, grids = zip(*watched.launches, strict=True)
    assert names == ("omlxd_index_float16_64_128", "omlxd_index_best") and counts == (5, 2)
    assert grids == ((8 * 256, 6, 1), (1024, 6, 1)), "eight tiles of tokens, six tokens"


def test_the_best_are_in_order_and_what_a_token_does_not_see_comes_last():
    scores = mx.array(
        [[3.0, 1.0, 9.0, 2.0, -mx.inf, -mx.inf], [1.0, 2.0, -mx.inf, -mx.inf, -mx.inf, -mx.inf]]
    )
    assert best(scores, 3).tolist()[0] == [0, 2, 3]
    assert best(scores, 3).tolist()[1][:2] == [0, 1]
