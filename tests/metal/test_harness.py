"""What the harness finds in kernels that are wrong, and that right ones have their numbers."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from metal import apple, harness, limits, pretended, stand_ins
from metal.harness import MetalError
from metal.mutants import survivors
from metal.source import parsed

from omlxd.engine.mlx_adapter.metal import kernel as kernel_module
from omlxd.engine.mlx_adapter.metal.kernel import Kernel

pytestmark = [
    pytest.mark.usefixtures("on_cpu"),
    pytest.mark.skipif(mx.metal.is_available(), reason="kernels run on the GPU here"),
]

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
    "thread 32 writes what thread 31 has read, and no barrier": I
    + "threadgroup float a[64]; a[i] = x[i]; y[i] = a[63 - i];",
    "a race at y.0.: thread 32 writes what thread 0 has written, too": I
    + "y[i % 32] = x[i]; y[32 + i % 32] = 0;",
    "a race at a, byte 0 of 8: thread 1 reads what thread 0 has written": I
    + "threadgroup float a[2]; float all = 0; for (int turn = 0; turn < 3; turn++) {"
    " if (i % 32 == 0) a[i / 32] = x[i] + turn; threadgroup_barrier(mem_flags::mem_threadgroup);"
    " all += a[0] + a[1]; } y[i] = all;",  # The second barrier of a turn is missing.
    "a race at t, byte 0 of 32: thread 8 reads what thread 0 has": I  # Its sums are exact in any order.
    + "threadgroup uint t[8]; if (i < 8) t[i] = 0; threadgroup_barrier(mem_flags::mem_threadgroup);"
    " t[i % 8] += 1; threadgroup_barrier(mem_flags::mem_threadgroup); y[i] = t[i % 8];",
    "a race at t, byte 0 of 4: thread 1 reads what": I
    + "threadgroup float t[1]; if (i == 0) t[0] = 0; threadgroup_barrier(mem_flags::mem_threadgroup);"
    " t[0] = max(t[0], x[i]); threadgroup_barrier(mem_flags::mem_threadgroup); y[i] = t[0];",
    "thread 1 reads what thread 0 has written": I  # simd_sum is no barrier.
    + "threadgroup float t[64]; t[i] = x[i]; const float all = simd_sum(x[i]); y[i] = t[i / 2 * 2] + all;",
    "a race at y.63.: thread 0 reads what thread 63": I
    + "y[i] = x[i]; threadgroup_barrier(mem_flags::mem_threadgroup); const float other = y[63 - i];"
    " threadgroup_barrier(mem_flags::mem_threadgroup); y[i] = other;",
    "reads y.0., of an output, before it is written": I + "y[i] += x[i];",
    "depends on .* what nobody has written": I
    + "threadgroup float t[8]; if (i < 2) t[i] = x[i]; threadgroup_barrier(mem_flags::mem_threadgroup);"
    " float most = 0; for (int j = 0; j < 8; j++) most = max(most, t[j]); y[i] = most;",
    "different places of simd_sum": I + "y[i] = i % 2 ? simd_sum(x[i]) : simd_sum(2 * x[i]);",
    "different places of simd_max": I + "if (i % 2) y[i] = most(x[i]); else y[i] = most(2 * x[i]);",
    "threads are at different barriers": I + "if (i < 32) { meet(); y[i] = 0; } else { meet(); y[i] = 1; }",
    "an index beyond an array, .* line 9: `const uint i": I
    + "float a[4]; for (int j = 0; j < 5; j++) a[j] = x[i]; y[i] = a[i % 4];",
    "an address that is not aligned, ": I + "y[i] = (*(const device float4*)(x + i % 4)).x;",
    "an integer divided by 0": I + "y[i] = int(x[i]) / int(i);",
    "threadgroup arrays take 33792 bytes": I + "threadgroup float a[8448]; a[i] = x[i]; y[i] = a[i];",
    "does not compile: ‘nobody’ was not declared": I + "y[i] = nobody(x[i]);",
    "does not compile: msl_on_cpu.h lacks xy, which Metal has": I + "y[i] = float4(x[i]).xy.x;",
    "does not compile: msl_on_cpu.h lacks simd_ballot": I + "y[i] = uint64_t(simd_ballot(x[i] > 3));",
    "it reads or writes outside of t, byte 240 of 240": I
    + "threadgroup float t[60]; if (i < 60) t[i] = x[i]; threadgroup float* p = t; y[i] = p[60];",
    "simd_shuffle of a lane that does not exist": I + "y[i] = simd_shuffle(x[i], 32);",
}

HELPERS = """
float most(float a) { return simd_max(a); }
METAL_FUNC void meet() { threadgroup_barrier(mem_flags::mem_threadgroup); }
"""

REFUSED = {
    "a threadgroup has 1056 threads": ("", "", 1056),
    "q points to no named address space": ("", "float own = 1; float* q = &own; y[i] = q[0];"),
    "r points to no named address space": ("float f(const float& r) { return r; }", "y[i] = f(1.0f);"),
    "'device float const .' with an lvalue of type 'threadgroup float": (
        "",
        "threadgroup float a[4]; const device float* q = a; y[i] = q[0];",
    ),
    "device float .' with an lvalue of type 'float": ("", "float a[2]; device float* q = a; y[i] = q[0];"),
    "a cast changes the address space": ("", "thread float* q = (thread float*)x; y[i] = q[0];"),
    "cast changes the address space; line .*float4": ("", "y[i] = ((constant float4*)x)[0].x;"),
    "cast changes the address space; line .*vec": (
        "",
        "threadgroup float t[64]; y[i] = ((device vec<float, 4>*)t)[0].x;",
    ),
    "size is no constant; line .*float a": ("", "int n = int(x[1]) + 2; float a[n]; a[0] = 1; y[i] = a[0];"),
    "size is no constant; line .*threadgroup": (
        "",
        "int n = int(x[1]) + 2; threadgroup float a[n]; a[i % n] = 1; y[i] = 1;",
    ),
    "no static variables": ("", "static int n = 0; y[i] = n;"),
    "no long long": ("", "long long n = 0; y[i] = n;"),
    "kernel is a word of Metal's own": ("", "float kernel = 1; y[i] = kernel;"),
    "vertex is a word of Metal's own": ("float f(float vertex) { return vertex; }", "y[i] = f(1.0f);"),
    "read-only variable is not assignable": ("", "constant float* q = (constant float*)x; q[i] = 1;"),
    "top of a kernel alone": ("", "if (i) { threadgroup float a[2]; a[0] = 1; y[i] = a[0]; }"),
    "no initial value": ("", "threadgroup float a[2] = {}; y[i] = a[0];"),
    "leaves threadgroup memory out": (
        "",
        "threadgroup float a[64]; a[i] = x[i]; threadgroup_barrier(mem_flags::mem_device); y[i] = a[63 - i];",
    ),
    "a variable outside of functions": ("float a = 1;", "y[i] = a;"),
    ". calls itself": (
        "int g(int a); int f(int a) { return g(a); } int g(int a) { return f(a); }",
        "y[i] = f(1);",
    ),
    "no double": ("", "double a = 1; y[i] = a;"),
    "no exceptions": ("", "try { y[i] = 1; } catch (...) {}"),
    "no virtual": ("struct A { virtual int f(); };", "y[i] = 1;"),
    "no std::": ("", "y[i] = std::max(x[i], 1.0f);"),
    "no lambdas": ("", "auto f = [](float a) { return a; }; y[i] = f(x[i]);"),
    "no pointers to functions": ("int f(int (*g)(int)) { return g(1); }", "y[i] = 1;"),
    "Metal 3 is C..14": ("struct P { int a, b; };", "P p = {1, 2}; auto [a, b] = p; y[i] = a;"),
}
"""By what is said: a header, and what stands in the kernel."""

ACCEPTED = """
constant constexpr int FOUR = 4;
struct State { float4 most; };
template <int M> METAL_FUNC int down(int a) { return down<M - 1>(a) + 1; }
template <> METAL_FUNC int down<0>(int a) { return a; }
METAL_FUNC float second(thread float4 (&a)[2], const device half4* b) { return float4(*b).x + a[1].x; }
template <int M, typename T>
METAL_FUNC float first(const device T* a, thread float* own, threadgroup float* all, thread const float& by) {
  float numbers[2 * M] = {by};
  own[0] = float(a[0]) * numbers[0];
  all[0] = own[0];
  return own[0];
}
"""


def called(kernel: Kernel, x: mx.array, threads: int = 64, **how: Any) -> mx.array:
    how = {"grid": (threads, 1, 1), "threadgroup": (min(threads, 64), 1, 1)} | how
    return kernel([x], output_shapes=[(threads,)], output_dtypes=[x.dtype], **how)[0]


def floats(threads: int = 64) -> mx.array:
    return mx.arange(threads).astype(mx.float32)


@pytest.mark.parametrize("said", WRONG)
def test_a_wrong_kernel_is_found(said: str):
    with pytest.raises(MetalError, match=said):
        called(Kernel("wrong", ["x"], ["y"], WRONG[said], HELPERS), floats())


@pytest.mark.parametrize("said", REFUSED)
def test_what_metal_refuses_is_refused(said: str):
    if not limits.can_read():
        pytest.skip("no libclang")
    header, source, *threads = REFUSED[said]
    kernel = Kernel("refused", ["x"], ["y"], I + source, header + "\n")
    with pytest.raises(MetalError, match=said):
        called(kernel, floats(*threads), *threads, threadgroup=(*(threads or [64]), 1, 1))


def test_a_kernel_has_31_buffers_at_most():
    for count in (31, 32):
        names = [f"x{at}" for at in range(count - 1)]
        source = I + f"y[i] = {' + '.join(f'{name}[i]' for name in names)};"
        how: dict[str, Any] = {"grid": (8, 1, 1), "threadgroup": (8, 1, 1), "output_shapes": [(8,)]}
        with nullcontext() if count == 31 else pytest.raises(MetalError, match="it has 32 buffers"):
            (y,) = Kernel("many", names, ["y"], source)(
                [floats(8)] * (count - 1), output_dtypes=[mx.float32], **how
            )
            assert y[1] == 30


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_what_kernels_are_made_of_has_metals_meaning(dtype: Any):
    source = """
    threadgroup float all[N * 32], more[2][3];
    threadgroup State states[2];
    threadgroup float *low = all, *high = all + 32;
    const uint i = thread_position_in_grid.x;
    float own[FOUR] = {0};
    State state;
    state.most = float4(1.0f, 2, 3, 4.5);
    const device T* p = x + i / 4 * 4;
    const device vec<T, 4>* four = (const device vec<T, 4>*)p;
    const float4 f = float4(four[0]);
    own[1] = first<N>(x + 1, own, all + i, 2.0f) + FOUR + down<3>(2);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (i == 0) more[1][2] = all[0];
    if (i == 1) states[1].most = float4(low[1] - high[1]);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    const uint two = as_type<uint>(half2(half(1.0f), half(2.0f)));
    if constexpr (N == 3) y[i] = T(f[i % 4] + own[1] + more[1][2] + state.most.w + (two >> 16 == 0x4000u));
    if (i == 3) y[i] += T(states[1].most.x);
    const uint down = simd_shuffle_down(i, 1), before = simd_prefix_exclusive_sum(1u);
    z[2 * i] = (i % 32 < 31 ? down : 0) + 100 * simd_max(int(i)) + 10000 * before;
    const uint any = select(1, 2, simd_any(i == 40)), all_small = simd_all(i < 32);
    z[2 * i + 1] = simd_broadcast(i, 3) + 100 * simd_shuffle_xor(i, 1) + 10000 * all_small + 100000 * any;
    """
    kernel = Kernel("made", ["x"], ["y", "z"], source, ACCEPTED)
    x = mx.arange(64).astype(dtype)
    how: dict[str, Any] = {
        "grid": (64, 1, 1),
        "threadgroup": (64, 1, 1),
        "template": [("T", dtype), ("N", 3)],
    }
    y, z = kernel([x], output_shapes=[(64,), (64, 2)], output_dtypes=[dtype, mx.uint32], **how)
    i = np.arange(64)
    assert mx.array_equal(y, (mx.arange(64) + 18.5).astype(dtype))
    down = (i + 1) * (i % 32 < 31) + 100 * (i // 32 * 32 + 31) + 10_000 * (i % 32)
    assert (np.asarray(z)[:, 0] == down).all()
    other = i // 32 * 32 + 3 + 100 * (i ^ 1) + 10_000 * (i < 32) + 100_000 * np.where(i < 32, 1, 2)
    assert (np.asarray(z)[:, 1] == other).all()


MATH: dict[str, Callable[[np.ndarray], Any]] = {
    "exp(a)": np.exp,
    "fast::exp2(a)": np.exp2,
    "precise::log(a)": np.log,
    "metal::rsqrt(a)": lambda a: a**-0.5,
    "metal::precise::rsqrt(a)": lambda a: a**-0.5,
    "sqrt(a) + tanh(a) + sin(a) + floor(a)": lambda a: np.sqrt(a) + np.tanh(a) + np.sin(a) + np.floor(a),
    "fma(a, a, -1.0f)": lambda a: a * a - 1,
    "clamp(a, 1.0f, 2.0f)": lambda a: a.clip(1, 2),
    "mix(float4(a), float4(1), float4(0.5f)).x + float4(float3(a), 1).z + float(1.5h)": lambda a: a * 1.5 + 2,
    "select(float4(0), float4(1), float4(a) > 2.0f).y": lambda a: 1.0 * (a > 2),
    "simd_shuffle_rotate_down(a, 1) - simd_shuffle_rotate_up(a, 2)": lambda a: np.roll(a, -1) - np.roll(a, 2),
    "select(a, -a, a > 2)": lambda a: np.where(a > 2, -a, a),
    "abs(-a) + abs(-3)": lambda a: a + 3,
    "isnan(0 / (a - a)) ? 1.0f : isinf(1 / (a - a)) ? 2.0f : 3.0f": np.ones_like,
    "max(min(a, 2.0f), 1.0f) + max(1, int(i) - 8)": lambda a: a.clip(1, 2) + np.maximum(1, np.arange(32) - 8),
    "dot(float4(a, 1, 2, 3), float4(2.0f)) + (float2(a) * half2(2)[0]).y": lambda a: 4 * a + 12,
    "all(float4(a) > float4(0.1f)) ? max(float4(a), float4(2)).w : 0.0f": lambda a: np.maximum(a, 2),
    "float(half3(half(a)).z) + sizeof(float3) + sizeof(packed_float3)": lambda a: (
        a.astype("f2").astype("f4") + 28
    ),
    "float(as_type<bfloat>(ushort(as_type<uint>(a) >> 16)))": lambda a: (a.view("u4") >> 16 << 16).view("f4"),
    "as_type<uchar4>(0x04030201u + i).x + extract_bits(0xf0u, 4, 2)": lambda a: 4.0 + np.arange(32),
    "simd_sum(a) + float(simd_max(half(i))) + simd_min(-int(i)) + simd_product(1u)": lambda a: (
        a * 0 + a.sum() + 1
    ),
    "simd_prefix_inclusive_sum(a) + float(simd_sum(bfloat(1.0f)))": lambda a: a.cumsum() + 32,
    "simd_shuffle_xor(float4(a), 5).z": lambda a: a[np.arange(32) ^ 5],
    "simd_shuffle_up(a, 1) * 0 == 0 ? 1.0f : 2.0f": lambda a: np.where(np.arange(32), 1, 2),
    "numeric_limits<float>::max() > FLT_MAX ? 0.0f : quad_sum(1.0f)": lambda a: 4.0 + 0 * a,
}
"""Expressions of a float, and the same in numpy."""


def test_functions_have_metals_numbers():
    lines = [f"y[{at * 32} + i] = {text};" for at, text in enumerate(MATH)]
    source = I + "const float a = x[i];\n" + "\n".join(lines)
    x = mx.arange(32) / 9 + 0.25
    how: dict[str, Any] = {"grid": (32, 1, 1), "threadgroup": (32, 1, 1)}
    (y,) = Kernel("functions", ["x"], ["y"], source)(
        [x], output_shapes=[(len(MATH), 32)], output_dtypes=[mx.float32], **how
    )
    for got, (text, numpy) in zip(np.asarray(y), MATH.items(), strict=True):
        np.testing.assert_allclose(got, numpy(np.asarray(x)), rtol=2e-6, err_msg=text)


def test_matrices_of_a_simdgroup_multiply():
    source = """
    threadgroup float held[64];
    simdgroup_matrix<float, 8, 8> a, b, c = make_filled_simdgroup_matrix<float, 8, 8>(1.0f);
    simdgroup_load(a, x, 16);
    simdgroup_load(b, x + 8, 16, 0, true);
    simdgroup_multiply_accumulate(c, a, b, c);
    simdgroup_store(c, held, 8);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (uint at = thread_index_in_simdgroup; at < 64; at += 32) y[at] = held[at];
    """
    x = mx.arange(128).reshape(8, 16).astype(mx.float32)
    how: dict[str, Any] = {"grid": (32, 1, 1), "threadgroup": (32, 1, 1)}
    (y,) = Kernel("matrices", ["x"], ["y"], source)(
        [x], output_shapes=[(8, 8)], output_dtypes=[mx.float32], **how
    )
    assert mx.array_equal(y, x[:, :8] @ x[:, 8:].T + 1)


def test_sixteen_bits_round_at_each_operation():
    source = I + "y[i] = x[i] * x[i] + x[i]; y[i + 32] = T(float(x[i]) * float(x[i]) + float(x[i]));"
    for dtype in (mx.float16, mx.bfloat16):
        x = (mx.arange(32) / 7 + 1).astype(dtype)
        how: dict[str, Any] = {"grid": (32, 1, 1), "threadgroup": (32, 1, 1), "template": [("T", dtype)]}
        (y,) = Kernel("round", ["x"], ["y"], source)([x], output_shapes=[(64,)], output_dtypes=[dtype], **how)
        x32 = x.astype(mx.float32)
        assert mx.array_equal(y[:32], x * x + x)
        assert mx.array_equal(y[32:], (x32 * x32 + x32).astype(dtype)) and not mx.array_equal(y[:32], y[32:])


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


def test_inputs_that_are_one_array_are_one_for_the_kernel():
    source = "device float* a = (device float*)x; " + I + "a[i] += 1; y[i] = x2[i];"
    kernel = Kernel("shared", ["x", "x2"], ["y"], source, writes=["x", "x2"])
    x = floats()
    how: dict[str, Any] = {"grid": (64, 1, 1), "threadgroup": (64, 1, 1), "output_shapes": [(64,)]}
    (y,) = kernel([x, x], output_dtypes=[mx.float32], **how)
    assert mx.array_equal(y, x) and x[3] == 4
    with pytest.raises(MetalError, match="x, which it writes, and x2 share some memory"):
        kernel([x, x[8:]], output_dtypes=[mx.float32], **how)


def test_a_slice_lies_where_it_is_in_its_array():
    kernel = Kernel("four", ["x"], ["y"], I + "y[i] = ((const device half4*)x)[i / 4][i % 4];")
    x = mx.arange(72).astype(mx.float16)
    for first in (0, 4, 8):
        assert mx.array_equal(called(kernel, x[first : first + 64]), x[first : first + 64])
    with pytest.raises(MetalError, match="an address that is not aligned"):
        called(kernel, x[1:65])
    assert called(kernel, x.reshape(2, 36)[:, 1:33])[0] == 1  # MLX copies what is not contiguous.


def test_an_output_may_have_elements_that_nobody_writes(on_cpu: Callable[..., None]):
    on_cpu(all_written=False)
    got = called(Kernel("some", ["x"], ["y"], I + "if (i != 3) y[i] = x[i];"), floats())
    assert got[2] == 2 and mx.isnan(got[3])


def test_threads_of_a_last_threadgroup_that_is_not_full():
    source = I + "y[i] = x[i] + threads_per_threadgroup.x * 1000 + threadgroup_position_in_grid.x;"
    got = called(Kernel("edge", ["x"], ["y"], source), floats(80), 80)
    assert got[79] == 79 + 16_000 + 1 and got[63] == 63 + 64_000


def test_apples_compiler_is_asked_where_there_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    program = tmp_path / "xcrun"
    program.write_text(
        "#!/bin/sh\nfor it; do case $it in *.metal) grep -q FOUR $it && echo no >&2 && exit 1; esac; done"
    )
    program.chmod(0o755)
    source = parsed("[[kernel]] void k(\n  device float* y [[buffer(0)]]) {\ny[0] = FOUR;\n}\n")
    for path, said in ((str(tmp_path), "no\n"), ("", "")):
        monkeypatch.setenv("PATH", f"{path}:{os.environ['PATH']}" if path else os.defpath)
        apple.is_here.cache_clear()
        apple.refused.cache_clear()
        assert apple.refused(source) == said or (not path and apple.is_here())
    apple.is_here.cache_clear()


def test_a_pretended_mac_takes_stand_ins_or_all_as_cpp(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(stand_ins, "_stand_ins", {})

    @stand_ins.stand_in("doubled")
    def doubled(call: stand_ins.Call) -> list[mx.array]:
        call.write("x", call.arrays["x"] * 0)
        return [mx.full(call.output_shapes[0], call.template["BY"] * 100)]

    monkeypatch.setattr(kernel_module, "run", pretended.run)
    source = I + "y[i] = BY * x[i]; if (i == 5) ((device float*)x)[i] = 0;"
    kernel = Kernel("doubled", ["x"], ["y"], source, writes=["x"])
    monkeypatch.delenv("PRETENDED_KERNELS", raising=False)
    x = floats(64)
    assert called(kernel, x, template=[("BY", 2)])[5] == 200 and not x.any()
    monkeypatch.setenv("PRETENDED_KERNELS", "cpp")
    x = floats(64)
    assert called(kernel, x, template=[("BY", 2)])[5] == 10 and x[5] == 0 and x[6] == 6


def test_what_does_not_end_and_what_is_written_beside_a_buffer_is_found(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(harness, "MOST_STEPS", 100_000)
    with pytest.raises(MetalError, match="it does not end"):
        called(Kernel("endless", ["x"], ["y"], I + "for (uint a = i + 1; a; a += 2) y[i] = x[i];"), floats())
    with pytest.raises(MetalError, match="it writes before or behind y"):
        called(Kernel("behind", ["x"], ["y"], I + "y[i] = x[i]; if (!i) y[61] = 0;"), floats(61), 61)
