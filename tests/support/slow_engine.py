"""A real engine whose disk takes `SECONDS` for each block file that is read, one after the other.

python tests/support/slow_engine.py SECONDS omlxd.engine --fd N
"""

from __future__ import annotations

import runpy
import sys
import threading
import time
from typing import Any

from omlxd.engine.kvio import newest
from omlxd.kv.files.fs import FileSystem

_readv = FileSystem.readv
_one = threading.Lock()
SECONDS = float(sys.argv[1])


def slow_readv(self: FileSystem, fd: int, buffers: Any, offset: int) -> int:
    if not offset:
        with _one:
            time.sleep(SECONDS)
    return _readv(self, fd, buffers, offset)


if __name__ == "__main__":
    newest.IDLE_S = 3600.0  # No block is in RAM before a request.
    FileSystem.readv = slow_readv
    sys.argv = sys.argv[2:]
    runpy.run_module("omlxd.engine", run_name="__main__")
