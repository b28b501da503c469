"""The engine's model by itself: a pass of 2,048 tokens, and 64 decode steps behind it."""

from __future__ import annotations

import statistics
import time

import mlx.core as mx
import psutil

from ....common.units import CPU_PREFILL_CHUNK, human, process_memory
from ....models.demo import is_demo
from ... import mlx_adapter
from ...mlx_adapter import LoadedModel
from .engine import Engine, Job, numbers
from .timing import Measured, short

TOKENS, STEPS = 2048, 64
WARM = 64
MOST_S = 3.0
"""Seconds after which the pass is not repeated."""


def load(engine: Engine, job: Job) -> Measured:
    """Describe the model by its shape, as its name may be private, and how attention is computed."""
    config, backend = engine.loaded.config, mlx_adapter.attention_backend().name
    words = f"{config.get('num_hidden_layers')} layers, {config.get('hidden_size')} wide"
    kind = "random weights" if is_demo(job.model) else "a model that is here"
    packing = config.get("quantization") or {}
    if isinstance(packing, dict) and "bits" in packing:
        words += f", {packing['bits']} bits"
    facts = f"{kind}: {engine.loaded.model_type}, {words}, {human(engine.loaded.weight_bytes)}"
    own = "attention is MLX's own: there is no kernel of omlxd's to check"
    if job.metal_kernels == "off" and mlx_adapter.backend() == "metal":
        own = "Metal kernels off (--metal-kernels): all is MLX's own"
    notes = engine.notes or ["nothing was measured"]
    return Measured(
        [
            ("model", f"{facts}, loaded in {engine.load_s:.1f} s"),
            ("kernels", own if backend == "mlx" else f"those for {backend}, as the load judged them:"),
            *(("", note) for note in notes),
        ]
    )


def passes(engine: Engine) -> Measured:
    chunk = CPU_PREFILL_CHUNK if mlx_adapter.backend() == "cpu" else TOKENS
    _run(engine.loaded, WARM, chunk, 2)
    prefill, steps = _run(engine.loaded, TOKENS, chunk, STEPS)
    if prefill < MOST_S:
        again = _run(engine.loaded, TOKENS, chunk, STEPS)
        prefill, steps = min(prefill, again[0]), steps + again[1]
    step = statistics.median(steps)
    text = (
        f"{TOKENS:,} tokens in {short(prefill)} ({TOKENS / prefill:,.0f} a second"
        f"{f', in chunks of {chunk}' if chunk < TOKENS else ''}); "
        f"{STEPS} decode steps of {short(step)}, the slowest {short(max(steps))}"
    )
    wired = getattr(psutil.virtual_memory(), "wired", 0)
    values = {"pass": prefill, "step": step, "wired": wired}
    return Measured([("pass", text), ("engine memory", _memory())], values)


def _run(loaded: LoadedModel, tokens: int, chunk: int, steps: int) -> tuple[float, list[float]]:
    """Return the seconds of a pass over so many tokens, and of each greedy step behind it."""
    cache = mlx_adapter.new_cache(loaded.model, tokens + steps + 1)
    prompt = mx.array([numbers(tokens, loaded.vocab_size)])
    taken: list[float] = []
    began, token = time.perf_counter(), prompt
    for start in range(0, tokens, chunk):
        token = mx.argmax(loaded.model(prompt[:, start : start + chunk], cache=cache)[:, -1:], axis=-1)
        mx.eval(token, mlx_adapter.state_arrays(cache))
    prefill = time.perf_counter() - began
    for _ in range(steps):
        began = time.perf_counter()
        token = mx.argmax(loaded.model(token, cache=cache)[:, -1:], axis=-1)
        mx.eval(token, mlx_adapter.state_arrays(cache))
        taken.append(time.perf_counter() - began)
    return prefill, taken


def _memory() -> str:
    process = psutil.Process()
    own = f"footprint {human(process_memory(process))}, resident {human(process.memory_info().rss)}"
    held = f"MLX has {human(mx.get_active_memory())} active, {human(mx.get_cache_memory())} kept"
    wired = human(int(mlx_adapter.limits["mlx_wired_limit_bytes"]))
    return f"{own}; {held}, {human(mx.get_peak_memory())} at most; may wire {wired}"
