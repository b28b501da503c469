"""tools/replay.py against the real app and an engine that reuses prefixes as it is told to."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import sys
from pathlib import Path

import numpy as np
import pytest
from fake_engine import FakeEngine, app_of, served
from mlx_lm.tokenizer_utils import load as load_tokenizer

from omlxd.chat import Finished, TextDelta, Usage
from omlxd.engine.prompt.pipeline import PromptPipeline
from omlxd.models import demo

ROOT = Path(__file__).parents[2]
TRACES = Path(os.environ.get("OMLXD_TRACES", ROOT.parent / "shared" / "traces"))

spec = importlib.util.spec_from_file_location("replay", ROOT / "tools" / "replay.py")
assert spec and spec.loader
replay = importlib.util.module_from_spec(spec)
sys.modules["replay"] = replay
spec.loader.exec_module(replay)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return demo.build_demo(tmp_path_factory.mktemp("models") / "demo")


class PrefixEngine(FakeEngine):
    """Counts as an engine with a cache of `block`-token blocks would; `forget` of them each time."""

    def __init__(self, folder: Path, block: int = 64, forget: int = 0):
        super().__init__()
        self.prompts = PromptPipeline(load_tokenizer(folder))
        self.seen: list[np.ndarray] = []
        self.block, self.forget = block, forget

    async def generate(self, request):
        tokens = np.array(self.prompts.render(request.prompt).tokens)
        shared = max((replay.common_prefix(tokens, seen) for seen in self.seen), default=0)
        blocks = max(min(shared, len(tokens) - 1) // self.block - self.forget, 0)
        self.seen.append(tokens)
        self.requests.append(request)
        yield TextDelta("a")
        cold = blocks // 2 * self.block
        usage = Usage(len(tokens), blocks * self.block - cold, cold, 1, 0, 0.5)
        yield Finished("length", usage)


def body(*texts: str) -> dict:
    messages = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]
    return {"model": "claude-x", "max_tokens": 32000, "messages": messages, "system": demo.PROSE}


def trace(path: Path, *bodies: dict, url: str = "/v1/messages?beta=true") -> Path:
    lines = [{"turn": f"t{i}", "path": url, "headers": {}, "body": b} for i, b in enumerate(bodies)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


async def run(engine: FakeEngine, *arguments: object) -> int:
    async with served(app_of(engine)) as url:
        return await asyncio.to_thread(replay.main, [*map(str, arguments), "--url", url])


TURNS = (body("Hello"), body("Hello", "Hi.", demo.PROSE), body("Hello", "Hi.", demo.PROSE, "Yes.", "Go"))


async def test_a_good_cache_passes(folder, tmp_path, capsys):
    engine = PrefixEngine(folder)
    path = trace(tmp_path / "trace.jsonl", *TURNS)
    assert await run(engine, path, "--model-path", folder) == 0
    head, *rows, last = capsys.readouterr().out.splitlines()
    assert head.split() == ["turn", "prompt", "ideal", "hot", "cold", "computed", "lost", "TTFT", "s"]
    assert [row.split()[0] for row in rows] == ["t0", "t1", "t2"]
    for row, tokens in zip(rows, engine.seen, strict=True):
        prompt, ideal, hot, cold, computed, lost = map(int, row.split()[1:7])
        assert prompt == len(tokens) == hot + cold + computed
        assert lost == ideal - hot - cold
        assert row.split()[7] == "0.500"
    assert int(rows[0].split()[2]) == 0 < int(rows[1].split()[2]) < int(rows[2].split()[2])
    assert last.startswith("PASS: 3 turns") and "lost" in last
    # What went out was short, and otherwise as recorded.
    assert all(request.sampling.max_tokens == 1 for request in engine.requests)


async def test_a_cache_that_loses_two_blocks_fails(folder, tmp_path, capsys):
    path = trace(tmp_path / "trace.jsonl", *TURNS)
    assert await run(PrefixEngine(folder, forget=2), path, "--model-path", folder) == 1
    assert capsys.readouterr().out.splitlines()[-1].startswith("FAIL: 3 turns")


async def test_state_counts_earlier_runs(folder, tmp_path, capsys):
    path, state = trace(tmp_path / "trace.jsonl", *TURNS), tmp_path / "state"
    arguments = (path, "--model-path", folder, "--state", state)
    engine = PrefixEngine(folder)
    assert await run(engine, *arguments) == 0
    assert await run(engine, *arguments) == 0
    first_again = capsys.readouterr().out.splitlines()[6]
    assert first_again.split()[0] == "t0"
    prompt, ideal = map(int, first_again.split()[1:3])
    assert ideal == prompt - 1
    # Another daemon that knows nothing of it fails.
    assert await run(PrefixEngine(folder), *arguments) == 1


async def test_a_synthetic_session_passes_with_a_good_cache_and_fails_with_a_bad_one(folder, capsys):
    arguments = ("--synthetic", 4, "--model-path", folder, "--least-hits", 80)
    assert await run(PrefixEngine(folder), *arguments) == 0
    rows = capsys.readouterr().out.splitlines()
    assert [row.split()[1] for row in rows[1:5]] == ["0", "1", "2", "3"] and rows[-1].startswith(
        "PASS: 4 turns"
    )
    assert all(int(row.split()[3]) > 0.8 * int(row.split()[2]) for row in rows[2:5])
    assert await run(PrefixEngine(folder, forget=2), *arguments) == 1
    assert await run(PrefixEngine(folder), *arguments[:-1], 99.9) == 1
    assert replay.synthetic(3) == replay.synthetic(3)
    for bad in ([], ["--synthetic", "0"], ["--synthetic", "many"]):
        with pytest.raises(SystemExit):
            replay.main(bad)


async def test_openai_traffic(folder, tmp_path):
    messages = [{"role": "system", "content": demo.PROSE}, {"role": "user", "content": "Hi"}]
    path = trace(tmp_path / "t", {"messages": messages}, {"messages": messages}, url="/v1/chat/completions")
    assert await run(PrefixEngine(folder), path, "--model-path", folder) == 0


async def test_responses_traffic(folder, tmp_path):
    first = {"instructions": demo.PROSE, "input": "Hi", "max_output_tokens": 900}
    more = [
        {"role": "user", "content": "Hi"},
        {"type": "function_call", "call_id": "c", "name": "read", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "text"},
    ]
    path = trace(tmp_path / "t", first, {**first, "input": more}, url="/v1/responses")
    engine = PrefixEngine(folder)
    assert await run(engine, path, "--model-path", folder) == 0
    assert [request.sampling.max_tokens for request in engine.requests] == [1, 1]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["missing.jsonl"], "missing.jsonl"),
        (["{elsewhere}", "--model-path", "{folder}"], "/v1/embeddings is none of /v1/messages, "),
        (["{trace}", "--model-path", "/nowhere"], "/nowhere: no such folder"),
        (["{empty}"], "no requests in it"),
        (["{refused}", "--model-path", "{folder}"], "t0: "),
    ],
)
async def test_what_can_not_be_done_is_said(folder, tmp_path, capsys, arguments, said):
    places = {
        "trace": trace(tmp_path / "trace.jsonl", *TURNS),
        "empty": trace(tmp_path / "empty.jsonl"),
        "refused": trace(tmp_path / "refused.jsonl", {**body("Hi"), "messages": []}),
        "elsewhere": trace(tmp_path / "elsewhere.jsonl", body("Hi"), url="/v1/embeddings"),
        "folder": folder,
    }
    assert await run(PrefixEngine(folder), *(a.format(**places) for a in arguments)) == 2
    assert said in capsys.readouterr().err


async def test_another_models_tokenizer_is_noticed(folder, tmp_path, capsys):
    path = trace(tmp_path / "trace.jsonl", *TURNS)
    assert await run(FakeEngine(), path, "--model-path", folder) == 2
    assert "the daemon counts 100 prompt tokens" in capsys.readouterr().err


async def test_no_daemon_is_said(tmp_path, capsys):
    path = trace(tmp_path / "trace.jsonl", *TURNS)
    code = await asyncio.to_thread(replay.main, [str(path), "--url", "http://127.0.0.1:9"])
    assert code == 2 and "/v1/models" in capsys.readouterr().err


@pytest.mark.skipif(not TRACES.is_dir(), reason="no recorded traces here")
@pytest.mark.parametrize("name", ["session", "other_sessions", "subagents"])
async def test_recorded_sessions_extend_turn_by_turn(folder, capsys, name):
    path = TRACES / f"claude_code_{name}.jsonl"
    assert await run(PrefixEngine(folder), path, "--model-path", folder) == 0
    rows = [row.split() for row in capsys.readouterr().out.splitlines()[1:-1]]
    if name == "session":
        for row, before in zip(rows[1:], rows, strict=False):
            assert int(row[2]) == int(before[1])  # the whole prompt before


async def test_several_traces_are_summed_up_one_by_one(folder, tmp_path, capsys):
    paths = [trace(tmp_path / f"{name}.jsonl", *TURNS) for name in ("one", "two")]
    assert await run(PrefixEngine(folder), *paths, "--model-path", folder) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines if "layout" in line] == ["one", "two"]
    assert lines[-1].startswith("PASS: 6 turns")


def test_offline_counts_what_a_layout_lets_be_shared(folder, tmp_path, capsys):
    """A new session in the same folder: its system message behind another question."""
    environment = {"role": "system", "content": demo.PROSE}
    bodies = [body("Hello"), body("Something else")]
    for one in bodies:
        one["messages"].append(environment)
    path = trace(tmp_path / "trace.jsonl", *bodies)
    shared = {}
    for hoist in ("never", "always"):
        arguments = (path, "--offline", "--hoist-system", hoist, "--model-path", folder)
        assert replay.main(list(map(str, arguments))) == 0
        rows = capsys.readouterr().out.splitlines()
        shared[hoist] = int(rows[2].split()[2])
        assert "more" in rows[-1] and int(rows[2].split()[5]) + shared[hoist] == int(rows[2].split()[1])
    assert shared["always"] > shared["never"] + 500
