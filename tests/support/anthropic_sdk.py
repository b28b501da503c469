"""What the anthropic SDK says may be sent: its TypedDicts, read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, get_args, get_origin

from anthropic.types import message_count_tokens_params, message_create_params
from anthropic.types.beta import BetaToolResultBlockParam
from anthropic.types.beta import message_count_tokens_params as beta_count_tokens_params
from anthropic.types.beta import message_create_params as beta_create_params
from typing_extensions import get_type_hints, is_typeddict

BODIES: list[Any] = [
    message_create_params.MessageCreateParamsStreaming,
    message_create_params.MessageCreateParamsNonStreaming,
    beta_create_params.MessageCreateParamsStreaming,
    message_count_tokens_params.MessageCountTokensParams,
    beta_count_tokens_params.MessageCountTokensParams,
]
RESULT: Any = BetaToolResultBlockParam


def fields(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind)


def members(union: Any) -> Iterator[Any]:
    """The TypedDicts within a type."""
    if is_typeddict(union):
        yield union
        return
    for part in get_args(union):
        yield from members(part)


def tag(kind: Any) -> str:
    """The value of its `type`."""

    def literals(hint: Any) -> Iterator[str]:
        for part in get_args(hint):
            if get_origin(hint) is Literal:
                yield part
            else:
                yield from literals(part)

    return next(literals(fields(kind)["type"]))


def variants(*unions: Any) -> dict[str, set[str]]:
    """`type` → its other fields, over all that a type may be."""
    found: dict[str, set[str]] = {}
    for union in unions:
        for kind in members(union):
            found.setdefault(tag(kind), set()).update(set(fields(kind)) - {"type"})
    return found


def everywhere(field: str) -> list[Any]:
    """The types of a field of bodies."""
    return [fields(body)[field] for body in BODIES if field in fields(body)]


def messages() -> list[Any]:
    return [kind for union in everywhere("messages") for kind in members(union)]
