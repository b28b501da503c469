"""Sampling for a whole batch in one graph, each row by its own parameters and its own seed.

A token is argmax(filtered logits / temperature + Gumbel noise), which is a draw from the softmax.
A seeded row's noise is a function of its seed and its step alone, over the whole vocabulary, so the
same request gives the same tokens whatever runs beside it. mlx-lm's server, for comparison, leaves
batching as soon as a request has a seed, and calls one sampler a row when parameters differ.

Order of operations, as Hugging Face and vLLM have it: penalties, bias, temperature, then top-k,
top-p and min-p on the probabilities. Tokens that are equally likely pass a filter together or not at
all, as order among them would depend on the batch: so top-k may keep more than k.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from copy import copy
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import numpy as np

from ...chat import Sampling
from ...common.files import read_small
from .sequence import Likelihood, SamplerRow

NEG_INF = float("-inf")

GREEDY_BELOW = 1e-5
"""Temperatures below are greedy, as in vLLM: logits divided by one may pass what a float holds."""

NO_TOKEN = -1
"""Sentinel token: the logits contain NaN or infinity."""


@dataclass(slots=True, frozen=True)
class SamplingDefaults:
    """A model's own defaults (generation_config.json)."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    repetition_context_size: int = 0

    @classmethod
    def of_model(cls, folder: Path) -> SamplingDefaults:
        """Those in the folder, whose `do_sample: false` means greedy; else `UNNAMED`."""
        try:
            config = dict(json.loads(read_small(folder / "generation_config.json")))
        except (OSError, ValueError, TypeError, RecursionError):
            return UNNAMED
        named = {f: config[f] for f in cls.__slots__ if isinstance(config.get(f), int | float)}
        if config.get("do_sample") is False:
            named["temperature"] = 0.0
        return replace(cls() if "temperature" in named else UNNAMED, **named)


UNNAMED = SamplingDefaults(temperature=0.8, top_p=0.95, top_k=40, min_p=0.05)
"""For models whose files name no temperature: llama.cpp's and LM Studio's defaults (Ollama's temperature is
0.8 too). At 1.0 with no filter, as vLLM has it, small models talk nonsense."""


@dataclass(slots=True, frozen=True)
class RowSampling:
    """`chat.Sampling` with every default filled in."""

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    repetition_context_size: int
    presence_penalty: float
    frequency_penalty: float
    logit_bias: tuple[tuple[int, float], ...]
    seed: int | None
    min_tokens: int = 0
    ends: tuple[int, ...] = ()
    """Tokens that are not sampled before `min_tokens` others."""

    @classmethod
    def of(cls, sampling: Sampling, defaults: SamplingDefaults, ends: Iterable[int] = ()) -> RowSampling:
        def pick(name: str) -> float:
            value = getattr(sampling, name)
            return getattr(defaults, name) if value is None else value

        return cls(
            temperature=pick("temperature"),
            top_p=pick("top_p"),
            top_k=max(0, int(pick("top_k"))),  # -1 is "off" in some models' defaults
            min_p=pick("min_p"),
            repetition_penalty=pick("repetition_penalty"),
            repetition_context_size=max(0, int(pick("repetition_context_size"))),
            presence_penalty=sampling.presence_penalty,
            frequency_penalty=sampling.frequency_penalty,
            logit_bias=tuple(sorted(sampling.logit_bias.items())),
            seed=sampling.seed,
            min_tokens=sampling.min_tokens,
            ends=tuple(ends) if sampling.min_tokens else (),
        )

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    @property
    def filtered(self) -> bool:
        return not self.greedy and (self.top_p < 1 or self.top_k > 0 or self.min_p > 0)

    @property
    def penalised(self) -> bool:
        return bool(
            self.repetition_penalty != 1 or self.presence_penalty or self.frequency_penalty or self.logit_bias
        )


class Penalties:
    """What a penalised row has seen, on the device: updated from tokens that the host never waits for.

    seen   (vocabulary,) int32: how often in prompt and output, for the repetition penalty
    count  (vocabulary,) float: output alone, for presence and frequency
    recent (repetition_context_size,) int32: the newest tokens, which `seen` is then made of; None: of all

    Tokens are compared with all ids: MLX compiles a kernel for each kind of assignment to some on CUDA, which
    takes 3 to 4 seconds, in the middle of others' answers.
    """

    __slots__ = ("_bias", "_ids", "_row", "count", "recent", "seen")

    def __init__(self, row: RowSampling, prompt: Sequence[int], vocab: int):
        self._row, self._ids = row, mx.arange(vocab)
        self.recent: mx.array | None = None
        seen, bias = np.zeros(vocab, np.int32), np.zeros(vocab, np.float32)
        if row.repetition_penalty != 1:
            ids = [token for token in prompt if token < vocab][-row.repetition_context_size :]
            np.add.at(seen, ids, 1)
            if row.repetition_context_size:
                self.recent = mx.array(ids, mx.int32)
        for token, value in row.logit_bias:
            if 0 <= token < vocab:
                bias[token] = value
        self.seen, self._bias, self.count = mx.array(seen), mx.array(bias), mx.zeros((vocab,))

    def copy(self) -> Penalties:
        """The same so far; updating one leaves the other as it is."""
        return copy(self)

    def update(self, token: mx.array) -> None:
        """`token`: shape (1,), the row's newest output."""
        now, row = self._ids == token, self._row
        if row.presence_penalty or row.frequency_penalty:
            self.count = self.count + now
        if row.repetition_penalty != 1:
            self.seen = self.seen + now
        if self.recent is None:
            return
        recent = mx.concatenate([self.recent, token])
        if recent.size > row.repetition_context_size:
            self.seen, recent = self.seen - (self._ids == recent[:1]), recent[1:]
        self.recent = recent

    def apply(self, logits: mx.array) -> mx.array:
        """`logits`: (1, vocabulary) float32."""
        row = self._row
        if row.repetition_penalty != 1:
            worse = mx.where(logits > 0, logits / row.repetition_penalty, logits * row.repetition_penalty)
            logits = mx.where(self.seen > 0, worse, logits)
        if row.presence_penalty or row.frequency_penalty:
            logits = logits - (self.count > 0) * row.presence_penalty - self.count * row.frequency_penalty
        return logits + self._bias


@dataclass(slots=True, frozen=True)
class Masked:
    """What stands in a `SamplerRow` for a constraint that has come to another place."""

    mask: np.ndarray | None
    binds: bool = True


def sampler_rows(
    row: SamplerRow, guesses: Sequence[int], masks: Sequence[np.ndarray | None]
) -> list[SamplerRow]:
    """How the next token of a row is sampled, and the one after each guess, if the guesses hold.

    masks  of these tokens, for a constrained row

    Once a token was sampled, step and penalties of the row that it was sampled by go on in place of `row`'s.
    A greedy row without penalties and grammar stands for all: its step has no effect.
    """
    plain = not (row.params.penalised or masks or row.binding is not None)
    if row.params.greedy and plain and row.step >= row.params.min_tokens:
        return [row] * (len(guesses) + 1)
    rows = [replace(row)]
    for guess in guesses:
        penalties = rows[-1].penalties and rows[-1].penalties.copy()
        if penalties is not None:
            penalties.update(mx.array([guess]))
        rows.append(replace(row, step=rows[-1].step + 1, penalties=penalties))
    for each, mask in zip(rows, masks, strict=False):
        each.constraint = cast(Any, Masked(mask))
    return rows


StepLogprobs = tuple[mx.array, mx.array, mx.array]
"""Of one step: logarithms of the sampled tokens (rows, 1), the likeliest tokens (rows, K) and theirs."""


def sample_one(row: SamplerRow, logits: mx.array) -> tuple[int, Likelihood | None]:
    """The next token of one row alone, read; logits (1, vocabulary)."""
    sampler = BatchSampler([row])
    token = sampler(logits)
    mx.eval(token, *(sampler.logprobs or ()))
    return cast(int, token.item()), likelihoods([row], sampler.logprobs)[0]


def likelihoods(rows: Sequence[SamplerRow], logprobs: StepLogprobs | None) -> list[Likelihood | None]:
    """Of the tokens of a step, for the rows that want them; waits for the device."""
    if logprobs is None:
        return [None] * len(rows)
    sampled, best, values = (cast(list[list[Any]], array.tolist()) for array in logprobs)
    return [
        Likelihood(
            sampled[index][0], tuple(zip(best[index][: row.top_logprobs], values[index], strict=False))
        )
        if row.top_logprobs is not None
        else None
        for index, row in enumerate(rows)
    ]


class BatchSampler:
    """Built for one composition of a batch; rebuilt when rows join or leave."""

    def __init__(self, rows: Sequence[SamplerRow]):
        self.rows = list(rows)
        params: list[RowSampling] = [row.params for row in rows]
        self._all_greedy = all(p.greedy for p in params)
        self._penalised = [i for i, p in enumerate(params) if p.penalised]
        self._filtered = any(p.filtered for p in params)
        wanted = [row.top_logprobs for row in rows if row.top_logprobs is not None]
        self._top = max(wanted) if wanted else None
        self.logprobs: StepLogprobs | None = None
        """Of the newest step, if a row wants it; lazy."""
        self._early = max((row.params.min_tokens - row.step for row in rows), default=0)
        """Steps in which a row may not end yet."""
        if self._all_greedy:
            return
        self._greedy = mx.array([[p.greedy] for p in params])
        self._scale = mx.array([[1.0 if p.greedy else 1.0 / p.temperature] for p in params])
        # A filter of every row by rank needs only the best few sorted, not the whole vocabulary.
        ranks = [p.top_k for p in params if not p.greedy]
        self._width = max(ranks) if all(k > 0 for k in ranks) else 0
        self._top_k = mx.array([[p.top_k or 1 << 30] for p in params])
        # Above 1 where it is off, or else rounding of the sum would cut the least likely tokens off.
        self._top_p = mx.array([[p.top_p if p.top_p < 1 else 2.0] for p in params])
        self._min_p = mx.array([[p.min_p] for p in params])

    @property
    def constrained(self) -> bool:
        """Whether the tokens of this step depend on those of the step before."""
        return any(row.binding is not None for row in self.rows)

    def __call__(self, logits: mx.array) -> mx.array:
        """logits (rows, vocabulary) → tokens (rows,) int32; lazy. `NO_TOKEN` where a logit is NaN or +inf."""
        model_logits = logits
        if self._penalised:
            logits = self._penalise(logits.astype(mx.float32))
        if self.constrained or self._early > 0:
            logits = self._mask(logits)
            self._early -= 1
        best = mx.argmax(logits, axis=-1)
        tokens = best if self._all_greedy else self._sample(logits.astype(mx.float32), best)
        numbers = mx.all(model_logits < -NEG_INF, axis=-1)  # A NaN is less than nothing.
        tokens = mx.where(numbers, tokens.astype(mx.int32), NO_TOKEN)
        for index in self._penalised:
            penalties = self.rows[index].penalties
            assert penalties is not None
            penalties.update(tokens[index : index + 1])
        for row in self.rows:
            row.step += 1
        if self._top is not None:
            self.logprobs = self._likelihoods(model_logits.astype(mx.float32), tokens, self._top)
        return tokens

    def _likelihoods(self, logits: mx.array, tokens: mx.array, top: int) -> StepLogprobs:
        logs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        ids = mx.arange(logs.shape[-1])  # Compared, as in `Penalties`.
        sampled = mx.max(mx.where(ids == tokens[:, None], logs, NEG_INF), axis=-1, keepdims=True)
        if not top:
            none = mx.zeros((len(self.rows), 0))
            return sampled, none, none
        top = min(top, logs.shape[-1])
        return sampled, mx.argsort(-logs, axis=-1)[:, :top], -mx.sort(-logs, axis=-1)[:, :top]

    def _penalise(self, logits: mx.array) -> mx.array:
        parts = [logits[i : i + 1] for i in range(len(self.rows))]
        for index in self._penalised:
            row = self.rows[index]
            penalties = row.penalties or Penalties(row.params, row.prompt, logits.shape[-1])
            row.penalties = penalties
            parts[index] = penalties.apply(parts[index])
        return mx.concatenate(parts)

    def _mask(self, logits: mx.array) -> mx.array:
        masks = [row.binding and row.binding.mask for row in self.rows]
        if self._early <= 0 and all(mask is None for mask in masks):
            return logits
        allowed: Any = np.ones(logits.shape, np.bool_)
        for index, (row, mask) in enumerate(zip(self.rows, masks, strict=True)):
            if mask is not None:
                allowed[index] = mask
            if row.step < row.params.min_tokens:
                longer = allowed[index].copy()
                longer[[end for end in row.params.ends if end < len(longer)]] = False
                if longer.any():  # Else its grammar has nothing but the end.
                    allowed[index] = longer
        return mx.where(mx.array(allowed), logits, NEG_INF)

    def _sample(self, logits: mx.array, best: mx.array) -> mx.array:
        scaled = logits * self._scale
        noise = self._noise(scaled.shape)
        picked = self._pick_filtered(scaled, noise) if self._filtered else mx.argmax(scaled + noise, axis=-1)
        return mx.where(self._greedy[:, 0], best, picked.astype(best.dtype))

    def _pick_filtered(self, scaled: mx.array, noise: mx.array) -> mx.array:
        """Each row's filters as the least value that passes them all."""
        log_total = mx.logsumexp(scaled, axis=-1, keepdims=True)
        best = mx.topk(scaled, self._width, axis=-1) if 0 < self._width < scaled.shape[-1] else scaled
        ranked = -mx.sort(-best, axis=-1)
        rank = mx.arange(ranked.shape[-1])[None]
        # As in Hugging Face and vLLM: top-p sees what top-k left, renormalised.
        kept = rank < self._top_k
        weights = mx.where(kept, mx.exp(ranked - log_total), 0.0)
        sums = mx.cumsum(weights, axis=-1)
        kept = (
            kept & (sums - weights < self._top_p * sums[:, -1:]) & (weights >= self._min_p * weights[:, :1])
        )
        # The best token always stays, whatever rounding does to the sums.
        kept = kept | (rank == 0)
        least = mx.min(mx.where(kept, ranked, -NEG_INF), axis=-1, keepdims=True)
        return mx.argmax(mx.where(scaled >= least, scaled + noise, NEG_INF), axis=-1)

    def _noise(self, shape: Sequence[int]) -> mx.array:
        if all(row.params.seed is None for row in self.rows):
            return mx.random.gumbel(tuple(shape))
        vocab = shape[-1]
        return mx.stack([mx.random.gumbel((vocab,), key=_key(row)) for row in self.rows])


def _key(row: SamplerRow) -> mx.array | None:
    """The PRNG key of a seeded row's step; None draws from the thread's own state."""
    seed = row.params.seed
    if seed is None:
        return None
    digest = blake2b(f"{seed}:{row.step}".encode(), digest_size=8).digest()
    return mx.random.key(int.from_bytes(digest, "little"))
