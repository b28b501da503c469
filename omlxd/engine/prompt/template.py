"""A model's chat template, applied: from a conversation to text. No tokens here.

What the template can't take was found out at load time (template_traits.py), and engine/prompt/messages.py
writes it in another way. Control tokens that stand in somebody's text are marked (engine/prompt/template.py).

Marks in texts on their way through a chat template: characters that no text of the prompt holds.

Unicode keeps thirty-two code points from U+FDD0 on that are no characters and never will be. A mark is
one of them that the prompt doesn't hold; it is put into a message before the template is applied,
found again in what the template made, and taken out before the text is tokenised.

The first use is control tokens that somebody typed. `<|im_end|>` in a file that a tool has read must
not end the turn: a mark goes behind its first letter, and the text is cut there before it is
tokenised, so the tokenizer never sees the token whole. Only tokens that the tokenizer calls `special`
are treated so: `<think>` or `<tool_call>` are text by their own tokenizer's word where it does not, and
templates look for them in an assistant's content.
"""
# MERGED: docstrings of rendering.py, marks.py (join by hand)

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from ...chat import Conversation
from ...errors import InvalidRequest, ModelError
from .messages import Shaped, compact_json, plain_text, shape
from .template_process import TemplateLost, install
from .template_traits import PLAIN, TemplateTraits, as_parts, probe

MARKS = tuple(chr(code) for code in range(0xFDD0, 0xFDF0))


def unused_marks(text: str, count: int) -> list[str]:
    """Marks that don't occur in `text`; fewer than `count` when somebody has used them up."""
    return [mark for mark in MARKS if mark not in text][:count]


def special_starts(contents: list[str]) -> re.Pattern[str] | None:
    """Matches (empty) behind the first letter of each special token in a text; None: there is none."""
    contents = [content for content in contents if len(content) > 1]
    if not contents:
        return None
    by_first: dict[str, list[str]] = {}
    for content in contents:
        by_first.setdefault(content[0], []).append(re.escape(content[1:]))
    # A look-behind and a look-ahead, so that tokens which overlap are all found.
    return re.compile("|".join(f"(?<={re.escape(a)})(?={'|'.join(rest)})" for a, rest in by_first.items()))


def map_strings(value: Any, change: Callable[[str], str]) -> Any:
    """A copy of JSON-like `value`, every string in it changed, keys too."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {change(key): map_strings(item, change) for key, item in value.items()}
    if isinstance(value, list):
        return [map_strings(item, change) for item in value]
    return value


def holds(value: Any, pattern: re.Pattern[str]) -> bool:
    """Whether any string in JSON-like `value` matches."""
    if isinstance(value, str):
        return pattern.search(value) is not None
    if isinstance(value, dict):
        return any(pattern.search(key) or holds(item, pattern) for key, item in value.items())
    return isinstance(value, list) and any(holds(item, pattern) for item in value)


log = logging.getLogger(__name__)

_RESERVED = frozenset(
    {
        *("add_generation_prompt", "chat_template", "continue_final_message", "conversation", "documents"),
        *("max_length", "messages", "padding", "return_assistant_tokens_mask", "return_dict"),
        *("return_tensors", "tokenize", "tokenizer_kwargs", "tools", "truncation"),
    }
)
"""Arguments of `apply_chat_template` that are not the template's own."""

_KEEP_THINKING = {"preserve_thinking": True, "clear_thinking": False}
"""Switches by which some templates keep the thinking of earlier turns: without them, each turn would
change the prompt of the one before, and its cached prefix would end there."""


@dataclass(slots=True, frozen=True)
class Text:
    """What a template made of a conversation.

    plain    as the model would read it
    marked   the same with `mark` wherever it must be cut before it is tokenised
    exposed  somebody's control tokens stand in it, and no mark could be put there
    """

    plain: str
    marked: str
    mark: str = ""
    exposed: bool = False


class Renderer:
    """One tokenizer's template. Thread-safe.

    traits   what it takes
    marking  whether a marked text can be tokenised
    hoist    system messages before the first answer go to the head
    """

    def __init__(self, tokenizer: Any, marking: bool, hoist: bool = False):
        install()
        self._tokenizer = tokenizer
        self._marking = marking
        self._hoist = hoist
        self._switches = _template_switches(tokenizer)
        self.has_template = bool(tokenizer.has_chat_template)
        try:
            self.traits: TemplateTraits = probe(self.apply) if self.has_template else PLAIN
        except TemplateLost as error:
            raise ModelError(f"its chat template can't be used: {error}") from None
        specials = special_tokens(tokenizer)
        self._special = re.compile("|".join(map(re.escape, specials)) or r"(?!)")
        self._special_starts = special_starts(specials)

    def notes(self) -> list[str]:
        """What is rendered in another way than the client sent it, a sentence each."""
        if not self.has_template:
            return ["the model has no chat template: conversations are rendered as plain text"]
        notes = []
        if missing := self.traits.missing():
            notes.append(f"the chat template has no {', '.join(missing)}: written in another way")
        if not self._marking:
            notes.append("control tokens within a message are not told apart: this tokenizer can't be cut")
        return notes

    def text(self, conversation: Conversation, *, generation: bool = True) -> Text:
        """Raises InvalidRequest. `generation`: end with the prompt to answer."""
        try:
            return self._written(conversation, generation)
        except InvalidRequest:
            if not conversation.effort:
                raise
            # Some templates refuse words for effort that are not their own.
            return self._written(msgspec.structs.replace(conversation, effort=""), generation)

    def _written(self, conversation: Conversation, generation: bool) -> Text:
        messages, tools = shape(conversation, self.traits, hoist=self._hoist)
        inputs = [messages, tools, self._arguments(conversation)]

        def applied(messages: list[Shaped], tools: list[Shaped] | None, arguments: dict[str, Any]) -> str:
            if conversation.continue_final:
                return self._begun(messages, tools, arguments)
            return self._text(messages, tools, arguments | {"add_generation_prompt": generation})

        special = holds(inputs, self._special)
        try:
            plain = applied(*inputs)
        except InvalidRequest:
            # gpt-oss's template refuses its own control tokens in a text; marked it doesn't see them.
            if not special:
                raise
            marked = self._marked(None, inputs, applied)
            if marked.exposed:
                raise
            return marked
        return self._marked(plain, inputs, applied) if special else Text(plain, plain)

    def _marked(
        self,
        plain: str | None,
        inputs: list[Any],
        applied: Callable[..., str],
    ) -> Text:
        """Control tokens within the messages are marked, if the template lets the marks through.

        plain   as the template writes it without them; None: it doesn't
        inputs  messages, tools and arguments
        Raises InvalidRequest for a text that uses all marks, which nobody needs but to have its tokens read.
        """
        pattern = self._special_starts
        bare = Text(plain or "", plain or "", exposed=True)
        if not self._marking or pattern is None:
            return bare
        if not (marks := unused_marks(plain or compact_json(inputs), 1)):
            raise InvalidRequest("messages: control tokens beside all of U+FDD0 to U+FDEF", param="messages")
        [mark] = marks
        marked = map_strings(inputs, lambda text: pattern.sub(mark, text))
        try:
            text = applied(*marked)
        except InvalidRequest:
            return bare
        unmarked = text.replace(mark, "")
        return Text(unmarked, text, mark) if plain in (None, unmarked) else bare

    # ----------------------------------------------------------------- the template

    def _arguments(self, conversation: Conversation) -> dict[str, Any]:
        """Keyword arguments for the template."""
        for name in conversation.template_args:
            if name in _RESERVED or name.startswith("_"):
                param = f"chat_template_kwargs.{name}"
                raise InvalidRequest(f"{param}: this can't be set by a request", param=param)
        arguments = {name: on for name, on in _KEEP_THINKING.items() if name in self._switches}
        if conversation.thinking is not None:
            arguments["enable_thinking"] = conversation.thinking
            if "thinking" in self._switches:  # DeepSeek's name for it
                arguments["thinking"] = conversation.thinking
        arguments |= conversation.template_args
        return arguments | {"reasoning_effort": conversation.effort} if conversation.effort else arguments

    def _text(self, messages: list[Shaped], tools: list[Shaped] | None, arguments: dict[str, Any]) -> str:
        if not self.has_template:
            return plain_text(messages)
        try:
            return self.apply(messages, tools, **arguments)
        except Exception as error:  # a template raises what it likes, and it is the client's input
            # Its words may be the conversation's.
            log.info("the chat template refused a conversation: %s", type(error).__name__)
            raise InvalidRequest(
                f"the model's chat template refuses this conversation: {error}", param="messages"
            ) from error

    def _begun(self, messages: list[Shaped], tools: list[Shaped] | None, arguments: dict[str, Any]) -> str:
        """Up to the end of the last message's text, which the model goes on with."""
        for end in unused_marks(compact_json([messages, tools]), 1):
            last = messages[-1]
            text = last["content"][-1]["text"] if self.traits.content_parts else last["content"]
            marked = {**last, "content": text + end}
            marked = as_parts(marked) if self.traits.content_parts else marked
            asked = arguments | {"add_generation_prompt": False}
            text = self._text([*messages[:-1], marked], tools, asked)
            if text.count(end) == 1:
                return text.partition(end)[0]
        raise InvalidRequest("the model's chat template can't continue a begun answer", param="messages")

    def apply(self, messages: list[Shaped], tools: list[Shaped] | None, **arguments: Any) -> str:
        """The template as transformers applies it. Raises whatever the template raises."""
        return self._tokenizer.apply_chat_template(
            messages, tools=tools, tokenize=False, **{"add_generation_prompt": True, **arguments}
        )


def special_tokens(tokenizer: Any) -> list[str]:
    """Contents of the added tokens that are special."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    return [token.content for token in added.values() if token.special and len(token.content) > 1]


def _template_switches(tokenizer: Any) -> set[str]:
    """Words in the template's code; an argument that the template doesn't read is not passed."""
    template = getattr(tokenizer, "chat_template", None)
    if isinstance(template, dict):
        template = "".join(map(str, template.values()))
    code = re.findall(r"\{[%{](.*?)[%}]\}", template or "", re.DOTALL)
    return set(re.findall(r"\w+", " ".join(code)))
