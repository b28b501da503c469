"""Listens for omlxd of one owner: TLS, a pairing, and then whatever the paired ones ask (`Listener.answer`).

A thread a connection: what it does, reading files and encrypting, lets go of the interpreter.
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

from .frames import MOST_UNPAIRED, VERSION, Channel, Hello, Pair, PairedWith, Refused, ToServer
from .identity import MOST_NAME, Identity, PeerError, proof

log = logging.getLogger(__name__)

MOST_CONNECTIONS = 16
HANDSHAKE_S, IDLE_S = 10.0, 10.0


class Listener:
    """Serves at the socket `listening`, which it takes over.

    may  what those who are paired may do here, in words
    """

    may = "may connect"

    def __init__(self, identity: Identity, listening: socket.socket):
        self._identity, self._listening = identity, listening
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self._closed = False
        self._held = -1
        """Of `Identity.hold_listening`."""

    def start(self) -> None:
        """Raises OSError."""
        self._identity.own()
        self._held = self._identity.hold_listening()
        threading.Thread(target=self._accept, name="peer-accept", daemon=True).start()

    def close(self) -> None:
        """End all connections."""
        with self._lock:
            self._closed = True
            ended = [self._listening, *self._open]
        for each in ended:
            with contextlib.suppress(OSError):
                socket.socket.shutdown(each, socket.SHUT_RDWR)
        self._listening.close()
        if self._held >= 0:
            os.close(self._held)
            self._held = -1

    def answer(self, asked: object, channel: Channel, certificate: bytes, host: str) -> bool:
        """Answer a frame of a paired omlxd; returns whether its next one is to be read."""
        raise NotImplementedError

    def refuse(self, host: str, why: str) -> None:
        """Somebody was not let in, for that reason."""
        log.debug("peers: %s: %s", host, why)

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
        except ssl.SSLError as error:
            unknown = "certificate" in str(error).lower()
            self.refuse(host, "it is not paired with this machine" if unknown else str(error))
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
                self.refuse(host, "it is not paired with this machine")
            return
        while self._identity.is_paired(certificate):  # It may be removed meanwhile.
            asked = channel.receive(ToServer)
            if isinstance(asked, Pair):
                channel.send(Refused("it is paired already"))
            elif not self.answer(asked, channel, certificate, host):
                return

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
        self._identity.add(asked.name, asked.certificate, host)
        log.info("peers: %s (%s) is paired, and %s", asked.name, host, self.may)
        return PairedWith(socket.gethostname()[:MOST_NAME], proof(code, "server", own, asked.certificate))
