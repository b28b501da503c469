"""What Apple's compiler and GPUs refuse, and running a kernel as C++ does not meet.

By count: buffers, threads of a threadgroup. The runtime counts threadgroup memory: 32,768 bytes.
By clang, to which address spaces are types of their own (msl_spaces.h), at the kernel's instance:

- a pointer or reference to one address space made of one to another, by a cast too
- a write to `constant` memory or to what is const
- a pointer or reference that names no address space
- threadgroup memory of a function that is no kernel, in an inner block, or with an initial value
- a variable outside of functions that is not `constant`
- a barrier without `mem_threadgroup`, in a kernel that has such memory
- what C++14 lacks, but for `if constexpr`
- double, long long, exceptions, virtual, new, goto, asm, std::, lambdas, pointers to functions, recursion
- arrays whose size is no constant, static variables of a function, variables named as a kind of function

An input of fewer than 8 elements comes as `constant`, not `device`: a kernel that takes it for the other is
refused at just such sizes.

A program can pass all of it and be refused on a Mac: clang sees no types of textures, nothing of a function
that is not used, and calls of functions that Metal has and msl_spaces.h lacks are not looked into. Without
the package libclang only the counts are looked at.
"""

from __future__ import annotations

import bisect
import functools
import re
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any

from .source import ARRAYS, Printed, without_includes

MOST_BUFFERS = 31
MOST_THREADS = 1024
HEADER = Path(__file__).with_name("msl_spaces.h")
ARGUMENTS = ["-target", "x86_64-linux-gnu", "-std=c++14", "-ffreestanding", "-ferror-limit=0"]
ARGUMENTS += ["-Wno-everything", "-Wvla", "-Wc++17-extensions", "-Wc++20-extensions"]
"""MSL up to 3.2 is C++14, and MLX itself relies on `if constexpr`."""

REFUSED = {word: word for word in ("double", "virtual", "dynamic_cast", "typeid", "new", "delete", "goto")}
REFUSED |= {word: word for word in ("thread_local", "asm", "noexcept", "register")}
REFUSED |= dict.fromkeys(("try", "catch", "throw"), "exceptions")
KINDS = ("kernel", "vertex", "fragment")
"""Of functions."""
SHIFT = 2
"""Lines before the kernel's."""
FUNCTIONS = ("FUNCTION_DECL", "FUNCTION_TEMPLATE", "CXX_METHOD")
SAID = re.compile(r"address space|\b(device|constant|threadgroup)\b|read-only|const-qualified")
SPACES = re.compile(r"\b(device|constant|thread|threadgroup|auto)\b")
MADE = re.compile(
    r"(?<![\w:])(?:metal::)?(?:(float|half|bfloat|u?int|u?short|u?char)([234])|vec<([^<>,]+),\s*([^<>,]+)>)\s*\((?!\s*&)"
)


def wrong(source: Printed, threadgroup: tuple[int, int, int]) -> str:
    """Return the first fault, or ""."""
    buffers = sum(parameter.buffer is not None for parameter in source.parameters)
    if buffers > MOST_BUFFERS:
        return f"it has {buffers} buffers, and Metal {MOST_BUFFERS}"
    if prod(threadgroup) > MOST_THREADS:
        return f"a threadgroup has {prod(threadgroup)} threads, and Apple's GPUs have {MOST_THREADS}"
    return refused(source.text, source.name, source.instance)


def can_read() -> bool:
    """Whether clang is here."""
    return _index() is not None


@functools.cache
def _index() -> Any:
    try:
        from clang import cindex

        return cindex.Index.create()
    except (ImportError, OSError):
        return None


@functools.lru_cache(maxsize=256)
def refused(text: str, name: str, instance: str) -> str:
    """Return what Metal's compiler would say of a kernel first, with the line, or ""."""
    index = _index()
    if index is None:
        return ""
    lines = text.splitlines()
    body = ARRAYS.sub(lambda match: f"extern {match[0]}", without_includes(text))
    body = MADE.sub(lambda match: f"msl::made<{match[1] or match[3]}, {match[2] or match[4]}>(", body)
    whole = f'#include "{HEADER}"\n\n{body}\n'
    if instance:
        whole += f"template decltype({name}{instance}) {name}{instance};\n"
    unit = index.parse("kernel.cpp", args=ARGUMENTS, unsaved_files=[("kernel.cpp", whole)])
    for what, line in sorted(_Reading(unit, name).faults(), key=lambda fault: fault[1]):
        return f"{what}; line {line}: `{lines[line - 1].strip() if 0 < line <= len(lines) else ''}`"
    return ""


def _named(told: str) -> str:
    """Return what clang says, with Metal's names of spaces."""
    for number, space in (("1", "device"), ("2", "constant"), ("3", "threadgroup")):
        told = re.sub(rf"(const )?__attribute__\(\(address_space\({number}\)\)\)", space, told)
    return told[:300]


class _Reading:
    """What clang's tree and tokens say of one kernel."""

    def __init__(self, unit: Any, name: str):
        self._unit, self._name = unit, name
        self._top = [
            cursor for cursor in unit.cursor.get_children() if str(cursor.location.file) == "kernel.cpp"
        ]
        self._cursors = [cursor for first in self._top for cursor in first.walk_preorder()]
        tokens = list(unit.get_tokens(extent=unit.cursor.extent))
        self._words = [token.spelling for token in tokens]
        places = [token.location for token in tokens]
        self._lines = [place.line for place in places]
        self._starts = [place.offset for place in places]

    def faults(self) -> Iterator[tuple[str, int]]:
        """Give each with its line of the Metal source."""
        for found in self._unit.diagnostics:
            told = [_named(text.spelling) for text in (found, *found.children)]
            line = found.location.line - SHIFT
            if "with linkage cannot have an initializer" in told[0]:  # It is `extern` for clang.
                yield "threadgroup memory has no initial value", line
            elif found.severity >= 3 and any(map(SAID.search, told)):
                yield "; ".join(told[:2]), line
            elif found.option.startswith("-Wvla"):
                yield "an array's size is no constant", line
            elif "extensions" in found.option and "constexpr if" not in told[0]:
                yield f"{told[0]}, and Metal 3 is C++14", line
        trees = (
            self._outside(),
            self._declarations(),
            self._casts(),
            self._threadgroup_memory(),
            self._recursive(),
        )
        for tree in trees:
            for what, cursor in tree:
                yield what, cursor.location.line - SHIFT
        for at, word in enumerate(self._words):
            if what := REFUSED.get(word):
                yield f"Metal has no {what}", self._lines[at] - SHIFT
            if word == "threadgroup_barrier" and "threadgroup" in self._words:
                yield from self._barrier(at)
            before, behind = self._words[at - 1 : at], self._words[at + 1 : at + 2]
            if word == "long" and behind == ["long"]:
                yield "Metal has no long long", self._lines[at] - SHIFT
            if word in KINDS and before != ["["] and behind != ["void"]:
                yield f"{word} is a word of Metal's own, and names nothing", self._lines[at] - SHIFT
            if word == "std" and behind == ["::"]:
                yield "Metal has no std::", self._lines[at] - SHIFT

    def _barrier(self, at: int) -> Iterator[tuple[str, int]]:
        if "mem_threadgroup" not in self._words[at : at + 12]:
            yield (
                "this barrier leaves threadgroup memory out: mem_flags::mem_threadgroup",
                self._lines[at] - SHIFT,
            )

    def _outside(self) -> Iterator[tuple[str, Any]]:
        for cursor in self._top:
            if cursor.kind.name == "VAR_DECL" and not re.search(r"\bconstant\b", self._declared(cursor)):
                yield "a variable outside of functions is `constant` in Metal", cursor

    def _declarations(self) -> Iterator[tuple[str, Any]]:
        for cursor in self._cursors:
            if cursor.kind.name == "LAMBDA_EXPR":
                yield "Metal has no lambdas", cursor
            if self._is_static_local(cursor):
                yield "Metal has no static variables of a function", cursor
            if cursor.kind.name not in ("VAR_DECL", "PARM_DECL", "FIELD_DECL"):
                continue
            kind = re.sub(
                r"\[[^]]*\]", "", cursor.type.get_canonical().spelling
            )  # Without sizes, as [2 * N].
            if "(*" in kind and ")(" in kind:
                yield "Metal has no pointers to functions", cursor
            elif re.search(r"[*&]", kind) and not SPACES.search(self._declared(cursor)):
                yield f"{cursor.spelling} points to no named address space", cursor

    def _is_static_local(self, cursor: Any) -> bool:
        if cursor.kind.name != "VAR_DECL" or cursor.storage_class.name != "STATIC":
            return False
        return cursor.semantic_parent.kind.name in FUNCTIONS and not cursor.type.get_address_space()

    def _casts(self) -> Iterator[tuple[str, Any]]:
        for cursor in self._cursors:
            if cursor.kind.name not in (
                "CSTYLE_CAST_EXPR",
                "CXX_REINTERPRET_CAST_EXPR",
                "CXX_FUNCTIONAL_CAST_EXPR",
            ):
                continue
            inner = [child for child in cursor.get_children() if child.kind.is_expression()][-1:]
            kinds = [some.type.get_canonical() for some in (cursor, *inner)]
            pointed = [kind.get_pointee() for kind in kinds]
            spaces = {kind.get_address_space() for kind in pointed if kind.spelling}
            if len(spaces) > 1:
                yield "a cast changes the address space", cursor

    def _threadgroup_memory(self) -> Iterator[tuple[str, Any]]:
        outermost = set[int]()
        for cursor in self._cursors:
            if cursor.kind.name in FUNCTIONS and cursor.spelling == self._name:
                bodies = [body for body in cursor.get_children() if body.kind.name == "COMPOUND_STMT"]
                statements = [statement for body in bodies for statement in body.get_children()]
                outermost |= {
                    declared.hash for statement in statements for declared in statement.get_children()
                }
        for cursor in self._cursors:
            if cursor.kind.name != "VAR_DECL" or cursor.hash in outermost:
                continue
            if re.match(r"(extern )?threadgroup [^*&]*$", self._declared(cursor)):
                yield "threadgroup memory is declared at the top of a kernel alone", cursor

    def _declared(self, cursor: Any) -> str:
        """Return a declaration up to its value. Clang leaves out a macro that it begins with."""
        first = bisect.bisect_left(self._starts, cursor.extent.start.offset)
        while first > 0 and self._words[first - 1] not in "(){},;<>":
            first -= 1
        if cursor.kind.name == "VAR_DECL" and self._words[first - 1] == ",":  # Behind another variable.
            while first > 0 and self._words[first - 1] not in "{};":
                first -= 1
        end = bisect.bisect_left(self._starts, cursor.extent.end.offset)
        words = self._words[first:end]
        return " ".join(words[: words.index("=")] if "=" in words else words)

    def _recursive(self) -> Iterator[tuple[str, Any]]:
        """Functions that call themselves, by their names: Metal has no stack for them."""
        defined = [cursor for cursor in self._cursors if cursor.kind.name in FUNCTIONS]
        calls: dict[str, set[str]] = {cursor.spelling: set() for cursor in defined}
        for function in defined:
            for cursor in function.walk_preorder():
                if cursor.kind.name == "CALL_EXPR":
                    words = [token.spelling for token in cursor.get_tokens()][:2]
                    if words and words[0] in calls and words[1:] != ["<"]:  # Of a template: another instance.
                        calls[function.spelling].add(words[0])
        for function in defined:
            reached, fresh = set[str](), set(calls[function.spelling])
            while fresh:
                reached |= fresh
                fresh = {called for name in fresh for called in calls[name]} - reached
            if function.spelling in reached:
                yield f"{function.spelling} calls itself", function
