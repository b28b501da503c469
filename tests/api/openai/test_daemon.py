"""OpenAI's protocols as its SDK speaks them, with a real daemon and a real (tiny) model behind them."""

from __future__ import annotations

import base64
import re
from collections.abc import Iterator

import openai
import pytest
from daemon import Daemon, prose

LINES = 'start: line ("\\n" line)?\nline: "+" /[a-z]{1,4}/\n'
IS_LINES = re.compile(r"\+[a-z]{1,4}(\n\+[a-z]{1,4})?")
READ = {
    "name": "read",
    "parameters": {
        "type": "object",
        "properties": {"path": {"enum": ["a", "b"]}},
        "required": ["path"],
        "additionalProperties": False,
    },
}
USER = [{"role": "user", "content": "Hello"}]
QUIET = {"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}}


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with Daemon(tmp_path_factory.mktemp("daemon")) as running:
        yield running


@pytest.fixture(scope="module")
def client(daemon: Daemon) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{daemon.url}/v1", api_key="k", max_retries=0, timeout=300) as sdk:
        yield sdk


def test_prompts_of_one_request_are_as_each_alone(client: openai.OpenAI, daemon: Daemon):
    prompts = ["Once upon", prose(20), prose(20, seed=3)]
    asked = {"model": daemon.model, "max_tokens": 6, "temperature": 0}
    alone = [client.completions.create(prompt=prompt, **asked) for prompt in prompts]
    together = client.completions.create(prompt=prompts, n=2, **asked)
    texts = [one.choices[0].text for one in alone for _ in range(2)]
    assert [choice.text for choice in together.choices] == texts
    assert [choice.index for choice in together.choices] == list(range(6))
    assert together.usage.prompt_tokens == sum(one.usage.prompt_tokens for one in alone)
    streamed = dict.fromkeys(range(6), "")
    for chunk in client.completions.create(prompt=prompts, n=2, stream=True, **asked):
        for choice in chunk.choices:
            streamed[choice.index] += choice.text
    assert list(streamed.values()) == texts


def test_a_custom_tool_is_held_to_its_grammar(client: openai.OpenAI, daemon: Daemon):
    grammar = {"type": "grammar", "grammar": {"syntax": "regex", "definition": IS_LINES.pattern}}
    tool = {"type": "custom", "custom": {"name": "patch", "format": grammar}}
    answer = client.chat.completions.create(
        model=daemon.model,
        messages=USER,
        tools=[tool],
        tool_choice={"type": "custom", "custom": {"name": "patch"}},
        parallel_tool_calls=False,
        max_tokens=200,
        **QUIET,
    )
    (call,) = answer.choices[0].message.tool_calls
    assert answer.choices[0].finish_reason == "tool_calls"
    assert call.type == "custom" and call.custom.name == "patch" and IS_LINES.fullmatch(call.custom.input)
    # The next turn: the call and its result go back to the model.
    messages = [*USER, answer.choices[0].message, {"role": "tool", "tool_call_id": call.id, "content": "ok"}]
    after = client.chat.completions.create(
        model=daemon.model, messages=messages, tools=[tool], max_tokens=4, **QUIET
    )
    assert after.usage.prompt_tokens > answer.usage.prompt_tokens
    with pytest.raises(openai.BadRequestError, match="can't be enforced"):
        broken = {"type": "grammar", "grammar": {"syntax": "lark", "definition": "start: nobody"}}
        client.chat.completions.create(
            model=daemon.model,
            messages=USER,
            tools=[{"type": "custom", "custom": {"name": "patch", "format": broken}}],
            tool_choice="required",
        )


def test_functions_are_called_and_answered(client: openai.OpenAI, daemon: Daemon):
    asked = {"model": daemon.model, "functions": [READ], "max_tokens": 100, **QUIET}
    answer = client.chat.completions.create(messages=USER, function_call={"name": "read"}, **asked)
    (choice,) = answer.choices
    assert choice.finish_reason == "function_call"
    assert choice.message.function_call.name == "read"
    assert re.fullmatch(r'\{"path": ?"[ab]"\}', choice.message.function_call.arguments)
    messages = [*USER, choice.message, {"role": "function", "name": "read", "content": "text"}]
    after = client.chat.completions.create(messages=messages, function_call="none", **asked)
    assert after.usage.prompt_tokens > answer.usage.prompt_tokens


def test_items_and_files_go_to_the_model(client: openai.OpenAI, daemon: Daemon):
    asked = {"model": daemon.model, "max_output_tokens": 8, "temperature": 0, "reasoning": {"effort": "none"}}
    file = {"type": "input_file", "filename": "a.txt", "file_data": base64.b64encode(b"one two").decode()}
    said = {"role": "user", "content": [file]}
    first = client.responses.create(input=[said], **asked)
    more = {"role": "user", "content": "Go on."}
    references = [{"type": "item_reference", "id": item.id} for item in first.output]
    by_items = client.responses.create(input=[said, *references, more], **asked)
    by_response = client.responses.create(input=[more], previous_response_id=first.id, **asked)
    assert by_items.usage.input_tokens == by_response.usage.input_tokens > first.usage.input_tokens
    assert by_items.output_text == by_response.output_text
