"""Passes of prompts by a kernel, in whose place MLX's operations compute here: when it runs, on which KV."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any, ClassVar

import mlx.core as mx
import numpy as np
import pytest
from families import build_family
from family_configs import WINDOW

from omlxd.engine import mlx_adapter
from omlxd.engine.mlx_adapter.attention import hooks as attention
from omlxd.engine.mlx_adapter.cuda import prompt_shapes
from omlxd.engine.mlx_adapter.cuda.attention import attend, prompt_attention

CHUNK = 128


class Plain:
    """A prompt kernel by MLX's own attention, in float32."""

    calls: ClassVar[list[tuple[int, tuple[int, int], int]]] = []
    """New tokens, places and window of each."""
    befores: ClassVar[set[tuple[int, int]]] = set()
    """New tokens and `before` of each over a window."""

    def __call__(self, queries, keys, values, places, scale, *, window=0, sinks=None, before=0):
        start, end = places
        new, tokens = queries.shape[2], end - start
        self.calls.append((new, places, window))
        if window:
            self.befores.add((new, before))
        own, seen = mx.arange(tokens - new, tokens)[:, None], mx.arange(tokens)
        held = [array[:, :, start:end].astype(mx.float32) for array in (keys, values)]
        return mx.fast.scaled_dot_product_attention(
            queries.astype(mx.float32),
            *held,
            scale=scale,
            mask=(seen <= own) & (seen > own - (window or tokens + 1)),
            sinks=None if sinks is None else sinks.astype(mx.float32),
        ).astype(queries.dtype)


@pytest.fixture
def on_cuda(monkeypatch: pytest.MonkeyPatch, reference):
    """Call it once the model is loaded: passes attend as on CUDA, whole chunks having `CHUNK` tokens."""

    def begin() -> None:
        reference()
        monkeypatch.setattr(attend, "PREFILL_CHUNK", CHUNK)
        monkeypatch.setattr(prompt_attention, "checked", lambda *kind: Plain())
        monkeypatch.setattr(Plain, "calls", [])
        monkeypatch.setattr(Plain, "befores", set())

    return begin


def last_logits(loaded: mlx_adapter.LoadedModel, *stops: int) -> np.ndarray:
    cache, start = mlx_adapter.new_cache(loaded.model, 512), 0
    out = mx.zeros(0)
    for stop in stops:
        tokens = mx.random.randint(5, 200, (1, stop - start), key=mx.random.key(start))
        out = loaded.model(tokens, cache=cache)
        mx.eval(out)
        start = stop
    return np.array(out)


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt_oss"])
def test_an_end_of_a_prompt_and_windows_attend_by_the_kernel_and_a_chunk_by_mlx(
    family: str, tmp_path: Path, on_cuda
):
    loaded = mlx_adapter.load(build_family(family, tmp_path / family))
    stops = CHUNK, 2 * CHUNK, 2 * CHUNK + 90
    want = last_logits(loaded, *stops)
    on_cuda()
    np.testing.assert_allclose(last_logits(loaded, *stops), want, atol=2e-4)
    assert Plain.calls and {new for new, _, window in Plain.calls if not window} == {90}
    assert {new for new, _, window in Plain.calls if window} <= {90, CHUNK}
    ends = {end for _, (_, end), window in Plain.calls if not window}
    assert ends == {2 * CHUNK + 90}, "a chunk's KV is read where it lies"
    assert any(window for _, _, window in Plain.calls) == (family != "llama")


@pytest.mark.parametrize("family", ["gemma3_text", "gpt_oss"])
def test_a_window_goes_by_the_kernel_in_all_passes_before_a_prompts_last(
    family: str, tmp_path: Path, on_cuda, monkeypatch: pytest.MonkeyPatch
):
    """It is told which token comes first: sums are cut at the same tokens wherever a pass begins."""
    loaded = mlx_adapter.load(build_family(family, tmp_path / family))
    stops = 20, 60, 64, 100
    want = last_logits(loaded, *stops)
    on_cuda()
    with prompt_shapes.fixed_shapes(True):
        np.testing.assert_allclose(last_logits(loaded, *stops), want, atol=2e-4)
    first = [max(0, stop - (WINDOW + new - 1)) for new, stop in ((20, 20), (40, 60), (4, 64), (36, 100))]
    assert Plain.befores == set(zip((20, 40, 4, 36), first, strict=True))
    assert {window for _, _, window in Plain.calls} == {WINDOW}, "other layers have shapes"


def test_keys_that_no_cache_gave_out_and_what_the_kernel_does_not_do(on_cuda):
    on_cuda()
    queries, keys = mx.random.normal((1, 4, 100, 16)), mx.random.normal((1, 2, 120, 16))
    own = mx.fast.scaled_dot_product_attention

    def ran(queries=queries, keys=keys, values=keys, mask: Any = "causal", **more: Any) -> bool:
        before = len(Plain.calls)
        got = attention.attend(queries, keys, values, None, 0.25, mask, **more)
        np.testing.assert_allclose(got, own(queries, keys, values, scale=0.25, mask=mask, **more), atol=1e-5)
        return len(Plain.calls) > before

    assert ran()
    assert ran(sinks=mx.ones((4,)))
    assert not ran(mask=None), "all see all"
    assert not ran(mask=mx.tril(mx.ones((100, 120), mx.bool_), 20)), "nobody said what it hides"
    assert not ran(*(mx.concatenate([array] * 2) for array in (queries, keys, keys))), "two rows"
    assert not ran(values=mx.ones((1, 2, 120, 8)))
    assert not ran(
        queries=mx.ones((1, 4, CHUNK, 16)), keys=mx.ones((1, 2, CHUNK, 16)), values=mx.ones((1, 2, CHUNK, 16))
    )


def test_shapes():
    fits = prompt_attention.fits
    assert fits(2, 8000, 2048)
    assert fits(2047, 2047, 2048) and not fits(2048, 2048, 2048)
    most = prompt_attention.MOST_PAIRS // 1024
    assert fits(1024, most, 2048) and not fits(1024, most + 1, 2048)


def test_kernels_of_one_name_have_one_source():
    """MLX keeps a kernel by its name."""
    sources: dict[str, str] = {}
    for width, group, dtype, sinks in product((64, 512), (1, 8), (mx.bfloat16, mx.float16), (False, True)):
        function, source = prompt_attention.source_of(width, group, dtype, sinks)
        assert f"#define FUNCTION {function}\n" in source
        assert sources.setdefault(function, source) == source
    assert len(set(sources.values())) == len(sources) == 16


class Zeros(Plain):
    def __call__(self, queries, *given, **named):
        return mx.zeros_like(queries)


class WithoutWindow(Plain):
    def __call__(self, *given, window=0, sinks=None, before=0):
        return super().__call__(*given, sinks=sinks)


class WithoutSinks(Plain):
    def __call__(self, *given, window=0, sinks=None, before=0):
        return super().__call__(*given, window=window)


def test_the_kernel_is_used_once_it_computes_what_mlx_does(monkeypatch: pytest.MonkeyPatch, caplog):
    def passes(kind: type[Plain], width: int = 64, dtype: Any = mx.bfloat16, sinks: bool = False) -> bool:
        monkeypatch.setattr(prompt_attention, "PromptKernel", lambda *given: kind())
        return prompt_attention.checked.__wrapped__(width, 2, dtype, sinks) is not None

    with caplog.at_level("INFO"):
        assert passes(Plain) and passes(Plain, sinks=True)
    assert "ends of prompts attend by omlxd's kernel" in caplog.text
    assert passes(Plain, 80) and passes(Plain, 512)
    assert not passes(Plain, 72) and not passes(Plain, 288) and not passes(Plain, dtype=mx.float32)
    assert not passes(Zeros) and not passes(WithoutWindow) and not passes(WithoutSinks, sinks=True)
    assert passes(WithoutSinks)
    assert "ours differs by" in caplog.text
    monkeypatch.undo()
    if mlx_adapter.backend() != "cuda":  # There is no GPU, and most likely no NVRTC.
        assert prompt_attention.checked.__wrapped__(64, 2, mx.bfloat16, False) is None
        assert "ours does not run here" in caplog.text
