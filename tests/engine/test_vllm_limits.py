"""vLLM's fields about where an answer ends: `ignore_eos`, `min_tokens`, `stop_token_ids`,
`skip_special_tokens`, `include_stop_str_in_output`. Benchmarks fix the length of answers by them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from daemon import demo_model
from host import Host, chat, finished, raw, text_of

from omlxd.chat import AnswerFormat, Event, TokenIds
from omlxd.errors import InvalidRequest

ALWAYS = 100.0
"""A bias that a model of random weights always follows."""


@pytest.fixture(scope="module")
def host() -> Iterator[Host]:
    host = Host(demo_model())
    yield host
    host.close()


def end_of(host: Host) -> int:
    return min(host.engine.loaded.tokenizer.eos_token_ids)


def spelled(host: Host, token: int) -> str:
    return host.engine.loaded.tokenizer.decode([token])


def ask(host: Host, **sampling: Any) -> list[Event]:
    return host.ask(raw(temperature=0.0, **sampling))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("logprobs", [None, 1])
def test_ignore_eos_goes_on_to_the_limit(host: Host, temperature: float, logprobs: int | None):
    wanted = {"temperature": temperature, "logit_bias": {end_of(host): ALWAYS}, "max_tokens": 9, "seed": 1}
    usual = finished(host.ask(raw(**wanted, logprobs=logprobs)))
    assert (usual.reason, usual.usage.completion_tokens) == ("stop", 1)
    events = host.ask(raw(**wanted, ignore_eos=True, logprobs=logprobs))
    assert (finished(events).reason, finished(events).usage.completion_tokens) == ("length", 9)
    assert text_of(events) == ""
    shown = text_of(host.ask(raw(**wanted, ignore_eos=True, shows_special=True)))
    assert shown == spelled(host, end_of(host)) * 9


def test_an_answer_has_min_tokens_at_least(host: Host):
    for least in (0, 1, 2, 7):
        last = finished(ask(host, logit_bias={end_of(host): ALWAYS}, min_tokens=least, max_tokens=20))
        # Its end is counted, too.
        assert (last.reason, last.usage.completion_tokens) == ("stop", least + 1)


def test_min_tokens_of_one_row_is_not_another_ones(host: Host):
    bias = {end_of(host): ALWAYS}
    ids = [host.send(raw(temperature=0.0, logit_bias=bias, min_tokens=least)) for least in (5, 0, 9, 2)]
    assert [finished(host.events(id)).usage.completion_tokens for id in ids] == [6, 1, 10, 3]


def test_min_tokens_holds_back_stop_tokens_and_stop_strings(host: Host):
    letter = host.engine.loaded.tokenizer.encode("a", add_special_tokens=False)[-1]
    bias = {letter: ALWAYS}
    last = finished(ask(host, logit_bias=bias, stop_token_ids=(letter,), min_tokens=4, max_tokens=20))
    assert (last.reason, last.usage.completion_tokens) == ("stop", 5)
    text = spelled(host, letter)
    events = ask(host, logit_bias=bias, stop=(text,), min_tokens=4, max_tokens=20)
    assert finished(events).reason == "stop_sequence" and text_of(events) == text * 4


def test_what_ends_the_answer_is_shown_if_asked_for(host: Host):
    letter = host.engine.loaded.tokenizer.encode("a", add_special_tokens=False)[-1]
    text, bias = spelled(host, letter), {letter: ALWAYS}
    for shows in (False, True):
        events = ask(host, logit_bias=bias, stop=(text,), shows_stop=shows)
        assert text_of(events) == text * shows and finished(events).stop_sequence == text
        events = ask(host, logit_bias=bias, stop_token_ids=(letter,), shows_stop=shows)
        assert text_of(events) == text * shows
        assert (finished(events).reason, finished(events).usage.completion_tokens) == ("stop", 1)


def test_a_format_ends_its_answer(host: Host):
    choice = AnswerFormat("choice", choices=("ab",))
    with pytest.raises(InvalidRequest, match="ignore_eos"):
        ask_of = chat(format=choice, ignore_eos=True)
        host.ask(ask_of)
    # The grammar has nothing but the end: min_tokens gives way.
    events = host.ask(chat(format=choice, min_tokens=30, max_tokens=40))
    assert text_of(events) == "ab" and finished(events).reason == "stop"
    assert not any(isinstance(event, TokenIds) for event in events)
