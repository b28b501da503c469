"""Finds the conversation that a request continues, and the branch that it must not push out of the cache.

A session is one client's conversation, named or known by its first messages. A branch is a line of requests
that extend one another in canonical form (canonical.py); a request that extends none begins a branch.

A sub-agent's branch has a parent: by the client's headers, else the session's longest branch with other
tools and system messages. While the sub-agent runs its parent's blocks are pinned, and made recent at its end
(engine/kvio/bridge.py), so that the sub-agent's blocks are evicted first.

Tokens alone decide what is reused. A request that extends a branch whose tokens differ is counted.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

from ...chat import Conversation, GenerateRequest, TextPart
from ...common.bounded_map import BoundedMap
from ...common.clients import asks_for_title
from ...kv.hashing import BlockHash
from .canonical import Digest
from .pipeline import RenderedPrompt

MOST_BLOCKS = 100_000
"""Block hashes over all branches: about 10 MB, or sixty prompts of 96k tokens."""

OWN_WEIGHT = 8
"""Blocks that a session weighs beyond its own."""

MOST_BRANCHES = 16
"""Branches of one session at most. A hundred sub-agents that are over are of no use to anybody."""

OPENING_MESSAGES = 3
"""Messages at the beginning that may ask for a title: the system's, an order, the text. The last one may,
too."""

TOLERANCE = 1
"""Blocks at the end of a prompt that the next one may change, with its prompt to answer."""


@dataclass(slots=True, eq=False)
class Branch:
    """A branch of a session. head: digest of tools and first system messages. tip: of all messages of its
    last request.

    prompt_blocks  full blocks of that request's prompt
    hashes         of these, then of what was generated
    """

    agent: str
    head: Digest
    tip: Digest
    prompt_blocks: int
    hashes: Sequence[BlockHash]


@dataclass(slots=True, frozen=True)
class Lineage:
    """A request's place among conversations.

    chain    digests of its beginnings
    head     that of tools and first system messages
    hashes   of its prompt's blocks; its output's may follow
    """

    session: tuple[str, str]
    agent: str
    parent_agent: str
    chain: tuple[Digest, ...]
    head: Digest
    hashes: Sequence[BlockHash]


@dataclass(slots=True, frozen=True)
class Standing:
    """The branch that a request continues.

    extends      a branch
    rejected_at  block from which its tokens differ from that branch's; None: they don't
    pins         blocks of the parent's branch
    """

    extends: bool = False
    rejected_at: int | None = None
    pins: Sequence[BlockHash] = ()


@dataclass(slots=True)
class _Session:
    branches: list[Branch] = field(default_factory=list)
    """Branches, the most recently used last."""
    weight: int = 0
    """Weight in blocks, with something for the session, so that a flood of tiny ones is bounded too."""


class Sessions:
    """Bounded, the least recently used session dropped first. Thread-safe."""

    def __init__(self, most_blocks: int = MOST_BLOCKS):
        self._lock = threading.Lock()
        self._sessions = BoundedMap[tuple[str, str], _Session](
            most_blocks, lambda session: session.weight, least=1
        )
        self.rejected = 0
        self.pinning = 0

    def begin(self, request: Lineage) -> Standing:
        """Place a request that has arrived."""
        with self._lock:
            session = self._sessions.get(request.session)
            if session is None:
                return Standing()
            branch = _extended(session, request)
            parent = _parent(session, request, branch)
            rejected_at = None if branch is None else _rejected_at(branch, request.hashes)
            self.rejected += rejected_at is not None
            self.pinning += parent is not None
            return Standing(
                extends=branch is not None,
                rejected_at=rejected_at,
                pins=parent.hashes if parent is not None else (),
            )

    def end(self, request: Lineage, prompt_blocks: int) -> None:
        """End a request that went well: its branch ends with it, and with its output's `hashes`."""
        new = Branch(request.agent, request.head, request.chain[-1], prompt_blocks, request.hashes)
        with self._lock:
            session = self._sessions.pop(request.session) or _Session()
            old = _extended(session, request)
            if old is not None:
                session.branches.remove(old)
            session.branches.append(new)
            del session.branches[:-MOST_BRANCHES]
            session.weight = OWN_WEIGHT + sum(len(branch.hashes) for branch in session.branches)
            self._sessions.put(request.session, session)

    def figures(self) -> dict[str, float]:
        with self._lock:
            return {
                "sessions": len(self._sessions),
                "session_branches": sum(len(s.branches) for s in self._sessions.values()),
                "prompt_canonical_rejected_total": self.rejected,
                "requests_sheltering_parent_total": self.pinning,
            }


def lineage_of(
    request: GenerateRequest, rendered: RenderedPrompt, hashes: Sequence[BlockHash]
) -> Lineage | None:
    """Return a request's lineage; None for a prompt that is no conversation."""
    if not isinstance(request.prompt, Conversation):
        return None
    roles = [message.role for message in request.prompt.messages]
    heads = next((i for i, role in enumerate(roles) if role != "system"), len(roles))
    _, _, agent = request.session.partition("/")
    session, salt = rendered.session
    return Lineage(
        session=(session.partition("/")[0], salt),
        agent=agent,
        parent_agent=request.parent_agent,
        chain=rendered.chain,
        head=rendered.chain[heads],
        hashes=hashes,
    )


def is_side_request(request: GenerateRequest, standing: Standing) -> bool:
    """Whether a request works for others of its session: a sub-agent's, by its names or by its branch, or one
    for a title."""
    session, _, agent = request.session.partition("/")
    return bool(request.parent_agent or (session and agent) or standing.pins) or _wants_title(request)


def _wants_title(request: GenerateRequest) -> bool:
    prompt = request.prompt
    if not isinstance(prompt, Conversation) or prompt.tools:
        return False
    messages = (*prompt.messages[:OPENING_MESSAGES], *prompt.messages[OPENING_MESSAGES:][-1:])
    asking = (part for message in messages if message.role in ("system", "user") for part in message.parts)
    return any(isinstance(part, TextPart) and asks_for_title(part.text) for part in asking)


def _extended(session: _Session, request: Lineage) -> Branch | None:
    """Return the deepest branch of the same agent whose last request begins this one."""
    depth = {digest: index for index, digest in enumerate(request.chain)}
    ancestors = [b for b in session.branches if b.agent == request.agent and b.tip in depth]
    return max(ancestors, key=lambda b: depth[b.tip], default=None)


def _parent(session: _Session, request: Lineage, own: Branch | None) -> Branch | None:
    def longest(branches: list[Branch]) -> Branch | None:
        return max(branches, key=lambda b: len(b.hashes), default=None)

    if request.agent:
        return longest([b for b in session.branches if b.agent == request.parent_agent])
    others = [b for b in session.branches if b is not own and not b.agent and b.head != request.head]
    parent = longest(others)
    # A sub-agent begins with a short prompt of its own; the longer of two is whom it works for.
    return parent if parent is not None and len(parent.hashes) > len(request.hashes) else None


def _rejected_at(branch: Branch, hashes: Sequence[BlockHash]) -> int | None:
    expected = branch.prompt_blocks - TOLERANCE
    for index, (one, two) in enumerate(zip(branch.hashes[: max(expected, 0)], hashes, strict=False)):
        if one != two:
            return index
    return None
