"""A conversation on a terminal: a question in, an answer out, and commands that begin with a slash.

prompt_toolkit reads the questions: a paste of several lines is one, and history lasts over sessions.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import sys
import termios
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec
from prompt_toolkit import PromptSession
from prompt_toolkit.completion import WordCompleter
from prompt_toolkit.filters import Condition
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.output.vt100 import Vt100_Output
from rich.console import Console
from rich.text import Text

from ...common.files import read_small, write_atomic
from ...config.values import SWITCHES, closest
from ...errors import ConfigError, OmlxdError
from ..daemon.client import DaemonError
from ..daemon.owner_api import InstalledStatus
from ..launch import Models, Target, find_target
from ..models.command import LOAD_S, as_page
from ..watch.status import table
from .conversation import CUT, Answer, Conversation, Message, answer_format, image_part
from .writer import Writer

PROMPT = "> "
LEAVE = ("/quit", "/exit", "/bye")
QUOTES = '"""'
CONTINUED = f"  ({QUOTES} ends it) "
HISTORY_BYTES = 1 << 20
"""Bytes of the history; its older half goes when a session begins."""

_NUMBERS: dict[str, tuple[str, float, float]] = {
    "temperature": ("", 0, 2),
    "top_p": ("", 0, 1),
    "top_k": ("whole", 0, 10**9),
    "min_p": ("", 0, 1),
    "repetition_penalty": ("", 0.01, 10),
    "seed": ("whole", 0, 2**63 - 1),
    "max_tokens": ("whole", 1, 2**31 - 1),
}
_SAME = {"num_predict": "max_tokens", "repeat_penalty": "repetition_penalty"}
"""Ollama's names of commands."""
_SWITCHED = {
    "nothink": ("think", False),
    "verbose": ("verbose", True),
    "quiet": ("verbose", False),
    "history": ("history", True),
    "nohistory": ("history", False),
    "think": ("think", True),
    "markdown": ("markdown", True),
    "thoughts": ("thoughts", True),
}
"""Ollama's words for on and off."""
_FORMATS = "json, a JSON Schema, or a file that holds one; or `text`"


def history_file(path: Path) -> History:
    """Open the history in `path`, which only its owner reads; without a place for it, this session's."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.close(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o600))
        if path.stat().st_size > HISTORY_BYTES:
            kept = read_small(path, 1 << 30)[-HISTORY_BYTES // 2 :]
            write_atomic(path, kept[kept.find(b"\n# ") + 1 :])
        return FileHistory(str(path))
    except OSError:
        return InMemoryHistory()


class Terminal:
    """A conversation, read from standard input. `history`: of questions and commands."""

    def __init__(
        self,
        conversation: Conversation,
        console: Console,
        history: Path | None = None,
        *,
        markdown: bool = True,
        verbose: bool = False,
        thoughts: bool = True,
    ):
        self._conversation = conversation
        self._console = console
        self._history = history
        self._histories: dict[bool, History] = {False: InMemoryHistory()}
        if history is not None:
            self._histories[True] = history_file(history)
        self._shown = {
            "markdown": markdown,
            "verbose": verbose,
            "thoughts": thoughts,
            "history": history is not None,
        }
        self._saved: Path | None = None
        self._commands: dict[str, tuple[str, str, Callable[[str], None]]] = {
            "/retry": ("[X]", "asks the last question again, at temperature X", self._retry),
            "/system": (
                "[TEXT]",
                "shows or sets what stands before all; `none`: nothing",
                self._system,
            ),
            "/set": ("[NAME VALUE]", "shows or sets temperature, think and others", self._set),
            "/image": ("FILE", "sends a picture or a PDF with your next question", self._image),
            "/model": ("[NAME]", "shows the models, or goes on with another one", self._model),
            "/load": ("NAME", "loads another model, and begins a new conversation with it", self._load),
            "/show": (
                "[parameters]",
                "shows the model's facts, or what /set has set; also system",
                self._show,
            ),
            "/stats": ("", "shows cached tokens, speed and time to the first token", self._stats),
            "/save": ("FILE", "writes the conversation as Markdown, or as .json", self._save),
            "/clear": ("", "begins a new conversation", self._clear),
            "/help": ("", "shows this", self._help),
        }

    def run(self) -> None:
        """Read questions until one of `LEAVE`, or Ctrl-D."""
        target = self._conversation.target
        self._say(f"{target.model}, {_context(target)}. /help lists commands; Ctrl-D leaves.", "dim")
        session = self._session()
        while True:
            try:
                line = session.prompt(PROMPT).strip()
            except KeyboardInterrupt:
                continue
            except EOFError:
                return
            if line in LEAVE:
                return
            try:
                with _typing_waits():
                    self._take(line)
            except OmlxdError as error:
                self._say(in_words(error), "red")
            if session.history is not self._kept():
                session = self._session()

    def _session(self) -> PromptSession[str]:
        output = Vt100_Output.from_pty(sys.stdout)
        output.enable_cpr = False  # A terminal that does not answer would get a warning.
        session: PromptSession[str] = PromptSession(
            history=self._kept(),
            output=output,
            multiline=Condition(lambda: _is_open(session.default_buffer.text)),
            prompt_continuation=lambda width, number, wrapped: (
                ""
                if wrapped
                else CONTINUED
                if number == 1 and _is_open(session.default_buffer.text)
                else "  "
            ),
            key_bindings=_leaves_block(lambda: _is_open(session.default_buffer.text)),
            completer=WordCompleter([*self._commands, *LEAVE], sentence=True),
            complete_while_typing=False,
            reserve_space_for_menu=0,
        )
        return session

    def _kept(self) -> History:
        """Return the history of questions: the same object until `/set history` changes it."""
        return self._histories[self._shown["history"]]

    def _take(self, line: str) -> None:
        command, _, rest = line.partition(" ")
        command = {"/?": "/help"}.get(command, command)
        if command in self._commands:
            self._commands[command][2](rest.strip())
        elif re.fullmatch(r"/[a-z?]+", command):
            near = closest(command, [*self._commands, *LEAVE])
            self._say(f"There is no {command}{near}; /help lists commands.", "red")
        elif line:
            self._answer(lambda show: self._conversation.ask(unquoted(line), show))

    def _answer(self, ask: Callable[[Callable[[Any], None]], Answer]) -> None:
        is_json = "response_format" in self._conversation.options
        answer = Writer(self._console, self._shown["markdown"], self._shown["thoughts"], is_json).answer(ask)
        if note := {"stopped": "stopped", "length": CUT}.get(answer.finish_reason):
            self._say(f"({note})", "dim")
        if self._shown["verbose"]:
            self._say(summary(answer), "dim")

    # ----------------------------------------------------------------- commands

    def _clear(self, rest: str) -> None:
        self._conversation.clear()
        self._say("A new conversation begins.", "dim")

    def _retry(self, rest: str) -> None:
        options = {"temperature": _number("temperature", rest)} if rest else {}
        self._conversation.check_question()  # Before a spinner turns.
        self._answer(lambda show: self._conversation.ask_again(show, **options))

    def _system(self, rest: str) -> None:
        if rest:
            self._conversation.system = "" if rest == "none" else unquoted(rest)
        self._say(self._conversation.system or "There is no system message.", "dim")

    def _set(self, rest: str) -> None:
        name, _, value = rest.removeprefix("parameter ").strip().partition(" ")
        name, value = _SAME.get(name, name), value.strip()
        if not name:
            self._say("\n".join(table(self._settings())))
        elif name == "system":
            self._system(value)
        elif name in _NUMBERS or name == "stop":
            self._set_option(name, value)
        elif name in ("format", "noformat"):
            self._set_format(value if name == "format" else "default")
        elif name in _SWITCHED:
            key, on = _SWITCHED[name]
            if value and value.lower() not in ("true", "false", *SWITCHES):
                raise ConfigError(f"/set {name}: {value!r} is neither on nor off.")
            chosen = SWITCHES.get(value.lower(), value.lower() != "false")
            self._switch(key, on == chosen)
        else:
            near = closest(name, [*_NUMBERS, *_SWITCHED, "stop", "system", "format"])
            raise ConfigError(f"There is no setting {name!r}{near}; /set shows them.")

    def _set_option(self, name: str, value: str) -> None:
        options = self._conversation.options
        if not value:
            raise ConfigError(f"/set {name}: say what it shall be, or `default`.")
        if value == "default":
            options.pop(name, None)
        else:
            options[name] = [value] if name == "stop" else _number(name, value)
        self._say(f"{name} is {value if value == 'default' else _shown(options[name])}.", "dim")

    def _set_format(self, value: str) -> None:
        options = self._conversation.options
        if not value:
            raise ConfigError(f"/set format: say {_FORMATS}.")
        if value.lower() in ("default", "text", "none"):
            options.pop("response_format", None)
        else:
            try:
                options["response_format"] = answer_format(value)
            except ConfigError as error:
                raise ConfigError(f"/set format: {error.message} Say {_FORMATS}.") from None
        self._say(f"format is {self._format()}.", "dim")

    def _format(self) -> str:
        said = self._conversation.options.get("response_format")
        return "text" if said is None else "json" if said["type"] == "json_object" else "a JSON Schema"

    def _switch(self, name: str, on: bool) -> None:
        if name == "think":
            self._conversation.options["enable_thinking"] = on
        elif name == "history" and on and self._history is None:
            raise ConfigError("History was left out for this chat; start it without --no-history.")
        else:
            self._shown[name] = on
        self._say(f"{name} is {'on' if on else 'off'}.", "dim")

    def _settings(self) -> list[tuple[str, ...]]:
        options = self._conversation.options
        thinks = options.get("enable_thinking")
        rows = [(name, _shown(options.get(name, "the model's own"))) for name in (*_NUMBERS, "stop")]
        rows.append(("think", "the model's own" if thinks is None else "on" if thinks else "off"))
        rows.append(("format", self._format()))
        return [*rows, *((name, "on" if on else "off") for name, on in self._shown.items())]

    def _model(self, rest: str) -> None:
        target = self._conversation.target
        if rest:
            self._conversation.target = target = find_target(target, rest)
            self._say(f"{target.model}, {_context(target)}", "dim")
            return
        models = target.fetch("/v1/models", Models).data
        rows = [("* " if m.id == target.model else "  ") + f"{m.id}  {m.omlxd.state}" for m in models]
        self._say("\n".join(rows))

    def _load(self, rest: str) -> None:
        if not rest:
            raise ConfigError("/load: name a model; /model shows them.")
        if rest.endswith((".md", ".json")) or Path(rest.strip("'\"")).expanduser().is_file():
            raise ConfigError(
                "/load: it takes a model; a saved conversation is a file, and isn't loaded again."
            )
        talk = self._conversation
        target = find_target(talk.target, rest)
        stays = {name: talk.options[name] for name in ("keep_alive",) if name in talk.options}
        body = {"model": target.model, "stream": False, **stays}
        with self._console.status(f"loading {target.model}"):
            # Ollama's order leaves the model's time to stay as it is.
            target.fetch("/api/generate", dict, msgspec.json.encode(body), LOAD_S)
        talk.target = target = find_target(target, target.model)
        talk.clear()
        self._say(f"{target.model}, {_context(target)}. A new conversation begins.", "dim")

    def _show(self, rest: str) -> None:
        if rest in ("parameters", "parameter"):
            self._say("\n".join(table(self._settings())))
        elif rest == "system":
            self._system("")
        elif rest in ("", "info"):
            target = self._conversation.target
            model = target.fetch("/omlxd/models/" + quote(target.model), InstalledStatus)
            self._say(as_page(model))
        else:
            raise ConfigError(f"/show: {rest[:40]!r} is none of info, parameters and system.")

    def _image(self, rest: str) -> None:
        if not rest:
            raise ConfigError("/image: name a file.")
        name = rest.strip("'\"").replace("\\ ", " ")  # As terminals write a file that is dropped on them.
        self._conversation.images.append(image_part(name))
        self._say(f"{Path(name).name} goes with your next question.", "dim")

    def _save(self, rest: str) -> None:
        if not rest:
            raise ConfigError("/save: name a file, as talk.md or talk.json.")
        path = Path(rest.strip("'\"").replace("\\ ", " ")).expanduser().absolute()
        if not self._conversation.answers:
            raise ConfigError("There is no answer yet.")
        if path.exists() and path != self._saved:
            raise ConfigError(f"{path} is there already; give another name.")
        messages = self._conversation.messages
        text = msgspec.json.format(
            msgspec.json.encode({"model": self._conversation.target.model, "messages": messages})
        )
        try:
            write_atomic(path, text if path.suffix == ".json" else as_markdown(messages).encode())
        except OSError as error:
            raise ConfigError(f"{path} can't be written: {error.strerror or error}.") from None
        self._saved = path
        self._say(f"The conversation is in {path}.", "dim")

    def _stats(self, rest: str) -> None:
        rows: list[tuple[str, ...]] = [
            ("ANSWER", "PROMPT", "FROM RAM", "FROM SSD", "COMPUTED", "TTFT", "TOKENS", "TOKENS/S")
        ]
        rows += [
            (str(number), *_figures(answer)) for number, answer in enumerate(self._conversation.answers, 1)
        ]
        self._say("\n".join(table(rows)) if len(rows) > 1 else "There is no answer yet.")

    def _help(self, rest: str) -> None:
        rows = [(f"{name} {words}".strip(), text) for name, (words, text, _) in self._commands.items()]
        rows += [
            (QUOTES, "begins a question of several lines, and ends it; Ctrl-D leaves it"),
            ("Ctrl-C", "stops an answer"),
            ("Ctrl-D", f"leaves, as {LEAVE[0]} does"),
        ]
        self._say("\n".join(table(rows)))

    def _say(self, text: str, style: str = "") -> None:
        self._console.print(Text(text, style))


# --------------------------------------------------------------------------- what is typed


def _is_open(text: str) -> bool:
    r"""Return whether \"\"\" at the start (perhaps behind /system) is open: Enter makes a line."""
    text = re.sub(r"^/(set )?system\s+", "", text.lstrip())
    return text.startswith(QUOTES) and not (len(text) >= 6 and text.rstrip().endswith(QUOTES))


def _leaves_block(is_open: Callable[[], bool]) -> KeyBindings:
    """Leave an open block at Ctrl-D, as at Ctrl-C."""
    keys = KeyBindings()

    @keys.add("c-d", filter=Condition(is_open), eager=True)
    def _(event: KeyPressEvent) -> None:
        event.app.exit(exception=KeyboardInterrupt, style="class:aborting")

    return keys


def unquoted(text: str) -> str:
    if text.startswith(QUOTES) and text.endswith(QUOTES) and len(text) >= 6:
        return text[3:-3].strip("\n")
    return text


def _number(name: str, text: str) -> int | float:
    kind, least, most = _NUMBERS[name]
    with contextlib.suppress(ValueError):
        value = int(text) if kind else float(text)
        if math.isfinite(value) and least <= value <= most:
            return value
    what = "whole number" if kind else "number"
    raise ConfigError(f"{name}: {text!r} is no {what} from {least:,} to {most:,}.")


def _shown(value: object) -> str:
    return " ".join(map(repr, value)) if isinstance(value, list) else str(value)


@contextlib.contextmanager
def _typing_waits() -> Generator[None]:
    """Hold typed keys for the next prompt: they are not shown now, and Ctrl-C keeps them."""
    before = termios.tcgetattr(0)
    meanwhile = [*before]
    meanwhile[3] = before[3] & ~termios.ECHO | termios.NOFLSH
    try:
        termios.tcsetattr(0, termios.TCSANOW, meanwhile)
        yield
    finally:
        termios.tcsetattr(0, termios.TCSANOW, before)


# --------------------------------------------------------------------------- what is shown


def in_words(error: OmlxdError) -> str:
    """Explain an error to a person: without a request's fields, and with what to type."""
    message = error.message
    if found := re.match(r"prompt is too long: (at least )?(\d+) tokens > (\d+) maximum", message):
        tokens, most = int(found[2]), int(found[3])
        return (
            f"The conversation has {found[1] or ''}{tokens:,} tokens, and the model reads {most:,}: "
            "/clear begins a new one."
        )
    if isinstance(error, DaemonError):
        message = re.sub(r"^(?:messages|prompt)(?:\.[\w*]+)*: ", "", message)
    return message


def as_markdown(messages: list[Message]) -> str:
    parts: list[str] = []
    for message in messages:
        content = message["content"]
        if isinstance(content, list):
            texts = [part["text"] for part in content if part["type"] == "text"]
            content = "\n\n".join(
                [*(f"({part['type']})" for part in content if part["type"] != "text"), *texts]
            )
        parts.append(f"**{message['role']}**\n\n{content.strip()}\n")
    return "\n".join(parts)


def summary(answer: Answer) -> str:
    """Format a line of figures below an answer."""
    prompt, ram, ssd, computed, ttft, tokens, speed = _figures(answer)
    cached = f"{computed} computed, {ram} from RAM, {ssd} from SSD"
    return f"prompt {prompt} tokens ({cached}), first token after {ttft}, {tokens} tokens, {speed} a second"


def _figures(answer: Answer) -> tuple[str, ...]:
    """Return the cells of `/stats`, without the number."""
    ttft, usage = f"{answer.first_s:.2f} s", answer.usage
    speed = f"{answer.tokens_per_s:.1f}" if answer.tokens_per_s else "-"
    if usage is None:  # It was stopped: no usage came.
        return ("-", "-", "-", "-", ttft, f"{answer.pieces}+", speed)
    prompt, cached = usage.prompt_tokens, usage.omlxd
    counts = map(str, (prompt, cached.cached_hot, cached.cached_cold, prompt - cached.all))
    return (*counts, ttft, str(usage.completion_tokens), speed)


def _context(target: Target) -> str:
    return f"context {target.context} tokens" if target.context else "context not known yet"
