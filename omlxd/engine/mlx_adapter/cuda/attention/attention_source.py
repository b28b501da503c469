"""CUDA source of the kernels of attention: spans, step, several, tiles, merge, put; attention_kernel.py runs
them.
"""

from __future__ import annotations

from typing import Any

from ..compile.source import TYPES, source

WARPS = 4
"""Of a block of threads. 8 took as long."""

UNROLL = 4
"""Tokens that a lane has on their way from memory. 2 took a tenth longer for long rows, 8 as long."""

AT_ONCE = 8
"""Queries that a lane keeps, at most; half as many of heads over 256 wide, and of several tokens.

Microseconds a layer for one new token a row in bfloat16, one H200, medians of 5 of 24 layers in one compiled
call (a script that is not kept). A launch takes the host 12 to 20 of them here: a row of 500 took this kernel
44 where it had two.

| query heads on KV heads, width      | rows            | MLX, no mask | mask  | ours | bytes at 4.8 TB/s |
|-------------------------------------|-----------------|--------------|-------|------|-------------------|
| 64 on 8, 64, sinks, window 128      | 1               | 12           | 51    | 29   | 0                 |
|                                     | 8: 200 to 3,000 | 22           | 88    | 36   | 0                 |
| 64 on 8, 64, sinks                  | 1: 8,000        | 165          | 154   | 59   | 3                 |
|                                     | 4: 2,000 to     | 136          | 757   | 62   | 11                |
| 8 on 4, 256, window 1,024           | 1               | 52           | 55    | 25   | 1                 |
|                                     | 8: 200 to 3,000 | 48           | 49    | 61   | 5                 |
| 8 on 4, 256                         | 4: 2,000 to     | 166          | 165   | 39   | 22                |
| 32 on 16, 128, window 1,024         | 1               | 12           | 43    | 38   | 2                 |
|                                     | 8: 200 to 3,000 | 48           | 99    | 51   | 10                |
| 8 on 1, 512                         | 4: 2,000 to     | 187          | 189   | 49   | 11                |
| 32 on 32, 96                        | 1: 8,000        | 45           | 99    | 43   | 21                |
|                                     | 4: 2,000 to     | 134          | 463   | 95   | 67                |
| 32 on 32, 80                        | 4: 2,000 to     | 424          | 433   | 85   | 56                |
| 16 on 16, 128                       | 4: 2,000 to     | 113          | 220   | 66   | 44                |

"2,000 to": 12,000, in steps that grow. Rows of a batch have a mask with MLX's own. One short row alone takes
longer than without: it has the same kernel, so that its bits are the same in company.
"""


def source_of(
    name: str, width: int, group: int, dtype: Any, span: int, *, ring: bool = False, sinks: bool = False
) -> tuple[str, str]:
    """(function, CUDA source) of a kernel: spans, step, several, tiles or merge.

    name   of the first three, `_out` behind it where a row has no more than one span; of the first four,
           `own_` before it where rows have arrays of their own
    ring   a row that comes to the arrays' end goes on at their beginning; a token sees `window` tokens
    sinks  a logit of each head joins the sum that weights are divided by
    """
    own = name.startswith("own_")
    name, _, out = name.removeprefix("own_").partition("_")
    kind = TYPES[dtype]
    function = "_".join(
        ["omlxd_decode", name, kind, *map(str, (width, group, span))]
        + [word for word, is_so in (("ring", ring), ("sinks", sinks), ("out", out), ("own", own)) if is_so]
    )
    numbers = {"D": width, "GROUP": group, "SPAN": span, "WARPS": WARPS, "UNROLL": UNROLL}
    numbers |= {"H": heads_at_once(width, group, name == "several"), "LANES": lanes_of(width)}
    numbers |= {"RING": int(ring), "SEVERAL": int(name == "several")}
    files = ["decode_rows", "decode_tiles" if name == "tiles" else "decode_spans"]
    if name == "merge":
        files = ["decode_merge"]
    words = {"FUNCTION": function, "STEP": int(name == "step"), "OWN": int(own), "OUT": int(bool(out))}
    return function, source(files, words | {"SINKS": int(sinks)}, kind, numbers)


def put_source(parts: int) -> tuple[str, str]:
    """(function, CUDA source) of a launch that puts new tokens into rows' own arrays.

    Part p of a token's KV has `bytes_p` bytes a KV head, an even number. The tokens of a row end at column
    `ends[row]`, and go on at the arrays' beginning where those end.
    """
    name = f"omlxd_put_{parts}"
    pointers = ", ".join(f"const unsigned short* new_{p}" for p in range(parts))
    sizes = ", ".join(f"const int bytes_{p}" for p in range(parts))
    copies = "\n".join(
        f"""  {{
    unsigned short* to = reinterpret_cast<unsigned short*>(own[{p}]);
    const int size = bytes_{p} / 2;
    for (int i = threadIdx.x; i < new_tokens * size; i += blockDim.x) {{
      const long column = (first + i / size) % capacity;
      to[(kv_head * capacity + column) * size + i % size] = new_{p}[(long)blockIdx.x * new_tokens * size + i];
    }}
  }}"""
        for p in range(parts)
    )
    return name, (
        f'extern "C" __global__ void {name}({pointers}, const unsigned long long* tails, const int* ends, '
        f"int* done, const int new_tokens, const int KV_HEADS, const int columns, {sizes}) {{\n"
        f"  const int row = blockIdx.x / KV_HEADS, kv_head = blockIdx.x % KV_HEADS;\n"
        f"  const unsigned long long* own = tails + (long)row * columns;\n"
        f"  const long capacity = own[{parts}], first = ends[row] - new_tokens + capacity;\n"
        f"{copies}\n  if (blockIdx.x == 0 && threadIdx.x == 0) *done = 1;\n}}\n"
    )


def most_heads(group: int) -> int:
    """Query heads of a group that a lane keeps."""
    return max(heads for heads in range(1, 9) if group % heads == 0)


def lanes_of(width: int) -> int:
    """Lanes that read a token together, a power of two."""
    return min(32, 1 << (width // 8 - 1).bit_length())


def heads_at_once(width: int, group: int, several: bool = False) -> int:
    """Queries of a KV head that a lane keeps; for several tokens those of a group are many times as many."""
    most = AT_ONCE if width <= 256 else AT_ONCE // 2
    if several:
        return most // 2
    return -(-group // -(-group // most))
