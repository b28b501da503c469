"""Reads the fields of OpenAI, Anthropic and vLLM that fix an answer's format.

JSON: `response_format` (chat, completions), `text.format` (Responses), `output_config.format` and
`output_format` (Messages). vLLM's `guided_…` and `structured_outputs` belong to all of OpenAI's protocols.

A request has one at most. Whether it can be enforced the engine decides.
"""

from __future__ import annotations

from typing import Any, Union

import msgspec

from ...chat import AnswerFormat
from ...errors import InvalidRequest, bad_field
from ..fields.body import free_json, json_object
from .thinking import ThinkingFields

MAX_GRAMMAR_CHARS = 100_000
MAX_CHOICES = 10_000
ANY_OBJECT: dict[str, Any] = {"type": "object"}
_KINDS = ("json", "regex", "choice", "grammar")


class NamedSchema(msgspec.Struct):
    """A `json_schema` of OpenAI. `strict`: a keyword that can't be enforced is an error."""

    schema: dict[str, Any] | None = None
    name: str | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct):
    """A format. `schema` beside the type is how Responses, Anthropic and llama.cpp have it."""

    type: str
    json_schema: NamedSchema | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class StructuredOutputs(msgspec.Struct):
    """The extra field of vLLM."""

    json: Union[str, dict[str, Any], None] = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: Any = None


class GuidedFields(ThinkingFields, kw_only=True):
    """Body fields of vLLM, and those of thinking, since a struct can have one base alone."""

    guided_json: Union[str, dict[str, Any], None] = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    structured_outputs: StructuredOutputs | None = None


def format_of(requested: ResponseFormat | None, param: str) -> AnswerFormat | None:
    """Read a `response_format` or its like; None for text. Raises InvalidRequest."""
    if requested is None or requested.type == "text":
        return None
    nested = requested.json_schema.schema if requested.json_schema is not None else None
    schema = nested if nested is not None else requested.schema
    if requested.type == "json_object":
        return _json(schema or ANY_OBJECT, param)
    if requested.type != "json_schema":
        raise bad_field(f"{param}.type", f"{requested.type[:40]!r} is none of text, json_object, json_schema")
    if schema is None:
        raise bad_field(
            f"{param}.json_schema.schema" if param == "response_format" else f"{param}.schema",
            "this field is required",
        )
    strict = requested.json_schema.strict if requested.json_schema is not None else requested.strict
    return _json(schema, param, bool(strict))


def guided(body: GuidedFields) -> AnswerFormat | None:
    """Read vLLM's fields. Raises InvalidRequest where they ask for several things."""
    asked = [(kind, getattr(body, f"guided_{kind}"), f"guided_{kind}") for kind in _KINDS]
    if (outputs := body.structured_outputs) is not None:
        param = "structured_outputs"
        if outputs.structural_tag is not None:
            raise bad_field(f"{param}.structural_tag", "structural tags can't be enforced by this server")
        asked += [(kind, getattr(outputs, kind), param) for kind in _KINDS]
        asked.append(("json", ANY_OBJECT if outputs.json_object else None, param))
    return only(*(_guided(kind, value, param) for kind, value, param in asked if value is not None))


def only(*formats: AnswerFormat | None) -> AnswerFormat | None:
    """Return the one format that is there. Raises InvalidRequest for more than one."""
    present = [format for format in formats if format is not None]
    if len(present) > 1:
        raise InvalidRequest(
            f"{present[1].param}: the answer's format is in {present[0].param} already; send one of them",
            param=present[1].param,
        )
    return present[0] if present else None


def _guided(kind: str, value: Any, param: str) -> AnswerFormat:
    if kind == "json":
        return _json(json_object(value, param) if isinstance(value, str) else value, param)
    if kind == "choice":
        if not value or len(value) > MAX_CHOICES or not all(value):
            raise bad_field(param, f"up to {MAX_CHOICES} texts, none empty, are needed")
        return AnswerFormat("choice", choices=tuple(value), param=param)
    if not value or len(value) > MAX_GRAMMAR_CHARS:
        raise bad_field(param, f"up to {MAX_GRAMMAR_CHARS} characters are needed")
    return AnswerFormat("regex" if kind == "regex" else "lark", text=value, param=param)


def _json(schema: dict[str, Any], param: str, strict: bool = False) -> AnswerFormat:
    return AnswerFormat("json", schema=free_json(schema, param), param=param, strict=strict)
