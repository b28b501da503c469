"""From a conversation to the model's tokens, on any thread but the engine's.

Two steps, kept apart: shaping.py makes the messages, this file applies the template and tokenises.
What the template can't take was found out at load time (template_traits.py).

`tool_choice: none` keeps the tools in the prompt, as vLLM does by default: leaving them out would
change the head of the prompt and lose the cached prefix. Calls are then not looked for, so one that
the model writes all the same is text.
"""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass
from typing import Any

from ..chat import Conversation, RawPrompt
from ..errors import InvalidRequest
from .shaping import Shaped, plain_text, shape
from .template_traits import PLAIN, probe
from .token_cache import TokenCache

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
class RenderedPrompt:
    """A prompt as the model gets it, and how to read what the model answers.

    tokens              the model's token ids
    text                what they were made of; "" when the client gave ids
    starts_in_thinking  the prompt ends inside a thinking block
    reasoning           thinking tags in the answer are markup (not so for a raw prompt)
    tool_calls          calls in the answer are looked for
    """

    tokens: list[int]
    text: str = ""
    starts_in_thinking: bool = False
    reasoning: bool = False
    tool_calls: bool = False


class PromptPipeline:
    """Renders prompts for one tokenizer (mlx-lm's TokenizerWrapper). Thread-safe.

    traits  what its template takes
    notes   sentences for the load log: what is rendered in another way than the client sent it
    """

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer
        self.tokens = TokenCache(tokenizer)
        self._switches = _template_switches(tokenizer)
        self._has_template = bool(tokenizer.has_chat_template)
        self.traits = probe(self._apply) if self._has_template else PLAIN
        self.notes = self._notes()

    def _notes(self) -> list[str]:
        if not self._has_template:
            return ["the model has no chat template: conversations are rendered as plain text"]
        missing = self.traits.missing()
        return [f"the chat template has no {', '.join(missing)}: written in another way"] if missing else []

    def render(self, prompt: Conversation | RawPrompt) -> RenderedPrompt:
        """Tokens of `prompt`. Raises InvalidRequest."""
        if isinstance(prompt, RawPrompt):
            return self._raw(prompt)
        text = self.text_of(prompt)
        start = self._tokenizer.think_start
        return RenderedPrompt(
            # A template has written itself what the tokenizer puts around a text.
            tokens=self.tokens.encode(text, special=not self._has_template),
            text=text,
            starts_in_thinking=bool(start) and text.rstrip().endswith(start),
            reasoning=True,
            tool_calls=bool(prompt.tools) and prompt.tool_choice != "none",
        )

    def text_of(self, prompt: Conversation) -> str:
        """What the template makes of `prompt`. Raises InvalidRequest."""
        messages, tools = shape(prompt, self.traits)
        return self._text(messages, tools, self._arguments(prompt))

    def _raw(self, prompt: RawPrompt) -> RenderedPrompt:
        if prompt.tokens is not None:
            return RenderedPrompt(tokens=list(prompt.tokens))
        return RenderedPrompt(tokens=self.tokens.encode(prompt.text, special=True), text=prompt.text)

    def _arguments(self, prompt: Conversation) -> dict[str, Any]:
        """Keyword arguments for the template."""
        for name in prompt.template_args:
            if name in _RESERVED:
                param = f"chat_template_kwargs.{name}"
                raise InvalidRequest(f"{param}: this can't be set by a request", param=param)
        arguments = {name: on for name, on in _KEEP_THINKING.items() if name in self._switches}
        if prompt.thinking is not None:
            arguments["enable_thinking"] = prompt.thinking
            if "thinking" in self._switches:  # DeepSeek's name for it
                arguments["thinking"] = prompt.thinking
        return arguments | prompt.template_args

    def _text(self, messages: list[Shaped], tools: list[Shaped] | None, arguments: dict[str, Any]) -> str:
        if not self._has_template:
            return plain_text(messages)
        try:
            return self._apply(messages, tools, **arguments)
        except Exception as error:  # a template raises what it likes, and it is the client's input
            log.info("the chat template refused a conversation: %r", error)
            raise InvalidRequest(
                f"the model's chat template refuses this conversation: {error}", param="messages"
            ) from error

    def _apply(self, messages: list[Shaped], tools: list[Shaped] | None, **arguments: Any) -> str:
        return self._tokenizer.apply_chat_template(
            messages, tools=tools, add_generation_prompt=True, tokenize=False, **arguments
        )


def _template_switches(tokenizer: Any) -> set[str]:
    """Words in the template's code; an argument that the template doesn't read is not passed."""
    template = getattr(tokenizer, "chat_template", None)
    if isinstance(template, dict):
        template = "".join(map(str, template.values()))
    code = re.findall(r"\{[%{](.*?)[%}]\}", template or "", re.DOTALL)
    return set(re.findall(r"\w+", " ".join(code)))
