"""Kernels' results by MLX's own operations, where to run the kernel itself would take too long.

    @stand_in("attend_rows")
    def attend_rows(call: Call) -> list[mx.array]: ...

The numbers are the kernel's within rounding; inputs of `kernel.writes` are changed in place (`write`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from .source import Kernel


@dataclass(frozen=True, slots=True)
class Call:
    """A call of a kernel."""

    kernel: Kernel
    arrays: dict[str, mx.array]
    template: dict[str, Any]
    grid: tuple[int, int, int]
    threadgroup: tuple[int, int, int]
    output_shapes: list[tuple[int, ...]]
    output_dtypes: list[Any]

    def write(self, name: str, value: mx.array) -> None:
        """Change the input `name` in place, as the kernel does."""
        from .harness import as_numpy, memory_of

        assert name in self.kernel.writes, f"{self.kernel.name} does not write {name}"
        memory_of(self.arrays[name])[...] = as_numpy(value.astype(self.arrays[name].dtype))


StandIn = Callable[[Call], list[mx.array]]

_stand_ins: dict[str, StandIn] = {}


def stand_in(*names: str) -> Callable[[StandIn], StandIn]:
    """Register a function for kernels of these names."""

    def register(function: StandIn) -> StandIn:
        _stand_ins.update(dict.fromkeys(names, function))
        return function

    return register


def of(kernel: Kernel) -> StandIn | None:
    return _stand_ins.get(kernel.name)


# --------------------------------------------------------------------------- attention of a batch's rows


@stand_in("attention_spans", "attention_packed_spans")
def attention_spans(call: Call) -> list[mx.array]:
    """A row's bits depend on that row alone, and not on where its KV is cut."""
    from omlxd.engine.mlx_adapter.metal.attention import kernels, plan

    table, width = _numbers_of(call.arrays["table"]), call.template["WIDTH"]
    header = dict(zip(kernels.HEADER_FIELDS, table, strict=False))
    scale = float(np.int32(header["SCALE"]).view(np.float32))
    heads, kv_heads, new, window = (header[name] for name in ("HEADS", "KV_HEADS", "NEW", "WINDOW"))
    group = heads // kv_heads
    queries = _exact(call.arrays["q"]).reshape(-1, kv_heads, group * new, width)
    slots = call.output_shapes[0][0] // (heads * new * (width + 2))
    out = np.zeros((slots, kv_heads, group * new, width + 2), np.float32)
    out[..., width] = -np.inf
    for at in range(header["PARTS"]):
        part = dict(
            zip(kernels.PART_FIELDS, table[kernels.HEADER + at * len(kernels.PART_FIELDS) :], strict=False)
        )
        rows = table[part["MEMBERS_AT"] : part["MEMBERS_AT"] + part["MEMBERS"]]
        tokens, last = np.arange(part["FIRST"], part["END"]), np.full(new, part["END"])
        if part["ROW"] >= 0:
            _put_fresh(call, part, header["FRESH"])
            last += np.arange(new) - new
        columns = (tokens - part["START"]) % part["CAPACITY"]
        keys, values = (_held(call, f"{what}{part['ARRAY']}", columns) for what in ("keys", "values"))
        sees = (tokens <= last[:, None]) & (tokens > last[:, None] - (window or len(tokens) + new))
        for member, row in enumerate(rows):
            scores = np.where(np.tile(sees, (group, 1)), queries[row] @ keys.swapaxes(1, 2) * scale, -np.inf)
            for at, span in enumerate(plan.cuts(part["FIRST"], part["END"], part["FINE"])):
                some = scores[:, :, span]
                most = np.maximum(some.max(2, keepdims=True), -1e30)  # It may have seen nothing.
                weights, slot = np.exp(some - most), out[part["SLOT"] + at * len(rows) + member]
                slot[..., :width], slot[..., width] = weights @ values[:, span], most[..., 0]
                slot[..., width + 1] = weights.sum(2)
    return [mx.array(out.reshape(-1))]


def _exact(array: mx.array) -> np.ndarray:
    return np.asarray(array.astype(mx.float32)).astype(np.float64)


def _numbers_of(array: mx.array) -> list[int]:
    return np.asarray(array).tolist()


def _arrays(call: Call, name: str) -> list[mx.array]:
    from omlxd.engine.mlx_adapter.metal.attention import kernels

    packing = kernels.Packing(call.template["BITS"], call.template["GROUP"])
    return [call.arrays[part] for part in kernels.part_names(name, packing)]


def _held(call: Call, name: str, columns: np.ndarray) -> np.ndarray:
    """(KV heads, tokens, width) of these columns."""
    held = [array[0][:, mx.array(columns)] for array in _arrays(call, name)]
    if bits := call.template["BITS"]:
        parts = held[0], *(part.astype(mx.float32) for part in held[1:])
        held = [
            mx.dequantize(*parts, group_size=call.template["GROUP"], bits=bits).astype(call.template["T"])
        ]
    return _exact(held[0])


def _put_fresh(call: Call, part: Mapping[str, int], count: int) -> None:
    from .harness import as_numpy, memory_of

    columns = (np.arange(part["END"] - count, part["END"]) - part["START"]) % part["CAPACITY"]
    for what in ("keys", "values") if count else ():
        held = _arrays(call, f"{what}{part['ARRAY']}")
        for array, new in zip(held, _arrays(call, f"new_{what}"), strict=True):
            memory_of(array)[0][:, columns] = as_numpy(new)[part["ROW"]]


@stand_in("attention_merge1", "attention_merge28")
def attention_merge(call: Call) -> list[mx.array]:
    from omlxd.engine.mlx_adapter.metal.attention import kernels

    table, (rows, heads, new, width) = _numbers_of(call.arrays["table"]), call.output_shapes[0]
    out, fields = np.empty((rows, heads * new, width), np.float32), len(kernels.MERGE_FIELDS)
    for row in range(rows):
        found = list[np.ndarray]()
        for at in range(table[2 + row], table[3 + row], fields):
            launch, slot, spans, apart = table[at : at + fields]
            partials = _exact(call.arrays[f"partials{launch}"]).reshape(-1, heads * new, width + 2)
            found.append(partials[slot : slot + spans * apart : apart])
        partials = np.concatenate(found)
        most, sinks = partials[..., width].max(0), np.full(heads * new, -np.inf)
        if table[0]:
            sinks = np.repeat(_exact(call.arrays["sinks"])[:heads], new)
        most = np.maximum(most, sinks)
        shares = np.exp(partials[..., width] - most)
        total = np.exp(sinks - most) + (shares * partials[..., width + 1]).sum(0)
        out[row] = (shares[..., None] * partials[..., :width]).sum(0) / total[:, None]
    return [mx.array(out.reshape(call.output_shapes[0])).astype(call.template["T"])]


@stand_in("few_row_product")
def few_row_product(call: Call) -> list[mx.array]:
    x, weights = call.arrays["x"], _quantised(call)
    rows = x.reshape(-1, 1, x.shape[-1])
    out = mx.concatenate(
        [mx.quantized_matmul(row, call.arrays["w"], **weights) for row in rows]
    )  # A row's bits are its own.
    return [_biased(call, out, call.arrays["added"]).reshape(call.output_shapes[0])]


@stand_in("few_row_product_gathered", "few_row_product_few_gathered")
def gathered_product(call: Call) -> list[mx.array]:
    x, indices = call.arrays["x"], call.arrays["indices"]
    x = mx.broadcast_to(x, (*indices.shape, *x.shape[-2:])).reshape(indices.size, 1, -1)
    weights = _quantised(call)
    out = [
        mx.gather_qmm(row[None], call.arrays["w"], **weights, rhs_indices=one)
        for row, one in zip(x, indices.reshape(-1, 1), strict=True)
    ]
    added = call.arrays["added"][indices.reshape(-1)] if call.template["BIASED"] else call.arrays["added"]
    return [_biased(call, mx.concatenate(out)[:, 0], added).reshape(call.output_shapes[0])]


def _quantised(call: Call) -> dict[str, Any]:
    parts = {"scales": call.arrays["scales"], "biases": call.arrays["biases"]}
    return parts | {"transpose": True, "group_size": call.template["GROUP"], "bits": call.template["BITS"]}


def _biased(call: Call, out: mx.array, added: mx.array) -> mx.array:
    return out + added if call.template["BIASED"] else out


# --------------------------------------------------------------------------- a step of gated delta net


@stand_in("gated_delta_net_step")
def gated_delta_net_step(call: Call) -> list[mx.array]:
    from omlxd.engine.mlx_adapter.metal.delta import step

    at = dict(zip(step.FIELDS, _numbers_of(call.arrays["table"]), strict=True))
    rows, new, _ = call.output_shapes[0]
    heads, sharing, width = call.output_shapes[2][1], at["SHARING"], call.template["DK"]
    keys, own = np.arange(heads) // sharing, np.arange(heads) % sharing
    arrays = {name: _exact(array) for name, array in call.arrays.items() if name != "table"}

    def part(name: str, first: np.ndarray, columns: int) -> np.ndarray:
        token = arrays[name].reshape(rows, new, -1)
        return token[..., first[:, None] + np.arange(columns)]

    q_at = np.arange(heads // sharing) * at["K_HEAD"]
    v_at = keys * at["V_GROUP"] + own * call.template["DV"]
    gate_at = keys * at["G_GROUP"] + own
    out, conv, state = gated_delta_net(
        *(part("qkv", q_at + first, width) for first in (0, at["K_AT"])),
        part("qkv", v_at + at["V_AT"], call.template["DV"]),
        part("z", v_at + at["Z_AT"], call.template["DV"]),
        *(part(name, gate_at + first, 1)[..., 0] for name, first in (("b", 0), ("a", at["A_AT"]))),
        *(arrays[name] for name in ("conv", "state")),
        arrays["weight"][..., 0],
        arrays["norm"],
        arrays["rates"][: 2 * heads].reshape(2, heads),
        float(np.int32(at["EPS"]).view(np.float32)),
    )
    numbers = zip((out.reshape(rows, new, -1), conv, state), call.output_dtypes, strict=True)
    return [mx.array(array.astype(np.float32)).astype(dtype) for array, dtype in numbers]


def gated_delta_net(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    z: np.ndarray,
    b: np.ndarray,
    a: np.ndarray,
    conv: np.ndarray,
    state: np.ndarray,
    weight: np.ndarray,
    norm: np.ndarray,
    rates: np.ndarray,
    eps: float,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """By its definition, in float64: what `out_proj` takes, (rows, tokens, heads, width), and the states.

    q, k, v, z     (rows, tokens, heads, width) each; q and k of key heads, as projections give them
    conv, state    (rows, taps - 1, channels), (rows, heads, width, key width)
    weight, rates  (channels, taps), and logarithms of A and biases of a, (2, heads)
    """
    (rows, new, key_heads, key_width), (heads, width) = q.shape, v.shape[2:]
    seen = np.concatenate([conv, *[np.concatenate([x.reshape(rows, new, -1) for x in (q, k, v)], 2)]], 1)
    taps = weight.shape[1]
    mixed = sum(seen[:, at : at + new] * weight[:, at] for at in range(taps))
    mixed = mixed / (1 + np.exp(-mixed))
    q, k, v = np.split(mixed, [key_heads * key_width, 2 * key_heads * key_width], axis=2)
    q, k = (x.reshape(rows, new, key_heads, key_width) for x in (q, k))
    q, k = (x / np.sqrt((x**2).sum(-1, keepdims=True) + 1e-6) for x in (q, k))
    q, k = (np.repeat(x, heads // key_heads, 2) for x in (q / key_width**0.5, k))
    v = v.reshape(rows, new, heads, width)
    decay, rate = np.exp(-np.exp(rates[0]) * np.logaddexp(0, a + rates[1])), 1 / (1 + np.exp(-b))
    out = np.empty(v.shape)
    for token in range(new):
        key, query = k[:, token, :, None], q[:, token, :, None]
        state = state * decay[:, token, :, None, None]
        change = (v[:, token] - (state * key).sum(-1)) * rate[:, token, :, None]
        state = state + key * change[..., None]
        out[:, token] = (state * query).sum(-1)
    out = out / np.sqrt((out**2).mean(-1, keepdims=True) + eps) * norm * (z / (1 + np.exp(-z)))
    return out, seen[:, new:], state
