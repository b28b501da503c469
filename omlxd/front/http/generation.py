"""The answer to a generating request: a stream that is never silent for long, or one JSON body.

A stream's headers and first event (a ping, where the protocol begins with the prompt's tokens) go out before
the engine has said anything (at most `header_grace_s` late), and a ping follows every `ping_interval_s` of
silence: while the request queues, while its model loads, while its prompt prefills, and later too.
A client that goes away cancels its request at once, streaming or not.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

import msgspec
from starlette.types import Receive, Scope, Send

from ...api.answer.sse import Collector, StreamEncoder
from ...api.anthropic import request as anthropic
from ...api.anthropic.answer import AnthropicCollector, AnthropicStream, Keep, MessageAnswer
from ...api.anthropic.threads import ThreadRequest
from ...api.decisions import answer as decisions
from ...api.decisions import request as decisions_request
from ...api.fields.body import ParsedRequest
from ...api.gemini import request as gemini
from ...api.gemini.answer import GeminiCollector, GeminiStream, GenerateContentAnswer
from ...api.gemini.body import GenerateContentBody
from ...api.lmstudio import request as lmstudio
from ...api.lmstudio.answer import ChatAnswer, LMStudioCollector, LMStudioStream
from ...api.ollama import request as ollama
from ...api.ollama.answer import Answer as OllamaAnswer
from ...api.ollama.answer import OllamaCollector, OllamaStream
from ...api.openai import chat_request, completions, llama_completion, scores
from ...api.openai.chat_answer import ChatCompletion, OpenAIChatCollector, OpenAIChatStream
from ...api.openai.completions import OpenAICompletionCollector, OpenAICompletionStream
from ...api.responses import request as openai_responses
from ...api.responses.answer import OpenAIResponsesCollector, OpenAIResponsesStream
from ...api.responses.items import new_response_id
from ...api.responses.objects import Response as OpenAIResponse
from ...api.responses.request import ResponsesRequest
from ...chat import Event, Failed, Finished, Restarted
from ..engines.model import ModelEngine
from .choices import events_of
from .observe.request_metrics import Requests
from .observe.trace import RequestTrace, trace_of
from .sending.event_pump import EventPump
from .sending.streams import SSE, STREAM_HEADERS, unless_disconnected
from .settings import HttpSettings
from .stores.response_store import ResponseStore, item_finder
from .stores.thread_store import ThreadStore

P = TypeVar("P", bound=ParsedRequest)
T = TypeVar("T")
Parse = Callable[[bytes, Mapping[str, str]], P]
"""Reads (body, headers). Raises InvalidRequest."""
LINES = "application/x-ndjson"


@dataclass(frozen=True, slots=True)
class Dialect(Generic[P]):
    """One protocol: how bodies are read and events written.

    body, answer  structs of the document
    encoder       takes the request and its id
    stream_type   of streams; "": it has none
    held          what is held while a request is answered. Raises OmlxdError
    without_sse   what speaks to a client that does not ask for `alt=sse`; None: it need not ask
    """

    body: Any
    answer: Any
    parse: Parse[P]
    encoder: Callable[[P, str], StreamEncoder]
    collector: Callable[[P], Collector]
    stream_type: str = SSE
    held: Callable[[P], AbstractContextManager[None]] = lambda parsed: nullcontext()
    without_sse: AnyDialect | None = None

    @property
    def content_type(self) -> bytes:
        """Content type of a stream."""
        charset = "; charset=utf-8" if self.stream_type == SSE else ""
        return (self.stream_type + charset).encode()


AnyDialect = Dialect[Any]


def _id(prefix: str) -> str:
    return prefix + os.urandom(12).hex()


def _now() -> int:
    return int(time.time())


def messages_dialect(threads: ThreadStore, parse: Any = anthropic.parse_to_answer) -> AnyDialect:
    """Make the dialect of Messages; answers to requests with a thread go into `threads`."""

    def keep_of(parsed: ParsedRequest) -> Keep | None:
        return partial(threads.keep, parsed) if isinstance(parsed, ThreadRequest) else None

    return Dialect(
        anthropic.MessagesBody,
        MessageAnswer,
        lambda body, headers: parse(body, headers, threads.find_thread),
        lambda parsed, request_id: AnthropicStream(_id("msg_"), parsed.model, request_id, keep_of(parsed)),
        lambda parsed: AnthropicCollector(_id("msg_"), parsed.model, keep_of(parsed)),
        held=threads.continuing,
    )


def responses_dialect(
    store: ResponseStore, parse: Any = openai_responses.parse, stream_type: str = SSE
) -> Dialect[ResponsesRequest]:
    """Make the dialect of Responses; answers go into `store` unless their request says `"store": false`."""

    def made(kind: Callable[..., T], parsed: ResponsesRequest) -> T:
        return kind(new_response_id(), parsed, _now(), store.keep)

    return Dialect(
        openai_responses.ResponsesBody,
        OpenAIResponse,
        lambda body, headers: parse(body, headers, store.messages, item_finder(store)),
        lambda parsed, request_id: made(OpenAIResponsesStream, parsed),
        lambda parsed: made(OpenAIResponsesCollector, parsed),
        stream_type,
    )


def lmstudio_dialect(store: ResponseStore) -> Dialect[lmstudio.ChatRequest]:
    """Make LM Studio's dialect; answers go into `store` unless their request says `"store": false`."""
    return Dialect(
        lmstudio.ChatBody,
        ChatAnswer,
        lambda body, headers: lmstudio.parse(body, headers, store.messages),
        lambda parsed, request_id: LMStudioStream(new_response_id(), parsed, store.keep),
        lambda parsed: LMStudioCollector(new_response_id(), parsed, store.keep),
    )


OPENAI_CHAT = Dialect(
    chat_request.ChatBody,
    ChatCompletion,
    chat_request.parse,
    lambda parsed, request_id: OpenAIChatStream(
        *(_id("chatcmpl-"), parsed.model, _now(), request_id),
        include_usage=parsed.include_usage,
        n=parsed.answers,
        shape=parsed.calls,
    ),
    lambda parsed: OpenAIChatCollector(_id("chatcmpl-"), parsed.model, _now(), parsed.answers, parsed.calls),
)
OPENAI_COMPLETIONS = Dialect(
    completions.CompletionsBody,
    completions.Completion,
    completions.parse,
    lambda parsed, request_id: OpenAICompletionStream(
        _id("cmpl-"), parsed.model, _now(), request_id, parsed.include_usage, parsed.answers
    ),
    lambda parsed: OpenAICompletionCollector(_id("cmpl-"), parsed.model, _now(), parsed.answers),
)
LLAMA_COMPLETION = Dialect(
    llama_completion.LlamaBody,
    llama_completion.LlamaCompletion,
    llama_completion.parse,
    lambda parsed, request_id: llama_completion.LlamaStream(parsed, request_id),
    llama_completion.LlamaCollector,
)
OLLAMA_CHAT = Dialect(ollama.ChatBody, OllamaAnswer, ollama.parse_chat, OllamaStream, OllamaCollector, LINES)
OLLAMA_GENERATE = Dialect(
    ollama.GenerateBody, OllamaAnswer, ollama.parse_generate, OllamaStream, OllamaCollector, LINES
)


def _gemini(stream: bool, sse: bool = True, without_sse: AnyDialect | None = None) -> AnyDialect:
    return Dialect(
        GenerateContentBody,
        GenerateContentAnswer,
        gemini.parse(stream),
        lambda parsed, request_id: GeminiStream(_id(""), parsed, request_id, sse),
        lambda parsed: GeminiCollector(_id(""), parsed),
        SSE if sse else "application/json",
        without_sse=without_sse,
    )


GEMINI = _gemini(stream=False)
GEMINI_STREAM = _gemini(stream=True, without_sse=_gemini(stream=True, sse=False))


def _never(parsed: ParsedRequest, request_id: str) -> StreamEncoder:
    raise AssertionError("scores are not streamed")


CLASSIFY = Dialect(
    scores.ClassifyBody,
    scores.Classifications,
    scores.parse_classify,
    _never,
    lambda parsed: scores.ScoresCollector(_id("classify-"), parsed, _now(), pairs=False),
    stream_type="",
)
SCORE = Dialect(
    scores.ScoreBody,
    scores.PairScores,
    scores.parse_score,
    _never,
    lambda parsed: scores.ScoresCollector(_id("score-"), parsed, _now(), pairs=True),
    stream_type="",
)
SYSTEM_ONE = Dialect(
    decisions_request.SystemOneBody,
    decisions.SystemOneAnswer,
    decisions_request.parse_systemone,
    _never,
    decisions.DecisionsCollector,
    stream_type="",
)
DECISIONS = Dialect(
    decisions_request.DecisionsBody,
    decisions.Decision,
    decisions_request.parse_decisions,
    _never,
    decisions.DecisionsCollector,
    stream_type="",
)


@dataclass
class GenerationResponse:
    """An ASGI response. Raises OmlxdError, for the shell to answer, while no header is out.

    note_end  is called with its trace once it is over
    """

    engine: ModelEngine
    parsed: ParsedRequest
    dialect: AnyDialect
    settings: HttpSettings
    metrics: Requests
    note_end: Callable[[RequestTrace], None]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        trace = trace_of(scope)
        trace.handed_on = True
        with (
            self.metrics.watch(self.engine.model_id, trace.started) as watch,
            self.dialect.held(self.parsed),
        ):
            pump = EventPump(events_of(self.engine, self.parsed, trace.id, trace.started), watch.event)
            try:
                work = self._stream if self.parsed.stream else self._collect
                if not await unless_disconnected(receive, work(pump, send, trace)):
                    trace.outcome = "disconnected"
            finally:
                await pump.close()
                self.note_end(trace)

    async def _collect(self, pump: EventPump, send: Send, trace: RequestTrace) -> None:
        collector = self.dialect.collector(self.parsed)
        async for event in pump.events():
            _note(event, trace, pump)
            if isinstance(event, Restarted):
                collector = self.dialect.collector(self.parsed)
            collector.event(event)
        await _send_json(send, collector.response())

    async def _stream(self, pump: EventPump, send: Send, trace: RequestTrace) -> None:
        events = await pump.next(self.settings.header_grace_s)
        if events and isinstance(events[-1], Failed):
            raise pump.error(events[-1])
        encoder = self.dialect.encoder(self.parsed, trace.id)
        headers = [(b"content-type", self.dialect.content_type), *STREAM_HEADERS]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        out = encoder.start() or (b"" if events else encoder.ping())
        interval = self.settings.ping_interval_s
        clock = asyncio.get_running_loop().time
        quiet_until = clock() + interval
        while True:
            for event in events:
                _note(event, trace, pump)
                out += encoder.error(pump.error(event)) if isinstance(event, Failed) else encoder.event(event)
            ended = bool(events) and isinstance(events[-1], (Finished, Failed))
            if out or ended:
                await send({"type": "http.response.body", "body": out, "more_body": not ended})
                quiet_until = clock() + interval
            if ended:
                return
            # Events that say nothing to the client (progress) don't put the ping off.
            events = await pump.next(max(0.0, quiet_until - clock()))
            out = b"" if events else encoder.ping()


def _note(event: Event, trace: RequestTrace, pump: EventPump) -> None:
    if isinstance(event, Finished):
        trace.usage = event.usage
    elif isinstance(event, Failed):
        trace.fail(pump.error(event))
    else:
        trace.follow(event)


async def _send_json(send: Send, body: bytes) -> None:
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": False})


class InputTokens(msgspec.Struct):
    """Input tokens of a request that was only counted."""

    input_tokens: int
    object: str = "response.input_tokens"
