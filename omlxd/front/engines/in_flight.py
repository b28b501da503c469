"""Requests that an engine has not answered yet, and questions that keep no engine loaded.

| a request is | it holds            | its engine dies                                                |
|--------------|---------------------|----------------------------------------------------------------|
| waiting      | its frame           | (it has none; it fails if the model can't be loaded)           |
| sent         | its frame, its life | the first time it waits again, the second time it fails        |
| answered     | its life            | it fails: a client may have read part of the answer            |

A life is one engine process, by its number. Progress is no part of an answer: a request that prefills is
sent, not answered, and its frame (of up to 30 MB) is held. So is one whose answer is `collected`, up to its
end: nobody has read any of it, and its next answer begins with `Restarted`.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterable
from dataclasses import dataclass
from typing import Any

from ... import wire
from ...chat import Event, Failed, Finished, Progress, Restarted
from ...errors import InvalidRequest, OmlxdError, Overloaded


class EngineStream(AsyncGenerator[Event, None]):
    """The events of one request; the last one is Finished or Failed. Closing it cancels the rest.

    Not a generator function: a generator that is closed before its first event runs no cleanup,
    and a client may be gone by then.

    forget(id)  nobody wants its answer any more
    """

    def __init__(self, id: int, forget: Callable[[int], None]):
        self._forget = forget
        self.id = id
        self.events: asyncio.Queue[Event] = asyncio.Queue()
        self._ended = False

    async def __anext__(self) -> Event:
        if self._ended:
            raise StopAsyncIteration
        event = await self.events.get()
        self._ended = isinstance(event, (Finished, Failed))
        return event

    async def aclose(self) -> None:
        self._ended = True
        self._forget(self.id)

    async def asend(self, value: None) -> Event:
        return await self.__anext__()

    async def athrow(self, typ: Any, val: Any = None, tb: Any = None) -> Event:
        await self.aclose()
        raise val if val is not None else typ


WAITING_PER_SLOT = 4
WAITING_FLOOR = 64
OWN_FLOOR = 4
"""Requests that each client may queue when others fill the queue, which then holds twice as many at most."""
OVERLOAD_RETRY_S = 5
MOST_SENDS = 2
"""Engines that may get one request: after two deaths it may be their cause."""


@dataclass(slots=True, eq=False)
class Request:
    """A request of any kind, see the table above.

    frame      None once a client may have read part of the answer
    life       the engine process that it was sent to; 0: it waits
    sends      how often it was sent
    collected  no client reads before the answer's end
    client, priority  as GenerateRequest's
    begun      this life has begun to answer
    """

    id: int
    frame: bytes | None
    answer: EngineStream | asyncio.Future[Any]
    collected: bool
    client: str = ""
    priority: int = 0
    begun: bool = False
    life: int = 0
    sends: int = 0


class InFlight:
    """Requests and questions under way. `len` counts the requests: a question loads no model.

    slots     requests that decode at once; it bounds how many more may wait
    requests  by id, in the order in which they came
    on_end()  called when a request is in flight no more
    channel   that ids begin with (wire/)
    """

    def __init__(self, slots: int, on_end: Callable[[], None], channel: int = 0):
        self._limit = slots + max(WAITING_FLOOR, WAITING_PER_SLOT * slots)
        self.requests: dict[int, Request] = {}
        self._questions: dict[int, asyncio.Future[wire.Stats | None]] = {}
        self._ids = itertools.count(channel * wire.CHANNEL + 1)
        self._on_end = on_end

    def __len__(self) -> int:
        return len(self.requests)

    @property
    def by_priority(self) -> dict[int, int]:
        """Return how many requests each priority has, the first to go first."""
        return dict(sorted(Counter(request.priority for request in self.requests.values()).items()))

    def new_id(self) -> int:
        """Return an id for a request or a question."""
        return next(self._ids)

    def check_room(self, client: str = "", priority: int = 0) -> None:
        """Raise Overloaded if no more requests may wait, or no more of `client`, or of that priority.

        Requests with higher numbers take no more room from it than other clients' do.
        """
        held = sum(request.client == client for request in self.requests.values())
        ahead = sum(request.priority <= priority for request in self.requests.values())
        floor = (client and held < OWN_FLOOR) or ahead < self._limit
        most = self._limit * 2 if floor else self._limit
        if len(self.requests) >= most:
            raise Overloaded(
                f"{len(self.requests)} requests are running or waiting already; retry in a moment.",
                retry_after=OVERLOAD_RETRY_S,
            )

    def add_request(
        self, id: int, message: Any, answer: EngineStream | asyncio.Future[Any], client: str = ""
    ) -> Request:
        """Add a request. Raises InvalidRequest for a message that no frame can hold."""
        try:
            collected, priority = False, 0
            if isinstance(message, wire.Generate):
                collected, priority = message.request.collected, message.request.priority
            request = Request(id, wire.encode(message), answer, collected, client, priority)
        except (ValueError, OverflowError, RecursionError, TypeError) as error:
            # JSON can say what a frame can't: integers of any size, lone surrogates, deep nesting.
            raise InvalidRequest(f"The request holds a value that can't be processed: {error}.") from error
        self.requests[id] = request
        return request

    async def question(self, id: int, send: Callable[[], None], timeout_s: float) -> wire.Stats | None:
        """Send a question by `send`; returns the answer, or None if none comes in time."""
        answer: asyncio.Future[wire.Stats | None] = asyncio.get_running_loop().create_future()
        self._questions[id] = answer
        try:
            send()
            return await asyncio.wait_for(answer, timeout_s)
        except TimeoutError:
            return None
        finally:
            del self._questions[id]

    def drop_request(self, id: int) -> Request | None:
        """Drop a request whose answer nobody wants; returns the request, if it was in flight."""
        request = self.requests.pop(id, None)
        if request is not None:
            self._on_end()
        return request

    def answer_request(self, id: int, result: Any) -> Request | None:
        """Hand `result` to the request `id`. None: no request does, it may have been cancelled."""
        if (question := self._questions.get(id)) is not None:
            if not question.done():
                question.set_result(result if isinstance(result, wire.Stats) else None)
            return None
        request = self.requests.get(id)
        if request is None:
            return None
        if not isinstance(result, Progress):
            request.begun = True
            if not request.collected:
                request.frame = None
        if isinstance(request.answer, EngineStream):
            request.answer.events.put_nowait(result)
            if not isinstance(result, (Finished, Failed)):
                return request
        elif not request.answer.done():
            if isinstance(result, Failed):
                request.answer.set_exception(OmlxdError.from_event(result))
            else:
                request.answer.set_result(result)
        return self.drop_request(id)

    def lost(self, failed: Failed) -> list[Request]:
        """Fail the requests of a dead engine, but return those that may be sent again."""
        self._close_questions()
        again = []
        for request in list(self.requests.values()):
            if request.frame is None or request.sends == MOST_SENDS:
                self.answer_request(request.id, failed)
            elif request.sends:
                if request.begun and isinstance(request.answer, EngineStream):
                    request.answer.events.put_nowait(Restarted())
                request.life, request.begun = 0, False
                again.append(request)
        return again

    def fail(self, failed: Failed) -> None:
        """Fail every request, and answer every question with None."""
        self._close_questions()
        for id in list(self.requests):
            self.answer_request(id, failed)

    def _close_questions(self) -> None:
        for question in self._questions.values():
            if not question.done():
                question.set_result(None)


def settle(futures: Iterable[asyncio.Future[None]], failed: Failed | None = None) -> None:
    """End futures that still wait, with a result or the error `failed`."""
    for future in futures:
        if future.done():
            continue
        if failed is None:
            future.set_result(None)
        else:
            future.set_exception(OmlxdError.from_event(failed))
