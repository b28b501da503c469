"""`/omlxd/cache/tree` and `/omlxd/cache/clear`: the program's answer, handed on; files that go, in order."""

import asyncio
from pathlib import Path

import httpx
import pytest
from app_client import client
from cache_folder import KEYS, Cache
from fake_engine import FakeCold, FakeEngine, FakeEngines, served

from omlxd.front.app import create_app
from omlxd.front.owner import cache_tree
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


async def test_the_tree_is_told_and_a_node_cleared(engines: FakeEngines, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cache_tree, "AT_ONCE", 4)
    async with client(create_app(engines)) as http:
        (tiny,) = [tree for tree in (await http.get(TREE)).json()["trees"] if tree["model"] == "org/tiny"]
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
        (tiny,) = [tree for tree in (await http.get(TREE)).json()["trees"] if tree["model"] == "org/tiny"]
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


async def test_without_a_cache_there_is_no_tree():
    async with client(create_app(FakeEngines(FakeEngine()))) as http:
        assert (await http.get(TREE)).status_code == 503
        assert (await http.post(CLEAR, json={"namespace": "0" * 32})).status_code == 503


async def test_a_program_that_fails_is_an_error_and_the_next_look_goes(
    engines: FakeEngines, monkeypatch: pytest.MonkeyPatch
):
    async with client(create_app(engines)) as http:
        with monkeypatch.context() as broken:
            broken.setattr(cache_tree, "COMMAND", ("false",))
            assert (await http.get(TREE)).status_code == 500
        assert (await http.get(TREE)).status_code == 200


async def test_whoever_goes_away_leaves_nothing_behind(engines: FakeEngines, monkeypatch: pytest.MonkeyPatch):
    async with served(create_app(engines)) as url, httpx.AsyncClient(base_url=url) as http:
        with monkeypatch.context() as slow:
            slow.setattr(cache_tree, "COMMAND", ("sh", "-c", "echo begun; exec sleep 600", "sh"))
            async with http.stream("GET", TREE) as answer:
                async for _ in answer.aiter_bytes():
                    assert (await http.get(TREE)).status_code == 503, "one at a time"
                    break
        async with asyncio.timeout(60):
            while (await http.get(TREE)).status_code == 503:
                await asyncio.sleep(0.05)
