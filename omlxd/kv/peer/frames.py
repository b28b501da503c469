"""Frames between two omlxd: a little-endian u32 length and that many bytes of msgpack, a tagged struct each.

| asks                | answer                                                               |
|---------------------|----------------------------------------------------------------------|
|                     | `Hello`, once the server knows who asks: else the channel ends       |
| `Pair`              | `PairedWith` or `Refused`; only without a certificate                |
| `Look`              | `Found` or `Refused`                                                 |
| `Read(names)`       | for each name in order a `Piece` and its bytes                       |
| `Lead`              | `Follows`, and the rest of the bytes are wire/plan.py's; or `Refused` |
| `Echo(nbytes)`      | it reads so many bytes, and sends as many back                       |

A cache (server.py) takes `Look` and `Read`, a host that joins (front/join/) `Lead` and `Echo`.

Names are hashes: nobody can name a file that is no block or checkpoint of a namespace.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from typing import Annotated, Any, TypeVar, Union

import msgspec
from msgspec import Meta, Struct

from .identity import MOST_CERTIFICATE, MOST_NAME, PeerError

VERSION = 1
MOST_UNPAIRED = 16 << 10
MOST_MODEL = 1000
MOST_ECHO = 64 << 20
MOST_FRAME = 8 << 20
"""Bytes of a frame: of 200,000 names."""

Name = Annotated[bytes, Meta(min_length=32, max_length=32)]


class Pair(Struct, frozen=True, tag="pair"):
    """`certificate`: the client's, in DER. `proof`: of identity.py."""

    name: Annotated[str, Meta(max_length=MOST_NAME)]
    certificate: Annotated[bytes, Meta(max_length=MOST_CERTIFICATE)]
    proof: bytes


class Look(Struct, frozen=True, tag="look"):
    """Which of these files are there? `facts`: what the namespace is the digest of; `model`: its id."""

    namespace: Name
    names: tuple[Name, ...]
    model: str = ""
    facts: dict[str, Any] = {}


class Read(Struct, frozen=True, tag="read"):
    namespace: Name
    names: tuple[Name, ...]


class Lead(Struct, frozen=True, tag="lead"):
    """Take a share of a model. `versions`: of what computes; `kv`: bits of its numbers, in words."""

    model: Annotated[str, Meta(max_length=MOST_MODEL)]
    versions: dict[str, str]
    block_size: int
    kv: str


class Echo(Struct, frozen=True, tag="echo"):
    nbytes: Annotated[int, Meta(ge=1, le=MOST_ECHO)]


class Hello(Struct, frozen=True, tag="hello"):
    version: int


class PairedWith(Struct, frozen=True, tag="paired"):
    name: Annotated[str, Meta(max_length=MOST_NAME)]
    proof: bytes


class Refused(Struct, frozen=True, tag="refused"):
    """`why`: a sentence without its full stop. `passing`: another try may go well."""

    why: str
    passing: bool = False


class Follows(Struct, frozen=True, tag="follows"):
    """It takes its share."""


class Found(Struct, frozen=True, tag="found"):
    """`there`: a byte a name, 1 or 0. `differs`: what keeps KV of the same model from being used, or ""."""

    there: bytes
    differs: str = ""


class Piece(Struct, frozen=True, tag="piece"):
    """A file of `nbytes` bytes follows; 0: it is not there."""

    nbytes: Annotated[int, Meta(ge=0)]


ToServer = Union[Pair, Look, Read, Lead, Echo]
ToClient = Union[Hello, PairedWith, Refused, Found, Piece, Follows]
T = TypeVar("T")
_encoder = msgspec.msgpack.Encoder()


def encode(message: Struct) -> bytes:
    body = _encoder.encode(message)
    if len(body) > MOST_FRAME:
        raise PeerError(f"a frame of {len(body)} bytes is too long")
    return len(body).to_bytes(4, "little") + body


def read_frame(read: Callable[[int], bytes | bytearray], type: Any, most: int = MOST_FRAME) -> Any:
    """Return the next message. `read(n)` returns n bytes.

    Raises PeerError for nonsense, and what `read` raises.
    """
    length = int.from_bytes(read(4), "little")
    if length > most:
        raise PeerError(f"it sent a frame of {length} bytes")
    try:
        return msgspec.msgpack.decode(read(length), type=type)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise PeerError("it sent a frame that makes no sense") from error


class Channel:
    """Frames over a connected socket. Each call raises OSError and PeerError.

    step_s  seconds that the other side may be silent
    """

    def __init__(self, sock: socket.socket, step_s: float):
        self.socket, self.step_s = sock, step_s
        self.deadline = float("inf")
        """Of all that is read, by time.monotonic()."""
        sock.settimeout(step_s)

    def send(self, message: Struct) -> None:
        self.socket.sendall(encode(message))

    def send_bytes(self, data: memoryview) -> None:
        self.socket.sendall(data)

    def receive(self, type: Any, most: int = MOST_FRAME) -> Any:
        return read_frame(self.read, type, most)

    def expect(self, type: type[T]) -> T:
        """Receive an answer of that type. Raises PeerError for a refusal, with its reason."""
        answer = self.receive(ToClient)
        if isinstance(answer, Refused):
            raise PeerError(answer.why, passing=answer.passing)
        if not isinstance(answer, type):
            raise PeerError("it answered something else")
        return answer

    def read(self, nbytes: int) -> bytearray:
        data = bytearray(nbytes)
        view, at = memoryview(data), 0
        # Once: TLS gives 16 KiB at a time, and each change of the timeout is a system call.
        self.socket.settimeout(max(0.001, min(self.step_s, self.deadline - time.monotonic())))
        while at < nbytes:
            if time.monotonic() >= self.deadline:
                raise TimeoutError("it is too slow")
            count = self.socket.recv_into(view[at:])
            if not count:
                raise PeerError("it ended the connection")
            at += count
        return data
