"""Gives blocks of this machine's SSD cache to omlxd that are paired with it. It writes nothing but a pairing.

Files are sent as they lie on the disk; who asked checks them.
"""

from __future__ import annotations

import contextlib
import os
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..files.fs import FileSystem
from ..files.namespace import NamespaceInfo, differences, read_namespace
from ..files.paths import block_path, is_namespace_dir, namespace_dir
from .frames import Channel, Found, Look, Piece, Read, Refused
from .identity import Identity
from .listener import Listener

SEND_S = 10.0
MOST_FILE = 1 << 30
MOST_NAMESPACES = 1000
"""Descriptions that are looked at for KV of the same model."""


@dataclass(slots=True)
class Given:
    """Files that others have read, and their bytes, since the start."""

    files: int = 0
    nbytes: int = 0


class PeerServer(Listener):
    """Serves the files below `cache`, the cache dir."""

    may = "may read this machine's SSD cache"

    def __init__(self, identity: Identity, cache: Path, listening: socket.socket):
        super().__init__(identity, listening)
        self._cache = cache
        self._fs = FileSystem()
        self.given = Given()

    def answer(self, asked: object, channel: Channel, certificate: bytes, host: str) -> bool:
        if isinstance(asked, Look):
            channel.send(self._look(asked))
        elif isinstance(asked, Read):
            self._send(channel, asked)
        else:
            channel.send(Refused("it is a cache that listens there, which takes no such question"))
        return True

    def _path(self, namespace: bytes, name: bytes) -> str:
        return f"{self._cache}/{block_path(namespace, name)}"

    def _look(self, asked: Look) -> Found:
        if not (self._cache / namespace_dir(asked.namespace)).is_dir():
            return Found(bytes(len(asked.names)), self._differs(asked))
        there = [self._fs.is_file(self._path(asked.namespace, name)) for name in asked.names]
        return Found(bytes(there))

    def _differs(self, asked: Look) -> str:
        """Say in what KV of the same model here differs from what was asked for; "": there is none."""
        best: list[str] = []
        for info in self._namespaces():
            same = info.facts.get("weights") == asked.facts.get("weights")
            same = (same or info.is_called(asked.model)) and (
                info.facts.get("adapter") == asked.facts.get("adapter")
            )
            if info.facts and same:
                differs = [*differences(asked.facts, info.facts).values()]
                best = min(best or differs, differs, key=len)
        return f"{' and '.join(best)} {'does' if len(best) == 1 else 'do'} not agree" if best else ""

    def _namespaces(self) -> list[NamespaceInfo]:
        with contextlib.suppress(OSError):
            folders = sorted(filter(is_namespace_dir, os.listdir(self._cache)))[:MOST_NAMESPACES]
            infos = [read_namespace(self._cache, folder) for folder in folders]
            return [info for info in infos if info is not None]
        return []

    def _send(self, channel: Channel, asked: Read) -> None:
        channel.socket.settimeout(SEND_S)
        for name in asked.names:
            data: Any = b""
            with contextlib.suppress(OSError):
                data = self._bytes_of(self._path(asked.namespace, name))
            channel.send(Piece(len(data)))
            if data:
                channel.send_bytes(memoryview(data))
                with self._lock:
                    self.given.files += 1
                    self.given.nbytes += len(data)

    def _bytes_of(self, path: str) -> bytes:
        """Raises OSError."""
        fd = self._fs.open_read(path)
        with open(fd, "rb") as file:
            size = os.fstat(fd).st_size
            return file.read(size) if size <= MOST_FILE else b""
