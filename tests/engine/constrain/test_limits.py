"""Thoughts that end by their budget, and loops that end: alike in plain steps and with any guesses."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
from families import build_family
from gguf_files import TEMPLATE
from guesses import guess_by, half_right
from host import Host, chat, finished, text_of
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from omlxd.chat import (
    AnswerFormat,
    Finished,
    GenerateRequest,
    Limited,
    RawPrompt,
    ReasoningDelta,
    Sampling,
    TextDelta,
    TokenIds,
    Tool,
    ToolCall,
)
from omlxd.engine.constrain import repetition
from omlxd.engine.constrain.limits import LAG, Limits, Marks
from omlxd.engine.constrain.repetition import Repetition
from omlxd.engine.prompt.pipeline import EFFORT_TOKENS
from omlxd.engine.speculate.verify import WIDTHS

OPEN, END, LINE, EOS, VOCAB = 10, 11, 12, 13, 14
MARKS = Marks((OPEN,), (END,), (LINE,), (LINE, LINE), None, lambda ids: "\n" * (ids[-1] == LINE), VOCAB)
HARMONY = Marks((5, 6, 7), (8,), (), (9, 3, 5), 6, str, VOCAB)
"""`5 6 7` opens, `8` closes; `9 3 5` begins the next message, which `6` may not."""

Wish = Callable[[Sequence[int]], int]
"""Tokens so far → what the model wants to say next."""


def drawn(wish: Wish, said: list[int], mask: Any) -> int:
    token = wish(said)
    return token if mask is None or mask[token] else int(mask.argmax())


def in_plain_steps(wish: Wish, limits: Limits, count: int) -> list[int]:
    """As decode_batch.py draws: a step starts before the one before it is read, unless something binds."""
    said: list[int] = []
    read = 0
    while len(said) < count:
        if limits.binds:
            while read < len(said):
                limits.advance(said[read])
                read += 1
        said.append(drawn(wish, said, limits.mask if limits.binds else None))
        while read < len(said) - 1:
            limits.advance(said[read])
            read += 1
        if limits.ends_at is not None:
            return said[: limits.ends_at]
    return said


def with_guesses(wish: Wish, limits: Limits, count: int, rng: random.Random) -> list[int]:
    """As a verify step draws: up to the first token that was not guessed."""
    said: list[int] = []
    while len(said) < count:
        right = list(said)
        for _ in range(rng.randrange(WIDTHS[-1] + 1)):
            right.append(drawn(wish, right, None) if rng.random() < 0.9 else rng.randrange(VOCAB))
        guesses = limits.forced_tokens() if rng.random() < 0.5 else right[len(said) :]
        masks = limits.masks_along(guesses) if limits.binds else [None] * (len(guesses) + 1)
        for mask, guess in zip(masks, [*guesses, None], strict=False):
            said.append(token := drawn(wish, said, mask))
            limits.advance(token)
            if token != guess:
                break
        if limits.ends_at is not None:
            return said[: limits.ends_at]
    return said[:count]


@given(
    seed=st.integers(0, 10**6),
    budget=st.none() | st.integers(0, 60),
    thinking=st.booleans(),
    marks=st.sampled_from([MARKS, HARMONY]),
    loops=st.booleans(),
)
def test_an_answer_is_the_same_in_plain_steps_and_with_guesses(seed, budget, thinking, marks, loops):
    rng = random.Random(seed)
    script = [rng.randrange(VOCAB - 1) for _ in range(rng.randrange(1, 9) if loops else 400)]
    if rng.random() < 0.7:  # A thought that nobody closes.
        script = [token for token in script if token not in marks.end] or [1]
    opening = [] if thinking else [*marks.start] * rng.randrange(2)

    def wish(said: Sequence[int]) -> int:
        return opening[len(said)] if len(said) < len(opening) else script[len(said) % len(script)]

    def limits() -> Limits:
        return Limits(None, marks, budget, thinking=thinking, repetition=Repetition())

    with pytest.MonkeyPatch.context() as patch:
        for name, value in (("THOUGHT", 40), ("ONE", 50), ("MOST", 90), ("LONG", 120)):
            patch.setattr(repetition, name, value)
        plain = in_plain_steps(wish, limits(), 300)
        assert with_guesses(wish, limits(), 300, rng) == plain
    if budget is not None and (thinking or opening):
        start = len(opening)
        closed = next(at for at in range(start, 300) if tuple(plain[at : at + len(marks.end)]) == marks.end)
        assert closed <= start + max(budget, len(marks.before))
    if loops and len(plain) < 300:
        assert len(plain) >= 50


def test_the_lag_covers_the_widest_verify_step():
    assert WIDTHS[-1] < LAG


def test_a_mark_that_the_model_has_begun_is_completed_and_a_line_that_ended_is_not_ended_twice():
    long = Marks((1,), (2, 3, 4), (LINE,), (), None, MARKS.decode, VOCAB)
    assert long.closing([9, 2, 3]) == (4,) and long.closing([9]) == (LINE, 2, 3, 4)
    assert MARKS.closing([1, LINE]) == (END, LINE, LINE)


def test_a_thought_that_goes_round_is_closed_and_then_the_answer_ends(monkeypatch):
    monkeypatch.setattr(repetition, "THOUGHT", 40)
    monkeypatch.setattr(repetition, "ONE", 50)
    monkeypatch.setattr(repetition, "MOST", 90)
    limits = Limits(None, MARKS, None, thinking=True, repetition=Repetition())
    said = in_plain_steps(lambda said: (1, 2, 3)[len(said) % 3], limits, 1000)
    closed = said.index(END)
    assert 40 <= closed <= 40 + 3 + LAG + repetition.GRAM + 1
    assert 90 <= len(said) - closed < 90 + 20 and limits.ends_at == len(said)
    assert limits.thought_ended == "repetition" and limits.period == 3
    assert "the answer is ended" in limits.news


# --------------------------------------------------------------------------- a whole engine


JSON = AnswerFormat(
    "json",
    schema={
        "type": "object",
        "properties": {"kind": {"enum": ["cat", "dog"]}},
        "required": ["kind"],
        "additionalProperties": False,
    },
)
READ = Tool("Read", "", {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"]})


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory):
    host = Host(build_family("qwen3", tmp_path_factory.mktemp("model")))
    yield host
    host.close()


def endless(host: Host, budget: int | None, seed: int = 1, **more: Any):
    """A request to a model that never closes its thought by itself."""
    tokenizer = host.engine.loaded.tokenizer
    never = {tokenizer.think_end_id: -100.0, **dict.fromkeys(tokenizer.eos_token_ids, -100.0)}
    more = {"temperature": 1.0, "max_tokens": 60, "logit_bias": never, "seed": seed, "thinking": True} | more
    return replace(chat(thinking_budget=budget, **more), return_token_ids=True)


def ids_of(events) -> list[int]:
    return [id for event in events if isinstance(event, TokenIds) for id in event.ids]


def kinds_of(events) -> list[type]:
    kinds = [type(e) for e in events if isinstance(e, ReasoningDelta | TextDelta | ToolCall)]
    return [kind for at, kind in enumerate(kinds) if not at or kind is not kinds[at - 1]]


@pytest.mark.parametrize("budget", [0, 1, 7, 40])
def test_a_thought_ends_at_its_budget_and_the_model_answers(host: Host, budget: int):
    events = host.ask(endless(host, budget))
    end, usage = finished(events), finished(events).usage
    close = host.engine.loaded.tokenizer.think_end_id
    assert end.reason == "length" and usage.completion_tokens == 60
    assert ids_of(events).index(close) == max(1, budget) == usage.reasoning_tokens  # A line's end before it.
    assert usage.limited.reasoning_ended == "budget" and text_of(events)
    hidden = host.ask(replace(endless(host, budget), hides_thinking=True))
    assert kinds_of(hidden) == [TextDelta] and text_of(hidden) == text_of(events)
    assert finished(hidden).usage.reasoning_tokens == usage.reasoning_tokens


def test_thoughts_that_the_template_does_not_open(tmp_path: Path):
    """The model opens them itself, or nobody does, as answers before have shown."""
    folder = build_family("qwen3", tmp_path / "model")
    config = folder / "tokenizer_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"chat_template": TEMPLATE}))
    host = Host(folder)
    try:
        tokenizer = host.engine.loaded.tokenizer
        for budget in (0, 9, 30):
            request = endless(host, budget)
            bias = request.sampling.logit_bias | {tokenizer.think_start_id: 14.0}
            opens = replace(request, sampling=replace(request.sampling, logit_bias=bias))
            ids = ids_of(host.ask(opens))
            assert ids[0] == tokenizer.think_start_id
            assert ids.index(tokenizer.think_end_id) == 1 + max(1, budget)
        host.engine._unopened.expected = True
        events = host.ask(endless(host, 9))
        assert ids_of(events).index(tokenizer.think_end_id) == 9 and text_of(events)
    finally:
        host.close()


def test_without_a_budget_nothing_is_forced_and_effort_is_one(host: Host, monkeypatch):
    usage = finished(host.ask(endless(host, None))).usage
    assert (usage.reasoning_tokens, usage.limited.reasoning_ended) == (60, "")
    monkeypatch.setitem(EFFORT_TOKENS, "low", 9)
    usage = finished(host.ask(endless(host, None, effort="low"))).usage
    assert (usage.reasoning_tokens, usage.limited.reasoning_ended) == (9, "budget")


def test_rows_of_a_batch_end_at_their_own_budgets_as_alone(host: Host):
    requests = [endless(host, budget, seed, max_tokens=40) for seed, budget in enumerate([0, 3, None, 33])]
    alone = [ids_of(host.ask(request)) for request in requests]
    assert [ids_of(host.events(id)) for id in [host.send(request) for request in requests]] == alone


def test_guesses_change_nothing_and_the_mark_is_one_of_them(host: Host, monkeypatch):
    greedy: dict[str, Any] = {"temperature": 0.0, "max_tokens": 80}
    budgets = [0, 5, 30, 47]
    plain = [host.ask(endless(host, budget, **greedy)) for budget in budgets]
    rights = [
        [*next(e.prompt for e in events if isinstance(e, TokenIds)), *ids_of(events)] for events in plain
    ]
    guess_by(monkeypatch, half_right(rights, 3), forced=True)
    sent = [host.send(endless(host, budget, **greedy)) for budget in budgets]
    for events, id in zip(plain, sent, strict=True):
        again = host.events(id)
        assert ids_of(again) == ids_of(events)
        assert finished(again).usage.accepted > 0


def test_formats_and_calls_begin_behind_the_mark(host: Host):
    events = host.ask(endless(host, 12, format=JSON, logit_bias={}, max_tokens=100))
    jsonschema_rs.validate(JSON.schema, json.loads(text_of(events)))
    assert finished(events).reason == "stop" and finished(events).usage.reasoning_tokens <= 12
    events = host.ask(endless(host, 12, tools=(READ,), tool_choice="required", logit_bias={}, max_tokens=300))
    assert finished(events).usage.reasoning_tokens <= 12
    assert any(isinstance(event, ToolCall) for event in events)


def test_the_kv_of_a_forced_mark_is_ordinary(host: Host):
    """What follows a cut thought is read from the cache."""
    first = host.ask(endless(host, 100, max_tokens=140))
    prompt = next(e.prompt for e in first if isinstance(e, TokenIds))

    def ask(salt: str) -> list[Any]:
        again = RawPrompt(tokens=(*prompt, *ids_of(first)))
        sampling = Sampling(temperature=0.0, max_tokens=12)
        return host.ask(GenerateRequest(again, sampling, cache_salt=salt, return_token_ids=True))

    warm, cold = ask(""), ask("another")
    assert finished(warm).usage.cached_tokens > len(prompt) + 100 and not finished(cold).usage.cached_tokens
    assert ids_of(warm) == ids_of(cold)


def test_an_engine_ends_loops_and_says_so_in_one_line(host: Host, monkeypatch, caplog):
    monkeypatch.setattr(repetition, "THOUGHT", 30)
    monkeypatch.setattr(repetition, "ONE", 50)
    always = {400: 100.0}
    request = endless(host, None, logit_bias=always, max_tokens=400)
    end: Finished = finished(host.ask(request))
    assert end.reason == "length" and end.usage.completion_tokens < 200
    assert end.usage.limited == Limited((), "repetition", "repetition", 1)
    reasoning, answer = [line for line in caplog.messages if "over and over" in line]
    assert "reasoning is ended after" in reasoning and "the answer is ended after" in answer
    free = finished(host.ask(replace(request, loop_stop=False)))
    assert free.usage.completion_tokens == 400 and not free.usage.limited.answer_ended
