"""What only the daemon that holds a cache dir can do, or knows: asked over its port.

It alone keeps the account of the folder, so it removes files itself while it runs.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from ..config import Settings
from ..daemon_client import DaemonError, address, address_of, fetch
from ..errors import ConfigError
from ..front.owner.cache import Forget, Forgotten
from ..front.owner.status import DaemonStatus
from .lock import DaemonRuns, holder

_BATCH = 5000
"""Paths in one request: half a megabyte."""
_SECONDS = 60.0


@dataclass(slots=True, frozen=True)
class Holder:
    """The daemon that holds the folder. `status`: as it was when it was found."""

    url: str
    key: str
    status: DaemonStatus

    @property
    def cap(self) -> int:
        """Most bytes that the folder may take."""
        return self.status.cold.cap if self.status.cold else 0

    def forget(self, paths: Sequence[str], *, remove: bool) -> tuple[int, int, list[str]]:
        """(files gone, bytes on disk gone, why some stay); see `Forget`. Raises DaemonError."""
        files = nbytes = 0
        troubles: list[str] = []
        for at in range(0, len(paths), _BATCH):
            body = msgspec.json.encode(Forget(paths=list(paths[at : at + _BATCH]), remove=remove))
            done = fetch(self.url, self.key, "/omlxd/cache/forget", Forgotten, body, _SECONDS)
            files, nbytes = files + done.files, nbytes + done.bytes
            troubles += done.troubles
        return files, nbytes, troubles


def find(root: Path, settings: Settings, url: str | None = None) -> Holder | None:
    """The daemon that holds `root`, if one does. Raises DaemonRuns where it does not answer."""
    pid = holder(root)
    if pid is None:
        return None
    try:
        where, key = address(url) if url else address_of(settings)
        status = fetch(where, key, "/omlxd/status", DaemonStatus)
    except (DaemonError, ConfigError):
        raise DaemonRuns(root, pid) from None
    if status.cold is None or not _same(Path(status.cold.dir), root):
        raise DaemonRuns(root, pid)  # The one that answers is another.
    return Holder(where, key, status)


def folder_of(url: str) -> Path:
    """The cache dir of the daemon at `url`. Raises DaemonError, ConfigError."""
    cold = fetch(*address(url), "/omlxd/status", DaemonStatus).cold
    if cold is None:
        raise DaemonError(f"The daemon at {url} has no SSD cache, or its folder can't be used.")
    return Path(cold.dir)


def _same(one: Path, other: Path) -> bool:
    try:
        return os.path.samefile(one, other)
    except OSError:
        return False
