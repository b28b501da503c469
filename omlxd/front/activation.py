"""Sockets that a service manager opened for us, before we were started: socket activation.

| manager | protocol                                                                                |
|---------|-----------------------------------------------------------------------------------------|
| systemd | sd_listen_fds(3): LISTEN_PID is us, LISTEN_FDS descriptors from 3 on, LISTEN_FDNAMES    |
| launchd | launch_activate_socket(3): the descriptors of the plist's `Sockets` entry of one name   |

Nothing here listens or accepts; the manager has done the first, and the server does the second.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, MutableMapping, Sequence

from ..errors import ConfigError

FIRST_FD = 3
LAUNCHD_NAME = "Listeners"
"""The key under `Sockets` in our LaunchAgent."""


class ActivationError(ConfigError):
    """What the service manager handed over is nothing that we can listen on."""


LaunchdSockets = Callable[[str], Sequence[int]]
"""Name under `Sockets` → descriptors; empty when launchd has none for this process. Raises OSError."""


def inherited_sockets(
    environ: MutableMapping[str, str] = os.environ, launchd: LaunchdSockets | None = None
) -> list[socket.socket]:
    """Listening sockets, IPv4 or IPv6, that a service manager opened for this process; [] for none.

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
        raise ActivationError(f"LISTEN_FDS: {count!r} is no number of sockets.", param="LISTEN_FDS")
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
    """macOS's own call. [] if this job has no such sockets, isn't launchd's, or there is no such call."""
    import ctypes
    import errno

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
