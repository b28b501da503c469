"""CUDA kernels of attention over segments: `omlxd_segments` reads one once for all rows that hold it,
`omlxd_segments_merge` puts its parts and those of each row's tail together by log-sum-exp.

A segment is cut into spans at fixed places. Queries of all rows that hold it are columns of products, each
added by itself and in one order, so that a row's bits do not depend on the rows beside it. The tail's parts
come from attention_kernel.py; segment_attention.py launches all of them. fused_attention.py's kernel reads
segments by segment.cu, too.
"""

from __future__ import annotations

from typing import Any

from ..compile.source import TYPES, source

SPAN = 512
"""Tokens of a segment that one block of threads reads. Others were not told apart: the host was slower."""

WARPS, STAGES = 4, 3
"""Of a block; two blocks share a multiprocessor. A warp has `STAGES` tiles of 16 tokens on their way."""

MERGE_WARPS = 8


def most_tiles(width: int) -> int:
    """Eights of columns that a block's registers have room for."""
    return 2 if width > 128 else 4


def segments_source(width: int, group: int, dtype: Any) -> tuple[str, str]:
    """(function, CUDA source)."""
    kind = TYPES[dtype]
    numbers = {"D": width, "GROUP": group, "SPAN": SPAN, "WARPS": WARPS, "STAGES": STAGES}
    numbers |= {"MOST_TILES": most_tiles(width), "LATE": 0}
    name = "_".join(["omlxd_segments", kind, *map(str, numbers.values())])
    files = "copies", "segment", "segments"
    return name, source(files, {"FUNCTION": name, "TURNS": 0}, kind, numbers)


def merge_source(width: int, dtype: Any, span: int, sinks: bool = False) -> tuple[str, str]:
    """(function, CUDA source). `span`: tokens of a part of a tail. `sinks`: as attention_source.py's."""
    kind = TYPES[dtype]
    numbers = {"D": width, "WARPS": MERGE_WARPS, "TAIL_SPAN": span}
    name = "_".join(["omlxd_segments_merge", kind, *map(str, numbers.values()), str(int(sinks))])
    return name, source(["segments_merge"], {"FUNCTION": name, "SINKS": int(sinks)}, kind, numbers)
