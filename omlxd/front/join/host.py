"""Waits for leads: who may have a rank here, and of which model. One at a time."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
import threading
from collections.abc import Sequence
from pathlib import Path

from ... import wire
from ...common.units import MOST_CACHE
from ...config import Settings, full_name
from ...config.address import record_join
from ...errors import ModelError, OmlxdError
from ...kv.peer.duplex import Duplex
from ...kv.peer.frames import Channel, Echo, Follows, Lead, Refused
from ...kv.peer.identity import Identity
from ...kv.peer.listener import Listener
from ...kv.peer.versions import AT, disagreement
from ...models.catalog import Catalog
from ...models.resolve import check_folder
from ..engines.ledger.cold_ledger import ColdLedger
from ..engines.model import kv_kept, settings_of
from .share import Share

log = logging.getLogger(__name__)

START_S = 30.0
"""Seconds for a process to start."""
GONE_S = 5.0
"""Seconds for the last rank of the same lead to end."""


class JoinHost(Listener):
    """A rank for whoever is paired.

    folder   of the model, whatever it is called there; None: it is looked for by its name
    command  the rank's program
    loop     runs it; in another thread than those that call `answer`
    """

    may = "may have a share of its models computed here, and read this machine's SSD cache if it is shared"

    def __init__(
        self,
        settings: Settings,
        listening: socket.socket,
        cold: ColdLedger,
        folder: Path | None,
        command: Sequence[str],
    ):
        super().__init__(Identity(settings.base_path), listening)
        self._settings, self._cold, self._folder = settings, cold, folder
        self._command, self._at = command, listening.getsockname()[:2]
        self._loop = asyncio.get_running_loop()
        self._taking = threading.Lock()
        self._share: Share | None = None
        self._record("")

    def close(self) -> None:
        super().close()
        if self._share is not None:
            self._share.end()

    async def gone(self) -> None:
        """Wait for the end of the rank, after `close`."""
        if self._share is not None:
            await asyncio.to_thread(self._share.gone.wait, GONE_S)

    def refuse(self, host: str, why: str) -> None:
        log.warning("%s is refused: %s", host, why)

    def answer(self, asked: object, channel: Channel, certificate: bytes, host: str) -> bool:
        if isinstance(asked, Echo):
            channel.send_bytes(memoryview(channel.read(asked.nbytes)))
            return True
        if not isinstance(asked, Lead):
            channel.send(Refused("it is `omlxd join` that listens there, which shares no cache"))
            return True
        try:
            with self._taking:
                share = self._share = self._take(asked, channel, certificate)
        except OmlxdError as error:
            self.refuse(host, error.message)
            channel.send(Refused(error.message.rstrip("."), passing=error.code == "unavailable"))
            return True
        log.info("%s leads: this machine has a share of %s", host, asked.model)
        try:
            channel.send(Follows())
            assert isinstance(channel.socket, ssl.SSLSocket)
            self._record(f"{asked.model} for {host}")
            share.carry(Duplex(channel.socket))
        finally:
            share.end()
            self._record("")
        log.info("%s leads no more: waits", host)
        return False

    def _record(self, share: str) -> None:
        """For `omlxd status` on this machine."""
        host, port = self._at
        record_join(self._settings.base_path, str(host), int(port), share)

    def _take(self, asked: Lead, channel: Channel, certificate: bytes) -> Share:
        """Start a rank. Raises OmlxdError."""
        self._check(asked)
        folder = self._folder or self._find(asked.model)
        address = str(channel.socket.getsockname()[0])
        if ":" in address:
            raise ModelError(f"MLX's ring takes no IPv6 address, as {address} is; give an IPv4 one")
        if (last := self._share) is not None and not last.gone.is_set():
            if (last.certificate, last.model) != (certificate, asked.model):
                what = f"it has a share of {last.model}, and takes one at a time"
                raise ModelError(what, code="unavailable")
            last.end()  # Its lead has begun anew.
            if not last.gone.wait(GONE_S):
                raise ModelError(f"its last rank of {last.model} has not ended", code="unavailable")
        future = asyncio.run_coroutine_threadsafe(
            self._start(asked.model, certificate, folder, address), self._loop
        )
        try:
            return future.result(START_S)
        except (OSError, TimeoutError) as error:
            future.cancel()
            raise ModelError(f"its rank can't be started: {error}", code="unavailable") from error

    async def _start(self, model: str, certificate: bytes, folder: Path, address: str) -> Share:
        settings = self._settings
        cap = MOST_CACHE if settings.cold_cache_bytes is None else settings.cold_cache_bytes
        cold_dir = await self._cold.open()
        home = wire.Home(str(folder), address, cold_dir, cap, settings.hot_cache_bytes)
        share = Share(model, certificate, home, self._cold)
        await share.start(self._command)
        return share

    def _check(self, asked: Lead) -> None:
        """Raise ModelError where versions, or settings of this machine, are not the lead's."""
        if differs := disagreement(asked.versions):
            raise ModelError(f"versions do not agree: {differs}")
        kept = kv_kept(settings_of(asked.model, self._settings), self._settings)
        if not kept.is_on:
            raise ModelError(f"ranks keep KV, and --no-cache is set {AT}; unset it there")
        set_here = [name for name in ("block_size", "kv_bits") if self._is_set(name, asked.model)]
        if "block_size" in set_here and kept.block_size != asked.block_size:
            raise ModelError(
                f"--block-size does not agree: {asked.block_size} on the lead and {kept.block_size} {AT}"
            )
        kv = wire.kv_words(kept.bits, kept.group_size)
        if "kv_bits" in set_here and kv != asked.kv:
            raise ModelError(f"--kv-bits does not agree: {asked.kv} on the lead and {kv} {AT}")

    def _is_set(self, name: str, model: str) -> bool:
        """Whether the owner of this machine has said it: what nobody said is as the lead has it."""
        sources = self._settings.sources
        return sources[name] != "default" or full_name(name, "models", model) in sources

    def _find(self, model: str) -> Path:
        """Return the folder of a model of that name. Raises ModelError."""
        catalog = Catalog(self._settings)
        catalog.look()
        last = model.rpartition("/")[2]
        there = catalog.models().values()
        named = [each for each in there if each.id == model] or [
            each for each in there if each.id.rpartition("/")[2] == last and not each.base
        ]
        folder = next((each.folder for each in named if each.folder is not None), None)
        if folder is None:
            raise ModelError(
                f"there is no model {model} {AT}; `omlxd models pull` on that one fetches it, and "
                "`omlxd join --model FOLDER` takes a folder of any name"
            )
        check_folder(folder)
        return folder
