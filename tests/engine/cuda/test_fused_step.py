"""The fused decode step beside the model's own, by MLX's ops in place of its kernels, which run on CUDA."""

from __future__ import annotations

import os
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from backends import use_backend
from families import FAMILIES, build_family
from fast_or_slow import SOME_FAMILIES, rest_slow

from omlxd.engine import mlx_adapter
from omlxd.engine.mlx_adapter import Quantisation
from omlxd.engine.mlx_adapter.cuda import backend as cuda_backend
from omlxd.engine.mlx_adapter.cuda.attention.attention_kernel import Tails
from omlxd.engine.mlx_adapter.cuda.attention.fused_attention import (
    MOST_NEW,
    FusedAttention,
    Heads,
    Shape,
    source_of,
)
from omlxd.engine.mlx_adapter.cuda.attention.segments import Shared
from omlxd.engine.mlx_adapter.cuda.products.products_kernel import FORMS, SET
from omlxd.engine.mlx_adapter.cuda.step import compiled_step, fused_step, model_checks, places
from omlxd.engine.mlx_adapter.cuda.step.compiled_step import CompiledStep
from omlxd.engine.mlx_adapter.cuda.step.fused_step import FusedStep
from omlxd.engine.mlx_adapter.cuda.step.fused_weights import Unfusable
from omlxd.engine.mlx_adapter.model import checks
from omlxd.engine.mlx_adapter.model import load as loading
from omlxd.engine.speculate.verify import packed_size

from .conftest import SegmentReference, only_seen, put_newest, with_room
from .test_compiled_step import STEPS, Steps, batch_of

FUSED = ("llama", "qwen3")
VARIANTS = {
    "llama": ("llama", {}),
    "biases, pairs": ("llama", {"attention_bias": True, "mlp_bias": True, "rope_traditional": True}),
    "qwen3": ("qwen3", {}),
}


class Attend:
    """What cuda/attention/fused_attention.py's kernel computes. Counts its calls."""

    def __init__(self, heads: Heads):
        self.heads, self.calls, self.by_address = heads, 0, 0

    def __call__(
        self,
        new: Any,
        norms: Any,
        turns: mx.array,
        held: Any,
        starts: mx.array,
        ends: mx.array,
        owners: mx.array | None = None,
        shared: Shared | None = None,
    ) -> Any:
        """Of nobody's rows it gives NaN, as the kernel may. Writes in place what it gets by address."""
        self.calls += 1
        if isinstance(held, Tails):
            self.by_address += 1
            own = [
                [SegmentReference.arrays[number] for number in of]
                for of in np.array(held.table)[:, :2].T.tolist()
            ]
            most = max(array.shape[2] for array in own[0])
            joint = [mx.concatenate([with_room(array, most) for array in arrays]) for arrays in own]
            out, *now = self(new, norms, turns, joint, starts, ends, owners, shared)
            for arrays, array in zip(own, now, strict=True):
                for row, tail in enumerate(arrays):
                    tail[:] = array[row : row + 1, :, : tail.shape[2]]
            return out
        rows, size = held[0].shape[0], turns.shape[0]
        owners = mx.arange(rows) * MOST_NEW if owners is None else owners
        out = mx.full((size, self.heads.heads * self.heads.width), mx.nan, turns.dtype)
        for token in range(min(MOST_NEW, size - rows + 1)):
            own = owners == mx.arange(rows)[:, None] * MOST_NEW + token
            has, at = own.any(axis=1), own.argmax(axis=1)
            given = tuple(array[at] for array in new), norms, turns[at], held, starts[at], ends[at]
            of_token, *now = self._of_one_token(*given, shared and _of_rows(shared, at))
            out[at] = mx.where(has[:, None], of_token, out[at])
            held = [mx.where(has[:, None, None, None], a, b) for a, b in zip(now, held, strict=True)]
        return out, *held

    def _of_one_token(
        self, new: Any, norms: Any, turns: mx.array, held: Any, starts: mx.array, ends: mx.array, shared: Any
    ) -> tuple[mx.array, mx.array, mx.array]:
        heads = self.heads
        q, k, v = (array.reshape(turns.shape[0], -1, heads.width) for array in new)
        if norms is not None:
            q, k = (mx.fast.rms_norm(x, weight, heads.eps) for x, weight in zip((q, k), norms, strict=True))
        q, k = self._turned(q, turns), self._turned(k, turns)
        fresh = k[:, :, None], v[:, :, None]
        if shared is not None:
            step = SegmentReference().step(q[:, :, None], fresh, held, shared, starts, ends, heads.scale)
            return step[0].reshape(turns.shape[0], -1), *step[1:]
        keys, values = put_newest(held, fresh, ends)
        columns = mx.arange(keys.shape[2])
        seen = (columns >= starts[:, None]) & (columns < ends[:, None])
        held = only_seen((keys, values), seen)
        out = mx.fast.scaled_dot_product_attention(
            q[:, :, None], *held, scale=heads.scale, mask=seen[:, None, None]
        )
        return out.reshape(turns.shape[0], -1), keys, values

    def _turned(self, x: mx.array, turns: mx.array) -> mx.array:
        heads, pairs = self.heads, mx.arange(self.heads.turned // 2)
        a, b = (2 * pairs, 2 * pairs + 1) if heads.traditional else (pairs, pairs + heads.turned // 2)
        cosine, sine = turns[:, None, a], turns[:, None, b]
        one, two = x[..., a], x[..., b]
        out = x + 0
        out[..., a], out[..., b] = one * cosine - two * sine, one * sine + two * cosine
        return out


def _of_rows(shared: Shared, rows: mx.array) -> Shared:
    """Of these rows alone."""
    pairs = shared.table[:, 1:].reshape(shared.table.shape[0], -1, 2)
    number, there = mx.arange(pairs.shape[1]), (pairs[:, :, :1] == rows)
    is_one = (number < shared.table[:, :1])[..., None] & there  # (segments, pairs, rows)
    held = is_one.any(axis=1)
    order = mx.argsort(~held, axis=1)
    index = (is_one * pairs[:, :, 1:]).sum(axis=1)
    pairs = mx.stack([order, mx.take_along_axis(index, order, axis=1)], axis=-1)
    table = mx.concatenate([held.sum(axis=1, keepdims=True), pairs.reshape(pairs.shape[0], -1)], axis=1)
    return shared._replace(table=table.astype(mx.int32), counts=shared.counts[rows])


def fuse(model: Any) -> FusedStep:
    step = FusedStep(model, attend=lambda *_: None)
    step.attend = Attend(step.heads)
    assert step.most_rows == 0, "no kernel of products runs here"
    step.most_rows = SET
    object.__setattr__(model, "omlxd_fused", step)  # As the load keeps it.
    return step


def fuse_passes(model: Any, most: int) -> FusedStep:
    """`fuse`, as if passes with up to `most` tokens had the bits of steps."""
    step = fuse(model)
    step.is_repeatable, step.most_rows = True, most
    return step


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(compiled_step, "fused_step", fuse)


@pytest.mark.parametrize(
    "lengths",
    [
        pytest.param((5, 40, 17), id="unequal"),
        pytest.param((33, 33), id="equal", marks=pytest.mark.slow),
        pytest.param((33,), id="one row", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("variant", rest_slow(VARIANTS, *FUSED))
def test_it_computes_what_the_model_does(variant: str, lengths: tuple[int, ...], tmp_path, reference, fused):
    family, changes = VARIANTS[variant]
    loaded = mlx_adapter.load(build_family(family, tmp_path / family, changes=changes))
    reference()
    want = Steps(loaded, batch_of(loaded, lengths), None).run(len(lengths))
    steps = Steps(loaded, cache := batch_of(loaded, lengths), CompiledStep(loaded.model))
    np.testing.assert_allclose(steps.run(len(lengths)), want, atol=2e-4)
    assert steps.done == STEPS, "compiled or not, all steps are fused"
    again = batch_of(loaded, lengths)
    Steps(loaded, again, None).run(len(lengths))
    for row, length in enumerate(lengths if len(lengths) > 1 else ()):
        held, own = (mlx_adapter.row_tensors(of, row, 0, length + STEPS) for of in (cache, again))
        for name, array in held.items():
            np.testing.assert_allclose(np.array(array), np.array(own[name]), atol=5e-5)


class Joined(FusedAttention):
    """`Attend`, in place as the kernel; a layer's launch may end with it."""

    def __init__(self, heads: Heads):
        super().__init__(heads)
        self._own = Attend(heads)

    def __call__(self, new: Any, *given: Any) -> mx.array:
        norms, turns, held, *places = given
        if isinstance(held, Tails):
            return self._own(new, norms, turns, held, *places)
        out, *now = self._own(new, norms, turns, held, *places)
        for array, ours in zip(held, now, strict=True):
            array[:] = ours
        return out

    def launch(self, *given: Any) -> Any:
        return given


@pytest.mark.parametrize("fault", [1.0, 1.01])
def test_a_launch_that_gives_what_its_parts_give_is_used(
    fault: float, tmp_path, reference, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    model = mlx_adapter.load(build_family("qwen3", tmp_path / "model")).model
    reference()
    step = fuse(model)
    step.attend, joined = Joined(step.heads), list[int]()

    def of_layers(x: Any, residual: Any, layers: Any, launches: Any) -> list[mx.array]:
        joined.append(len(x))
        for layer, launch in zip(layers, launches, strict=True):
            residual, *new = fused_step.products.of_layer(x, residual, layer)
            x = step.attend(new, *launch)
        return [residual * fault, x]

    monkeypatch.setattr(fused_step.products, "of_layers", of_layers)
    with caplog.at_level("INFO"):
        step.check(model, compiled_step.StepKV)
    assert joined == [rows * count for rows, count in fused_step.JOINED][: None if fault == 1 else 1]
    assert ("have other bits" in caplog.text) == (fault != 1)


@pytest.mark.parametrize("bits", [8, 4])
def test_packed_kv_in_a_fused_step(bits: int, tmp_path, reference, fused):
    model = build_family("qwen3", tmp_path / "model", changes={"head_dim": 64})
    loaded = mlx_adapter.load(model, Quantisation(bits))
    reference()

    def run(compiled: bool) -> list[np.ndarray]:
        batch = batch_of(loaded, (5, 40, 17), capacity=41)
        steps = Steps(loaded, batch, CompiledStep(loaded.model) if compiled else None)
        out = steps.run(3, 6)
        mlx_adapter.keep_rows(batch, [0, 2])
        mlx_adapter.trim(batch, [1, 0])
        steps.count = 0
        out += steps.run(2, 6)
        mlx_adapter.extend(batch, batch_of(loaded, (9,)))
        steps.count = 0
        out += steps.run(3, 2)
        assert not compiled or steps.done == 14
        return out

    for got, want in zip(run(True), run(False), strict=True):
        np.testing.assert_allclose(got, want, atol=2e-4)


@pytest.mark.parametrize(
    "lengths",
    [(5, 40, 17), *(pytest.param(equal, marks=pytest.mark.slow) for equal in ((33, 33), (33,)))],
    ids=["unequal", "equal", "one row"],
)
@pytest.mark.parametrize("variant", rest_slow(VARIANTS, "qwen3"))
def test_a_pass_of_several_tokens_is_that_of_steps(variant: str, lengths, tmp_path, reference, fused):
    """Also where rows have taken different numbers of guesses, and where there was no room."""
    family, changes = VARIANTS[variant]
    loaded = mlx_adapter.load(build_family(family, tmp_path / family, changes=changes))
    reference()
    compiled, rows = CompiledStep(loaded.model), len(lengths)
    step = compiled._fused
    assert step is not None and step.repeats(compiled_step.StepKV), "what the load checks"
    tokens = mx.random.randint(5, 200, (rows, 12), key=mx.random.key(9))

    def run(counts: list[int]) -> list[mx.array]:
        """Passes of `counts` tokens; of those of 4, rows forget one, two or none, and get them again."""
        cache, at, out = batch_of(loaded, lengths, capacity=41), [0] * rows, []
        for steps, count in enumerate(counts):
            given = mx.stack([tokens[row, start : start + count] for row, start in enumerate(at)])
            logits = compiled(given, cache, steps)
            assert logits is not None and logits.shape[:2] == (rows, count)
            if count < 4:
                gone = [0] * rows
            else:
                gone = [row % 3 for row in range(rows)]
                mlx_adapter.trim(cache, gone)
            for row, back in enumerate(gone):
                out.append((row, at[row], logits[row, : count - back]))
                at[row] += count - back
        return out

    each = {(row, at): x[0] for row, at, x in run([1] * 9)}
    for row, start, some in run([4, 1, 2, 1]):
        for i, logits in enumerate(some):
            np.testing.assert_allclose(logits, each[row, start + i], atol=2e-4)


def test_passes_that_are_too_long_are_the_models_own(tmp_path, reference, fused):
    loaded = mlx_adapter.load(build_family("llama", tmp_path / "llama"))
    reference()
    compiled, cache = CompiledStep(loaded.model), batch_of(loaded, (5, 40, 17))
    assert compiled.most_tokens(cache) == 0 and compiled(mx.ones((3, 2), mx.int32), cache, 0) is None
    assert compiled._fused is not None and compiled._fused.repeats(compiled_step.StepKV)
    assert compiled.most_tokens(cache) == SET
    assert compiled(mx.ones((3, 11), mx.int32), cache, 0) is None
    assert compiled(mx.ones(33, mx.int32), cache, 0, [16, 1, 16]) is None
    assert compiled(mx.ones(20, mx.int32), cache, 0, [17, 1, 2]) is None, "MOST_NEW of a row"
    assert compiled(mx.ones((3, 10), mx.int32), cache, 0) is not None


@pytest.mark.parametrize("compiled_at_once", [True, False])
def test_a_flat_pass_has_of_each_row_its_own_tokens(
    compiled_at_once: bool, tmp_path, reference, fused, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(compiled_step, "AFTER", 0 if compiled_at_once else 99)
    loaded, lengths = mlx_adapter.load(build_family("qwen3", tmp_path / "model")), (5, 40, 17)
    reference()
    compiled = CompiledStep(loaded.model)
    assert compiled._fused is not None and compiled._fused.repeats(compiled_step.StepKV)
    tokens = np.random.default_rng(1).integers(5, 200, (3, 12)).tolist()
    cache = batch_of(loaded, lengths)
    want = [compiled(mx.array([[own[i]] for own in tokens]), cache, i) for i in range(12)]
    cache, at = batch_of(loaded, lengths), [0, 0, 0]
    for steps, counts in enumerate(([1, 3, 2], [2, 1, 1], [1, 1, 1], [4, 2, 5])):
        flat = [tokens[row][begin + i] for row, begin in enumerate(at) for i in range(counts[row])]
        filled = mx.array([*flat, *[0] * (3 + packed_size(len(flat) - 3, 29) - len(flat))])
        logits = (
            compiled(filled, cache, steps, counts)
            if steps != 2
            else compiled(mx.array(flat)[:, None], cache, 2)
        )
        assert logits is not None
        logits, most = logits.reshape(-1, logits.shape[-1]), max(counts)
        expected = [want[begin + i][row, 0] for row, begin in enumerate(at) for i in range(counts[row])]  # type: ignore[index]
        np.testing.assert_allclose(logits[: len(flat)], mx.stack(expected), atol=2e-4)
        mlx_adapter.trim(cache, [most - count for count in counts])
        at = [begin + count for begin, count in zip(at, counts, strict=True)]
    if compiled_at_once:
        assert {key[0] for key in compiled._functions} == {3, 6, 18}


@pytest.mark.parametrize("copied", [0, places.COPIED], ids=["a layer at a time", "all at once"])
def test_rows_join_and_leave(copied: int, tmp_path, reference, fused, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(places, "COPIED", copied)
    loaded = mlx_adapter.load(build_family("qwen3", tmp_path / "model"))
    reference()

    def run(compiled: bool) -> list[np.ndarray]:
        batch = batch_of(loaded, (5, 40, 17), capacity=41)  # Full at once: room is made.
        steps = Steps(loaded, batch, CompiledStep(loaded.model) if compiled else None)
        out = steps.run(3, 3)
        mlx_adapter.keep_rows(batch, [0, 2])
        steps.count = 0
        out += steps.run(2, 2)
        mlx_adapter.trim(batch, [1, 0])  # Rows that end apart.
        out += steps.run(2, 2)
        assert not compiled or steps.done == 7
        return out

    for got, want in zip(run(True), run(False), strict=True):
        np.testing.assert_allclose(got, want, atol=2e-4)


@pytest.mark.parametrize("family", rest_slow(FAMILIES, *SOME_FAMILIES, *FUSED))
def test_other_models_are_left_alone(family: str, tmp_path):
    model = mlx_adapter.load(build_family(family, tmp_path / family)).model
    if family in FUSED:
        assert fuse(model)
    else:
        with pytest.raises(Unfusable):
            fuse(model)


@pytest.mark.parametrize("what", ["another product", "another scale", "another norm", "a window", "packed"])
def test_a_model_that_is_not_quite_of_its_kind(what: str, tmp_path, reference):
    model = mlx_adapter.load(build_family("llama", tmp_path / "llama")).model
    reference()
    fuse(model).check(model, compiled_step.StepKV)
    layer = model.layers[-1]
    if what == "another product":
        kind = type(layer.mlp)
        layer.mlp.__class__ = type("MLP", (kind,), {"__call__": lambda self, x: 1.1 * kind.__call__(self, x)})
    elif what == "another scale":
        layer.self_attn.scale *= 2
    elif what == "another norm":
        layer.input_layernorm.eps *= 2
    elif what == "a window":
        layer.use_sliding = True
    else:
        layer.mlp.down_proj = nn.QuantizedLinear.from_linear(layer.mlp.down_proj, 32, 8)
    with pytest.raises(Unfusable):
        fuse(model).check(model, compiled_step.StepKV)


def test_a_model_is_checked_once(tmp_path, reference, monkeypatch: pytest.MonkeyPatch):
    reference()
    monkeypatch.setattr(model_checks, "FusedStep", fuse)
    asked: list[int] = []

    def taken(architecture: int) -> bool:
        model = mlx_adapter.load(build_family("llama", tmp_path / f"{architecture}")).model
        monkeypatch.setattr(model_checks.cuda_driver, "architecture", lambda: asked.append(1) or architecture)
        vars(model).pop("omlxd_fused")  # Of the load.
        asked.clear()
        first = model_checks.fused_step(model)
        assert model_checks.fused_step(model) is first
        assert len(asked) == 1
        return first is not None

    assert taken(90) and not taken(80)

    def unusable(model: Any) -> FusedStep:
        step = fuse(model)
        step.most_rows = 0
        return step

    monkeypatch.setattr(model_checks, "FusedStep", unusable)
    assert not taken(100)


def test_a_source_for_each_kind_of_heads():
    sources = {
        source_of(Heads(width, 4 * group, 4, width, traditional, norm, 0.1, 1e-6, dtype), Shape())
        for width in (64, 128, 256)
        for group in (1, 3, 8, 16)
        for traditional in (False, True)
        for norm in (False, True)
        for dtype in (mx.bfloat16, mx.float16)
    }
    assert len({name for name, _ in sources}) == len(sources) == 96
    assert all(source.count("{") == source.count("}") for _, source in sources)


@pytest.mark.usefixtures("compiling")
def test_a_shape_traces_some_layers_once(tmp_path, reference, fused, monkeypatch: pytest.MonkeyPatch):
    reference()
    monkeypatch.setattr(checks, "use_own_rows", lambda model: False)  # A trace has no addresses.
    traced, own = [], FusedStep.layers
    monkeypatch.setattr(FusedStep, "layers", lambda *given: traced.append(1) or own(*given))
    loaded = mlx_adapter.load(build_family("qwen3", tmp_path / "qwen3"))
    steps = Steps(loaded, batch_of(loaded, (5, 40, 17)), CompiledStep(loaded.model))
    traced.clear()
    steps.run(3)
    assert steps.compiled is not None and len(loaded.model.layers) > 1
    assert len(traced) == len(steps.compiled._functions) and steps.done == STEPS


@pytest.mark.parametrize(
    ("family", "dtype"), [("qwen3", mx.bfloat16), ("qwen3", mx.float32), ("gemma3_text", mx.bfloat16)]
)
def test_a_model_whose_steps_are_fused_is_run_without_launch_graphs(
    family: str, dtype: Any, tmp_path, monkeypatch: pytest.MonkeyPatch
):
    model = mlx_adapter.load(build_family(family, tmp_path / "model")).model
    model.set_dtype(dtype)
    monkeypatch.setattr(loading, "_model_and_config", lambda path, blind: (model, {}))
    fused = family == "qwen3" and dtype == mx.bfloat16
    for backend, given in (("cuda", None), ("cuda", "1"), ("cpu", None)):
        use_backend(monkeypatch, "mlx" if backend == "cpu" else "cuda")
        monkeypatch.delenv(cuda_backend.GRAPHS, raising=False)
        if given is not None:
            monkeypatch.setenv(cuda_backend.GRAPHS, given)
        loading.read_model(tmp_path / "model")
        expected = "0" if fused and backend == "cuda" and given is None else given
        assert os.environ.get(cuda_backend.GRAPHS) == expected


def test_without_cuda_nothing_is_fused(tmp_path):
    model = mlx_adapter.load(build_family("llama", tmp_path / "llama")).model
    assert CompiledStep(model)(mx.array([[1]]), mlx_adapter.new_cache(model, 4), 9) is None


@pytest.mark.slow
def test_the_check_runs_each_form_of_the_products(tmp_path, reference, monkeypatch: pytest.MonkeyPatch):
    model = mlx_adapter.load(build_family("llama", tmp_path / "llama")).model
    reference(few_checks=False)
    seen: list[int] = []
    own = fused_step.products.products
    monkeypatch.setattr(
        fused_step.products,
        "products",
        lambda x, *given, **how: seen.append(x.shape[0]) or own(x, *given, **how),
    )
    fuse(model).check(model, compiled_step.StepKV)
    assert {next(eights for eights in FORMS if rows <= 8 * eights) for rows in seen} == set(FORMS)


def test_a_pass_of_more_tokens_than_a_set_has_the_bits_of_steps(
    tmp_path, reference, monkeypatch: pytest.MonkeyPatch
):
    model = mlx_adapter.load(build_family("llama", tmp_path / "llama")).model
    reference(few_checks=False)
    step, own = fuse_passes(model, 4 * SET), fused_step.products.products
    assert step.repeats(compiled_step.StepKV)

    def others_behind_a_set(x, *given, **how):
        out = own(x, *given, **how)
        return [mx.concatenate([each[:SET], each[SET:] * 1.01]) for each in out] if x.shape[0] > SET else out

    monkeypatch.setattr(fused_step.products, "products", others_behind_a_set)
    assert not step.repeats(compiled_step.StepKV) and not step.is_repeatable
    step.most_rows = SET
    assert step.repeats(compiled_step.StepKV), "no pass has so many tokens"
