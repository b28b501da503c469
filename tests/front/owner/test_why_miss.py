"""omlxd cache why-miss: causes, texts, what the daemon remembers, and what disk alone can tell."""

import asyncio
import json
import os
import shutil
import time
import tracemalloc
from pathlib import Path

import httpx
import msgspec
import pytest
from app_client import body as request_body
from app_client import client
from daemon import BLOCK, Daemon, body, own_usage, prose, wait_until
from fake_engine import USAGE, FakeEngine, FakeEngines, app_of, served

from omlxd.api.openai import chat_request
from omlxd.chat import Finished, GenerateRequest, Progress, RawPrompt, TextDelta
from omlxd.cli import main
from omlxd.cli.cache.asked import read_request
from omlxd.cli.cache.why_miss import as_text
from omlxd.cli.daemon.owner_api import WhyMiss
from omlxd.engine.process.children import children
from omlxd.engine.server.explain import Explainer, Placed
from omlxd.errors import ConfigError
from omlxd.front.app import create_app
from omlxd.front.http.observe.recent_requests import RecentRequests
from omlxd.front.http.observe.trace import RequestTrace
from omlxd.kv.files.block_file import text_of_keys
from omlxd.kv.files.fs import FileSystem
from omlxd.kv.files.namespace import NamespaceInfo, describe_namespace
from omlxd.kv.files.paths import block_path
from omlxd.kv.hashing import ExtraKey, chain_root, hash_blocks, namespace_of
from omlxd.kv.ledger.evicted_log import EvictedLog
from omlxd.wire.explanation import Explanation

CHAT = "/v1/chat/completions"
SIZE = 4
FACTS = {"weights": {"a.safetensors": "1", "config.json": "2"}, "block_size": SIZE}


# --------------------------------------------------------------------------- the explainer alone


class Files:
    """A cache dir of header-only block files, and an explainer over it. Tokens are their own text."""

    def __init__(self, root: Path, facts: dict = FACTS, stands=None, adapter: str = ""):
        self.root = root
        self.namespace = namespace_of(facts)
        self.size = facts["block_size"]
        describe_namespace(
            root,
            NamespaceInfo(
                model_id="org/m",
                model_path="/m",
                model_type="t",
                block_size=self.size,
                block_bytes=1,
                facts=facts,
                facts_digest=self.namespace.hex(),
                adapter=adapter,
            ),
            FileSystem(),
        )
        self.keys: dict[int, list[ExtraKey]] = {}  # Of the prompt that is asked about, and of what is stored.
        self.images: list[Placed] = []
        self.explainer = Explainer(
            prompt_of=lambda request: (list(request.prompt.tokens), self.keys, self.images),
            text_of=lambda tokens: " ".join(map(str, tokens)),
            namespace=self.namespace,
            block_size=self.size,
            where=lambda h: "cold" if (root / block_path(self.namespace, h)).is_file() else "",
            stands=stands,
            root=root,
            model_id="org/m",
            model_path="/m",
        )

    def store(self, tokens: list[int]) -> list[bytes]:
        parent = chain_root(self.namespace)
        hashes = hash_blocks(parent, tokens, self.size, self.keys)
        for index, name in enumerate(hashes):
            own = tokens[index * self.size : (index + 1) * self.size]
            claims = {"digest": "0" * 32, "format": "omlxd-kv-1", "kind": "tokens"}
            claims |= {"namespace": self.namespace.hex()[:32], "hash": name.hex(), "parent": parent.hex()}
            claims["tokens"] = ",".join(map(str, own))
            if index in self.keys:
                claims["extra"] = text_of_keys(self.keys[index])
            header = json.dumps({"__metadata__": claims}, separators=(",", ":")).encode()
            path = self.root / block_path(self.namespace, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
            parent = name
        return hashes

    def why(self, tokens: list[int], reached: int = -1) -> Explanation:
        return self.explainer.explain_request(
            GenerateRequest(prompt=RawPrompt(tokens=tuple(tokens))), reached
        )


def test_nothing_missed_and_nothing_stored(tmp_path: Path):
    files = Files(tmp_path)
    tokens = list(range(1, 13))
    told = files.why(tokens)
    assert (told.cause, told.position, told.cold_tokens) == ("never_stored", 0, 0)
    files.store(tokens)
    # The last block of 12 tokens would leave nothing to compute.
    told = files.why(tokens)
    assert (told.cause, told.cold_tokens, told.prompt_tokens) == ("none", 8, 12)
    assert files.why([1, 2, 3]).cause == "none"


def test_the_first_token_that_differs_and_the_text_around_it(tmp_path: Path):
    files = Files(tmp_path)
    files.store([1, 2, 3, 4, 5, 6, 7, 8])
    files.store([1, 2, 3, 4, 5, 9, 9, 9])
    told = files.why([1, 2, 3, 4, 5, 6, 70, 80, 90])
    assert (told.cause, told.position, told.cold_tokens) == ("differs", 6, 4)
    assert (told.before, told.prompt, told.stored) == ("1 2 3 4 5 6", "70 80 90", "7 8")
    assert told.looked >= 3 and told.complete
    # From the very first token on.
    told = files.why([7, 7, 7, 7, 7])
    assert (told.cause, told.position, told.before, told.prompt) == ("differs", 0, "", "7 7 7 7 7")


def test_another_image_is_named_with_the_place_where_it_begins(tmp_path: Path):
    files = Files(tmp_path)
    tokens = [1, 2, 7, 7, 7, 3, 4, 5, 6]
    files.keys = {0: [("image", "aa@2")], 1: [("image", "aa@-2")]}
    files.store(tokens)
    assert files.why(tokens).cause == "none"
    files.keys = {0: [("image", "bb@2")], 1: [("image", "bb@-2")]}
    why = files.why(tokens)
    assert (why.cause, why.position, why.before) == ("other_image", 2, "1 2")
    assert "another image is stored there, from token 2" in as_text(WhyMiss("org/m", why))
    files.images = [(0, 2, "image 1 of 2"), (2, 5, "image 2 of 2 (messages.0.content.3.source)")]
    told = as_text(WhyMiss("org/m", files.why(tokens)))
    assert "another image than image 2 of 2 (messages.0.content.3.source) is stored there, from" in told
    no_state = as_text(WhyMiss("org/m", msgspec.structs.replace(why, cause="no_checkpoint")))
    assert "can be restored only where" in no_state and "another image is stored from token 2" in no_state
    other_text = [1, 9, 7, 7, 7, 3, 4, 5, 6]
    assert (files.why(other_text).cause, files.why(other_text).position) == ("differs", 1)
    files.keys = {}
    assert (files.why(tokens).cause, files.why(tokens).position) == ("other_image", 2)


def test_an_image_is_no_wall_of_its_token(tmp_path: Path):
    files = Files(tmp_path)
    files.explainer.text_of = lambda tokens: "".join({7: "<|image_pad|>"}.get(t, f"{t} ") for t in tokens)
    files.store([1, 2, 7, 7, 7, 7, 7, 7, 7, 7])
    why = files.why([1, 2, 7, 7, 7, 7, 7, 8, 7, 9])
    assert (why.before, why.prompt) == ("1 2 <|image_pad|> x 5", "8 <|image_pad|>9 ")


def test_a_request_that_was_made_is_explained_by_what_it_reached(tmp_path: Path):
    files = Files(tmp_path)
    files.store([1, 2, 3, 4, 5, 6, 7, 8])
    tokens = [1, 2, 3, 4, 5, 6, 70, 80, 90]
    files.store(tokens)  # As the request itself did when it ended.
    assert files.why(tokens).cause == "none"
    assert files.why(tokens, reached=6).hot_tokens == 6  # as the log counts it, a block in part too
    told = files.why(tokens, reached=4)
    assert (told.cause, told.position, told.stored) == ("differs", 6, "7 8")


def test_another_namespace_of_the_same_model(tmp_path: Path):
    old = Files(tmp_path, FACTS)
    new = Files(tmp_path, {"weights": {**FACTS["weights"], "config.json": "3"}, "block_size": 8})
    tokens = list(range(1, 21))
    old.store(tokens)
    told = new.why(tokens)
    assert told.cause == "other_namespace"
    (other,) = told.elsewhere
    assert other.name == old.namespace.hex()[:32] and other.tokens == 16
    assert other.differs == ("block_size (4, now 8)", "weights (config.json)")
    # One that reaches no further than ours tells nothing.
    new.store(tokens)
    assert new.why(tokens).elsewhere == ()


def test_kv_of_another_adapter_is_told_as_such(tmp_path: Path):
    """Each asks for what another one stored: none sees a digest."""

    def of(root: str, adapter: str, digest: str, **facts) -> Files:
        return Files(tmp_path / root, {**FACTS, "adapter": digest, **facts}, adapter=adapter)

    def told(asks: Files, stored: Files) -> tuple[str, str]:
        tokens = list(range(1, 21))
        stored.store(tokens)
        text = as_text(WhyMiss("org/m", asks.why(tokens)))
        assert "another model file" not in text and "differs in" not in text and "d1" not in text
        (cause,) = [line for line in text.splitlines() if "first miss" in line]
        return cause, text

    kettle, base = ("/a/kettle", "d1"), ("", "")
    cause, text = told(of("a", *base), of("a", *kettle))
    assert "it is stored, but for the adapter kettle; adapters share no KV" in cause
    assert " holds 16 tokens of it, for the adapter kettle\n" in text
    assert "but for the model itself; adapters" in told(of("b", *kettle), of("b", *base))[0]
    assert "but for the adapter pot; adapters" in told(of("c", *kettle), of("c", "/a/pot", "d2"))[0]
    assert "but for the adapter /b/kettle; " in told(of("d", *kettle), of("d", "/b/kettle", "d2"))[0]
    assert (
        "but for the adapter kettle with other files; "
        in told(of("e", *kettle), of("e", "/a/kettle", "d2"))[0]
    )
    assert "but for another adapter; " in told(of("f", *kettle), of("f", "", "d2"))[0]
    # Something else is not the same either.
    asks, stored = of("g", *base), of("g", *kettle, block_size=2)
    stored.store(tokens := list(range(1, 21)))
    text = as_text(WhyMiss("org/m", asks.why(tokens)))
    assert "another model file or setting" in text
    assert " for the adapter kettle; differs in block_size (2, now 4)" in text


def test_a_chain_without_a_checkpoint(tmp_path: Path):
    standing: set[bytes] = set()
    files = Files(tmp_path, stands=lambda h: h in standing)
    hashes = files.store(list(range(1, 17)))
    told = files.why([*range(1, 17), 99])
    assert (told.cause, told.chain_tokens, told.cold_tokens) == ("no_checkpoint", 16, 0)
    standing.add(hashes[1])
    told = files.why([*range(1, 17), 99])
    assert (told.cause, told.cold_tokens, told.position) == ("no_checkpoint", 8, 16)
    # Where another text stands beside the chain's end, it is told all the same.
    told = files.why([*range(1, 13), 13, 70, 80, 90, 99])
    assert (told.cause, told.chain_tokens, told.position, told.stored) == (
        "no_checkpoint",
        12,
        13,
        "14 15 16",
    )
    standing.add(hashes[3])
    assert files.why([*range(1, 17), 99]).cause == "none"


def test_a_request_that_was_made_without_a_checkpoint_in_reach(tmp_path: Path):
    files = Files(tmp_path, stands=lambda h: True)
    files.store(list(range(1, 17)))
    tokens = [*range(1, 10), 70, 80, 90, *range(13, 20)]
    files.store(tokens)
    # It was computed from its first token, though two of its blocks were there.
    told = files.why(tokens, reached=0)
    assert (told.cause, told.chain_tokens, told.cold_tokens) == ("no_checkpoint", 8, 0)
    assert (told.position, told.prompt.split()[0], told.stored) == (9, "70", "10 11 12")


def test_lineage_bears_any_file(tmp_path: Path):
    files = Files(tmp_path)
    (first, *_) = files.store([1, 2, 3, 4, 5, 6, 7, 8])
    folder = tmp_path / files.namespace.hex()[:32]
    for index, junk in enumerate([b"", b"\0" * 100, b"\xff" * 2000]):
        name = f"{index:02x}" * 32
        (folder / name[:2]).mkdir(exist_ok=True)
        (folder / name[:2] / f"{name}.safetensors").write_bytes(junk)
    (folder / "ab").mkdir(exist_ok=True)
    (folder / "ab" / ("ab" * 32 + ".safetensors")).mkdir()
    os.mkfifo(folder / "ab" / ("ab" + "cd" * 31 + ".safetensors"))
    found = children(folder, [first], 5)
    assert [child.tokens for child in found.children[first]] == [[5, 6, 7, 8]]
    assert children(tmp_path / "none", [first], 5).children == {}
    assert not children(folder, [first], -1).complete


def test_fates_are_bounded():
    evicted_log = EvictedLog(most=3)
    paths = [f"{'a' * 32}/{n:02x}/{n:02x}{'0' * 62}.safetensors" for n in range(5)]
    for path in paths:
        evicted_log.note(path, "evicted")
    evicted_log.note(paths[3], "damaged")
    evicted_log.note("x/y.tmp", "evicted")
    assert (
        len(evicted_log._gone) == 3 and evicted_log.of(paths[0]) is None and evicted_log.of("x/y.tmp") is None
    )
    assert evicted_log.of(paths[3]).what == "damaged" and evicted_log.of(paths[4]).what == "evicted"


# --------------------------------------------------------------------------- the front


def test_recent_requests_are_bounded():
    recent = RecentRequests(most=3, most_bytes=100)
    traces = [RequestTrace("POST", CHAT) for _ in range(5)]
    for index, trace in enumerate(traces):
        request = GenerateRequest(prompt=RawPrompt(text="x"), session=f"s{index % 2}")
        recent.add_request("m", request, trace, 40 if index else 101)
    assert [each.trace for each in recent.newest_first()] == [traces[4], traces[3]]
    assert recent.find_request(traces[1].id) is None and recent.find_request(traces[3].id).trace is traces[3]
    assert recent.find_request().trace is traces[4] and recent.find_request(session="s1").trace is traces[3]
    assert recent.find_request(session="s9") is None and recent.find_request().reached == -1


@pytest.mark.slow
def test_recent_requests_hold_no_more_memory_than_is_said():
    recent = RecentRequests()
    held = json.dumps([[]] * 20_000)
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "x"}], "tools": ["T"]}).replace(
        '"T"', json.dumps({"type": "function", "function": {"name": "f", "parameters": {"a": "P"}}})
    )
    body = body.replace('"P"', held)
    tracemalloc.start()
    try:
        for _ in range(6):
            request = chat_request.parse(body.encode()).generate
            recent.add_request("m", request, RequestTrace("POST", CHAT), len(body))
        del request
        assert tracemalloc.get_traced_memory()[0] < 3 << 20
    finally:
        tracemalloc.stop()
    kept = recent.find_request()
    assert kept is not None and kept.request == chat_request.parse(body.encode()).generate


async def test_the_last_requests_and_why():
    engine = FakeEngine()
    engine.explanation = Explanation(cause="never_stored", missing=f"{'a' * 32}/bb/bb{'0' * 62}.safetensors")
    engines = FakeEngines(engine)
    async with client(create_app(engines)) as http:
        ask = lambda **more: http.post("/omlxd/why-miss", json=more)  # noqa: E731
        assert (await ask(request_id="last")).status_code == 404
        answer = await http.post(CHAT, json=request_body(CHAT))
        id = answer.headers["x-request-id"]
        (line,) = (await http.get("/omlxd/requests")).json()["requests"]
        assert line["id"] == id and line["cached_tokens"] == USAGE.cached_tokens and line["outcome"] == "ok"
        assert (await ask(request_id="last")).json()["request_id"] == id
        for path in ("/omlxd/why-miss", "/omlxd/cache/files", "/omlxd/cache/pin"):
            for unsaid in ({}, {"name": "x"}, {"body": request_body(CHAT)}):
                refused = await http.post(path, json=unsaid)
                assert refused.status_code == 400 and refused.json()["error"]["param"] == "request_id"
            refused = await http.post(path, content=b"")
            assert refused.status_code == 400 and "it is empty" in refused.json()["error"]["message"]
        found = (await ask(request_id=id)).json()
        assert found["request_id"] == id and found["explanation"]["cause"] == "never_stored"
        # Whose turn it was explains nothing.
        explained, reached = engine.explained
        assert msgspec.structs.replace(explained, client="") == msgspec.structs.replace(
            engine.requests[0], client=""
        )
        assert reached == USAGE.cached_tokens
        assert found["reached"] == USAGE.cached_tokens and not found.get("recomputed")
        engine.script = (Finished("stop", msgspec.structs.replace(USAGE, recomputed=64)),)
        await http.post(CHAT, json=request_body(CHAT))
        found = (await ask(request_id="last")).json()
        assert (found["reached"], found["recomputed"]) == (USAGE.cached_tokens, 64)
        assert found["explanation"]["hot_tokens"] == USAGE.cached_tokens
        assert engine.explained[1] == USAGE.cached_tokens + 64
        assert "64 more lay on SSD" in as_text(msgspec.convert(found, WhyMiss))
        engines.cold.evicted_log.note(engine.explanation.missing, "evicted")
        told = (await ask(path=CHAT, body=request_body(CHAT))).json()
        assert told["explanation"]["cause"] == "evicted" and told["explanation"]["gone_at"] > 1e9
        assert engine.explained == (engine.requests[0], -1)
        for more in ({"request_id": "req_0"}, {"session": "none"}):
            assert (await ask(**more)).status_code == 404
        for more in ({"path": "/v1/models"}, {"path": CHAT, "body": {"model": 5}}, {"body": 5}):
            assert (await ask(**more)).status_code == 400
    async with client(app_of(FakeEngine(), api_key="k")) as http:
        assert (await http.get("/omlxd/requests")).status_code == 401
        assert (await http.post("/omlxd/why-miss", json={})).status_code == 401


async def test_a_request_that_was_stopped_is_known_by_its_prompt():
    engine = FakeEngine((Progress(48, 100), TextDelta("It"), Progress(64, 100), 600.0))
    app = app_of(engine)
    async with served(app) as url, httpx.AsyncClient(base_url=url) as http:
        asked = request_body(CHAT) | {"stream": True}
        asked["messages"] = [{"role": "user", "content": "first words " * 40}]
        async with http.stream("POST", CHAT, json=asked) as answer:
            async for line in answer.aiter_lines():
                if "It" in line:
                    break
        await asyncio.wait_for(engine.closed.wait(), 60)
        (line,) = (await http.get("/omlxd/requests")).json()["requests"]
        assert (line["prompt_tokens"], line["cached_tokens"]) == (100, 48)
        assert line["opening"].startswith("first words first") and len(line["opening"]) <= 120
        async with asyncio.timeout(60), http.stream("GET", "/omlxd/events") as looks:
            async for line in looks.aiter_lines():
                if line.startswith("data:") and (slots := json.loads(line[5:])["slots"]):
                    break
        told = [slots[0][name] for name in ("requests", "first", "prompt", "cached_hot")]
        assert told == [1, 1, 100, 48]


# --------------------------------------------------------------------------- the command


def test_requests_are_read_from_files(tmp_path: Path):
    file = tmp_path / "r.json"

    def read(text: str, path: str | None = None):
        file.write_text(text)
        return read_request(str(file), path)

    assert read('{"messages": [], "system": "x"}').path == "/v1/messages"
    assert read('{"messages": []}').path == CHAT
    assert (
        read('{"prompt": "x"}').path == "/v1/completions" and read('{"input": "x"}').path == "/v1/responses"
    )
    assert read('{"messages": []}', "/v1/messages").path == "/v1/messages"
    whole = read('{"path": "/v1/messages?beta=true", "headers": {"A": "b"}, "body": {"m": 1}}')
    assert (whole.path, whole.body, whole.headers) == ("/v1/messages?beta=true", {"m": 1}, {"A": "b"})
    assert read('{"prompt": "x"}\n{"input": "y"}\n').body == {"input": "y"}
    for text in ("", "[]", "nonsense", "{}\nnonsense"):
        with pytest.raises(ConfigError):
            read(text)
    with pytest.raises(ConfigError):
        read_request(str(tmp_path / "none"), None)


def test_each_cause_is_a_sentence():
    now = time.time()
    for cause in (
        "none",
        "reuse_off",
        "differs",
        "never_stored",
        "other_namespace",
        "no_checkpoint",
        "evicted",
    ):
        told = Explanation(
            cause=cause,
            block_size=64,
            prompt_tokens=500,
            position=130,
            before="a",
            prompt="b",
            gone_at=now - 60,
        )
        text = as_text(WhyMiss("m", told))
        assert "prompt of 500 tokens" in text
        if cause not in ("none", "reuse_off", "no_checkpoint"):
            assert "first miss: block 2, from token 128" in text
    assert "evicted 1 min ago" in text
    for tokens, said in ((64, "no longer than one block of 64 tokens"), (65, "every full block")):
        text = as_text(WhyMiss("m", Explanation(cause="none", block_size=64, prompt_tokens=tokens)))
        assert f"nothing missed: {'the prompt is ' if tokens == 64 else ''}{said}" in text


@pytest.mark.parametrize(
    "argv", [["--offline"], ["last", "--offline"], ["/no/such/file"], ["--url", "x", "last"]]
)
def test_nonsense_ends_with_2(argv: list[str], capsys):
    assert main.main(["cache", "why-miss", *argv]) == 2
    assert capsys.readouterr().err.startswith("omlxd: ")


@pytest.mark.slow
def test_over_a_daemon_and_without_one(tmp_path: Path, capsys):
    """The same question to a running engine, after its blocks went, and to the disk alone."""
    text = prose(90)
    words = text.split()
    changed = " ".join([*words[:150], "CHANGED", *words[151:]])
    cache = tmp_path / "omlxd" / "cache"
    folder = ["--paged-ssd-cache-dir", str(cache)]

    def why(*argv: str) -> WhyMiss:
        assert main.main(["cache", "why-miss", *argv, *folder, "--json"]) == 0
        return msgspec.json.decode(capsys.readouterr().out, type=WhyMiss)

    def written() -> int:
        return len(list(cache.rglob("*.safetensors")))

    with Daemon(tmp_path) as daemon:
        url = ["--url", daemon.url]
        daemon.chat(text)
        daemon.settled()
        assert written() >= 5
        file = tmp_path / "changed.json"
        file.write_text(json.dumps({"path": CHAT, "body": body(daemon.model, changed)}))
        told = why(str(file), *url).explanation
        assert told.cause == "differs" and "CHANGED" in told.prompt and "CHANGED" not in told.stored
        assert told.hot_tokens >= BLOCK and told.position >= told.hot_tokens
        same = tmp_path / "same.json"
        same.write_text(json.dumps(body(daemon.model, text)))
        assert why(str(same), *url).explanation.cause == "none"
        # Afterwards, by its id: what it had reached then, not what it has stored since.
        usage = own_usage(daemon.chat(changed))
        assert why(str(file), *url).explanation.cause == "none"
        found = why("last", *url)
        assert found.reached == usage["cached_hot"] + usage["cached_cold"]
        assert found.explanation.cause == "differs" and "CHANGED" in found.explanation.prompt
        assert main.main(["cache", "why-miss", *url, *folder]) == 0
        assert found.request_id in capsys.readouterr().out
        assert main.main(["cache", "why-miss", found.request_id, *url, *folder]) == 0
        assert "another text is stored there" in capsys.readouterr().out
        assert main.main(["cache", "why-miss", "req_0", *url, *folder]) == 1
        assert "no request is kept; `omlxd cache why-miss` lists the last ones." in capsys.readouterr().err
        daemon.settled()
        assert written() >= 7
        # A damaged file is removed when it is read, and the daemon remembers it.
        daemon.kill_engine()
        for path in cache.rglob("*.safetensors"):
            data = bytearray(path.read_bytes())
            data[-1] ^= 1
            path.write_bytes(data)
        daemon.chat(prose(20, seed=3))
        assert own_usage(daemon.chat(text))["cached_cold"] == 0
        # The engine has told the daemon, whose account is another thread's.
        wait_until(lambda: why("last", *url).explanation.cause == "damaged")
        assert why("last", *url).explanation.gone_at > 0
        assert daemon.stop() == 0
    told = why(str(file), "--offline").explanation
    assert told.cause in ("differs", "none") and told.cold_tokens >= BLOCK
    other = tmp_path / "other.json"
    other.write_text(json.dumps(body("claude-any", "QUITE other " + text)))
    told = why(str(other), "--offline").explanation
    assert told.cause == "differs" and told.stored
    shutil.rmtree(cache)
    cache.mkdir()
    assert main.main(["cache", "why-miss", str(other), "--offline", *folder]) == 1
    assert "nothing lies in" in capsys.readouterr().err
