"""Requests and their engine's lives after every step of whatever Hypothesis can think of.

The engine is a fake link, moved by the rules: it starts, loads, answers, dies, freezes, ends. Rules act
without letting the event loop run, but for the ticks that each draws, so that two of them may meet in
one tick. In the end every request must have ended exactly once.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from kv_machines import LONG, QUICK

from omlxd import wire
from omlxd.chat import (
    Event,
    Failed,
    Finished,
    GenerateRequest,
    Progress,
    RawPrompt,
    Restarted,
    TextDelta,
    Usage,
)
from omlxd.errors import NotNow, OmlxdError, Unavailable
from omlxd.front.engines.client import EngineProcess
from omlxd.front.engines.in_flight import EngineStream

TICKS = st.sampled_from([0, 0, 1, 2, 3, 50])
NUMBER = st.integers(0, 99)
DONE = Finished("stop", Usage(prompt_tokens=1, completion_tokens=1))
INFO = wire.ModelInfo("m", "stub", 1000, 10, 0, 0, "", "", 64, "none")


@dataclass
class Asked:
    """A request: its stream, or the task that waits for its count; and the lives that it was sent to.

    passed_on  a client may have read part of its answer: never so of one that is `collected`
    """

    stream: EngineStream | None = None
    task: asyncio.Task[Any] | None = None
    collected: bool = False
    cancelled: bool = False
    events: list[Event] = field(default_factory=list)
    lives: list[int] = field(default_factory=list)
    passed_on: bool = False

    @property
    def ended(self) -> bool:
        if self.task is not None:
            return self.task.done()
        assert self.stream is not None
        while not self.stream.events.empty():
            self.events.append(self.stream.events.get_nowait())
        lasts = [event for event in self.events if isinstance(event, (Finished, Failed))]
        assert lasts in ([], self.events[-1:]), "it ended twice, or went on after its end"
        spoke: set[str] = set()
        for event in self.events:
            spoke = set() if isinstance(event, Restarted) else spoke | {getattr(event, "text", "")} - {""}
            assert len(spoke) < 2, "an answer of two engines"
        if lasts and isinstance(lasts[0], Failed) and "stopped: " in lasts[0].message:
            assert self.passed_on or len(self.lives) == 2, "not sent again though nobody has read of it"
        return bool(lasts)


class FakeLink:
    """`EngineLink` without a process. `quit`: it was asked to end. `frozen`: only SIGKILL ends it."""

    pid = 2**30
    last_words = ""

    def __init__(self, machine: Machine, life: int):
        self.machine, self.life = machine, life
        self.inbox: asyncio.Queue[Any] = asyncio.Queue()
        self.sent: dict[int, type] = {}
        self.quit = self.frozen = self.hung_up = self.loads = self.is_loaded = False
        self.ended = asyncio.Event()

    def send(self, message: Any) -> None:
        self.quit |= isinstance(message, wire.Quit)
        if isinstance(message, wire.Load):
            self.loads = True
            if (message.pass_limit or self.machine.failed_pass) >= self.machine.failed_pass > 0:
                self.machine.errors.append("a pass as large as the one that failed")
        if isinstance(message, wire.Cancel):
            self.sent.pop(message.id, None)

    def send_frame(self, frame: bytes) -> None:
        (message,) = wire.FrameDecoder(wire.ToEngine).feed(frame)
        asked = self.machine.asked[message.id]
        for wrong, what in (
            (not self.is_loaded or self.quit, "sent to an engine that does not serve"),
            (self.life in asked.lives, "sent twice to one engine"),
            (asked.passed_on, "sent again though a client may have read part of an answer"),
            (asked.cancelled or len(asked.lives) > 1, "sent for nobody, or a third time"),
        ):
            if wrong:
                self.machine.errors.append(what)  # Raised here, it would be the engine's end.
        asked.lives.append(self.life)
        self.sent[message.id] = type(message)

    async def receive(self, handle: Any) -> str:
        while (message := await self.inbox.get()) is not None:
            handle(message)
        return "it was killed"

    def kill(self) -> None:
        self.ended.set()
        self.inbox.put_nowait(None)

    def stop(self) -> None:
        self.kill()

    def terminate(self) -> None:
        if not self.frozen:
            self.kill()

    async def close(self, grace_s: float = 0.0) -> None:
        if grace_s and not self.frozen:
            await self.ended.wait()  # A rule has it quit.
        self.kill()


class FakeAccount:
    """Of one engine's grants, which it may use while its process lives."""

    def __init__(self, machine: Machine):
        self.machine, self.link, self.is_settled = machine, machine.links[-1], False
        machine.accounts.append(self)

    def model_loaded(self, namespace: str, model_path: str, shares: object = ()) -> None:
        pass

    def process_ended(self) -> None:
        if self.is_settled or not self.link.ended.is_set():
            self.machine.errors.append("a grant came back twice, or while its engine may write")
        self.is_settled = True


class FakeCold:
    def __init__(self, machine: Machine):
        self.machine = machine

    def account(self, reply: Any, pid: int) -> FakeAccount:
        return FakeAccount(self.machine)


async def unload(made: EngineProcess) -> bool:
    """As the pool does."""
    begun = made.begin_unload()
    if begun:
        await made.supervisor.gone()
    return begun


class Machine(RuleBasedStateMachine):
    @initialize(slots=st.integers(1, 8))
    def begin(self, slots: int) -> None:
        self.loop = asyncio.new_event_loop()
        self.errors: list[Any] = []
        self.loop.set_exception_handler(lambda loop, context: self.errors.append(context))
        self.asked: dict[int, Asked] = {}
        self.links: list[FakeLink] = []
        self.accounts: list[FakeAccount] = []
        self.refusal: Exception | None = None
        self.faults = self.failed_pass = 0
        self.may_spawn = asyncio.Event()
        self.loads: list[asyncio.Task[None]] = []
        self.unloads: list[asyncio.Task[bool]] = []
        self.run(self.make(slots))

    async def make(self, slots: int) -> None:
        cold: Any = FakeCold(self)
        self.made = EngineProcess(
            "m", self.spawn, max_concurrent=slots, backoff_s=(0.0,), hold_s=0.0, stall_s=0.0, cold=cold
        )

    async def spawn(self) -> tuple[FakeLink, wire.Load]:
        await self.may_spawn.wait()
        self.may_spawn.clear()
        if self.refusal is not None:
            error, self.refusal = self.refusal, None
            raise error
        assert all(link.ended.is_set() for link in self.links), "two processes at once"
        self.links.append(FakeLink(self, len(self.links) + 1))
        return self.links[-1], wire.Load(model_path="", model_id="m", cache=wire.CacheSettings())

    def run(self, work: Any) -> Any:
        return self.loop.run_until_complete(work)

    def ticks(self, count: int) -> None:
        async def pass_() -> None:
            for _ in range(count):
                await asyncio.sleep(0)

        if count:
            self.run(pass_())

    def now(self, function: Any) -> Any:
        """Call it on the loop, with no tick before."""

        async def call() -> Any:
            return function()

        return self.run(call())

    @property
    def link(self) -> FakeLink | None:
        return self.links[-1] if self.links and not self.links[-1].ended.is_set() else None

    def busy(self, number: int) -> int | None:
        """A request that the engine is at work on, and whose answer can reach the front."""
        ids = [id for id in self.link.sent if id in self.asked] if self.link and not self.link.hung_up else []
        return ids[number % len(ids)] if ids else None

    # ----------------------------------------------------------------- clients

    @rule(ticks=TICKS, before=st.sampled_from(["", "", "unload"]), collected=st.booleans())
    def ask(self, ticks: int, before: str, collected: bool = False) -> None:
        """Perhaps in the very step in which an unload begins."""
        id = self.made._requests.new_id() + 1
        asked = self.asked[id] = Asked(collected=collected)

        def generate() -> None:
            if before:
                self.made.begin_unload()
            request = GenerateRequest(prompt=RawPrompt(text="x"), collected=collected)
            asked.stream = self.made.generate(request)

        try:
            self.now(generate)
        except OmlxdError:
            del self.asked[id]
        self.ticks(ticks)

    @rule(ticks=TICKS)
    def count(self, ticks: int) -> None:
        id = self.made._requests.new_id() + 1
        self.asked[id] = Asked()

        def count() -> asyncio.Task[Any]:
            return asyncio.ensure_future(self.made.count_tokens(RawPrompt(text="x")))

        self.asked[id].task = self.now(count)
        self.ticks(max(1, ticks))  # It has its id.

    @precondition(lambda self: self.asked)
    @rule(number=NUMBER, ticks=TICKS)
    def cancel(self, number: int, ticks: int) -> None:
        asked = list(self.asked.values())[number % len(self.asked)]
        if asked.task is not None:
            self.now(asked.task.cancel)
            self.ticks(2)
        else:
            assert asked.stream is not None
            self.run(asked.stream.aclose())
        asked.cancelled = True
        self.ticks(ticks)

    # ----------------------------------------------------------------- the owner

    @rule(ticks=TICKS)
    def load(self, ticks: int) -> None:
        self.loads.append(self.now(lambda: asyncio.ensure_future(self.made.load())))
        self.ticks(ticks)

    @rule(ticks=TICKS, gives_up=st.booleans())
    def unload(self, ticks: int, gives_up: bool) -> None:
        if gives_up:
            self.now(self.made.give_up_load)
        self.unloads.append(self.now(lambda: asyncio.ensure_future(unload(self.made))))
        self.ticks(ticks)

    @rule(ticks=TICKS)
    def unload_in_this_tick(self, ticks: int) -> None:
        def check() -> None:
            waits = self.made.state == "unloading" or not (self.made.in_flight or self.made._load_waiters)
            assert self.made.begin_unload() == waits

        self.now(check)
        self.ticks(ticks)

    @precondition(lambda self: self.made.state == "ready")
    @rule(ticks=TICKS)
    def turns(self, ticks: int) -> None:
        """What it was loaded from has changed."""
        self.now(self.made.begin_turn)
        self.ticks(ticks)

    # ----------------------------------------------------------------- the engine

    @rule(
        ticks=TICKS,
        refusal=st.sampled_from([None, None, None, NotNow("full"), Unavailable("broken"), OSError()]),
    )
    def starts(self, ticks: int, refusal: Exception | None) -> None:
        self.refusal = refusal
        self.may_spawn.set()
        self.ticks(ticks)

    @precondition(lambda self: self.made.state not in ("ready", "unloading"))
    @rule(ticks=TICKS, asks=st.integers(0, 3))
    def serves(self, ticks: int, asks: int) -> None:
        """The whole way up; requests come in the tick in which it is ready."""
        if self.made.state in ("unloaded", "failed"):
            self.load(2)
        self.starts(50, None)
        for says in ("device", "loaded"):
            if self.link is not None and not self.link.quit:
                self.loading(50 if says == "device" else ticks, says)
        for _ in range(asks):
            self.ask(0, "")

    @precondition(lambda self: self.link)
    @rule(ticks=TICKS, says=st.sampled_from(["device", "loaded", "loaded", "failed"]))
    def loading(self, ticks: int, says: str) -> None:
        link = self.link
        assert link is not None
        if says == "device":
            link.inbox.put_nowait(wire.Device("none", 1, 1))
        elif says == "failed" and not link.is_loaded:
            link.inbox.put_nowait(wire.LoadFailed("it can't"))
        elif link.loads and not link.is_loaded:
            link.is_loaded = True
            link.inbox.put_nowait(wire.Loaded(INFO))
        self.ticks(ticks)

    @precondition(lambda self: self.busy(0))
    @rule(number=NUMBER, ticks=TICKS, last=st.sampled_from([None, DONE, Failed("internal", "no")]))
    def answers(self, number: int, ticks: int, last: Event | None) -> None:
        """Part of an answer, or its end."""
        id = self.busy(number)
        assert id is not None and self.link is not None
        self.asked[id].passed_on |= not self.asked[id].collected
        if self.link.sent[id] is wire.Count:
            message: Any = wire.Counted(id, 1)
        else:
            message = wire.Events(((id, last or TextDelta(str(self.link.life))),))
        if last is not None or isinstance(message, wire.Counted):
            del self.link.sent[id]
        if last is DONE and not isinstance(message, wire.Counted):
            self.faults = 0
        self.link.inbox.put_nowait(message)
        self.ticks(ticks)

    @precondition(lambda self: self.busy(0))
    @rule(number=NUMBER, ticks=TICKS)
    def prefills(self, number: int, ticks: int) -> None:
        id = self.busy(number)
        assert id is not None and self.link is not None
        if self.link.sent[id] is wire.Generate:
            self.link.inbox.put_nowait(wire.Events(((id, Progress(1, 2)),)))
        self.ticks(ticks)

    @precondition(lambda self: self.made.state == "ready" and self.link)
    @rule(ticks=TICKS, then=st.sampled_from(["", "unload", "unload"]))
    def answers_all(self, ticks: int, then: str) -> None:
        while self.busy(0):
            self.answers(0, 50, DONE)
        self.ask(ticks, then)

    @precondition(lambda self: self.link)
    @rule(ticks=TICKS)
    def dies(self, ticks: int) -> None:
        assert self.link is not None
        self.link.kill()
        self.ticks(ticks)

    @precondition(lambda self: self.link and not self.link.hung_up and self.made.state != "unloading")
    @rule(tokens=st.sampled_from([0, 65, 2048]))
    def meets_a_gpu_fault(self, tokens: int) -> None:
        """While it loads or serves. The third in a row ends what waits, and nothing starts by itself."""
        assert self.link is not None
        self.may_spawn.clear()
        self.link.inbox.put_nowait(wire.GpuFault("[METAL] it hangs", "It helps to rest.", tokens))
        self.link.kill()
        self.faults, self.failed_pass = self.faults + 1, tokens or self.failed_pass
        self.ticks(50)
        assert (self.made.state == "failed") == (self.faults >= 3)
        if self.faults >= 3:
            assert not self.made.is_awaited and not self.made.supervisor._wanted.is_set()

    @precondition(lambda self: self.link)
    @rule(ticks=TICKS)
    def closes_its_socket(self, ticks: int) -> None:
        """And runs on."""
        assert self.link is not None
        self.link.hung_up = True
        self.link.inbox.put_nowait(None)
        self.ticks(ticks)

    @precondition(lambda self: self.link)
    @rule()
    def freezes(self) -> None:
        assert self.link is not None
        self.link.frozen = True

    @precondition(lambda self: self.link and self.link.quit)
    @rule(ticks=TICKS)
    def quits(self, ticks: int) -> None:
        self.dies(ticks)

    @precondition(lambda self: self.made._trial)
    @rule(ticks=TICKS)
    def trial_takes_long(self, ticks: int) -> None:
        """Its timer fires, if it was not cancelled in this very step."""
        self.now(lambda: self.made._trial and self.made._send_again())
        self.ticks(ticks)

    @rule()
    def time_passes(self) -> None:
        self.ticks(50)

    # ----------------------------------------------------------------- what always holds

    @invariant()
    def holds(self) -> None:
        if not hasattr(self, "made"):
            return
        assert not self.errors, self.errors
        requests = self.made._requests.requests
        for id, asked in self.asked.items():
            over = asked.ended or asked.cancelled
            assert not (over and id in requests), "kept for ever"
            assert over or id in requests or asked.task is not None, "forgotten"
        for request in requests.values():
            assert bool(request.life) == (
                self.made.state == "ready" and request.life == self.made.supervisor.starts
            )
            assert request.frame or request.life
            if self.made.state == "ready" and not request.life and not self.made._turning:
                assert request in self.made._again and self.made._trial, "it waits for nobody"
        if self.made.state in ("unloaded", "failed"):
            assert self.link is None
            assert not requests or self.made.supervisor._wanted.is_set()

    def teardown(self) -> None:
        if not hasattr(self, "made"):
            return
        closes = len(self.asked) % 2
        if not closes:
            self.recovers()
        if self.link is not None:
            self.link.frozen = True  # Nothing is waited for.
        self.run(asyncio.wait_for(self.made.close(1.0), 60))
        self.ticks(50)
        for asked in self.asked.values():
            assert asked.ended or asked.cancelled
        for task in [*self.loads, *self.unloads]:
            assert task.done(), "somebody waits for ever"
            with contextlib.suppress(OmlxdError):
                task.result()
        assert all(link.ended.is_set() for link in self.links), "an orphan"
        assert all(account.is_settled for account in self.accounts), "a grant leaked"
        assert not self.errors, self.errors
        self.loop.close()

    def recovers(self) -> None:
        """From wherever it is: an engine that works gives every request its answer."""
        for _ in range(8 + len(self.asked)):
            self.ticks(50)
            if self.link is not None and (self.link.quit or self.link.frozen):
                self.dies(50)
            elif self.link is not None and not self.link.is_loaded:
                self.loading(50, "device")
                self.loading(50, "loaded")
            elif self.link is None:
                self.starts(50, None)
            while self.busy(0):
                self.answers(0, 50, DONE)
        assert not self.made.in_flight, "a request hangs"
        for task in [*self.loads, *self.unloads]:
            assert task.done(), "somebody waits for ever"


def test_quick():
    run_state_machine_as_test(Machine, settings=settings(QUICK, max_examples=60, stateful_step_count=30))


@pytest.mark.slow
def test_long():
    run_state_machine_as_test(Machine, settings=LONG)
