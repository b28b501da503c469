"""What a status says, in numbers that people compare: rates, shares, words for time."""

from __future__ import annotations

from dataclasses import dataclass

from ..front.owner.status import DaemonStatus, ModelStatus


def hit_rate(model: ModelStatus) -> float | None:
    """Part of all prompt tokens that was restored; None before the first prompt."""
    asked = model.values.get("prefix_cache_queries_total", 0.0)
    return restored(model) / asked if asked else None


def restored(model: ModelStatus) -> float:
    """Prompt tokens restored from RAM or SSD."""
    values = model.values
    return values.get("prefix_cache_hits_hot_total", 0.0) + values.get("prefix_cache_hits_cold_total", 0.0)


@dataclass(slots=True, frozen=True)
class Rates:
    """What one model did a second between two looks: tokens, and bytes of block files."""

    computed: float = 0.0
    restored: float = 0.0
    generated: float = 0.0
    written: float = 0.0
    read: float = 0.0


def rates(before: ModelStatus | None, now: ModelStatus, seconds: float) -> Rates:
    if before is None or seconds <= 0:
        return Rates()

    def rate(name: str) -> float:
        return max(0.0, now.values.get(name, 0.0) - before.values.get(name, 0.0)) / seconds

    return Rates(
        computed=rate("prompt_tokens_total"),
        restored=rate("prefix_cache_hits_hot_total") + rate("prefix_cache_hits_cold_total"),
        generated=rate("generation_tokens_total"),
        written=rate("kv_bytes_written_total"),
        read=rate("kv_bytes_restored_total"),
    )


def model_of(status: DaemonStatus | None, id: str) -> ModelStatus | None:
    return next((model for model in status.models if model.id == id), None) if status else None


def percent(part: float | None) -> str:
    return "-" if part is None else f"{part:.0%}"


def duration(seconds: float) -> str:
    """The two largest units: `3 d 4 h`, `5 min 2 s`, `12 s`."""
    left, words = int(seconds), list[str]()
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60), ("s", 1)):
        count, left = divmod(left, length)
        if count or (unit == "s" and not words):
            words.append(f"{count} {unit}")
        elif words:
            break  # `3 d 4 s` would tell less than it seems to.
    return " ".join(words[:2])
