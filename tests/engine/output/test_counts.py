"""One count of tokens and guesses: what a request's usage has is what the engine's counters grow by."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from guesses import guess_by, half_right
from host import Host, chat, finished, raw, text_of
from msgspec.structs import replace

from omlxd.chat import TokenIds
from omlxd.engine.output.parser import OutputParser
from omlxd.front.owner.metrics import DERIVED, HELP
from omlxd.models import demo

COUNTED = {
    "completion_tokens": "generation_tokens_total",
    "drafted": "spec_decode_num_draft_tokens_total",
    "accepted": "spec_decode_num_accepted_tokens_total",
}


@pytest.fixture
def host(tmp_path: Path):
    host = Host(demo.build_demo(tmp_path / "demo"))
    yield host
    host.close()


def counted(host: Host) -> dict[str, float]:
    values = host.engine.engine_stats()
    return {name: values[counter] for name, counter in COUNTED.items()}


@pytest.mark.parametrize("end", ["length", "stop string", "end of turn", "prompt alone"])
def test_usage_and_counters_agree_however_an_answer_ends(
    end: str, host: Host, monkeypatch: pytest.MonkeyPatch
):
    asked = raw("Once upon a time", temperature=0.0, max_tokens=40)
    first = host.ask(replace(asked, return_token_ids=True))
    tokens = [event for event in first if isinstance(event, TokenIds)]
    ids, text = [id for event in tokens for id in event.ids], text_of(first)
    guess_by(monkeypatch, half_right([[*tokens[0].prompt, *ids]], 1))
    add_token = OutputParser.add_token

    def late(self: OutputParser, *of_token: Any) -> Any:
        """The engine goes on while a stop string is looked for."""
        time.sleep(0.01)
        return add_token(self, *of_token)

    monkeypatch.setattr(OutputParser, "add_token", late)
    fields: dict[str, dict[str, Any]] = {
        "length": {"max_tokens": 20},
        "stop string": {"stop": (text[len(text) // 3 :][:4],)},
        "end of turn": {"stop_token_ids": (ids[15],)},
        "prompt alone": {"max_tokens": 0},
    }
    before = counted(host)
    usage = finished(host.ask(replace(asked, sampling=replace(asked.sampling, **fields[end])))).usage
    while host.engine.scheduler.active_sequences:
        time.sleep(0.01)
    assert {name: before[name] + getattr(usage, name) for name in COUNTED} == counted(host)
    assert usage.drafted or end == "prompt alone"


def test_a_prompt_counts_once_whatever_its_answers(host: Host):
    """Its prefix is looked up for each."""
    request = raw(demo.PROSE, temperature=0.0, max_tokens=2)
    one = finished(host.ask(request)).usage
    assert finished(host.ask(replace(request, again=True))).usage.cached_hot > 0
    values = host.engine.engine_stats()
    assert values["prompt_tokens_total"] == one.prompt_tokens and not values["prompt_tokens_hot_total"]
    looked_up = values["prefix_cache_queries_total"], values["prefix_cache_hits_hot_total"]
    other = finished(host.ask(request)).usage
    values = host.engine.engine_stats()
    assert values["prompt_tokens_hot_total"] == other.cached_hot
    assert values["prompt_tokens_total"] == 2 * one.prompt_tokens - other.cached_hot
    assert values["prefix_cache_queries_total"] == 1.5 * looked_up[0]
    assert values["prefix_cache_hits_hot_total"] == 2 * looked_up[1] > 0


def test_each_value_of_an_engine_has_a_line_of_help(host: Host):
    host.ask(chat())
    values = {name for name in host.engine.engine_stats() if "_per_pos_" not in name}
    assert len(values) > 50 and not values - HELP.keys() - DERIVED.keys()
