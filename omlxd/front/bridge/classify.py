"""How likely each of some labels is as the answer: each is the answer once, whatever the model would say.

The first one computes the prompt; the others find it in the cache.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence

from msgspec.structs import replace

from ...chat import Conversation, Failed, Finished, GenerateRequest, Sampling, TextDelta, Usage
from ...errors import InvalidRequest, OmlxdError, Unavailable
from ..engines.protocol import Engine
from .messages import Classified, Id, Score, usage_of

AT_ONCE = 8
"""Labels of one request that are scored at the same time."""


class _Scored:
    """A label's log-probability, over how many tokens, and the request's usage."""

    def __init__(self, logprobs: Sequence[float], usage: Usage):
        self.logprob = math.fsum(logprobs)
        self.tokens = len(logprobs)
        self.usage = usage


async def classify(id: Id, engine: Engine, request: GenerateRequest, labels: Sequence[str]) -> Classified:
    """Raises OmlxdError. `request`: its prompt is used, its sampling is not."""
    if len(set(labels)) < len(labels):
        raise InvalidRequest("labels: each may stand there once", param="labels")
    prompt = request.prompt
    if isinstance(prompt, Conversation):
        # A label is no thought: the answer begins at once, unless the request says otherwise.
        prompt = replace(prompt, thinking=bool(prompt.thinking))
    plain = replace(request, prompt=prompt, sampling=Sampling(temperature=0.0, logprobs=0), format=None)
    first = await _score(engine, plain, labels[0])
    slots = asyncio.Semaphore(AT_ONCE)

    async def score(label: str) -> _Scored:
        async with slots:
            return await _score(engine, plain, label)

    tasks = [asyncio.create_task(score(label)) for label in labels[1:]]
    try:
        scored = [first, *await asyncio.gather(*tasks)]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return _classified(id, labels, scored)


def _classified(id: Id, labels: Sequence[str], scored: Sequence[_Scored]) -> Classified:
    best = max(range(len(labels)), key=lambda index: scored[index].logprob)
    parts = [math.exp(one.logprob - scored[best].logprob) for one in scored]
    usage = replace(scored[0].usage, completion_tokens=sum(one.tokens for one in scored))
    return Classified(
        id,
        best=labels[best],
        scores=[
            Score(label, one.logprob, one.tokens, part / sum(parts))
            for label, one, part in zip(labels, scored, parts, strict=True)
        ],
        usage=usage_of(usage),
    )


async def _score(engine: Engine, request: GenerateRequest, label: str) -> _Scored:
    logprobs: list[float] = []
    events = engine.generate(replace(request, forced=label))
    try:
        async for event in events:
            if isinstance(event, TextDelta):
                logprobs += [token.logprob for token in event.logprobs]
            elif isinstance(event, Failed):
                raise OmlxdError.from_event(event)
            elif isinstance(event, Finished):
                if len(logprobs) != event.usage.completion_tokens:
                    raise InvalidRequest(f"labels: {label[:200]!r} can't be scored", param="labels")
                return _Scored(logprobs, event.usage)
    finally:
        await events.aclose()
    raise Unavailable("The engine stopped in the middle of the answer; try again.")
