"""The official SDKs play whole sessions against a real daemon whose model follows a script.

The agents that are programs (Claude Code, Codex, opencode) do the same in tools/check_clients.py,
which installs them; here is what needs no npm.
"""

import asyncio
import json
import sys
from importlib import metadata
from pathlib import Path

import httpx
import mlx.core as mx
import numpy as np
import pytest
from daemon import wait_until
from fast_or_slow import rest_slow
from templates import QWEN3

from omlxd.chat import Conversation, Message, Sampling, TextPart, Tool
from omlxd.engine.sequence.sampling import UNNAMED, BatchSampler, RowSampling
from tools.clients.agents import write_files
from tools.clients.own_daemon import OwnDaemon, first_model
from tools.clients.played import Played
from tools.clients.recorder import Recorder
from tools.clients.reuse import Reuse, ReuseLog, changed
from tools.clients.run import start_client
from tools.clients.script import LONG, THOUGHT, answer_to, written
from tools.clients.script_model import build_script_model
from tools.clients.scripted_engine import ScriptedRow, forced, scripted_rows
from tools.clients.turns import BLOCK, Session
from tools.clients_matrix import PARTS, Row, play_library

PROGRAMS = Path(__file__).resolve().parents[2] / "tools" / "clients"


# Its template drops the thinking of earlier turns: what was generated must be put back.
@pytest.fixture(scope="module")
def daemon(tmp_path_factory):
    folder = tmp_path_factory.mktemp("scripted")
    with OwnDaemon(folder / "daemon", build_script_model(folder / "scripted", template=QWEN3)) as daemon:
        yield daemon


@pytest.mark.slow
@pytest.mark.parametrize(("sdk", "cancelled"), rest_slow([("openai", 2), ("anthropic", 1)], ("anthropic", 1)))
def test_an_sdk_plays_a_session(daemon, tmp_path, sdk, cancelled):
    write_files(tmp_path)
    with Recorder(daemon.url) as recorder:
        command = [sys.executable, str(PROGRAMS / f"sdk_{sdk}.py"), recorder.url, first_model(daemon.url)]
        session = Session(sdk, recorder, daemon)
        env = {"HOME": str(tmp_path)}
        row = session.turn("session", lambda: start_client([*command, str(tmp_path)], env, tmp_path))
    assert row.problem == "" and row.status == 0
    # An abandoned stream freed its slot, and what it had computed was of use to the turn after it.
    assert sum(reuse.played.cancelled for reuse in row.reuses) == cancelled
    assert row.worst <= BLOCK and sum(reuse.played.cached for reuse in row.reuses) > 5000


@pytest.mark.slow
def test_the_matrix_plays_a_library(daemon, tmp_path):
    """The others are installed by tools/clients_matrix.py."""
    command = [sys.executable, "-P", str(PROGRAMS / "library_players.py"), "anthropic"]
    row = Row("anthropic")
    with Recorder(daemon.url) as recorder:
        play_library(row, command, recorder.url, tmp_path)
        assert not [request.error for request in recorder.requests if request.error]
    assert row.problems == dict.fromkeys(PARTS, "") and row.version == metadata.version("anthropic")
    failed = Row("none")
    play_library(failed, [sys.executable, "-c", "raise SystemExit('no such library')"], daemon.url, tmp_path)
    assert failed.problems == dict.fromkeys(PARTS, "it ended before: no such library")


@pytest.mark.slow
@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 1, "seed": 3}])
def test_a_long_script_is_said_as_it_is_written(daemon, sampling):
    """It repeats itself, so that draft tokens are accepted (how many is a matter of time)."""
    asked = {"messages": [{"role": "user", "content": "Scenario long in /x."}], "max_tokens": 400}
    answer = httpx.post(f"{daemon.url}/v1/chat/completions", json={**asked, **sampling}, timeout=60).json()
    assert LONG.startswith(answer["choices"][0]["message"]["content"].strip())


def test_each_token_of_a_verify_step_has_its_own_place_in_the_script():
    """Greedy or not: the plain rows of a greedy one are one and the same."""
    for temperature in (0.0, 1.0):
        params = RowSampling.of(Sampling(temperature=temperature, seed=3), UNNAMED)
        row = ScriptedRow(params, script=(5, 6, 7, 8))
        row.step = 1
        rows = scripted_rows(row, [6, 7], [])
        sampler = BatchSampler(rows)
        assert sampler(forced(rows, mx.zeros((3, 16)))).tolist() == [6, 7, 8]
        assert [one.step for one in rows] == [2, 3, 4]


# --------------------------------------------------------------------------- many at once


async def ask_all(url: str, *sessions: str, max_tokens: int, wait_s: float = 0.0) -> list[int]:
    """A request of each session, at once but for the last, which comes `wait_s` later; the statuses."""
    limits = httpx.Limits(max_connections=200)
    async with httpx.AsyncClient(base_url=url, timeout=120, limits=limits, trust_env=False) as client:

        async def ask(number: int, session: str) -> int:
            if number == len(sessions) - 1:
                await asyncio.sleep(wait_s)
            text = f"Request {number}. Scenario long in /x." + " Please." * (100 if session == "other" else 1)
            messages = [{"role": "user", "content": text}]
            asked = {"model": "scripted", "messages": messages, "max_tokens": max_tokens}
            headers = {"x-session-affinity": session} if session else {}
            return (await client.post("/v1/chat/completions", json=asked, headers=headers)).status_code

        return await asyncio.gather(*[ask(n, session) for n, session in enumerate(sessions)])


def ended_since(log: ReuseLog, count: int) -> list[Played]:
    """The next `count` requests that the engine ends, in order of arrival."""
    before = len(log.known)
    wait_until(lambda: log.read() is not None and len(log.known) >= before + count)
    return sorted((reuse.played for reuse in log.known[before:]), key=lambda played: played.began)


@pytest.mark.slow
def test_64_requests_at_once_are_served_in_order_of_arrival(daemon):
    log = ReuseLog(daemon.played)
    log.read()
    assert asyncio.run(ask_all(daemon.url, *[""] * 64, max_tokens=8)) == [200] * 64
    played = ended_since(log, 64)
    ranks = {one.id: rank for rank, one in enumerate(sorted(played, key=lambda p: p.ended))}
    # 8 run at once, and two threads render prompts: nobody is further from his place than that allows.
    assert max(abs(ranks[one.id] - rank) for rank, one in enumerate(played)) <= 24


@pytest.mark.slow
def test_a_client_of_many_requests_does_not_keep_another_waiting(daemon):
    log = ReuseLog(daemon.played)
    log.read()
    sessions = [*["swarm"] * 40, "other"]
    assert asyncio.run(ask_all(daemon.url, *sessions, max_tokens=300, wait_s=0.2)) == [200] * 41
    played = ended_since(log, 41)
    other = max(played, key=lambda one: one.prompt)
    # Only those that had a slot already, or got one in the same moment, end before it.
    assert sum(one.ended < other.ended for one in played) <= 16


# --------------------------------------------------------------------------- the script


def conversation(*turns: tuple[str, str], tools: tuple[str, ...] = ("read_file",)) -> Conversation:
    messages = tuple(Message(role, (TextPart(text),)) for role, text in turns)  # type: ignore[arg-type]
    return Conversation(messages, tools=tuple(map(Tool, tools)))


def test_a_scenario_is_played_step_by_step():
    asked = ("user", "<reminder>\nScenario two-files in /tmp/p.")
    first = answer_to(conversation(asked))
    assert first.calls == (("read_file", {"path": "/tmp/p/alpha.txt"}),)
    second = answer_to(conversation(asked, ("assistant", ""), ("tool", "kettle")))
    assert second.calls == (("read_file", {"path": "/tmp/p/beta.txt"}),)
    fourth = answer_to(conversation(asked, *[("assistant", ""), ("tool", "x")] * 3))
    assert fourth.text == "Done." and not fourth.calls
    # The last scenario counts; tools are the client's own.
    again = answer_to(conversation(asked, ("user", "Scenario once-more in /q."), tools=("Read",)))
    assert again.calls == (("Read", {"file_path": "/q/gamma.txt"}),)


def test_what_is_no_scenario_has_an_answer_too():
    assert "title" in json.loads(answer_to(conversation(("user", "Write a title."), tools=())).text)
    assert "<summary>" in answer_to(conversation(("user", "create a detailed summary of it"))).text
    assert "no such" in answer_to(conversation(("user", "Hello"))).text


def test_an_answer_is_written_in_the_models_markup():
    answer = answer_to(conversation(("user", "Scenario weather in /x.")))
    assert written(answer, "<think>\n\n</think>\n\n").startswith("<tool_call>")
    assert written(answer, "<|im_start|>assistant\n").startswith("<think>\n" + THOUGHT)
    text = written(answer, "<|im_start|>assistant\n<think>\n")
    assert text.startswith(THOUGHT + "\n</think>\n\n<tool_call>\n") and text.endswith("}\n</tool_call>")
    assert json.loads(text.splitlines()[-2]) == {
        "name": "get_weather",
        "arguments": {"city": "Oslo", "days": 2},
    }


# --------------------------------------------------------------------------- the ideal


def played(
    id: int, tokens: list[int], prompt: int, *, cached: int = 0, computed: int | None = None
) -> Played:
    return Played(
        id=id,
        tokens=tokens,
        prompt=prompt,
        computed=len(tokens) - 1 if computed is None else computed,
        cached=cached,
        cancelled=computed is not None,
        began=float(id),
        ended=id + 0.5,
    )


def log_of(path: Path, *lines: Played) -> ReuseLog:
    path.write_text(
        "".join(json.dumps({f: getattr(p, f) for f in p.__struct_fields__}) + "\n" for p in lines)
    )
    return ReuseLog(path)


def test_the_ideal_counts_prompts_and_answers(tmp_path):
    one = [*range(100)]
    two = played(2, [*range(99), 7, 7, 7], 102, cached=64)
    (first, second) = log_of(tmp_path / "log", played(1, one, 80), two).read()
    assert (first.ideal, second.ideal, second.lost) == (0, 99, 35)


def test_the_ideal_of_a_cancelled_request_is_what_it_computed(tmp_path):
    one = [*range(300)]
    lines = played(1, one, 300, computed=128), played(2, one, 300, cached=128)
    assert [reuse.ideal for reuse in log_of(tmp_path / "log", *lines).read()] == [0, 128]


def test_a_request_that_still_runs_is_no_ideal(tmp_path):
    first = played(1, [*range(200)], 200)
    first.ended = 9.0
    assert log_of(tmp_path / "log", first, played(2, [*range(200)], 200)).read()[1].ideal == 0


def test_where_a_client_changes_what_it_said():
    def reuse(tokens: list[int], prompt: int) -> Reuse:
        return Reuse(played(1, tokens, prompt), np.array(tokens, "<u4"), 0)

    before = reuse([*range(50), 99], 40)
    assert changed(before, reuse([*range(60)], 60)) is None
    assert changed(before, reuse([*range(40)], 40)) is None
    assert changed(before, reuse([*range(45), 7, 7, 7, 7, 7, 7], 51)) == (45, 5)
    assert changed(None, before) is None
