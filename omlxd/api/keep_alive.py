"""`keep_alive`, the one field that every generating body may carry: Ollama's, for how long a model stays."""

from __future__ import annotations

import msgspec

from ..durations import duration
from ..errors import InvalidRequest


class _Body(msgspec.Struct):
    keep_alive: str | float | int | None = None


_decoder = msgspec.json.Decoder(_Body)


def keep_alive_of(body: bytes) -> float | None:
    """Seconds that the model stays loaded after this request; infinite: for good; None: not said.

    Spelled as Ollama does: `"5m"`, `300`, `0` (it goes when the request has ended), `-1` (it stays).
    Raises InvalidRequest.
    """
    if b'"keep_alive"' not in body:
        return None
    try:
        value = _decoder.decode(body).keep_alive
        return None if value is None else duration(value)
    except (msgspec.MsgspecError, UnicodeDecodeError, ValueError):
        raise InvalidRequest(
            'keep_alive: write a length of time as "5m", seconds, 0 or -1', param="keep_alive"
        ) from None
