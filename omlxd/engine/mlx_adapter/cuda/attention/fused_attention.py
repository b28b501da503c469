"""A CUDA kernel from a layer's q, k and v of new tokens to what attention gives for them.

`omlxd_fused_attention` normalises and rotates queries and keys where the model does, puts the new KV into
its place, reads each row's own KV alone, and its last block of a head puts the parts together: one launch
where MLX and attention_kernel.py take eight. What rows hold in segments is read by other blocks of the same
launch, each segment once for all rows that hold it. A row is cut into parts by its own length alone, and
each part's sums have a fixed order, so that a row's bits do not depend on the rows beside it. Of several new
tokens each is a row of its own, which ends where the token does: their bits are those of as many launches of
one. Rows that are held may have unequal numbers of new tokens.

KV goes by asynchronous copies into rings of shared memory, one for each warp, and from there into tensor
cores: tokens are the long side of a tile, the query heads of a KV head the short one. fused_step.py calls it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import mlx.core as mx

from ..compile import kernel_store, launch
from ..compile.source import MOST_ROWS, TYPES, source
from .attention_kernel import Held, Tails
from .attention_source import most_heads

if TYPE_CHECKING:
    from .segments import Shared

WIDTHS, MOST_GROUP = (64, 128, 256), 16

MOST_NEW = 16
"""Tokens of each row that are held in a launch."""

ARCHITECTURES = (90, 100, 103)
"""With 227 KB of shared memory. It has run on the first alone."""


@dataclass(frozen=True, slots=True)
class Shape:
    """How a kernel is cut. A part of a tail has at least `least` tokens; a tail has at most `most` parts, 32
    or fewer.

    A part has a multiple of 16 * `warps` tokens. `stages` of 16 tokens are on their way for each warp. Of a
    segment a block reads `span` tokens for 8 * `tiles` queries of rows that hold it at once: registers bound
    them, so that two blocks of narrow heads share a multiprocessor. With 4 warps a layer's launch has room
    for attention of 128-wide heads (layer_products.py); by itself it takes 0.02 ms longer a step than with 8,
    and 0.1 for four rows.

    Milliseconds of a decode step, 8B shape in bfloat16, one H100, no launch graphs; plain: no segments:

    | warps, tiles, span, least, most | 1 x 500 | 1 x 16,000 | plain | 4 x 16,000 up |
    |---------------------------------|---------|------------|-------|---------------|
    | 8, 4, 1024, 1024, 16            | 6.02    | 7.19       | 6.96  | 10.26         |
    | 8, 4, 1024, 512, 16             | 6.14    | 7.25       | 6.86  | 10.35         |
    | 8, 4, 512, 512, 16              | 6.12    | 7.86       | 6.92  | 11.55         |
    | 4, 2, 512, 512, 32              | 6.19    | 7.26       | 6.98  | 10.76         |
    | 4, 2, 256, 256, 32              | 6.25    | 7.79       | 6.98  | 13.03         |

    On another host 4, 2, 1024, 1024, 32 took 6.08, 7.32, 7.08 and 10.59, and the first row 6.02, 7.27, 6.93
    and 10.40. Two chains of sums, blocks of tails first, and no merge changed a step by less than 0.1 ms; nor
    did it help to ask for all parts of a head at once as they are put together. A kernel for eight queries of
    a segment or fewer took 7.13 in place of 7.27, and is in use since. Blocks that prefetch the next
    product's weights into L2 at their end, here and in products_kernel.py, cost 0.1 to 0.4 ms.
    """

    warps: int = 4
    stages: int = 3
    least: int = 1024
    most: int = 16
    tiles: int = 4
    span: int = 1024


def shape_of(width: int) -> Shape:
    """The shape whose rings fit into an H100's shared memory, 227 KB of a multiprocessor."""
    return Shape(warps=8 if width < 128 else 4, tiles=4 if width == 128 else 2)


@dataclass(frozen=True, slots=True)
class Heads:
    """What a layer's attention is: the same for all layers of a model.

    turned       first dimensions of a head that are rotated; 0: none
    traditional  a rotation's pair are neighbours; else half of `turned` lies between them
    norm         queries and keys are normalised before
    """

    width: int
    heads: int
    kv_heads: int
    turned: int
    traditional: bool
    norm: bool
    scale: float
    eps: float
    dtype: Any


def fits(heads: Heads) -> bool:
    """Whether there is a kernel for these."""
    return (
        heads.width in WIDTHS
        and heads.heads // heads.kv_heads <= MOST_GROUP
        and heads.dtype == mx.bfloat16  # For products.py's norms.
    )


ARGUMENTS = [
    *(f"const T* {name}" for name in ("q", "k", "v", "q_norm", "k_norm")),
    *("const float* turns", "const T* keys", "const T* values", "const unsigned long long* tails"),
    *(f"const int* {name}" for name in ("starts", "ends", "owners")),
    *("const unsigned long long* addresses", "const int* table", "const int* counts", "const int* counters"),
    *("T* out", "float* sums", "float* weights"),
    *(f"const int {name}" for name in ("capacity", "several", "rows")),
    *(f"const int {name}" for name in ("segments", "length", "across", "most")),
]
"""Of `omlxd_attend`, behind the block's place, the shared memory and whom it awaits."""

OWN = ("q_norm", "k_norm", "keys", "values", "tails", "addresses")
"""Arguments that are a layer's own; the other arrays that it is given are the same for all layers."""


def bits_of(x: float) -> str:
    """A name of the number, for that of a function."""
    return x.hex().replace(".", "").replace("-", "m").replace("+", "")


FILES = "copies", "segment", "fused_attention"


def device_source(
    heads: Heads, shape: Shape, *, late: bool
) -> tuple[str, dict[str, float], dict[str, str | int]]:
    """(what tells it from others, numbers and words of `FILES`) for `omlxd_attend`. `late`: other blocks of
    its launch compute the new tokens' queries, keys and values."""
    group, width = heads.heads // heads.kv_heads, heads.width
    numbers: dict[str, float] = {"D": width, "GROUP": group, "H": most_heads(group)}
    numbers |= {"KV_HEADS": heads.kv_heads, "TURNED": heads.turned, "TRADITIONAL": int(heads.traditional)}
    numbers |= {"NORM": int(heads.norm), "WARPS": shape.warps, "STAGES": shape.stages, "LEAST": shape.least}
    numbers |= {"MOST": shape.most, "PARTS": group // most_heads(group), "MOST_NEW": MOST_NEW}
    numbers |= {"SPAN": shape.span, "MOST_TILES": shape.tiles, "LATE": int(late)}
    floats = {"scale": float(heads.scale), "eps": float(heads.eps)}  # MLX takes no float for an argument.
    name = "_".join([*map(str, numbers.values()), *map(bits_of, floats.values())])
    numbers |= {"RING": ring_bytes(width, shape) // 16, **floats}
    return name, numbers, {"TURNS": 1, "ARGUMENTS": ", ".join(ARGUMENTS)}


def ring_bytes(width: int, shape: Shape) -> int:
    """Of shared memory that hold KV on its way, and then the warps' sums."""
    return max(
        shape.warps * shape.stages * 2 * 16 * width * 2, shape.warps * 8 * shape.tiles * (width + 4) * 4
    )


def shared_bytes(width: int, shape: Shape) -> int:
    """Of a block: as fused_attention.cu divides them."""
    columns = 8 * shape.tiles
    vectors = 2 * width * (columns + 2 * MOST_NEW)
    return ring_bytes(width, shape) + vectors + 8 * shape.warps * columns + (8 + 4) * columns


def source_of(heads: Heads, shape: Shape) -> tuple[str, str]:
    """(function, CUDA source)."""
    name, numbers, words = device_source(heads, shape, late=False)
    kind = TYPES[heads.dtype]
    function = f"omlxd_fused_attention_{kind}_{name}"
    words |= {"FUNCTION": function, "ALONE": 1, "GIVEN": ", ".join(one.split()[-1] for one in ARGUMENTS)}
    return function, source(FILES, words, kind, numbers)


@cache
def compiled(heads: Heads, shape: Shape) -> tuple[str, bytes]:
    function, made = source_of(heads, shape)
    return function, kernel_store.machine_code(made)


def owners_of(counts: Sequence[int], size: int) -> mx.array:
    """(size,) in int32: of new tokens of rows, of which each has as many as `counts` says, one row's behind
    the other's, `MOST_NEW` times the row plus the token's place among its own; -1: nobody's."""
    owners = [row * MOST_NEW + token for row, count in enumerate(counts) for token in range(count)]
    return mx.array(owners + [-1] * (size - len(owners)), mx.int32)


def _arrays_of(held: Held) -> tuple[list[mx.array], int, int]:
    """(keys, values and addresses, of which some stand for what there is not; capacity, 0: each row has its
    own; tokens of the longest row, at most)."""
    if isinstance(held, Tails):
        return [held.table] * 3, 0, held.most
    capacity = held[0].shape[2]
    return [*held, held[0]], capacity, capacity


class Launch(NamedTuple):
    """A launch of the kernel, or what a layer's launch ends with.

    norms    of queries and keys, or none
    inputs   of `ARGUMENTS`, those behind the norms
    outputs  shapes and types of what attention gives and of what it keeps meanwhile
    """

    heads: Heads
    shape: Shape
    norms: Sequence[mx.array]
    inputs: Sequence[mx.array]
    scalars: Sequence[int]
    blocks: tuple[int, int]
    outputs: Sequence[tuple[tuple[int, ...], Any]]

    @property
    def own(self) -> list[mx.array]:
        """Those of `OWN`."""
        return [*self.norms, *(array for name, array in self._named() if name in OWN)]

    @property
    def common(self) -> list[mx.array]:
        """`inputs` that are the same for all layers."""
        return [array for name, array in self._named() if name not in OWN]

    def _named(self) -> Iterable[tuple[str, mx.array]]:
        behind_norms = (argument.split()[-1] for argument in ARGUMENTS[5:])
        return zip(behind_norms, self.inputs, strict=False)

    def run(self, new: Sequence[mx.array]) -> mx.array:
        """(rows, heads * width). `new`: q (rows, heads * width), k and v (rows, KV heads * width) as the
        projections give them."""
        across, down = self.blocks
        threads = 32 * self.shape.warps
        return launch.run(
            compiled(self.heads, self.shape),
            [*new, *(self.norms or new[:2]), *self.inputs],
            list(self.scalars),
            grid=(threads * across, down, 1),
            threadgroup=(threads, 1, 1),
            shared_memory=shared_bytes(self.heads.width, self.shape),
            output_shapes=[shape for shape, _ in self.outputs],
            output_dtypes=[dtype for _, dtype in self.outputs],
        )[0]


class FusedAttention:
    """The kernel for a model's heads. Raises what NVRTC, the driver and MLX raise.

    Microseconds a layer, 32 query heads on 8 of 128, one H100, 36 launches each behind the other, ten times
    over. Before, segments and the merge had launches of their own; a launch costs the host 20 to 50 of them
    there:

    | rows                               | one launch | three |
    |------------------------------------|------------|-------|
    | 1 x 16,000 in segments             | 64         | 89    |
    | 1 x 32,000                         | 92         | 98    |
    | 4 x 16,000 to 20,500               | 115        | 124   |
    | 4 that share 14,336 tokens         | 56         | 82    |
    | 16 that share them                 | 76         | 102   |
    | 8 x 32,000                         | 374        | 375   |

    Of several new tokens each has its blocks. A grid with `MOST_NEW` places for each row that is held, most
    of them empty, took longer; milliseconds of a pass so and now, 8B shape, another H100:

    | rows, tokens of a pass   | so   | now  |
    |--------------------------|------|------|
    | 1 x 16,000, 8            | 10.3 | 9.1  |
    | 4 x 16,000 to 20,500, 8  | 11.7 | 10.8 |
    | 4 x 16,000 to 20,500, 32 | 26.6 | 23.7 |
    | 16 x 500 to 1,055, 32    | 11.7 | 9.3  |
    """

    def __init__(self, heads: Heads, shape: Shape | None = None):
        self.heads, self._shape = heads, shape or shape_of(heads.width)
        self._counters: mx.array | None = None

    @property
    def narrow(self) -> Shape:
        """Of launches without segments, or of few queries."""
        return replace(self._shape, tiles=1)

    def launch(
        self,
        norms: tuple[mx.array, mx.array] | None,
        turns: mx.array,
        held: Held,
        starts: mx.array,
        ends: mx.array,
        owners: mx.array | None = None,
        shared: Shared | None = None,
    ) -> Launch:
        """Several new tokens of a row that is held are rows, one behind the other.

        norms  weights of the queries' and the keys' norm, (width,)
        turns  (rows, width) in float32: cosine and sine of each pair's turn, at its two dimensions
        held   (rows held, KV heads, capacity, width), in one piece, or arrays of each row, for up to
               `MOST_NEW` of the rows; column `ends[row] - 1` is written in place
        starts, ends  (rows,): columns of a row; each token of one ends a column behind the token before
        owners        (rows,): `owners_of` the rows; None: each is held by itself
        shared        what rows have in segments, of a multiple of 16 tokens, before `held`
        """
        heads, shape, width = self.heads, self._shape, self.heads.width
        group = heads.heads // heads.kv_heads
        rows = turns.shape[0]
        kv, capacity, longest = _arrays_of(held)
        if shared is None or shared.widest * group <= 8:
            shape = self.narrow
        places = min(shape.most, -(-longest // shape.least)) * rows
        if self._counters is None:
            self._counters = mx.zeros((MOST_ROWS * heads.heads,), mx.int32)
            mx.eval(self._counters)
        segments, length, across, most = 0, 0, 0, shape.most
        its: tuple[mx.array, ...] = (ends, ends, ends)
        if shared is not None:
            segments, length = shared.table.shape[0], shared.tokens
            across = -(-shared.widest * group // (8 * shape.tiles))
            most += shared.most * -(-length // shape.span)
            its = shared.addresses, shared.table, shared.counts
        return Launch(
            heads=heads,
            shape=shape,
            norms=norms or (),
            inputs=[turns, *kv, starts, ends, ends if owners is None else owners, *its, self._counters],
            scalars=[capacity, int(owners is not None), rows, segments, length, across, most],
            blocks=(segments * -(-length // shape.span) * across + places, heads.heads // most_heads(group)),
            outputs=[
                ((rows, heads.heads * width), heads.dtype),
                *(((rows, heads.heads, most, size), mx.float32) for size in (width, 2)),
            ],
        )

    def __call__(self, new: Sequence[mx.array], *given: Any) -> mx.array:
        """As `Launch.run`, of what `launch` takes."""
        return self.launch(*given).run(new)
