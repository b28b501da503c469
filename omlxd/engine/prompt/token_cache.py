"""Remembers tokens of a text by segment: a longer text of the same beginning tokenises only its end.

A text is cut before every added token (`<|im_start|>` and its like). Hugging Face's tokenizers split there
first, so no merge crosses a cut. Which added tokens cut:

| added token                              | why                                                   |
|------------------------------------------|-------------------------------------------------------|
| `normalized`                             | no: it is looked for in pieces that are normalised    |
| `lstrip`, `rstrip`                       | no: it takes spaces from its neighbours               |
| begins or ends with a space or a letter  | no: a neighbour's spaces, or word border, may be in it |
| every other                              | yes, where a leftmost-longest match over all finds it |

A segment begins with its token, so its text is at no text's start, where some pre-tokenizers write a space.
All of this is probed at load time; where it does not hold, texts are tokenised in one piece. A segment of
more than `PIECE_CHARS` is cut too (token_bound.py), which takes less time, and a text too long for the model
is noticed early.

Figures: `tools/bench/tokenise.py`.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import re
import threading
from array import array
from collections.abc import Iterator
from typing import Any

from ...common.bounded_map import BoundedMap
from ...errors import InvalidRequest, PromptTooLong
from .token_bound import TokenBound

CACHE_BYTES = 32 << 20
"""Bytes of ids and keys: about eight million tokens, or eighty prompts of 96k that share nothing."""

PIECE_CHARS = 1 << 14
"""Characters that one call tokenises. A longer segment is cut into pieces of this size or half of it. 32,000
tokens take 60 ms in pieces and 95 ms whole (processor time on a small machine). Eight threads on 16 cores
took 336 ms: they wait for one another in the backend.
"""
FAR_CHARS = 1 << 18
"""Characters of a piece, or half as many, where a segment has no place to cut near by."""
UNCUT_CHARS = 1 << 20
"""Characters of a piece that can't be cut."""
_AROUND_CUT = 32
"""Characters on either side of a trial cut."""
_TRIES = 16
"""Trial cuts of one piece."""

_ENTRY_BYTES = 200
"""Bytes of a segment beside its ids."""

_PROBE_WORDS = ("", " ", "a", " b ", "\n", "word", "  x  y", "1", "é", "\u2581", ".", "\u0301")


class TokenCache:
    """Thread-safe. `tokenizer`: mlx-lm's TokenizerWrapper.

    cuts    texts are cut
    joins   a text may be cut anywhere: the second piece gets no space of its own
    hits, misses   tokens that were remembered, and not
    """

    def __init__(self, tokenizer: Any, max_bytes: int = CACHE_BYTES):
        self._tokenizer = tokenizer
        self._lock = threading.Lock()
        self._segments: BoundedMap[bytes, array[int]] = BoundedMap(max_bytes, _cost)
        self.hits = 0
        self.misses = 0
        self._backend: Any = getattr(tokenizer, "backend_tokenizer", None)
        self._tokens, self._cutting = _added_tokens(self._backend)
        self._lead = min(self._cutting, default="")
        self.cuts = False
        proven = bool(self._cutting) and self._proven()
        self._around = self._what_is_put_around() if proven else None
        self.cuts = proven
        self.joins = self.cuts and self._joins()

    @functools.cached_property
    def bound(self) -> TokenBound:
        """Bounds of the tokenizer, made for the first large text: that reads the whole vocabulary."""
        return TokenBound(self._backend)

    def encode(self, text: str, *, special: bool = False, most: int | None = None) -> list[int]:
        """Return the ids of `text`, as transformers' own `encode` gives them.

        special  add what the tokenizer puts around a text
        most     raise PromptTooLong at twice as many ids; a smaller excess is counted to its end, for clients
        Raises InvalidRequest for a text that the tokenizer can't read, or not at one go.
        """
        around = self._around if special else ([], [])
        if not self.cuts or around is None:
            if len(text) > max(UNCUT_CHARS, 8 * (most or 0)):
                raise _uncut(len(text))
            return self._encode_uncut(text, special)
        before, after = around
        return [*before, *self.encode_pieces([text], most=most), *after]

    def encode_pieces(self, texts: list[str], *, most: int | None = None) -> list[int]:
        """Return the ids of each text, one after the other, none at a text's start. Needs `cuts`."""
        parts: list[str] = []
        led: set[int] = set()
        for index, text in enumerate(texts):
            for number, segment in enumerate(self._split(text)):
                inner = number or not index or self._tokens.match(segment) is not None
                for part in self._parts(segment):
                    if not inner:
                        # Behind a token, as nothing before it: what a tokenizer puts before a text's first
                        # word would be put before this text otherwise.
                        led.add(len(parts))
                        part = self._lead + part
                    parts.append(part)
                    inner = False
        if most is not None and len(parts) > 2 * most:  # each has a token
            raise PromptTooLong(len(parts), most, least=True)
        tokens: list[int] = []
        for index, ids in enumerate(self._ids(parts, most)):
            tokens += ids[1:] if index in led else ids
        return tokens

    def _ids(self, parts: list[str], most: int | None) -> list[array[int]]:
        keys = [hashlib.blake2b(part.encode(), digest_size=16).digest() for part in parts]
        ids_of = self._cached(keys)
        missing = list({key: i for i, key in enumerate(keys) if key not in ids_of}.values())
        count = sum(map(len, ids_of.values()))
        for batch in _batches(missing, [len(part) for part in parts]):
            if most is not None and count > 2 * most + len(parts):  # each may have an id that is dropped
                raise PromptTooLong(count - len(parts), most, least=True)
            with _readable():
                encoded = self._backend.encode_batch_fast([parts[i] for i in batch], add_special_tokens=False)
            new = {keys[i]: array("I", one.ids) for i, one in zip(batch, encoded, strict=True)}
            count += sum(map(len, new.values()))
            self._remember(new)
            ids_of |= new
        return [ids_of[key] for key in keys]

    def cuts_at(self, content: str) -> bool:
        """Return whether texts are cut before the added token `content`."""
        return self.cuts and content in self._cutting

    # ----------------------------------------------------------------- cutting

    def _split(self, text: str) -> list[str]:
        cuts = (match.start() for match in self._tokens.finditer(text) if match[0] in self._cutting)
        return [text[a:b] for a, b in itertools.pairwise((0, *cuts, len(text))) if b > a]

    def _parts(self, text: str) -> list[str]:
        """Return `text` in parts of about `PIECE_CHARS` if it is longer. Raises InvalidRequest."""
        parts: list[str] = []
        at = 0
        while len(text) - at > PIECE_CHARS and self.joins:
            # Where no place near by is one to cut at, one far away may be.
            cut = self._cut_behind(text, at, PIECE_CHARS // 2) or (
                len(text) - at > FAR_CHARS and self._cut_behind(text, at, FAR_CHARS // 2)
            )
            if not cut:
                break
            parts.append(text[at:cut])
            at = cut
        if len(text) - at > UNCUT_CHARS:
            raise _uncut(len(text) - at)
        return [*parts, text[at:]]

    def _cut_behind(self, text: str, at: int, least: int) -> int:
        """Return an end of the part of `text` from `at` on, of `least` characters or more; 0: none."""
        tries = itertools.islice(self.bound.joints.finditer(text, at + least, at + UNCUT_CHARS), _TRIES)
        return next((match.start() for match in tries if self._parts_at(text, match.start())), 0)

    def _parts_at(self, text: str, at: int) -> bool:
        """Return whether the ids around `at` are those of the two sides.

        Not behind a run of spaces that begins farther away: its ids depend on its length.
        """
        one, two = text[max(at - _AROUND_CUT, 0) : at], text[at : at + _AROUND_CUT]
        if one.isspace():
            return False
        encoded = self._backend.encode_batch_fast(
            [self._lead + one + two, self._lead + one, self._lead + two], add_special_tokens=False
        )
        both, first, second = (each.ids[1:] for each in encoded)
        return both == first + second

    def _what_is_put_around(self) -> tuple[list[int], list[int]] | None:
        """Return the ids before and behind a text; None: they vary."""
        bare, dressed = self._encode_uncut("a", False), self._encode_uncut("a", True)
        for at in range(len(dressed) - len(bare) + 1):
            if bare and dressed[at : at + len(bare)] == bare:
                return dressed[:at], dressed[at + len(bare) :]
        return None

    def _encode_uncut(self, text: str, special: bool) -> list[int]:
        with _readable():
            if self.cuts:
                return self._backend.encode(text, add_special_tokens=special).ids
            # transformers' own changes the tokenizer's settings each time, and no other thread may be in it
            # then. The backend's own changes nothing, so that a short text need not wait for a long one.
            with self._lock:
                return list(self._tokenizer.encode(text, add_special_tokens=special))

    def _proven(self) -> bool:
        """Return whether cutting gives the same ids, on borders of every kind that breaks it."""
        if not hasattr(self._backend, "encode_batch_fast"):
            return False
        self._backend.no_truncation()
        self._backend.no_padding()
        tokens = sorted(self._cutting)[:8]
        words = [[f"{one}{token}{two}" for one in _PROBE_WORDS for two in _PROBE_WORDS] for token in tokens]
        texts = ["".join(itertools.chain(*words)), *words[0]]
        if any(self._pieces_alone([text]) != [self._encode_uncut(text, False)] for text in texts):
            return False
        # transformers' own `encode` asks the backend; for all others we ask it too, in one call.
        others = list(itertools.chain(*words[1:]))
        uncut = self._backend.encode_batch(others, add_special_tokens=False)
        return self._pieces_alone(others) == [one.ids for one in uncut]

    def _joins(self) -> bool:
        """Return whether pieces of a text, cut within a word, read as the text did."""
        texts = (["a", "b"], ["a b", "c"], ["a", " b"])
        decoded = [self._tokenizer.decode(self.encode_pieces(pieces)) for pieces in texts]
        # Some decoders drop the space before the first word.
        return [text.strip() for text in decoded] == ["".join(pieces) for pieces in texts]

    def _pieces_alone(self, texts: list[str]) -> list[list[int]]:
        """Return the ids of each of `texts`, each of its pieces tokenised as a text of its own."""
        cut = [self._split(text) for text in texts]
        encoded = iter(self._backend.encode_batch_fast([*itertools.chain(*cut)], add_special_tokens=False))
        return [[id for _ in pieces for id in next(encoded).ids] for pieces in cut]

    # ----------------------------------------------------------------- remembering

    def _cached(self, keys: list[bytes]) -> dict[bytes, array[int]]:
        cached = {key: ids for key in keys if (ids := self._segments.get(key)) is not None}
        with self._lock:
            self.hits += sum(len(cached[key]) for key in keys if key in cached)
        return cached

    def _remember(self, new: dict[bytes, array[int]]) -> None:
        with self._lock:
            for key, ids in new.items():
                self.misses += len(ids)
                self._segments.put(key, ids)


@contextlib.contextmanager
def _readable() -> Iterator[None]:
    """Refuse a text on which the tokenizer's regular expression fails, with a panic of the backend."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise InvalidRequest("the model's tokenizer can't read this text", param="messages") from None


def _uncut(length: int) -> InvalidRequest:
    return InvalidRequest(
        f"a text of {length} characters can't be tokenised in parts, and whole it may have {UNCUT_CHARS}: "
        "it has no line or word that ends",
        param="messages",
    )


def _batches(indexes: list[int], lengths: list[int]) -> Iterator[list[int]]:
    """Group `indexes` up to `PIECE_CHARS` together, or one longer."""
    batch: list[int] = []
    size = 0
    for index in indexes:
        if batch and size + lengths[index] > PIECE_CHARS:
            yield batch
            batch, size = [], 0
        batch.append(index)
        size += lengths[index]
    if batch:
        yield batch


def _cost(ids: array[int]) -> int:
    return len(ids) * ids.itemsize + _ENTRY_BYTES


def _added_tokens(backend: Any) -> tuple[re.Pattern[str], frozenset[str]]:
    """Return a pattern of all added tokens in raw text, and those that cut."""
    if backend is None:
        return re.compile(r"(?!)"), frozenset()
    raw = [t for t in backend.get_added_tokens_decoder().values() if not t.normalized and t.content]
    # Alternatives in order of length: leftmost-longest, as the tokenizer's own automaton matches.
    contents = sorted({t.content for t in raw}, key=len, reverse=True)
    plain = frozenset(
        t.content for t in raw if not (t.lstrip or t.rstrip or t.single_word) and _closed(t.content)
    )
    return re.compile("|".join(map(re.escape, contents)) or r"(?!)"), plain


def _closed(content: str) -> bool:
    ends = content[0] + content[-1]
    return not any(c.isspace() or c.isalnum() or c == "_" for c in ends)
