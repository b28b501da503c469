"""Reads from clients' fields whether to think and which conversation this is.

The first that says anything counts: the body's own fields, then those under `metadata`, then `extra_body`.
Thinking: `enable_thinking`, `think` (Ollama), `thinking` (also `{type: enabled}`), `reasoning_effort`,
`reasoning` (also an object). Tokens of thought: `thinking_budget` (vLLM's and llama.cpp's names, too),
`reasoning.max_tokens` (OpenRouter), `thinking.budget_tokens` (Anthropic); 0: none, -1: any number. No text of
thoughts: `include_reasoning: false` (vLLM), `reasoning.exclude` (OpenRouter). Conversation: `session_id`,
`conversation_id`, `thread_id`, `chat_id`, `conversation`, `session`. Other words are ignored: these fields
are nobody's standard.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

from ...errors import bad_field
from .answer_format import GuidedFields

_OFF = frozenset({"off", "none", "disable", "disabled", "false", "0", "no"})
_ON = frozenset(
    {
        *("minimal", "low", "medium", "high", "xhigh", "max", "default", "auto", "adaptive"),
        *("on", "enable", "enabled", "true", "1", "yes"),
    }
)
_THINKING = ("enable_thinking", "think", "thinking", "reasoning_effort", "reasoning")
_WITHIN = ("enabled", "effort", "level", "type")
_BUDGETS = (
    *("thinking_budget", "thinking_budget_tokens", "thinking_token_budget", "max_reasoning_tokens"),
    "reasoning_budget",
)
_BUDGETS_WITHIN = (
    *(("reasoning", "max_tokens"), ("thinking", "budget_tokens"), ("reasoning", "budget_tokens")),
    ("chat_template_kwargs", "thinking_budget"),
)
_SESSION = ("session_id", "conversation_id", "thread_id", "chat_id", "conversation", "session")
_NESTED = ("metadata", "extra_body")


class DialectFields(GuidedFields, kw_only=True):
    """Fields of any type; useless values are passed over, but a budget that is none is refused."""

    think: Any = None
    thinking: Any = None
    reasoning: Any = None
    include_reasoning: Any = None
    thinking_budget: Any = None
    thinking_budget_tokens: Any = None
    thinking_token_budget: Any = None
    max_reasoning_tokens: Any = None
    reasoning_budget: Any = None
    metadata: Any = None
    extra_body: Any = None
    session_id: Any = None
    conversation_id: Any = None
    thread_id: Any = None
    chat_id: Any = None
    conversation: Any = None
    session: Any = None


def thinking_of(body: Any) -> bool | None:
    """Return whether `body` (a struct, or an object nested in one) asks to think; None: it says nothing."""
    for name in _THINKING:
        if (asked := _asked(_field(body, name))) is not None:
            return asked
    template = _field(body, "chat_template_kwargs")
    if isinstance(template, dict) and isinstance(template.get("enable_thinking"), bool):
        return template["enable_thinking"]
    for name in _NESTED:
        nested = _nested(body, name)
        if nested and (asked := thinking_of(nested)) is not None:
            return asked
    return None


def with_budget(body: Any, thinking: bool | None) -> dict[str, Any]:
    """Return `thinking` and `thinking_budget` of a Conversation. Raises InvalidRequest.

    A budget asks to think, but where `body` says that it is not wanted; 0 asks not to.
    """
    budget = budget_of(body)
    if budget is not None and thinking is not False:
        thinking = budget > 0
    return {"thinking": thinking, "thinking_budget": budget}


def budget_of(body: Any) -> int | None:
    """Return the tokens of thought that `body` allows; None: any number. Raises InvalidRequest."""
    named = [(name, _field(body, name)) for name in _BUDGETS]
    named += [(f"{outer}.{name}", _field(_field(body, outer), name)) for outer, name in _BUDGETS_WITHIN]
    for param, value in named:
        if value is None:
            continue
        if type(value) is float and value.is_integer():
            value = int(value)
        if type(value) is not int or not -1 <= value < 2**63:
            raise bad_field(param, "give a whole number of tokens; 0 for no thinking, -1 for no limit")
        return None if value < 0 else value
    for name in _NESTED:
        nested = _nested(body, name)
        if nested and (budget := budget_of(nested)) is not None:
            return budget
    return None


def hides_thinking(body: Any) -> bool:
    """Return whether `body` wants no text of thoughts."""
    hidden = (
        _field(body, "include_reasoning") is False or _field(_field(body, "reasoning"), "exclude") is True
    )
    return hidden or any(hides_thinking(nested) for name in _NESTED if (nested := _nested(body, name)))


def _asked(value: Any) -> bool | None:
    if isinstance(value, bool):
        return value
    if isinstance(value, dict | msgspec.Struct):
        return next((asked for name in _WITHIN if (asked := _asked(_field(value, name))) is not None), None)
    word = _word(value).lower()
    return False if word in _OFF else True if word in _ON else None


_LEVELS = ("low", "medium", "high")


def effort_of(body: Any) -> str:
    """Return the word for how hard to think, for templates that know it; "" for none."""
    within = _field(_field(body, "reasoning"), "effort")
    words = map(effort_word, (_field(body, "reasoning_effort"), within))
    think = _field(body, "think")
    return next(filter(None, words), think if think in _LEVELS else "")


def effort_word(value: Any) -> str:
    """Return `value` if it is a word, else ""."""
    return value if isinstance(value, str) and re.fullmatch(r"\w{1,20}", value) else ""


def session_of(body: Any) -> str:
    """Return the conversation's name, "" for none."""
    for name in _SESSION:
        value = _field(body, name)
        value = value.get("id") if isinstance(value, dict) else value
        if word := _word(value):
            return word[:200]
    for name in _NESTED:
        nested = _nested(body, name)
        if nested and (result := session_of(nested)):
            return result
    return ""


def _word(value: Any) -> str:
    """Return `value` as a word, "" for what is none: Python refuses to spell a number of 5,000 digits."""
    if isinstance(value, str):
        return value.strip()
    is_integer = isinstance(value, int) and not isinstance(value, bool)
    return str(value) if is_integer and abs(value) < 2**63 else ""


def _nested(body: Any, name: str) -> dict[str, Any]:
    """Return the object under `name`, without objects nested in it again."""
    nested = _field(body, name)
    return {**nested, **dict.fromkeys(_NESTED)} if isinstance(nested, dict) else {}


def _field(body: Any, name: str) -> Any:
    return body.get(name) if isinstance(body, dict) else getattr(body, name, None)
