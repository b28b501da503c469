"""`/v1/classify` and `/v1/score`: vLLM's shapes, an error for one prompt alone, and limits."""

from __future__ import annotations

import math

import pytest
from app_client import client
from fake_engine import FakeEngine, app_of

from omlxd.chat import Conversation, Failed, Finished, RawPrompt, TextDelta, TokenLogprob, Usage

LOGPROBS = {"yes": (-0.5,), "no": (-1.0, -1.0), "maybe": (-3.0,)}


class Scoring(FakeEngine):
    """Answers what is forced, with its tokens' `LOGPROBS`; refuses a prompt of `bad`, breaks at `dead`."""

    async def generate(self, request):
        self.requests.append(request)
        text = request.prompt.text if isinstance(request.prompt, RawPrompt) else "chat"
        if text in ("bad", "dead"):
            code = "prompt_too_long" if text == "bad" else "internal"
            yield Failed(code, f"{text} prompt")
            return
        values = LOGPROBS.get(request.forced, (-2.0,))
        for value in values:
            yield TextDelta("x", (TokenLogprob("x", value),))
        tokens = len(values) + (request.forced == "unseen")
        yield Finished("length", Usage(10, 4, 0, tokens))


async def post(path: str, **body: object):
    engine = Scoring()
    async with client(app_of(engine)) as http:
        return engine, await http.post(path, json=body)


async def test_each_prompt_has_its_class_and_a_bad_one_an_error():
    labels = ["yes", "no", "maybe"]
    engine, answer = await post("/v1/classify", input=["one", "bad", "two"], labels=labels)
    assert answer.status_code == 200
    told = answer.json()
    assert told["object"] == "list" and told["id"].startswith("classify-") and told["model"] == "org/tiny"
    first, bad, last = told["data"]
    weights = [math.exp(sum(LOGPROBS[label])) for label in labels]
    assert first["label"] == "yes" and first["num_classes"] == 3 and first["index"] == 0
    assert first["probs"] == pytest.approx([weight / sum(weights) for weight in weights])
    assert first["logprobs"] == pytest.approx([-0.5, -2.0, -3.0])
    assert {**last, "index": 0} == first and last["index"] == 2
    assert bad.keys() == {"index", "error"} and "bad prompt" in bad["error"]["message"]
    assert told["usage"]["prompt_tokens"] == 20 and told["usage"]["completion_tokens"] == 8
    assert [request.forced for request in engine.requests if request.prompt.text == "one"] == labels
    assert all(request.sampling.temperature == 0 for request in engine.requests)


async def test_a_conversation_is_classified_without_thinking():
    messages = [{"role": "user", "content": "hi"}]
    engine, answer = await post("/v1/classify", messages=messages, labels=["no", "yes"])
    assert answer.json()["data"][0]["label"] == "yes"
    assert isinstance(engine.requests[0].prompt, Conversation) and engine.requests[0].prompt.thinking is False


async def test_scores_of_one_text_with_many_and_of_pairs():
    _, answer = await post("/v1/score", text_1="one", text_2=["yes", "no"])
    told = answer.json()
    assert [(row["index"], row["object"]) for row in told["data"]] == [(0, "score"), (1, "score")]
    assert [row["score"] for row in told["data"]] == pytest.approx([math.exp(-0.5), math.exp(-1.0)])
    engine, answer = await post("/v1/score", text_1=["one", "bad"], text_2=["yes", "no"])
    good, bad = answer.json()["data"]
    assert good["score"] == pytest.approx(math.exp(-0.5)) and "bad prompt" in bad["error"]["message"]
    assert [(r.prompt.text, r.forced) for r in engine.requests] == [("one", "yes"), ("bad", "no")]
    assert answer.json()["usage"]["omlxd"]["tokens_per_s"] == 0, "nothing is decoded"
    _, answer = await post("/v1/score", text_1="one", text_2="yes")
    assert len(answer.json()["data"]) == 1


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/classify", {"input": "x"}, "labels"),
        ("/v1/classify", {"input": "x", "labels": []}, "labels"),
        ("/v1/classify", {"input": "x", "labels": ["a", "a"]}, "labels"),
        ("/v1/classify", {"input": "x", "labels": [""]}, "labels.0"),
        ("/v1/classify", {"input": "x", "labels": ["a" * 1001]}, "labels.0"),
        ("/v1/classify", {"input": "x", "labels": [f"{n}" for n in range(10_000)]}, "labels"),
        ("/v1/classify", {"input": ["x"] * 128, "labels": [f"{n}" for n in range(9)]}, "labels"),
        ("/v1/classify", {"input": [], "labels": ["a"]}, "input"),
        ("/v1/classify", {"labels": ["a"]}, "input"),
        ("/v1/classify", {"input": "x", "messages": [], "labels": ["a"]}, "input"),
        ("/v1/classify", {"messages": [], "labels": ["a"]}, "messages"),
        ("/v1/score", {"text_1": "x"}, "text_2"),
        ("/v1/score", {"text_1": ["x", "y"], "text_2": ["x"]}, "text_2"),
        ("/v1/score", {"text_1": "x", "text_2": ["a", ""]}, "text_2"),
        ("/v1/score", {"text_1": "x", "text_2": ["a"] * 129}, "text_2"),
    ],
)
async def test_what_is_refused_names_the_field(path, body, param):
    engine, answer = await post(path, **body)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param and not engine.requests


async def test_an_only_prompt_that_is_bad_and_an_engine_that_fails_are_errors():
    _, answer = await post("/v1/classify", input="bad", labels=["a", "b"])
    assert answer.status_code == 400 and "bad prompt" in answer.text
    _, answer = await post("/v1/classify", input=["dead", "one"], labels=["a"])
    assert answer.status_code == 500


async def test_a_label_that_the_model_can_not_say_is_its_prompts_error():
    _, answer = await post("/v1/classify", input=["one"], labels=["yes", "unseen"])
    assert "'unseen' can't be scored" in answer.json()["data"][0]["error"]["message"]
