"""What writes the arguments of a call that still arrives: one writer a spelling."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

Properties = Callable[[str], dict[str, Any]]
"""A tool's name → its parameters' schemas."""

MAX_HEAD = 2000
"""Letters before a call's first argument."""


class Writer(Protocol):
    """name       of the tool; "" until it is known
    arguments  JSON text that is certain
    dead       what came is malformed, from `rest` on
    in_string  the text so far ends inside a JSON string, so that a tag there is part of it
    """

    name: str
    arguments: str
    dead: bool

    @property
    def in_string(self) -> bool: ...

    @property
    def rest(self) -> str:
        """What has come and is in `arguments` in no form."""
        ...

    @property
    def whole(self) -> str:
        """The members that are whole, as an object."""
        ...

    def feed(self, text: str) -> None: ...

    def close(self) -> bool:
        """The call's text has ended. False: it is no whole call."""
        ...

    def cut(self) -> str:
        """The arguments with what is known of the member that was cut off."""
        ...
