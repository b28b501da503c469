"""KV that survives kill -9, a clean restart and an engine's death, and keeps its limits: real processes."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from daemon import BLOCK, NO_END, Daemon, body, own_usage, prose, restored, wait_until

from omlxd.kv.files.paths import TEMP_SUFFIX

LONG = prose(300)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"


def block_files(daemon: Daemon) -> list[Path]:
    return list(daemon.cache.rglob("*.safetensors"))


def text_of(answer: dict[str, Any]) -> list[tuple[str, str]]:
    return [(part["type"], part.get("text") or part.get("thinking")) for part in answer["content"]]


def prompt_tokens(answer: dict[str, Any]) -> int:
    usage = own_usage(answer)
    return usage["computed"] + usage["cached_hot"] + usage["cached_cold"]


def assert_restored_from_disk(answer: dict[str, Any], first: dict[str, Any]) -> None:
    usage = own_usage(answer)
    assert restored(usage) > 0
    # A disk that is slow for a moment has some of what it holds computed.
    assert 0 < usage["computed"] - usage.get("recomputed", 0) <= BLOCK
    assert prompt_tokens(answer) == prompt_tokens(first)
    assert text_of(answer) == text_of(first)


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with Daemon(tmp_path_factory.mktemp("serving"), "--hot-cache-max-size", "20%") as daemon:
        yield daemon


# --------------------------------------------------------------------------- ends and new beginnings


def test_kill_9_then_clean_restart(home: Path):
    other = prose(300, seed=8)
    with Daemon(home) as daemon:
        first = daemon.messages(LONG, max_tokens=40)
        assert own_usage(first)["cached_hot"] == own_usage(first)["cached_cold"] == 0
        daemon.settled()
        with daemon.stream("/v1/messages", body(daemon.model, prose(2000, seed=9))) as answer:
            next(answer.iter_lines())
            daemon.kill()  # In the middle of an answer; fails unless the engine dies too.
    with Daemon(home) as daemon:
        assert_restored_from_disk(daemon.messages(LONG, max_tokens=40), first)
        warm = daemon.messages(LONG, max_tokens=40)
        assert own_usage(warm)["computed"] <= BLOCK and text_of(warm) == text_of(first)
        second = daemon.messages(other, max_tokens=40)
        assert daemon.stop() == 0  # At once: blocks still in memory are flushed on the way.
        temporary = [
            path for path in (home / "omlxd" / "cache").rglob("*") if path.name.endswith(TEMP_SUFFIX)
        ]
        assert not temporary
    with Daemon(home) as daemon:
        assert_restored_from_disk(daemon.messages(other, max_tokens=40), second)
        assert_restored_from_disk(daemon.messages(LONG, max_tokens=40), first)


@pytest.mark.slow
def test_a_hit_gives_a_cold_runs_words_with_openblas(tmp_path: Path):
    """OpenBLAS sums in another order for another shape; the prefill grid computes equal shapes."""
    fast = {"OMLXD_CPU_BLAS": "auto"}
    with Daemon(tmp_path / "kept", env=fast) as daemon:
        if "OpenBLAS" not in daemon.logged():
            pytest.skip("there is no OpenBLAS here")
        first = daemon.messages(LONG, max_tokens=40)
        assert text_of(daemon.messages(LONG, max_tokens=40)) == text_of(first)
        assert daemon.stop() == 0
    with Daemon(tmp_path / "kept", env=fast) as daemon:
        assert_restored_from_disk(daemon.messages(LONG, max_tokens=40), first)


def test_killed_engine_comes_back_warm_and_the_daemon_lives_on(serving: Daemon):
    first = serving.messages(LONG, max_tokens=40)
    serving.settled()
    engine = serving.engine_pid()
    # However late the kill is, it is not over.
    request = body(serving.model, prose(400, seed=20), max_tokens=12_000, logit_bias=NO_END)
    with serving.stream("/v1/chat/completions", request) as answer:
        lines = answer.iter_lines()
        # Before its first token it would be sent again.
        next(line for line in lines if 'content":' in line and '"role"' not in line)
        os.kill(engine, signal.SIGKILL)
        assert '"code":"unavailable"' in "".join(lines)

    assert_restored_from_disk(serving.messages(LONG, max_tokens=40), first)
    assert serving.engine_pid() != engine and serving.process.poll() is None


def test_unloading_a_model_loses_no_block(serving: Daemon):
    text = prose(300, seed=50)
    first = serving.messages(text, max_tokens=40)
    gone = serving.post("/omlxd/models/unload", {"model": serving.model})  # At once: blocks are on their way.
    assert gone.status_code == 200 and not serving.engines()
    assert serving.post("/omlxd/models/load", {"model": serving.model}).status_code == 200
    again = serving.messages(text, max_tokens=40)
    assert_restored_from_disk(again, first)
    assert restored(own_usage(again)) == (prompt_tokens(first) - 1) // BLOCK * BLOCK


# --------------------------------------------------------------------------- conversations


def test_conversation_by_messages_reuses_every_turn(serving: Daemon):
    turns: list[Any] = [{"role": "user", "content": prose(120, seed=3)}]
    system = "You are of few words. " + prose(60, seed=4)
    before = 0
    for number in range(4):
        answer = serving.messages(*turns, max_tokens=150, system=system)
        assert own_usage(answer)["cached_hot"] >= before - BLOCK, f"turn {number}"
        assert answer["usage"]["cache_read_input_tokens"] == own_usage(answer)["cached_hot"]
        before = prompt_tokens(answer)
        turns += [{"role": "assistant", "content": answer["content"]}]
        turns += [{"role": "user", "content": [{"type": "text", "text": prose(30, seed=5 + number)}]}]


@pytest.mark.slow
def test_conversation_by_chat_completions_reuses_every_turn(serving: Daemon):
    turns: list[Any] = [{"role": "system", "content": prose(60, seed=14)}]
    turns += [{"role": "user", "content": prose(120, seed=13)}]
    before = 0
    for number in range(4):
        answer = serving.chat(*turns, max_tokens=150)
        cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert cached >= before - BLOCK, f"turn {number}"
        before = answer["usage"]["prompt_tokens"]
        turns += [answer["choices"][0]["message"], {"role": "user", "content": prose(30, seed=15 + number)}]


def test_protocols_share_their_prefixes(serving: Daemon):
    by_messages = serving.messages(prose(200, seed=30), max_tokens=4)
    by_chat = serving.chat(prose(200, seed=30), max_tokens=4)
    assert by_chat["usage"]["prompt_tokens"] == prompt_tokens(by_messages)
    assert own_usage(by_chat)["computed"] <= BLOCK


def test_cache_salt_keeps_prefixes_apart(serving: Daemon):
    ours = [serving.chat(LONG, cache_salt="ours") for _ in range(2)]
    assert [own_usage(answer)["computed"] <= BLOCK for answer in ours] == [False, True]
    assert own_usage(serving.chat(LONG, cache_salt="theirs"))["computed"] > BLOCK


# --------------------------------------------------------------------------- limits


def disk_use(folder: Path) -> int:
    """Bytes of block files, temporary ones too, that were all there at one instant, as `du` counts.

    A walk takes time, and files come and go: what stood there before and after it stood there together.
    """
    before, after = _sizes(folder), _sizes(folder)
    return sum(size for path, size in before.items() if path in after)


def _sizes(folder: Path) -> dict[Path, int]:
    sizes: dict[Path, int] = {}
    for path in folder.glob("*/*/*"):
        with contextlib.suppress(FileNotFoundError):
            sizes[path] = path.stat().st_blocks * 512
    return sizes


@pytest.mark.slow
def test_cold_tier_never_passes_its_cap(home: Path):
    cache = home / "omlxd" / "cache"
    with Daemon(home, "--paged-ssd-cache-max-size", "3MB", "--hot-cache-max-size", "0") as daemon:
        most, done = [0], threading.Event()

        def watch() -> None:
            while not done.is_set():
                most.append(disk_use(cache))
                time.sleep(0.002)

        watching = threading.Thread(target=watch)
        watching.start()
        try:
            answer = [daemon.messages(prose(300, seed=seed)) for seed in range(8)][-1]
            daemon.settled()
            again = daemon.messages(prose(300, seed=7))
        finally:
            done.set()
            watching.join()
        assert 2_500_000 < max(most) <= 3_000_000
        assert_restored_from_disk(again, answer)  # With no hot tier there is nowhere else.
        assert daemon.stop() == 0
    with Daemon(home, "--paged-ssd-cache-max-size", "1MB") as daemon:
        wait_until(lambda: disk_use(cache) <= 1_000_000)  # The folder is walked while the model loads.
        assert disk_use(cache) > 500_000
        assert daemon.messages(prose(300, seed=7))["content"]


@pytest.mark.slow
def test_no_cache(home: Path):
    with Daemon(home, "--no-cache") as daemon:
        answers = [daemon.messages(LONG) for _ in range(2)]
        assert [own_usage(a)["computed"] for a in answers] == [prompt_tokens(answers[0])] * 2
        assert text_of(answers[0]) == text_of(answers[1])
        assert not block_files(daemon)
        (entry,) = daemon.http.get("/v1/models").json()["data"]
        assert entry["omlxd"]["kv_reuse"]


@pytest.mark.slow
def test_two_daemons_on_one_cache_dir(serving: Daemon, home: Path):
    told = serving.messages(LONG)
    shared = str(serving.cache)
    with Daemon(home, "--paged-ssd-cache-dir", shared, "--if-cache-busy", "no-ssd") as second:
        assert "serving without the SSD cache" in second.logged()
        assert f"another omlxd is using it (process {serving.process.pid})" in second.logged()
        answers = [second.messages(LONG) for _ in range(2)]
        assert own_usage(answers[0])["cached_cold"] == own_usage(answers[0])["cached_hot"] == 0
        assert own_usage(answers[1])["cached_hot"] > 0
        assert text_of(answers[0]) == text_of(answers[1]) == text_of(told)
    assert own_usage(serving.messages(LONG))["cached_hot"] > 0


@pytest.mark.slow  # It waits until the engine has been idle.
def test_after_an_idle_restart_the_first_turn_comes_from_ram(home: Path):
    with Daemon(home) as daemon:
        first = daemon.messages(LONG)
        daemon.stop()
    with Daemon(home, "--hot-cache-max-size", "200MB") as daemon:  # `auto` may be none on a full machine.
        wait_until(lambda: "blocks used last" in daemon.logged(), why=daemon.logged)
        again = daemon.messages(LONG)
        usage = own_usage(again)
        assert usage["cached_cold"] == 0 and usage["cached_hot"] >= prompt_tokens(first) - BLOCK
        assert text_of(again) == text_of(first)
