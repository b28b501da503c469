"""`/v1/systemone` and `/v1/decisions`: three shapes of a question, one way of asking it."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from app_client import client
from fake_engine import FakeEngine, app_of
from sdk_clients import gpt

from omlxd.chat import Conversation, Failed, Finished, ImagePart, Scored, TextPart, TokenLogprob, Usage

LOGPROBS = {"yes": -2.0, "Yes": -1.0, "no": -3.0, "No": -30.0, "billing": -1.0, "bugs": -2.0}


class Deciding(FakeEngine):
    """Scores labels by `LOGPROBS`, others by their place; refuses a question that holds `bad`."""

    async def generate(self, request):
        self.requests.append(request)
        if "bad" in text_of(request.prompt):
            yield Failed("prompt_too_long", "prompt is too long: 9 tokens > 8 maximum", param="prompt")
            return
        values = [(LOGPROBS.get(label, -1.0 - at),) for at, label in enumerate(request.labels)]
        yield Scored(tuple(values), tuple(each[0] for each in values), TokenLogprob("x", -1.0))
        yield Finished("stop", Usage(10, 4, 0, 0))


def text_of(prompt: Any) -> str:
    assert isinstance(prompt, Conversation) and prompt.thinking is False
    return "".join(part.text for part in prompt.messages[-1].parts if isinstance(part, TextPart))


async def post(path: str, **body: object):
    engine = Deciding()
    async with client(app_of(engine)) as http:
        return engine, await http.post(path, json=body)


YES, BILLING = 0.91, 0.7311
"""Shares of yes and Yes among yes, Yes and no, and of -1 beside -2."""
QUESTIONS = {
    "urgent": {
        "type": "noul",
        "instructions": "Is it urgent?",
        "criteria": {"true": "Today.", "false": None},
    },
    "team": {"type": "choice", "instructions": "Which?", "criteria": {"billing": "Money.", "bugs": None}},
    "mood": {"type": "score", "criteria": ["calm", {"is": "cross"}, "angry"]},
}


def near(value: object) -> Any:
    return pytest.approx(value, abs=1e-3)


async def test_system_one():
    engine, answer = await post(
        "/v1/systemone", state={"b": 1, "a": None}, questions=QUESTIONS, model="jev-latest"
    )
    assert answer.status_code == 200, answer.text
    told = answer.json()
    assert told["answers"]["urgent"] == {"type": "noul", "noul": near(YES)}
    assert told["answers"]["team"] == {
        "type": "choice",
        "choice": "billing",
        "probabilities": {"billing": near(BILLING), "bugs": near(1 - BILLING)},
        "confidence": near(2 * BILLING - 1),
    }
    mood = told["answers"]["mood"]
    assert list(mood["legend"].values()) == ["calm", '{"is":"cross"}', "angry"]
    each = list(mood["probabilities"].values())
    assert sum(each) == near(1) and mood["score"] == near(each[1] + 2 * each[2])
    assert told["usage"]["input_tokens"] == 30 and told["usage"]["output_tokens"] == 0
    assert [message.role for message in engine.requests[0].prompt.messages] == ["system", "user"]
    asked = [text_of(request.prompt) for request in engine.requests]
    assert all(each.startswith('{"b":1,"a":null}\n\n') for each in asked), "what is common stands first"
    assert "yes: Today." in asked[0] and "no:" not in asked[0]
    assert "- billing: Money.\n- bugs\n" in asked[1] and engine.requests[1].labels == ("billing", "bugs")
    assert "1: {" in asked[2] and engine.requests[2].labels == ("0", "1", "2")


async def test_mlx_vlm():
    questions = QUESTIONS | {"urgent": {"type": "bool", "instructions": "Is it?", "criteria": "If today."}}
    questions["kind"] = {"criteria": ["billing", "bugs"]}
    engine, answer = await post("/v1/decisions", state="s", questions=questions)
    told = answer.json()["answers"]
    assert told["urgent"] == {"type": "bool", "value": True, "probability": near(YES)}
    assert told["team"]["value"] == told["kind"]["value"] == "billing"
    assert told["team"]["metadata"] == {"confidence": near(BILLING)}
    assert told["mood"]["type"] == "score" and told["mood"]["metadata"]["legend"]["0"] == "calm"
    assert "If today." in text_of(engine.requests[0].prompt)
    picture = "data:image/png;base64,iVBORw0KGgo="
    engine, answer = await post("/v1/decisions", images=[picture], questions={"x": QUESTIONS["urgent"]})
    assert answer.status_code == 200
    message = engine.requests[0].prompt.messages[-1]
    assert isinstance(message.parts[0], ImagePart) and message.parts[0].param == "images.0"


async def test_openais_library():
    engine = Deciding()
    conversation: Any = [
        {"role": "system", "content": "Be strict."},
        {"role": "user", "content": [{"type": "input_json", "data": {"order": 7}}]},
        {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "lost"},
    ]
    questions: Any = [
        {
            "type": "predicate",
            "name": "refund",
            "instructions": [{"type": "input_text", "text": "A refund."}],
        },
        {
            "type": "choice",
            "instructions": "Which?",
            "choices": [{"value": True, "description": "It is."}, {"value": "true"}, {"value": "a"}],
        },
        {
            "type": "score",
            "instructions": "How?",
            "levels": [{"label": "low", "description": "L"}, {"label": "high"}],
        },
    ]
    async with gpt(engine) as openais:
        told = await openais.decisions.create(model="tiny", input=conversation, questions=questions)
        with pytest.raises(openai.BadRequestError, match="use one of predicate, choice, score, not 'box'"):
            await openais.decisions.create(model="tiny", input="x", questions=[{"type": "box"}])  # type: ignore
        for wrong in ({"questions": []}, {"input": ""}, {"questions": [{"type": "choice", "choices": []}]}):
            asked: Any = {"input": "x", "questions": questions} | wrong
            with pytest.raises(openai.BadRequestError):
                await openais.decisions.create(model="tiny", **asked)
    predicate, choice, score = told.answers
    assert predicate.type == "predicate" and predicate.name == "refund" and predicate.probability == near(YES)
    assert choice.type == "choice" and choice.name is None
    assert choice.choice is True and [each.value for each in choice.probabilities] == [True, "true", "a"]
    assert score.type == "score" and [(each.value, each.label) for each in score.probabilities] == [
        (0, "low"),
        (1, "high"),
    ]
    assert told.usage.input_tokens == 30 and told.usage.input_tokens_details.cached_tokens == 12
    first, second, third = engine.requests
    assert isinstance(first.prompt, Conversation)
    assert [message.role for message in first.prompt.messages] == [
        "system",
        "user",
        "assistant",
        "tool",
        "user",
    ]
    assert first.prompt.messages[:-1] == second.prompt.messages[:-1]
    assert second.labels == ("0", "1", "2"), "two options have one name"
    assert third.labels == ("0", "1") and "0: low: L" in text_of(third.prompt)


@pytest.mark.parametrize(
    ("names", "labels"),
    [
        (["merge", "close"], ["merge", "close"]),
        (["merge", "merge request"], ["0", "1"]),
        (["a" * 61, "b"], ["0", "1"]),
        ([f"x{n}" for n in range(11)], [f"{n:02}" for n in range(11)]),
    ],
)
async def test_no_label_begins_another(names, labels):
    criteria = dict.fromkeys(names)
    engine, answer = await post("/v1/systemone", state="s", questions={"q": {"criteria": criteria}})
    assert engine.requests[0].labels == tuple(labels)
    assert list(answer.json()["answers"]["q"]["probabilities"]) == names


async def test_a_question_that_cannot_be_asked_refuses_the_request():
    questions = QUESTIONS | {"long": {"type": "noul", "instructions": "bad"}}
    _, answer = await post("/v1/systemone", state="s", questions=questions)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "questions.long"


NOUL = {"q": {"type": "noul", "instructions": "?"}}
BOGUS, JSON_PART = {"type": "bogus", "text": "x"}, {"type": "input_json", "json": {}}
OUTPUT = {"type": "function_call_output", "call_id": "c", "output": "x"}


def asked_openai(*parts: dict[str, Any], **more: Any) -> dict[str, Any]:
    parts = parts or ({"type": "input_text", "text": "s"},)
    question = {"type": "predicate", "instructions": "?", **more}
    return {"input": [{"role": "user", "content": parts}], "questions": [question]}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("systemone", {"questions": NOUL}, "state"),
        ("systemone", {"state": "s"}, "questions"),
        ("systemone", {"state": "s", "questions": {}}, "questions"),
        ("systemone", {"state": "", "questions": NOUL}, "state"),
        ("systemone", {"state": None, "questions": NOUL}, "state"),
        ("systemone", {"state": "s", "questions": NOUL, "stream": True}, "stream"),
        ("systemone", {"state": "s", "questions": NOUL | {"r": {"id": 1}}}, "questions.r.id"),
        ("decisions", {"state": "s", "questions": NOUL | {"r": {"type": 1}}}, "questions.r.type"),
        ("decisions", asked_openai(id="x"), "questions.0.id"),
        ("decisions", asked_openai(choices=[]), "questions.0.choices"),
        ("decisions", asked_openai(instructions=[BOGUS]), "questions.0.instructions.0.type"),
        ("decisions", asked_openai() | {"stream": True}, "stream"),
        ("decisions", asked_openai(JSON_PART), "input.0.content.0.data"),
        ("decisions", asked_openai(BOGUS), "input.0.content.0.type"),
        ("decisions", asked_openai() | {"input": [OUTPUT]}, "input.0.call_id"),
        ("decisions", asked_openai() | {"input": [{"type": "bogus"}]}, "input.0.type"),
        ("systemone", {"state": 3, "questions": NOUL}, "state"),
        ("systemone", {"state": "s", "questions": NOUL, "audio": "x"}, "audio"),
        ("systemone", {"state": "s", "questions": NOUL, "assets": {"x": {}}}, "assets"),
        ("systemone", {"state": "s", "questions": {"q": {"type": "box"}}}, "questions.q.type"),
        ("systemone", {"state": "s", "questions": {"q": {"type": "noul"}}}, "questions.q.instructions"),
        ("systemone", {"state": "s", "questions": {"q": {"type": "noul", "criteria": {"x": ""}}}}, None),
        ("systemone", {"state": "s", "questions": {"q": {"criteria": {}}}}, "questions.q.criteria"),
        ("systemone", {"state": "s", "questions": {"q": {"criteria": "a"}}}, "questions.q.criteria"),
        ("systemone", {"state": "s", "questions": {"q": {"criteria": ["a", "a"]}}}, "questions.q.criteria"),
        ("systemone", {"state": "s", "questions": {"q": {"type": "score"}}}, "questions.q.criteria"),
        ("decisions", {"state": "s", "questions": [{"type": "predicate", "instructions": "?"}]}, "questions"),
        ("decisions", {"input": "s", "questions": NOUL}, "questions"),
        ("decisions", {"questions": [{"type": "predicate", "instructions": "?"}]}, "input"),
        ("decisions", {"input": "s", "questions": [{"type": "predicate", "instructions": ""}]}, None),
        (
            "systemone",
            {
                "state": "s",
                "questions": {f"{n}": {"criteria": [f"{n}" for n in range(255)]} for n in range(5)},
            },
            "questions",
        ),
    ],
)
async def test_what_is_refused_names_the_field(path, body, param):
    engine, answer = await post(f"/v1/{path}", **body)
    assert answer.status_code == 400, answer.text
    told = answer.json()["error"]["param"]
    assert (told == param if param else told.startswith("questions.")) and not engine.requests
