#!/usr/bin/env python3
"""What loading and unloading model A costs the answers of model B: the gaps between B's tokens.

    python3 tools/bench/two_models.py --rounds 20

B answers one long stream after another. First alone; then while A is loaded, asked and unloaded,
over and over. Prints the gaps' median and 99th percentile of both, their difference and their ratio,
and what A's process leaves behind. With few cores A's start takes some from B: the ratio tells of
the machine as much as of the daemon.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import threading
import time
from pathlib import Path

import httpx
import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from soaking.own_daemon import MODELS, Daemon, build_models

A, B = MODELS
TOKENS = 200


class Gaps(threading.Thread):
    """Streams answers of B until told to stop; keeps the seconds between tokens."""

    def __init__(self, daemon: Daemon):
        super().__init__(daemon=True)
        self._http = httpx.Client(base_url=daemon.url, timeout=60, trust_env=False)
        self.stopping = threading.Event()
        self.gaps: list[float] = []

    def run(self) -> None:
        prompt = "kettle " * 50
        content = {"model": B, "prompt": prompt, "max_tokens": TOKENS, "stream": True, "temperature": 0}
        content["ignore_eos"] = True
        while not self.stopping.is_set():
            with self._http.stream("POST", "/v1/completions", json=content) as answer:
                before = None
                # A read a gap: tokens that came in one read had none between them.
                for _ in answer.iter_raw():
                    now = time.perf_counter()
                    if before is not None:
                        self.gaps.append(now - before)
                    before = now

    def end(self) -> list[float]:
        self.stopping.set()
        self.join(60)
        return self.gaps


def percentile(values: list[float], part: float) -> float:
    """In milliseconds."""
    ordered = sorted(values)
    return 1000 * ordered[min(len(ordered) - 1, int(part * len(ordered)))] if ordered else 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rounds", type=int, default=10, help="times that A is loaded and unloaded")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="omlxd-two-") as home:
        build_models(Path(home) / "models")
        daemon = Daemon(Path(home), ttl="0")
        try:
            print(json.dumps(measure(daemon, args.rounds), indent=1))
        finally:
            daemon.stop()


def measure(daemon: Daemon, rounds: int) -> dict[str, float]:
    for model in (A, B):
        daemon.post("/omlxd/models/load", {"model": model})
    daemon.post("/omlxd/models/unload", {"model": A})
    began = time.perf_counter()
    alone = Gaps(daemon)
    alone.start()
    time.sleep(max(5.0, 1.5 * rounds))
    quiet = alone.end()
    beside = Gaps(daemon)
    beside.start()
    resident = sum(engine.memory_info().rss for engine in daemon.engines())
    loads: list[float] = []
    for _ in range(rounds):
        start = time.perf_counter()
        daemon.post("/omlxd/models/load", {"model": A})
        loads.append(time.perf_counter() - start)
        daemon.post("/v1/completions", {"model": A, "prompt": "cup " * 200, "max_tokens": 4})
        daemon.post("/omlxd/models/unload", {"model": A})
    after = sum(engine.memory_info().rss for engine in daemon.engines())
    busy = beside.end()
    return {
        "cores": float(os.cpu_count() or 0),
        "seconds": time.perf_counter() - began,
        "rounds": float(rounds),
        "load_s_median": sorted(loads)[len(loads) // 2],
        "gaps_alone": float(len(quiet)),
        "gaps_beside": float(len(busy)),
        "p50_alone_ms": percentile(quiet, 0.5),
        "p50_beside_ms": percentile(busy, 0.5),
        "p99_alone_ms": percentile(quiet, 0.99),
        "p99_beside_ms": percentile(busy, 0.99),
        "max_beside_ms": percentile(busy, 1.0),
        "p99_difference_ms": percentile(busy, 0.99) - percentile(quiet, 0.99),
        "p99_ratio": percentile(busy, 0.99) / max(percentile(quiet, 0.99), 1e-9),
        "engines_after": float(len(daemon.engines())),
        "resident_grew_mb": (after - resident) / 1e6,
        "machine_available_gb": psutil.virtual_memory().available / 1e9,
    }


if __name__ == "__main__":
    main()
