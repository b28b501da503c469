#!/usr/bin/env python3
"""A model and its LoRA adapters in one engine, against an engine for each: memory, and tokens a second.

    python3 tools/bench/adapters.py MODEL_FOLDER [--adapters 3] [--tokens 64] [--rounds 2]

The adapters are random matrices for all linear layers. Two daemons run in turn; in the second one each
adapter has a setting that needs a load (`kv-reserve`), and so an engine of its own. One request for the model
and one for each adapter run together, then one after another. Memory is Linux's Pss of all engines then.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from soaking.own_daemon import Daemon

PROMPT = "Explain in a few sentences how a kettle works. " * 4
RANK = 16


def make_adapter(model: Path, folder: Path, seed: int) -> None:
    import mlx.core as mx
    from mlx.utils import tree_flatten
    from mlx_lm.tuner.utils import linear_to_lora_layers
    from mlx_lm.utils import load_model

    lora = {"rank": RANK, "scale": 1.0, "dropout": 0.0}
    mx.random.seed(seed)
    loaded, _ = load_model(model, lazy=True)
    loaded.freeze()
    layers = len(loaded.layers)
    linear_to_lora_layers(loaded, layers, lora)
    matrices = {
        name: 0.02 * mx.random.normal(a.shape) for name, a in tree_flatten(loaded.trainable_parameters())
    }
    folder.mkdir()
    mx.save_safetensors(str(folder / "adapters.safetensors"), matrices)
    config = {"fine_tune_type": "lora", "num_layers": layers, "lora_parameters": lora}
    (folder / "adapter_config.json").write_text(json.dumps(config))


def cpu_seconds(daemon: Daemon) -> float:
    """Of all engines so far; what a loaded machine changes little."""
    times = [engine.cpu_times() for engine in daemon.engines()]
    return sum(each.user + each.system for each in times)


def pss(processes: list[psutil.Process]) -> float:
    """MB."""
    return sum(process.memory_full_info().pss for process in processes) / 1e6


def measure(daemon: Daemon, names: list[str], tokens: int, rounds: int) -> dict[str, float]:
    def ask(name: str) -> int:
        body = {"model": name, "prompt": PROMPT, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        return daemon.post("/v1/completions", body).json()["usage"]["completion_tokens"]

    for name in names:
        daemon.post("/omlxd/models/load", {"model": name})
    with ThreadPoolExecutor(len(names)) as threads:
        list(threads.map(ask, names))  # Prompts are cached from now on.
        row: dict[str, float] = {}
        for _ in range(rounds):
            for how, each in (("together", threads.map), ("in turn", map)):
                began, cpu = time.perf_counter(), cpu_seconds(daemon)
                made = sum(each(ask, names))
                rate, spent = made / (time.perf_counter() - began), (cpu_seconds(daemon) - cpu) / made
                row[f"{how}, tokens/s"] = round(max(rate, row.get(f"{how}, tokens/s", 0)), 1)
                row[f"{how}, CPU ms/token"] = round(
                    min(1000 * spent, row.get(f"{how}, CPU ms/token", math.inf))
                )
    return {"engines": len(daemon.engines()), "Pss MB": round(pss(daemon.engines())), **row}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("model", type=Path)
    parser.add_argument("--adapters", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=2)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="omlxd-adapters-") as home:
        folder = Path(home) / "models" / "m"
        shutil.copytree(
            args.model, folder, copy_function=os.link if _same_disk(args.model, home) else shutil.copy
        )
        names = ["m"]
        for number in range(args.adapters):
            make_adapter(folder, folder / f"a{number}", number)
            names.append(f"m:a{number}")
        for kind in ("one engine", "an engine each"):
            if kind != "one engine":
                tables = (f'[models."{name}"]\nkv-reserve = 1023\n' for name in names[1:])
                (Path(home) / "omlxd.toml").write_text("".join(tables))
            daemon = Daemon(Path(home), ttl="0")
            try:
                print(kind, json.dumps(measure(daemon, names, args.tokens, args.rounds)), flush=True)
            finally:
                daemon.stop()


def _same_disk(one: Path, other: str) -> bool:
    return one.stat().st_dev == os.stat(other).st_dev


if __name__ == "__main__":
    main()
