"""What rendering a chat template in a child process costs over rendering it in this one.

    python tools/bench/render_child.py [--rounds 50]

Both ways in turn, medians: the demo's template, one small conversation and one of 400 kB in 120 messages.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

from omlxd.engine.prompt.template.child import answer
from omlxd.engine.prompt.template.process import TemplateProcesses
from omlxd.models.demo import TEMPLATE


def conversation(messages: int, chars: int) -> dict[str, Any]:
    text = ("The user asks for a file. " * (chars // 26 + 1))[:chars]
    roles = ("user", "assistant")
    listed = [{"role": roles[number % 2], "content": text} for number in range(messages)]
    return {"messages": listed, "tools": None, "add_generation_prompt": True}


def timed(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return 1000 * (time.perf_counter() - began)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=50)
    rounds = parser.parse_args().rounds
    children = TemplateProcesses()
    print("| conversation | in this process, ms | in the child, ms | more, ms |")
    print("|---|---|---|---|")
    for name, variables in (("small", conversation(3, 60)), ("400 kB", conversation(121, 3300))):
        assert (children.render(TEMPLATE, variables), "") == answer(TEMPLATE, variables)
        here, there = [], []
        for _ in range(rounds):
            here.append(timed(lambda each=variables: answer(TEMPLATE, each)))
            there.append(timed(lambda each=variables: children.render(TEMPLATE, each)))
        one, two = statistics.median(here), statistics.median(there)
        print(f"| {name} | {one:.2f} | {two:.2f} | {two - one:.2f} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
