"""Asks another omlxd: for a pairing, which files it has, and for them. Blocks the calling thread, bounded."""

from __future__ import annotations

import contextlib
import hmac
import math
import socket
import ssl
import time
from collections.abc import Generator, Iterator, Sequence
from typing import Any

from ...common.ports import address_text
from .duplex import Duplex
from .frames import VERSION, Channel, Follows, Found, Hello, Lead, Look, Pair, PairedWith, Piece, Read
from .identity import MOST_NAME, Identity, PeerError, plain_code, proof

STEP_S = 3.0
"""Seconds for a connection, and for the other side to say something. The first packet of a connection, if it
is lost, is sent again after 1 s.
"""
PERSON_S = 10.0
"""The same where a person waits, and nothing tries again."""
LOOK_UP_S = 30.0
"""Seconds that it may look for a model."""
UNTRUSTED = "the two do not trust each other"
_ENDED = ssl.SSLEOFError, ssl.SSLZeroReturnError


@contextlib.contextmanager
def _connected(
    address: tuple[str, int],
    context: ssl.SSLContext,
    deadline: float = math.inf,
    step_s: float = STEP_S,
) -> Generator[Channel, None, None]:
    """Raises PeerError, in words, for whatever fails inside."""

    def at_most(seconds: float) -> float:
        return max(0.001, min(seconds, deadline - time.monotonic()))

    try:
        with socket.create_connection(address, at_most(step_s)) as plain:
            plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            plain.settimeout(at_most(step_s))
            with context.wrap_socket(plain) as tls:
                yield _greeted(tls, deadline, step_s)
    except ssl.SSLError as error:
        raise PeerError(_why(error), passing=isinstance(error, _ENDED)) from error
    except TimeoutError as error:
        raise PeerError("it does not answer in time", passing=True) from error
    except OSError as error:
        raise PeerError(error.strerror or str(error), passing=True) from error


def _greeted(tls: ssl.SSLSocket, deadline: float, step_s: float) -> Channel:
    channel = Channel(tls, step_s)
    channel.deadline = deadline
    if (version := channel.expect(Hello).version) != VERSION:
        raise PeerError(f"it speaks version {version} of this protocol, and this omlxd {VERSION}")
    return channel


def _why(error: ssl.SSLError) -> str:
    if isinstance(error, _ENDED):
        return "it ended the connection"
    if isinstance(error, ssl.SSLCertVerificationError) or "ALERT" in (error.reason or ""):
        return (
            f"{UNTRUSTED}; `omlxd peer code` on the machine that listens and "
            "`omlxd peer pair` on the one that asks pair them"
        )
    return f"what listens there is no omlxd that shares its cache ({error.reason or error})"


def mend(error: PeerError) -> str:
    """Say what the owner does so that the `omlxd join` that was asked answers; no full stop. "": unknown."""
    cause = error.__cause__
    if not error.passing or isinstance(cause, ssl.SSLError) or not isinstance(cause, OSError):
        return ""
    if isinstance(cause, ConnectionRefusedError):
        return "start `omlxd join` on that machine"
    return "see that the machine is on, and that `omlxd join` runs there"


def pair(identity: Identity, address: tuple[str, int], typed: str) -> str:
    """Pair with the omlxd at `address` by the code that it showed; returns its name.

    Raises PeerError and OSError.
    """
    own, code = identity.own_certificate(), plain_code(typed)
    with _connected(address, identity.for_client(pairing=True), step_s=PERSON_S) as channel:
        assert isinstance(channel.socket, ssl.SSLSocket)
        theirs = channel.socket.getpeercert(binary_form=True) or b""
        channel.send(Pair(socket.gethostname()[:MOST_NAME], own, proof(code, "client", theirs, own)))
        answer = channel.expect(PairedWith)
    if not hmac.compare_digest(answer.proof, proof(code, "server", theirs, own)):
        raise PeerError("it does not know the code: another program may stand in between")
    identity.add(answer.name, theirs, address_text(*address))
    return answer.name


class Connection:
    """To a paired omlxd, about one namespace. Each call raises PeerError."""

    def __init__(self, channel: Channel, namespace: bytes):
        self._channel, self._namespace = channel, namespace

    def look(self, names: Sequence[bytes], model: str, facts: dict[str, Any]) -> tuple[list[bool], str]:
        """Return which of the files are there, and what keeps KV of the same model from being used."""
        self._channel.send(Look(self._namespace, tuple(names), model, facts))
        found = self._channel.expect(Found)
        if len(found.there) != len(names):
            raise PeerError("it answered something else")
        return [bool(each) for each in found.there], found.differs

    def read(self, names: Sequence[bytes], sizes: Sequence[int]) -> Iterator[bytearray]:
        """Yield the bytes of the files in order; none for those that are gone. `sizes`: of each."""
        self._channel.send(Read(self._namespace, tuple(names)))
        for size in sizes:
            nbytes = self._channel.expect(Piece).nbytes
            if nbytes not in (0, size):
                raise PeerError(f"it has a file of {nbytes} bytes where {size} belong")
            yield self._channel.read(nbytes)


@contextlib.contextmanager
def connected(
    identity: Identity, address: tuple[str, int], namespace: bytes, deadline: float
) -> Generator[Connection, None, None]:
    """Connect. All of it ends at `deadline`, by time.monotonic().

    Raises PeerError, also for what fails inside.
    """
    with _connected(address, _own(identity), deadline) as channel:
        yield Connection(channel, namespace)


def lead(identity: Identity, address: tuple[str, int], asked: Lead, step_s: float = LOOK_UP_S) -> Duplex:
    """Have the host at `address` take a share of a model; returns the link to it.

    Raises PeerError. step_s: seconds in which it has to say whether it does
    """
    with contextlib.ExitStack() as stack:
        channel = stack.enter_context(_connected(address, _own(identity)))
        channel.step_s = step_s
        channel.send(asked)
        channel.expect(Follows)
        assert isinstance(channel.socket, ssl.SSLSocket)
        return Duplex(channel.socket, stack.pop_all())


@contextlib.contextmanager
def asking(identity: Identity, address: tuple[str, int]) -> Generator[Channel, None, None]:
    """Connect to a paired omlxd, for a person who waits. Raises PeerError, also for what fails inside."""
    with _connected(address, _own(identity), step_s=PERSON_S) as channel:
        yield channel


def _own(identity: Identity) -> ssl.SSLContext:
    try:
        return identity.for_client()
    except (OSError, ssl.SSLError) as error:
        raise PeerError(f"the own key can't be read: {error}") from error
