"""Pins of the owner in the SSD cache: names, and the files of each.

They stand in a file of the cache dir, so that they survive a restart. A pin is of the files of that moment:
what a session computes later is pinned once it is pinned again.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, KeysView, Sequence
from pathlib import Path

import msgspec

from ....cli.cache.pinned import FILE_NAME, PinnedChain, read_pins
from ....common.files import SMALL, write_atomic
from ....errors import InvalidRequest, NotFound

log = logging.getLogger(__name__)

MOST_NAMES = 1000
SHARE = 0.5
"""Share of the cache's limit that pins may take when they are made; the others share the rest."""


class Pins:
    """Pins by name, the newest last, for one thread. `root`: the cache dir."""

    def __init__(self, root: Path):
        self._root, self._file = root, root / FILE_NAME
        self.by_name: dict[str, PinnedChain] = {}

    def load(self) -> None:
        """Read the file; an unreadable file stays, and holds no pins. Raises nothing."""
        self.by_name = {}
        try:
            self.by_name = read_pins(self._root)
        except (OSError, ValueError) as error:
            log.warning("SSD cache: nothing is pinned: %s can't be read: %s", self._file, error)

    def files(self) -> KeysView[str]:
        return dict.fromkeys(path for pin in self.by_name.values() for path in pin.files).keys()

    def put(self, name: str, pin: PinnedChain) -> None:
        """Add a pin. Raises InvalidRequest, and OSError with nothing changed."""
        if name not in self.by_name and len(self.by_name) >= MOST_NAMES:
            raise InvalidRequest(f"{MOST_NAMES} names are pinned; unpin some of them first.", param="name")
        self._replace({**{n: p for n, p in self.by_name.items() if n != name}, name: pin})

    def remove(self, name: str) -> None:
        """Remove a pin. Raises NotFound, and OSError with nothing changed."""
        if name not in self.by_name:
            raise NotFound(f"Nothing is pinned as {name[:200]!r}; `omlxd cache pin` lists what is.")
        self._replace({n: p for n, p in self.by_name.items() if n != name})

    def drop(self, gone: Collection[str]) -> None:
        """Take the files `gone` out of all pins; a pin that has no other goes. Raises nothing."""
        left = {
            name: msgspec.structs.replace(pin, files=files)
            for name, pin in self.by_name.items()
            if (files := [path for path in pin.files if path not in gone])
        }
        if left == self.by_name:
            return
        try:
            self._replace(left)
        except OSError as error:
            log.warning("SSD cache: %s can't be written: %s", self._file, error)
            self.by_name = left

    def _replace(self, by_name: dict[str, PinnedChain]) -> None:
        data = msgspec.json.encode(by_name)
        if len(data) > SMALL:  # It could not be read again. Fewer pins are never refused.
            raise InvalidRequest("The pins have too many files; unpin some of them first.", param="name")
        write_atomic(self._file, data, sync=True)
        self.by_name = by_name


def in_order(files: Sequence[str]) -> list[str]:
    """Sort a chain's files, root first, into eviction order: a child before its parent."""
    return list(reversed(files))
