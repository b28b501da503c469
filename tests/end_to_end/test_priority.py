"""Who goes first, in a real daemon: the order of answers, whatever they take."""

from __future__ import annotations

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
