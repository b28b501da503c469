"""Reads how a command line names a request, for some verbs of `omlxd cache`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import msgspec

from ...errors import ConfigError
from ..daemon.owner_api import LAST, WhyMissBody

NAMED = (
    "a session; `last` or a request's id (req_…), as the log has it; or a file, - for stdin: of a request's "
    'body or of {"path": …, "body": …} (.json; .jsonl: the last counts), or of a prompt'
)
NO_JSON = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""Errors that reading somebody's JSON may raise."""


class Recorded(msgspec.Struct):
    """A request as a trace has it."""

    body: dict[str, Any]
    path: str = ""
    headers: dict[str, str] = {}


def named_request(what: str, model: str | None = None, path: str | None = None) -> WhyMissBody:
    """Read the request that `what` names (`NAMED`). `path`: where a body goes. Raises ConfigError."""
    if what == LAST or what.startswith("req_"):
        return WhyMissBody(request_id=what)
    path_like = what == "-" or what.startswith(("/", "./", "../")) or what.endswith((".json", ".jsonl"))
    if not path_like and not Path(what).is_file():
        if any(sign.isspace() for sign in what):
            raise ConfigError(
                f"{what[:40]!r} is no session: give a session, `{LAST}`, or a file of the text."
            )
        return WhyMissBody(session=what)
    asked = read_request(what, path)
    if model:
        asked.body["model"] = model
    return asked


def read_request(name: str, path: str | None) -> WhyMissBody:
    """Read a JSON object, or the last of JSON Lines, from a file or stdin (`-`). Raises ConfigError."""
    data = read_data(name)
    lines = data.strip().splitlines()
    try:
        try:
            request = recorded(data)
        except msgspec.MsgspecError:
            if len(lines) < 2:
                raise
            request = recorded(lines[-1])
    except NO_JSON as error:
        if name != "-" and Path(name).suffix not in (".json", ".jsonl"):
            return WhyMissBody(path="/v1/completions", body={"prompt": text_of(name, data)})
        raise ConfigError(f"{name}: no JSON object: {error}.") from None
    return WhyMissBody(path=path or request.path, body=request.body, headers=request.headers)


def recorded(data: bytes) -> Recorded:
    """Read a request of a trace, or a body alone, whose fields tell its path. Raises what `NO_JSON` lists."""
    value = msgspec.json.decode(data, type=dict[str, Any])
    request = msgspec.convert(value if "body" in value else {"body": value}, Recorded)
    if not request.path:
        paths = {"input": "/v1/responses", "prompt": "/v1/completions", "system": "/v1/messages"}
        known = (path for field, path in paths.items() if field in request.body)
        request.path = next(known, "/v1/chat/completions")
    return request


def read_data(name: str) -> bytes:
    """Read the file `name` or stdin (`-`). Raises ConfigError."""
    try:
        return sys.stdin.buffer.read() if name == "-" else Path(name).read_bytes()
    except OSError as error:
        raise ConfigError(f"{name}: {error.strerror or error}.") from None


def text_of(name: str, data: bytes) -> str:
    """Decode a prompt's text. Raises ConfigError."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise ConfigError(f"{name}: it is no text in UTF-8, and no .json or .jsonl.") from None
