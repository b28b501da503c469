"""How long an image keeps others waiting on a CPU: the longest time between two look-ups of its tower.

    python -m tools.bench.tower_gap [--size 1280x800]

Four layers of the tower of Qwen2.5-VL 7B, three with windows and one without, of random weights in float32.
`whole layers`: as if the tower were looked into between its layers alone; `parts`: as it is
(model/vlm/tower.py).
"""

from __future__ import annotations

import argparse
import itertools
import sys
import tempfile
import time
from pathlib import Path

from omlxd.engine.process import blas

blas.put_first()  # As an engine does, before anything imports MLX.

import numpy as np  # noqa: E402

from omlxd.engine import mlx_adapter  # noqa: E402
from tools.bench.images import build_model  # noqa: E402

PATCH, MERGED = 14, 4
IMAGE = "<|image_pad|>"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--size", default="1280x800")
    options = parser.parse_args()
    width, height = (round(int(side) / PATCH / 2) * 2 for side in options.size.split("x"))
    print(f"{width * height} patches, BLAS: {blas.name() or 'of the wheel'}")
    with tempfile.TemporaryDirectory(prefix="tower-gap-") as folder:
        loaded = mlx_adapter.load(build_model("tower", Path(folder) / "model"))
        tokens = loaded.tokenizer.encode(IMAGE, add_special_tokens=False) * (width * height // MERGED)
        pixels = np.random.default_rng(0).standard_normal((width * height, 1176), np.float32)
        parts, looks = loaded.model.pause, []
        loaded.hook.call = lambda: looks.append(time.perf_counter())
        print("| | longest s | all s |\n|---|---|---|")
        for name, pause in (("whole layers", lambda result: None), ("parts", parts)):
            loaded.model.pause = pause
            looks[:] = [began := time.perf_counter()]
            loaded.model.see_image(
                tokens, {"pixel_values": pixels, "image_grid_thw": np.array([[1, height, width]])}
            )
            looks.append(time.perf_counter())
            longest = max(after - before for before, after in itertools.pairwise(looks))
            print(f"| {name} | {longest:.2f} | {looks[-1] - began:.2f} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
