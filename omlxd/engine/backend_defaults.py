"""What MLX's backends read from the environment, set before they compute. A user's own value stays.

| variable                    | ours | why                                                                  |
|-----------------------------|------|----------------------------------------------------------------------|
| `MLX_CUDA_GRAPH_CACHE_SIZE` | 4000 | MLX's CUDA backend replays launch graphs and forgets them beyond     |
|                             |      | this many; an 8B model's decode needs more than its default (H100:   |
|                             |      | 2 to 4% of a step)                                                   |
| `MLX_ENABLE_TF32`           | 0    | float32 products stay float32: what a chunk and what single steps    |
|                             |      | compute then differ by 4e-6 instead of 7e-3, and a hit on an answer  |
|                             |      | gives a cold run's tokens (H100, tools/bench/gpu_identity.py: 25 of  |
|                             |      | 25 families; with TF32 23 of 25). bfloat16 models have few of them    |

Not set: `MLX_CUDA_USE_CUDNN_SDPA=0`. cuDNN's attention for single tokens sums in another order from run to
run (bfloat16 and float16, 256 tokens and more), so that two runs of one prompt, with a hit or without, may
part at a token whose lead is within rounding. With 0 MLX's own kernels compute alike each time: hits gave a
cold run's tokens in all 14 requests of all 25 families in float32 and of 10 of 12 in bfloat16 (one request
each of phi3 and gemma4_text parted within rounding; H100, tools/bench/gpu_identity.py). But prefill of 16,000
tokens takes 1.46 s instead of 0.68 (8B shape) and long contexts decode slower (mlx_adapter/batch_kv.py).
"""

from __future__ import annotations

import os

DEFAULTS = {"MLX_CUDA_GRAPH_CACHE_SIZE": "4000", "MLX_ENABLE_TF32": "0"}


def set_backend_defaults() -> None:
    """Call before MLX computes anything: it reads them once."""
    for name, value in DEFAULTS.items():
        os.environ.setdefault(name, value)
