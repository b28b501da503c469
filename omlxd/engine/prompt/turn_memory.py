"""Keeps assistant turns as they were generated, for clients that echo them in another shape.

A client drops a turn's thinking or writes its calls anew, and a template may strip old thinking. The turn
then has other tokens than it was generated with, and the cached prefix ends there. So the generated tokens
are spliced into the prompt (engine/prompt/splice.py) where all of this holds:

- the scope (session and cache salt) and the canonical conversation before it are the same;
- the echo's text and calls are those that the client was sent; its thinking too, if it has any;
- the prompt that the turn was generated from is, token for token, the prompt that is being built.

A turn that the client edited is rendered as sent. Not remembered are turns cut within thinking or a call, by
a stop string, by time or by a client that left.

A place's entry is also a file (engine/prompt/turn_store.py), so that a session outlives its engine. The file
is removed before an answer begins there and written again after it: no crash leaves an outdated file.
"""

from __future__ import annotations

import hashlib
import json
import threading
from array import array
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from ...chat import Event, ReasoningDelta, TextDelta, ToolCall
from ...common.bounded_map import BoundedMap
from .canonical import Digest, answer_digest, thought_digest
from .tool_defaults import ToolDefaults


class PrefixDigest:
    """Digest of a growing list of token ids."""

    __slots__ = ("_state",)

    def __init__(self, tokens: Sequence[int] = ()):
        self._state = hashlib.blake2b(digest_size=16)
        self.add(tokens)

    def add(self, tokens: Sequence[int]) -> PrefixDigest:
        self._state.update(array("I", tokens).tobytes())
        return self

    def copy(self) -> PrefixDigest:
        other = PrefixDigest.__new__(PrefixDigest)
        other._state = self._state.copy()
        return other

    @property
    def value(self) -> Digest:
        return self._state.digest()


Said = tuple[Digest, Digest | None]
"""Digests of a turn as sent to the client: of its text and calls, and of its thinking."""


@dataclass(slots=True, frozen=True)
class Turn:
    """A turn that the model wrote.

    prompt           digest of the `prompt_length` tokens it was generated from; prompt_and_turn: of both
    tokens           what was generated, without the token that ended the turn
    """

    prompt: Digest
    prompt_length: int
    tokens: array[int]
    prompt_and_turn: Digest

    @property
    def length(self) -> int:
        """Tokens of the prompt and the turn."""
        return self.prompt_length + len(self.tokens)


class Scope(NamedTuple):
    """The owner of turns: `session` by the client's name, or "" (a sub-agent's: `name/agent`); `salt` of its
    cache.
    """

    session: str = ""
    salt: str = ""


@dataclass(slots=True, frozen=True)
class Place:
    """The place of a turn in a conversation.

    implicit  the session's name is made of its first messages
    defaults  of the conversation's tools
    """

    scope: tuple[str, str]
    before: Digest
    implicit: bool = False
    defaults: ToolDefaults = field(default_factory=ToolDefaults, compare=False)

    @property
    def key(self) -> tuple[tuple[str, str], Digest]:
        return self.scope, self.before


MOST_BYTES = 32 << 20
"""Bytes of remembered turns: about eight million generated tokens."""

REASONS = ("edited", "thinking_edited", "ambiguous", "prefix", "template", "too_long")
"""Reasons why a turn is rendered as the client sent it, though one was generated at its place:

edited, thinking_edited  the client changed its text or calls, or its thinking
ambiguous                two conversations without a name look the same, and their turns differ
prefix                   the tokens before it differ from those that it was generated from
template                 the template's text can't be told apart around it
too_long                 the prompt would no longer fit
"""

MOST_ANSWERS = 16
"""Answers of one place at most, to a question that is asked again and again."""

_PLACE_BYTES, _TURN_BYTES = 300, 300
"""Bytes of a place, and of a turn beside its tokens."""


@dataclass(slots=True, eq=False)
class _Entry:
    """The turns of one place.

    turns      by what was sent, the newest last; None: two conversations look alike, and their turns differ
    answering  answers that were begun there and have not ended
    on_disk    its file is in place, and holds `turns`; unsaved: it must be written; writing: it is being
    """

    turns: dict[Said, Turn | None] = field(default_factory=dict)
    answering: int = 0
    on_disk: bool = False
    unsaved: bool = False
    writing: bool = False

    @property
    def nbytes(self) -> int:
        return _PLACE_BYTES + sum(map(_cost, self.turns.values()))


class Files(Protocol):
    """A store of turns that outlives the process (turn_store.py)."""

    def path_of(self, place: Place) -> str: ...

    def load(self, place: Place) -> dict[Said, Turn] | None: ...

    def save(self, place: Place, turns: Mapping[Said, Turn], done: Callable[[bool], None]) -> bool: ...

    def remove(self, place: Place) -> None: ...

    def used(self, places: Sequence[Place]) -> None: ...


class TurnMemory:
    """Turns by place and answer, the least recently used place dropped first. Thread-safe.

    spliced  turns put back; refusals: reason → turns that were not
    unknown  turns at whose place nothing is known to have been generated
    """

    def __init__(self, max_bytes: int = MOST_BYTES, files: Files | None = None):
        self._files = files
        self._lock = threading.Lock()
        self._places = BoundedMap[tuple[tuple[str, str], Digest], _Entry](
            max_bytes, lambda entry: entry.nbytes
        )
        self._busy: dict[tuple[tuple[str, str], Digest], _Entry] = {}
        """Places under way, which are not dropped meanwhile."""
        self.spliced = 0
        self.unknown = 0
        self.refusals: Counter[str] = Counter()

    # ----------------------------------------------------------------- before an answer

    def find(self, place: Place, answer: Digest, thought: Digest | None) -> Turn | str:
        """Return the turn, or the reason for none; "" where nothing was generated there. May read a file."""
        entry = self._entry_of(place)
        with self._lock:
            same = [(said, turn) for said, turn in entry.turns.items() if said[0] == answer]
            if not same:
                return "edited" if entry.turns else ""
        if thought is not None and not (same := [each for each in same if each[0][1] == thought]):
            return "thinking_edited"
        _, turn = same[-1]
        return "ambiguous" if turn is None or (place.implicit and len(same) > 1) else turn

    def _entry_of(self, place: Place) -> _Entry:
        with self._lock:
            if (entry := self._held(place)) is not None:
                return entry
        if self._files is None or (stored := self._files.load(place)) is None:
            return _Entry()
        with self._lock:
            entry = self._held(place)
            if entry is None:
                # A place that has no file is noted too, so that it is looked for once.
                entry = _Entry(dict(stored), on_disk=bool(stored))
                self._places.put(place.key, entry)
            return entry

    def _held(self, place: Place) -> _Entry | None:
        """Return the entry of `place` without reading; it is the most recently used then. Under the lock."""
        entry = self._places.get(place.key)
        if entry is None and (entry := self._busy.get(place.key)) is not None:
            self._places.put(place.key, entry)
        return entry

    def begin(self, place: Place) -> None:
        """Begin an answer at `place`; `end` must follow. May read and remove a file."""
        if self._files is None:
            return
        entry = self._entry_of(place)
        with self._lock:
            if (held := self._held(place)) is not None:
                entry = held
            else:  # It couldn't be told whether there is a file.
                entry.on_disk = True
                self._places.put(place.key, entry)
            entry.answering += 1
            self._busy[place.key] = entry
            overtaken, entry.on_disk = entry.on_disk, False
            entry.unsaved = entry.unsaved or overtaken
        if overtaken:
            self._files.remove(place)

    def used(self, places: Sequence[Place]) -> None:
        """Note that a prompt uses the turns of these places."""
        if self._files is None:
            return
        with self._lock:
            entry = [(place, self._places.peek(place.key)) for place in places]
        filed = [place for place, one in entry if one is not None and one.on_disk]
        if filed:
            self._files.used(filed)

    def files_of(self, places: Sequence[Place]) -> list[str]:
        """Return the files with the turns of these places, written or not. May read files."""
        if self._files is None:
            return []
        found = [(self._files.path_of(place), self._entry_of(place)) for place in places]
        return [path for path, entry in found if entry.on_disk or (entry.writing and not entry.unsaved)]

    def count(self, spliced: int, refused: Sequence[str], unknown: int) -> None:
        """Count the fates of turns of a prompt that will be answered."""
        with self._lock:
            self.spliced += spliced
            self.refusals.update(refused)
            self.unknown += unknown

    # ----------------------------------------------------------------- after it

    def remember(
        self,
        place: Place,
        answer: Digest,
        thought: Digest | None,
        tokens: Sequence[int],
        generated: Sequence[int],
    ) -> None:
        """Remember `generated`, without the token that ended the turn. Reads and writes nothing itself."""
        digest = PrefixDigest(tokens)
        before = digest.value
        turn = Turn(before, len(tokens), array("I", generated), digest.add(generated).value)
        with self._lock:
            entry = self._held(place) or _Entry()
            self._places.pop(place.key)
            _put(entry, place, (answer, thought), turn)
            entry.unsaved = True
            self._places.put(place.key, entry)
            self._save(place, entry)

    def end(self, place: Place) -> None:
        """End an answer, remembered or not. Reads and writes nothing itself."""
        if self._files is None:
            return
        with self._lock:
            entry = self._busy[place.key]
            entry.answering -= 1
            self._save(place, entry)

    def _save(self, place: Place, entry: _Entry) -> None:
        """Write the place if it changed and is not being answered. Under the lock."""
        turns = {said: turn for said, turn in entry.turns.items() if turn is not None}
        # Which of two turns a conversation without a name goes on with is not for a crash to decide.
        told_apart = not place.implicit or len({answer for answer, _ in turns}) == len(entry.turns)
        if self._files is not None and not entry.answering and not entry.writing:
            if entry.unsaved and told_apart and turns:
                entry.unsaved = False
                entry.writing = self._files.save(place, turns, lambda done: self._saved(place, entry, done))
            if entry.writing:
                self._busy[place.key] = entry
            else:
                self._busy.pop(place.key, None)

    def _saved(self, place: Place, entry: _Entry, in_place: bool) -> None:
        with self._lock:
            overtaken = in_place and (entry.unsaved or entry.answering > 0)
            entry.on_disk = in_place and not overtaken
            entry.unsaved = entry.unsaved or overtaken
        if overtaken and self._files is not None:
            self._files.remove(place)
        with self._lock:
            entry.writing = False
            self._save(place, entry)


def _put(entry: _Entry, place: Place, said: Said, turn: Turn) -> None:
    """Add a turn to the entry of `place`, as its newest."""
    clash = False
    if place.implicit and said in entry.turns:
        # Two conversations that look the same to the last word: nothing tells whose it is.
        earlier = entry.turns[said]
        clash = earlier is None or earlier.prompt_and_turn != turn.prompt_and_turn
    entry.turns.pop(said, None)
    entry.turns[said] = None if clash else turn
    if len(entry.turns) > MOST_ANSWERS:
        del entry.turns[next(iter(entry.turns))]


def _cost(turn: Turn | None) -> int:
    return _TURN_BYTES + (len(turn.tokens) * turn.tokens.itemsize if turn is not None else 0)


@dataclass(slots=True)
class Answer:
    """An answer as sent. Texts are runs between calls; a call is (name, arguments)."""

    texts: list[str] = field(default_factory=lambda: [""])
    thoughts: list[str] = field(default_factory=list)
    calls: list[tuple[str, str]] = field(default_factory=list)

    def add(self, event: Event) -> None:
        if isinstance(event, TextDelta):
            self.texts[-1] += event.text
        elif isinstance(event, ReasoningDelta):
            self.thoughts.append(event.text)
        elif isinstance(event, ToolCall):
            self.calls.append((event.name, event.arguments))
            self.texts.append("")

    def digest(self, defaults: ToolDefaults) -> Digest:
        """Return the digest that `canonical.answer_of` gives of the echo."""
        calls = ((name, json.loads(arguments)) for name, arguments in self.calls)
        return answer_digest(self.texts, calls, defaults)

    @property
    def thought(self) -> Digest | None:
        return thought_digest(["".join(self.thoughts)])
