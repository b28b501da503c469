"""Tokens a second through HTTP of several streams at once, of unequal contexts too, beside other servers.

    python -m tools.bench.streams --model FOLDER [--contexts 500 16000 16000,17500,19000,20500 …]
        [--output 300] [--bound SECONDS] [--server NAME COMMAND]…

COMMAND may hold {port}, {model} and {home}, an empty folder. Without --server: this checkout's daemon. A
server whose NAME begins with omlxd knows the model by its folder's name, others by its path.
The servers run one after the other, with the same texts. Each context is asked for once alone (what it
keeps of that is its own affair), then all streams of a row at once. Rates are those of the time in which
all of them answer (rates.py); `-`: an error. TTFT is the largest of the row. A server that has not answered
all rows within the bound, its start not counted, is ended, and the row says so.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shlex
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path

import httpx
import numpy as np

from tools.bench.rates import total_rate
from tools.bench.serve import Server, free_port

OURS = f"{sys.executable} -m omlxd serve --port {{port}} --model {{model}} --base-path {{home}}"


def text(folder: Path, tokens: int, seed: int) -> str:
    """Words of a token each, by the model's own tokenizer."""
    vocabulary = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    words = sorted(w[1:] for w in vocabulary if w[0] == "Ġ" and w[1:].isascii() and w[1:].isalpha() and w[4:])
    return " " + " ".join(np.random.default_rng(seed).choice(words, tokens))


def server_of(name: str, command: str, model: Path, home: str) -> Server:
    """The server that COMMAND starts, once it answers."""
    port = free_port()
    words = shlex.split(command.format(port=port, model=model, home=home))
    return Server(name, words, port, model.name if name.startswith("omlxd") else str(model))


async def measure(server: Server, prompts: list[str], output: int) -> tuple[float, float, float]:
    """(tokens a second over all streams, largest TTFT, largest gap), in seconds."""
    for prompt in prompts:
        await server.ask([prompt], 1)
    streams = await server.ask(list(prompts), output)
    if not all(stream.times for stream in streams):
        raise ValueError("a stream ended without any text")
    gaps = (b - a for stream in streams for a, b in pairwise(stream.times))
    return total_rate(streams), max(stream.ttft for stream in streams), max(gaps)


async def bounded(server: Server, prompts: list[str], output: int, deadline: float) -> tuple[list[str], bool]:
    """(a row's cells, whether `deadline` of the monotonic clock came first)."""
    try:
        async with asyncio.timeout(deadline - time.monotonic()):
            return [f"{x:.3g}" for x in await measure(server, prompts, output)], False
    except TimeoutError:
        return ["- (not within the bound)", "-", "-"], True
    except (httpx.HTTPError, RuntimeError, ValueError) as error:
        return [f"- ({error})"[:200], "-", "-"], False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--contexts", nargs="+", default=["500", "16000", "16000,17500,19000,20500"])
    parser.add_argument("--output", type=int, default=300)
    parser.add_argument("--bound", type=float, default=3600.0)
    parser.add_argument("--server", nargs=2, action="append", metavar=("NAME", "COMMAND"))
    options = parser.parse_args()
    print("| server | streams | contexts | tok/s | TTFT s | largest gap s |\n|" + "---|" * 6)
    for name, command in options.server or [("omlxd", OURS)]:
        with tempfile.TemporaryDirectory(prefix="streams-", ignore_cleanup_errors=True) as home:
            rows(server_of(name, command, options.model, home), options)


def rows(server: Server, options: argparse.Namespace) -> None:
    """All rows of a server, which is ended then."""
    deadline = time.monotonic() + options.bound
    for number, row in enumerate(options.contexts):
        lengths = [int(length) for length in row.split(",")]
        prompts = [text(options.model, n, 1000 * number + i) for i, n in enumerate(lengths)]
        cells, cut = asyncio.run(bounded(server, prompts, options.output, deadline))
        span = f"{min(lengths)} to {max(lengths)}"
        print("|", " | ".join([server.name, str(len(lengths)), span, *cells]), "|", flush=True)
        if cut:
            server.kill()
            return
    server.stop()


if __name__ == "__main__":
    main()
