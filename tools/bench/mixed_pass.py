"""One pass for a prompt's chunk and the next tokens of decoding rows, beside a pass for each: a try.

    python -m tools.bench.mixed_pass [--shape cpu] [--chunk 64] [--first 1024] [--fresh 256] [--output 48]

Agents take turns as they will: each sends a prompt of `--first` tokens, decodes `--output`, sends `--fresh`
more, and so on. All ways compute the same operations of mlx-lm's layers, rows' attention one by one; they
differ in what shares a pass:

by turns        a chunk, then a step of all rows that decode
between layers  a step between layers of a chunk, each `--slice` seconds, as omlxd does (forward.py)
one pass        a chunk and a token of each row; steps alone where no prompt waits

It prints the seconds of all turns, the largest gap between tokens of an answer, the 90th percentile of the
time to the first token, and whether the answers' tokens are those of the first way. Seconds are the wall
clock's, or with `--clock cpu` this process's own: with one thread (OPENBLAS_NUM_THREADS=1) what a CPU takes
that has nothing else to do.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, cast

from omlxd.engine.process import blas

blas.put_first()  # As an engine does, before anything imports MLX.

import mlx.core as mx  # noqa: E402
from mlx_lm.models.base import create_attention_mask, scaled_dot_product_attention  # noqa: E402
from mlx_lm.models.cache import KVCache, make_prompt_cache  # noqa: E402

from tools.bench.shapes import SHAPES, build  # noqa: E402

CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
clock = time.perf_counter


@dataclass(slots=True)
class Agent:
    """One session. `waiting`: tokens of its prompt to compute; `left`: tokens of its answer to draw."""

    cache: list[KVCache]
    prompts: list[list[int]]
    output: int
    waiting: list[int] = field(default_factory=list)
    left: int = 0
    sent: float = 0.0
    times: list[float] = field(default_factory=list)
    ttfts: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    answer: list[int] = field(default_factory=list)

    def send(self) -> None:
        if self.prompts:
            self.waiting, self.sent, self.times = self.prompts.pop(0), clock(), []

    def take(self, token: int) -> None:
        """A token of its answer."""
        now = clock()
        if self.times:
            self.gaps.append(now - self.times[-1])
            self.left -= 1
        else:
            self.ttfts.append(now - self.sent)
            self.left = self.output - 1
        self.times.append(now)
        self.answer.append(token)
        if not self.left:
            self.send()


Part = tuple[Agent, list[int]]


def forward(model: Any, parts: list[Part]) -> Iterator[mx.array]:
    """What each layer gives for tokens of all parts in one pass, (1, tokens, hidden); last, the logits behind
    each part's last token, (parts, vocabulary)."""
    ends = [0]
    for _, tokens in parts:
        ends.append(ends[-1] + len(tokens))
    hidden = model.model.embed_tokens(mx.array([[token for _, tokens in parts for token in tokens]]))
    for index, layer in enumerate(model.layers):
        hidden = hidden + attention(layer.self_attn, layer.input_layernorm(hidden), parts, ends, index)
        hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
        yield hidden
    last = hidden[0, mx.array([end - 1 for end in ends[1:]])]
    yield model.lm_head(model.model.norm(last))


def attention(own: Any, x: mx.array, parts: list[Part], ends: list[int], layer: int) -> mx.array:
    """Products with weights once for all parts; each part reads its own KV."""

    def heads(array: mx.array, count: int, norm: Any = None) -> mx.array:
        array = array.reshape(1, x.shape[1], count, -1)
        return (norm(array) if norm else array).transpose(0, 2, 1, 3)

    queries = heads(own.q_proj(x), own.n_heads, own.q_norm)
    keys, values = heads(own.k_proj(x), own.n_kv_heads, own.k_norm), heads(own.v_proj(x), own.n_kv_heads)
    outputs: list[mx.array] = []
    for (agent, _), start, end in zip(parts, ends, ends[1:], strict=False):
        cache = agent.cache[layer]
        q = own.rope(queries[:, :, start:end], offset=cache.offset)
        k = own.rope(keys[:, :, start:end], offset=cache.offset)
        mask = create_attention_mask(x[:, start:end], cast(Any, cache))
        k, v = cache.update_and_fetch(k, values[:, :, start:end])
        outputs.append(scaled_dot_product_attention(q, k, v, cache=cache, scale=own.scale, mask=mask))
    return own.o_proj(mx.concatenate(outputs, axis=2).transpose(0, 2, 1, 3).reshape(1, x.shape[1], -1))


class Run:
    """One way over all turns."""

    def __init__(self, model: Any, agents: list[Agent], chunk: int, slice_s: float):
        self.model, self.agents, self.chunk, self.slice_s = model, agents, chunk, slice_s

    def compute(self, parts: list[Part], between: Callable[[], None] | None = None) -> None:
        """A pass; `between` runs between its layers, each `slice_s`. Ended prompts and rows get a token."""
        since = clock()
        out = mx.array(0)
        for out in forward(self.model, parts):
            if between:
                mx.eval(out)
                if clock() - since >= self.slice_s:
                    between()
                    since = clock()
        best = cast(list[int], mx.argmax(out, axis=-1).tolist())
        for (agent, tokens), token in zip(parts, best, strict=True):
            agent.waiting = agent.waiting[len(tokens) :]
            if not agent.waiting:
                agent.take(token)

    def rows(self) -> list[Part]:
        return [(agent, [agent.answer[-1]]) for agent in self.agents if agent.left and not agent.waiting]

    def step(self) -> None:
        if rows := self.rows():
            self.compute(rows)

    def next_chunk(self) -> list[Part]:
        waiting = sorted((agent for agent in self.agents if agent.waiting), key=lambda agent: agent.sent)
        return [(agent, agent.waiting[: self.chunk]) for agent in waiting[:1]]

    def by_turns(self) -> None:
        if chunk := self.next_chunk():
            self.compute(chunk)
        self.step()

    def between_layers(self) -> None:
        if chunk := self.next_chunk():
            self.compute(chunk, self.step)
        else:
            self.step()

    def one_pass(self) -> None:
        self.compute(self.next_chunk() + self.rows())

    def all_turns(self, way: str) -> float:
        """Seconds."""
        advance = {
            "by turns": self.by_turns,
            "between layers": self.between_layers,
            "one pass": self.one_pass,
        }[way]
        start = clock()
        for agent in self.agents:
            agent.send()
        while any(agent.waiting or agent.left for agent in self.agents):
            advance()
        return clock() - start


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--shape", default="cpu", choices=sorted(SHAPES))
    parser.add_argument("--agents", type=int, default=4)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--first", type=int, default=1024, help="tokens of an agent's first prompt")
    parser.add_argument("--fresh", type=int, default=256, help="new tokens of each later prompt")
    parser.add_argument("--output", type=int, default=48, help="tokens of each answer")
    parser.add_argument("--chunk", type=int, nargs="+", default=[64], help="tokens of a chunk")
    parser.add_argument("--slice", type=float, default=0.03, help="seconds between steps")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--clock", choices=CLOCKS, default="wall")
    options = parser.parse_args()
    global clock
    clock = CLOCKS[options.clock]
    model = build(SHAPES[options.shape]).model
    print("chunk  way             seconds  largest gap s  p90 TTFT s  tokens as by turns")
    for _ in range(options.rounds):
        for chunk in options.chunk:
            answers: list[list[int]] = []
            for way in ("by turns", "between layers", "one pass"):
                agents = [agent(model, options, seed) for seed in range(options.agents)]
                seconds = Run(model, agents, chunk, options.slice).all_turns(way)
                answers.append([token for each in agents for token in each.answer])
                ttfts = sorted(time for each in agents for time in each.ttfts)
                p90 = ttfts[min(len(ttfts) - 1, int(len(ttfts) * 0.9))]
                gap = max(gap for each in agents for gap in each.gaps)
                same = "yes" if answers[-1] == answers[0] else "no"
                print(f"{chunk:5}  {way:15} {seconds:8.2f} {gap:14.3f} {p90:11.2f}  {same}", flush=True)
    return 0


def agent(model: Any, options: argparse.Namespace, seed: int) -> Agent:
    sizes = [options.first, *[options.fresh] * (options.turns - 1)]
    keys = mx.random.split(mx.random.key(seed), len(sizes))
    prompts = [
        cast(list[int], mx.random.randint(5, 1000, (size,), key=keys[turn]).tolist())
        for turn, size in enumerate(sizes)
    ]
    return Agent(cast(list[KVCache], make_prompt_cache(model)), prompts, options.output)


if __name__ == "__main__":
    raise SystemExit(main())
