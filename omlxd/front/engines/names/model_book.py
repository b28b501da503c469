"""Remembers between runs the names and pins that the owner gave a model.

A small JSON file under the base path. The configuration file is the owner's own and is never
written; where both name an alias, the configuration file's counts.
"""

from __future__ import annotations

import asyncio
import logging
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from ....common.files import read_small, write_atomic

log = logging.getLogger(__name__)


class _Book(msgspec.Struct):
    aliases: dict[str, str] = {}
    pinned: list[str] = []
    factors: dict[str, float] = {}


class ModelBook:
    """The file `path` and its content. One that can't be read is an empty one, and says so in the log.

    aliases  alias → model id
    pinned   model ids
    factors  model id → memory seen in use over memory that was foretold
    """

    def __init__(self, path: Path):
        self._path = path
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="models.json")
        self._book = self._read_book()

    @property
    def aliases(self) -> dict[str, str]:
        return self._book.aliases

    @property
    def pinned(self) -> list[str]:
        return self._book.pinned

    def factor(self, model_id: str) -> float:
        return self._book.factors.get(model_id, 1.0)

    def set_factor(self, model_id: str, factor: float) -> None:
        """Keep a factor that differs by more than a hundredth."""
        if abs(factor - self.factor(model_id)) > 0.02:
            self._book.factors[model_id] = round(factor, 3)
            self._write()

    def set_alias(self, alias: str, model_id: str | None) -> None:
        """Set an alias; None removes it."""
        if model_id is None:
            self._book.aliases.pop(alias, None)
        else:
            self._book.aliases[alias] = model_id
        self._write()

    def set_pinned(self, model_id: str, pinned: bool) -> None:
        others = [name for name in self._book.pinned if name != model_id]
        self._book.pinned = [*others, model_id] if pinned else others
        self._write()

    def _read_book(self) -> _Book:
        try:
            return msgspec.json.decode(read_small(self._path), type=_Book)
        except FileNotFoundError:
            return _Book()
        except (OSError, msgspec.MsgspecError) as error:
            log.warning("%s can't be read, so aliases and pins are forgotten: %s", self._path, error)
            return _Book()

    async def close(self, wait_s: float) -> None:
        """Wait at most `wait_s` until all is written: a disk may hang."""
        await asyncio.wait({asyncio.get_running_loop().run_in_executor(self._writer, int)}, timeout=wait_s)
        self._writer.shutdown(wait=False)

    def _write(self) -> None:
        self._writer.submit(self._replace, msgspec.json.format(msgspec.json.encode(self._book)))

    def _replace(self, text: bytes) -> None:
        try:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_atomic(self._path, text, sync=True)
        except OSError as error:
            log.warning("%s can't be written, so this is forgotten at the end: %s", self._path, error)
