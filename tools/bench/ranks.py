"""One model on several ranks of this machine, beside the same on one, and beside mlx_lm.server on as many.

    python -m tools.bench.ranks [--shape tiny | --model FOLDER] [--ranks 2] [--prompt 16000] [--output 200]
        [--streams 1 4] [--agents 4] [--grow 8000+1000+1000] [--bound SECONDS]
        [--servers ours,alone,mlx-lm,sums] [--parts agents,restart]

The servers run one after the other, with the same texts; each line is printed as it comes, the table last.
mlx_lm.server's ranks get the variables that `mlx.launch` gives them: NCCL on CUDA with a GPU each, else ring.

start         from the spawn to the first answer, a small one; again: after the restart
prompt        tokens a second to the first token of a prompt that nobody has seen, the second of two
the same      seconds to its first token when it comes again
decode at n   tokens a second of n streams behind prompts of that length, computed before
agents        seconds until all have their answers: each begins with so many tokens and adds so many a turn;
              and the median TTFT of their first turns, and of later ones
next turn     TTFT of an agent's next turn after a restart (SIGKILL, once nothing more is being written), of a
              server that answers again
equal         whether a prompt's answer was the same cold, again, and after the restart
memory        MB of each GPU, by nvidia-smi; without one, resident MB of the largest processes

`sums`, last, is no server: every rank computes mlx-lm's own passes with random weights, with its sums and
without any, and as many sums in a chain. Their share is of the pass's time.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import httpx
import mlx.core as mx
import psutil
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import _get_classes

from omlxd.common.ports import free_addresses
from omlxd.engine import mlx_adapter
from omlxd.engine.mlx_adapter.model.split import take_share
from tools.bench.rates import Stream, total_rate
from tools.bench.serve import Server, free_port, settle
from tools.bench.shapes import SHAPES
from tools.bench.streams import text
from tools.bench.turns import Answers, follow, grown
from tools.daemon_process import REPO

PEER = """
import threading
import mlx.core as mx
from mlx_lm import server

class Here(threading.Thread):
    def start(self):
        pass
    def is_alive(self):
        return True

def run(host, port, provider):
    server.Thread = Here
    caches = server.LRUPromptCache(provider.cli_args.prompt_cache_size)
    generator = server.ResponseGenerator(provider, caches)
    if mx.distributed.init().rank() == 0:
        http = threading.Thread(target=server._run_http_server, args=(host, port, generator), daemon=True)
        http.start()
    generator._run_generate()

summed = mx.distributed.all_sum
mx.distributed.all_sum = lambda x, group=None, stream=None: summed(x, group=group)
server.run = run
server.main()
"""
"""mlx_lm.server 0.32.2 whose one thread computes all, and sums on the GPU. As it is, its ranks end at the
load with NCCL: "There is no Stream(gpu, 1) in current thread"."""

LARGEST = 32 << 20
"""Resident bytes from which a process is listed."""

PASSES = 10


def has_gpus() -> bool:
    return shutil.which("nvidia-smi") is not None


def rank_variables(rank: int, hosts: Sequence[str], folder: Path) -> dict[str, str]:
    """What `mlx.launch` gives a rank's process."""
    if has_gpus():
        ip, port = hosts[0].split(":")
        place = {"NCCL_HOST_IP": ip, "NCCL_PORT": port, "MLX_WORLD_SIZE": str(len(hosts))}
        return place | {"MLX_RANK": str(rank), "CUDA_VISIBLE_DEVICES": str(rank)}
    file = folder / "hosts.json"
    file.write_text(json.dumps([[host] for host in hosts]))
    return {"MLX_RANK": str(rank), "MLX_HOSTFILE": str(file)}


class Peer(Server):
    """A server of which each rank runs a process."""

    def __init__(self, ranks: int, home: Path, *args: Any):
        self._ranks, self._home = ranks, home
        self._others: list[subprocess.Popen[bytes]] = []
        super().__init__(*args)

    def start(self) -> None:
        hosts, own = free_addresses("127.0.0.1", self._ranks), self._env
        log = open(os.environ.get("BENCH_LOG", os.devnull), "ab")  # noqa: SIM115
        for rank in range(1, self._ranks):
            env = {**own, **rank_variables(rank, hosts, self._home)}
            self._others.append(subprocess.Popen(self._command, stdout=log, stderr=log, env=env))
        self._env = {**own, **rank_variables(0, hosts, self._home)}
        super().start()

    def kill(self) -> None:
        for process in self._others:
            process.kill()
            process.wait()
        self._others.clear()
        super().kill()

    stop = kill

    def pids(self) -> list[int]:
        return [self.process.pid, *(process.pid for process in self._others)]


def memory(server: Server) -> str:
    if has_gpus():
        asked = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
        return ", ".join(subprocess.run(asked, capture_output=True, text=True, check=True).stdout.split())
    pids = server.pids() if isinstance(server, Peer) else [server.process.pid]
    heads = [psutil.Process(pid) for pid in pids]
    tree = [own for head in heads for own in (head, *head.children(recursive=True))]
    sizes = sorted((own.memory_info().rss for own in tree), reverse=True)
    return ", ".join(str(size // 1_000_000) for size in sizes[:2] if size > LARGEST)


Row = dict[str, float | str]


class Measured:
    """A server's figures, printed as they come."""

    def __init__(self, name: str, options: argparse.Namespace, model: Path, make: Callable[[], Server]):
        self.name, self._options, self._model, self._make = name, options, model, make
        self.row: Row = {}
        self._answers: list[str] = []

    def note(self, what: str, value: float | str) -> None:
        self.row[what] = value
        shown = f"{value:.4g}" if isinstance(value, float) else value
        print(f"{self.name}: {what}: {shown}", flush=True)

    def run(self) -> None:
        began = time.perf_counter()
        try:
            server = self._make()
        except RuntimeError as error:
            print(f"{self.name}: {error}", flush=True)
            return
        try:
            self.note("start, s", time.perf_counter() - began)
            self.note("memory when loaded, MB", memory(server))
            parts = self._options.parts.split(",")
            asyncio.run(self._bounded(self._prompts(server)))
            if "agents" in parts:
                asyncio.run(self._bounded(self._agents(server)))
            self.note("memory at the end, MB", memory(server))
            if "restart" in parts:
                self._restart(server)
        except (httpx.HTTPError, RuntimeError, ValueError, TimeoutError) as error:
            print(f"{self.name}: ends: {type(error).__name__}: {error}"[:300], flush=True)
        finally:
            server.kill()

    async def _bounded(self, work: Any) -> None:
        async with asyncio.timeout(self._options.bound):
            await work

    async def _first(self, server: Server, prompt: str, tokens: int) -> Stream:
        return (await server.ask([prompt], tokens))[0]

    async def _prompts(self, server: Server) -> None:
        size, output = self._options.prompt, self._options.output
        await self._first(server, text(self._model, size, 1), 2)  # Compiles and allocates.
        prompt = text(self._model, size, 2)
        cold = await self._first(server, prompt, 48)
        again = await self._first(server, prompt, 48)
        self._answers += [cold.text, again.text]
        self.note("prompt, tok/s", (cold.prompt or size) / cold.ttft)
        self.note("the same, s", again.ttft)
        for count in self._options.streams:
            prompts = [text(self._model, size + 100 * each, 10 + each) for each in range(count)]
            for each in prompts:
                await self._first(server, each, 2)
            await server.ask(list(prompts), 8)  # The batch, once.
            streams = await server.ask(list(prompts), output)
            self.note(f"decode at {count}, tok/s", total_rate(streams))

    async def _agents(self, server: Server) -> None:
        turns, answers = grown(self._model, 3, [self._options.grow] * self._options.agents), Answers()
        asked = argparse.Namespace(output=64, each=False)
        await follow(server, asked, answers, turns, 0)
        later = set(map(id, answers.later))
        firsts = [stream.ttft for stream in answers.streams if id(stream) not in later]
        self.note("agents, s", answers.walls[0])
        self.note("their first turns, s", statistics.median(firsts))
        self.note("their later turns, s", statistics.median(stream.ttft for stream in answers.later))

    def _restart(self, server: Server) -> None:
        if server.cache is not None:
            settle(server.cache)
        server.kill()
        began = time.perf_counter()
        server.start()
        self.note("start again, s", time.perf_counter() - began)
        turns = grown(self._model, 3, [self._options.grow] * self._options.agents)
        last = [turn for turn, place in turns if place.agent == 0][-1]
        stream = asyncio.run(self._first(server, last + text(self._model, 200, 99), 8))
        self.note("next turn after it, s", stream.ttft)
        prompt = text(self._model, self._options.prompt, 2)
        self._answers.append(asyncio.run(self._first(server, prompt, 48)).text)
        equal = [answer == self._answers[0] for answer in self._answers[1:]]
        self.note("equal again, after a restart", ", ".join("yes" if each else "no" for each in equal))


def makers(options: argparse.Namespace, model: Path, home: Path) -> dict[str, Callable[[], Server]]:
    """By name, what starts each server."""
    flags = options.flags.split()

    def ours(ranks: int) -> Server:
        port, base = free_port(), home / f"omlxd-{ranks}"
        words = [sys.executable, "-m", "omlxd", "serve", "--model", str(model), "--port", str(port)]
        words += ["--base-path", str(base), "--speculation", "off", "--ranks", str(ranks), *flags]
        return Server("omlxd", words, port, model.name, base)

    def peer() -> Server:
        port = free_port()
        program = ["-c", PEER] if has_gpus() else ["-m", "mlx_lm", "server"]
        words = [sys.executable, *program, "--model", str(model), "--port", str(port)]
        return Peer(options.ranks, home, "mlx_lm.server", words, port, str(model))

    return {"ours": lambda: ours(options.ranks), "alone": lambda: ours(1), "mlx-lm": peer}


def table(rows: dict[str, Row]) -> None:
    """Ours first; beside each other one, ours as a multiple of it."""
    names = list(rows)
    heads = [names[0], *(cell for name in names[1:] for cell in (name, "ours over it"))]
    print(f"\n| | {' | '.join(heads)} |\n|" + "---|" * (1 + len(heads)))
    for what in dict.fromkeys(what for row in rows.values() for what in row):
        own = rows[names[0]].get(what)
        cells = [shown(own)]
        for name in names[1:]:
            its = rows[name].get(what)
            both = isinstance(own, float) and isinstance(its, float) and its > 0
            cells += [shown(its), f"{cast(float, own) / cast(float, its):.2f}" if both else ""]
        print(f"| {what} | {' | '.join(cells)} |", flush=True)


def shown(value: float | str | None) -> str:
    return "-" if value is None else value if isinstance(value, str) else f"{value:.3g}"


# --------------------------------------------------------------------------------------- sums

COLUMNS = "ms", "without its sums, ms", "sums", "a chain of them, ms", "share of the pass"


def time_sums(options: argparse.Namespace, model: Path) -> None:
    """Have a process a rank compute passes of the model's shape; rank 0 prints."""
    hosts, ranks = free_addresses("127.0.0.1", options.ranks), list[subprocess.Popen[bytes]]()
    words = [sys.executable, "-m", "tools.bench.ranks", "--model", str(model)]
    words += ["--prompt", str(options.prompt), "--chunk", str(options.chunk), "--hosts", ",".join(hosts)]
    head = f"\n| pass behind {options.prompt} tokens | {' | '.join(COLUMNS)} |"
    print(f"{head}\n|{'---|' * (1 + len(COLUMNS))}", flush=True)
    try:
        for rank in reversed(range(options.ranks)):
            env = {**os.environ, **({"CUDA_VISIBLE_DEVICES": str(rank)} if has_gpus() else {})}
            ranks.append(subprocess.Popen([*words, "--rank", str(rank)], cwd=REPO, env=env))
        ranks[-1].wait(options.bound)
    except subprocess.TimeoutExpired:
        print("sums: not within the bound", flush=True)
    finally:
        for process in ranks:
            process.kill()
            process.wait()


class Share:
    """A rank's share of a model of this config, with random weights, and its sums."""

    def __init__(self, config: dict[str, Any], rank: int, hosts: list[str]):
        self.group = mlx_adapter.join_group(rank, hosts)
        kind, arguments = _get_classes(config)
        self.network: Any = kind(arguments.from_dict(config))
        self.dtype, self.width = getattr(mx, config["torch_dtype"]), config["hidden_size"]
        self.network.set_dtype(self.dtype)
        take_share(self.network, self.group)
        for _, weight in cast(list[tuple[str, mx.array]], tree_flatten(self.network.parameters())):
            mx.eval(weight)
        self._summed, self._count = mx.distributed.all_sum, 0

    def milliseconds(self, work: Callable[[], mx.array]) -> float:
        times: list[float] = []
        for _ in range(PASSES + 2):
            mx.eval(self._summed(mx.array(0.0), group=self.group))  # All begin at once.
            began = time.perf_counter()
            mx.eval(work())
            times.append((time.perf_counter() - began) * 1e3)
        return statistics.median(times[2:])

    def passes(self, rows: int, tokens: int, behind: int, chunk: int) -> tuple[float, float, int, float]:
        """(ms of a pass, ms of one without sums, its sums, ms of as many in a chain)."""
        cache: Any = make_prompt_cache(self.network)
        for start in range(0, behind, chunk):
            mx.eval(self.network(mx.zeros((rows, min(chunk, behind - start)), mx.int32), cache=cache))

        def one() -> mx.array:
            self._count = 0
            out = mx.argmax(self.network(mx.ones((rows, tokens), mx.int32), cache=cache)[:, -1], axis=-1)
            for layer in cache:
                layer.trim(tokens)
            return out

        def chain() -> mx.array:
            x = mx.zeros((rows, tokens, self.width), self.dtype)
            for _ in range(count):
                x = self._summed(x, group=self.group)
            return x

        try:
            setattr(mx.distributed, "all_sum", self._counting)  # noqa: B010
            whole, count = self.milliseconds(one), self._count
            setattr(mx.distributed, "all_sum", lambda x, **rest: x)  # noqa: B010
            return whole, self.milliseconds(one), count, self.milliseconds(chain)
        finally:
            setattr(mx.distributed, "all_sum", self._summed)  # noqa: B010

    def _counting(self, x: mx.array, **rest: Any) -> mx.array:
        self._count += 1
        return self._summed(x, **rest)


def sums_of_rank(options: argparse.Namespace, model: Path) -> None:
    """One rank's passes: of a token, of four rows' tokens, of a chunk of a prompt."""
    config = json.loads((model / "config.json").read_text())
    share = Share(config, options.rank, options.hosts.split(","))
    for rows, tokens in ((1, 1), (4, 1), (1, options.chunk)):
        whole, without, count, sums = share.passes(rows, tokens, options.prompt, options.chunk)
        if options.rank == 0:
            cells = f"{whole:.2f}", f"{without:.2f}", str(count), f"{sums:.2f}", f"{sums / whole:.0%}"
            print(f"| {rows} x {tokens} | {' | '.join(cells)} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--shape", default="tiny", choices=sorted(SHAPES))
    parser.add_argument("--model", type=Path)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--prompt", type=int, default=16000)
    parser.add_argument("--output", type=int, default=200)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--agents", type=int, default=4)
    parser.add_argument("--grow", default="8000+1000+1000")
    parser.add_argument("--bound", type=float, default=600.0, help="seconds of each part of a server's work")
    parser.add_argument("--servers", default="ours,alone,mlx-lm,sums")
    parser.add_argument("--parts", default="agents,restart", help="of the work, beside prompts and decoding")
    parser.add_argument("--flags", default="", help="more flags of omlxd")
    parser.add_argument("--chunk", type=int, default=2048, help="tokens of a prompt's pass, for `sums`")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--hosts", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        sums_of_rank(options, options.model)
        return
    with tempfile.TemporaryDirectory(prefix="ranks-", ignore_cleanup_errors=True) as temp:
        home, model = Path(temp), options.model
        if model is None:
            model = home / options.shape
            words = [sys.executable, "-m", "tools.bench.shapes", options.shape, str(model)]
            subprocess.run(words, check=True, cwd=REPO, stdout=subprocess.DEVNULL)
        all_makers, rows = makers(options, model, home), dict[str, Row]()
        for name in options.servers.split(","):
            if name == "sums":
                continue
            measured = Measured(name, options, model, all_makers[name])
            measured.run()
            rows[name] = measured.row
        if rows:
            table(rows)
        if "sums" in options.servers.split(","):
            time_sums(options, model)


if __name__ == "__main__":
    main()
