"""A session over HTTP with a template that strips old thinking: every turn keeps its whole prefix."""

from __future__ import annotations

from pathlib import Path

import pytest
from daemon import BLOCK, Daemon, demo_model_with, own_usage, wait_until
from templates import QWEN3

TURNS = 3


@pytest.fixture(scope="module")
def stripping(tmp_path_factory) -> Path:
    """The demo model with Qwen3's template."""
    return demo_model_with(QWEN3, tmp_path_factory.mktemp("models") / "stripping")


def converse(daemon: Daemon, session: str, drop: str) -> list[int]:
    """Tokens of each later turn that were there before it and were computed again.

    drop  the field of an answer that the client keeps to itself
    """
    messages: list[dict] = [{"role": "user", "content": "Tell me of the sea."}]
    lost, known = [], 0
    for turn in range(TURNS):
        seed = 0
        while True:  # a turn that ends by itself, as most do
            seed += 1
            asked = {
                "model": daemon.model,
                "messages": messages,
                "max_tokens": 1500,
                "seed": 100 * turn + seed,
            }
            answer = daemon.post("/v1/chat/completions", asked, headers={"session-id": session}).json()
            if answer["choices"][0]["finish_reason"] == "stop":
                break
            assert seed < 8
        usage = own_usage(answer)
        if turn:
            lost.append(known - usage["cached_hot"] - usage["cached_cold"] if seed == 1 else 0)
        known = answer["usage"]["total_tokens"]
        echo = {k: v for k, v in answer["choices"][0]["message"].items() if k != drop and v is not None}
        messages += [echo, {"role": "user", "content": f"Go on, {turn}."}]
    return lost


@pytest.mark.slow
def test_a_client_that_keeps_no_thinking_loses_at_most_a_block(stripping, tmp_path):
    with Daemon(tmp_path, model=stripping) as daemon:
        lost = converse(daemon, "one", "reasoning_content")
        assert max(lost) <= BLOCK, lost
        # The lines follow the answers.
        wait_until(lambda: "healed=" in daemon.logged(), why=daemon.logged)
        healed = [line for line in daemon.logged().splitlines() if "healed=" in line]
        assert "sea" not in "".join(healed)


@pytest.mark.slow
def test_without_healing_it_is_computed_again(stripping, tmp_path):
    with Daemon(tmp_path, "--no-healing", model=stripping) as daemon:
        lost = converse(daemon, "one", "reasoning_content")
        assert sum(lost) > 0
        assert daemon.stop() == 0 and "healed=" not in daemon.logged()


@pytest.mark.slow
def test_the_clock_ends_a_request_and_the_next_one_is_served(tmp_path):
    with Daemon(tmp_path, "--request-timeout", "200ms") as daemon:
        long = {"role": "user", "content": "word " * 12_000}
        answer = daemon.messages(long, max_tokens=2000)
        assert answer["stop_reason"] == "max_tokens"
        assert daemon.messages("Hi", max_tokens=1)["stop_reason"] == "max_tokens"
        asked = {"model": daemon.model, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 5}
        refused = daemon.post("/v1/messages", asked, headers={"x-omlxd-timeout": "soon"})
        assert refused.status_code == 400 and "x-omlxd-timeout" in refused.text
