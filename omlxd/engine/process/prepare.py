"""Prepares a process for MLX, before anything imports it.

Sets what MLX's backends read from the environment, before they compute. A user's own value stays.

| variable                    | ours | why                                                                  |
|-----------------------------|------|----------------------------------------------------------------------|
| `MLX_CUDA_GRAPH_CACHE_SIZE` | 4000 | MLX's CUDA backend replays launch graphs and forgets them beyond     |
|                             |      | this many; an 8B model's decode needs more than its default (H100:   |
|                             |      | 2 to 4% of a step)                                                   |
| `MLX_ENABLE_TF32`           | 0    | float32 products stay float32: what a chunk and what single steps    |
|                             |      | compute then differ by 4e-6 instead of 7e-3, and a hit on an answer  |
|                             |      | gives a cold run's tokens (H100, tools/bench/gpu_identity.py: 25 of  |
|                             |      | 25 families; with TF32 23 of 25). bfloat16 models have few of them    |
| `MLX_MAX_OPS_PER_BUFFER`    | 400  | kernels of a launch graph, and millions of elements that they read:   |
| `MLX_MAX_MB_PER_BUFFER`     |20000 | a step of 4 rows of 16,000 to 20,500 tokens takes 11.8 ms, and 13.0   |
|                             |      | with MLX's own limits, which end a graph every other layer (8B shape, |
|                             |      | H100). Not on macOS                                                   |

`MLX_USE_CUDA_GRAPHS` depends on the model: mlx_adapter/model/load.py sets it. `MLX_PTX_CACHE_DIR` is in the
cache folder: kernel_store.py sets it.

Not set: `MLX_CUDA_USE_CUDNN_SDPA=0`. cuDNN's attention for single tokens sums in another order from run to
run (bfloat16 and float16, 256 tokens and more), so that two runs of one prompt, with a hit or without, may
part at a token whose lead is within rounding. With 0 MLX's own kernels compute alike each time: hits gave a
cold run's tokens in all 14 requests of all 25 families in float32 and of 10 of 12 in bfloat16 (one request
each of phi3 and gemma4_text parted within rounding; H100, tools/bench/gpu_identity.py). But prefill of 16,000
tokens takes 1.46 s instead of 0.68 (8B shape) and long contexts decode slower (mlx_adapter/cache/batch.py).
"""

from __future__ import annotations

import contextlib
import os
import stat
import sys
import tempfile

from . import blas

DEFAULTS = {"MLX_CUDA_GRAPH_CACHE_SIZE": "4000", "MLX_ENABLE_TF32": "0"}
LINUX = {"MLX_MAX_OPS_PER_BUFFER": "400", "MLX_MAX_MB_PER_BUFFER": "20000"}
"""Metal reads these too, and nobody has tried them there."""


def set_backend_defaults() -> None:
    """Call before MLX computes anything: it reads them once."""
    for name, value in (DEFAULTS | (LINUX if sys.platform == "linux" else {})).items():
        os.environ.setdefault(name, value)


def use_own_temporary_folder() -> None:
    """Have MLX keep its compiled CPU kernels in a folder of this user.

    MLX keeps them in `mlx/` of the temporary folder, which on Linux all users share: of two users the
    second could not load a model. A folder of that name that is not ours is left alone.
    """
    if sys.platform != "linux":
        return  # On macOS the temporary folder is the user's own.
    folder = os.path.join(tempfile.gettempdir(), f"omlxd-{os.getuid()}")
    with contextlib.suppress(OSError):
        with contextlib.suppress(FileExistsError):
            os.mkdir(folder, 0o700)
        facts = os.lstat(folder)
        if stat.S_ISDIR(facts.st_mode) and facts.st_uid == os.getuid():
            os.environ["TMPDIR"] = tempfile.tempdir = folder


def prepare_mlx(*, own_blas: bool = False) -> None:
    """Call before anything imports MLX. `own_blas`: leave matrix products to MLX's own."""
    use_own_temporary_folder()
    set_backend_defaults()
    if not own_blas:
        blas.put_first()
