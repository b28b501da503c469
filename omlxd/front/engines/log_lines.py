from __future__ import annotations

import logging
import re

_ENGINE_LINE = re.compile(r"(DEBUG|INFO|WARNING|ERROR|CRITICAL) ([\w.-]+): (.*)")


class EngineLines:
    """What an engine process prints becomes records of the front's log.

    Its own log lines keep their level and logger, and are left out below this log's level, which the
    engine may not have heard of yet. Anything else (what a C++ library says before it aborts) belongs
    to the line before it, and is a warning at least.
    """

    def __init__(self) -> None:
        self._level, self._name = logging.WARNING, "omlxd.engine"

    def __call__(self, text: str) -> None:
        if found := _ENGINE_LINE.fullmatch(text):
            self._level, self._name = getattr(logging, found[1]), found[2]
            text = found[3]
        level = self._level if found else max(self._level, logging.WARNING)
        logger = logging.getLogger(self._name)
        if logger.isEnabledFor(level):
            logger.handle(logger.makeRecord(self._name, level, "", 0, text, (), None))
