"""What keeping KV costs while decoding: the same streams with `--no-cache`, RAM only, and RAM and SSD.

    python -m tools.bench.store [--model FOLDER] [--streams 1,4,8] [--prompt 256] [--output 160] [--rounds 3]

Every prompt is new, so its blocks are being written while the first tokens are decoded, and a block more
every 64 tokens of each stream. Daemons run in turn, round after round; medians and their ratio to
--no-cache at the end, and what was written meanwhile. Limit: 1; goal: at least 0.97.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import sys
import tempfile
from pathlib import Path

from tools.bench.rates import total_rate
from tools.bench.serve import Server, free_port, settle
from tools.bench.shapes import SHAPES, save

MODES = {"no cache": ("--no-cache",), "RAM": ("--paged-ssd-cache-max-size", "0"), "RAM and SSD": ()}


def server(model: Path, name: str, flags: tuple[str, ...], cache: Path, streams: int) -> Server:
    port = free_port()
    command = [sys.executable, "-m", "omlxd", "serve", "--model", str(model), "--port", str(port)]
    command += ["--base-path", str(cache / "base"), "--paged-ssd-cache-dir", str(cache / "kv")]
    command += ["--log-level", "warning", "--max-concurrent-requests", str(streams), *flags]
    return Server(name, command, port, model.name)


def written(cache: Path) -> int:
    return sum(path.stat().st_size for path in cache.rglob("*.safetensors"))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", type=Path)
    parser.add_argument("--streams", default="1,4,8")
    parser.add_argument("--prompt", type=int, default=256)
    parser.add_argument("--output", type=int, default=160)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    streams = [int(n) for n in options.streams.split(",")]
    with tempfile.TemporaryDirectory(prefix="omlxd-store-") as temp:
        model = options.model or Path(temp) / "bench-model"
        if not options.model:
            save(SHAPES["cpu"], model)
        from mlx_lm.utils import load_tokenizer

        tokenizer = load_tokenizer(model)
        servers: list[Server] = []
        rates: dict[tuple[int, str], list[float]] = {}
        try:
            for name, flags in MODES.items():
                servers.append(server(model, name, flags, Path(temp) / name.replace(" ", "-"), max(streams)))
            for index in range(options.rounds):
                for number in streams:
                    rng = random.Random(f"{index} {number}")
                    texts = [
                        tokenizer.decode([rng.randrange(300, 3000) for _ in range(options.prompt)])
                        for _ in range(number)
                    ]
                    for one in servers:
                        made = asyncio.run(one.ask(texts, options.output))
                        rates.setdefault((number, one.name), []).append(total_rate(made))
                        settle(Path(temp), quiet_s=0.3)
        finally:
            for one in servers:
                one.stop()
        print(f"{'decode, tok/s':16}" + "".join(f"{name:>24}" for name in MODES))
        for number in streams:
            middle = {name: statistics.median(rates[number, name]) for name in MODES}
            base = middle["no cache"]
            cells = "".join(f"{rate:16.1f} ({rate / base:5.3f})" for rate in middle.values())
            print(f"{f'{number} streams':16}{cells}")
        print(f"written: {written(Path(temp) / 'RAM-and-SSD') / 1e6:.0f} MB")


if __name__ == "__main__":
    main()
