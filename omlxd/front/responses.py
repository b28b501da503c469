"""/v1/responses as a dialect: the one protocol with a memory, which its store is."""

from __future__ import annotations

import os
import time

import msgspec

from ..api import openai_responses
from ..api.body import ParsedRequest
from ..api.openai_responses import ResponsesRequest
from ..api.openai_responses_stream import OpenAIResponsesCollector, OpenAIResponsesStream
from .generation import Dialect
from .response_store import ResponseStore


def responses_dialect(store: ResponseStore) -> Dialect:
    """Answers go into `store` unless their request says `"store": false`."""

    def encoder(parsed: ParsedRequest, request_id: str) -> OpenAIResponsesStream:
        assert isinstance(parsed, ResponsesRequest)
        return OpenAIResponsesStream(_id(), parsed, int(time.time()), store.keep)

    def collector(parsed: ParsedRequest) -> OpenAIResponsesCollector:
        assert isinstance(parsed, ResponsesRequest)
        return OpenAIResponsesCollector(_id(), parsed, int(time.time()), store.keep)

    return Dialect(
        lambda body, headers: openai_responses.parse(body, headers, store.messages), encoder, collector
    )


class InputTokens(msgspec.Struct):
    """Of a request that was not made."""

    input_tokens: int
    object: str = "response.input_tokens"


def _id() -> str:
    return "resp_" + os.urandom(12).hex()
