"""Two real daemons of one model and homes of their own: one reads the other's SSD cache over the channel."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from daemon import BLOCK, Daemon, free_port, own_usage, prose, restored, wait_until

from omlxd.cli.main import main
from omlxd.kv.peer.client import pair
from omlxd.kv.peer.identity import Identity, PeerError

pytestmark = pytest.mark.slow


def base(daemon: Daemon) -> Path:
    return daemon.home / "omlxd"


def text_of(answer: dict) -> str:
    return answer["choices"][0]["message"]["content"]


def test_a_prefix_that_one_has_computed_is_a_hit_at_the_other(tmp_path: Path, capsys: pytest.CaptureFixture):
    address = f"127.0.0.1:{free_port()}"
    prompts = [prose(200, seed) for seed in range(4)]
    with (
        Daemon(tmp_path / "a", "--peer-listen", address) as a,
        Daemon(tmp_path / "b", "--peer", address) as b,
    ):
        texts = [text_of(a.chat(each)) for each in prompts]
        a.settled()

        # Not paired: nothing is given, and nobody waits for it.
        with pytest.raises(PeerError, match="no code"):
            pair(Identity(base(b)), ("127.0.0.1", int(address.split(":")[1])), "AAAA")
        first = b.chat(prompts[0])
        assert text_of(first) == texts[0] and restored(own_usage(first)) == 0
        wait_until(lambda: f"not paired: `omlxd peer pair {address}`" in b.logged(), why=b.logged)

        assert main(["peer", "code", "--base-path", str(base(a))]) == 0
        code = capsys.readouterr().out.strip()
        there = ["--base-path", str(base(b))]
        assert main(["peer", "pair", address, "--code", "AAAA-AAAA-AAAA-AAAA", *there]) == 1
        assert main(["peer", "pair", address, "--code", code, *there]) == 0

        b.kill_engine()  # A new one has left nobody out, and measured nothing.
        hit = b.chat(prompts[1])
        usage = own_usage(hit)
        assert text_of(hit) == texts[1]
        assert restored(usage) >= 200 * 3 // BLOCK * BLOCK and usage["computed"] <= BLOCK
        assert b.figure("kv_peer_files_total") * BLOCK == restored(usage)
        assert re.search(r"^omlxd_kv_peer_bytes_total\S* [1-9]", b.metrics(), re.M)
        assert re.search(r"^omlxd_peer_given_bytes_total [1-9]", a.metrics(), re.M)

        before = set((base(b) / "cache").rglob("*.safetensors"))
        for file in (base(a) / "cache").rglob("*.safetensors"):
            data = bytearray(file.read_bytes())
            data[-1] ^= 1
            file.write_bytes(data)
        b.kill_engine()
        spoilt = b.chat(prompts[2])
        assert text_of(spoilt) == texts[2]
        assert b.figure("kv_peer_bad_files_total") == 1 and b.figure("kv_peer_on") == 1
        assert before <= set((base(b) / "cache").rglob("*.safetensors"))

        a.kill()
        b.kill_engine()
        alone = b.chat(prompts[3])
        assert text_of(alone) == texts[3]
        assert b.figure("kv_peer_files_total") * BLOCK == restored(usage), "as before"


def test_what_does_not_agree_is_in_the_log(tmp_path: Path):
    address = f"127.0.0.1:{free_port()}"
    with (
        Daemon(tmp_path / "a", "--peer-listen", address) as a,
        Daemon(
            tmp_path / "b", "--peer", address, "--block-size", "32", "--kv-bits", "8", "--kv-group-size", "32"
        ) as b,
    ):
        prompt = prose(200)
        a.chat(prompt)
        a.settled()
        host, _, port = address.partition(":")
        pair(Identity(base(b)), (host, int(port)), Identity(base(a)).new_code())
        b.chat(prompt)
        said = r"KV of this model that can't be used: block_size \(64, now 32\) and kv_bits.* do not agree"
        wait_until(lambda: re.search(said, b.logged()) is not None, why=b.logged)
