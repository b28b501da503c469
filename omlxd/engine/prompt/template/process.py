"""Renders chat templates in processes whose loss costs one request (template/child.py).

transformers prepares the variables and calls what it takes for the compiled template, which asks a child.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from ....common.child_process import ChildProcesses

MEMORY_BYTES = 768 << 20
CPU_S = 30
DEADLINE_S = 5.0
"""Seconds of one rendering. `tools/bench/render_child.py`, medians beside other work on 2 cores: a small
conversation takes 0.4 to 1.2 ms (0.1 in the engine's own process), one of 400 kB 13 ms (2).
"""
DEADLINE_S_PER_MB = 1.0


class TemplateRefusal(Exception):
    """The template raised an error, whose words these are."""


class TemplateProcesses:
    """Renders templates; thread-safe. Each rendering has a child to itself; a few are kept."""

    def __init__(self) -> None:
        self.children = ChildProcesses(Path(__file__).with_name("child.py"), MEMORY_BYTES, CPU_S)

    def render(self, template: str, variables: dict[str, Any], seconds: float = DEADLINE_S) -> str:
        """Render a template. Raises TemplateRefusal and ChildLost."""
        frame = msgspec.msgpack.encode(variables)
        seconds += len(frame) * 1e-6 * DEADLINE_S_PER_MB
        text, error = self.children.call((template, msgspec.Raw(frame)), tuple[str, str], seconds)
        if error:
            raise TemplateRefusal(error)
        return text


PROCESSES = TemplateProcesses()


class _Remote:
    """Stands in for a compiled template."""

    def __init__(self, template: str):
        self._template = template

    def render(self, **variables: Any) -> str:
        return PROCESSES.render(self._template, variables)


def install() -> None:
    """Have transformers render every template of this process in a child."""
    from transformers.utils import chat_template_utils

    chat_template_utils._compile_jinja_template = _Remote
