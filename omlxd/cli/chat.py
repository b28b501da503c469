"""`omlxd chat`: talk to a model in the terminal, or put one question to it.

The running daemon answers. If there is none, the command starts one and ends it afterwards.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import io
import os
import re
import signal
import sys
import termios
import time
import uuid
from base64 import b64encode
from collections.abc import Callable, Generator, Sequence
from mimetypes import guess_type
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.text import Text

from ..common.files import read_small
from ..config import load_settings
from ..errors import ConfigError
from ..models.offer import offer_default_model
from .daemon_client import DaemonError, NoDaemon, Usage, add_url, find_daemon
from .launch import Models, Target, find_target
from .own_daemon import own_daemon
from .status import table

PROMPT = "> "
LEAVE = ("/quit", "/exit", "/bye")
MAX_TOKENS = 4096
"""Of an answer: a model that never ends its turn would fill the context."""
CUT = "cut: the limit of tokens (--max-tokens) or the context is reached"
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""Characters that would command the terminal."""


Message = dict[str, Any]
"""`role` and `content`; `reasoning_content` lets the daemon render the turn as the model generated it."""


MOST_FILE_BYTES = 20 << 20
"""Of an image, for the daemon too."""


def image_part(name: str) -> Message:
    """An image or a PDF from a file, as a part of a message. Raises ConfigError."""
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


def ask_body(**fields: Any) -> bytes:
    """The body of a request whose answer is a stream with its usage."""
    return msgspec.json.encode({**fields, "stream": True, "stream_options": {"include_usage": True}})


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None


class _Choice(msgspec.Struct):
    """`text`: of a completion, which has no `delta`."""

    delta: _Delta = msgspec.field(default_factory=_Delta)
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

    def add(self, chunk: Chunk) -> _Delta:
        """Take `chunk` in; returns what it adds."""
        self.usage = chunk.usage or self.usage
        if not chunk.choices:
            return _Delta()
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
        """By the engine's clock where it is told: pieces may come several at once. None: too few tokens."""
        if self.usage and self.usage.omlxd.tokens_per_s:
            return self.usage.omlxd.tokens_per_s
        tokens = self.usage.completion_tokens if self.usage else self.pieces
        seconds = self.last_s - self.first_s
        return (tokens - 1) / seconds if tokens > 1 and seconds > 0 else None

    def message(self) -> Message:
        thinking = {"reasoning_content": self.thinking} if self.thinking else {}
        return {"role": "assistant", "content": self.text, **thinking}


class Conversation:
    """The turns with one model. `answers`: those that ended or were stopped. `max_tokens`: of an answer.
    `images`: parts that go with the next question.
    """

    def __init__(self, target: Target, system: str = "", max_tokens: int = MAX_TOKENS):
        self.target = target
        self._system = system
        self._max_tokens = max_tokens
        self.clear()

    def clear(self) -> None:
        self._messages: list[Message] = []
        if self._system:
            self._messages.append({"role": "system", "content": self._system})
        self._name = f"chat-{uuid.uuid4().hex}"
        self.images: list[Message] = []
        self.answers: list[Answer] = []

    def ask(self, question: str, show: Callable[[_Delta], None]) -> Answer:
        """`show` each part of the answer as it comes. Raises DaemonError; the question is then not kept.

        KeyboardInterrupt stops the answer, and what came of it is kept.
        """
        parts, self.images = self.images, []
        content = [*parts, {"type": "text", "text": question}] if parts else question
        messages: list[Message] = [*self._messages, {"role": "user", "content": content}]
        limit, name = self._max_tokens, self._name
        body = ask_body(model=self.target.model, messages=messages, max_tokens=limit, prompt_cache_key=name)
        answer = Answer()
        chunks = self.target.stream("/v1/chat/completions", body, Chunk)
        with contextlib.closing(chunks):
            try:
                for chunk in chunks:
                    show(answer.add(chunk))
            except KeyboardInterrupt:
                answer.finish_reason = "stopped"
        if answer.text or answer.finish_reason != "stopped":
            self._messages = [*messages, answer.message()]
            self.answers.append(answer)
        return answer


# --------------------------------------------------------------------------- the terminal


class Terminal:
    """A conversation on a terminal: one line in, one answer out."""

    def __init__(self, conversation: Conversation, console: Console):
        self._conversation = conversation
        self._console = console
        self._commands: dict[str, tuple[str, Callable[[str], None]]] = {
            "/clear": ("begins a new conversation", self._clear),
            "/model": ("shows the models; `/model NAME` goes on with another one", self._model),
            "/image": (
                "`/image FILE` shows the model a picture or a PDF with your next question",
                self._image,
            ),
            "/stats": ("shows cached tokens, tokens per second and time to the first token", self._stats),
            "/help": ("shows this", self._help),
        }

    def run(self) -> None:
        """Read lines until one of `LEAVE`, or Ctrl-D."""
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  (line editing and history for `input`)
        target = self._conversation.target
        self._say(f"{target.model}, {_context(target)}. /help lists commands; Ctrl-D leaves.", "dim")
        while True:
            try:
                line = input(PROMPT).strip()
            except KeyboardInterrupt:
                print()
                continue
            except EOFError:
                print()
                return
            if line in LEAVE:
                return
            try:
                with _typing_waits():
                    self._take(line)
            except (ConfigError, DaemonError) as error:
                self._say(error.message, "red")

    def _take(self, line: str) -> None:
        command, _, rest = line.partition(" ")
        if command in self._commands:
            self._commands[command][1](rest.strip())
        elif re.fullmatch(r"/[a-z]+", command):
            self._say(f"There is no {command}; /help lists commands.", "red")
        elif line:
            show = Writer(self._console)
            answer = show.answer(self._conversation, line)
            notes = {"stopped": "stopped", "length": CUT}
            if note := notes.get(answer.finish_reason):
                self._say(f"({note})", "dim")

    def _clear(self, rest: str) -> None:
        self._conversation.clear()
        self._say("A new conversation begins.", "dim")

    def _model(self, rest: str) -> None:
        target = self._conversation.target
        if rest:
            self._conversation.target = target = find_target(target, rest)
            self._say(f"{target.model}, {_context(target)}", "dim")
            return
        models = target.fetch("/v1/models", Models).data
        rows = [("* " if m.id == target.model else "  ") + f"{m.id}  {m.omlxd.state}" for m in models]
        self._say("\n".join(rows))

    def _image(self, rest: str) -> None:
        name = rest.strip("'\"").replace("\\ ", " ")  # As terminals write a file that is dropped on them.
        self._conversation.images.append(image_part(name))
        self._say(f"{Path(name).name} goes with your next question.", "dim")

    def _stats(self, rest: str) -> None:
        rows: list[tuple[str, ...]] = [
            ("ANSWER", "PROMPT", "FROM RAM", "FROM SSD", "COMPUTED", "TTFT", "TOKENS", "TOKENS/S")
        ]
        rows += [
            (str(number), *_figures(answer)) for number, answer in enumerate(self._conversation.answers, 1)
        ]
        self._say("\n".join(table(rows)) if len(rows) > 1 else "There is no answer yet.")

    def _help(self, rest: str) -> None:
        rows = [(name, text) for name, (text, _) in self._commands.items()]
        self._say(
            "\n".join(
                table([*rows, ("Ctrl-C", "stops an answer"), ("Ctrl-D", f"leaves, as {LEAVE[0]} does")])
            )
        )

    def _say(self, text: str, style: str = "") -> None:
        self._console.print(Text(text, style))


@contextlib.contextmanager
def _typing_waits() -> Generator[None]:
    """What is typed meanwhile waits for the next prompt: it is not shown now, and Ctrl-C keeps it."""
    before = termios.tcgetattr(0)
    meanwhile = [*before]
    meanwhile[3] = before[3] & ~termios.ECHO | termios.NOFLSH
    try:
        termios.tcsetattr(0, termios.TCSANOW, meanwhile)
        yield
    finally:
        termios.tcsetattr(0, termios.TCSANOW, before)


class Writer:
    """Writes an answer as it comes: the thinking dimmed, a line between it and the text."""

    def __init__(self, console: Console):
        self._console = console
        self._style: str | None = None

    def answer(self, conversation: Conversation, question: str) -> Answer:
        """The answer to `question`, written. Raises DaemonError."""
        with contextlib.ExitStack() as waiting:
            if self._console.is_terminal:
                waiting.enter_context(self._console.status("computing the prompt"))

            def show(delta: _Delta) -> None:
                if delta.content or delta.reasoning_content:
                    waiting.close()
                self._write(delta.reasoning_content or "", "dim italic")
                self._write(delta.content or "", "")

            try:
                return conversation.ask(question, show)
            finally:
                waiting.close()
                if self._style is not None:
                    self._console.print()

    def _write(self, text: str, style: str) -> None:
        if not text:
            return
        if self._style not in (None, style):
            self._console.print("\n")
        self._style = style
        self._console.print(Text(_CONTROLS.sub("", text), style), end="", soft_wrap=True)


def _figures(answer: Answer) -> tuple[str, ...]:
    """Cells of `/stats`, without the number."""
    ttft, usage = f"{answer.first_s:.2f} s", answer.usage
    speed = f"{answer.tokens_per_s:.1f}" if answer.tokens_per_s else "-"
    if usage is None:  # It was stopped: no usage came.
        return ("-", "-", "-", "-", ttft, f"{answer.pieces}+", speed)
    prompt, cached = usage.prompt_tokens, usage.omlxd
    counts = map(str, (prompt, cached.cached_hot, cached.cached_cold, prompt - cached.all))
    return (*counts, ttft, str(usage.completion_tokens), speed)


def _context(target: Target) -> str:
    return f"context {target.context} tokens" if target.context else "context not known yet"


# --------------------------------------------------------------------------- the command


def main(argv: Sequence[str], parser: argparse.ArgumentParser) -> int:
    """Exit status 1 without a question, 130 at ^C. Raises OmlxdError."""
    parser.usage = (
        "omlxd chat [QUESTION …] [--image FILE] [--model NAME] [--url URL] [--system TEXT] [--max-tokens N]"
    )
    parser.add_argument("question", nargs="*", help="print the answer to it and end; also taken from a pipe")
    parser.add_argument("--model", metavar="NAME", help="default: the first one that is loaded")
    parser.add_argument(
        "--image", metavar="FILE", action="append", default=[], help="a picture or a PDF; again for more"
    )
    add_url(parser)
    parser.add_argument("--system", metavar="TEXT", default="", help="what stands before the conversation")
    parser.add_argument(
        "--max-tokens", metavar="N", type=int, default=MAX_TOKENS, help=f"of an answer; default: {MAX_TOKENS}"
    )
    args = parser.parse_args(argv)
    # Words and files may be in another encoding, which JSON can't hold.
    question, system = (
        os.fsencode(t).decode(errors="replace") for t in (" ".join(args.question), args.system)
    )
    images = [image_part(name) for name in args.image]
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")
    if not sys.stdin or not sys.stdin.isatty():  # It may be closed, and None.
        question = f"{question}\n\n{sys.stdin.read() if sys.stdin else ''}".strip()
        if not question:
            print("omlxd: there is no question: standard input is empty.", file=sys.stderr)
            return 1
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # The terminal is put right.
    try:
        with daemon(args.url, args.model) as target:
            conversation = Conversation(target, system, args.max_tokens)
            conversation.images += images
            console = Console(highlight=False)
            if question:
                _print_answer(conversation, question, console)
            else:
                Terminal(conversation, console).run()
    except KeyboardInterrupt:
        return 130
    return 0


@contextlib.contextmanager
def daemon(url: str | None, model: str | None) -> Generator[Target]:
    """The running daemon and its model; without one, and without `url`, one for as long as the block."""
    try:
        target = find_target(find_daemon(url), model)
    except NoDaemon:
        if url is not None:
            raise
    else:
        yield target
        return
    print("omlxd: no daemon runs; starting one for this chat", file=sys.stderr)
    # The daemon's own offer would reach nobody.
    asyncio.run(offer_default_model(load_settings({"model": model} if model else {})))
    with own_daemon(*(["--model", model] if model else [])) as own:
        yield find_target(own, None)


def _print_answer(conversation: Conversation, question: str, console: Console) -> None:
    """Into a file or a pipe the text alone goes, without the thinking."""
    if console.is_terminal:
        Writer(console).answer(conversation, question)
        return

    def show(delta: _Delta) -> None:
        sys.stdout.write(delta.content or "")
        sys.stdout.flush()

    answer = conversation.ask(question, show)
    if not answer.text.endswith("\n"):
        print(flush=True)  # Before a note on standard error.
    if answer.finish_reason == "length":
        print(f"omlxd: {CUT}", file=sys.stderr)
    if answer.finish_reason == "stopped":
        raise KeyboardInterrupt
