"""Calls written by a grammar are read back by the parser, in every spelling that has a grammar."""

# ruff: noqa: F811 -- `tokenizer` is a fixture of parsing.py

from __future__ import annotations

import importlib
import json

import jsonschema_rs
import numpy as np
import pytest
from fast_or_slow import rest_slow
from host import chat
from mlx_lm.tokenizer_utils import TokenizerWrapper
from parsing import tokenizer  # noqa: F401 -- a fixture

from omlxd.chat import Tool, ToolCall, ToolCallDelta
from omlxd.engine.constrain.constraint import ConstraintCompiler
from omlxd.engine.output.parser import OutputParser
from omlxd.models import demo

SCHEMA = {
    "type": "object",
    "properties": {
        "path": {"type": "string"},
        "mode": {"enum": ["r", "w"]},
        "limit": {"type": "integer", "minimum": 1, "maximum": 99},
        "deep": {"type": "boolean"},
        "at": {"$ref": "#/$defs/point"},
    },
    "required": ["path", "limit"],
    "additionalProperties": False,
    "$defs": {
        "point": {"type": "array", "items": {"type": "integer", "maximum": 9, "minimum": 0}, "maxItems": 2}
    },
}
TOOLS = (Tool("Read", "", SCHEMA), Tool("Stop", "", {"type": "object", "additionalProperties": False}))


def spelled(tokenizer, name: str) -> TokenizerWrapper:
    parsers = importlib.import_module(f"mlx_lm.tool_parsers.{name}")
    return TokenizerWrapper(
        tokenizer._tokenizer,
        eos_token_ids=tokenizer.eos_token_ids,
        tool_parser=parsers.parse_tool_call,
        tool_call_start=parsers.tool_call_start,
        tool_call_end=parsers.tool_call_end,
    )


CLOSES = ("\n</parameter>", "</arg_value>", "</longcat_arg_value>", "</parameter>")


def walk(tokenizer, constraint, ends, seed: int, limit: int = 600) -> list[int] | None:
    """Tokens drawn from what is allowed, the turn's end preferred and tags tried; None: cut off."""
    rng = np.random.default_rng(seed)
    tokens: list[int] = []
    while len(tokens) < limit:
        allowed = np.nonzero(constraint.mask)[0]
        assert len(allowed)
        done = [end for end in ends if constraint.mask[end]]
        if done:
            return tokens
        tokens.append(int(rng.choice(allowed)))
        constraint.advance(tokens[-1])
        for token in tokenizer.encode(CLOSES[rng.integers(4)], add_special_tokens=False):
            if rng.random() < 0.9 and constraint.mask[token]:
                tokens.append(token)
                constraint.advance(token)
        assert constraint.error is None
    return None


@pytest.mark.parametrize(
    "name",
    rest_slow(
        ["json_tools", "mistral", "kimi_k2", "qwen3_coder", "glm47", "laguna", "longcat", "minimax_m2"],
        *["json_tools", "qwen3_coder"],
    ),
)
def test_what_the_grammar_writes_the_parser_reads(tokenizer, name):
    wrapped = spelled(tokenizer, name)
    compiler = ConstraintCompiler(wrapped, demo.VOCAB)
    read = 0
    for seed in range(12):
        constraint = compiler.compile(chat(tools=TOOLS, tool_choice="required"), thinking=False)
        tokens = walk(wrapped, constraint, tokenizer.eos_token_ids, seed)
        if tokens is None:
            continue
        parser = OutputParser(wrapped, tools=TOOLS)
        events = [event for token in tokens for event in parser.add_token(token)] + parser.finish("stop")
        events = [event for event in events if not isinstance(event, ToolCallDelta)]
        assert events and all(isinstance(event, ToolCall) for event in events), wrapped.decode(tokens)
        for event in events:
            schema = next(tool.parameters for tool in TOOLS if tool.name == event.name)
            jsonschema_rs.validate(schema, json.loads(event.arguments))
            read += event.name == "Read"
    assert read


@pytest.mark.parametrize("name", ["json_tools", "qwen3_coder", "minimax_m2"])
def test_strict_calls_in_free_text(tokenizer, name):
    """Tags that are one special token, and tags that are plain text."""
    wrapped = spelled(tokenizer, name)
    strict = tuple(Tool(tool.name, "", tool.parameters, strict=True) for tool in TOOLS)
    compiler = ConstraintCompiler(wrapped, demo.VOCAB)
    good = {
        "json_tools": '<tool_call>\n{"name": "Stop", "arguments": {}}\n</tool_call>',
        "qwen3_coder": "<tool_call>\n<function=Stop>\n</function>\n</tool_call>",
        "minimax_m2": '<minimax:tool_call>\n<invoke name="Stop">\n</invoke>\n</minimax:tool_call>',
    }[name]
    for text, fine in (
        (f"I stop. {good} Done < now.", True),
        (f"I stop. {good.replace('Stop', 'Go')}", False),
    ):
        constraint = compiler.compile(chat(tools=strict), thinking=False)
        assert constraint is not None
        allowed = True
        for token in wrapped.encode(text, add_special_tokens=False):
            allowed = allowed and bool(constraint.mask[token])
            if allowed:
                constraint.advance(token)
        assert allowed == fine
