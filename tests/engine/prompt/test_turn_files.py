"""Remembered turns on disk: they outlive the memory, and never stand in for a newer answer."""

from __future__ import annotations

import contextlib
import os
import tempfile
from array import array
from pathlib import Path

import pytest
from families import build_family
from host import Host
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from kv_fakes import NAMESPACE, OTHER_NAMESPACE, Rig, files_in, ram_folder
from talk import Session, echo, pipeline, thought, tokenizer_folder, user
from templates import QWEN3

from omlxd.engine.kvio.fingerprint import tokenizer_fingerprint
from omlxd.engine.prompt.turn_memory import MOST_ANSWERS, Place, Scope, Turn, TurnMemory
from omlxd.engine.prompt.turn_store import TurnFiles, decoded, encoded
from omlxd.kv.files.record_file import Record, RecordFiles

ME = Place(("me", ""), b"b" * 16)
ANSWER, THOUGHT = b"a" * 16, b"t" * 16


def files_of(rig: Rig, namespace: bytes = NAMESPACE, tokenizer: bytes = b"T") -> TurnFiles:
    return TurnFiles(RecordFiles(rig.root, namespace), rig.writer, rig.lease, tokenizer)


@pytest.fixture
def rig(tmp_path: Path):
    rig = Rig(tmp_path)
    yield rig
    rig.ledger.close()


def say(memory: TurnMemory, place: Place, generated: list[int], answer: bytes = ANSWER) -> None:
    memory.begin(place)
    memory.remember(place, answer, THOUGHT, [1, 2, 3], generated)
    memory.end(place)


def found(memory: TurnMemory, place: Place = ME, answer: bytes = ANSWER) -> list[int] | str:
    turn = memory.find(place, answer, None)
    return turn if isinstance(turn, str) else list(turn.tokens)


# --------------------------------------------------------------------------- a restart


def test_a_turn_outlives_the_memory(rig: Rig):
    say(TurnMemory(files=files_of(rig)), ME, [5, 6, 7])
    assert not files_in(rig.root)  # Writing is the writers' work.
    rig.settle()
    files = files_of(rig)
    memory = TurnMemory(files=files)
    assert not memory._places.cost  # Nothing is read before it is asked for.
    turn = memory.find(ME, ANSWER, THOUGHT)
    assert isinstance(turn, Turn) and list(turn.tokens) == [5, 6, 7] and turn.prompt_length == 3
    assert memory.find(ME, ANSWER, b"x" * 16) == "thinking_edited"
    assert memory.find(ME, b"x" * 16, None) == "edited"
    assert files.figures() == {
        "prompt_turn_records_written_total": 0,
        "prompt_turn_records_dropped_total": 0,
        "prompt_turn_records_found_total": 1,
        "prompt_turn_records_bad_total": 0,
    }


@pytest.mark.parametrize(
    "place", [Place(("you", ""), ME.before), Place(("me", "salt"), ME.before), Place(("me", ""), b"c" * 16)]
)
def test_another_session_salt_or_conversation_finds_nothing(rig: Rig, place: Place):
    say(TurnMemory(files=files_of(rig)), ME, [5])
    rig.settle()
    memory = TurnMemory(files=files_of(rig))
    assert found(memory, place) == ""
    assert found(memory) == [5]


def test_another_model_or_tokenizer_finds_nothing(rig: Rig):
    say(TurnMemory(files=files_of(rig)), ME, [5])
    rig.settle()
    assert found(TurnMemory(files=files_of(rig, OTHER_NAMESPACE))) == ""
    assert found(TurnMemory(files=files_of(rig, tokenizer=b"U"))) == ""
    assert found(TurnMemory(files=files_of(rig))) == [5]


def test_a_damaged_record_heals_nothing_and_is_counted(rig: Rig):
    say(TurnMemory(files=files_of(rig)), ME, [5])
    rig.settle()
    (path,) = files_in(rig.root)
    path.write_bytes(path.read_bytes()[:-1] + b"!")
    files = files_of(rig)
    memory = TurnMemory(files=files)
    assert found(memory) == "" and files.counts["bad"] == 1
    assert not path.exists() and rig.ledger.stats().files == 0
    say(memory, ME, [6])
    rig.settle()
    assert found(TurnMemory(files=files_of(rig))) == [6]


def test_a_good_record_of_nonsense_is_no_record(rig: Rig):
    files = files_of(rig)
    for payload in (b"", b"x", b"\x90", encoded({(b"short", None): Turn(b"", 0, array("I"), b"")}, 1000)):
        record = Record(RecordFiles(rig.root, NAMESPACE), files.name_of(ME), payload)
        record.store(record.key, record.buffers())
        assert files.load(ME) == {} and not files_in(rig.root)
    assert files.counts["bad"] == 4


def test_nothing_is_written_where_no_writer_takes_it(tmp_path: Path):
    rig = Rig(tmp_path)
    files = files_of(rig)
    memory = TurnMemory(files=files)
    rig.writer.close()
    say(memory, ME, [5])
    assert found(memory) == [5] and files.counts["dropped"] == 1 and not files_in(tmp_path)
    rig.ledger.close()


def test_without_an_ssd_tier_there_are_no_records(tmp_path: Path):
    host = Host(build_family("qwen3", tmp_path))
    try:
        figures = host.engine.engine_stats()
    finally:
        host.close()
    assert "prompt_turns_healed_total" in figures
    assert not [name for name in figures if name.startswith("prompt_turn_records")]


def test_no_text_of_a_conversation_is_in_a_record(rig: Rig, tmp_path_factory):
    """Nor the name of its session; and what is there heals a pipeline that begins anew."""
    folder = tokenizer_folder(tmp_path_factory.mktemp("tokenizer"))
    session = Session(pipeline(folder, QWEN3, files=files_of(rig)), Scope("my-secret-session"))
    session.ask(user("Where is the treasure?"))
    answer = session.generate(thought(session.prompts, "Under the palm tree."))
    rig.settle()
    (path,) = files_in(rig.root)
    for word in (b"treasure", b"palm", b"Let me", b"my-secret-session"):
        assert word not in path.read_bytes() + path.name.encode()
    again = pipeline(folder, QWEN3, files=files_of(rig))
    session.prompts = again
    rendered = session.ask(echo(answer), user("How deep?"))
    assert session.kept() and rendered.spliced == 1 and rendered.refused == ()
    assert again.figures()["prompt_turn_records_found_total"] == 1
    stranger = Session(again, Scope("another"), session.messages)
    assert stranger.ask().spliced == 0


def test_a_changed_tokenizer_is_another(tmp_path: Path):
    folder = tokenizer_folder(tmp_path)
    before = tokenizer_fingerprint(folder)
    assert tokenizer_fingerprint(folder) == before
    file = folder / "tokenizer_config.json"
    file.write_text(file.read_text() + "\n")
    assert tokenizer_fingerprint(folder) != before


# --------------------------------------------------------------------------- answers that overtake others


def test_a_place_that_is_answered_again_has_no_file_meanwhile(rig: Rig):
    memory = TurnMemory(files=files_of(rig))
    say(memory, ME, [5])
    rig.settle()
    memory.begin(ME)
    assert not files_in(rig.root) and rig.ledger.stats().files == 0
    assert found(memory) == [5]
    memory.remember(ME, ANSWER, THOUGHT, [1, 2, 3], [6])
    memory.end(ME)
    assert found(TurnMemory(files=files_of(rig))) == ""
    rig.settle()
    assert found(TurnMemory(files=files_of(rig))) == [6]


def test_a_file_that_was_overtaken_on_its_way_is_removed(rig: Rig):
    memory = TurnMemory(files=files_of(rig))
    say(memory, ME, [5])
    memory.begin(ME)
    rig.settle()
    assert not files_in(rig.root) and rig.ledger.stats().files == 0
    memory.end(ME)  # Broken off: what was there before stands again.
    rig.settle()
    assert found(TurnMemory(files=files_of(rig))) == [5] and not memory._busy


def test_two_answers_at_once_are_both_written(rig: Rig):
    memory = TurnMemory(files=files_of(rig))
    memory.begin(ME)
    memory.begin(ME)
    memory.remember(ME, ANSWER, None, [1], [5])
    memory.end(ME)
    rig.settle()
    assert not files_in(rig.root)
    memory.remember(ME, b"z" * 16, None, [1], [6])
    memory.end(ME)
    rig.settle()
    memory = TurnMemory(files=files_of(rig))
    assert found(memory) == [5] and found(memory, answer=b"z" * 16) == [6]


def test_two_turns_that_look_alike_in_a_conversation_without_a_name_are_not_written(rig: Rig):
    nameless = Place(("implicit-1", ""), b"b" * 16, implicit=True)
    memory = TurnMemory(files=files_of(rig))
    say(memory, nameless, [5])
    rig.settle()
    assert found(TurnMemory(files=files_of(rig)), nameless) == [5]
    other = TurnMemory(files=files_of(rig))  # After a restart.
    say(other, nameless, [6])
    rig.settle()
    assert found(other, nameless) == "ambiguous" and not files_in(rig.root)


@pytest.mark.parametrize("implicit", [False, True])
def test_a_question_that_is_asked_again_keeps_its_record(rig: Rig, implicit: bool):
    place = Place(("implicit-1", ""), b"b" * 16, implicit=implicit)
    for _ in range(3):  # Of a client that tries again, each behind a restart.
        memory = TurnMemory(files=files_of(rig))
        for _ in range(2):
            say(memory, place, [5])
            say(memory, place, [7], b"z" * 16)
            memory.begin(place)
            memory.end(place)  # Cut.
        rig.settle()
        again = TurnMemory(files=files_of(rig))
        assert found(again, place) == [5] and found(again, place, answer=b"z" * 16) == [7]


def test_only_files_that_are_there_or_being_written_are_named(rig: Rig):
    nameless = Place(("implicit-1", ""), b"b" * 16, implicit=True)
    memory = TurnMemory(files=files_of(rig))
    for place, tokens in ((ME, [5]), (nameless, [5]), (nameless, [6])):
        say(memory, place, tokens)
    named = memory.files_of([ME, nameless, Place(("me", ""), b"n" * 16)])
    rig.settle()
    assert len(named) == 1 and memory.files_of([ME, nameless]) == named
    assert [str(path.relative_to(rig.root)) for path in files_in(rig.root)] == named
    assert TurnMemory(files=files_of(rig)).files_of([nameless, ME]) == named


def test_a_record_is_bounded_and_keeps_the_newest():
    turns = {(bytes([n]) * 16, None): Turn(b"p" * 16, 9, array("I", [n] * 100), b"w" * 16) for n in range(50)}
    payload = encoded(turns, 2000)
    assert 1000 < len(payload) <= 2000
    kept = decoded(payload)
    assert list(kept) == list(turns)[-len(kept) :] and kept == {a: turns[a] for a in kept}
    assert encoded(turns, 100) == b""


def test_a_place_keeps_so_many_answers(rig: Rig):
    memory = TurnMemory(files=files_of(rig))
    for number in range(40):
        say(memory, ME, [number], bytes([number]) * 16)
    rig.settle()
    for one in (memory, TurnMemory(files=files_of(rig))):
        kept = [number for number in range(40) if found(one, answer=bytes([number]) * 16) == [number]]
        assert kept == list(range(40 - MOST_ANSWERS, 40))


def test_a_used_record_is_as_recent_as_its_blocks(rig: Rig):
    memory = TurnMemory(files=files_of(rig))
    say(memory, ME, [5])
    rig.settle()
    (path,) = files_in(rig.root)
    os.utime(path, (10**9, 10**9))
    before = path.stat().st_mtime_ns
    memory.used([ME, Place(("nobody", ""), b"n" * 16)])
    rig.settle()
    assert path.stat().st_mtime_ns > before


digests = st.binary(min_size=16, max_size=16)
turns = st.builds(
    Turn,
    digests,
    st.integers(0, 1 << 40),
    st.lists(st.integers(0, (1 << 32) - 1), max_size=300).map(lambda tokens: array("I", tokens)),
    digests,
)


@given(st.dictionaries(st.tuples(digests, st.none() | digests), turns, min_size=1, max_size=5))
def test_what_is_encoded_is_decoded(known):
    assert decoded(encoded(known, 1 << 20)) == known


@given(st.binary(max_size=200))
@settings(max_examples=300)
def test_bytes_decode_or_are_refused(payload):
    with contextlib.suppress(ValueError):
        assert decoded(payload)


# --------------------------------------------------------------------------- any order, any crash


class Lives(RuleBasedStateMachine):
    """Answers begun and ended, files written or not yet, memories lost: what is found is the newest answer.

    Or nothing. A crash may lose an answer, and must not bring back one that another has replaced: after
    every step, what a memory would find that began now.
    """

    places = st.sampled_from([ME, Place(("nameless", ""), b"1" * 16, implicit=True)])
    answers = st.sampled_from([b"x" * 16, b"y" * 16])

    @initialize()
    def start(self):
        self.folder = tempfile.TemporaryDirectory(dir=ram_folder())
        self.rig = Rig(Path(self.folder.name))
        self.newest: dict[tuple, int] = {}
        self.count = 0
        self.live()

    def live(self):
        self.begun: list[Place] = []
        # Too small for all: what is dropped comes back from its file.
        self.memory = TurnMemory(1000, files=files_of(self.rig))

    def remember(self, place: Place, answer: bytes):
        self.count += 1
        self.newest[place.key, answer] = self.count
        self.memory.remember(place, answer, None, [1], [self.count])

    @rule(place=places, answer=answers, written=st.integers(0, 2))
    def say(self, place, answer, written):
        self.memory.begin(place)
        self.remember(place, answer)
        self.memory.end(place)
        for _ in range(written):
            self.rig.writer.step()

    @rule(place=places)
    def begin(self, place):
        self.memory.begin(place)
        self.begun.append(place)

    @precondition(lambda self: self.begun)
    @rule(data=st.data(), answer=answers | st.none())
    def end(self, data, answer):
        place = self.begun.pop(data.draw(st.integers(0, len(self.begun) - 1)))
        if answer is not None:
            self.remember(place, answer)
        self.memory.end(place)

    @rule()
    def write_one(self):
        self.rig.writer.step()

    @rule(number=st.integers(0, 3))
    def crowd(self, number):
        """Other places push these out of memory."""
        for other in range(number):
            self.memory.find(Place((f"crowd {other}", ""), b"c" * 16), ANSWER, None)

    @rule(well=st.booleans())
    def end_of_life(self, well):
        if well:
            self.rig.settle()
        while not self.rig.writer._queue.empty():
            self.rig.writer._queue.get_nowait()
        self.rig.ledger.close()
        self.rig = Rig(self.rig.root)
        self.live()

    @invariant()
    def what_is_found_is_the_newest(self):
        if hasattr(self, "memory"):
            for memory in (self.memory, TurnMemory(files=files_of(self.rig))):
                for (scope, before), answer in self.newest:
                    got = found(memory, Place(scope, before, scope[0] != "me"), answer)
                    assert isinstance(got, str) or got == [self.newest[(scope, before), answer]]

    @rule()
    def account(self):
        self.rig.settle()
        assert self.rig.ledger.stats().files == len(files_in(self.rig.root))

    def teardown(self):
        if hasattr(self, "rig"):
            self.rig.ledger.close()
            self.folder.cleanup()


Lives.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestLives = Lives.TestCase
