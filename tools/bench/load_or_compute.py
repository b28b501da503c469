"""Seconds to the first token of a prefix that lies on a disk of any speed: read, computed, and both at once.

    python -m tools.bench.load_or_compute [--shape cpu] [--tokens 4096] [--disk 0.5,1,2,4,0] [--rounds 3]
                                          [--dir DIR]

    disk      how long reading takes, as a multiple of computing; the files are read through a throttle, and
              0 is the disk as it is
    read      nothing is computed but what a hit leaves
    both      what the engine does with rates that it knows (kvio/reads/cold_reads.py): it computes from the
              front while it reads from the end, where that saves a fifth, else it reads
    unknown   the same in an engine that has measured neither rate yet, as after a restart
    limit     1 / (1 / read + 1 / computed), as if each block took as long to compute; the first take less
    blocks computed  of the prefix, by `both`, of all

Medians of the rounds, in which they follow each other; weights are random, the hot tier is empty.
"""

from __future__ import annotations

import argparse
import tempfile
import threading
import time
from pathlib import Path
from statistics import median
from typing import Any

import mlx.core as mx

from omlxd.engine.kvio.reads.rates import Rates
from omlxd.engine.process.prepare import set_backend_defaults
from omlxd.engine.schedule.scheduler import Scheduler
from omlxd.kv.files.fs import FileSystem

from .gpu_rig import Bench, Collector, row
from .shapes import SHAPES

BLOCK = 64


class Throttled(FileSystem):
    """Reads at `bytes_per_s`, all together; 0: as fast as they come."""

    def __init__(self, bytes_per_s: float):
        super().__init__()
        self._rate = bytes_per_s
        self._free_at = 0.0
        self._lock = threading.Lock()

    def readv(self, fd: int, buffers: Any, offset: int) -> int:
        got = super().readv(fd, buffers, offset)
        if self._rate:
            with self._lock:
                self._free_at = max(self._free_at, time.perf_counter()) + got / self._rate
                until = self._free_at
            time.sleep(max(0.0, until - time.perf_counter()))
        return got


class ReadAlone(Rates):
    """Rates by which nothing is ever computed instead."""

    def both_pay(self, read_s: float, blocks: int) -> bool:
        return False


class LoadBench(Bench):
    def __init__(self, shape: str, folder: Path, tokens: int):
        super().__init__(shape, folder, tokens, [BLOCK])
        self.words_of_prompt = self.prompt(tokens + 1)
        (folder / str(BLOCK)).mkdir()
        self.cold_tier, keys = self.cold(self.words_of_prompt, BLOCK)
        cache = self.prefilled(self.words_of_prompt)
        for key, payload in zip(keys, self.payloads(cache, tokens, BLOCK), strict=True):
            self.cold_tier.store(key, payload.buffers())
        self.bytes = len(keys) * self.cold_tier.format.file_bytes

    def seconds(self, rates: Rates | None) -> tuple[float, int]:
        """(to the first token, tokens of the prefix that were computed). None: nothing is read."""
        scheduler = Scheduler(self.loaded, None, slots=1, block_size=BLOCK)
        if rates is not None:
            scheduler.bridge = self._bridge(BLOCK, self.cold_tier)
            scheduler.bridge.reads.post = scheduler.bridge.store._post = scheduler.post
            scheduler.bridge.reads.rates = rates
            scheduler.prefill_budget.rate = rates.prefill
        sink = Collector()
        sequence = self._sequence(self.words_of_prompt, BLOCK, 1, sink)
        scheduler.submit(sequence)
        while not sink.ended or scheduler.active_sequences:
            scheduler.turn()
        if rates is None:
            self.rate = scheduler.prefill_budget.rate
        return sequence.stats.first_token_s, sequence.stats.recomputed

    def rates(self, kind: type[Rates] = Rates, read: float = 0.0) -> Rates:
        made = kind(BLOCK, self.layout.nbytes(BLOCK))
        made.read, made.prefill = read, self.rate if read else 0.0
        return made

    def disk(self, slower: float, rounds: int) -> None:
        got: dict[str, list[float]] = {"computed": [], "read": [], "both": [], "unknown": []}
        shares: list[float] = []
        for _ in range(rounds):
            computed, _ = self.seconds(None)
            rate = self.bytes / (slower * computed) if slower else 0.0
            self.cold_tier._fs = Throttled(rate)
            read, _ = self.seconds(self.rates(ReadAlone))
            both, again = self.seconds(self.rates(Rates, self.bytes / read))
            unknown, _ = self.seconds(self.rates())
            shares.append(again / self.tokens)
            for name, value in zip(got, (computed, read, both, unknown), strict=True):
                got[name].append(value)
        middle = {name: median(values) for name, values in got.items()}
        limit = 1 / (1 / middle["computed"] + 1 / middle["read"])
        row(slower, *middle.values(), limit, middle["both"] / limit, f"{median(shares):.0%}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=sorted(SHAPES), default="cpu")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--disk", default="0.5,1,2,4,0")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dir", default=None, help="where the temporary folder goes")
    args = parser.parse_args()
    set_backend_defaults()
    with tempfile.TemporaryDirectory(prefix="omlxd-load-", dir=args.dir) as folder:
        bench = LoadBench(args.shape, Path(folder), args.tokens // BLOCK * BLOCK)
        mb = bench.tokens * bench.per_token / 1e6
        print(f"{args.shape}, {bench.tokens} tokens, {mb:.0f} MB of KV, {mx.default_device()}; seconds\n")
        row("disk", "computed", "read", "both", "unknown", "limit", "both / limit", "blocks computed")
        row(*["---"] * 8)
        bench.seconds(None)  # Kernels are compiled, memory is there.
        for slower in map(float, args.disk.split(",")):
            bench.disk(slower, args.rounds)


if __name__ == "__main__":
    main()
