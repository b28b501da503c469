"""Settings put together from flags, environment and file, and closest words for what is misspelt."""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from ..keys import keys_path, read_keys
from . import parsers
from .models import ModelSettings, closest, parse_models
from .options import BY_NAME, OPTIONS, Settings


def load_settings(flags: Mapping[str, str], environ: Mapping[str, str] | None = None) -> Settings:
    """Settings from `flags` (option name → text; `config` may be among them), `environ` and the file.

    Raises ConfigError in one sentence that names the flag, the variable or the line at fault.
    """
    environ = os.environ if environ is None else environ
    given: dict[str, tuple[str, str]] = {}
    for name, option in BY_NAME.items():
        if name in flags:
            given[name] = flags[name], option.flag
        elif environ.get(option.variable):  # An empty variable is an unset one, as usual in shells.
            given[name] = environ[option.variable], option.variable
    from_file, models, places = _read_file(_config_file(flags, environ, given))
    for name, value in from_file.items():
        given.setdefault(name, value)

    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for option in OPTIONS:
        text, source = given.get(option.name, (option.default, "default"))
        values[option.name] = option.parse(text, source if source != "default" else option.flag, values)
        sources[option.name] = source
    if given.get("api_key", ("x", ""))[0] == "":
        raise ConfigError(f"{sources['api_key']}: an empty key protects nothing.", param=sources["api_key"])
    guarded = values["api_key"] or parsers.is_loopback(values["host"])
    if not guarded and not read_keys(keys_path(values["base_path"])):
        raise ConfigError(
            f"{sources['host']}: {values['host']} can be reached by other machines, so a key is needed: "
            "make one with `omlxd key add NAME`, set OMLXD_API_KEY, or leave --host at 127.0.0.1.",
            param=sources["host"],
        )
    return Settings(**values, models=models, sources=sources | places)


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
    text, source = given.get("base_path", (BY_NAME["base_path"].default, "--base-path"))
    path = parsers.path(text, source, {}) / "omlxd.toml"
    return path if path.is_file() else None


def _read_file(
    path: Path | None,
) -> tuple[dict[str, tuple[str, str]], dict[str, ModelSettings], dict[str, str]]:
    """The file's `[serve]` table as option name → (text, where it stands), and what `parse_models` gives."""
    if path is None:
        return {}, {}, {}
    try:
        source = path.read_text(encoding="utf-8")
        tables = tomllib.loads(source)
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{path}: {error}.", param=str(path)) from error
    for table, entries in tables.items():
        if table not in ("serve", "models") or not isinstance(entries, dict):
            place = _place(path, source, table)
            if table.replace("-", "_") in BY_NAME and not isinstance(entries, dict):
                raise ConfigError(
                    f"{place}: {table!r} stands in no table; put [serve] before it.", param=table
                )
            hint = closest(table, ["serve", "models"]) if table not in ("serve", "models") else ""
            raise ConfigError(
                f"{place}: {table!r} is unknown{hint}; settings stand under [serve], those of one model "
                'under [models."its name"].',
                param=table,
            )
    values: dict[str, tuple[str, str]] = {}
    for key, value in tables.get("serve", {}).items():
        name, place = key.replace("-", "_"), _place(path, source, key)
        if name not in BY_NAME:
            hint = closest(key.replace("_", "-"), [known.replace("_", "-") for known in BY_NAME])
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
    return values, *parse_models(tables.get("models", {}), path, source)


def _place(path: Path, source: str, key: str) -> str:
    """`file line N (key)`. tomllib tells no line numbers, and settings stand one a line."""
    for number, line in enumerate(source.splitlines(), 1):
        if re.match(rf"\s*\[?\s*[\"']?{re.escape(key)}[\"']?\s*[\]=.]", line):
            return f"{path} line {number} ({key})"
    return f"{path} ({key})"
