"""Says what this machine has for models: memory that they may take, and how fast it reads them."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable
from pathlib import Path

import msgspec

from ...common.units import available_ram, human, total_ram
from ...config import Settings
from ...errors import OmlxdError
from ...models.footprint import likely_backend, reserve_of
from ...wire import MeasureJob
from ..daemon.client import Daemon, NoDaemon
from ..doctor.report.bounds import Budget
from ..doctor.report.measure import Measured, measure
from ..doctor.report.system import sysctl

MEASURE_S = 60.0
"""Seconds for MLX to start and to measure."""
_BRAND, _FAST = "machdep.cpu.brand_string", "hw.perflevel0.physicalcpu"
_GB_S = {
    **{"M1": 68, "M1 Pro": 200, "M1 Max": 400, "M1 Ultra": 800},
    **{"M2": 100, "M2 Pro": 200, "M2 Max": 400, "M2 Ultra": 800},
    **{"M3": 100, "M3 Pro": 150, "M3 Max": 300, "M3 Ultra": 819},
    **{"M4": 120, "M4 Pro": 273, "M4 Max": 410},
    **{"M5": 153, "M5 Pro": 307, "M5 Max": 460},
}
"""Chip → GB/s of its memory, by Apple's technical specifications; the least where there are two."""
_MORE_CORES = {"M3 Max": 400, "M4 Max": 546}
"""The same for a Max chip with 12 fast cores, which has the larger GPU."""


_UNSAID = Measured("", error="failed: it did not start")


class Machine(msgspec.Struct, frozen=True):
    """This machine.

    room         bytes that all models together may take; `limit`: what says so
    free         bytes of RAM that are free now
    bandwidth    bytes a second that it reads; None: not known
    source       whose figure that is, or why there is none
    backend      `metal`, `cuda`, `cpu`; "": not known
    """

    room: int
    limit: str
    free: int
    bandwidth: float | None
    source: str
    backend: str

    def is_short_of(self, nbytes: int) -> bool:
        """Return whether fewer bytes are free now; those of a GPU's own memory are not known."""
        return self.backend in ("cpu", "metal") and self.free < nbytes

    def headline(self) -> str:
        """Say it in a line."""
        reads = f"reads {self.bandwidth / 1e9:,.3g} GB/s ({self.source})" if self.bandwidth else self.source
        free = f"; {human(self.free)} are free now" if self.is_short_of(self.room) else ""
        return f"this machine: models may take {human(self.room)} ({self.limit}){free}; {reads}"


def under_daemon(find: Callable[[], Daemon], settings: Settings) -> Settings:
    """Return `settings` with the memory limit of the daemon that `find` finds; without one, their own."""
    limit, whose = settings.memory_limit_bytes, settings.sources["memory_limit"]
    try:
        daemon = find()
        limit, whose = daemon.status().memory_limit, f"the daemon at {daemon.url}"
    except NoDaemon:
        whose += "; no daemon answers"
    except OmlxdError as error:
        whose += f"; no daemon tells its own: {error.message.rstrip('.')}"
    sources = {**settings.sources, "memory_limit": whose}
    return msgspec.structs.replace(settings, memory_limit_bytes=limit, sources=sources)


def this_machine(settings: Settings) -> Machine:
    """Ask MLX, in a process of its own, and the system."""
    told = sysctl(_BRAND, _FAST)
    bandwidth, source = apples_figure(told.get(_BRAND, ""), told.get(_FAST, ""))
    said = _ask_mlx(settings, ("room",) if bandwidth else ("room", "decode bandwidth"))
    room, rate = (said.get(part, _UNSAID) for part in ("room", "decode bandwidth"))
    if not bandwidth and not rate.error:
        bandwidth, source = rate.values["read"], "measured just now with MLX"
    elif error := room.error or (rate.error if not bandwidth else ""):
        source += f"; asking MLX {error}"
    backend, total = likely_backend(), total_ram()
    if not room.error:
        backend, total = room.lines[0][1], int(room.values["total"])
    most, limit = _room(total, settings.memory_limit_bytes)
    limit += f" by {settings.sources['memory_limit']}"
    return Machine(most, limit, available_ram(), bandwidth, source, backend)


def apples_figure(brand: str, fast_cores: str) -> tuple[float | None, str]:
    """Return (bytes a second, whose figure) of an Apple chip; (None, why) otherwise."""
    chip = brand.removeprefix("Apple ")
    figure = _MORE_CORES.get(chip) if fast_cores == "12" else None
    if (figure := figure or _GB_S.get(chip)) is None or not re.match("Apple ", brand):
        return None, "its memory bandwidth is not known, so no speed is estimated"
    return figure * 1e9, f"Apple's figure for {chip}"


def _room(total: int, limit: int | None) -> tuple[int, str]:
    if limit == 0:
        return total, "--memory-limit off"
    usable = total - reserve_of(total)
    if limit and limit < usable:
        return limit, f"--memory-limit {human(limit).replace(' ', '')}"
    return usable, "--memory-limit auto"


def _ask_mlx(settings: Settings, parts: tuple[str, ...]) -> dict[str, Measured]:
    """Return what `parts` of engine/server/measure measured, by name; fewer where MLX does not run."""
    said: dict[str, Measured] = {}
    with tempfile.TemporaryDirectory(prefix="omlxd-") as folder:
        job = Path(folder) / "job.json"
        job.write_bytes(msgspec.json.encode(MeasureJob(folder, folder, settings.metal_kernels)))
        measure(job, parts, Budget(MEASURE_S), lambda one: said.update({one.part: one}))
    return said
