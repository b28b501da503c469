"""Threads that take work by turns, one client after the other."""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable

log = logging.getLogger(__name__)


class Lane:
    """`threads` threads. Work of one `client` is done in order; who has asked for much waits for others."""

    def __init__(self, name: str, threads: int):
        self._waiting: OrderedDict[Hashable, deque[Callable[[], None]]] = OrderedDict()
        self._changed = threading.Condition()
        self._open = True
        for number in range(threads):
            threading.Thread(target=self._work, name=f"{name}_{number}", daemon=True).start()

    def put_work(self, client: Hashable, work: Callable[[], None]) -> None:
        with self._changed:
            self._waiting.setdefault(client, deque()).append(work)
            self._changed.notify()

    def close(self) -> None:
        """Begin nothing more."""
        with self._changed:
            self._open = False
            self._changed.notify_all()

    def _work(self) -> None:
        while (work := self._next()) is not None:
            try:
                work()
            except BaseException:
                log.exception("a request failed")

    def _next(self) -> Callable[[], None] | None:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or not self._open)
            if not self._open:
                return None
            client, works = self._waiting.popitem(last=False)
            work = works.popleft()
            if works:
                self._waiting[client] = works  # Behind all others.
            return work
