"""The kernel that reads latents of MLA, with one of MLX's ops in its place: it runs on CUDA alone."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest

from omlxd.engine.mlx_adapter.cuda.attention import latent_kernel
from omlxd.engine.mlx_adapter.cuda.attention.attention_kernel import Tails
from omlxd.engine.mlx_adapter.cuda.compile import kernel_store

from .conftest import LatentReference, known_addresses
from .test_segment_attention import Watched


class Late(LatentReference):
    """Sees a token less."""

    def over_tails(self, queries: Any, rope: Any, tails: Any, ends: Any, *given: Any) -> mx.array:
        return super().over_tails(queries, rope, tails, [end - 1 for end in ends], *given)


class Unturned(LatentReference):
    """Does without the parts that RoPE turns."""

    def over_tails(self, queries: Any, rope: Any, *given: Any) -> mx.array:
        return super().over_tails(queries, rope * 0, *given)


class OfCompany(LatentReference):
    """Its numbers depend on who is in the pass."""

    def over_tails(self, queries: Any, *given: Any) -> mx.array:
        return super().over_tails(queries, *given) + 1e-3 * len(queries)


class Segmentless(LatentReference):
    """Takes a row's segment for its tail."""

    @staticmethod
    def held(tails: Any, row: int) -> list[mx.array]:
        latents, parts = LatentReference.held(tails, row)
        cut = tails.each if tails.each > 1 else 0
        return [mx.concatenate([part[:, :, cut:], part[:, :, :cut]], axis=2) for part in (latents, parts)]


def test_the_check_finds_a_kernel_that_differs(monkeypatch: pytest.MonkeyPatch):
    known_addresses(monkeypatch)
    monkeypatch.setattr(latent_kernel, "SPAN", 128)

    def far(kernel: Any) -> float:
        return latent_kernel.difference(kernel, 32, 8, mx.float32)

    assert far(LatentReference()) < 1e-4
    for wrong in (Late, Unturned):
        assert far(wrong()) > latent_kernel.CLOSE, wrong
    for wrong in (OfCompany, Segmentless):
        assert far(wrong()) == float("inf"), wrong


def test_which_latents_it_reads():
    assert latent_kernel.fits(512, 64, mx.bfloat16) and latent_kernel.fits(256, 32, mx.float16)
    for width, part, dtype in (
        (512, 64, mx.float32),
        (32, 8, mx.bfloat16),
        (1024, 64, mx.float16),
        (512, 8, mx.float16),
    ):
        assert not latent_kernel.fits(width, part, dtype)


def test_without_a_gpu_mlx_s_own_attention_stays(caplog: pytest.LogCaptureFixture):
    latent_kernel.checked.cache_clear()
    with caplog.at_level("INFO"):
        assert latent_kernel.checked(512, 64, mx.bfloat16) is None
        assert latent_kernel.checked(32, 8, mx.bfloat16) is None
    assert (
        "omlxd's kernel does not run here" in caplog.text and "no kernel for latents 32 wide" in caplog.text
    )
    latent_kernel.checked.cache_clear()


def test_sources_are_complete():
    """No machine here compiles them: each kernel has a name of its own, and all of its constants."""
    made = [
        latent_kernel.source_of(width, part, dtype)
        for width, part in ((512, 64), (256, 64), (128, 32))
        for dtype in (mx.bfloat16, mx.float16)
    ]
    assert len({name for name, _ in made}) == len(made)
    for name, source in made:
        assert f"#define FUNCTION {name}\n" in source and source.count("{") == source.count("}")
        for word in ("D = ", "E = ", "SPAN = ", "TILE = ", "WARPS = ", "using T = "):
            assert word in source


def test_two_launches_read_all_rows(monkeypatch: pytest.MonkeyPatch):
    watched = Watched()
    monkeypatch.setattr(mx.fast, "precompiled_cuda_kernel", watched, raising=False)
    monkeypatch.setattr(kernel_store, "machine_code", lambda source: b"")
    kernel = latent_kernel.LatentKernel(256, 64, mx.float16)
    tails, queries, rope = (
        Tails(mx.zeros((2, 4), mx.uint64), 1024),
        mx.zeros((6, 20, 1, 256)),
        mx.zeros((6, 20, 1, 64)),
    )
    out = kernel.over_tails(queries, rope, tails, [7, 8, 9, 600, 601, 602], 0.1, mx.zeros((1,), mx.int32))
    assert out.shape == queries.shape
    names, counts, grids = zip(*watched.launches, strict=True)
    assert [name.split("_float16")[0] for name in names] == ["omlxd_latents", "omlxd_decode_merge"]
    assert counts == (6, 4)
    assert grids == ((2 * 256, 2, 6), (6 * 20 * 256, 1, 1)), "two spans, two tiles of heads, six tokens"
