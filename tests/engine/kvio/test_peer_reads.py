"""Blocks of a peer: the answer is that of a run without reuse, bit by bit, whatever the peer does."""

from __future__ import annotations

import contextlib
import shutil
import threading
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

import pytest
from cold_run import Reference, outputs, prompt, same_bits
from families import build_family
from kv_fakes import check_pool
from rig import BLOCK, Output, Rig

from omlxd.engine.kvio.reads.peer_reads import AWAY_S, Peer, PeerReads
from omlxd.engine.kvio.reads.rates import Rates
from omlxd.kv.files.paths import block_path
from omlxd.kv.peer.identity import PeerError

TOKENS = prompt(1300)
CACHED = 1280
GRID = 256


class There:
    """A peer over its cache folder. Reading a file takes `file_s` of a clock that nothing else moves.

    rates           what the engine is told of computing
    spoil(n, data)  what becomes of the n-th file on the way
    """

    def __init__(self, rig: Rig, root: Path):
        self.namespace, self._root = rig.namespace, root
        self.now, self.file_s, self.connected, self.sent = 0.0, 0.0, 0, 0
        self.spoil: Callable[[int, bytes], bytes] = lambda at, data: data
        self.differs, self.lasted = "", 0.0
        self.rates = Rates(BLOCK, 1)
        bridge, states = rig.scheduler.bridge, rig.checkpointer
        assert bridge is not None
        checkpoints = states.checkpoints if states is not None else None
        reads = PeerReads(
            Peer("there", self.connect, "tiny", {}),
            rig.store,
            self.rates,
            rig.scheduler.post,
            checkpoints,
            clock=lambda: self.now,
        )
        bridge.peer = self.reads = reads

    @contextlib.contextmanager
    def connect(self, seconds: float) -> Iterator[There]:
        self.connected += 1
        self.lasted = seconds
        yield self

    def look(self, names: Seq[bytes], model: str, facts: dict[str, Any]) -> tuple[list[bool], str]:
        return [(self._root / block_path(self.namespace, name)).is_file() for name in names], self.differs

    def read(self, names: Seq[bytes], sizes: Seq[int]) -> Iterator[bytearray]:
        for at, (name, size) in enumerate(zip(names, sizes, strict=True)):
            data = (self._root / block_path(self.namespace, name)).read_bytes()
            assert len(data) == size
            self.now += self.file_s
            self.sent += 1
            yield bytearray(self.spoil(at, data))


@pytest.fixture(scope="module", params=["qwen3", pytest.param("qwen3_5", marks=pytest.mark.slow)])
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    """(a model, the cache of a machine that has computed `TOKENS`, runs without reuse)."""
    folder = tmp_path_factory.mktemp(request.param)
    model = build_family(request.param, folder / "model")
    with Rig(model, folder / "there") as rig:
        rig.use_grid(GRID)
        rig.run(TOKENS, 1)
    with Reference(model) as reference:
        reference.rig.use_grid(GRID)
        yield model, folder / "there", reference


@pytest.fixture
def here(family: Any, tmp_path: Path) -> Iterator[tuple[Rig, There, Reference]]:
    model, folder, reference = family
    there = shutil.copytree(folder, tmp_path / "there")
    with Rig(model, tmp_path / "here", record=True) as rig:
        rig.use_grid(GRID)
        yield rig, There(rig, there), reference


def run(rig: Rig, reference: Reference) -> Output:
    rig.recorder.logits.clear()
    output = rig.run(TOKENS, 8)
    tokens, rows = reference.once(TOKENS, 8)
    assert output.got == tokens and same_bits(outputs(rig, 8), rows)
    rig.on_engine(lambda: check_pool(rig.pool, {}))
    bridge = rig.scheduler.bridge
    assert bridge is not None and bridge.peer is not None and not bridge.peer._under_way
    assert rig.ledger is not None and rig.root is not None
    on_disk = {str(file.relative_to(rig.root)) for file in rig.root.rglob("*.safetensors")}
    assert {path for path in on_disk if rig.ledger._files.nbytes_of(path) is None} == set()
    return output


def test_what_a_peer_has_is_restored_and_then_our_own(here: tuple[Rig, There, Reference]):
    rig, there, reference = here
    output = run(rig, reference)
    assert (output.cold, output.hot, there.connected) == (CACHED, 0, 1)
    stats = there.reads.stats
    assert stats.blocks == there.sent == CACHED // BLOCK + (rig.checkpointer is not None)
    assert (stats.bad, stats.failures) == (0, 0) and stats.nbytes > 0
    again = run(rig, reference)
    assert again.hot + again.cold == CACHED and there.connected == 1


def flipped(data: bytes) -> bytes:
    return data[:-9] + bytes([data[-9] ^ 1]) + data[-8:]


def test_a_flipped_byte_is_a_miss_and_several_leave_the_peer_out(
    here: tuple[Rig, There, Reference], caplog: Any
):
    rig, there, reference = here
    there.spoil = lambda at, data: flipped(data) if at == 3 else data
    output = run(rig, reference)
    expected = 0 if rig.checkpointer is not None else 3 * BLOCK
    assert (output.cold, there.reads.stats.bad, there.reads.is_on) == (expected, 1, True)
    assert rig.store.stats.corrupt == 0, "nothing of it came to the disk"
    assert "fails its check" in caplog.text and not there.reads.trouble

    there_look = there.look
    there.look = lambda names, *_: ([True] * len(names), "")  # type: ignore[method-assign,assignment]
    there.read = lambda names, sizes: map(bytearray, sizes)  # type: ignore[method-assign,assignment]
    for seed in (11, 12):
        assert there.reads.is_on
        rig.run(prompt(300, seed=seed), 1)
    assert (there.reads.stats.bad, there.reads.stats.failures, there.reads.is_on) == (3, 1, False)
    assert there.reads.trouble == "3 files in a row fail their check"
    there.look = there_look  # type: ignore[method-assign]
    rig.run(prompt(300, seed=1), 1)
    assert there.connected == 3
    there.now += AWAY_S
    rig.run(prompt(300, seed=2), 1)
    assert there.connected == 4 and there.reads.is_on and not there.reads.trouble


def test_the_reason_is_said_again_when_it_is_another_and_after_an_answer(
    here: tuple[Rig, There, Reference], caplog: Any
):
    rig, there, _ = here
    answer = lambda names, *_: ([False] * len(names), "")  # noqa: E731

    def look(why: str) -> Any:
        def fails(*_: Any) -> Any:
            raise PeerError(why)

        return fails if why else answer

    for seed, why in enumerate(("is off", "is off", "is full", "", "is full")):
        there.look = look(why)  # type: ignore[method-assign]
        rig.run(prompt(200, seed=20 + seed), 1)
        assert there.reads.trouble == why
        there.now += 10 * AWAY_S
    said = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    told = [text.rpartition(": ")[2] for text in said if "is left out" in text]
    assert told == ["is off", "is full", "is full"]


def test_without_a_pairing_it_says_so_once(here: tuple[Rig, There, Reference], caplog: Any):
    rig, there, _ = here
    peer = Peer("there", there.connect, "tiny", {}, unpaired=lambda: "not paired")
    reads = PeerReads(peer, rig.store, there.rates, rig.scheduler.post, None)
    assert reads.trouble == "not paired"
    assert caplog.text.count(reads.trouble) == 1
    reads.close()


def test_files_that_go_away_meanwhile_are_a_miss(here: tuple[Rig, There, Reference]):
    rig, there, reference = here
    there.spoil = lambda at, data: b"" if at == 2 else data
    output = run(rig, reference)
    assert output.cold == (0 if rig.checkpointer is not None else 2 * BLOCK)
    assert there.reads.is_on and there.reads.stats.bad == 0


@pytest.mark.parametrize("at", [-1, 0, 5])
def test_a_peer_that_dies_is_a_miss(here: tuple[Rig, There, Reference], at: int, caplog: Any):
    rig, there, reference = here

    def dies(now: int, data: bytes) -> bytes:
        if now == at:
            raise PeerError("it ended the connection")
        return data

    there.spoil = dies
    if at < 0:
        there.look = lambda *_: dies(-1, b"")  # type: ignore[method-assign,assignment]
    output = run(rig, reference)
    assert output.cold == (0 if rig.checkpointer is not None else max(0, at) * BLOCK)
    assert (there.reads.stats.failures, there.reads.is_on) == (1, False)
    assert "peer there is left out for 30 s: it ended the connection" in caplog.text


def test_as_much_is_read_as_beats_computing(here: tuple[Rig, There, Reference]):
    rig, there, reference = here
    there.rates.prefill = BLOCK / 0.2
    there.file_s = 1.0
    output = run(rig, reference)
    assert there.sent == 1 and output.cold == (0 if rig.checkpointer is not None else BLOCK)
    assert there.lasted == pytest.approx(0.2 * CACHED / BLOCK), "no longer than computing takes"
    other = prompt(1300, seed=7)
    there.look = lambda names, *_: ([True] * len(names), "")  # type: ignore[method-assign,assignment]
    before = there.reads.rates.read
    rig.run(other, 1)
    assert there.sent == 1 and there.reads.rates.read == 2 * before, "it will be tried again some time"
    there.rates.prefill = BLOCK / 1e-6
    connected = there.connected
    rig.run(prompt(1300, seed=8), 1)
    assert there.connected == connected, "what is computed at once is not asked for"


def test_equal_prompts_ask_once_and_a_cancelled_one_ends(here: tuple[Rig, There, Reference]):
    rig, there, reference = here
    go_on = threading.Event()

    def wait(at: int, data: bytes) -> bytes:
        assert go_on.wait(60)
        return data

    there.spoil = wait
    first, second = rig.start(TOKENS, 8), rig.start(TOKENS, 8)
    third = rig.start(prompt(200, seed=3), 1)
    assert third.tokens(), "nobody else waits"
    rig.scheduler.post(lambda: setattr(first.sequence, "cancelled", True))
    rig.on_engine(lambda: None)
    go_on.set()
    assert second.tokens() == reference.once(TOKENS, 8)[0]
    rig.settle()
    rig.on_engine(lambda: check_pool(rig.pool, {}))
    assert there.connected == 2


def test_what_does_not_agree_is_logged_once(here: tuple[Rig, There, Reference], caplog: Any):
    rig, there, _ = here
    there.differs = "block_size (64, now 16) does not agree"
    there.look = lambda names, *_: ([False] * len(names), there.differs)  # type: ignore[method-assign]
    for seed in (4, 5):
        rig.run(prompt(200, seed=seed), 1)
    said = "peer there has KV of this model that can't be used: block_size (64, now 16) does not agree"
    assert caplog.text.count(said) == 1
    assert there.reads.trouble == there.differs
