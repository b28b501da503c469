"""`/omlxd/cache/tree` and `/omlxd/cache/clear`: the program's answer, handed on; files that go, in order."""

import asyncio
import dataclasses
from pathlib import Path

import httpx
import pytest
from app_client import client
from cache_folder import KEYS, Cache
from fake_engine import FakeCold, FakeEngine, FakeEngines

from omlxd.front.app import create_app
from omlxd.front.owner.cache import index as cache_index
from omlxd.front.owner.cache import tree as cache_tree
from omlxd.kv.ledger.ledger import LedgerStats

TREE, CLEAR = "/omlxd/cache/tree", "/omlxd/cache/clear"


class Cold(FakeCold):
    """`gone`: what was taken out of it, a list an order. `pinned`: names by file."""

    def __init__(self, root: Path):
        super().__init__(root, LedgerStats(*[0] * len(LedgerStats.__dataclass_fields__)))
        self.gone: list[list[str]] = []
        self.pinned: dict[str, list[str]] = {}

    async def pinned_files(self) -> dict[str, list[str]]:
        return self.pinned

    async def forget_files(self, paths: list[str], remove: bool):
        assert remove
        self.gone.append(paths)
        return len(paths), 10 * len(paths), ["a.file: busy"]


def cached(root: Path) -> FakeEngines:
    """Engines with an SSD cache at `root`."""
    made = FakeEngines(FakeEngine())
    made.cold = Cold(root)
    return made


@pytest.fixture
def engines(tmp_path: Path) -> FakeEngines:
    return cached(Cache(tmp_path / "cache", tmp_path / "model").root)


async def trees_of(http: httpx.AsyncClient) -> list[dict]:
    """All pieces of a read that is not old."""
    first = (await http.get(TREE, params={"wait": 30})).json()
    assert first["state"] == "new"
    more = [(await http.get(TREE, params={"piece": at})).json() for at in range(1, first["pieces"])]
    assert {each["look"] for each in more} <= {first["look"]}
    return [tree for each in (first, *more) for tree in each["trees"]]


async def test_the_tree_is_told_and_a_node_cleared(engines: FakeEngines, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cache_tree, "AT_ONCE", 4)
    async with client(create_app(engines)) as http:
        (tiny,) = [tree for tree in await trees_of(http) if tree["model"] == "org/tiny"]
        ((depth, id, blocks, *_),) = tiny["nodes"]
        assert (depth, blocks) == (0, 8) and KEYS[0].block_hash.hex().startswith(id)
        done = await http.post(CLEAR, json={"namespace": tiny["namespace"], "id": id})
        assert done.json()["files"] == 9 and done.json()["bytes"] == 90 and done.json()["troubles"]
        assert [len(paths) for paths in engines.cold.gone] == [4, 4, 1]
        assert KEYS[-1].block_hash.hex() in engines.cold.gone[0][0], "what is last in the chain goes first"
        again = await http.post(CLEAR, json={"namespace": tiny["namespace"], "id": "ff" * 10})
        assert again.json()["files"] == 0


async def test_what_is_pinned_stays(engines: FakeEngines):
    async with client(create_app(engines)) as http:
        (tiny,) = [tree for tree in await trees_of(http) if tree["model"] == "org/tiny"]
        name = KEYS[0].block_hash.hex()
        first = f"{tiny['namespace']}/{name[:2]}/{name}.safetensors"
        engines.cold.pinned = {first: ["mine", "yours"], "other": ["his"]}
        done = (await http.post(CLEAR, json={"namespace": tiny["namespace"], "id": name[:20]})).json()
    assert (done["files"], done["pinned"], done["pins"]) == (8, 1, ["mine", "yours"])
    assert not any(first in paths for paths in engines.cold.gone)


@pytest.mark.parametrize("body", [{}, {"namespace": "../.."}, {"namespace": "0" * 32, "id": "--help"}])
async def test_what_names_no_node_is_refused(engines: FakeEngines, body: dict[str, str]):
    async with client(create_app(engines)) as http:
        assert (await http.post(CLEAR, json=body)).status_code == 400
    assert not engines.cold.gone


@pytest.mark.parametrize("query", ["piece=-1", "piece=x", "wait=nan", "wait=-1", "piece=1e9", "wait=inf"])
async def test_what_is_no_piece_is_refused(engines: FakeEngines, query: str):
    async with client(create_app(engines)) as http:
        assert (await http.get(f"{TREE}?{query}")).status_code == 400


async def test_without_a_cache_there_is_no_tree():
    async with client(create_app(FakeEngines(FakeEngine()))) as http:
        assert (await http.get(TREE)).status_code == 503
        assert (await http.post(CLEAR, json={"namespace": "0" * 32})).status_code == 503


async def test_a_program_that_fails_is_an_error_and_the_next_look_goes(
    engines: FakeEngines, monkeypatch: pytest.MonkeyPatch
):
    async with client(create_app(engines)) as http:
        with monkeypatch.context() as broken:
            broken.setattr(cache_index, "COMMAND", ("false",))
            assert (await http.get(TREE, params={"wait": 30})).status_code == 500
        assert await trees_of(http)


def slow_program(folder: Path) -> tuple[str, ...]:
    """A program that answers once the file `go` is there, with the count of its orders as a node's text."""
    node = '{"trees":[{"namespace":"n","model":"m","block_size":4,"nodes":[[0,"","1",1,1,"%d"]]}]}'
    script = f"n=0; while read order; do n=$((n+1)); while [ ! -e {folder}/go ]; do sleep 0.01; done; "
    return ("sh", "-c", f"{script} printf '{node}\\n\\n' $n; done", "sh")


async def test_many_readers_share_one_read_and_are_answered_with_the_last_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(cache_index, "COMMAND", slow_program(tmp_path))
    cold = Cold(tmp_path)
    index = cache_index.CacheIndex(cold)
    looks = await asyncio.gather(*(index.piece(0, wait=0) for _ in range(9)))
    assert {(each.state, each.look, each.pieces) for each in looks} == {("reading", 0, 0)}
    (tmp_path / "go").touch()
    looks = await asyncio.gather(*(index.piece(0, wait=30) for _ in range(9)))
    assert {(each.state, each.look, each.pieces) for each in looks} == {("new", 1, 1)} and index.reads == 1
    assert len({bytes(each.trees) for each in looks}) == 1
    await index.piece(0)
    assert index.reads == 1, "nothing has changed"
    (tmp_path / "go").unlink()
    cold.stats = dataclasses.replace(cold.stats, files=7)
    for _ in range(3):
        old = await index.piece(0, wait=0)
        assert (old.state, old.look, bytes(old.trees)) == ("old", 1, bytes(looks[0].trees))
        assert (await index.piece(0, wait=0)).files == 7, "the account is told as it is now"
    assert index.reads == 2
    (tmp_path / "go").touch()
    new = await index.piece(0, wait=30)
    assert (new.state, new.look) == ("new", 2) and bytes(new.trees) != bytes(old.trees)


async def test_a_browser_that_opens_the_page_has_the_cache_read_for_it(engines: FakeEngines):
    app = create_app(engines)
    async with client(app) as http:
        await http.get("/")
        (idle,) = {(await http.get(TREE, params={"piece": 0, "wait": 0})).json()["look"]}
        assert idle == 0
    app = create_app(engines)
    async with client(app) as http:
        await http.get("/", headers={"accept": "text/html"})
        async with asyncio.timeout(60):
            while (await http.get(TREE, params={"piece": 1})).json()["look"] == 0:  # Which begins no read.
                await asyncio.sleep(0.02)
