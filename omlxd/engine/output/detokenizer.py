"""Turns tokens into text, one at a time: complete characters only, and no text lost.

Byte-level BPE has a table of bytes and an incremental UTF-8 decoder: constant time a token, and a leading
space is kept, unlike in mlx-lm's. Other tokenizers have mlx-lm's own.
"""

from __future__ import annotations

import codecs
import functools
import re
from typing import Any, Protocol

from tokenizers import decoders


class Detokenizer(Protocol):
    """add(token) -> the text that is now certain; finish() -> the rest of it."""

    def add(self, token: int) -> str: ...

    def finish(self) -> str: ...


class ByteDetokenizer:
    """Decodes by `table`: token id → its bytes. Invalid UTF-8 becomes U+FFFD."""

    __slots__ = ("_decoder", "_table")

    def __init__(self, table: list[bytes]):
        self._table = table
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, token: int) -> str:
        # A model's vocabulary may be padded past the tokenizer's.
        return self._decoder.decode(self._table[token]) if token < len(self._table) else ""

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)


class WrappedDetokenizer:
    """Wraps mlx-lm's streaming detokenizer. `vocab_size`: of the tokenizer's own vocabulary."""

    __slots__ = ("_inner", "_vocab_size")

    def __init__(self, inner: Any, vocab_size: int):
        self._inner, self._vocab_size = inner, vocab_size

    def add(self, token: int) -> str:
        if (
            token >= self._vocab_size
        ):  # Padding of the model's vocabulary: sentencepiece's has no entry for it.
            return ""
        self._inner.add_token(token)
        return self._inner.last_segment

    def finish(self) -> str:
        self._inner.finalize()
        return self._inner.last_segment


def detokenizer(tokenizer: Any) -> Detokenizer:
    """Make a detokenizer for `tokenizer` (mlx-lm's TokenizerWrapper). The first call builds its table."""
    if not _byte_level(tokenizer):
        return WrappedDetokenizer(tokenizer.detokenizer, len(tokenizer))
    return ByteDetokenizer(_table(tokenizer))


def bytes_of(tokenizer: Any, token: int) -> bytes:
    """Return the bytes of `token`; b"" if it is not in the tokenizer's vocabulary."""
    if _byte_level(tokenizer):
        table = _table(tokenizer)
        return table[token] if token < len(table) else b""
    piece = tokenizer.convert_ids_to_tokens(token) if token < len(tokenizer) else None
    if piece is None:
        return b""
    if fallback := _BYTE_PIECE.fullmatch(piece):
        return bytes([int(fallback[1], 16)])
    return piece.replace("▁", " ").encode()


_BYTE_PIECE = re.compile(r"<0x([0-9A-F]{2})>")
"""Matches SentencePiece's spelling of a byte that is in no other piece; a space is "▁"."""


def _byte_level(tokenizer: Any) -> bool:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    return isinstance(getattr(backend, "decoder", None), decoders.ByteLevel)


@functools.lru_cache(maxsize=1)
def _table(tokenizer: Any) -> list[bytes]:
    """Return the bytes of each token. Added tokens stand for themselves, others are byte-level."""
    added = {int(index): str(token) for index, token in tokenizer.added_tokens_decoder.items()}
    spelled = _byte_of_letter()
    table: list[bytes] = []
    for index, token in enumerate(tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))):
        if token is None:
            table.append(b"")
        elif index in added or not all(letter in spelled for letter in token):
            table.append((added.get(index) or token).encode())
        else:
            table.append(bytes(spelled[letter] for letter in token))
    return table


def _byte_of_letter() -> dict[str, int]:
    """Map GPT-2's letters to bytes: printable bytes as themselves, others from U+0100 on in order."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(plain)]
    return {chr(byte): byte for byte in plain} | {chr(256 + n): byte for n, byte in enumerate(others)}
