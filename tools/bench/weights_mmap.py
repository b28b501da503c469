"""Weights read or mapped: time to load, memory of one engine and of two of one model, and equal logits.

    python -m tools.bench.shapes wide FOLDER
    python -m tools.bench.weights_mmap FOLDER [--rounds 3] [--align]

Memory is Linux's: Rss counts a shared page in each process, Pss each process's part of it. The files are in
the page cache; `--cold` drops them from it before each load (fadvise), so that the disk counts.
`mx.save_safetensors` puts tensors behind a header of any length; `--align` writes such a file anew, with the
header padded as other programs pad it.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

PROMPT = [[*range(3, 11)]]


def child(folder: Path, mode: str) -> None:
    """Load, compute a prompt, say so, and stay until stdin ends. Prints a line of JSON at each."""
    import mlx.core as mx

    from omlxd.engine import mlx_adapter

    before = memory()
    began = time.perf_counter()
    loaded = mlx_adapter.load(folder, None, True, "", mode)
    seconds = time.perf_counter() - began
    at_load = memory()
    logits = loaded.model(mx.array(PROMPT)).astype(mx.float32)
    mx.eval(logits)
    digest = hashlib.sha256(bytes(memoryview(logits))).hexdigest()[:12]
    first = time.perf_counter() - began
    row = {"load_s": seconds, "first_s": first, "before": before, "at_load": at_load, "logits": digest}
    row |= {"mapped": loaded.mapped.nbytes, "weights": loaded.weight_bytes}
    print(json.dumps(row), flush=True)
    for _ in sys.stdin:
        print(json.dumps(memory()), flush=True)


def memory() -> dict[str, int]:
    """MB of this process."""
    fields = (line.split() for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:])
    return {name.rstrip(":"): int(kb) // 1024 for name, kb, *_ in fields if name in ("Rss:", "Pss:")}


class Engine:
    def __init__(self, folder: Path, mode: str):
        command = [sys.executable, "-m", "tools.bench.weights_mmap", str(folder), "--child", mode]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.row = self._line()

    def _line(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())

    def memory(self) -> dict[str, int]:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return self._line()

    def end(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def drop(folder: Path) -> None:
    """Take the weights out of the page cache."""
    for file in folder.glob("*.safetensors"):
        fd = os.open(file, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def align(file: Path) -> None:
    """Pad the header with spaces, so that tensors begin at a multiple of 8."""
    copy = file.with_suffix(".aligned")
    with file.open("rb") as source, copy.open("wb") as target:
        header = source.read(int.from_bytes(source.read(8), "little"))
        header += b" " * (-len(header) % 8)
        target.write(len(header).to_bytes(8, "little") + header)
        shutil.copyfileobj(source, target, 1 << 24)
    copy.replace(file)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.bench.weights_mmap")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cold", action="store_true")
    parser.add_argument("--align", action="store_true")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(args.folder, args.child)
        return
    for file in args.folder.glob("*.safetensors") if args.align else ():
        align(file)
    digests: set[str] = set()
    for mode in ("off", "on") * args.rounds:
        if args.cold:
            drop(args.folder)
        one = Engine(args.folder, mode)
        two = Engine(args.folder, mode)
        held = [one.memory(), two.memory()]
        digests |= {one.row["logits"], two.row["logits"]}
        row, again = one.row, two.row
        print(
            f"{mode:3}  load {row['load_s']:.2f} and {again['load_s']:.2f} s, to the first logits "
            f"{row['first_s']:.2f} and {again['first_s']:.2f} s, mapped {row['mapped'] >> 20} of "
            f"{row['weights'] >> 20} MB; Rss {held[0]['Rss']} and {held[1]['Rss']} MB, "
            f"Pss together {held[0]['Pss'] + held[1]['Pss']} MB",
            flush=True,
        )
        one.end()
        two.end()
    print(f"logits {'equal' if len(digests) == 1 else 'DIFFER'}: {' '.join(sorted(digests))}")


if __name__ == "__main__":
    main()
