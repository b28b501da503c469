"""How long the front's event loop stands still while it serves many installed models.

    python tools/bench/loop_stalls.py [--models 200] [--seconds 10]

A ticker on the loop sleeps 1 ms at a time; a stall is the time by which it wakes late. The first row is the
start alone, then come the first `GET /v1/models`, and one request a model name every 20 ms, for whose look-up
the folders are read again every 2 s. Goal: no stall above 20 ms while requests are served.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import struct
import sys
import tempfile
import time
from collections.abc import Awaitable
from pathlib import Path

import httpx

from omlxd.config import load_settings
from omlxd.front.app import create_app
from omlxd.front.engines.pool import EnginePool

GOAL_S = 0.020
TICK_S = 0.001


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--models", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=10.0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="omlxd-loop-") as home:
        for number in range(args.models):
            make_model(Path(home) / "models" / "org" / f"m{number:03}")
        worst = asyncio.run(measure(Path(home), args.seconds))
    print(f"\nlongest stall {worst * 1e3:.1f} ms: goal {'met' if worst < GOAL_S else 'MISSED'}")
    return 0 if worst < GOAL_S else 1


def make_model(folder: Path) -> None:
    """A folder that looks like a model of 24 layers and 6 tensors each; it holds no weights."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3", "num_hidden_layers": 24}))
    names = [f"model.layers.{layer}.w{n}" for layer in range(24) for n in range(6)]
    header = json.dumps({name: {"dtype": "BF16", "shape": [0], "data_offsets": [0, 0]} for name in names})
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header.encode())


async def measure(home: Path, seconds: float) -> float:
    """Print a row a step; returns the longest stall of the steps after the start."""
    settings = load_settings({"base_path": str(home), "model_dir": str(home / "models")}, {})
    pool = EnginePool(settings)
    pool.start(first=False)
    transport = httpx.ASGITransport(app=create_app(pool))
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8000") as http:
        await http.get("/health")
        print("| step | requests | took s | longest stall ms | stalls above 5 ms |")
        print("|---|---|---|---|---|")
        first = await stalls("first GET /v1/models", asks(http, 0.0))
        rest = await stalls("requests", asks(http, seconds))
    await pool.close()
    return max(first, rest)


async def asks(http: httpx.AsyncClient, seconds: float) -> int:
    done, end = 0, time.perf_counter() + seconds
    names = [model["id"] for model in (await http.get("/v1/models")).json()["data"]]
    while time.perf_counter() < end:
        (await http.get(f"/v1/models/{names[done % len(names)]}")).raise_for_status()
        done += 1
        await asyncio.sleep(0.02)
    return done + 1


async def stalls(step: str, work: Awaitable[int]) -> float:
    late: list[float] = []

    async def tick() -> None:
        while True:
            began = time.perf_counter()
            await asyncio.sleep(TICK_S)
            late.append(time.perf_counter() - began - TICK_S)

    ticker, began = asyncio.create_task(tick()), time.perf_counter()
    done = await work
    took = time.perf_counter() - began
    ticker.cancel()
    longest = max(late, default=took)
    print(f"| {step} | {done} | {took:.3f} | {longest * 1e3:.1f} | {sum(one > 0.005 for one in late)} |")
    return longest


if __name__ == "__main__":
    sys.exit(main())
