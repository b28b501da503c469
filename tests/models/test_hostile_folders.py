"""Model folders and files that somebody broke or made to hurt: a sentence, soon, and little memory."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import socket
import time
from pathlib import Path

import psutil
import pytest
from daemon import Daemon, demo_model, demo_model_with
from engine_processes import collect, engine, package_on_the_path, until, up  # noqa: F401
from fast_or_slow import rest_slow
from templates import DEEPSEEK, GLM, HARMONY, QWEN3, QWEN3_THINKING
from transformers.utils import chat_template_utils

from omlxd import wire
from omlxd.chat import Failed
from omlxd.common.child_process import ChildLost
from omlxd.common.files import read_small
from omlxd.config import load_settings
from omlxd.config.keys import read_keys
from omlxd.engine.prompt.template import process as template_process
from omlxd.engine.prompt.template.process import TemplateProcesses, TemplateRefusal
from omlxd.engine.server import service
from omlxd.errors import ConfigError, ModelError, OmlxdError
from omlxd.front.engines import watch
from omlxd.models import demo
from omlxd.models.footprint import PROCESS_BYTES, footprint
from omlxd.models.resolve import check_folder

ABOVE = 8 << 30
"""Bytes of address space that these programs may have: the machine is for others too."""
LIMITED = ("bash", "-c", f'ulimit -v {(ABOVE * 2) >> 10}; exec "$@"', "limited")


def a_fifo(path: Path) -> None:
    os.mkfifo(path)


def a_device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def a_sparse_file(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(11 << 30)


def deep(path: Path) -> None:
    path.write_text("[" * 5_000_000)


ODD = [a_fifo, a_device, a_sparse_file]


@pytest.fixture
def no_harm():
    """The memory of this process has not grown by 200 MB, and no second was lost."""
    before, began = psutil.Process().memory_info().rss, time.process_time()
    yield
    assert psutil.Process().memory_info().rss - before < 200 << 20
    assert time.process_time() - began < 1.0


# --------------------------------------------------------------------------- files


@pytest.mark.parametrize("odd", ODD)
@pytest.mark.parametrize(
    "name",
    [
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "model.safetensors.index.json",
        "chat_template.jinja",
    ],
)
def test_a_model_folder_with_an_odd_file(tmp_path, odd, name, no_harm):
    folder = tmp_path / "model"
    shutil.copytree(demo_model(), folder)
    (folder / name).unlink(missing_ok=True)
    odd(folder / name)
    with pytest.raises(ModelError, match=f"{name}.*(regular|larger)"):
        check_folder(folder)
    footprint(folder)


@pytest.mark.parametrize("odd", [a_fifo, a_device])
def test_weights_that_are_no_file(tmp_path, odd, no_harm):
    folder = tmp_path / "model"
    shutil.copytree(demo_model(), folder)
    (folder / "model.safetensors").unlink()
    odd(folder / "model.safetensors")
    with pytest.raises(ModelError, match=r"model\.safetensors.*regular"):
        check_folder(folder)
    footprint(folder)


def test_a_config_of_nothing_but_brackets(tmp_path):
    deep(tmp_path / "config.json")
    assert footprint(tmp_path).weights == 0
    with pytest.raises(ModelError):
        check_folder(tmp_path)


@pytest.mark.parametrize("odd", ODD)
def test_keys_that_are_no_file(tmp_path, odd, no_harm):
    odd(tmp_path / "keys.json")
    with pytest.raises(ConfigError, match=r"keys\.json.*(regular|larger)"):
        read_keys(tmp_path / "keys.json")


@pytest.mark.parametrize("odd", ODD)
def test_settings_that_are_no_file(tmp_path, odd, no_harm):
    odd(tmp_path / "omlxd.toml")
    with pytest.raises(ConfigError, match=r"omlxd\.toml.*(regular|larger)"):
        load_settings({"base_path": str(tmp_path)}, {})


def test_a_file_that_grows_is_read_to_its_limit(tmp_path):
    (tmp_path / "small").write_bytes(b"x" * 100)
    assert read_small(tmp_path / "small", 100) == b"x" * 100
    with pytest.raises(OSError, match="larger"):
        read_small(tmp_path / "small", 99)


# --------------------------------------------------------------------------- templates

HOSTILE = [
    '{{ "x" | center(10**9) }}',
    '{{ "x" * 10**9 }}',
    "{% set n = namespace(x='ab') %}{% for i in range(99) %}{% set n.x = n.x + n.x %}{% endfor %}{{ n.x }}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "{% for a in range(99999) %}{% for b in range(99999) %}" + "x" * 999 + "{% endfor %}{% endfor %}",
    "{{ (messages | string) * 10**8 }}",
]
ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"


@pytest.fixture
def processes():
    made = TemplateProcesses()
    yield made
    made.children.close()


@pytest.mark.slow
@pytest.mark.parametrize("template", HOSTILE)
def test_a_template_that_takes_memory_is_refused(processes, template):
    with pytest.raises(TemplateRefusal, match=r"memory|without end|longer"):
        processes.render(template, {"messages": [{"role": "user", "content": "hello"}]})
    assert processes.render("{{ x }}", {"x": "still here"}) == "still here"


def test_a_template_without_end_costs_its_own_rendering(processes):
    assert processes.render("{{ x }}", {"x": "a"}) == "a"
    with pytest.raises(ChildLost, match="within"):
        processes.render(ENDLESS, {}, 0.5)
    assert processes.render("{{ x }}", {"x": "b"}) == "b"


def test_a_child_that_ended_meanwhile_is_replaced(processes):
    assert processes.render("{{ x }}", {"x": "a"}) == "a"
    [child] = processes.children._idle
    child.process.kill()
    child.process.wait()
    assert processes.render("{{ x }}", {"x": "b"}) == "b"


def test_a_child_ends_with_its_parent(processes):
    processes.render("{{ x }}", {"x": "a"})
    [child] = processes.children._idle
    child.process.stdin.close()
    assert child.process.wait(60) == 0


@pytest.mark.parametrize(
    "template",
    [
        *(QWEN3, QWEN3_THINKING, DEEPSEEK, GLM, HARMONY, demo.TEMPLATE),
        "{{ messages | tojson(indent=2) }}{{ '<a&\"é>' | tojson }}{{ strftime_now('%%') }}",
        "{% set n = namespace(self=1) %}{% set n.x = 2 %}{{ n.x }}{% generation %}a{% endgeneration %}",
        "{% set n = namespace() %}{% set n._x = 2 %}",
        "{{ dict(a=1) | tojson }}{{ dict.fromkeys('ab') }}{{ messages.append(1) }}",
        "{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}{{ m.role }}{% endfor %}",
        "{{ raise_exception('no') }}",
        "{{ messages[0].missing.deeper }}",
        "{{ ''.__class__.__mro__ }}",
        "{% if %}",
    ],
)
@pytest.mark.parametrize("thinking", rest_slow([True, False], True))
def test_the_child_renders_as_transformers_does(processes, template, thinking):
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": {"b": [1, 2.5, None, "é"]}}}
    messages = [
        {"role": "system", "content": "be kind"},
        {"role": "user", "content": " hello <b> 'x'\n"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a", "name": "f", "content": "siskin"},
    ]
    tools = [
        {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}
    ]
    given = {"messages": messages, "tools": tools, "documents": None, "add_generation_prompt": True}
    given["enable_thinking"] = thinking
    try:
        wanted = chat_template_utils._cached_compile_jinja_template(template).render(**given)
    except Exception:
        with pytest.raises(TemplateRefusal):
            processes.render(template, given)
    else:
        assert processes.render(template, given) == wanted


def test_transformers_renders_in_the_child():
    """By the name that it looks up itself."""
    template_process.install()
    [text], _ = chat_template_utils.render_jinja_template(
        conversations=[[{"role": "user", "content": "a"}]],
        chat_template="{{ messages[0].content }}{{ lipsum is defined }}",
    )
    assert text.startswith("a")
    assert template_process.PROCESSES.children._idle
    assert type(chat_template_utils._compile_jinja_template("x")) is template_process._Remote


# --------------------------------------------------------------------------- engines


def failure(daemon: Daemon) -> str:
    answer = daemon.http.post(
        "/v1/chat/completions",
        json={"model": daemon.model, "max_tokens": 1, "messages": [{"role": "user", "content": "a"}]},
    )
    assert answer.status_code >= 400
    return answer.text


@pytest.mark.slow
def test_a_template_without_end_is_no_model(tmp_path, monkeypatch):
    folder = demo_model_with(ENDLESS, tmp_path / "model")
    with Daemon(tmp_path / "home", model=folder, wait=False, wrapper=LIMITED) as daemon:
        assert "chat template can't be used: it did not end" in failure(daemon)


@pytest.mark.slow
def test_a_tokenizer_that_grows_at_load_is_ended(tmp_path):
    """Its normaliser doubles a text forty times, and an added token is normalised when it is read."""
    folder = tmp_path / "model"
    shutil.copytree(demo_model(), folder)
    (folder / "omlxd_demo.json").unlink()
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    double = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}
    tokenizer["normalizer"] = {"type": "Sequence", "normalizers": [double] * 40}
    tokenizer["added_tokens"][0] |= {"normalized": True, "content": "<a>"}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    with Daemon(tmp_path / "home", model=folder, wait=False, wrapper=LIMITED) as daemon:
        text = failure(daemon)
        assert "while it loaded" in text or "beside its model" in text


def test_a_model_that_nobody_has_is_a_sentence_and_no_traceback(tmp_path, monkeypatch, caplog):
    def leave(status: int) -> None:
        raise SystemExit(status)

    folder = demo_model_with("", tmp_path / "model")
    config = json.loads((folder / "config.json").read_text()) | {"model_type": "mamba9"}
    (folder / "config.json").write_text(json.dumps(config))
    monkeypatch.setattr(service.os, "_exit", leave)
    ours, theirs = socket.socketpair()
    load = wire.Load(model_path=str(folder), model_id="m", cache=wire.CacheSettings())
    with ours, theirs:
        with pytest.raises(SystemExit):
            service.EngineService(theirs)._run_engine(load)
        said = wire.FrameDecoder(wire.ToFront).feed(ours.recv(1 << 16))[-1]
    assert isinstance(said, wire.LoadFailed) and said.lasting
    assert said.message.startswith(f"{folder}: neither mlx-lm ")
    assert "'mamba9'; a newer omlxd may have it" in said.message
    assert not [record for record in caplog.records if record.exc_info]


async def test_a_load_that_takes_far_more_than_its_files_say_is_ended(monkeypatch):
    monkeypatch.setattr(watch, "LOAD_SPARE_BYTES", -2 * PROCESS_BYTES + (1 << 20))
    async with engine("--load-s", "300", start=False) as made:
        with pytest.raises(OmlxdError, match="while it loaded; its files need"):
            await asyncio.wait_for(made.load(), 60)


def test_an_engine_that_takes_memory_beside_its_model_says_so_and_ends(monkeypatch):
    ours, theirs = socket.socketpair()
    monkeypatch.setattr(service, "BEYOND_MLX_BYTES", 1 << 20)
    monkeypatch.setattr(service, "BEYOND_MLX_FRACTION", 0.0)
    ends: list[int] = []
    monkeypatch.setattr(service.os, "_exit", ends.append)
    service.EngineService(theirs)._watch_memory()
    [said] = wire.FrameDecoder(wire.ToFront).feed(ours.recv(1 << 16))
    assert isinstance(said, wire.LoadFailed) and "beside its model and KV" in said.message
    assert ends == [5]
    ours.close()
    theirs.close()


async def test_why_a_ready_engine_ended_is_what_it_said_itself():
    async with engine() as made:
        await up(made)
        failed = (await collect(made, "one leave:it-took-5-GB"))[-1]
        assert isinstance(failed, Failed) and "it-took-5-GB" in failed.message
