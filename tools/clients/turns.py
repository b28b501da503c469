"""Turns of a client's session, and what each must show."""

from __future__ import annotations

import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise

from .agents import Agent, ClaudeCode, Codex
from .own_daemon import OwnDaemon
from .recorder import GONE, Recorder, Request
from .reuse import Reuse, ReuseLog, changed, main_of
from .run import Ended, Running

BLOCK = 64
"""Tokens; the daemon's default."""
CANCEL_AFTER_BYTES = 4000
"""Of an answer: by then its text is on the way."""
CANCEL_LIMIT_S = 120.0
FREED_S = 10.0
"""A slot whose client is gone must be free by then."""
SETTLE_S = 0.5
"""Ends of requests reach the engine's log a moment after their answers."""


@dataclass(slots=True)
class Row:
    """One turn, or all of a client. `problem` "": it passed."""

    client: str
    turn: str
    requests: list[Request] = field(default_factory=list)
    reuses: list[Reuse] = field(default_factory=list)
    status: int | None = None
    note: str = ""
    problem: str = ""

    @property
    def errors(self) -> list[str]:
        return [request.error for request in self.requests if request.error and request.error != GONE]

    @property
    def worst(self) -> int:
        return max((reuse.lost for reuse in self.reuses), default=0)

    def add(self, turn: Row) -> None:
        """Make this the row of all turns, `turn` among them."""
        self.requests += turn.requests
        self.reuses += turn.reuses
        if turn.note:
            self.note += f"{'; ' if self.note else ''}{turn.turn}: {turn.note}"
        if turn.problem and not self.problem:
            self.problem = f"{turn.turn}: {turn.problem}"

    def cells(self) -> list[object]:
        prompt = sum(reuse.played.prompt for reuse in self.reuses)
        cached = sum(reuse.played.cached for reuse in self.reuses)
        ideal = sum(reuse.ideal for reuse in self.reuses)
        figures = [len(self.requests), len(self.errors), prompt, cached, prompt - cached, ideal, self.worst]
        result = self.problem or "pass"
        return [self.client, self.turn, *figures, f"{result}; {self.note}" if self.note else result]


class Session:
    """Runs turns of one client against one daemon, and judges each."""

    def __init__(self, client: str, recorder: Recorder, daemon: OwnDaemon):
        self._client = client
        self._recorder = recorder
        self._daemon = daemon
        self._log = ReuseLog(daemon.played)
        self._log.read()  # what others did before
        self._before: Reuse | None = None

    def turn(self, name: str, start: Callable[[], Running], said: str = "", *, follows: bool = True) -> Row:
        """One run to its end; `said` must stand in what it prints.

        follows  it goes on with the conversation of the turn before
        """
        first = len(self._recorder.requests)
        ended = start().wait()
        row = self._row(name, first, ended.status, follows)
        row.problem = _how_it_ended(ended, said) or row.problem
        return row

    def cancelled(self, name: str, start: Callable[[], Running], number: int = signal.SIGINT) -> Row:
        """A run that is interrupted in the middle of an answer."""
        first = len(self._recorder.requests)
        running = start()
        deadline = time.monotonic() + CANCEL_LIMIT_S
        while not any(r.passed > CANCEL_AFTER_BYTES for r in self._recorder.requests[first:]):
            if time.monotonic() > deadline or running.ended:
                running.signal(signal.SIGKILL)
                running.wait()
                return self._row(name, first, None, True, "no long answer came")
            time.sleep(0.01)
        running.signal(number)
        ended = running.wait(20)
        gone_at = time.monotonic()
        row = self._row(name, first, ended.status, True)
        while not any(reuse.played.cancelled for reuse in row.reuses):
            if time.monotonic() > gone_at + FREED_S:
                row.problem = row.problem or "the slot was not freed"
                break
            time.sleep(0.05)
            self._judge(row, self._log.read())
        return row

    def _row(self, name: str, first: int, status: int | None, follows: bool, problem: str = "") -> Row:
        time.sleep(SETTLE_S)
        row = Row(self._client, name, self._recorder.requests[first:], status=status, problem=problem)
        self._judge(row, self._log.read())
        conversation = main_of(row.reuses)
        if conversation:
            if follows:
                row.note = _layout_note([self._before, *conversation])
            self._before = conversation[-1]
        return row

    def _judge(self, row: Row, found: list[Reuse]) -> None:
        row.reuses += found
        if row.problem:
            return
        # A stream may end without usage, when nobody asked for it or nobody waited.
        told = Counter((r.prompt, r.cached) for r in row.requests if r.generates and r.prompt and not r.error)
        untrue = told - Counter((reuse.played.prompt, reuse.played.cached) for reuse in row.reuses)
        if row.errors:
            row.problem = row.errors[0].replace("|", "/")
        elif not row.reuses:
            row.problem = "it asked nothing"
        elif row.worst > BLOCK:
            row.problem = f"{row.worst} tokens computed again that were known"
        elif untrue:
            row.problem = f"usage says (prompt, cached) {[*untrue]}, the engine doesn't"


def agent_turns(client: str, agent: Agent, recorder: Recorder, daemon: OwnDaemon) -> Iterator[Row]:
    """All turns of an agent, in order; each is a process of its own."""
    session = Session(client, recorder, daemon)

    def play(scenario: str, go_on: bool = True) -> Callable[[], Running]:
        return lambda: agent.ask(f"Scenario {scenario} in {agent.project}.", go_on=go_on)

    yield session.turn("tool loop", play("two-files", False), "beta of saucers", follows=False)
    yield session.turn("second turn", play("once-more"), "Gamma tells of spoons")
    yield session.cancelled("interrupted", play("long"))
    yield session.turn("after that", play("both-at-once"), "Both are read")
    if isinstance(agent, ClaudeCode):
        yield session.turn("sub-agent", play("sub-agent"), "The sub-agent read gamma")
        yield session.turn("compaction", lambda: agent.ask("/compact", go_on=True))
        yield _shorter(session.turn("after compaction", play("two-files"), "beta of saucers"))
    if isinstance(agent, Codex):
        for provider in ("OpenAI", "omlxd"):
            # Less than what was said, more than what is left of it.
            limit = max(request.prompt for request in recorder.requests) - 300
            asked = f"Scenario both-at-once in {agent.project}."
            ask = partial(agent.ask_compacting, asked, limit, provider)
            yield _shorter(session.turn(f"compacted by {provider}", ask, "Both are read"))
            yield session.turn("after compaction", play("two-files"), "beta of saucers")
    if agent.reads_pdf:
        yield session.turn("PDF", play("pdf"), "tell of a kettle")
    if agent.sees:
        yield session.turn("picture", play("picture"), "red and blue")
    yield session.cancelled("killed", play("long"), signal.SIGKILL)
    daemon.kill_and_restart()
    yield session.turn("daemon killed", play("once-more"), "Gamma tells of spoons")
    yield session.turn("new session", play("two-files", False), "beta of saucers", follows=False)


def _shorter(row: Row) -> Row:
    """`row`, whose first prompt must depart from what was said before: the history was summarised."""
    if not row.problem and not row.note:
        row.problem = "nothing was compacted"
    return row


def _how_it_ended(ended: Ended, said: str) -> str:
    if ended.status is None:
        return "it did not end"
    if ended.status:
        last = (ended.errors.strip() or ended.output.strip()).splitlines()[-1:] or ["nothing"]
        return f"status {ended.status}, it said: {last[0][:200]}".replace("|", "/")
    if said not in ended.output:
        return f"it printed {ended.output.strip()[-100:]!r}".replace("|", "/")
    return ""


def _layout_note(requests: list[Reuse | None]) -> str:
    """Where the client itself, or the template, did not repeat what came before."""
    notes = []
    for one, two in pairwise(requests):
        if one is not None and (change := changed(one, two)):
            at, count = change
            what = "of the interrupted answer " if one.played.cancelled else ""
            notes.append(f"{count} tokens {what}from {at} on not repeated")
    return ", ".join(notes)
