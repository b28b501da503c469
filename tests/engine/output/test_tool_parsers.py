"""Every tool parser of mlx-lm: a call in its own markup is found in a model's output, typed by the schema."""

# ruff: noqa: F811 -- `tokenizer` is a fixture of parsing.py

from __future__ import annotations

import importlib
import json
import pkgutil

import pytest
from mlx_lm import tool_parsers
from parsing import SCHEMA, parse, tokenizer  # noqa: F401 -- a fixture

from omlxd.chat import Tool
from tests.engine.output.test_tool_calls import wrapper

READ = Tool("Read", "Reads.", SCHEMA)
WANTED = {"path": "1e3", "limit": 5, "ratio": 0.5, "deep": True}
JSON = '{"name": "Read", "arguments": {"path": "1e3", "limit": "5", "ratio": 0.5, "deep": true}}'
PAIRS = "".join(
    f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n"
    for key, value in (("path", "1e3"), ("limit", "5"), ("ratio", "0.5"), ("deep", "true"))
)


def tagged(parameter: str) -> str:
    values = (("path", "1e3"), ("limit", "5"), ("ratio", "0.5"), ("deep", "true"))
    return "\n".join(parameter.format(key=key, value=value) for key, value in values)


K3_ARGUMENT = '<|open|>argument key="{key}" type="string"<|sep|>{value}<|close|>argument<|sep|>'
CALLS = {
    "function_gemma": (
        "<start_function_call>call:Read{path:<escape>1e3<escape>,limit:5,ratio:0.5,deep:true}<end_function_call>"
    ),
    "gemma4": '<|tool_call>call:Read{path:<|"|>1e3<|"|>,limit:5,ratio:0.5,deep:true}<tool_call|>',
    "glm47": f"<tool_call>Read\n{PAIRS}</tool_call>",
    "json_tools": f"<tool_call>\n{JSON}\n</tool_call>",
    "kimi_k2": (
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.Read:0<|tool_call_argument_begin|>"
        '{"path": "1e3", "limit": "5", "ratio": 0.5, "deep": true}<|tool_call_end|><|tool_calls_section_end|>'
    ),
    "kimi_k3": (
        '<|open|>tools<|sep|><|open|>call tool="Read" index="1"<|sep|>'
        f"{tagged(K3_ARGUMENT)}<|close|>call<|sep|><|close|>tools<|sep|>"
    ),
    "laguna": f"<tool_call>Read\n{PAIRS}</tool_call>",
    "longcat": ("<longcat_tool_call>Read\n" + PAIRS.replace("arg_", "longcat_arg_") + "</longcat_tool_call>"),
    "minicpm5": f'<function name="Read">{tagged("""<param name="{key}">{value}</param>""")}</function>',
    "minimax_m2": (
        '<minimax:tool_call>\n<invoke name="Read">\n'
        + tagged('<parameter name="{key}">{value}</parameter>')
        + "\n</invoke>\n</minimax:tool_call>"
    ),
    "mistral": '[TOOL_CALLS]Read[ARGS]{"path": "1e3", "limit": "5", "ratio": 0.5, "deep": true}',
    "muse_spark": (
        '<atem:function_calls>\n<atem:invoke name="Read">\n'
        + tagged('<atem:parameter name="{key}">{value}</atem:parameter>')
        + "\n</atem:invoke>\n</atem:function_calls>"
    ),
    "pythonic": '<|tool_call_start|>[Read(path="1e3", limit=5, ratio=0.5, deep=True)]<|tool_call_end|>',
    "qwen3_coder": (
        "<tool_call>\n<function=Read>\n"
        + tagged("<parameter={key}>\n{value}\n</parameter>")
        + "\n</function>\n</tool_call>"
    ),
}


def test_all_parsers_are_here():
    assert {module.name for module in pkgutil.iter_modules(tool_parsers.__path__)} == CALLS.keys()


@pytest.mark.parametrize("name", sorted(CALLS))
def test_a_call_is_found_and_typed(tokenizer, name):
    model = wrapper(tokenizer, importlib.import_module(f"mlx_lm.tool_parsers.{name}"))
    for chunks in ((text := f"I read.\n{CALLS[name]}",), tuple(text)):
        said, (kind, called, arguments) = parse(model, *chunks, tools=(READ,))
        assert said == ("text", "I read.") and (kind, called) == ("call", "Read")
        given = json.loads(arguments)
        assert given == WANTED
        assert {key: type(value) for key, value in given.items()} == {
            key: type(value) for key, value in WANTED.items()
        }


@pytest.mark.parametrize("name", sorted(CALLS))
def test_what_is_no_call_is_text(tokenizer, name):
    module = importlib.import_module(f"mlx_lm.tool_parsers.{name}")
    text = f"{module.tool_call_start}what is this{module.tool_call_end}"
    assert parse(wrapper(tokenizer, module), text) == [("text", text)]
