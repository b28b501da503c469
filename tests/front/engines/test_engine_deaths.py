"""An engine dies at an exact moment, by each signal: what its requests get, what comes after, and what it
leaves on the disk."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from cold_files import all_on_disk, on_disk, settled, unsettled
from daemon import PATIENCE_S, READY_S, own_usage, prose, restored, wait_until
from dying import BASE, CAP, MOMENTS, Asking, Dying
from fast_or_slow import rest_slow

from omlxd.cli.cache.checks.check import check
from omlxd.front.engines.watch import STALL_S

SIGNALS = ("SIGKILL", "SIGSEGV", "SIGABRT", "SIGTERM", "FAULT")


@pytest.fixture(scope="module")
def dying(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Dying]:
    made = Dying(tmp_path_factory.mktemp("dying"))
    with made.daemon:
        yield made


def dies(dying: Dying, moment: str, signal: str) -> None:
    seed = MOMENTS.index(moment) * len(SIGNALS) + SIGNALS.index(signal) + 1
    dying.stop_at(moment)
    asked = [
        Asking(dying.daemon, BASE if moment in ("decode", "restoring") else prose(700, seed), stream=True)
    ]
    wait_until(dying.stands, READY_S, dying.daemon.logged)
    asked.append(Asking(dying.daemon, prose(50, seed), stream=False))
    wait_until(lambda: dying.in_flight() >= 2, 30, dying.daemon.logged)
    wait_until(lambda: asked[0].heard or moment != "decode", 30, dying.daemon.logged)
    engine = dying.engine()
    assert on_disk(dying.cache, temporary=True) or moment != "writing"
    assert all_on_disk(dying.cache) <= CAP

    died = dying.die_by(signal)
    for one in asked:
        one.join(PATIENCE_S)
    # Of one that was still prefilled, the next engine makes an answer.
    failed = {"loading": asked[: signal != "FAULT" and len(asked)], "decode": asked[:1]}.get(moment, [])
    assert [one for one in asked if one.error] == failed
    told = {"SIGKILL": "killed", "FAULT": "a GPU fault ended it: [METAL]"}.get(signal, signal)
    assert all(told in one.error for one in failed), failed[0].error
    took = max(one.ended for one in asked) - died
    print(f"{moment} {signal}: told after {took:.3f} s")
    assert took < STALL_S / 2, "not because nothing was heard of it for so long"
    assert all_on_disk(dying.cache) <= CAP

    again = dying.daemon.messages(BASE, max_tokens=20)
    assert again["content"] == dying.base["content"]
    assert restored(own_usage(again)) > 0
    (now,) = dying.status()["models"]
    assert now["state"] == "ready" and now["pid"] != engine
    wait_until(lambda: settled(dying.daemon), why=lambda: unsettled(dying.daemon))
    assert not check(dying.cache).bad
    assert dying.daemon.process.poll() is None


@pytest.mark.parametrize(
    ("moment", "signal"),
    rest_slow(
        [
            *(("loading", "SIGABRT"), ("loading", "SIGKILL"), ("prefill", "SIGSEGV"), ("prefill", "SIGKILL")),
            *(
                ("decode", "SIGTERM"),
                ("decode", "SIGKILL"),
                *(("writing", signal) for signal in SIGNALS[:-1]),
            ),
            *((moment, "FAULT") for moment in MOMENTS if moment != "writing"),
        ],
        *(("writing", "SIGKILL"), ("decode", "FAULT")),
    ),
)
def test_a_death(dying: Dying, moment: str, signal: str):
    dies(dying, moment, signal)


UNSTREAMED = {
    "/v1/messages": ({"messages": [{"role": "user", "content": BASE}], "max_tokens": 60}, "content"),
    "/v1/chat/completions": (
        {"messages": [{"role": "user", "content": BASE}], "max_tokens": 60, "n": 2},
        "choices",
    ),
    "/v1/completions": ({"prompt": [BASE, "one two"], "max_tokens": 60}, "choices"),
    "/v1/responses": ({"input": BASE, "max_output_tokens": 60}, "output"),
}


@pytest.mark.slow
@pytest.mark.parametrize("path", UNSTREAMED)
def test_an_answer_that_nobody_has_read_of_is_made_again(dying: Dying, path: str):
    fields, answers = UNSTREAMED[path]
    content = {"model": dying.daemon.model, "temperature": 0, **fields}
    before = dying.daemon.post(path, content).json()
    dying.stop_at("decode")
    with ThreadPoolExecutor() as threads:
        asking = threads.submit(dying.daemon.post, path, content)
        wait_until(dying.stands, READY_S, dying.daemon.logged)
        dying.die_by("SIGKILL")
        again = asking.result()
    assert again.status_code == 200, again.text
    assert texts(again.json()[answers]) == texts(before[answers])
    for kind in ("input_tokens", "prompt_tokens", "output_tokens", "completion_tokens", "total_tokens"):
        if kind != "input_tokens" or path != "/v1/messages":  # There it excludes what was cached.
            assert again.json()["usage"].get(kind) == before["usage"].get(kind), kind


def texts(answer: Any) -> list[str]:
    """Every text in it, in order, but for ids."""
    if isinstance(answer, dict):
        return [text for name, value in answer.items() if name != "id" for text in texts(value)]
    return [text for value in answer for text in texts(value)] if isinstance(answer, list) else [str(answer)]
