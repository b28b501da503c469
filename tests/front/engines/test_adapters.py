"""Adapters in the engine of their base, from a client's side: which texts, whose KV, what comes and goes."""

from __future__ import annotations

import os
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from adapters import make_adapter
from daemon import Daemon, family_model, wait_until

from omlxd.models import demo

NAMES = ["tiny", "tiny:style", "tiny:tone"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With two adapters of other ranks in its folder."""
    folder = demo.build_demo(tmp_path_factory.mktemp("models") / "tiny")
    (folder / "omlxd_demo.json").unlink()  # Or it would be built anew.
    make_adapter(folder, folder / "style", 1)
    make_adapter(folder, folder / "tone", 2, rank=8, num_layers=1)
    return folder


@pytest.fixture(scope="module")
def daemon(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with Daemon(tmp_path_factory.mktemp("home"), "--no-hf-cache", model=model) as daemon:
        yield daemon


def ask(daemon: Daemon, name: str, prompt: str = demo.PROSE, **more: Any) -> Any:
    body = {"model": name, "prompt": prompt, "max_tokens": 12, "temperature": 0} | more
    return daemon.http.post("/v1/completions", json=body)


def text(daemon: Daemon, name: str, prompt: str = demo.PROSE, **more: Any) -> str:
    answer = ask(daemon, name, prompt, **more)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["text"].strip()


def cached(daemon: Daemon, name: str, prompt: str) -> int:
    return ask(daemon, name, prompt).json()["usage"]["prompt_tokens_details"]["cached_tokens"]


def shown(daemon: Daemon, name: str) -> dict[str, Any]:
    return daemon.http.get(f"/omlxd/models/{name}").json()


def states(daemon: Daemon) -> list[str]:
    return [shown(daemon, name)["state"] for name in NAMES]


@pytest.fixture(scope="module")
def alone(model: Path) -> dict[str, str]:
    """What mlx-lm itself says, each adapter in a model of its own."""
    from mlx_lm.generate import stream_generate
    from mlx_lm.utils import load

    def says(adapter: Path | None) -> str:
        loaded, tokenizer = load(str(model), adapter_path=str(adapter) if adapter else None)[:2]
        parts = stream_generate(loaded, tokenizer, demo.PROSE, max_tokens=12)
        return "".join(part.text for part in parts).strip()

    return dict(zip(NAMES, [says(None), says(model / "style"), says(model / "tone")], strict=True))


def test_one_engine_says_for_each_what_mlx_lm_says(daemon: Daemon, alone: dict[str, str]):
    assert len(set(alone.values())) == 3
    assert {name: text(daemon, name) for name in NAMES} == alone
    with ThreadPoolExecutor(6) as threads:
        together = list(threads.map(lambda name: text(daemon, name), NAMES * 2))
    assert together == [alone[name] for name in NAMES * 2]
    assert len(daemon.engines()) == 1
    facts = [shown(daemon, name) for name in NAMES]
    assert [fact["state"] for fact in facts] == ["ready"] * 3
    assert [fact["shares"] for fact in facts] == ["", "tiny", "tiny"]
    assert facts[0]["pid"] and facts[1]["pid"] is None and facts[1]["load_bytes"] < facts[0]["load_bytes"]


def test_metrics_count_tokens_and_guesses_under_the_name_that_was_asked_for(daemon: Daemon):
    def count(of: str, name: str) -> float:
        line = f'vllm:{of}_total{{model_name="{name}"}} '
        lines = daemon.http.get("/metrics").text.splitlines()
        return sum(float(each.removeprefix(line)) for each in lines if each.startswith(line))

    for name in NAMES:
        text(daemon, name)
    before = [count("generation_tokens", name) for name in NAMES]
    usage = ask(daemon, "tiny:style", "Count. " + demo.PROSE).json()["usage"]
    after = [before[0], before[1] + usage["completion_tokens"], before[2]]
    assert [count("generation_tokens", name) for name in NAMES] == after
    assert "tiny:style" in daemon.http.get("/metrics").text.partition("vllm:spec_decode_num_drafts_total{")[2]


@pytest.mark.slow
def test_kv_is_never_shared_and_is_there_again_after_an_unload(daemon: Daemon):
    prompt = "Tell me. " + demo.PROSE
    for name in NAMES:
        assert cached(daemon, name, prompt) == 0
        assert cached(daemon, name, prompt) > 0
    pid = shown(daemon, "tiny")["pid"]
    assert daemon.http.post("/omlxd/models/unload", json={"model": "tiny:tone"}).json()["gone"]
    assert states(daemon) == ["ready", "ready", "unloaded"]
    assert cached(daemon, "tiny:style", prompt) > 0
    loaded = daemon.http.post("/omlxd/models/load", json={"model": "tiny:tone"}).json()
    assert (loaded["state"], loaded["shares"]) == ("ready", "tiny")
    assert cached(daemon, "tiny:tone", prompt) > 0
    assert shown(daemon, "tiny")["pid"] == pid


@pytest.mark.slow
def test_the_base_goes_with_its_adapters_and_comes_for_them(daemon: Daemon, alone: dict[str, str]):
    for name in NAMES:
        text(daemon, name)
    assert daemon.http.post("/omlxd/models/unload", json={"model": "tiny"}).json()["gone"]
    wait_until(lambda: states(daemon) == ["unloaded"] * 3, why=daemon.logged)
    assert daemon.engines() == []
    assert text(daemon, "tiny:style") == alone["tiny:style"]
    assert states(daemon) == ["ready", "ready", "unloaded"]


@pytest.mark.slow
def test_an_engine_stays_for_as_long_as_an_adapter_in_it(daemon: Daemon):
    def load(name: str, keep_alive: float) -> None:
        daemon.http.post("/omlxd/models/load", json={"model": name, "keep_alive": keep_alive})

    load("tiny", 0.1)
    load("tiny:style", -1)
    load("tiny:tone", 0.1)
    wait_until(lambda: states(daemon) == ["ready", "ready", "unloaded"], why=daemon.logged)
    daemon.http.post("/omlxd/models/unload", json={"model": "tiny:style"})
    wait_until(lambda: states(daemon) == ["unloaded"] * 3, why=daemon.logged)


@pytest.mark.slow
def test_an_engine_that_dies_takes_no_adapter_for_good(daemon: Daemon, alone: dict[str, str]):
    for name in NAMES:
        text(daemon, name)
    os.kill(daemon.engine_pid(), signal.SIGKILL)
    with ThreadPoolExecutor(3) as threads:
        assert list(threads.map(lambda name: text(daemon, name), NAMES)) == [alone[n] for n in NAMES]
    assert len(daemon.engines()) == 1


@pytest.mark.slow
def test_a_broken_adapter_is_an_error_for_it_alone_until_it_is_mended(daemon: Daemon, model: Path):
    good, broken, foreign, unsound = (model / name for name in ("style", "broken", "foreign", "unsound"))
    shutil.copytree(good, broken)
    (broken / "adapters.safetensors").write_bytes(b"x" * 99)
    make_adapter(family_model("qwen3"), foreign)
    weights = mx.load(str(good / "adapters.safetensors"))
    assert isinstance(weights, dict)
    weights[first := min(weights)][0, 0] = float("nan")
    shutil.copytree(good, unsound)
    mx.save_safetensors(str(unsound / "adapters.safetensors"), weights)
    try:
        for name, words in (
            ("broken", "adapters.safetensors is truncated"),
            ("foreign", "no adapter of this"),
            ("unsound", f"{first} holds numbers that are not finite"),
        ):
            for _ in range(4):  # Nothing is held back after some failures.
                answer = ask(daemon, f"tiny:{name}")
                assert answer.status_code == 400 and words in answer.text, answer.text
            fact = shown(daemon, f"tiny:{name}")
            assert fact["state"] == "failed" and words in fact["trouble"]
        text(daemon, "tiny:style")
        shutil.copy(good / "adapters.safetensors", broken)
        assert text(daemon, "tiny:broken") == text(daemon, "tiny:style")
    finally:
        shutil.rmtree(broken)
        shutil.rmtree(foreign)
        shutil.rmtree(unsound)


@pytest.mark.slow
def test_an_adapter_that_was_trained_on_is_served_at_once(daemon: Daemon, model: Path, tmp_path: Path):
    before = text(daemon, "tiny:style")
    kept = shutil.copytree(model / "style", tmp_path / "kept")
    try:
        shutil.copy(model / "tone" / "adapter_config.json", model / "style")
        new = tmp_path / "new.safetensors"
        shutil.copy(model / "tone" / "adapters.safetensors", new)
        new.replace(model / "style" / "adapters.safetensors")
        assert text(daemon, "tiny:style") == text(daemon, "tiny:tone") != before
    finally:
        shutil.copytree(kept, model / "style", dirs_exist_ok=True)
    assert text(daemon, "tiny:style") == before


@pytest.mark.slow
def test_one_that_was_trained_on_is_served_anew_while_requests_for_it_never_cease(
    daemon: Daemon, model: Path, tmp_path: Path
):
    """Those that run end with the old weights, those that come later have the new ones."""
    make_adapter(model, model / "further", 9)
    before, other = text(daemon, "tiny:style"), text(daemon, "tiny:further")
    kept = shutil.copytree(model / "style", tmp_path / "kept")
    body = {"model": "tiny:style", "prompt": "Go on.", "max_tokens": 600, "temperature": 0, "stream": True}
    looped, over, said = threading.Barrier(3), threading.Event(), list[int]()

    def keep_asking(wait_s: float) -> None:
        looped.wait()
        time.sleep(wait_s)  # So that one runs while the other begins.
        while not over.is_set():
            with daemon.http.stream("POST", "/v1/completions", json=body) as answer:
                said.append(answer.status_code)
                assert '"finish_reason":"length"' in "".join(answer.iter_lines()).replace(" ", "")

    try:
        with ThreadPoolExecutor(2) as threads:
            asking = [threads.submit(keep_asking, wait_s) for wait_s in (0.0, 0.3)]
            try:
                looped.wait()
                wait_until(lambda: shown(daemon, "tiny:style")["in_flight"] == 2, why=daemon.logged)
                new = Path(shutil.copy(model / "further" / "adapters.safetensors", tmp_path))
                new.replace(model / "style" / "adapters.safetensors")
                assert text(daemon, "tiny:style") == other != before
                assert "running requests have ended: its files have changed" in daemon.logged()
            finally:
                over.set()
            for each in asking:
                each.result()
        assert set(said) == {200}
    finally:
        shutil.copytree(kept, model / "style", dirs_exist_ok=True)
        shutil.rmtree(model / "further")
    assert text(daemon, "tiny:style") == before


@pytest.mark.slow
def test_other_kinds_get_an_engine_of_their_own_or_a_pass(daemon: Daemon, model: Path):
    try:
        make_adapter(model, model / "dora", 3, fine_tune_type="dora")
        make_adapter(model, model / "words", 4, keys=["model.embed_tokens", "embed_tokens"])
        with ThreadPoolExecutor(3) as threads:
            together = list(threads.map(lambda n: text(daemon, n), ["tiny:dora", "tiny", "tiny:style"]))
        assert together == [text(daemon, name) for name in ("tiny:dora", "tiny", "tiny:style")]
        assert shown(daemon, "tiny:dora")["shares"] == "tiny"
        text(daemon, "tiny:words")
        assert shown(daemon, "tiny:words")["shares"] == "" and len(daemon.engines()) == 2
        assert "tiny:words gets an engine of its own: " in daemon.logged()
    finally:
        daemon.http.post("/omlxd/models/unload", json={"model": "tiny:words"})
        shutil.rmtree(model / "dora", ignore_errors=True)
        shutil.rmtree(model / "words", ignore_errors=True)
