"""Time to the first token, turn by turn, of a growing session: with the cache, and without reuse.

    python tools/bench/session_ttft.py [--turns 10] [--model PATH] [--svg tools/bench/session_ttft.svg]

Both daemons answer the same requests: a system prompt of some 8,000 tokens, then turns that each add
about 650. Before turn `KILLED`, both get SIGKILL and start again. Prints a table, and with --svg
draws it.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from daemon_process import end_daemon, start_daemon

SYSTEM_WORDS, TURN_WORDS = 1200, 100
"""Between six and seven tokens each with the demo model's tokenizer."""
KILLED = 7


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--model", default="", help="default: the demo model")
    parser.add_argument("--svg", type=Path, help="draw the run into this file")
    args = parser.parse_args()
    runs = {}
    for name, flags in (("cache", []), ("no reuse", ["--no-cache"])):
        with tempfile.TemporaryDirectory(prefix="omlxd-session-") as home:
            runs[name] = play(
                Path(home), args.turns, [*flags, *(["--model", args.model] if args.model else [])]
            )
    print("| turn | prompt tokens | cached | with the cache, s | without reuse, s | ratio |")
    print("|---|---|---|---|---|---|")
    for turn, (kept, plain) in enumerate(zip(runs["cache"], runs["no reuse"], strict=True), 1):
        again = " (after kill -9)" if turn == KILLED else ""
        print(
            f"| {turn}{again} | {kept['prompt']} | {kept['cached']} | {kept['ttft']:.3f} "
            f"| {plain['ttft']:.3f} | {plain['ttft'] / kept['ttft']:.1f} |"
        )
    if args.svg:
        args.svg.write_text(draw(runs["cache"], runs["no reuse"]))
    return 0


def play(home: Path, turns: int, flags: list[str]) -> list[dict[str, Any]]:
    """The session on a daemon of its own: prompt tokens, cached tokens and TTFT in seconds, a turn each."""
    base = ["--port", "0", "--base-path", str(home / "omlxd"), *flags]
    daemon, url = start_daemon(home / "log.txt", *base, OMLXD_SEED="0")
    messages = [{"role": "system", "content": words(SYSTEM_WORDS, 0)}]
    results = []
    try:
        warm_up(url)
        for turn in range(1, turns + 1):
            if turn == KILLED:
                time.sleep(2.0)  # Blocks of the last answer may still be on their way to the SSD.
                daemon.send_signal(signal.SIGKILL)
                end_daemon(daemon)
                daemon, url = start_daemon(home / "log.txt", *base, OMLXD_SEED="0")
                warm_up(url)
            messages.append({"role": "user", "content": words(TURN_WORDS, turn)})
            text, result = ask(url, messages)
            results.append(result)
            messages.append({"role": "assistant", "content": text})
    finally:
        end_daemon(daemon)
    return results


def warm_up(url: str) -> None:
    """Load the model, so that no turn pays for it."""
    ask(url, [{"role": "user", "content": "Hello."}])


def words(count: int, seed: int) -> str:
    return " ".join(f"{chr(97 + (seed + i) % 26)}ine {(seed * 7919 + i * 31) % 997}" for i in range(count))


def ask(url: str, messages: list[dict[str, str]]) -> tuple[str, dict[str, Any]]:
    body = {
        "messages": messages,
        "model": model_of(url),
        "max_tokens": 32,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    request = urllib.request.Request(
        url + "/v1/chat/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    began, ttft, text, usage = time.perf_counter(), 0.0, "", {}
    with urllib.request.urlopen(request, timeout=600) as answer:
        for line in answer:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            delta = event["choices"][0]["delta"] if event.get("choices") else {}
            if not ttft and (delta.get("content") or delta.get("reasoning_content")):
                ttft = time.perf_counter() - began
            text += delta.get("content") or ""
            usage = event.get("usage") or usage
    cached = usage.get("prompt_tokens_details", {}).get("cached_tokens", 0)
    return text, {"prompt": usage["prompt_tokens"], "cached": cached, "ttft": ttft}


def model_of(url: str) -> str:
    with urllib.request.urlopen(url + "/v1/models", timeout=60) as answer:
        return json.load(answer)["data"][0]["id"]


# --------------------------------------------------------------------------- the picture

WIDTH, HEIGHT, LEFT, TOP, BOTTOM = 720, 300, 56, 48, 44
STYLE = """
  text { font: 13px system-ui, sans-serif; fill: #57606a }
  .cache { stroke: #1a7f37; fill: #1a7f37 } .plain { stroke: #bc4c00; fill: #bc4c00 }
  polyline { fill: none !important; stroke-width: 2.5 } .grid { stroke: #d0d7de }
  text.cache, text.plain { stroke: none }
  @media (prefers-color-scheme: dark) { text { fill: #9198a1 } .grid { stroke: #3d444d }
    .cache { stroke: #3fb950; fill: #3fb950 } .plain { stroke: #f0883e; fill: #f0883e } }
"""


def draw(kept: list[dict[str, Any]], plain: list[dict[str, Any]]) -> str:
    """Two lines over turns, seconds upwards, as SVG."""
    top = max(result["ttft"] for result in kept + plain) * 1.05
    step = (WIDTH - LEFT - 130) / max(1, len(kept) - 1)

    def x(turn: int) -> float:
        return LEFT + 20 + turn * step

    def y(seconds: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - BOTTOM - TOP) * seconds / top

    lines = []
    for tick in range(5):
        at = y(top * tick / 4)
        lines.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - 90}" y1="{at:.1f}" y2="{at:.1f}"/>')
        lines.append(f'<text x="{LEFT - 8}" y="{at + 4:.1f}" text-anchor="end">{top * tick / 4:.1f}</text>')
    for turn in range(len(kept)):
        lines.append(
            f'<text x="{x(turn):.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{turn + 1}</text>'
        )
        if turn + 1 == KILLED:
            at = f"{x(turn):.1f}"
            lines.append(f'<path class="grid" stroke-dasharray="4 3" d="M{at} {TOP}V{HEIGHT - BOTTOM}"/>')
            lines.append(f'<text x="{at}" y="{TOP - 6}" text-anchor="middle">kill -9</text>')
    for name, label, run in (("plain", "no reuse", plain), ("cache", "omlxd", kept)):
        points = " ".join(f"{x(turn):.1f},{y(result['ttft']):.1f}" for turn, result in enumerate(run))
        lines.append(f'<polyline class="{name}" points="{points}"/>')
        lines += [
            f'<circle class="{name}" cx="{x(turn):.1f}" cy="{y(result["ttft"]):.1f}" r="3"/>'
            for turn, result in enumerate(run)
        ]
        last = run[-1]["ttft"]
        end = f'x="{x(len(run) - 1) + 12:.1f}" y="{y(last) + 4:.1f}"'
        lines.append(f'<text class="{name}" {end}>{label} {last:.2f} s</text>')
    machine = f"{os.cpu_count()} CPU cores, {platform.system()} {platform.machine()}, MLX's CPU backend"
    title = f"Seconds to the first token, {kept[0]['prompt']:,} to {kept[-1]['prompt']:,} prompt tokens"
    body = "\n".join(lines)
    frame = f'viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{title}"'
    return f"""<svg xmlns="http://www.w3.org/2000/svg" {frame}>
<style>{STYLE}</style>
<text x="{LEFT}" y="18">{title}</text>
{body}
<text x="{LEFT}" y="{HEIGHT - 6}">turn of the session; demo model, {machine}</text>
</svg>
"""


if __name__ == "__main__":
    sys.exit(main())
