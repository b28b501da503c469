"""`/v1/classify` and `/v1/score`: vLLM's shapes, an error for one prompt alone, and limits."""

from __future__ import annotations

import math

import pytest
from app_client import client
from fake_engine import FakeEngine, app_of

from omlxd.chat import Conversation, Failed, Finished, RawPrompt, Scored, TextDelta, TokenLogprob, Usage
from omlxd.errors import InvalidRequest

LOGPROBS = {"yes": (-0.5,), "no": (-1.0, -1.0), "maybe": (-3.0,)}


LIKELIEST = TokenLogprob("yes", -0.5, (("yes", -0.5), ("\ufffd", -0.9)), top_raw=(b"", b"\xc3"))


class Scoring(FakeEngine):
    """Scores labels by `LOGPROBS`; refuses a prompt of `bad` and an empty label, breaks at `dead`."""

    async def generate(self, request):
        self.requests.append(request)
        text = request.prompt.text if isinstance(request.prompt, RawPrompt) else "chat"
        if text == "":
            raise InvalidRequest("the prompt has no tokens", param="prompt")
        if "" in request.labels:
            at = request.labels.index("")
            raise InvalidRequest("an empty text has no probability", param=f"labels.{at}")
        if text in ("bad", "dead"):
            code = "internal" if text == "dead" else "prompt_too_long"
            yield Failed(code, f"{text} prompt")
            return
        values = tuple(LOGPROBS[label] for label in request.labels)
        yield Scored(values, tuple(value[0] + 7 for value in values), LIKELIEST)
        yield Finished("stop", Usage(10, 4, 0, 0))


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
    assert told["usage"]["prompt_tokens"] == 20 and told["usage"]["completion_tokens"] == 0
    assert [request.prompt.text for request in engine.requests] == ["one", "bad", "two"]
    assert all(request.labels == tuple(labels) for request in engine.requests)
    assert all(request.sampling.temperature == 0 for request in engine.requests)


async def test_logits_and_likeliest_tokens_on_request():
    asked = {"input": "one", "labels": ["yes", "no"]}
    engine, answer = await post("/v1/classify", **asked, logits=True, top_logprobs=2, use_activation=False)
    (row,) = answer.json()["data"]
    assert row["logits"] == [6.5, 6.0] and row["probs"] == row["logprobs"] == [-0.5, -2.0]
    assert row["top_logprobs"] == [
        {"token": "yes", "logprob": -0.5, "bytes": [121, 101, 115]},
        {"token": "\ufffd", "logprob": -0.9, "bytes": [0xC3]},
    ]
    assert engine.requests[0].sampling.logprobs == 2
    messages = [{"role": "user", "content": "hi"}]
    _, answer = await post("/v1/classify", messages=messages, labels=["yes"], top_logprobs=2)
    assert len(answer.json()["data"][0]["top_logprobs"]) == 2
    _, answer = await post("/v1/classify", **asked)
    assert not {"logits", "top_logprobs"} & answer.json()["data"][0].keys()


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
    assert [(r.prompt.text, r.labels) for r in engine.requests] == [("one", ("yes",)), ("bad", ("no",))]
    assert answer.json()["usage"]["omlxd"]["tokens_per_s"] == 0, "nothing is decoded"
    _, answer = await post("/v1/score", text_1="one", text_2="yes")
    assert len(answer.json()["data"]) == 1


async def test_an_empty_text_is_an_error_of_its_own_row():
    _, answer = await post("/v1/score", text_1="one", text_2=["yes", "", "no"])
    first, empty, last = answer.json()["data"]
    assert first["score"] == pytest.approx(math.exp(-0.5)) and last["score"] == pytest.approx(math.exp(-1))
    assert empty["index"] == 1 and "score" not in empty and empty["error"]["message"]
    assert last["index"] == 2
    assert empty["error"]["param"] == "text_2.1"
    _, answer = await post("/v1/score", text_1="one", text_2="")
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "text_2"


@pytest.mark.parametrize("pair", [("queries", "documents"), ("queries", "items"), ("data_1", "data_2")])
async def test_the_texts_of_a_score_have_other_names_in_vllm(pair):
    one, two = pair
    engine, answer = await post("/v1/score", **{one: ["one", ""], two: ["yes", "no"]})
    first, empty = answer.json()["data"]
    assert first["score"] == pytest.approx(math.exp(-0.5)) and empty["error"]["param"] == f"{one}.1"
    assert engine.requests[0].prompt.text == "one" and engine.requests[0].labels == ("yes",)
    _, answer = await post("/v1/score", **{one: "", two: ["yes", "no"]})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == one


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
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
        ("/v1/score", {}, "text_1"),
        ("/v1/score", {"queries": "x"}, "documents"),
        ("/v1/score", {"items": "x"}, "queries"),
        ("/v1/score", {"queries": "x", "text_2": "x"}, "text_1"),
        ("/v1/score", {"queries": "x", "documents": ["x"], "items": "x"}, "items"),
        ("/v1/score", {"data_1": ["x", "y"], "data_2": ["x"]}, "data_2"),
        ("/v1/score", {"text_1": ["x", "y"], "text_2": ["x"]}, "text_2"),
        ("/v1/classify", {"input": "x", "labels": ["a"], "top_logprobs": 21}, "top_logprobs"),
        ("/v1/score", {"text_1": "x", "text_2": ["a"] * 129}, "text_2"),
    ],
)
async def test_what_is_refused_names_the_field(path, body, param):
    engine, answer = await post(path, **body)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param and not engine.requests


async def test_an_only_prompt_that_is_bad_and_an_engine_that_fails_are_errors():
    _, answer = await post("/v1/classify", input=["one", ""], labels=["yes"])
    assert answer.json()["data"][1]["error"]["param"] == "input.1"
    _, answer = await post("/v1/classify", input="bad", labels=["yes", "no"])
    assert answer.status_code == 400 and "bad prompt" in answer.text
    _, answer = await post("/v1/classify", input=["dead", "one"], labels=["yes"])
    assert answer.status_code == 500


class Drawing(FakeEngine):
    async def generate(self, request):
        self.requests.append(request)
        if request.prompt.text == "bad":
            raise InvalidRequest("bad prompt", param="prompt")
        yield TextDelta(" so", (LIKELIEST,))
        yield Finished("length", Usage(10, 4, 0, 1))


async def test_without_labels_the_next_token_is_drawn():
    engine = Drawing()
    async with client(app_of(engine)) as http:
        one = await http.post("/v1/classify", json={"input": "one", "top_logprobs": 2, "seed": 3})
        two = await http.post("/v1/classify", json={"input": ["one", "bad"], "temperature": 0.5})
        bad = await http.post("/v1/classify", json={"input": "one", "logits": True})
    (row,) = one.json()["data"]
    assert row["label"] == "yes" and row["num_classes"] == 1 and len(row["top_logprobs"]) == 2
    assert row["probs"] == pytest.approx([math.exp(-0.5)]) and row["logprobs"] == [-0.5]
    good, failed = two.json()["data"]
    assert good["label"] == "yes" and failed["error"]["param"] == "input.1"
    assert bad.status_code == 400 and bad.json()["error"]["param"] == "logits"
    sampling = [request.sampling for request in engine.requests]
    assert [(s.max_tokens, s.seed, s.temperature) for s in sampling[:2]] == [(1, 3, 0.0), (1, None, 0.5)]
