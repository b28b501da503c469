"""Who goes first, in a real daemon: the order of answers, whatever they take."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from daemon import NO_END, Daemon, prose, wait_until

QUEUED, SLOTS = 5, 2
HEADER = "X-Omlxd-Priority"


@pytest.mark.slow
def test_a_queue_in_the_background_does_not_keep_an_interactive_request_waiting(tmp_path: Path):
    order: list[str] = []
    with (
        Daemon(tmp_path, "--max-concurrent-requests", str(SLOTS)) as daemon,
        ThreadPoolExecutor(QUEUED) as pool,
    ):

        def ask(name: str, path: str, words: int, seed: int, **headers: str) -> None:
            text = {"role": "user", "content": prose(words, seed)}
            more = {"logit_bias": NO_END} if path.endswith("completions") else {}
            asked = {"model": daemon.model, "messages": [text], "max_tokens": 8, **more}
            assert daemon.post(path, asked, headers=headers).status_code == 200
            order.append(name)

        def waiting() -> int:
            return sum(model["in_flight"] for model in daemon.http.get("/omlxd/models").json()["models"])

        cron = [
            pool.submit(ask, "cron", "/v1/messages", 400, seed, **{HEADER: "background"})
            for seed in range(QUEUED)
        ]
        wait_until(lambda: waiting() + len(order) == QUEUED)
        before = len(order)
        ask("now", "/v1/chat/completions", 200, 99)
        assert order.index("now") <= before + SLOTS, "what has begun may end, and nothing else begins"
        for each in cron:
            each.result()
        print(before, order)
        refused = daemon.post("/v1/messages", {}, headers={HEADER: "now"})
        assert refused.status_code == 400


@pytest.mark.slow
def test_a_title_and_a_sub_agent_wait_for_their_session(tmp_path: Path):
    """As opencode asks, the title first, while somebody else holds the only slot."""
    title = ("system", "You are a title generator. You output ONLY a thread title. Nothing else.")
    question = ("user", "Mend the bug in the kettle.")
    long = {"messages": [{"role": "user", "content": "Go on."}], "max_tokens": 50_000, "logit_bias": NO_END}
    with Daemon(tmp_path, "--max-concurrent-requests", "1") as daemon, ThreadPoolExecutor(3) as pool:

        def ask(session: str, *said: tuple[str, str]) -> int:
            messages = [{"role": role, "content": text} for role, text in said]
            asked = {
                "model": daemon.model,
                "messages": messages,
                "max_tokens": 4,
                "prompt_cache_key": session,
            }
            return daemon.post("/v1/chat/completions", asked).json()["usage"]["prompt_tokens"]

        with daemon.stream("/v1/chat/completions", {"model": daemon.model, **long}) as slot:
            lines = slot.iter_lines()
            next(lines)
            asked = []
            for session, *said in (
                ("s", title, ("user", "Generate a title for this conversation:\n"), question),
                ("s/agent", question),
                ("s", ("system", prose(300)), question),
            ):
                asked.append(pool.submit(ask, session, *said))
                wait_until(lambda: daemon.figure("num_requests_waiting") == len(asked), why=daemon.logged)
        of_title, of_agent, of_main = (each.result() for each in asked)
        assert daemon.stop() == 0
    answered = re.findall(r"outcome=ok prompt=(\d+)", daemon.logged())
    assert [*map(int, answered)] == [of_main, of_title, of_agent]
