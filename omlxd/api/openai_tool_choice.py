"""`tool_choice` of OpenAI's two chat protocols, `allowed_tools` included.

| given                                   | becomes                                                 |
|-----------------------------------------|---------------------------------------------------------|
| `auto`, `none`, `required`              | the same                                                |
| a function or custom tool of the request | a call of it                                           |
| `allowed_tools`                         | its mode, and the names that may be called              |

All tools of the request stay in the prompt whatever is allowed, so that a cached prefix holds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import msgspec

from ..errors import InvalidRequest

PARAM = "tool_choice"


class _Named(msgspec.Struct):
    name: str


class ToolGiven(msgspec.Struct):
    """A tool as a choice names it: in chat completions its name is nested, in Responses it is not."""

    type: str
    name: str | None = None
    namespace: str | None = None
    function: _Named | None = None
    custom: _Named | None = None

    @property
    def called(self) -> str:
        nested = self.function or self.custom
        return (nested.name if nested else self.name) or ""


class _Allowed(msgspec.Struct):
    mode: Literal["auto", "required"]
    tools: list[ToolGiven]


class _Choice(ToolGiven):
    mode: Literal["auto", "required", None] = None
    tools: list[ToolGiven] | None = None
    allowed_tools: _Allowed | None = None


Names = Callable[[ToolGiven], "list[str] | None"]
"""What the model calls the tools that a choice means: none of them may be listed. None: no such tool."""


def tool_choice(given: Any, listed: set[str], names: Names) -> tuple[str, tuple[str, ...]]:
    """(Conversation.tool_choice, Conversation.allowed_tools). Raises InvalidRequest.

    listed  names of the tools in the prompt
    """
    if given is None or given in ("auto", "none"):
        return given or "auto", ()
    if given == "required":
        if not listed:
            raise _refused("there are no tools to choose from")
        return given, ()
    if isinstance(given, str):
        raise _refused(f"{given[:40]!r} is none of auto, none, required")
    choice = _parsed(given)
    if choice.type == "allowed_tools":
        allowed = choice.allowed_tools or choice
        return _allowed(allowed.mode or "auto", allowed.tools or [], listed, names)
    if choice.type not in ("function", "custom"):
        raise _refused(
            f"{choice.type[:40]!r} can't be enforced by this server; auto, none, required, allowed_tools and "
            "a function or custom tool of the request can"
        )
    name = _known(choice, names)[0]
    if name not in listed:
        raise _refused(f"{choice.called[:100]!r} is not among the tools that the model is told of at first")
    return f"named:{name}", ()


def _allowed(
    mode: str, given: list[ToolGiven], listed: set[str], names: Names
) -> tuple[str, tuple[str, ...]]:
    if not given:
        raise _refused("allowed_tools names no tool; use none")
    found: dict[str, None] = {}
    for tool in given:
        # Tools that run on OpenAI's side are left out of the prompt too.
        if tool.type in ("function", "custom", "namespace"):
            found.update(dict.fromkeys(_known(tool, names)))
    allowed = tuple(name for name in found if name in listed)
    if allowed:
        return mode, allowed
    if mode == "required":
        raise _refused("none of the allowed tools can be called here")
    return "none", ()


def _known(tool: ToolGiven, names: Names) -> list[str]:
    found = names(tool)
    if not found:
        raise _refused(f"there is no tool {tool.called[:100]!r}")
    return found


def _parsed(given: Any) -> _Choice:
    try:
        return msgspec.convert(given, _Choice)
    except msgspec.ValidationError as error:
        if not isinstance(given, dict):
            raise _refused(
                "this can't be enforced by this server; auto, none, required, allowed_tools and a "
                "function or custom tool of the request can"
            ) from None
        raise _refused(str(error).replace("`", "")) from None


def _refused(why: str) -> InvalidRequest:
    return InvalidRequest(f"{PARAM}: {why}", param=PARAM)
