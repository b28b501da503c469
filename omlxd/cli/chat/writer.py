"""Writes an answer on a terminal as it comes: thoughts dimmed, the answer's Markdown drawn.

A paragraph, list or block of code is drawn anew with each piece until the next one begins; then it stands.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from typing import ClassVar

from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.live import Live
from rich.markdown import Heading, Markdown, MarkdownElement
from rich.segment import Segment
from rich.text import Text

from .conversation import Answer, Delta

_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""Matches characters that would command the terminal."""
_FENCE = re.compile(r"^ {0,3}(```+|~~~+)", re.MULTILINE)
_BEFORE_A_LIST = re.compile(r"\n+(?= *(?:[-*+]|\d+[.)]) |    ?\S)")


class _PlainHeading(Heading):
    """A heading at the left and bold: rich's own is centred, in a box."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        self.text.justify = "left"
        yield self.text


class _Drawn(Markdown):
    elements: ClassVar[dict[str, type[MarkdownElement]]] = {
        **Markdown.elements,
        "heading_open": _PlainHeading,
    }


def drawn(text: str) -> Markdown:
    """Render Markdown with line breaks kept: a model means them, whatever Markdown says."""
    made = _Drawn(text, hyperlinks=False, code_theme="ansi_dark")
    for token in made.parsed:
        for inner in token.children or ():
            if inner.type == "softbreak":
                inner.type = "hardbreak"
    return made


class _Tail:
    """The last lines of `inner` that fit on the screen: earlier ones could not be drawn anew."""

    def __init__(self, inner: Markdown | Text):
        self._inner = inner

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        lines = console.render_lines(self._inner, options, pad=False)
        for line in lines[-max(1, console.size.height - 2) :]:
            yield from line
            yield Segment.line()


def split_done(text: str) -> tuple[str, str]:
    """Split `text` where later text changes nothing, at the end of a block. A list is one block."""
    end, fence = 0, ""
    for line in re.finditer(r"[^\n]*\n", text):
        mark = _FENCE.match(line[0])
        if mark and (not fence or (mark[1].startswith(fence) and line[0].strip() == mark[1])):
            fence = "" if fence else mark[1]
        if fence or line[0].strip():
            continue
        rest = text[line.end() :]
        # The next line must have begun: one that goes on with a list is of the same block.
        if rest.strip() and not _BEFORE_A_LIST.match("\n" + rest) and re.match(r".{4}|.*\n", rest):
            end = line.end()
    return text[:end], text[end:]


class Writer:
    """Writes one answer. `markdown` False: its text as it is. `thoughts` False: without them.

    is_json  the answer is JSON: a block of code
    """

    def __init__(self, console: Console, markdown: bool = True, thoughts: bool = True, is_json: bool = False):
        self._console = console
        self._markdown = markdown and console.is_terminal
        self._thoughts = thoughts
        self._style: str | None = None
        self._fence = "```json\n" if is_json and self._markdown else ""
        self._text = ""
        """Text of the block that is not done."""
        self._live: Live | None = None
        self._blocks = 0

    def answer(self, ask: Callable[[Callable[[Delta], None]], Answer]) -> Answer:
        """Write the answer of `ask` as it comes, and return it. Raises DaemonError."""
        with contextlib.ExitStack() as waiting:
            if self._console.is_terminal:
                waiting.enter_context(self._console.status("reading"))

            def show(delta: Delta) -> None:
                thought = delta.reasoning_content or "" if self._thoughts else ""
                if thought or delta.content:
                    waiting.close()
                self._write(thought, "dim italic")
                self._write(delta.content or "", "")

            try:
                return ask(show)
            finally:
                waiting.close()
                self._end()

    def _write(self, text: str, style: str) -> None:
        if not text:
            return
        if self._style not in (None, style):
            self._console.print("\n")
        self._style = style
        text = _CONTROLS.sub("", text)
        if style or not self._markdown:
            self._console.print(Text(text, style), end="", soft_wrap=True)
            return
        fence, self._fence = self._fence, ""
        done, self._text = split_done(fence + self._text + text)
        if done:
            self._stop_drawing()
            self._print(done)
        if not self._text.strip():
            return
        if self._live is None:
            self._live = Live(console=self._console, transient=True, auto_refresh=False)
            self._live.start()
        self._live.update(self._above(_Tail(drawn(self._text))), refresh=True)

    def _print(self, block: str) -> None:
        if block.strip():
            self._console.print(self._above(drawn(block)))
            self._blocks += 1

    def _above(self, block: Markdown | _Tail) -> Group | Markdown | _Tail:
        return Group(Text(""), block) if self._blocks else block

    def _stop_drawing(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _end(self) -> None:
        self._stop_drawing()
        if self._style is None:
            return
        if self._style or not self._markdown:
            self._console.print()
        else:
            self._print(self._text)
            self._text = ""
