"""Two hosts with a link between them that delays and loses packets (two_hosts.py), and daemons on both."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import psutil
import pytest
from cold_files import wait_for_shares
from daemon import BLOCK, Daemon, alive, body, family_model, free_port, own_usage, prose, restored, wait_until
from joining import JoinHost
from two_hosts import ADDRESSES, TwoHosts, why_not

from omlxd.cli.main import main
from omlxd.kv.peer.client import connected, pair
from omlxd.kv.peer.identity import MOST_NAME, Identity, PeerError
from omlxd.kv.peer.server import PeerServer

pytestmark = pytest.mark.slow

DELAY_S, LOSS = 0.005, 0.01


@pytest.fixture
def hosts() -> Iterator[TwoHosts]:
    if why := _why_not():
        pytest.skip(why)
    with TwoHosts(DELAY_S, LOSS) as made:
        yield made


_why_not = cache(why_not)


def on_host(hosts: TwoHosts, host: int, home: Path, *flags: str, **more: Any) -> Daemon:
    return Daemon(home, *flags, wrapper=hosts.wrapper(host), transport=hosts.transport(host), **more)


def text_of(answer: dict) -> str:
    return answer["choices"][0]["message"]["content"]


def test_a_connection_whose_first_packet_is_lost(hosts: TwoHosts, tmp_path: Path):
    """Its second one follows after a second."""
    here, there = Identity(tmp_path / "here"), Identity(tmp_path / "there")
    with hosts.on(1):
        listening = socket.create_server((ADDRESSES[1], 0))
    address, server = listening.getsockname(), PeerServer(there, tmp_path / "cache", listening)
    server.start()
    with contextlib.closing(server), hosts.on(0):
        hosts.set(DELAY_S, 0.0, openings=1)
        assert pair(here, address, there.new_code()) == socket.gethostname()[:MOST_NAME]
        hosts.set(DELAY_S, 0.0, openings=1)
        with connected(here, address, bytes(32), time.monotonic() + 60) as connection:
            assert connection.look([bytes(32)], "org/tiny", {}) == ([False], "")


def test_a_peer_behind_a_bad_link(hosts: TwoHosts, tmp_path: Path, capsys: pytest.CaptureFixture):
    port = free_port()
    address = f"{ADDRESSES[0]}:{port}"
    prompts = [prose(200, seed) for seed in range(3)]
    with (
        on_host(hosts, 0, tmp_path / "a", "--peer-listen", address) as a,
        on_host(hosts, 1, tmp_path / "b", "--peer", address) as b,
    ):
        texts = [text_of(a.chat(each)) for each in prompts]
        a.settled()
        bases = [daemon.home / "omlxd" for daemon in (a, b)]
        with hosts.on(1), pytest.raises(PeerError, match="no code"):
            pair(Identity(bases[1]), (ADDRESSES[0], port), "AAAA")
        first = b.chat(prompts[0])
        assert text_of(first) == texts[0] and restored(own_usage(first)) == 0
        wait_until(lambda: f"not paired: `omlxd peer pair {address}`" in b.logged(), why=b.logged)

        assert main(["peer", "code", "--base-path", str(bases[0])]) == 0
        code = capsys.readouterr().out.strip()
        words = ["peer", "pair", address, "--base-path", str(bases[1]), "--code"]
        with hosts.on(1):
            assert main([*words, "AAAA-AAAA-AAAA-AAAA"]) == 1
            assert main([*words, code]) == 0
        b.kill_engine()
        hit = b.chat(prompts[1])
        assert text_of(hit) == texts[1]
        assert restored(own_usage(hit)) >= 200 * 3 // BLOCK * BLOCK

        hosts.set(DELAY_S, 1.0)  # The cable is out: a miss, and nobody waits for it for long.
        b.kill_engine()
        alone = b.chat(prompts[2])
        assert text_of(alone) == texts[2]
        assert restored(own_usage(alone)) < BLOCK


def answer_of(daemon: Daemon, prompt: str) -> tuple[str, int]:
    """(a greedy answer, tokens of its prompt that were restored)."""
    answer = daemon.chat(prompt, max_tokens=12, ignore_eos=True)
    return text_of(answer), restored(own_usage(answer))


def test_a_model_on_two_hosts(hosts: TwoHosts, tmp_path: Path):
    """Each host keeps its share of the KV on its own disk, whoever ends, and when the link is cut."""
    model, prompts = family_model("llama"), [prose(60, seed=3), prose(60, seed=3) + prose(40, seed=9)]
    with Daemon(tmp_path / "one", "--ranks", "2", model=model) as one:
        texts = [answer_of(one, each)[0] for each in prompts]
    there = JoinHost(tmp_path / "there", "--model", str(model), host=ADDRESSES[1], wrapper=hosts.wrapper(1))
    home = tmp_path / "here"
    with there, on_host(hosts, 0, home, "--join", there.address, model=model, wait=False) as lead:
        unpaired = lead.post("/v1/chat/completions", body(lead.model, prompts[0]))
        assert unpaired.status_code != 200 and "do not trust each other" in unpaired.text
        with hosts.on(0):
            with pytest.raises(PeerError, match="the code is wrong"):
                pair(Identity(home / "omlxd"), (there.host, there.port), "AAAA-AAAA-AAAA-AAAA")
            there.pair(home / "omlxd")
        assert answer_of(lead, prompts[0]) == (texts[0], 0)
        again, hit = answer_of(lead, prompts[1])
        assert (again, hit > 0) == (texts[1], True)  # From RAM.

        def cut() -> None:
            hosts.set(DELAY_S, 1.0)

        ends: list[Callable[[], None]] = [
            lambda: there.follower().kill(),
            lambda: psutil.Process(lead.engine_pid()).kill(),
            cut,
        ]
        for end in ends:
            lead.settled()
            wait_for_shares(2, lead.cache, there.cache)
            both = [psutil.Process(lead.engine_pid()), there.follower()]
            end()
            wait_until(lambda both=both: not any(map(alive, both)), why=lead.logged)
            hosts.set(DELAY_S, LOSS)
            for prompt, text in zip(prompts, texts, strict=True):
                again, hit = answer_of(lead, prompt)
                assert (again, hit > 0) == (text, True)  # From the files of both.
        assert {*(home / "omlxd" / "cache").rglob("*.safetensors")}
        assert sum(file.stat().st_size for file in there.cache.rglob("*.safetensors")) <= there.cap
