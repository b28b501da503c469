"""`omlxd chat`: talk to a model in the terminal, or put one question to it.

The running daemon answers. If there is none, the command starts one and ends it afterwards.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import io
import os
import signal
import sys
from collections.abc import Callable, Generator, Sequence
from typing import TypeVar

from rich.console import Console

from ...config import load_settings
from ...errors import ConfigError
from ...models.fetch.offer import offer_default_model
from ..daemon.client import DaemonError, NoDaemon, add_url, find_daemon
from ..daemon.own import own_daemon
from ..launch import Target, find_target
from .conversation import CUT, MAX_TOKENS, Answer, Conversation, Delta, answer_format, image_part, keep_alive
from .writer import Writer

T = TypeVar("T")

# --------------------------------------------------------------------------- the command


def main(argv: Sequence[str], parser: argparse.ArgumentParser) -> int:
    """Run the verb; returns exit status 1 without a question, 130 at ^C. Raises OmlxdError."""
    parser.usage = "omlxd chat [QUESTION …] [--image FILE] [--model NAME] [--system TEXT] [more flags]"
    parser.add_argument(
        "question", nargs="*", default=[], help="print the answer to it and end; also taken from a pipe"
    )
    parser.add_argument("--model", metavar="NAME", help="default: the first one that is loaded")
    return talk(argv, parser)


def talk(
    argv: Sequence[str],
    parser: argparse.ArgumentParser,
    before: Callable[[argparse.Namespace], None] = lambda _: None,
) -> int:
    """Run `main` with a parser that has `question` and `model`. `before`: runs before the model is sought."""
    _add_flags(parser)
    args = parser.parse_intermixed_args(argv)  # Words of the question may stand behind flags.
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
    before(args)
    try:
        with daemon(args.url, args.model) as target:
            conversation = Conversation(target, system, args.max_tokens)
            conversation.images += images
            fields = {
                "temperature": args.temperature,
                "enable_thinking": args.think,
                "response_format": args.format,
                "keep_alive": args.keepalive,
            }
            conversation.options |= {name: value for name, value in fields.items() if value is not None}
            _talk(conversation, question, args)
    except KeyboardInterrupt:
        return 130
    return 0


def _add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--image", metavar="FILE", action="append", default=[], help="a picture or a PDF; again for more"
    )
    add_url(parser)
    parser.add_argument("--system", metavar="TEXT", default="", help="what stands before the conversation")
    parser.add_argument(
        "--max-tokens",
        metavar="N",
        type=_positive,
        default=MAX_TOKENS,
        help=f"of an answer; default: {MAX_TOKENS}",
    )
    parser.add_argument("--temperature", metavar="X", type=float, help="default: the model's own")
    parser.add_argument("--think", action=argparse.BooleanOptionalAction, help="default: the model's own")
    parser.add_argument("--verbose", action="store_true", help="figures below each answer")
    parser.add_argument("--plain", action="store_true", help="don't draw the answer's Markdown")
    parser.add_argument("--hidethinking", action="store_true", help="don't show what the model thinks")
    parser.add_argument(
        "--format",
        metavar="json|SCHEMA",
        type=_argument(answer_format),
        help="the answer is JSON, or fits the JSON Schema in this text or file",
    )
    parser.add_argument(
        "--keepalive",
        metavar="TIME",
        type=_argument(keep_alive),
        help="how long the model stays loaded after an answer, as 30m; 0: not at all; -1: for good",
    )
    parser.add_argument(
        "--no-history", action="store_true", help="keep nothing of what is typed (~/.omlxd/chat_history)"
    )


def _talk(conversation: Conversation, question: str, args: argparse.Namespace) -> None:
    from .terminal import Terminal, in_words, summary

    console = Console(highlight=False)
    if not question:
        history = None if args.no_history else load_settings({"host": "127.0.0.1"}).base_path / "chat_history"
        Terminal(
            conversation,
            console,
            history,
            markdown=not args.plain,
            verbose=args.verbose,
            thoughts=not args.hidethinking,
        ).run()
        return
    writer = Writer(
        console,
        not args.plain,
        thoughts=not args.hidethinking,
        is_json="response_format" in conversation.options,
    )
    try:
        answer = _print_answer(conversation, question, console, writer)
    except DaemonError as error:
        raise DaemonError(in_words(error)) from None
    if args.verbose:
        print(summary(answer), file=sys.stderr)


def _argument(read: Callable[[str], T]) -> Callable[[str], T]:
    """Wrap `read` for argparse, which shows no other error's sentence."""

    def argument(text: str) -> T:
        try:
            return read(text)
        except ConfigError as error:
            raise argparse.ArgumentTypeError(error.message.removesuffix(".")) from None

    return argument


def _positive(text: str) -> int:
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{text} is no whole number from 1 up")
    return number


@contextlib.contextmanager
def daemon(url: str | None, model: str | None) -> Generator[Target]:
    """Return the running daemon and its model; without one, and without `url`, start one for the block."""
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


def _print_answer(conversation: Conversation, question: str, console: Console, writer: Writer) -> Answer:
    """Print an answer into a file or a pipe, without the thinking."""
    if console.is_terminal:
        answer = writer.answer(lambda show: conversation.ask(question, show))
    else:
        answer = conversation.ask(question, _print_text)
        if not answer.text.endswith("\n"):
            print(flush=True)  # Before a note on standard error.
    if answer.finish_reason == "length":
        print(f"omlxd: {CUT}", file=sys.stderr)
    if answer.finish_reason == "stopped":
        raise KeyboardInterrupt
    return answer


def _print_text(delta: Delta) -> None:
    sys.stdout.write(delta.content or "")
    sys.stdout.flush()
