"""Models whose batches are read by attention's Metal kernels, which stand-ins compute: rows join, leave, grow
and forget guesses with the numbers of MLX's own attention, and each with the bits that it has alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from backends import use_backend
from families import build_family
from family_configs import WINDOW
from fast_or_slow import rest_slow
from metal import pretended

from omlxd.engine import mlx_adapter
from omlxd.engine.mlx_adapter import Quantisation
from omlxd.engine.mlx_adapter.attention import backend
from omlxd.engine.mlx_adapter.cache.kinds import leaves
from omlxd.engine.mlx_adapter.cache.rows import RowBatch
from omlxd.engine.mlx_adapter.metal import kernel as kernel_module
from omlxd.engine.mlx_adapter.metal import rule
from omlxd.engine.mlx_adapter.metal.attention.rows import SpanRowsKVCache
from omlxd.engine.mlx_adapter.metal.backend import MetalBackend

FAMILIES = ("qwen3", "gemma3_text", "gpt_oss", "qwen3_next", "gemma3n", "qwen3 8", "qwen3 4")
LENGTHS = (70, 9, WINDOW + 1)


@pytest.fixture
def by_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_module, "run", pretended.run)
    monkeypatch.setattr(rule, "times_of", lambda timed, clock=None: (0.5, 1.0))
    monkeypatch.setattr(rule, "_verdicts", {})
    monkeypatch.setattr(backend, "_current", MetalBackend())


def load(name: str, folder: Path) -> mlx_adapter.LoadedModel:
    family, _, bits = name.partition(" ")
    changes = {"changes": {"head_dim": 64}} if bits else {}
    if not folder.exists():
        build_family(family, folder, **changes)
    return mlx_adapter.load(folder, Quantisation(int(bits)) if bits else None, segment=64, segments_pay=True)


def prefilled(loaded: mlx_adapter.LoadedModel, length: int, seed: int) -> mlx_adapter.Cache:
    cache = mlx_adapter.new_cache(loaded.model, 1)
    mx.eval(loaded.model(mx.random.randint(5, 200, (1, length), key=mx.random.key(seed)), cache=cache))
    return cache


def story(loaded: mlx_adapter.LoadedModel, rows: list[int]) -> dict[int, list[mx.array]]:
    """Logits of each row, pass by pass, and what it keeps in the end. The last one goes on alone."""
    out: dict[int, list[mx.array]] = {row: [] for row in rows}
    first, *others = rows
    batch, present = mlx_adapter.merge([prefilled(loaded, LENGTHS[first], first)], apart=True), [first]
    own = [leaf for _, leaf in leaves(batch) if isinstance(leaf, RowBatch)]
    if isinstance(backend.current(), MetalBackend):
        assert own and all(isinstance(leaf, SpanRowsKVCache) for leaf in own)
    for row in others:
        mlx_adapter.extend(batch, prefilled(loaded, LENGTHS[row], row))
        present.append(row)
    takes_back = mlx_adapter.can_take_back(batch, 3)
    for step in range(12):
        new = 4 if step % 4 == 1 and takes_back else 1
        tokens = mx.array([[7 * row + step + at for at in range(new)] for row in present])
        logits = loaded.model(tokens, cache=batch)
        for at, row in enumerate(present):
            out[row].append(logits[at])
        mx.eval(logits)
        if new > 1:
            mlx_adapter.trim(batch, present)
    for at, row in enumerate(present):
        length = LENGTHS[row] + (9 + 3 * (4 - row) if takes_back else 12)
        out[row] += mlx_adapter.row_tensors(batch, at, 0, length).values()
        out[row] += mlx_adapter.row_states(batch, at).values()
    mx.eval(out[first])
    mlx_adapter.let_go(mlx_adapter.keep_rows(batch, [len(present) - 1]))
    out[present[-1]].append(loaded.model(mx.array([[3]]), cache=batch)[0])
    return out


@pytest.mark.parametrize("family", rest_slow(FAMILIES, "qwen3", "gemma3_text", "qwen3 8"))
def test_rows_of_a_model(family: str, by_kernels: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    loaded = load(family, tmp_path / "model")
    assert mlx_adapter.has_own_rows(loaded.model) and mlx_adapter.attention_backend().rows_pay()
    together = story(loaded, [0, 1, 2])
    for row in (1, 2):
        alone = story(loaded, [row])[row]
        assert all(map(mx.array_equal, alone[: len(together[row])], together[row])), row
    use_backend(monkeypatch, "mlx")
    want = story(load(family, tmp_path / "model"), [0, 1, 2])
    for row, arrays in want.items():
        for got, wanted in zip(together[row], arrays, strict=True):
            if wanted.dtype != mx.uint32:
                close = 3e-3 if " " in family else 3e-4
                np.testing.assert_allclose(np.array(got), np.array(wanted), atol=close)


@pytest.mark.parametrize("family", ["qwen3", "qwen3 8"])
def test_rows_that_share_segments(family: str, by_kernels: Any, tmp_path: Path):
    """A row alone reads them in a prompt's last pass as in a batch, and shared ones change no bit."""
    loaded = load(family, tmp_path / "model")
    assert loaded.segments.tokens == 64 and mlx_adapter.attention_backend().steps_read_segments(loaded.model)
    tokens = mx.random.randint(5, 200, (1, 200), key=mx.random.key(0))

    def cache() -> mlx_adapter.Cache:
        made = mlx_adapter.new_cache(loaded.model, 1)
        mx.eval(loaded.model(tokens[:, :150], cache=made), mlx_adapter.state_arrays(made))
        loaded.segments.cut(made, [b"a", b"b", b"c"], 64, 151, 220, last=True)
        return made

    one, two = cache(), cache()
    assert len(loaded.segments) == 2
    whole = loaded.model(tokens[:, 150:153], cache=mlx_adapter.copied(one))[0]
    batch = mlx_adapter.merge([one])
    mlx_adapter.extend(batch, two)
    joint = loaded.model(mx.concatenate([tokens[:, 150:153], tokens[:, 160:163]]), cache=batch)
    assert mx.array_equal(whole, joint[0]) and not mx.array_equal(joint[0], joint[1])
