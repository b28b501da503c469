"""What else may have slowed this machine while it was measured."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

from ....config import Settings
from ....errors import OmlxdError
from ...daemon.client import daemon_of
from .system import said_by

DAEMON_S = 2.0
_PREFIXES = ("MLX_", "AGX_", "OMLXD_", "METAL_", "MTL_")
_POWER = re.compile(
    r"'(AC Power|Battery Power|UPS Power)'|(\d+%)|\b(lowpowermode\s+\d)|\b(CPU_\w+\s*=\s*\d+)"
)


def load() -> str:
    """Return the load average of the last minute."""
    return f"{os.getloadavg()[0]:.1f}"


def daemon(settings: Settings) -> str:
    """Say whether a daemon runs at the address of `settings`."""
    try:
        daemon_of(settings).version(DAEMON_S)
    except OmlxdError:
        return "no omlxd daemon at the settings' address"
    return "AN OMLXD DAEMON RUNS (without it, figures are better)"


def power() -> list[str]:
    """Say what macOS tells of battery, Low Power Mode and heat; [] elsewhere."""
    told = "\n".join(said_by("/usr/bin/pmset", "-g", *words) for words in (["batt"], [], ["therm"]))
    return [" ".join("".join(found).split()) for found in _POWER.findall(told)]


def variables(environ: Mapping[str, str] = os.environ) -> str:
    """Name what is set of MLX's, Metal's and omlxd's variables."""
    names = sorted(name for name in environ if name.startswith(_PREFIXES))
    return f"set: {', '.join(names)}" if names else f"no variable of {', '.join(_PREFIXES)} is set"
