"""mlx-lm's bare BatchGenerator in a process of its own, told what to do in JSON lines on stdin.

`{"prompts": [[ids], …], "n": 48}` → `{"ttft": [s, …], "rate": tok/s, "seconds": s}`. The limit that
a server can reach: no HTTP, no text, nothing stored.
"""

from __future__ import annotations

import json
import sys
import time

import mlx.core as mx
from mlx_lm.generate import BatchGenerator
from mlx_lm.utils import load

from tools.bench.rates import Stream, total_rate


def run(model, prompts: list[list[int]], n: int) -> dict[str, object]:
    generator = BatchGenerator(model, stop_tokens=[], completion_batch_size=32, prefill_batch_size=8)
    start = time.perf_counter()
    uids = generator.insert(prompts, max_tokens=[n] * len(prompts))
    streams = {uid: Stream(start) for uid in uids}
    left = len(uids)
    while left:
        _, made = generator.next()
        now = time.perf_counter()
        for response in made:
            streams[response.uid].times.append(now)
            left -= response.finish_reason is not None
    generator.close()
    mx.synchronize()
    return {
        "ttft": [s.ttft for s in streams.values()],
        "rate": total_rate(list(streams.values())),
        "seconds": time.perf_counter() - start,
    }


def main() -> None:
    model, _ = load(sys.argv[1])[:2]
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        print(json.dumps(run(model, order["prompts"], order["n"])), flush=True)


if __name__ == "__main__":
    main()
