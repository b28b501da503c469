"""Keeps facts about images on disk, so that after a restart none is decoded or seen again.

| record   | its name is a digest of                                             | payload             |
|----------|---------------------------------------------------------------------|---------------------|
| picture  | its encoded bytes, the processor's settings, the decoders' versions | digests, tokens     |
| features | the image's digest and a number: several records of an image        | the tower's output  |

Records (kv/files/record_file.py) lie beside the KV, in its namespace: other weights have others. The block
writers write them, and nobody waits: what the queue, the disk, the cap or the write policy refuses is done
without. A record that is missing or fails a check is no record: the image is decoded, or seen, again.

Features take a tenth to a fifth of the bytes of the same tokens' KV: 9.6 MB beside 76 for a screenshot of
1280 x 800 in Qwen2.5-VL 7B, 33 beside 147 in Qwen3-VL 8B, whose deepstack has three layers' features besides.
"""

from __future__ import annotations

import logging
import threading
from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated

import msgspec
import numpy as np

from ...common.bounded_map import BoundedMap
from ...kv.cold.flusher import WritePolicy
from ...kv.cold.writer import Lease, StoreWriter
from ...kv.files.record_file import HEAD_BYTES, MOST_BYTES, Record, RecordError, RecordFiles
from ..prompt.canonical import digest_of
from .image import Image
from .media import Identity, Key

log = logging.getLogger(__name__)

FORMAT = "omlxd-images-1"
"""Part of every name: raise it when the meaning of a record or the decoding changes."""
PART_BYTES = MOST_BYTES - HEAD_BYTES
MOST_PARTS = 256
"""Parts of an image's features at most, 256 MiB; a larger one is seen again."""
MOST_WRITTEN = 4096
"""Images remembered as on disk."""


class _Picture(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """The content of `Identity` and `Image`. `tokens`: u32, little-endian. `grid`: None or three numbers."""

    width: int
    height: int
    rgb_digest: Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
    digest: Annotated[str, msgspec.Meta(min_length=64, max_length=64)]
    tokens: Annotated[bytes, msgspec.Meta(min_length=4)]
    grid: tuple[int, int, int] | None
    values: int
    tiles: int


_decoder = msgspec.msgpack.Decoder(_Picture)


class ImageFiles:
    """The images of one model. Thread-safe. `processor`: a digest of its settings.

    admits  the write policy, asked for features with the image's digest and the tokens of its prompt
    counts  of images: `remembered` (neither decoded nor processed), `restored` and `written` (features)
    """

    def __init__(self, records: RecordFiles, writer: StoreWriter, lease: Lease, admits: WritePolicy):
        self._records = records
        self._writer = writer
        self._lease = lease
        self._admits = admits
        self._lock = threading.Lock()
        self._written: BoundedMap[str, bool] = BoundedMap(max_items=MOST_WRITTEN)
        self.counts: Counter[str] = Counter()
        self.processor = b""

    # ----------------------------------------------------------------- pictures

    def _picture_name(self, key: Key) -> bytes:
        return digest_of(FORMAT, "picture", self.processor, _DECODERS, repr(key), size=32)

    def load_picture(self, key: Key) -> tuple[Identity, Image] | None:
        """Return the record of a picture; None: no record, or the disk can't be read now."""
        name = self._picture_name(key)
        try:
            known = _decoded(data) if (data := self._load(name)) is not None else None
        except ValueError as error:
            self._remove(name, error)
            return None
        if known is not None:
            self._count("remembered")
        return known

    def save_picture(self, key: Key, identity: Identity, image: Image) -> None:
        grid = None if image.grid is None else tuple(image.grid.reshape(-1).tolist())
        known = _Picture(
            identity.width,
            identity.height,
            identity.digest,
            image.digest,
            image.tokens.tobytes(),
            grid,  # type: ignore[arg-type]
            image.values,
            image.tiles,
        )
        self._save(self._picture_name(key), msgspec.msgpack.encode(known))

    def used(self, keys: Sequence[Key]) -> None:
        """Note that a prompt has these pictures."""
        self._touch([self._picture_name(key) for key in keys])

    # ----------------------------------------------------------------- features

    def load_features(self, digest: str) -> bytes | None:
        """Return an image's features as saved; None: not all of them are there."""
        first = self._load(_part_name(digest, 0))
        names = [_part_name(digest, part) for part in range(1, first[0] + 1)] if first else []
        parts = [first[1:] if first else None, *map(self._load, names)]
        whole = [part for part in parts if part is not None]
        if len(whole) < len(parts):
            self._written.pop(digest)  # It may have been evicted.
            return None
        self._touch([_part_name(digest, 0), *names])
        self._written.put(digest, True)
        self._count("restored")
        return b"".join(whole)

    def wants(self, digest: str, prompt_tokens: int) -> bool:
        """Return whether to write features; asked each time that a prompt uses them."""
        with self._lock:
            if digest in self._written:
                return False
            return self._admits(bytes.fromhex(digest), prompt_tokens)

    def save_features(self, digest: str, data: bytes) -> None:
        parts = [data[: PART_BYTES - 1]]
        parts += [data[at : at + PART_BYTES] for at in range(PART_BYTES - 1, len(data), PART_BYTES)]
        if len(parts) > MOST_PARTS:
            return
        self._written.put(digest, True)
        left = [len(parts)]

        def settled(in_place: bool) -> None:
            with self._lock:
                left[0] -= 1
                if not in_place:  # Another prompt may try again.
                    self._written.pop(digest)
                elif not left[0] and digest in self._written:
                    self.counts["written"] += 1

        # The first, without which the others are not looked for, is the last that is written.
        for part in range(len(parts) - 1, -1, -1):
            head = bytes([len(parts) - 1]) if part == 0 else b""
            if not self._save(_part_name(digest, part), head + parts[part], settled):
                settled(False)
                return

    # ----------------------------------------------------------------- records

    def _load(self, name: bytes) -> bytes | None:
        """Return a record's payload; None: no good one, or the disk can't be read now."""
        health = self._writer.health
        if not health.may_read():
            return None
        try:
            payload = self._records.load(name)
        except FileNotFoundError:
            return None
        except RecordError as error:
            self._remove(name, error)
            return None
        except OSError as error:
            health.read_failed(error)
            return None
        health.was_read()
        return payload

    def _remove(self, name: bytes, error: Exception) -> None:
        log.warning("images: %s: %s; removed", self._records.path_of(name), error)
        if self._records.remove(name):
            self._lease.dropped(self._records.path_of(name))

    def _save(self, name: bytes, payload: bytes, done: Callable[[bool], None] = lambda _: None) -> bool:
        record = Record(self._records, name, payload)
        return self._writer.submit(record.key, record, done, record)

    def _touch(self, names: Sequence[bytes]) -> None:
        def touch() -> None:
            self._records.touch(names)
            self._lease.touched([self._records.path_of(name) for name in names])

        self._writer.after_queued(touch)

    def _count(self, name: str) -> None:
        with self._lock:
            self.counts[name] += 1


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


_DECODERS = f"{_version('pillow')} {_version('pypdfium2')}"
"""Versions of the decoders, since another may give other pixels."""


def _part_name(digest: str, part: int) -> bytes:
    return digest_of(FORMAT, "features", digest, str(part), size=32)


def _decoded(payload: bytes) -> tuple[Identity, Image]:
    """Decode a record. Raises ValueError for nonsense."""
    known = _decoder.decode(payload)
    tokens = array("I", known.tokens)
    grid = None if known.grid is None else np.array([known.grid])
    return (
        Identity(known.width, known.height, known.rgb_digest),
        Image(known.digest, tokens, grid, known.values, known.tiles),
    )
