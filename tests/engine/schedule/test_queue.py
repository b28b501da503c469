"""Who gets the next slot."""

from omlxd.chat import Sampling
from omlxd.engine.schedule.queue import PATIENCE, RequestQueue
from omlxd.engine.schedule.sampling import UNNAMED, RowSampling, SamplerRow
from omlxd.engine.sequence import Sequence

GREEDY = RowSampling.of(Sampling(temperature=0.0), UNNAMED)


def sequence(session: str = "") -> Sequence:
    return Sequence(
        id=0,
        tokens=[1],
        prompt_length=1,
        root=bytes(32),
        hashes=[],
        max_new=1,
        eos=frozenset(),
        sampler=SamplerRow(GREEDY),
        session=session,
    )


def take(line: RequestQueue, active: list[Sequence]) -> Sequence:
    following = line.next_request(active)
    assert following is not None
    line.take_request(following)
    return following


def line_of(*sequences: Sequence) -> RequestQueue:
    line = RequestQueue()
    for one in sequences:
        line.add_request(one)
    return line


def test_equals_go_in_order_of_arrival():
    waiting = [sequence(name) for name in "aabbcc"]
    line = line_of(*waiting)
    active = []
    while len(line):
        active.append(take(line, active))
    a1, a2, b1, b2, c1, c2 = waiting
    assert active == [a1, b1, c1, a2, b2, c2]


def test_without_sessions_it_is_a_plain_queue():
    waiting = [sequence() for _ in range(5)]
    line = line_of(*waiting)
    assert [take(line, []) for _ in waiting] == waiting and list(line) == []


def test_a_crowd_does_not_keep_another_client_out():
    crowd = [sequence(f"swarm/agent-{n}") for n in range(20)]
    line = line_of(*crowd)
    active = [take(line, []) for _ in range(8)]
    late = sequence("other")
    line.add_request(late)
    assert take(line, active[1:]) is late


def test_nobody_is_overtaken_for_ever():
    running = sequence("busy")
    first = sequence("busy")
    line = line_of(first)
    for n in range(PATIENCE):
        line.add_request(sequence(f"new-{n}"))
        assert take(line, [running]) is not first
    line.add_request(sequence("one too many"))
    assert take(line, [running]) is first


def test_leaving_the_line():
    one, two = sequence(), sequence()
    line = line_of(one, two)
    line.remove_request(one)
    line.remove_request(one)
    assert list(line) == [two] and take(line, []) is two
    assert line.next_request([]) is None


def test_the_shortest_goes_before_one_that_waits_for_memory_but_not_for_ever():
    stuck = sequence()
    line = line_of(stuck)
    assert line.next_request([], stuck) is None
    for _ in range(PATIENCE):
        longer, short = sequence(), sequence()
        longer.prompt_length = 2
        line.add_request(longer)
        line.add_request(short)
        assert line.next_request([], stuck) is short
        line.take_request(short)
        line.remove_request(longer)
    line.add_request(sequence())
    assert line.next_request([]) is stuck and line.next_request([], stuck) is None
