"""Routes of vectors and scores. A model that embeds loads and goes as any other does.

A reranker is one of two kinds: a classifier of pairs, which has frames of its own, or a chat model that was
taught to answer yes or no to a query and a document (Qwen3-Reranker), whose score is the share of yes.
"""

from __future__ import annotations

import contextlib
import os
import time
from array import array

import msgspec
from starlette.requests import Request

from ...api import embeddings as api
from ...api.fields.body import ParsedRequest, keep_alive_of, mended
from ...api.openai.scores import Scores
from ...chat import (
    Conversation,
    EmbedRequest,
    Failed,
    GenerateRequest,
    Message,
    Sampling,
    TextPart,
    Usage,
    Vectors,
)
from ...errors import OmlxdError, bad_field
from ..engines.model import ModelEngine
from ..engines.names.names import PLACEHOLDERS
from ..engines.pool import EnginePool
from .choices import scores_of
from .observe.trace import client_of, trace_of
from .routes import Operation, post

INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
"""Instruction on what makes a document fit: Qwen3-Reranker's own default."""
_JUDGE = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct provided. Note "
    'that the answer can only be "yes" or "no".'
)
EXAMPLES = {"embedding": "mlx-community/Qwen3-Embedding-0.6B-8bit", "rerank": "Qwen/Qwen3-Reranker-0.6B"}
"""A model of each kind to begin with."""


class Embeddings:
    def __init__(self, engines: EnginePool):
        self._engines = engines

    def routes(self) -> list[Operation]:
        made = (
            ("/v1/embeddings", self._openai, "OpenAI: vectors"),
            ("/embeddings", self._openai, "OpenAI: vectors, as llama.cpp has it"),
            ("/v1/rerank", self._rerank, "Jina: documents by how they answer a query"),
            ("/v2/rerank", self._rerank, "Cohere: the same"),
            ("/rerank", self._rerank, "The same"),
            ("/api/embed", self._ollama, "Ollama: vectors"),
            ("/api/embeddings", self._ollama_old, "Ollama: a vector"),
        )
        return [post(path, answer, summary, while_connected=True) for path, answer, summary in made]

    async def _openai(self, request: Request, body: api.EmbeddingsBody) -> api.EmbeddingsAnswer:
        engine = await self._embedder(body.model, "embedding")
        vectors = await self._vectors(request, engine, api.embed_request(body.input, body.dimensions))
        return api.embeddings_answer(body, engine.model_id, vectors)

    async def _ollama(self, request: Request, body: api.OllamaEmbedBody) -> api.OllamaEmbedAnswer:
        began = time.monotonic()
        engine = await self._embedder(body.model, "embedding", await request.body())
        asked = api.embed_request(body.input, body.dimensions, body.truncate)
        return api.ollama_answer(body.model, await self._vectors(request, engine, asked), began)

    async def _ollama_old(
        self, request: Request, body: api.OllamaEmbeddingsBody
    ) -> api.OllamaEmbeddingsAnswer:
        engine = await self._embedder(body.model, "embedding", await request.body())
        vectors = await self._vectors(request, engine, api.embed_request(body.prompt, truncate=True))
        return api.OllamaEmbeddingsAnswer(api.vectors_of(vectors)[0])

    async def _rerank(self, request: Request, body: api.RerankBody) -> api.RerankAnswer:
        api.check_documents(body)
        engine = await self._embedder(body.model, "rerank")
        if engine.card.kind == "rerank":
            vectors = await self._vectors(request, engine, EmbedRequest(body.texts, query=body.query))
            scores, tokens = array("f", vectors.values).tolist(), vectors.tokens
        else:
            scores, tokens = await _judged(engine, body, client_of(request.scope))
            trace_of(request.scope).usage = Usage(prompt_tokens=tokens)
        return api.rerank_answer("rerank-" + os.urandom(12).hex(), engine.model_id, body, scores, tokens)

    async def _embedder(self, name: str, kind: str, raw: bytes = b"") -> ModelEngine:
        """Find the model that `name` means and that embeds or scores. OpenAI's names mean the first that
        does.

        raw  the body, whose `keep_alive` counts
        """
        plain = name.strip().lower()
        await self._engines.look_for_models()  # Else what a model does may not have been read yet.
        if not plain or PLACEHOLDERS.fullmatch(plain) or plain.startswith("text-embedding-"):
            engine = next((one for one in self._engines.models() if _does(one, kind)), None)
            if engine is None:
                what = "makes vectors" if kind == "embedding" else "scores documents"
                raise bad_field(
                    "model", f"no installed model {what}; get one with `omlxd models pull {EXAMPLES[kind]}`"
                )
        else:
            engine = await self._engines.find_engine(name)
        if not _does(engine, kind):
            what = "vectors" if kind == "embedding" else "scores of documents"
            raise bad_field("model", f"{engine.model_id} makes no {what}")
        if (seconds := keep_alive_of(mended(raw))) is not None:
            self._engines.keep_alive(engine, seconds)
        return engine

    async def _vectors(self, request: Request, engine: ModelEngine, asked: EmbedRequest) -> Vectors:
        trace_of(request.scope).model = engine.model_id
        vectors = await engine.embed(msgspec.structs.replace(asked, client=client_of(request.scope)))
        trace_of(request.scope).usage = Usage(prompt_tokens=vectors.tokens)
        return vectors


def _does(engine: ModelEngine, kind: str) -> bool:
    judges = kind == "rerank" and engine.card.kind == "chat" and "rerank" in engine.model_id.lower()
    return engine.card.kind == kind or judges


async def _judged(engine: ModelEngine, body: api.RerankBody, client: str) -> tuple[list[float], int]:
    """Return each document's share of yes, and the tokens of all prompts; the first one caches the query."""
    prompts = [_prompt(body, text) for text in body.texts]
    shares, tokens = await _shares(engine, prompts[:1], client)
    if len(prompts) > 1:
        others, more = await _shares(engine, prompts[1:], client)
        return [*shares, *others], tokens + more
    return shares, tokens


def _prompt(body: api.RerankBody, text: str) -> Conversation:
    asked = f"<Instruct>: {body.instruction or INSTRUCTION}\n<Query>: {body.query}\n<Document>: {text}"
    turns = (Message("system", (TextPart(_JUDGE),)), Message("user", (TextPart(asked),)))
    return Conversation(turns, thinking=False)


async def _shares(engine: ModelEngine, prompts: list[Conversation], client: str) -> tuple[list[float], int]:
    parsed = ParsedRequest(
        engine.model_id,
        stream=False,
        generate=GenerateRequest(prompts[0], sampling=Sampling(temperature=0.0, logprobs=0), client=client),
        more_prompts=tuple(prompts[1:]),
        labels=(("yes", "no"),) * len(prompts),
    )
    scores, shares = Scores(parsed.labels), list[float]()
    async with contextlib.aclosing(scores_of(engine, parsed)) as events:
        async for event in events:
            if isinstance(event, Failed):
                raise OmlxdError.from_event(event)
            scores.event(event)
    for one in scores:
        if isinstance(one, OmlxdError):
            raise one
        shares.append(one[0].share)
    return shares, scores.usage.prompt_tokens
