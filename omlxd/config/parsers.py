"""How the text of a setting is read: one function a kind, each raising ConfigError in one sentence.

A parser takes (text, name of the flag or variable or line, values of the options before this one).
"""

from __future__ import annotations

import ipaddress
import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ..durations import parse_duration
from ..errors import ConfigError
from ..sizes import disk_total, human, parse_size, total_ram

LOG_LEVELS = ("debug", "info", "warning", "error")


def any_text(text: str, param: str, _: Mapping[str, Any]) -> str:
    return text


def path(text: str, param: str, _: Mapping[str, Any]) -> Path:
    if not text:
        raise ConfigError(f"{param}: a folder is needed.", param=param)
    return Path(text).expanduser().absolute()


def model_dir(text: str, param: str, known: Mapping[str, Any]) -> Path | None:
    if not text:
        return None
    folder = path(text, param, known)
    if not folder.is_dir():
        raise ConfigError(f"{param}: there is no folder {folder}.", param=param)
    return folder


def seconds(text: str, param: str, _: Mapping[str, Any]) -> float:
    return parse_duration(text, param)


def ttl(text: str, param: str, _: Mapping[str, Any]) -> float | None:
    """Seconds; None: for good."""
    return parse_duration(text, param) or None


def limit(text: str, param: str, _: Mapping[str, Any]) -> float:
    """Seconds; 0 is no limit, and so is anything negative."""
    seconds = parse_duration(text, param)
    return 0.0 if math.isinf(seconds) else seconds


def cold_dir(text: str, param: str, known: Mapping[str, Any]) -> Path:
    return path(text, param, known) if text else known["base_path"] / "cache"


def cold_size(text: str, param: str, known: Mapping[str, Any]) -> int:
    return parse_size(text, param, lambda: disk_total(known["paged_ssd_cache_dir"]))


def hot_size(text: str, param: str, _: Mapping[str, Any]) -> int | None:
    if text == "auto":
        return None
    nbytes, ram = parse_size(text, param, total_ram), total_ram()
    if nbytes > ram:
        raise ConfigError(f"{param}: {text!r} is more than this machine's RAM ({human(ram)}).", param=param)
    return nbytes


def memory_limit(text: str, param: str, _: Mapping[str, Any]) -> int | None:
    """None: what the machine has; 0: none is kept."""
    if text == "auto":
        return None
    return 0 if text == "off" else parse_size(text, param, total_ram)


def integer(low: int, high: int) -> Callable[[str, str, Mapping[str, Any]], int]:
    def parse(text: str, param: str, _: Mapping[str, Any]) -> int:
        if not re.fullmatch(r"\d{1,9}", text) or not low <= int(text) <= high:
            raise ConfigError(f"{param}: {text!r} is no whole number from {low} to {high}.", param=param)
        return int(text)

    return parse


def seed(text: str, param: str, _: Mapping[str, Any]) -> int | None:
    if text == "random":
        return None
    if not re.fullmatch(r"\d{1,18}", text):
        raise ConfigError(f"{param}: {text!r} is neither a whole number nor `random`.", param=param)
    return int(text)


def whole_of(*numbers: int) -> Callable[[str, str, Mapping[str, Any]], int]:
    def parse(text: str, param: str, _: Mapping[str, Any]) -> int:
        if text not in map(str, numbers):
            known = ", ".join(map(str, numbers))
            raise ConfigError(f"{param}: {text!r} is none of {known}.", param=param)
        return int(text)

    return parse


def block_size(text: str, param: str, known: Mapping[str, Any]) -> int:
    if text not in {"16", "32", "64", "128", "256", "512", "1024"}:
        raise ConfigError(f"{param}: {text!r} is no power of two from 16 to 1024 tokens.", param=param)
    return int(text)


def switch(text: str, param: str, _: Mapping[str, Any]) -> bool:
    value = {"1": True, "true": True, "yes": True, "on": True}.get(text.lower())
    value = False if text.lower() in {"0", "false", "no", "off"} else value
    if value is None:
        raise ConfigError(f"{param}: {text!r} is neither true nor false.", param=param)
    return value


def one_of(*words: str) -> Callable[[str, str, Mapping[str, Any]], str]:
    def parse(text: str, param: str, _: Mapping[str, Any]) -> str:
        if text.lower() not in words:
            raise ConfigError(f"{param}: {text!r} is none of {', '.join(words)}.", param=param)
        return text.lower()

    return parse


def optional_path(text: str, param: str, known: Mapping[str, Any]) -> Path | None:
    return path(text, param, known) if text else None


def byte_size(text: str, param: str, _: Mapping[str, Any]) -> int:
    if nbytes := parse_size(text, param, least=1000):
        return nbytes
    raise ConfigError(f"{param}: a size is needed, as 10MB.", param=param)


def _listed(text: str) -> list[str]:
    return [word for word in re.split(r"[,\s]+", text) if word]


def origins(text: str, param: str, _: Mapping[str, Any]) -> tuple[str, ...]:
    for origin in _listed(text):
        if origin != "*" and not re.fullmatch(r"[a-z][a-z0-9+.-]*://[A-Za-z0-9.:_\[\]-]+", origin):
            raise ConfigError(
                f"{param}: {origin!r} is no origin; one is written https://chat.example, with no path, or *.",
                param=param,
            )
    return tuple(_listed(text))


def host_names(text: str, param: str, _: Mapping[str, Any]) -> tuple[str, ...]:
    for name in _listed(text):
        if not re.fullmatch(r"[A-Za-z0-9._-]+", name):
            raise ConfigError(f"{param}: {name!r} is no name of a host; give it without a port.", param=param)
    return tuple(name.lower() for name in _listed(text))


def admission(text: str, param: str, _: Mapping[str, Any]) -> str:
    if not re.fullmatch(r"always|second-use|min-length:\d{1,9}", text.lower()):
        raise ConfigError(
            f"{param}: {text!r} is none of always, second-use and min-length:N with N in tokens, "
            "as min-length:1000.",
            param=param,
        )
    return text.lower()


def plain_size(text: str, param: str, _: Mapping[str, Any]) -> int:
    return parse_size(text, param)


def log_level(text: str, param: str, _: Mapping[str, Any]) -> str:
    if text.lower() not in LOG_LEVELS:
        raise ConfigError(f"{param}: {text!r} is none of {', '.join(LOG_LEVELS)}.", param=param)
    return text.lower()


def host(text: str, param: str, _: Mapping[str, Any]) -> str:
    if not re.fullmatch(r"[A-Za-z0-9.:_%-]+", text):
        raise ConfigError(f"{param}: {text!r} is no address; 127.0.0.1 is this machine alone.", param=param)
    return text


def api_key(text: str, param: str, _: Mapping[str, Any]) -> str:
    # Anything else can't be sent in a header. The message must not repeat the key.
    if text and not re.fullmatch(r"[\x21-\x7e]+", text):
        raise ConfigError(f"{param}: a key is letters, digits and signs, with no spaces.", param=param)
    return text


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach `host`. A name other than localhost counts as reachable."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"
