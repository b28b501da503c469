"""What the programs that fetch or make a model folder share: hub.py and gguf/importing.py."""

from __future__ import annotations

import os
import sys
import threading


def end_with_parent() -> None:
    """From now on, end when standard input closes, since whoever wanted the model is gone."""
    if not sys.stdin.isatty():
        threading.Thread(target=_wait_for_end, daemon=True).start()


def _wait_for_end() -> None:
    # Not through sys.stdin: its lock, held here, would abort the interpreter's own exit.
    while os.read(0, 1024):
        pass
    os._exit(1)
