"""How fast blocks come off the disk and go onto it, beside plain reads and writes of the same files.

    python -m tools.bench.block_files [--shape large|small] [--megabytes 600] [--threads 1,2,4,8] [--dir DIR]

The page cache is warm, so this measures what the store adds, not the disk. Destinations are written
to once before the clock starts, so no design pays for page faults that another does not. Designs:

    plain      preadv of each file into one buffer, a slice a file: the limit, no check, no scatter
    scatter    ColdTier.load straight into the rows of the final arrays, (1, heads, capacity, dim) a
               tensor: heads x tensors pieces a block
    scratch    ColdTier.load into one buffer of a block a thread, then a numpy copy a tensor
    ... no digest   the same without xxh3 over the payload: what checking costs

The files go into a temporary folder, removed at the end.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy as np

import omlxd.kv.files.block_file as block_file
from omlxd.kv.cold.tier import ColdTier
from omlxd.kv.files.block_file import BlockFormat, BlockKey
from omlxd.kv.hashing import hash_blocks, namespace_of
from omlxd.kv.layout import Group, KVLayout

BLOCK = 64
ROUNDS = 5


@dataclass(slots=True, frozen=True)
class Shape:
    layers: int
    heads: int
    dim: int

    def layout(self) -> KVLayout:
        names = tuple(f"{kv}.{layer}" for layer in range(self.layers) for kv in ("k", "v"))
        return KVLayout((Group(names, self.heads, self.dim, "BF16"),))


SHAPES = {"large": Shape(36, 8, 128), "small": Shape(16, 8, 64)}


class Files:
    """Block files of one chain, and where their payloads belong."""

    def __init__(self, root: Path, shape: Shape, count: int, block: int = BLOCK):
        self.block = block
        namespace = namespace_of({"bench": "restore"})
        self.shape = shape
        self.layout = shape.layout()
        self.tier = ColdTier(root, BlockFormat(namespace, self.layout, block))
        tokens = list(range(count * block))
        hashes = hash_blocks(namespace, tokens, block)
        parents = [namespace, *hashes]
        self.keys = [
            BlockKey(h, parent, tokens[i * block : (i + 1) * block])
            for i, (h, parent) in enumerate(zip(hashes, parents, strict=False))
        ]
        self.block_bytes = self.layout.nbytes(block)
        self.payload = np.random.default_rng(0).integers(0, 256, self.block_bytes, np.uint8)

    def store_all(self) -> None:
        for key in self.keys:
            self.tier.store(key, [memoryview(self.payload)])

    def path(self, index: int) -> str:
        return f"{self.tier.root}/{self.tier.path_of(self.keys[index].block_hash)}"


class Landing:
    """Final arrays, one a tensor, (1, heads, capacity, dim) of 16-bit items, and byte views of their rows."""

    def __init__(self, files: Files):
        shape, capacity = files.shape, len(files.keys) * BLOCK
        tensors = len(files.layout.groups[0].names)
        self.arrays = [np.ones((1, shape.heads, capacity, shape.dim), np.uint16) for _ in range(tensors)]
        self.rows = [memoryview(a[0, h]).cast("B") for a in self.arrays for h in range(shape.heads)]
        self.each = BLOCK * shape.dim * 2
        self.block_shape = (tensors, shape.heads, BLOCK, shape.dim)

    def pieces(self, index: int) -> list[memoryview]:
        start, stop = index * self.each, (index + 1) * self.each
        return [row[start:stop] for row in self.rows]

    def copy_in(self, index: int, block: np.ndarray) -> None:
        a, b = index * BLOCK, (index + 1) * BLOCK
        for array, part in zip(self.arrays, block, strict=True):
            array[0, :, a:b] = part

    def wipe(self) -> None:
        for array in self.arrays:
            array[:] = 1

    def holds(self, files: Files) -> bool:
        block = files.payload.view(np.uint16).reshape(self.block_shape)
        last = len(files.keys) - 1
        return all(
            np.array_equal(array[0, :, i * BLOCK : (i + 1) * BLOCK], part)
            for i in (0, last // 2, last)
            for array, part in zip(self.arrays, block, strict=True)
        )


# --------------------------------------------------------------------- designs: each fills block `index`

Fill = Callable[[int], None]


def plain(files: Files, new: Callable[[int, type], np.ndarray] = np.ones) -> Fill:
    """Reads of whole files into one buffer, made by `new`."""
    size = files.tier.format.file_bytes
    buffer = memoryview(new(size * len(files.keys), np.uint8))

    def fill(index: int) -> None:
        fd = os.open(files.path(index), os.O_RDONLY)
        got = os.preadv(fd, [buffer[index * size : (index + 1) * size]], 0)
        os.close(fd)
        assert got == size

    return fill


def scatter(files: Files, landing: Landing) -> Fill:
    return lambda index: files.tier.load(files.keys[index], landing.pieces(index))


def scratch(files: Files, landing: Landing) -> Fill:
    local = threading.local()

    def fill(index: int) -> None:
        if not hasattr(local, "block"):
            local.block = np.empty(landing.block_shape, np.uint16)
        files.tier.load(files.keys[index], [memoryview(local.block).cast("B")])
        landing.copy_in(index, local.block)

    return fill


def timed(fill: Fill, count: int, threads: int, nbytes: int) -> float:
    """GB/s over all blocks."""
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(lambda _: time.sleep(0.001), range(threads)))  # the threads are there
        began = time.perf_counter()
        list(pool.map(fill, range(count)))
        took = time.perf_counter() - began
    return nbytes * count / took / 1e9


class Blank:
    """Stands for a digest, and looks at nothing."""

    def update(self, buffer: memoryview) -> None:
        pass

    def hexdigest(self) -> str:
        return "0" * 32


class NoDigest:
    """Within it, payloads are neither digested nor checked."""

    def __enter__(self) -> None:
        self._xxhash = block_file.xxhash
        block_file.xxhash = SimpleNamespace(xxh3_128=Blank)

    def __exit__(self, *_: object) -> None:
        block_file.xxhash = self._xxhash


def measure_reads(files: Files, threads: Sequence[int]) -> None:
    landing = Landing(files)
    fill_plain = plain(files)
    designs: list[tuple[str, Fill]] = [
        ("scatter", scatter(files, landing)),
        ("scratch", scratch(files, landing)),
    ]
    count, nbytes = len(files.keys), files.block_bytes
    for name, fill in designs:
        landing.wipe()
        timed(fill, count, 1, nbytes)
        assert landing.holds(files), name
    print(f"{'read, GB/s (of plain)':26}" + "".join(f"{n:>6} threads" for n in threads))
    rates: dict[str, list[float]] = {}
    for number in threads:
        found: dict[str, float] = {}
        for _ in range(ROUNDS):
            # In turn, so that whatever else the machine does falls on all alike.
            runs = [("plain", fill_plain), *designs]
            for name, fill in runs:
                found[name] = max(found.get(name, 0), timed(fill, count, number, nbytes))
        for name, rate in found.items():
            rates.setdefault(name, []).append(rate)
    measure_unchecked(files, landing, threads, rates)
    for name, row in rates.items():
        cells = [f"{r:6.2f} ({r / p:4.2f})" for r, p in zip(row, rates["plain"], strict=True)]
        print(f"{name:26}" + "".join(f"{cell:>14}" for cell in cells))


def measure_unchecked(
    files: Files, landing: Landing, threads: Sequence[int], rates: dict[str, list[float]]
) -> None:
    unchecked = Files(Path(tempfile.mkdtemp(dir=files.tier.root)), files.shape, len(files.keys))
    with NoDigest():
        unchecked.store_all()
        for name, make in (("scatter, no digest", scatter), ("scratch, no digest", scratch)):
            fill = make(unchecked, landing)
            for number in threads:
                best = max(timed(fill, len(files.keys), number, files.block_bytes) for _ in range(ROUNDS))
                rates.setdefault(name, []).append(best)
    shutil.rmtree(unchecked.tier.root)


def measure_parts(files: Files) -> None:
    """One thread, microseconds a block: what each part of a load costs by itself."""
    landing = Landing(files)
    block = files.payload.view(np.uint16).reshape(landing.block_shape)
    pieces = landing.pieces(0)
    key = files.keys[0]

    def us(work: Callable[[], object]) -> float:
        took: list[float] = []
        for _ in range(15):
            began = time.perf_counter()
            work()
            took.append(time.perf_counter() - began)
        return min(took) * 1e6

    whole = [memoryview(files.payload)]
    print(
        f"\none block of {files.block_bytes / 1e6:.1f} MB, {len(pieces)} pieces, in microseconds, one thread"
    )
    print(f"  build the list of pieces     {us(lambda: landing.pieces(0)):8.0f}")
    print(f"  build the expected header    {us(lambda: files.tier.format.header(key, b'0' * 32)):8.0f}")
    print(f"  digest, one call             {us(lambda: block_file.digest_of(whole)):8.0f}")
    print(f"  digest, a call a piece       {us(lambda: block_file.digest_of(pieces)):8.0f}")
    print(f"  copy from scratch, a tensor  {us(lambda: landing.copy_in(0, block)):8.0f}")
    print(f"  load, scatter                {us(lambda: files.tier.load(key, pieces)):8.0f}")
    print(f"  load, one buffer             {us(lambda: files.tier.load(key, whole)):8.0f}")


def measure_writes(files: Files, threads: Sequence[int]) -> None:
    folder = Path(tempfile.mkdtemp(dir=files.tier.root))
    (folder / "store").mkdir()  # A store makes no cache dir.
    other = Files(folder / "store", files.shape, len(files.keys))
    header = bytes(files.tier.format.header_bytes)

    def write_plain(index: int) -> None:
        fd = os.open(folder / f"{index}", os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        assert os.writev(fd, [header, files.payload]) == files.tier.format.file_bytes
        os.close(fd)

    def store(index: int) -> None:
        other.tier.store(other.keys[index], [memoryview(other.payload)])

    def fresh(fill: Fill, number: int) -> float:
        rate = timed(fill, len(files.keys), number, files.block_bytes)
        for path in folder.rglob("*"):
            if path.is_file():  # the folders stay, as they do in a cache dir in use
                path.unlink()
        return rate

    print(f"\n{'write, GB/s (of plain)':26}" + "".join(f"{n:>6} threads" for n in threads))
    rows: dict[str, list[float]] = {"plain": [], "ColdTier.store": []}
    fresh(store, 1)
    for number in threads:
        best = {"plain": 0.0, "ColdTier.store": 0.0}
        for _ in range(3):
            best["plain"] = max(best["plain"], fresh(write_plain, number))
            best["ColdTier.store"] = max(best["ColdTier.store"], fresh(store, number))
        for name, rate in best.items():
            rows[name].append(rate)
    for name, row in rows.items():
        cells = [f"{r:6.2f} ({r / p:4.2f})" for r, p in zip(row, rows["plain"], strict=True)]
        print(f"{name:26}" + "".join(f"{cell:>14}" for cell in cells))
    shutil.rmtree(folder)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=sorted(SHAPES), default="large")
    parser.add_argument("--megabytes", type=int, default=500, help="of payload; at most 1500")
    parser.add_argument("--threads", default="1,2,4,8")
    parser.add_argument("--dir", default=None, help="where the temporary folder goes")
    args = parser.parse_args()
    shape = SHAPES[args.shape]
    count = max(1, min(args.megabytes, 1500) * 10**6 // shape.layout().nbytes(BLOCK))
    threads = [int(n) for n in args.threads.split(",")]
    with tempfile.TemporaryDirectory(prefix="omlxd-block-files-", dir=args.dir) as root:
        files = Files(Path(root), shape, count)
        files.store_all()
        print(f"{os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}; {count} files, {args.shape}: {shape}\n")
        measure_reads(files, threads)
        measure_parts(files)
        measure_writes(files, threads)


if __name__ == "__main__":
    main()
