"""`[models."…"]` tables, lengths of time, and which models are found where."""

from __future__ import annotations

import asyncio
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from omlxd import wire
from omlxd.api.openai import completions
from omlxd.chat import Conversation, GenerateRequest, Message, RawPrompt, Sampling, TextPart
from omlxd.common.units import duration, spoken
from omlxd.config import ModelSettings, load_settings
from omlxd.errors import ConfigError, InvalidRequest, PromptTooLong
from omlxd.front.engines.model import ModelEngine, settings_of, with_settings
from omlxd.models.catalog import Catalog, default_model, hub_cache_dir, in_folder, in_hub_cache
from tests.models.test_resolve import make

EVERYTHING = """
[models."org/name"]
temperature = 0.5
top-p = 0.9
top_k = 20
min-p = 0.1
repetition-penalty = 1.1
repetition-context-size = 256
max-tokens = 100
thinking = true
max-thinking-tokens = 900
loop-stop = "off"
template-args = { a = [1, "x"] }
context-limit = 4096
ttl = "1h30m"
pin = true
aliases = ["one", "two"]
block-size = 128
no-cache = true
max-concurrent-requests = 2
starts-in-thinking = true
kv-reserve = 8192
weights-mmap = "off"
max-images = 20
"""


def models(home: Path, text: str) -> dict[str, ModelSettings]:
    (home / "omlxd.toml").write_text(text)
    return load_settings({"base_path": str(home)}, {}).models


def test_every_setting_of_a_model_is_read(tmp_path: Path):
    (got,) = models(tmp_path, EVERYTHING).values()
    assert got == ModelSettings(
        temperature=0.5,
        top_p=0.9,
        top_k=20,
        min_p=0.1,
        repetition_penalty=1.1,
        repetition_context_size=256,
        max_tokens=100,
        thinking=True,
        max_thinking_tokens=900,
        loop_stop="off",
        template_args={"a": [1, "x"]},
        context_limit=4096,
        ttl=5400.0,
        pin=True,
        aliases=("one", "two"),
        block_size=128,
        no_cache=True,
        max_concurrent_requests=2,
        starts_in_thinking=True,
        kv_reserve=8192,
        weights_mmap="off",
        max_images=20,
    )
    assert models(tmp_path, "[models.x]\nttl = 0\n")["x"].ttl == math.inf


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("temperature = -1", "line 4 (temperature): -1 is no number from 0"),
        ('temperature = "hot"', "line 4 (temperature): 'hot' is no number"),
        ("top-p = 0", "line 4 (top-p): 0 is no number above 0 to 1"),
        ("top_k = 1.5", "line 4 (top_k): 1.5 is no whole number"),
        ("thinking = 1", "neither true nor false"),
        (
            'ttl = "soon"',
            "no length of time from 0 up; write seconds or 90s, 30m, 2h; 0: until its room is needed.",
        ),
        (
            "request-timeout = -1",
            "-1 is no length of time from 0 up; write seconds or 90s, 30m, 2h; 0: no limit.",
        ),
        ("ttl = true", "no length of time"),
        ("aliases = [1]", "no list of names"),
        ("template-args = 3", "no table"),
        ("block-size = 48", "48 is none of 16, 32, 64, 128, 256, 512, 1024"),
        ("tempreature = 1", "did you mean temperature?"),
        ('weights-mmap = "yes"', "'yes' is none of auto, off, on"),
        ("kv-reserve = -1", "-1 is no whole number from 0"),
        ("repetition-context-size = -1", "-1 is no whole number from 0"),
        ("max-tokens = 1\nmax_tokens = 2", "given twice"),
    ],
)
def test_what_makes_no_sense_is_refused_with_its_line(tmp_path: Path, line: str, words: str):
    with pytest.raises(ConfigError) as caught:
        models(tmp_path, f"[models.x]\ntop-p = 1\n[models.y]\n{line}\n")
    assert words in caught.value.message and str(tmp_path / "omlxd.toml") in caught.value.message


def test_two_models_of_one_alias_and_a_table_that_is_none(tmp_path: Path):
    text = '[models.x]\naliases = ["a"]\n[models.y]\naliases = ["a"]\n'
    with pytest.raises(ConfigError, match=r"line 4 \(aliases\): 'a' is an alias of 'x' already"):
        models(tmp_path, text)
    with pytest.raises(ConfigError, match=r"line 2 \(x\).*\[models"):
        models(tmp_path, "[models]\nx = 3\n")
    with pytest.raises(ConfigError, match="did you mean model"):
        models(tmp_path, "[modle.x]\npin = true\n")


def test_lengths_of_time():
    for text, seconds in (("90s", 90), ("1h30m", 5400), ("5m", 300), (0, 0), ("250ms", 0.25), (1.5, 1.5)):
        assert duration(text) == seconds
    assert duration(-1) == duration("-5m") == math.inf
    for text in ("", "m", "5 minutes", "1e3", "nan", "5m3"):
        with pytest.raises(ValueError):
            duration(text)
    assert [spoken(s) for s in (0.4, 45, 300, 9000, None, math.inf)] == [
        "0.4 s",
        "45 s",
        "5 min",
        "2.5 h",
    ] + ["for good"] * 2


@pytest.mark.parametrize("text", ["1" * 10**6, "1" * 10**6 + "m", "1m" * 10**6, "9" * 65])
def test_a_length_of_time_is_short_itself(text: str):
    # Reading it took the square of its length, and a client could hang the daemon with one.
    with pytest.raises(ValueError):
        duration(text)


def test_keep_alive_of_a_body():
    from omlxd.api.fields.body import keep_alive_of

    assert keep_alive_of(b'{"model": "x"}') is None
    assert keep_alive_of(b'{"keep_alive": "5m"}') == 300
    assert keep_alive_of(b'{"keep_alive": 0}') == 0 and keep_alive_of(b'{"keep_alive": -1}') == math.inf
    assert keep_alive_of(b'{"messages": [{"keep_alive": "x"}]}') is None
    for wrong in (b'{"keep_alive": "x"}', b'{"keep_alive": true}', b'{"keep_alive": [1]}', b'{"keep_alive"'):
        with pytest.raises(InvalidRequest):
            keep_alive_of(wrong)


# --------------------------------------------------------------------------- what is installed


def test_folders_two_levels_deep(tmp_path: Path):
    for name in ("a", "org/b", "org/c", "deep/er/d", ".hidden"):
        make(tmp_path / name)
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    (tmp_path / "org" / "b" / "config.json").unlink()
    assert [model.id for model in in_folder(tmp_path)] == ["a", "org/c"]
    assert list(in_folder(tmp_path / "nowhere")) == []


def test_a_link_that_leads_nowhere_hides_no_model(tmp_path: Path):
    """The kernel refuses to follow it, as it does where a folder is another user's."""
    own = {"base_path": str(tmp_path / "base"), "model_dir": str(tmp_path / "models"), "no_hf_cache": "true"}
    for place in (make(tmp_path / "models" / "a"), tmp_path / "models", make(tmp_path / "base" / "models/b")):
        (place / "loop").symlink_to("loop")
        (place / "adapter").mkdir()
        (place / "adapter" / "adapter_config.json").symlink_to("x" * 300)
    (tmp_path / "base" / "models" / "c").mkdir()
    (tmp_path / "base" / "models" / "c" / "w.safetensors").write_bytes(b"")
    (tmp_path / "base" / "models" / "c" / "config.json").symlink_to("x" * 300)
    assert list(Catalog(load_settings(own, {})).models()) == ["a", "b"]


@pytest.mark.skipif(sys.platform == "darwin", reason="its file systems take no such name")
def test_a_folder_whose_name_is_not_utf_8_is_left_out(tmp_path: Path):
    """No answer to a client could hold its name."""
    make(tmp_path / "a")
    make(tmp_path / os.fsdecode(b"caf\xe9"))
    make(tmp_path / "café")
    ids = [model.id for model in in_folder(tmp_path)]
    assert json.loads(msgspec.json.encode(ids)) == ["a", "café"]


def hub_model(cache: Path, repo: str) -> Path:
    base = cache / ("models--" + repo.replace("/", "--"))
    folder = make(base / "snapshots" / "abc")
    (base / "refs").mkdir()
    (base / "refs" / "main").write_text("abc")
    return folder


def test_the_hubs_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = hub_model(tmp_path / "hub", "org/name")
    (hub_model(tmp_path / "hub", "org/no-tokenizer") / "tokenizer.json").unlink()
    (tmp_path / "hub" / "datasets--org--x").mkdir()
    hub_model(tmp_path / "hub", "org/zeros")
    # What a power cut leaves of a file.
    (tmp_path / "hub" / "models--org--zeros" / "refs" / "main").write_bytes(bytes(40))
    assert [(m.id, m.folder) for m in in_hub_cache(tmp_path / "hub")] == [("org/name", folder)]
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    settings = load_settings({"base_path": str(tmp_path), "model": "org/name"}, {})
    assert list(Catalog(settings).models()) == ["org/name"]
    off = load_settings({"base_path": str(tmp_path), "no_hf_cache": "true"}, {})
    assert list(Catalog(off).models()) == ["omlxd-demo"]


@pytest.mark.parametrize(
    "variables",
    [
        {},
        {"HF_HUB_CACHE": "$HOME/a"},
        {"HUGGINGFACE_HUB_CACHE": "~/b", "HF_HOME": "/c"},
        {"HF_HOME": "${HOME}/c", "XDG_CACHE_HOME": "/d"},
        {"XDG_CACHE_HOME": "~/d"},
    ],
)
def test_the_hubs_cache_is_where_its_client_has_it(variables: dict[str, str], monkeypatch):
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    program = "from huggingface_hub.constants import HF_HUB_CACHE; print(HF_HUB_CACHE, end='')"
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert str(hub_cache_dir()) == said.stdout


def test_the_default_model(tmp_path: Path):
    make(tmp_path / "models" / "org" / "a")
    base = {"base_path": str(tmp_path)}
    folder = {**base, "model_dir": str(tmp_path / "models")}
    none = default_model(load_settings(folder, {}))
    inside = default_model(load_settings({**folder, "model": "org/a"}, {}))
    hub = default_model(load_settings({**folder, "model": "org/else"}, {}))
    demo = default_model(load_settings(base, {}))
    assert none is None and inside and inside.source == "model-dir"
    assert hub and hub.source == "hub" and demo and demo.source == "demo"
    with pytest.raises(ConfigError, match="--model-dir: there is no folder"):
        load_settings({**base, "model_dir": str(tmp_path / "nowhere")}, {})


def test_defaults_hold_for_every_model_and_a_models_own_settings_win(tmp_path: Path):
    text = '[defaults]\ntemperature = 0.4\nmin-p = 0.1\n[models."org/x"]\ntemperature = 0.2\n'
    (tmp_path / "omlxd.toml").write_text(text)
    settings = load_settings({"base_path": str(tmp_path)}, {})
    own, other = (settings_of(name, settings) for name in ("org/x", "org/other"))
    assert (own.temperature, own.min_p) == (0.2, 0.1) and (other.temperature, other.min_p) == (0.4, 0.1)
    asked = GenerateRequest(prompt=RawPrompt(text="hi"), sampling=Sampling(min_p=0.0))
    assert with_settings(asked, other).sampling == Sampling(temperature=0.4, min_p=0.0)
    for limit in ({}, {"max_tokens": 3}):
        body = completions.parse(json.dumps({"prompt": "hi"} | limit).encode())
        kept = with_settings(body.generate, ModelSettings(max_tokens=40)).sampling.max_tokens
        assert kept == limit.get("max_tokens", 40)
    assert settings.sources["defaults.min-p"].endswith("line 3 (min-p)")
    for line, words in (
        ("temperature = -1", r"line 2 \(temperature\): -1 is no number"),
        ("pin = true", "'pin' is no sampling setting"),
    ):
        (tmp_path / "omlxd.toml").write_text(f"[defaults]\n{line}\n")
        with pytest.raises(ConfigError, match=words):
            load_settings({"base_path": str(tmp_path)}, {})


def test_the_least_budget_of_thinking_counts_and_a_model_has_its_own(tmp_path: Path):
    (tmp_path / "omlxd.toml").write_text('[models.own]\nmax-thinking-tokens = 50\nloop-stop = "off"\n')
    given = {"base_path": str(tmp_path), "max_thinking_tokens": "900"}
    own, other = (settings_of(name, load_settings(given, {})) for name in ("own", "other"))
    talk = Conversation((Message("user", (TextPart("Hi"),)),))
    for settings, asked, budget in (
        (own, None, 50),
        (own, 20, 20),
        (other, 5000, 900),
        (ModelSettings(), 7, 7),
    ):
        request = GenerateRequest(msgspec.structs.replace(talk, thinking_budget=asked))
        sent = with_settings(request, settings)
        assert isinstance(sent.prompt, Conversation) and sent.prompt.thinking_budget == budget
        assert sent.loop_stop is (settings is not own)


HUGE = "words " * 5_000_000
PROMPTS = [RawPrompt(text=HUGE), Conversation((Message("user", (TextPart(HUGE),)),))]


@pytest.mark.parametrize("prompt", PROMPTS)
def test_a_text_that_is_surely_too_long_never_reaches_the_engine(prompt: Conversation | RawPrompt):
    sent: list[Any] = []
    info = wire.ModelInfo("m", "", 1000, 10, 0, 0, "", "", 64, "", token_bytes=wire.TokenBytes(10.0, 100.0))
    supervisor = SimpleNamespace(model_id="m", info=info)
    process: Any = SimpleNamespace(supervisor=supervisor, state="ready", generate=sent.append)
    model = ModelEngine(SimpleNamespace(folder=None), process, may_load=lambda: True)  # type: ignore[arg-type]
    with pytest.raises(PromptTooLong, match=r"> 999 maximum"):
        model.generate(GenerateRequest(prompt=prompt))
    with pytest.raises(PromptTooLong, match=r"> 999 maximum"):
        asyncio.run(model.count_tokens(prompt))
    model.generate(GenerateRequest(prompt=RawPrompt(text="words " * 1500)))
    assert len(sent) == 1


def test_on_disk_means_the_files_whatever_the_weights_become(tmp_path: Path):
    header = json.dumps({"w": {"dtype": "F16", "shape": [10, 1000], "data_offsets": [0, 20_000]}}).encode()
    file = tmp_path / "model.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header + bytes(20_000))
    process: Any = SimpleNamespace(supervisor=SimpleNamespace(model_id="m", info=None))
    model = ModelEngine(SimpleNamespace(folder=tmp_path, adapter=None), process, may_load=lambda: True)  # type: ignore[arg-type]
    assert model.disk_bytes is None
    model.measure()
    for model.float32 in (False, True):
        assert model.disk_bytes == file.stat().st_size
    assert model.footprint is not None and model.footprint.weights == 40_000
