"""Sampling: each filter against a plain NumPy definition, seeds, penalties, mixed batches."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from omlxd.chat import Sampling
from omlxd.engine.sequence.sampling import (
    NO_TOKEN,
    BatchSampler,
    Penalties,
    RowSampling,
    SamplerRow,
    SamplingDefaults,
)

VOCAB = 50
RNG = np.random.default_rng(3)
LOGITS = RNG.normal(size=VOCAB).astype(np.float32) * 2


def row(prompt=(), **fields) -> SamplerRow:
    return SamplerRow(RowSampling.of(Sampling(**fields), SamplingDefaults()), prompt=prompt)


def draw(rows: list[SamplerRow], logits=LOGITS, steps: int = 1) -> np.ndarray:
    """(steps, rows) tokens; every row sees the same logits each step."""
    sampler = BatchSampler(rows)
    batch = mx.array(np.tile(logits, (len(rows), 1)))
    return np.array([np.array(sampler(batch)) for _ in range(steps)])


def softmax(values: np.ndarray) -> np.ndarray:
    weights = np.exp(values - values.max())
    return weights / weights.sum()


def allowed(logits: np.ndarray, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0) -> dict[int, float]:
    """Token → probability, by the definitions of Hugging Face and vLLM."""
    order = np.argsort(-logits)
    if top_k:
        order = order[:top_k]
    weights = softmax(logits[order] / temperature)
    kept = (np.cumsum(weights) - weights < top_p) & (weights >= min_p * weights[0])
    return dict(zip(order[kept].tolist(), (weights[kept] / weights[kept].sum()).tolist(), strict=True))


FILTERS = [
    {"temperature": 1.0},
    {"temperature": 0.5},
    {"temperature": 1.0, "top_k": 5},
    {"temperature": 1.3, "top_p": 0.7},
    {"temperature": 1.0, "min_p": 0.2},
    {"temperature": 0.8, "top_k": 8, "top_p": 0.8, "min_p": 0.05},
]


@pytest.mark.parametrize("fields", FILTERS, ids=str)
def test_frequencies_follow_the_definition(fields):
    mx.random.seed(11)
    want = allowed(LOGITS, **fields)
    tokens = draw([row(**fields)] * 40, steps=100).ravel()
    found, counts = np.unique(tokens, return_counts=True)
    assert set(found.tolist()) <= set(want)
    got = dict(zip(found.tolist(), (counts / len(tokens)).tolist(), strict=True))
    distance = sum(abs(got.get(token, 0.0) - p) for token, p in want.items()) / 2
    assert distance < 0.06


def test_rows_of_one_batch_keep_their_own_parameters():
    rows = [row(temperature=0.0), row(temperature=5.0, top_k=3), row(temperature=1.0, top_p=0.01)]
    tokens = draw(rows, steps=200)
    best = int(LOGITS.argmax())
    assert set(tokens[:, 0]) == {best} == set(tokens[:, 2])
    assert set(tokens[:, 1]) == set(np.argsort(-LOGITS)[:3].tolist())


@pytest.mark.parametrize("fields", [{}, {"top_k": 7}, {"top_p": 0.9}])
def test_a_seed_gives_the_same_tokens_whatever_runs_beside_it(fields):
    alone = draw([row(temperature=1.0, seed=42, **fields)], steps=20)[:, 0]
    company = [row(temperature=0.3, top_k=20), row(temperature=1.0, seed=42, **fields), row(temperature=0.0)]
    assert np.array_equal(draw(company, steps=20)[:, 1], alone)
    other = draw([row(temperature=1.0, seed=43, **fields)], steps=20)[:, 0]
    assert not np.array_equal(other, alone)
    assert len(set(alone.tolist())) > 1


@pytest.mark.parametrize("fields", [{"top_k": 5}, {"top_k": 20, "top_p": 0.8}, {"top_p": 0.6}, {}], ids=str)
@pytest.mark.parametrize("beside", [{"top_k": 40}, {"top_p": 0.5}, {}], ids=str)
def test_tokens_that_are_equally_likely_do_not_depend_on_the_neighbours_either(fields, beside):
    """Logits of 16 bits are often equal, and which of them a sort puts first depends on its width."""
    logits = np.round(np.random.default_rng(0).normal(size=2000) * 8).astype(np.float32) / 4
    for seed in range(30):
        own = {"temperature": 1.0, "seed": seed, **fields}
        alone = draw([row(**own)], logits)[0, 0]
        assert draw([row(**own), row(temperature=1.0, **beside)], logits)[0, 0] == alone


def test_of_equally_likely_tokens_all_pass_a_filter_or_none():
    logits = np.array([3.0, 2.0, 2.0, 2.0, 1.0], dtype=np.float32)
    for fields in ({"top_k": 2}, {"top_p": 0.6}):
        tokens = draw([row(temperature=2.0, **fields)] * 50, logits, steps=10)
        assert set(tokens.ravel().tolist()) == {0, 1, 2, 3}


@pytest.mark.parametrize("temperature", [1e-40, 1e-300, 1e-6])
def test_a_temperature_near_zero_is_greedy(temperature: float):
    tokens = draw([row(temperature=temperature), row(temperature=temperature, top_p=0.5)], steps=3)
    assert set(tokens.ravel().tolist()) == {int(LOGITS.argmax())}


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize(
    "fields", [{"temperature": 0.0}, {"temperature": 1.0}, {"temperature": 1.0, "top_k": 3}]
)
def test_logits_that_are_no_numbers_give_no_token(fields, value):
    broken = LOGITS.copy()
    broken[7] = value
    sampler = BatchSampler([row(**fields), row(**fields)])
    tokens = np.array(sampler(mx.array(np.stack([broken, LOGITS]))))
    assert tokens[0] == NO_TOKEN and 0 <= tokens[1] < VOCAB


@pytest.mark.parametrize("seed", [0, -1, 2**63, 2**70])
def test_any_integer_is_a_seed(seed):
    draw([row(temperature=1.0, seed=seed)])


def test_repetition_penalty_covers_prompt_and_output():
    logits = np.zeros(VOCAB, dtype=np.float32)
    logits[[3, 4, 5]] = [4.0, 3.9, 3.8]
    tokens = draw([row(prompt=(3,), temperature=0.0, repetition_penalty=2.0)], logits, steps=3)[:, 0]
    assert tokens.tolist() == [4, 5, 3], "3 was in the prompt; 4 and 5 are penalised once they are out"


def test_repetition_context_size_is_how_far_back_the_penalty_looks():
    logits = np.zeros(VOCAB, dtype=np.float32)
    logits[[3, 4, 5]] = [4.0, 3.9, 3.8]
    fields = {"temperature": 0.0, "repetition_penalty": 2.0}
    prompt = (4, 5, 3)
    assert draw([row(prompt, **fields)], logits, steps=2)[:, 0].tolist() == [3, 3], "all are penalised"
    near = [row(prompt, **fields, repetition_context_size=2), row(prompt, **fields)]
    assert draw(near, logits, steps=4).tolist() == [[4, 3], [5, 3], [3, 3], [4, 3]]
    more = row((), **fields, repetition_context_size=100)
    assert draw([more], logits, steps=4)[:, 0].tolist() == [3, 4, 5, 3]


def test_negative_logits_are_penalised_downwards():
    logits = np.full(VOCAB, -5.0, dtype=np.float32)
    logits[[1, 2]] = [-1.0, -1.5]
    assert draw([row(prompt=(1,), temperature=0.0, repetition_penalty=2.0)], logits)[0, 0] == 2


def test_presence_and_frequency_penalties_count_output_alone():
    logits = np.zeros(VOCAB, dtype=np.float32)
    logits[[7, 8]] = [1.0, 0.5]
    tokens = draw([row(prompt=(7, 7), temperature=0.0, frequency_penalty=0.2)], logits, steps=6)[:, 0]
    assert tokens.tolist() == [7, 7, 7, 8, 7, 8]
    tokens = draw([row(temperature=0.0, presence_penalty=0.6)], logits, steps=3)[:, 0]
    assert tokens.tolist() == [7, 8, 7]


def test_logit_bias_adds_and_ignores_ids_outside_the_vocabulary():
    assert draw([row(temperature=0.0, logit_bias={9: 100.0, VOCAB + 5: 50.0})])[0, 0] == 9


def test_defaults_of_the_model_fill_what_the_request_leaves_open():
    defaults = SamplingDefaults(temperature=0.6, top_p=0.95, top_k=20)
    filled = RowSampling.of(Sampling(top_k=5), defaults)
    assert (filled.temperature, filled.top_p, filled.top_k) == (0.6, 0.95, 5)
    assert RowSampling.of(Sampling(temperature=0.0), defaults).greedy
    assert RowSampling.of(Sampling(top_k=-1), defaults).top_k == 0


def test_a_model_that_names_no_temperature_is_sampled_as_llama_cpp_does(tmp_path: Path):
    file = tmp_path / "generation_config.json"
    usual = SamplingDefaults(temperature=0.8, top_p=0.95, top_k=40, min_p=0.05)
    assert SamplingDefaults.of_model(tmp_path) == usual
    for text, expected in (
        ('{"eos_token_id": 2}', usual),
        ('{"top_p": 0.5}', replace(usual, top_p=0.5)),
        ('{"temperature": 1.0}', SamplingDefaults()),
        ('{"do_sample": false}', SamplingDefaults(temperature=0.0)),
    ):
        file.write_text(text)
        assert SamplingDefaults.of_model(tmp_path) == expected


JUST_IN_TIME = "Gather", "GatherAxis", "Scatter", "ScatterAxis", "MaskedScatter"
"""Primitives for which MLX's CUDA backend compiles a kernel at its first use, in seconds: others wait."""

KINDS = {
    "greedy": {"temperature": 0.0},
    "filtered": {"temperature": 0.7, "top_p": 0.9, "top_k": 5, "min_p": 0.1},
    "no rank": {"temperature": 0.7, "top_p": 0.9},
    "seeded": {"temperature": 0.7, "seed": 3},
    "repetition": {"repetition_penalty": 1.3},
    "recent": {"repetition_penalty": 1.3, "repetition_context_size": 2},
    "counts": {"presence_penalty": 0.5, "frequency_penalty": 0.5},
    "bias": {"logit_bias": {3: 5.0, 7: -5.0}},
}


@pytest.mark.parametrize("top_logprobs", [None, 0, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_no_sampling_has_mlx_compile_a_kernel_amid_answers(kind: str, top_logprobs: int | None, tmp_path):
    rows = [row(prompt=[1, 2, 2], **KINDS[kind]), row(temperature=0.0)]
    rows[0].top_logprobs = top_logprobs
    sampler, file = BatchSampler(rows), tmp_path / "graph.dot"
    batch = mx.array(np.tile(LOGITS, (2, 1)))
    for _ in range(3):
        tokens = sampler(batch)
        mx.export_to_dot(str(file), tokens, *(sampler.logprobs or ()))
        graph = file.read_text()
        assert "label" in graph and not [name for name in JUST_IN_TIME if f'"{name}"' in graph], kind


@pytest.mark.parametrize("size", [0, 1, 3, 8])
def test_what_a_repetition_penalty_has_seen_is_the_newest_tokens(size: int):
    """Against lists, with tokens that come again."""
    rng = np.random.default_rng(size)
    prompt = rng.integers(0, 6, 5).tolist()
    params = row(repetition_penalty=2.0, presence_penalty=1.0, repetition_context_size=size).params
    penalties, seen = Penalties(params, prompt, VOCAB), list(prompt)
    output: list[int] = []
    for token in rng.integers(0, 6, 20).tolist():
        penalties.update(mx.array([token]))
        output.append(token)
        seen.append(token)
        want = set(seen[-size:] if size else seen)
        assert set(np.flatnonzero(np.array(penalties.seen))) == want
        assert np.array_equal(np.array(penalties.count), np.bincount(output, minlength=VOCAB))
