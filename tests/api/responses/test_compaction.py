"""Compaction of Codex: one item that is a summary, and understood when it comes back."""

from __future__ import annotations

import json
from typing import Any

import pytest
from app_client import client
from fake_engine import USAGE, FakeEngine, app_of

from omlxd.api.responses.request import parse
from omlxd.chat import Conversation, Finished, ReasoningDelta, TextDelta, TextPart
from omlxd.errors import InvalidRequest

SCRIPT = [ReasoningDelta("hm"), TextDelta("We read "), TextDelta("two files."), Finished("stop", USAGE)]
TURNS = [{"role": "user", "content": "read"}, {"role": "assistant", "content": "done"}]
TOOL = {"type": "function", "name": "read", "parameters": {"type": "object"}}


def prompt_of(engine: FakeEngine) -> Conversation:
    prompt = engine.requests[-1].prompt
    assert isinstance(prompt, Conversation)
    return prompt


def last_text(engine: FakeEngine) -> str:
    part = prompt_of(engine).messages[-1].parts[-1]
    assert isinstance(part, TextPart)
    return part.text


async def ask(path: str, engine: FakeEngine, **fields: Any) -> Any:
    async with client(app_of(engine)) as http:
        answer = await http.post(path, json={"model": "tiny", "store": False, **fields})
    if fields.get("stream"):
        lines = [line for line in answer.text.splitlines() if line.startswith("data: ")]
        return [json.loads(line[6:]) for line in lines]
    return answer.json()


async def test_a_trigger_is_answered_with_one_compaction_item_streamed_or_not():
    engine = FakeEngine(SCRIPT)
    given = [*TURNS, {"type": "compaction_trigger"}]
    whole = await ask("/v1/responses", engine, input=given, tools=[TOOL])
    (item,) = whole["output"]
    assert item["type"] == "compaction" and whole["status"] == "completed"
    assert "two files" not in json.dumps(whole)
    prompt = prompt_of(engine)
    assert last_text(engine).startswith("Summarise this conversation")
    assert prompt.tool_choice == "none" and prompt.tools[0].name == "read" and len(prompt.messages) == 3
    events = await ask("/v1/responses", engine, input=given, stream=True)
    assert [event["type"] for event in events if "item" in event] == [
        "response.output_item.added",
        "response.output_item.done",
    ]
    assert events[-1]["type"] == "response.completed"
    assert events[-1]["response"]["output"][0]["encrypted_content"] == item["encrypted_content"]


async def test_the_item_stands_for_what_was_before_it():
    engine = FakeEngine(SCRIPT)
    (item,) = (await ask("/v1/responses/compact", engine, input=TURNS))["output"]
    await ask("/v1/responses", engine, input=[item, {"role": "user", "content": "go on"}])
    messages = prompt_of(engine).messages
    assert [message.role for message in messages] == ["user", "user"]
    first = messages[0].parts[0]
    assert isinstance(first, TextPart)
    assert first.text == "Summary of the conversation so far:\n\nWe read two files."


async def test_the_older_path():
    engine = FakeEngine(SCRIPT)
    for given in ("read", TURNS):
        answer = await ask("/v1/responses/compact", engine, input=given, instructions="s")
        assert answer["object"] == "response.compaction" and len(answer["output"]) == 1
        assert prompt_of(engine).messages[0].role == "system"


async def test_a_trigger_stands_at_the_end_alone():
    answer = await ask("/v1/responses", FakeEngine(SCRIPT), input=[{"type": "compaction_trigger"}, *TURNS])
    assert answer["error"]["param"] == "input.0.type"


async def test_a_stored_summary_is_what_a_next_response_follows():
    engine = FakeEngine(SCRIPT)
    async with client(app_of(engine)) as http:
        asked = {"model": "tiny", "input": [*TURNS, {"type": "compaction_trigger"}]}
        id = (await http.post("/v1/responses", json=asked)).json()["id"]
        await http.post("/v1/responses", json={"model": "tiny", "input": "go on", "previous_response_id": id})
    texts = [part.text for m in prompt_of(engine).messages for part in m.parts if isinstance(part, TextPart)]
    assert texts == ["Summary of the conversation so far:\n\nWe read two files.", "go on"]


@pytest.mark.parametrize(
    "edits",
    [None, [], {"edits": []}, [{"type": "compaction", "compact_threshold": 20.0}], [{"type": "compaction"}]],
)
@pytest.mark.parametrize("path", ["/v1/responses", "/v1/responses/compact"])
async def test_leave_to_compact_changes_no_prompt(path, edits):
    engine = FakeEngine(SCRIPT)
    await ask(path, engine, input=TURNS)
    answer = await ask(path, engine, input=TURNS, context_management=edits)
    assert answer["status"] == "completed"
    plain, given = engine.requests
    assert given.prompt == plain.prompt and given.context_limit == plain.context_limit


@pytest.mark.parametrize(
    ("param", "edit"),
    [
        ("context_management.0.type", {"type": "truncation"}),
        ("context_management.0.compact_threshold", {"type": "compaction", "compact_threshold": 0}),
    ],
)
def test_another_edit_is_refused(param, edit):
    with pytest.raises(InvalidRequest) as error:
        parse(json.dumps({"input": "hi", "context_management": [edit]}).encode())
    assert error.value.param == param
