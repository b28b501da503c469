"""Every field and block that the anthropic SDK knows: read, of no meaning here, or refused by name.

The tables are held against the SDK's own types, so that an update of it that brings something new fails
here until somebody has decided what becomes of it.
"""

from __future__ import annotations

import copy
import json
from typing import Any, Literal

import anthropic_sdk as sdk
import pytest

from omlxd.api.anthropic import request
from omlxd.api.fields.body import ParsedRequest
from omlxd.errors import InvalidRequest

Fate = Literal["read", "ignored", "refused"]

SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}}
FORMAT = {"type": "json_schema", "schema": SCHEMA}
BODY: dict[str, Any] = {
    "model": "m",
    "max_tokens": 9,
    "messages": [{"role": "user", "content": "hi"}],
    "tools": [{"name": "f", "input_schema": SCHEMA}, {"name": "g", "input_schema": SCHEMA}],
}


def parse(body: dict[str, Any]) -> ParsedRequest:
    return request.parse(json.dumps(body).encode())


def check(body: dict[str, Any], before: dict[str, Any], fate: Fate, param: str = "") -> None:
    """What became of what `body` has and `before` has not."""
    if fate == "refused":
        with pytest.raises(InvalidRequest) as caught:
            parse(body)
        assert caught.value.param == param and caught.value.message.startswith(param)
        assert len(caught.value.message) > len(param) + 15
    elif fate == "read":
        assert parse(body) != parse(before)
    else:
        assert parse(body) == parse(before)


# --------------------------------------------------------------------------- the body

FIELDS: dict[str, tuple[Fate, Any]] = {
    "model": ("read", "other"),
    "messages": ("read", [{"role": "user", "content": "other"}]),
    "max_tokens": ("read", 5),
    "stream": ("read", True),
    "system": ("read", "s"),
    "stop_sequences": ("read", ["x"]),
    "metadata": ("read", {"user_id": "u"}),
    "thinking": ("read", {"type": "adaptive"}),
    "tool_choice": ("read", {"type": "any"}),
    "tools": ("read", [{"name": "h", "input_schema": SCHEMA}]),
    "output_config": ("read", {"format": FORMAT}),
    "thread": ("read", {"type": "create"}),
    # A summary is wanted and not an answer, or something runs elsewhere.
    "compaction": ("refused", {"type": "summarize"}),
    "container": ("refused", {"id": "c", "skills": [{"type": "anthropic", "skill_id": "pptx"}]}),
    "mcp_servers": ("refused", [{"type": "url", "url": "https://a.example", "name": "n"}]),
    # Nothing of the answer depends on it, or it is of what runs at Anthropic.
    "cache_control": ("ignored", {"type": "ephemeral"}),
    "context_management": ("ignored", {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}),
    "betas": ("ignored", ["context-1m-2025-08-07"]),
    "billing_policy": ("ignored", {"type": "billing_policy", "bill_to": "self"}),
    "diagnostics": ("ignored", {"previous_message_id": "msg_1"}),
    "fallback_credit_token": ("ignored", "t"),
    "fallbacks": ("ignored", [{"model": "claude-haiku-5-5"}]),
    "inference_geo": ("ignored", "eu"),
    "service_tier": ("ignored", "standard_only"),
    "speed": ("ignored", "fast"),
    "user_profile_id": ("ignored", "p"),
    "workspace_id": ("ignored", "w"),
}
OF_OLD: dict[str, tuple[Fate, Any]] = {
    "temperature": ("read", 0.5),
    "top_p": ("read", 0.5),
    "top_k": ("read", 5),
    "output_format": ("read", FORMAT),
}
"""Fields that the SDK no longer has, and that clients send."""


def test_every_field_of_a_body_is_in_the_table():
    assert {name for body in sdk.BODIES for name in sdk.fields(body)} == set(FIELDS)


@pytest.mark.parametrize("name", [*FIELDS, *OF_OLD])
def test_a_field_of_a_body(name):
    fate, value = (FIELDS | OF_OLD)[name]
    check({**BODY, name: value}, BODY, fate, name)
    if name != "messages":
        parse({**BODY, name: None})


@pytest.mark.parametrize("edit", ["clear_tool_uses_20250919", "clear_thinking_20251015", "compact_20260112"])
def test_no_edit_of_the_context_is_made_or_refused(edit):
    check({**BODY, "context_management": {"edits": [{"type": edit}]}}, BODY, "ignored")


def test_a_container_without_skills_is_of_no_meaning():
    for container in ("container_1", {"id": "c"}, {"id": None, "skills": []}, {"skills": None}):
        check({**BODY, "container": container}, BODY, "ignored")


INNER: dict[str, dict[str, tuple[Fate, Any, Any]]] = {
    "output_config": {
        "format": ("read", {}, FORMAT),
        "effort": ("read", {}, "high"),
        "task_budget": ("ignored", {}, {"type": "tokens", "total": 20000}),
    },
    "metadata": {"user_id": ("read", {}, "u")},
    "context_management": {"edits": ("ignored", {}, [])},
    "cache_control": {"type": ("ignored", {}, "ephemeral"), "ttl": ("ignored", {}, "1h")},
}
"""Field → its own fields → (fate, without it, its value)."""


@pytest.mark.parametrize("name", INNER)
def test_the_fields_of_a_field(name):
    assert {key for kind in sdk.members(tuple_of(sdk.everywhere(name))) for key in sdk.fields(kind)} == set(
        INNER[name]
    )
    for key, (fate, bare, value) in INNER[name].items():
        check({**BODY, name: {**bare, key: value}}, {**BODY, name: bare}, fate)


def tuple_of(kinds: list[Any]) -> Any:
    return tuple[tuple(kinds)]


# --------------------------------------------------------------------------- thinking, the choice of tools

THINKING = {"enabled": True, "adaptive": True, "disabled": False, "between_tools": False}
"""`between_tools` is `disabled` at Anthropic too, but for how short updates are shown."""


def test_thinking():
    known = sdk.variants(*sdk.everywhere("thinking"))
    assert set(known) == set(THINKING)
    more = {
        "budget_tokens": 2000,
        "display": "omitted",
        "block_binding": {"prefix_mismatch_behavior": "error"},
    }
    for kind, wanted in THINKING.items():
        given = {"type": kind} | {key: more[key] for key in known[kind]}
        prompt: Any = parse({**BODY, "thinking": given}).generate.prompt
        assert prompt.thinking is wanted
    check({**BODY, "thinking": {"type": "of_the_future"}}, BODY, "refused", "thinking.type")


CHOICES = {"auto": "auto", "any": "required", "tool": "named:g", "none": "none"}


def test_tool_choice():
    known = sdk.variants(*sdk.everywhere("tool_choice"))
    assert set(known) == set(CHOICES) and set().union(*known.values()) == {
        "name",
        "disable_parallel_tool_use",
    }
    for kind, wanted in CHOICES.items():
        for one_call in (False, True):
            given = {"type": kind, "name": "g", "disable_parallel_tool_use": one_call}
            prompt: Any = parse({**BODY, "tool_choice": given}).generate.prompt
            assert prompt.tool_choice == wanted and prompt.parallel_calls is not one_call
            assert len(prompt.tools) == 2
    check({**BODY, "tool_choice": {"type": "x"}}, BODY, "refused", "tool_choice.type")


# --------------------------------------------------------------------------- tools

TOLD = {
    *("custom", "bash_20241022", "bash_20250124", "memory_20250818"),
    *("text_editor_20241022", "text_editor_20250124", "text_editor_20250429", "text_editor_20250728"),
}
"""Types of tools that the model is told of; all others run at Anthropic, or need images."""

TOOL_FIELDS: dict[str, tuple[Fate, Any]] = {
    "description": ("read", "d"),
    "input_examples": ("read", [{"a": "x"}]),
    "strict": ("read", True),
    "defer_loading": ("read", True),
    "cache_control": ("ignored", {"type": "ephemeral"}),
    "allowed_callers": ("ignored", ["code_execution_20260120"]),
    "eager_input_streaming": ("ignored", True),
    "max_characters": ("ignored", 100),
}


def test_every_type_of_tool_is_told_or_left_out():
    known = sdk.variants(*sdk.everywhere("tools"))
    assert known.keys() >= TOLD
    for kind in known:
        tool = {"type": kind, "name": "n"} | ({"input_schema": SCHEMA} if kind == "custom" else {})
        check({**BODY, "tools": [*BODY["tools"], tool]}, BODY, "read" if kind in TOLD else "ignored")


def test_the_fields_of_tools_that_are_told():
    known = sdk.variants(*sdk.everywhere("tools"))
    for kind in TOLD:
        bare = {"type": kind, "name": "n"} | ({"input_schema": SCHEMA} if kind == "custom" else {})
        for name in known[kind] - {"name", "input_schema"}:
            fate, value = TOOL_FIELDS[name]
            check({**BODY, "tools": [{**bare, name: value}]}, {**BODY, "tools": [bare]}, fate)
        check({**BODY, "tools": [{**bare, "name": "x"}]}, {**BODY, "tools": [bare]}, "read")


# --------------------------------------------------------------------------- messages and blocks

SERVER = {"tool_use_id": "t", "content": []}
IMAGE = {"type": "base64", "media_type": "image/png", "data": "AAAA"}
BLOCKS: dict[str, tuple[str, Fate, dict[str, Any]]] = {
    "text": ("user", "read", {"text": "x"}),
    "image": ("user", "read", {"source": IMAGE}),
    "document": ("user", "read", {"source": {"type": "text", "media_type": "text/plain", "data": "x"}}),
    "search_result": ("user", "read", {"source": "s", "title": "t", "content": []}),
    "tool_result": ("user", "read", {"tool_use_id": "t", "content": "x"}),
    "thinking": ("assistant", "read", {"thinking": "x", "signature": ""}),
    "redacted_thinking": ("assistant", "ignored", {"data": "x"}),
    "tool_use": ("assistant", "read", {"id": "t", "name": "f", "input": {}}),
    "compaction": ("assistant", "read", {"content": "x"}),
    "tool_addition": ("system", "read", {"tool": {"type": "tool_reference", "name": "f"}}),
    "tool_removal": ("system", "read", {"tool": {"type": "tool_reference", "name": "f"}}),
    "container_upload": ("user", "refused", {"file_id": "f"}),
    "server_tool_use": ("assistant", "ignored", {"id": "t", "name": "web_search", "input": {}}),
    "mcp_tool_use": ("assistant", "ignored", {"id": "t", "name": "n", "server_name": "s", "input": {}}),
    "mcp_tool_listing": ("assistant", "ignored", {"mcp_server_name": "s", "tools": []}),
    "fallback": ("assistant", "ignored", {"from": {"model": "a"}, "to": {"model": "b"}}),
    **{
        f"{name}_tool_result": ("assistant", "ignored", SERVER)
        for name in (
            *("web_search", "web_fetch", "code_execution", "bash_code_execution", "advisor", "mcp"),
            *("text_editor_code_execution", "tool_search"),
        )
    },
}
"""Type → (role in which it stands, its fate, its fields)."""

BLOCK_FIELDS: dict[tuple[str, str], Any] = {
    ("text", "text"): "other",
    ("image", "source"): {**IMAGE, "data": "BBBB"},
    ("document", "source"): {"type": "text", "media_type": "text/plain", "data": "other"},
    ("document", "title"): "t",
    ("document", "context"): "c",
    ("search_result", "source"): "other",
    ("search_result", "title"): "other",
    ("search_result", "content"): [{"type": "text", "text": "other"}],
    ("tool_result", "tool_use_id"): "other",
    ("tool_result", "content"): "other",
    ("tool_result", "is_error"): True,
    ("thinking", "thinking"): "other",
    ("thinking", "signature"): "other",
    ("tool_use", "id"): "other",
    ("tool_use", "name"): "g",
    ("tool_use", "input"): {"a": "x"},
    ("compaction", "content"): "other",
    ("compaction", "tool_changes"): [
        {"type": "tool_removal", "tool": {"type": "tool_reference", "name": "f"}}
    ],
    ("tool_addition", "tool"): {"type": "tool_reference", "name": "g"},
    ("tool_removal", "tool"): {"type": "tool_reference", "name": "g"},
}
"""Fields of blocks that are read. All others are of no meaning, whatever they hold."""


def test_every_block_is_in_the_table():
    known = sdk.variants(*(sdk.fields(kind)["content"] for kind in sdk.messages()))
    assert set(known) == set(BLOCKS)
    for kind, field in BLOCK_FIELDS:
        assert field in known[kind]


def with_block(role: str, *blocks: dict[str, Any]) -> dict[str, Any]:
    first = {"role": role, "content": [{"type": "text", "text": "first"}, *blocks]}
    return {**BODY, "messages": [first, {"role": "user", "content": "hi"}]}


@pytest.mark.parametrize("kind", BLOCKS)
def test_a_block_and_its_fields(kind):
    role, fate, own = BLOCKS[kind]
    block = {"type": kind, **own}
    check(with_block(role, block), with_block(role), fate, "messages.0.content.1")
    if fate == "refused":
        return
    known = sdk.variants(*(sdk.fields(message)["content"] for message in sdk.messages()))[kind]
    for field in known:
        if (kind, field) in BLOCK_FIELDS:
            other = {**block, field: BLOCK_FIELDS[kind, field]}
            check(with_block(role, other), with_block(role, block), "read")
        elif field not in own:
            other = {**block, field: [{"of": "any kind"}, 1]}
            check(with_block(role, other), with_block(role, block), "ignored")


@pytest.mark.parametrize("kind", BLOCKS)
@pytest.mark.parametrize("role", ["user", "assistant", "system"])
def test_a_block_in_a_role_where_it_has_no_meaning_is_refused_by_name(kind, role):
    _, fate, own = BLOCKS[kind]
    try:
        parse(with_block(role, {"type": kind, **own}))
    except InvalidRequest as error:
        assert error.param == "messages.0.content.1"
        assert fate == "refused" or kind in error.message
        assert fate != "ignored" or role == "system" or kind == "redacted_thinking"


def test_blocks_in_the_result_of_a_tool():
    told = {
        "text": {"text": "x"},
        "image": {"source": IMAGE},
        "search_result": {"source": "s", "title": "t", "content": []},
        "document": {"source": {"type": "content", "content": "x"}},
        "tool_reference": {"tool_name": "f"},
        "browser_state": {"tabs": [{"tab_id": "1", "title": "t", "url": "u", "active": True}]},
    }
    assert set(sdk.variants(sdk.fields(sdk.RESULT)["content"])) == set(told)

    def result(*blocks: Any) -> dict[str, Any]:
        return with_block("user", {"type": "tool_result", "tool_use_id": "t", "content": list(blocks)})

    for kind, own in told.items():
        check(result({"type": kind, **own}), result(), "read")
        noise = {
            "cache_control": {"type": "ephemeral"},
            "citations": {"enabled": True},
            "transformations": {},
        }
        check(result({"type": kind, **own, **noise}), result({"type": kind, **own}), "ignored")
    check(result({"type": "tool_use"}), result(), "refused", "messages.0.content.1.content.0.type")


MESSAGE_FIELDS: dict[str, tuple[Fate, Any]] = {
    "clear_at": ("read", "next_user_message"),
    "output_config": ("ignored", {"effort": "low"}),
}


def test_the_fields_of_messages():
    known = {name for kind in sdk.messages() for name in sdk.fields(kind)}
    assert known == {"role", "content", *MESSAGE_FIELDS}
    before = with_block("system")
    for name, (fate, value) in MESSAGE_FIELDS.items():
        body = copy.deepcopy(before)
        body["messages"][0][name] = value
        check(body, before, fate)


# --------------------------------------------------------------------------- headers


@pytest.mark.parametrize("version", ["2023-06-01", "2026-10-21", "of the future"])
def test_headers_of_versions_and_betas_change_nothing(version):
    headers = {"anthropic-version": version, "anthropic-beta": "context-1m-2025-08-07,files-api-2025-04-14"}
    content = json.dumps(BODY).encode()
    assert request.parse(content, headers) == request.parse(content, {})
