"""Runs parts in order, each a line of JSON on standard output; a part that raises says so in its line.

The first line is of the part `start`.

JOB is a file that holds a wire.MeasureJob, as JSON.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import msgspec

from .... import wire
from ...process.prepare import prepare_mlx


def main(job: str, *parts: str) -> None:
    # Lines are for whoever started this; what a library prints goes to standard error.
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    os.umask(0o077)
    prepare_mlx()
    from ... import mlx_adapter  # These import MLX.
    from .engine import Job
    from .parts import run

    def end(status: int) -> None:
        mlx_adapter.release_memory()
        os._exit(status)  # As an engine ends: threads may be inside MLX.

    signal.signal(signal.SIGTERM, lambda *_: end(1))
    given = msgspec.json.decode(Path(job).read_bytes(), type=wire.MeasureJob)
    work = Job(Path(given.model), Path(given.folder), given.metal_kernels)
    if work.metal_kernels == "off" and mlx_adapter.backend() == "metal":
        mlx_adapter.use_mlx_alone()
    work.folder.mkdir(exist_ok=True)
    # Of all parts: a kernel that ends one is left out of the others.
    mlx_adapter.attention_backend().use_kernel_folder(work.folder / "kernels", tries=1)
    print(json.dumps({"part": "start"}), file=out, flush=True)
    for part in parts:
        print(json.dumps({"part": part, **run(part, work)}), file=out, flush=True)
    out.close()
    end(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
