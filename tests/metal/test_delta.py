"""A step of gated delta net by one Metal kernel, whose source runs here as C++."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from families import build_family
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from metal import pretended, stand_ins
from metal.draws import draws
from metal.mutants import survivors
from mlx_lm.models.cache import make_prompt_cache

from omlxd.engine import mlx_adapter
from omlxd.engine.mlx_adapter.metal import kernel as kernel_module
from omlxd.engine.mlx_adapter.metal import rule
from omlxd.engine.mlx_adapter.metal.delta import layers, prompts
from omlxd.engine.mlx_adapter.metal.delta import step as module
from omlxd.engine.mlx_adapter.metal.delta.step import Shape, Weights, rates_of
from omlxd.engine.mlx_adapter.metal.kernel import Kernel

FAR = {mx.float32: 1e-6, mx.float16: 1e-3, mx.bfloat16: 1e-2}
NAMES = ("q", "k", "v", "z", "b", "a")


def draw(seed: int, *shape: int, dtype: Any = mx.float32) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(seed)).astype(dtype)


def exact(array: mx.array) -> np.ndarray:
    return np.array(array.astype(mx.float32), np.float64)


class Net:
    """A layer, and drawn tokens and states: a row's are the same in any company.

    small  queries, keys and steps are almost 0, as epsilons and log(1 + x) are for
    """

    def __init__(self, shape: Shape, *, small: bool = False):
        self.shape, dtype, self._small = shape, shape.dtype, small
        self.weights = Weights(
            draw(1, shape.channels, shape.taps, 1, dtype=dtype) * 0.5,
            draw(2, shape.width, dtype=dtype),
            rates_of(draw(3, shape.heads) + 12 * small, draw(4, shape.heads)),
        )

    def tokens(self, rows: Sequence[int], new: int) -> list[mx.array]:
        """Of NAMES, (rows, new, heads, width) each, or (rows, new, heads)."""
        shape = self.shape
        sizes = (
            [(shape.key_heads, shape.key_width)] * 2 + [(shape.heads, shape.width)] * 2 + [(shape.heads,)] * 2
        )
        drawn = [
            mx.concatenate([draw(10 * row + at, 1, 8, *size, dtype=shape.dtype)[:, :new] for row in rows])
            for at, size in enumerate(sizes, 100)
        ]
        if self._small:
            q, k, v, z, b, a = drawn
            drawn = [q / 1000, k / 1000, v, z, b, a - 14]
        return drawn

    def held(self, rows: Sequence[int]) -> list[mx.array]:
        shape, dtype = self.shape, self.shape.dtype
        sizes = (shape.taps - 1, shape.channels), (shape.heads, shape.width, shape.key_width)
        conv, state = (
            mx.concatenate([draw(10 * row + at, 1, *size) for row in rows])
            for at, size in enumerate(sizes, 106)
        )
        return [(conv / 1000 if self._small else conv).astype(dtype), state]

    def given(self, tokens: Sequence[mx.array]) -> list[mx.array]:
        """As projections give them."""
        rows, new = tokens[0].shape[:2]
        q, k, v, z, b, a = tokens
        if self.shape.mixed:
            groups = [x.reshape(rows, new, self.shape.key_heads, -1) for x in tokens]
            joint = [mx.concatenate(part, axis=3).reshape(rows, new, -1) for part in (groups[:4], groups[4:])]
            return [joint[0], joint[0], joint[1], joint[1]]
        qkv = mx.concatenate([x.reshape(rows, new, -1) for x in (q, k, v)], axis=2)
        return [qkv, z.reshape(rows, new, -1), b, a]

    def step(self, tokens: Sequence[mx.array], held: Sequence[mx.array]) -> list[mx.array]:
        return module.step(self.shape, self.given(tokens), held, self.weights)

    def check(self, rows: Sequence[int], new: int) -> list[mx.array]:
        """That rows get what numpy gives; what they got."""
        tokens, held, (conv, norm, rates) = self.tokens(rows, new), self.held(rows), self.weights
        got, heads = self.step(tokens, held), self.shape.heads
        want = stand_ins.gated_delta_net(
            *map(exact, (*tokens, *held, conv[..., 0], norm)),
            exact(rates)[: 2 * heads].reshape(2, heads),
            self.shape.eps,
        )
        for array, right in zip(got, want, strict=True):
            far = np.abs(exact(array) - right.reshape(array.shape)).max() / np.abs(right).max()
            assert far < FAR[self.shape.dtype], far
        return got


SIZES = {
    "float32, 64 and 32 wide": (64, 32, 4, mx.float32),
    "float16, 128 wide": (128, 128, 4, mx.float16),
    "bfloat16, 32 and 96 wide": (32, 96, 3, mx.bfloat16),
    "bfloat16, 192 and 256 wide": (192, 256, 4, mx.bfloat16),
}


@pytest.mark.parametrize("name", SIZES)
@given(data=st.data())
@settings(max_examples=draws(3), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_step_is_that_of_float64_and_a_rows_bits_its_own(name: str, on_cpu: Any, data: st.DataObject):
    """Alone, in company, and token by token."""
    key_width, width, taps, dtype = SIZES[name]
    key_heads, heads = data.draw(st.sampled_from([(1, 3), (2, 2), (2, 4)]))
    rows, new = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 8 if width < 128 else 3))
    net = Net(Shape(key_heads, heads, key_width, width, taps, data.draw(st.booleans()), dtype, 1e-6))
    together, at = net.check(range(rows), new), rows - 1
    tokens, held, outs = net.tokens([at], new), net.held([at]), list[mx.array]()
    for token in range(new):
        out, *held = net.step([part[:, token : token + 1] for part in tokens], held)
        outs.append(out)
    for own, joint in zip((mx.concatenate(outs, axis=1), *held), together, strict=True):
        assert mx.array_equal(own[0], joint[at])


def test_a_kernel_with_a_fault_is_found(on_cpu: Any, monkeypatch: pytest.MonkeyPatch):
    shape = Shape(1, 2, 64, 32, 4, True, mx.float32, 1e-6)
    net, small = Net(shape), Net(shape, small=True)

    def check(kernel: Kernel) -> None:
        monkeypatch.setattr(module, "step_kernel", lambda: kernel)
        net.check([0, 1], 3)
        small.check([0], 3)

    barrier = "threadgroup_barrier(mem_flags::mem_threadgroup);"
    edits = [
        (f"{barrier}\n\n  // Queries", "\n  // Queries"),
        (f"{barrier}\n\n  // The state", "\n  // The state"),
        (f"{barrier}\n\n  // The gated", "\n  // The gated"),
        ("seen[i] = seen[i + 1]", "seen[i] = seen[i]"),
        ("held[r][i] *= decay;", ""),
        ("own == 0", "own == 2"),
        ("key_head * table[G_GROUP] + own", "key_head * table[G_GROUP]"),
        ("lane * EACH;", "lane;"),
        ("+ table[A_AT]", ""),
        (" + 1e-6f", ""),
        ("one == 1 ? small : log(one) * (small / (one - 1))", "log(one)"),
        ("+ own * DV;\n    const size_t to", "+ own;\n    const size_t to"),
    ]
    assert survivors(module.step_kernel(), edits, check) == []


def test_the_stand_in_gives_the_same(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(kernel_module, "run", pretended.run)
    for mixed in (True, False):
        Net(Shape(2, 4, 64, 32, 4, mixed, mx.float16, 1e-6)).check([0, 1], 3)


@pytest.fixture
def judged(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, float]]:
    """Kernels are stand-ins; ratios of their times by the names of cases, 0.5 otherwise."""
    ratios = dict[str, float]()
    monkeypatch.setattr(rule, "_verdicts", {})
    monkeypatch.setattr(rule, "times_of", lambda timed, clock: (ratios.get(timed.name, 0.5), 1.0))
    monkeypatch.setattr(kernel_module, "run", pretended.run)
    prompts.reset()
    yield ratios
    prompts.reset()


def logits(model: Any, passes: Sequence[int] = (130, 1, 3, 1)) -> list[np.ndarray]:
    """Of two rows, of passes of so many tokens."""
    cache, found, at = make_prompt_cache(model), list[np.ndarray](), 0
    for new in passes:
        tokens = (mx.arange(at, at + new)[None] + mx.array([[0], [7]])) % 90 + 5
        found.append(np.array(model(tokens, cache=cache)))
        at += new
    return found


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_next"])
def test_a_model_answers_as_by_mlx_alone(family: str, judged: Any, tmp_path: Path, monkeypatch: Any):
    model = mlx_adapter.load(build_family(family, tmp_path / family)).model
    want, steps, chunks = logits(model), list[int](), list[int]()
    layers.prepare(model)
    assert {kernel for kernel, _ in rule.verdicts()} == {"gated_delta_net_step", "gated_delta_update of MLX"}
    assert all(verdict.is_used for verdict in rule.verdicts().values()), rule.verdicts()
    step, by_chunks = layers.step, prompts.by_chunks
    monkeypatch.setattr(layers, "step", lambda *how: steps.append(how[1][0].shape[1]) or step(*how))
    monkeypatch.setattr(prompts, "by_chunks", lambda *how: chunks.append(how[0].shape[1]) or by_chunks(*how))
    for got, right in zip(logits(model), want, strict=True):
        np.testing.assert_allclose(got, right, atol=1e-4)
    assert steps == [1] * 3 + [3] * 3 + [1] * 3 and chunks == [130] * 3  # Of three layers.


def test_what_the_kernel_takes_not_is_the_models_own(judged: Any, tmp_path: Path, monkeypatch: Any):
    model = mlx_adapter.load(build_family("qwen3_5", tmp_path / "model")).model
    layers.prepare(model)
    monkeypatch.setattr(layers, "step", lambda *_: pytest.fail("the kernel is called"))
    logits(model, [5, 9])  # No states before, more tokens.
    cache = make_prompt_cache(model)
    model(mx.array([[5, 6], [7, 8]]), cache=cache)
    for leaf in cache:
        if hasattr(leaf, "lengths"):
            leaf.prepare(lengths=[2, 1])  # Padding.
    model(mx.array([[5, 6], [7, 8]]), cache=cache)
    model(mx.array([[5]]))


def test_layers_stay_as_they_are_where_a_kernel_is_slower(judged: dict[str, float], tmp_path: Path):
    model = mlx_adapter.load(build_family("qwen3_5", tmp_path / "model")).model
    judged |= {"4 rows": 1.5, "1,024 tokens": 1.5}
    kinds = [type(module) for module in model.modules()]
    layers.prepare(model)
    assert [type(module) for module in model.modules()] == kinds
    assert not any(prompts.is_used((2, 2, 32, 32, mx.float32), tokens) for tokens in (128, 2048))
