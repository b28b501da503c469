"""OpenAI bodies into requests, for chat and for legacy completions."""

import base64
import json

import pytest

from omlxd.api.openai import chat_request, completions
from omlxd.api.openai.fields import NOT_SERVED
from omlxd.chat import (
    Conversation,
    ImagePart,
    Message,
    RawPrompt,
    Sampling,
    TextPart,
    ThinkingPart,
    Tool,
    ToolCallPart,
    ToolResultPart,
)
from omlxd.errors import InvalidRequest

PNG = base64.b64encode(b"\x89PNG not really").decode()
IMAGE_AT = "messages.2.content.1.image_url"
SCHEMA = {"type": "object", "properties": {}}
TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": SCHEMA}}


def chat(headers=None, **body):
    body.setdefault("messages", [{"role": "user", "content": "hi"}])
    return chat_request.parse(json.dumps(body).encode(), headers or {})


def conversation(**body) -> Conversation:
    prompt = chat(**body).generate.prompt
    assert isinstance(prompt, Conversation)
    return prompt


def completion(**body):
    return completions.parse(json.dumps(body).encode(), {})


def refused(**body) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        chat(**body)
    return caught.value


def test_every_sampling_field():
    sampling = chat(
        max_tokens=9,
        temperature=0,
        top_p=0.5,
        top_k=-1,
        min_p=0.1,
        repetition_penalty=1.1,
        presence_penalty=1,
        frequency_penalty=-1,
        logit_bias={"5": -100, "7": 2.5},
        seed=-3,
        stop="END",
        logprobs=True,
        top_logprobs=2,
        n=1,
        response_format={"type": "text"},
    ).generate.sampling
    assert sampling.max_tokens == 9 and sampling.temperature == 0 and sampling.top_p == 0.5
    assert sampling.top_k == 0 and sampling.min_p == 0.1 and sampling.repetition_penalty == 1.1
    assert sampling.presence_penalty == 1 and sampling.frequency_penalty == -1
    assert sampling.logit_bias == {5: -100.0, 7: 2.5} and sampling.seed == -3
    assert sampling.stop == ("END",) and sampling.logprobs == 2


def test_nulls_are_absent_fields():
    names = """stream max_tokens max_completion_tokens temperature top_p top_k stop n tools tool_choice
    stream_options seed logit_bias response_format logprobs top_logprobs user functions modalities"""
    assert chat(**dict.fromkeys(names.split())) == chat()


def test_max_completion_tokens_wins():
    assert chat(max_tokens=5, max_completion_tokens=6).generate.sampling.max_tokens == 6


def test_messages():
    got = conversation(
        messages=[
            {"role": "developer", "content": "d"},
            {"role": "system", "content": [{"type": "text", "text": "s"}]},
            {
                "role": "user",
                "name": "ann",
                "content": [
                    {"type": "text", "text": "look"},
                    {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PNG}"}},
                ],
            },
            {
                "role": "assistant",
                "content": None,
                "reasoning_content": "hm",
                "tool_calls": [
                    {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}},
                    {"id": "c2", "type": "function", "function": {"name": "g", "arguments": ""}},
                ],
            },
            {"role": "tool", "tool_call_id": "c1", "content": "out"},
        ]
    ).messages
    assert got == (
        Message("system", (TextPart("d"),)),
        Message("system", (TextPart("s"),)),
        Message("user", (TextPart("look"), ImagePart(base64.b64decode(PNG), "image/png", IMAGE_AT))),
        Message(
            "assistant", (ThinkingPart("hm"), ToolCallPart("c1", "f", {"a": 1}), ToolCallPart("c2", "g", {}))
        ),
        Message("tool", (ToolResultPart("c1", "out"),)),
    )


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        (None, "auto"),
        ("auto", "auto"),
        ("none", "none"),
        ("required", "required"),
        ({"type": "function", "function": {"name": "f"}}, "named:f"),
    ],
)
def test_tools_and_choice(choice, expected):
    got = conversation(tools=[TOOL], tool_choice=choice)
    assert got.tools == (Tool("f", "d", SCHEMA),)
    assert got.tool_choice == expected


def allowed(*names, mode="auto"):
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_some_tools_are_allowed_and_all_stay_in_the_prompt(mode):
    tools = [TOOL, {"type": "function", "function": {"name": "g"}}]
    got = conversation(tools=tools, tool_choice=allowed("g", mode=mode))
    assert (got.tool_choice, got.allowed_tools) == (mode, ("g",))
    assert got.tools == conversation(tools=tools).tools
    assert refused(tools=tools, tool_choice=allowed("h", mode=mode)).param == "tool_choice"
    assert refused(tools=tools, tool_choice=allowed(mode=mode)).param == "tool_choice"
    assert refused(tools=tools, tool_choice=allowed("g", mode="some")).param == "tool_choice"


def test_verbosity_is_told_to_the_template():
    assert conversation(verbosity="low").template_args == {"verbosity": "low"}
    assert refused(verbosity="loud").param == "verbosity"


@pytest.mark.parametrize(
    ("body", "thinking", "effort", "args"),
    [
        ({}, None, "", {}),
        ({"enable_thinking": False}, False, "", {}),
        ({"chat_template_kwargs": {"enable_thinking": True, "style": "x"}}, True, "", {"style": "x"}),
        ({"chat_template_kwargs": {"enable_thinking": True}, "enable_thinking": False}, False, "", {}),
        ({"reasoning_effort": "high"}, True, "high", {}),
        ({"reasoning_effort": "none"}, False, "none", {}),
        ({"reasoning_effort": "low", "chat_template_kwargs": {"enable_thinking": False}}, False, "low", {}),
        (
            {"reasoning_effort": "low", "chat_template_kwargs": {"reasoning_effort": "max"}},
            True,
            "",
            {"reasoning_effort": "max"},
        ),
        ({"think": False}, False, "", {}),
        ({"think": True}, True, "", {}),
        ({"think": "high"}, True, "high", {}),
    ],
)
def test_thinking(body, thinking, effort, args):
    got = conversation(**body)
    assert (got.thinking, got.effort, got.template_args) == (thinking, effort, args)


def test_a_begun_answer():
    begun = [*[{"role": "user", "content": "Hi"}], {"role": "assistant", "content": "Once"}]
    assert not conversation(messages=begun).continue_final
    for asked in ({"continue_final_message": True}, {"add_generation_prompt": False}):
        both = {"continue_final_message": True, "add_generation_prompt": False}
        assert conversation(messages=begun, **asked).continue_final
        assert conversation(messages=begun, **both) == conversation(messages=begun, **asked)
        (param,) = asked
        assert refused(messages=[{"role": "user", "content": "Hi"}], **asked).param == param
        called = {"tool_calls": [{"id": "c", "function": {"name": "f", "arguments": "{}"}}]}
        assert (
            refused(messages=[*[{"role": "user", "content": "Hi"}], {**begun[-1], **called}], **asked).param
            == param
        )
        assert refused(messages=begun, response_format={"type": "json_object"}, **asked).param == param


def test_a_message_with_prefix_begins_the_answer():
    asked, begun = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Once", "prefix": True}
    both = conversation(messages=[asked, begun])
    assert both == conversation(messages=[asked, {**begun, "prefix": None}], continue_final_message=True)
    assert not conversation(messages=[asked, {**begun, "prefix": False}]).continue_final
    assert refused(messages=[asked, begun, asked]).param == "messages.1.prefix"
    assert refused(messages=[{**asked, "prefix": True}]).param == "messages.0.prefix"
    assert refused(messages=[asked, {**begun, "content": None}]).param == "messages.1.prefix"


def test_a_word_that_is_none_of_some_is_told_which_there_are():
    words = "use one of assistant, developer, function, system, tool, user"
    role = refused(messages=[{"role": "foo", "content": "x"}])
    assert role.message == f"messages.0.role: Invalid enum value 'foo'; {words}"
    call = {"type": "foo", "function": {"name": "f"}}
    told = refused(messages=[{"role": "assistant", "tool_calls": [call]}]).message
    assert told.endswith("tool_calls.0.type: Invalid enum value 'foo'; use one of custom, function")
    prediction = refused(prediction={"type": "text", "content": "x"})
    assert prediction.message == "prediction.type: it must be 'content', not 'text'"
    part = refused(messages=[{"role": "user", "content": [{"type": "foo"}]}])
    assert "content of type 'foo' is not supported" in part.message


def test_a_prediction_is_text_or_texts():
    for content in ("a = 2", [{"type": "text", "text": "a ="}, {"type": "text", "text": " 2"}]):
        request = chat(prediction={"type": "content", "content": content}).generate
        assert request.prediction == "a = 2"
    assert chat().generate.prediction == chat(prediction=None).generate.prediction == ""


def test_session_and_salt():
    got = chat({"x-session-affinity": "s"}, user="u", cache_salt="salt").generate
    assert (got.session, got.cache_salt) == ("s", "salt")
    assert chat(user="u").generate.session == "u"
    assert chat(user="u", prompt_cache_key="k").generate.session == "k"


def with_image(url):
    return {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}]}


def with_call(arguments):
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return {"messages": [{"role": "assistant", "content": None, "tool_calls": [call]}]}


@pytest.mark.parametrize(
    "text", ['{"path": "/tm', "[1]", "[" * 100_000, "null", '{"a": 1' + "0" * 5000 + "}"]
)
def test_a_broken_call_of_an_earlier_turn_is_kept_as_text(text: str):
    # The limit of tokens may have cut it off, and the client sends it back with every further turn.
    (message,) = chat(**with_call(text)).generate.prompt.messages
    assert message.parts[0].arguments == {"input": text}


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
def test_minus_one_is_no_limit(field: str):
    assert chat(**{field: -1}).generate.sampling.max_tokens is None


def test_fields_that_ask_for_no_other_answer_are_taken():
    assert chat(best_of=2, n=2, truncate_prompt_tokens=-1, typical_p=1.0).n == 2
    for nothing in (None, 0, False, "", []):
        assert chat(**dict.fromkeys(NOT_SERVED, nothing), echo=nothing).n == 1


def test_documents_go_to_the_template():
    prompt = chat(documents=[{"text": "a", "id": 10**40}]).generate.prompt
    told = {"documents": [{"text": "a", "id": 1e40}]}
    assert isinstance(prompt, Conversation) and prompt.template_args == told


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": "user"}]}, "messages.0.content"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.tool_call_id"),
        ({"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]}, "messages.0.content.0.type"),
        (with_image("http://127.0.0.1:1/x.png"), "messages.0.content.0.image_url"),
        (with_image("file:///etc/passwd"), "messages.0.content.0.image_url"),
        (with_image("data:text/html;base64,AAAA"), "messages.0.content.0.image_url"),
        (with_image("data:image/png;base64,%%"), "messages.0.content.0.image_url"),
        (with_call({"a": 10**400}), "messages.0.tool_calls.0.function.arguments"),
        ({"n": 9}, "n"),
        ({"n": 0}, "n"),
        ({"best_of": 4}, "best_of"),
        ({"best_of": 1, "n": 2}, "best_of"),
        *(({name: 4}, name) for name in NOT_SERVED),
        ({"echo": True}, "echo"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "add_generation_prompt"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {}}},
            "response_format.json_schema.schema",
        ),
        ({"response_format": {"type": ["x"]}}, "response_format.type"),
        ({"response_format": {"type": "structural_tag"}}, "response_format.type"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_completion_tokens": -5}, "max_completion_tokens"),
        ({"temperature": 2.1}, "temperature"),
        ({"top_p": -0.1}, "top_p"),
        ({"min_p": 1}, "min_p"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"logit_bias": {"1": 101}}, "logit_bias.*"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"seed": 10**30}, "seed"),
        ({"stop": ["x"] * 10_000}, "stop"),
        ({"stop": ""}, "stop"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": "sometimes"}, "tool_choice"),
        (
            {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}},
            "tool_choice",
        ),
        ({"tools": [{"type": "web_search"}]}, "tools.0.type"),
        ({"modalities": ["audio"]}, "modalities"),
        ({"prediction": "a = 2"}, "prediction"),
        ({"prediction": {"type": "file", "content": "a"}}, "prediction.type"),
        ({"prediction": {"type": "content", "content": 1}}, "prediction.content"),
        ({"chat_template_kwargs": {"enable_thinking": 1}}, "chat_template_kwargs.enable_thinking"),
    ],
)
def test_bad_fields_are_named(body, param):
    error = refused(**body)
    assert error.param == param
    assert param in error.message


def test_a_tool_of_another_type_is_told_as_such():
    assert "a tool of type 'web_search' is not served" in refused(tools=[{"type": "web_search"}]).message


# --------------------------------------------------------------------------- legacy completions


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("Once", RawPrompt("Once")),
        (["Once"], RawPrompt("Once")),
        ([1, 2, 3], RawPrompt(tokens=(1, 2, 3))),
        ([[1, 2, 3]], RawPrompt(tokens=(1, 2, 3))),
        ([7], RawPrompt(tokens=(7,))),
    ],
)
def test_prompts(prompt, expected):
    assert completion(prompt=prompt).generate.prompt == expected


def test_several_prompts():
    asked = completion(prompt=["a", "b", [1, 2]], n=2, echo=True)
    assert asked.generate.prompt == RawPrompt("a", echo=True)
    assert asked.more_prompts == (RawPrompt("b", echo=True), RawPrompt(tokens=(1, 2), echo=True))
    assert (asked.n, asked.answers) == (2, 6)
    assert completion(prompt=["a"] * 128).answers == 128
    assert completion(prompt=["a", ""]).more_prompts == (RawPrompt(""),)


def test_completion_options():
    parsed = completion(
        prompt="a", echo=True, stream=True, stream_options={"include_usage": True}, max_tokens=3
    )
    assert parsed.generate.prompt == RawPrompt("a", echo=True)
    assert parsed.stream and parsed.include_usage
    assert parsed.generate.sampling.max_tokens == 3
    assert completion(prompt="a").generate.sampling == Sampling(usual_max_tokens=16)
    assert completion(prompt="a", max_tokens=-1).generate.sampling == Sampling()
    assert completion(prompt="a", logprobs=3).generate.sampling.logprobs == 3


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [""]}, "prompt"),
        ({"prompt": [[1], [-2]]}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt"),
        ({"prompt": [["a"], ["b"]]}, "prompt"),
        ({"prompt": ["a"] * 129}, "prompt"),
        ({"prompt": ["a"] * 43, "n": 3}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": [1.5]}, "prompt"),
        ({"prompt": [10**30]}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"prompt": "a", "suffix": "b"}, "suffix"),
        ({"prompt": "a", "best_of": 2}, "best_of"),
        ({"prompt": "a", "use_beam_search": True}, "use_beam_search"),
        ({"prompt": "a", "echo": True, "logprobs": 1}, "logprobs"),
        ({"prompt": "a", "response_format": {"type": "xml"}}, "response_format.type"),
    ],
)
def test_bad_completion_fields_are_named(body, param):
    with pytest.raises(InvalidRequest) as caught:
        completion(**body)
    assert caught.value.param == param
