"""One request for several answers (`n`, and prompts in one list) becomes as many requests of the engine.

The others of a prompt start once its first has said something: the prompt is then in the store, so
that they restore it and nothing is computed twice. A seed counts up with the choice, so each is as it
would be alone with that seed. At most `AT_ONCE` run, so that a list of prompts leaves the engine's
waiting line to others. A prompt that can't be served is an error of its own choices alone; if none can be,
the request fails.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import AsyncGenerator, Mapping, Sequence

from msgspec.structs import replace

from ...api.fields.body import ParsedRequest
from ...chat import ChoiceEvent, Event, Failed, Finished, GenerateRequest, Progress, Usage
from ...errors import OmlxdError
from ..engines.model import ModelEngine

AT_ONCE = 8
SCORED_AT_ONCE = 32
"""Prompts scored at once: they share passes, and hold a slot for one."""
_OF_THE_PROMPT = ("invalid_request", "prompt_too_long")
"""Codes of errors that concern one prompt alone."""


def events_of(
    engine: ModelEngine, parsed: ParsedRequest, name: str, asked: float
) -> AsyncGenerator[Event, None]:
    """Yield the events of a request; of several choices each in a `ChoiceEvent`, and one Finished for all.

    name   its id in the log
    asked  when it came, of `time.monotonic`
    """
    first = replace(parsed.generate, collected=not parsed.stream, name=name, asked=asked)
    if parsed.labels:
        return scores_of(engine, parsed, name, asked)
    if parsed.answers == 1:
        return engine.generate(first)
    requests = [_choice(request, at) for request in _asked(first, parsed) for at in range(parsed.n)]
    return _choices(engine, requests, parsed.n, fields=parsed.fields)


def scores_of(
    engine: ModelEngine, parsed: ParsedRequest, name: str = "", asked: float = 0.0
) -> AsyncGenerator[Event, None]:
    """Yield the events of a request's prompts, each a choice that scores its labels."""
    first = replace(parsed.generate, collected=True, name=name, asked=asked or time.monotonic())
    pairs = zip(_asked(first, parsed), parsed.labels, strict=True)
    requests = [replace(request, labels=labels) for request, labels in pairs]
    return _choices(engine, requests, 1, SCORED_AT_ONCE, parsed.fields)


def _asked(first: GenerateRequest, parsed: ParsedRequest) -> list[GenerateRequest]:
    return [first, *(replace(first, prompt=prompt) for prompt in parsed.more_prompts)]


def _choice(request: GenerateRequest, at: int) -> GenerateRequest:
    seed = request.sampling.seed
    if not at:
        return request
    if seed is not None:
        seed = (seed + at + 2**63) % 2**64 - 2**63
    return replace(request, sampling=replace(request.sampling, seed=seed), again=True)


class _Line:
    """The queue of choices: the first of each prompt, and the others after it."""

    def __init__(self, count: int, n: int, at_once: int):
        self._n = n
        self._at_once = at_once
        self._may = deque(range(0, count, n))
        self._began: set[int] = set()
        self._running = 0

    def choice_began(self, index: int) -> None:
        if index % self._n == 0 and index not in self._began:
            self._began.add(index)
            self._may.extendleft(range(index + self._n - 1, index, -1))

    def choice_ended(self) -> None:
        self._running -= 1

    def next(self) -> int | None:
        """Return a choice to start now, or None."""
        if not self._may or self._running == self._at_once:
            return None
        self._running += 1
        return self._may.popleft()


_Events = asyncio.Queue[tuple[int, Event | Exception | None]]
"""Events by their choices; None: it is over. An exception is its last."""


async def _read(engine: ModelEngine, request: GenerateRequest, index: int, events: _Events) -> None:
    try:
        async with contextlib.aclosing(engine.generate(request)) as stream:
            async for event in stream:
                events.put_nowait((index, event))
        events.put_nowait((index, None))
    except Exception as error:
        events.put_nowait((index, error))


async def _choices(
    engine: ModelEngine,
    requests: list[GenerateRequest],
    n: int,
    at_once: int = AT_ONCE,
    fields: Sequence[Mapping[str, str]] = (),
) -> AsyncGenerator[Event, None]:
    """Yield the events of requests in the order of their choices, `n` of each prompt."""
    events: _Events = asyncio.Queue()
    finished: dict[int, Finished] = {}
    failed: dict[int, Failed] = {}
    tasks: list[asyncio.Task[None]] = []
    line = _Line(len(requests), n, at_once)
    try:
        while len(finished) + len(failed) < len(requests):
            while (start := line.next()) is not None:
                tasks.append(asyncio.create_task(_read(engine, requests[start], start, events)))
            index, event = await events.get()
            if event is None:
                if index not in finished and index not in failed:
                    raise OmlxdError("The engine ended a choice without a last event.", code="unavailable")
                line.choice_ended()
                continue
            if isinstance(event, Exception):
                if not isinstance(event, OmlxdError) or event.code not in _OF_THE_PROMPT:
                    raise event
                line.choice_ended()
                event = event.as_event()
            if isinstance(event, Failed):
                if fields and event.param:
                    event = replace(event, param=fields[index].get(event.param, event.param))
                failed[index] = event
                if event.code not in _OF_THE_PROMPT or len(failed) == len(requests) or len(requests) == n:
                    yield event
                    return
                line.choice_began(index)
                continue
            if isinstance(event, Finished):
                finished[index] = event
            if not isinstance(event, Progress):
                line.choice_began(index)
                yield ChoiceEvent(index, event)  # type: ignore[arg-type]  # no engine sends a ChoiceEvent
            elif index == 0:
                yield event
        for index, failure in failed.items():
            yield ChoiceEvent(index, failure)
        usages = {index: each.usage for index, each in finished.items()}
        yield Finished(min(finished.items())[1].reason, _sum(usages, n))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


_OF_PROMPTS = (
    "prompt_tokens",
    "cached_hot",
    "cached_cold",
    "recomputed",
    "left_over",
    "restore_s",
    "prefill_s",
)
_OF_CHOICES = (
    *("completion_tokens", "reasoning_tokens"),
    *("drafted", "accepted", "model_drafted", "model_accepted", "predicted", "predicted_accepted"),
)


def _sum(usages: dict[int, Usage], n: int) -> Usage:
    """Sum `usages`, one a choice. A prompt counts once, with its first choice's figures.

    Choices decode at the same time: from the first token of any to the end of the last.
    """
    prompts = [usage for index, usage in usages.items() if index % n == 0]
    sums = {name: sum(getattr(usage, name) for usage in prompts) for name in _OF_PROMPTS}
    sums |= {name: sum(getattr(usage, name) for usage in usages.values()) for name in _OF_CHOICES}
    first = min(usages.values(), key=lambda usage: usage.ttft_s)
    last = max(usage.ttft_s + usage.decode_s for usage in usages.values())
    decode_s = last - first.ttft_s if sums["completion_tokens"] else 0.0
    peak_bytes = max(usage.peak_bytes for usage in usages.values())
    limited = next((each.limited for each in usages.values() if each.limited.tells), first.limited)
    return replace(first, **sums, decode_s=decode_s, peak_bytes=peak_bytes, limited=limited)
