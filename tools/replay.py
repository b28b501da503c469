#!/usr/bin/env python3
"""Replay recorded agent traffic against a running daemon and say how much of each prompt was reused.

    tools/replay.py TRACE.jsonl… [--url http://127.0.0.1:8000] [--state FILE]
    tools/replay.py --synthetic 8 [--url http://127.0.0.1:8000]
    tools/replay.py TRACE.jsonl… --offline [--hoist-system always|never]

A trace holds one request a line: `turn`, `path`, `headers`, `body`, of /v1/messages, /v1/chat/completions
or /v1/responses (with the whole conversation as its input). Each is sent as it is, streaming, but for the
model's name and the limit of tokens. A row tells, in tokens of the model:

    prompt   the whole prompt
    ideal    its longest prefix that any earlier turn's prompt begins with too, at most prompt - 1
    hot      taken from RAM
    cold     taken from SSD
    computed the rest
    lost     ideal - hot - cold; below 0 when more was cached than this replay knows of
    TTFT s   to the first token, as the daemon measured it, and as seen from here

Several traces are replayed one after the other: behind each a line sums up what the layout of its
prompts let it share with all before. `--offline` asks no daemon: it renders the prompts and counts what
a cache that forgets nothing would have, token by token.

`--synthetic N` needs no trace: it makes a coding agent's session of N turns, with tools, their results, a
reminder and a telemetry line that changes each turn.

PASS means that no turn lost more than one block, and that no turn but the first restored less than
`--least-hits` of its prompt. `--state FILE` remembers the prompts of this run and
counts those of earlier runs among the earlier turns: replay, restart the daemon, replay again.
Exit status: 0 PASS, 1 FAIL, 2 it couldn't be done.
"""

from __future__ import annotations

import argparse
import http.client
import json
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from omlxd.api.anthropic import request as anthropic
from omlxd.api.fields.body import ParsedRequest
from omlxd.api.openai import chat_request
from omlxd.api.responses import request as openai_responses
from omlxd.engine.prompt.pipeline import PromptPipeline
from omlxd.errors import OmlxdError

DEMO = Path("~/.omlxd/models/omlxd-demo")
BLOCK_SIZE = 64
TIMEOUT_S = 600.0


class ReplayError(Exception):
    """Why the replay can't go on, in a sentence."""


class Request(msgspec.Struct):
    """One line of a trace."""

    path: str
    body: dict[str, Any]
    headers: dict[str, str] = {}
    turn: str = ""


@dataclass(slots=True)
class Row:
    turn: str
    prompt: int
    ideal: int
    hot: int
    cold: int
    computed: int
    ttft_s: float
    seen_s: float

    @property
    def lost(self) -> int:
        return self.ideal - self.hot - self.cold


@dataclass(slots=True)
class Earlier:
    """Prompts that the daemon has seen, as arrays of token ids."""

    prompts: list[np.ndarray] = field(default_factory=list)

    @classmethod
    def load(cls, path: Path | None) -> Earlier:
        if path is None or not path.exists():
            return cls()
        stored = msgspec.msgpack.decode(path.read_bytes(), type=list[bytes])
        return cls([np.frombuffer(prompt, "<u4") for prompt in stored])

    def save(self, path: Path) -> None:
        path.write_bytes(msgspec.msgpack.encode([prompt.tobytes() for prompt in self.prompts]))

    def shared(self, prompt: np.ndarray) -> int:
        """Tokens of the longest prefix that `prompt` shares with any of them."""
        return max((common_prefix(prompt, earlier) for earlier in self.prompts), default=0)


def common_prefix(one: np.ndarray, two: np.ndarray) -> int:
    size = min(len(one), len(two))
    differ = np.flatnonzero(one[:size] != two[:size])
    return int(differ[0]) if len(differ) else size


# --------------------------------------------------------------------------- the daemon


class Daemon:
    """A running daemon. `headers` go with every request."""

    def __init__(self, url: str, headers: dict[str, str]):
        self.url = url.rstrip("/")
        self._headers = headers

    def model(self) -> dict[str, Any]:
        """The first entry of its model list."""
        request = urllib.request.Request(f"{self.url}/v1/models", headers=self._headers)
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:
                return json.load(answer)["data"][0]
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise ReplayError(f"{self.url}/v1/models: {error}") from error

    def send(self, request: Request) -> tuple[dict[str, Any], float]:
        """The answer's last usage, and the seconds to its first content."""
        started = time.monotonic()
        usage: dict[str, Any] = {}
        first = 0.0
        for event in self._events(request):
            kind, whole = event.get("type", ""), event.get("response") or event
            if kind == "error" or whole.get("error"):
                raise ReplayError(f"{request.turn}: {whole.get('error')}")
            if not first and (kind.endswith(("_delta", ".delta")) or event.get("choices")):
                first = time.monotonic() - started
            usage = whole.get("usage") or usage
        if "omlxd" not in usage:
            raise ReplayError(f"{request.turn}: the answer's usage has no field omlxd: {usage}")
        return usage["omlxd"], first or time.monotonic() - started

    def _events(self, request: Request) -> Iterator[dict[str, Any]]:
        """Data of a stream of server-sent events, parsed."""
        url = urllib.parse.urlsplit(self.url + request.path)
        kind = http.client.HTTPSConnection if url.scheme == "https" else http.client.HTTPConnection
        connection = kind(url.netloc, timeout=TIMEOUT_S)
        headers = {**request.headers, **self._headers, "content-type": "application/json"}
        target = f"{url.path}?{url.query}" if url.query else url.path
        try:
            connection.request("POST", target, json.dumps(request.body), headers)
            answer = connection.getresponse()
            if answer.status != 200:
                raise ReplayError(f"{request.turn}: HTTP {answer.status}: {answer.read(2000).decode()}")
            for line in answer:
                if line.startswith(b"data:") and line[5:].strip() != b"[DONE]":
                    yield json.loads(line[5:])
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise ReplayError(f"{request.turn}: {error!r}") from error
        finally:
            connection.close()


# --------------------------------------------------------------------------- the replay


def read_trace(path: Path) -> list[Request]:
    try:
        lines = [line for line in path.read_bytes().splitlines() if line.strip()]
        return [msgspec.json.decode(line, type=Request) for line in lines]
    except (OSError, msgspec.DecodeError) as error:
        raise ReplayError(f"{path}: {error}") from error


def synthetic(turns: int) -> list[Request]:
    """A coding agent's session, the same each time: every turn goes on from the one before."""
    random = Random(turns)
    words = [
        random.choice("bcdfgklmnprst") + random.choice("aeiou") + random.choice("lnrst") for _ in range(99)
    ]

    def prose(count: int) -> str:
        return " ".join(random.choices(words, k=count)) + "."

    path = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}
    tools = [{"name": f"tool_{name}", "description": prose(60), "input_schema": path} for name in words[:6]]
    rules, requests = prose(600), list[Request]()
    reminder = f"<system-reminder>\n{prose(40)}\n</system-reminder>"
    messages: list[dict[str, Any]] = [{"role": "user", "content": [_text(reminder), _text(prose(30))]}]
    for turn in range(turns):
        billing = f"x-anthropic-billing-header: cc_version=2.1; cch={random.randrange(1 << 20):05x};"
        body = {"system": [_text(billing), _text(rules)], "tools": tools, "messages": [*messages]}
        requests.append(Request("/v1/messages", body, {"x-claude-code-session-id": "probe"}, f"turn {turn}"))
        call = {
            "type": "tool_use",
            "id": f"toolu_{turn}",
            "name": tools[turn % 6]["name"],
            "input": {"path": "a"},
        }
        result = {"type": "tool_result", "tool_use_id": call["id"], "content": prose(150)}
        messages += [
            {"role": "assistant", "content": [_text(prose(20)), call]},
            {"role": "user", "content": [result]},
        ]
    return requests


def _text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def prepared(request: Request, model: str, max_tokens: int) -> Request:
    """As it is sent: streaming, short, to the model that is served, with usage."""
    parse = parser_of(request)
    limit = "max_output_tokens" if parse is openai_responses.parse else "max_tokens"
    body = {**request.body, "model": model, "stream": True, limit: max_tokens}
    if parse is chat_request.parse:
        body.pop("max_completion_tokens", None)
        body["stream_options"] = {"include_usage": True}
    return Request(path=request.path, body=body, headers=request.headers, turn=request.turn)


_PARSERS = {
    "/v1/messages": anthropic.parse,
    "/v1/chat/completions": chat_request.parse,
    "/v1/responses": openai_responses.parse,
}


def parser_of(request: Request) -> Callable[..., ParsedRequest]:
    """The daemon's own translation. Raises ReplayError."""
    path = request.path.partition("?")[0]
    if path not in _PARSERS:
        raise ReplayError(f"{request.turn}: {path} is none of {', '.join(_PARSERS)}")
    return _PARSERS[path]


def tokens_of(request: Request, prompts: PromptPipeline) -> np.ndarray:
    """The prompt's token ids, as the daemon's own translation and template make them."""
    headers = {name.lower(): value for name, value in request.headers.items()}
    try:
        parsed = parser_of(request)(json.dumps(request.body).encode(), headers)
        return np.array(prompts.render(parsed.generate.prompt).tokens, "<u4")
    except OmlxdError as error:
        raise ReplayError(f"{request.turn}: {error.message}") from error


def replay(request: Request, daemon: Daemon, prompts: PromptPipeline, earlier: Earlier) -> Row:
    """Send one request; its prompt joins `earlier`."""
    tokens = tokens_of(request, prompts)
    ideal = min(earlier.shared(tokens), len(tokens) - 1)
    usage, seen_s = daemon.send(request)
    hot, cold, computed = usage["cached_hot"], usage["cached_cold"], usage["computed"]
    if hot + cold + computed != len(tokens):
        raise ReplayError(
            f"{request.turn}: the daemon counts {hot + cold + computed} prompt tokens, this side"
            f" {len(tokens)}: --model-path is not the model that it serves"
        )
    earlier.prompts.append(tokens)
    return Row(request.turn, len(tokens), ideal, hot, cold, computed, usage["ttft_s"], seen_s)


HEAD = f"{'turn':34}{'prompt':>8}{'ideal':>8}{'hot':>8}{'cold':>8}{'computed':>10}{'lost':>7}{'TTFT s':>10}"


def line_of(row: Row) -> str:
    counts = f"{row.prompt:8}{row.ideal:8}{row.hot:8}{row.cold:8}{row.computed:10}{row.lost:7}"
    return f"{row.turn[-33:]:34}{counts}{row.ttft_s:10.3f} ({row.seen_s:.3f})"


def summary(trace: Path, rows: list[Row]) -> str:
    """What one trace shared with those before it and with itself."""
    prompt, ideal = sum(row.prompt for row in rows), sum(row.ideal for row in rows)
    computed = sum(row.computed for row in rows)
    return (
        f"{trace.stem}: {len(rows)} turns, {prompt} prompt tokens; the layout lets {ideal} be shared, so"
        f" {prompt - ideal} must be computed; {computed} were, {computed - prompt + ideal} more"
    )


def verdict(rows: list[Row], block_size: int, least_hits: float = 0.0) -> tuple[bool, str]:
    """Whether no turn lost more than a block or, the first one excepted, hit too little; the last line."""
    worst = max(rows, key=lambda row: row.lost)
    hits = min(((row.hot + row.cold) / row.prompt for row in rows[1:]), default=1.0)
    passed = worst.lost <= block_size and 100 * hits >= least_hits
    sums = {name: sum(getattr(row, name) for row in rows) for name in ("prompt", "ideal", "hot", "cold")}
    text = (
        f"{'PASS' if passed else 'FAIL'}: {len(rows)} turns, {sums['prompt']} prompt tokens,"
        f" ideal {sums['ideal']}, cached {sums['hot'] + sums['cold']}"
        f" ({sums['hot']} hot, {sums['cold']} cold), computed {sum(row.computed for row in rows)};"
        f" worst turn lost {worst.lost} of at most {block_size}; least hit {hits:.1%}"
    )
    return passed, text


def main(argv: list[str] | None = None) -> int:
    options = _options(argv)
    try:
        traces = {path: read_trace(path) for path in options.trace}
        if options.synthetic:
            traces[Path("synthetic")] = synthetic(options.synthetic)
        for path, requests in traces.items():
            if not requests:
                raise ReplayError(f"{path}: no requests in it")
        if options.offline:
            return _offline(traces, options)
        headers = dict(given.split(":", 1) for given in options.header)
        daemon = Daemon(options.url, {name.strip(): value.strip() for name, value in headers.items()})
        model = daemon.model()
        extension = model.get("omlxd") or {}
        block_size = options.block_size or extension.get("block_size") or BLOCK_SIZE
        folder = Path(options.model_path or extension.get("path") or DEMO).expanduser()
        prompts = PromptPipeline(_tokenizer(folder), hoist_system=options.hoist_system)
        earlier = Earlier.load(options.state)
        print(HEAD)
        rows: list[Row] = []
        for path, requests in traces.items():
            before = len(rows)
            for request in requests:
                request = prepared(request, model["id"], options.max_tokens)
                rows.append(replay(request, daemon, prompts, earlier))
                print(line_of(rows[-1]), flush=True)
                if options.state:
                    earlier.save(options.state)
            if len(traces) > 1:
                print(summary(path, rows[before:]))
    except ReplayError as error:
        print(error, file=sys.stderr)
        return 2
    passed, text = verdict(rows, block_size, options.least_hits)
    print(text)
    return 0 if passed else 1


def _offline(traces: dict[Path, list[Request]], options: argparse.Namespace) -> int:
    """Rows of a cache that forgets nothing and holds single tokens."""
    folder = Path(options.model_path or DEMO).expanduser()
    prompts = PromptPipeline(_tokenizer(folder), hoist_system=options.hoist_system)
    earlier = Earlier.load(options.state)
    print(HEAD)
    for path, requests in traces.items():
        rows = []
        for request in requests:
            tokens = tokens_of(request, prompts)
            ideal = min(earlier.shared(tokens), len(tokens) - 1)
            earlier.prompts.append(tokens)
            rows.append(Row(request.turn, len(tokens), ideal, ideal, 0, len(tokens) - ideal, 0.0, 0.0))
            print(line_of(rows[-1]))
        print(summary(path, rows))
    return 0


def _tokenizer(folder: Path) -> Any:
    from mlx_lm.tokenizer_utils import load

    if not folder.is_dir():
        raise ReplayError(f"{folder}: no such folder; give the served model's with --model-path")
    return load(folder)


def _options(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("trace", type=Path, nargs="*")
    parser.add_argument(
        "--synthetic", type=int, default=0, metavar="TURNS", help="a made session of so many turns"
    )
    parser.add_argument(
        "--least-hits", type=float, default=0.0, metavar="PERCENT", help="of each turn's prompt"
    )
    parser.add_argument("--offline", action="store_true", help="count what could be shared; no daemon")
    parser.add_argument("--hoist-system", default="auto", help="as the daemon's (default: auto)")
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--model-path", help=f"folder of the served model (default: {DEMO})")
    parser.add_argument("--max-tokens", type=int, default=1, help="of each answer (default: 1)")
    parser.add_argument("--block-size", type=int, help=f"default: the daemon's, else {BLOCK_SIZE}")
    parser.add_argument("--state", type=Path, help="file that remembers the prompts of earlier runs")
    parser.add_argument(
        "--header", action="append", default=[], metavar="'NAME: VALUE'", help="sent with every request"
    )
    options = parser.parse_args(argv)
    if any(":" not in given for given in options.header):
        parser.error("--header: give it as 'NAME: VALUE'")
    if not options.trace and options.synthetic < 1:
        parser.error("give a trace, or --synthetic with a number of turns")
    return options


if __name__ == "__main__":
    sys.exit(main())
