"""Which positions of a forward get logits, and the hidden states that its head takes."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..cache.kinds import Cache


@contextlib.contextmanager
def last_positions(count: int) -> Iterator[None]:
    """Passes on this thread give logits of their last `count` positions, at least; without it, of one."""
    passes.positions = count
    try:
        yield
    finally:
        passes.positions = 1


def logits_at(
    model: Any, tokens: mx.array, cache: Cache, positions: list[list[int]], **inputs: Any
) -> mx.array:
    """Logits (rows, positions, vocabulary) of these `positions` of each row of a pass, in float32.

    positions  as many of one row as of another
    """
    at = mx.array(positions)[..., None]
    passes.of_rows, passes.taken = at, False
    try:
        logits = model(tokens, cache=cache, **inputs)
    finally:
        passes.of_rows = None
    if not passes.taken:  # Its head has another name.
        logits = mx.take_along_axis(logits, at, axis=1)
    return logits.astype(mx.float32)


class _Passes(threading.local):
    """What the pass under way on a thread gives beside its logits.

    keeps   hidden states are kept: of `layers`, `streams`, or what the head takes
    streams  what mlx-vlm's language model itself calls its hidden states
    given   by the layers so far
    """

    positions = 1
    keeps = False
    layers: tuple[int, ...] = ()
    streams = False
    hidden: mx.array | None = None
    of_rows: mx.array | None = None
    taken = False

    def __init__(self) -> None:
        self.given: dict[int, mx.array] = {}


passes = _Passes()


def keep_hidden() -> None:
    """From now on passes on this thread keep what their head takes: `take_hidden` gives it."""
    passes.keeps, passes.layers, passes.streams = True, (), False


def keep_streams() -> None:
    """From now on passes on this thread of language models of mlx-vlm (vlm_text.py) keep the streams that go
    into their last mixer: `take_hidden` gives them, one behind the other."""
    passes.keeps, passes.layers, passes.streams = True, (), True


def keeps_streams() -> bool:
    return passes.streams


def give_streams(hidden: mx.array) -> None:
    """`hidden`: (rows, tokens, any)."""
    passes.hidden = hidden


def keep_layers(model: Any, layers: Sequence[int]) -> None:
    """From now on passes on this thread keep what these layers of `model` give: `take_hidden` gives it, one
    layer's behind the other's."""
    passes.keeps, passes.layers, passes.streams, passes.given = True, tuple(layers), False, {}
    for index in set(layers):
        layer = model.layers[index]
        layer.__class__ = _telling(type(layer), index)


def _telling(kind: Any, index: int) -> Any:
    def __call__(layer: Any, *args: Any, **kwargs: Any) -> Any:
        out = kind.__call__(layer, *args, **kwargs)
        if index in passes.layers:
            passes.given[index] = out[0] if isinstance(out, tuple) else out
        return out

    return type(kind.__name__, (kind,), {"__call__": __call__})


def keeps_hidden() -> bool:
    """Whether passes on this thread keep hidden states."""
    return passes.keeps


def forget_hidden() -> None:
    """Passes on this thread keep no hidden states any more."""
    passes.keeps, passes.layers, passes.streams, passes.given, passes.hidden = False, (), False, {}, None


@contextlib.contextmanager
def forgotten_on_error() -> Iterator[None]:
    """What is raised here ends the keeping of hidden states."""
    try:
        yield
    except Exception:
        forget_hidden()
        raise


def take_hidden() -> mx.array | None:
    """Hidden states (batch, tokens, any) of the last pass, not evaluated; once. None: none are kept."""
    if passes.layers:
        given, passes.given = passes.given, {}
        if any(layer not in given for layer in passes.layers):
            return None
        return mx.concatenate([given[layer] for layer in passes.layers], axis=-1)
    hidden, passes.hidden = passes.hidden, None
    return hidden


def _last(x: mx.array) -> mx.array:
    """(batch, tokens, hidden) of positions that count: the last, but within `last_positions`, `logits_at`."""
    if passes.keeps and not passes.layers and not passes.streams:
        passes.hidden = x
    if x.ndim == 3 and passes.of_rows is not None:
        passes.taken = True
        return mx.take_along_axis(x, passes.of_rows, axis=1)
    return x[:, -passes.positions :] if x.ndim == 3 else x


class _LastPosition(nn.Module):
    """A head that looks at the last positions alone.

    A module, or else a model that asks for `"lm_head" in self` would take its embeddings for tied.
    """

    def __init__(self, head: nn.Module):
        super().__init__()
        self.head = head

    def __call__(self, x: mx.array) -> mx.array:
        return self.head(_last(x))


def is_head(module: Any) -> bool:
    """Whether it is a head that `last_position_only` made, or `as_linear` of one."""
    return isinstance(module, _LastPosition) or not isinstance(module, nn.Module)


def last_position_only(model: Any) -> None:
    """Make `model` give logits of shape (batch, 1, vocabulary): only the last position is sampled.

    `last_positions` asks for more.

    The head of a 64-token chunk is otherwise a third of its time (CPU, tools/bench's `cpu` shape:
    1,364 ms with all positions, 943 without). What a model does with its logits after the head, such
    as capping, stays as it is. A head of another name than `lm_head` or tied embeddings is left alone.
    """
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.QuantizedEmbedding):
            module.as_linear = lambda x, as_linear=module.as_linear: as_linear(_last(x))
        if isinstance(head := getattr(module, "lm_head", None), nn.Module) and "vision" not in name:
            module.lm_head = _LastPosition(head)
