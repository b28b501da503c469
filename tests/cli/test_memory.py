"""`omlxd memory`, its endpoint, and what a request's usage says of its time."""

from __future__ import annotations

import argparse
import json

import msgspec
import pytest
from app_client import body, client
from fake_engine import USAGE, FakeEngine, app_of
from host import Host, finished, raw
from msgspec.structs import replace

from omlxd.chat import Finished, TextDelta, Usage
from omlxd.cli.daemon.client import Daemon, DaemonError
from omlxd.cli.watch import memory
from omlxd.engine.server.model_load import cpu_speed
from omlxd.errors import ConfigError
from omlxd.models import demo

from .test_status import model, status

FIGURES = {
    "mlx_peak_bytes": 4e9,
    "mlx_memory_limit_bytes": 2e10,
    "mlx_cache_limit_bytes": 2e9,
    "mlx_wired_limit_bytes": 0.0,
}


def test_a_line_a_model():
    loaded = model(values=FIGURES, weight_bytes=2_000_000_000)
    text = memory.as_text(status(loaded, msgspec.structs.replace(model(), id="idle", values={})))
    head, line = text.splitlines()
    assert head.split("  ")[0] == "MODEL" and "idle" not in text
    assert " ".join(line.split()) == "org/tiny 2 GB 995 MB 5 MB of 8 GB 60 MB of 2 GB 4 GB of 20 GB - 2 GB"
    assert memory.as_text(status()) == "no model is loaded"
    held = loaded.values
    few = {**held, "mlx_active_bytes": loaded.weight_bytes + held.get("kv_hot_bytes", 0) + 16}
    idle = memory.as_text(status(msgspec.structs.replace(loaded, values=few))).splitlines()[1]
    assert idle.split()[:5] == ["org/tiny", "2", "GB", "0", "bytes"], "16 bytes are no KV"
    slow = msgspec.structs.replace(loaded, speed=cpu_speed(False, "float32 needs 2 GB"))
    assert memory.as_text(status(slow)).splitlines()[2:] == [f"org/tiny: {slow.speed}"]
    assert slow.speed.endswith("GFLOP/s, weights as stored: float32 needs 2 GB")


def test_an_adapters_figures_are_those_of_the_engine_that_it_shares(monkeypatch: pytest.MonkeyPatch, capsys):
    base, other = model(id="org/tiny", values=FIGURES), model(id="org/other", values=FIGURES)
    adapter = msgspec.structs.replace(model(id="org/tiny:style", shares="org/tiny"), values={})
    monkeypatch.setattr(Daemon, "fetch", lambda *args, seconds=0.0: status(base, adapter, other))
    assert memory.main(["tiny:style", "--url", "http://127.0.0.1:1"], argparse.ArgumentParser()) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[1].startswith("org/tiny ") and len(shown) == 3
    said = "org/tiny:style is in the engine of org/tiny: a figure there, or a --trim, is of all in it"
    assert shown[2] == said


def test_the_command_asks_and_orders(monkeypatch: pytest.MonkeyPatch, capsys):
    asked = []

    def fetch(self, path, type, body=None, seconds=0.0):
        asked.append((path, msgspec.to_builtins(body)))
        return status(model(values=FIGURES))

    monkeypatch.setattr(Daemon, "fetch", fetch)
    for words in ([], ["--trim"], ["tiny", "--reset-peak", "--json"]):
        assert memory.main(["--url", "http://127.0.0.1:1", *words], argparse.ArgumentParser()) == 0
    assert [path for path, _ in asked] == ["/omlxd/status", "/omlxd/memory", "/omlxd/memory"]
    assert asked[1][1]["trim"] and not asked[1][1]["reset_peak"]
    assert asked[2][1] == {"model": "tiny", "trim": False, "reset_peak": True}
    assert '"mlx_peak_bytes"' in capsys.readouterr().out
    assert memory.main(["tiny", "--url", "http://127.0.0.1:1"], argparse.ArgumentParser()) == 0
    with pytest.raises(ConfigError, match="knows no model 'nope'"):
        memory.main(["nope", "--url", "http://127.0.0.1:1"], argparse.ArgumentParser())
    monkeypatch.undo()
    with pytest.raises(DaemonError):
        memory.main(["--url", "http://127.0.0.1:9", "--trim"], argparse.ArgumentParser())


async def test_the_endpoint_reaches_one_model_or_all_and_refuses_what_it_does_not_know():
    engines = FakeEngine(), FakeEngine(model_id="org/other")
    async with client(app_of(*engines)) as http:
        answer = await http.post("/omlxd/memory", json={"trim": True})
        assert [one["id"] for one in answer.json()["models"]] == ["org/tiny", "org/other"]
        await http.post("/omlxd/memory", json={"model": "other", "reset_peak": True})
        assert (await http.post("/omlxd/memory", json={"model": "nobody", "trim": True})).status_code == 404
        assert (await http.post("/omlxd/memory", json={"trim": "yes"})).status_code == 400
        assert (await http.post("/omlxd/memory", content=b"{")).status_code == 400
    assert engines[0].orders == [(True, False)]
    assert engines[1].orders == [(True, False), (False, True)]


@pytest.mark.slow
def test_a_trim_gives_ram_blocks_back_and_the_answer_stays(tmp_path):
    host = Host(demo.build_demo(tmp_path / "demo"))
    try:
        request = raw(demo.PROSE, temperature=0.0, max_tokens=3)
        first = finished(host.ask(request)).usage
        assert (
            first.prefill_s > 0 and first.decode_s > 0 and first.peak_bytes > host.engine.loaded.weight_bytes
        )
        assert first.queue_s + first.restore_s + first.prefill_s == pytest.approx(first.ttft_s)
        assert first.tokens_per_s == pytest.approx(2 / first.decode_s)
        assert finished(host.ask(request)).usage.cached_hot
        assert host.engine.engine_stats()["kv_hot_bytes"]
        host.engine.tidy_memory(trim=True, reset_peak=True)
        stats = host.engine.engine_stats()
        assert not stats["kv_hot_bytes"] and stats["mlx_peak_bytes"] == stats["mlx_active_bytes"] > 0
        assert not finished(host.ask(request)).usage.cached_tokens
    finally:
        host.close()


TIMED = replace(USAGE, queue_s=0.05, restore_s=0.1, prefill_s=0.1, decode_s=2.0, peak_bytes=10**9)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_llama_cpps_timings_stand_beside_the_usage(path: str):
    engine = FakeEngine((TextDelta("Hello"), Finished("stop", TIMED)))
    async with client(app_of(engine)) as http:
        whole = (await http.post(path, json=body(path))).json()
        lines = (await http.post(path, json=body(path, stream=True))).text.splitlines()
    last = json.loads([line for line in lines if line.startswith("data: {")][-1][6:])
    expected = {
        **{"cache_n": 64, "prompt_n": 36, "prompt_ms": 100.0, "prompt_per_second": 360.0},
        **{"predicted_n": 7, "predicted_ms": 2000.0, "predicted_per_second": 3.0},
        **{"prompt_per_token_ms": pytest.approx(2.777, abs=0.001)},
        **{"predicted_per_token_ms": pytest.approx(333.333, abs=0.001)},
    }
    assert whole["timings"] == last["timings"] == expected
    omlxd = whole["usage"]["omlxd"]
    assert (omlxd["queue_s"], omlxd["decode_s"], omlxd["tokens_per_s"]) == (0.05, 2.0, 3.0)
    assert omlxd["peak_bytes"] == 10**9


def test_too_few_tokens_have_no_speed():
    assert Usage(completion_tokens=1, decode_s=1.0).tokens_per_s == 0.0
