"""The thread that turns tokens into events, for all requests: the engine thread never detokenises.

The events of one step leave in one frame.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

from ..chat import Event, Failed

log = logging.getLogger(__name__)

Work = Callable[[], list[tuple[int, Event]]]


class OutputThread:
    """Runs work in order and sends what it gives, as much as is there in one frame."""

    def __init__(self, send: Callable[[tuple[tuple[int, Event], ...]], None]):
        self._send = send
        self._queue: queue.SimpleQueue[Work | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="output", daemon=True)
        self._thread.start()

    def put(self, work: Work) -> None:
        self._queue.put(work)

    def close(self, timeout: float) -> None:
        """Finish what is queued."""
        self._queue.put(None)
        self._thread.join(timeout)

    def _run(self) -> None:
        closing = False
        while not closing:
            events: list[tuple[int, Event]] = []
            work = self._queue.get()
            while True:
                if work is None:
                    closing = True
                    break
                try:
                    events += work()
                except Exception:
                    log.exception("output failed")
                try:
                    work = self._queue.get_nowait()
                except queue.Empty:
                    break
            if events:
                self._send_all(events)

    def _send_all(self, events: list[tuple[int, Event]]) -> None:
        """In one frame, or else each event alone: this thread serves everybody, and must not end."""
        try:
            self._send(tuple(events))
            return
        except Exception:
            log.exception("a frame of events can't be sent")
        for id, event in events:
            try:
                self._send(((id, event),))
            except Exception as error:
                failed = Failed(code="internal", message=f"the answer can't be sent: {type(error).__name__}")
                self._send(((id, failed),))
