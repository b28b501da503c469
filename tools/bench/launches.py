"""How many kernels a decode step launches on a Mac, and how long the host builds its graph, on any machine.

    python -m tools.bench.launches [--rows 1 4 8] [--layers 16] [--models dense experts hybrid]

MLX's own graph of a step is taken while it is exported, with the device pretended to be Metal and the
kernels of metal/ as their load chooses them, or `off`. Norms, RoPE and attention are left whole, as on
Metal. A primitive that only looks at another's array launches nothing; a join copies each of its arrays;
operations number by number count as one with the only one that reads them, as `mx.compile` joins them; other
primitives are one kernel each. That is what Metal's sources say of steps of one token; attention of long
rows by MLX's own is two kernels there, and counts as one; the recurrence of a hybrid counts as mlx-lm's
operations, which has a kernel for it on a Mac. A layer's are what a model launches more than one of half as
many layers. Processor milliseconds of building a step's graph are the least of several.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "support"))

import pretend_metal

if __name__ == "__main__":
    pretend_metal.install()

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.utils import _get_classes

from omlxd.engine import mlx_adapter
from omlxd.engine.mlx_adapter.attention import backend, hooks
from omlxd.engine.mlx_adapter.metal import kernel as metal_kernel
from omlxd.engine.mlx_adapter.model import checks, load

COMMON: dict[str, Any] = {
    **{"vocab_size": 512, "hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 8},
    **{"num_key_value_heads": 2, "head_dim": 64, "rms_norm_eps": 1e-6, "rope_theta": 10000.0},
    **{"max_position_embeddings": 32768, "tie_word_embeddings": False},
}
EXPERTS: dict[str, Any] = {
    **{"num_experts": 8, "num_experts_per_tok": 2, "decoder_sparse_step": 1, "mlp_only_layers": []},
    **{"moe_intermediate_size": 64, "norm_topk_prob": True},
}
MODELS: dict[str, dict[str, Any]] = {
    "dense": {"model_type": "qwen3"},
    "experts": {"model_type": "qwen3_moe", **EXPERTS},
    "hybrid": {
        **{"model_type": "qwen3_next", **EXPERTS, "shared_expert_intermediate_size": 64},
        **{"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 64},
        **{"linear_value_head_dim": 64, "linear_conv_kernel_dim": 4, "full_attention_interval": 4},
        **{"partial_rotary_factor": 0.25},
    },
}

VIEWS = {
    *("Broadcast", "Reshape", "Flatten", "Unflatten", "ExpandDims", "Squeeze", "Transpose", "Slice", "Split"),
    *("StopGradient", "AsStrided", "View", "Depends", "Contiguous", "Full", "NumberOfElements"),
}
ELEMENTWISE = {
    *(
        "Add",
        "Subtract",
        "Multiply",
        "Divide",
        "Sigmoid",
        "Exp",
        "Log",
        "Log1p",
        "Negative",
        "Square",
        "Sqrt",
    ),
    *(
        "Maximum",
        "Minimum",
        "Select",
        "AsType",
        "Greater",
        "Less",
        "LogAddExp",
        "Tanh",
        "Power",
        "Abs",
        "Erf",
    ),
}


def built(name: str, layers: int) -> Any:
    """A model of random weights in 4 bits, whose batches are chosen as at a load."""
    config = COMMON | MODELS[name] | {"num_hidden_layers": layers}
    made, arguments = _get_classes(config)
    model = made(arguments.from_dict(config))
    model.set_dtype(mx.bfloat16)
    model.eval()  # As mlx-lm loads it: a layer that trains uses no kernel of ours.
    nn.quantize(model, group_size=64, bits=4)
    mx.eval(model.parameters())
    hooks.install()
    backend.current().prepare(model)
    load.run_passes(model, [[0]])
    checks.use_own_rows(model)
    return model


def batch_of(model: Any, lengths: Sequence[int]) -> mlx_adapter.Cache:
    caches = []
    for length in lengths:
        cache = mlx_adapter.new_cache(model, length + 64)
        mx.eval(model(mx.arange(length)[None] % 500, cache=cache), mlx_adapter.state_arrays(cache))
        caches.append(cache)
    alone = len(caches) == 1 and not mlx_adapter.joins_alone(caches[0])
    batch = caches[0] if alone else mlx_adapter.merge(caches, apart=True)
    mx.eval(mlx_adapter.state_arrays(batch))
    return batch


def _whole(name: str) -> Callable[..., mx.array]:
    """In place of an operation that is one kernel on Metal: one node of its first argument's shape."""

    def call(x: mx.array, *others: Any, **more: Any) -> mx.array:
        inputs = [x, *(a for a in (*others, *more.values()) if isinstance(a, mx.array))]
        names = [f"x{at}" for at in range(len(inputs))]
        made: Any = mx.fast.metal_kernel(
            name=name, input_names=names, output_names=["y"], source="y[0] = x0[0];"
        )
        how: dict[str, Any] = {"grid": (1, 1, 1), "threadgroup": (1, 1, 1)}
        return made(inputs=inputs, output_shapes=[x.shape], output_dtypes=[x.dtype], **how)[0]

    return call


WHOLE = ("rms_norm", "rope", "scaled_dot_product_attention")


@contextmanager
def _as_on_metal() -> Iterator[None]:
    held, run = {name: getattr(mx.fast, name) for name in WHOLE}, metal_kernel.run
    try:
        for name in WHOLE:
            setattr(mx.fast, name, _whole(name))
        metal_kernel.run = metal_kernel.on_device
        yield
    finally:
        for name, own in held.items():
            setattr(mx.fast, name, own)
        metal_kernel.run = run


def step(model: Any, cache: mlx_adapter.Cache, rows: int, new: int) -> tuple[list[dict[str, Any]], float]:
    """The primitives of a step, and the processor seconds that the host takes to put it together."""
    found: list[dict[str, Any]] = []
    took, cache = 0.0, mlx_adapter.copied(cache)
    mx.eval(mlx_adapter.state_arrays(cache))

    def call(tokens: mx.array) -> mx.array:
        nonlocal took
        began = time.process_time()
        out = model(tokens, cache=cache)
        took = time.process_time() - began
        return out

    with _as_on_metal():
        mx.export_function(found.append, call, mx.zeros((rows, new), mx.int32))
    return [each for each in found if each["type"] == "primitive"], took


def kernels(primitives: Sequence[dict[str, Any]]) -> Counter[str]:
    """How many kernels each kind of primitive is."""
    readers: Counter[str] = Counter(name for each in primitives for name, *_ in each["inputs"])
    single = {
        each["outputs"][0][0]
        for each in primitives
        if each["name"] in ELEMENTWISE and readers[each["outputs"][0][0]] == 1
    }
    joined = {
        name
        for each in primitives
        if each["name"] in ELEMENTWISE
        for name, shape, _ in each["inputs"]
        if name in single and prod(shape) == prod(each["outputs"][0][1])
    }
    count: Counter[str] = Counter()
    for each in primitives:
        name = each["name"]
        if name in VIEWS or each["outputs"][0][0] in joined:
            continue
        if name == "CustomKernel":
            name = (
                str(each["arguments"][0])
                .removeprefix("custom_kernel_")
                .partition("__")[0]
                .partition("_bf")[0]
            )
        count[name] += len(each["inputs"]) if name == "Concatenate" else 1
    return count


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--layers", type=int, default=16, help="of the model, a multiple of 8")
    parser.add_argument("--new", type=int, default=1, help="tokens of a row")
    parser.add_argument("--models", nargs="+", default=[*MODELS], choices=[*MODELS])
    parser.add_argument("--turns", type=int, default=15, help="of which the fastest counts")
    parser.add_argument("--details", action="store_true")
    arguments = parser.parse_args()
    print("| model | kernels | rows | launches a layer | ms of a step's graph |\n|---|---|---|---|---|")
    for name in arguments.models:
        for way in ("off", "auto"):
            backend._current = None
            if way == "off":
                backend.use_mlx_alone()
            small, large = (built(name, layers) for layers in (arguments.layers // 2, arguments.layers))
            for rows in arguments.rows:
                lengths = [6 + row for row in range(rows)]
                counts = [
                    kernels(step(model, batch_of(model, lengths), rows, arguments.new)[0])
                    for model in (small, large)
                ]
                batch = batch_of(large, lengths)
                took = min(step(large, batch, rows, arguments.new)[1] for _ in range(arguments.turns))
                more = counts[1] - counts[0]
                each = sum(more.values()) / (arguments.layers // 2)
                print(f"| {name} | {way} | {rows} | {each:.4g} | {took * 1e3:.2f} |", flush=True)
                if arguments.details:
                    print({kind: 2 * number / arguments.layers for kind, number in more.items()})


if __name__ == "__main__":
    main()
