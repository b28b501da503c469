"""Holds text back until its continuation decides: beginnings of tags and stop strings, trailing space."""

from __future__ import annotations

import re
from collections.abc import Iterable


class Beginnings:
    """Finds `words`, and how much of a text's end may begin one."""

    __slots__ = ("_firsts", "_longest", "_words", "search")

    def __init__(self, words: Iterable[str]):
        self._words = tuple(words)
        self._longest = max(map(len, self._words), default=0)
        self._firsts = frozenset(word[0] for word in self._words)
        self.search = re.compile("|".join(map(re.escape, self._words)) or r"(?!)").search

    def held(self, text: str) -> int:
        """Return the length of the longest end of `text` that begins a word without completing it."""
        end = text[max(len(text) - self._longest + 1, 0) :] if self._longest > 1 else ""
        for at, letter in enumerate(end):
            if letter in self._firsts and any(word.startswith(end[at:]) for word in self._words):
                return len(end) - at
        return 0


class StopStrings:
    """Passes text on up to the first stop string, then `matched`; holds back what may begin one.

    shown  the string itself is passed on, too
    off    text is passed on as it is
    """

    def __init__(self, stops: tuple[str, ...], shown: bool = False):
        self._shown, self.off = shown, False
        self._stops = tuple(dict.fromkeys(stop for stop in stops if stop))
        self._beginnings = Beginnings(self._stops)
        self._held = ""
        self.matched: str | None = None

    def feed(self, text: str) -> str:
        """Return the text to show now. Of two stops the one that ends first wins, then the longer."""
        if self.matched is not None or not self._stops or self.off:
            return "" if self.matched is not None else text
        text = self._held + text
        matches = [(at + len(stop), at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if matches:
            end, at, self.matched = min(matches)
            self._held = ""
            return text[: end if self._shown else at]
        shown = len(text) - self._beginnings.held(text)
        self._held = text[shown:]
        return text[:shown]

    def flush(self) -> str:
        """Return the held text: no more text follows that could complete a stop string."""
        held, self._held = self._held, ""
        return held


class TrailingSpaces:
    """Passes text on without its trailing space, which comes before the next word or is dropped."""

    __slots__ = ("_held",)

    def __init__(self) -> None:
        self._held = ""

    def feed(self, text: str) -> str:
        """Return the text that may be shown now."""
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
        """Drop the held space before a tag."""
        self._held = ""

    def flush(self) -> str:
        """Return the held space, behind which no text follows."""
        held, self._held = self._held, ""
        return held
