"""One engine process and the socketpair that joins it to the front: spawn, frames, end.

This file has no notion of requests. It sends and receives frames, and says when and how the process ended
(`receive`); front/engines/supervisor.py decides what that means.

The engine gets its own session, so that ^C in a terminal reaches the front alone, which then
stops the engine in order. It exits when its end of the socketpair closes, so a killed front
leaves no orphan.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import resource
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import psutil

from ... import wire
from ...common.stacks import SIGNAL

log = logging.getLogger(__name__)
T = TypeVar("T")

ENGINE_COMMAND = (sys.executable, "-m", "omlxd.engine")
"""The engine program; `--fd N`, its end of the socketpair, is added."""

_READ = 1 << 18
SOCKET_BYTES = 1 << 17
"""Bytes of the kernel's buffer, each way. macOS gives a Unix socket 8 KiB: with so few (on Linux) frames of
50 MB took 0.8 s to the engine and 0.5 s back, and 0.1 s and 0.03 s with these.
"""
_TAIL_LINES = 20
_LINE_LIMIT = 1 << 16
STOPPED_LOOK_S = 1.0
"""Seconds between two looks at an ending engine; one that is stopped at two in a row is killed."""
_REAP_S = 0.5
"""Seconds that a process may outlive its closed socket before it is killed."""
KILL_S = 10.0
"""Seconds that an engine may take after SIGTERM to unwire its memory, which macOS loses if it is killed."""
END_S = 2.0
"""Seconds that a killed process may take to end."""


def engine_environment(own: Mapping[str, str]) -> dict[str, str]:
    """Return an engine's environment: ours, and on Linux (glibc) how arrays get their memory.

    Huge pages: without them every new 4 KiB page of an array costs a fault; new arrays were filled with
    zeros at 2 to 3 GB/s on 2 virtual CPUs, and files restored into them at 2.3.

    One arena for all threads: an I/O thread that allocates a prefix's arrays would take an arena of its
    own, whose memory lies worse. Files to arrays with it and without, three runs of tools/bench/restore.py
    in turn on a busy machine, GB/s: 1 thread 10.2, 9.2, 9.9 against 8.5, 4.7, 4.4; 2 threads 13.0, 8.1, 12.9
    against 8.7, 6.9, 6.2.
    """
    return {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1:glibc.malloc.arena_max=1", **own}


class EngineLink:
    """A running engine process. Make one with `spawn`. `killed`: by `kill`, before it had ended."""

    def __init__(
        self, process: asyncio.subprocess.Process, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ):
        self._process = process
        self._reader = reader
        self._writer = writer
        self.killed = False
        self._outbox: asyncio.Queue[bytes] = asyncio.Queue()
        self._tail: deque[str] = deque(maxlen=_TAIL_LINES)
        self._sender = asyncio.create_task(self._send_all(), name="engine-send")
        self._printer = asyncio.create_task(self._print_all(), name="engine-stderr")

    @classmethod
    async def spawn(cls, command: Sequence[str] = ENGINE_COMMAND, fds: Sequence[int] = ()) -> EngineLink:
        """Start `command --fd N`, with `fds` open, too. Raises OSError when it can't be started."""
        ours, theirs = socket.socketpair()
        for end in (ours, theirs):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BYTES)
            end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SOCKET_BYTES)
        try:
            process = await asyncio.create_subprocess_exec(
                *command,
                "--fd",
                str(theirs.fileno()),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                pass_fds=(theirs.fileno(), *fds),
                start_new_session=True,
                env=engine_environment(os.environ),
                limit=_LINE_LIMIT,
            )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        try:
            reader, writer = await asyncio.open_unix_connection(sock=ours)
        except BaseException:
            ours.close()
            process.kill()
            raise
        return cls(process, reader, writer)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def last_words(self) -> str:
        """The last lines that the engine printed, or the end of its traceback."""
        return "\n".join(self._tail)

    def send(self, message: Any) -> None:
        """Queue a `wire.ToEngine`. Frames leave in order, no faster than the engine reads them."""
        self.send_frame(wire.encode(message))

    def send_frame(self, frame: bytes) -> None:
        """Queue a message that is encoded already."""
        self._outbox.put_nowait(frame)

    async def receive(self, handle: Callable[[Any], None]) -> str:
        """Hand each message to `handle` until the engine ends; returns how it ended, in words.

        `handle` is called on the event loop and must not block. A frame that makes no sense ends
        the engine: after one, no boundary between frames can be trusted.
        """
        decoder = wire.FrameDecoder(wire.ToFront)
        problem = ""
        try:
            while data := await self._reader.read(_READ):
                for message in decoder.feed(data):
                    handle(message)
        except ValueError as error:
            problem = f"it sent a frame that makes no sense ({error})"
            self.terminate()
        except OSError:
            pass  # It ended with something of ours unread; how it ended says more.
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._process.wait(), _REAP_S)
            # What it printed last is often the reason; it is in the pipe, but maybe not read yet.
            await asyncio.wait({self._printer}, timeout=_REAP_S)
        return problem or self._how_it_ended()

    def _how_it_ended(self) -> str:
        status = self._process.returncode
        if status is None:
            return "it closed its socket"
        if status == -signal.SIGKILL:
            return f"it was killed{' by this omlxd' if self.killed else ', perhaps because memory ran out'}"
        if status == -signal.SIGBUS:
            return "it was ended by SIGBUS: a mapped file of its weights was cut, or its disk failed"
        if status < 0:
            return f"it was ended by {signal.Signals(-status).name}"
        return f"it exited with status {status}{' after a GPU fault' * (status == wire.GPU_FAULT_STATUS)}"

    def stop(self) -> None:
        """Begin its end: SIGTERM, and SIGKILL `KILL_S` later."""
        in_background(self.close())

    def terminate(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.terminate()

    def show_threads(self) -> None:
        """Have the engine print where its threads stand, which is logged."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(SIGNAL)

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.killed |= self._process.returncode is None
            self._process.kill()

    async def close(self, grace_s: float = 0.0) -> None:
        """Wait `grace_s` for the engine to end by itself, then SIGTERM, then SIGKILL; reap it.

        One that is stopped (SIGSTOP) flushes nothing: it is not waited for.
        """
        for wait_s, push in ((grace_s, self.terminate), (KILL_S, self.kill)):
            if await self._ended_within(wait_s):
                break
            push()
        # A thread that waits for a disk that hangs may hold it back, whatever it is sent.
        await self._ended_within(END_S)
        await asyncio.wait({self._printer}, timeout=_REAP_S)
        for task in (self._sender, self._printer):
            task.cancel()
        self._writer.close()

    async def _ended_within(self, seconds: float) -> bool:
        ends, stopped = time.monotonic() + seconds, False
        while self._process.returncode is None and (left := ends - time.monotonic()) > 0:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._process.wait(), min(left, STOPPED_LOOK_S))
            was_stopped, stopped = stopped, self._is_stopped()
            if was_stopped and stopped:
                break
        return self._process.returncode is not None

    async def end_if_stopped(self) -> None:
        """Kill the process once it is stopped: ranks on other machines wait for it, and they can't."""
        stopped = was_stopped = False
        while not (stopped and was_stopped):
            await asyncio.sleep(STOPPED_LOOK_S)
            was_stopped, stopped = stopped, self._is_stopped()
        log.error("the engine of process %d is stopped, it is ended", self.pid)
        self.kill()

    def _is_stopped(self) -> bool:
        with contextlib.suppress(psutil.Error):
            return psutil.Process(self.pid).status() == psutil.STATUS_STOPPED
        return False

    async def _send_all(self) -> None:
        with contextlib.suppress(OSError):  # The reader notices the end and says so.
            while True:
                self._writer.write(await self._outbox.get())
                await self._writer.drain()

    async def _print_all(self) -> None:
        """Log what the engine prints, and keep its last lines."""
        assert self._process.stdout is not None
        log_line = EngineLines()
        while True:
            try:
                line = await self._process.stdout.readline()
            except ValueError:  # A line longer than the limit; its beginning is dropped.
                continue
            if not line:
                return
            text = line.decode(errors="replace").rstrip()
            self._tail.append(text)
            log_line(text)


NICE = 10
"""Niceness of a process that loads, so that engines that answer go first."""


def lower_priority(pid: int) -> None:
    """Lower the priority of the process and all that it will start, but only where that can be undone.

    Raising a priority needs a right that root has, or that RLIMIT_NICE gives. Elsewhere, on Linux, the
    process gets the batch policy, which everybody may leave.
    """
    with contextlib.suppress(OSError):
        if _may_raise():
            os.setpriority(os.PRIO_PROCESS, pid, os.getpriority(os.PRIO_PROCESS, 0) + NICE)
        elif sys.platform == "linux":
            os.sched_setscheduler(pid, os.SCHED_BATCH, os.sched_param(0))


def restore_priority(pid: int) -> None:
    """Undo `lower_priority` for all threads: on Linux each has a priority of its own."""
    for thread in _threads(pid):
        with contextlib.suppress(OSError):
            if _may_raise():
                os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, 0))
            elif sys.platform == "linux":
                os.sched_setscheduler(thread, os.SCHED_OTHER, os.sched_param(0))


def _may_raise() -> bool:
    if os.geteuid() == 0:
        return os.getpriority(os.PRIO_PROCESS, 0) >= 0
    limit = getattr(resource, "RLIMIT_NICE", None)
    # The limit is 20 less the best nice value that may be set.
    return limit is not None and resource.getrlimit(limit)[0] >= 20


def _threads(pid: int) -> list[int]:
    try:
        return [int(name) for name in os.listdir(Path("/proc") / str(pid) / "task")]
    except OSError:
        return [pid]


_ENGINE_LINE = re.compile(r"(DEBUG|INFO|WARNING|ERROR|CRITICAL) ([\w.-]+): (.*)")


class EngineLines:
    """Turns what an engine process prints into records of the front's log.

    Its own log lines keep their level and logger, and are left out below this log's level, which the
    engine may not have heard of yet. Anything else (what a C++ library says before it aborts) belongs
    to the line before it, and is a warning at least.
    """

    def __init__(self) -> None:
        self._level, self._name = logging.WARNING, "omlxd.engine"

    def __call__(self, text: str) -> None:
        if match := _ENGINE_LINE.fullmatch(text):
            self._level, self._name = getattr(logging, match[1]), match[2]
            text = match[3]
        level = self._level if match else max(self._level, logging.WARNING)
        logger = logging.getLogger(self._name)
        if logger.isEnabledFor(level):
            logger.handle(logger.makeRecord(self._name, level, "", 0, text, (), None))


_background: set[asyncio.Task[Any]] = set()
"""Tasks under way: the event loop keeps only weak references."""


def in_background(work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    """Start a task that nobody has to keep."""
    task = asyncio.create_task(work)
    _background.add(task)
    task.add_done_callback(_background.discard)
    return task
