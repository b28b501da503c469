"""Every dialect's word for thinking and for the conversation's name."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from omlxd.api.answer.local_fields import session_of
from omlxd.api.answer.thinking import thinking_of
from omlxd.api.anthropic import request as anthropic
from omlxd.api.fields.body import ParsedRequest
from omlxd.api.gemini import request as gemini
from omlxd.api.lmstudio import request as lmstudio
from omlxd.api.ollama.request import parse_chat, parse_generate
from omlxd.api.openai import chat_request, completions, llama_completion
from omlxd.api.responses import request as openai_responses
from omlxd.errors import InvalidRequest

HELLO = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}


def chat(headers=None, **more):
    return chat_request.parse(json.dumps({**HELLO, **more}).encode(), headers or {}).generate


@pytest.mark.parametrize(
    ("fields", "thinks"),
    [
        ({}, None),
        ({"enable_thinking": True}, True),
        ({"enable_thinking": False, "thinking": "high"}, False),
        ({"thinking": "off"}, False),
        ({"thinking": "xhigh"}, True),
        ({"thinking": True}, True),
        ({"thinking": 0}, False),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, True),
        ({"thinking": {"type": "disabled"}}, False),
        ({"thinking": {"type": "adaptive"}}, True),
        ({"reasoning_effort": "none"}, False),
        ({"reasoning_effort": "off"}, False),
        ({"reasoning_effort": "minimal"}, True),
        ({"reasoning_effort": "extreme"}, True),
        ({"reasoning": "low"}, True),
        ({"reasoning": "disabled"}, False),
        ({"reasoning": {"enabled": False, "effort": "high"}}, False),
        ({"reasoning": {"effort": "none"}}, False),
        ({"reasoning": {"level": "medium"}}, True),
        ({"reasoning": {"type": "auto"}}, True),
        ({"reasoning": {"summary": "auto"}}, None),
        ({"metadata": {"enable_thinking": "false"}}, False),
        ({"metadata": {"reasoning": {"effort": "low"}}}, True),
        ({"metadata": {"thinking": "no"}, "extra_body": {"thinking": "yes"}}, False),
        ({"extra_body": {"enable_thinking": False}}, False),
        ({"extra_body": {"reasoning_effort": "high"}}, True),
        ({"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}}, False),
        ({"thinking": "off", "extra_body": {"thinking": "on"}}, False),
        ({"metadata": {"thinking": "perhaps"}}, None),
        ({"metadata": "x", "extra_body": [1]}, None),
        ({"chat_template_kwargs": {"reasoning_effort": "none"}}, False),
        ({"metadata": {"metadata": {"thinking": "on"}}}, None),
    ],
)
def test_thinking(fields, thinks):
    assert chat(**fields).prompt.thinking is thinks


@pytest.mark.parametrize(
    "fields",
    [
        {"enable_thinking": False},
        {"thinking": {"type": "disabled"}},
        {"reasoning_effort": "none"},
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"metadata": {"enable_thinking": "false"}},
        {"extra_body": {"enable_thinking": False}},
        {"reasoning": {"effort": "high"}, "enable_thinking": False},
    ],
)
def test_thinking_of_responses(fields):
    body = json.dumps({"model": "m", "input": "Hi", **fields}).encode()
    assert openai_responses.parse(body, {}, lambda _: None).generate.prompt.thinking is False


def test_effort_reaches_the_template():
    assert chat(reasoning={"effort": "low"}).prompt.effort == "low"
    assert chat(reasoning_effort="high", reasoning={"effort": "low"}).prompt.effort == "high"
    assert chat(reasoning="high").prompt.effort == "high"
    assert chat(reasoning_effort="LOW").prompt.effort == "low"
    own = chat(reasoning_effort="Extreme").prompt
    assert (own.effort, own.effort_param) == ("Extreme", "reasoning_effort"), "a template may know it"


def test_anthropics_own_words():
    for kind, thinks in (("enabled", True), ("adaptive", True), ("disabled", False)):
        body = {**HELLO, "max_tokens": 5, "thinking": {"type": kind, "budget_tokens": 1024}}
        assert anthropic.parse(json.dumps(body).encode()).generate.prompt.thinking is thinks


@pytest.mark.parametrize(
    ("fields", "budget", "thinks"),
    [
        *(({name: 700}, 700, True) for name in ("thinking_budget", "thinking_budget_tokens")),
        *(({name: 700}, 700, True) for name in ("thinking_token_budget", "max_reasoning_tokens")),
        ({"reasoning": {"max_tokens": 700}}, 700, True),
        ({"reasoning": {"max_tokens": 700, "enabled": False}}, 700, False),
        ({"thinking": {"type": "enabled", "budget_tokens": 700}}, 700, True),
        ({"chat_template_kwargs": {"thinking_budget": 700}}, 700, True),
        ({"extra_body": {"thinking_budget": 700.0}}, 700, True),
        ({"thinking_budget": 700, "enable_thinking": False}, 700, False),
        ({"thinking_budget": 0}, 0, False),
        ({"thinking_budget": 0, "enable_thinking": True}, 0, False),
        ({"thinking_budget": -1}, None, None),
        ({"thinking_budget": 100, "max_reasoning_tokens": 6}, 6, True),
        ({"thinking_budget": 6, "max_reasoning_tokens": 0}, 0, False),
        ({"thinking_budget": -1, "reasoning": {"max_tokens": 6}}, 6, True),
        ({"chat_template_kwargs": {"thinking_budget": 6}, "extra_body": {"reasoning_budget": 5}}, 5, True),
        ({"thinking_budget": None, "reasoning_effort": "low"}, None, True),
    ],
)
def test_budgets_of_thinking(fields, budget, thinks):
    prompt = chat(**fields).prompt
    assert (prompt.thinking_budget, prompt.thinking) == (budget, thinks)


TALK = {"messages": [{"role": "user", "content": "Hi"}]}
DOORS: dict[str, tuple[Callable[[bytes], ParsedRequest], dict[str, Any]]] = {
    "chat": (chat_request.parse, TALK),
    "messages": (anthropic.parse, TALK | {"max_tokens": 5}),
    "responses": (openai_responses.parse, {"input": "Hi"}),
    "ollama chat": (parse_chat, TALK),
    "ollama generate": (parse_generate, {"prompt": "Hi"}),
    "lmstudio": (lmstudio.parse, {"input": "Hi"}),
    "completions": (completions.parse, {"prompt": "Hi"}),
    "llama": (llama_completion.parse, {"prompt": "Hi"}),
}
RAW = ("completions", "llama")
BUDGETS = (
    *("thinking_budget", "thinking_budget_tokens", "thinking_token_budget", "max_reasoning_tokens"),
    *("reasoning_budget", "reasoning.max_tokens", "chat_template_kwargs.thinking_budget"),
    *("extra_body.thinking_budget", "metadata.max_reasoning_tokens", "extra_body.reasoning.max_tokens"),
    *("options.thinking_budget", "thinking.budget_tokens"),
)


def at(door: str, path: str, value: Any) -> ParsedRequest:
    """The body of `door` with `value` at `path`, read."""
    for name in reversed(path.split(".")):
        value = {name: value}
    if path == "thinking.budget_tokens" and door == "messages":
        value["thinking"]["type"] = "enabled"
    parse, body = DOORS[door]
    return parse(json.dumps({"model": "m"} | body | value).encode())


@pytest.mark.parametrize("door", DOORS)
def test_thinking_at_every_door(door):
    """Doors by names: budgets are kept, and what is none is refused by its name."""
    strict = [
        ("include_reasoning", (*("no", "false"), 3)),
        ("reasoning", ([], 7)),
        ("reasoning.exclude", ("yes",)),
        ("reasoning.effort", ("no word",)),
        ("thinking", ("perhaps", ["on"])),
        ("thinking.type", ("bogus",)),
        ("think", (5, "silly", [1], {"a": 1})),
        ("reasoning_effort", ("no word",)),
        ("extra_body.include_reasoning", ("no",)),
    ]
    names = [
        name
        for name in BUDGETS
        if ("options" not in name or "ollama" in door)
        and not (door == "lmstudio" and name[:10] == "reasoning.")
    ]
    for name in names:
        with pytest.raises(InvalidRequest) as caught:
            at(door, name, "x")
        assert caught.value.param == name
        for given, read in ((9, (9, True)), (0, (0, False)), (-1, (None, None))):
            prompt: Any = at(door, name, given).generate.prompt
            read = (
                (None, True) if given < 0 and (door, name) == ("messages", "thinking.budget_tokens") else read
            )
            assert door in RAW or (prompt.thinking_budget, prompt.thinking) == read, (name, given)
    for name, values in strict:
        for value in values:
            with pytest.raises(InvalidRequest) as caught:
                at(door, name, value)
            assert caught.value.param and caught.value.param.startswith(name.partition(".")[0]), (name, value)
    if door in RAW:
        return
    assert at(door, "include_reasoning", False).generate.hides_thinking
    prompt: Any = at(door, "reasoning_effort", "None").generate.prompt
    assert (prompt.effort, prompt.thinking) == ("none", False)
    if door != "lmstudio":
        assert at(door, "reasoning.exclude", True).generate.hides_thinking
        prompt = at(door, "reasoning.effort", "none").generate.prompt
        assert prompt.thinking is False


def test_an_effort_of_claudes_asks_for_no_thought_but_none_forbids_it():
    for word, thinks in (("HIGH", None), ("none", False)):
        prompt: Any = at("messages", "output_config.effort", word).generate.prompt
        assert (prompt.effort, prompt.thinking) == (word.lower(), thinks)


def test_the_budget_of_gemini():
    body: dict[str, Any] = {"contents": [{"parts": [{"text": "Hi"}]}]}

    def read(**config: Any) -> Any:
        given = body | {"generationConfig": {"thinkingConfig": config}}
        prompt: Any = gemini.parse(stream=False)(json.dumps(given).encode(), {}).generate.prompt
        return prompt.thinking_budget, prompt.thinking, prompt.effort

    for budget, told in ((9, (9, True, "")), (0, (0, False, "")), (-1, (None, True, ""))):
        assert read(thinkingBudget=budget) == told
    assert read(thinkingBudget=9, thinkingLevel="LOW") == (9, True, "low")
    with pytest.raises(InvalidRequest, match=r"thinkingConfig\.thinkingBudget: give a whole number"):
        read(thinkingBudget=-7)
    with pytest.raises(InvalidRequest, match="'silly' is none of MINIMAL, LOW, MEDIUM, HIGH"):
        read(thinkingLevel="silly")


@pytest.mark.parametrize("value", ["many", -2, 1.5, True, [1]])
def test_a_budget_that_is_none_is_refused(value):
    for fields in ({"thinking_budget": value}, {"reasoning": {"max_tokens": value}}):
        with pytest.raises(InvalidRequest, match="a whole number of tokens"):
            chat(**fields)


def test_thoughts_may_be_left_out():
    assert chat(include_reasoning=False).hides_thinking and not chat(include_reasoning=True).hides_thinking
    assert chat(reasoning={"exclude": True}).hides_thinking
    assert chat(extra_body={"include_reasoning": False}).hides_thinking
    assert chat(include_reasoning=False).prompt.thinking is None, "it thinks all the same"
    body = json.dumps({**HELLO, "max_tokens": 5, "include_reasoning": False}).encode()
    assert anthropic.parse(body).generate.hides_thinking and parse_chat(body).generate.hides_thinking


@pytest.mark.parametrize(
    "key", ["session_id", "conversation_id", "thread_id", "chat_id", "conversation", "session"]
)
def test_session_keys_at_every_place(key):
    assert chat(**{key: "s1"}).session == "s1"
    assert chat(metadata={key: "s1"}).session == "s1"
    assert chat(extra_body={key: "s1"}).session == "s1"
    assert chat(extra_body={"metadata": {key: "s1"}}).session == ""
    assert chat(**{key: {"id": "s1"}}).session == "s1"
    assert chat(**{key: 7}).session == "7"
    assert chat(**{key: ["x"]}, user="u").session == "u"


def test_the_order_of_names():
    everything = {
        "prompt_cache_key": "key",
        "session_id": "own",
        "metadata": {"session_id": "nested"},
        "user": "u",
    }
    assert chat({"x-session-affinity": "header"}, **everything).session == "header"
    assert chat({"session_id": "codex"}, **everything).session == "codex"
    assert chat(**everything).session == "key"
    del everything["prompt_cache_key"]
    assert chat(**everything).session == "own"
    del everything["session_id"]
    assert chat(**everything).session == "nested"
    assert chat(user="u").session == "u"
    assert chat().session == ""


def test_the_other_endpoints_know_them_too():
    body = json.dumps({"model": "m", "prompt": "x", "session_id": "s1"}).encode()
    assert completions.parse(body, {}).generate.session == "s1"
    body = json.dumps({"model": "m", "input": "x", "metadata": {"session_id": "s1"}}).encode()
    assert openai_responses.parse(body, {}).generate.session == "s1"


def test_claude_code():
    user = json.dumps({"device_id": "d", "account_uuid": "a", "session_id": "from-metadata"})
    body = json.dumps({**HELLO, "max_tokens": 5, "metadata": {"user_id": user}}).encode()
    assert anthropic.parse(body, {}).generate.session == "from-metadata"
    headers = {
        "x-claude-code-session-id": "s1",
        "x-claude-code-agent-id": "a1",
        "x-claude-code-parent-agent-id": "a0",
    }
    generate = anthropic.parse(body, headers).generate
    assert (generate.session, generate.parent_agent) == ("s1/a1", "a0")


def test_plain_objects():
    assert thinking_of({}) is None and session_of({}) == ""
    assert session_of({"session": 10**5000}) == ""
    assert session_of({"session_id": True, "chat_id": "  c  "}) == "c"


@pytest.mark.parametrize("name", ["num_ctx", "num_keep", "num_batch", "num_gpu", "repeat_last_n"])
def test_a_field_that_is_ignored_is_an_integer_all_the_same(name):
    body = {"model": "m", "messages": [{"role": "user", "content": "Hi"}], "options": {name: 2.0}}
    parse_chat(json.dumps(body).encode())
    for value in (2.5, "2"):
        with pytest.raises(InvalidRequest, match=name):
            parse_chat(json.dumps({**body, "options": {name: value}}).encode())


def test_a_budget_of_thinking_is_an_integer():
    def read(budget):
        thinking = {"type": "enabled", "budget_tokens": budget}
        return anthropic.parse(json.dumps({**HELLO, "max_tokens": 5, "thinking": thinking}).encode())

    read(2.0)
    with pytest.raises(InvalidRequest, match="budget_tokens"):
        read(2.5)
