"""Space at the end of a text, held back until it is known what follows."""

from __future__ import annotations


class TrailingSpaces:
    """Passes text on without its trailing space, which comes before the next word or is dropped."""

    __slots__ = ("_held",)

    def __init__(self) -> None:
        self._held = ""

    def feed(self, text: str) -> str:
        """Text that may be shown now."""
        kept = text.rstrip()
        if not kept:
            self._held += text
            return ""
        shown, self._held = self._held + kept, text[len(kept) :]
        return shown

    @property
    def held(self) -> int:
        """Letters held back."""
        return len(self._held)

    def drop(self) -> None:
        """A tag follows."""
        self._held = ""

    def flush(self) -> str:
        """Nothing follows."""
        held, self._held = self._held, ""
        return held
