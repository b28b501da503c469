"""The file of the pins in a cache dir. The daemon writes it; a program that clears reads it."""

from __future__ import annotations

from pathlib import Path

import msgspec

from ...common.files import read_small
from ...kv.files.paths import is_stored_path

FILE_NAME = "pins.json"


class PinnedChain(msgspec.Struct):
    """A pin. `files`: relative to the cache dir, in eviction order. `at`: seconds since 1970."""

    model: str
    files: list[str]
    at: float


_decoder = msgspec.json.Decoder(dict[str, PinnedChain])


def read_pins(root: Path) -> dict[str, PinnedChain]:
    """Return the pins by name, newest last. Raises OSError and ValueError for an unreadable file."""
    try:
        read = _decoder.decode(read_small(root / FILE_NAME))
    except FileNotFoundError:
        return {}
    except RecursionError as error:
        raise ValueError(str(error)) from error
    for pin in read.values():
        pin.files = [path for path in pin.files if is_stored_path(path)]
    return read


def names_by_file(pins: dict[str, PinnedChain]) -> dict[str, list[str]]:
    """Return each pinned file's pins."""
    found: dict[str, list[str]] = {}
    for name, pin in pins.items():
        for path in pin.files:
            found.setdefault(path, []).append(name)
    return found
