"""Assistant turns as they were generated, for clients that echo them in another shape.

A client sends an assistant's turn back without its thinking, or with its calls' arguments written
anew; a template may strip old thinking itself. Rendered from that, the turn has other tokens than
those that were generated, and the cached prefix ends there. So the exact tokens are remembered and
put in place of the rendered turn (engine/prompt/splice.py) where all of this holds:

- the same scope (session and cache salt), the same canonical conversation before it;
- the echo's text and calls are those that the client was sent; its thinking too, if it has any;
- the prompt that the turn was generated from is, token for token, the prompt that is being built.

So the model sees nothing that it did not write itself, or that the client did not send; a turn that
the client has edited is rendered as the client sent it. Remembered are turns that ended by themselves and
answers that a limit of tokens cut; not those cut within thinking or a call, nor by a stop string, by time or
by a client that went away.

What is known of a place is also written beside the KV (engine/prompt/turn_store.py), and read when a
conversation comes back to it: so a session outlives its engine. A place that is to be answered loses its file
before the answer is begun, and gets it again with the answer: no crash leaves one that an answer has
overtaken.

A turn that the model wrote, and the place where it stands: what engine/prompt/turn_memory.py remembers.

What a client was sent of a turn: what it may send back.
"""
# MERGED: docstrings of healing.py, turn.py, answer.py (join by hand)

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
"""What a client was sent of a turn: digests of its text and calls, and of its thinking."""


@dataclass(slots=True, frozen=True)
class Turn:
    """A turn that the model wrote.

    prompt         digest of the tokens it was generated from, `prompt_length` of them
    tokens         what was generated, without the token that ended the turn
    whole          digest of both
    """

    prompt: Digest
    prompt_length: int
    tokens: array[int]
    whole: Digest

    @property
    def length(self) -> int:
        """Tokens of the prompt and the turn."""
        return self.prompt_length + len(self.tokens)


class Scope(NamedTuple):
    """Whose turns: `session` as the client named it, "" where it didn't; `salt` of its cache.

    A sub-agent's session is a scope of its own: `name/agent`.
    """

    session: str = ""
    salt: str = ""


@dataclass(slots=True, frozen=True)
class Place:
    """Where a turn stands. `implicit`: the session's name is made of its first messages."""

    scope: tuple[str, str]
    before: Digest
    implicit: bool = False

    @property
    def key(self) -> tuple[tuple[str, str], Digest]:
        return self.scope, self.before


MOST_BYTES = 32 << 20
"""Of remembered turns: about eight million generated tokens."""

REASONS = ("edited", "thinking_edited", "ambiguous", "prefix", "template", "too_long")
"""Why a turn is rendered as the client sent it, though one was generated at its place:

edited, thinking_edited  the client changed its text or calls, or its thinking
ambiguous                two conversations without a name look the same, and theirs differed; the client
                         sent no thinking that tells them apart
prefix                   what stands before it has other tokens than it was generated from
template                 the template's text can't be told apart around it
too_long                 the prompt would no longer fit
"""

MOST_ANSWERS = 16
"""Of one place: a question that is asked again and again."""

_PLACE_BYTES, _TURN_BYTES = 300, 300
"""What a place costs, and a turn beside its tokens."""


class Files(Protocol):
    """Where places are kept beyond this process: TurnFiles (engine/prompt/turn_store.py)."""

    def load(self, place: Place) -> dict[Said, Turn] | None:
        """Turns by what was sent, none where there is no file; None: it can't be told now."""
        ...

    def save(self, place: Place, turns: Mapping[Said, Turn], done: Callable[[bool], None]) -> bool:
        """Write them later; `done(in place?)` on another thread. False, and no `done`: not taken."""
        ...

    def remove(self, place: Place) -> None: ...

    def used(self, places: Sequence[Place]) -> None:
        """Later: they are the most recently used."""
        ...


@dataclass(slots=True, eq=False)
class Known:
    """What is known of one place.

    turns      by what was sent, the newest last; None: two conversations without a name were sent the same
               there, and it was not generated alike
    begun      answers that were begun there, one if its file was found; answering: that have not ended
    on_disk    its file is in place, and holds `turns`; unsaved: it is to be written; writing: it is being
    """

    turns: dict[Said, Turn | None] = field(default_factory=dict)
    begun: int = 0
    answering: int = 0
    on_disk: bool = False
    unsaved: bool = False
    writing: bool = False

    @property
    def nbytes(self) -> int:
        return _PLACE_BYTES + sum(map(_cost, self.turns.values()))


class TurnMemory:
    """Turns by place and answer, the least recently used place dropped first. Thread-safe.

    healed   turns put back; refusals: reason → turns that were not
    unknown  turns at whose place nothing is known to have been generated
    """

    def __init__(self, max_bytes: int = MOST_BYTES, files: Files | None = None):
        self._files = files
        self._lock = threading.Lock()
        self._places = BoundedMap[tuple[tuple[str, str], Digest], Known](
            max_bytes, lambda known: known.nbytes
        )
        self._busy: dict[tuple[tuple[str, str], Digest], Known] = {}
        """Places that are being answered or written: not forgotten meanwhile, whatever is dropped."""
        self.healed = 0
        self.unknown = 0
        self.refusals: Counter[str] = Counter()

    @property
    def nbytes(self) -> int:
        return self._places.cost

    def __len__(self) -> int:
        """Places."""
        return len(self._places)

    # ----------------------------------------------------------------- before an answer

    def find(self, place: Place, answer: Digest, thought: Digest | None) -> Turn | str:
        """The turn, or why there is none; "" where nothing was generated there. May read a file."""
        known = self._known(place)
        with self._lock:
            same = [(said, turn) for said, turn in known.turns.items() if said[0] == answer]
            if not same:
                return "edited" if known.turns else ""
        if thought is not None and not (same := [each for each in same if each[0][1] == thought]):
            return "thinking_edited"
        _, turn = same[-1]
        return "ambiguous" if turn is None or (place.implicit and len(same) > 1) else turn

    def _known(self, place: Place) -> Known:
        with self._lock:
            if (known := self._held(place)) is not None:
                return known
        if self._files is None or (stored := self._files.load(place)) is None:
            return Known()
        with self._lock:
            known = self._held(place)
            if known is None:
                # A place that has no file is noted too, so that it is looked for once.
                known = Known(dict(stored), begun=bool(stored), on_disk=bool(stored))
                self._places.put(place.key, known)
            return known

    def _held(self, place: Place) -> Known | None:
        """What is known of `place` without reading; it is the most recently used then. Under the lock."""
        known = self._places.get(place.key)
        if known is None and (known := self._busy.get(place.key)) is not None:
            self._places.put(place.key, known)
        return known

    def begin(self, place: Place) -> None:
        """An answer will be generated at `place`; `end` must follow. May read and remove a file."""
        if self._files is None:
            return
        known = self._known(place)
        with self._lock:
            if (held := self._held(place)) is not None:
                known = held
            else:  # It couldn't be told whether there is a file.
                known.on_disk = True
                self._places.put(place.key, known)
            known.begun += 1
            known.answering += 1
            self._busy[place.key] = known
            overtaken, known.on_disk = known.on_disk, False
            known.unsaved = known.unsaved or overtaken
        if overtaken:
            self._files.remove(place)

    def used(self, places: Sequence[Place]) -> None:
        """Turns of these places are part of a prompt."""
        if self._files is None:
            return
        with self._lock:
            known = [(place, self._places.peek(place.key)) for place in places]
        filed = [place for place, one in known if one is not None and one.on_disk]
        if filed:
            self._files.used(filed)

    def count(self, healed: int, refused: Sequence[str], unknown: int) -> None:
        """Note what became of the turns of a prompt that will be answered."""
        with self._lock:
            self.healed += healed
            self.refusals.update(refused)
            self.unknown += unknown

    # ----------------------------------------------------------------- after it

    def remember(
        self,
        place: Place,
        answer: Digest,
        thought: Digest | None,
        prompt: Sequence[int],
        generated: Sequence[int],
    ) -> None:
        """`generated` without the token that ended the turn. Reads and writes nothing itself."""
        digest = PrefixDigest(prompt)
        before = digest.value
        turn = Turn(before, len(prompt), array("I", generated), digest.add(generated).value)
        with self._lock:
            known = self._held(place) or Known()
            self._places.pop(place.key)
            _put(known, place, (answer, thought), turn)
            known.unsaved = True
            self._places.put(place.key, known)
            self._save(place, known)

    def end(self, place: Place) -> None:
        """An answer that was begun is over, remembered or not. Reads and writes nothing itself."""
        if self._files is None:
            return
        with self._lock:
            known = self._busy[place.key]
            known.answering -= 1
            self._save(place, known)

    def _save(self, place: Place, known: Known) -> None:
        """Have the place written if it must be and may be: not while it is answered. Under the lock."""
        # Which of two answers a conversation without a name goes on with is not for a crash to decide.
        told_apart = not place.implicit or known.begun < 2
        turns = {said: turn for said, turn in known.turns.items() if turn is not None}
        if self._files is not None and not known.answering and not known.writing:
            if known.unsaved and told_apart and turns:
                known.unsaved = False
                known.writing = self._files.save(place, turns, lambda done: self._saved(place, known, done))
            if known.writing:
                self._busy[place.key] = known
            else:
                self._busy.pop(place.key, None)

    def _saved(self, place: Place, known: Known, in_place: bool) -> None:
        with self._lock:
            overtaken = in_place and (known.unsaved or known.answering > 0)
            known.on_disk = in_place and not overtaken
            known.unsaved = known.unsaved or overtaken
        if overtaken and self._files is not None:
            self._files.remove(place)
        with self._lock:
            known.writing = False
            self._save(place, known)


def _put(known: Known, place: Place, said: Said, turn: Turn) -> None:
    """Add a turn to what is known of `place`, as its newest."""
    clash = False
    if place.implicit and said in known.turns:
        # Two conversations that look the same to the last word: nothing tells whose it is.
        earlier = known.turns[said]
        clash = earlier is None or earlier.whole != turn.whole
    known.turns.pop(said, None)
    known.turns[said] = None if clash else turn
    if len(known.turns) > MOST_ANSWERS:
        del known.turns[next(iter(known.turns))]


def _cost(turn: Turn | None) -> int:
    return _TURN_BYTES + (len(turn.tokens) * turn.tokens.itemsize if turn is not None else 0)


@dataclass(slots=True)
class Answer:
    """Texts are runs between calls; a call is (name, arguments)."""

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

    @property
    def digest(self) -> Digest:
        """As `canonical.answer_of` gives it of the echo."""
        return answer_digest(self.texts, ((name, json.loads(arguments)) for name, arguments in self.calls))

    @property
    def thought(self) -> Digest | None:
        return thought_digest(["".join(self.thoughts)])
