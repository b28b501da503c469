"""An answer that is given, and how likely the model finds it."""

from __future__ import annotations

import threading

import mlx.core as mx
import numpy as np
import pytest
from families import build_family
from host import Host, chat, finished, raw, text_of
from msgspec.structs import replace

from omlxd.chat import GenerateRequest, TextDelta
from omlxd.errors import InvalidRequest


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory):
    host = Host(build_family("qwen3", tmp_path_factory.mktemp("model")))
    yield host
    host.close()


def forced(request: GenerateRequest, answer: str) -> GenerateRequest:
    sampling = replace(request.sampling, temperature=0.0, logprobs=0)
    return replace(request, sampling=sampling, forced=answer)


def logprobs(events) -> list[float]:
    return [token.logprob for event in events if isinstance(event, TextDelta) for token in event.logprobs]


def expected(host: Host, prompt: list[int], answer: list[int]) -> list[float]:
    """Token by token, without a cache."""
    model, out, done = host.engine.loaded.model, [], threading.Event()

    def work() -> None:
        for index, token in enumerate(answer):
            logits = np.array(model(mx.array([prompt + answer[:index]]))[0, -1].astype(mx.float32))
            out.append(float(logits[token] - logits.max() - np.log(np.exp(logits - logits.max()).sum())))
        done.set()

    host.engine.scheduler.post(work)
    assert done.wait(120)
    return out


@pytest.mark.parametrize("answer", [" yes", " a long answer, of many tokens", "é", " yes \n "])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_its_tokens_are_as_likely_as_a_forward_pass_says(host: Host, answer, temperature):
    request = forced(raw("Is the kettle on?"), answer)
    request = replace(request, sampling=replace(request.sampling, temperature=temperature))
    events = host.ask(request)
    tokenizer = host.engine.loaded.tokenizer
    prompt = tokenizer.encode("Is the kettle on?")
    ids = tokenizer.encode("Is the kettle on?" + answer)[len(prompt) :]
    assert text_of(events) == answer
    told = logprobs(events)
    assert finished(events).usage.completion_tokens == len(ids) == len(told)
    assert np.allclose(told, expected(host, prompt, ids), atol=2e-3)


def test_a_conversation_has_it_as_its_answer(host: Host):
    request = forced(chat("Is the kettle on?"), "yes")
    events = host.ask(request)
    assert text_of(events) == "yes" and finished(events).reason == "length"
    rendered = host.engine.prompts.render(request.prompt)
    ids = host.engine.loaded.tokenizer.encode("yes", add_special_tokens=False)
    assert np.allclose(logprobs(events), expected(host, rendered.tokens, ids), atol=2e-3)


def test_beside_a_free_answer(host: Host):
    alone = logprobs(host.ask(forced(raw("Kettles are"), " made of copper")))
    free = host.send(raw("Tell me", temperature=0, max_tokens=30))
    together = host.send(forced(raw("Kettles are"), " made of copper"))
    assert np.allclose(logprobs(host.events(together)), alone, atol=2e-3)
    assert finished(host.events(free)).usage.completion_tokens == 30


@pytest.mark.parametrize("answer", ["<|im_end|>", "yes<|im_end|>"])
def test_control_tokens_are_no_answer(host: Host, answer):
    with pytest.raises(InvalidRequest, match="no text that the model could answer"):
        host.ask(forced(raw("Kettles"), answer))


def test_where_the_template_begins_with_thinking(host: Host):
    request = forced(chat("Hello", thinking=True), "yes")
    with pytest.raises(InvalidRequest, match="begins with thinking"):
        host.ask(request)
