"""A text of a schema that is also a token of the model is spelled in other tokens, and comes out whole."""

# ruff: noqa: F811 -- `tokenizer` is a fixture of parsing.py

from __future__ import annotations

import json
from typing import Any

import pytest
from grammar_walk import Walker, calls_in
from host import chat
from parsing import merged, tokenizer  # noqa: F401 -- a fixture

from omlxd.chat import AnswerFormat, Tool
from omlxd.engine.output.parser import OutputParser
from omlxd.errors import InvalidRequest
from tests.engine.constrain.test_forced_calls import compiled, compiler_of, spelled

LITERALS = (
    *("<|im_end|>", "<|endoftext|>", "<|im_start|>user", "<think>", "</think>", "<tool_call>"),
    *("a<|im_end|>", "<|im_end|><|im_end|>", "x</tool_call>y", "<think>a</think>b"),
)
PLACES: dict[str, Any] = {
    "enum": lambda text: {"properties": {"a": {"enum": [text]}}, "required": ["a"]},
    "const": lambda text: {"properties": {"a": {"const": text}}, "required": ["a"]},
    "one of two": lambda text: {"properties": {"a": {"enum": [text, "<|im_end"]}}, "required": ["a"]},
    "key": lambda text: {"properties": {text: {"enum": [1]}}, "required": [text]},
    "nested": lambda text: {"properties": {"a": {"enum": [{"b": [text]}]}}, "required": ["a"]},
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("text", LITERALS)
def test_an_answer_and_a_call_hold_it(tokenizer, text, place):
    schema = {"type": "object", **PLACES[place](text), "additionalProperties": False}
    model = spelled(tokenizer, "json_tools")
    for seed in range(2):
        format = AnswerFormat("json", schema=schema)
        constraint = compiler_of(model).compile(chat(format=format), thinking=False)
        tokens = Walker(model).walk(constraint, seed)
        assert tokens and not set(tokens[:-1]) & set(model.eos_token_ids)
        parser = OutputParser(model, held=True)
        events = [event for token in tokens for event in parser.add_token(token)] + parser.finish("stop")
        ((kind, shown),) = merged(events)
        assert kind == "text" and set(json.loads(shown)) == set(schema["properties"])
        if place != "one of two":
            assert text in json.dumps(json.loads(shown))
        tool = Tool("Go", "", schema)
        call = compiled(compiler_of(model), tools=(tool,), tool_choice="named:Go")
        assert calls_in(model, Walker(model).walk(call, seed) or [], (tool,))


@pytest.mark.parametrize("name", ["qwen3_coder", "gemma4", "pythonic", "minicpm5", "kimi_k2", "mistral"])
def test_every_format_of_calls_holds_it(tokenizer, name):
    model = spelled(tokenizer, name)
    for text in LITERALS[:4]:
        tool = Tool("Go", "", {"type": "object", "properties": {"a": {"enum": [text]}}, "required": ["a"]})
        call = compiled(compiler_of(model), tools=(tool,), tool_choice="named:Go")
        (made,) = calls_in(model, Walker(model).walk(call, 1) or [], (tool,))
        assert json.loads(made.arguments) == {"a": text}


def test_a_turn_does_not_end_before_the_grammar_does(tokenizer):
    model = spelled(tokenizer, "json_tools")
    end = model.eos_token_ids and min(model.eos_token_ids)
    for text, may_end in (('start: "a" <|im_end|> "b"', False), ('start: "a" <|im_end|>', True)):
        format = AnswerFormat("lark", text=text)
        constraint = compiler_of(model).compile(chat(format=format), thinking=False)
        assert constraint is not None
        constraint.advance(model.encode("a", add_special_tokens=False)[0])
        assert (constraint.mask is not None and bool(constraint.mask[end])) is may_end
        assert (constraint.error is None) is may_end


def test_a_choice_that_is_read_as_thought_is_refused_before_anything_is_computed(tokenizer):
    compiler = compiler_of(spelled(tokenizer, "json_tools"))
    for choice in ("<think>", "</think>no", " <think>"):
        format = AnswerFormat("choice", choices=("yes", choice), param="guided_choice")
        with pytest.raises(InvalidRequest, match="tag of thinking") as refused:
            compiler.compile(chat(format=format), thinking=False)
        assert refused.value.param == "guided_choice"
