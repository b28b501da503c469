"""Tokens of a text, remembered by segment: a longer text of the same beginning tokenises only its end.

A text is cut before every added token (`<|im_start|>` and its like). Hugging Face's tokenizers split
there before they do anything else: normaliser, pre-tokenizer and model see each piece alone, so no
merge crosses a cut and the ids of the segments are the ids of the whole. Which added tokens cut:

| added token                              | why                                                   |
|------------------------------------------|-------------------------------------------------------|
| `normalized`                             | no: it is looked for in pieces that are normalised    |
| `lstrip`, `rstrip`                       | no: it takes spaces from its neighbours               |
| begins or ends with a space or a letter  | no: a neighbour's spaces, or word border, may be in it |
| every other                              | yes, where a leftmost-longest match over all finds it |

A segment begins with its token, so the text behind it stands at no text's start, as in the whole:
some sentencepiece-like pre-tokenizers write a space before the first word of a text alone. Whether
all of it holds for a tokenizer is probed when it is loaded; where not, texts are tokenised whole.

`tools/bench/tokenise.py` on the demo's tokenizer and 96k tokens of a recorded session tells what it
is worth: ratios of the whole text's time.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import re
import threading
from array import array
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

CACHE_BYTES = 32 << 20
"""Of ids and keys: about eight million tokens, or eighty prompts of 96k that share nothing."""

_ENTRY_BYTES = 200
"""What a segment costs beside its ids."""

_PROBE_WORDS = ("", " ", "a", " b ", "\n", "word", "  x  y", "1", "é", "\u2581", ".", "\u0301")


class TokenCache:
    """Thread-safe. `tokenizer`: mlx-lm's TokenizerWrapper.

    cuts    texts are cut; else each is tokenised whole
    joins   a text may be cut anywhere: the second piece gets no space of its own
    hits, misses   tokens that were remembered, and that were not, since the start
    """

    def __init__(self, tokenizer: Any, max_bytes: int = CACHE_BYTES):
        self._tokenizer = tokenizer
        self._max_bytes = max_bytes
        # A tokenizer's settings are changed by every call of transformers' `encode`: a second thread
        # in it gets "Already borrowed". The backend's own changes nothing, so that a short text need not
        # wait for a long one.
        self._encoding = _Shared()
        self._lock = threading.Lock()
        self._segments: OrderedDict[bytes, array[int]] = OrderedDict()
        self._bytes = 0
        self.hits = 0
        self.misses = 0
        self._backend: Any = getattr(tokenizer, "backend_tokenizer", None)
        self._tokens, self._cutting = _added_tokens(self._backend)
        self._lead = min(self._cutting, default="")
        self.cuts = bool(self._cutting) and self._proven()
        self.joins = self.cuts and self._joins()

    @property
    def nbytes(self) -> int:
        return self._bytes

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        """The ids of `text`: those of transformers' own `encode`, to the last one.

        special  add what the tokenizer puts around a text (then nothing is remembered)
        """
        if special or not self.cuts:
            return self._whole(text, special)
        return self.encode_pieces([text])

    def encode_pieces(self, pieces: list[str]) -> list[int]:
        """The ids of each piece, one after the other, none beginning a text. Needs `cuts`."""
        first, *others = pieces
        segments = self._split(first)
        led: set[int] = set()
        for piece in others:
            following = self._split(piece)
            if following and self._tokens.match(following[0]) is None:
                # Behind a token, as nothing before it: what a tokenizer puts before a text's first
                # word would be put before this piece otherwise.
                following[0] = self._lead + following[0]
                led.add(len(segments))
            segments += following
        tokens: list[int] = []
        for index, ids in enumerate(self._ids(segments)):
            tokens += ids[1:] if index in led else ids
        return tokens

    def _ids(self, segments: list[str]) -> list[array[int]]:
        keys = [hashlib.blake2b(segment.encode(), digest_size=16).digest() for segment in segments]
        found = self._known(keys)
        missing = list({key: i for i, key in enumerate(keys) if key not in found}.values())
        if missing:
            with self._encoding.together():
                encoded = self._backend.encode_batch_fast(
                    [segments[i] for i in missing], add_special_tokens=False
                )
            new = {keys[i]: array("I", one.ids) for i, one in zip(missing, encoded, strict=True)}
            self._remember(new)
            found |= new
        return [found[key] for key in keys]

    def cuts_at(self, content: str) -> bool:
        """Whether texts are cut before the added token `content`."""
        return self.cuts and content in self._cutting

    # ----------------------------------------------------------------- cutting

    def _split(self, text: str) -> list[str]:
        at = [match.start() for match in self._tokens.finditer(text) if match[0] in self._cutting]
        bounds = [0, *at, len(text)]
        return [text[a:b] for a, b in itertools.pairwise(bounds) if b > a]

    def _whole(self, text: str, special: bool) -> list[int]:
        with self._encoding.alone():
            return list(self._tokenizer.encode(text, add_special_tokens=special))

    def _proven(self) -> bool:
        """Whether cutting gives the ids of the whole, on borders of every kind that breaks it."""
        if not hasattr(self._backend, "encode_batch_fast"):
            return False
        self._backend.no_truncation()
        self._backend.no_padding()
        tokens = sorted(self._cutting)[:8]
        words = [[f"{one}{token}{two}" for one in _PROBE_WORDS for two in _PROBE_WORDS] for token in tokens]
        texts = ["".join(itertools.chain(*words)), *words[0]]
        if any(self._pieces_alone([text]) != [self._whole(text, False)] for text in texts):
            return False
        # transformers' own `encode` asks the backend; for all others we ask it too, in one call.
        others = list(itertools.chain(*words[1:]))
        with self._encoding.together():
            whole = self._backend.encode_batch(others, add_special_tokens=False)
        return self._pieces_alone(others) == [one.ids for one in whole]

    def _joins(self) -> bool:
        """Whether pieces of a text, cut within a word, read as the text did."""
        texts = (["a", "b"], ["a b", "c"], ["a", " b"])
        decoded = [self._tokenizer.decode(self.encode_pieces(pieces)) for pieces in texts]
        # Some decoders drop the space before the first word.
        return [text.strip() for text in decoded] == ["".join(pieces) for pieces in texts]

    def _pieces_alone(self, texts: list[str]) -> list[list[int]]:
        """The ids of each of `texts`, each of its pieces tokenised as a text of its own."""
        cut = [self._split(text) for text in texts]
        encoded = iter(self._backend.encode_batch_fast([*itertools.chain(*cut)], add_special_tokens=False))
        return [[id for _ in pieces for id in next(encoded).ids] for pieces in cut]

    # ----------------------------------------------------------------- remembering

    def _known(self, keys: list[bytes]) -> dict[bytes, array[int]]:
        found: dict[bytes, array[int]] = {}
        with self._lock:
            for key in keys:
                ids = self._segments.get(key)
                if ids is None:
                    continue
                found[key] = ids
                self._segments.move_to_end(key)
                self.hits += len(ids)
        return found

    def _remember(self, new: dict[bytes, array[int]]) -> None:
        with self._lock:
            for key, ids in new.items():
                self.misses += len(ids)
                if key not in self._segments:
                    self._segments[key] = ids
                    self._bytes += _cost(ids)
            while self._bytes > self._max_bytes and self._segments:
                _, ids = self._segments.popitem(last=False)
                self._bytes -= _cost(ids)


class _Shared:
    """A lock that any number of threads hold together, or one alone."""

    def __init__(self) -> None:
        self._free = threading.Condition()
        self._holders = 0

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        with self._free:
            self._holders += 1
        try:
            yield
        finally:
            with self._free:
                self._holders -= 1
                self._free.notify_all()

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        with self._free:  # Held to the end: nobody joins meanwhile.
            self._free.wait_for(lambda: not self._holders)
            yield


def _cost(ids: array[int]) -> int:
    return len(ids) * ids.itemsize + _ENTRY_BYTES


def _added_tokens(backend: Any) -> tuple[re.Pattern[str], frozenset[str]]:
    """A pattern of all added tokens that are looked for in the raw text, and those that cut."""
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
