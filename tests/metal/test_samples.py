"""What `omlxd doctor --report` says of Metal kernels at shapes of common models."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import pytest
from metal import stand_ins

from omlxd.engine.mlx_adapter.attention import backend
from omlxd.engine.mlx_adapter.metal import kernel, rule
from omlxd.engine.mlx_adapter.metal.attention import choice
from omlxd.engine.mlx_adapter.metal.backend import MetalBackend
from omlxd.engine.mlx_adapter.metal.delta import layers, prompts
from omlxd.engine.mlx_adapter.metal.products import install
from omlxd.engine.server.measure.attention import kernel as measured
from omlxd.wire import SAMPLE_KERNELS as KERNELS

called = set[str]()
"""Names of kernels."""


def by_stand_in(some: kernel.Kernel, arrays: Any, template: Any = (), **how: Any) -> list[mx.array]:
    called.add(some.name)
    function = stand_ins.of(some)
    assert function is not None, some.name
    by_name = dict(zip(some.inputs, arrays, strict=True))
    shapes = [tuple(shape) for shape in how["output_shapes"]]
    sizes = how["grid"], how["threadgroup"]
    return function(stand_ins.Call(some, by_name, dict(template), *sizes, shapes, how["output_dtypes"]))


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(backend, "_current", MetalBackend())
    monkeypatch.setattr(kernel, "run", by_stand_in)
    monkeypatch.setattr(rule, "_verdicts", {})
    monkeypatch.setattr(rule, "times_of", lambda timed, clock: (0.75e-3, 1e-3))
    monkeypatch.setattr(choice, "SAMPLE", (2, 1, 64, mx.float32))
    monkeypatch.setattr(install, "SAMPLE", (128, 64))
    monkeypatch.setattr(install, "SAMPLE_EXPERTS", (64, 32, 4))
    monkeypatch.setattr(
        layers, "SAMPLE", layers.SAMPLE | {"linear_num_key_heads": 1, "linear_num_value_heads": 2}
    )
    install.reset()
    yield
    install.reset()
    prompts.reset()


def test_a_report_has_a_line_for_each_kernel(small: None):
    assert tuple(MetalBackend().samples) == KERNELS
    lines = [line for name in KERNELS for line in measured(name).lines]
    assert [name for name, _ in lines] == list(KERNELS)
    said = [text for _, text in lines]
    for start in (
        "attend_rows is used (2 query heads, 1 KV heads, 64 wide, float32):",
        "attend_rows is used (2 query heads, 1 KV heads, 64 wide, float32, KV in 8 bits):",
        "few_row_product is used (128 × 64, 4 bits, groups of 64, float16):",
        "few_row_product is used (128 × 64, 8 bits, groups of 64, float16):",
        "few_row_product of experts is used (4 experts, 64 × 32, 4 bits, groups of 64, float16):",
        "gated_delta_net_step is used (",
    ):
        (line,) = (text for text in said if text.startswith(start))
        assert "the same in company" in line and "time by MLX's own: 0.75 (" in line and ": 0.75 ms)" in line
    assert measured(KERNELS[0]).lines == []  # Judged once a process.
    for part in (
        "attention_spans",
        "attention_packed",
        "few_row_product",
        "gathered",
        "gated_delta_net_step",
    ):
        assert any(part in name for name in called), part
