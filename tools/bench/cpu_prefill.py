"""Where the time of a prefill goes on a CPU: products of weights, attention, elementwise operations.

    python -m tools.bench.cpu_prefill FOLDER [--tokens 1024]

FOLDER holds a model that mlx-lm computes by its `llama` module. Weights are float32, passes have 64 tokens,
as in an engine. Each operation is evaluated alone, so shares are of a sum a little above an engine's time.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from omlxd.engine.process import blas

blas.put_first()  # As an engine does, before anything imports MLX.

import mlx.core as mx  # noqa: E402
import mlx.nn as nn  # noqa: E402
from mlx_lm.models import llama  # noqa: E402
from mlx_lm.models.cache import make_prompt_cache  # noqa: E402

from omlxd.common.units import CPU_PREFILL_CHUNK  # noqa: E402
from omlxd.engine.mlx_adapter.model.load import load  # noqa: E402

spent: Counter[str] = Counter()
"""Seconds by kind of operation."""


def timed(kind: str, call: Callable[..., mx.array], beside: Callable[..., None] | None = None) -> Any:
    """`call`, its seconds counted; `beside` gets the same arguments, and its time is not the prefill's."""

    def run(*args: Any, **options: Any) -> mx.array:
        mx.eval([each for each in args if isinstance(each, mx.array)])
        began = time.perf_counter()
        out = call(*args, **options)
        mx.eval(out)
        spent[kind] += time.perf_counter() - began
        if beside is not None:
            began = time.perf_counter()
            beside(*args)
            spent["beside"] += time.perf_counter() - began
        return out

    return run


def softmax_alone(queries: mx.array, keys: mx.array, *_: Any) -> None:
    scores = mx.zeros((*queries.shape[:3], keys.shape[2]))
    mx.eval(scores)
    began = time.perf_counter()
    mx.eval(mx.softmax(scores, axis=-1, precise=True))
    spent["of attention: softmax"] += time.perf_counter() - began


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tokens", type=int, default=1024)
    options = parser.parse_args()
    loaded = load(options.folder, None, True)
    cache = make_prompt_cache(loaded.model)
    nn.Linear.__call__ = timed("products of weights", nn.Linear.__call__)
    nn.RMSNorm.__call__ = timed("RMSNorm", nn.RMSNorm.__call__)
    llama.swiglu = timed("SwiGLU", llama.swiglu)
    llama.scaled_dot_product_attention = timed("attention", llama.scaled_dot_product_attention, softmax_alone)
    tokens = [at * 7919 % loaded.vocab_size for at in range(options.tokens)]
    began = time.perf_counter()
    for at in range(0, len(tokens), CPU_PREFILL_CHUNK):
        logits = loaded.model(mx.array([tokens[at : at + CPU_PREFILL_CHUNK]]), cache=cache)
        mx.eval(logits, [each.state for each in cache])
    total = time.perf_counter() - began - spent.pop("beside")
    print(f"{blas.name() or 'reference BLAS'}: {len(tokens)} tokens in {total:.2f} s")
    print("| operation | s | share |\n|---|---|---|")
    spent["rope, residuals and the rest"] = total - sum(
        seconds for kind, seconds in spent.items() if not kind.startswith("of ")
    )
    for kind, seconds in spent.most_common():
        print(f"| {kind} | {seconds:.2f} | {seconds / total:.0%} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
