"""Gives blocks of this machine's SSD cache to omlxd that are paired with it. It writes nothing but a pairing.

A thread a connection: what it does, reading files and encrypting, lets go of the interpreter. Files are sent
as they lie on the disk; who asked checks them.
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import os
import socket
import ssl
import threading
import time
from pathlib import Path
from typing import Any

from ..files.fs import FileSystem
from ..files.namespace import NamespaceInfo, differences, read_namespace
from ..files.paths import block_path, is_namespace_dir, namespace_dir
from .frames import (
    MOST_UNPAIRED,
    VERSION,
    Channel,
    Found,
    Hello,
    Look,
    Pair,
    PairedWith,
    Piece,
    Read,
    Refused,
    ToServer,
)
from .identity import MOST_NAME, Identity, PeerError, proof

log = logging.getLogger(__name__)

MOST_CONNECTIONS = 16
HANDSHAKE_S, IDLE_S, SEND_S = 5.0, 5.0, 10.0
MOST_FILE = 1 << 30
MOST_NAMESPACES = 1000
"""Descriptions that are looked at for KV of the same model."""


class PeerServer:
    """Serves the files below `cache`, the cache dir, at the socket `listening`, which it takes over."""

    def __init__(self, identity: Identity, cache: Path, listening: socket.socket):
        self._identity, self._cache, self._listening = identity, cache, listening
        self._fs = FileSystem()
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self._closed = False

    def start(self) -> None:
        """Raises OSError."""
        self._identity.own()
        threading.Thread(target=self._accept, name="peer-accept", daemon=True).start()

    def close(self) -> None:
        """End all connections."""
        with self._lock:
            self._closed = True
            ended = [self._listening, *self._open]
        for each in ended:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        self._listening.close()

    # ----------------------------------------------------------------- connections

    def _accept(self) -> None:
        while not self._closed:
            try:
                made, address = self._listening.accept()
            except OSError as error:
                if self._closed:
                    return
                log.warning("peers: %s", error)
                threading.Event().wait(1.0)
                continue
            with self._lock:
                full = self._closed or len(self._open) >= MOST_CONNECTIONS
                if not full:
                    self._open.add(made)
            if full:
                made.close()
                continue
            threading.Thread(target=self._talk, args=(made, address[0]), name="peer", daemon=True).start()

    def _talk(self, made: socket.socket, host: str) -> None:
        plain = made
        try:
            made.settimeout(HANDSHAKE_S)
            made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with self._identity.for_server().wrap_socket(made, server_side=True) as tls:
                with self._lock:
                    self._open.discard(plain)
                    self._open.add(tls)
                made = tls
                self._answer(tls, host)
        except (OSError, PeerError) as error:
            log.debug("peers: %s: %s", host, error)
        except Exception:
            log.exception("peers: %s", host)
        finally:
            with self._lock:
                self._open -= {plain, made}
            plain.close()

    def _answer(self, tls: ssl.SSLSocket, host: str) -> None:
        channel, certificate = Channel(tls, IDLE_S), tls.getpeercert(binary_form=True)
        channel.send(Hello(VERSION))
        if certificate is None:
            channel.deadline = time.monotonic() + IDLE_S
            asked = channel.receive(ToServer, MOST_UNPAIRED)
            if isinstance(asked, Pair):
                channel.send(self._pair(asked, tls, host))
            else:
                channel.send(Refused("it is not paired with this machine; `omlxd peer pair` does that"))
            return
        while self._identity.is_paired(certificate):  # It may be removed meanwhile.
            asked = channel.receive(ToServer)
            if isinstance(asked, Look):
                channel.send(self._look(asked))
            elif isinstance(asked, Read):
                self._send(channel, asked)
            else:
                channel.send(Refused("it is paired already"))

    # ----------------------------------------------------------------- answers

    def _pair(self, asked: Pair, tls: ssl.SSLSocket, host: str) -> PairedWith | Refused:
        own = self._identity.own_certificate()
        code = self._identity.take_code()
        if not code:
            log.warning("peers: %s asked for a pairing, and no code is shown", host)
            return Refused(
                "it shows no code now; `omlxd peer code` there shows one, for 5 minutes and 3 tries"
            )
        if not hmac.compare_digest(asked.proof, proof(code, "client", own, asked.certificate)):
            log.warning("peers: %s asked for a pairing with a wrong code", host)
            return Refused("the code is wrong")
        self._identity.end_code()
        self._identity.add(asked.name, asked.certificate)
        log.info("peers: %s (%s) is paired, and may read this machine's SSD cache", asked.name, host)
        return PairedWith(socket.gethostname()[:MOST_NAME], proof(code, "server", own, asked.certificate))

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

    def _bytes_of(self, path: str) -> bytes:
        """Raises OSError."""
        fd = self._fs.open_read(path)
        with open(fd, "rb") as file:
            size = os.fstat(fd).st_size
            return file.read(size) if size <= MOST_FILE else b""
