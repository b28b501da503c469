"""From block files to evaluated KV arrays, beside plain parallel reads of the same files.

    python -m tools.bench.restore [--shape large|small] [--megabytes 1500] [--threads 1,2,4,8]
                                  [--blocks 64,128,256] [--rounds 7] [--dir DIR]

Every run pays for its own memory, as a request does, and begins with none:

    plain      preadv of each file, whole, into its slice of one new numpy buffer; nothing checked, nothing
               in its place: the limit
    arrays     what the engine's I/O threads do: `payload.DirectBuffers` allocates arrays of final size,
               ColdTier.load fills their rows and checks header and digest, `take` and mx.eval end it
    mx.load    mx.load of each file on the I/O threads, evaluated there, then one concatenation a tensor:
               no check at all, and the KV's bytes twice

A round runs them one after the other. Told are the median rate of the rounds and, in brackets, the median
of the share of plain in the same round, and the lowest share: a machine's speed changes between rounds.
1,500 MB are 10,000 tokens of the large shape: a coding agent's first request has twice as many.

Page cache warm, then dropped (posix_fadvise on each file before each run). `peak` is the growth of
resident memory over the payload. Files are written to a temporary folder and removed at the end.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median

import mlx.core as mx
import numpy as np
import psutil

from omlxd.engine.kvio.payload import DirectBuffers
from omlxd.engine.mlx_adapter import round_up
from omlxd.front.engines.link import engine_environment

from . import block_files
from .block_files import SHAPES, Files

Run = Callable[[Files, ThreadPoolExecutor], object]


def plain(files: Files, pool: ThreadPoolExecutor) -> object:
    read = block_files.plain(files, np.empty)
    list(pool.map(read, range(len(files.keys))))
    return read  # It holds the buffer.


def arrays(files: Files, pool: ThreadPoolExecutor) -> dict[str, mx.array]:
    capacity = round_up(len(files.keys) * files.block)
    buffers = pool.submit(DirectBuffers, files.layout, capacity, files.block).result()
    list(pool.map(lambda i: files.tier.load(files.keys[i], buffers.pieces(i)), range(len(files.keys))))
    taken = buffers.take_arrays()
    mx.eval(taken)
    return taken


def mx_load(files: Files, pool: ThreadPoolExecutor) -> dict[str, mx.array]:
    def read(index: int) -> dict[str, mx.array]:
        with mx.stream(mx.cpu):
            found = mx.load(files.path(index))
            mx.eval(found)
        return found  # type: ignore[return-value]

    blocks = list(pool.map(read, range(len(files.keys))))
    names = [name for group in files.layout.groups for name in group.names]
    joined = {name: mx.concatenate([block[name] for block in blocks], axis=1)[None] for name in names}
    mx.eval(joined)
    return joined


RUNS: dict[str, Run] = {"plain": plain, "arrays": arrays, "mx.load": mx_load}


def holds(files: Files, found: dict[str, mx.array]) -> bool:
    """Every tensor of the first and the last block is what was stored."""
    heads, dim = files.shape.heads, files.shape.dim
    stored = files.payload.view(np.uint16).reshape(-1, heads, files.block, dim)
    last = (len(files.keys) - 1) * files.block
    return all(
        np.array_equal(np.array(found[name].view(mx.uint16)[0, :, at : at + files.block]), tensor)
        for name, tensor in zip(files.layout.groups[0].names, stored, strict=True)
        for at in (0, last)
    )


def drop(files: Files) -> None:
    for index in range(len(files.keys)):
        fd = os.open(files.path(index), os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def once(run: Run, files: Files, threads: int, dropped: bool) -> float:
    """GB/s of payload."""
    mx.clear_cache()
    if dropped:
        drop(files)
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(lambda _: time.sleep(0.001), range(threads)))  # the threads are there
        began = time.perf_counter()
        kept = run(files, pool)
        took = time.perf_counter() - began
    del kept
    return files.block_bytes * len(files.keys) / took / 1e9


def peak(files: Files, run: Run) -> float:
    """Growth of resident memory while `run` runs, over the payload. 0 where the kernel can't tell."""
    mx.clear_cache()
    try:
        ctypes.CDLL(None).malloc_trim(0)  # what earlier runs freed goes back, or it would not count
        Path("/proc/self/clear_refs").write_text("5")
    except (OSError, AttributeError):
        return 0.0
    before = psutil.Process().memory_info().rss
    with ThreadPoolExecutor(4) as pool:
        kept = run(files, pool)
    status = Path("/proc/self/status").read_text()
    highest = int(status.partition("VmHWM:")[2].split()[0]) * 1024
    del kept
    return (highest - before) / (files.block_bytes * len(files.keys))


def told(name: str, rates: dict[str, list[float]]) -> str:
    """A design's rates, a round each, beside those of plain."""
    shares = [rate / limit for rate, limit in zip(rates[name], rates["plain"], strict=True)]
    return f"{name} {median(rates[name]):5.2f} ({median(shares):4.2f}, lowest {min(shares):4.2f})"


def measure(files: Files, threads: list[int], rounds: int) -> None:
    with ThreadPoolExecutor(2) as pool:
        for name in ("arrays", "mx.load"):
            assert holds(files, RUNS[name](files, pool)), name  # type: ignore[arg-type]
    for dropped in (False, True):
        if dropped:
            os.sync()  # a dirty page can't be dropped
        print(f"  page cache {'dropped' if dropped else 'warm'}, GB/s (of plain)")
        for number in threads:
            rates: dict[str, list[float]] = {name: [] for name in RUNS}
            for _ in range(rounds):
                for name, run in RUNS.items():
                    rates[name].append(once(run, files, number, dropped))
            print(f"    {number} threads   " + "   ".join(told(name, rates) for name in RUNS), flush=True)
    cells = "   ".join(f"{name} {peak(files, run):4.2f}" for name, run in RUNS.items())
    print(f"  peak memory of the payload   {cells}\n")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=sorted(SHAPES), default="large")
    parser.add_argument("--megabytes", type=int, default=1500, help="of payload; at most 4000")
    parser.add_argument("--threads", default="1,2,4,8")
    parser.add_argument("--blocks", default="64,128,256", help="block sizes, tokens")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--dir", default=None, help="where the temporary folder goes")
    args = parser.parse_args()
    mx.set_default_device(mx.cpu)
    shape = SHAPES[args.shape]
    print(f"{os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}; {args.shape}: {shape}\n")
    for block in map(int, args.blocks.split(",")):
        count = max(1, min(args.megabytes, 4000) * 10**6 // shape.layout().nbytes(block))
        with tempfile.TemporaryDirectory(prefix="omlxd-restore-", dir=args.dir) as root:
            files = Files(Path(root), shape, count, block)
            files.store_all()
            print(f"blocks of {block} tokens, {files.block_bytes / 1e6:.1f} MB, {count} files")
            measure(files, [int(n) for n in args.threads.split(",")], args.rounds)


if __name__ == "__main__":
    environment = engine_environment(os.environ)
    if environment != dict(os.environ):  # memory as the engine has it
        os.execve(sys.executable, [sys.executable, "-m", "tools.bench.restore", *sys.argv[1:]], environment)
    main()
