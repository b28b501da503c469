"""Runs a Metal kernel on this machine's processor, and says what is wrong with it.

    from metal import harness
    got, = harness.run(kernel, arrays, template=[("T", mx.float16)], grid=…, threadgroup=…,
                       output_shapes=[…], output_dtypes=[…])

takes what `Kernel.__call__` takes and gives evaluated arrays; inputs of `kernel.writes` are changed in place.
MLX declares every input const, so a kernel that changes one casts: `device T* own = (device T*)state;`.
The kernel runs once in each order of `ORDERS`. Errors are `MetalError`, with the line: a barrier or a
simdgroup operation that not all threads reach, or reach at different calls of it; an access before or behind
a buffer or an array; a write into another input; an address that is not aligned; an output's element that
nobody writes, or that is read before; a race of two threads (races.h), also where both write the same; bits
that depend on the order of threads, or on what nobody has written; a kernel that does not end; a limit of
Apple's (limits.py).

An input lies as MLX hands it on: a slice such as x[1:] at an address of its element alone. A kernel that may
get slices is run with one.

Not found: a variable of a thread that is read before it is set; memory of a threadgroup that is, where NaN, a
large and a large negative number give the same (`flag != 0`); a read of up to 15 bytes behind a buffer whose
size is no multiple of 16, where they give the same, too; a race of a byte in orders other than the first.
"""

from __future__ import annotations

import ctypes
import functools
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from . import build, limits
from .memory import Fenced
from .source import Kernel, Printed, as_cpp, printed

Sizes = tuple[int, int, int]

ORDERS = (0, 1, 2)
"""0: simdgroups one after the other, from the first thread on, and buffers end at a fence; 1: from the last
thread on, and buffers begin at one; others: by chance, by turns. Races are looked for in the
first of them."""

FILLS = (0xFF, 0x77, 0xF7)
"""What memory that nobody has written is full of, by orders: NaNs or -1, large numbers, their negatives."""

MOST_STEPS = 2_000_000_000
"""Of all threads, before a kernel is said not to end. A step is a piece of code without a branch."""


class MetalError(Exception):
    """A kernel does what Metal leaves undefined, or what no Apple GPU can."""


class Report(ctypes.Structure):
    _fields_ = (
        ("text", ctypes.c_char * 400),
        ("array", ctypes.c_char * 100),
        ("line", ctypes.c_int),
        ("other", ctypes.c_int),
        ("address", ctypes.c_uint64),
        ("code", ctypes.c_uint64),
        ("threadgroup_bytes", ctypes.c_uint64),
    )


class Written(ctypes.Structure):
    _fields_ = (("start", ctypes.c_uint64), ("size", ctypes.c_uint64), ("is_output", ctypes.c_uint64))


_running = threading.Lock()


def run(
    kernel: Kernel,
    arrays: Sequence[mx.array],
    template: Sequence[tuple[str, Any]] = (),
    *,
    grid: Sizes,
    threadgroup: Sizes,
    output_shapes: Sequence[Sequence[int]],
    output_dtypes: Sequence[Any],
    orders: Sequence[int] = ORDERS,
    all_written: bool = True,
) -> list[mx.array]:
    """Return the outputs of `kernel`, which takes its arguments as on a Mac.

    orders       in which its threads run, one run for each; their outputs have the same bits
    all_written  whether an element of an output that no thread writes is an error, or has any value
    """
    how: dict[str, Any] = {"grid": grid, "threadgroup": threadgroup}
    how |= {"output_shapes": [tuple(shape) for shape in output_shapes], "output_dtypes": list(output_dtypes)}
    mx.eval(*arrays)
    source = printed(kernel, arrays, template, **how)
    if wrong := limits.wrong(source, threadgroup):
        raise MetalError(f"{kernel.name}: {wrong}")
    launch = _Launch(kernel, arrays, source, grid, threadgroup)
    with _running:
        runs = [
            launch.run(order, output_shapes, output_dtypes, looks_for_races=order == orders[0])
            for order in orders
        ]
    unwritten = [np.logical_and.reduce([run[at][1] for run in runs]) for at in range(len(runs[0]))]
    for name, nobody in zip((*kernel.outputs, *kernel.writes), unwritten, strict=True):
        if all_written and nobody.any():
            some = f"{nobody.sum()} of {nobody.size} elements of {name}, first {nobody.argmax()}"
            raise MetalError(f"{kernel.name}: no thread writes {some}")
    for order, outputs in zip(orders, runs, strict=True):
        for name, first, other, nobody in zip(
            (*kernel.outputs, *kernel.writes), runs[0], outputs, unwritten, strict=True
        ):
            apart = (_bits(first[0]) != _bits(other[0])) & ~nobody
            if apart.any():
                raise MetalError(
                    f"{kernel.name}: {name} depends on the order of threads, in {apart.sum()} of {apart.size}"
                    f" elements (order {order}), or on what nobody has written"
                )
    results = [array for array, _ in runs[0]]
    for name, result in zip(kernel.writes, results[len(kernel.outputs) :], strict=True):
        memory_of(arrays[kernel.inputs.index(name)])[...] = result
    return [as_mlx(array, dtype) for array, dtype in zip(results, output_dtypes, strict=False)]


class _Launch:
    """A kernel, compiled, with its inputs."""

    def __init__(
        self, kernel: Kernel, arrays: Sequence[mx.array], source: Printed, grid: Sizes, group: Sizes
    ):
        self._kernel, self._source, self._sizes = kernel, source, (grid, group)
        try:
            self._library, self._file = build.kernel_of(as_cpp(source))
        except build.CompileError as error:
            raise MetalError(
                f"{kernel.name} does not compile: {_first_errors(str(error), source.text)}"
            ) from None
        self._inputs = {name: as_numpy(array) for name, array in zip(kernel.inputs, arrays, strict=True)}
        spans = {name: _memory(array) for name, array in self._inputs.items()}
        self._offs = {name: (start - _start_of_arrays()) % 16 for name, (start, _) in spans.items()}
        for name, (start, size) in ((name, spans[name]) for name in kernel.writes):
            for other, (at, length) in spans.items():
                if (at, length) != (start, size) and at < start + size and start < at + length:
                    raise MetalError(f"{kernel.name}: {name}, which it writes, and {other} share some memory")
        self._numbers = dict[str, np.ndarray]()
        for name, array in self._inputs.items():
            self._numbers[f"{name}_shape"] = np.array(array.shape or (0,), np.int32)
            self._numbers[f"{name}_ndim"] = np.array(array.ndim, np.int32)
            self._numbers[f"{name}_strides"] = np.array(array.strides or (0,), np.int64) // array.itemsize

    def run(
        self,
        order: int,
        output_shapes: Sequence[Sequence[int]],
        output_dtypes: Sequence[Any],
        *,
        looks_for_races: bool,
    ) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return outputs, then written inputs, each with where nobody wrote, in one order of threads."""
        kernel, begun, fill = self._kernel, dict[str, np.ndarray](), FILLS[order % len(FILLS)]
        for name, shape, dtype in zip(kernel.outputs, output_shapes, output_dtypes, strict=True):
            begun[name] = np.empty(tuple(shape), _NUMPY[dtype])
            begun[name].reshape(-1).view(np.uint8)[...] = fill
        held = self._fenced(self._inputs | self._numbers | begun, fill, bool(order % 2))
        in_order = [parameter for parameter in self._source.parameters if parameter.buffer is not None]
        in_order.sort(key=lambda parameter: parameter.buffer or 0)
        pointers = (ctypes.c_void_p * len(in_order))(*[held[each.name].address for each in in_order])
        report, three = Report(), ctypes.c_uint32 * 3
        call = build.runtime().msl_run
        call.restype = None
        body, sizes = ctypes.cast(self._library.body, ctypes.c_void_p), [three(*size) for size in self._sizes]
        outputs = {held[name].address for name in kernel.outputs}
        written = {each.address: each for each in held.values() if each.is_writable}
        watched = [Written(at, each.array.nbytes, at in outputs) for at, each in written.items()]
        marks = (Written * len(watched))(*watched), len(watched), looks_for_races
        steps = ctypes.c_int64(MOST_STEPS)
        call(body, pointers, *sizes, order, fill, steps, *marks, ctypes.byref(report))
        if report.text:
            raise MetalError(f"{kernel.name}: {self._told(report, list(held.values()))}")
        for fenced in held.values():
            if not fenced.is_clean():
                raise MetalError(f"{kernel.name}: it writes before or behind {fenced.name}")
        outputs = [
            (held[name].array, _bits(held[name].array) == _bits(begun[name])) for name in kernel.outputs
        ]
        return outputs + [(held[name].array, np.zeros(held[name].array.size, bool)) for name in kernel.writes]

    def _fenced(self, given: dict[str, np.ndarray], fill: int, at_start: bool) -> dict[str, Fenced]:
        """Copies by name. Inputs that are one array are one copy."""
        held, by_memory = dict[str, Fenced](), dict[tuple[int, int], Fenced]()
        written = {_memory(given[name]) for name in self._kernel.writes}
        for parameter in self._source.parameters:
            if parameter.buffer is None:
                continue
            name, memory = parameter.name, _memory(given[parameter.name])
            is_writable = name in self._kernel.outputs or memory in written
            if memory not in by_memory:
                how = {"fill": fill, "at_start": at_start, "is_writable": is_writable}
                by_memory[memory] = Fenced(name, given[name], off=self._offs.get(name, 0), **how)
            held[name] = by_memory[memory]
        return held

    def _told(self, report: Report, buffers: list[Fenced]) -> str:
        text = report.text.decode()
        lines = [report.line, report.other]
        if text == "fault":
            told = (fenced.told(report.address) for fenced in buffers)
            text = next(filter(None, told), "it reads or writes where there is no buffer")
            if array := report.array.decode():
                text = f"it reads or writes outside of {array}"
        here = (fenced.element(report.address) for fenced in buffers)
        text = text.replace("@", report.array.decode() or next(filter(None, here), ""))
        if report.code:
            lines = [self._line_of(report.code)]
        told_lines = (f"line {line}: `{_line(self._source.text, line)}`" for line in lines if line > 0)
        return "; ".join([text, *told_lines])

    def _line_of(self, code: int) -> int:
        """Return the line whose machine code is at this address, or 0."""
        rows = Path("/proc/self/maps").read_text().splitlines()
        ours = [row.split()[0].split("-") for row in rows if row.endswith(str(self._file))]
        spans = [(int(start, 16), int(end, 16)) for start, end in ours]
        tool = shutil.which("addr2line")
        if tool and any(start <= code < end for start, end in spans):
            at = hex(code - min(spans)[0])
            told = subprocess.run(
                [tool, "-i", "-e", str(self._file), at], capture_output=True, text=True
            ).stdout
            if found := re.search(r"kernel\.(?:cpp|metal):(\d+)", told):
                return int(found[1])
        return 0


_NUMPY: dict[Any, Any] = {
    mx.float32: np.float32, mx.float16: np.float16, mx.bfloat16: np.uint16, mx.bool_: np.bool_,
    mx.int8: np.int8, mx.int16: np.int16, mx.int32: np.int32, mx.int64: np.int64,
    mx.uint8: np.uint8, mx.uint16: np.uint16, mx.uint32: np.uint32, mx.uint64: np.uint64,
}  # fmt: skip
"""bfloat16 has the bits of uint16 there."""


def memory_of(array: mx.array) -> np.ndarray:
    """Return an evaluated array's own memory: what is written there is in the array."""
    plain = array.view(mx.uint16) if array.dtype == mx.bfloat16 else array
    mx.eval(plain)
    memory = np.asarray(plain)
    assert memory.flags.c_contiguous and memory.flags.writeable, "an array that a kernel writes is contiguous"
    return memory


def as_numpy(array: mx.array) -> np.ndarray:
    """Return it row-contiguous, as MLX gives it to a kernel: x[1:] where it lies, x[:, 1:] copied."""
    plain = array.view(mx.uint16) if array.dtype == mx.bfloat16 else array
    mx.eval(plain)
    if not np.asarray(plain).flags.c_contiguous:
        plain = mx.contiguous(plain)
        mx.eval(plain)
    return np.asarray(plain).reshape(array.shape)


@functools.cache
def _start_of_arrays() -> int:
    """Where MLX's arrays begin here, beyond an address of 16. On a Mac it is 0."""
    return _memory(as_numpy(mx.zeros(64)))[0] % 16


def as_mlx(array: np.ndarray, dtype: Any) -> mx.array:
    out = mx.array(array)
    if dtype == mx.bfloat16:
        out = out.view(mx.bfloat16)
    mx.eval(out)
    return out


def _memory(array: np.ndarray) -> tuple[int, int]:
    """Return where it lies, and its bytes."""
    return array.__array_interface__["data"][0], array.nbytes


def _bits(array: np.ndarray) -> np.ndarray:
    """Return an integer an element: NaNs are equal where their bits are."""
    return np.ascontiguousarray(array).reshape(-1).view(f"u{array.itemsize}")


def _line(text: str, number: int) -> str:
    lines = text.splitlines()
    return lines[number - 1].strip() if 0 < number <= len(lines) else ""


def _first_errors(told: str, text: str) -> str:
    errors = re.findall(r"kernel\.metal:(\d+):\d+: error: (.*)", told)
    lines = [f"{_lacked(what)}; line {at}: `{_line(text, int(at))}`" for at, what in errors[:3]]
    return " / ".join(lines) or told[:2000]


LACKED = re.compile(
    r"no member named ‘([xyzwrgba]{2,4}|thread_elements)’|"
    r"‘((?:atomic|simd|quad|simdgroup|pack|unpack)_\w+|length|normalize|distance|cross|step|smoothstep|saturate|"
    r"sincos|rotate|reverse_bits|absdiff|hadd|mad24|mul24|texture\w*|sampler)’ was not declared"
)
"""What Metal has, in words of g++."""


def _lacked(error: str) -> str:
    found = LACKED.search(error)
    return f"msl_on_cpu.h lacks {found[1] or found[2]}, which Metal has" if found else error


@contextmanager
def in_place_of_metal(**how: Any) -> Iterator[None]:
    """Have omlxd's kernels run here. `how`: of `run`, as `orders=(0,)`."""
    from omlxd.engine.mlx_adapter.metal import kernel

    before = kernel.run

    def here(some: Kernel, arrays: Sequence[mx.array], template: Sequence[tuple[str, Any]] = (), **call: Any):
        return run(some, arrays, template, **call, **how)

    kernel.run = here
    try:
        yield
    finally:
        kernel.run = before
