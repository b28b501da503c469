"""OpenAI's Responses API: events into a stream or a response object.

A stream is `response.created`, `response.in_progress`, output items, and one of `response.completed`,
`response.incomplete` (the limit of tokens) and `response.failed`. An item is `output_item.added`, its
content, `output_item.done`. The last event has the object of an answer that is not streamed.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec
from msgspec import UNSET

from ... import chat
from ...errors import OmlxdError
from ..answer.sse import OpenCall, named_event
from ..errors import message_of
from ..fields.body import lenient_arguments
from ..openai.fields import ChatLogprob, chat_logprobs
from ..openai.tool_choice import custom_input
from . import objects as body
from .items import SUMMARY, item_id, sealed
from .request import ResponsesRequest
from .tools import tool_name

Sent = dict[str, Any]
"""An event of the stream; its `sequence_number` is set when it is sent."""
Keep = Callable[[str, tuple[chat.Message, ...], bytes, bytes], None]
"""Called at the end: (response id, the conversation with this answer, response and input as JSON)."""


def _sent(type: str, **fields: Any) -> Sent:
    return {"type": f"response.{type}", **fields}


class _Answer:
    """One response under way. Every method yields the stream's events for its change."""

    def __init__(self, id: str, request: ResponsesRequest, created: int, keep: Keep | None):
        self._id = id
        self._request = request
        self._created = created
        self._keep = keep
        self._output: list[body.Item] = []
        self._parts: list[chat.Part] = []
        self._open: body.Message | body.Reasoning | None = None
        self._text: list[str] = []
        self._logprobs: list[ChatLogprob] = []
        self._calling = OpenCall()

    # ----------------------------------------------------------------- the whole

    def created(self) -> list[Sent]:
        return [_sent("created", response=self.response("in_progress")), self.in_progress()]

    def in_progress(self) -> Sent:
        return _sent("in_progress", response=self.response("in_progress"))

    def event(self, event: chat.Event) -> list[Sent]:
        if isinstance(event, chat.TextDelta):
            logprobs = chat_logprobs(event.logprobs).content
            return self._delta(event.text, body.Message, logprobs) if event.text else []
        if isinstance(event, chat.ReasoningDelta):
            return self._delta(event.text, body.Reasoning) if event.text else []
        if isinstance(event, (chat.ToolCallDelta, chat.ToolCall, chat.ToolCallCut)):
            return self._close("completed") + self._call(event)
        if isinstance(event, chat.Finished):
            return self._finish(event)
        return []

    def failed(self, error: OmlxdError) -> list[Sent]:
        events = self._close("incomplete")
        return [*events, _sent("failed", response=self.response("failed", error=_problem(error)))]

    def response(
        self, status: body.Status, usage: chat.Usage | None = None, error: body.Problem | None = None
    ) -> body.Response:
        return msgspec.structs.replace(
            self._request.response,
            id=self._id,
            created_at=self._created,
            model=self._request.model,
            output=list(self._output),
            status=status,
            completed_at=int(time.time()) if status == "completed" else None,
            error=error,
            incomplete_details=body.Incomplete() if status == "incomplete" else None,
            usage=None if usage is None else body.usage_body(usage),
        )

    def _finish(self, finished: chat.Finished) -> list[Sent]:
        status: body.Status = "incomplete" if finished.reason == "length" else "completed"
        events = self._close(status)
        response = self.response(status, finished.usage)
        if self._request.response.store and self._keep is not None:
            turn = (chat.Message("assistant", tuple(self._parts)),) if self._parts else ()
            conversation = self._request.messages + turn
            self._keep(self._id, conversation, msgspec.json.encode(response), self._request.input)
        return [*events, _sent(status, response=response)]

    # ----------------------------------------------------------------- text and reasoning

    def _delta(
        self,
        text: str,
        kind: type[body.Message] | type[body.Reasoning],
        logprobs: list[ChatLogprob] | None = None,
    ) -> list[Sent]:
        events: list[Sent] = []
        if not isinstance(self._open, kind):
            events = self._close("completed") + self._begin(kind)
        self._text.append(text)
        assert self._open is not None
        if kind is body.Reasoning:
            return [*events, self._in_part("reasoning_text.delta", self._open.id, delta=text)]
        self._logprobs += logprobs or []
        said = self._in_part("output_text.delta", self._open.id, delta=text, logprobs=logprobs or [])
        return [*events, said]

    def _begin(self, kind: type[body.Message] | type[body.Reasoning]) -> list[Sent]:
        self._text, self._logprobs = [], []
        if kind is body.Message:
            self._open, part = body.Message(self._item_id("msg")), body.OutputText("")
        else:
            self._open, part = body.Reasoning(self._item_id("rs")), body.ReasoningText("")
        return [self._added(self._open), self._in_part("content_part.added", self._open.id, part=part)]

    def _close(self, status: body.Status) -> list[Sent]:
        item = self._open
        if item is None:
            return []
        self._open = None
        text = "".join(self._text)
        if isinstance(item, body.Message):
            part = body.OutputText(text, logprobs=self._logprobs)
            done = body.Message(item.id, [part], status)
            said = self._in_part("output_text.done", item.id, text=text, logprobs=self._logprobs)
            self._parts.append(chat.TextPart(text))
        else:
            part = body.ReasoningText(text)
            secret = sealed(text) if self._request.sealed else None
            done = body.Reasoning(item.id, [part], secret, status)
            said = self._in_part("reasoning_text.done", item.id, text=text)
            self._parts.append(chat.ThinkingPart(text))
        return [said, self._in_part("content_part.done", item.id, part=part), self._done(done)]

    # ----------------------------------------------------------------- calls

    def _call(self, call: chat.ToolCallDelta | chat.ToolCall | chat.ToolCallCut) -> list[Sent]:
        tool = tool_name(self._request.names, call.name)
        if not tool.custom:
            id, begins = self._item_id("fc"), not self._calling.id
            item = partial(body.FunctionCall, id, call.id, tool.name, namespace=tool.namespace or UNSET)
            events = [self._added(item("", status="in_progress"))] if begins else []
            if text := self._calling.take(call):
                events.append(self._in_item("function_call_arguments.delta", id, delta=text))
            if isinstance(call, chat.ToolCallDelta):
                return events
            whole = {"arguments": call.arguments, "name": tool.name}
            events.append(self._in_item("function_call_arguments.done", id, **whole))
            return [*events, self._done(item(call.arguments, status=self._keep_call(call)))]
        if isinstance(call, chat.ToolCallDelta):
            return []  # What it is given is text out of the JSON: it can't be sent before that is whole.
        id, text = self._item_id("ctc"), custom_input(call.valid_arguments)
        item = partial(body.CustomCall, id, call.id, tool.name, namespace=tool.namespace or UNSET)
        return [
            self._added(item("", status="in_progress")),
            self._in_item("custom_tool_call_input.delta", id, delta=text),
            self._in_item("custom_tool_call_input.done", id, input=text),
            self._done(item(text, status=self._keep_call(call))),
        ]

    def _keep_call(self, call: chat.ToolCall | chat.ToolCallCut) -> body.Status:
        arguments = lenient_arguments(call.valid_arguments, "arguments")
        self._parts.append(chat.ToolCallPart(call.id, call.name, arguments))
        return "incomplete" if isinstance(call, chat.ToolCallCut) else "completed"

    # ----------------------------------------------------------------- items

    def _added(self, item: body.Item) -> Sent:
        return _sent("output_item.added", output_index=self._index, item=item)

    def _done(self, item: body.Item) -> Sent:
        """Close `item`; the next one is another."""
        self._output.append(item)
        return _sent("output_item.done", output_index=self._index - 1, item=item)

    def _in_item(self, type: str, id: str, **fields: Any) -> Sent:
        return _sent(type, item_id=id, output_index=self._index, **fields)

    def _in_part(self, type: str, id: str, **fields: Any) -> Sent:
        return self._in_item(type, id, content_index=0, **fields)

    @property
    def _index(self) -> int:
        """Index of the item that is open, or comes next."""
        return len(self._output)

    def _item_id(self, prefix: str) -> str:
        return item_id(prefix, self._id, self._index)


class _Compaction(_Answer):
    """A response of one item, the model's summary, of which the client reads nothing."""

    def event(self, event: chat.Event) -> list[Sent]:
        if isinstance(event, chat.TextDelta):
            self._text.append(event.text)
        if not isinstance(event, chat.Finished):
            return []
        text = "".join(self._text).strip()
        self._request = msgspec.structs.replace(self._request, messages=())
        self._parts.append(chat.TextPart(SUMMARY.format(text)))
        item = body.Compaction(self._item_id("cmp"), sealed(text))
        return [self._added(item), self._done(item), *self._finish(event)]


def _answer(id: str, request: ResponsesRequest, created: int, keep: Keep | None) -> _Answer:
    return (_Compaction if request.compacts else _Answer)(id, request, created, keep)


class OpenAIResponsesStream:
    """`sse.StreamEncoder` of one response. `created`: Unix seconds."""

    def __init__(self, id: str, request: ResponsesRequest, created: int, keep: Keep | None = None):
        self._answer = _answer(id, request, created, keep)
        self._next = 0

    def start(self) -> bytes:
        return self._encoded(self._answer.created())

    def ping(self) -> bytes:
        # A typed event: an SSE comment doesn't put Codex's idle timer off.
        return self._encoded([self._answer.in_progress()])

    def event(self, event: chat.Event) -> bytes:
        return self._encoded(self._answer.event(event))

    def error(self, error: OmlxdError) -> bytes:
        return self._encoded(self._answer.failed(error))

    def _encoded(self, events: list[Sent]) -> bytes:
        out = b""
        for event in events:
            event["sequence_number"] = self._next
            self._next += 1
            out += named_event(event["type"].encode(), event)
        return out


class OpenAIResponsesCollector:
    """`sse.Collector` of one response. `created`: Unix seconds."""

    def __init__(self, id: str, request: ResponsesRequest, created: int, keep: Keep | None = None):
        self._answer = _answer(id, request, created, keep)
        self._response: body.Response | None = None

    def event(self, event: chat.Event) -> None:
        for sent in self._answer.event(event):
            if sent["type"] in ("response.completed", "response.incomplete"):
                self._response = sent["response"]

    def response(self) -> bytes:
        assert self._response is not None, "response before Finished"
        return msgspec.json.encode(self._response)


def _problem(error: OmlxdError) -> body.Problem:
    """Return Codex's code: it waits as a rate limit says, retries a server error, gives up after others."""
    if error.code == "overloaded":
        wait = max(1, math.ceil(error.retry_after or 2))
        return body.Problem("rate_limit_exceeded", f"{error.message} Please try again in {wait}s.")
    if error.code in ("unavailable", "internal"):
        return body.Problem("server_error", error.message)
    code = "context_length_exceeded" if error.code == "prompt_too_long" else "invalid_prompt"
    return body.Problem(code, message_of(error, "openai"))
