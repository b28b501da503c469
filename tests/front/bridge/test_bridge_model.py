"""`omlxd engine` over a real model: the cache, killed and stopped in order, and labels."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path

import mlx.core as mx
import pytest
from daemon import BLOCK, NO_END, demo_model, prose, restored, wait_until
from engine_lines import EngineLines, Line


def engine(home: Path, *flags: str) -> EngineLines:
    return EngineLines(home, "--model", str(demo_model()), *flags, stub=None)


def ask(lines: EngineLines, *texts: str, **more: object) -> tuple[str, Line]:
    """The answer to a conversation, and its usage."""
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]
    fields = {"max_tokens": 8, "temperature": 0, "enable_thinking": False, **more}
    id = lines.send("chat", messages=messages, **fields)
    done = lines.last(id)
    assert done["type"] == "done", done
    usage = done["usage"]
    cached = usage["cached_hot"] + usage["cached_cold"]
    assert usage["prompt_tokens"] == cached + usage["computed"]
    first = next(line for line in lines.heard if line["id"] == id)
    assert first == {"type": "progress", "id": id, "prefilled": cached, "total": usage["prompt_tokens"]}
    return lines.text(id), usage


def settled(lines: EngineLines) -> None:
    """Return once nothing is on its way to disk."""

    def none_left() -> bool:
        metrics = lines.ask("metrics")
        values = metrics["model"]["values"]
        left = values.get("kv_unwritten_blocks", 1) + values.get("kv_store_queue_bytes", 1)
        return not left and metrics["cold"]["files"] > 0

    wait_until(none_left, why=lines.logged)


LONG = prose(200)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineLines]:
    with engine(tmp_path_factory.mktemp("shared")) as lines:
        yield lines


@pytest.mark.slow
def test_the_cache_outlives_a_kill(tmp_path: Path):
    with engine(tmp_path) as lines:
        text, usage = ask(lines, LONG)
        assert usage["cached_hot"] == usage["cached_cold"] == 0 < usage["computed"]
        again, usage = ask(lines, LONG)
        whole = (usage["prompt_tokens"] - 1) // BLOCK * BLOCK
        assert again == text and usage["cached_hot"] == whole
        assert usage["cached_cold"] == 0
        settled(lines)
        lines.process.kill()
        lines.process.wait()
    with engine(tmp_path) as lines:
        after, usage = ask(lines, LONG)
        assert after == text and restored(usage) == whole


slow = pytest.mark.slow


@pytest.mark.slow
@pytest.mark.parametrize(
    "end", ["quit", pytest.param("end of input", marks=slow), pytest.param("SIGTERM", marks=slow)]
)
def test_its_end_in_order_stores_what_is_still_in_memory(tmp_path: Path, end: str):
    with engine(tmp_path, "--hot-cache-write", "back") as lines:
        text, usage = ask(lines, LONG)
        if end == "quit":
            lines.send("quit")
        elif end == "SIGTERM":
            lines.process.terminate()
        else:
            lines.stdin.close()
        assert lines.ended() == 0 and lines.heard[-1]["type"] == "bye"
    with engine(tmp_path) as lines:
        again, usage = ask(lines, LONG)
        assert again == text and restored(usage) == (usage["prompt_tokens"] - 1) // BLOCK * BLOCK


def test_labels_are_as_likely_as_the_answer_s_own_tokens_say(shared: EngineLines):
    lines = shared
    prompt = LONG + " is"
    id = lines.send("generate", prompt=prompt, max_tokens=1, temperature=0, logprobs=20)
    lines.last(id)
    (delta,) = [line for line in lines.heard if line["id"] == id and "logprobs" in line]
    tops = {top["token"]: top["logprob"] for top in delta["logprobs"][0]["top_logprobs"]}
    words = [token for token in tops if token[0] == " " and token[1:].isalpha()]
    two = words[0] + words[1]
    found = lines.ask("classify", prompt=prompt, labels=[two, *words], logits=True, top_logprobs=20)
    assert {top["token"]: top["logprob"] for top in found["top_logprobs"]}.keys() == tops.keys()
    scores = found["scores"]
    assert [score["label"] for score in scores] == [two, *words]
    assert [score["tokens"] for score in scores] == [2] + [1] * len(words)
    for score in scores[1:]:
        assert math.isclose(score["logprob"], tops[score["label"]], abs_tol=1e-3)
    assert scores[0]["logprob"] < scores[1]["logprob"]
    assert found["best"] == max(scores, key=lambda score: score["logprob"])["label"]
    assert math.isclose(sum(score["share"] for score in scores), 1.0)
    first, second = scores[1:3]
    assert math.isclose(first["logit"] - second["logit"], first["logprob"] - second["logprob"], abs_tol=1e-3)
    assert found["usage"]["completion_tokens"] == 0
    assert found["usage"]["cached_hot"] == (found["usage"]["prompt_tokens"] - 1) // BLOCK * BLOCK
    # A conversation's answer begins at once, thinking or not, and a control token is none.
    messages = [{"role": "user", "content": "Is the kettle on?"}]
    found = lines.ask("classify", messages=messages, labels=["yes", "no", "the kettle is on"])
    assert found["type"] == "classified" and "logit" not in found["scores"][0]
    assert found["scores"][2]["tokens"] > 1 and "top_logprobs" not in found
    bad = lines.ask("classify", messages=messages, labels=["yes", "<|im_end|>"])
    assert bad["code"] == "invalid_request" and "<|im_end|>" in bad["message"]
    thinks = lines.ask("classify", messages=messages, labels=["yes"], enable_thinking=True)
    assert thinks["code"] == "invalid_request" and "thinking" in thinks["message"]


def test_a_prompt_is_inspected_as_over_http(shared: EngineLines):
    found = shared.ask("inspect", prompt=LONG, values=True, query=-1)
    assert found["type"] == "inspected" and found["tokens"] > BLOCK
    arrays = mx.load(found["file"])
    for layer in found["layers"]:
        keys = arrays[f"{layer['layer']}.keys"]
        assert keys.shape == (layer["keys"]["kv_heads"], found["tokens"], layer["keys"]["dim"])
        assert arrays[f"{layer['layer']}.values"].shape[1] == found["tokens"] and all(layer["entropy"])
    for wrong, param in (
        ({"prompt": LONG, "query": 9000}, "query"),
        ({}, "prompt"),
        ({"prompt": [1], "values": 5}, "values"),
    ):
        bad = shared.ask("inspect", **wrong)
        assert bad["code"] == "invalid_request" and bad["param"] == param, bad
    several = shared.ask("inspect", prompt=["one", "two"])
    assert several["code"] == "invalid_request" and "one answer" in several["message"]
    assert shared.ask("inspect", prompt=LONG, model="nobody")["code"] == "not_found"
    assert list(Path(found["file"]).parent.iterdir()) == [Path(found["file"])]


def test_thinking_is_told_apart_and_a_call_is_whole(shared: EngineLines):
    tool = {
        "type": "function",
        "function": {
            "name": "read",
            "strict": True,
            "parameters": {
                "type": "object",
                "properties": {"much": {"type": "boolean"}},
                "required": ["much"],
                "additionalProperties": False,
            },
        },
    }
    lines = shared
    messages = [{"role": "user", "content": "Read it."}]
    id = lines.send("chat", messages=messages, max_tokens=6, temperature=0, enable_thinking=True)
    done = lines.last(id)
    assert done["usage"]["reasoning_tokens"] > 0
    assert any(line.get("reasoning") for line in lines.heard if line["id"] == id)
    more = {"tools": [tool], "tool_choice": "required", "enable_thinking": False}
    id = lines.send("chat", messages=messages, temperature=0, max_tokens=60, **more)
    assert lines.last(id)["reason"] == "tool_calls"
    (call, *_) = [line for line in lines.heard if line["id"] == id and line["type"] == "tool_call"]
    assert call["name"] == "read" and json.loads(call["arguments"]).keys() == {"much"}
    assert call["call_id"] and "cut" not in call


def test_two_at_once_and_one_of_them_cancelled(shared: EngineLines):
    lines = shared
    long = lines.send("generate", prompt="The kettle", max_tokens=100_000, temperature=0, logit_bias=NO_END)
    lines.until(lambda line: line["id"] == long and line["type"] == "delta")
    short = lines.send("generate", prompt="The kettle", max_tokens=4)
    assert lines.last(short)["reason"] in ("length", "stop")
    assert not any(line["type"] == "done" for line in lines.heard if line["id"] == long)
    assert lines.ask("cancel", target=long)["found"] is True
    assert lines.last(long)["reason"] == "cancelled"

    def none_runs() -> bool:
        return lines.ask("metrics")["model"]["values"]["num_requests_running"] == 0

    wait_until(none_runs, why=lines.logged)
