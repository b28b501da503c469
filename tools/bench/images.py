"""Time to first token of conversations with images, beside mlx-vlm's own server with its prefix cache on.

    python -m tools.bench.images --mlx-vlm PYTHON [--model FOLDER | --shape tiny|small|8b] [--rounds 3]
                                 [--talks 1] [--turns 8] [--size 448x280] [--peers omlxd,mlx-vlm]
                                 [--before CHECKOUT] [--blas off|auto]

    python3 -m tools.bench.images --mlx-vlm python3 --shape 8b --rounds 1 --talks 5 --turns 6 --size 1280x800

PYTHON is one that has mlx-vlm's server (`pip install 'mlx[cpu]' mlx-vlm` in a venv of its own). One model,
one run, the peers in turn, round after round (A B A B …), medians at the end; each figure goes to stderr at
once. Both get the same pictures and texts over /v1/chat/completions, greedy, streamed; answers in the history
are made up. Rows:

- first image      a text of some 400 tokens and one picture, which nobody has seen
- second turn      the same, an answer and another question
- after kill -9    a third turn, after the server was killed (SIGKILL, once nothing more was being written)
                   and started again; what a fresh process pays for at first, another picture has paid
- turn N           a session whose turns bring a screenshot each: the last of them; and all of them, summed

A round starts each server twice, and has `--talks` conversations of the first three rows: a GPU's first ones
compile kernels. The aim: a second turn at least 5 times faster than mlx-vlm's, after kill -9 too; a first
image no slower. On a CPU both compute with the BLAS of MLX's wheel, unless --blas auto gives omlxd the one
that it uses by default. Without --model a Qwen2.5-VL of random
weights is built: `small` for a laptop's CPU; `8b` of the 7B's shape in bfloat16, 15 GB on disk, for a GPU, as
in the second command; `tiny` to try that one.
"""

from __future__ import annotations

import argparse
import base64
import functools
import json
import math
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten

from omlxd.models import demo
from tools.bench.serve import BEFORE, OURS, Server, free_port, settle

REPO = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(REPO / "tests" / "support")]

THEIRS = "mlx-vlm"
PROBE = [{"role": "user", "content": "hello there"}]
QUESTIONS = ("What is in it?", "And what stands beside it?", "Which of them is larger?")

TOWER = {"hidden_size": 1280, "num_heads": 16, "intermediate_size": 3420}
SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 4096,
        "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]},
        "vision": {"depth": 2, "hidden_size": 32, "num_heads": 2, "intermediate_size": 64},
        "dtype": "bfloat16",
    },
    "small": {
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "rope_scaling": {"type": "mrope", "mrope_section": [8, 12, 12]},
        "vision": {"depth": 4, "hidden_size": 128, "num_heads": 4, "intermediate_size": 256},
        "dtype": "float32",
    },
    "8b": {
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "vocab_size": 152064,
        "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
        "vision": {"depth": 32, **TOWER},
        "dtype": "bfloat16",
    },
}
SHAPES["tower"] = {**SHAPES["small"], "vision": {"depth": 4, **TOWER}}


NOISE = 1_000_003
"""Random numbers that are made of each scale, again and again: a prime, so that a matrix's rows differ."""


def build_model(shape: str, folder: Path) -> Path:
    """A Qwen2.5-VL of random weights in `folder`."""
    import vision_families

    sizes = dict(SHAPES[shape])
    vision, dtype = sizes.pop("vision"), sizes.pop("dtype")
    family = vision_families.VISION_FAMILIES["qwen2_5_vl"]
    tower = {**family.config["vision_config"], **vision, "out_hidden_size": sizes["hidden_size"]}
    tower |= {"window_size": 112, "fullatt_block_indexes": [vision["depth"] - 1]}
    config = {**family.config, **sizes, "max_position_embeddings": 131072, "vision_config": tower}
    family = replace(
        family,
        config={**config, "torch_dtype": dtype},
        processor={**family.processor, "max_pixels": 1280 * 28 * 28},
    )
    tokenizer, config = vision_families.describe_vision_family("qwen2_5_vl", family, folder)
    model = vision_families.make_model(config)
    write_weights(folder / "model.safetensors", model, dtype, demo.embedding_scale(tokenizer, {}))
    return folder


def write_weights(file: Path, model: Any, dtype: str, head: np.ndarray) -> None:
    """Write random weights of `model`, which is not evaluated: a tensor at a time.

    head  (tokens, 1) float32: scale of the head's first rows; the others are zero, and never the best
    """
    lazy = cast(list[tuple[str, mx.array]], tree_flatten(model.parameters()))
    tensors = sorted((name, tuple(array.shape)) for name, array in lazy)
    width = 2 if dtype == "bfloat16" else 4
    header: dict[str, Any] = {"__metadata__": {"format": "mlx"}}
    at = 0
    for name, size in tensors:
        end = at + width * math.prod(size)
        header[name] = {"dtype": "BF16" if width == 2 else "F32", "shape": size, "data_offsets": (at, end)}
        at = end
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    with file.open("wb") as out:
        out.write(len(encoded).to_bytes(8, "little") + encoded)
        for name, size in tensors:
            out.writelines(_numbers(name, size, width, head))


def _numbers(name: str, size: tuple[int, ...], width: int, head: np.ndarray) -> Iterator[memoryview]:
    count = math.prod(size)
    if len(size) == 1:
        yield _encoded(np.full(size, name.endswith("weight"), np.float32), width)
        return
    noise = _noise(math.prod(size[1:]), width)
    if "lm_head" in name:
        rows = np.random.default_rng(1).standard_normal((len(head), size[1]), np.float32) * head
        yield _encoded(rows * np.float32(1.5 / size[1] ** 0.5), width)
        count -= rows.size
        noise = _encoded(np.zeros(NOISE, np.float32), width)
    for start in range(0, count * width, len(noise)):
        yield noise[: count * width - start]


@functools.cache
def _noise(fan_in: int, width: int) -> memoryview:
    numbers = np.random.default_rng(fan_in).standard_normal(NOISE, np.float32)
    return _encoded(numbers * np.float32(1.5 / fan_in**0.5), width)


def _encoded(numbers: np.ndarray, width: int) -> memoryview:
    """As bytes of float32, or of bfloat16."""
    if width == 2:
        numbers = (numbers.view(np.uint32) >> 16).astype(np.uint16)
    return numbers.reshape(-1).view(np.uint8).data


def screenshot(seed: int, width: int, height: int) -> str:
    """A picture of coloured windows as a data URL; another for each seed."""
    import io

    from PIL import Image

    rng = np.random.default_rng(seed)
    pixels = np.full((height, width, 3), rng.integers(0, 256, 3), np.uint8)
    for _ in range(40):
        x, y = rng.integers(0, width), rng.integers(0, height)
        w, h = rng.integers(8, width // 2), rng.integers(8, height // 2)
        pixels[y : y + h, x : x + w] = rng.integers(0, 256, 3)
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "PNG")
    return "data:image/png;base64," + base64.b64encode(out.getvalue()).decode()


def words(count: int, seed: int) -> str:
    rng = np.random.default_rng(seed)
    names = ["kettle", "saucer", "spoon", "shelf", "drawer", "window", "garden", "letter", "stone", "river"]
    return " ".join(str(rng.choice(names)) for _ in range(count))


def user(text: str, *images: str) -> dict[str, Any]:
    parts: list[dict[str, Any]] = [{"type": "image_url", "image_url": {"url": url}} for url in images]
    return {"role": "user", "content": [*parts, {"type": "text", "text": text}]}


def run_round(
    server: Server,
    index: int,
    talks: int,
    turns: int,
    size: tuple[int, int],
    note: Callable[[str, str, float], None],
) -> None:
    """One peer's rows of one round."""
    server.ttft([user("Warm.", screenshot(10_000 + index, *size))])
    answer = {"role": "assistant", "content": "A kettle and a saucer."}
    conversations: list[list[dict[str, Any]]] = []
    for seed in range(index * talks, (index + 1) * talks):
        messages = [user(f"{words(120, seed)} {QUESTIONS[0]}", screenshot(seed, *size))]
        note("first image, TTFT", server.name, server.ttft(messages))
        messages += [answer, user(QUESTIONS[1])]
        note("second turn, TTFT", server.name, server.ttft(messages))
        conversations.append(messages)
    assert server.cache is not None
    settle(server.cache)
    server.kill()
    server.start()
    server.ttft([user("Warm again.", screenshot(20_000 + index, *size))])
    for messages in conversations:
        messages += [answer, user(QUESTIONS[2])]
        note("third turn after kill -9, TTFT", server.name, server.ttft(messages))
    messages, total, last = [{"role": "system", "content": words(120, 500 + index)}], 0.0, 0.0
    for turn in range(turns):
        messages.append(user(f"Step {turn}.", screenshot(1000 * (index + 1) + turn, *size)))
        last = server.ttft(messages)
        total += last
        messages.append(answer)
    note(f"turn {turns} with as many screenshots, TTFT", server.name, last)
    note(f"all {turns} turns, TTFTs together", server.name, total)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--mlx-vlm", metavar="PYTHON", help="a Python that has mlx-vlm's server")
    parser.add_argument("--model", type=Path, help="folder of a vision model that both serve")
    parser.add_argument("--shape", choices=list(SHAPES), default="small")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--talks", type=int, default=1)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--size", default="448x280")
    parser.add_argument("--peers", default=f"{OURS},{THEIRS}")
    parser.add_argument("--blas", choices=["off", "auto"], default="off", help="OMLXD_CPU_BLAS of omlxd")
    parser.add_argument("--before", type=Path, help="another checkout of omlxd to measure beside this one")
    options = parser.parse_args()
    width, height = map(int, options.size.split("x"))
    peers = [*options.peers.split(","), *([BEFORE] if options.before else [])]
    rows: dict[str, dict[str, list[float]]] = {}

    def note(row: str, who: str, seconds: float) -> None:
        rows.setdefault(row, {}).setdefault(who, []).append(seconds * 1000)
        print(f"{row}, {who}: {seconds * 1000:.0f} ms", file=sys.stderr, flush=True)

    with tempfile.TemporaryDirectory(prefix="omlxd-images-") as temporary:
        home = Path(temporary)
        model = options.model or build_model(options.shape, home / "model")
        for index in range(options.rounds):
            for peer in peers:
                server = _server(peer, options, model, home / f"{peer}-{index}")
                try:
                    run_round(server, index, options.talks, options.turns, (width, height), note)
                finally:
                    server.kill()
    print(f"| ms | {' | '.join(peers)} |\n|---|{'---|' * len(peers)}")
    for row, values in rows.items():
        print(f"| {row} | {' | '.join(_cell(values.get(peer, [])) for peer in peers)} |")
    return 0


def _server(name: str, options: argparse.Namespace, model: Path, cache: Path) -> Server:
    port = free_port()
    cache.mkdir(parents=True)
    if name != THEIRS:
        command = [sys.executable, "-m", "omlxd", "serve", "--model", str(model), "--port", str(port)]
        command += ["--base-path", str(cache), "--log-level", "warning"]
        checkout = options.before if name == BEFORE else None
        env = {"OMLXD_CPU_BLAS": options.blas}
        return Server(name, command, port, model.name, cache, checkout, env, PROBE)
    if options.mlx_vlm is None:
        sys.exit("--mlx-vlm is needed: a Python that has mlx-vlm's server.")
    command = [options.mlx_vlm, "-m", "mlx_vlm.server", "--model", str(model)]
    command += ["--host", "127.0.0.1", "--port", str(port)]
    env = {"APC_ENABLED": "1", "APC_DISK_PATH": str(cache), "HF_HUB_OFFLINE": "1"}
    return Server(name, command, port, str(model), cache, env=env, probe=PROBE)


def _cell(values: list[float]) -> str:
    if not values:
        return "-"
    return f"{statistics.median(values):.0f} ({min(values):.0f} to {max(values):.0f})"


if __name__ == "__main__":
    sys.exit(main())
