"""`omlxd cache warm`: the daemon computes prompts while it is idle, so that they are cached later.

A file of a trace (`.jsonl`, or `.json`) holds requests, a line each: `{"path": …, "body": …, "headers": …}`,
or a body alone, whose fields tell its path (why_miss.py takes the same files).
Any other file is the text of a prompt, and so is an argument that names no file: `omlxd cache warm "text"`.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from ...common.units import counted
from ...config import Settings
from ...errors import ConfigError
from ..daemon.client import STREAM_S, Daemon, DaemonError, Usage, find_daemon
from .asked import NO_JSON, Recorded, read_data, recorded, text_of

_LIMITS = {
    "/v1/messages": "max_tokens",
    "/v1/chat/completions": "max_tokens",
    "/v1/completions": "max_tokens",
    "/v1/responses": "max_output_tokens",
}
LOOK_S = 1.0
"""Seconds between two looks at whether the daemon is idle."""


class _Answer(msgspec.Struct):
    usage: Usage


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "file",
        nargs="+",
        metavar="FILE|TEXT",
        help="requests or their bodies (.jsonl, .json), or a prompt's text, in a file or as it is",
    )
    parser.add_argument(
        "--model", metavar="NAME", help="compute them with this model; default: the request's own"
    )


def run(args: argparse.Namespace, settings: Settings, root: Path) -> int:
    """Warm the cache, once all files are read; returns 1 if the daemon refused a request."""
    status = 0
    requests = [request for file in args.file for request in read_requests(file)]
    daemon = find_daemon(args.url, settings)
    for place, request in requests:
        _wait_until_idle(daemon)
        if args.model:
            request.body["model"] = args.model
        body = msgspec.json.encode(request.body)
        path, headers = request.path, request.headers
        try:
            used = daemon.fetch(path, _Answer, body, STREAM_S, headers).usage.omlxd
        except DaemonError as error:
            print(f"omlxd: {place}: {error.message}", file=sys.stderr)
            status = 1
            continue
        print(f"{place}: {counted(used.computed, 'token')} computed, {used.all:,} cached", flush=True)
    return status


def _is_text(argument: str) -> bool:
    """Return whether `what` is a prompt: it names no file, and has a space or no ending as a file's."""
    try:
        if argument == "-" or Path(argument).exists():
            return False
    except (OSError, ValueError):  # Too long for a name.
        return True
    return any(sign.isspace() for sign in argument) or not ("/" in argument or Path(argument).suffix)


def read_requests(argument: str | Path) -> Iterator[tuple[str, Recorded]]:
    """Yield (place in the file, request for one token). Raises ConfigError, which names the line."""
    if _is_text(str(argument)):
        shown = str(argument) if len(str(argument)) <= 40 else f"{str(argument)[:37]}..."
        yield repr(shown), Recorded({"prompt": str(argument), "max_tokens": 1}, "/v1/completions")
        return
    file = Path(argument)
    data = read_data(str(file))
    if not data.strip():
        raise ConfigError(f"{file}: it is empty.")
    if file.suffix not in (".json", ".jsonl"):
        body = {"prompt": text_of(str(file), data), "max_tokens": 1}
        yield str(file), Recorded(body, "/v1/completions")
        return
    lines = [data] if file.suffix == ".json" else data.splitlines()
    for number, line in enumerate(lines, 1):
        if line.strip():
            place = f"{file} line {number}"
            try:
                request = recorded(line)
            except NO_JSON as error:
                raise ConfigError(f"{place}: {error}.") from None
            request.path = request.path.partition("?")[0]
            if request.path not in _LIMITS:
                raise ConfigError(f"{place}: {request.path!r} is none of {', '.join(_LIMITS)}.")
            request.body.pop("max_completion_tokens", None)
            request.body |= {"stream": False, _LIMITS[request.path]: 1}
            yield place, request


def _wait_until_idle(daemon: Daemon) -> None:
    while any(model.running or model.waiting for model in daemon.status().models):
        time.sleep(LOOK_S)
