"""A small request beside huge ones: its worst time, and what the processes take.

    python tools/bench/huge_texts.py [--bodies 4] [--megabytes 30] [--digits]

The demo model; bodies of words, or of digits, all too long for the context. While they are refused, one
small chat completion after the other is timed. Fails where the worst took over 0.5 s, or the engine over
500 MB more.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from daemon_process import end_daemon, start_daemon

MOST_S, MOST_BYTES = 0.5, 500e6


def ask(url: str, body: bytes) -> int:
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=600) as answer:
            return len(answer.read()) and answer.status
    except urllib.error.HTTPError as error:
        return error.code


def chat(model: str, text: str) -> bytes:
    messages = [{"role": "user", "content": text}]
    return json.dumps({"model": model, "messages": messages, "max_tokens": 1}).encode()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--bodies", type=int, default=4)
    parser.add_argument("--megabytes", type=int, default=30)
    parser.add_argument("--digits", action="store_true")
    args = parser.parse_args()
    piece = "0123456789" if args.digits else "some words "
    with tempfile.TemporaryDirectory(prefix="omlxd-huge-") as home:
        daemon, url = start_daemon(Path(home) / "log.txt", "--port", "0", "--base-path", home)
        try:
            return measure(url, psutil.Process(daemon.pid), args.bodies, piece, args.megabytes * 1_000_000)
        finally:
            end_daemon(daemon)


def measure(url: str, front: psutil.Process, bodies: int, piece: str, size: int) -> int:
    with urllib.request.urlopen(url + "/v1/models") as answer:
        model = json.load(answer)["data"][0]["id"]
    url += "/v1/chat/completions"
    alone = [timed(url, chat(model, f"hello {number}"))[0] for number in range(5)]
    (engine, *_) = [child for child in front.children() if child.memory_info().rss > 50e6]
    before = {process.pid: process.memory_info().rss for process in (front, engine)}
    most = dict(before)
    huge = [chat(model, f"{number} " + piece * (size // len(piece))) for number in range(bodies)]
    ends: list[tuple[float, int]] = []
    threads = [threading.Thread(target=lambda body=body: ends.append(timed(url, body))) for body in huge]
    for thread in threads:
        thread.start()
    times = []
    while any(thread.is_alive() for thread in threads):
        times.append(timed(url, chat(model, f"hello {len(times)} beside")))
        for process in (front, engine):
            most[process.pid] = max(most[process.pid], process.memory_info().rss)
    worst = max((took for took, _ in times), default=0.0)
    more = {name: most[p.pid] - before[p.pid] for name, p in (("front", front), ("engine", engine))}
    print(f"alone: {max(alone[1:]):.3f} s at worst")
    print(f"beside {bodies} bodies: {worst:.3f} s at worst of {len(times)}; answers {sorted(times)[-1][1]}")
    print("huge: " + ", ".join(f"{status} after {took:.1f} s" for took, status in ends))
    print(", ".join(f"{name} {each / 1e6:.0f} MB more" for name, each in more.items()))
    return worst > MOST_S or more["engine"] > MOST_BYTES


def timed(url: str, body: bytes) -> tuple[float, int]:
    began = time.monotonic()
    status = ask(url, body)
    return time.monotonic() - began, status


if __name__ == "__main__":
    sys.exit(main())
