"""Two hosts on one machine: a network namespace each, and a link between them that delays and loses packets.

netem is not in every kernel, so the link is this program: it holds a TUN device in each namespace, and
carries IP packets from one to the other.

    python tests/support/two_hosts.py    prints its process id, and the descriptors of the two namespaces

It reads lines `DELAY LOSS OPENINGS` (seconds one way; a share of packets, of 1.0 none comes through; first
packets of TCP connections that are lost next), and ends with its standard input. Needs root and /dev/net/tun.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import heapq
import os
import random
import select
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

ADDRESSES = "10.77.0.1", "10.77.0.2"
_NEWNET = 0x40000000
_TUNSETIFF, _TUN_NO_PI = 0x400454CA, 0x1001
_LIBC = ctypes.CDLL(None, use_errno=True)


def why_not() -> str:
    """Why there can't be two hosts here; empty: there can."""
    if sys.platform != "linux" or os.geteuid():
        return "two network namespaces need root on Linux"
    if not os.access("/dev/net/tun", os.R_OK | os.W_OK):
        return "there is no /dev/net/tun"
    try:
        with TwoHosts():
            return ""
    except OSError as error:
        return f"no network namespaces here: {error}"


class TwoHosts:
    """The link, and how to run something on either side; a context manager."""

    def __init__(self, delay_s: float = 0.0, loss: float = 0.0):
        self._link = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._link.stdout is not None
        said = self._link.stdout.readline().split()
        if len(said) != 3:
            self.close()
            raise OSError("the link between two namespaces did not start")
        self._paths = [f"/proc/{said[0]}/fd/{fd}" for fd in said[1:]]
        self.set(delay_s, loss)

    def set(self, delay_s: float, loss: float, openings: int = 0) -> None:
        """From now on. openings: first packets of connections that are lost besides"""
        assert self._link.stdin is not None
        self._link.stdin.write(f"{delay_s} {loss} {openings}\n")
        self._link.stdin.flush()

    def wrapper(self, host: int) -> tuple[str, ...]:
        """What runs a program on host 0 or 1."""
        return ("nsenter", f"--net={self._paths[host]}")

    @contextlib.contextmanager
    def on(self, host: int) -> Iterator[None]:
        """Sockets that this thread makes are that host's."""
        with Path("/proc/thread-self/ns/net").open() as here, Path(self._paths[host]).open() as there:
            _enter(there.fileno())
            try:
                yield
            finally:
                _enter(here.fileno())

    def transport(self, host: int) -> httpx.HTTPTransport:
        """Of a client on that host."""
        return _Transport(self, host)

    def close(self) -> None:
        assert self._link.stdin is not None and self._link.stdout is not None
        self._link.stdin.close()
        self._link.wait()
        self._link.stdout.close()

    def __enter__(self) -> TwoHosts:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Transport(httpx.HTTPTransport):
    def __init__(self, hosts: TwoHosts, host: int):
        super().__init__(trust_env=False)
        self._hosts, self._host = hosts, host

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        with self._hosts.on(self._host):
            return super().handle_request(request)


def _enter(namespace: int) -> None:
    if _LIBC.setns(namespace, _NEWNET):
        raise OSError(ctypes.get_errno(), "setns")


# --------------------------------------------------------------------- the link


def _namespace(address: str) -> tuple[int, int]:
    """(a TUN device that has `address`, its namespace): descriptors. This process is in it afterwards."""
    if _LIBC.unshare(_NEWNET):
        raise OSError(ctypes.get_errno(), "unshare")
    tun = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(tun, _TUNSETIFF, struct.pack("16sH22x", b"tun0", _TUN_NO_PI))
    for words in ("link set lo up", f"addr add {address}/24 dev tun0", "link set tun0 up"):
        subprocess.run(["ip", *words.split()], check=True)
    return tun, os.open("/proc/self/ns/net", os.O_RDONLY)


def _opens(packet: bytes) -> bool:
    """Whether it is the first of a TCP connection, over IPv4."""
    at = 4 * (packet[0] & 15)
    return packet[0] >> 4 == 4 and packet[9] == 6 and packet[at + 13] & 0x12 == 0x02


def _carry(tuns: list[int]) -> None:
    delay, loss, openings, chance = 0.0, 0.0, 0.0, random.Random(1)
    under_way: list[tuple[float, int, int, bytes]] = []  # Until when, in which order, to whom.
    count = 0
    while True:
        wait = max(0.0, under_way[0][0] - time.monotonic()) if under_way else None
        for ready in select.select([0, *tuns], [], [], wait)[0]:
            if ready == 0:
                if not (line := sys.stdin.readline()):
                    return
                delay, loss, openings = map(float, line.split())
            else:
                with contextlib.suppress(BlockingIOError):
                    packet = os.read(ready, 1 << 16)
                    if openings and _opens(packet):
                        openings -= 1
                    elif chance.random() >= loss:
                        count += 1
                        to = tuns[ready == tuns[0]]
                        heapq.heappush(under_way, (time.monotonic() + delay, count, to, packet))
        while under_way and under_way[0][0] <= time.monotonic():
            *_, to, packet = heapq.heappop(under_way)
            with contextlib.suppress(OSError):  # Its queue is full: it is lost.
                os.write(to, packet)


def main() -> None:
    made: list[Any] = [_namespace(address) for address in ADDRESSES]
    print(os.getpid(), *(namespace for _, namespace in made), flush=True)
    _carry([tun for tun, _ in made])


if __name__ == "__main__":
    main()
