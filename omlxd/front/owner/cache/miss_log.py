"""The file of `--log-cache-misses`: why each request of the last week missed, in hashes and counts.

A line is a JSON object, written once the request has ended and been explained. No text of a prompt or an
answer is in it: blocks stand there by their hashes, and a session by the digest of its name. Any thread may
read and append; each call opens the file anew.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from ....cli.daemon.owner_api import RequestLine
from ....common.files import write_atomic
from ....wire.explanation import Explanation

log = logging.getLogger(__name__)

FILE_NAME = "cache-misses.jsonl"
KEPT_S = 7 * 86400.0
MOST_BYTES = 8 << 20
"""Bytes of the file at most: some 12,000 requests. The older half goes when it is full."""
TIDIED_EVERY_S = 3600.0
DIGEST_CHARS = 16
_FLAGS = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
"""Flags of opening: no link is followed, and a FIFO is not waited for."""


class LoggedRequest(msgspec.Struct, omit_defaults=True):
    """One line of the file. `explanation` None: the request did not get as far as its prompt, or its model
    was gone.

    recomputed  tokens that lay on SSD and were computed
    """

    request: RequestLine
    recomputed: int = 0
    explanation: Explanation | None = None


_decoder = msgspec.json.Decoder(LoggedRequest)


class MissLog:
    """The file of misses. `path`: the file, which need not exist. `clock`: seconds since 1970."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.time, most_bytes: int = MOST_BYTES):
        self._path = path
        self._clock = clock
        self._most_bytes = most_bytes
        self._tidied = 0.0
        self._fails = False

    def append(self, logged: LoggedRequest) -> None:
        """Write a line without its texts. Raises nothing: a file that fails is named in the log, once."""
        line = msgspec.json.encode(without_texts(logged)) + b"\n"
        try:
            self._append(line)
        except OSError as error:
            if not self._fails:
                log.warning("%s can't be written, so no misses are logged: %s", self._path, error)
            self._fails = True
        else:
            self._fails = False

    def _append(self, line: bytes) -> None:
        fd = os.open(self._path, _FLAGS | os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            size = _regular(fd, self._path)
            os.fchmod(fd, 0o600)
            is_torn = size > 0 and os.pread(fd, 1, size - 1) != b"\n"
            os.write(fd, b"\n" + line if is_torn else line)
        finally:
            os.close(fd)
        if size + len(line) > self._most_bytes or self._clock() - self._tidied > TIDIED_EVERY_S:
            self._tidy()

    def _tidy(self) -> None:
        """Rewrite the file with the lines of the last week, at most the newer half of its size."""
        self._tidied = self._clock()
        lines = [msgspec.json.encode(each) + b"\n" for each in self.newest_first()]
        kept, left = [], self._most_bytes
        if sum(map(len, lines)) > left:
            left //= 2
        for line in lines:
            left -= len(line)
            if left < 0:
                break
            kept.append(line)
        write_atomic(self._path, b"".join(reversed(kept)))

    def newest_first(self) -> Iterator[LoggedRequest]:
        """Yield the last week's requests, newest first, without unreadable lines. Raises OSError."""
        since = self._clock() - KEPT_S
        for line in reversed(self._lines()):
            try:
                logged = _decoder.decode(line)
            except (msgspec.DecodeError, UnicodeDecodeError):
                continue
            if logged.request.began >= since:
                yield logged

    def _lines(self) -> list[bytes]:
        try:
            with open(os.open(self._path, _FLAGS), "rb") as file:
                size = _regular(file.fileno(), self._path)
                file.seek(max(0, size - 2 * self._most_bytes))
                return file.read(2 * self._most_bytes).split(b"\n")
        except FileNotFoundError:
            return []

    def find(self, id: str = "", session: str = "") -> LoggedRequest | None:
        """Find the request of that id, else the newest of that session, else the newest. Raises OSError."""
        named = digest_of(session) if session else ""
        for logged in self.newest_first():
            line = logged.request
            if line.id == id if id else not session or line.session in (named, session):
                return logged
        return None


def _regular(fd: int, path: Path) -> int:
    """Return the bytes of the file. Raises OSError unless it is a regular one."""
    facts = os.fstat(fd)
    if not stat.S_ISREG(facts.st_mode):
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return facts.st_size


def digest_of(session: str) -> str:
    """Return a session's name in the file; "" for none."""
    return hashlib.sha256(session.encode()).hexdigest()[:DIGEST_CHARS] if session else ""


def without_texts(logged: LoggedRequest) -> LoggedRequest:
    line, explanation = logged.request, logged.explanation
    if explanation is not None:
        explanation = msgspec.structs.replace(explanation, before="", prompt="", stored="", image="")
    line = msgspec.structs.replace(line, opening="", session=digest_of(line.session), logged=True)
    return msgspec.structs.replace(logged, request=line, explanation=explanation)
