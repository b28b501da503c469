"""One request for several answers (`n`): as many requests of the engine, told as one.

The others start once the first has said something: its prompt is then in the store, so that they
restore it and nothing is computed twice. A seed counts up with the choice, so each is as it would be
alone with that seed.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

from msgspec.structs import replace

from ..api.body import ParsedRequest
from ..chat import ChoiceEvent, Event, Failed, Finished, GenerateRequest, Progress, Usage
from ..errors import OmlxdError
from .engines import Engine


def events_of(engine: Engine, parsed: ParsedRequest) -> AsyncGenerator[Event, None]:
    """The events of a request; of several choices each in a `ChoiceEvent`, and one Finished for all."""
    if parsed.n == 1:
        return engine.generate(parsed.generate)
    return _choices(engine, [_choice(parsed.generate, index) for index in range(parsed.n)])


def _choice(request: GenerateRequest, index: int) -> GenerateRequest:
    seed = request.sampling.seed
    if seed is None or not index:
        return request
    wrapped = (seed + index + 2**63) % 2**64 - 2**63
    return replace(request, sampling=replace(request.sampling, seed=wrapped))


async def _choices(engine: Engine, requests: list[GenerateRequest]) -> AsyncGenerator[Event, None]:
    told: asyncio.Queue[tuple[int, Event | Exception | None]] = asyncio.Queue()
    finished: dict[int, Finished] = {}

    async def read(index: int) -> None:
        try:
            stream = engine.generate(requests[index])
            try:
                async for event in stream:
                    told.put_nowait((index, event))
            finally:
                await stream.aclose()
            told.put_nowait((index, None))
        except Exception as error:
            told.put_nowait((index, error))

    tasks = [asyncio.create_task(read(0))]
    try:
        while len(finished) < len(requests):
            index, event = await told.get()
            if isinstance(event, Exception):
                raise event
            if event is None:
                if index in finished:
                    continue
                raise OmlxdError("The engine ended a choice without a last event.", code="unavailable")
            if isinstance(event, Failed):
                yield event
                return
            if isinstance(event, Finished):
                finished[index] = event
            if not isinstance(event, Progress):
                if len(tasks) == 1:
                    tasks += [asyncio.create_task(read(other)) for other in range(1, len(requests))]
                yield ChoiceEvent(index, event)  # type: ignore[arg-type]  # no engine sends a ChoiceEvent
            elif index == 0:
                yield event
        yield Finished(finished[0].reason, _sum([finished[index].usage for index in range(len(requests))]))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _sum(usages: list[Usage]) -> Usage:
    """The prompt counts once, as the first choice found it."""
    return replace(
        usages[0],
        completion_tokens=sum(usage.completion_tokens for usage in usages),
        reasoning_tokens=sum(usage.reasoning_tokens for usage in usages),
    )
