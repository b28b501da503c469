"""How soon the cache view is answered at 100,000 blocks: the first read of the folder, and looks after it.

    python -m tools.bench.cache_view [--readers 8]

Makes a cache folder of block files without KV, asks the app in this process as the page does, and prints
seconds. `first rows`: from an index that is in memory; `after a change`: a file came, the last read answers.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import sys
import tempfile
import time
from pathlib import Path

import httpx

sys.path += [str(Path(__file__).parents[2] / "tests" / "support"), str(Path(__file__).parents[2])]

from omlxd.front.app import create_app
from tests.end_to_end.test_page_daemon import large_cache
from tests.front.owner.test_cache_tree import TREE, cached


async def look(http: httpx.AsyncClient, **params: float) -> tuple[float, dict]:
    began = time.perf_counter()
    answer = (await http.get(TREE, params=params)).json()
    return time.perf_counter() - began, answer


async def measure(root: Path, readers: int) -> None:
    engines = cached(root)
    transport = httpx.ASGITransport(create_app(engines))
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1", timeout=600) as http:
        cold, answer = await look(http)
        print(f"first look, nothing read yet: {cold:.3f} s, state {answer['state']}")
        read, answer = await look(http, wait=30)
        print(f"the read: {read:.2f} s, {answer['pieces']} pieces")
        looks = await asyncio.gather(*(look(http) for _ in range(readers)))
        print(f"first rows, {readers} readers at once: {max(seconds for seconds, _ in looks):.3f} s at most")
        pieces = [await look(http, piece=at) for at in range(answer["pieces"])]
        print(f"all pieces, one by one: {sum(seconds for seconds, _ in pieces):.3f} s")
        engines.cold.stats = dataclasses.replace(engines.cold.stats, files=1)
        old, answer = await look(http)
        print(f"first rows after a change: {old:.3f} s, state {answer['state']}")
        again, answer = await look(http, wait=30)
        print(f"the read after it: {again:.2f} s, state {answer['state']}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--readers", type=int, default=8)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="omlxd-cache-view-") as folder:
        large_cache(Path(folder) / "cache")
        asyncio.run(measure(Path(folder) / "cache", args.readers))


if __name__ == "__main__":
    main()
