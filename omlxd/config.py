"""Settings of `omlxd serve`, and where each value came from.

Order: flag, then environment (`OMLXD_` and the flag's name in upper snake case), then the TOML
file's `[serve]` table, then the default. One table of `Option`s drives all four, so that a name
is spelled the same everywhere. Every value goes through its option's parser as text, so that a
flag, a variable and a line of the file are refused for the same reasons, each by its own name.
"""

from __future__ import annotations

import difflib
import ipaddress
import os
import re
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from .errors import ConfigError
from .sizes import disk_total, human, parse_size, total_ram

LOG_LEVELS = ("debug", "info", "warning", "error")


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """What `omlxd serve` was told. Sizes in bytes; an empty `model` is the embedded demo model.

    hot_cache_max_size  None: grows up to what memory safely allows; 0: no hot tier
    sources             option name → `--port`, `OMLXD_PORT`, `…/omlxd.toml line 3` or `default`
    """

    model: str
    host: str
    port: int
    api_key: str
    paged_ssd_cache_dir: Path
    paged_ssd_cache_max_size: int
    hot_cache_max_size: int | None
    initial_cache_blocks: int
    block_size: int
    no_cache: bool
    max_concurrent_requests: int
    log_level: str
    base_path: Path
    sources: dict[str, str] = {}

    def __repr__(self) -> str:
        """Every value but the key's: settings end up in logs and bug reports."""
        shown = {name: getattr(self, name) for name in self.__struct_fields__ if name != "sources"}
        shown["api_key"] = "***" if self.api_key else ""
        return f"Settings({', '.join(f'{name}={value!r}' for name, value in shown.items())})"


class Option(msgspec.Struct, frozen=True, kw_only=True):
    """One setting: `name` in snake case, its default as text ("": none), and how to read it."""

    name: str
    default: str
    metavar: str
    help: str
    parse: Callable[[str, str, Mapping[str, Any]], Any]
    """(text, name of the flag or variable or line, values of the options before this one)."""
    is_switch: bool = False

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        return "OMLXD_" + self.name.upper()


# --------------------------------------------------------------------------- parsers, one a kind


def _text(text: str, param: str, _: Mapping[str, Any]) -> str:
    return text


def _path(text: str, param: str, _: Mapping[str, Any]) -> Path:
    if not text:
        raise ConfigError(f"{param}: a folder is needed.", param=param)
    return Path(text).expanduser().absolute()


def _cold_dir(text: str, param: str, known: Mapping[str, Any]) -> Path:
    return _path(text, param, known) if text else known["base_path"] / "cache"


def _cold_size(text: str, param: str, known: Mapping[str, Any]) -> int:
    return parse_size(text, param, lambda: disk_total(known["paged_ssd_cache_dir"]))


def _hot_size(text: str, param: str, _: Mapping[str, Any]) -> int | None:
    if text == "auto":
        return None
    nbytes, ram = parse_size(text, param, total_ram), total_ram()
    if nbytes > ram:
        raise ConfigError(f"{param}: {text!r} is more than this machine's RAM ({human(ram)}).", param=param)
    return nbytes


def _integer(low: int, high: int) -> Callable[[str, str, Mapping[str, Any]], int]:
    def parse(text: str, param: str, _: Mapping[str, Any]) -> int:
        if not re.fullmatch(r"\d{1,9}", text) or not low <= int(text) <= high:
            raise ConfigError(f"{param}: {text!r} is no whole number from {low} to {high}.", param=param)
        return int(text)

    return parse


def _block_size(text: str, param: str, known: Mapping[str, Any]) -> int:
    if text not in {"16", "32", "64", "128", "256", "512", "1024"}:
        raise ConfigError(f"{param}: {text!r} is no power of two from 16 to 1024 tokens.", param=param)
    return int(text)


def _switch(text: str, param: str, _: Mapping[str, Any]) -> bool:
    value = {"1": True, "true": True, "yes": True, "on": True}.get(text.lower())
    value = False if text.lower() in {"0", "false", "no", "off"} else value
    if value is None:
        raise ConfigError(f"{param}: {text!r} is neither true nor false.", param=param)
    return value


def _log_level(text: str, param: str, _: Mapping[str, Any]) -> str:
    if text.lower() not in LOG_LEVELS:
        raise ConfigError(f"{param}: {text!r} is none of {', '.join(LOG_LEVELS)}.", param=param)
    return text.lower()


def _host(text: str, param: str, _: Mapping[str, Any]) -> str:
    if not re.fullmatch(r"[A-Za-z0-9.:_%-]+", text):
        raise ConfigError(f"{param}: {text!r} is no address; 127.0.0.1 is this machine alone.", param=param)
    return text


def _api_key(text: str, param: str, _: Mapping[str, Any]) -> str:
    # Anything else can't be sent in a header. The message must not repeat the key.
    if text and not re.fullmatch(r"[\x21-\x7e]+", text):
        raise ConfigError(f"{param}: a key is letters, digits and signs, with no spaces.", param=param)
    return text


# Parsed in this order: a parser may look at the options before its own.
OPTIONS: tuple[Option, ...] = (
    Option(
        name="model",
        default="",
        metavar="MODEL",
        parse=_text,
        help="local folder, or hub id as ORG/NAME (downloaded once); default: the embedded demo model",
    ),
    Option(
        name="host",
        default="127.0.0.1",
        metavar="ADDR",
        parse=_host,
        help="address to listen on; any but loopback needs --api-key",
    ),
    Option(
        name="port",
        default="8000",
        metavar="N",
        parse=_integer(0, 65535),
        help="port to listen on; 0 takes a free one and prints it",
    ),
    Option(
        name="api_key",
        default="",
        metavar="KEY",
        parse=_api_key,
        help="key that every request must carry; better given as OMLXD_API_KEY, which `ps` doesn't show",
    ),
    Option(
        name="base_path",
        default="~/.omlxd",
        metavar="DIR",
        parse=_path,
        help="folder of everything that omlxd keeps",
    ),
    Option(
        name="paged_ssd_cache_dir",
        default="",
        metavar="DIR",
        parse=_cold_dir,
        help="folder of the SSD cache; default: cache under --base-path",
    ),
    Option(
        name="paged_ssd_cache_max_size",
        default="100GB",
        metavar="SIZE",
        parse=_cold_size,
        help="most that the SSD cache may take, as 100GB or 20%% of its disk; 0: no SSD cache",
    ),
    Option(
        name="hot_cache_max_size",
        default="auto",
        metavar="SIZE",
        parse=_hot_size,
        help="most that the RAM cache may take, as 8GB or 20%% of RAM; 0: no RAM cache; "
        "auto: grows up to what memory safely allows",
    ),
    Option(
        name="initial_cache_blocks",
        default="256",
        metavar="N",
        parse=_integer(1, 10_000_000),
        help="cache blocks made ready at start; more are made on demand",
    ),
    Option(
        name="block_size",
        default="64",
        metavar="N",
        parse=_block_size,
        help="tokens in a cache block, a power of two from 16 to 1024",
    ),
    Option(
        name="no_cache",
        default="false",
        metavar="",
        parse=_switch,
        is_switch=True,
        help="compute every prompt from its first token: no RAM cache, no SSD cache",
    ),
    Option(
        name="max_concurrent_requests",
        default="8",
        metavar="N",
        parse=_integer(1, 1024),
        help="requests that decode at the same time; more wait their turn",
    ),
    Option(
        name="log_level",
        default="info",
        metavar="LEVEL",
        parse=_log_level,
        help="one of " + ", ".join(LOG_LEVELS),
    ),
)
_BY_NAME = {option.name: option for option in OPTIONS}


# --------------------------------------------------------------------------- putting it together


def load_settings(flags: Mapping[str, str], environ: Mapping[str, str] | None = None) -> Settings:
    """Settings from `flags` (option name → text; `config` may be among them), `environ` and the file.

    Raises ConfigError in one sentence that names the flag, the variable or the line at fault.
    """
    environ = os.environ if environ is None else environ
    given: dict[str, tuple[str, str]] = {}
    for name, option in _BY_NAME.items():
        if name in flags:
            given[name] = flags[name], option.flag
        elif environ.get(option.variable):  # An empty variable is an unset one, as usual in shells.
            given[name] = environ[option.variable], option.variable
    for name, value in _file_values(_config_file(flags, environ, given)).items():
        given.setdefault(name, value)

    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for option in OPTIONS:
        text, source = given.get(option.name, (option.default, "default"))
        values[option.name] = option.parse(text, source if source != "default" else option.flag, values)
        sources[option.name] = source
    if given.get("api_key", ("x", ""))[0] == "":
        raise ConfigError(f"{sources['api_key']}: an empty key protects nothing.", param=sources["api_key"])
    if not is_loopback(values["host"]) and not values["api_key"]:
        raise ConfigError(
            f"{sources['host']}: {values['host']} can be reached by other machines, so a key is needed: "
            "set OMLXD_API_KEY or --api-key, or leave --host at 127.0.0.1.",
            param=sources["host"],
        )
    return Settings(**values, sources=sources)


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach `host`. A name other than localhost counts as reachable."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def closest(word: str, words: list[str]) -> str:
    """` (did you mean …?)`, or nothing when no word is near."""
    near = difflib.get_close_matches(word, words, n=1)
    return f" (did you mean {near[0]}?)" if near else ""


def _config_file(
    flags: Mapping[str, str], environ: Mapping[str, str], given: Mapping[str, tuple[str, str]]
) -> Path | None:
    """The file to read, or None. One that was named must exist; the default one need not."""
    for text, source in ((flags.get("config"), "--config"), (environ.get("OMLXD_CONFIG"), "OMLXD_CONFIG")):
        if text is not None and (text or source == "--config"):
            path = Path(text).expanduser().absolute()
            if not path.is_file():
                raise ConfigError(f"{source}: there is no file {path}.", param=source)
            return path
    text, source = given.get("base_path", (_BY_NAME["base_path"].default, "--base-path"))
    path = _path(text, source, {}) / "omlxd.toml"
    return path if path.is_file() else None


def _file_values(path: Path | None) -> dict[str, tuple[str, str]]:
    """Option name → (text, where it stands) from the file's `[serve]` table."""
    if path is None:
        return {}
    try:
        source = path.read_text(encoding="utf-8")
        tables = tomllib.loads(source)
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{path}: {error}.", param=str(path)) from error
    for table, entries in tables.items():
        if table != "serve" or not isinstance(entries, dict):
            hint = closest(table, ["serve", *_BY_NAME]) if table != "serve" else ""
            raise ConfigError(
                f"{_place(path, source, table)}: {table!r} is unknown{hint}; settings stand under [serve].",
                param=table,
            )
    values: dict[str, tuple[str, str]] = {}
    for key, value in tables.get("serve", {}).items():
        name, place = key.replace("-", "_"), _place(path, source, key)
        if name not in _BY_NAME:
            hint = closest(key.replace("_", "-"), [known.replace("_", "-") for known in _BY_NAME])
            raise ConfigError(f"{place}: {key!r} is no setting{hint}.", param=key)
        if name in values:
            raise ConfigError(f"{place}: {key!r} is given twice.", param=key)
        if isinstance(value, bool):
            text = "true" if value else "false"
        elif isinstance(value, (str, int, float)):
            text = str(value)
        else:
            raise ConfigError(f"{place}: {key!r} takes one value, not a list or a table.", param=key)
        values[name] = text, place
    return values


def _place(path: Path, source: str, key: str) -> str:
    """`file line N (key)`. tomllib tells no line numbers, and settings stand one a line."""
    for number, line in enumerate(source.splitlines(), 1):
        if re.match(rf"\s*\[?\s*[\"']?{re.escape(key)}[\"']?\s*[\]=.]", line):
            return f"{path} line {number} ({key})"
    return f"{path} ({key})"
