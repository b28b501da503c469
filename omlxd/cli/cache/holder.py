"""Finds the daemon that holds a cache dir, and asks it for actions that need the holder.

Verbs that only look take no lock: a daemon that starts then would believe that another one holds the folder.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ...config import Settings
from ...config.address import recorded_address
from ...errors import ConfigError, OmlxdError
from ...kv.files.paths import LOCK_NAME
from ..daemon.client import Daemon, DaemonError, find_daemon, holder
from ..daemon.owner_api import DaemonStatus, Forget, Forgotten


class DaemonRuns(OmlxdError):
    """A daemon holds the cache dir. `pid` 0: of unknown number."""

    def __init__(self, root: Path, pid: int):
        who = f"a daemon (process {pid})" if pid else "a daemon"
        super().__init__(f"{who} is using {root}; stop it first, then run this again")


@contextlib.contextmanager
def exclusive(root: Path) -> Iterator[None]:
    """Hold the folder for a moment: no daemon can use it meanwhile. Raises DaemonRuns, or OSError."""
    fd = os.open(root / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DaemonRuns(root, holder(root) or 0) from None
        with contextlib.suppress(OSError):
            os.ftruncate(fd, 0)
        yield
    finally:
        os.close(fd)


_BATCH = 5000
"""Paths in one request: half a megabyte."""
_SECONDS = 60.0


@dataclass(slots=True, frozen=True)
class Holder(Daemon):
    """The daemon that holds the folder. `at_first`: its status when it was found."""

    at_first: DaemonStatus = field(kw_only=True)

    @property
    def cap(self) -> int:
        """Most bytes that the folder may take."""
        return self.at_first.cold.cap if self.at_first.cold else 0

    def forget(self, paths: Sequence[str], *, remove: bool) -> tuple[int, int, list[str]]:
        """Have the daemon `Forget` files: (files gone, bytes gone, why some stay). Raises DaemonError."""
        files = nbytes = 0
        troubles: list[str] = []
        for at in range(0, len(paths), _BATCH):
            body = Forget(paths=list(paths[at : at + _BATCH]), remove=remove)
            done = self.fetch("/omlxd/cache/forget", Forgotten, body, _SECONDS)
            files, nbytes = files + done.files, nbytes + done.bytes
            troubles += done.troubles
        return files, nbytes, troubles


def find(root: Path, settings: Settings, url: str | None = None) -> Holder | None:
    """Return the daemon that holds `root`, or None. Raises DaemonRuns where it does not answer."""
    pid = holder(root)
    if pid is None:
        return None
    try:
        daemon = find_daemon(url, settings)
        status = daemon.status()
        if status.cold is None or not root.samefile(status.cold.dir):
            raise DaemonRuns(root, pid)  # The one that answers is another.
    except (DaemonError, ConfigError, OSError):
        raise DaemonRuns(root, pid) from None
    return Holder(daemon.url, daemon.key, at_first=status)


def folder_at(settings: Settings) -> Path:
    """Return the cache dir of a setting, else of this base folder's daemon, else the default."""
    root, recorded = settings.paged_ssd_cache_dir, recorded_address(settings.base_path)
    named = settings.sources["paged_ssd_cache_dir"] != "default"
    if named or recorded is None or holder(root) == recorded[0]:
        return root
    with contextlib.suppress(DaemonError, ConfigError):
        status = find_daemon(None, settings).status()
        if status.pid == recorded[0] and status.cold is not None:
            return Path(status.cold.dir)
    return root


def folder_of(url: str) -> Path:
    """Return the cache dir of the daemon at `url`. Raises DaemonError, ConfigError."""
    cold = find_daemon(url).status().cold
    if cold is None:
        raise DaemonError(f"The daemon at {url} has no SSD cache, or its folder can't be used.")
    return Path(cold.dir)
