"""Vectors and scores of texts: bodies of OpenAI's, Jina's, Cohere's and Ollama's routes, and their answers.

| path                                  | body and answer                                              |
|---------------------------------------|--------------------------------------------------------------|
| /v1/embeddings                        | OpenAI's; base64 is what its SDK asks for by itself          |
| /v1/rerank, /rerank, /v2/rerank       | Jina's and Cohere's: one answer that clients of both read    |
| /api/embed, /api/embeddings (old)     | Ollama's                                                     |
"""

from __future__ import annotations

import base64
import time
from array import array
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Literal, Union

import msgspec
from msgspec import UNSET, UnsetType

from ..chat import EmbedRequest, Vectors
from ..errors import bad_field

MOST_TEXTS = 2048
"""Texts of a request at most, as OpenAI's."""
Count = Annotated[int, msgspec.Meta(ge=1, le=1 << 20)]
_Input = Union[str, list[Union[str, int, list[int]]]]


class EmbeddingsBody(msgspec.Struct):
    input: _Input
    model: str = ""
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Count | None = None
    user: str | None = None


class Embedding(msgspec.Struct):
    index: int
    embedding: Union[list[float], str]
    object: str = "embedding"


class EmbeddingsUsage(msgspec.Struct):
    prompt_tokens: int
    total_tokens: int


class EmbeddingsAnswer(msgspec.Struct):
    data: list[Embedding]
    model: str
    usage: EmbeddingsUsage
    object: str = "list"


class OllamaEmbedBody(msgspec.Struct):
    """A body. `truncate`: cut a text that is too long, as Ollama does by default."""

    model: str
    input: Union[str, list[str]]
    truncate: bool = True
    dimensions: Count | None = None
    options: Any = None
    keep_alive: Union[str, float, int, None] = None


class OllamaEmbedAnswer(msgspec.Struct):
    model: str
    embeddings: list[list[float]]
    total_duration: int
    prompt_eval_count: int
    load_duration: int = 0


class OllamaEmbeddingsBody(msgspec.Struct):
    model: str
    prompt: str
    options: Any = None
    keep_alive: Union[str, float, int, None] = None


class OllamaEmbeddingsAnswer(msgspec.Struct):
    embedding: list[float]


class Document(msgspec.Struct):
    text: str


class RerankBody(msgspec.Struct):
    """A body. `instruction`: what makes a document fit, for models that read one."""

    query: str
    documents: list[Union[str, Document]]
    model: str = ""
    top_n: Count | None = None
    return_documents: bool = False
    instruction: str = ""

    @property
    def texts(self) -> tuple[str, ...]:
        return tuple(one if isinstance(one, str) else one.text for one in self.documents)


class RerankResult(msgspec.Struct):
    index: int
    relevance_score: float
    document: Document | UnsetType = UNSET


class RerankUsage(msgspec.Struct):
    total_tokens: int


class BilledUnits(msgspec.Struct):
    search_units: int = 1


class RerankMeta(msgspec.Struct):
    """Units that Cohere's clients look for."""

    billed_units: BilledUnits = msgspec.field(default_factory=BilledUnits)


class RerankAnswer(msgspec.Struct):
    id: str
    model: str
    results: list[RerankResult]
    usage: RerankUsage
    meta: RerankMeta = msgspec.field(default_factory=RerankMeta)


def embed_request(
    value: str | Sequence[str | int | list[int]], dimensions: int | None = None, truncate: bool = False
) -> EmbedRequest:
    """Make an engine's request for a text, texts, token ids, or lists of them. Raises InvalidRequest."""
    items: list[Any] = [value] if isinstance(value, str) else list(value)
    if items and all(isinstance(item, int) for item in items):
        items = [items]
    if not 0 < len(items) <= MOST_TEXTS:
        raise bad_field("input", f"1 to {MOST_TEXTS} texts are needed")
    if len({type(item) for item in items}) > 1 or isinstance(items[0], int):
        raise bad_field("input", "texts or lists of token ids are needed, all of one kind")
    if isinstance(items[0], str):
        return EmbedRequest(texts=tuple(items), dimensions=dimensions or 0, truncate=truncate)
    return EmbedRequest(tokens=tuple(map(tuple, items)), dimensions=dimensions or 0)


def vectors_of(vectors: Vectors) -> list[list[float]]:
    return [array("f", row).tolist() for row in _rows(vectors)]


def _rows(vectors: Vectors) -> Iterable[bytes]:
    step = 4 * vectors.width
    return (vectors.values[at : at + step] for at in range(0, len(vectors.values), step))


def embeddings_answer(body: EmbeddingsBody, model: str, vectors: Vectors) -> EmbeddingsAnswer:
    if body.encoding_format == "base64":
        values: list[Any] = [base64.b64encode(row).decode() for row in _rows(vectors)]
    else:
        values = vectors_of(vectors)
    data = [Embedding(index, value) for index, value in enumerate(values)]
    return EmbeddingsAnswer(data, model, EmbeddingsUsage(vectors.tokens, vectors.tokens))


def ollama_answer(model: str, vectors: Vectors, began: float) -> OllamaEmbedAnswer:
    """Make Ollama's answer. `began`: monotonic time."""
    took = int((time.monotonic() - began) * 1e9)
    return OllamaEmbedAnswer(model, vectors_of(vectors), took, vectors.tokens)


def check_documents(body: RerankBody) -> None:
    """Raise InvalidRequest for a query or documents that can't be scored."""
    if not 0 < len(body.documents) <= MOST_TEXTS:
        raise bad_field("documents", f"1 to {MOST_TEXTS} documents are needed")
    if not body.query:
        raise bad_field("query", "a text is needed")


def rerank_answer(id: str, model: str, body: RerankBody, scores: list[float], tokens: int) -> RerankAnswer:
    """Return the documents with the highest scores, best first."""
    order = sorted(range(len(scores)), key=lambda at: -scores[at])[: body.top_n]
    texts = body.texts
    results = [
        RerankResult(at, scores[at], Document(texts[at]) if body.return_documents else UNSET) for at in order
    ]
    return RerankAnswer(id, model, results, RerankUsage(tokens))
