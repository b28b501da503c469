"""What writes the arguments of a call that still arrives: one writer a spelling."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

Properties = Callable[[str], dict[str, Any]]
"""A tool's name → its parameters' schemas."""

MAX_HEAD = 2000
"""Letters before a call's first argument."""


class Writer(ABC):
    """name       of the tool; "" until it is known
    arguments  JSON text that is certain
    dead       what came is malformed, from `rest` on
    """

    def __init__(self, properties: Properties):
        self.name = ""
        self.arguments = ""
        self.dead = False
        self._properties = properties
        self._types: dict[str, Any] = {}
        self._text = ""

    @property
    def in_string(self) -> bool:
        """The text so far ends inside a JSON string, so that a tag there is part of it."""
        return False

    @property
    def rest(self) -> str:
        """What has come and is in `arguments` in no form."""
        return self._text

    @property
    @abstractmethod
    def whole(self) -> str:
        """The members that are whole, as an object."""

    @abstractmethod
    def feed(self, text: str) -> None: ...

    @abstractmethod
    def close(self) -> bool:
        """The call's text has ended. False: it is no whole call."""

    @abstractmethod
    def cut(self) -> str:
        """The arguments with what is known of the member that was cut off."""
