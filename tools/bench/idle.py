"""What the daemon costs while nobody asks anything: memory, CPU and wakeups of front and engine.

    python tools/bench/idle.py [--seconds 30] [--model PATH] [--with-engine]

Without a model loaded, the front's goals are under 60 MB resident and under 0.1% of one CPU; the exit
status tells. With --with-engine the demo model (or --model) is loaded, one request is answered, and
the engine's idle is told as well. CPU time comes from /proc/PID/schedstat (nanoseconds) on Linux, and
from psutil elsewhere; wakeups are voluntary context switches of all threads.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from daemon_process import end_daemon, start_daemon

SETTLE_S = 5.0
"""After the start, or an answer, before the clock runs."""
MAX_RSS, MAX_CPU = 60e6, 0.001


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--model", default="", help="default: the demo model")
    parser.add_argument("--with-engine", action="store_true")
    args = parser.parse_args()
    print(f"| process | resident MB | CPU % of one, over {args.seconds:.0f} s | wakeups / s | threads |")
    print("|---|---|---|---|---|")
    with tempfile.TemporaryDirectory(prefix="omlxd-idle-") as home:
        ok = measure(Path(home), args.seconds, [])
        if args.with_engine:
            measure(Path(home), args.seconds, ["--model", args.model] if args.model else None)
    print(f"\nfront without a model: goals (60 MB, 0.1%) {'met' if ok else 'MISSED'}")
    return 0 if ok else 1


def measure(home: Path, seconds: float, flags: list[str] | None) -> bool:
    """`flags`: [] for no model, None for the demo model. Whether the front met its goals."""
    (home / "models").mkdir(exist_ok=True)
    engine = flags != []
    words = ["--model-dir", str(home / "models"), "--no-hf-cache"] if not engine else flags or []
    base = ["--port", "0", "--base-path", str(home / "omlxd")]
    daemon, url = start_daemon(home / "log.txt", *base, *words)
    try:
        ask(url + "/health")
        if engine:
            model = ask(url + "/v1/models")["data"][0]["id"]
            ask(url + "/v1/completions", {"model": model, "prompt": "hello", "max_tokens": 8})
        time.sleep(SETTLE_S)
        front = psutil.Process(daemon.pid)
        parts = {"front, with an engine" if engine else "front, no model": front}
        if engine:
            (parts["engine"],) = front.children()
        before = {name: sample(process) for name, process in parts.items()}
        began = time.monotonic()
        time.sleep(seconds)
        took = time.monotonic() - began
        ok = True
        for name, process in parts.items():
            cpu, switches = (b - a for a, b in zip(before[name], sample(process), strict=True))
            rss = process.memory_info().rss
            ok = ok and (name == "engine" or (rss < MAX_RSS and cpu / took < MAX_CPU))
            print(
                f"| {name} | {rss / 1e6:.1f} | {100 * cpu / took:.3f} | {switches / took:.2f} "
                f"| {process.num_threads()} |"
            )
        return ok
    finally:
        daemon.terminate()
        try:
            daemon.wait(30)
        finally:
            end_daemon(daemon)


def sample(process: psutil.Process) -> tuple[float, float]:
    """(CPU seconds, voluntary context switches) so far, over all threads."""
    tasks = Path(f"/proc/{process.pid}/task")
    if not tasks.is_dir():
        times = process.cpu_times()
        return times.user + times.system, float(process.num_ctx_switches().voluntary)
    cpu = switches = 0.0
    for task in tasks.iterdir():
        cpu += int((task / "schedstat").read_text().split()[0]) / 1e9
        said = re.search(r"^voluntary_ctxt_switches:\s+(\d+)", (task / "status").read_text(), re.MULTILINE)
        switches += int(said[1]) if said else 0
    return cpu, switches


def ask(url: str, body: object = None) -> dict:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=300) as answer:
        return json.load(answer)


if __name__ == "__main__":
    sys.exit(main())
