"""A model whose numbers turn into none: the request fails, and what it has stored is never recalled.

What other requests have stored, and what stood before, stays.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from cold_run import Reference, prompt
from families import build_family
from kv_fakes import bytes_on_disk, check_pool, files_in
from rig import BLOCK, Rig

from omlxd.engine.kvio import bridge
from omlxd.errors import OmlxdError

MARK = 7
"""A token that no prompt of `prompt` holds."""


class Spoiled:
    """A model whose logits are none where `when(tokens, cache)` says so, after the pass."""

    def __init__(self, model: Any, when: Callable[[mx.array, Any], bool], value: float = float("nan")):
        self._model, self._when, self._value = model, when, value

    def __call__(self, tokens: mx.array, cache: Any) -> mx.array:
        logits = self._model(tokens, cache=cache)
        return logits + self._value if self._when(tokens, cache) else logits

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


def marked(tokens: mx.array, cache: Any) -> bool:
    return MARK in tokens.tolist()[0]  # type: ignore[index]


@pytest.fixture(scope="module", params=["qwen3", "qwen3_5", "mamba2"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_family(request.param, tmp_path_factory.mktemp("model") / request.param)


@pytest.fixture(scope="module")
def uncached(model: Path):
    with Reference(model) as reference:
        yield reference


def fails(rig: Rig, tokens: list[int], n: int = 5) -> None:
    with pytest.raises(OmlxdError, match="not numbers"):
        rig.start(tokens, n).tokens()
    rig.settle()
    rig.on_engine(lambda: check_pool(rig.pool, {}))
    assert rig.ledger is not None and rig.root is not None
    assert rig.ledger.stats().files == len(files_in(rig.root))


SHARED = prompt(2 * BLOCK + 10, seed=1)
OTHER = SHARED + prompt(3 * BLOCK, seed=2)
LONG = SHARED + prompt(5 * BLOCK, seed=3) + [MARK]


@pytest.mark.slow
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_the_chunks_of_a_spoiled_prompt_have_stored_is_not_recalled(
    model: Path, uncached: Reference, tmp_path: Path, value: float
):
    want, other = uncached.once(LONG, 5)[0], uncached.once(OTHER, 5)[0]
    with Rig(model, tmp_path) as rig:
        rig.use_grid(BLOCK)
        assert rig.run(OTHER, 5).got == other
        before, names = files_in(tmp_path), rig.pool.num_cached
        whole = rig.loaded.model
        rig.loaded.model = Spoiled(whole, marked, value)
        for _ in range(2):
            fails(rig, LONG)
            assert files_in(tmp_path) == before and rig.pool.num_cached == names
        assert rig.store.flusher is not None and rig.store.flusher.writer.stats.written > len(before)
        rig.loaded.model = whole
        again = rig.run(LONG, 5)
        assert again.got == want
        assert again.hot == 2 * BLOCK
        assert rig.run(OTHER, 5).hot >= 4 * BLOCK
        assert rig.run(LONG, 5).hot >= 6 * BLOCK, "it is kept again"
    with Rig(model, tmp_path) as rig:
        later = rig.run(LONG, 5)
        assert later.got == want and later.cold >= 6 * BLOCK


def test_after_a_restart_nothing_of_a_spoiled_prompt_is_found(model: Path, tmp_path: Path):
    with Rig(model, tmp_path) as rig:
        rig.use_grid(BLOCK)
        rig.run(OTHER, 5)
        rig.loaded.model = Spoiled(rig.loaded.model, marked)
        fails(rig, LONG)
        on_disk = bytes_on_disk(tmp_path)
    assert bytes_on_disk(tmp_path) == on_disk
    with Rig(model, tmp_path) as rig:
        rig.use_grid(BLOCK)
        assert rig.run(LONG, 5).cold == 2 * BLOCK


def test_an_answer_that_is_spoiled_later_keeps_what_has_given_numbers(tmp_path_factory, monkeypatch):
    """Nothing vouches for the KV of the last pass: a block that ends with it is not kept."""
    monkeypatch.setattr(bridge, "OFFER_TOKENS", 1)
    tokens = prompt(BLOCK + 30)
    with Rig(build_family("qwen3", tmp_path_factory.mktemp("model") / "qwen3")) as rig:
        alone = rig.run(tokens, 60, salt="alone").sequence
        whole = rig.loaded.model
        rig.loaded.model = Spoiled(whole, lambda _, cache: cache[0].offset == 2 * BLOCK)
        output = rig.start(tokens, 60)
        with pytest.raises(OmlxdError, match="not numbers"):
            output.tokens()
        rig.settle()
        rig.on_engine(lambda: check_pool(rig.pool, {}))
        assert [*tokens, *output.got] == alone.tokens[: 2 * BLOCK]
        rig.loaded.model = whole
        assert rig.run(alone.tokens[: 2 * BLOCK + 1], 3).hot == BLOCK


@pytest.mark.parametrize("family", ["qwen3", "qwen3_5"])
def test_the_last_tokens_kv_is_not_kept_where_an_answer_ends_with_a_block(family: str, tmp_path_factory):
    """The answer's last token was put through the model, and nobody looked at the logits."""
    with Rig(build_family(family, tmp_path_factory.mktemp("model") / family)) as rig:
        tokens = prompt(BLOCK + 30)
        whole = rig.loaded.model
        at_the_end = Spoiled(whole, lambda _, cache: getattr(cache[-1], "offset", 0) == 2 * BLOCK)
        rig.loaded.model = at_the_end
        first = rig.run(tokens, BLOCK - 30)
        assert len(first.sequence.tokens) == 2 * BLOCK
        rig.loaded.model = whole
        again = rig.run([*first.sequence.tokens, 5], 3)
        assert again.hot == BLOCK, "a block that holds the newest token"


def leave_nan_blocks(rig: Rig, family: str, tokens: list[int]) -> None:
    """What a process leaves that dies before the first token: the second block of `tokens` holds NaN."""
    embed = rig.loaded.model.model if family == "qwen3" else rig.loaded.model.language_model.model
    weight = embed.embed_tokens.weight

    def poison(value: float) -> None:
        embed.embed_tokens.weight = mx.where(
            (mx.arange(weight.shape[0]) == tokens[BLOCK + 5])[:, None], value, weight
        )

    rig.on_engine(lambda: poison(float("nan")))
    stored = rig.scheduler.passes.first_token
    rig.scheduler.passes.first_token = lambda sequence, logits: rig.scheduler.fail(  # it dies here
        sequence, OmlxdError("gone")
    )
    with pytest.raises(OmlxdError, match="gone"):
        rig.start(tokens, 4).tokens()
    rig.settle()
    rig.on_engine(lambda: setattr(embed.embed_tokens, "weight", weight))
    rig.scheduler.passes.first_token = stored


@pytest.mark.parametrize("family", ["qwen3", "qwen3_5"])
@pytest.mark.parametrize("restart", [False, True])
def test_nan_blocks_from_an_earlier_life_fail_one_request_and_go(
    family: str, restart: bool, tmp_path_factory, tmp_path: Path
):
    folder = build_family(family, tmp_path_factory.mktemp("model") / family)
    tokens = prompt(3 * BLOCK + 10)
    with Rig(folder) as rig:
        want = rig.run(tokens, 4).got
    with Rig(folder, tmp_path) as rig:
        rig.use_grid(BLOCK)
        leave_nan_blocks(rig, family, tokens)
        if not restart:
            fails(rig, tokens)
            assert rig.run(tokens, 4).got == want
    with Rig(folder, tmp_path) as rig:
        rig.use_grid(BLOCK)
        if restart:
            fails(rig, tokens)
        assert rig.run(tokens, 4).got == want
    with Rig(folder, tmp_path) as rig:
        assert rig.run(tokens, 4).got == want


def test_nan_blocks_go_where_the_ends_of_prompts_are_computed_together(tmp_path_factory, tmp_path: Path):
    tokens, other = prompt(3 * BLOCK + 10), prompt(2 * BLOCK + 7, seed=9)
    with Rig(build_family("qwen3", tmp_path_factory.mktemp("model") / "qwen3"), tmp_path) as rig:
        rig.use_grid(BLOCK)
        want = rig.run(other, 4).got
        leave_nan_blocks(rig, "qwen3", tokens)
        both = rig.on_engine(lambda: [rig.start(tokens, 4), rig.start(other, 4)])
        with pytest.raises(OmlxdError, match="not numbers"):
            both[0].tokens()
        assert both[1].tokens() == want and both[1].hot == 2 * BLOCK
        rig.settle()
        again = rig.run(tokens, 4)
        assert again.hot == 0 and len(again.got) == 4
