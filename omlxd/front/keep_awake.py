"""Keeps the machine awake while requests run: a program of the system holds it, and ends with this process.

macOS  `caffeinate -i -w PID` ends when the process PID does
Linux  `systemd-inhibit … cat` ends when `cat` does: when nobody holds the other end of its input any more

Neither keeps the display on: `sleep` lets desktops blank it, which not all do for `idle`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, Protocol

log = logging.getLogger(__name__)

BEGIN_S = 1.0
"""Seconds from the first request to the start of the program: a request of less starts no process."""
LINGER_S = 10.0
"""Seconds from the last request to its end: agents ask again soon."""
START_S = 5.0
"""A program that ends by itself within these seconds of its start has failed to start."""
RETRY_S = 600.0
"""Seconds until a program that failed to start is tried again, or one that ended twice while requests ran."""
END_S = 1.0
"""Seconds that the end of the process waits for the program's."""
MOST_SAID = 300


def holder(platform: str = sys.platform) -> tuple[str, ...]:
    """Return the command that keeps the machine awake."""
    if platform == "darwin":
        return ("caffeinate", "-i", "-w", str(os.getpid()))
    why = "--why=It answers a request"
    return ("systemd-inhibit", "--what=sleep", "--mode=block", "--who=omlxd", why, "cat")


class Loop(Protocol):
    """The clock and the timers of an event loop."""

    def time(self) -> float: ...

    def call_later(self, delay: float, callback: Callable[[], object], /) -> asyncio.TimerHandle: ...


class KeepAwake:
    """Holds the machine awake. `loop`: None for the running one.

    trouble   why it can't hold it, in words; "" after a hold
    was_held  whether it did so at least once
    """

    def __init__(self, on: bool, command: Sequence[str] = (), loop: Loop | None = None):
        self.on = on
        self.trouble = ""
        self.was_held = False
        self._command = tuple(command) or holder()
        self._loop = loop
        self._busy = False
        self._since: float | None = None
        """When the first of the requests began that follow one another within `LINGER_S`."""
        self._not_before = -math.inf
        self._ends = 0
        """How often the program started and then ended by itself, while these requests ran."""
        self._timer: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[None] | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._asked_to_end = False

    @property
    def held(self) -> bool:
        """Whether the program runs now."""
        return self._process is not None

    def begin(self) -> None:
        """Note that a request runs."""
        if not self._busy:
            self._busy = True
            now = self._clock.time()
            self._since = now if self._since is None else self._since
            self._call_later(max(0.0, self._since + BEGIN_S - now), self._hold)

    def end(self) -> None:
        """Note that no request runs."""
        if self._busy:
            self._busy = False
            self._call_later(LINGER_S, self._release)

    def switch(self, on: bool) -> None:
        """Turn it on or off, also while requests run."""
        self.on = on
        if not on:
            self._end_program()
        elif self._busy:
            self._hold()

    async def close(self) -> None:
        """End the program, for good."""
        self.on = False
        if self._timer is not None:
            self._timer.cancel()
        self._release()
        if self._task is not None:
            await asyncio.wait({self._task}, timeout=END_S)

    @property
    def _clock(self) -> Loop:
        return self._loop or asyncio.get_running_loop()

    def _call_later(self, seconds: float, call: Callable[[], object]) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._clock.call_later(seconds, call)

    def _hold(self) -> None:
        if not self.on or self._task is not None:
            return
        wait_s = self._not_before - self._clock.time()
        if wait_s <= 0:
            self._asked_to_end = False
            self._task = asyncio.create_task(self._run(), name="keep awake")
        elif wait_s < math.inf:
            self._call_later(wait_s, self._hold)

    def _release(self) -> None:
        self._since = None
        if self._ends:
            self._ends, self._not_before = 0, -math.inf
        self._end_program()

    def _end_program(self) -> None:
        self._asked_to_end = True
        if (process := self._process) is not None:
            assert process.stdin is not None
            process.stdin.close()
            with contextlib.suppress(ProcessLookupError):
                process.terminate()

    async def _run(self) -> None:
        """Run the program until it ends."""
        pipes: dict[str, Any] = {"stdin": asyncio.subprocess.PIPE, "stderr": asyncio.subprocess.PIPE}
        pipes["stdout"] = asyncio.subprocess.DEVNULL
        try:
            self._process = await asyncio.create_subprocess_exec(
                *self._command, **pipes, start_new_session=True
            )
            started, early = self._clock.time(), self._asked_to_end
            if early:
                self._end_program()
            assert self._process.stderr is not None
            said = (await self._process.stderr.read(MOST_SAID)).decode(errors="replace")
            status = await self._process.wait()
            if not self._asked_to_end:
                self._note_end(status, said, self._clock.time() - started)
            elif not early:
                self.trouble, self.was_held = "", True
        except FileNotFoundError:
            self._note_trouble("there is none here", logging.DEBUG, math.inf)
        except OSError as error:
            self._note_trouble(error.strerror or str(error))
        finally:
            self._process = self._task = None
        if self._busy:
            self._hold()

    def _note_end(self, status: int, said: str, ran_s: float) -> None:
        """Decide when the program starts again, which nobody asked to end."""
        why = " ".join(said.split()) or f"it ended with status {status}"
        if status < 0:
            why = f"it was ended by signal {-status}"
        elif ran_s < START_S:
            self._ends = 0
            self._note_trouble(why)
            return
        self.was_held = True
        self._ends += 1
        if self._ends > 1:
            self._note_trouble(why)
        else:
            log.info("%s: %s; it is started again", self._command[0], why)

    def _note_trouble(self, why: str, level: int = logging.INFO, retry_s: float = RETRY_S) -> None:
        self._not_before = self._clock.time() + retry_s
        trouble = f"{self._command[0]}: {why}"
        if trouble != self.trouble:
            self.trouble = trouble
            log.log(level, "this machine may fall asleep while requests run: %s", trouble)
