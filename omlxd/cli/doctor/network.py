"""Checks the port, the daemon behind it, and the agents that could speak to it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import socket
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path

import psutil
from msgspec.structs import replace

from ...common import ports
from ...config import Settings, is_loopback
from ...config.address import recorded_address
from ...errors import ConfigError
from ...kv.files.paths import LOCK_NAME
from ...kv.peer.identity import Identity
from ..daemon.client import DaemonError, daemon_of, join_here
from .finding import Finding, bad, ok, warn

_SECONDS = 3.0
MEND_PEER = (
    "There, `omlxd serve --peer-listen` runs with the same model and settings, and `omlxd peer code` and "
    "`omlxd peer pair` here pair the two."
)
SHELLS = "by this shell's settings; the daemon that answers"


def check_port(settings: Settings) -> Finding:
    """Check the port: free, or held by omlxd or another program."""
    host, port = settings.host, settings.port
    if not port:
        return ok("port", "0: any free one is taken")
    if _is_free(host, port):
        does = join_here(settings)
        return ok("port", f"{port} on {host} is free; no daemon listens there{f', but {does}' * bool(does)}")
    daemon = daemon_of(settings)
    try:
        version = daemon.version(_SECONDS)
    except DaemonError:
        who = _holder(port)
        return bad(
            "port",
            f"{port} on {host} is held by {who or 'another program'}",
            f"Stop that program, or choose another port: `omlxd serve --port {port + 1}`.",
        )
    try:
        status = daemon.status(_SECONDS)
    except DaemonError as error:
        facts = f"omlxd {version} listens on {daemon.url}, and its status can't be read"
        return warn("port", facts, error.message)
    who = f"omlxd {status.version} (process {status.pid})"
    # The daemon looks when it writes; this machine's owner asks now.
    if (cold := status.cold) and (cold.folder_away or not (Path(cold.dir) / LOCK_NAME).exists()):
        facts = f"{who} has no SSD cache: its folder {cold.dir} is away"
        return bad("cache folder", facts, "Put the folder back, or restart omlxd.")
    return ok("port", f"{who} listens on {daemon.url}")


def with_daemons_cache(settings: Settings) -> tuple[Settings, dict[str, str]]:
    """Return `settings` with the SSD cache of the daemon at their address, if that answers and is on this
    machine.

    Without one if the daemon has none. Also returns the checks of folders that may be none of the daemon's,
    and what to say there.
    """
    try:
        status = daemon_of(settings).status(_SECONDS)
    except (ConfigError, DaemonError):
        return settings, {}
    recorded, cold = recorded_address(settings.base_path), status.cold
    own = recorded is not None and recorded[0] == status.pid
    if cold is None:
        why = f"{SHELLS} does not tell its own"
        return replace(settings, cold_cache_bytes=0), {} if own else {"base folder": why}
    why, folder = f"{SHELLS} has its cache in {cold.dir}", Path(cold.dir)
    if not (folder / LOCK_NAME).exists():
        checks = ("cache folder", "space", "written", "disk", *(() if own else ("base folder",)))
        return settings, dict.fromkeys(checks, f"{why}, which is not here")
    kept = replace(settings, paged_ssd_cache_dir=folder, cold_cache_bytes=cold.cap, no_cache=False)
    return kept, {} if own or folder == settings.paged_ssd_cache_dir else {"base folder": why}


def _is_free(host: str, port: int) -> bool:
    try:
        family, *_, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        ports.bind(family, place).close()
    except OSError:
        return False
    return True


def _holder(port: int) -> str:
    """Return `name (process N)` where the system tells this user: macOS only of the user's own processes."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            sockets = process.net_connections("tcp")
            if any(one.status == psutil.CONN_LISTEN and one.laddr.port == port for one in sockets):
                return f"{process.name()} (process {process.pid})"
    return ""


def check_exposure(settings: Settings) -> Finding:
    if is_loopback(settings.host):
        return ok("address", f"{settings.host}: only this machine reaches the daemon")
    return warn(
        "address",
        f"{settings.host}: other machines reach the daemon, over plain HTTP with a key",
        "Put a TLS proxy before it, or leave --host at 127.0.0.1.",
    )


def check_peer(settings: Settings) -> list[Finding]:
    """Check --peer: paired, and nothing that the daemon says against it."""
    found = set[str]()
    with contextlib.suppress(ConfigError, DaemonError):
        found = {model.peer for model in daemon_of(settings).status(_SECONDS).models}
    if settings.peer:
        found.add(Identity(settings.base_path).why_unpaired(settings.peer))
    if troubles := sorted(found - {""}):
        return [warn("peer", f"nothing comes from --peer: {why}", MEND_PEER) for why in troubles]
    return [ok("peer", f"{settings.peer} is asked for KV that this cache lacks")] if settings.peer else []


# --------------------------------------------------------------------------- clients


def check_clients(
    settings: Settings, environ: Mapping[str, str] | None = None, home: Path | None = None
) -> list[Finding]:
    """Check each agent: installed, and pointed at this daemon by its own settings."""
    environ, home = os.environ if environ is None else environ, home or Path.home()
    result: list[Finding] = []
    for name, asks in (("claude", _claude), ("codex", _codex), ("opencode", _opencode)):
        path = shutil.which(name, path=environ.get("PATH"))
        if path is None:
            result.append(ok(name, "not on the PATH"))
            continue
        url = asks(environ, home)
        if url and _is_ours(url, settings):
            result.append(_both_keys(name, path, url, environ))
        else:
            where = f"set to {url}" if url else "not set to any daemon"
            result.append(ok(name, f"{path}, {where}; `omlxd launch {name}` points it here"))
    return result


def _both_keys(name: str, path: str, url: str, environ: Mapping[str, str]) -> Finding:
    if name == "claude" and environ.get("ANTHROPIC_API_KEY"):
        return warn(
            name,
            f"{path}, set to {url}, with ANTHROPIC_API_KEY set too",
            "Unset ANTHROPIC_API_KEY: Claude Code would send it here; ANTHROPIC_AUTH_TOKEN is enough.",
        )
    return ok(name, f"{path}, set to this daemon ({url})")


def _is_ours(url: str, settings: Settings) -> bool:
    result = re.match(r"https?://(\[[^\]]+\]|[^/:]+)(?::(\d+))?", url)
    if not result:
        return False
    host = result[1].strip("[]")
    local = is_loopback(host) or host in (settings.host, socket.gethostname())
    return local and int(result[2] or 80) == settings.port


def _claude(environ: Mapping[str, str], home: Path) -> str:
    settings = _read(home / ".claude" / "settings.json", json.loads)
    return environ.get("ANTHROPIC_BASE_URL") or _text_at(settings, "env", "ANTHROPIC_BASE_URL")


def _codex(environ: Mapping[str, str], home: Path) -> str:
    config = _read(Path(environ.get("CODEX_HOME") or home / ".codex") / "config.toml", tomllib.loads)
    return _text_at(config, "model_providers", _text_at(config, "model_provider"), "base_url")


def _opencode(environ: Mapping[str, str], home: Path) -> str:
    folder = Path(environ.get("XDG_CONFIG_HOME") or home / ".config") / "opencode"
    config = _read(folder / "opencode.json", json.loads)
    chosen = _text_at(config, "model").partition("/")[0]
    return _text_at(config, "provider", chosen, "options", "baseURL")


def _read(path: Path, parse: Callable[[str], object]) -> object:
    """Parse a file; None if it can't be read."""
    try:
        return parse(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def _text_at(value: object, *keys: str) -> str:
    """Return the text in tables within tables; "" where one is missing."""
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    return str(value or "")
