"""The Model Context Protocol over a pair of streams: JSON-RPC 2.0, a message a line; tools alone.

Two generations of clients speak it. Until 2025-11-25 they begin with `initialize`; from 2026-07-28 on each
request names its version, and `server/discover` tells what there is. Each call runs in a thread of its own,
so that a download hinders neither another call nor its own cancellation.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Any

import msgspec
from msgspec import UNSET, UnsetType

from ... import __version__
from ...errors import OmlxdError

BEGINS = ("2024-11-05", "2025-03-26", "2025-06-18", "2025-11-25")
"""Versions that begin with `initialize`, the newest last."""
STATELESS = ("2026-07-28",)
BEAT_S = 5.0
"""Seconds between two signs of life of a call; clients give up on one that is silent."""
LEAVE_S = 1.0
_PARSE_ERROR, _INVALID_REQUEST, _NO_SUCH_METHOD, _INVALID_PARAMS = -32700, -32600, -32601, -32602
_WRONG_VERSION = -32022
_META = "io.modelcontextprotocol/"
_SERVER = {"name": "omlxd", "version": __version__}
_TOOLS = {"tools": {"listChanged": False}}


class Message(msgspec.Struct):
    """A message of the client. Without an id it is a notification; without a method an answer to nothing."""

    id: str | int | float | UnsetType | None = UNSET
    method: str = ""
    params: dict[str, Any] = {}

    @property
    def meta(self) -> dict[str, Any]:
        meta = self.params.get("_meta")
        return meta if isinstance(meta, dict) else {}


class CallError(OmlxdError):
    """A call can't be made as it was asked for."""

    code = "invalid_request"


class Call:
    """A running call. `tell` reports how far it is."""

    def __init__(self, tell: Callable[[float, float | None, str], None]):
        self.cancelled, self.ended = threading.Event(), threading.Event()
        self.tell = tell


class Tool(msgspec.Struct, frozen=True):
    """A tool. `run` gets its arguments and the call, and returns text. Raises OmlxdError.

    arguments    a struct that forbids unknown fields
    annotations  hints for the client's own questions to its user
    """

    name: str
    description: str
    arguments: type[msgspec.Struct]
    annotations: Mapping[str, bool]
    run: Callable[[Any, Call], str]

    def described(self) -> dict[str, Any]:
        schema = msgspec.json.schema(self.arguments)["$defs"][self.arguments.__name__]
        schema = {name: value for name, value in schema.items() if name not in ("title", "description")}
        return {
            "name": self.name,
            "description": self.description,
            "inputSchema": schema,
            "annotations": self.annotations,
        }


class _Refused(Exception):
    """A request that is answered by an error of the protocol."""

    def __init__(self, code: int, message: str, data: Any = None):
        self.error = {"code": code, "message": message} | ({} if data is None else {"data": data})


class Server:
    """Answers the messages that `read` has, into `written`, until it ends.

    kind_of  says what kind an error is, in a word
    """

    def __init__(
        self,
        read: IO[bytes],
        written: IO[bytes],
        tools: Sequence[Tool],
        instructions: str,
        kind_of: Callable[[OmlxdError], str],
    ):
        self._read, self._written = read, written
        self._tools = {tool.name: tool for tool in tools}
        self._instructions, self._kind_of = instructions, kind_of
        self._calls: dict[Any, Call] = {}
        self._lock = threading.Lock()

    def run(self) -> None:
        """Answer until the client closes its side; calls that run then have `LEAVE_S` to end."""
        while line := self._read.readline():
            if line.strip():
                self._take(line)
        until = time.monotonic() + LEAVE_S
        for call in [*self._calls.values()]:
            if not call.ended.wait(max(0.0, until - time.monotonic())):
                call.cancelled.set()
        self._lock.acquire()  # Nobody writes from here on: Python can't end while a thread does.

    def _take(self, line: bytes) -> None:
        try:
            message = msgspec.json.decode(line, type=Message)
        except msgspec.ValidationError:
            self._send({"id": None, "error": {"code": _INVALID_REQUEST, "message": "one request a line"}})
            return
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            self._send({"id": None, "error": {"code": _PARSE_ERROR, "message": "no JSON in UTF-8"}})
            return
        if message.id is UNSET:
            if message.method == "notifications/cancelled":
                call = self._calls.get(message.params.get("requestId"))
                if call is not None:
                    call.cancelled.set()
            return
        try:
            if message.method:
                self._answer(message)
        except _Refused as refused:
            self._send({"id": message.id, "error": refused.error})

    def _answer(self, message: Message) -> None:
        """Answer a request, or begin its call. Raises _Refused."""
        version = message.meta.get(_META + "protocolVersion")
        if version is not None and version not in STATELESS:
            there_are = {"supported": [*STATELESS, *BEGINS], "requested": version}
            raise _Refused(_WRONG_VERSION, f"the version {version!r} is not spoken here", there_are)
        if message.method == "tools/call":
            self._begin_call(message)
            return
        about = {"capabilities": _TOOLS, "instructions": self._instructions}
        match message.method:
            case "initialize":
                asked = message.params.get("protocolVersion")
                spoken = asked if asked in BEGINS else BEGINS[-1]
                self._reply(message, {"protocolVersion": spoken, "serverInfo": _SERVER, **about})
            case "server/discover":
                self._reply(message, {"supportedVersions": [*STATELESS, *BEGINS], **about}, stateless=True)
            case "ping":
                self._reply(message, {})
            case "tools/list":
                self._reply(message, {"tools": [tool.described() for tool in self._tools.values()]})
            case _:
                raise _Refused(_NO_SUCH_METHOD, f"there is no method {message.method[:100]!r}")

    def _reply(self, message: Message, result: dict[str, Any], *, stateless: bool = False) -> None:
        if stateless or message.meta.get(_META + "protocolVersion"):
            result = {"resultType": "complete", "_meta": {_META + "serverInfo": _SERVER}, **result}
            if message.method != "tools/call":
                result |= {"ttlMs": 0, "cacheScope": "private"}
        self._send({"id": message.id, "result": result})

    # ----------------------------------------------------------------- calls

    def _begin_call(self, message: Message) -> None:
        name, arguments = message.params.get("name"), message.params.get("arguments")
        tool = self._tools.get(name) if isinstance(name, str) else None
        if tool is None:
            raise _Refused(_INVALID_PARAMS, f"there is no tool {str(name)[:100]!r}")
        call = Call(self._teller(message.meta.get("progressToken")))
        with self._lock:
            self._calls[message.id] = call
        threading.Thread(target=self._run, args=(message, tool, arguments, call), daemon=True).start()

    def _teller(self, token: Any) -> Callable[[float, float | None, str], None]:
        def tell(done: float, total: float | None, what: str) -> None:
            if token is None:
                return
            far = {"progressToken": token, "progress": done, "message": what}
            params = far | ({"total": total} if total else {})
            self._send({"method": "notifications/progress", "params": params})

        return tell

    def _run(self, message: Message, tool: Tool, arguments: Any, call: Call) -> None:
        result = self._result(tool, arguments, call)
        if not call.cancelled.is_set():  # Else nobody waits for it.
            self._reply(message, result)
        call.ended.set()
        with self._lock:
            if self._calls.get(message.id) is call:  # Its client may have used the id again.
                del self._calls[message.id]

    def _result(self, tool: Tool, arguments: Any, call: Call) -> dict[str, Any]:
        try:
            try:
                asked = msgspec.convert({} if arguments is None else arguments, tool.arguments)
            except msgspec.ValidationError as error:
                takes = ", ".join(tool.arguments.__struct_fields__) or "none"
                raise CallError(
                    f"The arguments of {tool.name} are wrong: {error}; it takes {takes}."
                ) from None
            return {"content": [{"type": "text", "text": tool.run(asked, call)}], "isError": False}
        except OmlxdError as error:
            told, kind = error.message, self._kind_of(error)
        except Exception as error:  # A fault of ours ends its call, not the session.
            told, kind = f"{tool.name} broke: {type(error).__name__}", "internal"
        structured = {"error": {"type": kind, "message": told}}
        return {"content": [{"type": "text", "text": told}], "structuredContent": structured, "isError": True}

    def _send(self, message: dict[str, Any]) -> None:
        with self._lock:
            try:
                self._written.write(msgspec.json.encode({"jsonrpc": "2.0", **message}) + b"\n")
                self._written.flush()
            except (BrokenPipeError, ValueError):  # The client is gone, and its end of `read` follows.
                pass


def with_beats(call: Call, what: str, work: Callable[[], str], seconds: float = BEAT_S) -> str:
    """Return what `work` does, which may take minutes, with a sign of life every few `seconds`."""
    over = threading.Event()

    def beat() -> None:
        beats = 1
        while not over.wait(seconds):
            call.tell(beats * seconds, None, what)
            beats += 1

    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    try:
        return work()
    finally:
        over.set()
        thread.join()
