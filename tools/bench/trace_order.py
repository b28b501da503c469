"""Which requests of a recorded trace may be sent at the same time (tools/replay.py says what a trace is).

A request of /v1/messages waits for answers to requests that stand before it in the file, which has them as
they came to the server that recorded them:

- its agent's turn before: the request whose messages all begin its own, the one with most of them. Marks of
  cached prefixes do not count, and a text is as good as a block that holds it.
- where there is none, the turn that spawned the agent: whose answer, as the next turn of its own agent holds
  it, calls a tool with one of the new agent's texts as an input. An agent that nobody spawned begins at once.
- the latest turn of each agent that its own agent spawned, since it was recorded after that.

What an agent's tools took is left out: a turn is sent as soon as those that it waits for are answered.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tools.replay import Request


@dataclass
class Place:
    """agent  counted from 0, in the order of first turns
    turn   of that agent, counted from 0
    waits  indices of earlier requests
    """

    agent: int
    turn: int
    waits: set[int] = field(default_factory=set)


def order(requests: list[Request]) -> list[Place]:
    """A place for each request."""
    talks = [[_bare(message) for message in request.body["messages"]] for request in requests]
    before = [
        max(
            (i for i in range(at) if talk[: len(talks[i])] == talks[i] != talk),
            key=lambda i: len(talks[i]),
            default=-1,
        )
        for at, talk in enumerate(talks)
    ]
    called = {last: _inputs(talks[at][len(talks[last])]) for at, last in enumerate(before) if last >= 0}
    places: list[Place] = []
    latest: dict[int, int] = {}
    children: dict[int, set[int]] = {}
    for at, last in enumerate(before):
        if last >= 0:
            place = Place(places[last].agent, places[last].turn + 1, {last})
        else:
            place = Place(len(latest), 0)
            texts = [block["text"] for said in talks[at] for block in said["content"] if "text" in block]
            spawners = [i for i in called if i < at and any(text in texts for text in called[i])]
            if spawners:
                place.waits.add(max(spawners))
                children.setdefault(places[max(spawners)].agent, set()).add(place.agent)
        place.waits.update(latest[child] for child in children.get(place.agent, ()))
        latest[place.agent] = at
        places.append(place)
    return places


def _bare(value: Any) -> Any:
    """Without marks of cached prefixes, every content a list of blocks."""
    if isinstance(value, list):
        return [_bare(item) for item in value]
    if not isinstance(value, dict):
        return value
    bare = {key: _bare(item) for key, item in value.items() if key != "cache_control"}
    if isinstance(content := bare.get("content"), str):
        bare["content"] = [{"type": "text", "text": content}]
    return bare


def _inputs(message: dict[str, Any]) -> list[Any]:
    """Of all tool calls of an answer."""
    return [value for block in message["content"] for value in block.get("input", {}).values()]
