"""What a layer keeps of the context, in one struct (vLLM's `KVCacheSpec`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

KVKind = Literal["kv", "packed", "mla", "index", "chosen", "window", "state"]


def is_per_token(kind: KVKind) -> bool:
    """Return whether a layer of `kind` keeps one entry a token, and nothing at a position alone."""
    return kind not in ("window", "state")


@dataclass(slots=True, frozen=True)
class KVSpec:
    """What a layer keeps, of one sequence or of a batch. `cache/kinds.py` says which class keeps what.

    kind    kv      keys and values of each token
            packed  the same, in `bits` bits a number
            mla     latents of MLA, and the parts of keys that RoPE turns
            index   keys by which DeepSeek V3.2 chooses among latents
            chosen  keys and values of each token, and that by which attention chooses among them
            window  keys and values of the last `window` tokens
            state   arrays that stand for all tokens before a position
    parts   names of its arrays, in order
    """

    kind: KVKind
    parts: tuple[str, ...]
    window: int = 0
    bits: int = 0

    @property
    def per_token(self) -> bool:
        """Return `is_per_token` of its kind."""
        return is_per_token(self.kind)
