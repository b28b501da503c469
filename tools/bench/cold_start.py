"""Start with a full SSD cache: nobody may wait for 100,000 files to be counted.

    python tools/bench/cold_start.py [files]

The files are sparse, of a block's size and in a block's place, with no bytes in them: a walk sees
names, sizes and times alone, and 100,000 whole ones would take 2 GB. Among them lie the real blocks
of one prompt to the demo model, which the hits are. Names are in the page cache, being just made.

    walk      os.scandir and stat of every file, nothing kept: what counting can't beat
    ledger    Ledger.lock, then Ledger.take_stock (sorts by age, keeps every path)
    read      lock, then read and check one block as an engine does: a hit as far as the disk goes
    daemon    from the spawn of `omlxd serve` to a connection, and to the answer of a request that hits,
              beside the same with the real blocks alone

Goal: the daemon's first hit no later for the files than without, read and answered under a second.

Nearly all of the daemon's start is Python importing modules, so it runs with their bytecode, as an
installed omlxd does. Processor seconds of an engine alone, from its spawn to its first answer, demo
model, 2 virtual CPUs, least of 5: 0.93 with nothing done about it, 0.45 now. Most of that is
runtime/lean_imports.py (transformers does not read its models twice: 0.32 s), the rest engine/__main__.py (no
garbage is collected meanwhile) and engine/prompt/token_cache.py (one call for a thousand). What is left:
huggingface_hub 0.17, NumPy 0.05, our own modules 0.06, loading the demo and probing its template 0.07.
Compiling our own modules at each start, where PYTHONDONTWRITEBYTECODE is set, costs 0.07 more.
"""

from __future__ import annotations

import hashlib
import http.client
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

from front_start import free_port

REPO = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPO))

from omlxd.cli.cache.checks.verify import Verifier  # noqa: E402
from omlxd.kv.ledger.ledger import Ledger  # noqa: E402
from omlxd.models.demo import build_demo  # noqa: E402

CAP = 1 << 50
NAMESPACES = 8
FILE_BYTES = 20_480
RUNS = 7
PROMPT = " ".join(f"{chr(97 + i % 26)}ine {i * 31 % 997}" for i in range(400))


def main() -> int:
    files = int(sys.argv[1]) if len(sys.argv) > 1 else 100_000
    with tempfile.TemporaryDirectory(prefix="omlxd-cold-start-") as folder:
        home, model = Path(folder) / "home", build_demo(Path(folder) / "omlxd-demo")
        cache = home / "cache"
        serve_once(model, home)  # Stores the blocks.
        real = sorted(cache.rglob("*.safetensors"))
        few = [serve_once(model, home) for _ in range(RUNS)]
        took, _ = seconds(lambda: make_files(cache, files))
        print(f"{len(real)} real blocks; {files} sparse files made in {took:.1f} s\n")
        walked = min(seconds(lambda: plain_walk(cache))[0] for _ in range(RUNS))
        locked, stocked = map(min, zip(*(open_ledger(cache) for _ in range(RUNS)), strict=True))
        first_read = min(seconds(lambda: lock_and_read(cache, real[0]))[0] for _ in range(RUNS))
        many = [serve_once(model, home) for _ in range(RUNS)]
    print("| in process, best of 7 | s | of a plain walk |")
    print("|---|---|---|")
    for name, value in (
        ("plain walk", walked),
        ("Ledger.lock", locked),
        ("Ledger.take_stock", stocked),
        ("lock, then read and check a block", first_read),
    ):
        print(f"| {name} | {value:.4f} | {value / walked:.3f} |")
    print(
        "\n| daemon, from spawn | accepts after s | first hit answered after s | tokens from disk | walk s |"
    )
    print("|---|---|---|---|---|")
    for name, rows in ((f"{len(real)} files", few), (f"{files + len(real)} files", many)):
        for row in rows:
            print(f"| {name} | {row[0]:.3f} | {row[1]:.3f} | {row[2]} | {row[3]} |")
    answered = [median(row[1] for row in rows) for rows in (few, many)]
    late = answered[1] - answered[0]
    ok = first_read < 1 and answered[1] < 1 and all(row[2] for row in few + many)
    print(
        f"\nfirst hit, median of {RUNS}: {answered[1]:.3f} s, {late:+.3f} s for {files} more files; "
        f"under a second: {'yes' if ok else 'NO'}"
    )
    return 0 if ok else 1


def seconds(action: Callable[[], object]) -> tuple[float, object]:
    began = time.perf_counter()
    result = action()
    return time.perf_counter() - began, result


def make_files(cache: Path, count: int) -> None:
    for number in range(count):
        name = hashlib.sha256(number.to_bytes(8, "little")).hexdigest()
        folder = cache / hashlib.sha256(str(number % NAMESPACES).encode()).hexdigest()[:32] / name[:2]
        path = folder / f"{name}.safetensors"
        try:
            fd = os.open(path, os.O_WRONLY | os.O_CREAT)
        except FileNotFoundError:
            folder.mkdir(parents=True)
            fd = os.open(path, os.O_WRONLY | os.O_CREAT)
        os.ftruncate(fd, FILE_BYTES)
        os.close(fd)


def plain_walk(folder: Path | str) -> int:
    """Bytes of the files under `folder`."""
    total = 0
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                total += plain_walk(entry.path)
            else:
                total += entry.stat(follow_symlinks=False).st_size
    return total


def open_ledger(cache: Path) -> tuple[float, float]:
    """Seconds of (lock, take_stock)."""
    ledger = Ledger(cache, CAP)
    locked, _ = seconds(ledger.lock)
    stocked, _ = seconds(ledger.take_stock)
    ledger.close()
    return locked, stocked


def lock_and_read(cache: Path, block: Path) -> None:
    ledger = Ledger(cache, CAP)
    ledger.lock()
    fault = Verifier().verify(str(block), block.parts[-3], block.stem).fault
    ledger.close()
    assert not fault, fault


def serve_once(model: Path, home: Path) -> tuple[float, float, int, str]:
    """(seconds to a connection, to an answer, prompt tokens from disk, seconds of the walk as logged)."""
    port, home_flag = free_port(), str(home)
    home.mkdir(exist_ok=True)
    log = home / "log.txt"
    flags = ["--port", str(port), "--base-path", home_flag, "--model", str(model)]
    with log.open("w") as said:
        began = time.perf_counter()
        daemon = subprocess.Popen(
            [sys.executable, "-m", "omlxd", "serve", *flags, "--paged-ssd-cache-max-size", "1TB"],
            env=environment(),
            stdout=subprocess.DEVNULL,
            stderr=said,
        )
        try:
            wait_for(port, daemon)
            accepts = time.perf_counter() - began
            cached = ask(port)
            answered = time.perf_counter() - began
        finally:
            daemon.terminate()
            daemon.wait()
    counted = re.search(r"counted in ([\d.]+) s", log.read_text())
    return accepts, answered, cached, counted[1] if counted else "not ended"


def environment() -> dict[str, str]:
    """Ours, but that the first start writes bytecode and the others find it."""
    return {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"} | {"PYTHONPATH": str(REPO)}


def wait_for(port: int, daemon: subprocess.Popen[bytes]) -> None:
    until = time.perf_counter() + 30
    while True:
        try:
            return socket.create_connection(("127.0.0.1", port), timeout=5).close()
        except ConnectionRefusedError:
            if daemon.poll() is not None or time.perf_counter() > until:
                raise
            time.sleep(0.002)


def ask(port: int) -> int:
    """Prompt tokens that came from disk."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    messages = [{"role": "user", "content": PROMPT}]
    body = {"model": "claude-any", "max_tokens": 1, "temperature": 0, "messages": messages}
    connection.request("POST", "/v1/messages", json.dumps(body), {"Content-Type": "application/json"})
    answer = json.loads(connection.getresponse().read())
    connection.close()
    return int(answer["usage"]["omlxd"]["cached_cold"])


if __name__ == "__main__":
    sys.exit(main())
