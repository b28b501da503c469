"""Bounds of a request's numbers, for every protocol."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

MAX_INT64 = 2**63 - 1
"""Largest integer: msgspec reads larger ones as floats, which would be a type error."""

Temperature = Annotated[float, Meta(ge=0, le=2)]
LocalTemperature = Annotated[float, Meta(ge=0, le=100)]
"""Temperature at Ollama and LM Studio."""
TopP = Annotated[float, Meta(ge=0, le=1)]
TopK = Annotated[int, Meta(ge=-1, le=MAX_INT64)]
MinP = Annotated[float, Meta(ge=0, lt=1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
RepetitionPenalty = Annotated[float, Meta(ge=0.01, le=10)]
Seed = Annotated[int, Meta(ge=-(2**63), le=MAX_INT64)]
Count = Annotated[int, Meta(ge=1, le=MAX_INT64)]
TopLogprobs = Annotated[int, Meta(ge=0, le=20)]
