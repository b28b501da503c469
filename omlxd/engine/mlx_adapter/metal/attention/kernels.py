"""The two kernels of attention over rows whose KV lies in parts, and how they are launched.

A row's KV is in parts: segments, which rows may share, and its own tail. `spans` cuts them into spans by the
position of tokens, so that a row's spans depend on its length alone: of `SMALL` tokens, then of `LARGE`. A
threadgroup has a span, a KV head, and a block of the queries that see it: those of all rows that share the
part, so a shared part is read once for all of them. Tiles of 32 tokens come into threadgroup memory once for
all queries: first keys, a lane for each token, then values, a lane for each column. Sums are in float32 and
in one order, with a softmax that goes on from tile to tile. `merge` joins a row's spans in the order of
positions. So a layer takes two launches, whatever rows there are, and no copy.

**New tokens.** Their KV comes in small arrays, `fresh`. `spans` reads it there, and puts it into the tails as
it does so: the one threadgroup that has a column's span, its KV head and the first block of queries writes
it, and no other reads it from the tail. MLX does not see that write. It is safe since

- `merge` takes what `spans` gives, so MLX has a barrier or a fence between them, which holds for all memory;
- who reads the tail next, the next pass, depends on this one's result, by its tokens or by the layer before;
- no one else writes there, or has MLX copy it beside a pass: nobody gives out views, copies of a cache are
  copies of its arrays, and before arrays grow, or are read for something else, the newest pass is waited for
  (`settle` of rows.py);
- MLX keeps a kernel's inputs alive until it has run.

MLX's bound on a kernel is 31 buffers, so a launch of `spans` reads `most_parts` parts; more take more
launches, which one `merge` joins.

By arithmetic, on an M2 Pro (200 GB/s, 19 cores of 128 lanes at 1.4 GHz: 3.4e12 fused multiply-adds a second):
KV in 16 bits comes at 1e11 numbers a second, each for `rows x group` queries, and one lane's multiply-add
takes about two instructions. So up to 16 queries to a KV head reading is what takes time, and beyond that
the lanes are.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import NamedTuple

import mlx.core as mx

from ..kernel import Kernel

WIDTHS = (16, 32, 64, 80, 96, 128, 192, 256)
MOST_NEW = 16
"""New tokens of a row. Each block of queries reads the KV again; MLX's own kernels, which multiply matrices,
suit more."""

TOKENS, SIMDGROUPS = 32, 4
SMALL, LARGE, FINE = 128, 256, 8
"""Tokens of a span, and how many spans of a row are small ones. A span writes, and `merge` reads, 4 bytes a
number and query; its keys and values are 2 x 2 bytes a token: with a group of 4, 128 tokens make 6 % more
traffic, 256 tokens 3 %, and 12 % where four rows share them. Small ones keep a GPU busy with one short
row: 500 tokens of 8 KV heads are 32 threadgroups. A prompt is cut into segments at multiples of 256 tokens
(cache/segments.py), so whether it is cut changes no bit."""

ALL_FINE = 1 << 23
"""Small spans of a row that is cut into no others: of one with a window."""

BUFFERS = 31
MOST_LAUNCHES = BUFFERS - 3
"""Of `spans` that one `merge` joins, beside table, sinks and output."""

HEADER_FIELDS = ("PARTS", "HEADS", "KV_HEADS", "NEW", "SCALE", "WINDOW", "FRESH")
PART_FIELDS = (
    *("FIRST_UNIT", "ARRAY", "FIRST_SPAN", "BLOCKS", "MEMBERS_AT", "MEMBERS"),
    *("SLOT", "FIRST", "END", "START", "CAPACITY", "FINE", "ROW"),
)
MERGE_FIELDS = ("LAUNCH", "SPAN_SLOT", "SPANS", "APART")
HEADER = 8


class Packing(NamedTuple):
    """Bits of a number, and neighbours that share a scale. 0: not packed."""

    bits: int = 0
    group: int = 32

    @property
    def arrays(self) -> int:
        """That keys, or values, are."""
        return 3 if self.bits else 1

    @property
    def most_parts(self) -> int:
        """Of one launch, beside queries, table, fresh keys and values, and the output."""
        return (BUFFERS - 3 - 2 * self.arrays) // (2 * self.arrays)


PLAIN = Packing()


def queries_of(dtype: mx.Dtype, width: int) -> int:
    """Queries of a threadgroup."""
    return SIMDGROUPS * (2 if dtype.size == 4 and width > 192 else 4)


# --------------------------------------------------------------------------- the sources


@cache
def _text(name: str) -> str:
    return Path(__file__).with_name(name).read_text()


def _constants() -> str:
    numbers = {
        "TOKENS": TOKENS,
        "SIMDGROUPS": SIMDGROUPS,
        "THREADS": 32 * SIMDGROUPS,
        "SMALL": SMALL,
        "LARGE": LARGE,
        "HEADER": HEADER,
        "MERGE_HEADER": 2,
        "MERGE_FIELDS": len(MERGE_FIELDS),
    }
    lines = [f"constant constexpr int {name} = {number};" for name, number in numbers.items()]
    names = [HEADER_FIELDS, (*PART_FIELDS, "FIELDS"), ("HAS_SINKS", "MERGE_NEW"), MERGE_FIELDS]
    lines += [f"enum {{ {', '.join(each)} }};" for each in names]
    lines.append("#define QUERIES_OF(size, width) (SIMDGROUPS * ((size) == 4 && (width) > 192 ? 2 : 4))")
    return "\n".join(lines) + "\n"


def part_names(what: str, packing: Packing) -> list[str]:
    return [f"{what}_{part}" for part in ("words", "scales", "biases")] if packing.bits else [what]


@cache
def spans_kernel(packing: Packing) -> Kernel:
    """Of arrays that are packed so; `bits` and `group` are compiled in by its template."""
    is_packed = bool(packing.bits)
    fresh = [part_names(f"new_{what}", packing) for what in ("keys", "values")]
    held = [
        [part_names(f"{what}{at}", packing) for what in ("keys", "values")]
        for at in range(packing.most_parts)
    ]
    lines = [
        f"    case {at}: keys = {{{', '.join(keys)}}}; values = {{{', '.join(values)}}}; break;"
        for at, (keys, values) in enumerate(held)
        if at
    ]
    source = _text("spans.metal").replace("@arrays@", "\n".join(lines))
    for what, new, first in zip(("keys", "values"), fresh, held[0], strict=True):
        source = source.replace(f"@new_{what}@", ", ".join(new)).replace(f"@{what}0@", ", ".join(first))
    parts = [name for pair in held for names in pair for name in names]
    return Kernel(
        "attention_packed_spans" if is_packed else "attention_spans",
        ["q", "table", *fresh[0], *fresh[1], *parts],
        ["partials"],
        source,
        _constants() + _text("header.metal"),
        parts,
    )


@cache
def merge_kernel(launches: int) -> Kernel:
    """Of so many launches of `spans`."""
    names = [f"partials{at}" for at in range(launches)]
    lines = [f"      case {at}: from = {names[at]}; break;" for at in range(1, launches)]
    choice = "\n".join(["    switch (table[entry]) {", *lines, "    }"]) if lines else ""
    return Kernel(
        f"attention_merge{launches}",
        ["table", "sinks", *names],
        ["out"],
        _text("merge.metal").replace("@launches@", choice),
        _constants() + '#define UNROLL _Pragma("clang loop unroll(full)")\n',
    )
