"""Draft tokens of a draft model: a small model of the same tokenizer says what the large one may say next.

It draws its tokens with the noise that the check of the same positions draws with, so that likely tokens
agree (Gumbel coupling). Where rejection sampling keeps a draft token with min(1, p/q) and draws anew else,
here the check draws from p as a step of its own would, and a draft token is accepted if it was drawn: the
answer is that of plain decoding, token by token where it is greedy or seeded.

Its KV is its own: plain, of the newest tokens alone, in no block and in no file. It is computed when drafts
of this model begin to pay, a chunk between two passes; after a restore or a cancel there is nothing to mend.
"""

from __future__ import annotations

import filecmp
import random
import time
from collections.abc import Container
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import numpy as np

from ...common.units import CPU_PREFILL_CHUNK, DRAFT_CONTEXT
from ...errors import ModelError
from .. import mlx_adapter
from ..mlx_adapter import LoadedModel
from ..sequence.sampling import NEG_INF, BatchSampler, Masked, RowSampling
from ..sequence.sequence import SamplerRow, Sequence
from .verify import most_of_row


class DraftModel:
    """A small model that proposes draft tokens for another.

    loaded      it
    vocab_size  of the model that it proposes for
    chunk       tokens of a prompt that one forward computes; on a CPU as few as of any prompt

    Raises ModelError if it can't.
    """

    is_named = True
    """As `DrafterModel` has it."""

    def __init__(
        self, loaded: LoadedModel, name: str, target: LoadedModel, target_name: str, chunk: int = 512
    ):
        _check(loaded.tokenizer, target.tokenizer, name, target_name)
        if loaded.layout is None or loaded.states is None or loaded.states.tensors or not loaded.batchable:
            raise ModelError(
                f"draft-model: {name} keeps more than KV of each token (windows or recurrent states); "
                f"name another small model with the tokenizer of {target_name}"
            )
        self.loaded = loaded
        self.vocab_size = target.vocab_size
        self.context = min(DRAFT_CONTEXT, loaded.context_length // 2)
        self.chunk = CPU_PREFILL_CHUNK if mlx_adapter.backend() == "cpu" else chunk

    def kv_bytes(self, sequence: Sequence) -> int:
        """Most that its KV takes for one sequence, as far as room is made for its answer at once."""
        assert self.loaded.layout is not None
        tokens = min(sequence.prompt.length, self.context) + sequence.capacity - sequence.prompt.length
        return self.loaded.layout.nbytes(mlx_adapter.round_up(tokens))

    def rows(self) -> DraftRows:
        return DraftRows(self)

    def logits(self, tokens: mx.array, cache: mlx_adapter.Cache, positions: int = 1) -> mx.array:
        """(rows, positions, the other model's vocabulary), whose ends may be padding in either."""
        with mlx_adapter.last_positions(positions):
            logits = self.loaded.model(tokens, cache=cache)[:, -positions:, : self.vocab_size]
        if lacking := self.vocab_size - logits.shape[-1]:
            logits = mx.pad(logits, [(0, 0), (0, 0), (0, lacking)], constant_values=NEG_INF)
        return logits


def check_tokenizer(draft: Path, target: Path, target_name: str) -> None:
    """Raises ModelError for another tokenizer in folder `draft` than in `target`, before weights are read."""
    files = draft / "tokenizer.json", target / "tokenizer.json"
    if not (all(file.exists() for file in files) and filecmp.cmp(*files, shallow=False)):
        own, other = map(mlx_adapter.load_tokenizer, (draft, target))
        _check(own, other, draft.name, target_name)


def _check(draft: Any, target: Any, name: str, target_name: str) -> None:
    """Raises ModelError for two tokenizers that are not the same; it names the first token that is not."""
    own, other = draft.get_vocab(), target.get_vocab()
    if own != other:
        token = min(dict(own.items() ^ other.items()))
        differs = f"token {token!r} is {own.get(token, 'none')} there and {other.get(token, 'none')} here"
        raise ModelError(
            f"draft-model: {name} has another tokenizer than {target_name} ({differs}); "
            "name a smaller model of the same family"
        )


@dataclass(slots=True)
class Wanted:
    """A row to propose for. `tokens`: all it has, of which the newest has no KV. `sampler`: a copy."""

    sequence: Sequence
    tokens: np.ndarray
    sampler: SamplerRow


@dataclass(slots=True, eq=False)
class _Row:
    """KV of tokens `start` to `end` of a sequence; `cache`: its own, until it joins the others'."""

    sequence: Sequence
    start: int
    end: int
    cache: mlx_adapter.Cache | None = None


@dataclass(slots=True)
class DraftRows:
    """What the draft model keeps of the rows of one batch.

    seconds  that the last drafts took; 0: there were none, or they brought a row here
    """

    model: DraftModel
    seconds: float = 0.0
    _rows: list[_Row] = field(default_factory=list)
    _coming: list[_Row] = field(default_factory=list)
    _cache: mlx_adapter.Cache = field(default_factory=list)

    def keep(self, sequences: Container[Sequence]) -> None:
        """Drop all others."""
        self._coming = [row for row in self._coming if row.sequence in sequences]
        keep = [index for index, row in enumerate(self._rows) if row.sequence in sequences]
        if len(keep) == len(self._rows):
            return
        self._rows = [self._rows[index] for index in keep]
        if keep:
            mlx_adapter.keep_rows(self._cache, keep)
        else:
            self._cache = []

    def propose(self, wanted: Seq[Wanted], width: int) -> dict[Sequence, list[int]]:
        """Propose up to `width` tokens that may come next, of the rows whose KV is there.

        Of others some is computed, of one a chunk. A row may lack as much as the widest verify step gives it;
        the forward that computes that gives its first draft token.
        """
        began, self.seconds = clock(), 0.0
        self._drop_long(wanted, width)
        extra = self._bring_one(wanted)
        by = {each.sequence: each for each in wanted}
        lacks = [len(by[row.sequence].tokens) - row.end if row.sequence in by else 0 for row in self._rows]
        if max(lacks, default=0) > most_of_row():
            self._feed(by, [min(max(0, lack - 1), self.model.chunk) for lack in lacks])
            lacks = [
                lack and len(by[row.sequence].tokens) - row.end
                for row, lack in zip(self._rows, lacks, strict=True)
            ]
            extra = True
        counts = [lack if lack <= most_of_row() else 0 for lack in lacks]
        if not any(counts):
            return {}
        drawn = self._draw(by, counts, width)
        if not extra:
            self.seconds = clock() - began
        return {
            row.sequence: until_no_token(guess)
            for row, guess, count in zip(self._rows, drawn, counts, strict=True)
            if count
        }

    def _drop_long(self, wanted: Seq[Wanted], width: int) -> None:
        """Rows that no longer fit its context begin again, with their newest tokens."""
        most = self.model.loaded.context_length - width
        long = [
            each.sequence
            for each in wanted
            for row in (*self._rows, *self._coming)
            if row.sequence is each.sequence and len(each.tokens) - row.start > most
        ]
        if long:
            self.keep([row.sequence for row in (*self._rows, *self._coming) if row.sequence not in long])

    def _bring_one(self, wanted: Seq[Wanted]) -> bool:
        """Compute a chunk of a row that is not here yet; once it lacks nothing it joins. False: all are."""
        here = [row.sequence for row in self._rows]
        each = next((each for each in wanted if each.sequence not in here), None)
        if each is None:
            return False
        row = next((row for row in self._coming if row.sequence is each.sequence), None)
        last = len(each.tokens) - 1
        if row is None:
            start = max(0, last - self.model.context)
            capacity = last - start + each.sequence.capacity - each.sequence.prompt.length
            row = _Row(each.sequence, start, start, mlx_adapter.new_cache(self.model.loaded.model, capacity))
            self._coming.append(row)
        assert row.cache is not None
        stop = min(row.end + self.model.chunk, last)
        mx.eval(self.model.logits(mx.array(each.tokens[None, row.end : stop]), row.cache))
        row.end = stop
        if stop < last:
            return True
        cache, row.cache = mlx_adapter.merge([row.cache]), None
        self._coming.remove(row)
        if self._rows:
            mlx_adapter.extend_batch(self._cache, cache)
        else:
            self._cache = cache
        self._rows.append(row)
        return True

    def _feed(self, by: dict[Sequence, Wanted], counts: Seq[int], positions: int = 1) -> mx.array:
        """Compute the next `counts[row]` tokens of each row."""
        most = max(counts)
        padded = np.zeros((len(counts), most), np.int32)
        for index, (row, count) in enumerate(zip(self._rows, counts, strict=True)):
            if count:
                padded[index, :count] = by[row.sequence].tokens[row.end : row.end + count]
                row.end += count
        logits = self.model.logits(mx.array(padded), self._cache, positions)
        mlx_adapter.trim(self._cache, [most - count for count in counts])
        mx.async_eval(logits)
        return logits

    def _draw(self, by: dict[Sequence, Wanted], counts: Seq[int], width: int) -> list[list[int]]:
        """Draw `width` draft tokens of each row, one after the other; no KV of them stays."""
        logits = self._feed(by, counts, max(counts))
        ends = mx.array([max(0, count - 1) for count in counts])
        logits = mx.take_along_axis(logits, ends[:, None, None], axis=1)[:, 0]
        idle = replace(next(iter(by.values())).sampler, penalties=None, constraint=None)
        rows = [
            by[row.sequence].sampler if count else replace(idle)
            for row, count in zip(self._rows, counts, strict=True)
        ]
        sampler = BatchSampler(rows)
        drawn = [sampler(logits)]
        for row in rows:
            row.constraint = None
        while len(drawn) < width:
            drawn.append(sampler(self.model.logits(drawn[-1][:, None], self._cache)[:, -1]))
        guesses = mx.stack(drawn, axis=1)
        mx.eval(guesses)
        if width > 1:
            mlx_adapter.trim(self._cache, [width - 1] * len(rows))
        return cast(list[list[int]], guesses.tolist())


def clock() -> float:
    """Seconds, to compare passes by. On a CPU those of this process: what other programs take is no cost."""
    return time.process_time() if mlx_adapter.backend() == "cpu" else time.perf_counter()


def until_no_token(guess: list[int]) -> list[int]:
    """Cut a draft where the draft model's logits are no numbers."""
    return guess[: next((index for index, token in enumerate(guess) if token < 0), len(guess))]


def seeded(params: RowSampling) -> RowSampling:
    """`params` with noise that follows from a seed, so that two draws of a step can have the same."""
    if params.greedy or params.seed is not None:
        return params
    return replace(params, seed=random.getrandbits(63))


def drafting(row: SamplerRow) -> SamplerRow:
    """How a draft draws what `row` may draw next. Of a grammar it knows the first token alone."""
    penalties = row.penalties and row.penalties.copy()
    mask = cast(Any, Masked(row.binding.mask)) if row.binding is not None else None
    return replace(row, constraint=mask, top_logprobs=None, penalties=penalties)
