"""Tokens a second through HTTP of several streams at once, of unequal contexts too, beside other servers.

    python -m tools.bench.streams --model FOLDER [--contexts 500 16000 16000,17500,19000,20500 …]
        [--output 300] [--server NAME COMMAND]…

COMMAND may hold {port}, {model} and {home}, an empty folder. Without --server: this checkout's daemon.
The servers run one after the other, with the same texts. Each context is asked for once alone (what it
keeps of that is its own affair), then all streams of a row at once. The rate is that of the time in which
all of them answer: from the last first token to the first last one; `-`: no such time, or an error.
TTFT is the largest of the row.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from tools.bench.serve import free_port

REPO = Path(__file__).resolve().parents[2]
OURS = f"{sys.executable} -m omlxd serve --port {{port}} --model {{model}}"
START_S = 300.0


def text(folder: Path, tokens: int, seed: int) -> str:
    """Words of a token each, by the model's own tokenizer."""
    vocabulary = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    words = sorted(w[1:] for w in vocabulary if w[0] == "Ġ" and w[1:].isascii() and w[1:].isalpha() and w[4:])
    return " " + " ".join(np.random.default_rng(seed).choice(words, tokens))


class Server:
    def __init__(self, command: str, model: Path):
        self.port, self.name, self.home = free_port(), str(model), tempfile.mkdtemp(prefix="streams-")
        words = shlex.split(command.format(port=self.port, model=model, home=self.home))
        env = {**os.environ, "OMLXD_BASE_PATH": self.home}
        log = open(f"{self.home}/log", "ab")  # noqa: SIM115
        self.process = subprocess.Popen(words, env=env, stdout=log, stderr=log, start_new_session=True)
        deadline = time.monotonic() + START_S
        while not asyncio.run(self._answers()):
            if self.process.poll() is not None or time.monotonic() > deadline:
                sys.exit(f"{command} did not start:\n{Path(log.name).read_text(errors='replace')[-2000:]}")
            time.sleep(0.5)

    async def _answers(self) -> bool:
        try:
            answer = httpx.get(f"http://127.0.0.1:{self.port}/v1/models", timeout=60).text
            names = [model["id"] for model in json.loads(answer or '{"data": []}')["data"]]
            self.name = next((name for name in names if Path(name).name == Path(self.name).name), self.name)
            return len((await self.streams(["hello"], 2))[0][0]) > 0
        except httpx.HTTPError:
            return False

    async def streams(self, prompts: list[str], output: int) -> list[tuple[list[float], float]]:
        """Of each: when its texts arrived, and tokens a text. Raises httpx.HTTPError."""
        async with httpx.AsyncClient(timeout=900, limits=httpx.Limits(max_connections=200)) as client:
            return await asyncio.gather(*(self._stream(client, prompt, output) for prompt in prompts))

    async def _stream(self, client: httpx.AsyncClient, prompt: str, output: int) -> tuple[list[float], float]:
        body: dict[str, Any] = {"model": self.name, "prompt": prompt, "max_tokens": output}
        body |= {"temperature": 0, "stream": True, "stream_options": {"include_usage": True}}
        times: list[float] = []
        tokens = 0
        url = f"http://127.0.0.1:{self.port}/v1/completions"
        async with client.stream("POST", url, json=body) as response:
            if response.status_code != 200:
                raise httpx.RemoteProtocolError((await response.aread()).decode(errors="replace")[:300])
            async for line in response.aiter_lines():
                event = json.loads(line[6:]) if line.startswith("data: {") else {}
                if any(choice.get("text") for choice in event.get("choices") or ()):
                    times.append(time.perf_counter())
                tokens = (event.get("usage") or {}).get("completion_tokens", tokens)
        return times, max(1.0, tokens / max(1, len(times)))

    def stop(self) -> None:
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def measure(server: Server, prompts: list[str], output: int) -> tuple[float, float, float]:
    """(tokens a second over all streams, largest TTFT, largest gap), in seconds; NaN: no time in common."""
    for prompt in prompts:
        asyncio.run(server.streams([prompt], 1))
    began = time.perf_counter()
    rows = asyncio.run(server.streams(prompts, output))
    if not all(times for times, _ in rows):
        raise ValueError("a stream ended without any text")
    first, last = max(times[0] for times, _ in rows), min(times[-1] for times, _ in rows)
    shared = sum(each * sum(first <= at <= last for at in times) for times, each in rows)
    rate = shared / (last - first) if last > first else float("nan")
    return rate, first - began, max(b - a for times, _ in rows for a, b in pairwise(times))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--contexts", nargs="+", default=["500", "16000", "16000,17500,19000,20500"])
    parser.add_argument("--output", type=int, default=300)
    parser.add_argument("--server", nargs=2, action="append", metavar=("NAME", "COMMAND"))
    options = parser.parse_args()
    print("| server | streams | contexts | tok/s | TTFT s | largest gap s |\n|" + "---|" * 6)
    for name, command in options.server or [("omlxd", OURS)]:
        server = Server(command, options.model)
        for number, row in enumerate(options.contexts):
            lengths = [int(length) for length in row.split(",")]
            prompts = [text(options.model, n, 1000 * number + i) for i, n in enumerate(lengths)]
            try:
                cells = [f"{x:.3g}" for x in measure(server, prompts, options.output)]
            except (httpx.HTTPError, ValueError) as error:
                cells = [f"- ({error})"[:200], "-", "-"]
            span = f"{min(lengths)} to {max(lengths)}"
            print("|", " | ".join([name, str(len(lengths)), span, *cells]), "|", flush=True)
        server.stop()


if __name__ == "__main__":
    main()
