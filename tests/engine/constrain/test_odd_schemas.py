"""Schemas that are none: a call of such a tool is refused with a sentence, or made; nothing breaks."""

# ruff: noqa: F811 -- `tokenizer` is a fixture of parsing.py

from __future__ import annotations

import copy
import random
import re
from typing import Any

import pytest
from host import chat
from parsing import tokenizer  # noqa: F401 -- a fixture

from omlxd.chat import Tool
from omlxd.engine.constrain.schema.json_schema import TYPES
from omlxd.engine.constrain.value_grammar import text_regex
from omlxd.engine.output.calls.reader import ToolCallReader
from omlxd.errors import InvalidRequest
from tests.engine.constrain.test_forced_calls import SCHEMAS, compiler_of, spelled

JUNK: tuple[Any, ...] = (
    5,
    "x",
    None,
    True,
    [],
    {},
    [5],
    [{}],
    {"type": 5},
    {"$ref": 5},
    -1,
    0.5,
    [[]],
    {"a": []},
)
WORDS = ("type", "enum", "const", "anyOf", "oneOf", "allOf", "$ref", "required", "properties", "items")
MORE = (
    "minItems",
    "maxItems",
    "minLength",
    "maxLength",
    "pattern",
    "minimum",
    "additionalProperties",
    "prefixItems",
)


def places(value: Any):
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in list(items):
        yield value, key
        yield from places(inner)


def broken(rng: random.Random) -> dict[str, Any]:
    schema = copy.deepcopy(rng.choice(list(SCHEMAS.values())))
    for _ in range(rng.randrange(1, 3)):
        holder, key = rng.choice(list(places(schema)))
        if isinstance(holder, dict) and rng.random() < 0.5:
            holder[rng.choice(WORDS + MORE)] = copy.deepcopy(rng.choice(JUNK))
        else:
            holder[key] = copy.deepcopy(rng.choice(JUNK))
    return schema


@pytest.mark.parametrize("name", ["json_tools", "qwen3_coder", "minicpm5", "kimi_k3", "pythonic", "gemma4"])
def test_a_broken_schema_breaks_nothing(tokenizer, name):
    compiler = compiler_of(spelled(tokenizer, name))
    rng = random.Random(name)
    refused = 0
    for turn in range(60):
        tool = Tool("Odd", "", broken(rng), strict=bool(turn % 2))
        try:
            compiler.compile(chat(tools=(tool,), tool_choice="required"), thinking=False)
        except InvalidRequest as error:
            refused += 1
            assert error.param in ("tools", "tool_choice")
        for kinds in ToolCallReader((tool,)).parameters("Odd").values():
            assert kinds <= set(TYPES)
    assert 0 < refused < 60


def test_a_schema_of_alternatives_that_allow_nothing_ends():
    levels = {str(at): {"anyOf": [{"$ref": f"#/$defs/{at + 1}"}] * 2} for at in range(28)}
    schema = {
        "$defs": {**levels, "28": {"type": "string", "enum": [1]}},
        "properties": {"x": {"$ref": "#/$defs/0"}},
    }
    assert ToolCallReader((Tool("Odd", "", schema),)).parameters("Odd") == {"x": set()}


@pytest.mark.parametrize(
    ("pattern", "held", "other"),
    [
        (r"^\/[a-z]+$", "/etc", "etc"),
        (r"^[^\/]+/x$", "a/x", "//x"),
        (r"\.md$", "a.md", "a.mdx"),
        (r"^a\\$", "a\\", "ab"),
        (r"\$$", "a$", "a"),
        (r"\$", "a$b", "ab"),
    ],
)
def test_a_pattern_of_a_text_without_quotes_is_held_to(tokenizer, pattern, held, other):
    schema = {"type": "string", "pattern": pattern}
    regex = re.compile(text_regex(schema))
    assert regex.fullmatch(held) and not regex.fullmatch(other)
    tool = Tool("Odd", "", {"type": "object", "properties": {"x": schema}, "required": ["x"]}, strict=True)
    compiler = compiler_of(spelled(tokenizer, "qwen3_coder"))
    assert compiler.compile(chat(tools=(tool,), tool_choice="required"), thinking=False)
