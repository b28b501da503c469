"""/metrics, /ready and /omlxd/status over scripted engines, and over a real daemon."""

import asyncio
import os
import time
from dataclasses import fields
from pathlib import Path

import pytest
from app_client import body, client
from daemon import Daemon, prose, wait_until
from fake_engine import USAGE, FakeCold, FakeEngine, FakeEngines, app_of
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse

from omlxd.chat import Failed, Finished, TextDelta, ToolCall
from omlxd.errors import Overloaded
from omlxd.front.app import create_app
from omlxd.front.owner import engine_metrics
from omlxd.front.owner.engine_metrics import EngineMetrics, MetricsOf
from omlxd.front.owner.metrics import HELP
from omlxd.kv.ledger.ledger import LedgerStats

CHAT = "/v1/chat/completions"
TINY = {"model_name": "org/tiny"}


class Scrape:
    """A page of metrics, by name and labels."""

    def __init__(self, text: str):
        self.families = {family.name: family for family in parse(text)}
        self.values = {
            (sample.name, frozenset(sample.labels.items())): sample.value
            for family in self.families.values()
            for sample in family.samples
        }

    def __call__(self, name: str, **labels: str) -> float:
        """Of the model `org/tiny` unless the labels say otherwise."""
        return self.values[name, frozenset({**TINY, **labels}.items())]

    def plain(self, name: str) -> float:
        return self.values[name, frozenset()]

    def counters(self) -> dict[object, float]:
        kinds = ("counter", "histogram")
        names = {s.name for f in self.families.values() if f.type in kinds for s in f.samples}
        return {key: value for key, value in self.values.items() if key[0] in names}


async def scrape(http, **headers: str) -> Scrape:
    answer = await http.get("/metrics", headers=headers)
    assert answer.status_code == 200, answer.text
    return Scrape(answer.text)


# --------------------------------------------------------------------------- requests


async def test_a_request_moves_what_it_should():
    script = (TextDelta("a"), 0.03, TextDelta("b"), 0.03, TextDelta("c"), Finished("stop", USAGE))
    async with client(app_of(FakeEngine(script))) as http:
        before = await scrape(http)
        assert before("vllm:request_success_total", finished_reason="stop") == 0
        assert before("vllm:time_to_first_token_seconds_count") == 0
        for stream in (False, True):
            assert (await http.post(CHAT, json=body(CHAT, stream=stream))).status_code == 200
        after = await scrape(http)
    assert after("vllm:request_success_total", finished_reason="stop") == 2
    assert after("omlxd_requests_total", outcome="ok") == 2
    assert after("vllm:time_to_first_token_seconds_count") == 2
    assert after("vllm:inter_token_latency_seconds_count") == 4
    assert after("vllm:inter_token_latency_seconds_sum") >= 0.12
    assert after("vllm:inter_token_latency_seconds_bucket", le="0.025") == 0
    assert after("vllm:e2e_request_latency_seconds_count") == 2
    assert after("vllm:request_time_per_output_token_seconds_count") == 2
    assert after("vllm:request_prompt_tokens_sum") == 2 * USAGE.prompt_tokens
    assert after("vllm:request_generation_tokens_sum") == 2 * USAGE.completion_tokens


async def test_an_answer_that_is_one_call_has_the_engines_time_to_first_token():
    script = (0.05, ToolCall("call_1", "read", "{}"), Finished("tool_calls", USAGE))
    async with client(app_of(FakeEngine(script))) as http:
        await http.post(CHAT, json=body(CHAT))
        after = await scrape(http)
    assert after("vllm:time_to_first_token_seconds_count") == 1
    # Told by the engine as 0.25 s; here the whole answer was shorter than that.
    assert 0.05 <= after("vllm:time_to_first_token_seconds_sum") <= 0.25
    assert after("vllm:request_success_total", finished_reason="stop") == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_failures_are_counted_by_their_code(stream: bool):
    async def outcomes(*script) -> Scrape:
        async with client(app_of(FakeEngine(script))) as http:
            await http.post(CHAT, json=body(CHAT, stream=stream))
            return await scrape(http)

    for script in [
        (Failed("overloaded", "later"),),
        (TextDelta("a"), 0.15, Failed("overloaded", "later")),
        (Overloaded("now"),),
        (TextDelta("a"), 0.15, Overloaded("now")),
    ]:
        after = await outcomes(*script)
        assert after("omlxd_requests_total", outcome="overloaded") == 1
        assert after("vllm:request_success_total", finished_reason="error") == 1
        assert after("omlxd_requests_total", outcome="ok") == 0
    after = await outcomes(TextDelta("a"), Finished("length", USAGE))
    assert after("vllm:request_success_total", finished_reason="length") == 1


async def test_what_is_refused_is_counted_by_its_code_and_never_under_a_clients_words():
    path, second = "/v1/completions", FakeEngine(model_id="org/second")
    embedder = FakeEngine(model_id="org/embedder")
    embedder.kind = "embedding"
    wrong = [{"best_of": 3}, {"n": 9}, {"temperature": -1}, {"prompt": ""}, {"model": 7}]
    unknown = [{"model": f"nope-{n}"} for n in range(3)]
    async with client(app_of(FakeEngine(), second, embedder)) as http:
        for change in (*wrong, *unknown, {"model": "org/embedder"}):
            answer = await http.post(path, json=body(path) | change)
            assert answer.status_code in (400, 404), answer.text
        thread = {"type": "continue", "previous_message_id": "msg_1"}
        answer = await http.post("/v1/messages", json=body("/v1/messages") | {"thread": thread})
        assert answer.status_code == 404
        after = await scrape(http)
    name = "omlxd_requests_total"
    assert after(name, model_name="", outcome="invalid_request") == len(wrong)
    assert after(name, model_name="", outcome="not_found") == len(unknown) + 1
    assert after(name, model_name="org/embedder", outcome="invalid_request") == 1
    assert after(name, outcome="ok") == 0
    assert {dict(labels)["model_name"] for at, labels in after.values if at == name} == {
        *("", "org/tiny", "org/second", "org/embedder")
    }


async def test_a_client_that_goes_away_is_an_abort():
    engine = FakeEngine((TextDelta("a"), 30.0))
    app = app_of(engine)
    incoming = [
        {"type": "http.request", "body": b'{"model":"tiny","messages":[{"role":"user","content":"x"}]}'}
    ]

    async def receive():
        if incoming:
            return incoming.pop()
        await asyncio.sleep(0.05)
        return {"type": "http.disconnect"}

    async def send(message):
        pass

    scope = {
        **{"type": "http", "method": "POST", "path": CHAT, "raw_path": CHAT.encode(), "query_string": b""},
        "headers": [(b"host", b"127.0.0.1"), (b"content-type", b"application/json")],
    }
    await app(scope, receive, send)
    async with client(app) as http:
        after = await scrape(http)
    assert after("vllm:request_success_total", finished_reason="abort") == 1
    assert after("omlxd_requests_total", outcome="disconnected") == 1


async def test_a_clients_words_never_become_labels():
    async with client(app_of(FakeEngine())) as http:
        for name in ("gpt-4", "claude-x", "tiny"):
            await http.post(CHAT, json=body(CHAT) | {"model": name})
        text = (await http.get("/metrics")).text
    assert "gpt-4" not in text and "claude-x" not in text


# --------------------------------------------------------------------------- engines


VALUES = {
    "num_requests_running": 2.0,
    "num_requests_waiting": 3.0,
    "prompt_tokens_total": 100.0,
    "generation_tokens_total": 50.0,
    "prompt_tokens_hot_total": 60.0,
    "prompt_tokens_cold_total": 40.0,
    "prefix_cache_queries_total": 400.0,
    "prefix_cache_hits_hot_total": 200.0,
    "prefix_cache_hits_cold_total": 100.0,
    "kv_hot_bytes": 25.0,
    "kv_hot_budget_bytes": 100.0,
    "kv_corrupt_files_total": 1.0,
    "spec_decode_num_accepted_tokens_per_pos_0_total": 9.0,
    "spec_decode_num_accepted_tokens_per_pos_14_total": 2.0,
    "something_new": 7.0,
    "something_counted_total": 8.0,
    "no metric's name!": 1.0,
}


async def test_engine_values_get_vllms_names_and_the_rest_ours():
    engine = FakeEngine()
    engine.values = dict(VALUES)
    async with client(app_of(engine)) as http:
        got = await scrape(http)
    assert got("vllm:num_requests_running") == 2 and got("vllm:num_requests_waiting") == 3
    assert got("vllm:prompt_tokens_total") == 200 and got("vllm:prompt_tokens_cached_total") == 100
    assert got("vllm:prompt_tokens_by_source_total", source="local_compute") == 100
    assert got("vllm:prompt_tokens_by_source_total", source="local_cache_hit") == 60
    assert got("vllm:prompt_tokens_by_source_total", source="external_kv_transfer") == 40
    assert got("vllm:generation_tokens_total") == 50
    assert got("vllm:prefix_cache_queries_total") == 400 and got("vllm:prefix_cache_hits_total") == 200
    assert got("vllm:external_prefix_cache_queries_total") == 200
    assert got("vllm:external_prefix_cache_hits_total") == 100
    assert got("vllm:kv_cache_usage_perc") == 0.25
    assert got("omlxd_kv_corrupt_files_total") == 1
    per_position = "vllm:spec_decode_num_accepted_tokens_per_pos"
    assert (
        got(f"{per_position}_total", position="0") == 9 and got(f"{per_position}_total", position="14") == 2
    )
    assert got.families[per_position].type == "counter"
    assert not any(name.startswith("omlxd_spec_decode") for name in got.families)
    assert got("omlxd_something_new") == 7 and got("omlxd_something_counted_total") == 8
    assert got.families["omlxd_something_new"].type == "gauge"
    assert got.families["omlxd_something_counted"].type == "counter"
    assert got("omlxd_model_state", state="ready") == 1


async def test_a_counter_never_goes_down_when_an_engine_restarts():
    engine = FakeEngine()
    async with client(app_of(engine)) as http:
        engine.values = {"generation_tokens_total": 50.0, "kv_hot_bytes": 9.0}
        first = await scrape(http)
        engine.state, engine.values, engine.deaths = "restarting", None, 1
        dead = await scrape(http)
        engine.state, engine.starts = "ready", 2
        engine.values = {"generation_tokens_total": 60.0, "kv_hot_bytes": 1.0}
        second = await scrape(http)
        engine.values = {"generation_tokens_total": 65.0}
        third = await scrape(http)
    tokens = [each("vllm:generation_tokens_total") for each in (first, dead, second, third)]
    assert tokens == [50, 50, 110, 115]
    for earlier, later in ((first, dead), (dead, second), (second, third)):
        assert all(later.values[key] >= value for key, value in earlier.counters().items())
    # What the dead one held in memory is gone with it.
    assert first("omlxd_kv_hot_bytes") == 9
    assert ("omlxd_kv_hot_bytes", frozenset(TINY.items())) not in dead.values
    assert second("omlxd_engine_restarts_total") == 1 and second("omlxd_engine_starts_total") == 2


async def test_what_an_engine_says_at_its_end_counts():
    engine = FakeEngine()
    async with client(app_of(engine)) as http:
        engine.values = {"generation_tokens_total": 50.0}
        assert (await scrape(http))("vllm:generation_tokens_total") == 50
        engine.state, engine.values = "unloaded", None
        engine.last_stats = [(1, {"generation_tokens_total": 58.0}), (2, {"generation_tokens_total": 7.0})]
        assert (await scrape(http))("vllm:generation_tokens_total") == 65, "nobody has asked the second one"
        engine.state, engine.starts, engine.values = "ready", 3, {"generation_tokens_total": 1.0}
        assert (await scrape(http))("vllm:generation_tokens_total") == 66
        engine.last_stats = [(2, {"generation_tokens_total": 9.0})]
        assert (await scrape(http))("vllm:generation_tokens_total") == 66, "too late"


async def test_counters_go_on_where_a_models_folder_goes_and_comes_back():
    first, second = FakeEngine(), FakeEngine()
    first.starts, first.deaths, first.values = 5, 2, {"generation_tokens_total": 50.0}
    second.starts, second.values = 1, {"generation_tokens_total": 7.0}
    engines = FakeEngines(first)
    metrics = MetricsOf(engines)  # type: ignore[arg-type]
    await metrics.read()
    engines._engines["org/tiny"] = second
    for _ in range(2):
        (told,) = await metrics.read()
        assert (told.starts, told.deaths, told.total("generation_tokens_total")) == (6, 2, 57)


async def test_a_scrape_waits_for_no_engine(monkeypatch):
    monkeypatch.setattr(engine_metrics, "ANSWER_S", 0.05)
    engine = FakeEngine()
    engine.values = {"generation_tokens_total": 5.0, "num_requests_running": 1.0}

    async def slow():
        await asyncio.sleep(600)

    async with client(app_of(engine)) as http:
        assert (await scrape(http))("omlxd_engine_figures_age_seconds") == 0
        engine.stats = slow
        began = time.monotonic()
        # Many at once share one question.
        pages = await asyncio.gather(*(scrape(http) for _ in range(5)))
        assert time.monotonic() - began < 60
        assert all(page("vllm:generation_tokens_total") == 5 for page in pages)
        assert pages[0]("vllm:num_requests_running") == 1
        # These are of the look before, and whoever looks can tell.
        assert all(page("omlxd_engine_figures_age_seconds") > 0 for page in pages)
        status = (await http.get("/omlxd/status")).json()
        (model,), limit = status["models"], status["memory_limit"]
        assert limit == 6 * 10**9
        assert model["values_age_s"] > 0 and model["values"]["generation_tokens_total"] == 5
        engine.state, engine.in_flight = "loading", 4
        page = await scrape(http)
        assert page("vllm:num_requests_running") == 0 and page("vllm:num_requests_waiting") == 4


def test_figures_of_one_life_and_the_next():
    figures = EngineMetrics("m")
    figures.add_counters({"a_total": 3.0, "b": 1.0}, 1)
    figures.add_counters({"a_total": 3.0}, 1)
    assert figures.totals == {"a_total": 3.0} and figures.gauges == {}
    figures.add_counters({"a_total": 1.0}, 2)
    figures.add_counters({"a_total": 0.5}, 2)
    assert figures.totals == {"a_total": 4.0}


async def test_the_ssd_caches_account():
    engines = FakeEngines(FakeEngine())
    told = {
        "bytes_used": 10,
        "reserved": 2,
        "files": 3,
        "cold_cache_bytes": 100,
        "evicted_files": 4,
        "evicted_bytes": 40,
        "written_today_bytes": 7,
        "written_ever_bytes": 900,
    }
    stats = LedgerStats(**{field.name: told.get(field.name, 0) for field in fields(LedgerStats)})
    engines.cold = FakeCold(Path("/cache"), stats)
    async with client(create_app(engines)) as http:
        got = await scrape(http)
        status = (await http.get("/omlxd/status")).json()
    assert got.plain("omlxd_cold_bytes") == 10 and got.plain("omlxd_cold_cap_bytes") == 100
    assert got.plain("omlxd_cold_evicted_files_total") == 4
    assert got.plain("omlxd_cold_written_today_bytes") == 7
    assert got.plain("omlxd_cold_written_ever_bytes") == 900
    assert status["cold"] == {
        **{"dir": "/cache", "bytes": 10, "cap": 100, "reserved": 2, "files": 3},
        **{"evicted_files": 4, "evicted_bytes": 40, "capacity": 0, "folder_away": False},
        **{"written_today": 7, "written_ever": 900},
        **{"daily_write_budget": 0, "write_budget_used_up": False},
    }


async def test_formats_and_the_key():
    async with client(app_of(FakeEngine(), api_key="secret")) as http:
        for path in ("/metrics", "/omlxd/status"):
            assert (await http.get(path)).status_code == 401
        assert (await http.get("/ready")).status_code == 200
        headers = {"authorization": "Bearer secret"}
        plain = await http.get("/metrics", headers=headers)
        assert plain.headers["content-type"].startswith("text/plain; version=")
        headers["accept"] = "application/openmetrics-text; version=1.0.0, text/plain;q=0.5"
        opened = await http.get("/metrics", headers=headers)
        assert opened.headers["content-type"].startswith("application/openmetrics-text")
        families = list(parse_openmetrics(opened.text))
        names = {family.name for family in families}
        # A sample whose name is not its family's makes one of its own: so it shows in the families' types.
        assert {family.name for family in families if family.type == "unknown"} == set()
        samples = {sample.name for family in families for sample in family.samples}
        assert "vllm:num_requests_running" in samples and "vllm:request_success_total" in samples
        assert not any(name.startswith("vllm_") for name in samples)
    assert {"vllm:request_success", "vllm:time_to_first_token_seconds", "omlxd_requests"} <= names
    assert "_created" not in plain.text and "secret" not in plain.text


# --------------------------------------------------------------------------- ready and status


async def test_ready_says_why_not():
    first, second = FakeEngine(), FakeEngine(model_id="org/second")
    async with client(app_of(first, second)) as http:
        assert (await http.get("/ready")).json() == {"ready": True, "reasons": []}
        first.state = "loading"
        answer = await http.get("/ready")
        assert answer.status_code == 200
        assert answer.json() == {"ready": True, "reasons": ["org/tiny is loading."]}
        second.state, second.trouble = "failed", "org/second can't be loaded: no memory"
        answer = await http.get("/ready")
        assert answer.status_code == 503
        assert answer.json() == {
            "ready": False,
            "reasons": ["org/tiny is loading.", "org/second can't be loaded: no memory"],
        }
        assert (await http.get("/health")).status_code == 200
        # An engine that died comes back with the next request, which need not wait for this to say so.
        first.state, first.trouble = "restarting", "org/tiny ended. Retry: the next request starts it again."
        assert (await http.get("/ready")).status_code == 200
        first.in_flight = 1
        assert (await http.get("/ready")).status_code == 503
        first.in_flight, first.state, first.trouble = 0, "loading", ""
        # What is not loaded can be, on demand; but not while the model that was asked for still loads.
        second.state = "unloaded"
        assert (await http.get("/ready")).status_code == 503
        first.state = "failed"
        assert (await http.get("/ready")).status_code == 200
        # Unless the owner has said that no request loads a model.
        second.is_refused = True
        answer = await http.get("/ready")
        assert answer.status_code == 503
        assert answer.json()["reasons"] == [
            "org/tiny is failed.",
            "org/second is not loaded; load it with `omlxd models load org/second`.",
        ]
    async with client(app_of()) as http:
        answer = await http.get("/ready")
        assert answer.status_code == 503
        assert answer.json() == {"ready": False, "reasons": ["There is no model to serve."]}


async def test_status_tells_of_models():
    engine = FakeEngine()
    engine.values, engine.pid = dict(VALUES), os.getpid()
    async with client(app_of(engine)) as http:
        status = (await http.get("/omlxd/status")).json()
    (model,) = status["models"]
    assert model["id"] == "org/tiny" and model["state"] == "ready" and model["context_length"] == 4096
    assert model["running"] == 2 and model["waiting"] == 3 and model["resident"] > 1e6
    assert model["values"]["kv_hot_bytes"] == 25 and "trouble" not in model
    assert status["cold"] is None and status["pid"] == os.getpid() and status["uptime_s"] >= 0


# --------------------------------------------------------------------------- the real thing


@pytest.mark.slow
def test_an_unload_in_order_loses_no_count(tmp_path: Path):
    with Daemon(tmp_path) as daemon:
        for _ in range(2):
            before = sum(daemon.chat(prose(20))["usage"]["completion_tokens"] for _ in range(2))
            answer = daemon.http.post("/omlxd/models/unload", json={"model": daemon.model})
            assert answer.status_code == 200
        page = Scrape(daemon.metrics())
        assert page("vllm:generation_tokens_total", model_name=daemon.model) == 2 * before > 0
        assert page("vllm:prompt_tokens_total", model_name=daemon.model) > 0


@pytest.mark.slow
def test_a_daemons_metrics_live_through_the_death_of_its_engine(tmp_path: Path):
    with Daemon(tmp_path) as daemon:

        def page() -> Scrape:
            return Scrape(daemon.metrics())

        def of(page: Scrape, name: str) -> float:
            return page(name, model_name=daemon.model)

        assert daemon.http.get("/ready").json() == {"ready": True, "reasons": []}
        text = prose(60)
        daemon.chat(text)
        daemon.chat(text)
        before = page()
        assert of(before, "vllm:prompt_tokens_total") > 300
        assert of(before, "vllm:generation_tokens_total") >= 2
        assert of(before, "vllm:prefix_cache_hits_total") >= 128
        assert 0 < of(before, "vllm:kv_cache_usage_perc") <= 1
        assert of(before, "omlxd_engine_resident_bytes") > 10e6
        daemon.settled()
        assert of(page(), "omlxd_kv_files_written_total") >= 3
        wait_until(lambda: page().plain("omlxd_cold_bytes") > 0)
        # Of models that see, of CUDA, of Metal, of a peer, of ranks.
        others = ("image", "attention_long", "metal_", "kv_peer_", "ranks", "link_")
        elsewhere = {name for name in HELP if name.startswith(others)}
        assert set(HELP) - elsewhere <= set(daemon.figures()), "metrics.py describes the engine's names"
        before = page()
        daemon.kill_engine()
        dead = page()
        daemon.chat(text)
        after = page()
        for earlier, later in ((before, dead), (dead, after)):
            falls = {k: v for k, v in earlier.counters().items() if later.values.get(k, -1.0) < v}
            falls = {k: v for k, v in falls.items() if not str(k[0]).startswith("process_")}
            assert not falls
        assert of(after, "omlxd_engine_restarts_total") == 1
        assert of(after, "vllm:external_prefix_cache_hits_total") >= 128
        assert of(after, "omlxd_kv_files_restored_total") >= 2
