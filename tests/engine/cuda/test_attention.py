"""Where decode's own kernel takes over, with a kernel of MLX's ops in its place: it runs on CUDA alone."""

from __future__ import annotations

from itertools import product

import mlx.core as mx
import numpy as np
import pytest
from families import FAMILIES, build_family
from family_configs import CONFIGS, WINDOW, WINDOWED
from fast_or_slow import SOME_FAMILIES, diagonal, rest_slow
from mlx_lm.models import base
from mlx_lm.models.cache import KVCache

from omlxd.engine import mlx_adapter
from omlxd.engine.mlx_adapter.attention import hooks as attention
from omlxd.engine.mlx_adapter.cuda.attention import attend, attention_source
from omlxd.engine.mlx_adapter.cuda.attention.attention_kernel import Tails

from .conftest import Reference, known_addresses

LENGTHS = (5, 40, 17)
STEPS = 3


def decode(
    loaded: mlx_adapter.LoadedModel, lengths: tuple[int, ...] = LENGTHS, steps: int = STEPS, first: int = 0
) -> np.ndarray:
    """Logits of some steps of rows of these lengths, (steps, rows, vocabulary).

    first  the first row's number
    """
    caches = []
    for seed, length in enumerate(lengths, first):
        cache = mlx_adapter.new_cache(loaded.model, 64)
        tokens = mx.random.randint(5, 200, (1, length), key=mx.random.key(seed))
        mx.eval(loaded.model(tokens, cache=cache))
        caches.append(cache)
    batch = caches[0]
    if len(caches) > 1:
        batch = mlx_adapter.merge([batch])
        for cache in caches[1:]:
            mlx_adapter.extend(batch, cache)
    rows = []
    for step in range(steps):
        tokens = mx.array([[10 + 7 * step + first + row] for row in range(len(lengths))])
        rows.append(np.array(loaded.model(tokens, cache=batch)[:, -1].astype(mx.float32)))
    return np.stack(rows)


@pytest.mark.parametrize(
    ("family", "lengths"),
    [
        *((name, LENGTHS) for name in SOME_FAMILIES),
        *diagonal(sorted({*FAMILIES} - {*SOME_FAMILIES}), (LENGTHS, (33, 33), (33,))),
        *diagonal(SOME_FAMILIES, ((33, 33), (33,))),
    ],
)
def test_it_computes_what_mlx_does(family: str, lengths: tuple[int, ...], tmp_path, reference):
    loaded = mlx_adapter.load(build_family(family, tmp_path / family))
    want = decode(loaded, lengths)
    reference()
    got = decode(loaded, lengths)
    # Gemma 4 scales no scores: they are large, and MLX's own parts as far alone and in a batch.
    np.testing.assert_allclose(got, want, atol=1e-3 if family == "gemma4_text" else 2e-4)
    assert (Reference.calls > 0) == _taken(family), "taken where it may be, and nowhere else"


@pytest.mark.slow
@pytest.mark.parametrize(
    "family",
    ("gemma3_text", "gemma3n", "gpt_oss"),
)
def test_a_window_is_read_in_the_same_order_alone_and_in_a_batch(family: str, tmp_path, reference):
    """Below, at and beyond the window; in a batch a row lies in other columns of the ring. The reference is
    exact in that: other orders give other bits."""
    loaded = mlx_adapter.load(build_family(family, tmp_path / family))
    lengths = (5, WINDOW - 2, 3 * WINDOW + 7, WINDOW + 1)
    reference()
    together = decode(loaded, lengths, WINDOW + 3)
    for row in range(len(lengths)):
        alone = decode(loaded, lengths[row : row + 1], WINDOW + 3, first=row)
        apart = np.abs(alone[:, 0] - together[:, row]).max()
        assert apart < 2e-5, "products of one row and of four may round otherwise"
    passes = (WINDOW + 3) * (1 + len(lengths)) + 2 * 3  # Three prompts are short enough too.
    assert Reference.calls == passes * len(loaded.model.layers), "every layer's, shared KV included"


@pytest.mark.parametrize("family", rest_slow(FAMILIES, *SOME_FAMILIES))
def test_a_load_asks_for_it_before_any_request_does(family: str, tmp_path, reference):
    folder = build_family(family, tmp_path / family)
    reference()
    assert mlx_adapter.load(folder).batchable
    assert (Reference.calls > 0) == _taken(family)


def _taken(family: str) -> bool:
    return bool(CONFIGS[family].classes & WINDOWED) and family not in NOT_TAKEN


NOT_TAKEN = ("deepseek_v3", "deepseek_v32", "glm_moe_dsa", "kimi_linear")
"""Their attention derives keys and values from what their caches keep."""


def test_a_row_that_leaves_and_one_that_joins(tmp_path, reference):
    loaded = mlx_adapter.load(build_family("llama", tmp_path / "llama"))

    def run() -> np.ndarray:
        caches = []
        for seed, length in enumerate(LENGTHS):
            cache = mlx_adapter.new_cache(loaded.model, 64)
            mx.eval(
                loaded.model(mx.random.randint(5, 200, (1, length), key=mx.random.key(seed)), cache=cache)
            )
            caches.append(cache)
        batch = mlx_adapter.merge([caches[0]])
        mlx_adapter.extend(batch, caches[1])
        loaded.model(mx.array([[3], [4]]), cache=batch)
        mlx_adapter.keep_rows(batch, [0])
        mlx_adapter.extend(batch, caches[2])
        return np.array(loaded.model(mx.array([[5], [6]]), cache=batch)[:, -1])

    want = run()
    reference()
    np.testing.assert_allclose(run(), want, atol=2e-4)
    assert Reference.calls > 0


@pytest.mark.parametrize("family", ["llama", "gpt_oss", "olmo3"])
def test_rows_that_took_different_numbers_of_guesses(family: str, tmp_path, reference):
    """They end at columns of their own; a row that ends early may leave, and others join."""
    loaded = mlx_adapter.load(build_family(family, tmp_path / family))
    tokens = [[int(token) for token in np.random.default_rng(seed).integers(5, 200, 60)] for seed in range(4)]

    def run() -> list[np.ndarray]:
        def row(index: int, length: int) -> mlx_adapter.Cache:
            cache = mlx_adapter.new_cache(loaded.model, 64)
            mx.eval(loaded.model(mx.array([tokens[index][:length]]), cache=cache))
            return cache

        out, rows, at = [], [0, 1, 2], [9, 30, 21]

        def step(count: int) -> None:
            """The next `count` tokens of each row."""
            inputs = [tokens[row][start : start + count] for row, start in zip(rows, at, strict=True)]
            with mlx_adapter.last_positions(count):
                out.append(np.array(loaded.model(mx.array(inputs), cache=batch)))
            at[:] = [start + count for start in at]

        def trim(*counts: int) -> None:
            mlx_adapter.trim(batch, counts)
            at[:] = [start - count for start, count in zip(at, counts, strict=True)]

        batch = mlx_adapter.merge([row(0, 9)])
        mlx_adapter.extend(batch, row(1, 30))
        mlx_adapter.extend(batch, row(2, 21))
        step(5)
        trim(0, 4, 2)
        step(1)
        step(4)
        trim(3, 3, 0)
        mlx_adapter.keep_rows(batch, [0, 2])
        rows, at = [0, 2], [at[0], at[2]]
        step(1)
        mlx_adapter.extend(batch, row(3, 12))
        rows, at = [0, 2, 3], [*at, 12]
        step(1)
        step(3)
        for index, (which, end) in enumerate(zip(rows, at, strict=True)):
            held = mlx_adapter.row_tensors(batch, index, 0, end)
            alone = mlx_adapter.tensors(row(which, end))
            for name, array in held.items():
                np.testing.assert_allclose(np.array(array), np.array(alone[name][:, :, :end]), atol=1e-5)
        # What a row of its own says at the same places.
        for index, end in enumerate(at):
            logits = loaded.model(mx.array([tokens[rows[index]][:end]]))
            np.testing.assert_allclose(out[-1][index, -1], np.array(logits)[0, -1], atol=2e-4)
        return out

    want = run()
    reference()
    for got, expected in zip(run(), want, strict=True):
        np.testing.assert_allclose(got, expected, atol=2e-4)
    assert Reference.several > 0


def test_ends_of_prompts_and_guesses_of_one_row(tmp_path, reference):
    loaded = mlx_adapter.load(build_family("llama", tmp_path / "llama"))

    def run() -> np.ndarray:
        cache = mlx_adapter.new_cache(loaded.model, 256)
        for start, stop in ((0, 100), (100, 137), (137, 138), (138, 143)):
            tokens = mx.random.randint(5, 200, (1, stop - start), key=mx.random.key(start))
            out = loaded.model(tokens, cache=cache)
            mx.eval(out)
        return np.array(out)

    want = run()
    reference()
    np.testing.assert_allclose(run(), want, atol=2e-4)
    layers = len(loaded.model.layers)
    assert (Reference.calls, Reference.several) == (3 * layers, 2 * layers)


def test_padding_windows_and_other_arrays_go_on_to_mlx(reference):
    reference()
    cache = mlx_adapter.EvenBatchKVCache([0, 2])
    part, one = mx.ones((2, 1, 4, 8)), mx.ones((2, 1, 1, 8))
    queries = mx.ones((2, 2, 1, 8))
    keys, values = cache.update_and_fetch(part, part)
    attention.attend(mx.ones((2, 2, 4, 8)), keys, values, cache, 1.0, "causal")
    windowed, plain = cache.make_mask(1, window_size=2), cache.make_mask(1)
    keys, values = cache.update_and_fetch(one, one)
    attention.attend(queries, keys, values, cache, 1.0, windowed)
    attention.attend(queries, keys * 2, values, cache, 1.0, plain)
    attention.attend(queries, keys, values, mlx_adapter.EvenBatchKVCache([0, 2]), 1.0, plain)
    assert Reference.calls == 0
    attention.attend(queries, keys, values, cache, 1.0, plain)
    attention.attend(queries, keys, values, None, 1.0, plain, sinks=mx.zeros((2,)))
    assert Reference.calls == 2


def test_without_cuda_nothing_changes():
    before = KVCache.update_and_fetch
    attention.install()
    assert KVCache.update_and_fetch is before and base.scaled_dot_product_attention is attention.attend
    assert not mlx_adapter.attention_backend().reads_own_rows()


def test_kernels_of_one_name_have_one_source():
    """MLX keeps a kernel by its name."""
    sources: dict[str, str] = {}
    read = ("spans", "spans_out", "step", "step_out", "several", "several_out", "tiles")
    names = (*read, *(f"own_{name}" for name in read), "merge")
    for name, width, group, ring, sinks in product(names, (80, 512), (1, 8), (False, True), (False, True)):
        for dtype, span in product((mx.bfloat16, mx.float16), (512, 1024)):
            how = {"ring": ring, "sinks": sinks}
            function, source = attention_source.source_of(name, width, group, dtype, span, **how)
            assert f"#define FUNCTION {function}\n" in source
            assert sources.setdefault(function, source) == source
    assert len(set(sources.values())) == len(sources) == len(names) * 2 * 2 * 2 * 2 * 2 * 2


@pytest.mark.parametrize(("width", "lanes", "heads"), [(16, 2, 8), (80, 16, 8), (128, 16, 8), (512, 32, 4)])
def test_lanes_hold_a_whole_head(width: int, lanes: int, heads: int):
    assert attention_source.lanes_of(width) == lanes
    assert attention_source.heads_at_once(width, 16) == heads
    assert attention_source.heads_at_once(width, 9) == -(-9 // -(-9 // heads))
    assert attention_source.heads_at_once(width, 1) == 1


class Exact(Reference):
    """Rounds its results alone, and its step has the bits of its call, as those of the kernel."""

    def __call__(self, queries, keys, values, places, scale, *, window=0, sinks=None):
        exact = (array.astype(mx.float32) for array in (queries, keys, values))
        sinks = None if sinks is None else sinks.astype(mx.float32)
        return super().__call__(*exact, places, scale, window=window, sinks=sinks).astype(queries.dtype)

    def step(self, queries, fresh, held, starts, ends, scale, sinks=None):
        if isinstance(held, Tails):
            return super().step(queries, fresh, held, starts, ends, scale, sinks)
        _, *kept = super().step(queries, fresh, held, starts, ends, scale, sinks)
        return self(
            queries, *kept, (starts.tolist(), ends.tolist()), scale, window=1 << 30, sinks=sinks
        ), *kept


class WithoutSinks(Exact):
    def __call__(self, *arguments, window=0, sinks=None):
        return super().__call__(*arguments, window=window)


class WithoutWindow(Exact):
    def __call__(self, *arguments, window=0, sinks=None):
        return super().__call__(*arguments, window=1 << 30, sinks=sinks)


class ShortOfATurn(Exact):
    """Reads a ring as if it ended with its arrays."""

    def __call__(self, queries, keys, values, places, *arguments, **named):
        ends = [min(end, keys.shape[2]) for end in places[1]]
        return super().__call__(queries, keys, values, (places[0], ends), *arguments, **named)


@pytest.mark.parametrize("window", [False, True])
@pytest.mark.parametrize("sinks", [False, True])
def test_a_kernel_is_used_once_it_computes_what_mlx_does(window: bool, sinks: bool, monkeypatch, caplog):
    known_addresses(monkeypatch)

    def passes(kind: type[Reference]) -> bool:
        monkeypatch.setattr(attend, "Kernel", lambda *_, **__: kind())
        return attend._checked(16, 2, mx.bfloat16, window, sinks) is not None

    with caplog.at_level("INFO"):
        assert passes(Exact)
    assert (", windows" in caplog.text, ", sinks" in caplog.text) == (window, sinks)
    assert passes(WithoutSinks) != sinks
    assert passes(WithoutWindow) != window
    assert passes(ShortOfATurn) != window
    assert ("ours differs by" in caplog.text) == (window or sinks)


def test_shapes_that_have_a_kernel(monkeypatch):
    asked: list[tuple] = []
    monkeypatch.setattr(attend, "_kernels", {})
    monkeypatch.setattr(attend, "_checked", lambda *key: asked.append(key))

    def ask(width: int, heads: int, dtype=mx.bfloat16, sinks: mx.array | None = None) -> bool:
        before = len(asked)
        attend.kernel_for(
            mx.zeros((1, heads, 1, width), dtype), mx.zeros((1, 2, 4, width), dtype), True, sinks
        )
        return len(asked) > before

    assert all(ask(width, 2) for width in (64, 80, 96, 112, 128, 160, 192, 256, 512))
    assert not any(ask(width, 2) for width in (8, 100, 320, 576))
    assert all(ask(64, 2 * group) for group in (7, 8, 48))
    assert not ask(64, 4, mx.float32) and not ask(64, 4, sinks=mx.zeros((4,)))
    assert ask(64, 4, sinks=mx.zeros((4,), mx.bfloat16))
    assert asked[-1] == (64, 2, mx.bfloat16, True, True)
