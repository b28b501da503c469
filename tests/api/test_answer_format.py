"""Each protocol's spelling of what the answer must be, and of tools that must be called."""

import json

import pytest

from omlxd.api.anthropic import request as anthropic
from omlxd.api.openai import chat_request, completions
from omlxd.api.responses import request as openai_responses
from omlxd.chat import AnswerFormat, Conversation
from omlxd.errors import InvalidRequest

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
ANY = {"type": "object"}
USER = [{"role": "user", "content": "hi"}]


def chat(**body):
    return chat_request.parse(json.dumps({"messages": USER, **body}).encode()).generate


def completion(**body):
    return completions.parse(json.dumps({"prompt": "a", **body}).encode()).generate


def responses(**body):
    return openai_responses.parse(json.dumps({"input": "hi", **body}).encode()).generate


def messages(**body):
    return anthropic.parse(json.dumps({"messages": USER, **body}).encode()).generate


def json_format(param: str, schema=None, strict: bool = False) -> AnswerFormat:
    schema = SCHEMA if schema is None else schema
    return AnswerFormat("json", schema=schema, param=param, strict=strict)


NAMED = {"type": "json_schema", "json_schema": {"name": "n", "strict": True, "schema": SCHEMA}}
FLAT = {"type": "json_schema", "name": "n", "schema": SCHEMA}


@pytest.mark.parametrize(
    ("generate", "expected"),
    [
        (chat(), None),
        (chat(response_format={"type": "text"}), None),
        (chat(response_format=None), None),
        (chat(response_format={"type": "json_object"}), json_format("response_format", ANY)),
        (chat(response_format={"type": "json_object", "schema": SCHEMA}), json_format("response_format")),
        (chat(response_format=NAMED), json_format("response_format", strict=True)),
        (completion(response_format=NAMED), json_format("response_format", strict=True)),
        (responses(text={"format": FLAT}), json_format("text.format")),
        (responses(text={"format": {"type": "text"}, "verbosity": "low"}), None),
        (messages(output_config={"effort": "high", "format": FLAT}), json_format("output_config.format")),
        (messages(output_config={"effort": "high"}), None),
        (messages(output_format=FLAT), json_format("output_format")),
        (chat(guided_json=SCHEMA), json_format("guided_json")),
        (chat(guided_json=json.dumps(SCHEMA)), json_format("guided_json")),
        (completion(guided_regex="a+"), AnswerFormat("regex", text="a+", param="guided_regex")),
        (chat(guided_choice=["a", "b"]), AnswerFormat("choice", choices=("a", "b"), param="guided_choice")),
        (chat(guided_grammar="start: A"), AnswerFormat("lark", text="start: A", param="guided_grammar")),
        (chat(structured_outputs={"json": SCHEMA}), json_format("structured_outputs")),
        (chat(structured_outputs={"json_object": True}), json_format("structured_outputs", ANY)),
        (
            chat(structured_outputs={"choice": ["a"]}),
            AnswerFormat("choice", choices=("a",), param="structured_outputs"),
        ),
    ],
)
def test_formats(generate, expected):
    assert generate.format == expected


@pytest.mark.parametrize(
    ("parse", "body", "param"),
    [
        (chat, {"response_format": NAMED, "guided_regex": "a"}, "guided_regex"),
        (chat, {"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
        (chat, {"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag"),
        (chat, {"guided_choice": []}, "guided_choice"),
        (chat, {"guided_json": "{"}, "guided_json"),
        (chat, {"guided_json": "[1]"}, "guided_json"),
        (chat, {"guided_regex": ""}, "guided_regex"),
        (chat, {"guided_grammar": "x" * 100_001}, "guided_grammar"),
        (responses, {"response_format": NAMED, "text": {"format": FLAT}}, "text.format"),
        (messages, {"output_format": FLAT, "output_config": {"format": FLAT}}, "output_format"),
        (messages, {"output_format": {"type": "json_schema"}}, "output_format.schema"),
        (messages, {"output_config": {"format": {"type": "xml"}}}, "output_config.format.type"),
    ],
)
def test_refusals_name_the_field(parse, body, param):
    with pytest.raises(InvalidRequest) as refused:
        parse(**body)
    assert refused.value.param == param


def choice_of(generate) -> tuple[str, bool]:
    assert isinstance(generate.prompt, Conversation)
    return generate.prompt.tool_choice, generate.prompt.parallel_calls


def test_tools_that_must_be_called_and_once():
    tool = {"type": "function", "function": {"name": "f", "parameters": SCHEMA, "strict": True}}
    flat = {"type": "function", "name": "f", "parameters": SCHEMA, "strict": True}
    inner = {"type": "namespace", "name": "ns", "tools": [{**flat, "name": "g", "strict": False}]}
    own = {"name": "f", "input_schema": SCHEMA, "strict": True}
    for generate in (chat(tools=[tool]), responses(tools=[flat]), messages(tools=[own])):
        assert choice_of(generate) == ("auto", True)
        assert generate.prompt.tools[0].strict
    assert choice_of(chat(tools=[tool], parallel_tool_calls=False)) == ("auto", False)
    tools = [flat, inner, {"type": "custom", "name": "c"}]
    for given, expected in (
        ("required", "required"),
        ({"type": "function", "name": "f"}, "named:f"),
        ({"type": "function", "name": "g", "namespace": "ns"}, "named:ns__g"),
        ({"type": "custom", "name": "c"}, "named:c"),
    ):
        generate = responses(tools=tools, tool_choice=given, parallel_tool_calls=False)
        assert choice_of(generate) == (expected, False)
    any_tool = {"type": "any", "disable_parallel_tool_use": True}
    assert choice_of(messages(tools=[own], tool_choice=any_tool)) == ("required", False)
