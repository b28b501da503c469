"""Reads from a body whether to think, how hard, for how many tokens, and whether thoughts are shown.

Every protocol has these fields, in the body, under `extra_body`, `metadata` or Ollama's `options`:

    whether      `enable_thinking`, `think` (Ollama), `thinking`, `reasoning_effort`, `reasoning`, also as
                 an object; the first that says it counts
    how hard     `reasoning_effort`, `reasoning.effort`, `output_config.effort`, or a word for a switch;
                 the first counts
    how long     `_BUDGETS`: the least counts; 0: not at all, -1: any number
    shown        `include_reasoning` (vLLM), `reasoning.exclude` (OpenRouter)

A value that says nothing is refused by its name. Words under `metadata` are passed over: it is the client's.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import msgspec

from ...chat import EFFORTS
from ...errors import InvalidRequest, bad_field
from ..fields.body import free_json

_OFF = frozenset({"off", "none", "disable", "disabled", "false", "0", "no", "between_tools"})
_ON = frozenset(
    {*EFFORTS[1:], "default", "auto", "adaptive", "on", "enable", "enabled", "true", "1", "yes"},
)
_SWITCHES = (
    *("enable_thinking", "chat_template_kwargs.enable_thinking", "think", "thinking", "reasoning_effort"),
    *("reasoning", "output_config.effort", "chat_template_kwargs.reasoning_effort"),
)
_WITHIN = ("enabled", "effort", "level", "type")
_EFFORTS_AT = ("reasoning_effort", "reasoning.effort", "thinking.effort", "output_config.effort")
_BUDGETS = (
    *("thinking_budget", "thinking_budget_tokens", "thinking_token_budget", "max_reasoning_tokens"),
    *("reasoning_budget", "reasoning.max_tokens", "reasoning.budget_tokens", "thinking.budget_tokens"),
    "chat_template_kwargs.thinking_budget",
)
NESTED = ("metadata", "extra_body", "options")


class BudgetFields(msgspec.Struct, kw_only=True):
    """Budgets of any type; one that is none is refused."""

    thinking_budget: Any = None
    thinking_budget_tokens: Any = None
    thinking_token_budget: Any = None
    max_reasoning_tokens: Any = None
    reasoning_budget: Any = None


class ThinkingFields(BudgetFields, kw_only=True):
    """All fields, of any type."""

    enable_thinking: Any = None
    think: Any = None
    thinking: Any = None
    reasoning: Any = None
    reasoning_effort: Any = None
    include_reasoning: Any = None
    chat_template_kwargs: Any = None
    metadata: Any = None
    extra_body: Any = None


def thinking_fields(body: Any) -> dict[str, Any]:
    """Return what a Conversation says of thinking, and its `template_args`. Raises InvalidRequest.

    A budget asks to think, but where `body` says that it is not wanted; 0 asks not to.
    """
    args = free_json(field_of(body, "chat_template_kwargs") or {}, "chat_template_kwargs")
    thinking, budget, (effort, effort_param) = thinking_of(body), budget_of(body), _effort(body)
    if budget is not None and thinking is not False:
        thinking = budget > 0
    if "reasoning_effort" in args:  # An argument that the client names is no hint.
        effort = effort_param = ""
    for name in ("enable_thinking", "thinking_budget"):
        args.pop(name, None)
    return {
        "thinking": thinking,
        "thinking_budget": budget,
        "effort": effort,
        "effort_param": effort_param,
        "template_args": args,
    }


def thinking_of(body: Any) -> bool | None:
    """Return whether `body` (a struct, or an object) asks to think; None: it says nothing."""
    said = [_switch(value, param) for param, value in _values(body, _SWITCHES)]
    return next((each for each in said if each is not None), None)


def budget_of(body: Any) -> int | None:
    """Return the tokens of thought that `body` allows; None: any number. Raises InvalidRequest."""
    budgets = [as_budget(value, param) for param, value in _values(body, _BUDGETS)]
    return min((budget for budget in budgets if budget is not None), default=None)


def as_budget(value: Any, param: str) -> int | None:
    """Return a budget; None: no limit. Raises InvalidRequest."""
    if type(value) is float and value.is_integer():
        value = int(value)
    if type(value) is not int or not -1 <= value < 2**63:
        raise bad_field(param, "give a whole number of tokens; 0 for no thinking, -1 for no limit")
    return None if value < 0 else value


def hides_thinking(body: Any) -> bool:
    """Return whether `body` wants no text of thoughts. Raises InvalidRequest."""
    hidden = False
    for param, value in _values(body, ("include_reasoning", "reasoning.exclude")):
        if not isinstance(value, bool):
            if param.startswith("metadata."):
                continue
            raise bad_field(param, "true or false is needed")
        hidden |= value is param.endswith("exclude")
    return hidden


def _switch(value: Any, param: str) -> bool | None:
    """Return what `value` says. Raises InvalidRequest if it says nothing."""
    if isinstance(value, dict | msgspec.Struct):
        inner = [(f"{param}.{name}", field_of(value, name)) for name in _WITHIN]
        said = [_switch(each, name) for name, each in inner if each is not None]
        if not said and param.endswith("think"):
            raise _no_switch(param)
        return next((each for each in said if each is not None), None)
    if isinstance(value, bool):
        return value
    word = as_word(value).lower()
    if "chat_template_kwargs." in param:
        if param.endswith("enable_thinking"):
            raise bad_field(param, "true or false is needed")
        return False if word in _OFF else True if word in _ON else None
    if word in _OFF:
        return False
    if param.endswith(".effort") and "output_config" in param:
        return None  # At Anthropic it asks for no thinking.
    if word in _ON or (word and param.endswith(_EFFORTS_AT)):
        return True
    if param.startswith("metadata.") or value == "":
        return None
    raise _no_switch(param)


def _no_switch(param: str) -> InvalidRequest:
    return bad_field(param, f"give true or false, or one of {', '.join(EFFORTS)}")


def _effort(body: Any) -> tuple[str, str]:
    """Return the word for how hard to think, "" for none; and its field, if only a template may know it."""
    words = [_effort_word(value, param) for param, value in _values(body, _EFFORTS_AT)]
    if first := next((each for each in words if each[0]), None):
        return first
    switches = (as_word(value).lower() for _, value in _values(body, ("think", "thinking", "reasoning")))
    return next((word for word in switches if word in EFFORTS[1:]), ""), ""


def _effort_word(value: Any, param: str) -> tuple[str, str]:
    if isinstance(value, str) and (not value or value.lower() in _OFF | _ON):
        return value.lower(), ""
    if isinstance(value, str) and re.fullmatch(r"\w{1,20}", value):
        return value, param
    if param.startswith("metadata."):
        return "", ""
    raise bad_field(param, f"use one of {', '.join(EFFORTS)}")


def as_word(value: Any) -> str:
    """Return `value` as a word, "" for what is none: Python refuses to spell a number of 5,000 digits."""
    if isinstance(value, str):
        return value.strip()
    is_integer = isinstance(value, int) and not isinstance(value, bool)
    return str(value) if is_integer and abs(value) < 2**63 else ""


def _values(body: Any, paths: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    """Yield (path, value) of those of `paths` that are given, in the body and in its nested objects."""
    nested = [(f"{name}.", field_of(body, name)) for name in NESTED]
    for prefix, place in [("", body), *nested]:
        for path in paths:
            value = place
            for name in path.split("."):
                value = field_of(value, name)
            if value is not None:
                yield prefix + path, value


def field_of(body: Any, name: str) -> Any:
    """Return a field of a struct or an object; None: it has none."""
    return body.get(name) if isinstance(body, dict) else getattr(body, name, None)
