"""A name that a door lets in is read in every format of calls, streamed and whole, forced and free."""

# ruff: noqa: F811 -- `tokenizer` is a fixture of parsing.py

from __future__ import annotations

import json
import re

import pytest
from grammar_walk import Walker, calls_in
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from parsing import merged, tokenizer  # noqa: F401 -- a fixture

from omlxd.api.fields.body import checked_name
from omlxd.chat import Tool
from omlxd.engine.constrain.call_formats import CALL_FORMATS, JsonCalls, TagCalls, format_name
from omlxd.engine.output.parser import OutputParser
from omlxd.errors import InvalidRequest
from tests.engine.constrain.test_forced_calls import CASES, compiled, compiler_of, spelled

NAMES = st.one_of(
    st.from_regex(r"[a-zA-Z0-9_-]{1,64}", fullmatch=True),
    st.from_regex(r"[\w./-]([\w.:/-]{0,254}[\w./-])?", fullmatch=True),
    st.sampled_from(
        ["functions.x", "assistant", "to", "call", "None", "-", "a" * 256, "mcp__a__b", "import"]
    ),
)
TEXTS = st.text(st.characters(exclude_categories=["Cs", "Cc"], exclude_characters='<>&|"'), max_size=20)
how = settings(
    max_examples=12,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


def written(name: str, tool: str, text: str) -> str:
    """A call as a model of that format writes it."""
    row = CALL_FORMATS[name]
    if isinstance(row, JsonCalls):
        call = row.head(tool) + json.dumps({"text": text}) + row.after
    elif isinstance(row, TagCalls):
        keyed = row.keyed % "string" if row.typed else row.keyed
        value = f"{row.cdata[0]}{text}{row.cdata[1]}" if row.cdata else text + row.pad
        call = row.head(tool) + row.key + "text" + keyed + value + row.close + row.pad + row.tail + row.after
    else:
        quote = row.values.quote
        value = f"{quote}{text}{quote}" if quote else json.dumps(text)
        call = row.head(tool) + ("text=" if row.python else "text:") + value + row.closes
    return row.section + call + row.end


@pytest.mark.parametrize(("name", "special"), CASES)
@given(data=st.data())
@how
def test_a_call_of_it_is_read(tokenizer, name, special, data):
    model = spelled(tokenizer, name, special)
    tool, text = checked_name(data.draw(NAMES), "name"), data.draw(TEXTS)
    tools = (Tool(tool, "", {"type": "object", "properties": {"text": {"type": "string"}}}),)
    call = written(format_name(model), tool, text)
    expected = [("call", tool, json.dumps({"text": text}, ensure_ascii=False))]
    for size in (len(call), 1, 7):
        parser = OutputParser(model, tools=tools)
        pieces = [call[at : at + size] for at in range(0, len(call), size)]
        events = [event for piece in pieces for event in parser.add_text(piece)]
        assert merged(events + parser.finish("stop")) == expected, call


@pytest.mark.slow
@pytest.mark.parametrize(("name", "special"), CASES)
@given(tool=NAMES)
@settings(how, max_examples=5)
def test_a_forced_call_of_it_is_read(tokenizer, name, special, tool):
    model = spelled(tokenizer, name, special)
    tools = (Tool(tool, "", {"type": "object", "properties": {"n": {"enum": [1]}}, "required": ["n"]}),)
    constraint = compiled(compiler_of(model), tools=tools, tool_choice=f"named:{tool}")
    tokens = Walker(model).walk(constraint, 1)
    assert tokens and [call.name for call in calls_in(model, tokens, tools)] == [tool]


@given(name=st.text(max_size=300))
@settings(deadline=None)
def test_a_door_lets_in_what_is_read_and_refuses_the_rest(name):
    try:
        assert checked_name(name, "tools.0.name") == name
    except InvalidRequest as refused:
        assert refused.param == "tools.0.name"
        assert not re.fullmatch(r"[a-zA-Z0-9_-]{1,128}", name)


@pytest.mark.parametrize(
    "name", ["a b", 'a"b', "a<b", "a]", "a" * 257, "", "a\n", "a{b}", ":a", "a:", "é(", "a,b"]
)
def test_names_that_formats_can_not_hold_are_refused(name):
    with pytest.raises(InvalidRequest):
        checked_name(name, "name")
