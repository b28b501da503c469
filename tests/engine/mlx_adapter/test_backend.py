"""What every attention backend keeps to: MLX's own, and a stub of forty lines with a kernel of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from families import build_family

from omlxd.engine import mlx_adapter
from omlxd.engine.mlx_adapter.attention import backend, hooks
from omlxd.engine.mlx_adapter.attention.backend import AttentionBackend, AttentionCall, MlxBackend


class StubBackend(AttentionBackend):
    """Attends to plain KV by products of its own, and notes what it is asked."""

    name = "stub"
    equal_segments = True
    compares_rows = True

    def __init__(self) -> None:
        self.asked: list[str] = []

    def install(self) -> None:
        self.asked.append("install")

    def before_weights(self, model: Any) -> None:
        self.asked.append("before_weights")

    def beside_weights(self, model: Any) -> None:
        self.asked.append("beside_weights")

    def prepare(self, model: Any) -> None:
        self.asked.append("prepare")

    def warm_up(self, model: Any) -> None:
        self.asked.append("warm_up")

    def forward(self, call: AttentionCall) -> mx.array | None:
        queries, keys, values, _, scale, mask, sinks = call
        if isinstance(mask, str) or mask is not None or sinks is not None or isinstance(keys, list):
            return None
        self.asked.append("forward")
        group = queries.shape[1] // keys.shape[1]
        keys, values = (mx.repeat(array, group, axis=1) for array in (keys, values))
        weights = mx.softmax(queries * scale @ keys.swapaxes(-1, -2), axis=-1, precise=True)
        return weights @ values


BACKENDS = {"mlx": MlxBackend, "stub": StubBackend}


@pytest.fixture(params=[*BACKENDS])
def current(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> AttentionBackend:
    made = BACKENDS[request.param]()
    monkeypatch.setattr(backend, "_current", made)
    return made


def logits(model: Any, tokens: list[int], stops: tuple[int, ...]) -> np.ndarray:
    """Of the last token, after forwards up to these tokens, in rows of a batch from the second one on."""
    cache, start, out = mlx_adapter.new_cache(model, 64), 0, mx.zeros(0)
    for stop in stops:
        with backend.current().chunk(final=stop == stops[-1]):
            out = model(mx.array([tokens[start:stop]]), cache=cache)
        mx.eval(out, mlx_adapter.state_arrays(cache))
        cache, start = cache if start else mlx_adapter.merge([cache]), stop
    return np.array(out[:, -1].astype(mx.float32))


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_a_model_answers_as_by_mlx_alone(
    family: str, current: AttentionBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    folder, tokens = build_family(family, tmp_path / family), [*range(7, 40)]
    got = logits(mlx_adapter.load(folder).model, tokens, (20, 31, 32, 33))
    if isinstance(current, StubBackend):
        steps = ["install", "before_weights", "beside_weights", "prepare", "warm_up"]
        assert [step for step in current.asked if step in steps] == steps and "forward" in current.asked
    monkeypatch.setattr(backend, "_current", None)
    monkeypatch.setattr(MlxBackend, "forward", lambda self, call: None)
    want = logits(mlx_adapter.load(folder).model, tokens, (20, 31, 32, 33))
    np.testing.assert_allclose(got, want, atol=3e-4)


def test_rows_keep_their_own_kv(current: AttentionBackend, tmp_path: Path):
    """Rows that join and leave a batch go on as they do alone, by the backend's steps if it has any."""
    loaded = mlx_adapter.load(build_family("llama", tmp_path / "llama"))
    step, alone, rows = current.decode_step(loaded.model), list[np.ndarray](), list[Any]()
    for length in (5, 21):
        cache = mlx_adapter.new_cache(loaded.model, 32)
        loaded.model(mx.arange(length)[None] + 5, cache=cache)
        rows.append(mlx_adapter.copied(cache))
        alone.append(np.array(loaded.model(mx.array([[9]]), cache=cache)[:, -1].astype(mx.float32)))
    batch = mlx_adapter.merge([rows[0]])
    mlx_adapter.extend(batch, rows[1])
    tokens = mx.array([[9], [9]])
    if isinstance(current, StubBackend):
        current.asked.clear()
    out = step(tokens, batch, 0)
    out = loaded.model(tokens, cache=batch) if out is None else out
    np.testing.assert_allclose(np.array(out[:, -1].astype(mx.float32)), np.concatenate(alone), atol=3e-4)
    if isinstance(current, StubBackend):  # A kernel of `forward` alone attends to each row of a batch, too.
        assert current.asked == ["forward"] * len(tokens) * len(batch)
    held = mlx_adapter.row_tensors(batch, 1, 0, 22)
    assert all(array.shape[2] == 22 for array in held.values())
    mlx_adapter.let_go(mlx_adapter.keep_rows(batch, [1]))
    current.wait()
    assert not step.most_tokens(batch) or step.most_new > 1


def test_what_no_kernel_takes_goes_on_to_mlx(current: AttentionBackend):
    queries, keys = mx.random.normal((1, 4, 3, 16)), mx.random.normal((1, 2, 9, 16))
    got = hooks.attend(queries, keys, keys, None, 0.25, "causal")
    want = mx.fast.scaled_dot_product_attention(queries, keys, keys, scale=0.25, mask="causal")
    np.testing.assert_allclose(got, want, atol=1e-5)


def test_figures_of_memory_make_sense(current: AttentionBackend):
    current.trim_memory()
    free = current.free_memory()
    assert free is None or free > 0
    assert 0 < current.memory_reserve < 1 and current.masked_cost >= 1 and current.gathered_multiple >= 1


def test_the_device_says_which_one_it_is(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(backend, "_made", {})
    backend.register("cpu", StubBackend)
    monkeypatch.setattr(backend, "device", lambda: "cpu")
    monkeypatch.setattr(backend, "_current", None)
    assert backend.current().name == "stub" and backend.current() is backend.current()
    monkeypatch.setattr(backend, "device", lambda: "metal")
    monkeypatch.setattr(backend, "_current", None)
    assert backend.current().name == "mlx"
