"""Reads settings from flags, environment and file."""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import tomllib
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any, get_type_hints

from msgspec.structs import replace

from ..common.files import read_small
from ..common.ports import PEER_PORT, peer_address
from ..common.units import counted, disk_total, human, total_ram
from ..errors import ConfigError
from .keys import keys_path, read_keys
from .settings import (
    BY_NAME,
    BY_SERVICE,
    OPTIONS,
    PREFIX,
    SAMPLING,
    WITH_STDIN,
    ModelSettings,
    Option,
    Settings,
    full_name,
)
from .values import closest, convert, expected, is_loopback

_MODEL_TYPES = get_type_hints(ModelSettings, include_extras=True)
_INTERNAL = re.compile(
    rf"{BY_SERVICE}|{WITH_STDIN}|{PREFIX}(ENGINE_COMMAND|FETCH_MODEL|TRACES|SCRIPT_.*|TEST_.*)"
)
"""Matches variables that are no settings: of commands for each other, of tests and of tools."""
_TABLES = ("serve", "defaults", "models")
_BARE = re.compile(
    r"""\s*(?P<key>[^\s=#]+)\s*=\s*(?P<word>[^\s"'#\[\]{},]*[A-Za-z%/~][^\s"'#\[\]{},]*)\s*(?:\#.*)?"""
)
"""Matches a line `speculation = off`, which TOML would have in quotes."""
MOST_MISTAKES = 10
"""Mistakes in one error at most."""


FILE_NAME = "omlxd.toml"
"""Name of the settings' file below the base folder."""


def load_settings(flags: Mapping[str, str], environ: Mapping[str, str] | None = None) -> Settings:
    """Read the settings of `flags` (option name → text), `environ` and the file.

    Raises ConfigError, whose message has a line for each mistake: those of the file last, in its order.
    """
    settings, mistakes = read_settings(flags, environ)
    if not mistakes:
        return settings
    more = len(mistakes) - MOST_MISTAKES
    rest = [f"And {counted(more, 'more mistake')}."] if more > 0 else []
    raise ConfigError("\n".join(mistakes[:MOST_MISTAKES] + rest))


def read_settings(
    flags: Mapping[str, str], environ: Mapping[str, str] | None = None
) -> tuple[Settings, list[str]]:
    """Read settings like `load_settings`, with a sentence for each mistake, which leaves the default."""
    environ = os.environ if environ is None else environ
    by_flag = {name: (flags[name], option.flag) for name, option in BY_NAME.items() if name in flags}
    by_variable = {
        name: (environ[option.variable], option.variable)
        for name, option in BY_NAME.items()
        if environ.get(option.variable)  # An empty variable is an unset one, as usual in shells.
    }
    entries: dict[str, tuple[Any, str]] = by_variable | by_flag
    mistakes: list[str] = []
    path, source, file = None, "default", None
    with _noted(mistakes):
        path, source = _config_file(flags, environ, entries)
        file = _File(path) if path else None
    mistakes += file.mistakes if file else []
    in_file = file.serve if file else {}
    entries = in_file | entries

    values: dict[str, Any] = {}
    sources = {"config": source}
    for option in OPTIONS:
        value, source = entries.get(option.name, (option.default, "default"))
        sources[option.name] = source
        place = option.flag if source == "default" else source
        with _noted(mistakes):
            values[option.field] = _value(option, value, place, values)
        if option.field not in values:
            values[option.field] = _value(option, option.default, option.flag, values)
    if entries.get("api_key", ("x", ""))[0] == "":
        mistakes.append(f"{sources['api_key']}: an empty key protects nothing.")
    guarded = values["api_key"] or is_loopback(values["host"]) or mistakes
    with _noted(mistakes):
        if not guarded and not read_keys(keys_path(values["base_path"])):
            raise ConfigError(
                f"{sources['host']}: {values['host']} can be reached by other machines, so a key is needed: "
                "make one with `omlxd key add NAME`, set OMLXD_API_KEY, or leave --host at 127.0.0.1."
            )
    overridden = tuple(_faults(by_variable, sources, values) + _faults(in_file, sources, values))
    settings = Settings(**values, overridden=overridden, sources=sources)
    if file is not None:
        settings = replace(
            settings, config=path, models=file.models, defaults=file.defaults, sources=sources | file.places
        )
    return settings, sorted(dict.fromkeys(mistakes), key=_line)


@contextlib.contextmanager
def _noted(mistakes: list[str]) -> Generator[None]:
    """Add a ConfigError of the block to `mistakes`."""
    try:
        yield
    except ConfigError as error:
        mistakes.append(error.message)


def _line(mistake: str) -> int:
    """Return a mistake's line in the file; 0 without one."""
    place = re.search(r"^[^:]* line (\d+)", mistake)
    return int(place[1]) if place else 0


def warnings_of(settings: Settings, environ: Mapping[str, str] | None = None) -> list[str]:
    """List what is ignored: unknown variables, wrong values that another source overrides, and flags that a
    model's own settings do."""
    return [*unknown_variables(environ), *settings.overridden, *_overridden_flags(settings)]


def _overridden_flags(settings: Settings) -> list[str]:
    """List each flag that models' own settings of the file override, with another value."""
    result: list[str] = []
    for name, option in BY_NAME.items():
        field = {"no_healing": "healing", "model_ttl": "ttl"}.get(name, name)
        if settings.sources[name] != option.flag or field not in _MODEL_TYPES:
            continue
        value = getattr(settings, option.field)
        value = not value if name == "no_healing" else value
        for model, own in settings.models.items():
            place = settings.sources.get(full_name(field, "models", model))
            if place and getattr(own, field) != value:
                result.append(f"{option.flag} does not hold for {model}: its own setting wins ({place}).")
    return result


def unknown_variables(environ: Mapping[str, str] | None = None) -> list[str]:
    """List variables of omlxd's prefix that nothing reads: they may be another program's."""
    known = [option.name.upper() for option in OPTIONS] + ["CONFIG"]
    names = [
        name.removeprefix(PREFIX)
        for name, value in (os.environ if environ is None else environ).items()
        if name.startswith(PREFIX) and value and not _INTERNAL.fullmatch(name)
    ]
    return [
        f"{PREFIX}{name} is no variable of omlxd{hint.replace('mean ', 'mean ' + PREFIX)}; it is ignored."
        for name in sorted(set(names) - set(known))
        for hint in [where_else(name, known)]
    ]


def where_else(name: str, words: list[str]) -> str:
    """Return ` (it stands under … of a settings file)` for a setting of another place, else `closest`."""
    field = name.lstrip("-").lower().replace("-", "_")
    fields = {"[serve]": BY_NAME, "[defaults]": SAMPLING, '[models."NAME"]': _MODEL_TYPES}
    tables = [table for table, names in fields.items() if field in names]
    return f" (it stands under {' or '.join(tables)} of a settings file)" if tables else closest(name, words)


def settings_of(args: argparse.Namespace, *names: str, **flags: str) -> Settings:
    """Return the settings, with flags of `args` for the options `names` and the file. Raises ConfigError."""
    return load_settings(flags_of(args, *names) | flags)


def flags_of(args: argparse.Namespace, *names: str) -> dict[str, str]:
    """Return the flags in `args` for the options `names` and for the file."""
    named = {name: getattr(args, name, None) for name in (*names, "config")}
    return {name: value for name, value in named.items() if value is not None}


def _faults(
    entries: Mapping[str, tuple[Any, str]], sources: Mapping[str, str], values: Mapping[str, Any]
) -> list[str]:
    """List the faults of `entries` that another source overrides."""
    result: list[str] = []
    for name, (value, place) in entries.items():
        if place != sources[name]:
            try:
                _value(BY_NAME[name], value, place, values)
            except ConfigError as error:
                result.append(f"{error.message.removesuffix('.')}; {sources[name]} overrides it.")
    return result


def _value(option: Option, value: Any, place: str, before: Mapping[str, Any]) -> Any:
    """Convert a value. `before`: earlier settings, by field. Raises ConfigError."""
    if value == option.none:
        return None
    match option.name:
        case "paged_ssd_cache_dir" if not value:
            return before["base_path"] / "cache"
        case "memory_limit" if value == "off":
            return 0
        case "log_level" | "ssd_cache_admission" | "allowed_host" if isinstance(value, str):
            value = value.lower()
    full_sizes = {"hot_cache_max_size": total_ram, "memory_limit": total_ram}
    full_sizes["paged_ssd_cache_max_size"] = lambda: disk_total(before["paged_ssd_cache_dir"])
    got = convert(
        option.type,
        value,
        place,
        wrong=option.wrong,
        secret=option.name == "api_key",
        full_size=full_sizes.get(option.name),
    )
    problem = ""
    if option.name == "model_dir" and not os.path.isdir(got):
        problem = f"there is no folder {got}"
    elif option.name == "hot_cache_max_size" and got > total_ram():
        problem = f"{value!r} is more than this machine's RAM ({human(total_ram())})"
    elif option.name == "log_file_size" and not got:
        problem = "a size is needed, as 10MB"
    elif option.name in ("peer", "peer_listen", "join_listen") and got:
        problem = _why_no_peer_address(got)
    elif option.name == "join":
        problem = next(filter(None, map(_why_no_peer_address, got)), "")
    if problem:
        raise ConfigError(f"{place}: {problem}.")
    return got


def _why_no_peer_address(text: str) -> str:
    try:
        host, _ = peer_address(text)
    except ValueError:
        return f"{text!r} is no address; write 192.168.1.5, or 192.168.1.5:{PEER_PORT} with a port"
    every = host in ("0", "0.0.0.0", "::", "*")
    return f"{host} is every network of this machine; name the address in one of them" if every else ""


def _config_file(
    flags: Mapping[str, str], environ: Mapping[str, str], entries: Mapping[str, tuple[Any, str]]
) -> tuple[Path | None, str]:
    """Return the file to read, or None, and its source. A named one must exist, the default need not."""
    for text, source in ((flags.get("config"), "--config"), (environ.get("OMLXD_CONFIG"), "OMLXD_CONFIG")):
        if text is not None and (text or source == "--config"):
            path = Path(os.path.expanduser(text)).absolute()
            if not os.path.isfile(path):
                raise ConfigError(f"{source}: there is no file {path}.")
            return path, source
    option = BY_NAME["base_path"]
    text, source = entries.get("base_path", (option.default, option.flag))
    path = _value(option, text, source, {}) / FILE_NAME
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None, f"default ({path} is not there)"
    except OSError as error:
        raise ConfigError(f"{path} can't be read: {error.strerror}.") from error
    return path, "default"


class _File:
    """A file of settings. Raises ConfigError if it is no TOML at all.

    mistakes  a sentence each, which names the line
    serve     the `[serve]` table: option name → (value, where it stands)
    models    the `[models]` tables, each with what `defaults` says and it does not
    places    `full_name` → where it stands
    """

    def __init__(self, path: Path):
        self._path = path
        self.mistakes: list[str] = []
        try:
            self._text = read_small(path).decode()
            tables = tomllib.loads(self._text)
        except OSError as error:
            raise ConfigError(f"{path} can't be read: {error.strerror or error}.") from error
        except UnicodeDecodeError as error:
            line = error.object[: error.start].count(b"\n") + 1
            raise ConfigError(f"{path} line {line}: the text is not UTF-8.") from error
        except tomllib.TOMLDecodeError as error:
            raise self._no_toml(str(error)) from error
        for table, entries in tables.items():
            if table not in _TABLES or not isinstance(entries, dict):
                self.mistakes.append(self._unknown_table(table, isinstance(entries, dict)))
        tables = {name: entries for name, entries in tables.items() if isinstance(entries, dict)}
        self.places: dict[str, str] = {}
        self.serve: dict[str, tuple[Any, str]] = {}
        for name, (key, value) in self._entries(tables.get("serve", {}), list(BY_NAME), "serve").items():
            place = self._place(key, "serve")
            if isinstance(value, (list, dict)):
                self.mistakes.append(f"{place}: {key!r} takes one value, not a list or a table.")
                continue
            self.serve[name] = value, place
        self.defaults = self._model(tables.get("defaults", {}), list(SAMPLING), "defaults")
        self.models: dict[str, ModelSettings] = {}
        owners: dict[str, str] = {}
        for name, entries in tables.get("models", {}).items():
            if not isinstance(entries, dict):
                place = self._place(name, "models")
                self.mistakes.append(f'{place}: settings of a model stand under [models."{name}"].')
                continue
            own = self.models[name] = self._model(entries, list(_MODEL_TYPES), "models", name)
            for alias in own.aliases:
                if (other := owners.setdefault(alias, name)) != name:
                    place = self._place("aliases", "models", name)
                    self.mistakes.append(f"{place}: {alias!r} is an alias of {other!r} already.")

    def _model(self, entries: Mapping[str, Any], fields: list[str], *table: str) -> ModelSettings:
        values = {name: getattr(self.defaults, name) for name in SAMPLING} if table != ("defaults",) else {}
        for field, (key, value) in self._entries(entries, fields, *table).items():
            place = self.places[full_name(field, *table)] = self._place(key, *table)
            kind = _MODEL_TYPES[field]
            with _noted(self.mistakes):
                values[field] = convert(kind, value, place, wrong=expected(kind), words=False)
        return ModelSettings(**values)

    def _entries(
        self, entries: Mapping[str, Any], names: list[str], *table: str
    ) -> dict[str, tuple[str, Any]]:
        """Map name → (key as written, value)."""
        got: dict[str, tuple[str, Any]] = {}
        for key, value in entries.items():
            name = key.replace("-", "_")
            if name not in names:
                kinds = {"serve": "setting", "defaults": "sampling setting", "models": "setting of a model"}
                what = kinds[table[0]]
                hint = where_else(key.replace("_", "-"), [entry.replace("_", "-") for entry in names])
                self.mistakes.append(f"{self._place(key, *table)}: {key!r} is no {what}{hint}.")
            elif name in got:
                self.mistakes.append(f"{self._place(key, *table)}: {key!r} is given twice.")
            else:
                got[name] = key, value
        return got

    def _no_toml(self, problem: str) -> ConfigError:
        """Make an error of `problem`, tomllib's words with a place at the end."""
        result = re.fullmatch(r"(.*) \(at line (\d+), .*\)", problem)
        if not result:
            return ConfigError(f"{self._path}: {problem}.")
        what, line = result[1], int(result[2])
        text = self._text.splitlines()[line - 1]
        if what.startswith(("Invalid value", "Expected newline")) and (bare := _BARE.fullmatch(text)):
            what = f'a word needs quotes: {bare["key"]} = "{bare["word"]}"'
        elif what == "Cannot overwrite a value" or what.endswith(" twice"):
            written, equals, _ = text.partition("=")
            what = (written.strip() if equals or "[" in written else "a key") + " stands there twice"
        return ConfigError(f"{self._path} line {line}: {what}.")

    def _unknown_table(self, name: str, is_table: bool) -> str:
        place = self._place(name)
        if name.replace("-", "_") in BY_NAME and not is_table:
            return f"{place}: {name!r} stands in no table; put [serve] before it."
        hint = closest(name, list(_TABLES)) if name not in _TABLES else ""
        return (
            f"{place}: {name!r} is unknown{hint}; settings stand under [serve], those of one model under "
            '[models."its name"], sampling for all of them under [defaults].'
        )

    def _place(self, key: str, *table: str) -> str:
        """Return `file line N (key)`. tomllib gives no line numbers, and settings stand one a line."""
        header = r"\s*\.\s*".join(rf"[\"']?{re.escape(name)}[\"']?" for name in table)
        entry = re.compile(rf"\s*(?:\[(?:.*\.)?)?\s*[\"']?{re.escape(key)}[\"']?\s*[\]=.]")
        inside = not table
        for number, line in enumerate(self._text.splitlines(), 1):
            if table and re.match(rf"\s*\[\s*{header}\s*[\].]", line):
                inside = True
            elif inside and table and re.match(r"\s*\[", line) and not entry.match(line):
                inside = False
            if inside and entry.match(line):
                return f"{self._path} line {number} ({key})"
        return f"{self._path} ({key})"
