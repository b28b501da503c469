"""A model on two machines, which are two addresses of loopback here: who may lead, what must agree, and what
each end of either does.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from cold_files import all_on_disk, wait_for_shares
from daemon import Daemon, alive, body, family_model, own_usage, prose, restored, wait_until
from joining import JoinHost

from omlxd import wire
from omlxd.cli.doctor import link
from omlxd.cli.main import main
from omlxd.config import load_settings
from omlxd.engine.kvio.fingerprint import differing, weight_fingerprints
from omlxd.engine.server.ranks import joined
from omlxd.engine.server.ranks.joined import reach
from omlxd.errors import ModelError, NotNow
from omlxd.front.engines import link as engine_link
from omlxd.front.engines.ledger.cold_ledger import ColdLedger
from omlxd.front.engines.link import EngineLink
from omlxd.front.join.host import JoinHost as Waiting
from omlxd.kv.peer.client import pair
from omlxd.kv.peer.identity import Identity, PeerError
from omlxd.kv.peer.versions import computing


class Host:
    """A machine that waits for leads, in this process; its rank is a program that says nothing."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, **options: str):
        monkeypatch.setattr(joined, "AWAY_S", -1.0)
        monkeypatch.setattr(joined, "AGAIN_S", 0.0)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self.lead = folder / "lead"
        given = {"base_path": str(folder / "there"), "paged_ssd_cache_max_size": "0", "no_hf_cache": "true"}
        self.settings = load_settings(given | options, {})
        self.listening = socket.create_server(("127.0.0.1", 0))
        self.host = asyncio.run_coroutine_threadsafe(self._make(), self._loop).result(30)
        self.host.start()
        self.identity = Identity(self.settings.base_path)
        address: tuple[str, int] = self.listening.getsockname()
        self.address = address

    async def _make(self) -> Waiting:
        folder = family_model("llama")
        return Waiting(self.settings, self.listening, ColdLedger(folder, 0), folder, ("sleep", "60", "#"))

    def pair(self) -> None:
        pair(Identity(self.lead), self.address, self.identity.new_code())

    def ask(self, **more: object) -> None:
        cache = wire.CacheSettings(peer_base=str(self.lead), **more)  # type: ignore[arg-type]
        reach(wire.Load(str(family_model("llama")), "llama", cache, ranks=2), f"127.0.0.1:{self.address[1]}")

    def close(self) -> None:
        self.host.close()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:
    made = Host(tmp_path, monkeypatch, block_size="32")
    yield made
    made.close()


def test_who_is_not_paired_leads_nobody(
    host: Host, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    host.identity.own()
    with pytest.raises(
        ModelError, match="do not trust each other; `omlxd peer code` on the machine that listens"
    ):
        host.ask()
    with pytest.raises(PeerError, match="the code is wrong"):
        host.identity.new_code()
        pair(Identity(host.lead), host.address, "AAAA-AAAA-AAAA-AAAA")
    # Paired with the host once, and removed there: the certificate is unknown.
    host.pair()
    host.identity.remove(host.identity.paired()[0].name)
    with pytest.raises(ModelError, match="do not trust"):
        host.ask()
    wait_until(lambda: "127.0.0.1 is refused: it is not paired with this machine" in caplog.text)
    host.host.close()
    with pytest.raises(
        NotNow, match=r"does not join now: Connection refused; start `omlxd join` on that machine"
    ):
        host.ask()


def test_what_does_not_agree_is_said_before_anything_loads(
    host: Host, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    host.pair()
    with pytest.raises(ModelError, match=r"--block-size .*: 64 on the lead and 32 on the machine that joins"):
        host.ask()
    assert "127.0.0.1 is refused: --block-size" in caplog.text
    theirs = computing() | {"MLX": "0.1"}
    monkeypatch.setattr(joined, "computing", lambda: theirs)
    with pytest.raises(ModelError, match=f"MLX is 0.1 on the lead and {computing()['MLX']} on the m"):
        host.ask(block_size=32)


def test_a_machine_that_keeps_no_kv_takes_no_share(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with contextlib.closing(Host(tmp_path, monkeypatch, no_cache="true")) as host:
        host.pair()
        with pytest.raises(ModelError, match="--no-cache is set on the machine that joins; unset it there"):
            host.ask()


def test_the_doctor_measures_the_link(host: Host, capsys: pytest.CaptureFixture[str]):
    doctor = ["doctor", "--base-path", str(host.lead), "--model", str(family_model("llama")), "--join"]
    assert main([*doctor, f"127.0.0.1:{host.address[1]}"]) == 1
    told = capsys.readouterr().out
    assert (
        "do not trust each other" in told
        and f"`omlxd peer pair 127.0.0.1:{host.address[1]}` pairs both" in told
    )
    with socket.create_server(("127.0.0.1", 0)) as nobody:
        free = nobody.getsockname()[1]
    assert main([*doctor, f"127.0.0.1:{free}"]) == 1
    told = capsys.readouterr().out
    assert "Start `omlxd join` on that machine." in told and "peer pair" not in told
    host.pair()
    assert main([*doctor, f"127.0.0.1:{host.address[1]}"]) == 0
    assert re.search(r"round trip takes \S+ ms.*\n.*of a token's step", capsys.readouterr().out)
    # 64 round trips of 1 ms, and 64 x 8 KB at 1 GB/s.
    assert link.sums(32, 4096, 1, 1e-3, 1e9) == pytest.approx(64 * (1e-3 + 8192 / 1e9))


def test_weights_that_differ_are_named(tmp_path: Path):
    model = family_model("llama")
    own = weight_fingerprints(model, None)
    assert differing(model, own, None) == ""
    other = {name: "0" * 32 for name in own}
    assert "the digest of config.json is " in differing(model, other, None)
    # A digest as the hub has it is compared with one of that kind.
    assert "the digest of config.json is " in differing(model, {name: "0" * 64 for name in own}, None)
    assert differing(model, {**own, "more.safetensors": ""}, None) == "more.safetensors is on the lead alone"


@pytest.mark.parametrize("address", ["0.0.0.0", "[::]:8078", "0"])
def test_it_listens_on_no_network_that_is_not_named(
    address: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    assert main(["join", "--base-path", str(tmp_path), "--listen", address]) == 2
    said = capsys.readouterr().err
    assert "--listen: " in said and "name the address in one of them" in said


def test_memory_is_blamed_where_nothing_else_is_known():
    async def run() -> str:
        engine = await EngineLink.spawn((sys.executable, "-c", "import time; time.sleep(600)"))
        psutil.Process(engine.pid).kill()
        how = await engine.receive(lambda message: None)
        engine.kill()
        await engine.close()
        return how

    assert asyncio.run(run()) == "it was killed, perhaps because memory ran out"


def test_an_engine_that_is_stopped_is_ended(monkeypatch: pytest.MonkeyPatch):
    """Its ranks on other machines end by its silence, and can't end it."""
    monkeypatch.setattr(engine_link, "STOPPED_LOOK_S", 0.01)

    async def run() -> str:
        engine = await EngineLink.spawn((sys.executable, "-c", "import time; time.sleep(600)"))
        ending = asyncio.create_task(engine.end_if_stopped())
        psutil.Process(engine.pid).suspend()
        await ending
        how = await engine.receive(lambda message: None)
        await engine.close()
        return how

    assert asyncio.run(run()) == "it was killed by this omlxd"


CAP = 1_000_000
PROMPT, LONGER = prose(60, seed=3), prose(60, seed=3) + prose(40, seed=9)


def text(daemon: Daemon, prompt: str) -> tuple[str, bool]:
    """(a greedy answer, whether some of its prompt was restored)."""
    answer = daemon.chat(prompt, max_tokens=12, ignore_eos=True)
    message = answer["choices"][0]["message"]
    return f"{message.get('reasoning_content')}{message['content']}", restored(own_usage(answer)) > 0


def rank_of(daemon: Daemon) -> dict[str, Any]:
    """What the status says of the rank on the other machine."""
    ranks = daemon.http.get("/omlxd/status").json()["models"][0].get("ranks") or [{}, {"cold": 0}]
    return ranks[1]


@pytest.mark.slow
def test_two_machines_give_the_tokens_of_two_ranks_whatever_dies(tmp_path: Path):
    model, cap = family_model("llama"), ("--paged-ssd-cache-max-size", str(CAP))
    with Daemon(tmp_path / "alone", "--ranks", "2", *cap, model=model) as daemon:
        expected = [text(daemon, prompt)[0] for prompt in (PROMPT, LONGER)]
    with JoinHost(tmp_path / "there", "--model", str(model), cap=CAP) as host:
        host.pair(tmp_path / "here" / "omlxd")
        with Daemon(tmp_path / "here", "--join", host.address, *cap, model=model) as daemon:
            assert text(daemon, PROMPT) == (expected[0], False)
            assert text(daemon, PROMPT) == (expected[0], True)  # From RAM.
            assert text(daemon, LONGER) == (expected[1], True)  # What both begin with.
            # What its files take is known there alone.
            wait_until(
                lambda: rank_of(daemon)["cold"] > 0 and rank_of(daemon)["host"] == host.address,
                why=daemon.logged,
            )
            assert rank_of(daemon)["pid"] == host.follower().pid
            for ended in ("follower", "lead", "stopped follower", "waiting"):
                daemon.settled()
                wait_for_shares(2, host.cache, daemon.cache)
                lead, follower = psutil.Process(daemon.engine_pid()), host.follower()
                if ended == "waiting":
                    assert host.stop() == 0
                elif ended == "stopped follower":
                    follower.suspend()
                else:
                    (follower if ended == "follower" else lead).kill()
                wait_until(lambda pair=(lead, follower): not any(map(alive, pair)), why=daemon.logged)
                if ended == "waiting":
                    refused = daemon.post("/v1/chat/completions", body(daemon.model, PROMPT))
                    assert refused.status_code == 503 and "retry-after" in refused.headers
                    assert f"{host.address} does not join now" in refused.text
                    host.start()
                assert text(daemon, LONGER) == (expected[1], True), ended  # From each one's own files.
            for cache in (host.cache, daemon.cache):
                assert 0 < all_on_disk(cache) <= CAP
            follower = host.follower()
            assert daemon.stop() == 0
            wait_until(lambda: not alive(follower), why=host.logged)
