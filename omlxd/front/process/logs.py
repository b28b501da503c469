"""The daemon's log: lines of text or JSON, to standard error or to a file that is rotated.

text  `2026-11-21T10:00:00.000 INFO omlxd.access: req_… POST /v1/messages model=… status=200 …`
json  `{"time": …, "level": …, "logger": …, "message": …, "error": …}` and the fields of the record,
      which are a Struct given as `extra={"fields": …}`

Every line, tracebacks and what engines print included, is searched for keys before it is written.
Prompt text is never logged above debug, where requests' bodies are: no other line of ours holds any, and
tracebacks leave the texts of exceptions out (private_trace.py). Libraries log at warning, since some print
headers below it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import sys
import time
from io import TextIOWrapper
from logging.handlers import RotatingFileHandler
from typing import Any, TextIO

import msgspec

from ...common.private_trace import PrivateFormatter
from ...config import Settings
from ...config.keys import KEY_PATTERN
from ...config.settings import BY_SERVICE
from ...errors import ConfigError
from ..http.observe.trace import printable

HIDDEN = "***"
_HEADERS = re.compile(
    r"(?i)(\bbearer\s+|\bx-api-key['\"]?\s*[:=,]\s*b?['\"]?|\bapi[_-]key['\"]?\s*[:=]\s*b?['\"]?)([^\s'\",)]{4,})"
)


def _written(secret: str) -> set[str]:
    """Return the forms of `secret` in a line: plain, escaped by us or by Python, and within JSON."""
    plain = {secret, printable(secret), repr(secret)[1:-1], repr(secret.encode())[2:-1]}
    return plain | {msgspec.json.encode(each).decode()[1:-1] for each in plain}


class Redactor:
    """Takes keys out of a line: hidden ones, our keys by their form, and values of such headers."""

    def __init__(self) -> None:
        self._forms: list[str] = []

    def hide(self, secret: str) -> None:
        # Some forms are a part of others.
        self._forms = sorted({*self._forms, *_written(secret)}, key=len, reverse=True)

    def __call__(self, text: str) -> str:
        for form in self._forms:
            text = text.replace(form, HIDDEN)
        return _HEADERS.sub(rf"\1{HIDDEN}", KEY_PATTERN.sub(HIDDEN, text))


class TextFormatter(PrivateFormatter):
    def __init__(self, redact: Redactor):
        super().__init__("%(asctime)s.%(msecs)03d %(levelname)s %(name)s: %(message)s", "%Y-%m-%dT%H:%M:%S")
        self._redact = redact

    def format(self, record: logging.LogRecord) -> str:
        return self._redact(super().format(record))


class _Line(msgspec.Struct, omit_defaults=True):
    time: str
    level: str
    logger: str
    message: str
    error: str = ""


class JsonFormatter(PrivateFormatter):
    def __init__(self, redact: Redactor):
        super().__init__()
        self._redact = redact

    def format(self, record: logging.LogRecord) -> str:
        fields = getattr(record, "fields", None)
        second = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line = _Line(
            time=f"{second}.{int(record.msecs):03d}Z",
            level=record.levelname.lower(),
            logger=record.name,
            message=type(fields).__name__.lower() if fields is not None else record.getMessage(),
            error=self.formatException(record.exc_info) if record.exc_info else "",
        )
        fields_of_line: dict[str, Any] = msgspec.to_builtins(line)
        if fields is not None:
            fields_of_line |= msgspec.to_builtins(fields)
        return self._redact(msgspec.json.encode(fields_of_line).decode())


class Logs:
    """The process's log, set up once. `reopen` and `apply` change it while it runs."""

    def __init__(self, settings: Settings, *, has_page: bool = False):
        """Set up the log. Raises ConfigError when the file can't be written, also because its folder is
        missing.

        has_page  a start page comes: what a load says waits for `page_is_printed`
        """
        self._redact = Redactor()
        self._handler = self._make_handler(settings, has_page)
        made = JsonFormatter if settings.log_format == "json" else TextFormatter
        self._handler.setFormatter(made(self._redact))
        root = logging.getLogger()
        root.handlers[:] = [self._handler]
        root.setLevel(logging.WARNING)
        logging.getLogger("omlxd.http").setLevel(logging.WARNING)
        self.apply_settings(settings)

    def apply_settings(self, settings: Settings) -> None:
        """Apply the level, and hide the key."""
        logging.getLogger("omlxd").setLevel(settings.log_level.upper())
        if settings.api_key:  # An old key stays hidden.
            self._redact.hide(settings.api_key)

    def page_is_printed(self) -> None:
        """Write what waited for the start page."""
        if isinstance(self._handler, _Stream) and self._handler.held is not None:
            held, self._handler.held = self._handler.held, None
            for record in held:
                self._handler.handle(record)

    def reopen(self) -> None:
        """Write to a new file if somebody moved the old one away."""
        if isinstance(self._handler, RotatingFileHandler):
            self._handler.acquire()
            try:
                self._handler.close()  # Opened again by the next line.
            finally:
                self._handler.release()

    def _make_handler(self, settings: Settings, has_page: bool) -> logging.Handler:
        if settings.log_file is None:
            return _Stream(has_page)
        try:
            folder = settings.log_file.parent
            # Programs that tidy up ~/Library/Logs remove a service's too.
            if folder == settings.base_path or BY_SERVICE in os.environ:
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            return _PrivateFile(
                settings.log_file,
                maxBytes=settings.log_file_size,
                backupCount=settings.log_file_count,
                encoding="utf-8",
                errors="backslashreplace",
            )
        except OSError as error:
            source = settings.sources.get("log_file", "--log-file")
            raise ConfigError(f"{source}: {settings.log_file} can't be written: {error.strerror}.") from error


MEASURED = "omlxd.engine.mlx_adapter."
"""Loggers of measurements at a load, which `omlxd doctor` shows, too."""
OF_A_LOAD = ("omlxd.engine.", "omlxd.front.engines.supervisor")
"""Loggers of a load's progress, `MEASURED` among them."""
JUDGED = "omlxd.engine.mlx_adapter.metal.rule"
"""Logger of kernels that are judged, which may take long. Its lines are printed at once, behind those that
waited."""


class _Stream(logging.StreamHandler[TextIO]):
    """Standard error. A load's lines, but for warnings, wait for the start page, which a person reads
    first; its measurements show on a terminal at debug alone, but that they are made.

    held  what waits for the page; None: it is printed, or none comes
    """

    def __init__(self, has_page: bool) -> None:
        super().__init__()
        self.held: list[logging.LogRecord] | None = [] if has_page else None

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno < logging.WARNING and not logging.getLogger("omlxd").isEnabledFor(logging.DEBUG):
            begins = record.name == JUDGED and record.getMessage().startswith("judging")
            if record.name.startswith(MEASURED) and self.stream.isatty() and not begins:
                return
            if self.held is not None and record.name.startswith(OF_A_LOAD) and record.name != JUDGED:
                self.held.append(record)
                return
        if self.held and record.name == JUDGED:
            for each in self.held:
                super().emit(each)
            self.held = []
        super().emit(record)


class _PrivateFile(RotatingFileHandler):
    """A log file that only its owner can read. A full disk costs lines, never the daemon.

    A file that is gone is made again, with its folder. Why lines are lost stands once on stderr.
    """

    _lost = False

    def emit(self, record: logging.LogRecord) -> None:
        if self.stream is None or not os.path.exists(self.baseFilename):
            self.close()  # Opened again below.
            with contextlib.suppress(OSError):  # Opening it says why.
                os.mkdir(os.path.dirname(self.baseFilename), 0o700)
        super().emit(record)

    def _open(self) -> TextIOWrapper:
        made = open(  # noqa: SIM115 (the handler closes it)
            self.baseFilename,
            self.mode,
            encoding=self.encoding,
            errors=self.errors,
            opener=lambda path, flags: os.open(path, flags | os.O_CLOEXEC, 0o600),
        )
        assert isinstance(made, TextIOWrapper)
        return made

    def flush(self) -> None:
        super().flush()
        self._lost = False  # A line is written.

    def handleError(self, record: logging.LogRecord) -> None:
        if not self._lost and isinstance(error := sys.exception(), OSError):
            self._lost = True
            with contextlib.suppress(OSError, ValueError):
                print(f"omlxd: log lines are lost: {self.baseFilename}: {error.strerror}", file=sys.stderr)
