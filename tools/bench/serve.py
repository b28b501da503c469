"""Time to first token and decode rate through HTTP, beside mlx_lm.server and the bare BatchGenerator.

    python -m tools.bench.serve [--model FOLDER] [--prompt 320] [--rounds 3]

One model, one run, the peers in turn, round after round (A B C A B C …), medians at the end. Rows:

- cold TTFT           a prompt that nobody has seen
- hot TTFT            the same prompt again, but for its last words: all but the end is in RAM
- cold-tier TTFT      the same after the daemon was killed (SIGKILL) and started again
                      BatchGenerator's figure is for just the tokens that omlxd's hit computed, in
                      an empty context: what a hit would cost if restoring were free
- decode at 1, 4, 8   tokens a second over all streams, while all of them decode

TTFT ends with the first byte of the first token on the client's side, so the restored KV is in
memory and has been computed with. Without --model, a random model is built whose decode step takes
at least 20 ms on a laptop CPU. The page cache is warm after the restart (this machine just wrote
the files): the row says so.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx

from tools.bench.rates import Stream, total_rate
from tools.bench.shapes import SHAPES, save

OUTPUT = 32
STREAMS = (1, 4, 8)
DECODE_PROMPT = 64


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Server:
    """A server process and its completions endpoint."""

    def __init__(self, name: str, command: list[str], port: int, model: str, **env: str):
        self.name, self._command, self._port, self._model = name, command, port, model
        self._env = {**os.environ, **env}
        self.url = f"http://127.0.0.1:{port}"
        self.start()

    def start(self) -> None:
        log = open(os.environ.get("BENCH_LOG", os.devnull), "ab")  # noqa: SIM115
        self.process = subprocess.Popen(self._command, stdout=log, stderr=log, env=self._env)
        deadline = time.monotonic() + 120
        while True:
            try:
                asyncio.run(self.ask(["hello there"], 1))
                return
            except (httpx.HTTPError, IndexError):
                if time.monotonic() > deadline or self.process.poll() is not None:
                    raise RuntimeError(f"{self.name} did not start") from None
                time.sleep(0.3)

    async def ask(self, prompts: list[Any], n: int) -> list[Stream]:
        async with httpx.AsyncClient(timeout=900) as client:
            return list(await asyncio.gather(*(self._stream(client, p, n) for p in prompts)))

    async def _stream(self, client: httpx.AsyncClient, prompt: Any, n: int) -> Stream:
        body = {
            "model": self._model,
            "prompt": prompt,
            "max_tokens": n,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        stream = Stream(time.perf_counter())
        async with client.stream("POST", f"{self.url}/v1/completions", json=body) as response:
            response.raise_for_status()
            async for line in response.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                event = json.loads(line[6:])
                if any(choice.get("text") for choice in event.get("choices", ())):
                    stream.times.append(time.perf_counter())
                if usage := event.get("usage"):
                    stream.tokens = usage["completion_tokens"]
                    stream.computed = usage.get("omlxd", {}).get("computed", 0)
        if n > 1 and stream.tokens and stream.tokens < n:
            print(f"  ({self.name}: a stream ended after {stream.tokens} tokens)")
        return stream

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def stop(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.kill()


class Worker:
    """The bare BatchGenerator."""

    def __init__(self, model: str):
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tools.bench.batch_generator_worker", model],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._read()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("the BatchGenerator worker died")
        return json.loads(line)

    def run(self, prompts: list[list[int]], n: int) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"prompts": prompts, "n": n}) + "\n")
        self._process.stdin.flush()
        return self._read()

    def stop(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)


class Bench:
    def __init__(self, model: Path, prompt: int, cache: Path, tokenizer: Any):
        self._length = prompt
        self._rng = random.Random(1)
        self._tokenizer = tokenizer
        self.rows: dict[str, dict[str, list[float]]] = {}
        port, peer_port = free_port(), free_port()
        serve = [sys.executable, "-m", "omlxd", "serve", "--model", str(model), "--port", str(port)]
        serve += ["--paged-ssd-cache-dir", str(cache), "--log-level", "warning"]
        self.ours = Server("omlxd", serve, port, model.name)
        peer = [sys.executable, "-m", "mlx_lm", "server", "--model", str(model), "--port", str(peer_port)]
        self.peer = Server("mlx_lm.server", peer, peer_port, str(model))
        self.worker = Worker(str(model))
        self.worker.run([[5, 6, 7]], 2)

    def text(self, length: int) -> str:
        """New text of about `length` tokens: mlx_lm.server takes no token ids."""
        return self._tokenizer.decode([self._rng.randrange(300, 3000) for _ in range(length)])

    def tokens(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text))

    def note(self, row: str, who: str, value: float) -> None:
        self.rows.setdefault(row, {}).setdefault(who, []).append(value)

    def first(self, row: str, server: Server, text: str) -> Stream:
        # A few tokens, since the first may have no text of its own.
        stream = asyncio.run(server.ask([text], 6))[0]
        self.note(row, server.name, stream.ttft * 1000)
        return stream

    def round(self) -> None:
        head, tail = self.text(self._length), [self.text(30) for _ in range(3)]
        for server in (self.ours, self.peer):
            self.first("cold TTFT, ms", server, head + tail[0])
        cold = self.worker.run([self.tokens(head + tail[0])], 2)
        self.note("cold TTFT, ms", "BatchGenerator", cold["ttft"][0] * 1000)
        hot = self.first("hot TTFT, ms", self.ours, head + tail[1])
        self.first("hot TTFT, ms", self.peer, head + tail[1])
        rest = self.tokens(head + tail[1])[-hot.computed :]
        alone = self.worker.run([rest], 2)
        self.note("hot TTFT, ms", "BatchGenerator", alone["ttft"][0] * 1000)
        self.ours.kill()
        self.ours.start()
        self.first("cold-tier TTFT after kill -9, ms", self.ours, head + tail[2])
        for streams in STREAMS:
            texts = [self.text(DECODE_PROMPT) for _ in range(streams)]
            row = f"decode at {streams}, tok/s"
            for server in (self.ours, self.peer):
                asyncio.run(server.ask(texts, 2))  # prefilled, so that the streams start together
                self.note(row, server.name, total_rate(asyncio.run(server.ask(texts, OUTPUT))))
            self.note(row, "BatchGenerator", self.worker.run([self.tokens(t) for t in texts], OUTPUT)["rate"])

    def close(self) -> None:
        self.ours.stop()
        self.peer.stop()
        self.worker.stop()

    def report(self) -> None:
        names = ("omlxd", "mlx_lm.server", "BatchGenerator")
        print(f"{'median':36}" + "".join(f"{n:>16}" for n in names) + f"{'ours/server':>13}{'ours/bare':>11}")
        middle = {r: {n: statistics.median(v) for n, v in by.items()} for r, by in self.rows.items()}
        for row, by in middle.items():
            cells = "".join(f"{by[n]:16.1f}" if n in by else f"{'':16}" for n in names)
            ratios = [f"{by['omlxd'] / by[n]:.3f}" if n in by else "" for n in names[1:]]
            print(f"{row:36}{cells}{ratios[0]:>13}{ratios[1]:>11}")
        print("BatchGenerator's hot TTFT is that of the uncached rest alone, in an empty context.")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", type=Path)
    parser.add_argument("--prompt", type=int, default=320, help="tokens")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="omlxd-bench-") as temp:
        model = options.model or Path(temp) / "bench-model"
        if not options.model:
            save(SHAPES["cpu"], model)
        from mlx_lm.utils import load_tokenizer

        tokenizer = load_tokenizer(model)
        bench = Bench(model, options.prompt, Path(temp) / "cache", tokenizer)
        try:
            for index in range(options.rounds):
                bench.round()
                print(f"round {index + 1} of {options.rounds} done", flush=True)
        finally:
            bench.close()
        bench.report()


if __name__ == "__main__":
    main()
