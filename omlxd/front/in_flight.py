"""What an engine has been asked and has not answered yet: requests, and questions that are none."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterable
from typing import Any

from .. import wire
from ..chat import Failed, Finished
from ..errors import InvalidRequest, OmlxdError, Overloaded
from .engine_stream import EngineStream

WAITING_PER_SLOT = 4
WAITING_FLOOR = 64
OVERLOAD_RETRY_S = 5


class Waiting:
    """A request of any kind: its frame until it is sent, and what becomes of its answer."""

    __slots__ = ("answer", "frame")

    def __init__(self, frame: bytes, answer: EngineStream | asyncio.Future[Any]):
        self.frame = frame
        self.answer = answer


class InFlight:
    """`len` counts the requests. A question keeps no model loaded and waits for none, so it is no request.

    slots     requests that decode at once; it bounds how many more may wait
    requests  by id, in the order in which they came
    on_end()  called when a request is in flight no more
    """

    def __init__(self, slots: int, on_end: Callable[[], None]):
        self._limit = slots + max(WAITING_FLOOR, WAITING_PER_SLOT * slots)
        self.requests: dict[int, Waiting] = {}
        self._questions: dict[int, asyncio.Future[wire.Stats | None]] = {}
        self._ids = itertools.count(1)
        self._on_end = on_end

    def __len__(self) -> int:
        return len(self.requests)

    def new_id(self) -> int:
        """For a request or a question."""
        return next(self._ids)

    def check_room(self) -> None:
        """Raises Overloaded if no more may wait."""
        if len(self.requests) >= self._limit:
            raise Overloaded(
                f"{len(self.requests)} requests are running or waiting already; retry in a moment.",
                retry_after=OVERLOAD_RETRY_S,
            )

    def add(self, id: int, message: Any, answer: EngineStream | asyncio.Future[Any]) -> Waiting:
        """Take a request in. Raises InvalidRequest for a message that no frame can hold."""
        try:
            waiting = Waiting(wire.encode(message), answer)
        except (ValueError, OverflowError, RecursionError, TypeError) as error:
            # JSON can say what a frame can't: integers of any size, lone surrogates, deep nesting.
            raise InvalidRequest(f"The request holds a value that can't be processed: {error}.") from error
        self.requests[id] = waiting
        return waiting

    async def question(self, id: int, send: Callable[[], None], timeout_s: float) -> wire.Stats | None:
        """`send` a question; its answer, or None if none comes in time."""
        answer: asyncio.Future[wire.Stats | None] = asyncio.get_running_loop().create_future()
        self._questions[id] = answer
        try:
            send()
            return await asyncio.wait_for(answer, timeout_s)
        except TimeoutError:
            return None
        finally:
            del self._questions[id]

    def forget(self, id: int) -> bool:
        """Nobody wants the answer any more. True: the engine was sent the request, and is at work on it."""
        waiting = self.requests.get(id)
        if waiting is None:
            return False
        self._remove(id)
        return not waiting.frame

    def answer(self, id: int, result: Any) -> bool:
        """Hand `result` to whoever waits for `id`. False: no request does, it may have been cancelled."""
        if (question := self._questions.get(id)) is not None:
            if not question.done():
                question.set_result(result if isinstance(result, wire.Stats) else None)
            return False
        waiting = self.requests.get(id)
        if waiting is None:
            return False
        if isinstance(waiting.answer, EngineStream):
            waiting.answer.events.put_nowait(result)
            if not isinstance(result, (Finished, Failed)):
                return True
        elif not waiting.answer.done():
            if isinstance(result, Failed):
                waiting.answer.set_exception(OmlxdError.from_event(result))
            else:
                waiting.answer.set_result(result)
        self._remove(id)
        return True

    def fail(self, failed: Failed) -> None:
        """Every request fails; every question is answered by None."""
        for question in self._questions.values():
            if not question.done():
                question.set_result(None)
        for id in list(self.requests):
            self.answer(id, failed)

    def _remove(self, id: int) -> None:
        del self.requests[id]
        self._on_end()


def settle(futures: Iterable[asyncio.Future[None]], failed: Failed | None = None) -> None:
    """End futures that still wait: well, or with what `failed` says."""
    for future in futures:
        if future.done():
            continue
        if failed is None:
            future.set_result(None)
        else:
            future.set_exception(OmlxdError.from_event(failed))
