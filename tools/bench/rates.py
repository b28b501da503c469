"""Rates of token streams that run together."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Stream:
    """When a stream was asked for and when each of its tokens came, in seconds of one clock."""

    start: float
    times: list[float] = field(default_factory=list)
    tokens: int = 0
    """Tokens in all, where events are fewer than tokens; 0: one event a token."""
    prompt: int = 0
    """Prompt tokens, where the server tells them."""
    computed: int = 0
    """Of them those that the server computed, where it says so."""
    text: str = ""

    @property
    def ttft(self) -> float:
        return self.times[0] - self.start

    @property
    def tokens_per_event(self) -> float:
        return self.tokens / len(self.times) if self.tokens else 1.0


def total_rate(streams: list[Stream]) -> float:
    """Tokens a second of all streams, from the last one's first token to the first one's last.

    In that window every stream decodes and none prefills, so that decoding alone is measured.
    """
    begin = max(s.times[0] for s in streams)
    end = min(s.times[-1] for s in streams)
    if end <= begin:
        return float("nan")
    seen = sum(sum(begin < t <= end for t in s.times) * s.tokens_per_event for s in streams)
    return seen / (end - begin)
