"""A reverse proxy that notes what each request asked and what its usage said. Loopback only.

It stands between a client and the daemon, so that figures are those of the wire and a daemon that
somebody else started can be checked too. Bytes pass as they come; nothing is buffered.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import threading
from collections.abc import Callable
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

_HOP = frozenset({"connection", "keep-alive", "transfer-encoding", "content-length", "host"})
TIMEOUT_S = 600.0
GONE = "the client went away"
"""The error of a request whose client hung up."""


@dataclass(slots=True)
class Request:
    """One request. Tokens as its protocol's usage gave them; `error` "" if it went well.

    passed  bytes of the answer that the client has been sent
    """

    method: str
    path: str
    status: int = 0
    prompt: int = 0
    cached: int = 0
    completion: int = 0
    passed: int = 0
    error: str = ""

    @property
    def generates(self) -> bool:
        return self.method == "POST" and not self.path.partition("?")[0].endswith(
            ("count_tokens", ":countTokens", "/api/show")
        )


class _Server(ThreadingHTTPServer):
    def handle_error(self, request: Any, client_address: Any) -> None:
        """Quiet: a client that was killed resets its connection."""


class Recorder:
    """A context manager: listens on `url`, forwards to `target`, keeps `requests` in order.

    rewrite  what becomes of a request's path and body on the way
    """

    def __init__(self, target: str, rewrite: Callable[[str, bytes], tuple[str, bytes]] | None = None):
        self.target = target
        self.rewrite = rewrite
        self.requests: list[Request] = []
        recorder = self

        class Handler(_Handler):
            owner = recorder

        self._server = _Server(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> Recorder:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Handler(BaseHTTPRequestHandler):
    owner: Recorder
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        self._forward()

    def do_HEAD(self) -> None:
        self._forward()

    def do_POST(self) -> None:
        self._forward()

    def do_DELETE(self) -> None:
        self._forward()

    def do_OPTIONS(self) -> None:
        self._forward()

    def _forward(self) -> None:
        request = Request(self.command, self.path)
        self.owner.requests.append(request)
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        path = self.path
        if self.owner.rewrite is not None:
            path, body = self.owner.rewrite(path, body)
        where = urlsplit(self.owner.target)
        upstream = http.client.HTTPConnection(where.hostname or "", where.port, timeout=TIMEOUT_S)
        try:
            headers = {name: value for name, value in self.headers.items() if name.lower() not in _HOP}
            upstream.request(self.command, path, body or None, headers)
            answer = upstream.getresponse()
            self._pass_on(answer, request)
        except (BrokenPipeError, ConnectionResetError):
            request.error = request.error or GONE
            self.close_connection = True
        except (OSError, http.client.HTTPException) as error:
            request.error = f"{type(error).__name__}: {error}"
            self.close_connection = True
        finally:
            upstream.close()

    def _pass_on(self, answer: http.client.HTTPResponse, request: Request) -> None:
        request.status = answer.status
        self.send_response(answer.status)
        for name, value in answer.getheaders():
            if name.lower() not in _HOP:
                self.send_header(name, value)
        if self.command == "HEAD" or answer.status in (204, 304):
            self.send_header("content-length", "0")
            self.end_headers()
            return
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        seen = bytearray()
        while data := answer.read1(1 << 16):
            seen += data
            self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
            request.passed += len(data)
        note(request, bytes(seen))  # Before the end is out: whoever has the answer finds it noted.
        self.wfile.write(b"0\r\n\r\n")


def note(request: Request, body: bytes) -> None:
    """Fill in what the answer's body, JSON or a stream of events, says of tokens and errors."""
    lines = body.split(b"\n")
    events = [line[5:].strip() for line in lines if line.startswith(b"data:")] or lines
    for data in events:
        with contextlib.suppress(ValueError):
            _note_value(request, json.loads(data))
    if request.status >= 400 and not request.error:
        request.error = f"status {request.status}"


def _note_value(request: Request, value: Any) -> None:
    if not isinstance(value, dict):
        return
    if isinstance(value.get("response"), dict):  # An event of /v1/responses wraps the whole answer.
        value = value["response"]
    if isinstance(value.get("error"), dict):
        request.error = f"{request.status} {value['error'].get('message', '')}"[:300]
    if "prompt_eval_count" in value:  # Ollama's, whose own words are none for what was cached.
        request.prompt, request.completion = value["prompt_eval_count"], value["eval_count"]
        request.cached = value["omlxd"]["cached_hot"] + value["omlxd"]["cached_cold"]
    if isinstance(google := value.get("usageMetadata"), dict):
        request.prompt = google["promptTokenCount"]
        request.cached = google.get("cachedContentTokenCount", 0)
        request.completion = google["totalTokenCount"] - request.prompt
    usage = value.get("usage")
    if not isinstance(usage, dict):
        return
    if "prompt_tokens" in usage:
        request.prompt = usage["prompt_tokens"]
        request.cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
        request.completion = usage.get("completion_tokens", 0)
    elif "input_tokens_details" in usage:
        request.prompt = usage["input_tokens"]
        request.cached = usage["input_tokens_details"].get("cached_tokens", 0)
        request.completion = usage.get("output_tokens", 0)
    elif "input_tokens" in usage:
        request.cached = usage.get("cache_read_input_tokens", 0)
        request.prompt = usage["input_tokens"] + request.cached + usage.get("cache_creation_input_tokens", 0)
        request.completion = usage.get("output_tokens", 0)
