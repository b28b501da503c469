"""Answers held to a grammar: a model of noise writes valid JSON, in any batch, thinking or not."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jsonschema_rs
import numpy as np
import pytest
from families import add_foreign_token, build_family
from guesses import check_always, guess_by, half_right
from host import Host, chat, finished, raw, text_of
from msgspec.structs import replace

from omlxd.chat import AnswerFormat, Failed, Message, ReasoningDelta, TextDelta, TextPart, Tool, ToolCall
from omlxd.engine.schedule.scheduler import Scheduler
from omlxd.engine.speculate.controller import Speculation
from omlxd.errors import InvalidRequest

BOUNDED: dict[str, Any] = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["cat", "dog", "é"]},
        "name": {"type": "string", "maxLength": 4},
        "legs": {"type": "integer", "minimum": 0, "maximum": 8},
        "tags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
        "next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/point"}]},
    },
    "required": ["kind", "name", "legs", "tags", "next"],
    "additionalProperties": False,
    "$defs": {
        "point": {
            "type": "object",
            "properties": {"x": {"type": "integer", "minimum": -9, "maximum": 9}},
            "required": ["x"],
            "additionalProperties": False,
        }
    },
}
JSON = AnswerFormat("json", schema=BOUNDED)
READ = Tool(
    "Read",
    "Reads.",
    {
        "type": "object",
        "properties": {"path": {"type": "string", "maxLength": 6}, "deep": {"type": "boolean"}},
        "required": ["path"],
        "additionalProperties": False,
    },
)
NUMBER = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"]}
BASH = Tool("Bash", "Runs.", NUMBER | {"additionalProperties": False})


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory):
    host = Host(build_family("qwen3", tmp_path_factory.mktemp("model")))
    yield host
    host.close()


# --------------------------------------------------------------------------- schemas


def test_noise_writes_valid_json_whatever_the_seed(host: Host):
    ids = [host.send(chat(format=JSON, temperature=1.5, seed=seed, max_tokens=400)) for seed in range(8)]
    texts = set()
    for events in map(host.events, ids):
        assert finished(events).reason == "stop"
        jsonschema_rs.validate(BOUNDED, json.loads(text_of(events)))
        texts.add(text_of(events))
    assert len(texts) > 4


@pytest.mark.slow
def test_a_row_is_the_same_beside_others_that_are_free(host: Host):
    request = chat(format=JSON, temperature=1.0, seed=7, max_tokens=300)
    free = chat("Tell me more", temperature=1.0, seed=9, max_tokens=60)
    alone = text_of(host.ask(request)), text_of(host.ask(free))
    ids = [host.send(each) for each in (free, request, free, request, free)]
    texts = [text_of(host.events(id)) for id in ids]
    assert texts == [alone[1], alone[0], alone[1], alone[0], alone[1]]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_filters_and_penalties_stay_within_the_grammar(host: Host, temperature: float):
    events = host.ask(
        chat(
            format=JSON,
            temperature=temperature,
            seed=1,
            top_k=5,
            top_p=0.5,
            repetition_penalty=1.3,
            logit_bias={5: 100.0},
            max_tokens=400,
        )
    )
    assert finished(events).reason == "stop"
    jsonschema_rs.validate(BOUNDED, json.loads(text_of(events)))


@pytest.mark.slow
def test_any_object_and_what_is_cut_off(host: Host):
    any_object = AnswerFormat("json", schema={"type": "object"})
    reasons = set()
    for seed in range(8):
        events = host.ask(chat(format=any_object, temperature=0.7, seed=seed, max_tokens=40))
        reasons.add(finished(events).reason)
        assert text_of(events).startswith("{")
        if finished(events).reason == "stop":
            assert isinstance(json.loads(text_of(events)), dict)
    assert "length" in reasons


def test_regex_choice_and_grammars(host: Host):
    choice = AnswerFormat("choice", choices=("yes", 'no "way"', "möglich"))
    assert text_of(host.ask(chat(format=choice, max_tokens=30))) in choice.choices
    regex = AnswerFormat("regex", text=r"[a-c]{3}-[0-9]{2}")
    text = text_of(host.ask(raw(format=regex, max_tokens=30)))
    assert re.fullmatch(regex.text, text)
    lark = AnswerFormat("lark", text='start: "a" "b"+ /[xy]/')
    assert text_of(host.ask(raw(format=lark, temperature=0, max_tokens=200))).startswith("ab")
    gbnf = AnswerFormat("lark", text='root ::= "p" ("q" | "r")')
    assert text_of(host.ask(raw(format=gbnf, max_tokens=9))) in ("pq", "pr")


@pytest.mark.parametrize(
    ("schema", "named"),
    [
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"not": {"type": "null"}}, "not"),
        ({"type": "object", "propertyNames": {"minLength": 2}}, "propertyNames"),
        ({"if": {}, "then": {}}, "if"),
        ({"type": "string", "format": "phone"}, "phone"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf"),
        ({"$ref": "http://elsewhere/schema"}, "http://elsewhere/schema"),
        ({"type": "text"}, "text"),
        ({"type": "string", "pattern": "(?=a)b"}, "look"),
        ({"x-guidance": {"lenient": True}, "not": {}}, "not"),
    ],
)
def test_what_cant_be_enforced_is_refused_by_name_if_strict_else_told(host: Host, schema: dict, named: str):
    with pytest.raises(InvalidRequest, match="text.format.*" + named.replace("(", "")) as refused:
        host.ask(chat(format=AnswerFormat("json", schema=schema, param="text.format", strict=True)))
    assert refused.value.param == "text.format"
    ended = finished(host.ask(chat(format=AnswerFormat("json", schema=schema), max_tokens=2)))
    assert ended.usage.limited.not_enforced


@pytest.mark.parametrize(
    "format",
    [
        AnswerFormat("regex", text="(a"),
        AnswerFormat("lark", text="start: nothing"),
        AnswerFormat("lark", text="root ::= ((("),
        AnswerFormat("lark", text="\x00"),
        AnswerFormat("lark", text="start: start"),  # Has no first mask.
        AnswerFormat("lark", text="start: " + " | ".join(f'"a{i}"' for i in range(100_000))),  # Took 115 s.
    ],
)
def test_grammars_that_are_none_are_refused(host: Host, format: AnswerFormat):
    with pytest.raises(InvalidRequest):
        host.ask(raw(format=format))


# --------------------------------------------------------------------------- thinking


TOO_MUCH = (
    AnswerFormat("choice", choices=tuple("x" * 20 + str(i) for i in range(9000)), param="guided_choice"),
    AnswerFormat("regex", text=".*" * 200 + "x", param="guided_regex"),
    AnswerFormat(
        "lark",
        text="start: a0\n" + "".join(f"a{i}: a{i + 1} a{i + 1}\n" for i in range(200)) + 'a200: "x"\n',
        param="guided_grammar",
    ),
)


@pytest.mark.parametrize("format", TOO_MUCH, ids=[each.param for each in TOO_MUCH])
def test_a_grammar_that_fails_on_the_way_is_the_clients_and_no_text_of_the_answer_is_told(
    host: Host, format: AnswerFormat, caplog
):
    failed = host.ask(chat(format=format, max_tokens=8))[-1]
    assert isinstance(failed, Failed) and failed.code == "invalid_request", failed
    assert "give a simpler one" in failed.message and "<state>" not in failed.message
    assert "<state>" not in caplog.text and "Tokens:" not in caplog.text


def test_thinking_is_free_and_the_answer_after_it_is_not(host: Host):
    close = host.engine.loaded.tokenizer.think_end_id
    likely = {close: 6.0}
    for seed in range(6):
        events = host.ask(
            chat(format=JSON, thinking=True, temperature=1.0, seed=seed, logit_bias=likely, max_tokens=600)
        )
        if finished(events).reason == "length":
            continue
        assert any(isinstance(event, ReasoningDelta) for event in events)
        jsonschema_rs.validate(BOUNDED, json.loads(text_of(events)))
        return
    raise AssertionError("no seed stopped thinking")


def test_thinking_cant_end_the_turn(host: Host):
    (end,) = host.engine.loaded.tokenizer.eos_token_ids
    request = chat(format=JSON, thinking=True, temperature=0, logit_bias={end: 100.0}, max_tokens=20)
    assert finished(host.ask(request)).reason == "length"


# --------------------------------------------------------------------------- tools


def calls_of(events) -> list[ToolCall]:
    return [event for event in events if isinstance(event, ToolCall)]


def test_a_required_call_is_made(host: Host):
    names = set()
    (end,) = host.engine.loaded.tokenizer.eos_token_ids
    how: Any = {"tool_choice": "required", "temperature": 1.0, "logit_bias": {end: 4.0}, "max_tokens": 300}
    for seed in range(6):
        events = host.ask(chat(tools=(READ, BASH), seed=seed, **how))
        assert finished(events).reason == "tool_calls" and not text_of(events) and calls_of(events)
        for call in calls_of(events):
            names.add(call.name)
            schema = {"Read": READ, "Bash": BASH}[call.name].parameters
            jsonschema_rs.validate(schema, json.loads(call.arguments))
    assert names <= {"Read", "Bash"}


def test_a_named_call_is_made_once(host: Host):
    for seed in range(2):
        events = host.ask(
            chat(
                tools=(READ, BASH),
                tool_choice="named:Read",
                temperature=1.0,
                seed=seed,
                max_tokens=300,
            )
        )
        (call,) = calls_of(events)
        assert call.name == "Read" and finished(events).reason == "tool_calls"


def test_a_forced_call_follows_a_begun_answer(host: Host):
    request = chat(
        tools=(READ, BASH), tool_choice="named:Read", thinking=None, max_tokens=300, temperature=1.0
    )
    prompt = request.prompt
    begun = Message("assistant", (TextPart("I look into it."),))
    prompt = replace(prompt, messages=(*prompt.messages, begun), continue_final=True)
    events = host.ask(replace(request, prompt=prompt))
    (call,) = calls_of(events)
    assert call.name == "Read" and not text_of(events)
    jsonschema_rs.validate(READ.parameters, json.loads(call.arguments))


@pytest.mark.parametrize("choice", ["required", "named:Read"])
def test_a_forced_call_that_is_cut_off_is_no_text(host: Host, choice):
    for most in range(1, 12):
        events = host.ask(chat(tools=(READ,), tool_choice=choice, max_tokens=most))
        assert not text_of(events) and finished(events).reason == "length"


def test_a_schema_that_cant_be_enforced_matters_for_strict_tools_alone(host: Host, caplog):
    odd = {"type": "object", "properties": {"n": {"enum": [1]}}, "propertyNames": {"maxLength": 9}}
    request = chat(tools=(Tool("Odd", "", odd),), tool_choice="required", max_tokens=4)
    assert finished(host.ask(request)).reason == finished(host.ask(request)).reason == "length"
    (line,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert "not enforced" in line and "Odd" not in line
    assert finished(host.ask(request)).usage.limited.not_enforced == ("tools.Odd: /propertyNames",)
    with pytest.raises(InvalidRequest, match=r"'Odd'.*propertyNames"):
        host.ask(chat(tools=(Tool("Odd", "", odd, strict=True),), max_tokens=4))


def test_strict_tools_leave_text_free(host: Host):
    strict = Tool(READ.name, "", READ.parameters, strict=True)
    start = host.engine.loaded.tokenizer.convert_tokens_to_ids("<tool_call>")
    how: Any = {"tools": (strict,), "temperature": 1.0, "logit_bias": {start: 5.0}, "max_tokens": 300}
    calls: list[ToolCall] = []
    for seed in range(3, 9):  # Hardly one of a hundred calls nothing.
        calls = calls or calls_of(host.ask(chat(seed=seed, **how)))
    assert calls
    for call in calls:
        jsonschema_rs.validate(READ.parameters, json.loads(call.arguments))


@pytest.mark.slow
def test_an_answer_of_a_schema_or_a_call(host: Host):
    kinds = set()
    for seed in range(8):
        events = host.ask(chat(tools=(READ,), format=JSON, temperature=1.5, seed=seed, max_tokens=300))
        kinds.add(bool(calls_of(events)))
        if not calls_of(events):
            jsonschema_rs.validate(BOUNDED, json.loads(text_of(events)))
    assert kinds == {True, False}


@pytest.mark.slow
def test_allowed_tools_leave_the_prompt_as_it_was(host: Host):
    """Only which tool may be called changes, so that the prefix is found in the cache."""
    long = "Tell me what to do. " * 60
    how: Any = {"tools": (READ, BASH), "temperature": 1.0, "max_tokens": 300}
    before = finished(host.ask(chat(long, **how, seed=1))).usage
    for seed in range(3):
        events = host.ask(chat(long, **how, seed=seed, tool_choice="required", allowed_tools=("Bash",)))
        usage = finished(events).usage
        assert usage.prompt_tokens == before.prompt_tokens and usage.cached_tokens > before.prompt_tokens // 2
        if finished(events).reason == "tool_calls":
            assert {call.name for call in calls_of(events)} == {"Bash"}


# --------------------------------------------------------------------------- guesses


def guessed_requests(host: Host) -> list[Any]:
    close = {host.engine.loaded.tokenizer.think_end_id: 6.0}
    return [
        chat(format=JSON, temperature=1.0, seed=7, max_tokens=200),
        chat(format=JSON, temperature=0.0, max_tokens=200, repetition_penalty=1.3),
        chat(format=JSON, thinking=True, temperature=1.0, seed=3, logit_bias=close, max_tokens=80),
        chat(tools=(READ, BASH), tool_choice="required", temperature=1.0, seed=2, max_tokens=120),
        raw(
            format=AnswerFormat("regex", text=r"([a-c]{3}-[0-9]{2} ){9}"),
            temperature=1.0,
            seed=1,
            max_tokens=90,
        ),
        raw("One", temperature=1.0, seed=5, logprobs=2, max_tokens=60),
        raw("Two", temperature=0.0, stop=("e",), max_tokens=60),
    ]


@pytest.mark.slow
def test_guesses_change_nothing_of_what_a_grammar_lets_through(host: Host, monkeypatch: pytest.MonkeyPatch):
    """Nor of calls, thinking, stop strings and log-probabilities, in one batch."""
    rights: list[list[int]] = []
    over = Scheduler._over

    def recorded(self: Scheduler, sequence: Any) -> None:
        rights.append(sequence.tokens)
        over(self, sequence)

    with monkeypatch.context() as plain:
        plain.setattr(Scheduler, "_over", recorded)
        plain.setattr(Speculation, "best_width", lambda self, offers, packed=0: 0)
        want = [summary(host.ask(request)) for request in guessed_requests(host)]
    guess_by(monkeypatch, half_right(rights, 1), forced=True)
    shared = host.engine.scheduler.speculation
    assert shared is not None
    before = shared.counts[None].drafted, shared.counts[None].accepted
    ids = [host.send(request) for request in guessed_requests(host)]
    assert [summary(host.events(id)) for id in ids] == want
    assert shared.counts[None].drafted - before[0] > shared.counts[None].accepted - before[1] > 100


def summary(events: list[Any]) -> tuple:
    """What a client makes of an answer."""
    logprobs = [
        (each.token, round(each.logprob, 3))
        for event in events
        if isinstance(event, TextDelta)
        for each in event.logprobs
    ]
    thought = "".join(event.text for event in events if isinstance(event, ReasoningDelta))
    end = finished(events)
    calls = [(call.name, call.arguments) for call in calls_of(events)]
    return text_of(events), thought, calls, logprobs, end.reason, end.usage.completion_tokens


def test_what_is_forced_is_guessed(host: Host, monkeypatch: pytest.MonkeyPatch):
    """A call's name and tags take fewer passes than tokens."""
    guess_by(monkeypatch, lambda tokens: [], forced=True)
    text = "a long answer that the grammar leaves no choice in, not even at its very end"
    usage = finished(
        host.ask(raw(format=AnswerFormat("choice", choices=(text,)), temperature=0, max_tokens=99))
    ).usage
    assert usage.accepted > usage.completion_tokens // 2


@pytest.mark.parametrize("whose", ["grammar", "prediction"])
def test_a_token_that_the_model_does_not_have_is_not_guessed(
    whose: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Others' answers go on."""
    add_foreign_token(folder := build_family("qwen3", tmp_path / "model"))
    check_always(monkeypatch)
    host = Host(folder)
    try:
        other, asked = raw("Other", temperature=0, max_tokens=60), raw(temperature=0, max_tokens=30)
        want, text = text_of(host.ask(other)), text_of(host.ask(asked))
        if whose == "grammar":
            asked = replace(asked, format=AnswerFormat("lark", text='start: "ab" <extra> "cd"'))
        else:
            asked = replace(asked, format=AnswerFormat("regex", text="(?s:.*)"))
            asked = replace(asked, prediction=text.replace(" ", "<extra> "))
        id = host.send(other)
        events = host.ask(asked)
        assert text_of(host.events(id)) == want
        if whose == "grammar":
            assert isinstance(events[-1], Failed) and events[-1].code == "invalid_request"
        else:
            assert text_of(events) == text and finished(events).usage.predicted
    finally:
        host.close()


def test_masks_along_guesses_are_those_of_taking_them(host: Host):
    constraint = host.engine._checks._constraints.compile(raw(format=JSON), thinking=False)
    twin = host.engine._checks._constraints.compile(raw(format=JSON), thinking=False)
    assert constraint is not None and twin is not None
    rng = np.random.default_rng(2)
    for _ in range(60):
        assert constraint.mask is not None
        allowed = np.nonzero(constraint.mask)[0]
        masks = constraint.masks_along([int(allowed[0]), int(rng.integers(500)), int(rng.integers(500))])
        assert np.array_equal(masks[0], twin.mask) and np.array_equal(masks[0], constraint.mask)
        token = int(rng.choice(allowed))
        along = constraint.masks_along([token])
        for each in (constraint, twin):
            each.advance(token)
        if token in host.engine.loaded.tokenizer.eos_token_ids:
            assert len(along) == 1
            return
        assert np.array_equal(along[1], twin.mask) and np.array_equal(constraint.mask, twin.mask)
