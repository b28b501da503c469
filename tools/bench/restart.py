"""What a start, a first load, a second one and a long prompt behind a restart take, and where the time goes.

    python -m tools.bench.restart [--shape qwen3-8b] [--model FOLDER] [--tokens 32000] [--restarts 3]
        [--least MS]

A daemon with an empty home (no kernels, no checks, no blocks) loads the model and computes a prompt of so
many tokens; it is killed once nothing more is written, and started again as often as said. The page cache is
warm. Without --model, one of the shape is made (shapes.py).

weights   a process of its own that reads the weights as MLX does, and does nothing else
start     from the spawn of `omlxd serve` to the line that says where it listens
load      from a small request's sending to its first text: all of the engine's load, and 10 ms more
TTFT      of the long prompt, from its sending to its first text; queue, read and prefill are the engine's own

The first and the last daemon note spans of the load, and the last one of the prompt's way
(spans/sitecustomize.py). Those of --least ms or more are printed: when each began and ended, behind the
sending of the small request or of the long one, and the processor time of its thread.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tools.bench.serve import settle
from tools.bench.shapes import SHAPES
from tools.bench.streams import text
from tools.daemon_process import REPO, end_daemon, start_daemon

WEIGHTS = """
import sys, time
import mlx.core as mx
from pathlib import Path
from mlx_lm.utils import load_model
mx.eval(mx.zeros(1) + 1)
began = time.perf_counter()
mx.eval(load_model(Path(sys.argv[1]), lazy=True)[0].parameters())
print(time.perf_counter() - began)
"""

LOAD = """
omlxd.engine.server.service:EngineService._run_engine
omlxd.engine.server.host:load_model
omlxd.engine.mlx_adapter.model.load:read_model
omlxd.engine.mlx_adapter.model.load:_model_and_config
omlxd.engine.mlx_adapter.model.load:load_tokenizer
omlxd.engine.mlx_adapter.cuda.products.products:compile_activations
omlxd.engine.mlx_adapter.cuda.products.products:prepare
omlxd.engine.mlx_adapter.cuda.step.early_compile:begin
omlxd.engine.mlx_adapter.model.load:run_passes
omlxd.engine.mlx_adapter.cuda.step.compiled_step:CompiledStep
omlxd.engine.mlx_adapter.model.checks:share_prefixes
omlxd.engine.mlx_adapter.model.checks:use_own_rows
omlxd.engine.mlx_adapter.cuda.step.warm_up:compiles
omlxd.engine.mlx_adapter.cuda.step.warm_up:attend_unequal
omlxd.engine.mlx_adapter.cuda.compile.kernel_store:remembered
omlxd.engine.mlx_adapter.cuda.compile.kernel_store:code
omlxd.engine.mlx_adapter.cuda.prompt_shapes:check_ahead
omlxd.engine.mlx_adapter.cuda.prompt_shapes:check_products
omlxd.engine.server.host:rehearse
omlxd.engine.server.host:ModelStore
omlxd.engine.server.host:PromptPipeline
"""

PROMPT = """
omlxd.front.http.shell:Shell.__call__
omlxd.front.engines.client:EngineProcess.generate
omlxd.engine.server.service:EngineService._generate
omlxd.engine.prompt.template.template:Renderer.text
omlxd.engine.prompt.token_cache:TokenCache.encode
omlxd.engine.server.new_sequence:hash_blocks
omlxd.engine.schedule.scheduler:Scheduler._admit
omlxd.kv.store:KVStore.extend_match
omlxd.kv.store:KVStore._record_use
omlxd.engine.kvio.reads.cold_reads:ColdReads.begin
omlxd.engine.kvio.reads.restore:Restore._allocate
omlxd.engine.kvio.reads.restore:Restore._fill_next
omlxd.engine.kvio.reads.restore:Restore._join
omlxd.engine.kvio.reads.restore:Restore._settle
omlxd.engine.kvio.reads.cold_reads:ColdReads._promote
omlxd.engine.schedule.forward:PromptPasses.compute_next
omlxd.engine.schedule.scheduler:Scheduler.decode
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--shape", default="qwen3-8b", choices=SHAPES)
    parser.add_argument("--tokens", type=int, default=32_000)
    parser.add_argument("--restarts", type=int, default=3)
    parser.add_argument("--least", type=float, default=1.0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="omlxd-restart-") as folder:
        model = args.model or made(args.shape, Path(folder) / args.shape)
        measure(model.absolute(), args.tokens, args.restarts, args.least, Path(folder))
    return 0


def made(shape: str, folder: Path) -> Path:
    """In a process of its own, which takes as much of the device's memory as it likes."""
    command = [sys.executable, "-m", "tools.bench.shapes", shape, str(folder)]
    subprocess.run(command, check=True, cwd=REPO, stdout=subprocess.DEVNULL)
    return folder


def measure(model: Path, tokens: int, restarts: int, least_ms: float, folder: Path) -> None:
    print("| | start, s | load, s | TTFT, s | queue, s | read, s | prefill, s | from disk |")
    print("|---|---|---|---|---|---|---|---|", flush=True)
    prompt, spans = text(model, tokens, 1), folder / "spans"
    for run in range(restarts + 1):
        watched = run in (0, restarts)
        row, sent = once(model, prompt, folder / "home", spans if watched else None)
        print(f"| {'restart' if run else 'first'} | {' | '.join(row)} |", flush=True)
        if watched:
            show(spans, sent[0], LOAD, least_ms)
        if run == restarts:
            show(spans, sent[1], PROMPT, least_ms)
    command = [sys.executable, "-c", WEIGHTS, str(model)]
    took = subprocess.run(command, check=True, capture_output=True, text=True, cwd=REPO).stdout
    print(f"\nweights alone: {float(took):.2f} s")


def once(model: Path, prompt: str, home: Path, spans: Path | None) -> tuple[list[str], tuple[float, float]]:
    """(the row's figures, when the small request and the long one were sent) of a daemon that is killed."""
    variables: dict[str, str] = {}
    if spans is not None:
        spans.unlink(missing_ok=True)
        variables = {"PYTHONPATH": f"{REPO}:{Path(__file__).parent / 'spans'}", "SPANS_FILE": str(spans)}
        variables["SPANS"] = " ".join((LOAD + PROMPT).split())
    began = time.perf_counter()
    flags = ["--port", "0", "--model", str(model), "--base-path", str(home)]
    daemon, url = start_daemon(home.parent / "log.txt", *flags, **variables)
    try:
        started = time.perf_counter() - began
        small, loaded, _ = ask(url, model.name, "Hello.")
        long, first, own = ask(url, model.name, prompt)
        settle(home / "cache")
        daemon.send_signal(signal.SIGKILL)
        figures = (
            started,
            loaded - small,
            first - long,
            *(own[f"{n}_s"] for n in ("queue", "restore", "prefill")),
        )
        return [*(f"{figure:.3f}" for figure in figures), str(own["cached_cold"])], (small, long)
    except BaseException:
        sys.stderr.write((home.parent / "log.txt").read_text()[-3000:])
        raise
    finally:
        end_daemon(daemon)


def ask(url: str, model: str, prompt: str) -> tuple[float, float, dict[str, Any]]:
    """(when it was sent, when its first text came or else its end, the engine's figures)."""
    body = {"model": model, "messages": [{"role": "user", "content": prompt}], "max_tokens": 16}
    body |= {"temperature": 0, "stream": True, "stream_options": {"include_usage": True}}
    connection = http.client.HTTPConnection(url.partition("//")[2], timeout=600)
    connection.connect()
    sent, first, usage = time.perf_counter(), 0.0, dict[str, Any]()
    connection.request("POST", "/v1/chat/completions", json.dumps(body), {"content-type": "application/json"})
    for line in connection.getresponse():
        if line.startswith(b"data: {"):
            event = json.loads(line[6:])
            said = any(choice["delta"].get("content") for choice in event.get("choices", ()))
            first = first or (time.perf_counter() if said else 0.0)
            usage = event.get("usage") or usage
    connection.close()
    return sent, first or time.perf_counter(), usage["omlxd"]


def show(spans: Path, sent: float, names: str, least_ms: float) -> None:
    """Those of `names` that ended behind `sent`, in milliseconds behind it."""
    rows = [line.split() for line in spans.read_text().splitlines()]
    print("\n   began    ended  took, ms     cpu  thread          span")
    for thread, name, *rest in sorted(rows, key=lambda row: float(row[2])):
        began, ended, cpu = (1000 * float(each) for each in rest[:3])
        if name in names.split() and ended > 1000 * sent and ended - began >= least_ms:
            began, ended = began - 1000 * sent, ended - 1000 * sent
            what = " ".join((name.partition(":")[2], *rest[3:]))
            print(f"{began:8.1f} {ended:8.1f}  {ended - began:8.1f} {cpu:7.1f}  {thread[:14]:14}  {what}")
    print(flush=True)


if __name__ == "__main__":
    os.chdir(REPO)
    sys.exit(main())
