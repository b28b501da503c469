"""Rank 0's side: it starts the other ranks, tells them each call before it makes it, and watches them.

| thread    | does                                                                                |
|-----------|-------------------------------------------------------------------------------------|
| engine    | sends the plan, computes rank 0's share of each pass                                |
| ranks     | starts the others, here and on hosts that join (joined.py), and pings them, as long |
|           | as this process lives: on Linux the kernel                                          |
|           | ends them with the thread that started them                                         |
| rank-N    | reads what rank N says; its end ends the engine                                     |
| lease-N   | asks the front for rank N's space on SSD                                            |

A rank that ends, or is silent for `SILENCE_S`, ends the engine: the others wait in a sum for it, and no call
in one can be broken off. The front starts the engine again.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlx.core as mx
from msgspec.structs import replace

from .... import wire
from ....common.ports import free_addresses
from ....errors import ModelError, OmlxdError
from ....kv.cold.writer import Lease
from ....kv.store import KVStore
from ....models.footprint import read_config
from ....wire import plan
from ... import mlx_adapter
from ...kvio.fingerprint import weight_fingerprints
from ...kvio.open_store import memo_dir
from ...mlx_adapter import Cache, Group
from ...schedule.counts import Counts
from ...sequence.sequence import Sequence
from .compute import compute, time_link
from .figures import LinkFigures, add_figures, held, stores
from .joined import Far, reach
from .lead_lease import LeadLease
from .link import PING_S, Link

log = logging.getLogger(__name__)

START_S = 120.0
"""Seconds that a rank may take until MLX is there."""
LOAD_S = 3600.0
"""Seconds that it may take to load its share after rank 0 has."""

JACCL = (
    "--link jaccl: MLX never notices a lost peer there; the ranks' own watch ends their processes then, and "
    "memory that macOS keeps of one it has again after the Mac's next start"
)
_COMMAND = (sys.executable, "-m", "omlxd.engine", "--follow")


def share(budget: wire.Budget, world: int) -> wire.Budget:
    """A rank's part of what the engine may hold on this machine."""

    def part(nbytes: int | None) -> int | None:
        return None if nbytes is None else nbytes // world

    hot, live, most, freed = map(part, (budget.hot, budget.live, budget.most, budget.freed))
    return replace(budget, hot=hot, live=live, most=most, freed=freed)


def share_of_load(load: wire.Load) -> wire.Load:
    """What each rank is to load. Raises ModelError for what several ranks can't do."""
    folder = Path(load.model_path)
    mlx_adapter.check_split(read_config(folder), load.ranks)
    mlx_adapter.check_link(load.link)
    if load.link == "jaccl":
        log.warning("%s", JACCL)
    wrong = {
        "a LoRA adapter": load.adapter,
        "a draft model": load.draft_path,
        "--no-cache": not load.cache.enabled,
        "images": mlx_adapter.blindness(folder) == "",
    }
    if what := next((what for what, is_so in wrong.items() if is_so), ""):
        raise ModelError(
            f"{load.ranks} ranks can't serve a model with {what}; serve it with --ranks 1", param="--ranks"
        )
    cache = load.cache
    here = load.ranks_here
    hot = None if cache.hot_cache_bytes is None else cache.hot_cache_bytes // here
    cache = replace(
        cache, hot_cache_bytes=hot, hot_parts=here, cold_cache_bytes=cache.cold_cache_bytes // here
    )
    return replace(load, cache=cache, budget=share(load.budget, here), speculate=False, share_prefix="off")


class _Rank:
    """Another rank: its process, and what it has said."""

    def __init__(self, number: int, process: subprocess.Popen[bytes] | Far, link: Link):
        self.number, self.process, self.link = number, process, link
        self.name = f"rank {number} ({process if isinstance(process, Far) else f'process {process.pid}'})"
        self.said: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.asks: queue.SimpleQueue[Any] = queue.SimpleQueue()


class Lead:
    """The other ranks of `load`, as `share_of_load` gives it.

    end    ends this process, with a reason and whether it lasts. Any thread
    lease  the engine's own
    others  what they hold, once they are loaded
    """

    def __init__(self, load: wire.Load, lease: Lease, end: Callable[[str, bool], None]):
        self._load, self._lease, self._end = load, lease, end
        self.world = load.ranks
        self.others: list[plan.Ready] = []
        self._post: Callable[[Callable[[], None]], None] = lambda call: None
        self._model: Any = None
        self._store: KVStore | None = None
        self._link: LinkFigures | None = None
        self.group: Group
        self._ranks: list[_Rank] = []
        self._rows = 0
        self._matches: dict[int, Callable[[int, int], None]] = {}
        self._closing = False
        self._refused: OmlxdError | None = None
        self.own_host = "127.0.0.1"
        started = threading.Event()
        threading.Thread(target=self._start_and_watch, args=(started,), name="ranks", daemon=True).start()
        started.wait()

    # ----------------------------------------------------------------- start and watch

    def _start_and_watch(self, started: threading.Event) -> None:
        try:
            weights = self._start_joined()
            for number in range(1, self._load.ranks_here):
                self._ranks.append(self._start(number))
            self._ranks.sort(key=lambda rank: rank.number)
            for rank in self._ranks:
                far = isinstance(rank.process, Far)
                rank.link.send(plan.Follow(rank.number, self._load, weights if far else {}))
        except OmlxdError as error:
            self._refused = error
        except Exception as error:
            self.end(f"another rank can't be started: {error}")
        started.set()
        threading.Thread(target=self._watch, name="watch", daemon=True).start()
        while True:
            time.sleep(PING_S)
            if self._link is not None and self._link.is_old:
                self._post(self._time_link_again)
            for rank in self._ranks:
                rank.link.send(plan.Ping())

    def _watch(self) -> None:
        """Beside the pings: sending to a rank that is stopped may wait for ever."""
        while True:
            time.sleep(PING_S)
            for rank in self._ranks:
                pid = None if isinstance(rank.process, Far) else rank.process.pid
                if rank.link.is_lost(pid, loads=not self.others) and not self._closing:
                    self.end(f"{rank.name} does not answer")

    def _start_joined(self) -> dict[str, str]:
        """Reach the hosts that join; returns digests, which their weights must have. Raises OmlxdError."""
        load = self._load
        if not load.join:
            return {}
        weights = weight_fingerprints(Path(load.model_path), memo_dir(load))
        for number, host in enumerate(load.join, load.ranks_here):
            duplex = reach(load, host)
            self.own_host = duplex.own_host  # The last rank meets this one in MLX's ring.
            self._ranks.append(self._listen_to(number, Far(host, duplex), Link(duplex, plan.FromRank)))
        return weights

    def _start(self, number: int) -> _Rank:
        ours, theirs = socket.socketpair()
        environ = mlx_adapter.rank_environment(number)
        blas = [word for word in sys.argv if word == "--mlx-blas"]
        with theirs:
            process = subprocess.Popen(
                [*_COMMAND, "--number", str(number), "--fd", str(theirs.fileno()), *blas],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env=environ,
            )
        return self._listen_to(number, process, Link(ours, plan.FromRank))

    def _listen_to(self, number: int, process: subprocess.Popen[bytes] | Far, link: Link) -> _Rank:
        rank = _Rank(number, process, link)
        for name, work in ((f"rank-{number}", self._read), (f"lease-{number}", self._grant)):
            threading.Thread(target=work, args=(rank,), name=name, daemon=True).start()
        return rank

    def end(self, why: str, lasting: bool = False) -> None:
        """End this engine, and the other ranks whatever state they are in."""
        for rank in self._ranks:
            with contextlib.suppress(OSError):
                rank.process.kill()
        self._end(why, lasting)

    def _read(self, rank: _Rank) -> None:
        def take(message: Any) -> None:
            if isinstance(message, plan.Broken):
                self.end(f"{rank.name}: {message.message}", message.lasting)
            elif isinstance(message, plan.Matched):
                self._post(lambda: self._matched(message.row, rank.number, message.tokens))
            elif isinstance(message, plan.Here | plan.Ready | plan.Closed):
                rank.said.put(message)
            else:
                rank.asks.put(message)

        try:
            rank.link.read(take)
        except ValueError:
            log.exception("rank %d says what makes no sense", rank.number)
        if not self._closing:
            self.end(f"{rank.name} has ended")
        rank.said.put(None)

    def _grant(self, rank: _Rank) -> None:
        """Space on SSD for a rank."""
        lease = self.lease_of(rank.number)
        while True:
            match rank.asks.get():
                case wire.Reserve(ticket=ticket, nbytes=most, least=least):
                    granted = next((n for n in (most, least) if n and lease.take(n)), 0)
                    rank.link.send(wire.Grant(ticket, granted, lease.capacity))
                case wire.Released(nbytes=nbytes):
                    lease.give_back(nbytes)
                case wire.Stored(files=files):
                    for path, nbytes in files:
                        lease.stored(path, nbytes)
                case wire.Dropped(files=files):
                    for path in files:
                        lease.dropped(path)
                case wire.Touched(files=files):
                    lease.touched(files)
                case other:
                    log.warning("unexpected frame %s of rank %d", type(other).__name__, rank.number)

    def _hear(self, rank: _Rank, seconds: float) -> Any:
        """What the rank says next. None: it has ended, or says nothing for so long."""
        try:
            return rank.said.get(timeout=max(0.0, seconds))
        except queue.Empty:
            return None

    # ----------------------------------------------------------------- load

    def join(self) -> Group:
        """The group of all ranks, which load from here on. Engine thread. Raises OmlxdError, RuntimeError."""
        if self._refused is not None:
            raise self._refused
        here = self._load.ranks_here
        hosts = free_addresses(self.own_host, here)
        for rank in self._ranks:
            said = self._hear(rank, START_S if rank.number < here else LOAD_S)
            if not isinstance(said, plan.Here):
                raise ModelError(f"{rank.name} did not start", code="unavailable")
            if said.address:
                hosts.append(said.address)
        self.send(plan.Join(tuple(hosts)))
        for rank in self._ranks:  # None is waited for below, where no thread of this process could end it.
            if not isinstance(self._hear(rank, START_S), plan.Here):
                raise ModelError(f"{rank.name} did not come", code="unavailable")
        self.group = mlx_adapter.join_group(0, hosts, self._load.link)
        for rank in self._ranks:
            rank.link.met()
        return self.group

    def share(self, budget: wire.Budget) -> wire.Budget:
        """A rank's part of what the engine may hold on this machine; its others here hear of theirs."""
        budget = share(budget, self._load.ranks_here)
        for rank in self._ranks:
            if not isinstance(rank.process, Far):
                rank.link.send(budget)
        return budget

    def begin(
        self,
        model: Any,
        namespace: str,
        store: KVStore,
        post: Callable[[Callable[[], None]], None],
        counts: Counts,
    ) -> None:
        """Rank 0's share is loaded: wait for the others', and open the stores. Raises ModelError.

        namespace  folder of rank 0's `store`. `post`: runs a call on the engine thread. `counts`: its steps
        """
        self._model, self._store, self._post, self._link = model, store, post, LinkFigures(counts)
        for rank in self._ranks:
            said = self._hear(rank, LOAD_S)
            if not isinstance(said, plan.Ready):
                raise ModelError(f"{rank.name} did not load its share", code="unavailable")
            self.others.append(said)
        self.send(plan.Begin(namespace))
        self._time_link()

    def _time_link_again(self) -> None:
        if self._link is not None and self._link.is_old:  # Else an earlier call has just done so.
            self._time_link()

    def _time_link(self) -> None:
        """Time the link on all ranks. Engine thread."""
        if self._link is None:
            return
        self.send(plan.TimeLink())
        with self.all_or_none("timing the link to other ranks"):
            self._link.take(time_link(self._model))

    def add_figures(self, values: dict[str, float]) -> None:
        """Make the figures of rank 0 those of all. Any thread."""
        add_figures(values, self._held())
        if self._link is not None:
            self._link.add_to(values)

    def _held(self) -> list[plan.Pong]:
        """What each rank holds, by its last word. Any thread."""
        return [held(self._store), *(rank.link.last for rank in self._ranks)]

    def lease_of(self, number: int) -> LeadLease:
        """Where rank `number` gets its space on SSD: of the engine's lease, as the front counts all files."""

        def may_store() -> bool:
            others = (rank.link.last for rank in self._ranks if rank.number != number)
            return (number == 0 or stores(self._store)) and all(each.kv_cold_tier_on for each in others)

        return LeadLease(self._lease, self._load.ranks_here, may_store)

    # ----------------------------------------------------------------- the plan; engine thread

    def send(self, message: Any) -> None:
        for rank in self._ranks:
            rank.link.send(message)

    def open_row(self, sequence: Sequence) -> int:
        """Begin a row; returns its number."""
        self._rows += 1
        prompt = sequence.prompt
        self.send(
            plan.Open(
                self._rows,
                prompt.root,
                tuple(sequence.tokens),
                sequence.capacity - prompt.length,
                tuple(prompt.pins),
            )
        )
        return self._rows

    def match(self, row: int, limit: int, take: Callable[[int, int], None]) -> None:
        """Have the others restore at most `limit` blocks. `take(rank, tokens)` follows for each."""
        self._matches[row] = take
        self.send(plan.Match(row, limit))

    def _matched(self, row: int, rank: int, tokens: int) -> None:
        self._matches[row](rank, tokens)

    def forget(self, row: int) -> None:
        self._matches.pop(row, None)

    def compute(self, row: int, start: int, tokens: list[int], cache: Cache) -> mx.array:
        """Logits of a pass over `tokens` of a row, behind `start` others, on all ranks."""
        self.send(plan.Pass(row, start, tuple(tokens)))
        with self.all_or_none(f"a pass over {len(tokens)} tokens"):
            return compute(self._model, tokens, cache)

    @contextmanager
    def all_or_none(self, what: str) -> Iterator[None]:
        """Do here what the others have been told to do. An error ends the engine: the others wait in a sum,
        which nothing but their end breaks off."""
        try:
            yield
        except Exception as error:
            log.exception("rank 0 failed")
            self.end(f"{what} failed: {error}")
            raise

    # ----------------------------------------------------------------- the end

    def quit(self, deadline_s: float) -> None:
        """Have the others flush their stores, and end."""
        self._closing = True
        self.send(wire.Quit(deadline_s))

    def wait_closed(self, deadline_s: float) -> None:
        """Until all have, or the deadline is over: then they are killed."""
        until = time.monotonic() + deadline_s
        for rank in self._ranks:
            if self._hear(rank, until - time.monotonic()) is None:
                log.warning("rank %d has not stored all before the deadline", rank.number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                rank.process.wait(max(0.0, until - time.monotonic()))
            rank.process.kill()
