"""API keys with names, in one private file under the base path.

A key is 256 random bits that we make, so its SHA-256 is as hard to turn back as the key is to
guess. A slow hash (scrypt) protects words that people choose, and would cost every request tens of
milliseconds; here it would protect nothing. Keys that owners choose (--api-key) are never stored.

The file is replaced whole, under a lock on its folder; a running daemon sees the new one at its
next request.
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

from ..errors import ConfigError
from .small_file import read_with_facts

FILE_NAME = "keys.json"
KEY_PATTERN = re.compile(r"omlxd-[A-Za-z0-9_-]{43}")
"""A whole key, as `add_key` makes it: known by its form wherever it must not appear."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.@-]{0,63}")


class Key(msgspec.Struct, frozen=True):
    """name: unique; digest: SHA-256 of the key, in hex; created: ISO 8601, UTC."""

    name: str
    digest: str
    created: str


class _File(msgspec.Struct):
    keys: list[Key] = []


def digest_of(key: bytes) -> str:
    return hashlib.sha256(key).hexdigest()


def keys_path(base_path: Path) -> Path:
    return base_path / FILE_NAME


def read_keys(path: Path) -> tuple[Key, ...]:
    """The keys in `path`; none if there is no such file. Raises ConfigError for one that can't be trusted."""
    try:
        text, facts = read_with_facts(path)
    except FileNotFoundError:
        return ()
    except OSError as error:
        raise ConfigError(f"{path} can't be read: {error.strerror}.", param=str(path)) from error
    if facts.st_mode & 0o077:
        raise ConfigError(
            f"{path} can be read or written by others; run `chmod 600 {path}`.", param=str(path)
        )
    if facts.st_uid not in (os.geteuid(), 0):
        raise ConfigError(f"{path} belongs to another user.", param=str(path))
    try:
        return tuple(msgspec.json.decode(text, type=_File).keys)
    except msgspec.DecodeError as error:
        raise ConfigError(
            f"{path} is no file of keys ({error}); remove it and make keys again with `omlxd key add NAME`.",
            param=str(path),
        ) from error


def add_key(path: Path, name: str) -> str:
    """Make a key called `name`, keep its digest, return it: it can't be had again. Raises ConfigError."""
    if not _NAME.fullmatch(name):
        raise ConfigError("A key's name is up to 64 letters, digits and . _ @ -.", param="NAME")
    key = "omlxd-" + secrets.token_urlsafe(32)
    with _locked(path):
        keys = read_keys(path)
        if any(known.name == name for known in keys):
            raise ConfigError(
                f"there is a key {name} already; revoke it first, or choose another name.", param="NAME"
            )
        created = datetime.now(UTC).isoformat(timespec="seconds")
        _write(path, [*keys, Key(name, digest_of(key.encode()), created)])
    return key


def revoke_key(path: Path, name: str) -> int:
    """Forget the key called `name`; returns how many are left. Raises ConfigError."""
    with _locked(path):
        keys = read_keys(path)
        left = [key for key in keys if key.name != name]
        if len(left) == len(keys):
            names = ", ".join(key.name for key in keys) or "none"
            raise ConfigError(f"there is no key {name}; the keys are: {names}.", param="NAME")
        _write(path, left)
    return len(left)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Two `omlxd key` at once must not lose a key, nor bring a revoked one back."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise ConfigError(
            f"{path.parent} can't be used: {error.strerror}.", param=str(path.parent)
        ) from error
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
        os.fsync(folder)
    finally:
        os.close(folder)


def _write(path: Path, keys: Sequence[Key]) -> None:
    new = path.with_name(f".{path.name}.new")
    try:
        new.unlink(missing_ok=True)
        fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd, "wb") as file:
            file.write(msgspec.json.format(msgspec.json.encode(_File(list(keys))), indent=2) + b"\n")
            file.flush()
            os.fsync(file.fileno())
        new.replace(path)
    except OSError as error:
        raise ConfigError(f"{path} can't be written: {error.strerror}.", param=str(path)) from error
