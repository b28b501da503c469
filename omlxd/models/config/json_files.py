"""Reads JSON of model folders, which anybody may have written: every fault is one error."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

import msgspec

from ...common.files import SMALL, read_small

T = TypeVar("T")


class BrokenJSON(ValueError):
    """Bytes are no UTF-8, nested too deeply, or have other fields; the text says which."""


def decode_json(data: bytes, kind: type[T] | Any) -> T:
    """Decode `data` as a `kind`. Raises BrokenJSON."""
    try:
        return msgspec.json.decode(data, type=kind)
    except RecursionError:
        raise BrokenJSON("it is nested too deeply") from None
    except (msgspec.MsgspecError, ValueError, OverflowError) as error:
        raise BrokenJSON(str(error)) from None


def read_json(path: Path, kind: type[T] | Any, most: int = SMALL) -> T:
    """Read a file's JSON as a `kind`. Raises OSError, BrokenJSON."""
    return decode_json(read_small(path, most), kind)
