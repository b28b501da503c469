"""Settings of single models: the file's `[models."org/name"]` tables.

What a request does not say is taken from here before the model's own generation_config.json.
`LIVE` fields hold from the next request on when the file is read again; the others from the model's
next load on.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from ..durations import duration
from ..errors import ConfigError


class ModelSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What the file says of one model; None: nothing.

    thinking        whether the model thinks, where the request leaves it open
    template_args   arguments of the chat template; a request's own go first
    context_limit   tokens of prompt and answer at most, below what the model could
    ttl             seconds that it stays loaded without a request; infinite: for good
    healing         earlier turns are put back as they were generated
    hoist_system    one of HOIST
    request_timeout seconds that a request may take; 0: no limit
    pin             never unloaded to make room, nor for being idle
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_tokens: int | None = None
    thinking: bool | None = None
    template_args: dict[str, Any] = {}
    context_limit: int | None = None
    ttl: float | None = None
    pin: bool = False
    aliases: tuple[str, ...] = ()
    block_size: int | None = None
    kv_bits: int | None = None
    kv_group_size: int | None = None
    no_cache: bool | None = None
    max_concurrent_requests: int | None = None
    healing: bool | None = None
    hoist_system: str | None = None
    request_timeout: float | None = None


NEXT_LOAD = (
    "block_size",
    "kv_bits",
    "kv_group_size",
    "no_cache",
    "max_concurrent_requests",
    "healing",
    "hoist_system",
    "request_timeout",
)
"""Fields that a loaded engine does not take up; every other one is live."""


def closest(word: str, words: list[str]) -> str:
    """` (did you mean …?)`, or nothing when no word is near."""
    near = difflib.get_close_matches(word, words, n=1)
    return f" (did you mean {near[0]}?)" if near else ""


class _Wrong(Exception):
    """What a value should have been."""


def _number(low: float, high: float, *, open_low: bool = False) -> Callable[[Any], float]:
    def parse(value: Any) -> float:
        fine = isinstance(value, (int, float)) and not isinstance(value, bool) and low <= value <= high
        if not fine or (open_low and value == low):
            above = "above " if open_low else "from "
            raise _Wrong(f"no number {above}{low:g}" + (f" to {high:g}" if high < math.inf else " up"))
        return float(value)

    return parse


def _whole(low: int, high: int) -> Callable[[Any], int]:
    def parse(value: Any) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise _Wrong(f"no whole number from {low} to {high}")
        return value

    return parse


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise _Wrong("neither true nor false")
    return value


def _ttl(value: Any) -> float:
    """Here, as on the flag, 0 is for good."""
    if isinstance(value, str) or (isinstance(value, (int, float)) and not isinstance(value, bool)):
        try:
            return duration(value) or math.inf
        except ValueError:
            pass
    raise _Wrong('no length of time; write "30m" or "2h", 0 for good')


def _seconds(value: Any) -> float:
    """A limit: 0 is none."""
    limit = _ttl(value)
    return 0.0 if math.isinf(limit) else limit


def _one_of(*words: str) -> Callable[[Any], str]:
    def parse(value: Any) -> str:
        if value not in words:
            raise _Wrong(f"none of {', '.join(words)}")
        return value

    return parse


def _aliases(value: Any) -> tuple[str, ...]:
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, list) or not all(isinstance(name, str) and name.strip() for name in names):
        raise _Wrong("no list of names")
    return tuple(names)


def _table(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _Wrong("no table; write { enable_thinking = false }")
    try:
        msgspec.json.encode(value)
    except (TypeError, ValueError) as error:
        raise _Wrong(f"nothing that JSON can say ({error})") from None
    return value


def _whole_of(*numbers: int) -> Callable[[Any], int]:
    def parse(value: Any) -> int:
        if value not in numbers or isinstance(value, bool):
            raise _Wrong(f"none of {', '.join(map(str, numbers))}")
        return value

    return parse


def _block_size(value: Any) -> int:
    if value not in (16, 32, 64, 128, 256, 512, 1024) or isinstance(value, bool):
        raise _Wrong("no power of two from 16 to 1024 tokens")
    return value


HOIST = ("auto", "always", "never")
"""What becomes of system messages before the first assistant's turn."""

_PARSERS: Mapping[str, Callable[[Any], Any]] = {
    "temperature": _number(0, 100),
    "top_p": _number(0, 1, open_low=True),
    "top_k": _whole(0, 10**9),
    "min_p": _number(0, 1),
    "repetition_penalty": _number(0, math.inf, open_low=True),
    "max_tokens": _whole(1, 2**31 - 1),
    "thinking": _flag,
    "template_args": _table,
    "context_limit": _whole(16, 2**31 - 1),
    "ttl": _ttl,
    "pin": _flag,
    "aliases": _aliases,
    "block_size": _block_size,
    "kv_bits": _whole_of(0, 4, 8),
    "kv_group_size": _whole_of(32, 64, 128),
    "no_cache": _flag,
    "max_concurrent_requests": _whole(1, 1024),
    "healing": _flag,
    "hoist_system": _one_of(*HOIST),
    "request_timeout": _seconds,
}
assert set(_PARSERS) == set(ModelSettings.__struct_fields__)


def full_name(model: str, field: str) -> str:
    """Of a setting of one model, as TOML writes it: `models."org/name".max-tokens`."""
    return f"models.{msgspec.json.encode(model).decode()}.{field.replace('_', '-')}"


def parse_models(
    tables: Mapping[str, Any], path: Path, source: str
) -> tuple[dict[str, ModelSettings], dict[str, str]]:
    """The `[models]` tables of a file whose text is `source`, and each `full_name` → where it stands.

    Raises ConfigError, which names the line.
    """
    found: dict[str, ModelSettings] = {}
    places: dict[str, str] = {}
    owners: dict[str, str] = {}
    for name, entries in tables.items():
        if not isinstance(entries, dict):
            place = _place(path, source, "", name)
            raise ConfigError(f'{place}: settings of a model stand under [models."{name}"].', param=name)
        found[name] = _parse_model(name, entries, path, source)
        for alias in found[name].aliases:
            if (other := owners.setdefault(alias, name)) != name:
                place = _place(path, source, name, "aliases")
                raise ConfigError(f"{place}: {alias!r} is an alias of {other!r} already.", param="aliases")
        places |= {full_name(name, key): _place(path, source, name, key) for key in entries}
    return found, places


def _parse_model(name: str, entries: Mapping[str, Any], path: Path, source: str) -> ModelSettings:
    values: dict[str, Any] = {}
    for key, value in entries.items():
        field, place = key.replace("-", "_"), _place(path, source, name, key)
        if field not in _PARSERS:
            hint = closest(field, list(_PARSERS))
            raise ConfigError(f"{place}: {key!r} is no setting of a model{hint}.", param=key)
        if field in values:
            raise ConfigError(f"{place}: {key!r} is given twice.", param=key)
        try:
            values[field] = _PARSERS[field](value)
        except _Wrong as wrong:
            raise ConfigError(f"{place}: {value!r} is {wrong}.", param=key) from None
    return ModelSettings(**values)


def _place(path: Path, source: str, model: str, key: str) -> str:
    """`file line N (key)`: the key's line after the header of the model's table."""
    table = re.compile(rf"\s*\[\s*models\s*\.\s*[\"']?{re.escape(model)}[\"']?\s*[\].]")
    entry = re.compile(rf"\s*(?:\[.*\.)?\s*[\"']?{re.escape(key)}[\"']?\s*[\]=.]")
    inside = not model
    for number, line in enumerate(source.splitlines(), 1):
        if table.match(line):
            inside = True
        elif inside and model and re.match(r"\s*\[", line) and not entry.match(line):
            inside = False
        if inside and entry.match(line):
            return f"{path} line {number} ({key})"
    return f"{path} ({key})"
