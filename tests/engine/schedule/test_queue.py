"""Who gets the next slot."""

from hypothesis import given
from hypothesis import strategies as st

from omlxd.chat import Sampling
from omlxd.engine.schedule.waiting.queue import PATIENCE, RequestQueue
from omlxd.engine.sequence.sampling import UNNAMED, RowSampling, SamplerRow
from omlxd.engine.sequence.sequence import Prompt, Sequence

GREEDY = RowSampling.of(Sampling(temperature=0.0), UNNAMED)


def sequence(session: str = "", client: str = "") -> Sequence:
    return Sequence(
        id=0,
        tokens=[1],
        prompt=Prompt(1, bytes(32), client=client, session=session),
        sampling=SamplerRow(GREEDY, max_new=1),
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
        longer.prompt.length = 2
        line.add_request(longer)
        line.add_request(short)
        assert line.next_request([], stuck) is short
        line.take_request(short)
        line.remove_request(longer)
    line.add_request(sequence())
    assert line.next_request([]) is stuck and line.next_request([], stuck) is None


SLOTS = 4


@given(
    crowd=st.integers(1, 40),
    sessions=st.integers(1, 120),
    requests=st.integers(1, 30),
    others=st.integers(0, 20),
    picks=st.randoms(use_true_random=False),
)
def test_nobody_waits_longer_for_the_sessions_that_others_name(crowd, sessions, requests, others, picks):
    """A client of one request at a time, beside one of many sessions, and others of one request at a time:
    what its turns wait for does not grow with the sessions."""
    line, running = RequestQueue(), []
    for n in range(crowd * 4):
        line.add_request(sequence(f"s{n % sessions}", "crowd"))
    small, waited = None, 0
    for other in range(others):
        line.add_request(sequence("", f"other-{other}"))
    while requests:
        if small is None:
            small, waited = sequence("", "small"), 0
            line.add_request(small)
        if len(running) == SLOTS:
            ended = running.pop(picks.randrange(SLOTS))
            line.add_request(
                sequence(ended.prompt.session, ended.prompt.client)
            ) if ended.prompt.client != "small" else None
        following = take(line, running)
        running.append(following)
        if following is small:
            assert waited <= PATIENCE + others + 2
            small, requests = None, requests - 1
        waited += 1


@given(sessions=st.integers(2, 60), busy=st.integers(1, 60))
def test_a_session_waits_for_the_number_of_sessions_not_for_their_requests(sessions, busy):
    line = line_of(*(sequence("busy", "one") for _ in range(busy)))
    for n in range(1, sessions):
        line.add_request(sequence(f"s{n}", "one"))
    took = [take(line, [sequence("s1", "one")] * SLOTS) for _ in range(busy + sessions - 1)]
    late = max(took.index(one) for one in took if one.prompt.session != "busy")
    assert late <= PATIENCE + 2 * sessions


def test_a_client_of_100_sessions_has_as_many_turns_as_one_of_one():
    held = []
    line = line_of(*(sequence(f"s{n}", "crowd") for n in range(100)))
    for _ in range(50):
        line.add_request(sequence("only", "small"))
    for _ in range(100):
        held = held[-SLOTS + 1 :]
        held.append(take(line, held))
        if len(held) == SLOTS:
            assert [one.prompt.client for one in held].count("small") == SLOTS // 2
