"""What the block pool costs: nanoseconds a block, milliseconds of hashing, memory of a million blocks.

    python -m tools.bench.pool [--blocks N]

Each figure stands beside its limit and, where there is one, beside vLLM 0.33's own as measured by its
users on another machine (2-vCPU AMD EPYC, Python 3.11), so compare those two in kind only. Every time
is the best of several rounds: on a shared machine the best is the cost, and the rest is other people.
"""

from __future__ import annotations

import argparse
import gc
import os
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass

from omlxd.kv.block import Block
from omlxd.kv.block_pool import BlockPool
from omlxd.kv.hashing import hash_blocks

ROUNDS = 7


@dataclass(slots=True, frozen=True)
class Payload:
    nbytes: int


@dataclass(slots=True, frozen=True)
class Result:
    what: str
    value: float
    unit: str
    limit: float | None
    vllm: str = ""

    def line(self) -> str:
        limit = "" if self.limit is None else f"{self.limit:g}"
        verdict = "" if self.limit is None else ("ok" if self.value <= self.limit else "MISSED")
        return f"{self.what:42} {self.value:9.4g} {self.unit:9} {limit:>6} {verdict:7} {self.vllm}"


def best(run: Callable[[], float], rounds: int = ROUNDS) -> float:
    """The least of `rounds` results, with the garbage collector off."""
    gc.collect()
    gc.disable()
    try:
        return min(run() for _ in range(rounds))
    finally:
        gc.enable()


def elapsed(work: Callable[[], object]) -> float:
    """Nanoseconds."""
    began = time.perf_counter_ns()
    work()
    return time.perf_counter_ns() - began


def names(count: int) -> list[bytes]:
    """As many different names, made as real ones are: 32 bytes nobody else holds."""
    return [i.to_bytes(8, "little") * 4 for i in range(count)]


def cached_pool(hashes: list[bytes], payload: Payload | None) -> tuple[BlockPool, list[Block]]:
    """A pool of exactly that many records, all cached, with nobody holding any."""
    pool = BlockPool(len(hashes), max_records=len(hashes))
    blocks = [pool.allocate() for _ in hashes]
    for block, block_hash in zip(blocks, hashes, strict=True):
        pool.cache(block, block_hash, payload)
    pool.free(blocks)
    return pool, blocks


def allocate(count: int) -> float:
    pool = BlockPool(count)
    allocate = pool.allocate
    return elapsed(lambda: [allocate() for _ in range(count)]) / count


def allocate_growing(count: int) -> float:
    allocate = BlockPool(0).allocate
    return elapsed(lambda: [allocate() for _ in range(count)]) / count


def allocate_evicting(hashes: list[bytes], payload: Payload | None) -> float:
    pool, _ = cached_pool(hashes, payload)
    allocate = pool.allocate
    took = elapsed(lambda: [allocate() for _ in hashes]) / len(hashes)
    assert pool.evicted == len(hashes)
    return took


def evict_bytes(hashes: list[bytes]) -> float:
    pool, _ = cached_pool(hashes, Payload(10))
    return elapsed(lambda: pool.evict(10 * len(hashes))) / len(hashes)


def free(hashes: list[bytes]) -> float:
    pool, blocks = cached_pool(hashes, None)
    pool.touch(blocks)
    return elapsed(lambda: pool.free(blocks)) / len(blocks)


def touch(hashes: list[bytes]) -> float:
    pool, blocks = cached_pool(hashes, None)
    return elapsed(lambda: pool.touch(blocks)) / len(blocks)


def lookup(hashes: list[bytes]) -> float:
    pool, _ = cached_pool(hashes, None)
    # Other objects of the same value, as a request's own hashes are: no hit by identity.
    asked = [bytes(bytearray(h)) for h in hashes]
    get = pool.get_cached_block
    return elapsed(lambda: [get(h) for h in asked]) / len(asked)


def cache(hashes: list[bytes]) -> float:
    pool = BlockPool(len(hashes))
    pairs = list(zip((pool.allocate() for _ in hashes), hashes, strict=True))
    payload = Payload(10)
    put = pool.cache

    def work() -> None:
        for block, block_hash in pairs:
            put(block, block_hash, payload)

    return elapsed(work) / len(hashes)


def hashing(block_size: int) -> float:
    """Milliseconds for 32k tokens in a list, as a tokeniser gives them."""
    tokens = [(i * 7919) % 151_000 for i in range(32_768)]
    return elapsed(lambda: hash_blocks(b"r" * 32, tokens, block_size)) / 1e6


def memory(count: int) -> tuple[float, float]:
    """Bytes a record of a pool of `count` spare ones, and of as many with a name each."""
    gc.collect()
    tracemalloc.start()
    pool = BlockPool(count)
    spare = tracemalloc.get_traced_memory()[0]
    for number in range(count):
        pool.cache(pool.allocate(), number.to_bytes(32, "little"), None)
    named = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    return spare / count, named / count


def collector_pause(count: int) -> float:
    """Milliseconds of a full garbage collection with a pool of `count` cached blocks alive."""
    pool, _ = cached_pool(names(count), None)
    took = elapsed(gc.collect) / 1e6
    assert len(pool) == count
    return took


def measure(count: int, memory_count: int) -> list[Result]:
    hashes = names(count)
    free_ns = "85-100"
    spare, named = memory(memory_count)
    return [
        Result("allocate, spare record", best(lambda: allocate(count)), "ns/block", None, "180"),
        Result("allocate, new record", best(lambda: allocate_growing(count)), "ns/block", None),
        Result(
            "allocate, evicting", best(lambda: allocate_evicting(hashes, None)), "ns/block", 400, "390-410"
        ),
        Result(
            "allocate, evicting one with a payload",
            best(lambda: allocate_evicting(hashes, Payload(10))),
            "ns/block",
            400,
        ),
        Result("evict by bytes", best(lambda: evict_bytes(hashes)), "ns/block", None),
        Result("free", best(lambda: free(hashes)), "ns/block", 150, free_ns),
        Result("touch", best(lambda: touch(hashes)), "ns/block", 150, "90"),
        Result("lookup", best(lambda: lookup(hashes)), "ns/block", 400, "380"),
        Result("cache (name and payload)", best(lambda: cache(hashes)), "ns/block", None),
        Result(
            "hash 32k tokens, blocks of 16", best(lambda: hashing(16)), "ms", None, "2.6 (pickle), 1.04 (raw)"
        ),
        Result("hash 32k tokens, blocks of 64", best(lambda: hashing(64)), "ms", 1, "0.30 (raw)"),
        Result("hash 32k tokens, blocks of 256", best(lambda: hashing(256)), "ms", None),
        Result(f"memory of {memory_count:,} spare records", spare * memory_count / 2**20, "MiB", None),
        Result(f"memory of {memory_count:,} named blocks", named * memory_count / 2**20, "MiB", None),
        Result(f"full garbage collection, {memory_count:,}", collector_pause(memory_count), "ms", None),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--blocks", type=int, default=20_000, help="blocks a round")
    parser.add_argument("--memory-blocks", type=int, default=1_000_000)
    args = parser.parse_args()
    print(f"{os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}, {args.blocks:,} blocks, best of {ROUNDS}\n")
    print(f"{'':42} {'here':>9} {'':9} {'limit':>6} {'':7} vLLM 0.33, elsewhere")
    for result in measure(args.blocks, args.memory_blocks):
        print(result.line(), flush=True)


if __name__ == "__main__":
    main()
