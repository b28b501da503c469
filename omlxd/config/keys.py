"""API keys with names, in one private file under the base path.

A key is 256 random bits, so SHA-256 is enough. Keys that owners choose (--api-key) are never stored. Writers
replace the file under a lock; a running daemon reads the new one at its next request.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import secrets
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from ..chat import PriorityWord
from ..common.files import read_with_facts, write_atomic
from ..errors import ConfigError

FILE_NAME = "keys.json"
NONE_LEFT = (
    "This daemon asks for an API key, and none is left: make one with `omlxd key add NAME`, which counts at "
    "once, or have no key asked for with `omlxd key off`."
)
"""Message of status 401, which `omlxd status` and others pass on."""
KEY_PATTERN = re.compile(r"omlxd-[A-Za-z0-9_-]{43}")
"""Matches a key of `add_key`, for logs that hide it."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.@-]{0,63}")


class Key(msgspec.Struct, frozen=True, omit_defaults=True):
    """A key. name: unique; digest: SHA-256 of the key, in hex; created: ISO 8601, UTC.

    priority  of its requests, which may say a higher number and no lower one
    """

    name: str
    digest: str
    created: str
    priority: PriorityWord = "interactive"


class _File(msgspec.Struct):
    """The file's content. `open`: the owner wants no key to be asked for, until the next one is made."""

    keys: list[Key] = []
    open: bool = False


def digest_of(key: bytes) -> str:
    return hashlib.sha256(key).hexdigest()


def keys_path(base_path: Path) -> Path:
    return base_path / FILE_NAME


def read_keys(path: Path) -> tuple[Key, ...]:
    """Return the keys in `path`, () without a file. Raises ConfigError if others could change it."""
    return tuple(_read(path).keys)


def is_open(path: Path) -> bool:
    """Return whether `open_to_all` was the last word. Raises ConfigError as `read_keys`."""
    return _read(path).open


def _read(path: Path) -> _File:
    try:
        text, facts = read_with_facts(path)
    except FileNotFoundError:
        return _File()
    except OSError as error:
        raise ConfigError(f"{path} can't be read: {error.strerror}.") from error
    if facts.st_mode & 0o077:
        raise ConfigError(f"{path} can be read or written by others; run `chmod 600 {path}`.")
    if facts.st_uid not in (os.geteuid(), 0):
        raise ConfigError(f"{path} belongs to another user.")
    try:
        return msgspec.json.decode(text, type=_File)
    except msgspec.DecodeError as error:
        raise ConfigError(
            f"{path} is no file of keys ({error}); remove it and make keys again with `omlxd key add NAME`."
        ) from error


def add_key(path: Path, name: str, priority: PriorityWord = "interactive") -> str:
    """Make a key called `name`, store its digest, return the key. Raises ConfigError.

    priority  of its requests, which may say a higher number and no lower one
    """
    if not _NAME.fullmatch(name):
        raise ConfigError("A key's name is up to 64 letters, digits and . _ @ -.")
    secret = "omlxd-" + secrets.token_urlsafe(32)
    with _locked(path):
        keys = read_keys(path)
        if any(key.name == name for key in keys):
            raise ConfigError(f"there is a key {name} already; revoke it first, or choose another name.")
        created = datetime.now(UTC).isoformat(timespec="seconds")
        _write(path, [*keys, Key(name, digest_of(secret.encode()), created, priority)])
    return secret


def revoke_key(path: Path, name: str) -> int:
    """Remove the key called `name`; return how many are left. Raises ConfigError."""
    with _locked(path):
        keys = read_keys(path)
        left = [key for key in keys if key.name != name]
        if len(left) == len(keys):
            names = ", ".join(key.name for key in keys) or "none"
            raise ConfigError(f"there is no key {name}; the keys are: {names}.")
        _write(path, left)
    return len(left)


def open_to_all(path: Path) -> int:
    """Remove all keys, and have daemons that only this machine reaches ask for none; return how many keys
    there were. Raises ConfigError."""
    with _locked(path):
        keys = read_keys(path)
        _write(path, [], opened=True)
    return len(keys)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Lock the folder: two `omlxd key` at once must not lose a key, nor bring a revoked one back."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise ConfigError(f"{path.parent} can't be used: {error.strerror}.") from error
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
        os.fsync(folder)
    finally:
        os.close(folder)


def _write(path: Path, keys: Sequence[Key], *, opened: bool = False) -> None:
    file = {"keys": keys, **({"open": True} if opened else {})}
    data = msgspec.json.format(msgspec.json.encode(file), indent=2) + b"\n"
    try:
        write_atomic(path, data, sync=True)
    except OSError as error:
        raise ConfigError(f"{path} can't be written: {error.strerror}.") from error
