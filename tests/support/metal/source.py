"""The Metal source of a kernel, as MLX prints it, and a file of C++ that has its numbers."""

from __future__ import annotations

import os
import re
import sys
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import mlx.core as mx


class Kernel(Protocol):
    """What of omlxd's `Kernel` is asked here."""

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    source: str
    header: str
    writes: tuple[str, ...]

    @property
    def made(self) -> Any: ...


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter of the printed function: a buffer, or a position such as `thread_position_in_grid`."""

    type: str
    name: str
    attribute: str
    buffer: int | None

    @property
    def plain(self) -> str:
        """The type without address space, const, pointer."""
        return re.sub(r"\b(device|constant|const)\b|[&*]", "", self.type).strip()


@dataclass(frozen=True, slots=True)
class Printed:
    """A kernel as MLX prints it. `instance`: the arguments of its template, as `<float, 3>`."""

    text: str
    name: str
    parameters: tuple[Parameter, ...]
    instance: str


_printing = threading.Lock()
_printed: dict[Any, Printed] = {}


def printed(
    kernel: Kernel, arrays: Sequence[mx.array], template: Sequence[tuple[str, Any]], **how: Any
) -> Printed:
    """Return the source that MLX makes for this call. It prints it while a function is exported."""
    small = [(str(array.dtype), array.ndim == 0, array.size < 8) for array in arrays]
    key = repr((kernel.name, kernel.inputs, kernel.outputs, kernel.source, kernel.header, template, small))
    key += repr(how["output_dtypes"])
    if key not in _printed:
        if template:
            how["template"] = list(template)
        with _printing:
            text = _while_exported(
                lambda *given: kernel.made(inputs=list(given), verbose=True, **how), arrays
            )
        _printed[key] = parsed(text)
    return _printed[key]


def _while_exported(call: Any, arrays: Sequence[mx.array]) -> str:
    sys.stdout.flush()
    with tempfile.TemporaryFile() as out, tempfile.TemporaryDirectory() as folder:
        held = os.dup(1)
        os.dup2(out.fileno(), 1)
        try:
            mx.export_function(f"{folder}/kernel.mlxfn", call, *arrays)
        finally:
            os.dup2(held, 1)
            os.close(held)
        out.seek(0)
        text = out.read().decode()
    return text.split("```")[1]


def parsed(text: str) -> Printed:
    found = re.search(r"\[\[kernel[^]]*\]\] void (\w+)\((.*?)\) \{", text, re.S)
    assert found is not None, text
    name, inside = found.groups()
    parameters = []
    for part in inside.split(",\n"):
        match = re.fullmatch(r"\s*(.*?)(\w+)\s*\[\[(\w+)(?:\((\d+)\))?\]\]\s*", part, re.S)
        assert match is not None, part
        parameters.append(
            Parameter(match[1].strip(), match[2], match[3], int(match[4]) if match[4] else None)
        )
    instance = re.search(rf"\n\s*template \[\[host_name[^\n]*? {name}(<[^;\n]*>);\s*$", text, re.S)
    if instance:
        text = text[: instance.start()]
    return Printed(text, name, tuple(parameters), instance[1] if instance else "")


POSITIONS = {
    "thread_position_in_grid": "in_grid",
    "thread_position_in_threadgroup": "in_group",
    "threadgroup_position_in_grid": "group",
    "threads_per_threadgroup": "group_size",
    "dispatch_threads_per_threadgroup": "full_group",
    "threads_per_grid": "grid_size",
    "threadgroups_per_grid": "groups",
}
NUMBERS = {
    "thread_index_in_threadgroup": "msl::now->index",
    "thread_index_in_simdgroup": "msl::now->lane",
    "simdgroup_index_in_threadgroup": "msl::now->simdgroup",
    "simdgroups_per_threadgroup": "msl::now->simdgroups",
    "dispatch_simdgroups_per_threadgroup": "msl::now->simdgroups",
    "threads_per_simdgroup": "32u",
    "thread_execution_width": "32u",
    "quadgroup_index_in_threadgroup": "msl::now->index / 4",
    "thread_index_in_quadgroup": "msl::now->index % 4",
}
ARRAYS = re.compile(
    r"(?<!\w)threadgroup\s+((?:alignas\(\w+\)\s*)?[\w:]+(?:<[^;>]*>)?(?:::\w+)?)\s+(\w+\s*(?:[\[,][^;]*)?);"
)
"""Declarations of threadgroup memory: type, then names with their sizes."""


def as_cpp(source: Printed) -> str:
    """A file of C++ with `body`, which one thread runs."""
    arguments = []
    for parameter in source.parameters:
        if parameter.buffer is not None:
            star = "*" if parameter.type.endswith("&") else ""
            arguments.append(f"{star}({parameter.plain}*)buffers[{parameter.buffer}]")
        elif parameter.attribute in POSITIONS:
            scalar = re.sub(r"[23]$", "", parameter.plain)
            at = f"msl::place<{scalar}>(msl::now->{POSITIONS[parameter.attribute]})"
            arguments.append(f"({at}{'' if parameter.plain.endswith('3') else '.x'})")
        else:
            arguments.append(NUMBERS[parameter.attribute])
    text = without_includes(source.text)
    return f"""#include "msl_on_cpu.h"
#line 1 "kernel.metal"
{with_shared_arrays(text)}
extern "C" __attribute__((visibility("default"))) void body(void** buffers) {{
  {source.name}{source.instance}({", ".join(arguments)});
}}
"""


def without_includes(text: str) -> str:
    """Leave out Metal's own headers, whose names msl_on_cpu.h has."""
    return re.sub(r"^[ \t]*#[ \t]*include[ \t]*<metal_\w+>", "", text, flags=re.M)


def with_shared_arrays(text: str) -> str:
    """Have the runtime give arrays of `threadgroup` memory, which it fences and fills with NaNs."""
    count = 0

    def declared(match: re.Match[str]) -> str:
        nonlocal count
        kind, out = match[1], []
        for name, sizes in re.findall(r"(\w+)\s*((?:\[[^\]]*\]\s*)*)(?:,|$)", match[2]):
            count += 1
            memory = f'msl::shared(sizeof({kind} {sizes}), {count}, "{name}", __LINE__)'
            out.append(f"{kind} (&{name}){sizes} = *({kind} (*){sizes}){memory};")
        return " ".join(out) + "\n" * match[0].count("\n")

    return ARRAYS.sub(declared, text)
