"""The service manager's job: the command, its variables, the address, the log."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

import omlxd

from ...common.ports import JOIN_PORT, peer_address
from ...config import BY_NAME, OPTIONS, load_settings
from ...config.settings import BY_SERVICE
from ...errors import ConfigError
from ...models.local_stores import check_default_model
from ...models.resolve import is_local
from .protected import used_paths

EXIT_TIMEOUT_S = 60
"""Seconds between SIGTERM and SIGKILL: above our own deadlines for ending answers and writing the cache."""
THROTTLE_S = 10
FILES = 8192
CARRIED = (
    *("HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "XDG_CACHE_HOME", "HF_ENDPOINT"),
    *("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "AGX_RELAX_CDM_CTXSTORE_TIMEOUT"),
)
"""Variables of the installing shell that say where models are, and how patient macOS's GPU watchdog is. No
token is among them."""
LAUNCHD_NAME = "Listeners"
"""The key under `Sockets` in our LaunchAgent."""


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """A job of the service manager.

    program     absolute path of the interpreter, then its arguments
    environ     variables on top of those that the manager gives
    host, port  where the manager listens for us
    log_file    where the daemon logs; None: standard error
    at_login    start at login, and again after a failure, rather than at the first connection
    join        it is `omlxd join`, not `omlxd serve`
    paths       what it runs, reads and writes: (what it is, path)
    """

    program: tuple[str, ...]
    environ: dict[str, str]
    host: str
    port: int
    log_file: Path | None = None
    at_login: bool = False
    join: bool = False
    paths: tuple[tuple[str, Path], ...] = ()

    @property
    def where(self) -> tuple[str, int, str]:
        """Where the manager listens, and the flag that says so."""
        return self.host, self.port, "--listen" if self.join else "--port"


def make_plan(flags: Mapping[str, str], *, log_file: Path | None, at_login: bool, join: bool = False) -> Plan:
    """Plan `omlxd serve`, or `join`, with `flags` (option name → text). Raises ConfigError, as that would.

    log_file  where to log when the flags and the file say nothing
    """
    if "api_key" in flags:
        raise ConfigError(
            "--api-key would stand in a file and in `ps`; make a key with `omlxd key add NAME` instead."
        )
    options = {name: _absolute(name, text) for name, text in flags.items()}
    settings = load_settings(options, {})  # The service will not see this shell's variables.
    host, port = peer_address(settings.join_listen, JOIN_PORT) if join else (settings.host, settings.port)
    if port == 0:
        flag = "--listen" if join else "--port"
        raise ConfigError(f"{flag}: a service needs a port that stays; give one above 1023.")
    if not join:
        check_default_model(settings)
    if settings.log_file is None and log_file is not None:
        options["log_file"] = str(log_file)
    arguments = [word for name, text in options.items() for word in _words(name, text)]
    variables = {BY_SERVICE: "1"} | {name: os.environ[name] for name in CARRIED if os.environ.get(name)}
    program = (str(Path(sys.executable).absolute()), "-m", "omlxd", "join" if join else "serve", *arguments)
    log_file = settings.log_file or log_file
    return Plan(
        program=program,
        environ=variables | _import_path(program[0]),
        host=host,
        port=port,
        join=join,
        log_file=log_file,
        at_login=at_login,
        paths=tuple(used_paths(settings, log_file)),
    )


def ignored_variables(environ: Mapping[str, str]) -> list[str]:
    """List this shell's variables that would be settings, but that the service will not see."""
    names = {option.variable for option in OPTIONS} | {"OMLXD_CONFIG"}
    return sorted(name for name in environ if name in names and environ[name])


def _absolute(name: str, text: str) -> str:
    """Make paths absolute: a service starts in /."""
    option = BY_NAME.get(name)
    is_path = name == "config" or (option is not None and option.is_path)
    if text and (is_path or (name == "model" and is_local(text))):
        return str(Path(text).expanduser().absolute())
    return text


def _words(name: str, text: str) -> Sequence[str]:
    option = BY_NAME.get(name)
    flag = option.flag if option is not None else "--" + name
    flag = "--listen" if name == "join_listen" else flag
    return [flag] if option is not None and option.is_switch else [flag, text]


def _import_path(python: str) -> dict[str, str]:
    """Return PYTHONPATH for a checkout that is not installed, by trying with a service's environment."""
    root = str(Path(omlxd.__file__).absolute().parents[1])
    for extra in ({}, {"PYTHONPATH": root}):
        bare = {"PATH": "/usr/bin:/bin", "HOME": str(Path.home()), **extra}
        tried = subprocess.run([python, "-m", "omlxd", "--version"], cwd="/", env=bare, capture_output=True)
        if tried.returncode == 0:
            return extra
    last = tried.stderr.decode(errors="replace").strip().splitlines()[-1:]
    raise ConfigError(f"{python} can't start omlxd outside of this shell: {''.join(last)}")
