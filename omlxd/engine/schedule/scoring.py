"""How likely given answers are: the ends of several prompts in one pass, padded on the right.

A row is a prompt's end behind its cached prefix, and an answer but for its last token: what comes after a
position changes nothing at it, so padding needs no mask, whatever the layers keep. Answers that begin alike
share a row, and those of one token need none of their own. What the passes compute is not kept: the prompt's
full blocks are stored before, as any other's.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from typing import Any, cast

import mlx.core as mx

from .. import mlx_adapter
from ..mlx_adapter import LoadedModel
from ..sequence.sampling import NO_TOKEN, BatchSampler
from ..sequence.sampling import likelihoods as likelihoods_of
from ..sequence.sequence import LabelScores, Likelihood, Sequence
from .prefill import TOGETHER

COPIED = 1 << 30
"""Bytes of KV that the rows of a pass may copy."""


@dataclass(slots=True, frozen=True)
class _Row:
    """tokens: the prompt's end and the beginning of an answer. `labels`: indices of those that it scores."""

    sequence: Sequence
    tokens: list[int]
    labels: list[int]

    @property
    def answer(self) -> int:
        """The position whose logits are of the answer's first token."""
        return self.sequence.prompt.length - self.sequence.kv.length - 1


def tokens_to_score(sequence: Sequence) -> int:
    """Of all its rows."""
    return sum(len(row.tokens) for row in _rows(sequence))


def score(loaded: LoadedModel, sequences: Seq[Sequence]) -> Iterator[tuple[Sequence, LabelScores | None]]:
    """Yield each sequence and the scores of its labels; None: the model's logits are not numbers.

    Sequences stand at their last boundary. Those without images alone may be several.
    """
    found = {sequence: _Found(sequence) for sequence in sequences}
    rows = [row for sequence in sequences for row in _rows(sequence)]
    for group in _groups(loaded, rows):
        _compute(loaded, group, found)
    for sequence, each in found.items():
        yield sequence, each.scores()


def _rows(sequence: Sequence) -> list[_Row]:
    end = sequence.tokens[sequence.kv.length : sequence.prompt.length]
    heads = sorted({tuple(label[:-1]) for label in sequence.prompt.labels})
    # Whatever goes on from a head stands right behind it.
    begun = {head for head, after in pairwise(heads) if after[: len(head)] == head}
    heads = [head for head in heads if head not in begun]
    rows = [_Row(sequence, [*end, *head], []) for head in heads]
    for index, label in enumerate(sequence.prompt.labels):
        rows[bisect_left(heads, tuple(label[:-1]))].labels.append(index)
    return rows


def _groups(loaded: LoadedModel, rows: Seq[_Row]) -> Iterator[list[_Row]]:
    """Rows of one pass; each but the first is within `TOGETHER` tokens and `COPIED` bytes."""
    per_token = loaded.layout.nbytes(1) if loaded.layout else 0
    group: list[_Row] = []
    # Rows with KV and without it don't mix: nobody needs that, and not every class can do it.
    for row in sorted(rows, key=lambda row: (row.sequence.kv.length > 0, len(row.tokens))):
        several = [*group, row]
        copied = len(several) * max(each.sequence.kv.length for each in several) * per_token
        if group and not (
            loaded.batchable
            and len(several) * len(row.tokens) <= TOGETHER
            and copied <= COPIED
            and bool(row.sequence.kv.length) == bool(group[0].sequence.kv.length)
            and row.sequence.prompt.images is None
            and mlx_adapter.may_share_pass([each.sequence.adapter for each in several])
        ):
            yield group
            several = [row]
        group = several
    yield group


class _Found:
    """What is known of a sequence's labels so far."""

    def __init__(self, sequence: Sequence):
        self._sequence = sequence
        self.logprobs = [[math.nan] * len(label) for label in sequence.prompt.labels]
        self.logits = [math.nan] * len(sequence.prompt.labels)
        self.likeliest: tuple[int, Likelihood] | None = None

    def scores(self) -> LabelScores | None:
        if self.likeliest is None or any(map(math.isnan, chain(*self.logprobs))):
            return None
        return LabelScores(tuple(map(tuple, self.logprobs)), tuple(self.logits), self.likeliest)


def _compute(loaded: LoadedModel, group: Seq[_Row], found: dict[Sequence, _Found]) -> None:
    cache, width = _cache_of(loaded, group), len(group[-1].tokens)
    for start, stop, inputs in _spans(group, width):
        padded = [row.tokens[start:stop] for row in group]
        padded = [part + [0] * (stop - start - len(part)) for part in padded]
        # Of each row, the positions of the pass whose logits say something of its answers.
        wanted = [list(range(max(row.answer, start), min(len(row.tokens), stop))) for row in group]
        most = max(1, *map(len, wanted))
        positions = [[at - start for at in (own or [start])] for own in wanted]
        positions = [own + own[-1:] * (most - len(own)) for own in positions]
        with mlx_adapter.row_adapters([row.sequence.adapter for row in group]):
            logits = mlx_adapter.logits_at(loaded.model, mx.array(padded), cache, positions, **inputs)
        if any(wanted):
            _take(group, wanted, logits, found)
        else:
            mx.eval(mlx_adapter.state_arrays(cache))


def _cache_of(loaded: LoadedModel, group: Seq[_Row]) -> mlx_adapter.Cache:
    """The rows' prefixes, to be written to; a sequence with several rows keeps its own."""
    if len(group) == 1 and len(_rows(group[0].sequence)) == 1:
        return group[0].sequence.take_cache()
    if loaded.batchable and group[0].sequence.prompt.images is None:
        held = (cast(mlx_adapter.Cache, row.sequence.kv.cache) for row in group)
        return mlx_adapter.merge([*map(mlx_adapter.copied, held)])
    return mlx_adapter.copied(cast(mlx_adapter.Cache, group[0].sequence.kv.cache))


def _spans(group: Seq[_Row], width: int) -> Iterator[tuple[int, int, dict[str, Any]]]:
    """(start, stop, what the model gets besides) of each pass: a row alone may be long."""
    images, start = group[0].sequence.prompt.images, 0
    if images is not None:  # A prompt's end may be a few images, and is one pass as it always is.
        behind, start = group[0].sequence.kv.length, group[0].answer + 1
        yield 0, start, images.inputs(behind, group[0].sequence.prompt.length)
    for at in range(start, width, TOGETHER):
        yield at, min(at + TOGETHER, width), {"deltas": [images.delta]} if images and images.delta else {}


def _take(group: Seq[_Row], wanted: Seq[Seq[int]], logits: mx.array, found: dict[Sequence, _Found]) -> None:
    """`logits` (rows, positions, vocabulary) at the `wanted` positions of each row."""
    places: list[tuple[int, int, int]] = []  # Row, position among its wanted, token.
    owners: list[tuple[Sequence, int, int]] = []  # Sequence, label, its token.
    firsts: dict[Sequence, int] = {}  # Rows.
    for index, (row, own) in enumerate(zip(group, wanted, strict=True)):
        for at, position in enumerate(own):
            of_answer = position - row.answer
            for label in row.labels:
                if of_answer < len(tokens := row.sequence.prompt.labels[label]):
                    places.append((index, at, tokens[of_answer]))
                    owners.append((row.sequence, label, of_answer))
        if row.answer in own and row.sequence not in firsts and found[row.sequence].likeliest is None:
            firsts[row.sequence] = index
    rows, positions, tokens = (mx.array(part) for part in zip(*places, strict=True))
    values = logits[rows, positions, tokens]
    logprobs = values - mx.logsumexp(logits, axis=-1)[rows, positions]
    sampler, drawn = None, None
    if firsts:
        sampler = BatchSampler(
            [replace(row.sampling, top_logprobs=row.sampling.top_logprobs or 0) for row in firsts]
        )
        drawn = sampler(mlx_adapter.rows_at(logits, [*firsts.values()])[:, 0])
    mx.eval(values, logprobs, *([] if sampler is None else [drawn, *(sampler.logprobs or ())]))
    for (sequence, label, at), value, logprob in zip(
        owners, cast(list[float], values.tolist()), cast(list[float], logprobs.tolist()), strict=True
    ):
        found[sequence].logprobs[label][at] = logprob
        if at == 0:
            found[sequence].logits[label] = value
    if sampler is not None and drawn is not None:
        likely = likelihoods_of(sampler.rows, sampler.logprobs)
        for sequence, token, each in zip(firsts, cast(list[int], drawn.tolist()), likely, strict=True):
            if token != NO_TOKEN and each is not None:
                found[sequence].likeliest = token, each
