"""What is remembered of turns, in RAM and on disk: bounded, and never another conversation's."""

from __future__ import annotations

from omlxd.engine.prompt.turn_memory import Place, TurnMemory


def test_memory_is_bounded_and_drops_the_least_recently_used():
    memory = TurnMemory(max_bytes=20_000)
    kept = Place(("kept", ""), b"k")
    memory.remember(kept, b"a", None, [1], [2] * 100)
    for i in range(200):
        memory.remember(Place((f"s{i}", ""), b"x"), b"a", None, [1], [2] * 100)
        assert memory.find(kept, b"a", None)
        assert memory._places.cost <= 20_000
    assert memory.find(Place(("s0", ""), b"x"), b"a", None) == ""
    assert 10 < len(memory._places) < 30


def test_a_turn_larger_than_the_memory():
    memory = TurnMemory(max_bytes=1000)
    memory.remember(Place(("s", ""), b"x"), b"a", None, [1], [2] * 1000)
    assert memory._places.cost == 0 and not len(memory._places)
