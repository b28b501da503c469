"""A decode step of Llama's kind of model in few kernels: layer_products.py, fused_attention.py.

A layer of RMSNorm, attention and SwiGLU is some 14 kernels in MLX, most of them so small that starting them
is what they cost: a third of a step of one row. Besides, MLX multiplies one row by one kernel and eight by
another, whose sums differ; these give a row the same bits whoever is beside it.

`FusedStep(model)` knows a model by its classes. `check` has its first and its last layer and its head give
what the model's own give, within rounding. Where they don't, the model goes on as it is.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn

from ...runtime.arrays import distance
from ..attention import checks
from ..attention.fused_attention import FusedAttention, fits
from ..attention.segments import Shared
from ..products import products
from ..products.layer_products import AT_ONCE
from .fused_weights import (
    Layer,
    Linear,
    Start,
    Unfusable,
    heads_of,
    is_known,
    layer_of,
    linear_of,
    norm_of,
    qk_norms,
    qkv_of,
)

log = logging.getLogger(__name__)

CLOSE = 0.02
"""Root of the mean square of a layer's difference from the model's own, as a share of what the layer adds.

bfloat16 rounds by 0.2 % at each of some ten places.
"""

CHECKED_ROWS = (3, 12, 24)
"""One of each form of the products' kernel (products_kernel.FORMS): what the check compiles, no request waits
for."""


REPEATED_ROWS = (1, 3, 12)
"""Steps of so many rows, and passes of `PASS` times as many tokens: each form of the products' kernel beside
another, and more tokens than one of its sets has, where a pass may have these."""
UNEQUAL_TOKENS = 1500
"""Tokens of the longest row that a check draws. Attention reads them in several spans."""

PASS = 4
"""Tokens of a row in a check's pass."""

JOINED = (1, 1), (3, 1), (2, 3), (4, 4), (9, 1), (2, 15), (16, 4)
"""Rows, and tokens of each, of what is computed in one launch and in several, and compared."""


class Between(NamedTuple):
    """What one layer gives the next. `sum`: (rows, hidden), the residual. `attended`: (rows, heads * width),
    what the next layer's attention gives."""

    sum: mx.array
    attended: mx.array


class FusedStep:
    """Logits (…, vocabulary) of tokens, by `compiled_step.StepKV` of each layer.

    Several tokens of a row have the bits of as many steps of one: each is a row of the products and of
    attention, where it ends. So `offset`, `starts` and `ends` of the layers are of each token, and their
    `owners` tells whose it is. There are at most `most_rows` tokens, and fused_attention.MOST_NEW of a row.

    attend     in place of the kernel. It may return (result, keys, values) instead of writing into what is
               held
    most_rows  that the products' kernel takes at most; 0: MLX's own products are used

    Raises Unfusable.
    """

    def __init__(self, model: Any, attend: Callable[..., Any] | None = None):
        if not is_known(model):
            raise Unfusable("another kind of model")
        inner = model.model
        self._embedding: nn.Embedding = inner.embed_tokens
        self._rope = inner.layers[0].self_attn.rope
        heads = {heads_of(layer, self._rope) for layer in inner.layers}
        if len(heads) != 1 or type(self._embedding) is not nn.Embedding:
            raise Unfusable("layers of several kinds")
        (self.heads,) = heads
        if attend is None and not fits(self.heads):
            raise Unfusable(f"no kernel for {self.heads}")
        self._eps: float = inner.norm.eps
        head = getattr(model, "lm_head", None)
        head = getattr(head, "head", head)  # Of the last positions alone.
        self._head = linear_of(head) if head is not None else Linear(self._embedding.weight, None)
        nexts = [(norm_of(layer.input_layernorm, self._eps), qkv_of(layer)) for layer in inner.layers]
        nexts.append((norm_of(inner.norm, self._eps), (self._head,)))
        followings = [*inner.layers[1:], None]
        self._layers = [layer_of(*each) for each in zip(inner.layers, nexts[1:], followings, strict=True)]
        self._starts = [
            Start(*own, qk_norms(layer.self_attn)) for own, layer in zip(nexts, inner.layers, strict=False)
        ]
        self.attend = attend or FusedAttention(self.heads)
        self.is_repeatable = False
        alike = {layer.products.shapes for layer in self._layers[:-1]}
        size, last = AT_ONCE if len(alike) == 1 else 1, len(self._layers) - 1
        self._groups = [slice(start, min(start + size, last)) for start in range(0, last, size)]
        self._joins = bool(self._groups)
        self._probes: dict[int, mx.array] = {}  # By the rows of a step.
        qkv = (linear.weight for linear in self._starts[0].qkv)
        weights = *self._layers[0].products.weights, *qkv, self._head.weight
        self.most_rows = products.most_rows(weights)

    def __call__(
        self, tokens: mx.array, layers: list[Any], compute: Callable[..., Between] | None = None
    ) -> mx.array:
        """`compute`: what does the same as `layers`, in less time."""
        turns = self.turns(layers[0].offset)
        x = self.begin(self._embedding(tokens.reshape(-1)), self._starts[0], turns, layers[0])
        for group in self._groups:
            behind = layers[group.start + 1 : group.stop + 1]
            x = (compute or self.layers)(self._layers[group], x, turns, behind)
        return self.end(self._layers[-1], x)[1].reshape(*tokens.shape, -1)

    def begin(self, x: mx.array, layer: Start, turns: mx.array, kv: Any) -> Between:
        """What the products of a layer take in, of (rows, hidden); `kv` takes the tokens' KV."""
        weights, biases = [one.weight for one in layer.qkv], [one.bias for one in layer.qkv]
        new = products.products(x, weights, norm=layer.norm, eps=self._eps, biases=biases)
        return Between(x, self._attend(new, layer.qk_norms, turns, kv))

    def end(self, layer: Layer, x: Between) -> list[mx.array]:
        """The residual behind a layer, and the next queries, keys and values, or the logits."""
        return products.of_layer(x.attended, x.sum, layer.products)

    def turns(self, offset: mx.array) -> mx.array:
        """(rows, width): cosine and sine by which each pair of dimensions turns: what the model's own rope
        makes of (1, 0)."""
        return mx.contiguous(self._rope(self._probe(offset.shape[0]), offset=offset)[:, 0, 0])

    def _probe(self, rows: int) -> mx.array:
        """(1, 0) for each pair, in the shape and order in which the model's own keys come. Kept."""
        if (probe := self._probes.get(rows)) is None:
            heads, dimension = self.heads, mx.arange(self.heads.width)
            first = dimension % 2 == 0 if heads.traditional else dimension < heads.turned // 2
            shape = rows, 1, heads.kv_heads, heads.width
            probe = mx.contiguous(mx.broadcast_to(first.astype(mx.float32), shape)).transpose(0, 2, 1, 3)
            mx.eval(probe)
            self._probes[rows] = probe
        return probe

    def layers(self, weights: Sequence[Layer], x: Between, turns: mx.array, kvs: Sequence[Any]) -> Between:
        """What comes out of layers and of the attention behind each; `kvs`, of the next ones, take the KV."""
        if self._joins and isinstance(self.attend, FusedAttention) and all(kv.how is None for kv in kvs):
            launches = [
                self.attend.launch(layer.next_norms, *_given(turns, kv))
                for layer, kv in zip(weights, kvs, strict=True)
            ]
            for kv in kvs:
                kv.done = True
            return Between(
                *products.of_layers(x.attended, x.sum, [layer.products for layer in weights], launches)
            )
        return self._apart(weights, x, turns, kvs)

    def _apart(self, weights: Sequence[Layer], x: Between, turns: mx.array, kvs: Sequence[Any]) -> Between:
        """`layers`, where each kernel has its own launch."""
        for layer, kv in zip(weights, kvs, strict=True):
            total, *new = self.end(layer, x)
            x = Between(total, self._attend(new, layer.next_norms, turns, kv))
        return x

    def _attend(
        self, new: Sequence[mx.array], norms: tuple[mx.array, mx.array] | None, turns: mx.array, kv: Any
    ) -> mx.array:
        """What attention gives of `new` queries, keys and values; `kv` takes the tokens' KV."""
        if kv.how is not None:
            return self._attend_packed(new, norms, kv)
        attended = self.attend(tuple(new), norms, *_given(turns, kv))
        if isinstance(attended, tuple):  # Where nothing is written in place.
            attended, kv.keys, kv.values = attended
        kv.done = True
        return attended

    def _attend_packed(
        self, new: Sequence[mx.array], norms: tuple[mx.array, mx.array] | None, kv: Any
    ) -> mx.array:
        """`attend` over packed KV: norms, turns and what packs the token are kernels of MLX."""
        q, k, v = (array.reshape(array.shape[0], -1, 1, self.heads.width) for array in new)
        if norms is not None:
            q, k = (mx.fast.rms_norm(x, norm, self.heads.eps) for x, norm in zip((q, k), norms, strict=True))
        q, k = (self._rope(array, offset=kv.offset) for array in (q, k))
        keys, values = kv.update_and_fetch(k, v)
        return kv.attend(q, keys, values, self.heads.scale, None, None).reshape(q.shape[0], -1)

    def compile_ahead(self) -> None:
        """Compile, side by side, what steps will need. Raises what NVRTC raises."""
        its = (self.heads, self.attend.narrow) if isinstance(self.attend, FusedAttention) else None
        lengths = {group.stop - group.start for group in self._groups}
        products.compile_ahead([layer.products for layer in self._layers], its, lengths)

    def check(
        self, model: Any, step_kv: Any, shared: Callable[..., tuple[Shared, mx.array, Any]] | None = None
    ) -> None:
        """Raise Unfusable unless the first and the last layer give what the model's own do, and what follows
        them, too: queries, keys and values, or the head's logits.

        step_kv  makes a layer's cache of (keys, values, starts, ends, offset, shared)
        shared   of so many rows: what they hold in segments, the tokens of that, what must stay meanwhile
        """
        for rows in CHECKED_ROWS:
            for at in (0, -1):
                before = shared(rows) if shared is not None else (None, mx.array(0), None)
                far = self._difference(model, step_kv, rows, at, *before[:2])
                if not far < CLOSE:  # NaN too
                    raise Unfusable(f"layer {at} differs by {far:.3g} in a step of {rows} rows")
        if self._joins and not all(self._joins_well(step_kv, *one, shared) for one in JOINED):
            log.info("fused steps have two launches a layer: several layers in one have other bits")
            self._joins = False

    @property
    def passed(self) -> list[bool]:
        """What checks have found: whether several layers are one launch, and several tokens have the bits of
        steps. Set it to what they found before."""
        return [self._joins, self.is_repeatable]

    @passed.setter
    def passed(self, found: Sequence[bool]) -> None:
        self._joins, self.is_repeatable = found

    def _joins_well(
        self,
        step_kv: Any,
        rows: int,
        count: int,
        shared: Callable[..., tuple[Shared, mx.array, Any]] | None,
    ) -> bool:
        """Whether `layers` gives what its parts do, for rows of unequal lengths, each with `count` tokens."""
        return checks.are_equal(
            *(self._group_by(compute, step_kv, rows, count, shared) for compute in (self.layers, self._apart))
        )

    def reads_tails(
        self, step_kv: Any, shared: Callable[..., tuple[Shared, mx.array, Any]] | None = None
    ) -> bool:
        """Whether rows with arrays of their own, told by address, have the bits of rows in one array."""
        given = ((self.layers, step_kv, *one, shared) for one in (*JOINED, (CHECKED_ROWS[1], 1)))
        return bool(self._groups) and all(
            checks.are_equal(self._group_by(*each), self._group_by(*each, own=True)) for each in given
        )

    def _group_by(
        self,
        compute: Callable[..., Between],
        step_kv: Any,
        rows: int,
        count: int,
        shared: Callable[..., tuple[Shared, mx.array, Any]] | None,
        *,
        own: bool = False,
    ) -> list[mx.array]:
        """What comes out of the first group of layers and of attention behind it, for rows of unequal lengths
        with `count` tokens each; and their keys and values. `own`: each row has arrays of its own."""
        weights, length = self._layers[self._groups[0]], UNEQUAL_TOKENS
        its, bases, stay = shared(rows, count) if shared is not None else (None, mx.array(0), None)
        starts, ends = checks.unequal_rows(rows, length)
        begin, end, owners = checks.places_of(starts, ends, range(count))
        offset = bases + end - begin - 1
        shape = rows, self.heads.kv_heads, length + count, self.heads.width
        given = [*((rows * count, size) for size in weights[0].products.weights[0].shape), shape, shape]
        x, attended, *drawn = (
            mx.random.normal(size, key=mx.random.key(i)).astype(self.heads.dtype)
            for i, size in enumerate(given)
        )
        arrays = [[array + i for array in drawn] for i in range(len(weights))]
        if own:
            arrays = [[array[row : row + 1] + 0 for row in range(rows) for array in pair] for pair in arrays]
        mx.eval(arrays)
        kvs = [
            step_kv(
                *((checks.tails_of(pair), None) if own else pair),
                begin,
                end,
                offset,
                shared=its,
                owners=owners,
            )
            for pair in arrays
        ]
        between = compute(weights, Between(x, attended), self.turns(offset), kvs)
        mx.eval(between)
        if own:
            after = [mx.concatenate(pair[i::2]) for pair in arrays for i in (0, 1)]
        else:
            after = [array for kv in kvs for array in (kv.keys, kv.values)]
        mx.eval(after)
        del stay
        return [*between, *after]

    def repeats(
        self, step_kv: Any, shared: Callable[..., tuple[Shared, mx.array, Any]] | None = None
    ) -> bool:
        """Whether several tokens of a row have the bits of as many steps: `is_repeatable` from now on.

        The arguments are `check`'s; `shared` takes how often all rows come, too.
        """
        most = max(1, self.most_rows // PASS)
        rows = {min(rows, most) for rows in REPEATED_ROWS}
        self.is_repeatable = all(self._repeats(some, step_kv, shared) for some in rows)
        return self.is_repeatable

    def _repeats(
        self, rows: int, step_kv: Any, shared: Callable[..., tuple[Shared, mx.array, Any]] | None
    ) -> bool:
        heads, n, length = self.heads, PASS, UNEQUAL_TOKENS // 2
        starts, ends = checks.unequal_rows(rows, length)
        keys = [mx.random.key(i) for i in range(3)]
        x = mx.random.normal((rows, n, self._embedding.weight.shape[1]), key=keys[0]).astype(heads.dtype)
        shape = rows, heads.kv_heads, length + n, heads.width
        held = [mx.random.normal(shape, key=key).astype(heads.dtype) for key in keys[1:]]
        mx.eval(held)

        def run(tokens: range, arrays: list[mx.array]) -> list[mx.array]:
            """The head's logits (rows, tokens, vocabulary), and keys and values."""
            count, own = len(tokens), x[:, tokens.start : tokens.stop].reshape(-1, x.shape[-1])
            begin, end, owners = checks.places_of(starts, ends, tokens)
            its, bases, stay = shared(rows, count) if shared is not None else (None, mx.array(0), None)
            kv = step_kv(*arrays, begin, end, bases + end - begin - 1, shared=its, owners=owners)
            behind = self.begin(own, self._starts[-1], self.turns(kv.offset), kv)
            logits = self.end(self._layers[-1], behind)[1]
            out = [logits.reshape(rows, count, -1), kv.keys, kv.values]
            mx.eval(out)
            del stay
            return out

        each, arrays = list[mx.array](), [array + 0 for array in held]
        for i in range(n):
            logits, *arrays = run(range(i, i + 1), arrays)
            each.append(logits)
        copies = [array + 0 for array in held]
        mx.eval(copies)
        return checks.are_equal([mx.concatenate(each, axis=1), *arrays], run(range(n), copies))

    def _difference(
        self,
        model: Any,
        step_kv: Any,
        rows: int,
        at: int,
        shared: Shared | None,
        bases: mx.array,
    ) -> float:
        """The largest of what a layer adds, of its KV and of what follows, for rows of unequal lengths."""
        heads, dtype = self.heads, self.heads.dtype
        length, capacity = 300, 512
        starts, ends = map(mx.array, checks.unequal_rows(rows, length))
        shape = rows, heads.kv_heads, capacity, heads.width
        keys = [mx.random.key(4 * rows - at + i) for i in range(3)]
        x = mx.random.normal((rows, self._embedding.weight.shape[1]), key=keys[0]).astype(dtype)
        held = [mx.random.normal(shape, key=key).astype(dtype) for key in keys[1:]]
        mx.eval(held)
        own, ours = (
            step_kv(*(array + 0 for array in held), starts, ends, bases + ends - starts - 1, shared=shared)
            for _ in range(2)
        )
        mx.eval(own.keys, own.values, ours.keys, ours.values)
        want = model.model.layers[at](x[:, None], None, own)
        behind = self.begin(x, self._starts[at], self.turns(ours.offset), ours)
        total, *results = self.end(self._layers[at], behind)
        mx.eval(total, results, want, own.keys, ours.keys)
        added = total - x, want[:, 0] - x
        pairs = [added, (ours.keys, own.keys), (ours.values, own.values)]
        pairs += zip(results, (wanted[:, 0] for wanted in self._wanted_behind(model, at, want)), strict=True)
        return max(distance(*pair) for pair in pairs)

    def _wanted_behind(self, model: Any, at: int, x: mx.array) -> list[mx.array]:
        """The next layer's queries, keys and values, or the logits, by the model's own modules."""
        if self._layers[at] is self._layers[-1]:
            head = getattr(model, "lm_head", None) or self._embedding.as_linear
            return [head(model.model.norm(x))]
        layer = model.model.layers[at + 1]
        own, x = layer.self_attn, layer.input_layernorm(x)
        return [own.q_proj(x), own.k_proj(x), own.v_proj(x)]


def _given(turns: mx.array, kv: Any) -> tuple[Any, ...]:
    """Of what `FusedAttention` takes: all but the new tokens and norms."""
    return turns, kv.held, kv.starts, kv.ends, kv.owners, kv.shared
