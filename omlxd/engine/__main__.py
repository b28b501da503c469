"""`python -m omlxd.engine --fd N`: one engine over an inherited Unix socket."""

from __future__ import annotations

import argparse
import contextlib
import gc
import logging
import os
import signal
import socket
import sys
import threading

from ..common.private_trace import LineFormatter
from ..common.stacks import show_threads_on_signal
from ..kv.files.fs import write_for
from .process.prepare import prepare_mlx


def main() -> None:
    parser = argparse.ArgumentParser(prog="omlxd.engine", description=__doc__)
    parser.add_argument("--fd", type=int, required=True, help="connected Unix socket")
    parser.add_argument("--follow", action="store_true", help="be another rank of the engine at the socket")
    parser.add_argument("--lead", type=int, help="connected Unix socket to rank 0, on another machine")
    parser.add_argument("--number", type=int, default=0, help="of that rank, beside rank 0 on this machine")
    parser.add_argument("--mlx-blas", action="store_true", help="leave matrix products to MLX's own BLAS")
    args = parser.parse_args()
    _log_to_stderr()
    show_threads_on_signal()
    os.umask(0o077)  # All that an engine writes is its owner's cache.
    _die_with_parent()
    if args.number:
        write_for(os.getppid(), args.number)
    prepare_mlx(own_blas=args.mlx_blas)
    # The front stops engines by `Quit` or by closing the socket; a terminal's ^C is for the front.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sock = socket.socket(fileno=args.fd)
    # What is imported stays: collecting while its 70,000 objects are made takes 60 ms of processor time,
    # and looking at all of them once more when a model is loaded as much again.
    gc.disable()
    # After logging is set up: these import MLX.
    sockets = [sock]
    if args.follow or args.lead is not None:
        from .server.ranks.follower import Follower as Service

        if args.lead is not None:
            sockets = [socket.socket(fileno=args.lead), sock]
    else:
        from .server.service import EngineService as Service

    gc.freeze()
    gc.enable()
    service, status = Service(*sockets), 0
    signal.signal(signal.SIGTERM, lambda number, frame: service.terminate())
    try:
        service.run()
    except Exception:
        logging.getLogger(__name__).exception("this engine ends")
        status = 6
    service.release_memory()
    logging.shutdown()
    if service.terminated:  # The front tells of the signal.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)
    # MLX and its threads have nothing to say any more; ordinary interpreter exit can hang on them.
    os._exit(status)


def _log_to_stderr() -> None:
    """For the front, which reads it. The level of our own lines comes with Load and LogLevel."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(LineFormatter())
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    logging.getLogger("omlxd").setLevel(logging.INFO)

    def thread_failed(args: threading.ExceptHookArgs) -> None:
        where = args.thread.name if args.thread else "a thread"
        logging.getLogger(__name__).error(
            "%s failed: %s", where, args.exc_type.__name__, exc_info=args.exc_value
        )

    threading.excepthook = thread_failed


def _die_with_parent() -> None:
    """On Linux the kernel ends us with the front, should the socket's end not be noticed.

    By SIGKILL: a SIGTERM, which would end us no later, waits for as long as we are stopped.
    """
    if not sys.platform.startswith("linux"):
        return
    with contextlib.suppress(Exception):
        import ctypes

        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


if __name__ == "__main__":
    main()
