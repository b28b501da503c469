"""gpt-oss's messages held to a grammar: forced and strict calls, allowed tools, answers of a format."""

# ruff: noqa: F811 -- `tokenizer` is a fixture of test_harmony.py

from __future__ import annotations

import json
from typing import Any

import jsonschema_rs
import pytest
from grammar_walk import Walker, calls_in
from host import chat
from parsing import merged

from omlxd.chat import AnswerFormat, ReasoningDelta, TextDelta, Tool
from omlxd.engine.constrain.constraint import ConstraintCompiler
from omlxd.engine.constrain.limits import Limits, Marks
from omlxd.engine.output.parser import OutputParser
from omlxd.errors import InvalidRequest
from omlxd.models import demo
from tests.engine.constrain.test_forced_calls import SCHEMAS, SMALL, STOP, TOOLS, compiled
from tests.engine.output.test_harmony import tokenizer, tokens_of  # noqa: F401 -- a fixture

GO = Tool("Go", "", SMALL)
THINK = "<|channel|>analysis<|message|>Let me see.<|end|><|start|>assistant"
CALL = "<|channel|>commentary to=functions.Go <|constrain|>json<|message|>"
FINAL = "<|channel|>final<|message|>"


@pytest.fixture(scope="module")
def compiler(tokenizer):
    return ConstraintCompiler(tokenizer, demo.VOCAB + 16)


def allows(compiler, tokenizer, text: str, **more: Any) -> bool:
    """Whether `text` may be written and the turn then end; it may hold the token that ends it."""
    constraint = compiled(compiler, **more)
    for token in tokens_of(tokenizer, text):
        if constraint.mask is None or not constraint.mask[token]:
            return False
        constraint.advance(token)
    ends = tokenizer.eos_token_ids
    return constraint.mask is None or any(constraint.mask[end] for end in ends)


@pytest.mark.parametrize("name", sorted(SCHEMAS))
def test_what_is_forced_is_read_back_as_the_schema_says(compiler, tokenizer, name):
    walker = Walker(tokenizer)
    walks = []
    for seed in range(3):
        constraint = compiled(compiler, tools=TOOLS, tool_choice=f"named:{name}")
        if (tokens := walker.walk(constraint, seed)) is not None:
            (call,) = calls_in(tokenizer, tokens, TOOLS)
            assert call.name == name
            walks.append(call)
    assert walks


def test_a_forced_call_may_be_thought_about_first(compiler, tokenizer):
    how: dict[str, Any] = {"tools": (GO, STOP), "tool_choice": "named:Go"}
    call = CALL + '{"n": 7}<|call|>'
    assert allows(compiler, tokenizer, call, **how)
    assert allows(compiler, tokenizer, THINK + call, **how, thinking=True)
    assert not allows(compiler, tokenizer, THINK + call, **how)
    assert not allows(compiler, tokenizer, THINK + call.replace("7", "77"), **how, thinking=True)
    assert not allows(compiler, tokenizer, THINK + call.replace("Go", "Stop"), **how, thinking=True)
    assert not allows(compiler, tokenizer, FINAL + "No.<|return|>", **how, thinking=True)
    parser = OutputParser(tokenizer, tools=(GO, STOP))
    events = [event for token in tokens_of(tokenizer, THINK + call) for event in parser.add_token(token)]
    assert merged(events + parser.finish("stop")) == [
        ("reasoning", "Let me see."),
        ("call", "Go", '{"n": 7}'),
    ]


def test_strict_calls_among_free_messages(compiler, tokenizer):
    how: dict[str, Any] = {"tools": (Tool("Go", "", SMALL, strict=True), STOP), "thinking": None}
    aside = "<|channel|>commentary<|message|>I will go.<|end|><|start|>assistant"
    call = CALL + '{"n": 7}<|call|>'
    for text in (FINAL + "a < b", THINK + FINAL + "No.<|return|>", THINK + aside + call, call):
        assert allows(compiler, tokenizer, text, **how), text
    assert not allows(compiler, tokenizer, THINK + call.replace("7", "77"), **how)
    assert not allows(compiler, tokenizer, call.replace("Go", "Run"), **how)


def test_of_the_tools_some_are_allowed(compiler, tokenizer):
    how: dict[str, Any] = {"tools": (GO, STOP), "thinking": None}
    call = CALL + '{"n": 7}<|call|>'
    assert allows(compiler, tokenizer, call, **how, allowed_tools=("Go",))
    assert not allows(compiler, tokenizer, call, **how, allowed_tools=("Stop",))
    assert allows(compiler, tokenizer, FINAL + "No.", **how, allowed_tools=("Stop",))
    assert not allows(
        compiler, tokenizer, FINAL + "No.", **how, allowed_tools=("Go",), tool_choice="required"
    )


def test_an_answer_of_a_schema_is_a_final_message(compiler, tokenizer):
    walker = Walker(tokenizer)
    format = AnswerFormat("json", schema=SMALL)
    thought = 0
    for seed in range(12):
        constraint = compiled(compiler, format=format, thinking=None)
        tokens = walker.walk(constraint, seed, free=12)
        if tokens is None:
            continue
        parser = OutputParser(tokenizer)
        events = [event for token in tokens for event in parser.add_token(token)] + parser.finish("stop")
        thought += any(isinstance(event, ReasoningDelta) for event in events)
        kind, text = merged([event for event in events if not isinstance(event, ReasoningDelta)])[0]
        assert kind == "text"
        jsonschema_rs.validate(SMALL, json.loads(text))
    assert thought
    tools: dict[str, Any] = {"tools": (GO,), "format": format, "thinking": None}
    assert allows(compiler, tokenizer, FINAL + '{"n": 3}<|return|>', **tools)
    assert allows(compiler, tokenizer, THINK + CALL + '{"n": 3}<|call|>', **tools)
    assert not allows(compiler, tokenizer, FINAL + "Three.", **tools)


@pytest.mark.parametrize(
    ("format", "good", "bad"),
    [
        (AnswerFormat("regex", text="[a-c]{3}"), "abc", "abd"),
        (AnswerFormat("regex", text=r"\d[^\d]\w\\d"), "1xy\\d", "1xé\\d"),
        (AnswerFormat("regex", text=r"\d"), "5", "٣"),
        (AnswerFormat("choice", choices=("yes", "no")), "no", "maybe"),
        (AnswerFormat("lark", text='start: "a" "b"+'), "abb", "aab"),
    ],
)
def test_answers_of_other_formats(compiler, tokenizer, format, good, bad):
    assert allows(compiler, tokenizer, f"{FINAL}{good}<|return|>", format=format)
    assert allows(compiler, tokenizer, f"{THINK}{FINAL}{good}", format=format, thinking=None)
    assert not allows(compiler, tokenizer, f"{FINAL}{bad}", format=format)


def test_a_raw_prompt_has_no_messages(compiler, tokenizer):
    from host import raw

    constraint = compiler.compile(raw(format=AnswerFormat("choice", choices=("yes",))), thinking=False)
    assert constraint is not None
    for token in tokenizer.encode("yes", add_special_tokens=False):
        assert constraint.mask is not None and constraint.mask[token]
        constraint.advance(token)
    assert compiler.compile(chat(tools=(GO,)), thinking=False) is None


@pytest.mark.parametrize("format", [None, AnswerFormat("choice", choices=("yes",))])
def test_analysis_ends_at_its_budget(compiler, tokenizer, format):
    """`final` or a call follows, never more analysis."""
    grammar = None if format is None else compiled(compiler, format=format, thinking=None)
    marks = Marks.of(tokenizer, demo.VOCAB + 16, ("", ""))
    assert marks is not None and tokenizer.decode([*marks.start]) == "<|channel|>analysis<|message|>"
    limits = Limits(grammar, marks, 30)
    wanted = tokens_of(tokenizer, "<|channel|>analysis<|message|>" + "Let me see. " * 40)
    said: list[int] = []
    while len(said) < len(marks.start) + 30 + len(marks.end + marks.after):
        token, mask = wanted[len(said)], limits.mask
        said.append(token if mask is None or mask[token] else int(mask.argmax()))
        limits.advance(said[-1])
    assert tuple(said[-len(marks.end + marks.after) :]) == marks.end + marks.after
    assert tokenizer.decode(said).endswith("<|end|><|start|>assistant<|channel|>")
    assert limits.mask is not None and not limits.mask[marks.barred] and limits.mask.any()
    limits.advance(tokens_of(tokenizer, "final")[0])
    assert limits.error is None and limits.thought_ended == "budget"


def test_a_forced_call_that_is_cut_off_is_no_text(tokenizer):
    tokens = tokens_of(tokenizer, CALL + '{"n": 7}<|call|>')
    for end in range(len(tokens)):
        parser = OutputParser(tokenizer, tools=(GO,), must_call=True)
        events = [event for token in tokens[:end] for event in parser.add_token(token)]
        assert not any(isinstance(event, TextDelta) for event in events + parser.finish("length"))


def test_a_forced_call_cant_follow_a_begun_answer(compiler):
    for more in ({"tools": (GO,), "tool_choice": "required"}, {"format": AnswerFormat("json", SMALL)}):
        with pytest.raises(InvalidRequest, match="an assistant's message to continue"):
            compiler.compile(chat(continue_final=True, **more), thinking=False)
