"""The User-Agent of the command's requests to a daemon: `omlxd-chat/0.1.0` for `omlxd chat`."""

from __future__ import annotations

from ... import __version__

_verb = ""


def name_verb(verb: str) -> None:
    """Set the verb that runs in this process."""
    global _verb
    _verb = verb


def user_agent() -> str:
    return f"omlxd-{_verb}/{__version__}" if _verb else f"omlxd/{__version__}"
