"""One rank for one lead: its process, the bytes between both, and its account of files.

| who                  | does                                                          |
|----------------------|---------------------------------------------------------------|
| the lead's thread    | carries what the lead says to the rank                        |
| `share-back`         | carries what the rank says to the lead                        |
| the event loop       | has the process, and settles what the rank asks of the ledger |

Whatever ends first ends the others: the link, the process, or `end`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import struct
import threading
from collections.abc import Sequence
from typing import Any, Protocol

from ... import wire
from ...kv.peer.duplex import Duplex
from ..engines.ledger.cold_ledger import ColdLedger
from ..engines.link import EngineLink

log = logging.getLogger(__name__)

END_S = 0.5
"""Seconds for a rank to end by itself once its lead is gone."""
LEFT = "its lead ended the link, or this `omlxd join` did"
TELL_S = 2.0
"""Seconds between looks at what its files take."""
STUCK_S = 4
"""Seconds in which a rank that lives reads what it is sent: a thread of its own does nothing else."""
_READ = 1 << 16


class _Stream(Protocol):
    def recv(self, most: int, /) -> bytes: ...

    def sendall(self, data: bytes, /) -> None: ...


class Share:
    """A rank of `model` for a lead, who is known by `certificate`. `home`: what this machine has of it."""

    def __init__(self, model: str, certificate: bytes, home: wire.Home, cold: ColdLedger):
        self.model, self.certificate = model, certificate
        self.gone = threading.Event()
        self._home, self._cold = home, cold
        self._over = asyncio.Event()
        self._to_rank, self._of_rank = socket.socketpair()
        self._to_rank.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("@ll", STUCK_S, 0))
        self._duplex: Duplex | None = None
        self._loop: asyncio.AbstractEventLoop

    async def start(self, command: Sequence[str]) -> None:
        """Start the process. Raises OSError."""
        self._loop = asyncio.get_running_loop()
        try:
            fd = self._of_rank.fileno()
            link = await EngineLink.spawn((*command, "--lead", str(fd)), (fd,))
        except BaseException:
            self._to_rank.close()
            self.gone.set()
            raise
        finally:
            self._of_rank.close()
        link.send(self._home)
        self._living = asyncio.create_task(self._live(link), name=f"rank of {self.model}")

    def carry(self, duplex: Duplex) -> None:
        """Carry bytes between the lead and the rank until one of both ends. Blocks."""
        self._duplex = duplex
        back = threading.Thread(target=self._carry, args=(self._to_rank, duplex), name="share-back")
        back.start()
        self._carry(duplex, self._to_rank)
        back.join()
        self.gone.wait()
        self._to_rank.close()

    def end(self) -> None:
        """Any thread."""
        if self._duplex is not None:
            self._duplex.close()
        with contextlib.suppress(OSError):
            self._to_rank.shutdown(socket.SHUT_RDWR)
        with contextlib.suppress(RuntimeError):  # The loop has ended.
            self._loop.call_soon_threadsafe(self._over.set)

    def _carry(self, source: _Stream, target: _Stream) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(_READ):
                target.sendall(data)
        self.end()

    async def _tell(self, link: EngineLink, namespace: str) -> None:
        """Tell the rank what its files take, as its lead shows."""
        told = -1
        while True:
            if (now := self._cold.bytes_in(namespace)) != told:
                link.send(wire.ColdBytes(now))
                told = now
            await asyncio.sleep(TELL_S)

    async def _live(self, link: EngineLink) -> None:
        """Until the process has ended."""
        account = self._cold.account(link.send, link.pid)
        telling = list[asyncio.Task[None]]()

        def handle(message: Any) -> None:
            if isinstance(message, wire.Loaded):
                account.model_loaded(message.info.namespace, self._home.model_path)
                telling.append(asyncio.create_task(self._tell(link, message.info.namespace)))
                log.info("has its share of %s", self.model)
            elif isinstance(
                message, wire.Reserve | wire.Released | wire.Stored | wire.Dropped | wire.Touched
            ):
                account.handle(message)

        receiving = asyncio.create_task(link.receive(handle))
        over = asyncio.create_task(self._over.wait())
        try:
            await asyncio.wait({receiving, over}, return_when=asyncio.FIRST_COMPLETED)
            if not receiving.done():
                await asyncio.wait({receiving}, timeout=END_S)
                link.kill()
            how = await receiving
            log.info("the rank of %s has ended: %s", self.model, LEFT if link.killed else how)
        finally:
            link.kill()
            for task in (over, *telling):
                task.cancel()
            await link.close()
            account.process_ended()
            self.end()
            self.gone.set()
