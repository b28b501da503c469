"""A line of the scripted engine's log."""

from __future__ import annotations

import msgspec


class Played(msgspec.Struct):
    """One request as the engine ended it.

    tokens    prompt and answer
    prompt    of these, the prompt
    computed  tokens whose KV was there at the end, restored ones included
    cached    tokens restored
    began, ended  of the same clock
    """

    id: int
    tokens: list[int]
    prompt: int
    computed: int
    cached: int
    cancelled: bool
    began: float
    ended: float
