"""Bounds the tokens of a text from below by its bytes: a huge text is refused before it is read.

Byte-level BPE drops nothing, so a token has at most as many bytes as the vocabulary's longest. Runs of spaces
or dashes are long tokens in many vocabularies, so bytes of words are counted by themselves. Normalising may
shrink a text first: NFC to a third, NFKC to a quarter. A tokenizer that may drop text has no bound.

Texts are cut where no token of the vocabulary spans the cut: the parts then have the tokens of the text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any

from tokenizers.pre_tokenizers import ByteLevel

from ...wire.token_bytes import FILLER, TokenBytes

_FILLER_LETTERS = str.maketrans("", "", FILLER.decode() + "ĠĊĉčċČ▁")
_JOINTS = {
    r"(?<=[A-Za-z])(?= [A-Za-z])": re.compile(r"[A-Za-z][ Ġ▁][A-Za-z]"),
    r"(?<=[0-9])(?= [A-Za-z])": re.compile(r"[0-9][ Ġ▁][A-Za-z]"),
    r"(?<=[A-Za-z])(?=[\",:;({\[])": re.compile(r"[A-Za-z][\",:;({\[]"),
    r"(?<=\n)(?=[^\W\d_])": re.compile(r"[\nĊ](?![ĊĠĉč▁])[^\W\d_]"),
}
"""Place where every pre-tokenizer of the field cuts → a token that would span it."""
_SHRINKS = {"NFC": 3, "NFKC": 4, "Prepend": 1}


class TokenBound:
    """Bounds for `backend`, a `tokenizers.Tokenizer`, or None. `joints`: matches (empty) where a text may be
    cut.
    """

    def __init__(self, backend: Any):
        self.token_bytes = TokenBytes()
        if backend is None:
            self.joints = re.compile("(?!)")
            return
        tokens = list(backend.get_vocab(with_added_tokens=True))
        free = (at for at, spans in _JOINTS.items() if not any(map(spans.search, tokens)))
        self.joints = re.compile("|".join(free) or "(?!)")
        if not (shrink := _shrink(backend, set(tokens))):
            return
        word = shrink * max((_bytes(t.translate(_FILLER_LETTERS)) for t in tokens), default=0)
        blanks_stay = not any(t.lstrip or t.rstrip for t in backend.get_added_tokens_decoder().values())
        self.token_bytes = TokenBytes(
            word, shrink * max(map(_bytes, tokens), default=0) if blanks_stay else 0.0
        )


def _bytes(token: str) -> int:
    return len(token.encode(errors="replace"))


def _shrink(backend: Any, tokens: set[str]) -> int:
    """Return the factor by which a text may shrink into tokens; 0: unknown."""
    if type(getattr(backend, "model", None)).__name__ != "BPE":
        return 0
    # Without its vocabulary, which may be 30 MB.
    parts = {
        name: json.loads(part.__getstate__()) if (part := getattr(backend, name)) is not None else None
        for name in ("normalizer", "pre_tokenizer")
    }
    pre = list(_leaves(parts["pre_tokenizer"], "pretokenizers"))
    if any(leaf["type"] not in ("ByteLevel", "Split", "Metaspace", "Digits", "Punctuation") for leaf in pre):
        return 0
    if any(leaf.get("behavior") == "Removed" for leaf in pre):
        return 0
    by_bytes = any(leaf["type"] == "ByteLevel" for leaf in pre)
    letters = ByteLevel.alphabet() if by_bytes else [f"<0x{byte:02X}>" for byte in range(256)]
    # A byte without a token is dropped, or is part of an unknown one.
    if not (by_bytes or backend.model.byte_fallback) or not tokens.issuperset(letters):
        return 0
    shrink = 1
    for leaf in _leaves(parts["normalizer"], "normalizers"):
        if leaf["type"] == "Replace" and leaf["pattern"] == {"String": " "} and leaf["content"]:
            continue
        if leaf["type"] not in _SHRINKS:
            return 0
        shrink *= _SHRINKS[leaf["type"]]
    return shrink


def _leaves(part: dict[str, Any] | None, inner: str) -> Iterable[dict[str, Any]]:
    if part is None:
        return
    if part["type"] != "Sequence":
        yield part
        return
    for one in part[inner]:
        yield from _leaves(one, inner)
