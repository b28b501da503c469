"""The sockets that the daemon listens on: those of a service manager, or one of its own.

Socket activation: a service manager opens the sockets before it starts the daemon.

| manager | protocol                                                                                |
|---------|-----------------------------------------------------------------------------------------|
| systemd | sd_listen_fds(3): LISTEN_PID is us, LISTEN_FDS descriptors from 3 on, LISTEN_FDNAMES    |
| launchd | launch_activate_socket(3): the descriptors of the plist's `Sockets` entry of one name   |
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import logging
import math
import os
import resource
import socket
import time
from collections.abc import Callable, MutableMapping, Sequence

from ...cli.service.plan import LAUNCHD_NAME
from ...common import ports
from ...config import Settings
from ...errors import ConfigError

FIRST_FD = 3


class ActivationError(ConfigError):
    """The service manager's descriptors are nothing that we can listen on."""


LaunchdSockets = Callable[[str], Sequence[int]]
"""Name under `Sockets` → descriptors; empty when launchd has none for this process. Raises OSError."""


def inherited_sockets(
    environ: MutableMapping[str, str] = os.environ, launchd: LaunchdSockets | None = None
) -> list[socket.socket]:
    """Return listening sockets, IPv4 or IPv6, that a service manager opened for this process.

    The variables that announce them are removed, so that no child takes them for its own. Raises
    ActivationError.
    """
    fds = _systemd_fds(environ)
    if not fds and "XPC_SERVICE_NAME" in environ:  # launchd sets it for every job; Linux never does.
        fds = _launchd_fds(launchd or launch_activate_socket)
    return [_adopt(fd) for fd in fds]


def _systemd_fds(environ: MutableMapping[str, str]) -> list[int]:
    pid, count = environ.get("LISTEN_PID", ""), environ.get("LISTEN_FDS", "")
    names = environ.get("LISTEN_FDNAMES", "")
    for name in ("LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES", "LISTEN_PIDFDID"):
        environ.pop(name, None)
    if pid != str(os.getpid()) or not count:
        return []
    if not count.isdigit() or int(count) > 64:
        raise ActivationError(f"LISTEN_FDS: {count!r} is no number of sockets.")
    # `stored` are descriptors that a daemon once gave the manager to keep; we give none.
    named = dict(enumerate(names.split(":")))
    return [FIRST_FD + at for at in range(int(count)) if named.get(at) != "stored"]


def _launchd_fds(activate: LaunchdSockets) -> list[int]:
    try:
        return list(activate(LAUNCHD_NAME))
    except OSError as error:
        raise ActivationError(f"launchd would not hand over its sockets: {error.strerror}.") from error


def _adopt(fd: int) -> socket.socket:
    try:
        made = socket.socket(fileno=fd)
    except OSError as error:
        raise ActivationError(f"descriptor {fd} from the service manager is no socket.") from error
    try:
        if made.family not in (socket.AF_INET, socket.AF_INET6) or made.type != socket.SOCK_STREAM:
            raise ActivationError(f"descriptor {fd} from the service manager is no TCP socket.")
        if not _listens(made):
            raise ActivationError(f"descriptor {fd} from the service manager does not listen (Accept=no?).")
        made.set_inheritable(False)
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    except BaseException:
        made.detach()  # Not ours to close: the manager may hold it for the next one.
        raise
    return made


def _listens(made: socket.socket) -> bool:
    try:
        return bool(made.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
    except OSError:  # Not every system answers.
        return True


def launch_activate_socket(name: str) -> list[int]:
    """Ask macOS for sockets; [] if this job has none, isn't launchd's, or there is no such call."""
    import ctypes

    libc = ctypes.CDLL(None)
    call = getattr(libc, "launch_activate_socket", None)
    if call is None:
        return []
    # int launch_activate_socket(const char *name, int **fds, size_t *cnt): returns an errno; we free.
    call.argtypes = (
        ctypes.c_char_p,
        ctypes.POINTER(ctypes.POINTER(ctypes.c_int)),
        ctypes.POINTER(ctypes.c_size_t),
    )
    call.restype = ctypes.c_int
    libc.free.argtypes, libc.free.restype = (ctypes.c_void_p,), None
    fds, count = ctypes.POINTER(ctypes.c_int)(), ctypes.c_size_t(0)
    status = call(name.encode(), ctypes.byref(fds), ctypes.byref(count))
    if status in (errno.ENOENT, errno.ESRCH):
        return []
    if status:
        raise OSError(status, os.strerror(status))
    try:
        return [fds[at] for at in range(count.value)]
    finally:
        libc.free(fds)


log = logging.getLogger(__name__)

BACKLOG = 1024
HEALTH_S = 1.0
"""Seconds for the holder of our port to say that it is omlxd."""

RESERVE = 64
"""Open files kept for what is no connection: engines, the cache, the log."""


AT_ONCE = 32
"""Connections accepted in one turn of the event loop. With one a turn, /health waited behind all that
stood in the kernel's queue: 10 s at 200 connections a second."""
PAUSE_S = 0.5
"""Seconds of pause after files ran out; asyncio tries again after one."""


class Listening(socket.socket):
    """A listening socket that leaves some files to others, made of one that listens already.

    Serve it with asyncio's `backlog=AT_ONCE`: asyncio takes that both for the kernel's queue, which is set
    here, and for the number of connections to accept at once. When files run out, each of those tries
    would fail and start a timer of its own that tries so often again, until nothing else ran: all but the
    first find nothing to accept. When files are short here, connections wait in the kernel's queue.
    """

    _full_until = -math.inf

    def listen(self, backlog: int = 0, /) -> None:
        super().listen(BACKLOG)

    def accept(self):
        if time.monotonic() < self._full_until:
            raise BlockingIOError
        probe = os.dup(self.fileno())  # The lowest free number is how many are taken.
        os.close(probe)
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        if limit != resource.RLIM_INFINITY and probe >= limit - min(RESERVE, limit // 2):
            self._full_until = time.monotonic() + PAUSE_S
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return super().accept()


def for_asyncio(made: socket.socket) -> Listening:
    """Wrap `made`, and take it over."""
    family, kind, protocol = made.family, made.type, made.proto
    one = Listening(family, kind, protocol, fileno=made.detach())
    one.setblocking(False)
    return one


class CannotListen(Exception):
    """The daemon can't listen; the text is one sentence for the owner."""


def open_sockets(settings: Settings, *, guarded: bool) -> list[socket.socket]:
    """Open listening sockets; a service manager's win over --host and --port. Those of --ollama-port come
    last.

    guarded  whether a key is asked for; without one, only loopback will do
    Raises CannotListen, and ConfigError for what the service manager got wrong.
    """
    return [*_own_sockets(settings, guarded), *_ollama_sockets(settings)]


def _ollama_sockets(settings: Settings) -> list[socket.socket]:
    if not settings.ollama_port:
        return []
    try:
        made = bind(settings.host, settings.ollama_port)
    except OSError as error:
        log.warning("--ollama-port %d is left out: %s", settings.ollama_port, error.strerror or error)
        return []
    return [made, *_same_port_on_ipv6(made)]


def _own_sockets(settings: Settings, guarded: bool) -> list[socket.socket]:
    if inherited := inherited_sockets():
        for one in inherited:
            host = one.getsockname()[0]
            if not guarded and not _is_loopback(host):
                raise ConfigError(
                    f"the service manager's socket on {host} can be reached by other machines, so a key is "
                    "needed: `omlxd key add NAME` makes one. Or let it listen on 127.0.0.1."
                )
        return inherited
    try:
        made = bind(settings.host, settings.port)
    except UnicodeError as error:  # A label of none or of too many letters.
        raise CannotListen(_no_address(settings)) from error
    except OSError as error:
        raise CannotListen(_why_not_bound(settings, error)) from error
    return [made, *_same_port_on_ipv6(made)]


def _same_port_on_ipv6(made: socket.socket) -> list[socket.socket]:
    """Bind the other address that `localhost` means to clients, if `made` listens on the first."""
    host, port = made.getsockname()[:2]
    if host != "127.0.0.1":
        return []
    try:
        return [bind("::1", port)]
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            log.warning("port %d on ::1 is in use: some clients reach another program at localhost", port)
        return []  # This machine may have no IPv6.


def all_loopback(sockets: list[socket.socket]) -> bool:
    return all(_is_loopback(one.getsockname()[0]) for one in sockets)


def addresses_of(sockets: list[socket.socket]) -> list[str]:
    """Return the addresses of `sockets`, without ports."""
    return [one.getsockname()[0] for one in sockets]


def _is_loopback(host: str) -> bool:
    return ipaddress.ip_address(host.partition("%")[0]).is_loopback


def bind(host: str, port: int) -> socket.socket:
    """Return a socket that listens on the first address that `host` means. Raises OSError."""
    family, *_, address = sorted(
        socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE),
        key=lambda address: address[0] != socket.AF_INET,  # localhost is 127.0.0.1 to most clients.
    )[0]
    made = ports.bind(family, address)
    try:
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        made.listen(BACKLOG)
    except BaseException:
        made.close()
        raise
    return made


def _why_not_bound(settings: Settings, error: OSError) -> str:
    host, port = settings.host, settings.port
    if error.errno == errno.EADDRINUSE:
        from ...cli.daemon.client import DaemonError, daemon_of  # Else no daemon needs it.

        with contextlib.suppress(DaemonError):
            daemon = daemon_of(settings)
            version = daemon.version(HEALTH_S)
            return (
                f"omlxd {version} already runs on {host} port {port}, see `omlxd status --url {daemon.url}`; "
                "stop that one, or choose another port with --port (0 takes a free one)."
            )
        return (
            f"port {port} on {host} is in use; stop the program that holds it, or choose another port "
            "with --port (0 takes a free one)."
        )
    if error.errno in (errno.EACCES, errno.EPERM):
        return f"port {port} on {host} is not allowed to this user; choose one above 1023 with --port."
    if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
        return _no_address(settings)
    return f"can't listen on {host} port {port}: {error}."


def _no_address(settings: Settings) -> str:
    return f"{settings.sources.get('host', '--host')}: {settings.host} is no address of this machine."


def urls_of(sockets: list[socket.socket]) -> str:
    """Return URLs for people, without `[::1]` where 127.0.0.1 has the same port."""
    addresses = [one.getsockname()[:2] for one in sockets]
    shown = [
        (host, port) for host, port in addresses if host != "::1" or ("127.0.0.1", port) not in addresses
    ]
    return " and ".join(f"http://{f'[{host}]' if ':' in host else host}:{port}" for host, port in shown)
