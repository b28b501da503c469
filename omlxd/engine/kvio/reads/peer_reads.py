"""Blocks that another omlxd of the owner has are put into the own SSD cache, before a prompt is matched.

So they are leased, written and counted as any file of it is, and what follows is a restore from SSD. A peer
is asked once a prompt, where what is missing takes longer than `LEAST_S` to compute; how much of it is read
the rates say (rates.py), as they are measured. Each file is checked by its digest as it comes. Whatever fails
is a miss. A file that fails its check is not asked for again; a peer that can't be asked, or gives
`BAD_IN_A_ROW` of these, is left out for `AWAY_S`. The engine thread never waits; the prompt does, at most as
long as it would take to be computed, or a second.

A model that keeps state at positions gets the blocks up to the peer's deepest checkpoint, and that.
"""

from __future__ import annotations

import logging
import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Set
from collections.abc import Sequence as Seq
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

from ....kv.checkpoint import Checkpoints, checkpoint_name
from ....kv.cold.tier import ColdTier
from ....kv.files.block_file import BlockKey
from ....kv.hashing import BlockHash
from ....kv.peer.identity import PeerError
from ....kv.store import KVStore
from ...sequence.sequence import Sequence
from .rates import LEAST_S, Rates

log = logging.getLogger(__name__)

AWAY_S, MOST_AWAY_S = 30.0, 600.0
"""Seconds for which a peer is left out: twice as long after each failure that follows another."""
BAD_IN_A_ROW = 3
"""Files that fail their check, one after another, until the peer is left out."""
LEAST_WAIT_S, UNMEASURED_S = 1.0, 20.0
"""Seconds of reading at most: of a prompt that is computed in less, and while nothing is measured."""
WRITE_S = 10.0
"""Seconds for what came to be on the SSD."""
AT_ONCE = 4
"""Prompts for which the peer is asked at the same time; others are computed."""

Ready = Callable[[], None]


class Connection(Protocol):
    """To the peer, about this store's namespace (omlxd/kv/peer/client.py). Each call raises PeerError."""

    def look(self, names: Seq[bytes], model: str, facts: dict[str, Any]) -> tuple[list[bool], str]: ...

    def read(self, names: Seq[bytes], sizes: Seq[int]) -> Any: ...


@dataclass(slots=True, frozen=True)
class Peer:
    """Whom to ask. connect(s): for at most s seconds; model, facts: of the namespace, to say what differs.

    unpaired()  that this machine is paired with none, a clause; "": it is with some
    """

    host: str
    connect: Callable[[float], AbstractContextManager[Connection]]
    model: str
    facts: dict[str, Any]
    unpaired: Callable[[], str] = lambda: ""


@dataclass(slots=True)
class PeerStats:
    """Counts since the start. bad: files that failed their check; failures: times that it was left out."""

    blocks: int = 0
    nbytes: int = 0
    bad: int = 0
    failures: int = 0


@dataclass(slots=True)
class _Ask:
    """A question under way. `have` blocks are here, of `limit`; `resume`: up to where a state stands."""

    sequence: Sequence
    have: int
    resume: int
    limit: int
    names: Set[BlockHash]
    most_s: float
    waiting: list[Ready] = field(default_factory=list)


@dataclass(slots=True, frozen=True)
class _File:
    """A payload of StoreWriter: a whole file."""

    data: bytearray

    @property
    def nbytes(self) -> int:
        return len(self.data)

    def buffers(self) -> Seq[memoryview]:
        return [memoryview(self.data)]


@dataclass(slots=True, frozen=True)
class _AsItCame:
    """A tier of StoreWriter, whose payloads are whole files."""

    tier: ColdTier

    @property
    def bytes_per_block(self) -> int:
        return self.tier.bytes_per_block

    def path_of(self, block_hash: BlockHash) -> str:
        return self.tier.path_of(block_hash)

    def store(self, key: BlockKey, buffers: Seq[memoryview]) -> None:
        self.tier.store_file(key.block_hash, buffers)


class PeerReads:
    """One store's. `rates`: its own, for the rate of prefill. `post(f)` runs `f` on the engine thread."""

    def __init__(
        self,
        peer: Peer,
        store: KVStore,
        rates: Rates,
        post: Callable[[Callable[[], None]], None],
        checkpoints: Checkpoints | None,
        clock: Callable[[], float] = time.monotonic,
    ):
        assert store.cold is not None and store.flusher is not None
        self._peer, self._store, self._cold, self._post = peer, store, store.cold, post
        self._writer, self._checkpoints, self._clock = store.flusher.writer, checkpoints, clock
        self._own_rates, self._block = rates, store.block_size
        self.rates = Rates(store.block_size, store.cold.format.file_bytes)
        self.stats = PeerStats()
        self._away_until, self._away_s = 0.0, AWAY_S
        self._why, self._said = "", ""
        """Why it is left out, or was and was not asked since; what does not agree."""
        self._bad, self._bad_in_a_row = set[bytes](), 0
        self._under_way: list[_Ask] = []
        self._threads = ThreadPoolExecutor(AT_ONCE, thread_name_prefix="kv-peer")
        if trouble := self.trouble:
            log.warning("peer %s: %s", peer.host, trouble)

    @property
    def is_on(self) -> bool:
        return self._clock() >= self._away_until

    @property
    def trouble(self) -> str:
        """Why nothing comes from it, a clause; "": nothing is known against it. Any thread."""
        return self._peer.unpaired() or self._why or self._said

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    # ----------------------------------------------------------------- on the engine thread

    def begin(self, sequence: Sequence, limit: int, ready: Ready) -> bool:
        """Get what is missing of the sequence's first `limit` blocks. True: `ready()` follows."""
        if not self.is_on or not limit:
            return False
        hashes, states = sequence.kv.hashes, self._checkpoints
        # Chains lose their ends first, so what is here is nearly always a beginning.
        have = bisect_left(range(limit), True, key=lambda at: not self._store.where(hashes[at]))
        if not self._cold.format.layout.groups:
            have = limit
        resume = have
        if states is not None:
            resume = next((n for n in range(have, 0, -1) if states.stands(hashes[n - 1])), 0)
        if resume == limit:
            return False
        for other in self._under_way:
            if hashes[resume] in other.names:
                other.waiting.append(ready)
                return True
        self.rates.prefill = self._own_rates.prefill
        compute_s = self.rates.compute_s(limit - resume)
        if 0 < compute_s < LEAST_S or len(self._under_way) >= AT_ONCE or not self._store.fits_disk(limit):
            return False
        most_s = max(compute_s, LEAST_WAIT_S) if compute_s else UNMEASURED_S
        ask = _Ask(sequence, have, resume, limit, {*hashes[resume:limit]}, most_s, [ready])
        self._threads.submit(self._run, ask)
        self._under_way.append(ask)
        return True

    def _end(self, ask: _Ask) -> None:
        self._under_way.remove(ask)
        for ready in ask.waiting:
            ready()

    # ----------------------------------------------------------------- on a thread of its own

    def _run(self, ask: _Ask) -> None:
        try:
            if self._peer.unpaired():  # It may be any moment: nothing is left out for that.
                return
            with self._peer.connect(ask.most_s) as connection:
                self._read(ask, connection)
            if self._away_until:
                log.info("peer %s answers again", self._peer.host)
                self._away_until, self._away_s, self._why = 0.0, AWAY_S, ""
        except PeerError as error:
            self.stats.failures += 1
            self._leave_out(str(error))
        except Exception:
            log.exception("peer %s: reading failed", self._peer.host)
            self._leave_out("reading failed: see the log")
        finally:
            self._post(lambda: self._end(ask))

    def _leave_out(self, why: str) -> None:
        level = logging.DEBUG if why == self._why else logging.WARNING
        log.log(level, "peer %s is left out for %.0f s: %s", self._peer.host, self._away_s, why)
        self._away_until, self._why = self._clock() + self._away_s, why
        self._bad.clear()
        self._bad_in_a_row = 0
        self._away_s = min(2 * self._away_s, MOST_AWAY_S)

    def _read(self, ask: _Ask, connection: Connection) -> None:
        files = self._files_there(ask, connection)
        if not files:
            return
        nbytes = sum(tier.format.file_bytes for _, tier in files)
        if self.rates.computing_pays(self.rates.read_s(nbytes), ask.limit - ask.resume):
            self.rates.doubt()
            return
        began, done, ended_early = self._clock(), 0, False
        written = _Written()
        names = [key.block_hash for key, _ in files]
        sizes = [tier.format.file_bytes for _, tier in files]
        try:
            for (key, tier), data in zip(files, connection.read(names, sizes), strict=True):
                if not data or ask.sequence.cancelled or not self._take(key, tier, data, written):
                    break
                done += len(data)
                took = self._clock() - began
                left_s = took / done * (nbytes - done)
                left = round((ask.limit - ask.resume) * (nbytes - done) / nbytes)
                if ended_early := took > LEAST_S and self.rates.computing_pays(left_s, left):
                    break
        finally:
            self.rates.record_read(done, self._clock() - began, ended_early=ended_early)
            written.wait(WRITE_S)

    def _files_there(self, ask: _Ask, connection: Connection) -> list[tuple[BlockKey, ColdTier]]:
        """What the peer has of what is missing, as far as it is of use, in the order in which it is read."""
        hashes, states = ask.sequence.kv.hashes, self._checkpoints
        names = hashes[ask.have : ask.limit]
        ends = range(ask.resume + 1, ask.limit + 1) if states is not None else range(0)
        asked = [*names, *(checkpoint_name(hashes[end - 1]) for end in ends)]
        there, differs = connection.look(asked, self._peer.model, self._peer.facts)
        there = [is_there and name not in self._bad for is_there, name in zip(there, asked, strict=True)]
        said, self._said = self._said, differs
        if differs and differs != said:
            log.warning("peer %s has KV of this model that can't be used: %s", self._peer.host, differs)
        reach = ask.have + (there.index(False) if False in there[: len(names)] else len(names))
        if states is None:
            return [(ask.sequence.key(at, self._block), self._cold) for at in range(ask.have, reach)]
        stand = [end for end, is_there in zip(ends, there[len(names) :], strict=True) if is_there]
        deepest = max((end for end in stand if end <= reach), default=0)
        if not deepest:
            return []
        blocks = [(ask.sequence.key(at, self._block), self._cold) for at in range(ask.have, deepest)]
        return [*blocks, states.file_at(hashes[deepest - 1], deepest * self._block)]

    def _take(self, key: BlockKey, tier: ColdTier, data: bytearray, written: _Written) -> bool:
        """Have a file written. False: it fails its check, or there is no room.

        Raises PeerError for the last bad one of several in a row.
        """
        if not tier.format.is_file_of(key, memoryview(data)):
            self.stats.bad += 1
            self._bad.add(key.block_hash)
            self._bad_in_a_row += 1
            if self._bad_in_a_row >= BAD_IN_A_ROW:
                raise PeerError(f"{BAD_IN_A_ROW} files in a row fail their check")
            log.warning("peer %s: its %s fails its check", self._peer.host, tier.path_of(key.block_hash))
            return False
        self._bad_in_a_row = 0
        flusher = self._store.flusher
        assert flusher is not None
        if flusher.is_removing(key.block_hash) or not self._writer.wait_for_room(len(data), WRITE_S):
            return False
        written.begin()
        if not self._writer.submit(key, _File(data), written.end, _AsItCame(tier)):
            written.end(False)
            return False
        self.stats.blocks += 1
        self.stats.nbytes += len(data)
        return True


class _Written:
    """Counts stores that are not settled."""

    def __init__(self) -> None:
        self._left, self._settled = 0, threading.Condition()

    def begin(self) -> None:
        with self._settled:
            self._left += 1

    def end(self, in_place: bool) -> None:
        with self._settled:
            self._left -= 1
            self._settled.notify_all()

    def wait(self, seconds: float) -> None:
        with self._settled:
            self._settled.wait_for(lambda: not self._left, seconds)
