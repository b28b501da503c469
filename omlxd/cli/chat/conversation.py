"""A conversation with a daemon's model, and each answer's figures."""

from __future__ import annotations

import contextlib
import time
import uuid
from base64 import b64encode
from collections.abc import Callable
from mimetypes import guess_type
from pathlib import Path
from typing import Any

import msgspec

from ...common.files import read_small
from ...common.units import duration
from ...errors import ConfigError
from ..daemon.client import Usage
from ..launch import Target

MAX_TOKENS = 4096
"""Tokens of an answer at most: a model that never ends its turn would fill the context."""
CUT = "cut: the limit of tokens (--max-tokens) or the context is reached"

Message = dict[str, Any]
"""`role` and `content`; `reasoning_content` lets the daemon render the turn as the model generated it."""


MOST_FILE_BYTES = 20 << 20
"""Bytes of an image at most, for the daemon too."""


def image_part(name: str) -> Message:
    """Read an image or a PDF from a file, as a part of a message. Raises ConfigError."""
    path = Path(name).expanduser()
    try:
        data = read_small(path, MOST_FILE_BYTES)
    except OSError as error:
        raise ConfigError(f"{name}: {error.strerror or error}.") from None
    kind = "application/pdf" if data.startswith(b"%PDF-") else guess_type(path.name)[0] or ""
    url = f"data:{kind};base64,{b64encode(data).decode()}"
    if kind == "application/pdf":
        return {"type": "file", "file": {"filename": path.name, "file_data": url}}
    if not kind.startswith("image/"):
        raise ConfigError(f"{name}: send a PNG, JPEG, WebP or GIF, or a PDF.")
    return {"type": "image_url", "image_url": {"url": url}}


def answer_format(text: str) -> Message:
    """Return the `response_format` of `json`, a JSON Schema, or a file with one. Raises ConfigError."""
    if text.strip().lower() == "json":
        return {"type": "json_object"}
    if not text.lstrip().startswith("{"):
        try:
            text = read_small(Path(text).expanduser()).decode(errors="replace")
        except (OSError, ValueError):
            raise ConfigError(
                f"{text[:80]!r} is neither `json`, nor a JSON Schema, nor a file that holds one."
            ) from None
    try:
        schema = msgspec.json.decode(text, type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError) as error:
        raise ConfigError(f"The schema is no JSON object: {error}.") from None
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}


def keep_alive(text: str) -> str:
    """Check that `text` is a length of time. Raises ConfigError."""
    try:
        duration(text)
    except ValueError:
        raise ConfigError(f"{text!r} is no length of time: write 30m, seconds, 0 or -1.") from None
    return text


def ask_body(**fields: Any) -> bytes:
    """Return the body of a request whose answer is a stream with its usage."""
    return msgspec.json.encode({**fields, "stream": True, "stream_options": {"include_usage": True}})


class Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None


class _Choice(msgspec.Struct):
    """A choice of an answer. `text`: of a completion, which has no `delta`."""

    delta: Delta = msgspec.field(default_factory=Delta)
    finish_reason: str | None = None
    text: str = ""


class Chunk(msgspec.Struct):
    choices: list[_Choice]
    usage: Usage | None = None


class Answer:
    """One answer as it comes, and its figures. Seconds since the question to its first token and its newest.

    pieces  of the answer so far: it has at least as many tokens
    """

    def __init__(self) -> None:
        self.text = self.thinking = self.finish_reason = ""
        self.usage: Usage | None = None
        self.pieces = 0
        self.first_s = self.last_s = 0.0
        self._began = time.monotonic()

    def add(self, chunk: Chunk) -> Delta:
        """Add `chunk`; returns its new text."""
        self.usage = chunk.usage or self.usage
        if not chunk.choices:
            return Delta()
        choice = chunk.choices[0]
        delta, self.finish_reason = choice.delta, choice.finish_reason or self.finish_reason
        text, thinking = choice.text or delta.content or "", delta.reasoning_content or ""
        if text or thinking:
            self.token_came()
            self.text += text
            self.thinking += thinking
        return delta

    def token_came(self) -> None:
        self.pieces += 1
        self.last_s = time.monotonic() - self._began
        self.first_s = self.first_s or self.last_s

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens a second by the engine's clock, else by arrival, several at once. None: too few tokens."""
        if self.usage and self.usage.omlxd.tokens_per_s:
            return self.usage.omlxd.tokens_per_s
        tokens = self.usage.completion_tokens if self.usage else self.pieces
        seconds = self.last_s - self.first_s
        return (tokens - 1) / seconds if tokens > 1 and seconds > 0 else None

    def message(self) -> Message:
        thinking = {"reasoning_content": self.thinking} if self.thinking else {}
        return {"role": "assistant", "content": self.text, **thinking}


class Conversation:
    """The turns with one model.

    answers  those that ended or were stopped
    images   parts that go with the next question
    options  fields of a request, as `temperature`; `max_tokens` is one
    system   what stands before the turns; "": nothing
    """

    def __init__(self, target: Target, system: str = "", max_tokens: int = MAX_TOKENS):
        self.target = target
        self.system = system
        self.options: dict[str, Any] = {"max_tokens": max_tokens}
        self.clear()

    def clear(self) -> None:
        self._turns: list[Message] = []
        self._asked: Any = None
        self._name = f"chat-{uuid.uuid4().hex}"
        self.images: list[Message] = []
        self.answers: list[Answer] = []

    @property
    def messages(self) -> list[Message]:
        system: list[Message] = [{"role": "system", "content": self.system}] if self.system else []
        return [*system, *self._turns]

    def ask(self, question: str, show: Callable[[Delta], None]) -> Answer:
        """Ask, and `show` each part of the answer as it comes. Raises DaemonError; the question is then not
        kept.

        KeyboardInterrupt stops the answer, and what came of it is kept.
        """
        parts, self.images = self.images, []
        content = [*parts, {"type": "text", "text": question}] if parts else question
        return self._ask(self._turns, content, show)

    def check_question(self) -> None:
        """Raise ConfigError without a question to ask again."""
        if self._asked is None:
            raise ConfigError("There is no question yet.")

    def ask_again(self, show: Callable[[Delta], None], **options: Any) -> Answer:
        """Ask the last question again, and forget its answer. Raises ConfigError if there is none.

        options  for this answer alone
        """
        self.check_question()
        answered = bool(self._turns) and self._turns[-2]["content"] is self._asked
        return self._ask(self._turns[:-2] if answered else self._turns, self._asked, show, **options)

    def _ask(
        self, turns: list[Message], content: Any, show: Callable[[Delta], None], **options: Any
    ) -> Answer:
        self._asked = content
        question: Message = {"role": "user", "content": content}
        system: list[Message] = [{"role": "system", "content": self.system}] if self.system else []
        fields = {**self.options, **options}
        body = ask_body(
            model=self.target.model,
            messages=[*system, *turns, question],
            prompt_cache_key=self._name,
            **fields,
        )
        answer = Answer()
        chunks = self.target.stream("/v1/chat/completions", body, Chunk)
        with contextlib.closing(chunks):
            try:
                for chunk in chunks:
                    show(answer.add(chunk))
            except KeyboardInterrupt:
                answer.finish_reason = "stopped"
        if answer.text or answer.finish_reason != "stopped":
            self._turns = [*turns, question, answer.message()]
            self.answers.append(answer)
        return answer
