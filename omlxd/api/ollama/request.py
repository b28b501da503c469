"""Reads Ollama's chat and generate into a `GenerateRequest`.

`options` that would change the answer and can't be honoured are refused; those about loading (`num_ctx`,
`num_gpu`, …) are ignored. A body without messages or prompt loads its model; with `keep_alive` 0 the model
goes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Union

import msgspec

from ... import chat
from ...errors import bad_field
from ..answer.answer_format import ANY_OBJECT
from ..answer.local_fields import DialectFields, session_of
from ..answer.thinking import BudgetFields, hides_thinking, thinking_fields
from ..conversation import conversation, tool_result
from ..fields.body import (
    MAX_TOKENS,
    ParsedRequest,
    decode,
    free_json,
    image,
    image_url,
    lenient_arguments,
    misplaced,
    nucleus,
    refuse,
    session_header,
    stops,
)
from ..fields.types import (
    MAX_INT64,
    LocalTemperature,
    MinP,
    Penalty,
    RepetitionPenalty,
    Seed,
    TopK,
    TopLogprobs,
    TopP,
)
from ..openai.chat_tools import ChatTool, chat_tools
from ..openai.content import Content, content_parts, runs_of


class Options(BudgetFields, kw_only=True):
    """Options of a request; the last ones are about loading, and ignored."""

    temperature: LocalTemperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    min_p: MinP | None = None
    repeat_penalty: RepetitionPenalty | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    seed: Seed | None = None
    num_predict: Annotated[int, msgspec.Meta(ge=-2, le=MAX_INT64)] | None = None
    stop: Union[str, list[str], None] = None
    mirostat: int | None = None
    typical_p: float | None = None
    tfs_z: float | None = None
    num_ctx: int | None = None
    num_keep: int | None = None
    num_batch: int | None = None
    num_gpu: int | None = None
    num_thread: int | None = None
    main_gpu: int | None = None
    repeat_last_n: int | None = None


class _Body(DialectFields, kw_only=True):
    model: str
    stream: bool | None = None
    options: Options | None = None
    format: Union[str, dict[str, Any], None] = None
    keep_alive: Union[str, float, int, None] = None
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None


class _Function(msgspec.Struct):
    name: str
    arguments: Union[dict[str, Any], str, None] = None


class _Call(msgspec.Struct):
    function: _Function
    id: str | None = None


class _Message(msgspec.Struct):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Union[str, list[Content], None] = None
    thinking: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    images: list[str] | None = None
    tool_calls: list[_Call] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None


class ChatBody(_Body, kw_only=True):
    messages: list[_Message] | None = None
    tools: list[ChatTool] | None = None


class GenerateBody(_Body, kw_only=True):
    prompt: str | None = None
    system: str | None = None
    images: list[str] | None = None
    raw: bool | None = None
    suffix: str | None = None
    template: str | None = None
    context: list[int] | None = None


class OllamaRequest(ParsedRequest, frozen=True, kw_only=True):
    """A parsed body.

    chats          it is a chat
    loads          it holds no prompt, and only loads the model
    waits          its model has to load first
    """

    chats: bool
    loads: bool
    waits: bool = False


_chat = msgspec.json.Decoder(ChatBody)
_generate = msgspec.json.Decoder(GenerateBody)

_NOTHING = chat.RawPrompt(tokens=(0,))
"""The prompt of a request that only loads: one token without an answer."""


def parse_chat(body: bytes, headers: Mapping[str, str] | None = None) -> OllamaRequest:
    """Read a body of /api/chat. Raises InvalidRequest."""
    request = decode(_chat, body)
    prompt, thinking = None, thinking_fields(request)
    if request.messages:
        tools = chat_tools(request.tools, None, None, None)
        prompt = conversation(_messages(request.messages), tools.tools, **thinking)
    return _request(request, prompt, headers or {}, chats=True)


def parse_generate(body: bytes, headers: Mapping[str, str] | None = None) -> OllamaRequest:
    """Read a body of /api/generate. Raises InvalidRequest."""
    request = decode(_generate, body)
    refuse(
        {
            "suffix": (request.suffix, "a text can't be filled in here; leave it out"),
            "template": (request.template, "the model's own template is used; send raw: true and the prompt"),
            "context": (
                request.context,
                "no token ids are taken; send messages to /api/chat",
            ),
        }
    )
    prompt, thinking = None, thinking_fields(request)
    if request.prompt and request.raw:
        refuse({"images": (request.images, "a raw prompt has no place for them")})
        prompt = chat.RawPrompt(request.prompt)
    elif request.prompt:
        turn = chat.Message("user", (*_images(request.images, "images"), chat.TextPart(request.prompt)))
        system = (chat.Message("system", (chat.TextPart(request.system),)),) if request.system else ()
        prompt = conversation((*system, turn), (), **thinking)
    return _request(request, prompt, headers or {}, chats=False)


def _request(
    body: _Body, prompt: chat.Conversation | chat.RawPrompt | None, headers: Mapping[str, str], *, chats: bool
) -> OllamaRequest:
    options = body.options or Options()
    refuse(
        {
            "options.mirostat": (options.mirostat, "this sampler is not there; use temperature and top_p"),
            "options.typical_p": (options.typical_p not in (None, 0, 1), "use top_p or min_p"),
            "options.tfs_z": (options.tfs_z not in (None, 0, 1), "use top_p or min_p"),
        }
    )
    limit = options.num_predict or -1  # Ollama's 0 is no limit either.
    sampling = chat.Sampling(
        temperature=options.temperature,
        **nucleus(options.top_p, options.top_k),
        min_p=options.min_p,
        repetition_penalty=options.repeat_penalty,
        presence_penalty=options.presence_penalty or 0.0,
        frequency_penalty=options.frequency_penalty or 0.0,
        seed=options.seed,
        max_tokens=None if limit < 0 else min(limit, MAX_TOKENS),
        stop=stops(options.stop, "options.stop"),
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
    )
    generate = chat.GenerateRequest(
        prompt=prompt or _NOTHING,
        sampling=sampling if prompt else chat.Sampling(max_tokens=0),
        session=session_header(headers, "x-session-affinity") or session_of(body),
        format=_format(body.format) if prompt else None,
        hides_thinking=hides_thinking(body),
    )
    return OllamaRequest(
        model=body.model,
        stream=body.stream is not False,
        generate=generate,
        chats=chats,
        loads=prompt is None,
    )


def _format(value: str | dict[str, Any] | None) -> chat.AnswerFormat | None:
    if value is None or value == "":
        return None
    if isinstance(value, str) and value != "json":
        raise bad_field("format", f"{value[:40]!r} is neither json nor a JSON schema")
    schema = ANY_OBJECT if isinstance(value, str) else free_json(value, "format")
    return chat.AnswerFormat("json", schema=schema, param="format")


def _images(images: list[str] | None, param: str) -> list[chat.ImagePart]:
    """Read images from base64, or `data:` URLs, which Ollama's clients pass on."""
    return [
        image_url(data, f"{param}.{index}")
        if data[:5].lower() == "data:"
        else image(data, "image/*", f"{param}.{index}")
        for index, data in enumerate(images or [])
    ]


def _messages(items: list[_Message]) -> tuple[chat.Message, ...]:
    """Read messages. A result belongs to the first unanswered call of the tool that it names."""
    messages: list[chat.Message] = []
    waiting: dict[str, str] = {}
    for index, message in enumerate(items):
        where = f"messages.{index}"
        if message.images and message.role not in ("user", "tool"):
            raise misplaced("an image", message.role, f"{where}.images")
        parts: list[chat.Part] = [*_images(message.images, f"{where}.images")]
        thought = message.thinking or message.reasoning_content or message.reasoning
        if thought and message.role == "assistant":
            parts.append(chat.ThinkingPart(thought))
        parts += content_parts(message.content, message.role, f"{where}.content")
        if message.role == "tool":
            parts = [tool_result(_answered(message, waiting, where), parts)]
        elif message.tool_calls:
            calls = [_call(call, f"call_{index}_{at}", where) for at, call in enumerate(message.tool_calls)]
            waiting = {call.id: call.name for call in calls}
            parts += calls
        role = "system" if message.role == "developer" else message.role
        messages += [chat.Message(each, tuple(those)) for each, those in runs_of(role, parts)]
    return tuple(messages)


def _call(call: _Call, id: str, param: str) -> chat.ToolCallPart:
    value, where = call.function.arguments or {}, f"{param}.tool_calls"
    arguments = free_json(value, where) if isinstance(value, dict) else lenient_arguments(value, where)
    return chat.ToolCallPart(call.id or id, call.function.name, arguments)


def _answered(message: _Message, waiting: dict[str, str], param: str) -> str:
    """Return the id of the call that `message` answers; it no longer waits."""
    if message.tool_call_id:
        return message.tool_call_id
    named = next((id for id, name in waiting.items() if name == message.tool_name), None)
    if (id := named or next(iter(waiting), None)) is None:
        raise bad_field(f"{param}.role", "no call that has no result yet stands before this result")
    del waiting[id]
    return id
