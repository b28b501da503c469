#!/usr/bin/env python3
"""What the token cache saves: a long agent's prompt tokenised whole, and as one more turn of a session.

    tools/bench/tokenise.py TRACE.jsonl [--model FOLDER] [--tokens 96000]

The trace's longest conversation is repeated until its prompt has that many tokens. Rows, best of
`--runs`, in ms and as a ratio of the whole:

    whole         transformers' own `encode`
    cut           the same text by segments, nothing remembered
    next turn     all but the last two messages remembered
    again         all remembered
    render        the template alone

The ids of every row are compared with the whole's. Exit status: 0 equal, 1 not.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mlx_lm.tokenizer_utils import load
from msgspec.structs import replace

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from omlxd.api.anthropic import request
from omlxd.chat import Conversation, Message, TextPart, ToolResultPart
from omlxd.engine.prompt.pipeline import PromptPipeline
from omlxd.engine.prompt.token_cache import TokenCache
from omlxd.models import demo


def longest_of(trace: Path) -> Conversation:
    lines = [json.loads(line) for line in trace.read_text().splitlines() if line.strip()]
    prompts = [request.parse(json.dumps(line["body"]).encode(), {}).generate.prompt for line in lines]
    talks = [prompt for prompt in prompts if isinstance(prompt, Conversation)]
    return max(talks, key=lambda talk: len(talk.messages))


def lengthened(talk: Conversation, prompts: PromptPipeline, tokens: int) -> Conversation:
    """`talk` with its turns repeated, each copy numbered so that no segment of it is known."""
    body, messages, copy = talk.messages[2:], talk.messages, 0
    while len(prompts.render(replace(talk, messages=messages)).tokens) < tokens:
        copy += 1
        messages += tuple(numbered(message, copy) for message in body)
    return replace(talk, messages=messages)


def numbered(message: Message, copy: int) -> Message:
    parts = tuple(
        replace(part, text=f"[{copy}] {part.text}") if isinstance(part, TextPart | ToolResultPart) else part
        for part in message.parts
    )
    return replace(message, parts=parts)


def best(runs: int, work: Callable[[Any], list[int]], prepare: Callable[[], Any]) -> tuple[float, list[int]]:
    """(ms, tokens) of the fastest run; `prepare` is not timed."""
    fastest, tokens = float("inf"), []
    for _ in range(runs):
        subject = prepare()
        start = time.perf_counter()
        tokens = work(subject)
        fastest = min(fastest, 1000 * (time.perf_counter() - start))
    return fastest, tokens


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("trace", type=Path)
    parser.add_argument("--model", type=Path, help="folder with a tokenizer (default: the demo's)")
    parser.add_argument("--tokens", type=int, default=96_000)
    parser.add_argument("--runs", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        tokenizer = load(options.model or demo.build_demo(Path(scratch) / "demo"))
    prompts = PromptPipeline(tokenizer)
    talk = lengthened(longest_of(options.trace), prompts, options.tokens)
    text = prompts.render(talk).text
    before = prompts.render(replace(talk, messages=talk.messages[:-2])).text

    def remembering(*texts: str) -> TokenCache:
        cache = TokenCache(tokenizer)
        for known in texts:
            cache.encode(known)
        return cache

    whole, wanted = best(options.runs, lambda _: list(tokenizer.encode(text, add_special_tokens=False)), int)
    rows = {
        "whole": (whole, wanted),
        "cut": best(options.runs, lambda cache: cache.encode(text), remembering),
        "next turn": best(options.runs, lambda cache: cache.encode(text), lambda: remembering(before)),
        "again": best(options.runs, lambda cache: cache.encode(text), lambda: remembering(text)),
        "render": (best(options.runs, lambda _: [len(prompts.renderer.text(talk).plain)], int)[0], wanted),
    }
    print(f"{len(wanted)} tokens, {len(text)} characters, {len(talk.messages)} messages")
    for name, (took, tokens) in rows.items():
        print(f"{name:12}{took:10.2f} ms{took / whole:9.3f}{'' if tokens == wanted else '  OTHER IDS'}")
    return 0 if all(tokens == wanted for _, tokens in rows.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
