"""Tool calls in generated text: spellings, types by schema, and what is no call."""

# ruff: noqa: F811 -- `tokenizer` is a fixture of parsing.py

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
from mlx_lm.tool_parsers import glm47, json_tools, mistral, qwen3_coder
from parsing import READ, call, parse, tokenizer  # noqa: F401 -- a fixture

from omlxd.chat import ToolCall
from omlxd.engine.output.calls.reader import ToolCallReader
from omlxd.engine.output.parser import OutputParser
from omlxd.engine.output.splitter import in_json_string


def test_calls_in_order_with_the_text_around_them(tokenizer):
    text = (
        f"I read.\n<tool_call>\n{call(path='a')}\n</tool_call>\n<tool_call>\n{call(path='b')}\n</tool_call>\n"
    )
    wanted = [("text", "I read."), ("call", "Read", '{"path": "a"}'), ("call", "Read", '{"path": "b"}')]
    assert parse(tokenizer, text) == wanted
    assert parse(tokenizer, text + "\nDone.") == [*wanted, ("text", "Done.")]


def test_ids_are_unique(tokenizer):
    parser = OutputParser(tokenizer, tools=(READ,))
    events = parser.add_text(f"<tool_call>{call(path='a')}</tool_call>" * 20)
    ids = {event.id for event in events if isinstance(event, ToolCall)}
    assert len(ids) == 20 and all(len(id) == 29 and id.startswith("call_") for id in ids)


def test_a_call_after_reasoning(tokenizer):
    text = f"I need it.\n</think>\n\n<tool_call>\n{call(path='a')}\n</tool_call>"
    wanted = [("reasoning", "I need it."), ("call", "Read", '{"path": "a"}')]
    assert parse(tokenizer, text, starts_in_thinking=True) == wanted


def test_an_end_tag_inside_a_json_string_belongs_to_it(tokenizer):
    path = 'say "</tool_call>" <tool_call> here'
    text = f"<tool_call>\n{call(path=path)}\n</tool_call>"
    assert parse(tokenizer, *text) == [("call", "Read", json.dumps({"path": path}))]


@pytest.mark.parametrize(
    "body",
    [
        "not json",
        '{"name": "Read", "arguments": [1]}',
        '{"name": "", "arguments": {}}',
        '{"name": "two words", "arguments": {}}',
        '{"arguments": {}}',
        "[1, 2]",
        "{" * 5000,
        '{"name": "Read", "arguments": {"x": NaN}}',
        "<function=Read><parameter=path>a</function>",
        "<function=Read>",
        "Read<arg_key>path</arg_key><arg_value>a",
        "",
    ],
)
def test_what_is_no_call_is_text(tokenizer, body):
    text = f"before \n<tool_call>{body}</tool_call> after"
    assert parse(tokenizer, text) == [("text", text)]
    assert parse(tokenizer, *text) == [("text", text)]


def test_a_cut_off_call_is_no_text(tokenizer):
    whole = f"x <tool_call>\n{call(path='abc')}\n</tool_call>"
    begins, tagged = whole.index('"abc'), whole.index("\n")
    for end in range(3, begins):
        events = parse(tokenizer, whole[:end], reason="length")
        assert events[0] == ("text", "x" if end >= tagged else whole[:end])
        assert [event[:2] for event in events[1:]] in ([], [("cut", "Read")])
        assert parse(tokenizer, *whole[2:end], reason="length", must_call=True) == events[1:]
    for end in range(begins + 1, len(whole)):
        text, cut = parse(tokenizer, whole[:end], reason="length")
        assert text == ("text", "x") and cut[:2] == ("cut", "Read")
        assert '{"path": "abc"}'.startswith(cut[2]) and len(cut[2]) >= min(end - begins, 5) + 8
        assert cut[3] == ('{"path": "abc"}' if end > begins + 4 else "{}")


def test_a_call_without_its_end_tag_counts_if_the_model_ended_its_turn(tokenizer):
    text = f"<tool_call>\n{call(path='a')}\n"
    assert parse(tokenizer, text, reason="stop") == [("call", "Read", '{"path": "a"}')]


def test_calls_behind_a_broken_one_are_found(tokenizer):
    broken = '<tool_call>{"name": "Read", "arguments": {"path": "a}}</tool_call>'
    good = f"<tool_call>{call(path='b')}</tool_call>"
    wanted = [("cut", "Read", '{"path": "a}}', "{}"), ("call", "Read", '{"path": "b"}')]
    assert parse(tokenizer, broken + good) == wanted
    assert parse(tokenizer, *(broken + good)) == wanted
    unnamed = broken.replace("Read", "not a name")
    assert parse(tokenizer, unnamed + good) == [("text", unnamed), wanted[1]]
    assert parse(tokenizer, *(broken + good)) == wanted


def test_what_begins_no_call_is_text_where_it_is_cut_off(tokenizer):
    for text in ("x <tool_call> is a tag", "x <tool_call>{}", '<tool_call>{"name": "Write", "a'):
        assert parse(tokenizer, text, reason="length") == [("text", text)]
        assert parse(tokenizer, text, reason="length", must_call=True) in ([], [("text", "x ")])


def test_without_tools_calls_are_text(tokenizer):
    text = f"<tool_call>{call(path='a')}</tool_call>"
    assert parse(tokenizer, text, tools=()) == [("text", text)]


@pytest.mark.parametrize(
    "body",
    [
        "Read\n<arg_key>path</arg_key>\n<arg_value>123</arg_value>\n<arg_key>limit</arg_key>\n"
        "<arg_value>5</arg_value>",
        "<function=Read>\n<parameter=path>\n123\n</parameter>\n<parameter=limit>\n5\n</parameter>\n</function>",
        '{"name": "Read", "arguments": {"path": 123, "limit": "5"}}',
        '{"name": "Read", "arguments": "{\\"path\\": \\"123\\", \\"limit\\": 5}"}',
        '{"name": "Read", "parameters": {"path": "123", "limit": 5.0}}',
    ],
)
def test_every_spelling_is_typed_by_the_schema(tokenizer, body):
    wanted = [("call", "Read", '{"path": "123", "limit": 5}')]
    assert parse(tokenizer, f"<tool_call>\n{body}\n</tool_call>") == wanted


def test_a_bare_function_of_qwens_coder(tokenizer):
    text = "Reading.\n<function=Read>\n<parameter=path>\na\n</parameter>\n</function>\n</tool_call>"
    wanted = [("text", "Reading."), ("call", "Read", '{"path": "a"}')]
    assert parse(tokenizer, text) == wanted
    assert parse(tokenizer, *text) == wanted


@pytest.mark.parametrize(
    ("key", "given", "value"),
    [
        ("path", "123", "123"),
        ("path", "null", "null"),
        ("path", '{"a": 1}', '{"a": 1}'),
        ("path", " indented\n  text", " indented\n  text"),
        ("limit", "7", 7),
        ("limit", "7.0", 7),
        ("limit", "seven", "seven"),
        ("ratio", "0.5", 0.5),
        ("deep", "true", True),
        ("deep", "True", True),
        ("items", "[1, 'a']", [1, "a"]),
        ("maybe", "null", None),
        ("maybe", "5", "5"),
        ("either", "5", "5"),
        ("count", "null", None),
        ("count", "5", 5),
        ("any", "5", "5"),
        ("any", "[5]", [5]),
        ("undeclared", "5", 5),
        ("undeclared", "word", "word"),
    ],
)
def test_bare_values(key, given, value):
    reader = ToolCallReader((READ,))
    for text in (
        f"Read<arg_key>{key}</arg_key><arg_value>{given}</arg_value>",
        f"<function=Read><parameter={key}>{given}</parameter></function>",
    ):
        calls = reader.read(text)
        assert calls is not None and json.loads(calls[0].arguments) == {key: value}


def test_a_tool_that_was_not_listed_can_be_called(tokenizer):
    # Deferred tools are told in a tool's result, not in the list.
    text = '<tool_call>{"name": "mcp__x.Search", "arguments": {"q": "Grüße"}}</tool_call>'
    assert parse(tokenizer, text) == [("call", "mcp__x.Search", '{"q": "Grüße"}')]


def test_arguments_are_always_valid_utf8(tokenizer):
    text = '<tool_call>{"name": "Read", "arguments": {"path": "\\ud800 é"}}</tool_call>'
    ((_, _, arguments),) = parse(tokenizer, text)
    arguments.encode()
    # Clients echo it, and a body that holds half a pair would be refused for good.
    assert json.loads(arguments) == {"path": "\ufffd é"}


@pytest.mark.parametrize("module", [json_tools, glm47, qwen3_coder, mistral])
def test_other_models_parsers(tokenizer, module):
    model = wrapper(tokenizer, module)
    if module is mistral:
        text = 'Hm. [TOOL_CALLS]Read[ARGS]{"path": "a"}'
        wanted = [("text", "Hm."), ("call", "Read", '{"path": "a"}')]
        assert parse(model, *text) == wanted
        assert parse(model, text[:-2], reason="length") == [
            ("text", "Hm."),
            ("cut", "Read", '{"path": "a', "{}"),
        ]
        return
    text = f"<tool_call>{call(path='a')}</tool_call>"
    assert parse(model, text) == [("call", "Read", '{"path": "a"}')]
    assert parse(model, "<tool_call>what is this</tool_call>") == [
        ("text", "<tool_call>what is this</tool_call>")
    ]


class wrapper(SimpleNamespace):
    """The demo's tokenizer with another model's tool parser."""

    def __init__(self, tokenizer, module):
        super().__init__(
            **{
                name: getattr(tokenizer, name)
                for name in (
                    *("think_start", "think_end", "eos_token_ids", "bos_token_id", "pad_token_id"),
                    *("all_special_ids", "encode", "backend_tokenizer", "added_tokens_decoder"),
                    "convert_ids_to_tokens",
                )
            },
            has_tool_calling=True,
            tool_call_start=module.tool_call_start,
            tool_call_end=module.tool_call_end,
            tool_parser=module.parse_tool_call,
            size=len(tokenizer),
        )

    def __len__(self):
        return self.size

    __hash__ = object.__hash__


def test_in_json_string():
    assert in_json_string('{"a": "b')
    assert in_json_string('{"a": "b\\"')
    assert not in_json_string('{"a": "b\\\\"')
    assert not in_json_string('say "')
