"""A daemon over a disk that is slower than its model: what lies there is read and computed at once."""

from __future__ import annotations

import shlex
import sys
import threading
import time
from pathlib import Path

import pytest
from daemon import BLOCK, Daemon, own_usage, prose

TEXT = prose(1500)
SECONDS = 0.4
"""A block takes to be read: many times what the demo model takes to compute one, however busy the machine."""


def slow(home: Path, seconds: float = SECONDS) -> Daemon:
    script = str(Path(__file__).parents[1] / "support" / "slow_engine.py")
    command = shlex.join([sys.executable, script, str(seconds), "omlxd.engine"])
    return Daemon(home, env={"OMLXD_ENGINE_COMMAND": command})


@pytest.mark.slow
def test_a_prefix_on_a_slow_disk_is_read_and_computed(tmp_path: Path):
    with Daemon(tmp_path) as daemon:
        want = daemon.chat(TEXT, max_tokens=16)
        daemon.settled()
        tokens = own_usage(want)["computed"]
        daemon.kill()
    blocks = tokens // BLOCK
    assert blocks > 20
    with slow(tmp_path) as daemon:
        got = daemon.chat(TEXT, max_tokens=16)
        usage = own_usage(got)
        assert got["choices"][0]["message"] == want["choices"][0]["message"]
        assert usage["recomputed"] >= BLOCK
        assert usage["cached_cold"] >= BLOCK
        assert usage["cached_hot"] + usage["cached_cold"] + usage["computed"] == tokens
        assert usage["cached_cold"] + usage["recomputed"] == (tokens - 1) // BLOCK * BLOCK
        assert got["usage"]["prompt_tokens_details"]["cached_tokens"] == usage["cached_cold"]
        assert usage["ttft_s"] < blocks * SECONDS
        daemon.settled()  # The answer is out before its end is counted.
        assert daemon.figure("kv_tokens_recomputed_total") == usage["recomputed"]
        assert 0 < daemon.figure("kv_read_bytes_per_s") < 1e9
        told = daemon.post("/omlxd/why-miss", {"request_id": "last"}).json()
        assert told["explanation"]["cause"] == "none"
        assert told["recomputed"] == usage["recomputed"]
        assert own_usage(daemon.chat(TEXT, max_tokens=16))["cached_hot"] == (tokens - 1) // BLOCK * BLOCK


@pytest.mark.slow
def test_an_engine_that_is_killed_meanwhile_leaves_a_cache_that_serves(tmp_path: Path):
    with Daemon(tmp_path) as daemon:
        want = daemon.chat(TEXT, max_tokens=16)["choices"][0]["message"]
        daemon.settled()
    with slow(tmp_path, 5 * SECONDS) as daemon:
        asking = threading.Thread(target=lambda: daemon.chat(TEXT, max_tokens=16))
        asking.start()
        time.sleep(1.0)
        daemon.kill_engine()
        asking.join(120)
        assert not asking.is_alive()
    with Daemon(tmp_path) as daemon:
        again = daemon.chat(TEXT, max_tokens=16)
        assert again["choices"][0]["message"] == want
        assert own_usage(again)["computed"] <= BLOCK
        assert daemon.figure("kv_corrupt_files_total") == 0
