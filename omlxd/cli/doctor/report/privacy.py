"""Takes what is private out of a text: paths, names of user and host, keys."""

from __future__ import annotations

import contextlib
import getpass
import os
import platform
import pwd
import re
import socket
from collections.abc import Iterable, Mapping
from pathlib import Path

_QUOTED_PATH = re.compile(r"(?P<quote>['\"])(?:~|/[^'\"\n]*?/)[^'\"\n]*(?P=quote)")
_PATH = re.compile(r"(?<![\w.~<>/…])(?:~|/[\w.@+-]+)(?:/[^\s'\",;()]*)+")
_UUID = re.compile(r"\b[0-9A-Fa-f]{8}(?:-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}\b")
_MAIL = re.compile(r"[\w.+-]+@[\w-]+(?:\.[\w-]+)+")
_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASS|AUTH|CREDENTIAL", re.I)
LEAST_SECRET = 6
"""Letters of a value that is taken for a key; shorter ones are words and switches."""


class Privacy:
    """`clean` is all. What to look for is read once."""

    def __init__(self, environ: Mapping[str, str] | None = None, more_secrets: Iterable[str] = ()):
        environ = os.environ if environ is None else environ
        secrets = [value for name, value in environ.items() if _SECRET.search(name)]
        self._secrets = [s for s in (*secrets, *more_secrets) if len(s) >= LEAST_SECRET]
        homes = {str(Path.home()), environ.get("HOME", ""), os.path.realpath(Path.home())}
        self._homes = sorted((h for h in homes if len(h) > 1), key=len, reverse=True)
        self._users = [*_users(environ)]
        self._hosts = [*_hosts()]

    def clean(self, text: str) -> str:
        for secret in self._secrets:
            text = text.replace(secret, "<key>")
        for home in self._homes:
            text = re.sub(rf"{re.escape(home)}(?![\w.-])", "~", text)
        text = _QUOTED_PATH.sub("<path>", text)
        text = _PATH.sub(lambda match: "~/…" if match[0].startswith("~") else "<path>", text)
        text = _MAIL.sub("<mail>", _UUID.sub("<id>", text))
        for names, word in ((self._hosts, "<host>"), (self._users, "<user>")):
            for name in names:
                text = re.sub(rf"(?<!\w){re.escape(name)}(?!\w)", word, text)
        return text


def _users(environ: Mapping[str, str]) -> Iterable[str]:
    names = {environ.get(name, "") for name in ("USER", "LOGNAME", "SUDO_USER")}
    with contextlib.suppress(OSError, KeyError):
        names.add(getpass.getuser())
    with contextlib.suppress(KeyError):
        entry = pwd.getpwuid(os.getuid())
        full = entry.pw_gecos.split(",")[0].strip()
        names |= {entry.pw_name, *([full, *full.split()] if " " in full else [])}
    return sorted((n for n in names if len(n) > 2), key=len, reverse=True)


def _hosts() -> Iterable[str]:
    names = {socket.gethostname(), platform.node()}
    names |= {name.split(".")[0] for name in names}
    return sorted((n for n in names if len(n) > 2 and n != "localhost"), key=len, reverse=True)
