"""omlxd mcp: the protocol's messages of both generations, and what its tools ask of a daemon."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest

from omlxd.cli.daemon import client
from omlxd.cli.daemon.client import NoDaemon, NotThere, StreamError
from omlxd.cli.daemon.owner_api import DaemonStatus, InstalledStatus, InstalledStatuses, PinList, Unloaded
from omlxd.cli.mcp import tools
from omlxd.cli.mcp.protocol import Call, Server, with_beats
from omlxd.cli.mcp.tools import INSTRUCTIONS, kind_of, tools_of
from omlxd.cli.models.machine import Machine
from omlxd.models.resolve import DEFAULT_ID
from tests.front.process.test_serve import REPO, Daemon, start  # noqa: F401

META = {"io.modelcontextprotocol/protocolVersion": "2026-07-28"}


class Scripted(client.Daemon):
    """A daemon with one model, and a download of three events, the last of which waits for `go_on`."""

    asked: ClassVar[list[str]] = []
    go_on: ClassVar = threading.Event()
    closed: ClassVar = threading.Event()

    def fetch(self, path: str, type: Any, body: Any = None, *_: Any, **__: Any) -> Any:
        self.asked.append(path)
        if (name := path.removeprefix("/omlxd/models/")) in ("nope", "org/new", "gemma", DEFAULT_ID):
            raise NotThere(f"There is no model {name!r} here.")
        if path == "/omlxd/status":
            return DaemonStatus(version="1", pid=1, started=0, uptime_s=1, resident=1, models=[], cold=None)
        tiny = InstalledStatus(id="org/tiny", state="ready", source="folder", folder="/models/tiny")
        return {
            InstalledStatus: tiny,
            InstalledStatuses: InstalledStatuses([tiny]),
            Unloaded: Unloaded("org/tiny", False, 2),
            PinList: PinList([], 0, 1),
        }[type]

    def stream(self, path: str, body: bytes, type: Any) -> Any:
        self.asked.append(path)
        try:
            yield type(done=5, total=10)
            yield type(done=5, total=10)
            self.go_on.wait(60)
            for _ in range(2 * tools.SILENT):
                yield type(done=5, total=10)
            yield type(done=8, total=10)
            yield type(folder="/models/x")
        finally:
            self.closed.set()


class Client:
    """The other side of a server's pipes."""

    def __init__(self, server: Server, write: int, read: int):
        self._thread = threading.Thread(target=server.run)
        self._thread.start()
        self._write, self._read = os.fdopen(write, "wb"), os.fdopen(read, "rb")

    def say(self, text: bytes) -> None:
        self._write.write(text + b"\n")
        self._write.flush()

    def send(self, method: str, id: Any = 1, **params: Any) -> None:
        self.say(json.dumps({"jsonrpc": "2.0", "id": id, "method": method, "params": params}).encode())

    def hear(self) -> dict[str, Any]:
        message = json.loads(self._read.readline())
        assert message.pop("jsonrpc") == "2.0"
        return message

    def ask(self, method: str, **params: Any) -> dict[str, Any]:
        self.send(method, **params)
        heard = self.hear()
        assert heard.pop("id") == 1
        return heard

    def call(self, name: str, **arguments: Any) -> dict[str, Any]:
        return self.ask("tools/call", name=name, arguments=arguments)["result"]

    def close(self) -> None:
        self._write.close()
        self._thread.join()


@pytest.fixture
def daemon() -> Scripted:
    made = Scripted("http://127.0.0.1:1")
    made.asked.clear()
    made.go_on.clear()
    made.closed.clear()
    return made


@pytest.fixture
def mcp(daemon: Scripted) -> Iterator[Client]:
    with contextlib.ExitStack() as files:
        (there, write), (read, back) = os.pipe(), os.pipe()
        streams = files.enter_context(os.fdopen(there, "rb")), files.enter_context(os.fdopen(back, "wb"))
        made = Client(Server(*streams, tools_of(lambda: daemon), INSTRUCTIONS, kind_of), write, read)
        yield made
        made.close()


@pytest.mark.parametrize(("asked", "spoken"), [("2025-03-26", "2025-03-26"), ("2031-01-01", "2025-11-25")])
def test_a_client_that_shakes_hands(mcp: Client, asked, spoken):
    told = mcp.ask("initialize", protocolVersion=asked, capabilities={}, clientInfo={"name": "c"})["result"]
    assert told["protocolVersion"] == spoken and told["serverInfo"]["name"] == "omlxd"
    assert told["capabilities"] == {"tools": {"listChanged": False}} and "resultType" not in told
    mcp.say(b'{"jsonrpc": "2.0", "method": "notifications/initialized"}')
    assert mcp.ask("ping") == {"result": {}}, "strict clients take nothing more"
    listed = {tool["name"]: tool for tool in mcp.ask("tools/list")["result"]["tools"]}
    reads = {name for name, tool in listed.items() if tool["annotations"]["readOnlyHint"]}
    assert listed.keys() - reads == {"load_model", "unload_model", "pull_model"}
    assert [name for name, tool in listed.items() if tool["annotations"].get("destructiveHint")] == [
        "unload_model"
    ]
    schema = listed["load_model"]["inputSchema"]
    assert schema["type"] == "object" and schema["required"] == ["model"] and "$ref" not in str(schema)


def test_a_client_that_names_its_version_each_time(mcp: Client):
    told = mcp.ask("server/discover", _meta=META)["result"]
    assert "2026-07-28" in told["supportedVersions"] and told["resultType"] == "complete"
    listed = mcp.ask("tools/list", _meta=META)["result"]
    assert listed["resultType"] == "complete" and listed["ttlMs"] == 0 and listed["tools"]
    called = mcp.ask("tools/call", name="list_models", _meta=META)["result"]
    assert called["resultType"] == "complete" and "org/tiny" in called["content"][0]["text"]
    wrong = mcp.ask("tools/list", _meta={"io.modelcontextprotocol/protocolVersion": "2031-01-01"})["error"]
    assert wrong["code"] == -32022 and "2026-07-28" in wrong["data"]["supported"]


def test_what_is_no_request_is_an_error_of_the_protocol(mcp: Client):
    for text, code in ((b"{", -32700), (b"\xff", -32700), (b"[]", -32600), (b'{"id": {}}', -32600)):
        mcp.say(text)
        heard = mcp.hear()
        assert heard["id"] is None and heard["error"]["code"] == code, text
    mcp.say(b"")
    mcp.say(b'{"jsonrpc": "2.0", "id": 7, "result": {}}')  # The answer to nothing.
    assert mcp.ask("resources/list")["error"]["code"] == -32601
    assert mcp.ask("tools/call", name="rm_model")["error"]["code"] == -32602
    assert mcp.ask("ping") == {"result": {}}


def test_what_fails_is_the_call_s_own_error(mcp: Client, daemon: Scripted, monkeypatch):
    told = mcp.call("show_model", model="nope")
    assert told["isError"] and told["structuredContent"]["error"]["type"] == "not_found"
    told = mcp.call("load_model", model=3)
    assert told["isError"] and "Expected `str`" in told["content"][0]["text"]
    assert told["structuredContent"]["error"]["type"] == "arguments"
    for name, wrong, said in (
        ("unload_model", {"model": "nope", "force": True}, "unknown field `force`; it takes model."),
        ("status", [], "Expected `object`, got `array`; it takes none."),
        ("pull_model", {"model": "gemma"}, "'gemma' is no hub id: write ORG/NAME, or SmolLM2"),
        (
            "pull_model",
            {"model": "gemma", "confirmed": True},
            "'gemma' is no hub id: write ORG/NAME, or SmolLM2",
        ),
        ("what_fits", {"model": "gemma"}, "'gemma' is no hub id: write ORG/NAME, or SmolLM2"),
    ):
        told = mcp.ask("tools/call", name=name, arguments=wrong)["result"]
        assert said in told["content"][0]["text"]
        assert told["structuredContent"]["error"]["type"] == "arguments"

    def gone(*_: Any, **__: Any) -> Any:
        raise NoDaemon("Nothing answers at http://127.0.0.1:1; start the daemon with `omlxd serve`.")

    monkeypatch.setattr(Scripted, "fetch", gone)
    told = mcp.call("status")
    assert told["structuredContent"]["error"]["type"] == "no_daemon" and "omlxd serve" in str(told["content"])
    monkeypatch.setattr(Scripted, "fetch", lambda *_: 1 / 0)
    assert mcp.call("status")["structuredContent"]["error"]["type"] == "internal"
    monkeypatch.undo()
    assert not mcp.call("status")["isError"]


def test_the_tools(mcp: Client, daemon: Scripted):
    def said(name: str, **arguments: Any) -> str:
        told = mcp.call(name, **arguments)
        assert not told["isError"], told
        return told["content"][0]["text"]

    assert "org/tiny is loaded, and stays until it is unloaded" in said("load_model", model="tiny")
    assert "2 in flight" in said("unload_model", model="tiny")
    assert "SSD cache: none" in said("cache_stats") and "pinned: 0 bytes" in said("cache_stats")
    assert "http://127.0.0.1:1" in said("status") and "state" in said("show_model", model="tiny")
    assert daemon.asked[:2] == ["/omlxd/models/load", "/omlxd/models/unload"]


def test_a_download_is_asked_for_told_of_and_cancelled(mcp: Client, daemon: Scripted, monkeypatch):
    monkeypatch.setattr(tools, "look_up", lambda name, settings: name)
    monkeypatch.setattr(tools, "hub_page", lambda name: (name, {"download": "5 GB"}, []))
    told = mcp.call("pull_model", model="org/new")
    assert "5 GB" in told["content"][0]["text"] and "Nothing is downloaded yet" in told["content"][0]["text"]
    assert daemon.asked == ["/omlxd/models/org/new", "/omlxd/status"], "nothing is pulled"
    assert "is here already, in /models/tiny" in mcp.call("pull_model", model="tiny")["content"][0]["text"]
    for id, ends in (("a", "cancelled"), ("b", "done")):
        daemon.go_on.clear()
        daemon.closed.clear()
        asked = {"name": "pull_model", "arguments": {"model": "org/new", "confirmed": True}}
        mcp.send("tools/call", id=id, **asked, _meta={"progressToken": "t"})
        far = mcp.hear()
        assert far["method"] == "notifications/progress"
        said = {"progress": 5, "total": 10, "message": "5 bytes of org/new"}
        assert far["params"] == {"progressToken": "t", **said}
        assert mcp.ask("ping") == {"result": {}}, "a running call hinders nobody"
        if ends == "cancelled":
            mcp.say(b'{"method": "notifications/cancelled", "params": {"requestId": "a"}}')
            assert mcp.ask("ping") == {"result": {}}
        daemon.go_on.set()
        assert daemon.closed.wait(60)
    assert [mcp.hear()["params"]["progress"] for _ in range(3)] == [6, 7, 8], "two signs of life, then news"
    last = mcp.hear()
    assert last["id"] == "b" and "/models/x" in last["result"]["content"][0]["text"]


def test_the_default_model_is_no_hub_s_and_a_hub_s_failure_is_of_one_type(
    mcp: Client, daemon: Scripted, monkeypatch
):
    machine = Machine(10**9, "--memory-limit 1GB", 10**9, 1e9, "measured", "metal")
    monkeypatch.setattr("omlxd.cli.models.fit.this_machine", lambda settings: machine)
    for name in ("pull_model", "what_fits"):
        told = mcp.call(name, model=DEFAULT_ID)
        said = told["content"][0]["text"]
        assert (
            "93 MB in 1 file" in said and "in the package index" in said and "yes, with 8,192 tokens" in said
        )

    def fails(*_: Any) -> Any:
        raise StreamError("org/new can't be downloaded: the hub can't be reached; check the network.")
        yield

    monkeypatch.setattr(Scripted, "stream", fails)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    for confirmed in (False, True):
        told = mcp.call("pull_model", model="org/new", confirmed=confirmed)
        assert told["structuredContent"]["error"]["type"] == "model"
        assert "the hub can't be reached" in told["content"][0]["text"]


def test_a_long_call_gives_signs_of_life():
    told, heard = list[tuple[float, float | None, str]](), threading.Event()

    def tell(*far: Any) -> None:
        told.append(far)
        if len(told) == 2:
            heard.set()

    done = with_beats(Call(tell), "x loads", lambda: str(heard.wait(60)), seconds=0.001)
    assert done == "True" and [far[2] for far in told[:2]] == ["x loads"] * 2
    assert told[0][0] < told[1][0], "progress grows"


def ask_command(*flags: str, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    numbered = [{"jsonrpc": "2.0", "id": at, **each} for at, each in enumerate(messages)]
    lines = "".join(json.dumps(each) + "\n" for each in numbered)
    argv, pipe = [sys.executable, "-m", "omlxd", "mcp", *flags], subprocess.PIPE
    with subprocess.Popen(argv, stdin=pipe, stdout=pipe, stderr=pipe, text=True, cwd=REPO) as process:
        assert process.stdin is not None and process.stdout is not None and process.stderr is not None
        process.stdin.write(lines)
        process.stdin.flush()
        told = [json.loads(process.stdout.readline()) for _ in messages]
        process.stdin.close()
        assert process.stdout.read() == "" and process.stderr.read() == ""
    assert process.returncode == 0
    return sorted(told, key=lambda each: each["id"])


STATUS = {"method": "tools/call", "params": {"name": "status"}}


def test_the_command_without_a_daemon():
    first, second = ask_command("--url", "http://127.0.0.1:9", messages=[{"method": "ping"}, STATUS])
    assert first["result"] == {}
    assert second["result"]["structuredContent"]["error"]["type"] == "no_daemon"


@pytest.mark.slow
def test_the_command_with_a_daemon(start):  # noqa: F811
    daemon: Daemon = start()
    listed = {"method": "tools/call", "params": {"name": "list_models"}}
    missed = {"method": "tools/call", "params": {"name": "why_miss"}}
    told = ask_command("--url", daemon.url, messages=[STATUS, listed, missed])
    texts = [each["result"]["content"][0]["text"] for each in told]
    assert daemon.url in texts[0] and daemon.model in texts[1] and "no request" in texts[2]
