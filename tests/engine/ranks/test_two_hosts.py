"""Two hosts with a link between them that delays and loses packets (two_hosts.py), and daemons on both."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from daemon import BLOCK, Daemon, free_port, own_usage, prose, restored, wait_until
from two_hosts import ADDRESSES, TwoHosts, why_not

from omlxd.cli.main import main
from omlxd.kv.peer.client import pair
from omlxd.kv.peer.identity import Identity, PeerError

pytestmark = pytest.mark.slow

DELAY_S, LOSS = 0.005, 0.01


@pytest.fixture
def hosts() -> Iterator[TwoHosts]:
    if why := _why_not():
        pytest.skip(why)
    with TwoHosts(DELAY_S, LOSS) as made:
        yield made


_why_not = cache(why_not)


def on_host(hosts: TwoHosts, host: int, home: Path, *flags: str, model: Path | None = None) -> Daemon:
    return Daemon(home, *flags, model=model, wrapper=hosts.wrapper(host), transport=hosts.transport(host))


def text_of(answer: dict) -> str:
    return answer["choices"][0]["message"]["content"]


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
        wait_until(lambda: "do not trust each other" in b.logged(), why=b.logged)

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
