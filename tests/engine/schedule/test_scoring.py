"""How likely given answers are: as a forward pass without a cache says, whoever shares the pass."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from cold_run import prompt
from families import add_foreign_token, build_family
from family_configs import CONFIGS
from host import Host, chat, finished, raw
from kv_fakes import check_pool
from msgspec.structs import replace
from rig import BLOCK, Output, Rig

from omlxd.chat import Event, GenerateRequest, Scored
from omlxd.engine import mlx_adapter
from omlxd.engine.schedule import forward as prompt_passes
from omlxd.engine.schedule import scoring
from omlxd.engine.schedule.prefill import TOGETHER
from omlxd.errors import InvalidRequest, OmlxdError

LABELS = [[400], [401], [402, 403], [402, 404, 405], [400, 500, 501, 502], [402, 403, 404]]
"""Of one token and of several; some begin alike, and one begins another."""
SAME = {"rtol": 0, "atol": 2e-3}


def logprobs_of(model: Any, tokens: list[int], label: list[int]) -> list[float]:
    """By one pass over all, into an empty cache."""
    both = tokens + label[:-1]
    with mlx_adapter.last_positions(len(label)):
        logits = model(mx.array([both]), cache=mlx_adapter.new_cache(model, len(both)))
    logits = logits[0, -len(label) :].astype(mx.float32)
    logits = np.array(logits, np.float64)
    logits -= logits.max(axis=-1, keepdims=True)
    return (logits[np.arange(len(label)), label] - np.log(np.exp(logits).sum(axis=-1))).tolist()


def scores_of(output: Output) -> Any:
    output.tokens()
    assert output.scores is not None and output.reason == "stop" and not output.got
    return output.scores


def assert_right(rig: Rig, tokens: list[int], output: Output, labels: list[list[int]] = LABELS) -> None:
    found = scores_of(output)
    expected = rig.on_engine(lambda: [logprobs_of(rig.loaded.model, tokens, label) for label in labels])
    for got, want in zip(found.logprobs, expected, strict=True):
        np.testing.assert_allclose(got, want, **SAME)
    sums = [sum(each) for each in found.logprobs], [sum(each) for each in expected]
    assert np.argmax(sums[0]) == np.argmax(sums[1])


class Passes:
    """A model that notes the shapes of its passes, and gives logits times `factor`."""

    def __init__(self, model: Any, factor: float = 1.0):
        self._model, self._factor = model, factor
        self.shapes: list[tuple[int, ...]] = []

    def __call__(self, tokens: Any, cache: Any, **inputs: Any) -> Any:
        self.shapes.append(tokens.shape)
        return self._model(tokens, cache=cache, **inputs) * self._factor

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


FAST = ("qwen3", "gemma3_text", "qwen3_5")
ONE_EACH = {
    *{family.classes: name for name, family in reversed(CONFIGS.items())}.values(),
    *("gpt_oss", "gemma3n", "deepseek_v3"),
}
"""The first of those whose caches are of the same classes, and those whose attention is the oddest."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "kv_bits"),
    [
        *((name, 0) for name in FAST),
        *((name, 0) for name in sorted(ONE_EACH) if name not in FAST),
        ("qwen3", 8),
        ("gemma3_text", 8),
    ],
)
def test_every_family_says_what_a_forward_pass_says(family: str, kv_bits: int, tmp_path: Path):
    """Prompts over one cached prefix, and prompts without one, together and alone."""
    folder = build_family(family, tmp_path / family, changes={"head_dim": 64} if kv_bits else {})
    shared = prompt(2 * BLOCK, seed=1)
    prompts = [shared + prompt(more, seed=more) for more in (5, 1, 33, 12, 64)]
    prompts += [prompt(length, seed=length) for length in (7, 1, 20)]
    with Rig(folder, kv_bits=kv_bits) as rig:
        if kv_bits:  # Fewer bits are not the same logits: what is the same is alone and together.
            alone = [scores_of(rig.run(tokens, labels=LABELS)) for tokens in prompts]
        rig.run(prompts[0], 1)
        outputs = rig.on_engine(lambda: [rig.start(tokens, labels=LABELS) for tokens in prompts])
        for index, (tokens, output) in enumerate(zip(prompts, outputs, strict=True)):
            if kv_bits:
                for got, want in zip(scores_of(output).logprobs, alone[index].logprobs, strict=True):
                    np.testing.assert_allclose(got, want, rtol=0, atol=0.05)
            else:
                assert_right(rig, tokens, output)
        if rig.scheduler.bridge is not None:
            rig.settle()
            rig.on_engine(lambda: check_pool(rig.pool))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_family("qwen3", tmp_path_factory.mktemp("model"))


def test_prompts_of_a_request_share_passes_and_their_prefix_is_computed_once(folder: Path):
    shared = prompt(3 * BLOCK, seed=1)
    prompts = [shared + prompt(9 + index, seed=index) for index in range(8)]
    with Rig(folder) as rig:
        rig.loaded.model = passes = Passes(rig.loaded.model)
        outputs = rig.on_engine(lambda: [rig.start(tokens, labels=[[400], [401]]) for tokens in prompts])
        for output in outputs:
            scores_of(output)
        rig.settle()
        *prefix, ends = passes.shapes
        assert {rows for rows, _ in prefix} == {1} and sum(width for _, width in prefix) == 3 * BLOCK, "once"
        assert ends == (8, 16), "all in one pass"
        assert [output.hot for output in outputs] == [0] + [3 * BLOCK] * 7
        rig.loaded.model = passes._model
        for tokens, output in zip(prompts, outputs, strict=True):
            assert_right(rig, tokens, output, [[400], [401]])
        assert rig.run([*shared, 400], 1).hot == 3 * BLOCK, "the prefix is stored"
        rig.on_engine(lambda: check_pool(rig.pool))


@pytest.mark.slow
def test_long_labels_and_many_are_cut_into_passes(folder: Path):
    labels = [prompt(length, seed=length) for length in (1, 2, 300, 700)] + [[n, 5, 6] for n in range(40)]
    with Rig(folder) as rig:
        rig.loaded.model = passes = Passes(rig.loaded.model)
        tokens = prompt(BLOCK + 30)
        output = rig.run(tokens, labels=labels)
        assert max(rows * width for rows, width in passes.shapes) <= TOGETHER
        rig.loaded.model = passes._model
        assert_right(rig, tokens, output, labels)


def test_rows_copy_no_more_kv_than_allowed(folder: Path, monkeypatch: pytest.MonkeyPatch):
    tokens = prompt(2 * BLOCK + 5)
    with Rig(folder) as rig:
        alone = scores_of(rig.run(tokens, labels=LABELS))
        monkeypatch.setattr(scoring, "COPIED", 0)
        rig.loaded.model = passes = Passes(rig.loaded.model)
        found = scores_of(rig.run(tokens, labels=LABELS))
        assert {rows for rows, _ in passes.shapes} == {1}
        for got, want in zip(found.logprobs, alone.logprobs, strict=True):
            np.testing.assert_allclose(got, want, **SAME)


def test_live_segments_are_read(folder: Path):
    """A shared prefix that is in live memory once (--share-prefix)."""
    shared = prompt(4 * BLOCK, seed=1)
    prompts = [shared + prompt(9, seed=index) for index in range(3)]
    with Rig(folder, segment=2 * BLOCK) as rig:
        assert rig.loaded.segments.tokens == 2 * BLOCK
        rig.run([*shared, 5], 1)
        outputs = rig.on_engine(lambda: [rig.start(tokens, labels=LABELS) for tokens in prompts])
        found = [scores_of(output) for output in outputs]
    with Rig(folder) as rig:
        for tokens, each in zip(prompts, found, strict=True):
            for got, want in zip(
                each.logprobs, scores_of(rig.run(tokens, labels=LABELS)).logprobs, strict=True
            ):
                np.testing.assert_allclose(got, want, **SAME)


def test_one_that_is_cancelled_meanwhile_leaves_the_others(folder: Path, monkeypatch: pytest.MonkeyPatch):
    prompts = [prompt(20 + index, seed=index) for index in range(3)]
    score, started = prompt_passes.score, list[Output]()

    def cancelled(loaded: Any, sequences: Any) -> Iterator[Any]:
        rig.scheduler.cancel(started[1].sequence)
        rig.scheduler.look_up()
        return score(loaded, sequences)

    with Rig(folder) as rig:
        monkeypatch.setattr(prompt_passes, "score", cancelled)
        rig.on_engine(lambda: started.extend(rig.start(tokens, labels=LABELS) for tokens in prompts))
        for index in (0, 2):
            assert_right(rig, prompts[index], started[index])
        rig.settle()
        assert started[1].scores is None
        rig.on_engine(lambda: check_pool(rig.pool))


def test_a_pass_that_fails_fails_its_prompts_and_no_more(folder: Path, monkeypatch: pytest.MonkeyPatch):
    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("no memory")

    prompts = [prompt(20 + index, seed=index) for index in range(2)]
    with Rig(folder) as rig:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(prompt_passes, "score", broken)
            for output in rig.on_engine(lambda: [rig.start(tokens, labels=LABELS) for tokens in prompts]):
                with pytest.raises(OmlxdError, match="no memory"):
                    output.tokens()
        assert_right(rig, prompts[0], rig.run(prompts[0], labels=LABELS))


def test_logits_that_are_no_numbers_are_an_error_and_nothing_of_them_stays(folder: Path):
    tokens = prompt(2 * BLOCK + 5)
    with Rig(folder) as rig:
        good = rig.loaded.model
        rig.loaded.model = Passes(good, math.nan)
        with pytest.raises(OmlxdError, match="not numbers"):
            rig.run(tokens, labels=[[400], [401, 402]])
        rig.settle()
        rig.loaded.model = good
        output = rig.run(tokens, labels=LABELS)
        assert output.hot == 0, "what it stored is withdrawn"
        assert_right(rig, tokens, output)


# --------------------------------------------------------------------------- through the host


@pytest.fixture(scope="module")
def host(folder: Path) -> Iterator[Host]:
    host = Host(folder)
    yield host
    host.close()


def scoring_of(request: GenerateRequest, *labels: str, top: int = 0) -> GenerateRequest:
    return replace(request, sampling=replace(request.sampling, temperature=0.0, logprobs=top), labels=labels)


def scored(events: list[Event]) -> Scored:
    (found,) = [event for event in events if isinstance(event, Scored)]
    return found


def expected(host: Host, tokens: list[int], label: list[int]) -> list[float]:
    out, done = list[float](), threading.Event()

    def work() -> None:
        out.extend(logprobs_of(host.engine.loaded.model, tokens, label))
        done.set()

    host.engine.scheduler.post(work)
    assert done.wait(120)
    return out


TEXTS = (" yes", " a long answer, of many tokens", "é", " yes \n ")


def test_texts_are_as_likely_as_their_tokens_behind_the_prompt(host: Host):
    tokenizer, text = host.engine.loaded.tokenizer, "Is the kettle on?"
    events = host.ask(scoring_of(raw(text), *TEXTS, top=3))
    found, prompted = scored(events), tokenizer.encode(text)
    for label, logprobs in zip(TEXTS, found.logprobs, strict=True):
        ids = tokenizer.encode(text + label)[len(prompted) :]
        np.testing.assert_allclose(logprobs, expected(host, prompted, ids), **SAME)
    usage = finished(events).usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (len(prompted), 0) and usage.ttft_s > 0
    # Logits differ as their logarithms do, and the likeliest token heads its list.
    firsts = [each[0] for each in found.logprobs]
    np.testing.assert_allclose(np.diff(found.logits), np.diff(firsts), atol=1e-4)
    assert len(found.likeliest.top) == 3 and found.likeliest.top[0][1] == found.likeliest.logprob >= max(
        firsts
    )
    (best,) = [event for event in host.ask(raw(text, temperature=0, max_tokens=1)) if hasattr(event, "text")]
    assert found.likeliest.token == best.text


def test_a_conversation_has_them_as_its_answer(host: Host):
    request = scoring_of(chat("Is the kettle on?"), "yes")
    rendered = host.engine.prompts.render(request.prompt)
    ids = host.engine.loaded.tokenizer.encode("yes", add_special_tokens=False)
    np.testing.assert_allclose(
        scored(host.ask(request)).logprobs[0], expected(host, rendered.tokens, ids), **SAME
    )


def test_beside_a_free_answer(host: Host):
    request = scoring_of(raw("Kettles are"), " made of copper", " blue")
    alone = scored(host.ask(request))
    free = host.send(raw("Tell me", temperature=0, max_tokens=30))
    together = scored(host.events(host.send(request)))
    for got, want in zip(together.logprobs, alone.logprobs, strict=True):
        np.testing.assert_allclose(got, want, **SAME)
    assert finished(host.events(free)).usage.completion_tokens == 30


@pytest.mark.parametrize("label", ["<|im_end|>", "yes<|im_end|>", ""])
def test_control_tokens_and_empty_texts_are_no_answer(host: Host, label: str):
    with pytest.raises(InvalidRequest, match=r"no text that the model could answer|an empty text") as caught:
        host.ask(scoring_of(raw("Kettles"), "yes", label))
    assert caught.value.param == "labels.1"


def test_a_token_that_the_model_does_not_have_has_no_score(tmp_path: Path):
    add_foreign_token(folder := build_family("qwen3", tmp_path / "model"))
    host = Host(folder)
    try:
        with pytest.raises(InvalidRequest, match="token id 1024 is not in this model's vocabulary") as caught:
            host.ask(scoring_of(raw("Kettles"), "yes", "yes<extra>no"))
        assert caught.value.param == "labels.1"
    finally:
        host.close()


def test_where_the_template_begins_with_thinking(host: Host):
    with pytest.raises(InvalidRequest, match="begins with thinking"):
        host.ask(scoring_of(chat("Hello", thinking=True), "yes"))
