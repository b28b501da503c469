"""Custom tools whose input is a text of a grammar: held to it where text stands bare, else refused."""

# ruff: noqa: F811 -- fixtures of other modules

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from fast_or_slow import rest_slow
from grammar_walk import CLOSERS, Walker
from host import chat
from mlx_lm.tokenizer_utils import TokenizerWrapper
from parsing import tokenizer  # noqa: F401 -- a fixture
from responses import conversation

from omlxd.chat import Conversation, Tool, ToolCall, ToolCallDelta
from omlxd.engine.constrain.call_grammar import INPUT
from omlxd.engine.output.parser import OutputParser
from omlxd.errors import InvalidRequest
from tests.engine.constrain.test_forced_calls import CASES, SOME, allows, compiled, compiler_of, spelled
from tests.engine.output.test_harmony import tokenizer as harmony  # noqa: F401 -- a fixture

LINES = r"""
start: line+  // a comment with "quotes" and /slashes/
line: KEY " = " value LF
value: STRING | INT -> number
KEY: /[a-z]{1,9}/
STRING: /"[^"\n<\]]*"/
%import common (INT, DIGIT)
%import common.LF
"""
IS_LINES = re.compile(r'([a-z]{1,9} = ("[^"\n<\]]*"|[0-9]+)\n)+')
PATCH = r"""
start: begin_patch hunk+ end_patch
begin_patch: "*** Begin Patch" LF
end_patch: "*** End Patch" LF?
hunk: add_hunk | delete_hunk
add_hunk: "*** Add File: " filename LF add_line+
delete_hunk: "*** Delete File: " filename LF
filename: /(.+)/
add_line: "+" /(.*)/ LF -> line
%import common.LF
"""
TEXT = '*** Begin Patch\n*** Add File: a "b".py\n+x = "\\n\t<é>"\n+\n*** Delete File: c:\\d\n*** End Patch'


def custom(definition: str, syntax: str = "lark") -> Tool:
    format = {"type": "grammar", "syntax": syntax, "definition": definition}
    prompt = conversation(input="u", tools=[{"type": "custom", "name": "apply", "format": format}])
    assert isinstance(prompt, Conversation)
    return prompt.tools[0]


def input_of(model: TokenizerWrapper, tokens: list[int], tool: Tool) -> str:
    """The text of the one call that `tokens` are."""
    parser = OutputParser(model, tools=(tool,))
    events = [event for token in tokens for event in parser.add_token(token)] + parser.finish("stop")
    (call,) = [event for event in events if not isinstance(event, ToolCallDelta)]
    assert isinstance(call, ToolCall) and call.name == tool.name, model.decode(tokens)
    return json.loads(call.arguments)[INPUT]


# Where a text stands bare, the mark that ends it ends the call, whatever the grammar says.
ODD = (*'"\\\n{}<>&é😀az1 \t', " = ", "zz", "12", "\\n", '\\"')
ENDS = ('"', '\\"', "\\n", "\n", "1", "=", '\\n"}', '\\n")', *(f"\n{tag}" for tag in CLOSERS))


def walker_of(model: TokenizerWrapper) -> Walker:
    return Walker(model, ODD, ENDS)


QUOTED = ("json_tools", "pythonic", "kimi_k2", "mistral")
BARE = [case for case in CASES if case[0] not in QUOTED]


@pytest.mark.parametrize(("name", "special"), rest_slow(BARE, *SOME))
def test_noise_writes_what_the_grammar_says(tokenizer, name, special):
    model = spelled(tokenizer, name, special)
    compiler, walker, tool = compiler_of(model), walker_of(model), custom(LINES)
    found = 0
    for seed in range(4):
        constraint = compiled(compiler, tools=(tool,), tool_choice="required", parallel_calls=False)
        tokens = walker.walk(constraint, seed, limit=600)
        if tokens is None:
            continue
        text = input_of(model, tokens, tool)
        # One newline at the end may belong to the tags.
        assert IS_LINES.fullmatch(text) or IS_LINES.fullmatch(text + "\n"), text
        found += 1
    assert found


FRAMES = {
    "qwen3_coder": "<tool_call>\n<function=apply>\n<parameter=input>\n%s\n</parameter>\n</function>\n"
    "</tool_call>",
    "glm47": "<tool_call>apply<arg_key>input</arg_key><arg_value>%s</arg_value></tool_call>",
    "gemma4": '<|tool_call>call:apply{input:<|"|>%s<|"|>}<tool_call|>',
    "minicpm5": '<function name="apply"><param name="input"><![CDATA[%s]]></param></function>',
    "kimi_k3": '<|open|>tools<|sep|><|open|>call tool="apply" index="1"<|sep|><|open|>argument key="input" '
    'type="string"<|sep|>%s<|close|>argument<|sep|><|close|>call<|sep|><|close|>tools<|sep|>',
}
PATCHES = [case for case in CASES if case[0] in FRAMES]


@pytest.mark.parametrize(("name", "special"), PATCHES)
@pytest.mark.parametrize("choice", ["required", "auto"])
def test_a_patch_in_codex_grammar(tokenizer, name, special, choice):
    model = spelled(tokenizer, name, special)
    compiler, tool = compiler_of(model), custom(PATCH)

    def may(text: str) -> bool:
        how: dict[str, Any] = {"tools": (tool,), "tool_choice": choice, "parallel_calls": False}
        return allows(model, compiled(compiler, **how), FRAMES[name] % text)

    assert may(TEXT)
    assert input_of(model, model.encode(FRAMES[name] % TEXT, add_special_tokens=False), tool) == TEXT
    for wrong in ("", "Hello", TEXT.replace("Add", "Odd"), TEXT.replace("\n+x", "\nx")):
        assert not may(wrong), wrong


@pytest.mark.parametrize("name", [*QUOTED, "harmony"])
def test_a_grammar_of_text_that_stands_in_json_is_refused_where_a_call_is_forced(tokenizer, harmony, name):
    model = harmony if name == "harmony" else spelled(tokenizer, name)
    compiler, tools = compiler_of(model), (custom(PATCH),)
    with pytest.raises(InvalidRequest, match=r"grammar of 'apply' can't be enforced: .* JSON") as refused:
        compiler.compile(chat(tools=tools, tool_choice="required"), thinking=False)
    assert refused.value.param == "tools"
    # Codex offers such a tool with each request: its description states the grammar.
    assert compiler.compile(chat(tools=tools, tool_choice="auto"), thinking=False) is None
    assert "Begin Patch" in tools[0].description


@pytest.mark.parametrize("name", ["json_tools", "qwen3_coder", "gemma4", "pythonic", "muse_spark"])
def test_a_regular_expression(tokenizer, name):
    model = spelled(tokenizer, name)
    compiler, walker, tool = compiler_of(model), walker_of(model), custom(r"a|[b-d]{2,3}|\d+f", "regex")
    assert tool.strict
    for seed in range(4):
        constraint = compiled(compiler, tools=(tool,), tool_choice="required", parallel_calls=False)
        tokens = walker.walk(constraint, seed)
        if tokens is not None:
            assert re.fullmatch("a|[b-d]{2,3}|[0-9]+f", input_of(model, tokens, tool))


@pytest.mark.parametrize(
    ("grammar", "says"),
    [
        ("start: nothing", "nothing"),
        ("start: /a(?=b)/", "look-around"),
        ("start: /(a/", "unclosed group"),
        ("%import common.SQL\nstart: SQL", "SQL"),
    ],
)
def test_a_grammar_that_is_none_is_refused(tokenizer, grammar, says):
    compiler = compiler_of(spelled(tokenizer, "qwen3_coder"))
    with pytest.raises(InvalidRequest, match=re.escape(says)) as refused:
        compiler.compile(chat(tools=(custom(grammar),)), thinking=False)
    assert refused.value.param == "tools"


@pytest.mark.parametrize(
    "format",
    [
        {"type": "yaml"},
        {"type": "grammar"},
        {"type": "grammar", "syntax": "ebnf", "definition": "x"},
        {"type": "grammar", "syntax": "lark", "definition": ""},
        {"type": "grammar", "syntax": "regex", "definition": "x" * 100_001},
        {"type": "grammar", "syntax": "lark", "definition": 'start: "' + "x" * 100_000 + '"'},
    ],
)
def test_formats_that_are_none_are_refused(format):
    with pytest.raises(InvalidRequest) as refused:
        conversation(input="u", tools=[{"type": "custom", "name": "apply", "format": format}])
    assert refused.value.param == "tools.0.format"
