"""What the harness finds in kernels that are wrong, and that right ones have their numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from metal import pretended, stand_ins
from metal.harness import MetalError
from metal.mutants import survivors

from omlxd.engine.mlx_adapter.metal import kernel as kernel_module
from omlxd.engine.mlx_adapter.metal.kernel import Kernel

pytestmark = pytest.mark.usefixtures("on_cpu")

SUM = """
  threadgroup float part[2];
  const uint i = thread_position_in_grid.x;
  const float mine = simd_sum(x[i]);
  if (thread_index_in_simdgroup == 0) part[simdgroup_index_in_threadgroup] = mine;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  y[i] = part[0] + part[1];
"""
I = "const uint i = thread_position_in_grid.x; "  # noqa: E741

WRITE = "device bfloat* s = (device bfloat*)state; s[i] += x[i]; y[i] = s[i];"  # MLX says const.

WRONG = {
    "simd_sum without the lanes that have returned": I + "if (i % 2) return; y[i] = simd_sum(x[i]);",
    "different operations: simd_": I + "y[i] = i % 2 ? simd_max(x[i]) : simd_min(x[i]);",
    "while other lanes are at a barrier": I
    + "if (i % 2) threadgroup_barrier(mem_flags::mem_none);\n y[i] = simd_sum(x[i]);",
    "a barrier that not all threads reach": I
    + "if (i < 32) threadgroup_barrier(mem_flags::mem_threadgroup); y[i] = x[i];",
    "past the end of x, at element 64 of 64": I + "y[i] = x[i + 1];",
    "before the start of x, at element -1 of 64": I + "y[i] = x[int(i) - 1];",
    "past the end of y": I + "y[i + 1] = x[i];",
    "writes into its input x": I + "((device float*)x)[i] = 1; y[i] = 1;",
    "no thread writes 1 of 64 elements of y, first 3": I + "if (i != 3) y[i] = x[i];",
    "depends on the order of threads": I + "threadgroup float a[64]; a[i] = x[i]; y[i] = a[63 - i];",
    "depends on the order": I + "y[i % 32] = x[i]; y[32 + i % 32] = 0;",
    "an index beyond an array, .* line 6: `const uint i": I
    + "float a[4]; for (int j = 0; j < 5; j++) a[j] = x[i]; y[i] = a[i % 4];",
    "an address that is not aligned, ": I + "y[i] = (*(const device float4*)(x + i % 4)).x;",
    "an integer divided by 0": I + "y[i] = int(x[i]) / int(i);",
    "threadgroup arrays take 33792 bytes": I + "threadgroup float a[8448]; a[i] = x[i]; y[i] = a[i];",
    "does not compile: ‘nobody’ was not declared": I + "y[i] = nobody(x[i]);",
    "simd_shuffle of a lane that does not exist": I + "y[i] = simd_shuffle(x[i], 32);",
}


def called(kernel: Kernel, x: mx.array, threads: int = 64, **how: Any) -> mx.array:
    how = {"grid": (threads, 1, 1), "threadgroup": (min(threads, 64), 1, 1)} | how
    return kernel([x], output_shapes=[(threads,)], output_dtypes=[x.dtype], **how)[0]


def floats(threads: int = 64) -> mx.array:
    return mx.arange(threads).astype(mx.float32)


@pytest.mark.parametrize("said", WRONG)
def test_a_wrong_kernel_is_found(said: str):
    with pytest.raises(MetalError, match=said):
        called(Kernel("wrong", ["x"], ["y"], WRONG[said]), floats())


def test_mutants_of_a_sum_are_found():
    def check(kernel: Kernel) -> None:
        assert (np.asarray(called(kernel, floats())) == 2016).all()

    edits = [
        ("threadgroup_barrier(mem_flags::mem_threadgroup);", ""),
        ("simd_sum", "simd_max"),
        ("x[i]", "x[i + 1]"),
        ("part[0] + ", ""),
    ]
    kernel = Kernel("sum", ["x"], ["y"], SUM)
    assert survivors(kernel, edits, check) == []
    assert survivors(kernel, [("const uint i", "uint i")], check) == ["'const uint i' -> 'uint i'"]


def test_inputs_that_a_kernel_names_are_changed_in_place():
    kernel = Kernel("add", ["x", "state"], ["y"], I + WRITE, writes=["state"])
    x = mx.arange(64).astype(mx.bfloat16)
    state = mx.ones((64,), mx.bfloat16)
    for turn in (1, 2):
        (y,) = kernel(
            [x, state],
            grid=(64, 1, 1),
            threadgroup=(64, 1, 1),
            output_shapes=[(64,)],
            output_dtypes=[mx.bfloat16],
        )
        assert mx.array_equal(state, 1 + turn * x) and mx.array_equal(y, state)


def test_an_output_may_have_elements_that_nobody_writes(on_cpu: Callable[..., None]):
    on_cpu(all_written=False)
    got = called(Kernel("some", ["x"], ["y"], I + "if (i != 3) y[i] = x[i];"), floats())
    assert got[2] == 2 and mx.isnan(got[3])


def test_threads_of_a_last_threadgroup_that_is_not_full():
    source = I + "y[i] = x[i] + threads_per_threadgroup.x * 1000 + threadgroup_position_in_grid.x;"
    got = called(Kernel("edge", ["x"], ["y"], source), floats(80), 80)
    assert got[79] == 79 + 16_000 + 1 and got[63] == 63 + 64_000


def test_a_stand_in_takes_large_calls_of_a_pretended_mac(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(stand_ins, "_stand_ins", {})

    @stand_ins.stand_in("doubled")
    def doubled(call: stand_ins.Call) -> list[mx.array]:
        call.write("x", call.arrays["x"] * 0)
        return [mx.full(call.output_shapes[0], call.template["BY"] * 100)]

    monkeypatch.setattr(kernel_module, "run", pretended.run)
    source = I + "y[i] = BY * x[i]; if (i == 5) ((device float*)x)[i] = 0;"
    kernel = Kernel("doubled", ["x"], ["y"], source, writes=["x"])
    few, many = floats(64), floats(8192)
    assert called(kernel, few, template=[("BY", 2)])[5] == 10 and few[5] == 0
    assert called(kernel, many, 8192, template=[("BY", 2)])[5] == 200 and not many.any()
