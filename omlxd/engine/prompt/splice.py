"""Splices turns as they were generated in place of what a template makes of their echoes.

The template is applied with a sentinel (template.py) instead of each such turn's text, and the text is cut
there:

    … <|im_end|>\\n<|im_start|>assistant\\n ⟨number⟩ <tool_call>…</tool_call><|im_end|>\\n<|im_start|>user …
    └── gap ────┘└─── header ─────────┘          └─ the echo's calls ─┘└─ next gap …

The prompt is the first gap, the prompt to answer, the turn's own tokens, then the next gap from the token on
that ends the turn. Three things are proven for every turn and request:

- gap and prompt to answer tokenise to the tokens that the turn was generated from (by digest);
- nothing of the next message stands between a sentinel and the end of its turn: that message has a guard in
  its middle, or, without text, no control token precedes the end of a turn without calls;
- the gaps stand in the template's text of the conversation as it was sent, in order, from beginning to end:
  the sentinels changed nothing else.

A turn whose proof fails stays as the template renders it, and the reason is counted.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from msgspec.structs import replace

from ...chat import Conversation, Message, Part, TextPart, ToolCallPart, ToolResultPart
from ...errors import InvalidRequest
from .template.template import Renderer, Text, special_tokens, unused_sentinels
from .token_cache import TokenCache
from .turn_memory import PrefixDigest, Turn

_MOST_TRIES = 8
"""Renderings of one prompt at most, each without the turn that didn't fit before."""


@dataclass(slots=True)
class Spliced:
    """The result. tokens: the prompt. turns: (start, stop) of generated ones. refused: reasons."""

    tokens: list[int]
    turns: list[tuple[int, int]] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)


class _NoFit(Exception):
    """A turn doesn't fit: (index of its message, reason)."""


class Splicer:
    """Splices turns; thread-safe. `able`: whether this template and tokenizer allow it."""

    def __init__(self, renderer: Renderer, tokens: TokenCache, tokenizer: Any):
        self._renderer = renderer
        self._tokens = tokens
        ends = [tokenizer.convert_ids_to_tokens(id) for id in sorted(tokenizer.eos_token_ids)]
        # The next gap begins with the end of the turn, so the text must be safe to cut there.
        self._ends = [end for end in ends if tokens.cuts and tokens.cuts_at(end)]
        self._specials = special_tokens(tokenizer)
        self._openings: list[str] = []
        self._headers: list[str] = []
        if self._ends and renderer.has_template:
            self._openings, self._headers = _borders(renderer)

    @property
    def able(self) -> bool:
        return bool(self._openings and self._headers)

    def splice(self, conversation: Conversation, text: Text, turns: Mapping[int, Turn]) -> Spliced:
        """Splice turns. `turns`: message index → turn to put there. `text`: the rendered conversation."""
        left, refused = dict(turns), []
        for _ in range(_MOST_TRIES):
            if not left:
                break
            try:
                tokens, spans = self._spliced(conversation, text, left)
            except _NoFit as misfit:
                index, reason = misfit.args
                del left[index]
                refused.append(reason)
            else:
                return Spliced(tokens, spans, refused)
        return Spliced(self.encode(text.text, text.sentinel), [], [*refused, *("template" for _ in left)])

    def encode(self, rendered: str, sentinel: str, most: int | None = None) -> list[int]:
        """Tokenise a text that is cut at `sentinel`. Raises PromptTooLong above `most` tokens."""
        if sentinel:
            return self._tokens.encode_pieces(rendered.split(sentinel), most=most)
        return self._tokens.encode(rendered, most=most)

    def _spliced(
        self, conversation: Conversation, text: Text, turns: dict[int, Turn]
    ) -> tuple[list[int], list[tuple[int, int]]]:
        """Return (tokens, those of the turns)."""
        first = min(turns)
        sentinels = unused_sentinels(text.plain, 2)
        if text.exposed or len(sentinels) < 2:
            raise _NoFit(first, "template")
        try:
            rendered = self._renderer.text(_with_sentinels(conversation, turns, *sentinels))
        except InvalidRequest:
            raise _NoFit(first, "template") from None
        if rendered.exposed:
            raise _NoFit(first, "template")
        order = sorted(turns)
        gap, *echoes = re.split(f"{sentinels[0]}(\\d+){sentinels[0]}", rendered.text)
        if [int(number) for number in echoes[::2]] != order:
            raise _NoFit(first, "template")
        gaps: list[str] = []
        spans: list[tuple[int, int]] = []
        tokens: list[int] = []
        digest = PrefixDigest()
        for index, echo in zip(order, echoes[1::2], strict=True):
            gap = gap.replace(sentinels[1], "")
            header, new = self._before(gap, rendered.sentinel, digest, turns[index], index)
            gaps.append(gap.removesuffix(header))
            digest.add(new).add(turns[index].tokens)
            tokens += new
            tokens += turns[index].tokens
            spans.append((len(tokens) - len(turns[index].tokens), len(tokens)))
            message, *following = conversation.messages[index : index + 2]
            gap = self._from_end(echo, sentinels[1], index, any(map(_has_text, following)))
            if not any(isinstance(part, ToolCallPart) for part in message.parts):
                before = echo.removesuffix(gap)
                if any(special in before for special in self._specials):
                    raise _NoFit(index, "template")
        gaps.append(gap.replace(sentinels[1], ""))
        # Their cuts are compared too: the guard may have hidden a control token that somebody typed.
        sent = [gap.replace(rendered.sentinel, text.sentinel) if rendered.sentinel else gap for gap in gaps]
        if not _in_order(sent, text.text):
            raise _NoFit(order[-1], "template")
        return tokens + self.encode(gaps[-1], rendered.sentinel), spans

    def _before(
        self, gap: str, sentinel: str, digest: PrefixDigest, turn: Turn, index: int
    ) -> tuple[str, list[int]]:
        """Return (the turn's header at the end of `gap`, tokens of the gap and the prompt to answer)."""
        has_header = False
        for header in self._headers:
            if not gap.endswith(header):
                continue
            has_header = True
            for opening in self._openings:
                new = self.encode(gap.removesuffix(header) + opening, sentinel)
                if digest.copy().add(new).value == turn.prompt:
                    return header, new
        raise _NoFit(index, "prefix" if has_header else "template")

    def _from_end(self, echo: str, guard: str, index: int, guarded: bool) -> str:
        """Return the text behind the turn whose rest is `echo`, from its ending token on."""
        ends = [at for end in self._ends if (at := echo.find(end)) >= 0]
        if not ends or (guarded and echo.find(guard) < min(ends)):
            raise _NoFit(index, "template")
        return echo[min(ends) :]


def _with_sentinels(
    conversation: Conversation, turns: Mapping[int, Turn], sentinel: str, guard: str
) -> Conversation:
    messages = list(conversation.messages)
    for index in turns:
        calls = [part for part in messages[index].parts if isinstance(part, ToolCallPart)]
        messages[index] = Message("assistant", (TextPart(f"{sentinel}{index}{sentinel}"), *calls))
        if index + 1 < len(messages):
            messages[index + 1] = _guarded(messages[index + 1], guard)
    return replace(conversation, messages=tuple(messages))


def _guarded(message: Message, guard: str) -> Message:
    """Put `guard` in the middle of the first text of `message`: templates look at the ends of texts."""
    for index, part in enumerate(message.parts):
        if isinstance(part, TextPart | ToolResultPart) and part.text:
            middle = len(part.text) // 2
            guarded: Part = replace(part, text=part.text[:middle] + guard + part.text[middle:])
            return replace(message, parts=(*message.parts[:index], guarded, *message.parts[index + 1 :]))
    return message


def _has_text(message: Message) -> bool:
    return any(isinstance(part, TextPart | ToolResultPart) and part.text for part in message.parts)


def _in_order(pieces: list[str], text: str) -> bool:
    """Return whether `text` begins with the first piece, ends with the last, and holds all in order."""
    first, *middle, last = pieces
    if not text.startswith(first) or not text.endswith(last):
        return False
    at = len(first)
    for piece in middle:
        at = text.find(piece, at)
        if at < 0:
            return False
        at += len(piece)
    return at <= len(text) - len(last)


# --------------------------------------------------------------------------- of a template


def _borders(renderer: Renderer) -> tuple[list[str], list[str]]:
    """Return (prompts to answer, headers of an assistant's turn) of the template, longest header first."""
    user, more = Message("user", (TextPart("falcon"),)), Message("user", (TextPart("heron"),))
    answer = Message("assistant", (TextPart("merlin"),))
    call = Message(
        "assistant", (TextPart("merlin"), ToolCallPart("abcdef123", "kestrel", {"wing": "plover"}))
    )
    result = Message("tool", (ToolResultPart("abcdef123", "siskin"),))
    openings: dict[str, None] = {}
    headers: dict[str, None] = {}
    for thinking in (None, True, False):
        for rest in (
            (answer, more),
            (call, result),
            (answer, more, answer, more),
            (call, result, answer, more),
        ):
            talk = Conversation((user,), thinking=thinking)
            try:
                base = renderer.text(talk, generation=False).plain
                asked = renderer.text(talk).plain
                text = renderer.text(replace(talk, messages=(user, *rest)), generation=False).plain
            except InvalidRequest:
                continue
            if asked.startswith(base) and len(asked) > len(base):
                openings[asked[len(base) :]] = None
            if text.startswith(base) and (at := text.find("merlin")) > len(base):
                headers[text[len(base) : at]] = None
    return list(openings), sorted(headers, key=len, reverse=True)
