"""mlx-lm's prompt-cache files through `omlxd cache export` and `import`, and mlx-lm's own programs."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from adapters import make_adapter
from daemon import Daemon, demo_model, prose
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import load_prompt_cache, make_prompt_cache
from mlx_lm.utils import load as mlx_load

from omlxd.cli.cache import command
from omlxd.errors import ConfigError, OmlxdError


def cache(*words: object) -> int:
    return command.main([str(word) for word in words], argparse.ArgumentParser())


def mlx_lm(*words: object) -> str:
    program = [sys.executable, "-m", "mlx_lm", *map(str, words)]
    return subprocess.run(program, check=True, capture_output=True, text=True).stdout


def greedy(model: Any, tokens: list[int], cache: Any) -> list[int]:
    steps = generate_step(mx.array(tokens), model, max_tokens=12, prompt_cache=cache)
    return [int(token) for token, _ in steps]


def asked(daemon: Daemon, text: str, session: str = "") -> tuple[int, str]:
    """(tokens of the prompt from the cache, the answer)."""
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": 12, "temperature": 0}
    answer = daemon.http.post("/v1/chat/completions", json=body, headers={"x-session-id": session}).json()
    message = answer["choices"][0]["message"]
    used = answer["usage"]["omlxd"]
    return used["cached_hot"] + used[
        "cached_cold"
    ], f"{message.get('reasoning_content')} {message['content']}"


def counted(daemon: Daemon) -> list[str]:
    """What the metrics say of prompts."""
    names = ("vllm:prefix_cache_", "vllm:prompt_tokens_total")
    return [line for line in daemon.http.get("/metrics").text.splitlines() if line.startswith(names)]


@pytest.mark.slow
def test_mlx_lms_file_is_a_hit_and_a_wrong_prompt_is_refused(tmp_path: Path, capsys):
    text, file = prose(120) + "\n", tmp_path / "cache.safetensors"
    (tmp_path / "prompt.txt").write_text(text)
    mlx_lm("cache_prompt", "--model", demo_model(), "--prompt-cache-file", file, "--prompt", text)
    with pytest.raises(OmlxdError, match="Nothing answers at"):
        cache("import", file, "--prompt", tmp_path / "prompt.txt", "--url", "http://127.0.0.1:9")
    with Daemon(tmp_path / "cold") as daemon:
        cold = asked(daemon, text)
        assert cold[0] == 0
    with Daemon(tmp_path / "home") as daemon:
        url = ("--url", daemon.url)
        with pytest.raises(ConfigError, match="doesn't say of which prompt"):
            cache("import", file, *url)
        wrong, short, ids = tmp_path / "wrong.txt", tmp_path / "short.txt", tmp_path / "ids.json"
        wrong.write_text(text.replace("vine", "pine", 1))
        short.write_text("vine")
        ids.write_text("[1, 2, -1]")
        for prompt, words in (
            (wrong, "its KV is not of this prompt from token"),
            (short, "give the prompt that it was made of"),
            (ids, "prompt"),
        ):
            with pytest.raises(OmlxdError, match=words):
                cache("import", file, "--prompt", prompt, *url)
        with pytest.raises(OmlxdError, match="no model 'nobody'"):
            cache("import", file, "--prompt", tmp_path / "prompt.txt", "--model", "nobody", *url)
        assert asked(daemon, wrong.read_text())[0] == 0  # Nothing of what was refused is used.
        assert not (tmp_path / "home" / "omlxd" / "spool").exists() or not list(
            (tmp_path / "home" / "omlxd" / "spool").iterdir()
        )
        assert cache("import", file, "--prompt", tmp_path / "prompt.txt", "--model", daemon.model, *url) == 0
        tokens = int(capsys.readouterr().out.partition(" tokens ")[0].rpartition(" ")[2])
        restored, answer = asked(daemon, text)
        assert restored == tokens // 64 * 64 > 256 and answer == cold[1]
        # Damaged on its way, and one that lies about its length.
        for body in (b"", b"\1", (9).to_bytes(8, "little") + b"{", (1 << 40).to_bytes(8, "little")):
            answer = daemon.http.post("/omlxd/cache/prompt-cache/import", content=body)
            assert answer.status_code in (400, 413), answer.text
        (tmp_path / "half.safetensors").write_bytes(file.read_bytes()[:-9000])
        with pytest.raises(OmlxdError, match="damaged or no safetensors file"):
            cache("import", tmp_path / "half.safetensors", "--prompt", tmp_path / "prompt.txt", *url)
        assert daemon.http.get("/omlxd/status").json()["models"][0]["starts"] == 1


@pytest.mark.slow
def test_mlx_lm_goes_on_from_a_session(tmp_path: Path, capsys):
    text, file = prose(100, seed=2), tmp_path / "out.safetensors"
    with Daemon(tmp_path / "home") as daemon:
        url = ("--url", daemon.url)
        asked(daemon, text, "mine")
        with pytest.raises(ConfigError, match="--format mlx-lm: say with --session"):
            cache("export", file, "--format", "mlx-lm", "--model", daemon.model, *url)
        with pytest.raises(OmlxdError, match="no request is kept"):
            cache("export", file, "--format", "mlx-lm", "--session", "nobody", *url)
        assert not file.exists()
        before = counted(daemon)
        assert cache("export", file, "--format", "mlx-lm", "--session", "mine", *url) == 0
        assert counted(daemon) == before, "no client's prompt"
        said = capsys.readouterr().out
        assert "go on with: mlx_lm.generate --prompt-cache-file" in said
        with pytest.raises(OmlxdError, match="File exists"):
            cache("export", file, "--format", "mlx-lm", "--session", "mine", *url)
        assert [path.name for path in tmp_path.iterdir() if "out" in path.name] == [file.name]
        assert file.stat().st_mode & 0o777 == 0o600
        assert not list((tmp_path / "home" / "omlxd" / "spool").iterdir())
    model, tokenizer = mlx_load(str(demo_model()))[:2]
    back, metadata = load_prompt_cache(str(file), return_metadata=True)
    tokens = [int(token) for token in metadata["tokens"].split(",")]
    rendered = tokenizer.apply_chat_template([{"role": "user", "content": text}], add_generation_prompt=True)
    assert tokens == list(rendered)
    more = tokenizer.encode("and then", add_special_tokens=False)
    cold = greedy(model, tokens + more, make_prompt_cache(model))
    assert greedy(model, more, back) == cold
    words = ("--ignore-chat-template", "--prompt", "and then", "--temp", 0, "--max-tokens", 12)
    printed = mlx_lm("generate", "--prompt-cache-file", file, *words)
    assert tokenizer.decode(cold).strip() in printed
    # Where it is taken in again, it brings its tokens along.
    with Daemon(tmp_path / "other") as daemon:
        before = counted(daemon)
        assert cache("import", file, "--url", daemon.url) == 0
        assert counted(daemon) == before
        assert asked(daemon, text)[0] == (len(tokens) - 1) // 64 * 64


@pytest.mark.slow
def test_kv_of_an_adapter_is_its_own(tmp_path: Path, capsys):
    text, file = prose(80), tmp_path / "cache.safetensors"
    (tmp_path / "prompt.json").write_text(json.dumps({"messages": [{"role": "user", "content": text}]}))
    adapter = make_adapter(demo_model(), tmp_path / "adapter")
    words = ("--model", demo_model(), "--prompt-cache-file", file, "--prompt", text)
    mlx_lm("cache_prompt", "--adapter-path", adapter, *words)
    with Daemon(tmp_path / "plain") as daemon:
        with pytest.raises(OmlxdError, match="The prompt cache is not taken"):
            cache("import", file, "--prompt", tmp_path / "prompt.json", "--url", daemon.url)
        assert asked(daemon, text)[0] == 0
    config = tmp_path / "tuned.toml"
    config.write_text(f'[models."omlxd-demo"]\nadapter = "{adapter}"\n')
    with Daemon(tmp_path / "tuned", "--config", str(config)) as daemon:
        assert cache("import", file, "--prompt", tmp_path / "prompt.json", "--url", daemon.url) == 0
        assert asked(daemon, text)[0] > 128
        asked(daemon, text, "mine")
        out = tmp_path / "out.safetensors"
        assert cache("export", out, "--format", "mlx-lm", "--session", "mine", "--url", daemon.url) == 0
        assert f"--adapter-path {adapter}" in capsys.readouterr().out
