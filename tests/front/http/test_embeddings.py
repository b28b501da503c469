"""Vectors and scores over HTTP: bodies, answers, which model answers, and a real daemon that embeds."""

from __future__ import annotations

import base64
from array import array
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from app_client import EMBEDDING, body, client, message_of
from daemon import Daemon, demo_model_with
from embedders import build_embedder, reference
from fake_engine import USAGE, FakeEngine, app_of
from msgspec.structs import replace
from templates import QWEN3
from tokenizers import Tokenizer

from omlxd.chat import Conversation, Finished, GenerateRequest, Scored, TextPart, TokenLogprob


def engine_that(kind: str, model_id: str = "org/embed") -> FakeEngine:
    engine = FakeEngine(model_id=model_id)
    engine.kind = kind
    return engine


async def post(engine: FakeEngine, path: str, **fields: Any) -> httpx.Response:
    async with client(app_of(FakeEngine(), engine)) as http:
        return await http.post(path, json=fields)


# --------------------------------------------------------------------------- OpenAI


@pytest.mark.parametrize(
    ("given", "texts", "tokens"),
    [
        ("one", ("one",), ()),
        (["one", "two!"], ("one", "two!"), ()),
        ([1, 2, 3], (), ((1, 2, 3),)),
        ([[1], [2, 3]], (), ((1,), (2, 3))),
    ],
)
async def test_what_an_input_may_be(given: Any, texts: Any, tokens: Any):
    engine = engine_that("embedding")
    answer = (await post(engine, "/v1/embeddings", input=given, model="embed", dimensions=2)).json()
    assert (engine.embedded[0].texts, engine.embedded[0].tokens) == (texts, tokens)
    assert engine.embedded[0].dimensions == 2 and not engine.embedded[0].truncate
    lengths = [float(len(item)) for item in texts or tokens]
    assert [item["embedding"] for item in answer["data"]] == [[length, 0.5] for length in lengths]
    assert [item["index"] for item in answer["data"]] == list(range(len(lengths)))
    assert answer["model"] == "org/embed" and answer["usage"] == {
        "prompt_tokens": len(lengths),
        "total_tokens": len(lengths),
    }


async def test_base64_is_float32():
    answer = await post(engine_that("embedding"), "/v1/embeddings", input="abc", encoding_format="base64")
    assert array("f", base64.b64decode(answer.json()["data"][0]["embedding"])).tolist() == [3.0, 0.5]


@pytest.mark.parametrize(
    "given", ["[]", '["a", 1]', '["a", [1]]', "[[1.5]]", "7", "[true]", '[["a"]]', "null"]
)
async def test_what_an_input_may_not_be(given: str):
    async with client(app_of(engine_that("embedding"))) as http:
        answer = await http.post("/v1/embeddings", content=f'{{"input": {given}}}')
    assert answer.status_code == 400 and answer.json()["error"]["param"].startswith("input")


@pytest.mark.parametrize("name", ["", "text-embedding-3-small", "default"])
async def test_openai_s_names_mean_the_first_model_that_embeds(name: str):
    engine = engine_that("embedding")
    assert (await post(engine, "/v1/embeddings", input="a", model=name)).status_code == 200
    assert engine.embedded
    answer = await post(engine_that("chat"), "/v1/embeddings", input="a", model=name)
    assert answer.status_code == 400 and "no installed model makes vectors" in answer.text
    assert "omlxd models pull mlx-community/Qwen3-Embedding-0.6B-8bit" in answer.text


async def test_a_model_of_another_kind_is_refused():
    answer = await post(engine_that("embedding"), "/v1/embeddings", input="a", model="tiny")
    assert answer.status_code == 400 and "org/tiny makes no vectors" in answer.json()["error"]["message"]
    for path in ("/v1/chat/completions", "/v1/messages", "/api/chat", "/v1/completions"):
        answer = await post(engine_that("embedding"), path, **{**body(path), "model": "embed"})
        assert answer.status_code == 400 and "/v1/embeddings" in message_of(path, answer)


# --------------------------------------------------------------------------- Ollama


async def test_ollama_s_vectors():
    engine = engine_that("embedding")
    asked: Any = {"model": "embed", "input": ["a", "bc"], "keep_alive": "1m"}
    answer = (await post(engine, "/api/embed", **asked)).json()
    assert answer["embeddings"] == [[1.0, 0.5], [2.0, 0.5]] and answer["prompt_eval_count"] == 2
    assert engine.keep_alive == 60 and engine.embedded[0].truncate
    await post(engine, "/api/embed", model="embed", input="a", truncate=False)
    assert not engine.embedded[1].truncate
    answer = (await post(engine, "/api/embeddings", model="embed", prompt="abc")).json()
    assert answer == {"embedding": [3.0, 0.5]}


# --------------------------------------------------------------------------- rerank


@pytest.mark.parametrize("path", ["/v1/rerank", "/rerank", "/v2/rerank"])
async def test_documents_come_back_best_first(path: str):
    engine = engine_that("rerank")
    asked: Any = {"query": "q", "documents": ["a", {"text": "abc"}, "ab"], "model": "embed"}
    answer = (await post(engine, path, **asked, top_n=2, return_documents=True)).json()
    assert engine.embedded[0].query == "q" and engine.embedded[0].texts == ("a", "abc", "ab")
    assert answer["results"] == [
        {"index": 1, "relevance_score": 3.0, "document": {"text": "abc"}},
        {"index": 2, "relevance_score": 2.0, "document": {"text": "ab"}},
    ]
    assert answer["usage"] == {"total_tokens": 3} and answer["meta"]["billed_units"] == {"search_units": 1}
    plain = (await post(engine, path, **asked)).json()
    assert len(plain["results"]) == 3 and "document" not in plain["results"][0]
    for wrong in ({"documents": []}, {"query": ""}, {"top_n": 0}):
        assert (await post(engine, path, **{**asked, **wrong})).status_code == 400


class Judge(FakeEngine):
    """Says how likely `yes` and `no` are: the longer the document is, the less likely is `no`."""

    async def generate(self, request: GenerateRequest):
        self.requests.append(request)
        text = texts_of(request)[-1].partition("<Document>: ")[2]
        logprobs = tuple((-1.0 if label == "yes" else -float(len(text)),) for label in request.labels)
        yield Scored(logprobs, (0.0, 0.0), TokenLogprob("yes", -1.0))
        yield Finished("stop", replace(USAGE, completion_tokens=0))


def texts_of(request: GenerateRequest) -> list[str]:
    assert isinstance(request.prompt, Conversation) and request.prompt.thinking is False
    parts = [part for message in request.prompt.messages for part in message.parts]
    return [part.text for part in parts if isinstance(part, TextPart)]


async def test_a_chat_model_that_judges_scores_by_its_own_template():
    engine = Judge(model_id="Qwen/Qwen3-Reranker-0.6B")
    asked: Any = {"query": "q", "documents": ["ab", "abcd"], "model": "Qwen3-Reranker-0.6B"}
    answer = (await post(engine, "/v1/rerank", **asked)).json()
    assert [result["index"] for result in answer["results"]] == [1, 0]
    expected = 1 / (1 + np.exp(-4 + 1))
    assert abs(answer["results"][0]["relevance_score"] - expected) < 1e-9
    system, user = texts_of(engine.requests[0])
    assert system.endswith('can only be "yes" or "no".')
    assert user == (
        "<Instruct>: Given a web search query, retrieve relevant passages that answer the query\n"
        "<Query>: q\n<Document>: ab"
    )
    await post(engine, "/v1/rerank", **asked, instruction="Find it")
    assert texts_of(engine.requests[-1])[1].startswith("<Instruct>: Find it\n")


# --------------------------------------------------------------------------- a daemon


def judge(text: str) -> str:
    """Qwen3-Reranker's template, as its model card has it."""
    return (
        "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the "
        'Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
        "<Instruct>: Given a web search query, retrieve relevant passages that answer the query\n"
        f"<Query>: kettle\n<Document>: {text}<|im_end|>\n"
        "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )


@pytest.mark.slow
def test_a_daemon_embeds_scores_idles_and_keeps_chatting(tmp_path: Path):
    models = tmp_path / "models"
    build_embedder("qwen3", models / "tiny-embedding", "lasttoken")
    build_embedder("bert", models / "scorer", scores=True)
    demo_model_with(QWEN3, models / "tiny-reranker")
    with Daemon(tmp_path / "home", "--model-dir", str(models)) as daemon:
        first = daemon.http.post("/v1/embeddings", json={"model": "tiny-embedding", "input": "a"})
        assert first.status_code == 200, first.text
        kinds = {m["id"]: m["omlxd"]["kind"] for m in daemon.http.get("/v1/models").json()["data"]}
        assert kinds["tiny-embedding"] == "embedding" and kinds["scorer"] == "rerank"
        sdk = openai.OpenAI(
            base_url=daemon.url + "/v1", api_key="x", http_client=httpx.Client(trust_env=False)
        )
        texts = ["the kettle", "saucers and spoons"]
        made = sdk.embeddings.create(model="text-embedding-3-small", input=texts)
        ids = daemon.http.post("/v1/embeddings", json={"model": "tiny-embedding", "input": texts})
        for item, plain in zip(made.data, ids.json()["data"], strict=True):
            assert np.abs(np.array(item.embedding) - plain["embedding"]).max() < 1e-6
        assert made.usage.prompt_tokens == ids.json()["usage"]["prompt_tokens"] > 4
        folder = models / "tiny-embedding"
        tokens = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(texts[0]).ids
        assert np.abs(np.array(made.data[0].embedding) - reference(folder, tokens, "lasttoken")).max() < 1e-4
        asked = {"query": "kettle", "documents": texts}
        scored = daemon.http.post("/v1/rerank", json={**asked, "model": "scorer"})
        assert len(scored.json()["results"]) == 2 and scored.status_code == 200
        shown = daemon.http.post("/api/show", json={"model": "tiny-embedding"}).json()
        assert shown["capabilities"] == ["embedding"]
        judged = daemon.http.post("/v1/rerank", json={**asked, "model": "tiny-reranker"}).json()
        coder = Tokenizer.from_file(str(models / "tiny-reranker" / "tokenizer.json"))
        assert judged["usage"]["total_tokens"] == sum(len(coder.encode(judge(text)).ids) for text in texts)
        assert all(0 < result["relevance_score"] < 1 for result in judged["results"])
        gone = daemon.http.post("/api/embed", json={"model": "scorer", "input": "a"})
        assert gone.status_code == 400 and "makes no vectors" in gone.json()["error"]
        assert daemon.messages("hi", max_tokens=2)["usage"]["output_tokens"] == 2
        assert daemon.http.post("/omlxd/models/unload", json={"model": "tiny-embedding"}).json()["gone"]
        again = daemon.http.post("/api/embed", json={"model": "tiny-embedding", "input": texts[0]})
        assert np.abs(np.array(again.json()["embeddings"][0]) - made.data[0].embedding).max() < 1e-6


async def test_a_body_that_is_none_is_refused_everywhere():
    async with client(app_of(engine_that("embedding"))) as http:
        for path in EMBEDDING:
            for content in (b"", b"[]", b"{}", b'{"input": [[[1]]]}'):
                assert (await http.post(path, content=content)).status_code == 400
