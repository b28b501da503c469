"""What checkpoints at intervals save on recorded traffic, and what they cost in bytes written.

    python -m tools.bench.checkpoints TRACE.jsonl... [--model-path FOLDER]

A count, not a timing: prompts are rendered and hashed as the daemon does it, and a store that forgets
nothing is walked through, for models of some published shapes. Each trace begins with what those before
it have left. Per shape and interval:

    interval    tokens between two checkpoints of a prompt; * is what the engine chooses
    computed    prompt tokens computed, beyond those that any cache must compute
    written     bytes written over the minimum: the new tokens' KV, and one checkpoint a turn

`and forks`: one more where a prompt left an earlier one and found no checkpoint near; the engine makes
them for models with KV, whose blocks tell where prompts part.

Prompt-end checkpoints count only where they are written: at the turn's end (the trace's answers don't
feed back, so that is the prompt's end too).
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from mlx_lm.tokenizer_utils import load as load_tokenizer

from omlxd.engine.kvio.checkpointer import LEAST_FORK, _interval
from omlxd.engine.mlx_adapter.cache.kinds import StateLayout, StateTensor
from omlxd.engine.prompt.pipeline import PromptPipeline
from omlxd.kv.hashing import BlockHash, hash_blocks
from omlxd.kv.layout import Group, KVLayout
from omlxd.models import demo
from tools.replay import read_trace, tokens_of

BLOCK = 64
INTERVALS = (1024, 2048, 4096, 8192, 16384, 32768, 1 << 40)


@dataclass(slots=True, frozen=True)
class Shape:
    """Bytes of a model's KV a token, and of its state in full, 16 bits a number but where said."""

    per_token: int
    state: int

    def interval(self) -> int:
        """What the engine would choose."""
        numbers = self.per_token // 2
        tokens = KVLayout((Group(("kv",), 1, numbers, "BF16"),) if numbers else ())
        states = StateLayout((StateTensor("state", (1, self.state // 2), "BF16", 0),))
        return _interval(states, tokens)


def _attention(layers: int, heads: int, width: int) -> int:
    """Bytes a token of `layers` layers' K and V."""
    return layers * 2 * heads * width * 2


SHAPES = {
    # 12 of 24 layers see 128 tokens.
    "gpt-oss-20b": Shape(_attention(12, 8, 64), 128 * _attention(12, 8, 64)),
    # 40 of 48 layers see 1,024 tokens.
    "gemma-3-12b": Shape(_attention(8, 8, 256), 1024 * _attention(40, 8, 256)),
    # 36 of 48 layers keep 32 heads of 128 by 128 in float32, and 3 columns of a convolution 8,192 wide.
    "qwen3-next-80b-a3b": Shape(_attention(12, 2, 256), 36 * (32 * 128 * 128 * 4 + 3 * 8192 * 2)),
    # 64 layers keep 80 heads of 64 by 128, and 3 columns of a convolution 5,376 wide; no KV at all.
    "mamba2-2.7b": Shape(0, 64 * (80 * 64 * 128 * 2 + 3 * 5376 * 2)),
}


@dataclass(slots=True)
class Count:
    """Over all requests. Bytes are payloads."""

    computed: int = 0
    least: int = 0
    blocks: int = 0
    checkpoints: int = 0


def walk(prompts: list[tuple[np.ndarray, list[BlockHash]]], interval: int, forks: bool) -> Count:
    """A store that forgets nothing, with checkpoints at `interval` and at each prompt's end.

    forks  and one where a prompt left an earlier one and found none near
    """
    count = Count()
    blocks: set[BlockHash] = set()
    stands: set[BlockHash] = set()
    for tokens, hashes in prompts:
        most = (len(tokens) - 1) // BLOCK
        chain = next((i for i in range(most) if hashes[i] not in blocks), most)
        usable = next((i for i in range(chain, 0, -1) if hashes[i - 1] in stands), 0)
        count.least += len(tokens) - chain * BLOCK
        count.computed += len(tokens) - usable * BLOCK
        places = {i for i in range(usable + 1, most + 1) if i * BLOCK % interval == 0} | ({most} - {0})
        if forks and (chain - usable) * BLOCK >= LEAST_FORK:
            places.add(chain)
        new = {hashes[i - 1] for i in places} - stands
        count.checkpoints += len(new)
        stands |= new
        count.blocks += len(set(hashes) - blocks)
        blocks |= set(hashes)
    return count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("trace", type=Path, nargs="+")
    parser.add_argument("--model-path", type=Path, help="whose tokenizer and template (default: the demo's)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = arguments.model_path or demo.build_demo(Path(folder) / "demo")
        pipeline = PromptPipeline(load_tokenizer(model))
        rendered = [tokens_of(r, pipeline) for trace in arguments.trace for r in read_trace(trace)]
    prompts = [(tokens, hash_blocks(bytes(32), tokens.tolist(), BLOCK)) for tokens in rendered]
    counts = {interval: [walk(prompts, interval, forks) for forks in (False, True)] for interval in INTERVALS}
    least = counts[INTERVALS[0]][0].least
    print(f"{len(prompts)} prompts, {sum(map(len, rendered)):,} tokens; at least {least:,} to compute")
    for name, shape in SHAPES.items():
        print(f"\n{name}: {shape.per_token:,} B a token, {shape.state / 1e6:,.1f} MB a checkpoint")
        print(f"{'':12} | {'intervals and ends':>31} | {'and forks':>31} |")
        print(f"{'interval':>12}" + f" | {'computed':>10} {'checkpoints':>12} {'written':>7}" * 2 + " |")
        chosen = shape.interval()
        for interval, both in counts.items():
            kv = both[0].blocks * BLOCK * shape.per_token
            minimum = kv + counts[INTERVALS[-1]][0].checkpoints * shape.state
            shown = ("none" if interval == INTERVALS[-1] else f"{interval:,}") + "*" * (interval == chosen)
            for count in both:
                written = (kv + count.checkpoints * shape.state) / minimum
                shown += f" | {count.computed - least:>+10,} {count.checkpoints:>12,} {written:>7.2f}"
            print(f"{shown:>{12 + 70}} |")


if __name__ == "__main__":
    main()
