"""Time to first token and decode rate through HTTP, beside mlx_lm.server and the bare BatchGenerator.

    python -m tools.bench.serve [--model FOLDER] [--prompt 320[,4096…]] [--streams 1,4,8] [--output 32]
                                [--rounds 3] [--peers omlxd,mlx_lm.server,BatchGenerator] [--one-at-a-time]
                                [--before CHECKOUT] [--peer-prompt 2,34]

One model, one run, the peers in turn, round after round (A B C A B C …), medians at the end; with
--one-at-a-time all of a peer's rounds and then the next's (A A B B C C), for memory that does not hold
several copies of the model. --before adds another checkout of omlxd (`git worktree add`), run by the
same Python, as a peer named `before`. Every peer gets the same texts. --peer-prompt gives mlx-lm's peers
shorter prompts, where theirs would take hours (4 bits on a CPU). Rows:

- cold TTFT           a prompt that nobody has seen; `prefill` is its tokens divided by that time
- hot TTFT            the same prompt again, but for its last words: all but the end is in RAM
- cold-tier TTFT      the same after the daemon was killed (SIGKILL, once nothing more was being
                      written) and started again
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
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

import httpx

from tools.bench.rates import Stream, total_rate
from tools.bench.shapes import SHAPES, save
from tools.replay import Request, prepared

DECODE_PROMPT = 64
START_S = 600.0
"""A large model is read from a slow disk."""

UNKNOWN_S = 30.0
"""A server that still answers 404 then will never have the model."""

PROMPT_PARTS = "prompt_tokens", "input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens"
TEXTS = "content", "reasoning_content", "text", "thinking", "partial_json"

PEERS = OURS, SERVER, BARE = "omlxd", "mlx_lm.server", "BatchGenerator"
BEFORE = "before"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def settle(folder: Path, quiet_s: float = 1.0, at_most_s: float = 60.0) -> None:
    """Wait until no file has come for a while."""
    deadline, seen, since = time.monotonic() + at_most_s, -1, time.monotonic()
    while time.monotonic() < deadline and time.monotonic() - since < quiet_s:
        count = sum(1 for _ in folder.rglob("*.safetensors"))
        if count != seen:
            seen, since = count, time.monotonic()
        time.sleep(0.1)


class Server:
    """A server process; it is asked for completions, or for an answer to messages.

    cache     its folder of blocks, if it is omlxd
    checkout  of omlxd, if it is another than this one
    probe     what it is asked for until it answers
    """

    def __init__(
        self,
        name: str,
        command: list[str],
        port: int,
        model: str,
        cache: Path | None = None,
        checkout: Path | None = None,
        env: Mapping[str, str] | None = None,
        probe: Any = "hello there",
    ):
        self.name, self._command, self._port, self._model = name, command, port, model
        self.cache, self._checkout, self._probe = cache, checkout, probe
        self._env = {**os.environ, **(env or {}), **({"PYTHONPATH": str(checkout)} if checkout else {})}
        self.url = f"http://127.0.0.1:{port}"
        self.start()

    def start(self) -> None:
        log = open(os.environ.get("BENCH_LOG", os.devnull), "ab")  # noqa: SIM115
        self.process = subprocess.Popen(
            self._command, stdout=log, stderr=log, env=self._env, cwd=self._checkout
        )
        began = time.monotonic()
        while True:
            try:
                asyncio.run(self.ask([self._probe], 1))
                return
            except (httpx.HTTPError, IndexError) as error:
                waited, answer = time.monotonic() - began, getattr(error, "response", None)
                unknown = waited > UNKNOWN_S and answer is not None and answer.status_code == 404
                if unknown or waited > START_S or self.process.poll() is not None:
                    self.stop()
                    problem = f"has no model {self._model}" if unknown else "did not start"
                    raise RuntimeError(f"{self.name} {problem}") from None
                time.sleep(0.3)

    def ttft(self, prompt: Any, n: int = 6) -> float:
        """Seconds to the first text; a few tokens are asked for, since the first may have none."""
        return asyncio.run(self.ask([prompt], n))[0].ttft

    async def ask(self, prompts: list[Any], n: int) -> list[Stream]:
        """A prompt is text, token ids, messages, or a request of a trace."""
        async with httpx.AsyncClient(timeout=900) as client:
            return list(await asyncio.gather(*(self._stream(client, p, n) for p in prompts)))

    async def _stream(self, client: httpx.AsyncClient, prompt: Any, n: int) -> Stream:
        url, headers, body = self._asked(prompt, n)
        stream = Stream(time.perf_counter())
        async with client.stream("POST", url, json=body, headers=headers) as response:
            response.raise_for_status()
            async for line in response.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                event = json.loads(line[6:])
                if "error" in event:
                    raise RuntimeError(f"{self.name}: {event['error']}")
                if piece := "".join(map(_text_of, event.get("choices") or [event])):
                    stream.times.append(time.perf_counter())
                    stream.text += piece
                if usage := event.get("usage"):
                    stream.tokens = usage.get("completion_tokens") or usage["output_tokens"]
                    stream.prompt = sum(usage.get(part) or 0 for part in PROMPT_PARTS)
                    stream.computed = usage.get("omlxd", {}).get("computed", 0)
        if n > 1 and stream.tokens and stream.tokens < n:
            print(f"  ({self.name}: a stream ended after {stream.tokens} tokens)")
        return stream

    def _asked(self, prompt: Any, n: int) -> tuple[str, dict[str, str], dict[str, Any]]:
        """URL, headers and body."""
        if isinstance(prompt, Request):
            sent = prepared(prompt, self._model, n)
            return self.url + sent.path, sent.headers, {**sent.body, "temperature": 0}
        chat = isinstance(prompt, list) and isinstance(prompt[0], dict)
        body = {
            "model": self._model,
            "messages" if chat else "prompt": prompt,
            "max_tokens": n,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        return f"{self.url}/v1/{'chat/' if chat else ''}completions", {}, body

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def stop(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.kill()


def _text_of(choice: dict[str, Any]) -> str:
    """Of a choice, or of an event of /v1/messages."""
    delta = choice.get("delta") or {}
    return choice.get("text") or next((delta[kind] for kind in TEXTS if delta.get(kind)), "")


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


Maker = Callable[[], "Server | Worker"]


class Bench:
    """`sizes`: prompt lengths, tokens. `streams`: rows decoding together, `output` tokens each.

    home        folder for caches
    before      another checkout of omlxd, or None
    peer_sizes  of mlx-lm's peers, or None: the same
    """

    def __init__(
        self,
        model: Path,
        sizes: Seq[int],
        streams: Seq[int],
        output: int,
        home: Path,
        tokenizer: Any,
        before: Path | None = None,
        peer_sizes: Seq[int] | None = None,
    ):
        self._sizes, self._streams, self._output = sizes, streams, output
        self._peer_sizes = peer_sizes or sizes
        self._tokenizer = tokenizer
        self.rows: dict[str, dict[str, list[float]]] = {}
        self._computed: dict[str, int] = {}
        peer_port = free_port()

        def daemon(name: str, checkout: Path | None = None) -> Server:
            port, cache = free_port(), home / name
            serve = [sys.executable, "-m", "omlxd", "serve", "--model", str(model), "--port", str(port)]
            serve += ["--paged-ssd-cache-dir", str(cache), "--log-level", "warning"]
            serve += ["--max-concurrent-requests", str(max(*streams, 8))]
            return Server(name, serve, port, model.name, cache, checkout)

        peer = [sys.executable, "-m", "mlx_lm", "server", "--model", str(model), "--port", str(peer_port)]
        self.makers: dict[str, Maker] = {
            OURS: lambda: daemon(OURS),
            BEFORE: lambda: daemon(BEFORE, before),
            SERVER: lambda: Server(SERVER, peer, peer_port, str(model)),
            BARE: lambda: Worker(str(model)),
        }

    def text(self, length: int, *seed: object) -> str:
        """Text of about `length` tokens, the same for the same seed: mlx_lm.server takes no token ids."""
        rng = random.Random(repr(seed))
        return self._tokenizer.decode([rng.randrange(300, 3000) for _ in range(length)])

    def tokens(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text))

    def note(self, row: str, who: str, value: float) -> None:
        self.rows.setdefault(row, {}).setdefault(who, []).append(value)

    def first(self, row: str, server: Server, text: str) -> int:
        """Note a TTFT; returns prompt tokens computed."""
        stream = asyncio.run(server.ask([text], 6))[0]
        self.note(row, server.name, stream.ttft * 1000)
        return stream.computed

    def _sizes_of(self, peer: Server | Worker) -> Seq[int]:
        return self._sizes if isinstance(peer, Server) and peer.cache else self._peer_sizes

    def _note_prefill(self, cold: str, who: str, text: str) -> None:
        self.note("prefill, tok/s", who, len(self.tokens(text)) / self.rows[cold][who][-1] * 1000)

    def round(self, index: int, peer: Server | Worker) -> None:
        self._warm(peer, index)
        for size in self._sizes_of(peer):
            self._cold_and_hot(index, size, peer)
        if isinstance(peer, Server) and peer.cache:
            settle(peer.cache)
            peer.kill()
            peer.start()
            self._warm(peer, index)
            for size in self._sizes:
                text = self.text(size, index) + self.text(30, index, "third")
                computed = self.first(f"{size}: cold-tier TTFT after kill -9, ms", peer, text)
                print(f"  {size} tokens: {self._computed[f'{size}.{index}']} computed hot, {computed} cold")
        for streams in self._streams:
            length = min(DECODE_PROMPT, *self._sizes, *self._peer_sizes)
            texts = [self.text(length, index, streams, i) for i in range(streams)]
            row = f"decode at {streams}, tok/s"
            if isinstance(peer, Worker):
                self.note(row, BARE, peer.run([self.tokens(t) for t in texts], self._output)["rate"])
                continue
            asyncio.run(peer.ask(texts, 2))  # prefilled, so that the streams start together
            self.note(row, peer.name, total_rate(asyncio.run(peer.ask(texts, self._output))))

    def _warm(self, peer: Server | Worker, index: int) -> None:
        """The first pass of a process loads kernels: not what is measured here."""
        text = self.text(min(300, *self._sizes_of(peer)), "warm", index)
        if isinstance(peer, Worker):
            peer.run([self.tokens(text)], 2)
        else:
            asyncio.run(peer.ask([text], 2))

    def _cold_and_hot(self, index: int, size: int, peer: Server | Worker) -> None:
        cold, hot = f"{size}: cold TTFT, ms", f"{size}: hot TTFT, ms"
        head = self.text(size, index)
        texts = [head + self.text(30, index, which) for which in ("first", "second")]
        if isinstance(peer, Worker):
            self.note(cold, BARE, peer.run([self.tokens(texts[0])], 2)["ttft"][0] * 1000)
            self._note_prefill(cold, BARE, texts[0])
            if size in self._sizes:
                computed = self._computed.get(f"{size}.{index}", 30)
                alone = peer.run([self.tokens(texts[1])[-computed:]], 2)
                self.note(hot, BARE, alone["ttft"][0] * 1000)
            return
        self.first(cold, peer, texts[0])
        self._note_prefill(cold, peer.name, texts[0])
        if size not in self._sizes:
            return
        computed = self.first(hot, peer, texts[1])
        if peer.name == OURS:
            self._computed[f"{size}.{index}"] = computed

    def report(self) -> None:
        names = [name for name in (*PEERS, BEFORE) if any(name in by for by in self.rows.values())]
        others = [name for name in names if name != OURS]
        print(f"{'median':36}" + "".join(f"{n:>16}" for n in [*names, *(f"/{n}" for n in others)]))
        middle = {r: {n: statistics.median(v) for n, v in by.items()} for r, by in self.rows.items()}
        for row, by in middle.items():
            cells = "".join(f"{by[n]:16.1f}" if n in by else f"{'':16}" for n in names)
            ratios = [f"{by[OURS] / by[n]:.3f}" if n in by and OURS in by else "" for n in others]
            print(f"{row:36}{cells}" + "".join(f"{ratio:>16}" for ratio in ratios))
        print("A column /PEER is omlxd's figure divided by that peer's.")
        print("BatchGenerator's hot TTFT is that of the uncached rest alone, in an empty context.")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", type=Path)
    parser.add_argument("--prompt", default="320", help="tokens; several: 4096,16384")
    parser.add_argument("--peer-prompt", help="tokens for mlx-lm's peers; default: as --prompt")
    parser.add_argument("--streams", default="1,4,8")
    parser.add_argument("--output", type=int, default=32, help="tokens a stream, when decoding")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--peers", default=",".join(PEERS))
    parser.add_argument("--one-at-a-time", action="store_true")
    parser.add_argument("--before", type=Path, help="another checkout of omlxd to measure beside this one")
    options = parser.parse_args()
    peer_prompt = options.peer_prompt or options.prompt
    sizes, streams, peer_sizes = (
        [int(n) for n in text.split(",")] for text in (options.prompt, options.streams, peer_prompt)
    )
    with tempfile.TemporaryDirectory(prefix="omlxd-bench-") as temp:
        model = options.model or Path(temp) / "bench-model"
        if not options.model:
            save(SHAPES["cpu"], model)
        from mlx_lm.utils import load_tokenizer

        tokenizer = load_tokenizer(model)
        bench = Bench(
            model, sizes, streams, options.output, Path(temp), tokenizer, options.before, peer_sizes
        )
        names: list[str] = [*options.peers.split(","), *([BEFORE] if options.before else [])]
        try:
            for group in [[name] for name in names] if options.one_at_a_time else [names]:
                measure(bench, group, options.rounds)
        finally:
            bench.report()


def measure(bench: Bench, names: Seq[str], rounds: int) -> None:
    """Start these peers, and measure them in turn."""
    running: list[Server | Worker] = []
    try:
        running += [bench.makers[name]() for name in names]
        for index in range(rounds):
            for peer in running:
                bench.round(index, peer)
            print(f"{', '.join(names)}: round {index + 1} of {rounds} done", flush=True)
    finally:
        for peer in running:
            peer.stop()


if __name__ == "__main__":
    main()
