"""Renders chat templates in processes whose loss costs one request (template_child.py).

transformers prepares the variables and calls what it takes for the compiled template, which asks a child.
"""

from __future__ import annotations

import contextlib
import selectors
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import psutil

from .template_child import MEMORY_BYTES

DEADLINE_S = 5.0
"""Of one rendering. `tools/bench/render_child.py`, medians beside other work on 2 cores: a small conversation
takes 0.4 to 1.2 ms (0.1 in the engine's own process), one of 400 kB 13 ms (2)."""
DEADLINE_S_PER_MB = 1.0
LOOK_S = 0.05
KEEP = 2
"""Children that wait for work."""
MOST_LOST = 2
"""Fresh children that one rendering may end: the first may have been killed for another reason."""


class TemplateLost(Exception):
    """The template did not end in time, or took too much memory, and its process is gone."""


class TemplateRefusal(Exception):
    """The template raised an error; its words."""


class _Child:
    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-I", str(Path(__file__).with_name("template_child.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            start_new_session=True,  # A terminal's ^C is for the front.
        )

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()

    def ask(self, frame: bytes, seconds: float) -> bytes:
        """Raises TemplateLost, OSError and EOFError."""
        writer = self.process.stdin
        assert writer is not None
        until = time.monotonic() + seconds
        # The child reads a whole frame before it answers, so that neither waits for the other.
        view = memoryview(len(frame).to_bytes(4, "little") + frame)
        while view:
            view = view[writer.write(view) or 0 :]
        try:
            return self._read(int.from_bytes(self._read(4, until), "little"), until)
        except TimeoutError:
            raise TemplateLost(f"it did not end within {seconds:.0f} s") from None

    def _read(self, length: int, until: float) -> bytes:
        reader = self.process.stdout
        assert reader is not None
        data = bytearray()
        with selectors.DefaultSelector() as ready:
            ready.register(reader, selectors.EVENT_READ)
            while len(data) < length:
                while not ready.select(LOOK_S):
                    if time.monotonic() > until:
                        raise TimeoutError
                    self._check_memory()
                if not (piece := reader.read(length - len(data))):
                    raise EOFError
                data += piece
        return bytes(data)

    def _check_memory(self) -> None:
        """Where the system does not limit it."""
        with contextlib.suppress(psutil.Error):
            if psutil.Process(self.process.pid).memory_info().rss > MEMORY_BYTES:
                raise TemplateLost("it takes more memory than a template may have")


class TemplateProcesses:
    """Thread-safe. Each rendering has a child to itself; a few are kept."""

    def __init__(self) -> None:
        self._idle: list[_Child] = []
        self._lock = threading.Lock()

    def render(self, template: str, variables: dict[str, Any], seconds: float = DEADLINE_S) -> str:
        """Raises TemplateRefusal and TemplateLost."""
        frame = msgspec.msgpack.encode((template, variables))
        seconds += len(frame) * 1e-6 * DEADLINE_S_PER_MB
        lost = 0
        while True:
            with self._lock:
                kept = self._idle.pop() if self._idle else None
            child = kept or _Child()
            try:
                text, error = msgspec.msgpack.decode(child.ask(frame, seconds), type=tuple[str, str])
            except (OSError, EOFError, msgspec.DecodeError):
                child.kill()
                lost += kept is None
                if lost < MOST_LOST:  # A kept one may have ended while nobody looked.
                    continue
                raise TemplateLost("its process was ended") from None
            except BaseException:
                child.kill()
                raise
            self._keep(child)
            if error:
                raise TemplateRefusal(error)
            return text

    def _keep(self, child: _Child) -> None:
        with self._lock:
            if len(self._idle) < KEEP:
                self._idle.append(child)
                return
        child.kill()


PROCESSES = TemplateProcesses()


class _Remote:
    """In place of a compiled template."""

    def __init__(self, template: str):
        self._template = template

    def render(self, **variables: Any) -> str:
        return PROCESSES.render(self._template, variables)


def install() -> None:
    """From now on transformers renders every template of this process in a child."""
    from transformers.utils import chat_template_utils

    chat_template_utils._compile_jinja_template = _Remote
