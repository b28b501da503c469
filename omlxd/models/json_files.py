"""JSON of model folders, which anybody may have written: every way in which it is no JSON is one error."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

import msgspec

from ..common.files import SMALL, read_small

T = TypeVar("T")


class BrokenJSON(ValueError):
    """Bytes that are no UTF-8, are nested too deeply, or have other fields; its text says which."""


def decode_json(data: bytes, kind: type[T] | Any) -> T:
    """`data` as a `kind`. Raises BrokenJSON."""
    try:
        return msgspec.json.decode(data, type=kind)
    except RecursionError:
        raise BrokenJSON("it is nested too deeply") from None
    except (msgspec.MsgspecError, ValueError, OverflowError) as error:
        raise BrokenJSON(str(error)) from None


def read_json(path: Path, kind: type[T] | Any, most: int = SMALL) -> T:
    """The file's JSON as a `kind`. Raises OSError, BrokenJSON."""
    return decode_json(read_small(path, most), kind)
