"""Message threads: bounded, in memory, read by the next request that continues one."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from ....api.anthropic.threads import PREVIOUS, REPLAY, ThreadRequest, already_continued, with_answer
from ....api.fields.body import ParsedRequest
from ....common.bounded_map import BoundedMap
from ....errors import ThreadError

MAX_ANSWERS = 4000
"""Answers at most, continued ones included, of which nothing else is kept."""
MAX_BYTES = 64 * 1024 * 1024
MAX_THREAD_BYTES = 8 * 1024 * 1024
"""Bytes of one thread at most: the event loop reads it with each request that continues it, 5 ms a MiB."""


class ThreadStore:
    """(owner, id of an answer) → the conversation up to it, as JSON; the least recently used go first.

    An answer is continued once: then its conversation is kept under the next answer, and b"" under its own.
    Thread-safe, as a thread parses large bodies.
    """

    def __init__(self, max_answers: int = MAX_ANSWERS, max_bytes: int = MAX_BYTES):
        self._kept = BoundedMap[tuple[str, str], bytes](max_bytes, len, max_items=max_answers)
        self._continued_now: set[tuple[str, str]] = set()
        self._lock = threading.Lock()

    def find_thread(self, owner: str, id: str) -> bytes | None:
        """Return the conversation up to an answer; b"": it has been continued. None: never kept, or gone."""
        with self._lock:
            return self._kept.get((owner, id))

    @contextlib.contextmanager
    def continuing(self, parsed: ParsedRequest) -> Iterator[None]:
        """Let no other request continue the same answer while `parsed` is answered. Raises ThreadError."""
        if not isinstance(parsed, ThreadRequest) or not parsed.previous:
            yield
            return
        key = (parsed.owner, parsed.previous)
        with self._lock:
            if key in self._continued_now:
                why = f"another request is continuing this answer; continue from that one's, or {REPLAY}"
                raise ThreadError(PREVIOUS, why, "thread_continue_in_flight")
            if self._kept.get(key) == b"":
                raise already_continued()  # Since `parsed` was read.
            self._continued_now.add(key)
        try:
            yield
        finally:
            with self._lock:
                self._continued_now.remove(key)

    def keep(self, request: ThreadRequest, id: str, content: bytes) -> None:
        """Keep the conversation of `request` with its answer, blocks as JSON, unless it is too large."""
        conversation = with_answer(request.conversation, content)
        with self._lock:
            if request.previous:
                self._kept.put((request.owner, request.previous), b"")
            if len(conversation) <= MAX_THREAD_BYTES:
                self._kept.put((request.owner, id), conversation)
