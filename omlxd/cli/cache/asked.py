"""How a command line names a request, for the verbs of `omlxd cache` that are about one."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import msgspec

from ...errors import ConfigError
from ..owner_api import LAST, WhyMissBody

NAMED = (
    "a session; `last` or a request's id (req_…), as the log has it; or a file, - for stdin: of a request's "
    'body or of {"path": …, "body": …} (.json; .jsonl: the last counts), or of a prompt'
)


def named_request(what: str, model: str | None = None, path: str | None = None) -> WhyMissBody:
    """The request that `what` names, as `NAMED` says. `path`: where a body goes. Raises ConfigError."""
    if what == LAST or what.startswith("req_"):
        return WhyMissBody(request_id=what)
    path_like = what == "-" or what.startswith(("/", "./", "../")) or what.endswith((".json", ".jsonl"))
    if not path_like and not Path(what).is_file():
        return WhyMissBody(session=what)
    asked = read_request(what, path)
    if model:
        asked.body["model"] = model
    return asked


def read_request(name: str, path: str | None) -> WhyMissBody:
    """Read a JSON object, or the last of JSON Lines, from a file or stdin (`-`). Raises ConfigError."""
    try:
        data = sys.stdin.buffer.read() if name == "-" else Path(name).read_bytes()
    except OSError as error:
        raise ConfigError(f"{name}: {error.strerror or error}.") from None
    try:
        value = _decoded(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        if name != "-" and Path(name).suffix not in (".json", ".jsonl"):
            return WhyMissBody(path="/v1/completions", body={"prompt": text_of(name, data)})
        raise ConfigError(f"{name}: no JSON object: {error}.") from None
    wrapped = isinstance(value.get("body"), dict)
    body: dict[str, Any] = value["body"] if wrapped else value
    path = path or (str(value.get("path", "")) if wrapped else "") or guessed_path(body)
    headers = value.get("headers") if wrapped else None
    plain = {str(k): str(v) for k, v in headers.items()} if isinstance(headers, dict) else {}
    return WhyMissBody(path=path, body=body, headers=plain)


def text_of(name: str, data: bytes) -> str:
    """A prompt's text. Raises ConfigError."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise ConfigError(f"{name}: it is no text in UTF-8, and no .json or .jsonl.") from None


def _decoded(data: bytes) -> dict[str, Any]:
    try:
        return msgspec.json.decode(data, type=dict[str, Any])
    except msgspec.MsgspecError:
        lines = data.strip().splitlines()
        if len(lines) < 2:
            raise
        return msgspec.json.decode(lines[-1], type=dict[str, Any])


def guessed_path(body: dict[str, Any]) -> str:
    """Which path a body is for: each protocol has a field that it can't do without."""
    if "input" in body:
        return "/v1/responses"
    if "prompt" in body:
        return "/v1/completions"
    return "/v1/messages" if "system" in body else "/v1/chat/completions"
