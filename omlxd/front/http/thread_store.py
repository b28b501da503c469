"""Message threads: bounded, in memory, read by the next request that continues one."""

from __future__ import annotations

import threading

from ...api.anthropic.threads import ThreadRequest, with_answer
from ...common.bounded_map import BoundedMap

MAX_ANSWERS = 4000
"""Those that have been continued, of which nothing else is kept, count too."""
MAX_BYTES = 64 * 1024 * 1024
MAX_THREAD_BYTES = 8 * 1024 * 1024
"""Of one thread: the event loop reads it with each request that continues it, 5 ms a MiB."""


class ThreadStore:
    """(owner, id of an answer) → the conversation up to it, as JSON; the least recently used go first.

    An answer is continued once: then its conversation is kept under the next answer, and b"" under its own.
    Thread-safe, as a thread parses large bodies.
    """

    def __init__(self, max_answers: int = MAX_ANSWERS, max_bytes: int = MAX_BYTES):
        self._kept = BoundedMap[tuple[str, str], bytes](max_bytes, len, max_items=max_answers)
        self._lock = threading.Lock()

    def find_thread(self, owner: str, id: str) -> bytes | None:
        """b"": it has been continued. None: never kept, or gone."""
        with self._lock:
            return self._kept.get((owner, id))

    def keep(self, request: ThreadRequest, id: str, content: bytes) -> None:
        """Keep the conversation of `request` with its answer, blocks as JSON, unless it is too large."""
        conversation = with_answer(request.conversation, content)
        with self._lock:
            if request.previous:
                self._kept.put((request.owner, request.previous), b"")
            if len(conversation) <= MAX_THREAD_BYTES:
                self._kept.put((request.owner, id), conversation)
