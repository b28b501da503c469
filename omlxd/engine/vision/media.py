"""Decodes the images and PDFs of requests, in a child process (media_child.py), on request threads.

An agent sends all its images with each turn, so what was seen lately is not decoded again: `identities` knows
a picture by the digest of its encoded bytes, and a cached prefix needs no pixels.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from ... import chat
from ...common.bounded_map import BoundedMap
from ...common.child_process import ChildLost, ChildProcesses
from ...errors import bad_field

MEMORY_BYTES = 1536 << 20
"""Bytes of a child. The most of 64 million pixels is taken by a WebP with transparency: 1.1 GB."""
CPU_S = 60
DEADLINE_S = 20.0
"""Seconds for one picture, or for a PDF's text."""
REQUEST_DEADLINE_S = 60.0
"""Seconds for all images of a request, and for all its PDFs."""
MOST_IDENTITIES = 4096
RECENT_BYTES = 64 << 20
"""Bytes of decoded pictures that are kept: ten screenshots of 1920 x 1080."""
TEXT_CHARS = 16 << 20
"""Characters of PDFs' texts that are kept."""

T = TypeVar("T")

Key = tuple[bytes, int, int]
"""SHA-256 of the encoded bytes, a PDF's page, and the longest side."""
Keyed = tuple[chat.ImagePart, Key]
_Pixels = tuple[tuple[int, int, bytes] | None, str]
Size = tuple[float, float]
"""Size of a PDF's page in points: pages of one size make pictures of one size."""


class Identity(msgspec.Struct, frozen=True):
    """A picture without its pixels.

    digest  SHA-256 of size and RGB bytes: the same for PNG and any lossless encoding of it
    """

    width: int
    height: int
    digest: bytes

    @property
    def identity(self) -> Identity:
        return Identity(self.width, self.height, self.digest)


class Picture(Identity, frozen=True, kw_only=True):
    """An image's first frame, turned as its EXIF says, at most `media_child.MOST_PIXELS` pixels.

    rgb  height * width * 3 bytes, row-major; transparency is over white
    """

    rgb: bytes


class TimeLeft:
    """Time left to read the images of a request, or its PDFs; `what`: one of them."""

    def __init__(self, what: str):
        self._what = what
        self._left = REQUEST_DEADLINE_S

    def spend(self, param: str, call: Callable[[float], T]) -> T:
        """Return `call(seconds)`, with the time for one. Raises InvalidRequest if none is left."""
        if self._left <= 0:
            raise bad_field(
                param,
                f"the {self._what}s before this one took {REQUEST_DEADLINE_S:.0f} s to read; send it again, "
                "which goes on here, or send fewer",
            )
        began = time.monotonic()
        try:
            return call(min(DEADLINE_S, self._left))
        finally:
            self._left -= time.monotonic() - began


class Media:
    """Owns the children that decode. Thread-safe.

    recall  tells of a picture not seen lately, if something is known of it
    """

    def __init__(self) -> None:
        script = Path(__file__).with_name("media_child.py")
        self._children = ChildProcesses(script, MEMORY_BYTES, CPU_S)
        self._identities: BoundedMap[Key, Identity] = BoundedMap(max_items=MOST_IDENTITIES)
        self._recent: BoundedMap[Key, Picture] = BoundedMap(RECENT_BYTES, lambda picture: len(picture.rgb))
        self._documents: BoundedMap[tuple[bytes, str], list[Any]] = BoundedMap(
            TEXT_CHARS, lambda pages: sum(map(len, pages))
        )
        self.recall: Callable[[Key], Identity | None] = lambda key: None

    def identities(self, parts: Iterable[Keyed], param: str = "messages") -> Iterator[Identity]:
        """Yield size and digest of each image; decodes those not seen lately. Raises InvalidRequest."""
        for seen in self._seen(parts, param, self._identities, self.recall):
            yield seen.identity

    def pictures(self, parts: Iterable[chat.ImagePart], param: str = "messages") -> Iterator[Picture]:
        """Yield each image with its pixels, up to 48 MiB each. Raises InvalidRequest."""
        return self._seen(keyed(parts), param, self._recent, lambda key: None)

    def _seen(
        self,
        parts: Iterable[Keyed],
        param: str,
        kept: BoundedMap[Key, Any],
        recall: Callable[[Key], Identity | None],
    ) -> Iterator[Any]:
        """Yield what is `kept` of each part, or recalled, or its picture."""
        left = TimeLeft("image")
        for part, key in parts:
            seen = kept.get(key)
            if seen is None and (seen := recall(key)) is not None:
                kept.put(key, seen)
            if seen is None:
                named = part.param or param
                seen = left.spend(named, partial(self._decode, part, key, named))
            yield seen

    def texts(self, document: chat.DocumentPart, left: TimeLeft | None = None) -> list[str]:
        """Return the text of each page of a PDF. Raises InvalidRequest."""
        return self._ask("texts", document, tuple[list[str] | None, str], left or TimeLeft("PDF"))

    def pages(self, document: chat.DocumentPart, left: TimeLeft | None = None) -> list[Size]:
        """Return the size of each page of a PDF. Raises InvalidRequest."""
        return self._ask("pages", document, tuple[list[Size] | None, str], left or TimeLeft("PDF"))

    @property
    def busy(self) -> bool:
        """Whether a child works for a request. Each call has a deadline."""
        return self._children.under_way > 0

    def sizes(self, parts: Iterable[Keyed]) -> Iterator[Size | None]:
        """Yield the size of each page of a PDF read lately; None: an image, or it is not known."""
        for _, (digest, page, _side) in parts:
            pages = self._documents.get((digest, "pages")) if page else None
            yield pages[page - 1] if pages else None

    def drop_pictures(self) -> int:
        """Drop pictures, which can be decoded again; returns their number."""
        return self._recent.clear()

    def warm_up(self) -> None:
        """Start a child, and have it import what it needs. Raises ChildLost."""
        self._children.call(("picture", b""), _Pixels, DEADLINE_S)

    def close(self) -> None:
        """End the children that wait for work."""
        self._children.close()

    def _decode(self, part: chat.ImagePart, key: Key, param: str, seconds: float) -> Picture:
        what = f"page {part.page} of {_pdf(part.name)}" if part.page else "the image"
        try:
            pixels, why = self._children.call(("picture", part.data, part.page, part.side), _Pixels, seconds)
        except ChildLost as lost:
            raise bad_field(param, f"{what} can't be read: {lost}") from None
        if pixels is None:
            raise bad_field(param, f"{what} {why}")
        width, height, rgb = pixels
        digest = hashlib.sha256(b"%d x %d " % (width, height) + rgb).digest()
        picture = Picture(width, height, digest, rgb=rgb)
        self._identities.put(key, Identity(width, height, digest))
        self._recent.put(key, picture)
        return picture

    def _ask(
        self, kind: str, document: chat.DocumentPart, reply: type[tuple[list[T] | None, str]], left: TimeLeft
    ) -> list[T]:
        key = (hashlib.sha256(document.data).digest(), kind)
        if (answer := self._documents.get(key)) is not None:
            return answer
        what = _pdf(document.name)
        try:
            answer, why = left.spend(
                document.param, lambda seconds: self._children.call((kind, document.data), reply, seconds)
            )
        except ChildLost as lost:
            raise bad_field(document.param, f"{what} can't be read: {lost}") from None
        if answer is None:
            raise bad_field(document.param, f"{what} {why}")
        self._documents.put(key, answer)
        return answer


def _pdf(name: str) -> str:
    return f"the PDF {name[:200]!r}" if name else "the PDF"


def keyed(parts: Iterable[chat.ImagePart]) -> list[Keyed]:
    """Return each part with its key. Pages share the bytes of their PDF, which are hashed once."""
    hashed: dict[int, bytes] = {}
    pairs: list[Keyed] = []
    for part in parts:
        name = id(part.data)
        if name not in hashed:
            hashed[name] = hashlib.sha256(part.data).digest()
        pairs.append((part, (hashed[name], part.page, part.side)))
    return pairs
