"""/v1/responses as a dialect: the one protocol with a memory, which its store is."""

from __future__ import annotations

import time

import msgspec

from ..api import openai_responses
from ..api.body import ParsedRequest
from ..api.openai_ids import new_response_id
from ..api.openai_responses import ResponsesRequest
from ..api.openai_responses_stream import OpenAIResponsesCollector, OpenAIResponsesStream
from .generation import Dialect
from .response_store import ItemFinder, ResponseStore


def responses_dialect(store: ResponseStore) -> Dialect:
    """Answers go into `store` unless their request says `"store": false`."""

    def encoder(parsed: ParsedRequest, request_id: str) -> OpenAIResponsesStream:
        assert isinstance(parsed, ResponsesRequest)
        return OpenAIResponsesStream(new_response_id(), parsed, int(time.time()), store.keep)

    def collector(parsed: ParsedRequest) -> OpenAIResponsesCollector:
        assert isinstance(parsed, ResponsesRequest)
        return OpenAIResponsesCollector(new_response_id(), parsed, int(time.time()), store.keep)

    return Dialect(
        lambda body, headers: openai_responses.parse(body, headers, store.messages, ItemFinder(store)),
        encoder,
        collector,
    )


class InputTokens(msgspec.Struct):
    """Of a request that was not made."""

    input_tokens: int
    object: str = "response.input_tokens"
