"""What the owner pinned in the SSD cache: names, and the files that each stands for.

They stand in a file of the cache dir, so that they survive a restart. A pin is of the files of that moment:
what a session computes later is pinned once it is pinned again.
"""

from __future__ import annotations

import logging
from collections.abc import KeysView, Sequence
from pathlib import Path

import msgspec

from ...common.files import read_small, write_atomic
from ...errors import InvalidRequest, NotFound
from ...kv.files.paths import is_stored_path

log = logging.getLogger(__name__)

FILE_NAME = "pins.json"
MOST_NAMES = 1000
SHARE = 0.5
"""Of the cache's limit that pinned files may take when they are pinned: the rest is for everybody else."""


class PinnedChain(msgspec.Struct):
    """`files`: relative to the cache dir, those first that are evicted first. `at`: seconds since 1970."""

    model: str
    files: list[str]
    at: float


_decoder = msgspec.json.Decoder(dict[str, PinnedChain])


class Pins:
    """By name, the newest last. `root`: the cache dir. Of one thread."""

    def __init__(self, root: Path):
        self._file = root / FILE_NAME
        self.by_name: dict[str, PinnedChain] = {}

    def load(self) -> None:
        """Take up what is in the file. Raises nothing: one that can't be read holds no pins, and stays."""
        try:
            read = _decoder.decode(read_small(self._file))
        except FileNotFoundError:
            return
        except (OSError, msgspec.MsgspecError, RecursionError) as error:
            log.warning("SSD cache: nothing is pinned: %s can't be read: %s", self._file, error)
            return
        for pin in read.values():
            pin.files = [path for path in pin.files if is_stored_path(path)]
        self.by_name = read

    def files(self) -> KeysView[str]:
        return dict.fromkeys(path for pin in self.by_name.values() for path in pin.files).keys()

    def put(self, name: str, pin: PinnedChain) -> None:
        """Raises InvalidRequest, and OSError with nothing changed."""
        if name not in self.by_name and len(self.by_name) >= MOST_NAMES:
            raise InvalidRequest(f"{MOST_NAMES} names are pinned; unpin some of them first.", param="name")
        self._replace({**{n: p for n, p in self.by_name.items() if n != name}, name: pin})

    def remove(self, name: str) -> None:
        """Raises NotFound, and OSError with nothing changed."""
        if name not in self.by_name:
            raise NotFound(f"Nothing is pinned as {name[:200]!r}; GET /omlxd/cache/pins lists what is.")
        self._replace({n: p for n, p in self.by_name.items() if n != name})

    def _replace(self, by_name: dict[str, PinnedChain]) -> None:
        write_atomic(self._file, msgspec.json.encode(by_name))
        self.by_name = by_name


def in_order(files: Sequence[str]) -> list[str]:
    """A chain's files, root first, in the order in which they are evicted: a child before its parent."""
    return list(reversed(files))
