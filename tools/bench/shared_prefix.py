"""Decoding rows that share a prefix, with its KV held once and held by each.

    python -m tools.bench.shared_prefix [--shape smollm2 | --model FOLDER] [--tokens 20000] [--rows 1,4]
        [--new 1] [--kv-bits 8]

Random KV stands for the prompts of a shape, so nothing is prefilled. A model of a folder, of any family, is
loaded twice and computes them. `--tokens` are shared, and each row has `--own` tokens behind. Both kinds take
turns, so that a load on the machine slows both: `--run` steps, each started before the one before has been
read, or a pass of several tokens. A row of output for each number of rows: milliseconds a step (median,
fastest), bytes of live KV, the logits' largest difference.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from omlxd.engine.process import blas

blas.put_first()  # As an engine does, before anything imports MLX.

import mlx.core as mx  # noqa: E402

from omlxd.common.units import PREFILL_CHUNK  # noqa: E402
from omlxd.engine import mlx_adapter  # noqa: E402
from omlxd.engine.mlx_adapter import Cache, LoadedModel, Quantisation, Segment  # noqa: E402
from omlxd.engine.mlx_adapter.attention import hooks as attention  # noqa: E402
from omlxd.engine.mlx_adapter.cache.packed import PARTS  # noqa: E402
from omlxd.engine.mlx_adapter.cuda.products import products  # noqa: E402
from omlxd.engine.mlx_adapter.cuda.step.compiled_step import CompiledStep  # noqa: E402
from tools.bench.gpu_rig import row  # noqa: E402
from tools.bench.shapes import SHAPES, Shape, build  # noqa: E402


def random_kv(shape: Shape, how: Quantisation | None, tokens: int, seed: int) -> dict[str, mx.array]:
    """By layout name, (1, heads, tokens, dim)."""
    made: dict[str, mx.array] = {}
    dtype, keys = getattr(mx, shape.dtype), mx.random.split(mx.random.key(seed), 2 * shape.layers)
    for at, key in enumerate(keys):
        size = 1, shape.kv_heads, tokens, shape.head_dim
        plain = mx.random.normal(size, dtype=dtype, key=key)
        name = f"layers.{at // 2}.{('keys', 'values')[at % 2]}"
        parts = [plain] if how is None else how.pack(plain)
        made |= dict(zip([name] if how is None else [f"{name}.{p}" for p in PARTS], parts, strict=True))
        mx.eval(parts)
    return made


def private(model: Any, prefix: list[dict[str, mx.array]], own: dict[str, mx.array]) -> Cache:
    """A row that holds all its KV itself."""
    room = mlx_adapter.round_up(1) * 2
    parts = [*prefix, own]
    arrays = {
        name: mx.concatenate([*(p[name] for p in parts), mx.zeros_like(own[name])[:, :, :room]], axis=2)
        for name in own
    }
    mx.eval(arrays)
    length = sum(next(iter(part.values())).shape[2] for part in parts)
    return mlx_adapter.filled_cache(model, arrays, length)


def shared(model: Any, segments: list[Segment], base: int, own: dict[str, mx.array]) -> Cache:
    """A row that holds `own`, and shares `segments`."""
    arrays = {name: array + 0 for name, array in own.items()}
    mx.eval(arrays)
    length = base + next(iter(own.values())).shape[2]
    cache = mlx_adapter.filled_cache(model, arrays, length, segments, base)
    for leaf in cache:
        leaf.joint = False
    return cache


def prompts(loaded: LoadedModel, tokens: int, own: int, rows: int) -> list[Cache]:
    """Rows whose prompts begin with the same `tokens`. They share segments where `loaded` has any."""
    length, block, live = tokens + own, 64, loaded.segments
    given = mx.random.randint(5, 200, (1, tokens), key=mx.random.key(0))
    first = mlx_adapter.new_cache(loaded.model, length + 512)
    for start in range(0, tokens, PREFILL_CHUNK):
        loaded.model(given[:, start : start + PREFILL_CHUNK], cache=first)
        mx.eval(mlx_adapter.state_arrays(first))
    names = [at.to_bytes(4) for at in range(tokens // block)]
    live.cut(first, names, block, length, length + 512, last=True)
    made: list[Cache] = []
    for seed in range(1, rows + 1):
        cache = mlx_adapter.copied(first)
        loaded.model(mx.random.randint(5, 200, (1, own), key=mx.random.key(seed)), cache=cache)
        mx.eval(mlx_adapter.state_arrays(cache))
        made.append(cache)
    return made


def held(make: Callable[[], Cache]) -> tuple[Cache, int]:
    """A cache and the bytes that it added."""
    before = mx.get_active_memory()
    cache = make()
    mx.eval([array for array in mlx_adapter.state_arrays(cache)])
    mlx_adapter.give_memory_back()
    return cache, mx.get_active_memory() - before


def compare(options: argparse.Namespace, rows: int, each: dict[str, tuple[LoadedModel, Cache, int]]) -> None:
    """Steps or passes of each kind in turns: a row of output."""
    tokens = mx.zeros((rows, options.new), mx.int32)
    steps = {kind: CompiledStep(loaded.model) for kind, (loaded, _, _) in each.items()}
    done = dict.fromkeys(each, 0)
    times: dict[str, list[float]] = {kind: [] for kind in each}
    logits: dict[str, mx.array] = {}
    for _ in range(options.passes):
        for kind, (loaded, cache, _) in each.items():
            began = time.perf_counter()
            for _ in range(options.run):
                plain = options.new == 1
                step = steps[kind](tokens, cache, done[kind]) if plain else None
                logits[kind] = loaded.model(tokens, cache=cache) if step is None else step
                done[kind] += 1
                mx.async_eval(logits[kind], mlx_adapter.state_arrays(cache))
            mx.eval(logits[kind], mlx_adapter.state_arrays(cache))
            times[kind].append((time.perf_counter() - began) * 1e3 / options.run)
            if options.new > 1:
                mlx_adapter.trim(cache, [options.new] * rows)
    spoken = [f"{statistics.median(times[k]):.1f}, {min(times[k]):.1f}" for k in times]
    far = mx.abs(logits["private"] - logits["shared"]).max().item()
    row(rows, *spoken, *(nbytes / 1e6 for _, _, nbytes in each.values()), f"{far:.1e}")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--shape", default="smollm2", choices=SHAPES)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--tokens", type=int, default=20000)
    parser.add_argument("--own", type=int, default=500)
    parser.add_argument("--rows", default="1,4")
    parser.add_argument("--passes", type=int, default=12)
    parser.add_argument("--run", type=int, default=1, help="steps of one token that are timed together")
    parser.add_argument("--new", type=int, default=1, help="tokens of a row in a pass: 64 as in a prompt")
    parser.add_argument("--segment", type=int, default=mlx_adapter.SEGMENT)
    parser.add_argument("--kv-bits", type=int, choices=(8, 4))
    options = parser.parse_args()
    shape = SHAPES[options.shape]
    attention.install()
    how = Quantisation(options.kv_bits) if options.kv_bits else None
    row("rows", "private ms", "shared ms", "private MB", "shared MB", "difference")
    row(*["---"] * 6)
    if options.model:
        each = {"private": mlx_adapter.load(options.model, how)}
        each["shared"] = mlx_adapter.load(options.model, how, segment=options.segment)
        assert each["shared"].segments.tokens, "this model shares nothing"
        for rows in map(int, options.rows.split(",")):
            taken: dict[str, tuple[LoadedModel, Cache, int]] = {}
            for kind, loaded in each.items():
                cache, size = held(
                    lambda loaded=loaded, rows=rows: mlx_adapter.merge(
                        prompts(loaded, options.tokens, options.own, rows)
                    )
                )
                taken[kind] = loaded, cache, size
            compare(options, rows, taken)
        return 0
    loaded = build(shape, kv=how)
    products.prepare(loaded.model)
    assert loaded.layout is not None
    size, fresh = options.segment, vars(loaded.model).get("make_cache")
    count = options.tokens // size
    prefix = [random_kv(shape, how, size, i) for i in range(count)]
    prefix_bytes = count * loaded.layout.nbytes(size)
    for rows in map(int, options.rows.split(",")):
        owns = [random_kv(shape, how, options.own + options.tokens % size, 100 + i) for i in range(rows)]
        vars(loaded.model).pop("make_cache", None)
        if fresh is not None:
            loaded.model.make_cache = fresh
        private_cache, private_bytes = held(
            lambda owns=owns: mlx_adapter.merge([private(loaded.model, prefix, own) for own in owns])
        )
        live = mlx_adapter.share_prefixes(loaded.model, size)
        assert live.tokens, "this model shares nothing"
        segments = [Segment(kv, how) for kv in prefix]
        shared_cache, shared_bytes = held(
            lambda owns=owns, segments=segments: mlx_adapter.merge(
                [shared(loaded.model, segments, count * size, own) for own in owns]
            )
        )
        both = shared_cache, shared_bytes + prefix_bytes
        compare(options, rows, {"private": (loaded, private_cache, private_bytes), "shared": (loaded, *both)})
        del private_cache, shared_cache, segments, both
        mlx_adapter.give_memory_back()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
