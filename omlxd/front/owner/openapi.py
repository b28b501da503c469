"""GET /openapi.json: what this server takes and gives, made from its routes and their structs.

Bodies are stricter in fact than in the document where JSON Schema can't say it (a named tool must be in
`tools`); such a request gets the 400 that is documented.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from starlette.routing import BaseRoute

from ... import __version__
from ...api.errors import AnthropicError, GeminiError, OllamaError, OpenAIError, protocol_of
from ...api.fields.priority import PRIORITY_HEADER, PriorityBody
from ...chat import PRIORITIES
from ..http.routes import Operation

_REFS = "#/components/schemas/{name}"
_PROBLEMS = {
    "400": "The request can't be served as it is; the message names the field.",
    "401": "The API key is missing or wrong.",
    "404": "There is no such model, response or path.",
    "413": "The body is larger than the limit.",
    "503": "Loading, restarting or full; `retry-after` says when to try again.",
}
_ERRORS = {
    "anthropic": AnthropicError,
    "openai": OpenAIError,
    "completions": OpenAIError,
    "ollama": OllamaError,
    "gemini": GeminiError,
}


def document(routes: Sequence[BaseRoute]) -> bytes:
    """Return the document on these routes, as JSON."""
    operations = [route for route in routes if isinstance(route, Operation)]
    types = [t for each in operations for t in (each.body, each.answer, each.unready) if t is not None]
    types += [PriorityBody, *dict.fromkeys(_ERRORS.values())]
    schemas, components = msgspec.json.schema_components(types, ref_template=_REFS)
    schema_of = dict(zip(map(id, types), schemas, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for each in operations:
        paths.setdefault(each.path_format, {})[each.method] = _operation(each, schema_of)
    return msgspec.json.encode(
        {
            "openapi": "3.1.0",
            "info": {"title": "omlxd", "version": __version__},
            "security": [{}, {"bearer": []}, {"key": []}],
            "paths": paths,
            "components": {
                "schemas": components,
                "securitySchemes": {
                    "bearer": {"type": "http", "scheme": "bearer"},
                    "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
                },
            },
        }
    )


def _operation(row: Operation, schema_of: dict[int, Any]) -> dict[str, Any]:
    problem = schema_of[id(_ERRORS[protocol_of(row.path)])]
    content = {row.media: {"schema": schema_of[id(row.answer)] if row.answer else {}}}
    if row.stream:
        content[row.stream] = {"schema": {"type": "string"}}
    operation: dict[str, Any] = {
        "operationId": f"{row.method} {row.path_format}",
        "summary": row.summary,
        "responses": {
            "200": {"description": "The answer.", "content": content},
            **{
                status: {"description": why, "content": {"application/json": {"schema": problem}}}
                for status, why in _problems(row.path).items()
            },
        },
    }
    if row.unready is not None:
        operation["responses"]["503"] = {
            "description": "Not now; the reasons say why.",
            "content": {row.media: {"schema": schema_of[id(row.unready)]}},
        }
    if row.body is not None:
        body = schema_of[id(row.body)]
        if row.queues:
            body = {"allOf": [body, schema_of[id(PriorityBody)]]}
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": body}}}
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
        for name in row.param_convertors
    ]
    if row.queues:
        parameters.append({"name": PRIORITY_HEADER, "in": "header", "schema": {"enum": [*PRIORITIES]}})
    return operation | ({"parameters": parameters} if parameters else {})


def _problems(path: str) -> dict[str, str]:
    if protocol_of(path) == "anthropic":
        return _PROBLEMS | {"529": "Full; `retry-after` says when to try again."}
    return _PROBLEMS
