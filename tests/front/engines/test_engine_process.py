"""EngineProcess against a real process (stub_engine.py): waiting, death, respawn, cancel, close."""

import asyncio
import os
import re
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest
from engine_processes import (
    AT_ONCE_S,
    alive,
    ask,
    collect,
    engine,
    package_on_the_path,  # noqa: F401
    prepare,
    rest_of,
    until,
    words,
)

from omlxd import wire
from omlxd.chat import Event, Failed, Finished, Progress, RawPrompt, TextDelta
from omlxd.errors import InvalidRequest, ModelError, OmlxdError, Overloaded, Unavailable
from omlxd.front.engines import link as link_module
from omlxd.front.engines.client import EngineProcess
from omlxd.front.engines.ledger.cold_ledger import ColdLedger
from omlxd.front.engines.link import SOCKET_BYTES, EngineLink
from omlxd.front.engines.supervisor import BACKOFF_S, _quoted


async def test_requests_wait_while_loading_and_keep_their_own_events():
    async with engine("--load-s", "0.2") as made:
        asked = [asyncio.create_task(collect(made, f"a{n} b{n}")) for n in range(5)]
        await asyncio.sleep(0)  # Each has begun; nothing was heard of the engine yet.
        assert made.state == "loading" and made.in_flight == 5
        for n, events in enumerate(await asyncio.gather(*asked)):
            assert isinstance(events[0], Progress) and isinstance(events[-1], Finished)
            assert words(events) == [f"a{n}", f"b{n}"]
        assert made.state == "ready" and made.in_flight == 0
        assert made.supervisor.info is not None and made.supervisor.info.context_length == 1000


async def test_count_and_stats():
    async with engine() as made:
        assert await made.stats() is None
        assert await made.count_tokens(RawPrompt(text="one two three")) == 3
        stats = await made.stats()
        assert stats is not None and stats.values == {"cancels": 0.0}


async def test_sigkill_fails_what_runs_at_once_and_the_next_request_restarts():
    async with engine() as made:
        streams = [made.generate(ask(f"w{n} sleep:300 never")) for n in range(3)]
        for stream in streams:
            assert isinstance(await anext(stream), Progress)
            assert isinstance(await anext(stream), TextDelta)
        first_pid = made.supervisor.pid
        assert first_pid
        os.kill(first_pid, signal.SIGKILL)
        killed_at = time.monotonic()
        for stream in streams:
            failed = await anext(stream)
            assert isinstance(failed, Failed)
            assert failed.code == "unavailable" and failed.retry_after and "killed" in failed.message
            with pytest.raises(StopAsyncIteration):
                await anext(stream)
        assert time.monotonic() - killed_at < AT_ONCE_S
        assert made.state == "restarting" and made.supervisor.info is not None
        assert words(await collect(made, "again")) == ["again"]
        assert made.supervisor.pid != first_pid and made.state == "ready"


async def test_a_request_that_kills_its_engines_ends_alone_those_that_were_with_it_are_answered():
    async with engine() as made:
        await collect(made, "up")
        asked = ["late one", "poison", "late two", "late three"]
        *others, poisoned = await asyncio.gather(*(collect(made, text) for text in sorted(asked)))
        assert [words(events) for events in others] == [["late", "one"], ["late", "three"], ["late", "two"]]
        assert isinstance(poisoned[0], Failed) and "killed" in poisoned[0].message
        assert made.supervisor.deaths == 2, "a request is with two engines at most"


async def test_a_request_whose_prompt_prefills_survives_its_engine(tmp_path: Path):
    async with engine("--notes", str(tmp_path)) as made:
        streams = [made.generate(ask(f"gate {word}")) for word in ("one", "two")]
        for stream in streams:
            assert isinstance(await anext(stream), Progress)
        assert made.supervisor.pid
        os.kill(made.supervisor.pid, signal.SIGKILL)
        (tmp_path / "gate").touch()
        events = [await asyncio.wait_for(rest_of(stream), 60) for stream in streams]
        assert [words(those) for those in events] == [["one"], ["two"]]


@pytest.mark.parametrize(
    ("script", "why"), [("exit:7", "status 7"), ("nonsense sleep:300", "frame"), ("die", "kill")]
)
async def test_every_way_to_die_is_told(script: str, why: str):
    async with engine() as made:
        failed = (await collect(made, script))[-1]
        assert isinstance(failed, Failed) and failed.code == "unavailable" and why in failed.message
        assert words(await collect(made, "again")) == ["again"]


async def test_an_engine_that_ends_itself_while_it_serves_has_died():
    async with engine() as made:
        failed = (await collect(made, "leave:overgrown"))[-1]
        assert isinstance(failed, Failed) and "overgrown" in failed.message
        assert made.supervisor.deaths == 2, "it was sent to two"
        assert words(await collect(made, "again")) == ["again"]


async def test_gpu_faults_make_passes_smaller_and_the_third_in_a_row_keeps_it_down(tmp_path: Path):
    async with engine("--notes", str(tmp_path), hold_s=50) as made:

        async def fails(script: str) -> Failed:
            failed = (await collect(made, script))[-1]
            assert isinstance(failed, Failed) and failed.code == "unavailable"
            return failed

        for tokens in (2048, 0):  # The second is of a decode step: no reason for smaller passes.
            what = (await fails(f"heard fault:{tokens}")).message
            assert (
                "a GPU fault ended it: [METAL] it hangs. The next one computes passes of at most 512 tokens. "
                "Retry: the next request starts it again." in what
            )
            assert made.supervisor.trouble == what
            assert words(await collect(made, "answered")) == ["answered"]
        assert (await fails("fault:512")).retry_after == 1  # After two: nobody has heard of it.
        down = await fails("heard fault:130")
        assert down.retry_after in (49, 50)
        assert "stays down: 3 GPU faults ended it in a row, the last: [METAL] it hangs. It h" in down.message
        with pytest.raises(
            Unavailable, match=r"helps to rest\..* 64 tokens\. It is tried again after \d\d s"
        ):
            made.generate(ask("x"))
        assert made.state == "failed" and made.supervisor.deaths == 5
        made.supervisor.end_hold()  # The owner has done something about it.
        assert words(await collect(made, "again")) == ["again"]
        await fails("heard fault:2048")
        assert words(await collect(made, "slow")) == ["slow"]
        slowed = made.supervisor.slowed
        assert re.fullmatch(
            r"passes of at most 512 tokens since a GPU fault at .*; `omlxd.*` lifts it", slowed
        )
        made.supervisor.end_hold()  # Of an engine that serves.
        assert not made.supervisor.slowed
        assert words(await collect(made, "fast")) == ["fast"]
        limits = [line for line in (tmp_path / "notes.txt").read_text().split("\n") if "passes" in line]
        assert limits == [f"passes {limit}" for limit in (0, 512, 512, 128, 128, 0, 512, 0)]


async def test_counting_fails_cleanly_too():
    async with engine("--load-s", "0.2", "--crash-on-load") as made:
        with pytest.raises(OmlxdError) as caught:
            await made.count_tokens(RawPrompt(text="x"))
        assert caught.value.code == "unavailable"


async def test_closing_a_stream_cancels_it(tmp_path: Path):
    async with engine("--notes", str(tmp_path)) as made:
        stream = made.generate(ask("one sleep:300 two"))
        await anext(stream)
        await stream.aclose()
        with pytest.raises(StopAsyncIteration):
            await anext(stream)
        assert made.in_flight == 0
        await until(lambda: "cancel 1" in (tmp_path / "notes.txt").read_text())
        assert words(await collect(made, "next")) == ["next"]


async def test_closing_before_the_first_event_frees_the_place(tmp_path: Path):
    async with engine("--load-s", "0.3", "--notes", str(tmp_path)) as made:
        stream = made.generate(ask("one"))
        assert made.in_flight == 1
        await stream.aclose()
        assert made.in_flight == 0
        assert words(await collect(made, "next")) == ["next"]
        assert "cancel" not in (tmp_path / "notes.txt").read_text()


async def test_a_timeout_between_events_loses_none():
    async with engine() as made:
        stream, got = made.generate(ask("one sleep:0.2 two")), []
        while True:
            try:
                got.append(await asyncio.wait_for(anext(stream), 0.03))
            except TimeoutError:
                continue
            except StopAsyncIteration:
                break
        assert words(got) == ["one", "two"] and isinstance(got[-1], Finished)


async def test_a_failed_load_is_told_and_after_three_the_state_is_failed():
    async with engine("--load-fails", "config.json is missing", hold_s=50) as made:
        for attempt in (1, 2, 3):
            events = await collect(made, "x")
            assert len(events) == 1 and isinstance(events[0], Failed)
            assert events[0].code == "unavailable" and "config.json is missing" in events[0].message
            assert made.state == "failed" and ("tried again after" in events[0].message) == (attempt == 3)
        with pytest.raises(Unavailable, match=r"config\.json is missing.* again after \d\d s") as caught:
            made.generate(ask("x"))
        assert caught.value.retry_after and 1 <= caught.value.retry_after <= 50
        made.supervisor.restarts.hold_s = 0.0  # Its time is over.
        assert isinstance((await collect(made, "x"))[0], Failed)
        assert made.state == "failed" and made.supervisor.deaths == 0


async def test_a_lasting_fault_is_never_told_as_one_to_ask_again_after():
    async with engine("--load-fails", "lasting: no such architecture", hold_s=50) as made:
        (failed,) = await collect(made, "x")
        assert failed.code == "model_unusable" and failed.retry_after is None
        assert "no such architecture. Until its files or settings change, `omlxd" in failed.message
        with pytest.raises(ModelError, match="no such architecture") as held:
            made.generate(ask("x"))
        assert held.value.code == "model_unusable" and held.value.retry_after is None
        made.supervisor.end_hold()
        assert (await collect(made, "x"))[0].code == "model_unusable"

    async def broken() -> wire.Load:
        raise ModelError("tokenizer.json is missing")

    async with engine(prepare=broken) as made:
        assert (await collect(made, "x"))[-1].code == "model_unusable"


async def test_the_last_words_of_a_crash_on_load_reach_the_client():
    async with engine("--crash-on-load") as made:
        failed = (await collect(made, "x"))[-1]
        assert isinstance(failed, Failed)
        assert "status 3" in failed.message and "told to crash" in failed.message
        assert made.supervisor.deaths == 1


@pytest.mark.parametrize(
    ("printed", "told"),
    [
        ("INFO omlxd.engine: reads\nDEBUG omlxd: looks", ""),
        (
            "ERROR omlxd.kv: no space\nINFO omlxd.engine: reads",
            "; its last words were: ERROR omlxd.kv: no space",
        ),
        ("INFO omlxd.engine: reads\nlibc++abi: bad_alloc\n\n", "; its last words were: libc++abi: bad_alloc"),
    ],
)
def test_last_words_tell_of_a_fault(printed: str, told: str):
    assert _quoted(printed) == told


async def test_an_engine_that_ends_with_frames_unread_is_told_by_its_status():
    async with engine("--unread") as made:
        failed = (await collect(made, "x"))[-1]
        assert isinstance(failed, Failed)
        assert "status 1" in failed.message and "left frames unread" in failed.message


async def test_preparation_may_fail_and_an_engine_may_not_exist():
    async def broken() -> wire.Load:
        raise Unavailable("the hub can't be reached")

    async with engine(prepare=broken) as made:
        failed = (await collect(made, "x"))[-1]
        assert isinstance(failed, Failed) and "the hub can't be reached" in failed.message
        assert made.supervisor.deaths == 0

    async def spawn() -> tuple[EngineLink, wire.Load]:
        return await EngineLink.spawn(("/nonexistent/engine",)), await prepare()

    absent = EngineProcess("stub", spawn)
    absent.supervisor.start()
    failed = (await collect(absent, "x"))[-1]
    assert isinstance(failed, Failed) and "can't be started" in failed.message
    await absent.close()


async def test_a_start_that_fails_half_way_leaves_no_socket_and_no_process(monkeypatch):
    sockets: list[socket.socket] = []

    async def fails(*, sock: socket.socket) -> None:
        sockets.append(sock)
        raise OSError("too many open files")

    monkeypatch.setattr(asyncio, "open_unix_connection", fails)
    before = set(psutil.Process().children())
    with pytest.raises(OSError, match="too many"):
        await EngineLink.spawn((sys.executable, "-c", "import time; time.sleep(60)"))
    assert sockets[0].fileno() == -1
    await until(lambda: not set(psutil.Process().children()) - before)


async def test_much_fits_into_the_socket_where_the_system_gives_little(monkeypatch):
    pair = socket.socketpair

    def small() -> tuple[socket.socket, socket.socket]:
        made = pair()
        for end in made:
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        return made

    monkeypatch.setattr(socket, "socketpair", small)
    script = "import sys; from socket import *; s = socket(fileno=int(sys.argv[-1]))"
    link = await EngineLink.spawn(
        (sys.executable, "-c", f"{script}; print(s.getsockopt(SOL_SOCKET, SO_SNDBUF))")
    )
    await link.receive(lambda message: None)
    await link.close()
    assert int(link.last_words) >= SOCKET_BYTES


@pytest.mark.parametrize(
    ("handler", "last_words", "how"),
    [
        ("lambda *_: exit('unwired')", "up\nunwired", "it exited with status 1"),
        ("signal.SIG_IGN", "up", "it was killed by this omlxd"),
    ],
)
async def test_an_engine_may_end_by_itself_before_it_is_killed(handler, last_words, how, monkeypatch):
    assert link_module.KILL_S == 10.0
    if handler == "signal.SIG_IGN":
        monkeypatch.setattr(link_module, "KILL_S", 0.1)
    script = f"import signal, time; signal.signal(signal.SIGTERM, {handler}); print('up', flush=True)"
    link = await EngineLink.spawn((sys.executable, "-c", f"{script}\nwhile True: time.sleep(60)"))
    await until(lambda: link.last_words)
    receiving = asyncio.create_task(link.receive(lambda message: None))
    link.stop()
    assert (await receiving, link.last_words) == (how, last_words)


async def test_the_first_restart_is_at_once_later_ones_wait_and_a_success_forgets():
    async with engine(backoff_s=BACKOFF_S) as made:
        await collect(made, "begun die")
        assert made.supervisor.restarts.backoff_s == 0.0
        began = time.monotonic()
        await collect(made, "begun die")
        assert made.supervisor.restarts.backoff_s == 0.5
        assert words(await collect(made, "up")) == ["up"]
        assert time.monotonic() - began > 0.5
        assert made.supervisor.restarts.backoff_s == 0.0


async def test_a_full_queue_is_refused_before_any_event():
    async with engine("--load-s", "0.3", max_concurrent=1) as made:
        held = [made.generate(ask("x")) for _ in range(65)]
        with pytest.raises(Overloaded) as caught:
            made.generate(ask("x"))
        assert caught.value.retry_after
        await held[0].aclose()
        held[0] = made.generate(ask("x"))
        for stream in held:
            assert isinstance([event async for event in stream][-1], Finished)


async def test_what_a_frame_cannot_say_is_the_clients_error():
    async with engine() as made:
        for text in ("\ud800",):
            with pytest.raises(InvalidRequest):
                made.generate(ask(text))
        assert made.in_flight == 0


async def test_close_lets_the_engine_quit_and_reaps_it(tmp_path: Path):
    async with engine("--notes", str(tmp_path)) as made:
        await collect(made, "x")
        pid = made.supervisor.pid
        assert pid
        running = made.generate(ask("one sleep:300"))
        await anext(running)
        await made.close(30.0)
        rest = [event async for event in running]
        assert isinstance(rest[-1], Failed) and rest[-1].code == "unavailable"
        assert not alive(pid) and "quit" in (tmp_path / "notes.txt").read_text()
        with pytest.raises(Unavailable):
            made.generate(ask("x"))


async def test_a_request_that_waits_for_a_turn_is_answered_without_another_one(tmp_path: Path):
    async with engine("--notes", str(tmp_path)) as made:
        first = made.generate(ask("gate one"))
        assert isinstance(await anext(first), Progress)
        assert made.begin_turn()
        waits = asyncio.create_task(collect(made, "two"))
        await asyncio.sleep(0)  # It has begun, and the engine has not got it.
        (tmp_path / "gate").touch()
        assert words(await rest_of(first)) == ["one"]
        assert words(await asyncio.wait_for(waits, 60)) == ["two"] and made.supervisor.starts == 2


@pytest.mark.slow
async def test_an_unload_does_not_wait_for_an_engine_that_is_stopped():
    async with engine() as made:
        await collect(made, "x")
        pid = made.supervisor.pid
        assert pid
        os.kill(pid, signal.SIGSTOP)
        began = time.monotonic()
        assert made.begin_unload()
        await made.supervisor.gone()
        assert not alive(pid) and made.state == "unloaded"
        assert time.monotonic() - began < AT_ONCE_S
        assert words(await collect(made, "up")) == ["up"]


async def test_close_while_loading_does_not_wait_for_the_load():
    async with engine("--load-s", "300") as made:
        await until(lambda: made.supervisor.pid)
        pid = made.supervisor.pid
        began = time.monotonic()
    assert pid and not alive(pid)
    assert time.monotonic() - began < AT_ONCE_S


async def test_a_big_request_passes_and_is_not_held():
    async with engine() as made:
        stream = made.generate(ask("x " * 2_000_000 + "end"))
        while isinstance(await anext(stream), Progress):
            pass
        assert made._requests.requests[stream.id].frame is None
        await stream.aclose()
        assert words(await collect(made, "after")) == ["after"]


async def test_space_is_granted_through_the_ledger_and_taken_back_on_death(tmp_path: Path):
    cold = ColdLedger(tmp_path / "cache", 10_000_000)
    assert await cold.open() == str(tmp_path / "cache")
    async with engine(cold=cold) as made:
        assert words(await collect(made, "reserve:4000000")) == ["4000000"]
        assert words(await collect(made, "reserve:4000000")) == ["4000000"]
        assert words(await collect(made, "reserve:4000000")) == ["0"]
        stats = await cold.ledger_stats()
        assert stats is not None and stats.reserved == 8_000_000
        await collect(made, "die")
        stats = await cold.ledger_stats()
        assert stats is not None and stats.reserved == 0
    await cold.close()


async def test_without_a_ledger_space_is_refused():
    async with engine() as made:
        assert words(await collect(made, "reserve:4000000")) == ["0"]


@pytest.mark.slow
async def test_a_cache_dir_that_cannot_be_used_is_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    (tmp_path / "file").write_text("not a folder")
    bad = ColdLedger(tmp_path / "file", 10_000_000)
    assert await bad.open() == "" and await bad.open() == ""
    assert await bad.ledger_stats() is None
    async with engine(cold=bad) as made:
        assert words(await collect(made, "reserve:5")) == ["0"]
    first, second = ColdLedger(tmp_path / "c", 10_000_000), ColdLedger(tmp_path / "c", 10_000_000)
    assert await first.open() and await second.open() == ""
    assert [
        record.getMessage().count("can't be used")
        for record in caplog.records
        if record.levelname == "WARNING" and "SSD" in record.getMessage()
    ] == [1, 1]
    assert "another omlxd" in caplog.text
    for ledger in (bad, first, second):
        await ledger.close()


async def test_a_full_disk_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full here")
    (tmp_path / ".probe").symlink_to("/dev/full")
    full = ColdLedger(tmp_path, 10_000_000)
    assert await full.open() == str(tmp_path), "it is read"
    assert "only read until its disk takes writes again: No space left" in caplog.text
    await full.close()


@pytest.mark.parametrize("signal_number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT, signal.SIGTERM])
async def test_whatever_signal_ends_it_every_request_hears_of_it_at_once(signal_number: int, tmp_path: Path):
    """While it loads and in the middle of an answer; before the first event it goes to the next engine."""
    async with engine("--load-gate", "may-load", "--notes", str(tmp_path)) as made:

        async def killed(stream: AsyncIterator[Event]) -> None:
            assert made.supervisor.pid
            os.kill(made.supervisor.pid, signal_number)
            failed = (await asyncio.wait_for(rest_of(stream), AT_ONCE_S))[-1]
            assert isinstance(failed, Failed) and failed.code == "unavailable" and failed.retry_after

        stream = made.generate(ask("one"))
        await until(lambda: made.supervisor.pid)
        await killed(stream)
        (tmp_path / "may-load").touch()
        await collect(made, "up")
        stream = made.generate(ask("of a request without an event the next engine makes an answer"))
        assert made.supervisor.pid
        os.kill(made.supervisor.pid, signal_number)
        assert words(await asyncio.wait_for(rest_of(stream), AT_ONCE_S))[:2] == ["of", "a"]
        stream = made.generate(ask("one sleep:300 two"))
        assert isinstance(await anext(stream), Progress) and isinstance(await anext(stream), TextDelta)
        await killed(stream)
