"""Keeps remembered turns on disk, so that a session goes on after its engine or the daemon has died.

One record (kv/files/record_file.py) a place, beside its KV: token ids and digests, no text. Its name is a
digest of the place and the tokenizer, so nothing is searched; the namespace's folder stands for the rest.

The block writers write it, and nobody waits: what the queue, the disk or the cap refuses is counted. A record
that is missing or fails a check is no record: the turn is rendered as the client sent it.
"""

from __future__ import annotations

import logging
import threading
from array import array
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated

import msgspec

from ...kv.cold.writer import Lease, StoreWriter
from ...kv.files.record_file import HEAD_BYTES, MOST_BYTES, Record, RecordError, RecordFiles
from .canonical import digest_of
from .turn_memory import Place, Said, Turn

log = logging.getLogger(__name__)

FORMAT = "omlxd-turns-1"
"""Part of every name: raise it when the meaning of a record or a canonical digest changes."""

_COUNTERS = ("written", "dropped", "found", "bad")


_Digest = Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]


class _Stored(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """A turn in a record. `tokens`: u32, little-endian, as is every machine that MLX runs on."""

    answer: _Digest
    thought: _Digest | None
    prompt: _Digest
    prompt_length: int
    tokens: bytes
    prompt_and_turn: _Digest


_decoder = msgspec.msgpack.Decoder(Annotated[list[_Stored], msgspec.Meta(min_length=1)])


class TurnFiles:
    """The places of one model. Thread-safe. `tokenizer`: a digest of it; `most_bytes`: of a record.

    counts  of records: `written`, `dropped`, `found`, `bad` (removed)
    """

    def __init__(
        self,
        records: RecordFiles,
        writer: StoreWriter,
        lease: Lease,
        tokenizer: bytes,
        most_bytes: int = MOST_BYTES,
    ):
        self._records = records
        self._writer = writer
        self._lease = lease
        self._tokenizer = tokenizer
        self._most_bytes = most_bytes - HEAD_BYTES
        self._lock = threading.Lock()
        self.counts: Counter[str] = Counter()

    def _count(self, name: str) -> None:
        with self._lock:
            self.counts[name] += 1

    def figures(self) -> dict[str, float]:
        return {f"prompt_turn_records_{name}_total": self.counts[name] for name in _COUNTERS}

    def name_of(self, place: Place) -> bytes:
        """Return a name of 32 bytes."""
        return digest_of(FORMAT, self._tokenizer, *place.scope, place.before, size=32)

    def path_of(self, place: Place) -> str:
        """Return the path relative to the cache dir."""
        return self._records.path_of(self.name_of(place))

    # ----------------------------------------------------------------- reading

    def load(self, place: Place) -> dict[Said, Turn] | None:
        """Return turns by what was sent, none without a good record; None: the disk can't be read."""
        health = self._writer.health
        if not health.may_read():
            return None
        try:
            turns = decoded(self._records.load(self.name_of(place)))
        except FileNotFoundError:
            return {}
        except (RecordError, ValueError) as error:
            self._count("bad")
            log.warning("turn memory: %s: %s; removed", self.path_of(place), error)
            self.remove(place)
            return {}
        except OSError as error:
            health.read_failed(error)
            return None
        health.was_read()
        self._count("found")
        return turns

    # ----------------------------------------------------------------- writing

    def save(self, place: Place, turns: Mapping[Said, Turn], done: Callable[[bool], None]) -> bool:
        """Queue a record of `turns`, the newest last: as many of these as it may hold."""
        payload = encoded(turns, self._most_bytes)
        record = Record(self._records, self.name_of(place), payload)

        def settled(in_place: bool) -> None:
            self._count("written" if in_place else "dropped")
            done(in_place)

        if payload and self._writer.submit(record.key, record, settled, record):
            return True
        self._count("dropped")
        return False

    def remove(self, place: Place) -> None:
        name = self.name_of(place)
        if self._records.remove(name):
            self._lease.dropped(self._records.path_of(name))

    def used(self, places: Sequence[Place]) -> None:
        names = [self.name_of(place) for place in places]

        def touch() -> None:
            self._records.touch(names)
            self._lease.touched([self._records.path_of(name) for name in names])

        self._writer.after_queued(touch)


def encoded(turns: Mapping[Said, Turn], most_bytes: int) -> bytes:
    """Encode a record's payload, without the oldest turns if it were too long; empty: none fits."""
    kept: list[_Stored] = []
    room = most_bytes - 5
    for (answer, thought), turn in reversed([*turns.items()]):
        tokens = turn.tokens.tobytes()
        one = _Stored(answer, thought, turn.prompt, turn.prompt_length, tokens, turn.prompt_and_turn)
        room -= len(msgspec.msgpack.encode(one))
        if room < 0:
            break
        kept.append(one)
    return msgspec.msgpack.encode(kept[::-1]) if kept else b""


def decoded(payload: bytes) -> dict[Said, Turn]:
    """Decode a payload. Raises ValueError for nonsense or no turns."""
    turns: dict[Said, Turn] = {}
    for one in _decoder.decode(payload):
        tokens = array("I", one.tokens)
        turns[one.answer, one.thought] = Turn(one.prompt, one.prompt_length, tokens, one.prompt_and_turn)
    return turns
