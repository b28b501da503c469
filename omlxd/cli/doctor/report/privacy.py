"""Takes what is private out of a text: paths, names of user, host and models, addresses, keys."""

from __future__ import annotations

import contextlib
import getpass
import ipaddress
import os
import platform
import pwd
import re
import socket
from collections.abc import Iterable, Mapping

_CUT = re.compile(r"(?<![\w.<>])['\"(\[]*(?:~/|/(?!Volumes\b(?![/ ]\w))\S).*", re.S)
"""A path, and all behind it, as nobody knows where one with spaces ends. "/Volumes" alone is a line's own."""
_CUT_ERROR = re.compile(r"(?:(?<!\w)['\"`][^'\"`]*/|\S*/).*", re.S)
"""Anything with a slash: a path, or a model's name."""
_UUID = re.compile(r"\b(?:[\dA-F]{8}(?:-[\dA-F]{4}){3}-[\dA-F]{12}|[\dA-F]{2}(?::[\dA-F]{2}){5})\b", re.I)
_MAIL = re.compile(r"[\w.+-]+@[\w-]+(?:\.[\w-]+)+")
_NUMBERS = re.compile(
    r"(?<![\w.:])(?:\d{1,3}(?:\.\d{1,3}){3}(?!\.?\w)|[\dA-Fa-f]*:[\dA-Fa-f:]*:[\dA-Fa-f:.]*)"
)
_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASS|AUTH|CREDENTIAL|(?:^|_)PAT(?:_|$)", re.I)
_TOKEN = re.compile(r"(?<!\w)(?:gh[a-z]_|github_pat_|hf_|sk-|xox[a-z]-)[\w-]{6,}")
LEAST_SECRET = 4
"""Letters of a value that is taken for a key; shorter ones are words and switches."""
MOST_ERROR = 300


class Privacy:
    """`clean` is for lines of ours, `error` for what others wrote. What to look for is read once."""

    def __init__(
        self,
        environ: Mapping[str, str] | None = None,
        more_secrets: Iterable[str] = (),
        models: Iterable[str] = (),
    ):
        environ = os.environ if environ is None else environ
        secrets = [v for name, v in environ.items() if _SECRET.search(name) or _TOKEN.match(v)]
        self._secrets = [s for s in (*secrets, *more_secrets) if len(s) >= LEAST_SECRET]
        parts = {part for model in models for part in (model, *model.split("/"))}
        self._names = [
            (_any(parts), "<model>"),
            (_any(_hosts()), "<host>"),
            (_any(_users(environ)), "<user>"),
        ]

    def clean(self, text: str) -> str:
        for secret in sorted(self._secrets, key=len, reverse=True):
            text = text.replace(secret, "<key>")
        text = _CUT.sub("<path>", _TOKEN.sub("<key>", text))
        text = _NUMBERS.sub(_address, _MAIL.sub("<mail>", _UUID.sub("<id>", text)))
        for names, word in self._names:
            text = names.sub(word, text)
        return text

    def error(self, text: str) -> str:
        """Clean what MLX, Python or a tool wrote: nobody knows what is in it."""
        return self.clean(_CUT_ERROR.sub("<path>", " ".join(text.split())))[:MOST_ERROR]


def _any(names: Iterable[str]) -> re.Pattern[str]:
    """Return a pattern of each of `names` that has three letters or more, in any case."""
    long = sorted((name for name in names if len(name) > 2), key=len, reverse=True)
    return re.compile(rf"(?<![^\W_])(?:{'|'.join(map(re.escape, long)) or '(?!)'})(?![^\W_])", re.I)


def _address(match: re.Match[str]) -> str:
    """Hide an IP address, but those that every machine has."""
    with contextlib.suppress(ValueError):
        address = ipaddress.ip_address(match[0].rstrip(":."))
        return match[0] if address.is_loopback or address.is_unspecified else "<address>"
    return match[0]


def _users(environ: Mapping[str, str]) -> set[str]:
    names = {environ.get(name, "") for name in ("USER", "LOGNAME", "SUDO_USER")}
    with contextlib.suppress(OSError, KeyError):
        names.add(getpass.getuser())
    with contextlib.suppress(KeyError):
        entry = pwd.getpwuid(os.getuid())
        full = entry.pw_gecos.split(",")[0].strip()
        names |= {entry.pw_name, full, *full.split()}
    return names


def _hosts() -> set[str]:
    names = {socket.gethostname(), platform.node()}
    return (names | {name.split(".")[0] for name in names}) - {"localhost"}
