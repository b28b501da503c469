"""Applies a model's chat template: from a conversation to text.

What a template can't take (template/traits.py) is written in another way (messages.py).

Sentinels keep control tokens within messages from being read as such: `<|im_end|>` in a file must not end the
turn. A sentinel goes after the first letter of such a token before the template is applied, and the text is
cut there before it is tokenised. Sentinels are code points from U+FDD0 on, which Unicode reserves; one is
used that the prompt does not hold. Only `special` tokens are treated so: templates look for `<think>` or
`<tool_call>` in an assistant's content.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec

from ....chat import Conversation
from ....common.child_process import ChildLost
from ....errors import InvalidRequest, ModelError, bad_field
from .messages import TemplateMessage, compact_json, plain_text, template_messages
from .process import install
from .traits import PLAIN, TemplateTraits, as_parts, probe

TOOLS_AS_TEXT = "a request's tools are described in its system message, and the model may never call one"
SENTINELS = tuple(chr(code) for code in range(0xFDD0, 0xFDF0))


def unused_sentinels(text: str, count: int) -> list[str]:
    """Return sentinels that don't occur in `text`; fewer than `count` if it holds nearly all."""
    return [sentinel for sentinel in SENTINELS if sentinel not in text][:count]


def special_starts(contents: list[str]) -> re.Pattern[str] | None:
    """Return a pattern (empty matches) behind the first letter of each special token; None: no tokens."""
    contents = [content for content in contents if len(content) > 1]
    if not contents:
        return None
    by_first: dict[str, list[str]] = {}
    for content in contents:
        by_first.setdefault(content[0], []).append(re.escape(content[1:]))
    # A look-behind and a look-ahead, so that tokens which overlap are all found.
    return re.compile("|".join(f"(?<={re.escape(a)})(?={'|'.join(rest)})" for a, rest in by_first.items()))


def map_strings(value: Any, change: Callable[[str], str]) -> Any:
    """Copy JSON-like `value` with every string changed, keys too."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {change(key): map_strings(item, change) for key, item in value.items()}
    if isinstance(value, list):
        return [map_strings(item, change) for item in value]
    return value


def holds(value: Any, pattern: re.Pattern[str]) -> bool:
    """Return whether any string in JSON-like `value` matches."""
    if isinstance(value, str):
        return pattern.search(value) is not None
    if isinstance(value, dict):
        value = [*value, *value.values()]
    return isinstance(value, list) and any(map(partial(holds, pattern=pattern), value))


log = logging.getLogger(__name__)

_RESERVED = frozenset(
    {
        *("add_generation_prompt", "chat_template", "continue_final_message", "conversation"),
        *("max_length", "messages", "padding", "return_assistant_tokens_mask", "return_dict"),
        *("return_tensors", "tokenize", "tokenizer_kwargs", "tools", "truncation"),
    }
)
"""Arguments of `apply_chat_template` itself, not of the template."""

_KEEP_THINKING = {"preserve_thinking": True, "clear_thinking": False}
"""Switches of templates that keep earlier thinking; else each turn changes the prompt before it."""


@dataclass(slots=True, frozen=True)
class Text:
    """A rendered conversation, cut at each `sentinel`. `exposed`: a user's control tokens have none."""

    text: str
    sentinel: str = ""
    exposed: bool = False

    @property
    def plain(self) -> str:
        """The text as the model would read it."""
        return self.text.replace(self.sentinel, "") if self.sentinel else self.text


class Renderer:
    """Renders with one tokenizer's template. Thread-safe.

    traits   what the template takes
    cuttable the tokenizer takes a text in pieces
    hoist    system messages before the first answer go to the head
    images   the model takes images
    """

    def __init__(self, tokenizer: Any, cuttable: bool, hoist: bool = False, images: bool = False):
        install()
        self._tokenizer = tokenizer
        self._cuttable = cuttable
        self._hoist = hoist
        self._switches = _template_switches(tokenizer)
        self.has_template = bool(tokenizer.has_chat_template)
        try:
            self.traits: TemplateTraits = probe(self.apply, images) if self.has_template else PLAIN
        except ChildLost as error:
            raise ModelError(f"its chat template can't be used: {error}") from None
        specials = special_tokens(tokenizer)
        self._special = re.compile("|".join(map(re.escape, specials)) or r"(?!)")
        self._special_starts = special_starts(specials)

    def notes(self) -> list[str]:
        """Return sentences for a user on how conversations are rendered."""
        if not self.has_template:
            return [
                f"the model has no chat template: conversations are rendered as plain text; {TOOLS_AS_TEXT}"
            ]
        if missing := self.traits.missing():
            log.debug("rendered in a way of ours, as the chat template lacks it: %s", ", ".join(missing))
        notes = [] if self.traits.tools else [f"its chat template has no tools: {TOOLS_AS_TEXT}"]
        if not self._cuttable:
            notes.append("control tokens within a message are not told apart: this tokenizer can't be cut")
        return notes

    def reads(self, word: str) -> bool:
        """Whether the template's code has `word`."""
        return word in self._switches

    def around_mark(self, end: str) -> tuple[str, str]:
        """Return the space that the template writes around the mark `end`, which closes a thought."""
        said: TemplateMessage = {
            "role": "assistant",
            "content": "merlin",
            self.traits.reasoning_key: "petrel",
        }
        talk: list[TemplateMessage] = [{"role": "user", "content": "falcon"}, said]
        try:
            written = [as_parts(each) for each in talk] if self.traits.content_parts else talk
            text = self.apply(written, None, add_generation_prompt=False)
        except Exception:  # a template raises what it likes
            text = ""
        found = re.search(f"petrel(\\s*){re.escape(end)}(\\s*)merlin", text)
        return (found[1], found[2]) if found else ("\n", "\n\n")

    def text(self, conversation: Conversation, *, generation: bool = True) -> Text:
        """Render a conversation. Raises InvalidRequest. `generation`: end with the prompt to answer."""
        try:
            return self._written(conversation, generation)
        except InvalidRequest:
            if not conversation.effort:
                raise
            # Some templates refuse words for effort that are not their own.
            return self._written(msgspec.structs.replace(conversation, effort=""), generation)

    def _written(self, conversation: Conversation, generation: bool) -> Text:
        messages, tools = template_messages(conversation, self.traits, hoist=self._hoist)
        variables = [messages, tools, self._arguments(conversation)]

        def applied(
            messages: list[TemplateMessage], tools: list[TemplateMessage] | None, arguments: dict[str, Any]
        ) -> str:
            if conversation.continue_final:
                return self._begun(messages, tools, arguments)
            return self._text(messages, tools, arguments | {"add_generation_prompt": generation})

        special = holds(variables, self._special)
        try:
            text = applied(*variables)
        except InvalidRequest:
            # gpt-oss's template refuses its own control tokens; with a sentinel it doesn't see them.
            if not special:
                raise
            cut = self._with_sentinel(None, variables, applied)
            if cut.exposed:
                raise
            return cut
        return self._with_sentinel(text, variables, applied) if special else Text(text)

    def _with_sentinel(self, plain: str | None, variables: list[Any], applied: Callable[..., str]) -> Text:
        """Return the text with sentinels in the messages' control tokens, if the template lets them through.

        plain      the text without sentinels; None: the template refuses
        variables  messages, tools and arguments
        Raises InvalidRequest for a text that holds all sentinels.
        """
        pattern = self._special_starts
        bare = Text(plain or "", exposed=True)
        if not self._cuttable or pattern is None:
            return bare
        if not (free := unused_sentinels(plain or compact_json(variables), 1)):
            raise bad_field("messages", "control tokens beside all of U+FDD0 to U+FDEF")
        [sentinel] = free
        try:
            text = Text(applied(*map_strings(variables, lambda each: pattern.sub(sentinel, each))), sentinel)
        except InvalidRequest:
            return bare
        return text if plain in (None, text.plain) else bare

    # ----------------------------------------------------------------- the template

    def _arguments(self, conversation: Conversation) -> dict[str, Any]:
        """Return keyword arguments for the template."""
        for name in conversation.template_args:
            if name in _RESERVED or name.startswith("_"):
                raise bad_field(f"chat_template_kwargs.{name}", "this can't be set by a request")
        arguments = {name: on for name, on in _KEEP_THINKING.items() if name in self._switches}
        if conversation.thinking is not None:
            arguments["enable_thinking"] = conversation.thinking
            if "thinking" in self._switches:  # DeepSeek's name for it
                arguments["thinking"] = conversation.thinking
        if conversation.thinking_budget is not None and "thinking_budget" in self._switches:  # Seed-OSS's
            arguments |= {"thinking_budget": conversation.thinking_budget}
        arguments |= conversation.template_args
        return arguments | {"reasoning_effort": conversation.effort} if conversation.effort else arguments

    def _text(
        self, messages: list[TemplateMessage], tools: list[TemplateMessage] | None, arguments: dict[str, Any]
    ) -> str:
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

    def _begun(
        self, messages: list[TemplateMessage], tools: list[TemplateMessage] | None, arguments: dict[str, Any]
    ) -> str:
        """Return the text up to the end of the last message's, which the model continues."""
        for end in unused_sentinels(compact_json([messages, tools]), 1):
            last = messages[-1]
            text = last["content"][-1]["text"] if self.traits.content_parts else last["content"]
            marked = {**last, "content": text + end}
            marked = as_parts(marked) if self.traits.content_parts else marked
            asked = arguments | {"add_generation_prompt": False}
            text = self._text([*messages[:-1], marked], tools, asked)
            if text.count(end) == 1:
                return text.partition(end)[0]
        raise InvalidRequest("the model's chat template can't continue a begun answer", param="messages")

    def apply(
        self, messages: list[TemplateMessage], tools: list[TemplateMessage] | None, **arguments: Any
    ) -> str:
        """Apply the template as transformers does. Raises whatever the template raises."""
        return self._tokenizer.apply_chat_template(
            messages, tools=tools, tokenize=False, **{"add_generation_prompt": True, **arguments}
        )


def special_tokens(tokenizer: Any) -> list[str]:
    """Return the contents of special added tokens."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    return [token.content for token in added.values() if token.special and len(token.content) > 1]


def _template_switches(tokenizer: Any) -> set[str]:
    """Return words in the template's code; an argument that the template doesn't read is not passed."""
    template = getattr(tokenizer, "chat_template", None)
    if isinstance(template, dict):
        template = "".join(map(str, template.values()))
    code = re.findall(r"\{[%{](.*?)[%}]\}", template or "", re.DOTALL)
    return set(re.findall(r"\w+", " ".join(code)))
