"""Values of settings: msgspec's types, and sizes, times and paths as people write them."""

from __future__ import annotations

import difflib
import ipaddress
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
from msgspec import inspect

from ..common.units import SMALLEST, duration, parse_size
from ..errors import ConfigError

SWITCHES = {"yes": True, "on": True, "no": False, "off": False}


class Bytes(int):
    """A size: `8GB`, or `20%` of a total. `least`: smaller sizes, but 0, are refused."""

    least = SMALLEST


class FileBytes(Bytes):
    """The size of a file, which may be small."""

    least = 1000


class Seconds(float):
    """A length of time; infinite: for ever. `zero`: what 0 means."""

    zero = "for ever"


class Stay(Seconds):
    """Time that something stays. 0 and infinity: until its room is needed."""

    zero = "until its room is needed"


class Limit(Seconds):
    """Longest time of something. 0: no limit."""

    zero = "no limit"


def convert(
    kind: Any,
    value: Any,
    place: str,
    *,
    wrong: str,
    secret: bool = False,
    words: bool = True,
    full_size: Callable[[], int] | None = None,
) -> Any:
    """Convert `value`, text or a TOML value, to type `kind`. Raises ConfigError in one sentence.

    place  the flag, variable or line; wrong: what a refused value is; full_size: bytes that 100% is
    words  text may stand for true or false, as in a variable
    """

    def custom(kind: type, value: Any) -> Any:
        if kind is Path:
            if not value or not isinstance(value, str):
                raise ValueError("no path")
            try:
                return Path(value).expanduser().absolute()
            except RuntimeError as error:
                raise ValueError("no path: that user has no home folder here; begin it with /") from error
        if issubclass(kind, Bytes):
            return kind(parse_size(str(value), full_size, least=kind.least))
        try:
            seconds = duration(str(value))
            if str(value).strip().startswith("-"):  # Ollama's "for good", which is 0 here.
                raise ValueError
        except ValueError:
            text = f"no length of time from 0 up; write seconds or 90s, 30m, 2h; 0: {kind.zero}"
            raise ValueError(text) from None
        if kind is Stay:
            seconds = seconds or math.inf
        return kind(0.0 if kind is Limit and math.isinf(seconds) else seconds)

    info, written = _plain(inspect.type_info(kind)), value
    if isinstance(value, str):
        if isinstance(info, inspect.BoolType) and words:
            value = SWITCHES.get(value.lower(), value)
        elif isinstance(info, inspect.LiteralType):
            value = value.lower()
        elif isinstance(info, inspect.VarTupleType):
            value = [part.strip() for part in value.split(",") if part.strip()]
    try:
        strict = not isinstance(written, str) or (isinstance(info, inspect.BoolType) and not words)
        got = msgspec.convert(value, kind, strict=strict, dec_hook=custom)
        # Plain numbers, which msgspec can encode.
        return int(got) if isinstance(got, Bytes) else float(got) if isinstance(got, Seconds) else got
    except msgspec.ValidationError as error:
        if isinstance(error.__cause__, ValueError) and isinstance(info, inspect.CustomType):
            wrong = str(error.__cause__)
        if isinstance(info, inspect.LiteralType) and not isinstance(written, str):
            wrong = f"none of {', '.join(map(json.dumps, info.values))}"  # As the file writes them.
        shown = str(written).lower() if isinstance(written, bool) else repr(written)
        what = "" if secret else f"{shown} is "
        raise ConfigError(f"{place}: {what}{wrong}.") from None


def expected(kind: Any) -> str:
    """Describe a value that does not fit `kind`: `no whole number from 1 to 8`."""
    match _plain(inspect.type_info(kind)):
        case inspect.IntType() as number:
            return f"no whole number from {number.ge} to {number.le}"
        case inspect.FloatType() as number:
            low = f"above {number.gt:g}" if number.ge is None else f"from {number.ge:g}"
            high = f" to below {number.lt:g}" if number.lt is not None else " up"
            return f"no number {low}" + (high if number.le is None else f" to {number.le:g}")
        case inspect.BoolType():
            return "neither true nor false"
        case inspect.LiteralType() as words:
            return f"none of {', '.join(map(str, words.values))}"
        case inspect.VarTupleType():
            return "no list of names"
        case inspect.StrType():
            return "no name of a model"
        case inspect.DictType():
            return "no table; write { enable_thinking = false }"
        case _:
            return ""  # The conversion says it.


def _plain(info: inspect.Type) -> inspect.Type:
    """Return the type without metadata and None."""
    while isinstance(info, inspect.Metadata | inspect.UnionType):
        if isinstance(info, inspect.Metadata):
            info = info.type
        else:
            info = next(each for each in info.types if not isinstance(each, inspect.NoneType))
    return info


def closest(word: str, words: list[str]) -> str:
    """Return ` (did you mean …?)`, in upper or lower case alike, or nothing when no word is near."""
    by_lower = {each.lower(): each for each in words}
    word = word.lower()
    near = difflib.get_close_matches(word, by_lower, n=1)
    near = near or [each for each in by_lower if len(word) >= 4 and each.startswith(word)]
    return f" (did you mean {by_lower[near[0]]}?)" if near else ""


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach `host`. A name other than localhost counts as reachable."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"
