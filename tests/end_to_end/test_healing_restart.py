"""A session that goes on after its engine, or the daemon, was killed: its whole prefix is on the SSD.

The template strips old thinking and the client keeps none, so the prefix ends at the first answer
unless its tokens are put back, which only their record still knows.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from daemon import BLOCK, Daemon, demo_model_with, own_usage, prose, wait_until
from prometheus_client.parser import text_string_to_metric_families
from templates import QWEN3_THINKING

from omlxd.cli.main import main
from omlxd.models import demo

SESSION = "a-session-with-a-name"
THINK_END = demo.VOCAB - 3
"""The id of `</think>`, which the demo model must be talked into."""


@pytest.fixture(scope="module")
def stripping(tmp_path_factory) -> Path:
    """The demo model with the template of a Qwen3 that always thinks."""
    return demo_model_with(QWEN3_THINKING, tmp_path_factory.mktemp("models") / "stripping")


def records(folder: Path) -> list[Path]:
    return list(folder.rglob("*.record"))


def ask(
    daemon: Daemon, messages: list[dict[str, Any]], session: str = SESSION, **more: Any
) -> dict[str, Any]:
    asked = {"model": daemon.model, "messages": messages, "max_tokens": 4, **more}
    answer = daemon.post("/v1/chat/completions", asked, headers={"session-id": session})
    assert answer.status_code == 200, answer.text
    return answer.json()


def thoughtful_turn(daemon: Daemon) -> tuple[list[dict[str, Any]], dict[str, Any], str]:
    """(a question, its answer that thinks, says something long and ends by itself, the record's name).

    Which seed gives one is the machine's affair: its numbers' last bits decide. Each asks something else,
    so that the records of those that would not do are others'.
    """
    earlier: set[str] = set()
    for seed in range(1, 30):
        messages = [{"role": "user", "content": prose(40, seed)}]
        answer = ask(daemon, messages, max_tokens=1500, seed=seed, logit_bias={str(THINK_END): 4})
        usage, choice = answer["usage"], answer["choices"][0]
        if choice["finish_reason"] != "stop" or not choice["message"].get("reasoning_content"):
            continue
        own = new_record(daemon, earlier)
        if usage["completion_tokens"] > 2 * BLOCK:
            return messages, answer, own
        earlier.add(own)
    pytest.fail("no such turn")


def new_record(daemon: Daemon, earlier: set[str]) -> str:
    def found() -> set[str]:
        return {path.name for path in records(daemon.cache)} - earlier

    wait_until(lambda: len(found()) == 1)
    return found().pop()


def counter(daemon: Daemon, name: str) -> float:
    families = text_string_to_metric_families(daemon.metrics())
    return sum(sample.value for family in families for sample in family.samples if sample.name == name)


@dataclass
class Lived:
    """A session of one turn, and what is left of its daemon.

    known      tokens of the turn's prompt and answer
    record     name of the turn's record
    messages   with the second question, the answer echoed without its thinking
    restarted  the second answer's usage, of an engine that was killed meanwhile
    """

    home: Path
    model: Path
    known: int
    record: str
    messages: list[dict[str, Any]]
    restarted: dict[str, Any]

    def copy(self, folder: Path) -> Path:
        """The home as it was, without the second answer's record: its kill may have come before that."""
        home = folder / "home"
        shutil.copytree(self.home, home, ignore=shutil.ignore_patterns("log-*"))
        for path in records(home):
            if path.name != self.record:
                path.unlink()
        return home


@pytest.fixture(scope="module")
def lived(tmp_path_factory, stripping: Path) -> Lived:
    home = tmp_path_factory.mktemp("lived") / "home"
    with Daemon(home, model=stripping) as daemon:
        messages, answer, record = thoughtful_turn(daemon)
        known = answer["usage"]["total_tokens"]
        daemon.settled()
        messages += [
            {"role": "assistant", "content": answer["choices"][0]["message"]["content"]},
            {"role": "user", "content": "Go on."},
        ]
        daemon.kill_engine()
        restarted = own_usage(ask(daemon, messages))
        daemon.kill()
    return Lived(home, stripping, known, record, messages, restarted)


def lost(lived: Lived, usage: dict[str, Any]) -> int:
    """Tokens of the first turn that the second one's prompt got from nowhere."""
    return lived.known - usage["cached_hot"] - usage["cached_cold"]


def test_an_engine_that_was_killed(lived: Lived):
    assert lost(lived, lived.restarted) <= BLOCK, lived


@pytest.mark.slow
def test_a_daemon_that_was_killed(lived: Lived, tmp_path: Path):
    with Daemon(lived.copy(tmp_path), model=lived.model) as daemon:
        stranger = own_usage(ask(daemon, lived.messages, "another"))
        wait_until(lambda: counter(daemon, "omlxd_prompt_turns_unknown_total") == 1)
        assert counter(daemon, "omlxd_prompt_turns_healed_total") == 0
        assert counter(daemon, "omlxd_prompt_turn_records_found_total") == 0
        usage = own_usage(ask(daemon, lived.messages))
        assert lost(lived, usage) <= BLOCK, usage
        assert lost(lived, stranger) > BLOCK, stranger
        wait_until(lambda: counter(daemon, "omlxd_prompt_turns_healed_total") == 1)
        assert counter(daemon, "omlxd_prompt_turn_records_bad_total") == 0


@pytest.mark.slow
def test_a_damaged_record_heals_nothing(lived: Lived, tmp_path: Path):
    home = lived.copy(tmp_path)
    (record,) = records(home)
    record.write_bytes(record.read_bytes()[:-1] + b"?")
    with Daemon(home, model=lived.model) as daemon:
        assert lost(lived, own_usage(ask(daemon, lived.messages))) > BLOCK
        wait_until(lambda: counter(daemon, "omlxd_prompt_turn_records_bad_total") == 1)
        assert counter(daemon, "omlxd_prompt_turns_healed_total") == 0
        assert not record.exists()


def test_what_clears_a_models_kv_clears_its_records(lived: Lived, tmp_path: Path, capsys):
    cache = lived.copy(tmp_path) / "omlxd" / "cache"
    assert main(["cache", "stats", "--json", "--paged-ssd-cache-dir", str(cache)]) == 0
    (row,) = json.loads(capsys.readouterr().out)["namespaces"]
    assert row["records"] == 1 and row["record_bytes"] % 4096 == 0
    assert main(["cache", "check", "--paged-ssd-cache-dir", str(cache)]) == 0
    (record,) = records(cache)
    record.write_bytes(record.read_bytes()[:-1] + b"?")
    assert main(["cache", "check", "--paged-ssd-cache-dir", str(cache)]) == 1
    assert f"{record.name}: fails its digest" in capsys.readouterr().out
    words = ["--model", row["model_id"], "--yes", "--paged-ssd-cache-dir", str(cache)]
    assert main(["cache", "clear", *words]) == 0
    assert not records(cache) and not list(cache.rglob("*.safetensors"))
